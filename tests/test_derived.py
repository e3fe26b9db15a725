"""Is what is committed what `make derived` makes? The quick parts of it are held by the tests of each part."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import launching
import pytest
from launching import ROOT


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.org", "-c", "core.hooksPath=/dev/null"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the tree is in no repository, which says what belongs to it")
def test_make_derived_changes_nothing(tmp_path):
    for name in git(ROOT, "ls-files", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "As it is")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    launching.use()
    made = subprocess.run(
        ["make", "-o", "setup", "derived"],
        cwd=tmp_path, env=launching.environment({"PYTHONPATH": str(tmp_path)}), capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    assert len(re.findall(r"^\S.* \.\.\.$", made.stdout, re.MULTILINE)) > 15
    assert git(tmp_path, "status", "--short", "--", ":!.venv") == ""
