"""Read one log of a checkout, and complete what it states by what the files beside it state."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from study.logs import imported

from public_sources.checkout import Checkout
from study.errors import Refusal
from study.public_runs.schema import PublicRun, Series, Setting

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
    if run.training is None:
        return run
    last = len(run.training) - 1
    kept = [index for index in range(last + 1) if (index + 1) % every == 0 or index == last]
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
