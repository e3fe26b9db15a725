"""Freezes what a restructuring must not change, and lists cell by cell what differs afterwards.

    python tools/golden.py freeze FOLDER                       every quick part: five minutes of one core
    python tools/golden.py freeze FOLDER --part conformance    this part only; may be repeated
    python tools/golden.py compare FOLDER                      run each frozen command again, list what differs
    python tools/golden.py compare FOLDER --with OTHER         two frozen folders, without running anything
    python tools/golden.py compare FOLDER --part doctor --all  every cell instead of a line for each kind of change
    python tools/golden.py trainings FOLDER                    the same as freeze FOLDER --part trainings

A case is one command line, `python -m study ...` of the tree in the current folder, and the cells of what it printed or
wrote. `compare` runs the command lines that it finds frozen: a command, option or view that is not there any more is
reported as gone. The slow parts, conformance (3 min) and trainings (15 min), run where they are named.
Exit status: 0 nothing differs; 1 something does."""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

SLOW = ("conformance", "trainings")
ABSENT = "(no such cell)"
SHOWN = 12  # kinds of change that are listed for a part without --all

# Two runs of one tree differ in these, by the part whose cells they are: the key of a cell holds one of them.
UNSTEADY = {
    "trainings": r"seconds|_at\b|(steps|record|config|study)_sha256|output_dir|command|launcher|/load/|/code/|/timing/"
    r"|/machine/|position|stderr_tail|(resident|unreleased|process|process_average)_bytes|per_second|swap_(folder|bytes)",
    "conformance": r"seconds|examined_at",
}
# A model on a box: every family and card, one GPU and many, offload, long sequences, and what is left to the planner.
ADVICE = """
bert-base t4 1                                         | bert-large a10g 1 --dropout --attention eager
gpt2 l4 1 --sequence-length 512                        | gpt2-xl v100-16gb 1
gpt2-xl a100-40gb 8                                    | gpt2-large v100-32gb 4 --optimizer-kernel foreach
gpt-neo-2.7b a100-40gb 1 --strategy zero3_cpu_offload  | gpt-j-6b a100-80gb 8 --sequence-length 2048
mpt-7b h100-sxm 8 --sequence-length 8192               | mpt-30b h100-sxm 32 --activation-checkpointing full
llama-2-7b a100-80gb 8 --micro-batch-size 1            | llama-2-13b a100-80gb 2 --strategy zero2_cpu_offload
llama-2-70b h200 64 --network-gbps 400                 | llama-3-8b h100-pcie 4 --precision bf16
llama-3-70b b200 16 --gpus-per-node 8                  | mistral-7b a10g 8 --compile
qwen2.5-1.5b l4 2 --optimizer adamw-8bit               | qwen2.5-7b h200 1 --strategy zero3_nvme_offload
gemma2-2b a100-80gb 16 --optimizer adafactor           | gemma2-27b h100-sxm 16 --kernels transformers
llama-2-7b a100-80gb -                                 | - h100-sxm 8
"""
NAMING = ("id", "run_id", "strategy", "key", "name", "kind", "step")  # fields that name an item of a list


@dataclass(frozen=True)
class Case:
    """One command line, where it is run, and how what it says is read."""

    part: str
    name: str
    words: Sequence[str]
    reader: str
    folder: str = ""  # within FOLDER/inputs; the current folder where it is empty

    @property
    def file(self) -> Path:
        return Path(self.part) / (re.sub(r"[^\w.+-]+", "_", self.name) + ".json")


