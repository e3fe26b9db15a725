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

# The groups in which `zero-study --help` lists the commands of this package and of the replication study. Commands that
# no group names are listed below "More". Each group ends with the example of its first command.
GROUPS = {
    "Predict (needs no GPU)": ["advise", "predict"],
    "Check": ["why", "doctor", "prove", "dry-run", "saved", "diff", "upgrade"],
    "Measure (the ZeRO replication study)": ["train", "compare", "run", "plan", "report", "import"],
}
_MISSING = "The commands of the replication study are missing, because"
_ENTRY_POINTS = "zero_study.commands"


class _Commands(command_line.Command, click.Group):
    """The commands of this package, and those of the replication study, which is imported only if it is needed.

    A script that a command runs may therefore import a package of its own that is called `study`.
    """

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group of commands with the questions that they answer, and an example."""
        rest = all_commands()
        groups = {title: [rest.pop(name) for name in names if name in rest] for title, names in GROUPS.items()}
        for title, commands in {**groups, "More": [*rest.values()]}.items():
            if commands:
                with formatter.section(title):
                    formatter.write_dl([(str(command.name), command.short_help or "") for command in commands])
                    formatter.write_text(f"Example: {commands[0].example}")
        if reason := _of_study().why_missing:
            formatter.write_text(reason)

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(all_commands())

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return the command with this name. Raises NoSuchOption of click, or Refusal if it may be one of the study."""
        command = self.commands.get(name) or all_commands().get(name)
        if command is None and not name.startswith("-"):
            is_misspelt = get_close_matches(name, self.commands, cutoff=0.8)
            if (reason := _of_study().why_missing) and not is_misspelt:
                raise Refusal(f"zero-study has no command {name!r}. {reason}")
            possible, message = get_close_matches(name, all_commands()), f"No such command {name!r}."
            raise click.NoSuchOption(name, message, possible, context)  # click has NoSuchCommand only since release 8.4
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
    """The commands of the replication study by their names, or why they are missing."""

    commands: dict[str, Command]
    why_missing: str | None = None


@cache
def _of_study() -> _OfStudy:
    commands: dict[str, Command] = {}
    if not (points := _entry_points()):
        return _OfStudy({}, f"{_MISSING} zero-study is not installed. In the clone, run `make setup`.")
    for point in points:
        if (reason := _why_missing(point.module.partition(".")[0])) is not None:
            return _OfStudy({}, reason)
        commands |= {command.name: command for command in point.load()}
    return _OfStudy(commands)


def all_commands() -> dict[str, Command]:
    """Return the commands of this package and of the replication study by their names."""
    return {**_OWN, **_of_study().commands}


_OWN = {str(each.name): each for each in (*plan.COMMANDS, *project.COMMANDS, *check.COMMANDS)}


@click.group(
    cls=_Commands,
    commands=_OWN,
    no_args_is_help=False,
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
    help="What changes if you train on several GPUs with DDP, DeepSpeed ZeRO or FSDP2? Predict it, measure it, and "
    "check that the training is correct.",
)
@click.version_option(__version__, prog_name="zero-study")
def zero_study() -> None:
    """Define the command to which all commands belong."""


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
