"""How does a value read in a table, a figure or a sentence? Bytes, numbers of three digits, processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class Unit(NamedTuple):
    name: str
    size: float  # in bytes, or in seconds

    def text(self, value: float) -> str:
        return f"{three_digits(value / self.size)} {self.name}"


def bytes_unit(largest: float) -> Unit:
    return next((u for u in (Unit("GiB", 2**30), Unit("MiB", 2**20)) if largest >= u.size), Unit("KiB", 2**10))


def bytes_text(value: float) -> str:
    return bytes_unit(value).text(value)


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


def powers(value: float) -> str:
    """A small or large number in two digits and its power of ten: 2.1e-6. Superscripts are too small for a phone."""
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def computed_note(runs: pd.DataFrame) -> str:
    """What a table or a figure of these runs says where DDP's buckets in it are computed; nothing where none are."""
    computed = sorted(set(runs.loc[runs["has_computed_buckets"].eq(True), "strategy"]))
    return f" Buckets of {', '.join(computed)}: computed from the parameters, not measured." if computed else ""


def processes(count: float) -> str:
    return f"{count:.0f} process" if count == 1 else f"{count:.0f} processes"
