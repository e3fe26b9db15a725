"""The command `zero-study saved`: read, check and compare a folder, and print the result."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .. import progress
from ..answers.envelope import Answer
from ..errors import Refusal
from ..verdict import Verdict
from . import against, folders, json_answer, recorded, text
from .against import Comparison
from .content import Saved


def command(
    folder: Path, other: Path | None, model: Path | None, is_strict: bool, trust: bool, as_json: bool
) -> Verdict | Answer:
    """Print what is wrong with a saved folder, compare it with `other` if given, and return the verdict.

    If `as_json` is True, nothing is printed, and the answer for JSON is returned.
    """
    saved, compared = examine(folder, other, model, trust)
    if as_json:
        return json_answer.of(folder, saved, compared, is_strict)
    print(text.text(folder, saved, compared, is_strict))
    return text.verdict(saved, compared, is_strict)


def examine(
    folder: Path, other: Path | None = None, model: Path | None = None, trust: bool = False
) -> tuple[list[Saved], list[Comparison]]:
    """Return a folder's saved models and their comparisons with each other and with `other`. Raises Refusal."""
    # DeepSpeed prints to stdout when it is imported, where a program reads the result.
    with contextlib.redirect_stdout(sys.stderr), progress.after_two_seconds(f"Reading all tensors in {folder}"):
        saved = folders.read(folder, trust, model)
        compared = _made(lambda: against.cross_check(saved), folder)
        if other is not None:
            requested = _made(lambda: recorded.compare_all(saved, other, trust), other)
            compared += [replace(comparison, is_requested=True) for comparison in requested]
    return saved, compared


def _made(compare: Callable[[], list[Comparison]], path: Path) -> list[Comparison]:
    """Return comparisons, or one that could not be made because a file has contents that nobody expects."""
    try:
        return compare()
    except Refusal:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")[:160]
        return [Comparison(str(path), unchecked=[f"the values, because {type(error).__name__}: {reason}"])]
