"""How values, strategies and tables read: units, digits, the order of strategies, Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.engines.strategy_names import in_order as in_order
from study.files import relative_to_cwd

if TYPE_CHECKING:
    from study.records.find import RecordFile

# ---------------------------------------------------------------- values


def bytes_text(value: float) -> str:
    name, size = next((unit for unit in (("GiB", 2**30), ("MiB", 2**20)) if value >= unit[1]), ("KiB", 2**10))
    return f"{three_digits(value / size)} {name}"


def three_digits(value: float) -> str:
    """Three digits, written out."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}".replace("-", "\N{MINUS SIGN}")
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}") if abs(value) >= 1e-3 or value == 0 else powers(value)


def signed_percent(relative: float) -> str:
    """A relative difference in per cent, with its sign: three decimals, or a power of ten where these were zeros."""
    percent = 100 * relative
    if 0 < abs(percent) < 5e-4:
        return f"{'+' if percent > 0 else '-'}{powers(abs(percent))}"
    return f"{percent:+z.3f}"


def percent(share: float) -> str:
    """A share in per cent, in two digits."""
    value = 100 * share
    return f"{powers(value) if 0 < abs(value) < 5e-4 else f'{value:.{2 if abs(value) < 99.5 else 3}g}'} %"


def powers(value: float) -> str:
    """A small or large number in two digits and its power of ten: 2.1e-6. Superscripts are too small for a phone."""
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def processes(count: float) -> str:
    return f"{count:.0f} process" if count == 1 else f"{count:.0f} processes"


# ---------------------------------------------------------------- Markdown


def page(
    title: str,
    legend: str,
    lines: Iterable[str],
    option: str,
    folders: Sequence[Path],
    record_files: Iterable[RecordFile] = (),
) -> str:
    """Make a page of `zero-study compare`: title and folders, legend, tables, runs without a result, its command."""
    name = f"compare {option}".rstrip()
    of = ", ".join(path.name for path in folders if path.name not in ("", "records"))
    head = f"# {title} ({of})" if of else f"# {title}"
    return "\n".join([head, "", legend, "", *lines, *not_ok(record_files), f"Made by `{command(name, folders)}`."])


def not_ok(record_files: Iterable[RecordFile]) -> list[str]:
    """List the runs that did not finish, so that no table drops them unseen.

    And those that different code, other processors or another number of threads trained in parts.
    """
    found = [file.record for file in record_files]
    lines = [f"- {shown(r.run_id)}: {r.status}" for r in found if r.status != "ok"]
    mixed = [f"- {shown(r.run_id)}: {shown(r.mixed_code)}" for r in found if r.mixed_code]
    others = [f"- {shown(r.run_id)}: {shown(r.mixed_processors)}" for r in found if r.mixed_processors]
    return [
        *(["", "Runs without a result:", "", *lines] if lines else []),
        *(["", "Runs that no single code trained (--resume-with-other-code):", "", *mixed] if mixed else []),
        *(["", "Runs that went on with other threads or another processor:", "", *others] if others else []),
    ]


def command(name: str, folders: Sequence[Path]) -> str:
    """The command that makes a page, with folders as seen from the current one."""
    return " ".join(["zero-study", name, *map(relative_to_cwd, folders)])


def shown(text: Any) -> str:
    """What a record says, on one line: nothing in it ends a cell, is HTML, or turns the direction of what follows."""
    line = " ".join(str(text).split())
    visible = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return visible.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table; all columns but the first are to the right."""
    ruler = "|" + "|".join([" --- ", *[" ---: "] * (len(head) - 1)]) + "|"
    first, *others = ["| " + " | ".join(map(shown, row)) + " |" for row in (head, *rows)]
    return [first, ruler, *others]
