"""Gather the pages of the site into build/pages: README, guides, reports, executed notebooks, and generated pages.

python tools/derive/pages.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import docs_tables
import nbformat
import schemas
import web_page
from subjects.conformance import EFFECTS, is_nearly_hidden

from study.claims import corrections_page
from study.records.schema import Record
from zero_study import cli, skills
from zero_study.command_line import ALL
from zero_study.upgrade import changes, faults
from zero_study.upgrade.locks import Lock
from zero_study.version import REPOSITORY

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "build" / "pages"
WIDTH = 100  # of what commands print, in characters
# A link, whose text may be code; or what is no link: fenced, or code.
LINK = re.compile(
    r"^ *```.*?^ *```|(?<!!)\[(?P<text>(?:`[^`]*`|[^\]`])*+)\]\((?P<to>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)|`[^`\n]+`",
    re.DOTALL | re.MULTILINE,
)
# A row of a table of guides.
ROW = re.compile(r"\| \[(?P<title>[^\]]+)\]\((?P<to>[^)#\s:]+\.md)\) \| (?P<about>.+) \|")
LARGEST = 200_000  # bytes of a linked file that is copied into the site
PICTURES = ("reports/**/*.svg", "docs/**/*.svg")  # which pages show

# Comparisons of committed runs that only the site shows: the page, the view, and the studies.
VIEWS = {
    "parity": ("parity", "smoke"),
    "parity_full": ("parity", "parity"),
    "real_text": ("parity", "cpu"),
    "bert_large": ("parity", "bert-large"),
    "model_states": ("model-states", "model-states", "smoke"),
    "communication": ("communication", "communication"),
    "network": ("communication", "network"),
    "peaks": ("peaks", "peaks"),
    "peaks_real": ("parts", "peaks-real"),
    "theory": ("theory", ""),
}

# README's picture follows the reader's system. The site has its own switch between light and dark, by the end of `src`.
PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
SOURCE_FOR_DARK = re.compile(r" *<source [^>]*\bdark\b[^>]*>\n")
FOLDED = r'<details markdown="1"><summary>code</summary>\n\n\g<0>\n\n</details>'
# The theme breaks code within words, so a short name in a first column needs a least width on a phone. The figures of
# notebooks are on white paper. On a dark page, their lightness is inverted, and the page is their paper.
LOOK = (
    "<style>.md-typeset table:not([class]) :is(th, td) {min-width: 0; padding: .5em .7em}"
    " .md-typeset table:not([class]) td:first-child:has(code) {min-width: 7em}"
    ' [data-md-color-scheme="slate"] img[src*="_files/"] {filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen}'
    "</style>\n\n"
)


def sources() -> dict[str, Path]:
    """Return the source of every page by its place in the site. Notebooks become Markdown pages."""
    pages = {"index.md": ROOT / "README.md", "CHANGELOG.md": ROOT / "CHANGELOG.md"}
    for folder in ("docs", "reports"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".md", ".ipynb") and "records" not in path.parts:
                pages[str(path.relative_to(ROOT).with_suffix(".md"))] = path
    return pages


def only_on_the_site() -> Iterator[tuple[str, str]]:
    """Yield place and text of each page that is made from records, and that the repository does not have."""
    yield "reports/corrections.md", corrections_page.text()
    for name, (view, *studies) in VIEWS.items():
        folders = [f"reports/cpu/records/{study}".rstrip("/") for study in studies]
        command = [sys.executable, "-m", "zero_study", "compare", "--view", view, "--markdown", *folders]
        printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        yield f"reports/cpu/{name}.md", printed.stdout


def pictures() -> list[Path]:
    """List the pictures that are copied into the site, to the same places as in the repository."""
    return sorted(path for pattern in PICTURES for path in ROOT.glob(pattern))


def with_switch(picture: re.Match[str]) -> str:
    """Return a light and a dark picture, of which the site shows one, instead of one that follows the system."""
    light = SOURCE_FOR_DARK.sub("", picture[0]).replace('.svg" alt', '.svg#only-light" alt')
    return light + "\n" + light.replace("-light", "-dark")


def linked(text: str, source: Path, place: str, places: dict[Path, str]) -> str:
    """Rewrite the links of a page for the site.

    A link to a page or a small file leads to its copy in the site. Any other link leads to the published repository, if
    there is one; otherwise only its text remains.
    """
    published = REPOSITORY

    def link(match: re.Match[str]) -> str:
        if not match["to"]:
            return match[0]
        target = Path(os.path.normpath(source.parent / match["to"]))
        is_copied = target.is_file() and target.suffix != ".md" and target.stat().st_size < LARGEST
        if target in places or is_copied:
            to = places.get(target, str(target.relative_to(ROOT)))
            if target not in places:
                (PAGES / to).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(target, PAGES / to)
            return f"[{match['text']}]({os.path.relpath(to, Path(place).parent)}{match['anchor'] or ''})"
        if published and target.exists():
            return f"[{match['text']}]({published}/blob/main/{target.relative_to(ROOT)})"
        return str(match["text"])

    return LINK.sub(link, text)


def with_links_to_schemas(text: str) -> str:
    """Return docs/json.md with links to the schemas, which the site has and the repository has not."""
    names = {path.name for path in schemas.texts()}
    return re.sub(
        r"`([\w-]+\.json)`", lambda name: f"[{name[0]}](schemas/{name[1]})" if name[1] in names else name[0], text
    )


def notebook(source: Path, target: Path) -> str:
    """Convert an executed notebook to Markdown with folded code; write its figures next to the page."""
    content = nbformat.read(source, as_version=4)
    tags = [cell.metadata.get("tags", []) for cell in content.cells]
    if ["injected-parameters"] in tags:  # instead of those in the notebook's own cell
        del content.cells[tags.index(["parameters"])]
    from nbconvert import MarkdownExporter  # only `make site` installs it

    text, resources = MarkdownExporter().from_notebook_node(content, {"output_files_dir": f"{target.stem}_files"})
    for name, image in resources["outputs"].items():
        (target.parent / name).parent.mkdir(exist_ok=True)
        (target.parent / name).write_bytes(image)
    text = re.sub(r"<style.*?</style>|(?<=<table)[^>]*", "", text, flags=re.DOTALL)  # the theme's look and scroll box
    text = re.sub(r"\n```\s+```python\n", "\n\n", text)  # cells with nothing between them
    text = re.sub(r"^```python\n.*?^```$", FOLDED, text, flags=re.DOTALL | re.MULTILINE)
    titles = [(heading.start(), heading[1]) for heading in re.finditer(r"^(?:#+ |\*\*)([^*\n]+)", text, re.MULTILINE)]
    return re.sub(r"!\[png\]", lambda heading: f"![{[name for at, name in titles if at < heading.start()][-1]}]", text)


def commands() -> Iterator[str]:
    """Yield the page of all commands: for each one, the help with all options."""
    yield "# Commands\n\nAll options of every command, as `zero-study COMMAND --help` or `--help-all` prints them.\n"
    top = click.Context(cli.zero_study, info_name="zero-study")
    for name in cli.zero_study.list_commands(top):
        command = cli.zero_study.get_command(top, name)
        if command is not None and not command.hidden:
            with click.Context(command, info_name=f"zero-study {name}", max_content_width=84) as context:
                context.meta[ALL] = True
                yield f"## {name}\n\n```text\n{command.get_help(context)}\n```\n"


def releases() -> Iterator[tuple[str, str]]:
    """Yield name and text of a page for each examined release: its known faults, and what it changes."""
    for package, entry in changes.index().packages.items():
        for before, version in pairwise([None, *entry.releases]):
            faults = [
                fault
                for fault in changes.known_faults()
                if fault.package == package and fault.kind != "change" and fault.is_in(version)
            ]
            wrong = [" ".join([f"- {fault.summary}", *(f"<{url}>" for url in fault.threads)]) for fault in faults]
            old, new = Lock({package: before} if before else {}), Lock({package: version})
            report = (
                changes.text(changes.compare_locks(old, new), old, new, WIDTH)
                if before
                else "This is the oldest release that was examined."
            )
            lines = [f"# {package} {version}", "Known to train wrongly:", "\n".join(wrong or ["- nothing"])]
            yield f"{package}-{version}", "\n\n".join([*lines, f"```text\n{report}\n```"])


ABOUT_FAULTS = """# Faults of each DeepSpeed release

