"""Check any training script: the engine it builds, and the memory and messages of one optimizer step.

    from zero_study import prove

    trainer.add_callback(prove.callback())    # transformers' Trainer, TRL
    prove.watch(model, optimizer)             # any other loop: after prepare, deepspeed.initialize or fully_shard
    python -m zero_study.prove train.py       # or without changing the script

It needs torch and the packages that the script itself imports.
"""

import sys

from ..errors import exit_if_missing

with exit_if_missing(is_command=sys.argv[:1] == ["-m"]):  # Python's word for itself while `python -m` imports this
    from .mismatch import ConfigMismatch, KnownFault, TrainingFault, Unverified
    from .watching import callback, watch

__all__ = ["ConfigMismatch", "KnownFault", "TrainingFault", "Unverified", "callback", "watch"]
