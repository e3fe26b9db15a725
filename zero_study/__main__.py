"""Run the `zero-study` command, and print its errors. `zero-study --help` lists what it can do."""

from __future__ import annotations

import contextlib
import errno
import io
import signal
import sys
import traceback
from typing import Any

from zero_study import terminal
from zero_study.answers import envelope
from zero_study.answers.envelope import ErrorKind
from zero_study.errors import Refusal, RunFailed, describe_missing
from zero_study.verdict import FOUND, REFUSED, UNKNOWN

# What is wrong with a place that was named, before anything is written to it; a full disk is not.
UNUSABLE = {
    errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ELOOP, errno.EINVAL,
}  # fmt: skip
LONGEST_PLACE = 200  # characters that are shown of it
INTERRUPTED = 128 + signal.SIGINT
NO_READER = 128 + signal.SIGPIPE  # the status that a shell reports for a program whose reader has gone


def main() -> None:
    """Run the command line of this process. A refused request prints one error and ends with exit status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a folder's name may be bytes that are no text
    # A run is in a process group of its own: were this process just to die, it would go on.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup wants the end of its terminal to end nothing
            signal.signal(number, _interrupt)
    with terminal.guarded_output():
        try:
            status = _status()
        except BrokenPipeError:  # `zero-study compare ... | head`: what is left to say has no reader
            status = NO_READER
        except Exception as error:
            status = UNKNOWN  # an error of the program is no finding
            if not (isinstance(error, OSError) and error.filename in terminal.STREAMS):
                _report(error)
                _print_json("internal", f"{type(error).__name__}: {error}", UNKNOWN)
        terminal.finish_output()
    sys.exit(status)


def _status() -> int:
    """Run the command line of this process, print an expected error if there is one, and return the exit status."""
    from zero_study import cli

    try:
        status = cli.run(sys.argv[1:])
        sys.stdout.flush()
    except Refusal as refusal:
        return _refuse(refusal)
    except RunFailed as failure:
        terminal.print_error(failure)
        return _print_json("failed", str(failure), FOUND)
    except ModuleNotFoundError as error:
        if (message := describe_missing(error)) is None:
            raise
        return _refuse(message)
    except KeyboardInterrupt:
        kept = "; finished runs are kept" if sys.argv[1:2] in (["run"], ["train"]) else ""
        terminal.print_error(f"interrupted{kept}")
        return _print_json("interrupted", "The command was interrupted.", INTERRUPTED)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _refuse_file(error)
    return status


def _report(error: Exception) -> None:
    """Print an unexpected error, which is a fault of this program."""
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
        terminal.print_error("this is an error in zero-study, so there is no result. Please report it.")


def _refuse_file(error: OSError) -> int:
    """Print an error of the operating system that names a file, and return the exit status."""
    if error.filename is None:
        raise error
    place = str(error.filename)
    status = REFUSED if error.errno in UNUSABLE else UNKNOWN
    return _refuse(
        f"{place if len(place) <= LONGEST_PLACE else place[:LONGEST_PLACE] + '...'}: {error.strerror}", status
    )


def _refuse(message: object, status: int = REFUSED) -> int:
    line = " ".join(str(message).splitlines())  # a file's name may have several
    terminal.print_error(line)
    return _print_json("refused" if status == REFUSED else "not checked", line, status)


def _print_json(kind: ErrorKind, message: str, status: int) -> int:
    """Print an error to standard output if the command line asks for JSON, and return the status."""
    from zero_study import cli

    words = sys.argv[1:]
    if cli.asks_for_json(words):
        with contextlib.suppress(OSError):
            print(envelope.error(cli.command_of(words), kind, message, status).text())
    return status


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
