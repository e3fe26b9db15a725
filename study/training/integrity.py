"""Is what lies in a run's folder what this run wrote? Its steps and its configuration, tied to its record."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from study.errors import Failed


def tied(
    folder: Path, lines: list[dict[str, Any]], configuration: dict[str, Any] | None, is_result: bool
) -> dict[str, str | None]:
    """The digests by which a record names its steps and its configuration; None: not there.

    `lines` and `configuration` are what this run wrote. Raises Failed where the files of a result are others.
    """
    steps, config = _content(folder / "steps.jsonl"), _content(folder / "config.json")
    if is_result:
        _check(folder / "steps.jsonl", steps, lines)
        if configuration is not None:
            _check(folder / "config.json", config, [configuration])
        numbers = [line["step"] for line in lines]
        if numbers != list(range(1, len(lines) + 1)):
            raise Failed(f"{folder / 'steps.jsonl'}: its steps are not 1 to {len(lines)}, one after another")
    return {
        "steps_sha256": None if steps is None else hashlib.sha256(steps).hexdigest(),
        "config_sha256": None if config is None or configuration is None else hashlib.sha256(config).hexdigest(),
    }


def further_steps(folder: Path, num_known: int) -> list[dict[str, Any]]:
    """The steps that were written, whole, beyond those that are known."""
    lines = (_content(folder / "steps.jsonl") or b"").splitlines(keepends=True)[num_known:]
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def is_anothers(folder: Path, configuration: dict[str, Any] | None) -> bool:
    """Say whether another run has written its configuration over this run's; None: this one wrote none."""
    written: Any = None
    with suppress(ValueError):
        written = json.loads(_content(folder / "config.json") or b"null")
    if configuration is None or not isinstance(written, dict):
        return False
    return bool(written.get("writer") != configuration["writer"])


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _check(path: Path, content: bytes | None, written: list[Any]) -> None:
    """Raise Failed unless a file of one or more JSON values holds what was written."""
    if content is None:
        raise Failed(f"{path}: not there any more, though this run wrote it; something else has removed it")
    try:
        whole = [json.loads(content)] if path.suffix == ".json" else [json.loads(line) for line in content.splitlines()]
    except ValueError:
        whole = None
    if whole != written:
        raise Failed(f"{path}: not what this run wrote; something else has written into its folder")
