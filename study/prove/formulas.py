"""The formulas of known optimizers: how one step changes a parameter, computed in float64 from what the step got.

They are written out here, and do not call the optimizers that they check. A formula that works element by element can
be applied to any part of a parameter. The others need the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# How much the change of a parameter may differ from the formula, as a fraction of the length of the formula's change.
# float32: the optimizers' kernels order their operations differently, which changes single elements by 1e-6 or less.
# An element whose momentum and gradient almost cancel differs more, and this tolerance leaves room for a few of them.
TOLERANCE = 1e-3
# 16 bits: an optimizer rounds its states and intermediate results several times, each time by up to 2^-9 = 0.2 % per
# element (bfloat16). Eight such roundings, all in the same direction, are 1.6 %.
TOLERANCE_OF_16_BITS = 0.02
# Muon: for right updates by torch 2.13 and DeepSpeed 0.19.8 (matrices of five shapes, gradients of rank 1 to 64), the
# difference beyond ROUNDINGS_OF_MUON was at most 0.034 of the change.
TOLERANCE_OF_MUON = 0.1
# Muon's iteration runs in 16 bits. It multiplies small singular values by up to 3.4445^5 = 485, and their rounding
# errors, too: for a gradient of rank 1, half of the update is rounding. So the effect of rounding is measured for each
# matrix. The formula is applied a second time, to a gradient and a momentum that are rounded to bfloat16. Rounding may
# explain this many times the difference of the two results.
ROUNDINGS_OF_MUON = 2


class Given(NamedTuple):
    """A parameter, or a part of it, before an update. All tensors are float64 and have the same shape."""

    weight: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, torch.Tensor]  # before the update
    group: dict[str, Any]  # the settings of its parameter group, without the parameters
    number: int | None  # the number of this update, from 1; None if the optimizer does not count
    eps: float  # the relative rounding error of the weight's own type


class Rule(NamedTuple):
    """How an optimizer updates the parameters of one group."""

    name: str  # for messages
    change: Callable[[Given], torch.Tensor]  # returns by how much the weight changes
    states: tuple[str, ...]  # the names of the states that it keeps
    needs_number: bool = False
    is_elementwise: bool = True
    tolerance: float = TOLERANCE
    next_states: Callable[[Given], dict[str, torch.Tensor]] = lambda given: {}  # the states after the update

    def rounding(self, given: Given, change: torch.Tensor) -> float:
        """Return the length of the difference that rounding of intermediate results may cause. It is 0 except for Muon.

        `change` is what `self.change` returns for `given`.
        """
        return rounding_of_muon(given, change, self.change) if self.name == "Muon" else 0.0


def rule_of(optimizer: Any, group: dict[str, Any]) -> Rule | None:
    """Return the rule with which an optimizer updates a parameter group. None if its class is unknown.

    A subclass of a known class is unknown, because it may compute something else.
    """
    kind = type(optimizer)
    name, module = kind.__name__, kind.__module__
    if module == "torch.optim" or module.startswith("torch.optim."):
        if name in ("Adam", "AdamW"):
            return _adam(name, name == "AdamW" or group.get("decoupled_weight_decay", False), group)
        if name == "SGD":
            return Rule(name, sgd, ("momentum_buffer",) if group["momentum"] else (), next_states=states_of_sgd)
        if name == "Muon":
            return _muon(muon)
        if name == "Adafactor":
            return Rule(name, adafactor, ("row_var", "col_var", "variance"), needs_number=True, is_elementwise=False)
    if module.startswith("deepspeed."):
        if name == "MuonWithAuxAdam" and group["use_muon"]:
            return _muon(muon_of_deepspeed)
        if name in ("DeepSpeedCPUAdam", "FusedAdam", "MuonWithAuxAdam"):
            return _adam("Adam", bool(getattr(optimizer, "adam_w_mode", True)), group)
        if name in ("DeepSpeedCPULion", "FusedLion"):
            return Rule("Lion", lion, ("exp_avg",), next_states=states_of_lion)
    return None


def _adam(name: str, is_decoupled: bool, group: dict[str, Any]) -> Rule:
    def change(given: Given) -> torch.Tensor:
        return adam(given, is_decoupled)

    def next_states(given: Given) -> dict[str, torch.Tensor]:
        first, second = moments_of_adam(given, is_decoupled)
        return {"exp_avg": first, "exp_avg_sq": second}

    states = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else []))
    return Rule(name, change, states, needs_number=True, next_states=next_states)


def _muon(change: Callable[[Given], torch.Tensor]) -> Rule:
    return Rule("Muon", change, ("momentum_buffer",), is_elementwise=False, tolerance=TOLERANCE_OF_MUON)


def adam(given: Given, is_decoupled: bool) -> torch.Tensor:
    """Return the change by Adam (arXiv:1412.6980), or with decoupled weight decay by AdamW (arXiv:1711.05101)."""
    group, rate, decay = given.group, _rate(given), _decay(given)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    first, second = moments_of_adam(given, is_decoupled)
    if group.get("amsgrad"):
        second = torch.maximum(second, given.states["max_exp_avg_sq"])
    if group.get("bias_correction", True):
        assert given.number is not None
        first, second = first / (1 - beta1**given.number), second / (1 - beta2**given.number)
    change: torch.Tensor = -rate * first / (second.sqrt() + float(group["eps"]))
    return change - rate * decay * given.weight if is_decoupled else change


def moments_of_adam(given: Given, is_decoupled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Adam's first and second moment after the update."""
    beta1, beta2 = (float(beta) for beta in given.group["betas"])
    gradient = _ascending(given) if is_decoupled else _ascending(given) + _decay(given) * given.weight
    first = beta1 * given.states["exp_avg"] + (1 - beta1) * gradient
    return first, beta2 * given.states["exp_avg_sq"] + (1 - beta2) * gradient**2