def cases(folder: Path) -> Iterator[Case]:
    """Every case of the tree in the current folder; writes the files that doctor is asked into FOLDER/inputs."""
    views = re.search(r"--view \[([\w|-]+)\]", _study(["compare", "--help"], Path()).stdout)
    for records in sorted(Path("reports").glob("*/records/*")):
        for view in views[1].split("|") if views else ():
            yield Case("compare", f"{records.name} {view}", ("compare", str(records), "--view", view), "markdown")
    for line in re.split(r"[|\n]", ADVICE.strip()):
        model, gpu, gpus, *options = line.split()
        named = [word for asked in (("--model", model), ("--gpus", gpus)) if asked[1] != "-" for word in asked]
        yield Case("advise", line.strip(), ("advise", "--gpu", gpu, *named, *options, "--json"), "json")
    for study in sorted(path.stem for path in Path("study").rglob("studies/*.yaml")):
        yield Case("plan", study, ("plan", study, "--runs-dir", "{out}"), "plan")
        for gpu, gpus in (("a100-40gb", "1"), ("h100-sxm", "8")):
            box = ("--gpu", gpu, "--gpus", gpus, "--output", "{out}")
            yield Case("predict", f"{study} {gpu} {gpus}", ("predict", study, *box), "json")
    yield Case("verdicts", "sentences", ("claims", "--json"), "json")
    yield Case("verdicts", "decided again", ("claims", "--check"), "markdown")
    for study in ("learning-bert", "learning-gpt", "learning-bert-pilot", "learning-gpt-pilot"):
        yield Case("verdicts", study, ("verdict", study, f"reports/cpu/records/{study}"), "markdown")
    yield from _doctors(folder / "inputs")
    yield from _pages()
    cells = ("conformance", "--ranks", "2", "--only", "accumulation-2", "--output", "{out}/cells.json")
    yield Case("conformance", "two ranks", cells, "json")
    yield Case("trainings", "smoke", ("run", "smoke", "--runs-dir", "{out}"), "json")


def _doctors(inputs: Path) -> Iterator[Case]:
    """Every file that the study launches, and every one that the tests give doctor."""
    for path in sorted(Path("accelerate_configs").rglob("*.[yj]*")):
        yield Case("doctor", f"study {path}", ("doctor", str(path), "--json"), "json")
    tested = Path("tests/real_files")
    beside = inputs / "real" / "deepspeed_config_templates"  # where one of the accelerate files has its JSON
    for made in (inputs / "real" / "files", beside):
        made.mkdir(parents=True, exist_ok=True)
    shutil.copy(tested / "accelerate_zero1.json", beside / "zero_stage1_config.json")
    for row in yaml.safe_load((tested / "index.yaml").read_text()):
        name = row["file"]
        shutil.copy(tested / name, inputs / "real" / "files")
        mended = "{out}/mended" + Path(name).suffix
        yield Case("doctor", name, ("doctor", name, "--json", "--fix", mended), "json", "real/files")
    for name, trap in yaml.safe_load((tested / "traps.yaml").read_text()).items():
        traps = inputs / "traps" / name
        traps.mkdir(parents=True, exist_ok=True)
        asked = "file.yaml" if "yaml" in trap else "file.json"
        for place, content in ((asked, trap.get("yaml", trap.get("json"))), ("named.json", trap.get("json"))):
            (traps / place).write_text(json.dumps(content))  # which is YAML too
        yield Case("doctor", f"trap {name}", ("doctor", asked, "--json"), "json", f"traps/{name}")


def _pages() -> Iterator[Case]:
    """The commands that make the committed pages, as reports/README.md has them, into a folder of their own."""
    block = re.search(r"```sh\n(zero-study report.*?)```", Path("reports/README.md").read_text(), re.DOTALL)
    for line in block[1].replace("\\\n", " ").splitlines() if block else ():
        words = line.partition("#")[0].split()[1:]
        name = words[1] if len(words) > 1 else "site"
        output = "{out}/reports" + ("" if name == "site" else f"/{name}")
        yield Case("pages", name, (*words, "--output", output), "pages")


def examine(case: Case, folder: Path) -> dict[str, Any]:
    """Return the cells of one case, by key. What a run writes stays in FOLDER/scratch until it has ended by itself."""
    scratch = (folder / "scratch" / case.file.with_suffix("")).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    words = [word.replace("{out}", str(scratch)) for word in case.words]
    done = _study(words, (folder / "inputs" / case.folder).resolve() if case.folder else Path())
    cells: dict[str, Any] = {"exit status": done.returncode}
    said = (done.stderr.strip().splitlines() or [""])[-1].replace(str(scratch), "{out}")
    if done.returncode == 2 or "Traceback" in done.stderr:
        cells["gone" if re.search(r"no such (command|option)|is not one of", said) else "error"] = said
    else:
        out = done.stdout.replace(str(scratch), "{out}")
        unsteady = UNSTEADY.get(case.part, "(?!)")  # which nothing is
        try:
            cells |= {key: value for key, value in READERS[case.reader](out, scratch) if not re.search(unsteady, key)}
        except ValueError as error:
            cells["error"] = f"cannot be read: {error}"
    if done.returncode in (0, 1, 2):
        shutil.rmtree(scratch)
    return cells


