"""Read the files of a repository at one commit, from a clone of any kind."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from zero_study.errors import Refusal
from zero_study.public_runs.schema import PublicRun, Source


@dataclass(frozen=True)
class Repository:
    """A repository at a commit, and the function that reads its runs."""

    name: str
    commit: str
    license: str
    runs: Callable[[Checkout], Iterator[PublicRun]]
    retrieved: str = "2026-11-28"


class Checkout:
    """A repository at one commit. The clone needs no working tree."""

    def __init__(self, folder: Path, repository: str, commit: str, license: str, retrieved: str) -> None:
        self.left_out: list[str] = []  # logs that cannot be read, with the reason
        self._folder, self._about = folder, {"repository": repository, "license": license, "retrieved": retrieved}
        self.commit = self._git("rev-parse", f"{commit}^{{commit}}").decode().strip()

    @cached_property
    def paths(self) -> list[str]:
        """The paths of all files."""
        return self._git("ls-tree", "-r", "-z", "--name-only", self.commit).decode().split("\0")[:-1]

    @cached_property
    def paths_set(self) -> frozenset[str]:
        """The same paths, to ask whether there is a file."""
        return frozenset(self.paths)

    def under(self, *folders: str, suffix: str = "") -> list[str]:
        """Return the paths of the files in these folders, sorted."""
        return sorted(path for path in self.paths if path.startswith(folders) and path.endswith(suffix))

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        return self._git("show", f"{self.commit}:{path}")

    def source(self, path: str, content: bytes) -> Source:
        """Return where a file is."""
        return Source(path=path, sha256=hashlib.sha256(content).hexdigest(), commit=self.commit, **self._about)

    def _git(self, *words: str) -> bytes:
        done = subprocess.run(["git", "-C", self._folder, *words], capture_output=True)
        if done.returncode:
            raise Refusal(f"{self._folder}: git {words[0]}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout
