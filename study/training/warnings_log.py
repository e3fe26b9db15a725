"""Send the warnings of libraries to a log, and report the cause of a failure to the launcher."""

from __future__ import annotations

import json
import os
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TextIO


class LibraryWarnings:
    """Keeps the warnings of libraries from the screen, from now on: for warnings.log, once there is a run directory."""

    def __init__(self) -> None:
        self._early: list[str] = []
        self._path: Path | None = None
        warnings.showwarning = self._note

    def write_to(self, folder: Path) -> None:
        """Write what there was, and from now on each as it comes; every rank appends to the same file."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "warnings.log"
        self._append(self._path, "".join(self._early))
        self._early.clear()

    def _note(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        if self._path is None:
            self._early.append(text)
        else:
            self._append(self._path, text)

    @staticmethod
    def _append(path: Path, text: str) -> None:
        if text:
            # A library warns in the middle of a training: that a disk is full, the run's own files say.
            with suppress(OSError), open(path, "a") as log:
                log.write(text)


def tell_launcher(cause: str) -> None:
    """Give torchrun the cause in the file that it asks for, so that its own last lines name it; no other launcher asks.

    The earliest rank's is what it shows. The format is that of torch.distributed.elastic's error handler.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    details = {"py_callstack": cause, "timestamp": str(int(time.time()))}
    Path(path).write_text(json.dumps({"message": {"message": cause, "extraInfo": details}}))


def tidy_launcher() -> None:
    """Remove the folder that torchrun made for this process in that for temporary files, where torchrun leaves it.

    The last of its processes removes the folder that they share. One that holds a file, as a log that was asked for,
    stays, and so does one that was named (--log_dir).
    """
    folders = list(Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents)[:4]  # rank, attempt, launch, torchrun
    if folders and folders[-1].name.startswith("torchelastic_"):
        with suppress(OSError):
            for folder in folders:
                folder.rmdir()
