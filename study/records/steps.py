"""Read the steps of a run from steps.jsonl, which has one line per optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from study.records.find import RecordFile
from zero_study import files
from zero_study.errors import Refusal

STEP_KEYS = {"step", "loss", "grad_norm", "learning_rate", "seconds", "tokens"}  # that every step has
AT_ONCE = 10_000  # lines that are parsed together
NUMBERS = {int, float, type(None)}


def steps_of(file: RecordFile) -> list[dict[str, float]]:
    """Read the steps of a record. Raises Refusal if their number or last loss contradicts the record."""
    record, steps = file.record, parse_steps(file.steps_where, file.steps or b"")
    last = steps[-1]["loss"] if steps else None
    if (len(steps), last) != (record.steps_done, record.final_loss):
        raise Refusal(
            f"{file.steps_where} has {len(steps)} steps and the last loss {last}, but {file.where} has "
            f"{record.steps_done} steps and the last loss {record.final_loss}. Restore the files, or repeat the run."
        )
    if record.status == "ok" and any(line["loss"] is None for line in steps):
        raise Refusal(
            f"{file.steps_where}: a loss is not a number, although the status in {file.where} is ok. Run it again"
        )
    return steps


def read_steps(path: Path) -> list[dict[str, float]]:
    """Read steps.jsonl from a run directory, or from the folder of a record.json, as `parse_steps` does."""
    path = (path if path.is_dir() else path.parent) / "steps.jsonl"
    with files.reading(path, "steps"):
        steps = files.read_whole(path)
    return parse_steps(path, steps)


def parse_steps(place: Path | str, steps: bytes) -> list[dict[str, float]]:
    """Parse the content of a steps.jsonl into one dictionary per step.

    Keys: step, loss, learning_rate, grad_norm, seconds, elapsed_seconds, data_wait_seconds, tokens, samples. `place`
    names the source in messages. Raises Refusal if a line is not the step with its number.
    """
    with files.reading(place, "steps"):
        lines = steps.decode().splitlines()
        parsed: list[dict[str, float]] = []
        for first in range(0, len(lines), AT_ONCE):
            parsed += _parse_lines(lines[first : first + AT_ONCE], first)
    return parsed


def _parse_lines(lines: Sequence[str], first: int) -> list[dict[str, float]]:
    """Parse the lines after the first `first` lines. Raises ValueError if a line is not the step with its number."""
    parsed: list[dict[str, float]] = files.parse_json(f"[{','.join(lines)}]")
    for number, line in enumerate(parsed, first + 1):
        if not isinstance(line, dict) or not line.keys() >= STEP_KEYS or line["step"] != number:
            raise ValueError(f"line {number} is not step {number}, with {', '.join(sorted(STEP_KEYS))}")
        if not {type(value) for value in line.values()} <= NUMBERS:
            raise ValueError(f"line {number} has a value that is not a number")
    if len(parsed) != len(lines):
        raise ValueError(f"{len(lines)} lines contain {len(parsed)} steps")
    return parsed
