"""What does theory know of a model? Its shape, found by a known name, by a config.json, or by its id on the hub."""

from study.theory.shapes.config_json import from_config
from study.theory.shapes.known import KNOWN, find
from study.theory.shapes.shape import (
    Architecture,
    ModelShape,
    ParameterSizes,
    architecture_of,
    parameter_sizes,
    plain,
    with_vocabulary,
)

__all__ = [
    "KNOWN",
    "Architecture",
    "ModelShape",
    "ParameterSizes",
    "architecture_of",
    "find",
    "from_config",
    "parameter_sizes",
    "plain",
    "with_vocabulary",
]
