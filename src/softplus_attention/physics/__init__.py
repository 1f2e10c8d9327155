"""Newton from orbits: exact orbits, a GPT that predicts them, its force, and the law that symbolic regression finds.

Nothing here is imported with the package. ``orbits``, ``distributions`` and ``sequences`` need numpy alone; the models
need torch and transformers; pyoperon, scipy and matplotlib are loaded by the functions that use them.
"""
