"""How is another release of DeepSpeed examined? Installed beside this one, for the processes that train alone."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from study.errors import Refusal
from study.files import ROOT
from study.preflight import extensions

FOLDER = ROOT / ".releases"
BUILD_SECONDS = 1800
LAST_LINES = 3
# What the matrix loads; a release before these sources compiles them again, for a minute.
SOURCES = ("ops/csrc/adam", "ops/csrc/cpu", "ops/csrc/includes", "ops/op_builder")
LOAD = (
    "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load(); "
    "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
)


def environment(version: str, folder: Path = FOLDER) -> dict[str, str]:
    """Install a release and compile what it needs; return the environment in which Python finds it first.

    Its dependencies are those that are installed already. Raises Refusal where it cannot be had.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise Refusal(f"--deepspeed {version}: name a release, for instance 0.18.2")
    place = folder / version
    if not (place / "deepspeed").is_dir():
        print(f"installing deepspeed {version} into {place.name}/ ...", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
        command = [*pip, "--target", str(place), f"deepspeed=={version}"]
        _run(command, os.environ | {"DS_BUILD_OPS": "0"}, f"deepspeed {version} cannot be installed")
    # One path for all of them, so that two releases with the same sources have the same commands, and one build.
    current = folder / "current"
    current.unlink(missing_ok=True)
    current.symlink_to(place.name)
    digest = hashlib.sha256()
    for source in SOURCES:
        for path in sorted((place / "deepspeed" / source).rglob("*.*")):
            if path.suffix in (".cpp", ".h", ".py"):
                digest.update(path.read_bytes())
                os.utime(path, (0, 0))  # not newer than what another release has compiled of it
    extensions.use_own_folder()  # and with it the ninja of this Python
    there = os.environ | {
        "PYTHONPATH": str(current),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions" / digest.hexdigest()[:12]),
        "DS_ACCELERATOR": "cpu",
    }
    _run([sys.executable, "-c", LOAD], there, f"deepspeed {version} cannot compile its extensions")
    return there


def _run(command: list[str], environment: dict[str, str], failure: str) -> None:
    try:
        subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=BUILD_SECONDS, cwd=ROOT.parent
        )
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines()[-LAST_LINES:]
        raise Refusal(f"{failure}: {' '.join(lines)}") from None
    except subprocess.TimeoutExpired:
        raise Refusal(f"{failure}: it took more than {BUILD_SECONDS // 60} min") from None
