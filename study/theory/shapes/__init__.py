"""Shapes of models: by a known name, by a config.json, or by an id on the hub."""

from study.theory.shapes.config_json import from_config
from study.theory.shapes.known import KNOWN, find, find_known
from study.theory.shapes.shape import (
    GATED,
    Architecture,
    Head,
    ModelShape,
    ParameterSizes,
    architecture_of,
    parameter_sizes,
    plain,
    with_vocabulary,
)

__all__ = [
    "GATED",
    "KNOWN",
    "Architecture",
    "Head",
    "ModelShape",
    "ParameterSizes",
    "architecture_of",
    "find",
    "find_known",
    "from_config",
    "parameter_sizes",
    "plain",
    "with_vocabulary",
]
