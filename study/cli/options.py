"""The parts that several commands are made of: their class, the types of their options, and options that they share.

What a command needs is imported when it is called: `require` refuses early if a plain installation lacks it.
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

# What every run imports. Whether DeepSpeed is required depends on the strategy.
TRAINING = (
    "torch", "accelerate", "transformers", "datasets", "evaluate", "huggingface_hub", "pyarrow", "safetensors",
    "tokenizers", "tqdm",
)  # fmt: skip
TRACING = ("torch", "accelerate", "transformers")

A_STUDY = "a study that the project ships, or a YAML file of your own"
RECORDS = "folders of run directories or of collected records"
DATA_FOLDER = "folder with imdb/, wikitext-2/ and tokenizers/, for real text"
CHECKPOINT_EVERY = (
    "optimizer steps between checkpoints, from which what is cut off goes on [default: as the study says]"
)


class Command(config.Command):
    """A command whose parsing does not call it, and whose help is listed whole."""

    def invoke(self, context: click.Context) -> click.Context:
        return context

    def get_short_help_str(self, limit: int = 45) -> str:
        return " ".join((self.help or "").partition("\n\n")[0].split())


command = functools.partial(click.command, cls=Command)


class _WholeNumber(click.ParamType):
    """A whole number of at least 1, and not more than anybody has."""

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


NUMBER = _WholeNumber()
PATH = click.Path(path_type=Path)

# What a command that is started on every machine of a run is told, by the launcher's own names.
MACHINES = [
    click.Option(
        ["--num-machines"], type=NUMBER, help="machines, on each of which this command is started [default: 1]"
    ),
    click.Option(["--machine-rank"], type=click.IntRange(0), default=0, help="of this machine, from 0"),
    click.Option(["--main-process-ip"], metavar="ADDRESS", help="of machine 0, as the others reach it"),
    click.Option(["--main-process-port"], type=NUMBER, default=29500, help="of machine 0, where all meet"),
]


def require(*modules: str) -> None:
    """Refuse now what would fail later, in a process of its own."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)


def choice(flag: str, kinds: Any, help: str, default: str | None = None) -> Callable[[Any], Any]:
    """An option that takes one of the words of a Literal."""
    return click.option(flag, type=click.Choice(get_args(kinds)), default=default, help=help)