def _study(words: Sequence[str], place: Path) -> subprocess.CompletedProcess[str]:
    """Run one command of the tree in the current folder, on the CPU."""
    of_tree = {} if place == Path() else {"PYTHONPATH": str(Path.cwd())}
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"} | of_tree
    command = [sys.executable, "-m", "study", *words]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)


Cells = Iterator[tuple[str, Any]]


def flat(value: Any, key: str = "") -> Cells:
    """Every leaf of a JSON value, by its path; an item of a list by what names it, else by its place."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, f"{key}/{name}")
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        seen: Counter[str] = Counter()
        for number, item in enumerate(value):
            names = [
                item[field] for field in NAMING if isinstance(item, dict) and isinstance(item.get(field), str | int)
            ]
            yield from flat(item, f"{key}/{_unique(str((names or [number])[0]), seen)}")
    else:
        yield key, value


def _unique(name: str, seen: Counter[str]) -> str:
    """The name, with a number from the second time on."""
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"


def numbers(text: str) -> list[str]:
    """Every number of a text, as it is printed."""
    return re.findall(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)", text)


def text(piece: str) -> str:
    """The text of a piece of HTML."""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", piece)).split())


def rows_of(header: list[str], rows: list[list[str]]) -> Cells:
    """Every cell of a table, by its row's leading cells, as many as tell the rows apart, and its column's head."""
    width = next((k for k in (1, 2, 3) if len({tuple(row[:k]) for row in rows}) == len(rows)), 1)
    seen: Counter[str] = Counter()
    for row in rows:
        label = _unique(" ".join(row[:width]), seen)
        for column, value in list(zip(header, row, strict=False))[1:]:
            yield f"{label}/{column}", value


def _markdown(out: str, scratch: Path) -> Cells:
    """The cells of every table, and of each section the numbers in what is no table."""
    headings: list[str] = []
    prose: dict[str, list[str]] = defaultdict(list)
    table: list[list[str]] = []
    for line in [*out.splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        where = "/".join(headings)
        yield from ((f"{where}/{key}", value) for key, value in (rows_of(table[0], table[2:]) if table else ()))
        table = []
        if found := re.match(r"(#+) (.*)", line):
            headings = [*headings[: len(found[1]) - 1], found[2]]
        else:
            prose[where] += numbers(line)
    yield from ((f"{where}/numbers in its text", " ".join(found)) for where, found in prose.items() if found)


def _plan(out: str, scratch: Path) -> Cells:
    """Of each run what becomes of it and why, and the numbers of the rest."""
    for line in out.splitlines():
        if found := re.match(r"\s*(\d+)\s+(\w+)\s+(\S+)\s*(.*)", line):
            yield from zip((f"{found[3]}/{key}" for key in ("place", "what", "why")), found.group(1, 2, 4), strict=True)


def _json(out: str, scratch: Path) -> Cells:
    """Every leaf of the JSON that was printed, and of every JSON and YAML that was written."""
    if re.match(r"[\[{]\s", out):
        yield from flat(json.loads(out))
    for path in sorted(path for path in scratch.rglob("*") if path.suffix in (".json", ".jsonl", ".yaml")):
        if path.suffix == ".jsonl":
            content = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            content = (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text())
        yield from flat(content, str(path.relative_to(scratch)))


def _pages_of(out: str, scratch: Path) -> Cells:
    """The numbers in the cells of every table of every page, under the heading above it."""
    for path in sorted(scratch.rglob("*.html")):
        heading = ""
        seen: Counter[str] = Counter()
        for piece in re.findall(r"<h[1-3]\b.*?</h[1-3]>|<table\b.*?</table>", path.read_text(), re.DOTALL):
            if not piece.startswith("<table"):
                heading = text(piece)
                continue
            cells = [re.findall(r"<t[hd]\b.*?</t[hd]>", row, re.DOTALL) for row in piece.split("<tr")[1:]]
            table = _unique(f"{path.relative_to(scratch)}/{heading}", seen)
            header, *rows = [[text(cell) for cell in row] for row in cells]
            yield from ((f"{table}/{key}", " ".join(numbers(cell))) for key, cell in rows_of(header, rows))


READERS = {"markdown": _markdown, "json": _json, "plan": _plan, "pages": _pages_of}


def freeze(folder: Path, parts: list[str]) -> None:
    """Run the cases of some parts and write each to a file of its own."""
    for case in cases(folder):
        if case.part in parts or (not parts and case.part not in SLOW):
            cells = examine(case, folder)
            path = folder / case.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(case) | {"cells": cells}, indent=0, sort_keys=True, ensure_ascii=False))
            print(f"{case.part}: {case.name}: {len(cells):,} cells", flush=True)


class Change(NamedTuple):
    """A cell that differs; ABSENT where there is none."""

    case: str
    key: str
    before: Any
    after: Any


def compare(folder: Path, other: Path | None, parts: list[str], show_all: bool) -> int:
    """Print what differs from a frozen folder; return the exit status."""
    differs = False
    frozen_parts = sorted({path.parent.name for path in folder.glob("*/*.json")})
    for part in [part for part in frozen_parts if (part in parts if parts else part not in SLOW or other)]:
        changes: list[Change] = []
        num_cells = 0
        for path in (paths := sorted((folder / part).glob("*.json"))):
            frozen = json.loads(path.read_text())
            before = frozen.pop("cells")
            case = Case(**frozen)
            if other is None:
                after = examine(case, folder)
            else:
                there = other / case.file
                after = json.loads(there.read_text())["cells"] if there.exists() else {"gone": "not frozen there"}
            keys = ["gone"] if "gone" in after else sorted(before.keys() | after.keys())
            both = [Change(case.name, key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys]
            changes += [change for change in both if change.before != change.after]
            num_cells += len(before)
        cells = f"{num_cells:,} cells differ, in {len({change.case for change in changes})} of {len(paths)} cases"
        print(f"{part}: {len(changes):,} of {cells}", *_lines(changes, show_all), sep="\n  ", flush=True)
        differs |= bool(changes)
    return int(differs)


def _lines(changes: list[Change], show_all: bool) -> Iterator[str]:
    """One line for each kind of change, cells whose keys end alike, the most frequent first, with an example."""
    kinds: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        there = " (no more)" if change.after == ABSENT else " (new)" if change.before == ABSENT else ""
        kinds[re.sub(r"\d+", "N", change.key.rpartition("/")[2]) + there].append(change)
    ordered = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    for kind, alike in ordered if show_all else ordered[:SHOWN]:
        yield f"{kind}: {len(alike):,} cells in {len({change.case for change in alike})} cases{_apart(alike)}"
        for change in alike if show_all else alike[:1]:
            yield f"    {change.case}: {change.key}: {str(change.before)[:90]} -> {str(change.after)[:90]}"
    if len(ordered) > SHOWN and not show_all:
        yield f"and {len(ordered) - SHOWN} other kinds; --all lists every cell"


def _apart(changes: list[Change]) -> str:
    """The largest relative difference, where all values are numbers."""
    pairs = [(change.before, change.after) for change in changes]
    if not all(isinstance(value, int | float) for pair in pairs for value in pair):
        return ""
    return f", at most {max(abs(b - a) / max(abs(a), abs(b)) for a, b in pairs):.2g} of the value apart"


def main() -> int:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("freeze", "trainings", "compare"))
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--part", action="append", default=[], help="only this part; may be repeated")
    parser.add_argument("--with", dest="other", type=Path, metavar="OTHER", help="a frozen folder to compare with")
    parser.add_argument("--all", action="store_true", help="list every cell that differs")
    asked = parser.parse_args()
    if asked.what == "compare":
        return compare(asked.folder, asked.other, asked.part, asked.all)
    freeze(asked.folder, ["trainings"] if asked.what == "trainings" else asked.part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
