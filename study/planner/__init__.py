"""Strategies for a model and a box before anybody rents GPUs: what `zero-study advise` answers."""

from study.planner.asked import Asked
from study.planner.choose import advise, fewest_gpus, largest_models

__all__ = ["Asked", "advise", "fewest_gpus", "largest_models"]
