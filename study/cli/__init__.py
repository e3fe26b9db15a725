"""Define the command line of zero-study. `parse` only reads a command line, and `run` executes it.

Each module defines a group of commands. A command imports the modules that it needs when it is called, so that a
missing package affects only the commands that need it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click

from study import __version__, command_line
from study.answers.envelope import Answer
from study.cli import check, claims, compare, exact, maintain, plan, project, public, train
from study.cli.options import Command
from study.errors import Refusal, describe_usage
from study.verdict import Verdict


class _Group(NamedTuple):
    """A group of commands with one purpose, with the example and the note that the help prints below them."""

    commands: tuple[click.Command, ...]
    example: str
    note: str = ""


# The groups of commands that `zero-study` lists if it is called without arguments.
GROUPS = {
    "Train": _Group(train.COMMANDS, "zero-study run smoke"),
    "Compare": _Group((*compare.COMMANDS, *public.COMMANDS), "zero-study compare runs"),
    "Plan": _Group(plan.COMMANDS, "zero-study advise --model gpt2-xl --gpu a100-80gb --gpus 8"),
    "Check": _Group(
        (*check.COMMANDS, *exact.COMMANDS, *claims.COMMANDS, *project.CHECKS),
        "zero-study doctor my_deepspeed.json",
    ),
    "Maintain": _Group((*maintain.COMMANDS, *project.COMMANDS), "zero-study pack runs/smoke my-box.zip"),
}


class _Commands(command_line.Command, click.Group):
    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(command.name or "", command.get_short_help_str()) for command in group.commands])
                formatter.write_text(f"$ {group.example}")
                if group.note:
                    formatter.write_text(group.note)

    get_short_help_str = Command.get_short_help_str


@click.group(
    cls=_Commands, no_args_is_help=False, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="zero-study")
def zero_study() -> None:
    """Choose how to train with DDP, DeepSpeed ZeRO or FSDP2, and check that the training is correct."""


for _group in GROUPS.values():
    for _command in _group.commands:
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
    return next((word for word in words[:1] if word in zero_study.commands), None)


def asks_for_json(words: Sequence[str]) -> bool:
    """Return whether a command line contains --json, even if it is otherwise wrong.

    The arguments after the script of `prove` and `dry-run` belong to the script. Without the name of a command, --json
    counts anywhere.
    """
    name = command_of(words)
    if name is None:
        return "--json" in words
    command = zero_study.commands[name]
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
