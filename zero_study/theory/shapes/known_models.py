"""Find models by a known name, by a config.json, or by an id on the Hugging Face hub.

hub_models.json.gz has the configurations of well-known models of the hub, and the counts of those whose architecture
has no formulas (tools/derive/hub_table.py). known_models.csv has BERT with the two-class head of bert-imdb
(arXiv:1810.04805, and arXiv:1908.08962 for the small ones), and the MPT models of LLM Foundry's benchmark tables. The
numbers of parameters of the MPT models are exactly those of a GPT-2 with biases. They have as many positions as the
sequences have tokens, which is 2048 in most rows.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zero_study.errors import several_names_message
from zero_study.files import parse_json
from zero_study.theory.shapes.config_json import MODEL_TYPES, from_config, from_parts, replace_parts
from zero_study.theory.shapes.counts import from_content, images_from_content
from zero_study.theory.shapes.shape import ModelShape, shape_from_counts

FOLDER = Path(__file__).parent
COUNTS = ("layers", "hidden", "heads", "kv_heads", "feed_forward", "head_size", "vocabulary", "positions")
EXAMPLES = ("llama-3.1-8b", "qwen3-8b", "gemma-2-9b", "gpt2", "bert-large", "t5-base")
DEFAULT_LENGTH = 1024  # default length of a sequence, in tokens


class _Known(Mapping[str, ModelShape]):
    """The shapes of known models by name. Files are read, and a shape is made, when they are first needed."""

    def __init__(self) -> None:
        self._shapes: dict[str, ModelShape] = {}

    @cached_property
    def _lines(self) -> dict[str, dict[str, str]]:
        """The lines of known_models.csv by name."""
        with open(FOLDER / "known_models.csv", encoding="utf-8", newline="") as file:
            return {line["name"]: line for line in csv.DictReader(file)}

    @cached_property
    def _entries(self) -> dict[str, dict[str, Any]]:
        """The models of the hub by name."""
        content = json.loads(gzip.decompress((FOLDER / "hub_models.json.gz").read_bytes()))
        return {entry["name"]: entry for entry in content}

    @cached_property
    def hub_ids(self) -> dict[str, list[str]]:
        """The hub ids of each model, by its name."""
        of_entries = {name: entry["hub_ids"] for name, entry in self._entries.items()}
        return of_entries | {name: line["hub_ids"].split() for name, line in self._lines.items()}

    @cached_property
    def names(self) -> dict[str, str]:
        """The names of the models by their spellings in lower case: the names themselves, and ids on the hub."""
        spellings = {hub_id.lower(): name for name, hub_ids in self.hub_ids.items() for hub_id in hub_ids}
        return spellings | {name.lower(): name for name in self.hub_ids}

    def __getitem__(self, name: str) -> ModelShape:
        if name not in self._shapes:
            is_line = name in self._lines
            self._shapes[name] = _of_line(self._lines[name]) if is_line else _of_entry(self._entries[name])
        return self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.hub_ids)

    def __len__(self) -> int:
        return len(self.hub_ids)


def _of_line(line: dict[str, str]) -> ModelShape:
    words: dict[str, Any] = {name: line[name] for name in ("name", "architecture", "activation", "head")}
    counts: dict[str, Any] = {name: int(line[name]) for name in COUNTS}
    shape = from_parts(**words, **counts, tied=line["tied"] == "True")
    # MPT's own configurations have no dropout (class MPTConfig of llm-foundry).
    return replace(shape, dropout={}) if shape.name.startswith("mpt-") else shape


def _of_entry(entry: dict[str, Any]) -> ModelShape:
    if "counts" not in entry:
        return from_config(entry["config"], entry["name"])
    counts = from_content(entry["counts"])
    notes, config, rates = tuple(entry["notes"]), entry["config"], entry["dropout"]
    shape = shape_from_counts(entry["name"], counts, entry["positions"], notes, config, rates, entry.get("image"))
    if "with_image" in entry:
        return replace(shape, with_image=images_from_content(entry["with_image"]))
    return shape


KNOWN = _Known()


class NotRead(ValueError):
    """Raised if there is no readable config.json for a name. The message has a remedy."""


LONGEST_PATH = 1024  # longer paths cause an error in the file system


def find_known(text: str) -> ModelShape | None:
    """Return the model with a known name or hub id, ignoring case. None if it is not known.

    This reads no file and does not contact the hub.
    """
    name = KNOWN.names.get(text.strip().lower())
    return None if name is None else KNOWN[name]


def find(text: str) -> ModelShape:
    """Return the model with a known name (in any case), a path of a config.json or its folder, or a hub id.

    The hub is contacted only for an id that is not known here, for at most five seconds. Raises ValueError with a
    remedy.
    """
    if shape := find_known(text):
        return shape
    return from_config(*read_config(text))


def find_for_length(text: str, sequence_length: int | None = None) -> tuple[ModelShape, int, list[str]]:
    """Find a model as `find` does. Return its shape, the sequence length in tokens, and notes on the model.

    If `sequence_length` is None, the length is 1,024, or the number of the model's positions if that is smaller. If the
    model has fewer positions than `sequence_length`, the returned shape has that many. Raises ValueError with a remedy.
    """
    return for_length(find(text), sequence_length)


def for_length(shape: ModelShape, sequence_length: int | None = None) -> tuple[ModelShape, int, list[str]]:
    """Return a model's shape with enough positions for a sequence length, this length, and notes on the model.

    The rules are those of `find_for_length`. Raises NotRead if the model has fewer positions, and no formulas for more.
    """
    length = sequence_length or min(DEFAULT_LENGTH, shape.positions)
    if length <= shape.positions:
        return shape, length, list(shape.notes)
    if shape.reads_images:
        raise NotRead(f"{shape.name} reads images, which have no sequence length. Leave --sequence-length out")
    # The counts of a longer model are known from formulas. Without a config.json, they stay the same.
    if shape.config is not None and shape.architecture not in {each.architecture for each in MODEL_TYPES.values()}:
        raise NotRead(
            f"{shape.name} has {shape.positions:,} positions, and is known only for these. Use "
            f"--sequence-length {shape.positions} or less, or a config.json with more positions"
        )
    note = f"{shape.name} has {shape.positions:,} positions, but the prediction assumes {length:,}"
    return replace_parts(shape, positions=length), length, [*shape.notes, note]


def read_config(text: str) -> tuple[dict[str, Any], str]:
    """Return the content of the config.json with this path or hub id, and its location.

    Raises NotRead with a remedy.
    """
    if not text.strip():
        raise NotRead("the name of the model is empty. Use a known name, a config.json, or a hub id (owner/name)")
    path = Path(text if len(text) < LONGEST_PATH else "\0")  # no file can have that name
    if (path / "config.json").is_file():
        return _from_file(path / "config.json")
    if text.endswith(".json") or path.is_file():
        return _from_file(path)
    if path.is_dir():
        raise NotRead(f"{text}: this folder has no config.json. Add one, or use a known name or a hub id")
    owner, slash, name = text.partition("/")
    if slash and owner and name and "/" not in name and " " not in text:
        return _from_hub(text)
    compact = _compact(text)
    kinds = [known for name, known in KNOWN.names.items() if compact and _compact(name).startswith(compact)]
    if len(kinds := list(dict.fromkeys(kinds))) > 1:
        raise NotRead(several_names_message("the model", text, kinds))
    near = list(dict.fromkeys(KNOWN.names[n] for n in difflib.get_close_matches(text.lower(), KNOWN.names, n=3)))
    hint = f"similar names are {', '.join(near)}" if near else f"known names are {', '.join(EXAMPLES)} and others"
    raise NotRead(
        f"unknown model {text!r}: {hint}. Use a name that "
        "`zero-study advise --model list` prints, a config.json, or a hub id (owner/name)"
    )


def _compact(name: str) -> str:
    """Return a name in small letters and without separators: "Llama 3" becomes "llama3"."""
    return re.sub(r"[-_ .]", "", name.lower())


def _from_file(path: Path) -> tuple[dict[str, Any], str]:
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise NotRead(f"{path}: {error.strerror}. Use the path of a config.json of transformers") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise NotRead(
            f"{path}: the file is not JSON ({error}). Use the path of a config.json of transformers"
        ) from None
    if not isinstance(content, dict):
        raise NotRead(f"{path}: the file does not contain a JSON object. Use the path of a config.json of transformers")
    return content, str(path)


def _from_hub(hub_id: str) -> tuple[dict[str, Any], str]:
    from zero_study.theory.shapes import hub  # its imports take longer than those of all of theory

    try:
        content = parse_json(hub.read_config(hub_id))
    except hub.Unavailable as reason:
        raise NotRead(
            f"{hub_id}: its config.json was not read from the hub: {reason}. {_near(hub_id)}, or the path of its"
            " config.json"
        ) from None
    except ValueError as error:
        raise NotRead(
            f"{hub_id}: the config.json on the hub is not JSON ({error}). Use the path of another one"
        ) from None
    if not isinstance(content, dict):
        raise NotRead(
            f"{hub_id}: the config.json on the hub does not contain a JSON object. Use the path of another one"
        )
    return content, hub_id


def _near(text: str) -> str:
    """Return the start of a sentence that suggests similar known names. The caller continues it with "or"."""
    name = text.lower().rpartition("/")[2]
    by_last_part = {spelling.rpartition("/")[2]: known for spelling, known in KNOWN.names.items()}
    near = dict.fromkeys(by_last_part[n] for n in difflib.get_close_matches(name, by_last_part, n=3, cutoff=0.5))
    return f"Use a known name of a similar model, such as {', '.join(near)}" if near else "Use a known name"
