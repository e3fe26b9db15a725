"""Do the flags that change how a step is computed change just that? Seen in real runs, on a CPU."""

from __future__ import annotations

import math

import launching
import pytest

pytestmark = pytest.mark.launches

# As in test_parity.py: without dropout, so that what is recomputed needs no random numbers.
UNCLIPPED = {"workload": "gpt-wikitext", "gradient_clipping": 0, "dropout": 0}


def num_gathers(run: launching.Run) -> int:
    return sum(one.count for one in run.record.collectives_per_step if one.kind == "all_gather")


def test_activation_checkpointing_changes_no_loss_and_gathers_parameters_once_more():
    """Under zero3_tuned, which keeps no gathered parameter: by default so small a model stays whole until backward."""
    plain = launching.run("zero3_tuned", **UNCLIPPED)
    recomputed = launching.run("zero3_tuned", activation_checkpointing=True, **UNCLIPPED)
    losses = [[line["loss"] for line in run.steps] for run in (plain, recomputed)]
    assert len(losses[0]) == launching.DEFAULTS["max_steps"]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert num_gathers(recomputed) > num_gathers(plain) > 0


def test_compiled_model_learns():
    run = launching.run("single", num_processes=1, compile=True, **UNCLIPPED)
    losses = [line["loss"] for line in run.steps]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
