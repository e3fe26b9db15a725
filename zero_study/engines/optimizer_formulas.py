"""Compute one update of each known optimizer by a formula, without the optimizer itself.

The formulas call no optimizer, so that a mistake in a library's optimizer is found. `prove` applies them to a step of a
training, and `conformance` trains its reference with them. States and settings have the names and the defaults of
torch.optim. This module needs only torch, and runs under any release of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

States = dict[str, torch.Tensor]
Rounded = Callable[[torch.Tensor], torch.Tensor]  # gives a result the rounding error of the type it is computed in

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
SMALLEST_NORM = 1e-7  # of a matrix that Muon orthogonalizes
ADAFACTOR_DECAY, ADAFACTOR_EPS, ADAFACTOR_CLIPPING = -0.8, (None, 1e-3), 1.0


class UpdateInputs(NamedTuple):
    """The inputs from which an optimizer computes the update of a parameter, or of a part of it.

    A part is enough for a formula that works element by element.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    states: States  # before the update; a state that is missing is zero
    settings: dict[str, Any]  # of the parameter group
    number: int | None  # the number of this update, from 1; None if the optimizer does not count
    eps: float  # of the weight's own type, as torch.finfo has it
    has_draws: bool = False  # whether each row of the tensors is a parameter of its own, as in conformance's reference


class Change(NamedTuple):
    """The change of a weight by an update: it multiplies the weight by 1 - `decay`, and adds `step`."""

    step: torch.Tensor
    decay: float  # decoupled weight decay; 0 if weight decay is a part of the gradient
    states: States  # after the update

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the change of the weight by an update."""
        return self.step - self.decay * weight

    def applied_to(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight after the update."""
        return weight * (1 - self.decay) + self.step


Formula = Callable[[UpdateInputs], Change]


def adamw(inputs: UpdateInputs) -> Change:
    """Return the change of a parameter by AdamW, which decouples weight decay (arXiv:1711.05101)."""
    return _adam(inputs, _ascending(inputs), _rate(inputs) * _decay(inputs))


def adam(inputs: UpdateInputs) -> Change:
    """Return the change of a parameter by Adam (arXiv:1412.6980)."""
    return _adam(inputs, _decayed(inputs), 0.0)


def _adam(inputs: UpdateInputs, gradient: torch.Tensor, decay: float) -> Change:
    settings, number = inputs.settings, inputs.number
    beta1, beta2 = (float(beta) for beta in settings["betas"])
    first = (_state(inputs, "exp_avg") * beta1).add(gradient, alpha=1 - beta1)
    second = (_state(inputs, "exp_avg_sq") * beta2).add(gradient.square(), alpha=1 - beta2)
    states = {"exp_avg": first, "exp_avg_sq": second}
    if settings.get("amsgrad"):
        second = states["max_exp_avg_sq"] = torch.maximum(second, _state(inputs, "max_exp_avg_sq"))
    if settings.get("bias_correction", True):
        assert number is not None
        first, second = first / (1 - beta1**number), second / (1 - beta2**number)
    return Change(-_rate(inputs) * first / (second.sqrt() + float(settings["eps"])), decay, states)


def sgd(inputs: UpdateInputs) -> Change:
    """Return the change of a parameter by SGD, with PyTorch's momentum, dampening and Nesterov momentum."""
    settings, gradient = inputs.settings, _decayed(inputs)
    momentum = float(settings["momentum"])
    if not momentum:
        return Change(-_rate(inputs) * gradient, 0.0, {})
    buffer = gradient
    if "momentum_buffer" in inputs.states:
        dampened = 1 - float(settings.get("dampening", 0))
        buffer = (inputs.states["momentum_buffer"] * momentum).add(gradient, alpha=dampened)
    direction = gradient + momentum * buffer if settings.get("nesterov") else buffer
    return Change(-_rate(inputs) * direction, 0.0, {"momentum_buffer": buffer})


def lion(inputs: UpdateInputs) -> Change:
    """Return the change of a parameter by Lion (arXiv:2302.06675)."""
    beta1, beta2 = (float(beta) for beta in inputs.settings["betas"])
    before, rate = _state(inputs, "exp_avg"), _rate(inputs)
    direction = (beta1 * before + (1 - beta1) * inputs.gradient).sign()
    after = (before * beta2).add(inputs.gradient, alpha=1 - beta2)
    return Change(-rate * direction, rate * _decay(inputs), {"exp_avg": after})


