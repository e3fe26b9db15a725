"""Name strategies. A file with the name of a shipped strategy but other content gets another name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The digest of the settings of each file in accelerate_configs/, by name. test_strategy.py checks the digests.
DIGESTS: dict[str, str] = json.loads(Path(__file__).with_name("shipped.json").read_text())

# Settings that do not define a strategy: launcher, path of the JSON, and settings that the run sets for all strategies.
_SET_BY_THE_RUN = {
    "deepspeed_config_file", "deepspeed_multinode_launcher", "gradient_accumulation_steps", "gradient_clipping",
    "train_micro_batch_size_per_gpu", "train_batch_size", "steps_per_print",
}  # fmt: skip
_UNSET = (None, "none", False, "auto")


def normalized_settings(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an accelerate file and its JSON that decide how a run is distributed.

    `files` has the contents under "yaml" and "json".
    """
    content = files.get("yaml")
    content = content if isinstance(content, dict) else {}
    sections = {name: content.get(name) for name in ("deepspeed_config", "fsdp_config", "parallelism_config")}
    return {"distributed_type": content.get("distributed_type")} | {
        name: {key: value for key, value in section.items() if key not in _SET_BY_THE_RUN and value not in _UNSET}
        for name, section in {**sections, "JSON": files.get("json")}.items()
        if isinstance(section, dict)
    }


def digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(normalized_settings(files), sort_keys=True, default=str).encode()).hexdigest()[:16]


def name_of(name: str, files: Mapping[str, Any]) -> str:
    """Return the name of the strategy in a file.

    A file that has a shipped strategy's name but other content gets another name.
    """
    return name if DIGESTS.get(name) in (None, digest(files)) else f"{name}-changed"
