"""Define what several commands share: their class, the types of their options, and common options.

A command imports what it needs when it is called. `require` reports a missing package before the command does any work.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import click

from zero_study import command_line
from zero_study.command_line import NUMBER, Option
from zero_study.verdict import MEANINGS

# The packages that every run imports. DeepSpeed is needed only for some strategies.
TRAINING = (
    "torch", "accelerate", "transformers", "datasets", "evaluate", "huggingface_hub", "pyarrow", "safetensors",
    "tokenizers", "tqdm",
)  # fmt: skip
TRACING = ("torch", "accelerate", "transformers")

A_STUDY = "Name of a study of this project, or path of your own study file (YAML)."
RECORDS = "Folders with run directories, or with records that `zero-study pack` collected."
DATA_FOLDER = "Folder with the subfolders imdb/, wikitext-2/ and tokenizers/, which runs on real text read."
CHECKPOINT_EVERY = (
    "Number of optimizer steps between checkpoints. An interrupted run resumes from its newest checkpoint. "
    "[default: as in the study]"
)


class Statuses(NamedTuple):
    """The meanings of the exit statuses 0 to 3 for one command. They are written so that they can end a sentence."""

    sound: str = "the answer is complete"
    found: str | None = None
    refused: str | None = "the request is refused, and nothing was done"
    unknown: str | None = "there is no answer, because of an error in zero-study"


class Command(command_line.Command):
    """A click command whose help ends with the meanings of its exit statuses.

    `statuses` says what they mean for this command: if it is sound, if something is found, if it is refused, and if
    something could not be checked. None means that the command never ends with this status. The short help is shown in
    full.

    `prints_itself` is True if the command is replaced by another program, which prints the answer of --json.
    """

    def __init__(
        self, *arguments: Any, statuses: Statuses | None = None, prints_itself: bool = False, **attributes: Any
    ) -> None:
        super().__init__(*arguments, **attributes)
        self.statuses = statuses or Statuses()
        self.prints_itself = prints_itself

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit statuses at the end of the help. The short help has them on one line."""
        super().format_epilog(context, formatter)
        if self.has_help_all and not context.meta.get(command_line.ALL):
            meanings = (f"{status} {meaning[0].lower()}{meaning[1:]}" for status, meaning in MEANINGS.items())
            formatter.write(f"\nExit status: {', '.join(meanings)}.\n")
            return
        with formatter.section("Exit status"):
            formatter.write_dl(
                [
                    (
                        str(status),
                        f"{meaning}: {text}." if text else f"{meaning}. This command never ends with this status.",
                    )
                    for (status, meaning), text in zip(MEANINGS.items(), self.statuses, strict=True)
                ]
            )

    def invoke(self, context: click.Context) -> click.Context:
        return context

    def get_short_help_str(self, limit: int = 45) -> str:
        return " ".join((self.help or "").partition("\n\n")[0].split())


command = functools.partial(click.command, cls=Command)
PATH = click.Path(path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON (docs/json.md).")

# The options of a command that is started on every machine of a run. Accelerate's launcher uses the same names.
MACHINES = [
    Option(
        ["--num-machines"],
        group="Several machines",
        type=NUMBER,
        help="Number of machines on which you start this command. [default: 1]",
    ),
    Option(
        ["--machine-rank"],
        group="Several machines",
        type=click.IntRange(0),
        default=0,
        help="Rank of this machine, counted from 0.",
    ),
    Option(
        ["--main-process-ip"],
        group="Several machines",
        metavar="ADDRESS",
        help="Address at which the other machines reach machine 0.",
    ),
    Option(
        ["--main-process-port"],
        group="Several machines",
        type=NUMBER,
        default=29500,
        help="Port of machine 0 to which all machines connect.",
    ),
]


def require(*modules: str) -> None:
    """Raise ModuleNotFoundError if one of these modules is not installed.

    Use it for modules that only a process which is started later would import.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
