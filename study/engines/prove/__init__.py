"""The proof of anybody's script: what it built, and what one of its optimizer steps held and sent.

    from zero_study import prove

    trainer.add_callback(prove.callback())    # transformers' Trainer, TRL
    prove.watch(model, optimizer)             # any other loop: after prepare, deepspeed.initialize or fully_shard
    python -m zero_study.prove train.py       # or no line at all

It needs torch and what the script has imported itself.
"""

from .mismatch import KnownBad, NotAsAsked, NotChecked, TrainsWrong
from .watching import callback, watch

__all__ = ["KnownBad", "NotAsAsked", "NotChecked", "TrainsWrong", "callback", "watch"]
