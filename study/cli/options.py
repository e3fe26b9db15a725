"""Building blocks of the commands: their class, the types of their options, and options that several commands share.

A command imports what it needs when it is called. `require` reports a missing package before the command does any work.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import click

from study import command_line
from study.command_line import NUMBER, Option

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


class Command(command_line.Command):
    """A command that is only parsed, not called, and whose short help is shown in full."""

    def invoke(self, context: click.Context) -> click.Context:
        return context

    def get_short_help_str(self, limit: int = 45) -> str:
        return " ".join((self.help or "").partition("\n\n")[0].split())


command = functools.partial(click.command, cls=Command)
PATH = click.Path(path_type=Path)

# The options of a command that is started on every machine of a run. Accelerate's launcher uses the same names.
MACHINES = [
    Option(
        ["--num-machines"],
        group="Several machines",
        type=NUMBER,
        help="Number of machines. Start this command on each of them. [default: 1]",
    ),
    Option(
        ["--machine-rank"],
        group="Several machines",
        type=click.IntRange(0),
        default=0,
        help="Number of this machine, counted from 0.",
    ),
    Option(
        ["--main-process-ip"],
        group="Several machines",
        metavar="ADDRESS",
        help="Address of machine 0, as the other machines reach it.",
    ),
    Option(
        ["--main-process-port"],
        group="Several machines",
        type=NUMBER,
        default=29500,
        help="Port of machine 0 at which all machines meet.",
    ),
]


def require(*modules: str) -> None:
    """Raise ModuleNotFoundError if a module is not installed.

    This is for modules that only a process that is started later would import.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
