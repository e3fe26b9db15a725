"""Write the tables of the guides and reports from the records, between two comments such as <!-- claims -->.

The modules in subjects/ say what makes each table.

    python tools/derive/docs_tables.py
"""

from __future__ import annotations

import re
from collections.abc import Callable

import subjects
from subjects import theory

from zero_study.files import ROOT

PLACES: dict[tuple[str, str], Callable[[], str]] = subjects.joined("TABLES")


def pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of a table between the two comments of this name, and of these comments."""
    return re.compile(rf"(<!-- {name}(?:: [^>]*)? -->\n)(.*?)(<!-- /{name} -->)", re.DOTALL)


def between(page: str, name: str) -> str:
    """Return the text between the two comments of this name in a page."""
    return pattern(name).search((ROOT / page).read_text(encoding="utf-8"))[2].strip("\n")


def main() -> None:
    """Write every table, and the page of theory's errors."""
    theory.THEORY.write_text(f"{theory.whole_theory()}\n", encoding="utf-8")
    for (page, name), make in PLACES.items():
        path, table = ROOT / page, make()
        text = path.read_text(encoding="utf-8")
        path.write_text(
            pattern(name).sub(lambda m, table=table: f"{m[1]}{table}\n{m[3]}", text),
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
