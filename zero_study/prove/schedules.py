"""Find learning rate schedules that reach zero before the epoch or the training ends.

Such a schedule takes several steps per update, or was made for too few updates. Only a copy of the schedule is run.
"""

from __future__ import annotations

import copy
import inspect
import types
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

# Rates below this fraction of the highest rate count as zero. The second to last rate of a cosine schedule is higher.
NOTHING = 1e-12
SHARE = 0.02  # A schedule may end early by this fraction of the updates, because scripts round differently.
MOST_STEPS = 100_000  # the most steps that a copy takes, which is some seconds; LambdaLR is not copied and has no limit

_PLAIN = (bool, int, float, str, types.NoneType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_MANY = (list, tuple, set, deque)


def parts_of(schedule: Any) -> list[Any]:
    """Return all schedules inside a composite schedule such as SequentialLR, including nested ones."""
    parts = [part for part in getattr(schedule, "_schedulers", ()) if isinstance(part, LRScheduler)]
    return [nested for part in parts for nested in (part, *parts_of(part))]


def steps_of(schedule: Any) -> int:
    """Return how many steps a schedule has taken.

    ChainedScheduler does not count its own steps, so the largest count of its parts is returned.
    """
    number = getattr(schedule, "last_epoch", None)
    return int(number) if number is not None else max(map(steps_of, parts_of(schedule)), default=0)


def of_epoch(schedule: Any, steps_a_update: float, number: int, updates: int) -> list[tuple[int, str]]:
    """Return a note if a schedule takes several steps per update and reaches zero before an epoch ends.

    `steps_a_update` is the number of its steps per update, `number` is the number of the current update, and `updates`
    is the number of updates in an epoch. The note comes with the first update at a rate of zero. The list is empty for
    a schedule that cannot be copied, and for one with a step per update, because a script may leave the epoch early.
    """
    moment = _moment(schedule, steps_a_update, number, updates) if steps_a_update > 1 else None
    if moment is None:
        return []
    zero, text = moment
    return [
        (
            zero,
            f"the learning rate is {text}, but an epoch has {updates} updates: the schedule takes {steps_a_update:g} "
            "steps per update (accelerate's scheduler takes one per process)",
        )
    ]


def of_training(schedule: Any, steps_a_update: float, number: int, updates: int) -> list[str]:
    """Return a finding if a learning rate schedule reaches zero clearly before the last update of the training.

    `updates` is the number of updates. The other arguments are those of `of_epoch`.
    """
    moment = _moment(schedule, steps_a_update, number, updates) if steps_a_update > 0 else None
    if moment is None:
        return []
    return [
        f"the schedule ends before the training: the learning rate is {moment[1]}, but the training has {updates} "
        f"updates. The schedule takes {steps_a_update:g} steps per update"
    ]


def _moment(schedule: Any, steps_a_update: float, number: int, updates: int) -> tuple[int, str] | None:
    """Return the first update at which the rate of a schedule is zero, and a text for messages.

    None if it is not zero clearly before the last of `updates` updates.
    """
    lambdas = getattr(schedule, "lr_lambdas", None)
    if lambdas and type(schedule) is lr_scheduler.LambdaLR and all(function is not None for function in lambdas):
        zero, rises = _of_lambdas(lambdas, steps_a_update, updates), False
    else:
        zero, rises = _of_copy(schedule, steps_a_update, number, updates)
    if zero is None or updates - zero + 1 <= max(1.0, SHARE * updates):
        return None
    return zero, f"zero at update {zero}, and rises again" if rises else f"zero from update {zero} on"


def _of_lambdas(lambdas: Any, steps_a_update: float, updates: int) -> int | None:
    """Return the first update at which the learning rate of a LambdaLR is zero.

    None if the rate is zero at the first update, or is not zero at the last of the updates.
    """

    def is_zero(update: int) -> bool:
        return all(function(round(update * steps_a_update)) == 0 for function in lambdas)

    if not is_zero(updates - 1) or is_zero(0):
        return None
    last, zero = 0, updates - 1
    while zero - last > 1:
        middle = (last + zero) // 2
        last, zero = (last, middle) if is_zero(middle) else (middle, zero)
    return zero + 1


def _of_copy(schedule: Any, steps_a_update: float, number: int, updates: int) -> tuple[int | None, bool]:
    """Return the first update at which the rate is zero, and whether the rate rises again after it.

    The update is None if the rate does not reach zero, or if no copy can be run.
    """
    num_steps = round((updates - number) * steps_a_update)
    rates: list[float] = []
    with suppress(Exception), warnings.catch_warnings():  # a script's own class may raise anything
        warnings.simplefilter("ignore")  # a warning that the copy steps without its optimizer
        copied = _copy(schedule) if 0 < num_steps <= MOST_STEPS else None
        rates = list(_rates(copied, num_steps)) if copied is not None else []
    if not rates:
        return None, False
    parts = (copied, *parts_of(copied))
    base_rates = [float(rate) for part in parts for rate in getattr(part, "base_lrs", ())]
    highest = max(*base_rates, *rates)
    positive = next((step for step, rate in enumerate(rates) if rate > NOTHING * highest), None)
    zeros = [step for step, rate in enumerate(rates) if rate <= NOTHING * highest]
    zeros = [step for step in zeros if positive is not None and step > positive]
    if not zeros:
        return None, False
    zero = number - int(-zeros[0] // steps_a_update)
    return zero, max(rates[zeros[0] :]) > NOTHING * highest


def _rates(schedule: Any, num_steps: int) -> Iterator[float]:
    """Yield the highest learning rate of all parameter groups now, and after each further step.

    OneCycleLR raises an error after its last step, and accelerate then leaves the rate unchanged. That rate is close to
    zero and is yielded as 0.
    """
    groups = schedule.optimizer.param_groups
    last = schedule.total_steps - 1 if isinstance(schedule, lr_scheduler.OneCycleLR) else None
    yield max(float(group["lr"]) for group in groups)
    for _ in range(num_steps):
        if last is not None and schedule.last_epoch >= last:
            yield 0.0
        else:
            schedule.step()
            yield max(float(group["lr"]) for group in groups)


# ---------------------------------------------------------------- a copy


def _copy(schedule: Any) -> Any | None:
    """Return a copy of a schedule, with an optimizer that has only placeholder weights.

    None if the schedule contains anything but numbers and functions. Functions are shared with the original. The copy
    calls them with other step numbers, as the original would later.
    """
    every = [schedule, *parts_of(schedule)]
    if not all(map(_can_be_run, every)):
        return None
    optimizer = schedule.optimizer
    # The copy's optimizer has the same settings, but one placeholder weight per group.
    stand_in = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in optimizer.param_groups], lr=0.0)
    for own, group in zip(stand_in.param_groups, optimizer.param_groups, strict=True):
        own |= {key: copy.deepcopy(setting) for key, setting in group.items() if key != "params"}
    memo: dict[int, Any] = {id(optimizer): stand_in}
    for each in every:
        memo |= {id(value): value for value in _leaves(vars(each)) if callable(value)}
    return copy.deepcopy(schedule, memo)


def _can_be_run(schedule: Any) -> bool:
    """Say whether a schedule has torch's own step, needs no metric, and contains only numbers and functions."""
    step = inspect.getattr_static(type(schedule), "step", None)
    is_torchs = getattr(step, "__module__", "") == lr_scheduler.__name__
    if not is_torchs or isinstance(schedule, lr_scheduler.ReduceLROnPlateau) or "step" in vars(schedule):
        return False
    optimizer = schedule.optimizer
    return all(
        isinstance(value, (*_PLAIN, LRScheduler))
        or value is optimizer
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
        for value in _leaves(vars(schedule))
    )


def _leaves(value: Any) -> Iterable[Any]:
    """Yield the values in nested lists and dicts."""
    if isinstance(value, (dict, Counter)):
        value = list(value.values())
    if isinstance(value, _MANY):
        for schedule_part in value:
            yield from _leaves(schedule_part)
    else:
        yield value
