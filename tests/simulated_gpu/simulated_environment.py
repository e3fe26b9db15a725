"""Make a virtual environment whose Python simulates GPUs, beside the environment that runs the tests.

A run refuses a `sitecustomize` on PYTHONPATH, and rightly so. It accepts what an environment imports at its start, and
its record names the file (`imports.at_start`).
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from study.records.simulation import SIMULATED_GPUS

HERE = Path(__file__).resolve().parent
START = "simulated_gpu.pth"


def make(folder: Path) -> Path:
    """Make the environment in a folder, and return its Python. It has all packages of the current one."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    for name in ("python", "python3", base.name):
        (folder / "bin" / name).symlink_to(base)
    (folder / "bin" / "nvidia-smi").symlink_to(HERE / "bin" / "nvidia-smi")
    installed = sysconfig.get_path("purelib")
    (packages / START).write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\nimport site; site.addsitedir({installed!r})\n"
        "import simulated_start\n"
    )
    return folder / "bin" / "python"


def variables(
    python: Path, count: int = 1, name: str = "NVIDIA H100 80GB HBM3", memory_bytes: int = 85_000_000_000, **gpu: Any
) -> dict[str, str | None]:
    """Return the environment variables with which that Python finds these GPUs."""
    table = {"count": count, "name": name, "memory_bytes": memory_bytes, **gpu}
    scripts = [str(python.parent), sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    return {
        SIMULATED_GPUS: json.dumps(table),
        "CUDA_VISIBLE_DEVICES": None,
        "PATH": os.pathsep.join(scripts),
        "VIRTUAL_ENV": str(python.parent.parent),
    }
