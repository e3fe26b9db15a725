"""Read and write files: written completely or not at all, read strictly, and shown without folders of this machine.

`load` and `read_yaml` read a file strictly: each key once, and every value as it is written.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import yaml
from pydantic import BaseModel, ConfigDict

from .errors import Refusal

ROOT = Path(__file__).resolve().parents[1]  # of the project, where it is installed in place

LARGEST_FILE = 256 << 20  # bytes; a file with a million steps has that many
DEEPEST = 40  # collections in collections; nothing that the study reads has ten
MOST_DIGITS = 19  # of a whole number: as many as 64 bits have, which DeepSpeed writes for "no limit"

LONGEST_NAME = 128  # half of what a file system allows, because suffixes are added
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_-])?")
_RESERVED = {"config", "manifest", "outcome", "record", "steps"}  # files in a run directory or a pack

_HOST = re.compile(r"^(\s+host\s+: ).+", re.MULTILINE)


def require_clone(what: str) -> None:
    """Raise Refusal if the project is installed without its repository. `what`: the files that are only there."""
    if not (ROOT / "pyproject.toml").is_file():
        raise Refusal(
            f"{what} are only part of a clone of the project. Clone it, and run in the clone: pip install -e ."
        )


class StrictModel(BaseModel):
    """A model of a file that people write by hand: unknown keys, values of another type and NaN are errors."""

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
    """Raise Refusal if the folder that a file is to be written to does not exist."""
    if not output.absolute().parent.is_dir():
        raise Refusal(f"--output {output}: the folder {output.parent} does not exist. Create it.")


def check_name(name: str, what: str) -> str:
    """Return a name of a run, a strategy or a study. Raises Refusal if it cannot be the name of a file."""
    quoted = repr(name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "...")
    if len(name) > LONGEST_NAME:
        raise Refusal(f"{what} {quoted} has {len(name)} characters. Use at most {LONGEST_NAME}.")
    if not _NAME.fullmatch(name):
        raise Refusal(
            f"{what} {quoted} cannot be a file name on every system. Use letters, digits, _, -, and periods inside "
            "the name."
        )
    if name.partition(".")[0].lower() in _RESERVED:
        raise Refusal(f"{what} {quoted} is reserved for another file. Use another name.")
    return name


# ---------------------------------------------------------------- reading


Section = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{_short(next(key for key in keys if keys.count(key) > 1))} is listed twice")
    return content


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")


@contextlib.contextmanager
def reading(place: Path | str, what: str) -> Iterator[None]:
    """Raise Refusal if a file, or a part of one, cannot be read; `what` says what it should have been."""
    try:
        yield
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Refusal(f"{place}: cannot be read as {what} ({' '.join(str(error).split())})") from None


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
        raise Refusal(f"{path}: the file has no keys. Start from a copy of a file in {examples.name}/.")
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
    """Decompress a gzip file. Raises ValueError if it is none, is cut off, or has more than LARGEST_FILE bytes."""
    reader = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        text = reader.decompress(content, LARGEST_FILE + 1)
    except zlib.error as error:
        raise ValueError(f"no gzip file: {error}") from None
    if len(text) > LARGEST_FILE:
        raise ValueError(f"it contains more than {LARGEST_FILE >> 20} MiB")
    if not reader.eof or reader.unused_data:
        raise ValueError("the gzip file is truncated, or has other data after its end")
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
        raise ValueError(f"it is nested more deeply than {DEEPEST}") from None
    _check_depth(content)
    if "\\ud" in text.lower():
        json.dumps(content, ensure_ascii=False).encode()  # half a character is a UnicodeEncodeError
    return content


class _TooDeep(ValueError):
    pass


def _check_depth(content: Any) -> None:
    """Raise _TooDeep for collections in collections, more than DEEPEST of them; also for one that contains itself."""
    level = [content] if isinstance(content, (dict, list)) else []
    for _ in range(DEEPEST):
        children = (child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent))
        level = list({id(child): child for child in children if isinstance(child, (dict, list))}.values())
        if not level:
            return
    raise _TooDeep(f"it is nested more deeply than {DEEPEST}")


def _whole(text: str) -> int:
    if len(text.lstrip("+-")) > MOST_DIGITS:
        raise ValueError(f"{text[:20]}... has more than {MOST_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a number")
    return value


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is there
_STRANGE = re.compile("[\t\ufeff\x85\u2028\u2029]|\r(?!\n)")  # a tab, a byte order mark, lines that end otherwise
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FRACTION = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def parse_yaml(text: str) -> Any:
    """Read YAML: as `parse_json`, and nothing that YAML 1.1 reads otherwise than it is written (010, 1:30, a date).

    Raises ValueError, and YAMLError.
    """
    if strange := _STRANGE.search(text):
        line = text.count("\n", 0, strange.start()) + 1
        raise ValueError(
            f"line {line}: {strange[0]!a} is read differently by different YAML libraries. Use plain spaces and line"
            " breaks"
        )
    _check_nesting(text)
    loader = _LOADER(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_nodes(loader, root)
        content = loader.construct_document(root)
        _check_depth(content)
    except (RecursionError, _TooDeep):  # the text itself is not, as was checked
        raise ValueError(
            f"its aliases (*) nest it more deeply than {DEEPEST}, or within itself. Write the aliased parts out"
        ) from None
    finally:
        loader.dispose()
    return content


def _check_nesting(text: str) -> None:
    """Refuse deep nesting before nodes are composed, for which libyaml calls itself until the process crashes."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEEPEST:
                line = event.start_mark.line + 1
                raise ValueError(f"line {line}: it is nested more deeply than {DEEPEST}")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_nodes(loader: Any, root: yaml.Node) -> None:
    """Refuse tags, repeated keys, and scalars that YAML reads otherwise than they are written."""
    pending, checked = [root], set[int]()  # what an alias repeats is checked once
    while pending:
        node = pending.pop()
        if id(node) in checked:
            continue
        checked.add(id(node))
        _check_tag(loader, node)
        if isinstance(node, yaml.MappingNode):
            _check_keys(loader, node)
            pending += [value for _, value in reversed(node.value)]
        elif isinstance(node, yaml.SequenceNode):
            pending += reversed(node.value)
        else:
            _check_scalar(node)


