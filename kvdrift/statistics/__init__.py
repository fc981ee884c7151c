"""Intervals, paired tests, multiplicity, survival, detectable differences: pure functions of numbers, on scipy.

Nothing here knows of models, paths or results. Prompts or items are the sampling unit, since tokens are clustered in
them. What scipy has is called there; what it lacks stands here with its formula, and the tests simulate its level or
coverage. ``scipy.stats`` takes long to import, so it is reached as an attribute of ``scipy``, which loads it when it is
first used.
"""
