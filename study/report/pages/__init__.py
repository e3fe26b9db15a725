"""What does a page say? Tables, figures and sentences from the tidy table; no number in them is typed."""

from study.report.pages.decided import (
    decide,
    decided_choice,
    decided_drawn,
    decided_first,
    decided_tables,
    other_losses,
)
from study.report.pages.drawn import answer_drawn, compared_drawn, drawn, loss_curves, times_drawn, worlds_drawn
from study.report.pages.opening import (
    learned_choice,
    losses_first,
    memory_and_price,
    memory_choice,
    memory_first,
    processes_first,
    time_first,
    title,
)
from study.report.pages.predicted import (
    predicted_memory,
    predicted_memory_drawn,
    predicted_times,
    predicted_times_drawn,
    predictions,
)
from study.report.pages.questions import (
    largest_batch,
    memory,
    memory_in_words,
    proof,
    proof_in_words,
    scaling,
    scaling_in_words,
    times,
)
from study.report.pages.runs import load
from study.report.pages.summary import answer, basis
from study.report.pages.trust import boxes, held_fixed, not_comparable, reproduce, varied, without_result
