"""Define the errors that end a request or a run. Each message says what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import re
import reprlib
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from . import terminal

if TYPE_CHECKING:  # `prove` and `diff` run where neither is installed
    import click
    from pydantic import ValidationError


class Refusal(ValueError):
    """The error for a request that is invalid or cannot be carried out.

    The message is one line, the exit status is 2, and nothing is started.
    """

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in a notebook instead of a traceback: the message."""
        return [str(self)]


def unknown_name_message(kind: str, name: object, valid_names: Iterable[str], accepts: str) -> str:
    """Return a one-line message for an unknown name.

    If several valid names begin with it, it asks which of them is meant. Otherwise it suggests the most similar names,
    or lists all valid names if none is similar. `accepts` is the text before that list, for instance "--size takes".
    """
    names = list(valid_names)
    begun = [valid for valid in names if name and valid.startswith(str(name))]
    if len(begun) > 1:
        return several_names_message(kind, name, begun)
    similar = difflib.get_close_matches(str(name), names, n=2)
    hint = f"Did you mean {' or '.join(similar)}?" if similar else f"{accepts} {', '.join(names)}."
    return f"{kind} {name!r} is unknown. {hint[0].upper()}{hint[1:]}"


def several_names_message(kind: str, name: object, fitting_names: Sequence[str]) -> str:
    """Return a one-line message for an ambiguous name, which asks which of several names is meant."""
    names = list(fitting_names)
    left_out = len(names) - _MOST_NAMES
    last = f"{left_out} others" if left_out > 1 else names.pop()
    return f"{kind} {name!r} can be {', '.join(names[:_MOST_NAMES])} or {last}. Which one? Write its whole name"


_MOST_NAMES = 8  # in a message


class Failed(RuntimeError):
    """The error for a run that did not train, for instance because the loss became NaN or no parameter changed."""


class Stalled(Failed):
    """The error for a collective operation that a rank did not join in time."""


class PeerLost(Failed):
    """The error for a lost connection to another rank. The cause is whatever ended that rank."""


class MachineLost(Failed):
    """The error for ranks on another machine that disappeared without a report."""


class OutputFailed(Failed):
    """The error for a run directory that was removed or can no longer be written to, for instance on a full disk."""


class OffloadFailed(Failed):
    """The error for a swap folder that was removed or can no longer be written to, for instance on a full disk."""


class Interrupted(BaseException):
    """The exception that the signals SIGTERM and SIGINT raise."""


class RunFailed(RuntimeError):
    """The error for a process that this program started and that failed.

    The message says which process failed, and how.
    """


class refusing:
    """A context manager that turns each ValueError of its block into a Refusal, including pydantic's ValidationError.

    If `place` is given, the message begins with it.
    """

    def __init__(self, place: str = "") -> None:
        self._place = place

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, ValueError):
            from pydantic import ValidationError

            if isinstance(error, ValidationError):
                raise Refusal(describe(error, self._place)) from None
            raise Refusal(f"{self._place}: {error}" if self._place else str(error)) from None


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # error types of a model and of a dataclass


def describe(error: ValidationError, place: str = "") -> str:
    """Return a one-line message for a pydantic error: where it is, the key, and what is wrong with its value."""
    # A misspelt key causes two errors: one key is missing, and another is unknown.
    first = min(error.errors(), key=lambda e: e["type"] not in _UNKNOWN)
    message = _describe(first)
    if not place and first["type"] not in ("value_error", "missing", *_UNKNOWN):
        message += f". Change --{_key(first).replace('_', '-')}"
    return f"{place}: {message}" if place else message


def _key(error: Any) -> str:
    return ".".join(str(part) for part in error["loc"])


def _describe(error: Any) -> str:
    if error["type"] == "value_error":  # raised by the study's validators, with a complete message
        return " ".join(str(error["ctx"]["error"]).split())
    if error["type"] in _UNKNOWN:
        return f"unknown key {_key(error)!r}"
    if error["type"] == "missing":
        return f"{_key(error)} is missing"
    return f"{_key(error)}={_shortened(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _shortened(value: object) -> str:
    """Return a value as Python writes it. A value of a user's file may be of any length, so it is cut off."""
    text = repr(value) if isinstance(value, (int, float, type(None))) else _brief.repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


