"""Format values with units and digits, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, SupportsFloat

GIB = 1 << 30


# ---------------------------------------------------------------- values


def gib(num_bytes: SupportsFloat | None, digits: int = 2) -> str:
    """Return a number of bytes in GiB, without the unit. None gives an empty string."""
    return "" if num_bytes is None else f"{float(num_bytes) / GIB:.{digits}f}"


def bytes_text(num_bytes: float) -> str:
    """Return a number of bytes with three digits and a suitable unit: GiB, MiB or KiB."""
    units = (("GiB", GIB), ("MiB", 2**20))
    name, size = next((unit for unit in units if num_bytes >= unit[1]), ("KiB", 2**10))
    return f"{three_digits(num_bytes / size)} {name}"


def three_digits(value: float) -> str:
    """Return a number with three significant digits. Numbers from 100 on are rounded to whole numbers.

    Only numbers below 0.001 are written with a power of ten.
    """
    if abs(value) >= 99.95:
        return f"{value:,.0f}".replace("-", "\N{MINUS SIGN}")
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}") if abs(value) >= 1e-3 or value == 0 else powers(value)


def signed_percent(relative: float) -> str:
    """Return a relative difference in percent with its sign and three decimals, but without the "%".

    A difference that would round to zero is written with a power of ten.
    """
    percent = 100 * relative
    if 0 < abs(percent) < 5e-4:
        return f"{'+' if percent > 0 else '-'}{powers(abs(percent))}"
    return f"{percent:+z.3f}"


def percent(share: float) -> str:
    """Return a share in percent with two significant digits."""
    value = 100 * share
    return f"{powers(value) if 0 < abs(value) < 5e-4 else f'{value:.{2 if abs(value) < 99.5 else 3}g}'} %"


def powers(value: float) -> str:
    """Return a number with two digits and a power of ten, such as 2.1e-6.

    Superscripts would be too small on a phone.
    """
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def difference(relative: float | None) -> str:
    """Return a relative difference between two runs with two digits and a power of ten, such as 2.1e-06.

    None gives "unknown".
    """
    return "unknown" if relative is None else f"{relative:.1e}"


def processes(count: float) -> str:
    return f"{count:.0f} process" if count == 1 else f"{count:.0f} processes"


# ---------------------------------------------------------------- Markdown


def shown(text: Any) -> str:
    """Return text that is safe in a cell of a Markdown table.

    The text is on one line. The characters that would end the cell or begin HTML are escaped, and so are control
    characters, such as those that reverse the direction of the text.
    """
    line = " ".join(str(text).split())
    visible = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return visible.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]], num_texts: int = 1) -> list[str]:
    """Return the lines of a Markdown table. The first `num_texts` columns are aligned to the left, and others right."""
    ruler = "|" + "|".join([" --- "] * num_texts + [" ---: "] * (len(head) - num_texts)) + "|"
    first, *others = ["| " + " | ".join(map(shown, row)) + " |" for row in (head, *rows)]
    return [first, ruler, *others]
