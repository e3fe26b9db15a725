"""How are files found, named, read and written? Whole or not at all, and shown without the folders of this machine.

`load` and `read_yaml` read strictly what a file says: each key once, numbers as they stand there, nothing endless.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml
from pydantic import BaseModel, ConfigDict

from .errors import Refusal

ROOT = Path(__file__).resolve().parents[1]  # of the project, where it is installed in place

LARGEST_FILE = 256 << 20  # bytes; the steps of a million
DEEPEST = 40  # collections in collections; nothing that the study reads has ten
MOST_VALUES = 1_000_000  # of a YAML file, those of aliases counted wherever they stand
MOST_DIGITS = 19  # of a whole number: as many as 64 bits have, which DeepSpeed writes for "no limit"

LONGEST_NAME = 128  # half of what a file system takes: suffixes are added to it
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_-])?")
# Of files that lie in a run directory or a pack, and of devices on Windows.
_RESERVED = {"config", "manifest", "outcome", "record", "steps", "con", "prn", "aux", "nul"}
_RESERVED |= {f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10)}

_HOST = re.compile(r"^(\s+host\s+: ).+", re.MULTILINE)


def require_clone(what: str) -> None:
    """Raise Refusal where the project is installed without its repository."""
    if not (ROOT / "pyproject.toml").is_file():
        raise Refusal(f"{what} are only in a clone of the project; clone it, and in there run: pip install -e .")


class StrictModel(BaseModel):
    """What people write into a file by hand, read strictly: no unknown key, no value of another type, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    try:
        with open_new(scratch, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        error.filename = str(path)  # which a full disk does not say
        error.filename2 = None
        raise
    finally:
        scratch.unlink(missing_ok=True)


def open_new(path: Path, mode: str) -> IO[Any]:
    """Open a file to write, in place of what has its name.

    A link there is removed and not followed: who may write into a run's folder could name any other file by it.
    """
    path.unlink(missing_ok=True)
    return open(path, mode.replace("w", "x"))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    write_whole(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def require_folder(output: Path) -> None:
    """Raise Refusal where the folder that a file is to be written to is not there."""
    if not output.absolute().parent.is_dir():
        raise Refusal(f"--output {output}: there is no folder {output.parent}; make it")


def check_name(name: str, what: str) -> str:
    """Return a name of a run, a strategy or a study, which becomes a file's. Raises Refusal where it cannot be one."""
    said = repr(name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "...")
    if len(name) > LONGEST_NAME:
        raise Refusal(f"{what} {said} has {len(name)} characters; take at most {LONGEST_NAME}")
    if not _NAME.fullmatch(name):
        raise Refusal(f"{what} {said} cannot be a file's name everywhere; take letters, digits, _, - and . in between")
    if name.partition(".")[0].lower() in _RESERVED:
        raise Refusal(f"{what} {said} is the name of another file; take another")
    return name


# ---------------------------------------------------------------- reading


Section = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{_short(next(key for key in keys if keys.count(key) > 1))} is there twice")
    return content


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")


@contextlib.contextmanager
def reading(where: Path | str, what: str) -> Iterator[None]:
    """Raise Refusal where a file, or a part of one, cannot be read; `what` says what it should have been."""
    try:
        yield
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Refusal(f"{where}: cannot be read as {what} ({' '.join(str(error).split())})") from None


def load(path: Path, what: str, section: Section = _each_once) -> Any:
    """Read a JSON file strictly. Raises Refusal as `reading` does.

    `section` makes a mapping of its keys and values, where a key may be there twice.
    """
    with reading(path, what):
        return parse_json(read_whole(path), section)


def read_yaml(path: Path, examples: Path) -> dict[str, Any]:
    """Read a file of keys strictly, YAML or, by its name, JSON. Raises Refusal where it is none.

    `examples` is a folder of some that are.
    """
    with reading(path, "JSON" if path.suffix == ".json" else "YAML"):
        text = read_whole(path)
        content = parse_json(text) if path.suffix == ".json" else parse_yaml(text.decode())
    if not isinstance(content, dict):
        raise Refusal(f"{path}: holds no keys; copy one of {examples.name}/")
    return content


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file to read. Raises OSError for what is none, such as a named pipe, of which a reader waits for ever."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file")
    return file


def read_whole(path: Path) -> bytes:
    """Read a file. Raises OSError, and ValueError for one that is larger than any of the study's."""
    with open_regular(path) as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"it is larger than {LARGEST_FILE >> 20} MiB")
    return content


