"""Format values and tables: units, digits, tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, SupportsFloat

GIB = 1 << 30


# ---------------------------------------------------------------- values


def gib(num_bytes: SupportsFloat | None, digits: int = 2) -> str:
    """Return bytes in GiB, without the unit; empty if they are not known."""
    return "" if num_bytes is None else f"{float(num_bytes) / GIB:.{digits}f}"


def bytes_text(num_bytes: float) -> str:
    """Return bytes in three digits with the unit that suits them: GiB, MiB or KiB."""
    units = (("GiB", GIB), ("MiB", 2**20))
    name, size = next((unit for unit in units if num_bytes >= unit[1]), ("KiB", 2**10))
    return f"{three_digits(num_bytes / size)} {name}"


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


def difference(relative: float | None) -> str:
    """A relative difference between two runs, in two digits and a power of ten of two: 2.1e-06."""
    return "unknown" if relative is None else f"{relative:.1e}"


def processes(count: float) -> str:
    return f"{count:.0f} process" if count == 1 else f"{count:.0f} processes"


# ---------------------------------------------------------------- Markdown


def shown(text: Any) -> str:
    """Return text on one line in which nothing ends a cell, is HTML, or turns the direction of what follows."""
    line = " ".join(str(text).split())
    visible = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return visible.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table; all columns but the first are to the right."""
    ruler = "|" + "|".join([" --- ", *[" ---: "] * (len(head) - 1)]) + "|"
    first, *others = ["| " + " | ".join(map(shown, row)) + " |" for row in (head, *rows)]
    return [first, ruler, *others]
