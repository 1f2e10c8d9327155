"""The commands of ``softplus-attention``, one module each. They import what they need when they run, not before."""
