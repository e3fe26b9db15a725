"""Where two trainings begin to differ by more than rounding: recordings of anybody's scripts, compared.

from zero_study import diff

diff.record(model, "a")                   # after prepare, deepspeed.initialize, DDP(...) or fully_shard
diff.assert_same_training("a", "b")       # in a test
python -m zero_study.diff --output a train.py    # or no line at all
"""

from pathlib import Path
from typing import Any

NUM_STEPS = 3


def record(
    model: Any, folder: str | Path, *, steps: int = NUM_STEPS, noise: int | None = None, whole: str | None = None
) -> None:
    """Record the next optimizer steps of `model` into a folder, a file for each rank. Call it on every rank.

    `noise`: the number of a run whose results are rounded otherwise, which goes into noise-N in that folder. `whole`:
    outputs and gradients of what begins with this name are kept as they are. Once the training goes on after `steps`,
    or ends, it is written; nothing of it is left.
    """
    from .recording import Recorder

    Recorder(Path(folder), steps, noise, whole).adopt(model)


def assert_same_training(a: str | Path, b: str | Path) -> None:
    """Raise AssertionError with the first difference of two recorded trainings that rounding does not explain."""
    from .compare import compare
    from .recorded import Recording
    from .text import text

    result = compare(Recording.read(Path(a)), Recording.read(Path(b)))
    if not result.is_same:
        raise AssertionError(text(result))
