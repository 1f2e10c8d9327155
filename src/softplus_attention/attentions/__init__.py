"""Every attention by name: ours, the others and the ablations."""
