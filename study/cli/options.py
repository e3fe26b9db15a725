"""Building blocks of the commands: their class, the types of their options, and options that several commands share.

A command imports what it needs when it is called. `require` reports a missing package before the command does any work.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from study import config
from study.errors import Refusal

# The packages that every run imports. DeepSpeed is needed only for some strategies.
TRAINING = (
    "torch", "accelerate", "transformers", "datasets", "evaluate", "huggingface_hub", "pyarrow", "safetensors",
    "tokenizers", "tqdm",
)  # fmt: skip
TRACING = ("torch", "accelerate", "transformers")

A_STUDY = "The name of a study of this project, or a YAML file of your own."
RECORDS = "Folders with run directories or with collected records."
DATA_FOLDER = "Folder with imdb/, wikitext-2/ and tokenizers/, for runs on real text."
CHECKPOINT_EVERY = (
    "Number of optimizer steps between checkpoints. An interrupted run resumes from its newest one. [default: as the "
    "study says]"
)


class Command(config.Command):
    """A command that is only parsed, not called, and whose short help is shown in full."""

    def invoke(self, context: click.Context) -> click.Context:
        return context

    def get_short_help_str(self, limit: int = 45) -> str:
        return " ".join((self.help or "").partition("\n\n")[0].split())


command = functools.partial(click.command, cls=Command)


class _WholeNumber(click.ParamType):
    """An option type: a whole number from 1 to `config.LARGEST_NUMBER`."""

    name = "integer"

    def convert(self, value: str | int, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = 0
        flag = param.opts[0] if param else self.name
        if number < 1:
            raise Refusal(f"{flag} {value}: must be a whole number of at least 1")
        if number > config.LARGEST_NUMBER:
            raise Refusal(f"{flag} {value}: must be at most {config.LARGEST_NUMBER:,}")
        return number


class _ReadAndWrite(click.ParamType):
    """An option type: one positive number for reading and writing, or two with a comma between them."""

    name = "read,write"

    def convert(
        self, value: str | tuple[float, float], param: click.Parameter | None, context: click.Context | None
    ) -> tuple[float, float]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = [float(part) for part in value.split(",")]
            read, write = numbers * 2 if len(numbers) == 1 else numbers
        except ValueError:
            flag = param.opts[0] if param else self.name
            raise Refusal(
                f"{flag} {value}: must be one number, or two with a comma between them, such as 6.8,4"
            ) from None
        return read, write


NUMBER = _WholeNumber()
READ_AND_WRITE = _ReadAndWrite()
PATH = click.Path(path_type=Path)

# The options of a command that is started on every machine of a run. Accelerate's launcher uses the same names.
MACHINES = [
    click.Option(
        ["--num-machines"], type=NUMBER, help="Number of machines. Start this command on each of them. [default: 1]"
    ),
    click.Option(["--machine-rank"], type=click.IntRange(0), default=0, help="Number of this machine, counted from 0."),
    click.Option(
        ["--main-process-ip"], metavar="ADDRESS", help="Address of machine 0, as the other machines reach it."
    ),
    click.Option(
        ["--main-process-port"], type=NUMBER, default=29500, help="Port of machine 0 at which all machines meet."
    ),
]


def require(*modules: str) -> None:
    """Raise ModuleNotFoundError if a module is not installed.

    This is for modules that only a process that is started later would import.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)


def choice(flag: str, kinds: Any, help: str, default: str | None = None) -> Callable[[Any], Any]:
    """Return an option whose values are the words of a Literal type."""
    return click.option(flag, type=click.Choice(get_args(kinds)), default=default, help=help)
