"""Read a pickle that contains only numbers, texts, lists and dictionaries, and refuse everything else.

PyTorch's flight recorder and its memory snapshots are such pickles. A pickle can call any function while it is loaded,
so that pickle.load would be dangerous for files of unknown origin.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, NoReturn

from zero_study.errors import Refusal
from zero_study.files import read_whole

LARGEST = 1 << 30  # bytes


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, identifier: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to data outside of it")


def read(path: Path, what: str) -> Any:
    """Return the content of a pickle. Raises Refusal if the file is no pickle, too large, or contains other data."""
    if path.is_file() and path.stat().st_size > LARGEST:
        raise Refusal(f"{path}: it has more than 1 GiB, too much for {what}. Record fewer entries.")
    content = read_whole(path)
    try:
        return _Plain(io.BytesIO(content)).load()
    except Exception as error:
        raise Refusal(
            f"{path}: this is not {what}, or not only plain data ({type(error).__name__}: {str(error)[:100]}). Nothing "
            "was loaded from it. Name the file that PyTorch wrote."
        ) from None
