"""Check what holds for the numbers of every optimizer, schedule and loss scaler, whatever was trained."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .against import WIDEST_FIRST, with_scales
from .content import Saved, names_text
from .values import same, values_of

_TINY, _INFINITE = 1e-300, math.inf
# The numbers of groups, schedules and loss scalers: lower <= number < upper.
_RANGES: dict[str, tuple[float, float]] = {
    "lr": (0, _INFINITE), "initial_lr": (0, _INFINITE), "base_lrs": (0, _INFINITE), "_last_lr": (0, _INFINITE),
    "eps": (0, _INFINITE), "weight_decay": (0, _INFINITE), "betas": (0, 1), "momentum": (0, _INFINITE),
    "step": (0, _INFINITE), "last_epoch": (-1, _INFINITE), "scale": (_TINY, _INFINITE), "cur_scale": (_TINY, _INFINITE),
    "growth_factor": (1, _INFINITE), "backoff_factor": (_TINY, 1), "growth_interval": (1, _INFINITE),
}  # fmt: skip
_RATES = ("base_lrs", "initial_lr")  # a rate may be zero at the end of a training, but these are not
# The keys of a group of Adam or AdamW in torch, DeepSpeed, apex and transformers. Others make other updates.
_ADAM = {
    "params", "param_names", "lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach",
    "capturable", "differentiable", "fused", "decoupled_weight_decay", "bias_correction", "step", "adam_w_mode",
    "adamw_mode", "correct_bias", "name",
}  # fmt: skip
_MOMENTS = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
_ROUNDING = 1.05  # relative, of a second moment in fp32
_UNDERFLOW = 1e-34  # of squares; smaller ones are not compared
_NO_UNDERFLOW = 1e-15  # of a gradient, whose square is then a number in fp32
_FEWEST = 16  # elements of a moment whose signs say something
_BEFORE = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum")  # states of the shape of their weight


def _numbers(value: Any) -> list[float]:
    """Return the numbers in a value: a number, a tensor or a list of them."""
    if isinstance(value, torch.Tensor):
        return [float(number) for number in value.reshape(-1)[:1024]] if not value.is_complex() else []
    if isinstance(value, list | tuple):
        return [number for entry in value for number in _numbers(entry)]
    return [float(value)] if (isinstance(value, int | float) and abs(value) < 1e300) or _is_odd(value) else []


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def check_numbers(saved: Saved, file: str, contents: Iterable[Mapping[str, Any]]) -> None:
    """Report numbers of groups, of a schedule or of a loss scaler that no training has."""
    wrong: dict[str, float] = {}
    contents = list(contents)
    for key, (lower, upper) in _RANGES.items():
        values = [number for content in contents for number in _numbers(content.get(key))]
        odd = [number for number in values if not lower <= number < upper]
        if odd or (key in _RATES and values and not any(values)):
            wrong[key] = odd[0] if odd else 0.0
    if wrong:
        listed = names_text(f"{key} = {number:g}" for key, number in wrong.items())
        saved.wrong(
            "optimizer", f"{file} has numbers that no training has ({listed}). A resumed training would train nothing "
            "or destroy the weights.", [file],
        )  # fmt: skip


def check_schedule(saved: Saved, file: str, content: Any, is_certain: bool) -> None:
    """Check the state of a schedule, and that its learning rates are those of the optimizer's groups."""
    if not isinstance(content, dict):
        return
    check_numbers(saved, file, [content])
    groups = [] if saved.optimizer is None else saved.optimizer.groups
    for key, of_group in (("_last_lr", "lr"), ("base_lrs", "initial_lr")):
        rates, own = _numbers(content.get(key)), [_numbers(group.get(of_group)) for group in groups]
        flat = [number for numbers in own for number in numbers]
        if not rates or not flat or not all(map(math.isfinite, (*rates, *flat))):
            continue
        is_equal = len(rates) == len(groups) and all(map(_is_close, rates, flat)) if len(flat) == len(groups) else True
        if not is_equal:
            (saved.wrong if is_certain else saved.note)(
                "optimizer", f"{file} has other learning rates ({key} {_listed(rates)}) than the optimizer's groups "
                f"({of_group} {_listed(flat)}).", [file],
            )  # fmt: skip
            return


def _is_close(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-5, abs_tol=1e-12)


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates[:4])


# ---------------------------------------------------------------- groups and states


