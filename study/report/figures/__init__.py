"""Which figures does a report have? Each is of one box and one thing trained, and comes with its words."""

from study.report.figures.drawing import Figure
from study.report.figures.forest import differences
from study.report.figures.front import pareto
from study.report.figures.losses import loss_curves
from study.report.figures.memory import peak_memory
from study.report.figures.predicted import predicted_memory, predicted_times
from study.report.figures.speed import runtime
from study.report.figures.worlds import world_sizes

__all__ = [
    "Figure",
    "differences",
    "loss_curves",
    "pareto",
    "peak_memory",
    "predicted_memory",
    "predicted_times",
    "runtime",
    "world_sizes",
]
