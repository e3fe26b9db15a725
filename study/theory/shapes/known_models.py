"""Models known by name. Any other model is found by its config.json or by its id on the Hugging Face hub.

known_models.csv has shapes as the hub's config.json files have them, with their ids there. BERT: arXiv:1810.04805, and
its miniatures, arXiv:1908.08962. MPT: LLM Foundry's benchmark tables, whose numbers of parameters are those of a GPT-2
with biases, exactly; they have as many positions as the sequence has tokens, 2048 in most rows.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
from pathlib import Path
from typing import Any

from study.files import parse_json
from study.theory.shapes import hub
from study.theory.shapes.config_json import from_config
from study.theory.shapes.shape import ModelShape

COUNTS = ("layers", "hidden", "heads", "kv_heads", "feed_forward", "head_size", "vocabulary", "positions")
DEFAULT_LENGTH = 1024  # tokens of a sequence, where nobody says how many


def _read() -> dict[str, tuple[ModelShape, list[str]]]:
    """Read the table of known models, each with its ids on the hub."""
    with open(Path(__file__).with_name("known_models.csv"), encoding="utf-8", newline="") as file:
        return {line["name"]: (_shape_of(line), line["hub_ids"].split()) for line in csv.DictReader(file)}


def _shape_of(line: dict[str, str]) -> ModelShape:
    words: dict[str, Any] = {name: line[name] for name in ("name", "architecture", "activation", "head")}
    counts: dict[str, Any] = {name: int(line[name]) for name in COUNTS}
    return ModelShape(**words, **counts, tied=line["tied"] == "True")


_ROWS = _read()
KNOWN: dict[str, ModelShape] = {name: shape for name, (shape, _) in _ROWS.items()}
_BY_NAME = KNOWN | {hub_id.lower(): shape for shape, ids in _ROWS.values() for hub_id in ids}


LONGEST_PATH = 1024  # beyond what a file system takes, asking it is an error


def find_known(text: str) -> ModelShape | None:
    """Find a model by a known name or hub id, ignoring case, without reading a file or asking the hub."""
    return _BY_NAME.get(text.strip().lower())


def find(text: str) -> ModelShape:
    """Find a model by a known name or hub id, in any case, by a config.json or its folder, or on the hub.

    The hub is asked only for an id that is not known here, for five seconds at most. Raises ValueError with the remedy.
    """
    if shape := find_known(text):
        return shape
    return from_config(*read_config(text))


def find_for_length(text: str, sequence_length: int | None = None) -> tuple[ModelShape, int, list[str]]:
    """Find a model as `find` does; return it with the length of its sequences, and notes on how it is counted.

    `sequence_length`: in tokens; None: 1,024, or as many as the model has positions. A model with fewer positions than
    that is taken as if it had as many. Raises ValueError with the remedy.
    """
    shape = find(text)
    length = sequence_length or min(DEFAULT_LENGTH, shape.positions)
    if length <= shape.positions:
        return shape, length, list(shape.notes)
    note = f"{shape.name} has {shape.positions:,} positions: taken as if it had {length:,}"
    return dataclasses.replace(shape, positions=length), length, [*shape.notes, note]


def read_config(text: str) -> tuple[dict[str, Any], str]:
    """Read the config.json that a path or an id on the hub names; return it with where it was found.

    Raises ValueError with the remedy.
    """
    if not text.strip():
        raise ValueError("the name of the model is empty. Use a known name, a config.json, or a hub id (owner/name)")
    path = Path(text if len(text) < LONGEST_PATH else "\0")  # no file can have that name
    if (path / "config.json").is_file():
        return _from_file(path / "config.json")
    if text.endswith(".json") or path.is_file():
        return _from_file(path)
    if path.is_dir():
        raise ValueError(f"{text}: this folder has no config.json. Add one, or use a known name or a hub id")
    owner, slash, name = text.partition("/")
    if slash and owner and name and "/" not in name and " " not in text:
        return _from_hub(text)
    near = list(dict.fromkeys(_BY_NAME[n].name for n in difflib.get_close_matches(text.lower(), _BY_NAME, n=3)))
    hint = f"near are {', '.join(near)}" if near else f"known are {', '.join(KNOWN)}"
    raise ValueError(f"unknown model {text!r}: {hint}. Use a known name, a config.json, or a hub id (owner/name)")


def _from_file(path: Path) -> tuple[dict[str, Any], str]:
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}. Use the path of a config.json of transformers") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(
            f"{path}: the file is not JSON ({error}). Use the path of a config.json of transformers"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: the file does not contain a JSON object. Use the path of a config.json of transformers"
        )
    return content, str(path)


def _from_hub(hub_id: str) -> tuple[dict[str, Any], str]:
    try:
        content = parse_json(hub.read_config(hub_id))
    except hub.Unavailable as reason:
        raise ValueError(
            f"{hub_id}: its config.json was not read from the hub: {reason}. {_near(hub_id)}, or the path of its"
            " config.json"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{hub_id}: the config.json on the hub is not JSON ({error}). Use the path of another one"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{hub_id}: the config.json on the hub does not contain a JSON object. Use the path of another one"
        )
    return content, hub_id


def _near(text: str) -> str:
    """Suggest known names that are similar to a text: the start of a sentence that continues with "or"."""
    name = text.lower().rpartition("/")[2]
    by_last_part = {spelling.rpartition("/")[2]: shape.name for spelling, shape in _BY_NAME.items()}
    near = dict.fromkeys(by_last_part[n] for n in difflib.get_close_matches(name, by_last_part, n=3, cutoff=0.5))
    return f"give a known name of about its size, such as {', '.join(near)}" if near else "give a known name"
