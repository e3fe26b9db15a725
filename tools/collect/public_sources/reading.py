"""Read one log of a checkout, and complete what it states by what the files beside it state."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from public_sources.checkout import Checkout
from zero_study.errors import Refusal
from zero_study.logs import imported
from zero_study.public_runs.quantities import values
from zero_study.public_runs.schema import Ending, PublicRun, Series, Setting
from zero_study.version import __version__

# What a description of the machine or a folder names better than the log, in which submitters name themselves freely.
BESIDE_THE_LOG = {"benchmark", "submitter", "system"}


def read_run(checkout: Checkout, path: str, name: str, **stated: Any) -> PublicRun:
    """Return the run of a log that has exactly one.

    `stated` has fields of the setting that files beside the log state. What the log itself states is kept, except for
    `BESIDE_THE_LOG`. Other facts are added to `Setting.other`.
    """
    content = checkout.read(path)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, PurePosixPath(path).name)
        file.write_bytes(content)
        ((run, _),) = imported.read([file])
    return run.model_copy(
        update={"name": name, "source": checkout.source(path, content), "setting": completed(run.setting, stated)}
    )


def read_if_possible(checkout: Checkout, path: str, name: str, **stated: Any) -> PublicRun | None:
    """Return the run of a log. None if it cannot be read, which is noted in `Checkout.left_out`."""
    try:
        return read_run(checkout, path, name, **stated)
    except Refusal as refusal:
        checkout.left_out.append(f"{path}: {str(refusal).partition(': ')[2]}")
        return None


def completed(setting: Setting, stated: dict[str, Any]) -> Setting:
    """Return a setting with further facts. Facts that the setting has already are kept."""
    own = setting.model_dump(exclude_defaults=True, exclude=BESIDE_THE_LOG & stated.keys())
    known = {name: value for name, value in stated.items() if name in Setting.model_fields and name != "versions"}
    other = {name: value for name, value in stated.items() if name not in Setting.model_fields}
    versions = stated.get("versions", {}) | setting.versions
    return Setting.model_validate(known | own | {"other": other | setting.other, "versions": versions})


def thinned(run: PublicRun, every: int) -> PublicRun:
    """Return a run of whose training steps every n-th and the last one are kept."""
    last = -1 if run.training is None else len(run.training) - 1
    return _with_rows(run, [index for index in range(last + 1) if (index + 1) % every == 0 or index == last])


def with_few_steps(run: PublicRun, most: int) -> PublicRun:
    """Return a run of which at most `most` training steps are kept, beside the first and the last one.

    They are the multiples of a round number, so that runs of different lengths have steps in common.
    """
    steps = values(run.training, "step")
    if len(steps) <= most or None in steps:
        return run
    rounds = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    every = next(each for each in rounds if sum(step is not None and step % each == 0 for step in steps) <= most)
    ends = {0, len(steps) - 1}
    return _with_rows(run, [n for n, step in enumerate(steps) if n in ends or (step is not None and step % every == 0)])


def _with_rows(run: PublicRun, kept: list[int]) -> PublicRun:
    if run.training is None:
        return run
    columns = {name: [column[index] for index in kept] for name, column in run.training.columns.items()}
    positions = {old: new for new, old in enumerate(kept)}
    not_finite = {
        name: [positions[index] for index in indices if index in positions]
        for name, indices in run.training.not_finite.items()
    }
    return run.model_copy(update={"training": Series(columns=columns, not_finite=not_finite)})


def without(run: PublicRun, columns: Iterable[str]) -> PublicRun:
    """Return a run without some columns of its training steps."""
    if run.training is None:
        return run
    kept = {name: column for name, column in run.training.columns.items() if name not in columns}
    not_finite = {name: places for name, places in run.training.not_finite.items() if name in kept}
    return run.model_copy(update={"training": Series(columns=kept, not_finite=not_finite)})


def of_totals(
    checkout: Checkout, path: str, name: str, log_format: str, totals: Mapping[str, float | None], *,
    lines: list[int] | None = None, ending: Ending = "unknown", marks: Sequence[str] = (), **stated: Any
) -> PublicRun:  # fmt: skip
    """Return a run of which a file states numbers of the whole training only. `stated` is as for `read_run`.

    `lines` are the first and the last line in a file that has several runs. Totals that are None are left out.
    """
    source = checkout.source(path, checkout.read(path)).model_copy(update={"lines": lines})
    return PublicRun(
        made_by=f"zero-study {__version__}",
        name=name,
        log_format=log_format,
        source=source,
        setting=completed(Setting(), stated),
        ending=ending,
        marks=list(marks),
        totals={name: value for name, value in totals.items() if value is not None},
    )


def numbers_in(text: str, pattern: re.Pattern[str]) -> list[float]:
    """Return the numbers in the groups of a pattern, where it first matches a text. Raises Refusal if it does not."""
    match = pattern.search(text)
    if match is None:
        raise Refusal(f"a log lacks {pattern.pattern!r}")
    return [float(group) for group in match.groups()]


def line_of(text: str, match: re.Match[str]) -> list[int]:
    """Return the first and the last line of a match in a text."""
    first = text[: match.start()].count("\n") + 1
    return [first, first + match[0].rstrip("\n").count("\n")]


def number_in(cell: str) -> float:
    """Return the first number in a cell of a table, such as "~43 samples/s" or "1,082"."""
    match = re.search(r"\d[\d,]*(?:\.\d+)?", cell)
    if match is None:
        raise Refusal(f"a table has a cell without a number: {cell!r}")
    return float(match[0].replace(",", ""))