def decompressed(content: bytes) -> bytes:
    """What a gzip file holds. Raises ValueError where it is none, is cut off, or holds more than any of the study's."""
    reader = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        text = reader.decompress(content, LARGEST_FILE + 1)
    except zlib.error as error:
        raise ValueError(f"no gzip file: {error}") from None
    if len(text) > LARGEST_FILE:
        raise ValueError(f"it holds more than {LARGEST_FILE >> 20} MiB")
    if not reader.eof or reader.unused_data:
        raise ValueError("a gzip file that is cut off, or followed by something else")
    return text


def parse_json(text: bytes | str, section: Section = _each_once) -> Any:
    """Read JSON: no key twice, no NaN, no number beyond 64 bits or a float, nothing nested without end.

    Raises ValueError.
    """
    text = text if isinstance(text, str) else text.decode()  # JSON in UTF-16 is not what engines read
    try:
        content = json.loads(
            text, object_pairs_hook=section, parse_int=_whole, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST}") from None
    level: list[Any] = [content]
    for _ in range(DEEPEST):
        level = [child for parent in level for child in _children(parent)]
    if any(isinstance(each, (dict, list)) for each in level):
        raise ValueError(f"it is nested deeper than {DEEPEST}")
    if "\\ud" in text.lower():
        json.dumps(content, ensure_ascii=False).encode()  # half a character is a UnicodeEncodeError
    return content


