"""Install the project in Colab. Nothing is installed when this module is imported, so it needs only Python itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2]  # of a clone, of the unpacked zip file, or of the unpacked wheel


def install(extras: str = "report") -> None:
    """Install the project with these extras: from the current folder, or from the wheel that was unpacked there."""
    wheels = [] if (FOLDER / "pyproject.toml").exists() else sorted(Path.cwd().glob("*.whl"))
    source = [f"{wheels[-1]}[{extras}]"] if wheels else ["-e", f"{FOLDER}[{extras}]"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *source], check=True)


def install_and_train(committed: str | list[str]) -> list[str]:
    """Install the project, train a few strategies, and return the folder of the new runs.

    If no run leaves a record, return the `committed` folders. Raises Refusal if these are missing.
    """
    install("train,report")
    from study.report import colab

    return colab.train(committed, FOLDER)