def states_of_sgd(given: Given) -> dict[str, torch.Tensor]:
    """Return SGD's momentum after the update. Empty without momentum."""
    momentum, gradient = float(given.group["momentum"]), _ascending(given) + _decay(given) * given.weight
    if not momentum:
        return {}
    if "momentum_buffer" not in given.states:
        return {"momentum_buffer": gradient}
    before = given.states["momentum_buffer"]
    return {"momentum_buffer": momentum * before + (1 - float(given.group["dampening"])) * gradient}


def states_of_lion(given: Given) -> dict[str, torch.Tensor]:
    """Return Lion's momentum after the update."""
    beta2 = float(given.group["betas"][1])
    return {"exp_avg": beta2 * given.states["exp_avg"] + (1 - beta2) * given.gradient}


def sgd(given: Given) -> torch.Tensor:
    """Return the change by SGD, with PyTorch's momentum, dampening and Nesterov momentum."""
    group = given.group
    momentum, gradient = float(group["momentum"]), _ascending(given) + _decay(given) * given.weight
    if momentum:
        buffer = states_of_sgd(given)["momentum_buffer"]
        gradient = gradient + momentum * buffer if group["nesterov"] else buffer
    change: torch.Tensor = -_rate(given) * gradient
    return change


def lion(given: Given) -> torch.Tensor:
    """Return the change by Lion (arXiv:2302.06675)."""
    beta1 = float(given.group["betas"][0])
    direction = (beta1 * given.states["exp_avg"] + (1 - beta1) * given.gradient).sign()
    change: torch.Tensor = -_rate(given) * (direction + _decay(given) * given.weight)
    return change


def adafactor(given: Given) -> torch.Tensor:
    """Return the change by PyTorch's Adafactor (arXiv:1804.04235). Needs the whole parameter."""
    assert given.number is not None
    group, rate, gradient, states = given.group, _rate(given), _ascending(given), given.states
    eps1, eps2 = (given.eps if eps is None else float(eps) for eps in group["eps"])
    share = given.number ** float(group["beta2_decay"])
    alpha = max(eps2, _root_mean_square(given.weight)) * min(rate, given.number**-0.5)
    if gradient.dim() > 1:
        rows = states["row_var"] + share * (gradient.square().mean(-1, keepdim=True) - states["row_var"])
        columns = states["col_var"] + share * (gradient.square().mean(-2, keepdim=True) - states["col_var"])
        variance = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=eps1)
    else:
        variance = states["variance"] + share * (gradient.square() - states["variance"])
    update: torch.Tensor = variance.clamp(min=eps1**2).rsqrt() * gradient
    update = update / max(1.0, _root_mean_square(update) / float(group["d"]))
    change: torch.Tensor = -alpha * update - rate * _decay(given) * given.weight
    return change


def muon(given: Given) -> torch.Tensor:
    """Return the change by torch.optim.Muon. Needs the whole matrix."""
    group = given.group
    rows, columns = given.weight.shape
    kind = group["adjust_lr_fn"]
    ratio = 0.2 * math.sqrt(max(rows, columns)) if kind == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    direction = orthogonalized(_blended(given, group["nesterov"]), group["ns_coefficients"], group["ns_steps"])
    change: torch.Tensor = -_rate(given) * (ratio * direction + _decay(given) * given.weight)
    return change


def muon_of_deepspeed(given: Given) -> torch.Tensor:
    """Return the change by DeepSpeed's MuonWithAuxAdam for one of Muon's matrices. Needs the whole matrix."""
    rows, columns = given.weight.shape
    direction = orthogonalized(_blended(given, True)) * math.sqrt(max(1, rows / columns))
    change: torch.Tensor = -_rate(given) * (direction + _decay(given) * given.weight)
    return change


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, ...] = (3.4445, -4.7750, 2.0315), steps: int = 5
) -> torch.Tensor:
    """Return a matrix with its singular values replaced by values near 1: Muon's Newton-Schulz iteration."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    current: torch.Tensor = (matrix.T if is_tall else matrix).float()  # precise enough for TOLERANCE_OF_MUON
    current = current / current.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = current @ current.T
        current = a * current + (b * gram + c * gram @ gram) @ current
    return (current.T if is_tall else current).double()


def rounding_of_muon(given: Given, change: torch.Tensor, formula: Callable[[Given], torch.Tensor]) -> float:
    """Return the length of the difference that rounding in Muon's iteration may cause."""
    states = {key: state.bfloat16().double() for key, state in given.states.items()}
    rounded = given._replace(gradient=given.gradient.bfloat16().double(), states=states)
    return ROUNDINGS_OF_MUON * float((formula(rounded) - change).norm())


def _blended(given: Given, is_nesterov: bool) -> torch.Tensor:
    """Return the matrix that Muon orthogonalizes: the momentum, or with Nesterov a mean of it and the gradient."""
    momentum = float(given.group["momentum"])
    before = given.states.get("momentum_buffer", torch.zeros_like(given.gradient))
    buffer = momentum * before + (1 - momentum) * given.gradient
    return momentum * buffer + (1 - momentum) * given.gradient if is_nesterov else buffer


def _ascending(given: Given) -> torch.Tensor:
    return -given.gradient if given.group.get("maximize") else given.gradient


def _rate(given: Given) -> float:
    return float(given.group["lr"])


def _decay(given: Given) -> float:
    return float(given.group.get("weight_decay") or 0)


def _root_mean_square(tensor: torch.Tensor) -> float:
    return float(tensor.norm()) / math.sqrt(tensor.numel())
