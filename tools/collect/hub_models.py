"""Check the configurations of well-known models of the Hugging Face hub against the installed transformers.

    python tools/collect/hub_models.py [NAME ...]

tools/collect/hub_models.json has one entry per model: its name here, its names on the hub, where the facts come from,
the configuration (only what differs from the defaults of its class in transformers) and the number of parameters. This
program builds each model without weights and prints those whose number of parameters differs. It ends with status 1
if there are any, as a new version of transformers can change a default.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")


def main(names: list[str]) -> int:
    models = read()
    known = {model["name"] for model in models}
    if unknown := sorted(set(names) - known):
        print(f"hub_models.json has no {', '.join(unknown)}.", file=sys.stderr)
        return 2
    chosen = [model for model in models if not names or model["name"] in names]
    differing = 0
    for model in chosen:
        parameters = count(model["config"])
        if parameters != model["parameters"]:
            differing += 1
            print(f"{model['name']}: {parameters:,} parameters, the file says {model['parameters']:,}")
    print(f"{len(chosen) - differing} of {len(chosen)} models have the number of parameters that the file says.")
    return 1 if differing else 0


def read() -> list[dict[str, Any]]:
    """Read all entries, sorted by name."""
    models: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return models


def count(config: dict[str, Any]) -> int:
    """Count the parameters of the model that transformers builds from a configuration; a tied one counts once."""
    import torch
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of token numbers, which do not matter here
    settings = dict(config)
    model_type = settings.pop("model_type")
    built = transformers.AutoConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(built)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
