"""Find the files of a project that can be checked, and the same files in an earlier commit."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zero_study.doctor import job_files, kinds
from zero_study.doctor.named_files import find as find_named
from zero_study.errors import Refusal

CONFIG_ENDINGS = (".yaml", ".yml", ".json", ".jsonc", ".toml")
LARGEST_CONFIG = 256 << 10  # bytes; people write these files
# Names of files that pin releases. All of them are compared with those of the last commit.
LOCK = re.compile(
    r"(?:.*(?:requirements|constraints).*\.txt|.*\.lock|pylock(?:\..+)?\.toml|Pipfile\.lock|conda-lock\.ya?ml"
    r"|environment.*\.ya?ml)",
    re.IGNORECASE,
)
# An option with which a lock file includes another file, also as an entry of a list in YAML.
_INCLUDED = re.compile(rb"(?m)^[-\s]*?(?:-r|-c|--requirement|--constraint)[=\s]*([^\s#'\"]+)")
# Keys that hardly any file has that does not configure a training. A file that has one of them, or several keys of
# training tools, and cannot be parsed is reported.
_DISTINCTIVE = frozenset({
    "zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "distributed_type", "deepspeed_config",
    "fsdp_version", "gradient_accumulation_steps", "finetuning_type", "micro_batch_size", *kinds.OF_TRAINER_ONLY,
})  # fmt: skip
_KEYS = kinds.ARGUMENTS | kinds.OF_TRL | kinds.OF_AXOLOTL | kinds.OF_LLAMAFACTORY | kinds.OF_MS_SWIFT
_SEVERAL = 3
_LIST = re.compile(r"(?:\s|#.*\n|---)*(?:\[\s*[{\[\]\"]|- )")
_KEY = re.compile(r"""(\w+)["']?\s*[:=](?!=)""")
# Folders of installed packages and of results, where there is no git that says which files belong to the project.
LEFT_OUT = {"node_modules", "build", "dist", "site-packages", "__pycache__", "wandb", "mlruns"}


@dataclass(frozen=True)
class Project:
    """A folder with the files of a project."""

    root: Path
    has_git: bool

    def name_of(self, path: Path) -> str:
        """Return the path of a file relative to the project, with slashes. A file outside it keeps its whole path."""
        absolute = Path(os.path.abspath(path))
        is_inside = absolute.is_relative_to(self.root)
        return (absolute.relative_to(self.root) if is_inside else absolute).as_posix()

    def files(self, folder: Path) -> list[Path]:
        """Return the files of the project in a folder, sorted, without those that git ignores."""
        if not self.has_git or not Path(os.path.abspath(folder)).is_relative_to(self.root):
            return sorted(_walk(folder))
        listed = _git(
            self.root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", os.path.abspath(folder)
        )
        names = (listed.stdout if listed.returncode == 0 else b"").split(b"\0")
        return sorted(path for name in filter(None, names) if (path := self.root / os.fsdecode(name)).is_file())

    def require_commit(self, commit: str) -> None:
        """Raise Refusal if git does not know a commit."""
        if commit.startswith("-") or not _resolves(self.root, commit):
            raise Refusal(
                f"--since {commit}: git does not find this commit in the project. Name a commit, a tag or a branch."
            )

    def changed_lines(self, commit: str) -> dict[str, set[int]]:
        """Return the numbers of the lines that changed since a commit, by the path of the file in the project."""
        lines: dict[str, set[int]] = {}
        shown = _git(self.root, "diff", "--unified=0", "--no-color", "--no-ext-diff", "--no-prefix", commit)
        path = ""
        for line in shown.stdout.decode(errors="replace").splitlines():
            if line.startswith("+++ "):
                path = line[4:]
            elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
                first = int(match[1])
                lines.setdefault(path, set()).update(range(first, first + int(match[2] or 1)))
        return lines

    def has_commit(self) -> bool:
        return self.has_git and _resolves(self.root, "HEAD")

    def earlier_locks(self, commit: str) -> list[Path]:
        """Return the paths of the lock files that a commit has, whether or not the project still has them."""
        listed = _git(self.root, "ls-tree", "-r", "-z", "--name-only", commit)
        names = (os.fsdecode(name) for name in listed.stdout.split(b"\0") if name)
        return [path for name in names if is_lock(path := self.root / name)]

    def write_earlier(self, paths: Iterable[Path], commit: str, folder: Path) -> dict[Path, Path]:
        """Write the versions that files had in a commit into a folder, at the same relative paths.

        The files that they include are written, too. Return the path of the written file for each file that the
        commit has.
        """
        written: dict[Path, Path] = {}
        queue = list(paths)
        for path in queue:  # which grows
            name = self.name_of(path)
            shown = _git(self.root, "show", f"{commit}:{name}")
            if shown.returncode == 0:
                written[path] = folder / name
                written[path].parent.mkdir(parents=True, exist_ok=True)
                written[path].write_bytes(shown.stdout)
                names = map(os.fsdecode, _INCLUDED.findall(shown.stdout))
                included = (Path(os.path.normpath(path.parent / each)) for each in names)
                queue += {each for each in included if each.is_relative_to(self.root)} - {*queue}
        return written


def find(folder: Path) -> Project:
    """Return the project that a folder belongs to: its git repository, or the folder itself if there is no git."""
    try:
        top = _git(folder, "rev-parse", "--show-toplevel")
    except OSError:  # git is not installed
        return Project(folder.resolve(), has_git=False)
    if top.returncode:
        return Project(folder.resolve(), has_git=False)
    return Project(Path(os.fsdecode(top.stdout.rstrip(b"\n"))), has_git=True)


def is_config(path: Path) -> bool:
    """Return whether a file may be a handwritten configuration file, judged by its name and size."""
    if is_lock(path) or path.stat().st_size > LARGEST_CONFIG:
        return False
    return path.suffix.lower() in CONFIG_ENDINGS or _is_job(path)


def _is_job(path: Path) -> bool:
    """Return whether a script starts a training without a configuration file, or with one that exists."""
    with suppress(Refusal):
        names = [launch.flags.get("config_file") for launch in job_files.launches(path)]
        return any(name is None or find_named(name, path) for name in names)
    return False


def names_settings(path: Path) -> bool:
    """Return whether a file's text has keys that configure a training. False if the text cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    text = content.replace(b"\0", b"").decode(errors="replace")  # UTF-16 has a zero in each letter
    if _LIST.match(text):
        return False  # a file of settings has keys
    keys = set(_KEY.findall(text))
    of_torchtitan = kinds.OF_TORCHTITAN & set(re.findall(r"(?m)^\s*\[(\w+)", text))
    return bool(keys & _DISTINCTIVE) or len(keys & _KEYS) >= _SEVERAL or len(of_torchtitan) > 1


def is_lock(path: Path) -> bool:
    """Return whether a file's name is that of a lock file, which pins the releases of packages."""
    return LOCK.fullmatch(path.name) is not None


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders
            if not name.startswith(".") and name not in LEFT_OUT and not (Path(place) / name / "pyvenv.cfg").exists()
        ]  # fmt: skip
        yield from (path for name in names if (path := Path(place) / name).is_file())  # a link may lead nowhere


def _resolves(root: Path, commit: str) -> bool:
    return _git(root, "rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}").returncode == 0


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
