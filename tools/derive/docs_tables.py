"""Write the tables of the guides and reports from the records, between two comments such as <!-- claims -->.

The modules in subjects/ say what makes each table. Where a page has the sentence with the command that prints a table,
the sentence stays there, and only the site shows the table.

    python tools/derive/docs_tables.py                         # write every table
    python tools/derive/docs_tables.py reports/why.md cases    # print one table
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence

import subjects

from zero_study.errors import Refusal
from zero_study.files import ROOT

PLACES: dict[tuple[str, str], Callable[[], str]] = subjects.joined("TABLES")


def pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of a table between the two comments of this name, and of these comments."""
    return re.compile(rf"(<!-- {name}(?:: [^>]*)? -->\n)(.*?)(<!-- /{name} -->)", re.DOTALL)


def between(page: str, name: str) -> str:
    """Return the text between the two comments of this name in a page."""
    return pattern(name).search((ROOT / page).read_text(encoding="utf-8"))[2].strip("\n")


def sentence(page: str, name: str) -> str:
    """Return the sentence with the command that prints a table, which a page can have instead of the table."""
    return f"`python tools/derive/docs_tables.py {page} {name}` prints this table."


def is_committed(page: str, name: str) -> bool:
    """Return whether a page has a table itself, and not the sentence with its command."""
    return between(page, name) != sentence(page, name)


def with_table(text: str, name: str, table: str) -> str:
    """Return the text of a page with a table between the two comments of this name."""
    return pattern(name).sub(lambda m: f"{m[1]}{table}\n{m[3]}", text)


def filled(page: str, text: str) -> str:
    """Return the text of a page with each table of which it has only the command."""
    for (of_page, name), make in PLACES.items():
        if of_page == page and not is_committed(page, name):
            text = with_table(text, name, make())
    return text


def main(words: Sequence[str]) -> None:
    """Print one table, or write every table that is committed."""
    if words:
        if tuple(words) not in PLACES:
            raise Refusal(f"{' '.join(words)}: no such table. Give a page and the name of a comment in it.")
        print(PLACES[words[0], words[1]]())
        return
    for (page, name), make in PLACES.items():
        if is_committed(page, name):
            path, table = ROOT / page, make()
            path.write_text(with_table(path.read_text(encoding="utf-8"), name, table), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refusal as refusal:
        print(f"tools/derive/docs_tables.py: {refusal}", file=sys.stderr)
        sys.exit(2)
