"""List the numbers of README, the guides and the notebooks, so that a person finds those that disagree.

    python tools/derive/number_pairs.py            # the 200 pairs of numbers that most likely state the same quantity
    python tools/derive/number_pairs.py --all      # every number, by unit and noun
    python tools/derive/number_pairs.py --word ZeRO-3 --unit GiB   # of sentences with a word, of one unit
    python tools/derive/number_pairs.py --check    # compare the quantities of `QUANTITIES`; status 1 if a value differs

Two numbers of the same unit are a pair if their sentences share words and their values differ. Words that few
sentences contain count more. Whether a pair states one quantity is for a person to decide, so the list has no status
of failure. A quantity that a person decided about belongs into `QUANTITIES`, and a test runs `--check`: status 1 if two
pages state different values, and status 3 if no page matches a pattern, because then nothing was compared.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import NamedTuple

import nbformat

from zero_study.files import ROOT

UNITS = (
    "GiB MiB KiB GB MB TB TiB bytes byte s ms minutes minute hours hour % times x million billion TFLOPS PFLOPS GB/s "
    "Gbit/s GPUs GPU H100 A100 parameters elements sequences tokens steps runs trainings models rows cases pairs "
    "sources releases keys processes ranks nodes bits layers cores sentences claims checks faults seeds repeats"
)
_UNIT = "|".join(sorted(map(re.escape, UNITS.split()), key=len, reverse=True))
_VALUE = r"[-+]?\$?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
NUMBER = re.compile(rf"(?<![\w.-])({_VALUE}(?: (?:to|and|or) {_VALUE})?) ?({_UNIT})?(?![\w.]*\w)")
# Numbers that are part of a name: a release, a stage, a model, a benchmark.
NAMES = re.compile(
    r"\d+\.\d+\.\d+\S*|ZeRO-\d|zero\d\w*|FSDP2?|fsdp2\w*|[Ll]lama[- ]?\d(?:\.\d)?|GPT-2|MLPerf\S* Training \d\.\d"
)
# Words that say nothing about a quantity.
COMMON = (
    "the and that with for are was were not than has have had its this which from one two can per all but each about "
    "into when only more most less they them their then there other others same also does out both between under over "
    "our because after before where who what how many much use used uses see page it is an in of on to as by or if at "
    "be we so"
)
# Numbers of these units describe a setting, which may differ, and not a result. They are only in the whole list.
SETTINGS = (
    "steps seeds processes sequences runs tokens ranks nodes GPUs GPU H100 A100 repeats layers cores keys bits million "
    "billion parameters x sentences pairs rows elements"
)
MOST_OF_A_SENTENCE = 3  # pairs
LARGEST_GROUP = 400  # sentences with one unit and word that are still compared with each other
NOTEBOOK_TEXT = ("text/markdown", "text/html", "text/plain")


class Found(NamedTuple):
    """A number on a page, with its unit and the sentence around it."""

    page: str
    value: str
    unit: str
    words: frozenset[str]
    sentence: str
    is_prose: bool

    @property
    def noun(self) -> str:
        """The two words that follow the number."""
        after = self.sentence.partition(f"[{self.value}]")[2]
        return " ".join(re.findall(r"[A-Za-z][\w-]*", after)[:2])


# Quantities that pages state, each with a pattern whose group 1 is the value. A pattern is searched in sentences
# without Markdown's marks. Values are compared as they are written.
QUANTITIES = {
    "minutes of make test": r"make test (?:runs|install)\b.*?(\d+) minutes",
    "minutes of make study": r"make study +runs? every strategy.*?(\d+) minutes",
    "releases of DeepSpeed to avoid": r"[Aa]void[ (]+(?:DeepSpeed )?(\d+\.\d+\.\d+ to \d+\.\d+\.\d+)",
    "largest model that we trained (million parameters)": (
        r"(?:models have at most|largest model is the GPT of) (\d+) million parameters"
    ),
}


def pages() -> list[Path]:
    """List README, the guides and the executed notebooks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "reports").glob("*.ipynb"))]


def texts(page: Path) -> Iterator[str]:
    """Yield the parts of a page: its Markdown, or the Markdown and the outputs of a notebook."""
    if page.suffix != ".ipynb":
        yield page.read_text(encoding="utf-8")
        return
    for cell in nbformat.read(page, as_version=4).cells:
        if cell.cell_type == "markdown":
            yield cell.source
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            yield output.get("text") or next((data[kind] for kind in NOTEBOOK_TEXT if kind in data), "")