def _children(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()


def _whole(text: str) -> int:
    if len(text.lstrip("+-")) > MOST_DIGITS:
        raise ValueError(f"{text[:20]}... has more than {MOST_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no number")
    return value


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is there
_STRANGE = re.compile("[\t\ufeff\x85\u2028\u2029]|\r(?!\n)")  # a tab, a byte order mark, lines that end otherwise
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FRACTION = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


@dataclass
class _Open:
    """A collection of a YAML file that has begun."""

    anchor: str | None
    keys: set[str] | None = None  # of a mapping, those so far; None: a list
    wants_key: bool = False
    num_values: int = 1  # within it, itself counted, aliases wherever they stand
    height: int = 1


def parse_yaml(text: str) -> Any:
    """Read YAML: as `parse_json`, and nothing that YAML 1.1 reads otherwise than it stands there (010, 1:30, a date).

    Raises ValueError, and YAMLError.
    """
    if strange := _STRANGE.search(text):
        where = f"line {text.count(chr(10), 0, strange.start()) + 1}"
        raise ValueError(f"{where}: {strange[0]!a} is read differently by YAML's libraries; write spaces and lines")
    loader = _LOADER(text)
    try:
        _check_yaml(loader)
    finally:
        loader.dispose()
    return yaml.load(text, Loader=_LOADER)


def _check_yaml(loader: Any) -> None:
    """Look at everything that a file says, before it is built."""
    anchors: dict[str, tuple[int, int] | None] = {}  # number of values and height; None: it has not ended
    stack = [_Open(None)]
    while loader.check_event():
        event = loader.get_event()
        where = f"line {event.start_mark.line + 1}: "
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"{where}{_short(event.tag)} is a tag; leave it out")
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            if stack[-1].wants_key:
                raise ValueError(f"{where}a key is a list or has keys itself; write a word")
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            stack.append(_Open(event.anchor, set() if is_mapping else None, is_mapping))
            if event.anchor:
                anchors[event.anchor] = None
            if len(stack) > DEEPEST + 1:
                raise ValueError(f"{where}it is nested deeper than {DEEPEST}")
            continue
        if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            ended = stack.pop()
            size = ended.num_values, ended.height + 1
            if ended.anchor:
                anchors[ended.anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            _check_scalar(loader, event, stack[-1], where)
            size = 1, 1
            if event.anchor:
                anchors[event.anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            known = anchors.get(event.anchor, (1, 1))  # one that is not there is an error of the parser's own
            if known is None or stack[-1].wants_key:
                raise ValueError(f"{where}*{_short(event.anchor)[1:-1]} stands for itself, or is a key; write it out")
            size = known
        else:  # of the document
            continue
        _add(stack, size, where)


def _check_scalar(loader: Any, event: Any, around: _Open, where: str) -> None:
    """Refuse what is read otherwise than it is written, and a key that is there already."""
    said = _short(event.value)
    kind = loader.resolve(yaml.ScalarNode, event.value, event.implicit).rpartition(":")[2]
    if around.wants_key and around.keys is not None:
        if kind not in ("str", "merge"):
            raise ValueError(f"{where}{said} is no word, so no key; write it in quotes")
        if event.value in around.keys:
            raise ValueError(f"{where}{said} is there twice")
        around.keys.add(event.value)
    elif kind in ("int", "float"):
        if not (_WHOLE if kind == "int" else _FRACTION).fullmatch(event.value):
            raise ValueError(f"{where}{said} is a number that YAML reads otherwise; write its digits, or quotes")
        _whole(event.value) if kind == "int" else _finite(event.value)
    elif kind == "timestamp":
        raise ValueError(f"{where}{said} is a date in YAML; write it in quotes")


def _add(stack: list[_Open], size: tuple[int, int], where: str) -> None:
    """Count a value that has ended into what it stands in."""
    num_values, height = size
    around = stack[-1]
    around.num_values += num_values
    around.height = max(around.height, height)
    if around.keys is not None:
        around.wants_key = not around.wants_key
    if around.num_values > MOST_VALUES:
        raise ValueError(f"{where}its aliases make more than {MOST_VALUES:,} values of it")
    if len(stack) + height > DEEPEST + 2:
        raise ValueError(f"{where}it is nested deeper than {DEEPEST}")


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def why_not_writable(folder: Path, num_bytes: int = 1 << 16) -> str | None:
    """Say why a folder takes no file of so many bytes, in the kernel's words; None: it does.

    Tried with a file that has no name: what the permissions say is not all that counts, least of all for root.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(num_bytes))
            file.write(b"x")  # one that fits in part is written in part
    except OSError as error:
        return error.strerror
    return None


def can_be_written(folder: Path) -> bool:
    """Say whether a folder can be written, or made if it is not there; nothing is left there."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return existing.is_dir() and why_not_writable(existing, 1) is None


def is_removed(*descriptors: int) -> bool:
    """Whether one of these open files or folders has lost its name."""
    try:
        return not all(os.fstat(descriptor).st_nlink for descriptor in descriptors)
    except OSError:  # a network's file system forgets it
        return True


def missing_folders(run_dir: Path) -> list[Path]:
    """The folders that making a run directory would create, innermost first."""
    return [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, as far as they are empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # it is not empty, or another process has removed it
            break


def relative_to_cwd(path: Path) -> str:
    """A path as seen from the current folder; of one elsewhere its name, for a page names no place of a machine."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else absolute.name


def redact_paths(text: str) -> str:
    """A text without this machine's folders and name: the current one and the project's become `.`, the user's own `~`.

    The name is in the report of torchrun. Characters that a terminal would obey are written out.
    """
    text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    text = _HOST.sub(r"\1(this machine)", text)
    for folder, short in ((Path.cwd(), "."), (ROOT, "."), (Path(os.path.expanduser("~")), "~")):
        if folder != folder.parent:
            text = re.sub(rf"(?<![\w.~-]){re.escape(str(folder))}(?![\w-])", short, text)
    return text
