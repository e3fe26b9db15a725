"""Gathers the site's pages into build/pages: README, guides, executed notebooks, reference made from the code.

python tools/pages.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
from nbconvert import MarkdownExporter

from study import cli
from study.records.schema import Record
from study.report import colab

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<to>[^)#\s:]*)(?P<anchor>#[^)\s]*)?\)")

# README's picture is the reader's system's; the site has a switch of its own, and shows the one that goes with it.
PICTURE = re.compile(
    r'<picture>.*?srcset="(?P<dark>[^"]+)".*?src="(?P<light>[^"]+)" alt="(?P<alt>[^"]+)".*?</picture>', re.DOTALL
)


def sources() -> dict[str, Path]:
    """Every file of the project that is a page, by its place in the site; notebooks become Markdown."""
    found = {"index.md": ROOT / "README.md"}
    for folder in ("docs", "reports"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".md", ".ipynb") and "records" not in path.parts:
                found[str(path.relative_to(ROOT).with_suffix(".md"))] = path
    return found


def linked(text: str, source: Path, place: str, places: dict[Path, str]) -> str:
    """A page's text with links to pages of the site, or to where the project is published; else without a link."""
    published = colab.repository()

    def link(found: re.Match[str]) -> str:
        to, anchor = found["to"], found["anchor"] or ""
        if not to:
            return found[0]
        target = Path(os.path.normpath(source.parent / to))
        if target in places:
            return f"[{found['text']}]({os.path.relpath(places[target], Path(place).parent)}{anchor})"
        if published and target.exists():
            return f"[{found['text']}]({published}/blob/main/{target.relative_to(ROOT)})"
        return found["text"]

    parts = re.split(r"(^ *```.*?^ *```|`[^`\n]+`)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if number % 2 else LINK.sub(link, part) for number, part in enumerate(parts))


def commands() -> Iterator[str]:
    """The reference of commands, as click has it."""
    yield "# Commands\n"
    top = click.Context(cli.zero_study, info_name="zero-study")
    for name in cli.zero_study.list_commands(top):
        command = cli.zero_study.get_command(top, name)
        if command is not None and not command.hidden:
            with click.Context(command, info_name=f"zero-study {name}", max_content_width=100) as context:
                yield f"## {name}\n\n```text\n{command.get_help(context)}\n```\n"


def main() -> None:
    """Gather all pages anew."""
    shutil.rmtree(PAGES, ignore_errors=True)
    exporter = MarkdownExporter()  # type: ignore[no-untyped-call]
    found = sources()
    places = {path: place for place, path in found.items()} | {ROOT / "reports": "reports/README.md"}
    for place, source in found.items():
        target = PAGES / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".ipynb":
            text, resources = exporter.from_filename(str(source), {"output_files_dir": f"{target.stem}_files"})
            for name, content in resources["outputs"].items():
                (target.parent / name).parent.mkdir(exist_ok=True)
                (target.parent / name).write_bytes(content)
            text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
            scrolls = r'<div style="overflow-x: auto">\g<0></div>'  # a table that is wider than a phone
            text = re.sub(r"<table.*?</table>", scrolls, text, flags=re.DOTALL)
        else:
            both = r"![\g<alt>](\g<light>#only-light)\n![\g<alt>](\g<dark>#only-dark)"
            text = PICTURE.sub(both, source.read_text(encoding="utf-8"))
        target.write_text(linked(text, source, place, places), encoding="utf-8")
    for path in (ROOT / "reports").glob("*.svg"):
        shutil.copy(path, PAGES / "reports")
    reference = PAGES / "reference"
    reference.mkdir()
    (reference / "commands.md").write_text("\n".join(commands()), encoding="utf-8")
    (reference / "record.schema.json").write_text(json.dumps(Record.model_json_schema(), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