def sentences(text: str) -> Iterator[tuple[str, bool]]:
    """Yield sentences, cells of tables (with the first cell of the row and the head of the column), lines of outputs.

    The second value says whether it is a sentence of a paragraph or of a list.
    """
    text = re.sub(r"<style.*?</style>|<svg.*?</svg>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<img[^>]* alt="([^"]*)"[^>]*>', r"\n\n\1\n\n", text)  # what a picture shows
    text = re.sub(r"</t[dh]>\s*", " | ", re.sub(r"<tr[^>]*>", "\n| ", re.sub(r"\s*\n\s*(?=<t[dh])", "", text)))
    text = unescape(re.sub(r"<[^>]+>", "", text))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    head: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        rows = [line for line in block.splitlines() if line.lstrip().startswith("|")]
        if rows:
            for row in rows:
                cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
                if not head or len(cells) != len(head):
                    head = cells
                    continue
                for name, cell in zip(head[1:], cells[1:], strict=False):
                    yield f"{cells[0]}, {name}: {cell}", False
            head = []
        elif block.startswith("```") or "  " in block.strip():
            yield from ((line, False) for line in block.splitlines())
        else:
            joined = " ".join(block.split())
            yield from ((each, True) for each in re.split(r"(?<=[.;:!?]) (?=[A-Z(*\[`-])", joined))


def numbers(page: Path) -> Iterator[Found]:
    """Yield the numbers of a page."""
    for text in texts(page):
        for each, is_prose in sentences(text):
            plain = re.sub(r"[*`\[\]]", "", each)
            hidden = NAMES.sub(lambda match: re.sub(r"\d", "#", match[0]), plain)
            words = frozenset(re.findall(r"[a-z][\w-]{2,}|[A-Z][\w#-]*", plain)) - {*COMMON.split()}
            for match in NUMBER.finditer(hidden):
                shown = f"{plain[: match.start(1)]}[{match[1]}]{plain[match.end(1) :]}"
                around = shown[max(0, match.start(1) - 160) : match.end(1) + 162]
                yield Found(str(page.relative_to(ROOT)), match[1], match[2] or "", words, around, is_prose)


def pairs(found: list[Found], most: int) -> list[tuple[float, Found, Found]]:
    """Return the pairs of numbers whose sentences share the most words and whose values differ."""
    counts = Counter(word for each in found for word in each.words)
    weight = {word: math.log(len(found) / count) for word, count in counts.items()}
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, each in enumerate(found):
        for word in each.words:
            groups[each.unit, word].append(index)
    shared: dict[tuple[int, int], float] = defaultdict(float)
    for (unit, word), members in groups.items():
        if unit and len(members) <= LARGEST_GROUP:
            for one, other in itertools.combinations(members, 2):
                if found[one].value != found[other].value and found[one].page != found[other].page:
                    shared[one, other] += weight[word]
    size = [math.sqrt(sum(weight[word] for word in each.words)) or 1.0 for each in found]
    scored = ((value / size[one] / size[other], one, other) for (one, other), value in shared.items())
    ranked, shown = [], Counter[frozenset[str]]()
    for score, one, other in sorted(scored, reverse=True):
        sides = found[one].words, found[other].words
        if all(shown[side] < MOST_OF_A_SENTENCE for side in sides):
            shown.update(sides)
            ranked.append((score, found[one], found[other]))
    return ranked[:most]


def values(pattern: str, lines_of: dict[str, list[str]]) -> dict[str, set[str]]:
    """Return the values of a quantity, each with the pages that state it."""
    places: dict[str, set[str]] = defaultdict(set)
    for page, lines in lines_of.items():
        for line in lines:
            for match in re.finditer(pattern, line):
                places[match[1]].add(page)
    return dict(places)


def check(paths: list[Path], quantities: dict[str, str]) -> int:
    """Print each quantity whose values differ, or that no page states. Return the exit status."""
    status = 0
    lines_of = {
        str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path): [
            re.sub(r"[*`\[\]]", "", each) for text in texts(path) for each, _ in sentences(text)
        ]
        for path in paths
    }
    for what, pattern in quantities.items():
        places = values(pattern, lines_of)
        if len(places) != 1:
            status = max(status, 1 if places else 3)
            stated = "; ".join(f"{value} in {', '.join(sorted(where))}" for value, where in places.items())
            print(f"{what}: {stated or 'no page matches the pattern, so nothing was compared'}")
    return status


def main() -> None:
    """Print the list that the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every number, by unit and noun")
    parser.add_argument("--word", action="append", default=[], help="only sentences with this text; repeatable")
    parser.add_argument("--unit", help="only numbers with this unit")
    parser.add_argument("--most", type=int, default=200, help="number of pairs")
    parser.add_argument("--check", action="store_true", help="compare the quantities that must agree")
    options = parser.parse_args()
    if options.check:
        sys.exit(check([*pages(), ROOT / "Makefile", ROOT / "AGENTS.md"], QUANTITIES))
    found = [each for page in pages() for each in numbers(page)]
    found = [each for each in found if all(word.lower() in each.sentence.lower() for word in options.word)]
    found = [each for each in found if options.unit in (None, each.unit)]
    if not options.all and not options.word:
        found = [each for each in found if each.is_prose and each.unit not in SETTINGS.split()]
    if options.all or options.word or options.unit:
        for each in sorted(found, key=lambda each: (each.unit, each.noun.lower(), each.value)):
            print(f"{each.unit or '(none)':10} {each.noun[:24]:24} {each.value:>16}  {each.page}: {each.sentence}")
        return
    for score, one, other in pairs(found, options.most):
        print(f"{score:.2f}  {one.value} and {other.value} {one.unit}")
        print(f"      {one.page}: {one.sentence}\n      {other.page}: {other.sentence}")


if __name__ == "__main__":
    main()
