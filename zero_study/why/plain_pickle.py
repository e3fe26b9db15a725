"""Read a pickle that contains only numbers, texts, lists and dictionaries, and refuse everything else.

PyTorch's flight recorder and its memory snapshots are such pickles. A pickle can call any function while it is loaded,
so that pickle.load would be dangerous for files of unknown origin. A hostile pickle can also end Python with a
segmentation fault, or fill the memory. Therefore, another process reads it, without PyTorch and with limits.
"""

from __future__ import annotations

import contextlib
import marshal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_study.errors import Refusal
from zero_study.files import open_regular
from zero_study.terminal import printable

SECONDS = 300  # reading a snapshot of 1 GiB takes less than 100
# The other process reads the pickle from standard input, and writes its content in Python's marshal format, which has
# no objects, and at most 2000 levels.
READER = """
import io, marshal, pickle, sys

class Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}")

try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
except (ImportError, OSError, ValueError):  # Windows has no limits
    pass
try:
    content = sys.stdin.buffer.read((1 << 30) + 1)
    if len(content) > 1 << 30:
        raise ValueError("it is larger than 1 GiB")
    sys.stdout.buffer.write(marshal.dumps(Plain(io.BytesIO(content)).load()))
except Exception as error:
    sys.exit(f"{type(error).__name__}: {str(error)[:100]}")
"""


def read(path: Path) -> Any:
    """Return the content of a pickle. Raises OSError or ValueError if it cannot be read, or contains other data."""
    with open_regular(path) as file:
        command = [sys.executable, "-I", "-c", READER]
        done = subprocess.run(command, stdin=file, capture_output=True, timeout=SECONDS)
    if done.returncode != 0:
        raise ValueError(done.stderr.decode(errors="replace").strip() or "reading it ends Python")
    return marshal.loads(done.stdout)


@contextlib.contextmanager
def refusing(path: Path, what: str, advice: str) -> Iterator[None]:
    """Raise Refusal for any error in the `with` block, which reads a file that may be damaged or hostile."""
    try:
        yield
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".removeprefix("ValueError: ")
        raise Refusal(f"{path}: this is not {what} ({printable(reason[:100])}). {advice}") from None


def place(frames: Any) -> str:
    """Return the innermost line of Python that is not PyTorch's, such as " at train.py:12 (main)", or an empty text."""
    for frame in frames[:200] if isinstance(frames, list) else []:
        match frame:
            case {"filename": str(file), "line": int(line), "name": str(name)} if file.endswith(".py"):
                *folders, base = file.replace("\\", "/").split("/")
                if "torch" not in folders:
                    return printable(f" at {base[-80:]}:{number(line)} ({name[:80]})")
    return ""


def number(value: Any) -> int:
    """Return a size, a rank or a number of bytes. Raises ValueError if it is not one."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a number in it is damaged")
    return value
