"""How do the runs of a study lie in few files? Each has a line in records.jsonl, steps.jsonl and outcomes.jsonl.

A line begins with its run's id and holds what the file of the run's directory held, and lines are in the order of ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study import files
from study.errors import Refusal

RECORDS, STEPS, OUTCOMES = "records.jsonl", "steps.jsonl", "outcomes.jsonl"
NAMES = (STEPS, OUTCOMES, RECORDS)  # as they are written: a run's record last, as the run itself does

_START = re.compile(rb'\{"run_id": "([ !#-\[\]-~]{1,256})", ')  # what a name may be is for who reads the line


def read(path: Path) -> dict[str, bytes]:
    """Read a file's lines by their runs' ids; there are none where the file is not there.

    What follows the id is not looked at. Raises Refusal for a line without an id, and for two of one run.
    """
    if not path.exists():
        return {}
    with files.reading(path, "lines of runs"):
        text = files.read_whole(path).removesuffix(b"\n")
    lines: dict[str, bytes] = {}
    for number, line in enumerate(text.split(b"\n") if text else (), 1):
        start = _START.match(line)
        if start is None:
            raise Refusal(f"{path}: line {number} does not begin with a run_id; restore it, or collect its run again")
        run_id = start[1].decode()
        if run_id in lines:
            raise Refusal(f"{path}: line {number} is the second one of {run_id}; take the one not wanted away")
        lines[run_id] = line
    return lines


def join(lines: Mapping[str, bytes]) -> bytes:
    """What a file of these lines holds."""
    return b"".join(lines[run_id] + b"\n" for run_id in sorted(lines, key=order))


def order(run_id: str) -> str:
    """By what runs are sorted: what repeats or varies a run (NAME-repeat1) comes before it (NAME).

    So were the files of single runs listed, and where `compare` takes the first of equals, it takes the same one still.
    """
    return f"{run_id}."


def line_of(content: dict[str, Any]) -> bytes:
    """The line of a record or an outcome, of which every key is kept."""
    return json.dumps({"run_id": content["run_id"], **content}).encode()


def line_of_steps(run_id: str, steps: bytes) -> bytes:
    """The line of a run's steps. Raises Refusal where the same bytes could not be had from it."""
    line = b"%s%s]}" % (_start_of_steps(run_id), b", ".join(steps.split(b"\n")[:-1]))
    if steps_in(run_id, line) != steps:
        raise Refusal(f"{run_id}: its steps.jsonl is not as a run writes it, a step a line; run it again")
    return line


def steps_in(run_id: str, line: bytes) -> bytes:
    """What the steps.jsonl of the run held, byte for byte: steps are flat, so that their bounds are plain to see."""
    steps = line.removeprefix(_start_of_steps(run_id)).removesuffix(b"]}")
    return steps.replace(b"}, {", b"}\n{") + b"\n" if steps else b""


def _start_of_steps(run_id: str) -> bytes:
    return f'{{"run_id": "{run_id}", "steps": ['.encode()
