"""Choose a strategy for a model before renting GPUs (`zero-study advise`)."""

from study.planner.choose import advise, fewest_gpus, largest_models
from study.planner.request import Request

__all__ = ["Request", "advise", "fewest_gpus", "largest_models"]
