"""Write the defaults of transformers' configuration classes, for a planner that runs without transformers.

    python tools/derive/config_defaults.py

Writes zero_study/theory/shapes/config_defaults.json. It has, by model_type, the default of each setting that determines
the shape of a model, the names of settings that this type calls by another name than most types, and the default rates
of dropout in the model's body.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zero_study import files
from zero_study.theory.shapes.config_json import DEFAULTS_FILE, MODEL_TYPES

# Rates that apply to one head of a model only, and the rate at which whole layers are left out.
NOT_IN_BODY = {"classifier_dropout", "layerdrop", "qa_dropout", "seq_classif_dropout", "summary_first_dropout"}


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
        rates = {
            field.name: field.default for field in fields if "drop" in field.name and field.name not in NOT_IN_BODY
        }
        by_class[name] = {"defaults": defaults, "own_names": own_names, "dropout": rates}
    return by_class


if __name__ == "__main__":
    main()
