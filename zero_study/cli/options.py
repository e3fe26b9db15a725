"""Define what several commands share: their class, the types of their options, and common options.

A command imports what it needs when it is called. `require` reports a missing package before the command does any work.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from zero_study import command_line
from zero_study.command_line import NUMBER, Option
from zero_study.verdict import MEANINGS

# The packages that every run imports. DeepSpeed is needed only for some strategies. Only the extra `train` has the
# first one, so that a message names this extra if none of them is installed.
TRAINING = (
    "datasets", "torch", "accelerate", "transformers", "evaluate", "huggingface_hub", "pyarrow", "safetensors",
    "tokenizers", "tqdm",
)  # fmt: skip
TRACING = ("torch", "accelerate", "transformers")

A_STUDY = "Name of a study of this project, or path of your own study file (YAML)."
RECORDS = "Folders with run directories, or with records that `zero-study pack` collected."
DATA_FOLDER = "Folder with the subfolders imdb/, wikitext-2/ and tokenizers/. Runs on real text read it."
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
    """A click command whose help ends with the meanings of its exit statuses and an example.

    `statuses` says what they mean for this command: if it is sound, if something is found, if it is refused, and if
    something could not be checked. None means that the command never ends with this status. `example` is a command line
    without "zero-study".

    `prints_itself` is True if the command is replaced by another program, which prints the answer of --json.
    """

    def __init__(
        self,
        *arguments: Any,
        example: str,
        statuses: Statuses | None = None,
        prints_itself: bool = False,
        **attributes: Any,
    ) -> None:
        super().__init__(*arguments, **attributes)
        self.example = f"zero-study {example}"
        self.statuses = statuses or Statuses()
        self.prints_itself = prints_itself

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit statuses and an example at the end of the help. The short help has one line for each."""
        super().format_epilog(context, formatter)
        if self.has_help_all and not context.meta.get(command_line.ALL):
            meanings = (f"{status} {meaning[0].lower()}{meaning[1:]}" for status, meaning in MEANINGS.items())
            formatter.write(f"Exit status: {', '.join(meanings)}.\nExample: {self.example}\n")
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
        formatter.write(f"\nExample: {self.example}\n")

    def invoke(self, context: click.Context) -> click.Context:
        return context


def command(name: str, question: str, example: str, **attributes: Any) -> Callable[[Any], Command]:
    """Return a decorator that makes a command. `question` is what it answers, in the words of a user."""
    return click.command(name, cls=Command, short_help=question, example=example, **attributes)


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
