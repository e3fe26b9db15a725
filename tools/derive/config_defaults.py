"""Write the defaults of transformers' configuration classes, for a planner that runs without transformers.

    python tools/derive/config_defaults.py

Writes study/theory/shapes/config_defaults.json. It has, by model_type, the default of each setting that determines the
shape of a model, and the names of settings that this type calls by another name than most types.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from study import files
from study.theory.shapes.config_json import DEFAULTS_FILE, MODEL_TYPES


def main() -> None:
    content = ",\n".join(f" {json.dumps(name)}: {json.dumps(defaults)}" for name, defaults in classes().items())
    files.write_whole(DEFAULTS_FILE, f"{{\n{content}\n}}\n".encode())
    print(DEFAULTS_FILE)


def classes() -> dict[str, dict[str, Any]]:
    """Read the installed configuration classes of all model types that the planner knows."""
    by_class = {}
    for name, model_type in MODEL_TYPES.items():
        own_names, fields = CONFIG_MAPPING[name].attribute_map, dataclasses.fields(CONFIG_MAPPING[name])
        by_name = {own_names.get(field.name, field.name): field.default for field in fields}
        keys = [*model_type.keys.values(), *model_type.more.values(), *model_type.switches]
        defaults = {key: by_name[key] for key in keys if key in by_name}
        by_class[name] = {"defaults": defaults, "own_names": own_names}
    return by_class


if __name__ == "__main__":
    main()
