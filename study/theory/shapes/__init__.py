"""Find shapes of models by a known name, a config.json, or an id on the Hugging Face hub."""

from study.theory.shapes.config_json import decoder_shape as decoder_shape
from study.theory.shapes.config_json import from_config as from_config
from study.theory.shapes.config_json import from_parts as from_parts
from study.theory.shapes.config_json import replace_parts as replace_parts
from study.theory.shapes.config_json import vocabulary_of as vocabulary_of
from study.theory.shapes.known_models import DEFAULT_LENGTH as DEFAULT_LENGTH
from study.theory.shapes.known_models import KNOWN as KNOWN
from study.theory.shapes.known_models import NotRead as NotRead
from study.theory.shapes.known_models import find as find
from study.theory.shapes.known_models import find_for_length as find_for_length
from study.theory.shapes.known_models import find_known as find_known
from study.theory.shapes.known_models import for_length as for_length
from study.theory.shapes.known_models import read_config as read_config
from study.theory.shapes.shape import Architecture as Architecture
from study.theory.shapes.shape import Head as Head
from study.theory.shapes.shape import ModelShape as ModelShape
from study.theory.shapes.shape import ParameterSizes as ParameterSizes
from study.theory.shapes.shape import architecture_of as architecture_of
from study.theory.shapes.shape import shape_from_counts as shape_from_counts
