"""Assertions for the test suite of a project that trains on several ranks. They need no GPU.

from zero_study import testing

testing.assert_same_training(train, ranks=2, strategies=["ddp", "zero2"])
testing.assert_never_hangs("train.py", ranks=8)
testing.assert_saved_is_complete("checkpoint", trained=model)
testing.assert_does_what_it_says("zero3.yaml")

pytest has them also as fixtures of the same names. Each assertion raises AssertionError if something is wrong,
`CouldNotBeChecked`, which is an AssertionError, if it is not known, and Refusal for wrong arguments. If an engine is
not installed, the test is skipped, or it fails with `missing="fail"`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from .outcomes import CouldNotBeChecked as CouldNotBeChecked

__all__ = [
    "CouldNotBeChecked",
    "assert_does_what_it_says",
    "assert_never_hangs",
    "assert_same_training",
    "assert_saved_is_complete",
]

Missing = Literal["skip", "fail"]
PathLike = str | os.PathLike[str]
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2")


def assert_same_training(
    train: Callable[..., object] | PathLike,
    ranks: int = 2,
    strategies: Sequence[PathLike] = STRATEGIES,
    *,
    arguments: Sequence[object] = (),
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None,
    gradient_clipping: float | None = None,
    timeout: float = 120.0,
    missing: Missing | None = None,
) -> int:
    """Assert that `train` trains with each strategy on several CPU ranks as it does on one process.

    `train` is a function that can be imported, or the path of a script. It has to make at least four optimizer steps,
    with the same rows per step for any number of processes. It uses accelerate's `Accelerator`, which gets the
    strategy from its launcher's variables, or it has a parameter `strategy`, which gets the strategy's name (`single`
    for one process). A strategy is the name of a file in accelerate_configs, or the path of an accelerate file.

    Each training is recorded and compared in all of its optimizer steps, at most 50, as by `zero-study diff`, and its
    third step is examined as by `zero-study prove`. Return how many steps were compared. The error names the first
    tensor that differs by more than rounding, the step, the size of the difference, and likely causes.

    `arguments` are the arguments of the function or of the script. `gradient_clipping` is the norm at which the shipped
    strategies of DeepSpeed clip, which has to be that of `train`; None if it does not clip. `timeout` is the most
    seconds that one training may take. `missing` says what happens if an engine is not installed: skip or fail. By
    default, the option of pytest or the environment variable ZERO_STUDY_MISSING_ENGINE decides.
    """
    __tracebackhide__ = True
    from .training import compare

    return compare(train, ranks, strategies, arguments, mixed_precision, gradient_clipping, timeout, missing)


def assert_never_hangs(
    train: Callable[..., object] | PathLike,
    ranks: int = 8,
    strategy: PathLike = "ddp",
    *,
    arguments: Sequence[object] = (),
    timeout: float = 300.0,
    missing: Missing | None = None,
) -> None:
    """Assert that all ranks of a training make the same collectives and end, as by `zero-study dry-run`.

    `train` and `strategy` are as for `assert_same_training`. Up to eight ranks run and exchange real values on this
    machine if it has the memory. Otherwise, some ranks run in a simulated process group. The error names the ranks
    that make different calls, and the lines of these calls. `timeout` is the most seconds that the check may take.
    """
    __tracebackhide__ = True
    from .hangs import check

    check(train, ranks, strategy, arguments, timeout, missing)


def assert_saved_is_complete(
    folder: PathLike,
    trained: torch.nn.Module | Mapping[str, torch.Tensor] | PathLike,
    *,
    model: PathLike | None = None,
    missing: Missing | None = None,
) -> None:
    """Assert that a checkpoint or a saved model is complete and loadable. `zero-study saved` checks the same.

    `trained` is the trained model, its whole state by name, or the folder of another checkpoint or of a recording by
    `zero-study diff`. `model` is a folder with the model's config.json, if the saved folder has none. Settings, such as
    num_attention_heads or lora_alpha, are compared only if `trained` is the folder of another saved model.
    """
    __tracebackhide__ = True
    from .saving import check

    check(Path(folder), trained, None if model is None else Path(model), missing)


def assert_does_what_it_says(config_file: PathLike, *, release: str | Sequence[str] = ()) -> None:
    """Assert that each key of a configuration file works as written. `zero-study doctor FILE` checks the same.

    `release`, such as "deepspeed==0.18.1" or a list of releases of several packages, also asserts that this release has
    each key, and that none of its known faults affects the file.
    """
    __tracebackhide__ = True
    from .configuration import check

    check(Path(config_file), [release] if isinstance(release, str) else release)


def __getattr__(name: str) -> Any:
    if name == "CouldNotBeChecked":  # imported when used, so that pytest starts fast
        from .outcomes import CouldNotBeChecked

        return CouldNotBeChecked
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
