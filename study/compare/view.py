"""Make the frame that all pages of `zero-study compare` share: title, explanation, unfinished runs and command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from study.records import find as records
from study.records.find import RecordFile
from zero_study.files import relative_to_cwd
from zero_study.terminal import escape_markdown, markdown

T = TypeVar("T")


@dataclass(frozen=True)
class View:
    """A page that `zero-study compare --view` can print."""

    name: str  # the value of --view
    title: str
    explanation: str
    sections: Callable[[list[RecordFile]], list[str]]  # the lines below the explanation
    lists_unfinished: bool = True  # whether runs without a result are listed

    def page(self, folders: Sequence[Path]) -> str:
        """Return the page in Markdown for all records below the folders. Raises Refusal if there is no record."""
        files = records.find(folders)
        unfinished = files if self.lists_unfinished else ()
        return page(self.title, self.explanation, self.sections(files), f"--view {self.name}", folders, unfinished)


def page(
    title: str,
    explanation: str,
    lines: Iterable[str],
    option: str,
    folders: Sequence[Path],
    record_files: Iterable[RecordFile] = (),
) -> str:
    """Return a page of `zero-study compare` in Markdown: title, explanation, `lines`, unfinished runs and command.

    `option`: the option of `zero-study compare` that makes the page. `record_files`: records of which those without a
    result are listed.
    """
    name = f"compare {option}".rstrip() + " --markdown"
    folder_names = ", ".join(path.name for path in folders if path.name not in ("", "records"))
    head = f"# {title} ({folder_names})" if folder_names else f"# {title}"
    made_by = f"Made by `{command(name, folders)}`."
    return "\n".join([head, "", explanation, "", *lines, *not_ok(record_files), made_by])


def tables(
    items: Iterable[T],
    order: Callable[[T], Any],
    title: Callable[[T], str],
    head: Sequence[str],
    rows: Callable[[list[T]], Iterable[Sequence[Any]]],
) -> list[str]:
    """Return Markdown tables with titles, one for each group of items that have the same title.

    `order` is the key by which the items are sorted.
    """
    lines = []
    for name, members in groupby(sorted(items, key=order), key=title):
        lines += [name, "", *markdown(head, rows(list(members))), ""]
    return lines


def finished(record_files: Iterable[RecordFile]) -> list[RecordFile]:
    """Return the records of successful runs."""
    return [file for file in record_files if file.record.status == "ok"]


def not_ok(record_files: Iterable[RecordFile]) -> list[str]:
    """Return lines that list the runs that did not finish, so that no table drops them silently.

    The lines also list runs whose parts were trained by different code, on other processors, or with another number of
    threads.
    """
    all_records = [file.record for file in record_files]
    unfinished = [f"- {escape_markdown(r.run_id)}: {r.status}" for r in all_records if r.status != "ok"]
    mixed_code = [
        f"- {escape_markdown(r.run_id)}: {escape_markdown(r.mixed_code)}" for r in all_records if r.mixed_code
    ]
    mixed_processors = [
        f"- {escape_markdown(r.run_id)}: {escape_markdown(r.mixed_processors)}"
        for r in all_records
        if r.mixed_processors
    ]
    lines = []
    for heading, runs in (
        ("Runs without a result:", unfinished),
        ("Runs that were trained by several versions of the code (--resume-with-other-code):", mixed_code),
        ("Runs that continued with other threads or another processor:", mixed_processors),
    ):
        lines += ["", heading, "", *runs] if runs else []
    return lines


def command(name: str, folders: Sequence[Path]) -> str:
    """Return the command that makes a page of `zero-study compare`, with folders relative to the current folder."""
    return " ".join(["zero-study", name, *map(relative_to_cwd, folders)])
