"""What does theory know of a model? Its shape, found by a known name, by a config.json, or by its id on the hub."""

from study.theory.shapes.config_json import from_config
from study.theory.shapes.known import KNOWN, find, find_known
from study.theory.shapes.shape import ModelShape, architecture_of, parameter_sizes, plain, with_vocabulary
from study.theory.shapes.sizes import GATED, Architecture, Head, ParameterSizes

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
