"""What did anybody's script really build, and what did one of its optimizer steps hold and send?

    from study.engines import prove

    trainer.add_callback(prove.callback())    # transformers' Trainer, TRL
    prove.watch(model, optimizer)             # any other loop: after prepare, deepspeed.initialize or fully_shard

It needs torch and what the script has imported itself.
"""

from study.engines.prove.mismatch import KnownBad, NotAsAsked
from study.engines.prove.watching import callback, watch

__all__ = ["KnownBad", "NotAsAsked", "callback", "watch"]
