"""How are files found, read and written? Whole or not at all, and shown without the folders of this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from study.errors import Refusal

ROOT = Path(__file__).resolve().parents[1]  # of the project, where it is installed in place

_HOST = re.compile(r"^(\s+host\s+: ).+", re.MULTILINE)


def require_clone(what: str) -> None:
    """Raise Refusal where the project is installed without its repository."""
    if not (ROOT / "pyproject.toml").is_file():
        raise Refusal(f"{what} are only in a clone of the project; clone it, and in there run: pip install -e .")


class Written(BaseModel):
    """What people write into a file by hand, read strictly: no unknown key, no value of another type, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    try:
        with open(scratch, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    write_whole(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def load(path: Path, what: str) -> Any:
    """Read a JSON file. Raises Refusal where it is none; `what` says what it should have been."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Refusal(f"{path}: cannot be read as {what} ({error})") from None


def read_yaml(path: Path, examples: Path) -> dict[str, Any]:
    """Read a YAML file of keys. Raises Refusal where it is none; `examples` is a folder of some that are."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refusal(f"{path}: cannot be read as YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise Refusal(f"{path}: holds no keys; copy one of {examples.name}/")
    return content


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_writable(folder: Path) -> bool:
    """Try it with a file that has no name: what the permissions say is not all that counts, least of all for root."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def missing_folders(run_dir: Path) -> list[Path]:
    """The folders that making a run directory would create, innermost first."""
    return [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, as far as they are empty."""
    for folder in folders:
        if any(folder.iterdir()):
            break
        folder.rmdir()


def shown_path(path: Path) -> str:
    """A path as seen from the current folder; of one elsewhere its name, for a page names no place of a machine."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else absolute.name


def shown_text(text: str) -> str:
    """A text without this machine's folders and name: the current one and the project's become `.`, the user's own `~`.

    The name is in the report of torchrun.
    """
    text = _HOST.sub(r"\1(this machine)", text)
    for folder, short in ((Path.cwd(), "."), (ROOT, "."), (Path(os.path.expanduser("~")), "~")):
        if folder != folder.parent:
            text = re.sub(rf"(?<![\w.~-]){re.escape(str(folder))}(?![\w-])", short, text)
    return text
