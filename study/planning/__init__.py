"""What does the planner page say? Tables and figures of predictions, and how far to trust them; no number is typed."""

from study.planning.figures import memory_by_gpus, memory_by_part, published_speed, speed_against_memory, tree_outcomes
from study.planning.tables import differences, front, in_words, memory, reasons, speed
from study.planning.trees import evaluate, fastest, published_trees, trees_in_words
from study.planning.trust import cases, errors, load, memory_cases, trust_in_words

__all__ = [
    "cases",
    "differences",
    "errors",
    "evaluate",
    "fastest",
    "front",
    "in_words",
    "load",
    "memory",
    "memory_by_gpus",
    "memory_by_part",
    "memory_cases",
    "published_speed",
    "published_trees",
    "reasons",
    "speed",
    "speed_against_memory",
    "tree_outcomes",
    "trees_in_words",
    "trust_in_words",
]
