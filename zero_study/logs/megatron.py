"""Read the golden values of Megatron-LM's tests: a JSON file with the values of each metric by step.

Since 2025, the values of a metric are an object with the step as the key. Before, they were a list.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from zero_study.errors import Refusal
from zero_study.logs import json_parts
from zero_study.logs.columns import Meaning, Rows, as_number
from zero_study.logs.draft import Draft

KNOWN = {
    "iteration-time": Meaning("seconds_per_step"),
    "mem-allocated-bytes": Meaning("allocated_bytes"),
    "mem-max-allocated-bytes": Meaning("peak_allocated_bytes"),
    "lm loss validation": Meaning("evaluation_loss", "evaluation"),
    "lm loss validation ppl": Meaning("lm loss validation ppl", "evaluation"),
}
_BEGIN = re.compile(r'\{\s*"[^"]+"\s*:\s*\{\s*"(?:start_step|end_step|step_interval)"')
_DIGITS = re.compile("[0-9]{1,15}")
MOST_VALUES = 2_000_000


def is_begin(text: str) -> bool:
    """Return whether a JSON document begins like golden values of Megatron-LM."""
    return _BEGIN.match(text) is not None


def read(path: Path) -> list[Draft]:
    """Return the run in a file with golden values of Megatron-LM."""
    by_step: dict[int, list[tuple[str, object]]] = {}
    totals: list[tuple[str, Any]] = []
    rows, num_values = Rows(KNOWN), 0
    for part in json_parts.parts(path):
        name = part.key or ""
        if isinstance(part.value, dict) and "values" in part.value:
            values = _values(part.value)
            num_values += len(values)
            if num_values > MOST_VALUES:
                raise Refusal(f"it has more than {MOST_VALUES:,} values, which no file of golden values has")
            for step, value in values:
                by_step.setdefault(step, []).append((name, value))
            if not values:
                rows.runs.current.not_read.add(f"the values of {name} were left out, because they have no steps")
        elif not part.is_element:
            totals.append((name, part.value))
    if not by_step:
        raise Refusal("it has no metric with values by step")
    for step in sorted(by_step):
        rows.add([("step", step), *by_step[step]], f"step {step:,}")
    drafts = rows.finish()
    for draft in drafts:
        draft.state("program", "Megatron-LM")
        for name, value in totals:
            draft.note(name, value)
    return drafts


def _values(metric: dict[str, Any]) -> list[tuple[int, object]]:
    """Return the steps and the values of a metric. Empty if the values are damaged."""
    values = metric["values"]
    if isinstance(values, dict):
        pairs = [(int(step), value) for step, value in values.items() if _DIGITS.fullmatch(step)]
        return pairs if len(pairs) == len(values) else []
    first, interval = as_number(metric.get("start_step")), as_number(metric.get("step_interval"))
    are_numbers = isinstance(values, list) and all(as_number(value) is not None for value in values)
    if not are_numbers or not isinstance(first, int) or not isinstance(interval, int) or interval < 1:
        return []
    return [(first + place * interval, value) for place, value in enumerate(values)]