def check_optimizer(saved: Saved) -> None:
    """Check the optimizer's groups, and that its states are of a training that these groups describe."""
    facts = saved.optimizer
    if facts is None:
        return
    check_numbers(saved, facts.file, facts.groups)
    of_kind: dict[str, dict[str, str]] = {}  # the kind of a state -> the weight -> the state's name
    for name in saved.states:
        weight, _, kind = name.rpartition("/")
        if weight:
            of_kind.setdefault(kind, {})[weight] = name
    needed = {"exp_avg", "exp_avg_sq"}
    if any("amsgrad" in group for group in facts.groups) and needed & of_kind.keys() and not needed <= of_kind.keys():
        lost = names_text(needed - of_kind.keys())
        saved.wrong("optimizer", f"{facts.file} has no {lost} of any weight, which Adam needs.", [facts.file])
    if needed <= of_kind.keys() and not facts.steps and not saved.format.startswith("DeepSpeed"):
        saved.wrong(
            "optimizer", f"{facts.file} does not count the steps of any weight, so Adam cannot continue.", [facts.file]
        )
    if needed <= of_kind.keys():
        _check_moments(saved, of_kind)


def _check_moments(saved: Saved, of_kind: Mapping[str, Mapping[str, str]]) -> None:
    """Check the moments of Adam against each other."""
    bound = _bound(saved, of_kind.keys())
    weights = of_kind["exp_avg"].keys() & of_kind["exp_avg_sq"].keys()
    found: dict[str, list[str]] = {kind: [] for kind in _CONTRADICTIONS}
    num_signed = 0
    for weight in sorted(weights):
        first, second = (_state(saved, of_kind, weight, kind) for kind in ("exp_avg", "exp_avg_sq"))
        largest = _state(saved, of_kind, weight, "max_exp_avg_sq")
        if first is None or second is None or first.shape != second.shape or not first.numel():
            continue
        num_signed += first.numel() >= _FEWEST
        is_trained = bool(second.any())
        is_exact = first.dtype == second.dtype and first.dtype in (torch.float32, torch.float64)
        if not bool(first.any()):
            found["first zero" if is_trained else "both zero"].append(weight)
        elif same(first, second):
            found["same"].append(weight)
        elif (not is_trained and float(first.abs().max()) > _NO_UNDERFLOW) or (
            is_exact and bound and bool((first**2 > _ROUNDING * bound * second + _UNDERFLOW).any())
        ):
            found["too small"].append(weight)
        elif first.numel() >= _FEWEST and bool((first >= 0).all()):
            found["positive"].append(weight)
        if largest is not None and largest.shape == second.shape and bool((largest < second).any()):
            found["largest"].append(weight)
        if not is_exact and _is_narrower(saved, weight, first):
            found["narrow"].append(weight)
    for kind, (is_alone_wrong, text) in _CONTRADICTIONS.items():
        names = found[kind]
        total = num_signed if kind == "positive" else len(weights)
        if kind == "both zero" and max(saved.optimizer.steps.values() if saved.optimizer else (), default=0) < 2:
            continue  # no gradient has been seen yet
        if names and (is_alone_wrong or (2 * len(names) > total and len(names) > 2)):
            (saved.note if kind == "narrow" else saved.wrong)("optimizer", text, names)


# A contradiction between moments -> whether one weight is enough to be sure, and the text.
_CONTRADICTIONS = {
    "same": (True, "The first and the second moment of these weights have the same values, so one is a copy."),
    "too small": (
        True, "The second moments of these weights are smaller than their first moments allow, so they are of "
        "different trainings or were lost. A resumed training would destroy the weights.",
    ),
    "largest": (True, "The largest second moments of these weights are smaller than the second moments."),
    "first zero": (False, "The first moments of most weights are zero, although the second ones are not."),
    "both zero": (False, "All moments of most weights are zero, so nothing was trained or they were lost."),
    "positive": (False, "The first moments of most weights have no negative values, which no training leaves."),
    "narrow": (True, "These moments have fewer bits than the weights, so a part of their values was rounded away."),
}  # fmt: skip


def _state(saved: Saved, of_kind: Mapping[str, Mapping[str, str]], weight: str, kind: str) -> torch.Tensor | None:
    name = of_kind.get(kind, {}).get(weight)
    values = None if name is None else values_of(saved.states[name])
    return values if values is not None and values.is_floating_point() and bool(values.isfinite().all()) else None


def _is_narrower(saved: Saved, weight: str, moment: torch.Tensor) -> bool:
    """Return whether a moment has 16 bits, although the weights have more."""
    own = saved.tensors.get(weight)
    types = {own.dtype} if own is not None else {tensor.dtype for tensor in saved.tensors.values() if tensor.is_float}
    return moment.element_size() < 4 and bool(types) and types <= set(WIDEST_FIRST[:2])


