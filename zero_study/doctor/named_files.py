"""Find a file that another configuration file names, and read configuration files of any kind."""

from __future__ import annotations

import json
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ..errors import Refusal
from ..files import CONFIGS, load, parse_json, parse_yaml, read_whole, reading
from .findings import Settings
from .kinds import kind_of

MOST_KEYS = 20_000  # of a file; aliases in YAML can make a small file huge
FOLDERS_ABOVE = 6  # how many folders above a file are tried for a path in it
_STRICT_KINDS = ("accelerate", "deepspeed", "ddp")  # kinds whose YAML must be plain enough for every reader


class Section(dict[str, Any]):
    """A section of a JSON file as accelerate reads it. If a key is repeated, its last value counts.

    `overridden` has the values that do not count.
    """

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        last = {key: position for position, (key, _) in enumerate(pairs)}
        self.overridden = [pair for position, pair in enumerate(pairs) if last[pair[0]] != position]


@dataclass(frozen=True)
class Named:
    """A file that another file names: where it is, and whether its path is relative to the current folder."""

    path: Path
    is_seen: bool


def find(name: str, of_file: Path) -> Named | None:
    """Return the location of a file that a configuration file names. None if there is no such file.

    The path may start in the current folder, in the file's folder, or in a folder above that.
    """
    folders = [of_file.absolute().parent, *of_file.absolute().parent.parents][: FOLDERS_ABOVE + 1]
    with suppress(OSError, ValueError):  # a text that cannot be a path
        if Path(name).is_file():
            return Named(Path(name), True)
        return next((Named(folder / name, False) for folder in folders if (folder / name).is_file()), None)
    return None


def is_json(path: Path) -> bool:
    """Return whether a file is JSON, judged by the ending of its name or else by its first character.

    A file with an unknown ending is JSON if its text begins with a brace. DeepSpeed accepts any ending, and some
    projects name their files .conf.
    """
    if path.suffix in (".json", ".yaml", ".yml", ".toml"):
        return path.suffix == ".json"
    with reading(path, "JSON or YAML"):
        return read_whole(path).lstrip()[:1] == b"{"


def read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON, YAML or TOML file. Raises Refusal if it cannot be read, or has no keys."""
    if path.suffix == ".py" and path.is_file():
        raise Refusal(
            f"{path} is a Python script, but doctor reads configuration files. `zero-study prove {path}` runs the "
            "script and checks its training."
        )
    if path.suffix == ".toml":
        with reading(path, "TOML"):
            content = tomllib.loads(read_whole(path).decode())
            parse_json(json.dumps(content, default=str))  # which limits the nesting
        return checked(path, content)
    if is_json(path):
        return read_json(path)
    return checked(path, _read_yaml(path))


def read_json(path: Path) -> dict[str, Any]:
    return checked(path, load(path, "JSON", Section))


def parse_inline(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a text, which Trainer accepts instead of a path. None if there is none."""
    try:
        content = parse_json(text, Section)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def checked(path: Path, content: Any) -> dict[str, Any]:
    """Return the content of a file if it is a mapping of a reasonable number of keys. Raises Refusal otherwise."""
    keys = with_keys(path, content)
    if len(list(islice(Settings(keys).nodes(), MOST_KEYS + 1))) > MOST_KEYS:
        raise Refusal(
            f"{path}: the file has more than {MOST_KEYS:,} keys, so it is not a configuration file that "
            "doctor recognizes."
        )
    return keys


def with_keys(path: Path, content: Any) -> dict[str, Any]:
    """Return the content of a file if it is a mapping of keys. Raises Refusal otherwise."""
    if not isinstance(content, dict):
        raise Refusal(f"{path}: the file has no keys. Start from a copy of one of the files in {CONFIGS.name}/.")
    return content


def _read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Files of accelerate and DeepSpeed are read strictly. The files of other tools may contain what YAML libraries read
    differently, such as 500_000, because doctor examines only a part of their keys.
    """
    with reading(path, "YAML"):
        text = read_whole(path).decode()
        try:
            return parse_yaml(text)
        except (ValueError, yaml.YAMLError):
            content = read_leniently(text)
            if content is None or kind_of(content) in _STRICT_KINDS:
                raise
            return content


def read_leniently(text: str) -> dict[str, Any] | None:
    """Return the keys of a YAML file as tools read them. None if there are none, or if they are nested too deeply."""
    depth = deepest = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            deepest = max(deepest, depth)
            if deepest > 40 or isinstance(event, yaml.AliasEvent):
                return None
        content = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return None
    if not isinstance(content, dict) or not any(isinstance(key, str) for key in content):
        return None
    return {str(key): value for key, value in content.items()}
