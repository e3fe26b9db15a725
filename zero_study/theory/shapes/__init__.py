"""Find shapes of models by a known name, a config.json, or an id on the Hugging Face hub."""

from zero_study.theory.shapes.config_json import decoder_shape as decoder_shape
from zero_study.theory.shapes.config_json import from_config as from_config
from zero_study.theory.shapes.config_json import from_parts as from_parts
from zero_study.theory.shapes.config_json import replace_parts as replace_parts
from zero_study.theory.shapes.config_json import vocabulary_of as vocabulary_of
from zero_study.theory.shapes.known_models import DEFAULT_LENGTH as DEFAULT_LENGTH
from zero_study.theory.shapes.known_models import KNOWN as KNOWN
from zero_study.theory.shapes.known_models import NotRead as NotRead
from zero_study.theory.shapes.known_models import find as find
from zero_study.theory.shapes.known_models import find_for_length as find_for_length
from zero_study.theory.shapes.known_models import find_known as find_known
from zero_study.theory.shapes.known_models import for_length as for_length
from zero_study.theory.shapes.known_models import read_config as read_config
from zero_study.theory.shapes.shape import Architecture as Architecture
from zero_study.theory.shapes.shape import Head as Head
from zero_study.theory.shapes.shape import ModelShape as ModelShape
from zero_study.theory.shapes.shape import ParameterSizes as ParameterSizes
from zero_study.theory.shapes.shape import architecture_of as architecture_of
from zero_study.theory.shapes.shape import shape_from_counts as shape_from_counts