def _bound(saved: Saved, kinds: Iterable[str]) -> float:
    """Return how many times as large as the second moment the square of a first moment of Adam can be.

    Both are sums over all gradients, so the Cauchy-Schwarz inequality holds. 0 if the optimizer may not be Adam.
    """
    groups = [] if saved.optimizer is None else saved.optimizer.groups
    if not groups or not {*kinds} <= _MOMENTS or any(not group.keys() <= _ADAM for group in groups):
        return 0.0
    steps = min(10_000, int(max((saved.optimizer.steps if saved.optimizer else {}).values(), default=10_000)))
    bounds = []
    for group in groups:
        betas = _numbers(group.get("betas", (0.9, 0.999)))
        if len(betas) != 2 or not 0 <= betas[0] < 1 or not 0 < betas[1] < 1:
            return 0.0
        ratio = betas[0] ** 2 / betas[1]
        bounds.append((1 - betas[0]) ** 2 / (1 - betas[1]) * sum(ratio**power for power in range(max(1, steps))))
    return max(bounds)


def check_order(saved: Saved, shapes: list[tuple[int, ...]]) -> None:
    """Check that numbered states have the shapes of the model's weights in their order, in each group.

    `shapes` are those of the model's parameters. Libraries put them into groups in the order of the model.
    """
    facts = saved.optimizer
    groups = [] if facts is None else [group.get("params") or [] for group in facts.groups]
    own = [[shape for number in group if (shape := _shape_of(saved, number)) is not None] for group in groups]
    if facts is None or Counter(shape for group in own for shape in group) - Counter(shapes):
        return  # of a model that was built in another way
    is_trainers = saved.step is not None
    for group in own:
        remaining = iter(shapes)
        if not all(shape in remaining for shape in group):
            (saved.wrong if is_trainers else saved.note)(
                "optimizer", f"The states in {facts.file} are not in the order of the model's weights, so a resumed "
                "training uses them for other weights or stops.", [facts.file],
            )  # fmt: skip
            return
    if is_trainers and len(own) == 2 and own[0] and max(map(len, own[0])) < 2 <= max(map(len, own[1]), default=0):
        saved.wrong(
            "optimizer", f"The groups in {facts.file} are in another order than Trainer's, whose first group has the "
            "matrices.", [facts.file],
        )  # fmt: skip


def _shape_of(saved: Saved, number: Any) -> tuple[int, ...] | None:
    states = (saved.states.get(f"weight {number}/{kind}") for kind in _BEFORE)
    return next((state.shape for state in states if state is not None), None)


def check_ids(saved: Saved, file: str, groups: Sequence[Any], numbers: Iterable[Any]) -> None:
    """Check that the groups of an optimizer number its weights as torch does, and that all states belong to them."""
    listed = [number for group in groups for number in (group.get("params") or [])]
    if all(type(number) is int for number in listed) and listed != [*range(len(listed))]:
        saved.wrong(
            "optimizer", f"The groups in {file} do not number the weights from 0 to {len(listed) - 1} in this order, "
            "so groups or weights were lost or exchanged.", [file],
        )  # fmt: skip
    if unknown := [f"weight {number}" for number in numbers if number not in listed]:
        saved.wrong("optimizer", f"{file} has states of weights that are in none of its groups.", unknown)


def check_random_states(saved: Saved, name: str, content: Any) -> None:
    """Report a file of random states that has none, or not those of the CPU."""
    keys = ("cpu", "torch_manual_seed")  # of Trainer, of accelerate
    state = next((content[key] for key in keys if key in content), None) if isinstance(content, dict) else None
    is_other = isinstance(content, dict) and bool(content) and state is None
    if content is not None and not is_other and not (isinstance(state, torch.Tensor) and state.numel()):
        effect = "a resumed training stops, or draws other random numbers"
        saved.wrong("partial", f"{name} has no random states, so {effect}.", [name])


_PACKED = re.compile(r"weight|blocks|W_q|qdata|codes")  # names of quantized weights
_QUANTIZED = re.compile(r"float8.*|float4.*|u?int8")


def check_scales(saved: Saved) -> None:
    """Report quantized weights without the scales by which they are multiplied."""
    scaled = with_scales(saved.tensors)
    lacking = [
        name
        for name, tensor in saved.tensors.items()
        if len(tensor.shape) > 1 and name not in scaled and _PACKED.search(name.rpartition(".")[2])
        if _QUANTIZED.fullmatch(tensor.dtype) or name.endswith("qweight")
    ]
    if lacking:
        saved.wrong("partial", "These weights are quantized, but the scales that they need were not saved.", lacking)
