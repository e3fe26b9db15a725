"""Write the warnings of libraries to a log file, and report the cause of a failure to the launcher."""

from __future__ import annotations

import json
import os
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TextIO


class LibraryWarnings:
    """The warnings of libraries from now on. They are not printed, but kept until warnings.log can be written."""

    def __init__(self) -> None:
        self._early: list[str] = []
        self._path: Path | None = None
        warnings.showwarning = self._note

    def write_to(self, folder: Path) -> None:
        """Write all warnings so far to warnings.log in a folder, and append later ones to it.

        All ranks append to the same file.
        """
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
            # A library may warn in the middle of training, where an OSError would end the run. Writing the run's own
            # files detects a full disk anyway.
            with suppress(OSError), open(path, "a") as log:
                log.write(text)


def tell_launcher(cause: str) -> None:
    """Write the cause of a failure to the file that torchrun provides, so that torchrun's last lines name the cause.

    Other launchers provide no such file. If several ranks report a cause, torchrun shows the earliest one. The format
    is that of torch.distributed.elastic's error handler.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    details = {"py_callstack": cause, "timestamp": str(int(time.time()))}
    Path(path).write_text(json.dumps({"message": {"message": cause, "extraInfo": details}}))


def tidy_launcher() -> None:
    """Remove the temporary folder that torchrun creates for this process and does not delete.

    The last process removes the folders that the processes share. A folder that contains a file is kept, for instance
    one with logs that the user requested. A folder that the user named with --log_dir is kept too.
    """
    # the folders of the rank, the attempt, the launch and torchrun
    folders = list(Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents)[:4]
    if folders and folders[-1].name.startswith("torchelastic_"):
        with suppress(OSError):
            for folder in folders:
                folder.rmdir()
