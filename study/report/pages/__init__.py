"""What does a page say? Tables, figures and sentences from the tidy table; no number in them is typed."""

from study.report.pages.drawn import compared_drawn, drawn, loss_curves
from study.report.pages.predicted import (
    predicted_memory,
    predicted_memory_drawn,
    predicted_times,
    predicted_times_drawn,
    predictions,
)
from study.report.pages.questions import (
    largest_batch,
    losses,
    memory,
    memory_in_words,
    proof,
    proof_in_words,
    scaling,
    scaling_in_words,
    times,
    verdicts_in_words,
)
from study.report.pages.runs import load
from study.report.pages.summary import answer, in_words, title
from study.report.pages.trust import boxes, held_fixed, not_comparable, reproduce, varied, without_result

__all__ = [
    "answer",
    "boxes",
    "compared_drawn",
    "drawn",
    "held_fixed",
    "in_words",
    "largest_batch",
    "load",
    "loss_curves",
    "losses",
    "memory",
    "memory_in_words",
    "not_comparable",
    "predicted_memory",
    "predicted_memory_drawn",
    "predicted_times",
    "predicted_times_drawn",
    "predictions",
    "proof",
    "proof_in_words",
    "reproduce",
    "scaling",
    "scaling_in_words",
    "times",
    "title",
    "varied",
    "verdicts_in_words",
    "without_result",
]
