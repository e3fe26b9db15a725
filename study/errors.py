"""How does a request or a run end that cannot go on? One line for the user: what is wrong, where, and what to do."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

import click
from pydantic import ValidationError


class Refusal(ValueError):
    """A request that the study refuses: one line for the user, exit status 2, nothing started."""


class Failed(RuntimeError):
    """The run did not train to a result: a loss that is NaN or infinite, parameters that did not move."""


class Interrupted(BaseException):
    """SIGTERM or SIGINT arrived."""


class RunFailed(RuntimeError):
    """A process that a program of the study started did not end well; its message says which, and how."""


class refusing:
    """Turn a ValueError of what is called into a refusal, which says where, if that is given."""

    def __init__(self, where: str = "") -> None:
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, ValueError):
            raise Refusal(f"{self._where}: {error}" if self._where else str(error)) from None


def describe(error: ValidationError, where: str = "") -> str:
    """One line for a pydantic error: the key, what is wrong with the value seen, where."""
    errors = error.errors()
    # A misspelt key comes as two errors: one that is missing, and one that is not known.
    unknown = ("extra_forbidden", "unexpected_keyword_argument")  # of a model, and of a dataclass
    first = next((e for e in errors if e["type"] in unknown), errors[0])
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":  # ours: it already says everything
        message = str(first["ctx"]["error"])
    elif first["type"] in unknown:
        message = f"unknown key {key!r}"
    elif first["type"] == "missing":
        message = f"{key} is missing"
    else:
        message = f"{key}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
        if not where:
            message += f"; change --{key.replace('_', '-')}"
    return f"{where}: {message}" if where else message


def describe_usage(error: click.UsageError) -> str:
    """One line for a command line that click refuses: the flag, what is wrong with it, and where its help is."""
    option = getattr(error, "param", None)
    flag = option.opts[0] if isinstance(option, click.Option) else option and option.human_readable_name
    if isinstance(error, click.MissingParameter):
        message = f"{flag} is missing"
    elif isinstance(error, click.BadParameter) and flag:
        message = f"{flag}: {error.message.rstrip('.')}"
    else:
        message = error.message[0].lower() + error.message[1:].rstrip(".")
    similar = getattr(error, "possibilities", None)
    hint = f"; did you mean {' or '.join(similar)}? " if similar else "; "
    command = f"{error.ctx.command_path} " if error.ctx else ""
    return f"{message}{hint}`{command}--help` lists the options"


def describe_missing(error: ModuleNotFoundError) -> str | None:
    """One line for a package that comes with an extra of the project; None for any other."""
    missing = (error.name or "").partition(".")[0]
    try:
        required = importlib.metadata.requires("zero-study") or []
    except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
        return None
    for line in required:
        name, extra = re.match(r"[\w.-]+", line)[0], re.search(r"extra == ['\"](\w+)", line)
        # markdown-it-py is imported as markdown_it.
        if extra and missing and f"{name.lower().replace('-', '_')}_".startswith(f"{missing}_"):
            return f"{name} is not installed; run: pip install 'zero-study[{extra[1]}]' (in a clone: '.[{extra[1]}]')"
    return None
