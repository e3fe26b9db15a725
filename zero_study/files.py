"""Read and write files safely.

A file is written completely or not at all. `load` and `read_yaml` are strict: a repeated key is an error, and so is a
value that a library would read differently from how it is written. `redact_paths` removes the folders of this machine
from a text.
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
from pydantic import BaseModel, BeforeValidator, ConfigDict

from .errors import Refusal
from .version import REPOSITORY

ROOT = Path(__file__).resolve().parents[1]  # folder of the project in an editable installation
# The accelerate files of the strategies that the project ships. In a clone, this is a link to the folder in ROOT.
CONFIGS = (Path(__file__).parent / "accelerate_configs").resolve()

FILL_IN = "FILL_IN"  # written into files where the user has to write something else
LARGEST_FILE = 256 << 20  # bytes; the size of a file with a million steps
LARGEST_YAML = 1 << 20  # bytes; people write these files, and reading them takes 10 s per MiB
MOST_IN_YAML = 1_000_000  # values, with the aliases written out
MOST_VALUES = 8_000_000  # in a JSON file; that of a large tokenizer has 2 million
DEEPEST = 40  # levels of nesting; files of the study have fewer than ten
MOST_DIGITS = 19  # of an integer; DeepSpeed writes the largest one of 64 bits for "no limit"

LONGEST_NAME = 128  # half of a file system's limit, because suffixes are added
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_-])?")
_RESERVED = {"config", "manifest", "outcome", "record", "steps"}  # names of files in a run directory or a pack

_HOST = re.compile(r"^(\s+host\s+: ).+", re.MULTILINE)


def require_clone(what: str) -> None:
    """Raise Refusal if the project is installed without its repository.

    `what` names the files that only a clone of the repository has.
    """
    if not (ROOT / "pyproject.toml").is_file():
        address = f" from {REPOSITORY}" if REPOSITORY else ""
        raise Refusal(
            f"{what} are only in a clone of the project. Clone it{address}, and run in the clone: pip install -e ."
        )


# Makes a list a tuple in a strict model. Before pydantic 2.10, `Field(strict=False)` does not do this in all cases.
FROM_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class StrictModel(BaseModel):
    """The base class for files that people write. Unknown keys, values of the wrong type and NaN are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def write_whole(path: Path, content: bytes) -> None:
    """Write bytes to a file atomically. If writing fails, the file keeps its old content."""
    scratch = path.with_name(path.name + ".part")
    try:
        with open_new(scratch, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        error.filename = str(path)  # missing in the error of a full disk
        error.filename2 = None
        raise
    finally:
        scratch.unlink(missing_ok=True)


def open_new(path: Path, mode: str) -> IO[Any]:
    """Open a new file for writing, in place of any file that already has this name.

    A symbolic link of that name is deleted and not followed. Otherwise, anybody who may write into a run's folder could
    make the study overwrite any other file.
    """
    path.unlink(missing_ok=True)
    return open(path, mode.replace("w", "x"))


def write_json(path: Path, content: Any) -> None:
    """Write an object to a JSON file atomically. If writing fails, the file keeps its old content."""
    write_whole(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def require_folder(output: Path, option: str = "--output") -> None:
    """Raise Refusal if the folder of an output file does not exist. `option` is the flag that sets the output file."""
    if not output.absolute().parent.is_dir():
        raise Refusal(f"{option} {output}: the folder {output.parent} does not exist. Create it.")


def check_name(name: str, what: str) -> str:
    """Return `name` if it is a valid name of a run, a strategy or a study.

    Raises Refusal if it cannot be a file name. `what` describes the name in the message.
    """
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
    """Turn each OSError, ValueError or YAMLError of the `with` block into a Refusal.

    `place` is the file, or the part of a file, that is read. `what` says which format or content was expected.
    """
    try:
        yield
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Refusal(f"{place}: cannot be read as {what} ({' '.join(str(error).split())})") from None


def load(path: Path, what: str, section: Section = _each_once) -> Any:
    """Read a JSON file strictly. Raises Refusal if it cannot be read.

    `section` turns the list of (key, value) pairs of each JSON object into a dict. By default, a repeated key is an
    error.
    """
    with reading(path, what):
        return parse_json(read_whole(path), section)


def read_yaml(path: Path, examples: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file strictly, or from a JSON file if the name ends in .json.

    Raises Refusal if the file cannot be read or has no keys. `examples` is a folder with valid files; the message names
    it.
    """
    with reading(path, "JSON" if path.suffix == ".json" else "YAML"):
        text = read_whole(path)
        content = parse_json(text) if path.suffix == ".json" else parse_yaml(text.decode())
    if not isinstance(content, dict):
        raise Refusal(f"{path}: the file has no keys. Start from a copy of a file in {examples.name}/.")
    require_address(path, content)
    return content


def require_address(path: Path, content: dict[str, Any]) -> None:
    """Raise Refusal if the user still has to write the address of the first machine into an accelerate file."""
    if content.get("main_process_ip") == FILL_IN:
        raise Refusal(f"{path}: in place of {FILL_IN}, write the address of the first machine.")


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises OSError for anything else, such as a named pipe, because reading from it could block forever.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no regular file; save its content in a file, and name that")
    return file


def read_whole(path: Path) -> bytes:
    """Read a file. Raises OSError if it cannot be read, and ValueError if it is larger than LARGEST_FILE bytes."""
    with open_regular(path) as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"it is larger than {LARGEST_FILE >> 20} MiB")
    return content


def decompressed(content: bytes, limit: int = LARGEST_FILE) -> bytes:
    """Return the content of a gzip file.

    Raises ValueError if the data is not valid gzip, is truncated, or has more than `limit` bytes when decompressed.
    """
    reader = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        text = reader.decompress(content, limit + 1)
    except zlib.error as error:
        raise ValueError(f"no gzip file: {error}") from None
    if len(text) > limit:
        raise ValueError(f"it contains more than {limit / 2**20:.3g} MiB")
    if not reader.eof or reader.unused_data:
        raise ValueError("the gzip file is truncated, or has more data after its end")
    return text


def parse_json(text: bytes | str, section: Section = _each_once) -> Any:
    """Parse JSON strictly. Raises ValueError if the text is invalid.

    These are also errors: repeated keys, NaN, numbers that are too large for a float, integers with more than
    MOST_DIGITS digits, more than MOST_VALUES values, and nesting deeper than DEEPEST levels.
    """
    text = text if isinstance(text, str) else text.decode()  # only UTF-8, because engines cannot read UTF-16
    if len(text) > MOST_VALUES and sum(map(text.count, ",:[")) > MOST_VALUES:  # each value would take 30 to 230 bytes
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    try:
        content = json.loads(
            text, object_pairs_hook=section, parse_int=_whole, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError:
        raise ValueError(f"it is nested more deeply than {DEEPEST}") from None
    _check_depth(content)
    if "\\ud" in text.lower():
        json.dumps(content, ensure_ascii=False).encode()  # raises UnicodeEncodeError for half a character
    return content


class _TooDeep(ValueError):
    pass


def _check_depth(content: Any) -> None:
    """Raise _TooDeep if lists and dicts are nested deeper than DEEPEST levels, or if one contains itself."""
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


def _check_size(content: Any) -> None:
    """Raise ValueError if lists and dicts that occur several times make a content larger than MOST_IN_YAML values.

    Aliases of YAML repeat a part without copying it. A few lines can thus describe more values than fit into memory,
    which any program that walks through them would notice. The content is nested at most DEEPEST levels.
    """
    sizes: dict[int, int] = {}

    def size(value: Any) -> int:
        if not isinstance(value, (dict, list)):
            return 1
        if id(value) not in sizes:
            sizes[id(value)] = 1 + sum(map(size, value.values() if isinstance(value, dict) else value))
        return sizes[id(value)]

    if size(content) > MOST_IN_YAML:
        raise ValueError(f"its aliases (*) repeat parts until it has more than {MOST_IN_YAML:,} values")


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # with libyaml, ten times as fast
_STRANGE = re.compile("[\t\ufeff\x85\u2028\u2029]|\r(?!\n)")  # tab, byte order mark, unusual line ends
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FRACTION = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def parse_yaml(text: str) -> Any:
    """Parse YAML strictly. Raises ValueError or YAMLError if the text is invalid.

    All restrictions of `parse_json` apply. Values that YAML 1.1 reads differently from how they are written are errors
    too, such as 010, 1:30 and dates.
    """
    if len(text) > LARGEST_YAML:
        raise ValueError(f"it is larger than {LARGEST_YAML >> 20} MiB")
    if strange := _STRANGE.search(text):
        line = text.count("\n", 0, strange.start()) + 1
        raise ValueError(
            f"line {line}: {strange[0]!a} is read differently by different YAML libraries. Use plain spaces and line"
            " breaks"
        )
    if _LOADER is not yaml.SafeLoader:  # it needs no check before, and reads so slowly that each pass counts
        _check_nesting(text)
    loader = _LOADER(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_nodes(loader, root)
        content = loader.construct_document(root)
        _check_depth(content)
        _check_size(content)
    except (RecursionError, _TooDeep):
        _check_nesting(text)  # raises an error unless aliases are the cause
        raise ValueError(
            f"its aliases (*) nest it more deeply than {DEEPEST}, or within itself. Write the aliased parts out"
        ) from None
    finally:
        loader.dispose()
    return content


def _check_nesting(text: str) -> None:
    """Raise ValueError if the text is nested too deeply, before PyYAML builds its nodes.

    Building them is recursive in libyaml, so deep nesting would crash the process. Without libyaml, it raises
    RecursionError.
    """
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
    """Raise ValueError for tags, repeated keys, and values that YAML reads differently from how they are written."""
    pending, checked = [root], set[int]()  # a node that aliases repeat is checked once
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
    """Return the last word of a node's tag, such as str, int, float, bool, null, timestamp or merge."""
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
                f"{_line_of(node)}{quoted} is a number that YAML reads as a different value. Write its digits, or put "
                "it in quotes"
            )
        _whole(node.value) if kind == "int" else _finite(node.value)
    elif kind == "timestamp":
        raise ValueError(f"{_line_of(node)}{quoted} is a date in YAML. Put it in quotes")


def sync_folder(folder: Path) -> None:
    """Wait until the file names in a folder are stored on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def why_not_writable(folder: Path, num_bytes: int = 1 << 16) -> str | None:
    """Return the operating system's reason why a folder cannot take a file of `num_bytes` bytes.

    Returns None if the folder can. The function writes an unnamed temporary file, because permissions do not show a
    full disk, and root ignores them.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(num_bytes))
            file.write(b"x")  # if only a part fits, write() does not raise an error
    except OSError as error:
        return error.strerror
    return None


def can_be_written(folder: Path) -> bool:
    """Return whether a folder can be written to or can be created. The check leaves nothing behind."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return existing.is_dir() and why_not_writable(existing, 1) is None


def own_temporary_folder(name: str) -> Path:
    """Create and return a folder for temporary files that belongs to this user, in the system's temporary folder.

    Code is loaded from this folder, so it is only used if it belongs to the user and nobody else can write to it.
    Another user may have made a folder of this name first. In that case, the function returns one whose name ends with
    random characters, and finds it again the next time.
    """
    place = Path(tempfile.gettempdir())
    usual = place / f"{name}-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    for folder in (usual, *sorted(place.glob(f"{usual.name}-*"))):
        if is_private(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=place))


def is_private(folder: Path) -> bool:
    """Return whether a path is a folder that belongs to this user, and to which nobody else can write."""
    try:
        status = folder.lstat()  # a symbolic link may lead to a folder of somebody else
    except OSError:
        return False
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_ours and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def belongs_to_others(folder: Path) -> bool:
    """Return whether another user owns a folder, or everybody may write to it.

    If the folder does not exist, its nearest existing parent is examined.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    status = existing.stat()
    return status.st_uid != os.getuid() or bool(status.st_mode & stat.S_IWOTH)


def is_removed(*descriptors: int) -> bool:
    """Return whether any of these file descriptors belongs to a file or folder that has been removed."""
    try:
        return not all(os.fstat(descriptor).st_nlink for descriptor in descriptors)
    except OSError:  # network file systems forget removed files
        return True


def missing_folders(run_dir: Path) -> list[Path]:
    """Return the folders that have to be created for a run directory to exist, innermost first."""
    return [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, and stop at the first one that is not empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # it is not empty, or another process has removed it
            break


def relative_to_cwd(path: Path) -> str:
    """Return a path relative to the current folder.

    Only the name is returned for a path outside the current folder, so that published pages do not show other folders.
    """
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else absolute.name


def redact_paths(text: str) -> str:
    """Return a text without this machine's folders and host name.

    The current folder and the project's folder become `.`, and the user's home becomes `~`. The host name appears in
    the reports of torchrun. Control characters are escaped, because a terminal would act on them.
    """
    text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    text = _HOST.sub(r"\1(this machine)", text)
    for folder, short in ((Path.cwd(), "."), (ROOT, "."), (Path(os.path.expanduser("~")), "~")):
        if folder != folder.parent:
            text = re.sub(rf"(?<![\w.~-]){re.escape(str(folder))}(?![\w-])", short, text)
    return text