def _line_of(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}: "


def _kind(node: yaml.Node) -> str:
    """Return the last word of a node's tag: str, int, float, bool, null, timestamp, merge ..."""
    return str(node.tag.rpartition(":")[2])


def _check_tag(loader: Any, node: yaml.Node) -> None:
    implicit = (not node.style, bool(node.style)) if isinstance(node, yaml.ScalarNode) else True
    if node.tag != loader.resolve(type(node), node.value, implicit):
        raise ValueError(f"{_line_of(node)}{_short(node.tag)} is a YAML tag. Remove it")


def _check_keys(loader: Any, mapping: yaml.MappingNode) -> None:
    keys = set()
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"{_line_of(key)}a key is a list or a mapping. Use a word")
        _check_tag(loader, key)
        if _kind(key) not in ("str", "merge"):
            raise ValueError(
                f"{_line_of(key)}{_short(key.value)} is not a word, so it cannot be a key. Put it in quotes"
            )
        if key.value in keys:
            raise ValueError(f"{_line_of(key)}{_short(key.value)} is listed twice")
        keys.add(key.value)


def _check_scalar(node: yaml.Node) -> None:
    kind, quoted = _kind(node), _short(node.value)
    if kind in ("int", "float"):
        if not (_WHOLE if kind == "int" else _FRACTION).fullmatch(node.value):
            raise ValueError(
                f"{_line_of(node)}{quoted} is a number that YAML reads differently. Write its digits, or put it in"
                " quotes"
            )
        _whole(node.value) if kind == "int" else _finite(node.value)
    elif kind == "timestamp":
        raise ValueError(f"{_line_of(node)}{quoted} is a date in YAML. Put it in quotes")


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
    """Say in the kernel's words why a folder takes no file of so many bytes; None: it does.

    A file without a name is written, because permissions do not tell enough, least of all for root.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(num_bytes))
            file.write(b"x")  # one that fits in part is written in part
    except OSError as error:
        return error.strerror
    return None


def can_be_written(folder: Path) -> bool:
    """Say whether a folder can be written, or can be created; nothing is left there."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return existing.is_dir() and why_not_writable(existing, 1) is None


def is_removed(*descriptors: int) -> bool:
    """Say whether one of these open files or folders has been removed."""
    try:
        return not all(os.fstat(descriptor).st_nlink for descriptor in descriptors)
    except OSError:  # a network's file system forgets it
        return True


def missing_folders(run_dir: Path) -> list[Path]:
    """Return the folders that creating a run directory would create, innermost first."""
    return [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, as far as they are empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # it is not empty, or another process has removed it
            break


def relative_to_cwd(path: Path) -> str:
    """Return a path relative to the current folder; only the name of a path elsewhere, so that pages show no more."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else absolute.name


def redact_paths(text: str) -> str:
    """Return a text without this machine's folders and name.

    The current folder and the project's become `.`, the user's home becomes `~`. The machine's name is in torchrun's
    report. Control characters, which a terminal would obey, are written out.
    """
    text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    text = _HOST.sub(r"\1(this machine)", text)
    for folder, short in ((Path.cwd(), "."), (ROOT, "."), (Path(os.path.expanduser("~")), "~")):
        if folder != folder.parent:
            text = re.sub(rf"(?<![\w.~-]){re.escape(str(folder))}(?![\w-])", short, text)
    return text
