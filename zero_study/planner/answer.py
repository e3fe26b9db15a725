"""Answer a question to the planner: which strategy to use, and what to change if there is not enough memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from zero_study.errors import Refusal
from zero_study.planner import choose, launch, reasons, remedies, stack_options
from zero_study.planner.choose import Advice, Remedy, StrategyPrediction
from zero_study.planner.request import Request, find_model
from zero_study.theory import hardware, step_time
from zero_study.theory.shapes import ModelShape

# Returns the same options, with a trace if they can be traced.
Trace = Callable[[ModelShape, Request, Sequence[StrategyPrediction]], list[StrategyPrediction]]


def advise(model: str, request: Request, trace: Trace | None = None) -> Advice:
    """Predict every strategy for a model on the requested GPUs, and recommend one.

    Each strategy is predicted with the requested split of the batch. If none is requested, every split is a candidate,
    and `choose.best_option` chooses among them. `trace` replaces predicted memory by traced memory. The memory of a
    changed request is only predicted.

    Raises Refusal if the model is unknown, or if the request cannot be satisfied.
    """
    shape, request, notes = find_model(model, request)
    request.batch()  # an error in the batch concerns every strategy
    for chosen in request.strategies(request.num_gpus)[:1]:  # so does a program that cannot train the model
        stack_options.parts(request.training(chosen, shape))
    advice = _predicted(shape, request, notes, trace)
    advice = dataclasses.replace(advice, remedies=remedies.find(advice, _can_start))
    change = reasons.better_change(advice)
    if advice.recommended is not None:
        now = change.option if change else advice.recommended
        helpful = [each for each in advice.remedies if each is change or remedies.helps(each.option, now)]
        advice = dataclasses.replace(advice, remedies=helpful)
    if change is None:
        return advice
    changed = _predicted(change.option.shape, change.request, notes)
    # The changed request is recommended the strategy that the change was found with.
    return dataclasses.replace(advice, change=change, changed=_recommending(change.option, changed))


def _predicted(shape: ModelShape, request: Request, notes: Sequence[str], trace: Trace | None = None) -> Advice:
    """Return the predictions of all strategies and the best one, without changes of the request."""
    box, notes = request.box(), [*notes]
    options, left_out = choose.options_of(shape, box, request)
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    notes += [
        f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} left out: {reason}"
        for reason, names in by_reason.items()
    ]
    if not options:
        raise Refusal(notes[-1])
    if trace is not None:
        options = trace(shape, request, options)
    if any(step_time.has_unaligned_heads(shape, option.prediction.engine, option.prediction.job) for option in options):
        notes.append(
            f"the heads have {shape.head_size} values each, which is no multiple of {step_time.ALIGNED_HEAD}, so that "
            "tensor cores cannot multiply them in eager attention. The prediction includes this. Use --attention sdpa, "
            "or change the number of heads"
        )
    if any(option.prediction.peak.host_bytes for option in options) and (note := hardware.whole_host_note(box)):
        notes.append(note)
    advice = Advice(shape, request, box, notes, options, None, left_out)
    return advice if (option := choose.recommend(options)) is None else _recommending(option, advice)


def _recommending(option: StrategyPrediction, advice: Advice) -> Advice:
    """Return advice that recommends an option, which replaces the one of the same strategy."""
    options = [option if old.strategy == option.strategy else old for old in advice.options]
    return dataclasses.replace(advice, options=options, recommended=option)


def _can_start(remedy: Remedy) -> bool:
    """Return whether the requested program can start what is recommended with a change of the request."""
    option = remedy.option
    changed = Advice(option.shape, remedy.request, option.prediction.box, [], [option], option)
    try:
        launch.launch(changed)
    except Refusal:
        return False
    return True
