"""Make the options of a command from the fields of a pydantic model, and print them in a short and a complete help.

A field that `option` declares is the only place that knows an option: its type, default, description, unit, group and
flag. The command line, the help, and the choices of the planner's web page are made from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click
from click.core import augment_usage_errors
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from zero_study.errors import Refusal

LARGEST_NUMBER = 1_000_000_000

# ---------------------------------------------------------------- types of values


class _WholeNumber(click.ParamType):
    """An option type: a whole number from 1 to `LARGEST_NUMBER`."""

    name = "integer"

    def convert(self, value: str | int, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = 0
        flag = param.opts[0] if param else self.name
        if number < 1:
            raise Refusal(f"{flag} {value}: must be a whole number of at least 1")
        if number > LARGEST_NUMBER:
            raise Refusal(f"{flag} {value}: must be at most {LARGEST_NUMBER:,}")
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
_CLICK_TYPES: dict[Any, Any] = {int: NUMBER, float: float, tuple[float, float]: _ReadAndWrite()}
_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", Path: "PATH"}

# ---------------------------------------------------------------- options of a model


@dataclass(frozen=True)
class _Declaration:
    """What a field says about its option, apart from type, default and description."""

    group: str  # title of the group in which --help-all lists the option
    is_common: bool = False  # whether --help shows it, too
    flag: str | None = None  # None if it follows from the field's name
    metavar: str | None = None  # None if it follows from the type
    unit: str | None = None


def option(
    default: Any,
    description: str,
    group: str,
    *,
    is_common: bool = False,
    flag: str | None = None,
    metavar: str | None = None,
    unit: str | None = None,
    **limits: Any,
) -> Any:
    """Declare a field of a pydantic model that is an option of a command.

    `limits` are those of pydantic's Field, such as ge=1.
    """
    declaration = _Declaration(group, is_common, flag, metavar, unit)
    return Field(default, description=description, json_schema_extra=vars(declaration), **limits)


def _declaration(field: FieldInfo) -> _Declaration:
    assert isinstance(field.json_schema_extra, dict), "declare the field with `option`"
    return _Declaration(**field.json_schema_extra)  # type: ignore[arg-type]


def unit(field: FieldInfo) -> str | None:
    """Return the unit of an option's value, such as "GiB". None if the value has no unit."""
    return _declaration(field).unit


def kind(field: FieldInfo) -> Any:
    """Return the type of a field's value. For a field of type `X | None`, this is X."""
    if not is_optional(field):
        return field.annotation
    return next(member for member in get_args(field.annotation) if member is not NoneType)


def is_optional(field: FieldInfo) -> bool:
    """Return whether a field accepts None."""
    return NoneType in get_args(field.annotation)


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field accepts, or no words if it also accepts other values, such as any number."""
    return get_args(kind(field)) if get_origin(kind(field)) is Literal else ()


class Option(click.Option):
    """A command-line option that knows its group: the heading under which --help-all lists it."""

    def __init__(self, names: list[str], *, group: str, is_common: bool = False, **attributes: Any) -> None:
        super().__init__(names, **attributes)
        self.group, self.is_common = group, is_common


class Argument(click.Argument):
    """A positional argument with a description. Before release 8.5 of click, --help lists it among the options."""

    def __init__(self, names: list[str], *, help: str, **attributes: Any) -> None:
        super().__init__(names, **attributes)
        self.help = help

    def get_help_record(self, context: click.Context) -> tuple[str, str]:
        return self.get_usage_pieces(context)[0], self.help or ""


argument = partial(click.argument, cls=Argument)


def flag(name: str, field: FieldInfo) -> str:
    """Return the command-line flag of a field, such as --micro-batch-size."""
    return _declaration(field).flag or "--" + name.replace("_", "-")


def options_of(model: type[BaseModel], has_presets: bool = False) -> list[Option]:
    """Return the options of a command, one for each field of a model. An option that is not given has the value None.

    With presets, an option has to be able to turn off what a preset turns on, so `--compile` has `--no-compile`.
    pydantic checks the values then. Otherwise click converts and checks them.
    """
    return [_option(name, field, has_presets) for name, field in model.model_fields.items()]


def _option(name: str, field: FieldInfo, has_presets: bool) -> Option:
    declaration, names = _declaration(field), flag(name, field)
    attributes: dict[str, Any] = {"group": declaration.group, "is_common": declaration.is_common}
    default = field.default
    if kind(field) is bool and (has_presets or default is None):
        names = f"{names}/--no-{names[2:]}"
        default = None if default is None else "on" if default else "off"
    elif kind(field) is bool:
        attributes["is_flag"], default = True, None
    else:
        words = choices(field)
        metavar = f"[{'|'.join(words)}]" if words else _METAVARS.get(kind(field), "NAME")
        attributes["metavar"] = declaration.metavar or metavar
        if not has_presets:
            attributes["type"] = click.Choice(words) if words else _CLICK_TYPES.get(kind(field))
    text = field.description or ""
    if default is not None and "[default: " not in text:
        text += f" [default: {default}]"
    return Option([names, name], default=None, help=text, **attributes)


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that have a value. An option that is missing on the command line has the value None."""
    return {name: value for name, value in values.items() if value is not None}


# ---------------------------------------------------------------- commands


ALL = "zero_study.command_line.all"  # the key of a context whose help shows all options


class Command(click.Command):
    """A click command whose name appears in every error about its options.

    If some options are marked as common, --help shows these only, and --help-all shows all options, in groups.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.has_help_all = any(isinstance(each, Option) and each.is_common for each in self.params)
        if self.has_help_all:
            help_all = click.Option(
                ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_print_all,
                help="Show all options and exit.",
            )  # fmt: skip
            self.params = [*self.params, help_all]

    def parse_args(self, context: click.Context, words: list[str]) -> list[str]:
        with augment_usage_errors(context):
            return super().parse_args(context, words)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options for --help, or all options in groups for --help-all."""
        if not self.has_help_all:
            super().format_options(context, formatter)
            return
        shows_all = context.meta.get(ALL, False)
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            is_common = isinstance(parameter, Option) and parameter.is_common
            record = parameter.get_help_record(context)
            if record is None or not (shows_all or is_common):
                continue
            group = parameter.group if isinstance(parameter, Option) else "Help"
            flags, text = record
            groups.setdefault(group if shows_all else "Options", []).append(
                (flags, text if shows_all else _first_sentence(text))
            )
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a sentence which says that --help-all shows all options."""
        super().format_epilog(context, formatter)
        if self.has_help_all and not context.meta.get(ALL):
            formatter.write(f"\nAll options: {context.command_path} --help-all\n")


def _first_sentence(text: str) -> str:
    """Return the first sentence of an option's description, and its default."""
    description, default = re.fullmatch(r"(.*?)( *\[default: .*\])?", text, re.DOTALL).groups("")  # type: ignore[union-attr]
    return re.split(r"(?<=\.) ", description, maxsplit=1)[0] + default


def _print_all(context: click.Context, _: click.Parameter, is_requested: bool) -> None:
    if is_requested and not context.resilient_parsing:
        context.meta[ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()
