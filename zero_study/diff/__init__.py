"""Find where two trainings begin to differ by more than rounding, from recordings of their scripts.

from zero_study import diff

diff.record(model, "a")                   # after prepare, deepspeed.initialize, DDP(...) or fully_shard
diff.assert_same_training("a", "b")       # in a test
python -m zero_study.diff --output a train.py    # or without changing the script
"""

from pathlib import Path
from typing import Any

NUM_STEPS = 3


def record(
    model: Any, folder: str | Path, *, steps: int = NUM_STEPS, noise: int | None = None, whole: str | None = None
) -> None:
    """Record the next optimizer steps of `model` into a folder, one file per rank. Call this on every rank.

    `noise` is the number of a run with random rounding, which is written to the subfolder noise-N; None records without
    noise. `whole` is a prefix: complete outputs and gradients of modules whose names begin with it are saved, too. When
    the training continues after `steps` steps, or ends, the recording is written and all hooks are removed.
    """
    from .recording import Recorder

    Recorder(Path(folder), steps, noise, whole).adopt(model)


def assert_same_training(a: str | Path, b: str | Path) -> None:
    """Raise AssertionError with the first difference if two recorded trainings differ by more than rounding."""
    from .compare import compare
    from .recorded import Recording
    from .text import text

    result = compare(Recording.read(Path(a)), Recording.read(Path(b)))
    if not result.is_same:
        raise AssertionError(text(result))
