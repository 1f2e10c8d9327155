"""From forces to laws: exponents, symbolic regression by two engines, and the rules that choose from what they find."""
