"""Choose a strategy for a model before renting GPUs (`zero-study advise`)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_study.planner.request import Request

if TYPE_CHECKING:
    from zero_study.planner.answer import advise
    from zero_study.planner.choose import fewest_gpus, largest_models

__all__ = ["Request", "advise", "fewest_gpus", "largest_models"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when used: every command line needs the options of a request, but not the models
        return getattr(import_module(f"zero_study.planner.{'answer' if name == 'advise' else 'choose'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