Each table lists the known faults of a release that make a training wrong without an error. The faults that `zero-study
conformance` finds come first. The same list for programs, in the OSV format, is
[deepspeed-faults.json](deepspeed-faults.json).

- **With default AdamW** says how far the weights moved after 1, 5 and 20 steps, relative to a right training (1.00), in
  the release in parentheses, first for a small model and then for a larger one (see *Known faults of releases*). A
  fault is *nearly hidden* if this is within 10 % of the right distance after each step. An empty field means that we
  did not measure it.
- **Shown by** is a program in this repository. *Never reproduced here* means that we only read about the fault.
  *No program* means that this repository has none, and that most of these faults are known from their threads.
"""


def faults_of_deepspeed() -> str:
    """Return the page with a table of known faults for each examined release of DeepSpeed."""
    effects = json.loads(EFFECTS.read_text(encoding="utf-8"))["faults"] if EFFECTS.is_file() else {}
    parts = [ABOUT_FAULTS]
    for version in reversed(changes.index().packages["deepspeed"].releases):
        found = [fault for fault in _faults_of_deepspeed() if fault.is_in(version)]
        rows = []
        for fault in sorted(found, key=lambda fault: not fault.engines):
            who, _, what = fault.summary.partition(": ")
            threads = " ".join(f"<{url}>" for url in fault.threads)
            row = [who, f"{what} {threads}".strip(), _effect(effects, fault.id), _shown_by(fault, version)]
            rows.append(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |")
        head = "| who is affected | what is wrong | with default AdamW | shown by |\n| --- | --- | --- | --- |"
        parts.append("\n".join([f"## DeepSpeed {version}\n", head, *rows]))
    return "\n\n".join(parts) + "\n"


def _faults_of_deepspeed() -> list[changes.Change]:
    return [
        replace(fault, how="there")
        for fault in changes.known_faults()
        if (fault.package, fault.kind) == ("deepspeed", "fault")
    ]


def _effect(effects: Mapping[str, Any], name: str) -> str:
    """Return the measured effect of a fault with the default AdamW, by the longest name in the record that fits it."""
    entry = effects.get(max((key for key in effects if name.startswith(key)), key=len, default=""))
    given = [entry[setting]["moved"] for setting in ("adamw", "adamw_large")] if entry else []
    of_models = [moved for moved in given if isinstance(moved, dict)]  # a text says why there is none
    if not of_models:
        return ""
    scales = [scale for each in of_models for scale in each.values()]
    is_hidden = is_nearly_hidden(scales)
    words = "; ".join(
        ", ".join("not a number" if moved[step] is None else f"{moved[step]:.2f}" for step in ("1", "5", "20"))
        for moved in of_models
    )
    return f"{words} ({entry['release']}){', *nearly hidden*' if is_hidden else ''}"


def _shown_by(fault: changes.Change, version: str) -> str:
    if fault.program:
        return f"`{fault.program}`"
    if fault.engines:
        cell = faults.cell(fault, fault.engines[0], fault.precisions[0])
        return f"`zero-study conformance --release deepspeed=={version} --only {cell}`"
    return "*never reproduced here*" if fault.evidence == "read" else "*no program*"


def llms(guides: str) -> str:
    """Return llms.txt, the list of pages for language models (https://llmstxt.org), from the tables of docs/README.md.

    The skill for agents follows the list. The links are relative, and lead to the pages of the site.
    """
    lines = [f"# zero-study\n\n> {guides.split(chr(10) * 2)[1]}\n"]
    for line in guides.splitlines():
        if line.startswith("## "):
            lines.append(f"\n{line}\n")
        elif row := ROW.fullmatch(line):
            place = os.path.normpath(Path("docs") / row["to"]).removesuffix("README.md").removesuffix(".md")
            lines.append(f"- [{row['title']}]({place.rstrip('/')}/): {row['about']}")
    return "\n".join(lines) + "\n\n" + "\n\n".join(skills.texts()) + "\n"


def main() -> None:
    """Write all pages, after removing the earlier ones."""
    shutil.rmtree(PAGES, ignore_errors=True)
    schemas.main()
    pages = sources()
    made = dict(only_on_the_site())
    places = {path: place for place, path in pages.items()} | {ROOT / "reports": "reports/README.md"}
    places |= {ROOT / place: place for place in made}
    for place, text in made.items():
        (PAGES / place).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / place).write_text(LOOK + linked(text, ROOT / place, place, places), encoding="utf-8")
    for place, source in pages.items():
        target = PAGES / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".ipynb":
            text = notebook(source, target)
        else:
            text = PICTURE.sub(with_switch, docs_tables.filled(place, source.read_text(encoding="utf-8")))
            text = with_links_to_schemas(text) if place == "docs/json.md" else text
        target.write_text(LOOK + linked(text, source, place, places), encoding="utf-8")
    for path in pictures():
        target = PAGES / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    reference = PAGES / "reference"
    (reference / "releases").mkdir(parents=True)
    names = dict(releases())
    for name, text in names.items():
        (reference / "releases" / f"{name}.md").write_text(text, encoding="utf-8")
    listed = "\n".join(f"- [{name.replace('-', ' ')}](releases/{name}.md)" for name in names)
    (reference / "releases.md").write_text(f"# Releases\n\n{listed}", encoding="utf-8")
    (reference / "deepspeed-faults.md").write_text(faults_of_deepspeed(), encoding="utf-8")
    listed_faults = {"vulns": [fault.as_osv() for fault in _faults_of_deepspeed()]}
    (reference / "deepspeed-faults.json").write_text(json.dumps(listed_faults, indent=1), encoding="utf-8")
    (reference / "commands.md").write_text("\n".join(commands()), encoding="utf-8")
    web_page.write(PAGES / "docs" / "web")
    (PAGES / "llms.txt").write_text(llms(pages["docs/README.md"].read_text(encoding="utf-8")), encoding="utf-8")
    (reference / "record.schema.json").write_text(json.dumps(Record.model_json_schema(), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
