"""How long a model holds: loss by length, with the control that tells whether the long context is used."""
