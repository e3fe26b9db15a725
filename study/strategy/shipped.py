"""The name of a strategy: its file's, unless the project ships another strategy under that name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

# By the names of the files in accelerate_configs/, the digest of what each says; tests/test_strategy.py keeps it true.
DIGESTS: dict[str, str] = json.loads(Path(__file__).with_name("shipped.json").read_text())

# Who starts processes, where a JSON lies, and what the run sets alike for every strategy.
_NOT_OF_IT = {
    "deepspeed_config_file", "deepspeed_multinode_launcher", "gradient_accumulation_steps", "gradient_clipping",
    "train_micro_batch_size_per_gpu", "train_batch_size", "steps_per_print",
}  # fmt: skip
_AS_LEFT_OUT = (None, "none", False, "auto")


def meaning(content: Any, beside: Any) -> dict[str, Any]:
    """What of an accelerate file and the JSON beside it, as a record keeps them, says how a run is distributed."""
    written = content if isinstance(content, dict) else {}
    sections = {name: written.get(name) for name in ("deepspeed_config", "fsdp_config", "parallelism_config")}
    return {"distributed_type": written.get("distributed_type")} | {
        name: {key: value for key, value in section.items() if key not in _NOT_OF_IT and value not in _AS_LEFT_OUT}
        if isinstance(section, dict)
        else {}
        for name, section in {**sections, "JSON": beside}.items()
    }


def digest(content: Any, beside: Any) -> str:
    text = json.dumps(meaning(content, beside), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def name_of(name: str, content: Any, beside: Any) -> str:
    """Name the strategy of a file of this name: a shipped one's with other content is no strategy of that name."""
    return name if DIGESTS.get(name) in (None, digest(content, beside)) else f"{name}-changed"
