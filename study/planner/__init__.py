"""Strategies for a model and a box before anybody rents GPUs: what `zero-study advise` answers."""

from study.planner.choose import advise, fewest_gpus, largest_models
from study.planner.request import Request

__all__ = ["Request", "advise", "fewest_gpus", "largest_models"]
