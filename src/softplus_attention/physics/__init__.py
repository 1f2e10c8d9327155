"""Newton from orbits: exact orbits, a GPT that predicts them and the force, and symbolic regression of its law.

The package does not import this folder. ``orbits``, ``distributions`` and ``sequences`` need only numpy; the models
need torch and transformers; pyoperon, scipy and matplotlib are imported by the functions that use them.
"""
