"""Choose the formula that a parameter group's update must follow, and how much the update may differ from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..engines.optimizer_formulas import Formula, UpdateInputs, adafactor, adam, adamw, lion, muon, sgd

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


class Rule(NamedTuple):
    """The rule by which an optimizer updates the parameters of one group."""

    name: str  # for messages
    formula: Formula
    states: tuple[str, ...]  # the names of the states that it keeps
    needs_number: bool = False
    is_elementwise: bool = True
    tolerance: float = TOLERANCE

    def rounding(self, inputs: UpdateInputs, change: torch.Tensor) -> float:
        """Return the norm of the difference that rounding of intermediate results may cause. It is 0 except for Muon.

        `change` is the change of the weight that the formula gives for `inputs`.
        """
        if self.formula is not muon:
            return 0.0
        states = {key: state.bfloat16().double() for key, state in inputs.states.items()}
        rounded = inputs._replace(gradient=inputs.gradient.bfloat16().double(), states=states)
        return ROUNDINGS_OF_MUON * float((muon(rounded).of(inputs.weight) - change).norm())


MUON = Rule("Muon", muon, ("momentum_buffer",), is_elementwise=False, tolerance=TOLERANCE_OF_MUON)


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
            return Rule(name, sgd, ("momentum_buffer",) if group["momentum"] else ())
        if name == "Muon":
            return MUON
        if name == "Adafactor":
            return Rule(name, adafactor, ("row_var", "col_var", "variance"), needs_number=True, is_elementwise=False)
    if module.startswith("deepspeed."):
        if name == "MuonWithAuxAdam" and group["use_muon"]:
            return MUON
        if name in ("DeepSpeedCPUAdam", "FusedAdam", "MuonWithAuxAdam"):
            return _adam("Adam", bool(getattr(optimizer, "adam_w_mode", True)), group)
        if name in ("DeepSpeedCPULion", "FusedLion"):
            return Rule("Lion", lion, ("exp_avg",))
    return None


def _adam(name: str, is_decoupled: bool, group: dict[str, Any]) -> Rule:
    states = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else []))
    return Rule(name, adamw if is_decoupled else adam, states, needs_number=True)
