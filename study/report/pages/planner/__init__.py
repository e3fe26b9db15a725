"""What does the planner page say? Tables and figures of predictions, and how far to trust them; no number is typed."""

from study.planner.published_rows import load
from study.report.figures.planner import (
    memory_by_gpus,
    memory_by_part,
    published_speed,
    speed_against_memory,
)
from study.report.pages.planner.accuracy import cases, errors, intervals, memory_cases, trust_in_words
from study.report.pages.planner.played import played
from study.report.pages.planner.tables import differences, front, in_words, memory, memory_parts, reasons, speed