_LONGEST_VALUE = 200  # characters
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _LONGEST_VALUE
_brief.maxlist = _brief.maxdict = _brief.maxtuple = 20


def describe_usage(error: click.UsageError) -> str:
    """Return a one-line message for an invalid command line: the option, what is wrong with it, and how to get help."""
    import click

    option = getattr(error, "param", None)
    flag = option.opts[0] if isinstance(option, click.Option) else option and option.human_readable_name
    if isinstance(error, click.MissingParameter):
        message = f"{flag} is missing"
    elif isinstance(error, click.BadParameter) and flag:
        message = f"{flag}: {error.message.rstrip('.')}"
    else:
        message = error.message[0].lower() + error.message[1:].rstrip(".")
    similar = getattr(error, "possibilities", None)
    hint = f". Did you mean {' or '.join(similar)}? " if similar else ". "
    command = error.ctx.command_path if error.ctx else "zero-study"
    has_help_all = error.ctx is not None and getattr(error.ctx.command, "has_help_all", False)
    return f"{message}{hint}`{command} {'--help-all' if has_help_all else '--help'}` lists the options"


def describe_missing(error: ModuleNotFoundError) -> str | None:
    """Return a one-line message that says how to install a missing optional package.

    Return None if no extra of this project installs the package. If the project itself is not installed, the message
    says to run `make setup` in the clone.
    """
    missing = (error.name or "").partition(".")[0]
    try:
        required = importlib.metadata.requires("zero-study") or []
    except importlib.metadata.PackageNotFoundError:  # run from a clone that is not installed
        is_ours = missing in ("", "study", "zero_study")
        return None if is_ours else f"{missing} is not installed. In the clone, run `make setup`."
    for line in required:
        name, extra = re.split(r"[^\w.-]", line)[0], re.search(r"extra == ['\"](\w+)", line)
        # markdown-it-py is imported as markdown_it.
        if extra and missing and f"{name.lower().replace('-', '_')}_".startswith(f"{missing}_"):
            return f"{name} is not installed. Run `{install_command(extra[1])}`."
    return None


def install_command(extra: str) -> str:
    """Return the pip command that installs an extra of this project from where the project itself was installed.

    The name `zero-study` is enough only if the project came from a package index. Otherwise the command names the
    clone, the wheel or the address.
    """
    clone = Path(__file__).resolve().parents[1]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{_from_here(clone)}[{extra}]')}"
    try:
        recorded = importlib.metadata.distribution("zero-study").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:  # the modules were copied, for instance into a web page
        return f"pip install 'PATH_OF_THE_WHEEL[{extra}]'"
    if not recorded:
        return f"pip install 'zero-study[{extra}]'"
    source = json.loads(recorded)
    address = source["url"]
    if address.startswith("file:"):
        place = Path(unquote(urlsplit(address).path))
        return f"pip install {shlex.quote(f'{_from_here(place)}[{extra}]')}"
    if revision := source.get("vcs_info"):
        address = f"{revision['vcs']}+{address}@{revision['commit_id']}"
    return f"pip install {shlex.quote(f'zero-study[{extra}] @ {address}')}"


def _from_here(place: Path) -> str:
    """Return a path as pip needs it from the current folder. For a file that was removed, return ./ and its name."""
    if place == Path.cwd():
        return "."
    return str(place) if place.exists() else f"./{place.name}"


@contextmanager
def exit_if_missing(is_command: bool) -> Iterator[None]:
    """Exit with status 2 and one message if the `with` block imports an optional package that is not installed.

    If the module is imported and not run as a command, the error is raised as it is.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        message = describe_missing(missing) if is_command else None
        if message is None:
            raise
        terminal.print_error(message)
        sys.exit(2)


def run_command(command: click.Command) -> None:
    """Run the command line of a module and exit with its status.

    An invalid command line and a Refusal print one error and exit with status 2. RunFailed exits with status 1.
    """
    import click

    try:
        status, message = command(standalone_mode=False) or 0, ""
    except click.UsageError as error:
        status, message = 2, describe_usage(error)
    except Refusal as refusal:
        status, message = 2, " ".join(str(refusal).splitlines())
    except RunFailed as failure:
        status, message = 1, str(failure)
    if message:
        terminal.print_error(message)
    sys.exit(status)
