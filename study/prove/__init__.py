"""Check any training script: the engine it builds, and the memory and messages of one optimizer step.

    from zero_study import prove

    trainer.add_callback(prove.callback())    # transformers' Trainer, TRL
    prove.watch(model, optimizer)             # any other loop: after prepare, deepspeed.initialize or fully_shard
    python -m zero_study.prove train.py       # or without changing the script

It needs torch and the packages that the script itself imports.
"""

import sys
import warnings
from typing import Any

from ..errors import exit_if_missing

with exit_if_missing(is_command=sys.argv[:1] == ["-m"]):  # Python's word for itself while `python -m` imports this
    from .mismatch import ConfigMismatch, KnownFault, TrainingFault, Unverified
    from .watching import callback, watch

__all__ = ["ConfigMismatch", "KnownFault", "TrainingFault", "Unverified", "callback", "watch"]

_FORMER_NAMES = {
    "KnownBad": "KnownFault",
    "NotAsAsked": "ConfigMismatch",
    "NotChecked": "Unverified",
    "TrainsWrong": "TrainingFault",
}


def __getattr__(name: str) -> Any:
    """Return an exception of this package by its former name, which will be removed in the next release."""
    if name not in _FORMER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"prove.{name} is now prove.{_FORMER_NAMES[name]}.", DeprecationWarning, stacklevel=2)
    return globals()[_FORMER_NAMES[name]]
