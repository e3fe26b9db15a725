"""Compare measured steps with their predictions, and scale the parts of the other predictions accordingly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero_study.errors import Refusal
from zero_study.planner import choose
from zero_study.planner.choose import Advice, StrategyPrediction, gib
from zero_study.planner.reasons import percent
from zero_study.terminal import significant
from zero_study.theory.step_time import StepTime

# Times of a measured run that are this close to the prediction need no explanation.
CLOSE = 0.1
FEW_REASONS = (
    "waiting for data (measure a step without the data loader), batches that are shorter than the sequence length, the "
    "overhead of launching many small kernels (small batches, or hooks in every layer), eager attention, traffic "
    "between the GPUs that does not use the fast link (see the log of NCCL_DEBUG=INFO), or another program on the "
    "machine"
)


# The parts of a step that are slower or faster than predicted for different reasons.
COMPONENTS = {
    "computation": ("forward", "backward", "recompute", "optimizer", "launching"),
    "communication": ("exposed_communication",),
    "offload": ("offload",),
}


@dataclass(frozen=True)
class Measured:
    """A measured step of one strategy, and its prediction."""

    option: StrategyPrediction
    seconds: float  # of an optimizer step

    @property
    def factor(self) -> float:
        """The measured time divided by the predicted one."""
        return self.seconds / self.option.seconds

    @property
    def is_inside(self) -> bool:
        """Whether the measured time is inside the interval of the prediction."""
        return self.option.prediction.step.low <= self.seconds <= self.option.slowest_seconds


@dataclass(frozen=True)
class Calibration:
    """Measured steps, and the factors by which they change the predictions of other strategies."""

    steps: list[Measured]  # the first is that of the requested strategy
    factors: dict[str, float]  # by component; components without one stay as predicted
    others: list[StrategyPrediction]  # calibrated, those that fit, the fastest first


def calibrate(advice: Advice, measured: Mapping[str | None, float]) -> Calibration:
    """Return the calibration from measured step times, by the name of the strategy.

    Raises Refusal if the request names no strategy, or one that was not measured.
    """
    request = advice.request
    if request.strategy is None or request.strategy not in measured:
        raise Refusal("A measured step needs the strategy that was measured. Add --strategy, such as --strategy zero3.")
    (own,) = advice.options
    job = own.prediction.job
    # The others keep the global batch, and may split it in another way.
    sequences = job.micro_batch_size * job.gradient_accumulation_steps
    free = request.replace(
        strategy=None, shard_group_size=None, micro_batch_size=None, gradient_accumulation_steps=None,
        global_batch_size=sequences * request.num_groups,
    )  # fmt: skip
    options, _ = choose.options_of(advice.shape, advice.box, free)
    steps = [Measured(own, measured[request.strategy])]
    for name, seconds in measured.items():
        if name != request.strategy:
            (option,), _ = choose.options_of(advice.shape, advice.box, free.replace(strategy=name))
            steps.append(Measured(option, seconds))
    factors = factors_of([(step.option.prediction.step, step.seconds) for step in steps])
    others = [
        scaled(option, factors) for option in options if option.fits and option.strategy.name != own.strategy.name
    ]
    return Calibration(steps, factors, sorted(others, key=lambda option: option.seconds))


def factors_of(steps: Sequence[tuple[StepTime, float]]) -> dict[str, float]:
    """Return the factor of each component that measured steps calibrate, from their predictions and seconds.

    A step calibrates the component with the largest part of its predicted time. The factors have the least squares of
    the relative errors. If one would not be positive, because the other parts alone are predicted to take longer than
    the step, all components have one factor.
    """
    shares = np.array([np.array(parts_of(step)) / seconds for step, seconds in steps])
    known = np.unique(shares.argmax(axis=1))
    others = np.delete(shares, known, axis=1).sum(axis=1)
    found = np.linalg.lstsq(shares[:, known], 1 - others)[0]
    if found.min() > 0:
        return {[*COMPONENTS][index]: float(factor) for index, factor in zip(known, found, strict=True)}
    return dict.fromkeys(COMPONENTS, float(np.exp(-np.log(shares.sum(axis=1)).mean())))


def parts_of(step: StepTime) -> list[float]:
    """Return the predicted seconds of each component."""
    return [sum(getattr(step, name) for name in names) for names in COMPONENTS.values()]


def scaled(option: StrategyPrediction, factors: Mapping[str, float]) -> StrategyPrediction:
    """Return an option whose predicted parts are multiplied by the factors of their components."""
    step = option.prediction.step
    parts = {name: factor * getattr(step, name) for of, factor in factors.items() for name in COMPONENTS[of]}
    prediction = dataclasses.replace(option.prediction, step=dataclasses.replace(step, **parts))
    return dataclasses.replace(option, prediction=prediction)


def measured_advice(advice: Advice, calibration: Calibration) -> Advice:
    """Return the advice with the measured time in place of the predicted one.

    The times of all changes of the training are calibrated, too.
    """
    own, factors = calibration.steps[0], calibration.factors
    measured = scaled(own.option, dict.fromkeys(COMPONENTS, own.factor))
    measured = dataclasses.replace(measured, is_measured=True)
    remedies = [dataclasses.replace(each, option=scaled(each.option, factors)) for each in advice.remedies]
    changed = advice.changed
    if changed is not None:
        options = [scaled(option, factors) for option in changed.options]
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


def sentences(calibration: Calibration) -> list[str]:
    """Explain in sentences how the measured step times compare with the predictions, and what they change."""
    lines = []
    for measured in calibration.steps:
        option, step = measured.option, measured.option.prediction.step
        low = significant(step.low, 2)
        interval = f"at least {low} s" if option.is_rough else f"{low} to {significant(step.high, 2)} s"
        where = "inside" if measured.is_inside else "outside"
        lines.append(
            f"You measured {significant(measured.seconds)} s per step with {option.strategy.name}. This is "
            f"{measured.factor:.2f} times the predicted {significant(step.total)} s, and {where} the predicted "
            f"interval ({interval})."
        )
        if not option.fits:
            lines.append("The prediction says that this training does not fit, but your run shows that it does.")
    parts = " and ".join(f"{factor:.2f} times the predicted {name}" for name, factor in calibration.factors.items())
    lines.append(f"The times below have {parts}.")
    if kept := [name for name in COMPONENTS if name not in calibration.factors]:
        lines.append(f"The rest ({', '.join(kept)}) is unchanged, because no measured step consists mostly of it.")
    own = calibration.steps[0]
    if own.factor > 1 + CLOSE:
        lines.append(f"The usual reasons for a longer step are {FEW_REASONS}.")
    elif own.factor < 1 - CLOSE and not own.is_inside:
        lines.append(
            "A step that is much shorter than predicted often computes less: it has a smaller batch, shorter "
            "sequences, or fewer trained parameters than the options of this command say."
        )
    return lines


def rows(calibration: Calibration) -> list[list[str]]:
    """Return a table of the other strategies that fit, with their calibrated times."""
    head = ["strategy", "s/step, from your measurement", "compared with yours", "GiB", "free"]
    return [head, *(
        [option.strategy.name, significant(option.seconds), f"{option.seconds / calibration.steps[0].seconds:.2f}x",
         gib(option.needed_bytes), percent(option.free_share)]
        for option in calibration.others
    )]  # fmt: skip


def content(calibration: Calibration) -> dict[str, Any]:
    """Return the calibration as plain data for JSON."""
    return {
        "measured": [
            {
                "strategy": step.option.strategy.name,
                "measured_seconds_per_step": step.seconds,
                "predicted_seconds_per_step": step.option.seconds,
                "is_inside_interval": step.is_inside,
            }
            for step in calibration.steps
        ],
        "factors": calibration.factors,
        "meaning": sentences(calibration),
        "others": [
            {
                "strategy": option.strategy.name,
                "seconds_per_step": option.seconds,
                "needed_bytes_per_gpu": round(option.needed_bytes),
                "free_share": option.free_share,
            }
            for option in calibration.others
        ],
    }
