"""The `zero-study` command: the only place that prints errors. `zero-study --help` lists what it can do."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import Any

from study.errors import Refusal, RunFailed, describe_missing

# What is wrong with a place that was named, before anything is written to it; a full disk is not.
UNUSABLE = {
    errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ELOOP, errno.EINVAL,
}  # fmt: skip
LONGEST_PLACE = 200  # characters that are shown of it


def main() -> None:
    """Run a command; a refusal is one line and exit status 2."""
    from study import cli

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a folder's name may be bytes that are no text
    # A run is in a process group of its own: were this process just to die, it would go on.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup wants the end of its terminal to end nothing
            signal.signal(number, _interrupt)
    try:
        status = cli.run(sys.argv[1:])
        sys.stdout.flush()
    except Refusal as refusal:
        status = _refuse(refusal)
    except RunFailed as failure:
        print(f"zero-study: {failure}", file=sys.stderr)
        status = 1
    except ModuleNotFoundError as error:
        if (message := describe_missing(error)) is None:
            raise
        status = _refuse(message)
    except KeyboardInterrupt:
        kept = "; finished runs are kept" if sys.argv[1:2] in (["run"], ["train"]) else ""
        print(f"zero-study: interrupted{kept}", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # `zero-study compare ... | head`: what is left to say has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        if error.filename is None:
            raise
        place = str(error.filename)
        _refuse(f"{place if len(place) <= LONGEST_PLACE else place[:LONGEST_PLACE] + '...'}: {error.strerror}")
        status = 2 if error.errno in UNUSABLE else 1
    sys.exit(status)


def _refuse(message: object) -> int:
    line = " ".join(str(message).splitlines())  # a file's name may have several
    print(f"zero-study: {line}", file=sys.stderr)
    return 2


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
