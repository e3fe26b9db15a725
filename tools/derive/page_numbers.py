"""Write the numbers in the sentences of guides, from the records and from the planner.

A number, or the words around several numbers, lie between two comments such as `<!-- peaks -->` and `<!-- /peaks -->`
within a line. tools/derive/docs_tables.py does the same for whole tables. The modules in subjects/ say what makes each
number.

    python tools/derive/page_numbers.py
"""

from __future__ import annotations

import re
from collections.abc import Callable

import subjects

from zero_study.files import ROOT

# By page and name: what lies between the two comments.
PLACES: dict[tuple[str, str], Callable[[], str]] = subjects.joined("NUMBERS")


def pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of the text between the two comments of this name, within a line."""
    return re.compile(rf"(<!-- {name} -->)([^\n]*?)(<!-- /{name} -->)")


def written(page: str, name: str) -> set[str]:
    """Return the texts between the comments of this name in a page. A page may say one number in several places."""
    return {match[2] for match in pattern(name).finditer((ROOT / page).read_text(encoding="utf-8"))}


def main() -> None:
    """Write every number into its page."""
    for (page, name), make in PLACES.items():
        path, text = ROOT / page, make()
        content = path.read_text(encoding="utf-8")
        path.write_text(pattern(name).sub(lambda m, text=text: f"{m[1]}{text}{m[3]}", content), encoding="utf-8")


if __name__ == "__main__":
    main()
