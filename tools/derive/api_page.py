"""Write docs/api.md, the reference of the Python functions, from the docstrings of zero_study.api and the answers.

python tools/derive/api_page.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

from zero_study import api
from zero_study.answers import models

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def page() -> str:
    """Return the page: what all functions share, then each function with its answer's fields."""
    parts = re.fullmatch(r"(.*?)\n\n(    .*?)\n\n(\S.*)", inspect.getdoc(api) or "", re.DOTALL)
    assert parts is not None  # a sentence, an example, and what all functions share
    first, example, shared = parts.groups()
    lines = [
        "# Python functions", "", joined(first), "", "```python", textwrap.dedent(example), "```", "",
        "`zero_study.api` contains the types of the answers. [Read answers as JSON](json.md) describes the keys that "
        "all answers have. The "
        "[schemas](json.md#schemas-and-ids) list the fields of the types that answers contain, such as "
        "`AdvisedStrategy`.", "",
        joined(shared), "", "## Functions", "",
    ]  # fmt: skip
    for name in api.__all__:
        if name != "Refusal":
            lines += [*function(name), ""]
    lines += ["## Answers", "", "Every answer has these fields:", "", *fields(models.Answer), ""]
    for name in sorted(answers()):
        lines += [f"### {name}", "", joined(inspect.getdoc(answers()[name]) or ""), ""]
        lines += [*fields(answers()[name], models.Answer), ""]
    return "\n".join(lines)


def joined(text: str) -> str:
    """Return paragraphs with each on one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def function(name: str) -> Iterator[str]:
    """Yield the lines of a function: its name, its signature, and its docstring."""
    called = getattr(api, name)
    yield from (f"### {name}", "", "```python", f"{name}{inspect.signature(called)}".replace("'", ""), "```", "")
    yield joined(inspect.getdoc(called) or "")


def answers() -> dict[str, type[models.Answer]]:
    """Return the types of the answers of the functions by their names."""
    kinds = [get_type_hints(getattr(api, name))["return"] for name in api.__all__ if name != "Refusal"]
    return {kind.__name__: kind for kind in kinds}


def fields(kind: type[models.Answer], base: type[models.Answer] | None = None) -> Iterator[str]:
    """Yield a list of the fields of an answer that `base` does not have."""
    known = set() if base is None else set(base.model_fields)
    for name, field in kind.model_fields.items():
        if name not in known:
            meaning = "" if field.description is None else f": {' '.join(field.description.split())}"
            annotation = kind.__annotations__.get(name) or models.Envelope.__annotations__[name]
            yield f"- `{field.alias or name}` (`{annotation}`){meaning}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
