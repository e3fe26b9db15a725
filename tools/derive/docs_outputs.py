"""Write the outputs of commands into README and the guides, so that a page shows what its commands really print.

    python tools/derive/docs_outputs.py                    # every output that a page can have on any machine
    python tools/derive/docs_outputs.py docs/prove.md      # only those of one page
    python tools/derive/docs_outputs.py --runs docs/prove.md   # also of training runs, which differ by machine

A block of commands (`sh`) that is followed by one of these comments and a `text` block is such a place:

    <!-- output -->                the same on every machine: the fast tests compare it with what the commands print
    <!-- output of a run -->       has times or memory of one machine: the slow tests compare it without its numbers
    <!-- output, lines 1-12 -->    only these lines of the output; "..." takes the place of the others

The commands run in a copy of `docs/examples`, in a terminal of 80 columns. The folders `accelerate_configs`, `reports`
and `study` lie beside the examples, as in a clone. Standard error is shown too. Lines of progress are left out,
because a slower machine prints more of them: "10 s, step 3, loss 0.67", lines that end with " ...", the bars of tqdm
and DeepSpeed's notes with a time stamp.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
BESIDE_THE_EXAMPLES = ("accelerate_configs", "reports", "study", "zero_study")
COLUMNS = 80
PATTERN = re.compile(
    r"^```sh\n(?P<commands>(?:(?!```).*\n)+)```\n\n"
    r"(?P<comment><!-- output(?P<run> of a run)?(?:, lines (?P<first>\d+)-(?P<last>\d+))? -->)\n\n?"
    r"```text\n(?P<output>(?:(?!```).*\n)*)```$",
    re.MULTILINE,
)


PROGRESS = re.compile(
    r"^(\[\d+/\d+\] \S+:)? *\d+ s, (starting|step \d+)|^\S.* \.\.\.$|^\s*\d+%\||^\[\d{4}-\d\d-\d\d .*\] \[\w+\]"
)


class Place(NamedTuple):
    """A block of commands in a page, and the part of their output that the page shows."""

    page: Path
    commands: str
    shown: str
    is_run: bool
    first: int
    last: int | None

    @property
    def name(self) -> str:
        """The page and the first command, for messages and tests."""
        return f"{self.page.name}: {self.commands.splitlines()[0]}"


def places(page: Path) -> Iterator[Place]:
    """Yield the places of a page, in order."""
    for match in PATTERN.finditer(page.read_text(encoding="utf-8")):
        yield _place(page, match)


def _place(page: Path, match: re.Match[str]) -> Place:
    lines = (int(match["first"] or 1), int(match["last"]) if match["last"] else None)
    return Place(page, match["commands"], match["output"], bool(match["run"]), *lines)


def pages() -> list[Path]:
    """List README and every guide."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def printed(place: Place) -> str:
    """Run the commands of a place in a copy of the examples; return the part of their output that the page shows."""
    with tempfile.TemporaryDirectory(prefix="zero-study-docs-") as name:
        folder = Path(name) / "examples"
        if EXAMPLES.is_dir():
            shutil.copytree(EXAMPLES, folder)
        folder.mkdir(exist_ok=True)
        for beside in BESIDE_THE_EXAMPLES:
            (folder / beside).symlink_to(ROOT / beside)
        # As after `source .venv/bin/activate`. The shell reads its commands before it starts them.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        quiet = {
            "PATH": path,
            "COLUMNS": str(COLUMNS),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # without it, torchrun prints a warning
            "NO_COLOR": "1",
            "LC_ALL": "C.UTF-8",
        }
        done = subprocess.run(
            ["bash", "-c", place.commands], cwd=folder, env={**os.environ, **quiet},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        lines = [line.rstrip() for line in done.stdout.replace(f"{folder}/", "").splitlines()]
    return _part([line for line in lines if not PROGRESS.match(line)], place.first, place.last)


def _part(lines: list[str], first: int, last: int | None) -> str:
    part = lines[first - 1 : last]
    before = ["..."] if first > 1 else []
    after = ["..."] if last is not None and last < len(lines) else []
    return "".join(f"{line}\n" for line in [*before, *part, *after])


def without_numbers(output: str) -> list[str]:
    """Return the words of an output without its numbers: what it has in common with another machine's.

    The place of a line break and the width of a table's column are left out, because they depend on the length of the
    numbers. Seconds and minutes count as the same unit, because a slower machine prints a duration in minutes. The name
    of the processor is left out.
    """
    text = re.sub(r"-{2,}", "--", re.sub(r"[-+]?\d[\d.,:e+-]*", "#", output))
    text = re.sub(r"\bon (?:(?!\bon\b).)+?, # cores", "on # cores", " ".join(text.split()))
    return re.sub(r"# (s|min)\b", "# s", text).split()


def update(page: Path, with_runs: bool) -> int:
    """Write the outputs of a page anew; return how many places changed."""
    text = page.read_text(encoding="utf-8")
    num_changed = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal num_changed
        place = _place(page, match)
        if place.is_run and not with_runs:
            return match[0]
        output = printed(place)
        num_changed += output != place.shown
        return f"```sh\n{place.commands}```\n\n{match['comment']}\n\n```text\n{output}```"

    updated = PATTERN.sub(replace, text)
    if updated != text:
        page.write_text(updated, encoding="utf-8")
    return num_changed


@click.command()
@click.option("--runs", "with_runs", is_flag=True, help="Also write outputs that differ between machines.")
@click.argument("chosen", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(chosen: tuple[Path, ...], with_runs: bool) -> None:
    """Run the commands of README and the guides, and write their outputs into the pages."""
    for page in [path.resolve() for path in chosen] or pages():
        if num_changed := update(page, with_runs):
            print(f"{page}: {num_changed} outputs written", flush=True)


if __name__ == "__main__":
    main()
