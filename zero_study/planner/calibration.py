"""Compare a measured step with its prediction, and scale the predictions of the other strategies accordingly."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from zero_study.errors import Refusal
from zero_study.planner import choose
from zero_study.planner.choose import Advice, StrategyPrediction, gib
from zero_study.planner.reasons import percent
from zero_study.terminal import significant

# Times of a measured run that are this close to the prediction need no explanation.
CLOSE = 0.1
FEW_REASONS = (
    "waiting for data (measure a step without the data loader), batches that are shorter than the sequence length, the "
    "overhead of launching many small kernels (small batches, or hooks in every layer), eager attention, traffic "
    "between the GPUs that does not use the fast link (see the log of NCCL_DEBUG=INFO), or another program on the "
    "machine"
)


@dataclass(frozen=True)
class Calibration:
    """A measured step of one strategy, and the other strategies' predictions scaled by measured over predicted time."""

    measured: StrategyPrediction
    seconds: float  # of an optimizer step, as it was measured
    others: list[StrategyPrediction]  # those that fit, the fastest first

    @property
    def factor(self) -> float:
        """The measured time divided by the predicted one."""
        return self.seconds / self.measured.seconds

    @property
    def is_inside(self) -> bool:
        """Whether the measured time is inside the interval of the prediction."""
        return self.measured.prediction.step.low <= self.seconds <= self.measured.slowest_seconds


def calibrate(advice: Advice, seconds: float) -> Calibration:
    """Return the calibration from a measured step time of the strategy that a request names.

    Raises Refusal if the request names no strategy, or if the time is no positive number.
    """
    if not 0 < seconds < math.inf:
        raise Refusal(f"--measured-step-seconds {seconds:g}: must be a number above 0.")
    request = advice.request
    if request.strategy is None:
        raise Refusal("A measured step needs the strategy that was measured. Add --strategy, such as --strategy zero3.")
    (measured,) = advice.options
    job = measured.prediction.job
    # The others keep the global batch, and may split it in another way.
    sequences = job.micro_batch_size * job.gradient_accumulation_steps
    free = request.replace(
        strategy=None, shard_group_size=None, micro_batch_size=None, gradient_accumulation_steps=None,
        global_batch_size=sequences * request.num_groups,
    )  # fmt: skip
    options, _ = choose.options_of(advice.shape, advice.box, free)
    others = [option for option in options if option.fits and option.strategy.name != measured.strategy.name]
    return Calibration(measured, seconds, sorted(others, key=lambda option: option.seconds))


def measured_advice(advice: Advice, calibration: Calibration) -> Advice:
    """Return the advice with the measured time in place of the predicted one.

    The times of all changes of the training are multiplied by the same factor.
    """
    factor = calibration.factor
    measured = dataclasses.replace(_scaled(calibration.measured, factor), is_measured=True)
    remedies = [dataclasses.replace(each, option=_scaled(each.option, factor)) for each in advice.remedies]
    changed = advice.changed
    if changed is not None:
        options = [_scaled(option, factor) for option in changed.options]
        recommended = next(
            (o for o in options if changed.recommended and o.strategy is changed.recommended.strategy), None
        )
        changed = dataclasses.replace(changed, options=options, recommended=recommended)
    return dataclasses.replace(
        advice,
        options=[measured],
        recommended=None if advice.recommended is None else measured,
        remedies=remedies,
        change=None if advice.change is None else remedies[advice.remedies.index(advice.change)],
        changed=changed,
    )


def _scaled(option: StrategyPrediction, factor: float) -> StrategyPrediction:
    """Return an option whose predicted time is multiplied by a factor."""
    step = option.prediction.step
    parts = (
        "forward", "backward", "recompute", "optimizer", "launching", "communication", "exposed_communication",
        "offload",
    )  # fmt: skip
    scaled = dataclasses.replace(step, **{name: factor * getattr(step, name) for name in parts})
    return dataclasses.replace(option, prediction=dataclasses.replace(option.prediction, step=scaled))


def sentences(calibration: Calibration) -> list[str]:
    """Explain in sentences how the measured step time compares with the prediction."""
    measured, factor = calibration.measured, calibration.factor
    step = measured.prediction.step
    low = significant(step.low, 2)
    interval = f"at least {low} s" if measured.is_rough else f"{low} to {significant(step.high, 2)} s"
    where = "inside" if calibration.is_inside else "outside"
    lines = [
        f"You measured {significant(calibration.seconds)} s per step with {measured.strategy.name}. This is "
        f"{factor:.2f} times the predicted {significant(step.total)} s, and {where} the predicted interval "
        f"({interval})."
    ]
    if not measured.fits:
        lines.append("The prediction says that this training does not fit, but your run shows that it does.")
    if factor > 1 + CLOSE:
        lines.append(
            f"The usual reasons for a longer step are {FEW_REASONS}. Each time below is the predicted time "
            f"multiplied by {factor:.2f}. This is right only if the reason slows down the other strategies equally."
        )
    elif factor < 1 - CLOSE and not calibration.is_inside:
        lines.append(
            "A step that is much shorter than predicted often computes less: it has a smaller batch, shorter "
            "sequences, or fewer trained parameters than the options of this command say."
        )
    return lines


def rows(calibration: Calibration) -> list[list[str]]:
    """Return a table of the other strategies that fit, with their predicted times multiplied by the measured factor."""
    head = ["strategy", "s/step, from your measurement", "compared with yours", "GiB", "free"]
    return [head, *(
        [option.strategy.name, significant(calibration.factor * option.seconds),
         f"{option.seconds / calibration.measured.seconds:.2f}x", gib(option.needed_bytes), percent(option.free_share)]
        for option in calibration.others
    )]  # fmt: skip


def content(calibration: Calibration) -> dict[str, Any]:
    """Return the calibration as plain data for JSON."""
    return {
        "strategy": calibration.measured.strategy.name,
        "measured_seconds_per_step": calibration.seconds,
        "predicted_seconds_per_step": calibration.measured.seconds,
        "factor": calibration.factor,
        "is_inside_interval": calibration.is_inside,
        "meaning": sentences(calibration),
        "others": [
            {
                "strategy": option.strategy.name,
                "seconds_per_step": calibration.factor * option.seconds,
                "needed_bytes_per_gpu": round(option.needed_bytes),
                "free_share": option.free_share,
            }
            for option in calibration.others
        ],
    }
