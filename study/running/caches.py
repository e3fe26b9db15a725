"""Choose cache folders for libraries if the home folder is not writable, as on some clusters and in containers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from zero_study.files import can_be_written, own_temporary_folder

# Environment variables of datasets, evaluate, Triton and Matplotlib, and the folder for each. The Hugging Face Hub's
# cache of models and texts is left out, because files that are already there are only read.
_VARIABLES = {
    "HF_MODULES_CACHE": "modules",
    "HF_EVALUATE_CACHE": "evaluate",
    "HF_METRICS_CACHE": "metrics",
    "HF_DATASETS_CACHE": "datasets",
    "TRITON_CACHE_DIR": "triton",
    "MPLCONFIGDIR": "matplotlib",
}


def outside_home(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return environment variables that move the caches of libraries to the temporary folder.

    The result is empty if the cache in the home folder can be written. Variables that `environment` already sets are
    left out, so that the user's values stay in effect. Some of these caches hold code, so the folder is one to which
    only this user can write.
    """
    home = Path(environment.get("HOME") or "~").expanduser()
    cache = Path(
        environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface"
    )
    if can_be_written(cache):
        return {}
    folder = own_temporary_folder("zero-study-caches")
    return {name: str(folder / place) for name, place in _VARIABLES.items() if name not in environment}
