"""Which strategy suits a model and a box? What `zero-study advise` answers, before anybody rents GPUs."""

from study.planner.asked import Asked
from study.planner.choose import advise, fewest_gpus, largest_models

__all__ = ["Asked", "advise", "fewest_gpus", "largest_models"]
