"""From forces to laws: exponents, symbolic regression by two engines, and rules that select one of the laws found."""