def adafactor(inputs: UpdateInputs) -> Change:
    """Return the change of a whole parameter by PyTorch's Adafactor (arXiv:1804.04235).

    The second moment of a matrix is kept as one number per row and one per column. The learning rate is relative to the
    root mean square of the parameter.
    """
    assert inputs.number is not None
    settings, rate, gradient = inputs.settings, _rate(inputs), _ascending(inputs)
    given_eps = settings.get("eps", ADAFACTOR_EPS)
    eps1, eps2 = (inputs.eps if eps is None else float(eps) for eps in given_eps)
    share = inputs.number ** float(settings.get("beta2_decay", ADAFACTOR_DECAY))
    scale = _root_mean_square(inputs, inputs.weight).clamp(min=eps2) * min(rate, inputs.number**-0.5)
    if gradient.ndim - inputs.has_draws > 1:
        row = _state(inputs, "row_var", gradient[..., :1]).lerp(gradient.square().mean(-1, keepdim=True), share)
        column = _state(inputs, "col_var", gradient[..., :1, :])
        column = column.lerp(gradient.square().mean(-2, keepdim=True), share)
        states = {"row_var": row, "col_var": column}
        variance = row @ column / row.mean(-2, keepdim=True).clamp(min=eps1)
    else:
        variance = _state(inputs, "variance").lerp(gradient.square(), share)
        states = {"variance": variance}
    update = gradient * variance.clamp(min=eps1**2).rsqrt()
    longest = float(settings.get("d", ADAFACTOR_CLIPPING))
    too_long = (_root_mean_square(inputs, update) / longest).clamp(min=1)
    return Change(-(scale / too_long) * update, rate * _decay(inputs), states)


def muon(inputs: UpdateInputs, rounded: Rounded = torch.Tensor.float) -> Change:
    """Return the change of a whole matrix by Muon: its momentum, orthogonalized by a Newton-Schulz iteration.

    DeepSpeed's MuonWithAuxAdam does the same as torch.optim.Muon with its defaults. `rounded` is for `orthogonalized`.
    """
    settings, rate, gradient = inputs.settings, _rate(inputs), inputs.gradient
    momentum = float(settings["momentum"])
    buffer = _state(inputs, "momentum_buffer").lerp(gradient, 1 - momentum)
    direction = gradient.lerp(buffer, momentum) if settings.get("nesterov", True) else buffer
    coefficients = settings.get("ns_coefficients", NEWTON_SCHULZ)
    direction = orthogonalized(direction, coefficients, settings.get("ns_steps", NEWTON_SCHULZ_STEPS), rounded)
    rows, columns = gradient.shape[-2:]
    is_like_adamw = settings.get("adjust_lr_fn") == "match_rms_adamw"
    ratio = 0.2 * math.sqrt(max(rows, columns)) if is_like_adamw else math.sqrt(max(1, rows / columns))
    return Change(-(rate * ratio) * direction, rate * _decay(inputs), {"momentum_buffer": buffer})


def orthogonalized(
    matrix: torch.Tensor,
    coefficients: tuple[float, ...] = NEWTON_SCHULZ,
    steps: int = NEWTON_SCHULZ_STEPS,
    rounded: Rounded = torch.Tensor.float,
) -> torch.Tensor:
    """Return matrices with their singular values replaced by values near 1, by Muon's Newton-Schulz iteration.

    `rounded` is applied to every result within the iteration. By default, the iteration is computed in float32.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    current = matrix.mT if is_tall else matrix
    current = rounded(current / current.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM))
    for _ in range(steps):
        gram = rounded(current @ current.mT)
        polynomial = rounded(b * gram + c * rounded(gram @ gram))
        current = rounded(a * current + rounded(polynomial @ current))
    return (current.mT if is_tall else current).to(matrix.dtype)


def _state(inputs: UpdateInputs, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
    state = inputs.states.get(name)
    return torch.zeros_like(inputs.gradient if like is None else like) if state is None else state


def _ascending(inputs: UpdateInputs) -> torch.Tensor:
    return -inputs.gradient if inputs.settings.get("maximize") else inputs.gradient


def _decayed(inputs: UpdateInputs) -> torch.Tensor:
    """Return the gradient plus the weight decay."""
    return _ascending(inputs) + _decay(inputs) * inputs.weight


def _rate(inputs: UpdateInputs) -> float:
    return float(inputs.settings["lr"])


def _decay(inputs: UpdateInputs) -> float:
    return float(inputs.settings.get("weight_decay") or 0)


def _root_mean_square(inputs: UpdateInputs, values: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of a tensor (or of each row of draws), in a shape that broadcasts over `values`."""
    of_each = values.flatten(int(inputs.has_draws)).square().mean(-1).sqrt()
    return of_each.reshape(*of_each.shape, *[1] * (values.ndim - of_each.ndim))
