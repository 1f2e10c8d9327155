"""Every attention by name: LSSA and LSSAR, baselines and ablations."""
