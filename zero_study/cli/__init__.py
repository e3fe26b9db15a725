"""Define the command line of zero-study. `parse` only reads a command line, and `run` executes it.

Each module defines a group of commands. A command imports the modules that it needs when it is called, so that a
missing package affects only the commands that need it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoints, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click

from zero_study import command_line
from zero_study.answers.envelope import Answer
from zero_study.cli import check, plan, project
from zero_study.cli.options import Command
from zero_study.errors import Refusal, describe_usage
from zero_study.verdict import Verdict
from zero_study.version import __version__

# The groups of commands that `zero-study` lists if it is called without arguments: the commands of this package, and an
# example. The replication study adds its own commands.
GROUPS: dict[str, tuple[tuple[click.Command, ...], str]] = {
    "Train": ((), "zero-study run smoke"),
    "Compare": ((), "zero-study compare runs"),
    "Plan": (plan.COMMANDS, "zero-study advise --model gpt2-xl --gpu a100-80gb --gpus 8"),
    "Check": ((*check.COMMANDS, *project.CHECKS), "zero-study doctor my_deepspeed.json"),
    "Maintain": (project.COMMANDS, "zero-study pack runs/smoke my-box.zip"),
}
_MISSING = "The commands of the replication study are missing, because"
_ENTRY_POINTS = "zero_study.commands"


class _Commands(command_line.Command, click.Group):
    """The commands of this package, and those of the replication study, which is imported only if it is needed.

    A script that a command runs may therefore import a package of its own that is called `study`.
    """

    get_short_help_str = Command.get_short_help_str

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, (own, example) in GROUPS.items():
            commands = [*own, *_of_study().commands.get(title, ())]
            if commands:
                with formatter.section(title):
                    formatter.write_dl([(command.name or "", command.get_short_help_str()) for command in commands])
                    formatter.write_text(f"$ {example}")
        if reason := _of_study().why_missing:
            formatter.write_text(reason)

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(all_commands())

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return the command with this name. Raises click's NoSuchCommand, or Refusal if it may be one of the study."""
        command = self.commands.get(name) or all_commands().get(name)
        if command is None and not name.startswith("-"):
            is_misspelt = get_close_matches(name, self.commands, cutoff=0.8)
            if (reason := _of_study().why_missing) and not is_misspelt:
                raise Refusal(f"zero-study has no command {name!r}. {reason}")
            raise click.NoSuchCommand(name, possibilities=all_commands(), ctx=context)
        return command


def _entry_points() -> EntryPoints:
    try:
        return distribution("zero-study").entry_points.select(group=_ENTRY_POINTS)
    except PackageNotFoundError:  # a clone that is not installed, or a web page
        return EntryPoints()


def _why_missing(package: str) -> str | None:
    """Return why a package beside this one cannot be imported. None if it can be imported.

    The package may be missing, or hidden by a module of the same name in a folder that comes first.
    """
    own = Path(__file__).resolve().parents[2] / package / "__init__.py"
    if not own.is_file():
        return f"{_MISSING} the package {package} is not installed."
    spec = find_spec(package)
    found = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
    if found and Path(found).resolve() == own:
        return None
    return (
        f"{_MISSING} Python imports {found} in place of the package {package} of zero-study. Run zero-study in another "
        "folder, or change PYTHONPATH."
    )


class _OfStudy(NamedTuple):
    """The commands of the replication study by the group in which the help lists them, or why they are missing."""

    commands: dict[str, tuple[click.Command, ...]]
    why_missing: str | None = None


@cache
def _of_study() -> _OfStudy:
    commands: dict[str, tuple[click.Command, ...]] = {}
    if not (points := _entry_points()):
        return _OfStudy({}, f"{_MISSING} zero-study is not installed. In the clone, run `make setup`.")
    for point in points:
        if (reason := _why_missing(point.module.partition(".")[0])) is not None:
            return _OfStudy({}, reason)
        for title, of_group in point.load().items():
            commands[title] = (*commands.get(title, ()), *of_group)
    return _OfStudy(commands)


def all_commands() -> dict[str, click.Command]:
    """Return the commands of this package and of the replication study by their names."""
    of_study = [command for commands in _of_study().commands.values() for command in commands]
    return {**zero_study.commands, **{str(command.name): command for command in of_study}}


@click.group(
    cls=_Commands, no_args_is_help=False, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="zero-study")
def zero_study() -> None:
    """Choose how to train with DDP, DeepSpeed ZeRO or FSDP2, and check that the training is correct."""


for _own, _ in GROUPS.values():
    for _command in _own:
        zero_study.add_command(_command)


def parse(words: list[str]) -> click.Context:
    """Return click's context for the command that a command line names, with its options as `params`. Execute nothing.

    Raises Refusal if the command line is wrong, and click's Exit after --help or --version has been printed.
    """
    try:
        context = zero_study.make_context("zero-study", list(words) or ["--help"], max_content_width=120)
        parsed: click.Context = zero_study.invoke(context)
        return parsed
    except click.UsageError as error:
        raise Refusal(describe_usage(error)) from None


def run(words: list[str]) -> int:
    """Run one command line, and return the exit status. Raises Refusal if the command refuses the request.

    The status of a command that checks something follows from the Verdict that it returns. With --json, a command
    returns an Answer, which is the only thing that is printed to standard output.
    """
    try:
        context = parse(words)
    except click.exceptions.Exit as end:
        return end.exit_code
    callback = context.command.callback
    assert callback is not None  # every command has one
    result: Verdict | Answer | int | None
    if context.params.get("as_json") and not getattr(context.command, "prints_itself", False):
        result = _answer(context)
        print(result.text())
    else:
        result = context.invoke(callback, **context.params)
    return result.status if isinstance(result, (Verdict, Answer)) else result or 0


def answer_of(words: list[str]) -> Answer:
    """Return the answer of one command line with --json. Raises Refusal if the command refuses the request."""
    return _answer(parse(words))


def _answer(context: click.Context) -> Answer:
    callback = context.command.callback
    assert callback is not None  # every command has one
    with _output_to_stderr():
        result = context.invoke(callback, **context.params)
    assert isinstance(result, Answer), f"{context.info_name} has no answer for --json"
    return result


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Redirect everything that is printed to standard output, also by other processes, to standard error."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def command_of(words: Sequence[str]) -> str | None:
    """Return the name of the command in a command line. None if no word is the name of a command."""
    return next((word for word in words[:1] if word in zero_study.commands or word in all_commands()), None)


def asks_for_json(words: Sequence[str]) -> bool:
    """Return whether a command line contains --json, even if it is otherwise wrong.

    The arguments after the script of `prove` and `dry-run` belong to the script. Without the name of a command, --json
    counts anywhere.
    """
    name = command_of(words)
    if name is None:
        return "--json" in words
    command = zero_study.commands.get(name) or all_commands()[name]
    valued = {
        flag
        for option in command.params
        if isinstance(option, click.Option) and not option.is_flag
        for flag in option.opts
    }
    may_follow = command.context_settings.get("allow_interspersed_args", True)
    is_value = False
    for word in words[1:]:
        if is_value:
            is_value = False
        elif word == "--json":
            return True
        elif word == "--" or (not word.startswith("-") and not may_follow):
            return False
        else:
            is_value = word in valued
    return False
