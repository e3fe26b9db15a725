"""The command `zero-study saved`: read, check and compare a folder, and print the result."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from ... import progress
from . import against, folders, text


def command(folder: Path, other: Path | None, model: Path | None, is_strict: bool, trust: bool, as_json: bool) -> int:
    """Print what is wrong with a folder, and return the exit status. Raises Refusal. `other` is compared if given."""
    # DeepSpeed prints to stdout when it is imported, where a program reads the result.
    with contextlib.redirect_stdout(sys.stderr), progress.after_two_seconds(f"Reading all tensors in {folder}"):
        saved = folders.read(folder, trust, model)
        compared = against.cross_check(saved)
        if other is not None:
            compared += against.compare_all(saved, other, trust)
    if as_json:
        print(json.dumps(text.content(folder, saved, compared, is_strict), indent=1))
    else:
        print(text.text(folder, saved, compared, is_strict))
    return text.status(saved, compared, is_strict)
