"""Check the update of a step: compare the change of the weights with what the optimizer's formula gives.

The formula gets what the optimizer gets: its own tensors (the master weights, if there are any), their gradients after
clipping, its states before the step, and the settings of the parameter group. A formula that works element by element
is checked on a sample of the elements of every parameter. Adafactor's and Muon's formulas need whole parameters, and
are checked on a few of them. No collective is issued.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypedDict

import torch

from .. import terminal
from ..engines.optimizer_formulas import States, UpdateInputs
from ..engines.readback.fragments import Fragment, elements, fragments_of
from ..engines.readback.full_tensors import kind_of_state
from ..engines.readback.parameters import local
from . import muon, rules
from .rules import Rule

MOST_ELEMENTS = 2**20  # of all parameters of a rank together that are compared element by element
LEAST_ELEMENTS = 64  # of each parameter, even if there are very many parameters
# A weight is rounded when it is stored, by up to half of its type's eps, and a second time by a separate weight decay.
# Rounding may explain a difference of this many eps of each weight.
ROUNDINGS = 2
# If rounding may cause a difference larger than this fraction of the change, it hides whether the change is right. For
# Muon, whose tolerance is larger, the limit is this many tolerances, which is half of the change.
HIDDEN = 0.1
HIDDEN_TOLERANCES = 5
NO_FORMULA = "prove has no formula for "
HIDDEN_BY_ROUNDING = "rounding is too large to tell whether the update is right"
LOST_BY_ROUNDING = "rounding is too large and loses the whole update"
OF_SAMPLE = "'s formula is checked on a few parameters"


class UpdateReport(TypedDict):
    """The observations of one rank about the update. They can be written as JSON."""

    compared: dict[str, list[Any]]  # name of a parameter -> rule, tolerance, and the fields of a Comparison
    shards: dict[str, muon.Shard]  # of the matrices that the ranks exchange
    unchecked: dict[str, str]  # name of a parameter -> why its update is not checked
    stateless: dict[str, list[int]]  # rule -> how many tensors lack states, and how many there are
    kinds: dict[str, list[str]]  # name of a parameter -> kinds of its states, for example "exp_avg: float32"
    changed: list[str]  # parameters whose states are of another kind because they are sharded
    wrong_states: list[list[str]]  # pairs of a state and a parameter
    reason: str | None  # why nothing is checked
    error: str | None
    without_muon: list[str]  # the matrices, if Muon trains none of them


class Comparison(NamedTuple):
    """Sums that compare a parameter's change with its formula. Sums of several ranks can be added."""

    actual: float  # of squares of the change
    expected: float  # of squares of the change that the formula gives
    product: float  # of products of the two
    difference: float  # of squares of their difference
    rounding: float  # of squares of the difference that rounding may cause

    @property
    def ratio(self) -> float:
        """The norm of the change, divided by the norm of the change that the formula gives."""
        return math.sqrt(self.actual / self.expected) if self.expected else math.inf if self.actual else 1.0

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the change and the change that the formula gives."""
        lengths = math.sqrt(self.actual) * math.sqrt(self.expected)
        return self.product / lengths if lengths else 1.0

    def is_right(self, tolerance: float) -> bool:
        """Return whether tolerance and rounding explain the difference between change and formula."""
        allowed = tolerance * math.sqrt(self.expected) + math.sqrt(self.rounding)
        return math.sqrt(self.difference) <= allowed

    def is_hidden(self, tolerance: float) -> bool:
        """Return whether rounding is large enough to hide a wrong change."""
        return math.sqrt(self.rounding) > max(HIDDEN, HIDDEN_TOLERANCES * tolerance) * math.sqrt(self.expected) > 0


class _Part(NamedTuple):
    """What the optimizer got of one parameter before the update."""

    fragment: Fragment
    rule: Rule
    tensor: Any  # that the optimizer updates
    stride: int  # every so many elements are compared; 0: the whole parameter
    inputs: UpdateInputs


class Update:
    """The update of one step, observed from the beginning of the step to the end of its update."""

    def __init__(self, model: Any, optimizer: Any, base: Any, has_states_on_disk: bool) -> None:
        """Begin to observe. `optimizer` holds the model states, and `base` does the arithmetic."""
        # ZeroRedundancyOptimizer has another optimizer inside, which does the arithmetic.
        inner = getattr(base, "optim", None)
        has_formula = any(rules.rule_of(base, group) is not None for group in base.param_groups)
        with_formula = inner if isinstance(inner, torch.optim.Optimizer) and not has_formula else base
        self._model, self._optimizer, self._base = model, optimizer, with_formula
        self.squares, self.num_elements = 0.0, 0  # of the gradients that the optimizer got on this rank
        self._reason = "its states are on a disk" if has_states_on_disk else None  # why nothing is checked
        self._error: str | None = None
        self._fragments: dict[int, list[Fragment]] = {}  # of the tensors of the optimizer, by their id
        self._tensors: dict[int, tuple[str, Rule | None, Any]] = {}  # id -> name, rule, tensor; of those with gradients
        self._parts: list[_Part] = []
        self._shards: dict[str, tuple[Any, torch.Tensor, muon.Shard]] = {}  # name -> tensor, weight before, shard
        self._unchecked: dict[str, str] = {}  # name of a parameter -> why its update is not checked
        self._zero = muon.ZeroMuonTracker(model, optimizer, self._base)

    def begin_forward(self) -> None:
        """Record the values that change before the update, at the beginning of the step's first forward pass."""
        if not self._zero.is_in_use:
            return
        try:
            with torch.no_grad():
                self._zero.begin_forward(self._find_fragments())
        except Exception as error:  # the training continues
            self._error = f"{type(error).__name__}: {error}"

    def in_backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward call, in which gradients are observed that ZeRO changes before the update."""
        return self._zero.in_backward()

    def note_before(self, optimizer: Any) -> None:
        """Record the inputs of an optimizer at the beginning of its update. Other optimizers are ignored.

        DeepSpeed updates in several calls, one per group of parameters.
        """
        if optimizer is not self._base or self._reason or self._error:
            return
        try:
            with torch.no_grad():
                self._find_fragments()
                for index, group in enumerate(optimizer.param_groups):
                    self._note_group(optimizer, index, group)
        except Exception as error:  # the other results of the proof do not depend on it
            self._error = f"{type(error).__name__}: {error}"

    @property
    def arithmetic(self) -> Any:
        """The optimizer that does the arithmetic."""
        return self._base

    def note_sample(self, group: dict[str, Any], tensor: Any, fragment: Fragment) -> None:
        """Record the inputs of the update of one part of a parameter, whose rule must work element by element."""
        rule = rules.rule_of(self._base, group)
        assert rule is not None
        with torch.no_grad():
            if reason := self._note_part(self._base, group, rule, tensor, fragment, 1):
                self._unchecked[fragment.name] = reason

    def _find_fragments(self) -> dict[int, list[Fragment]]:
        self._fragments = self._fragments or fragments_of(self._model, self._optimizer)
        return self._fragments

    def _note_group(self, optimizer: Any, index: int, group: dict[str, Any]) -> None:
        rule = rules.rule_of(optimizer, group)
        tensors = [t for t in group["params"] if t.grad is not None and id(t) not in self._tensors]
        self._add_squares(optimizer, tensors)
        smallest = _smallest(tensors)
        quota = max(LEAST_ELEMENTS, MOST_ELEMENTS // max(1, len(self._fragments)))
        for position, tensor in enumerate(tensors):
            unnamed = f"tensor {position} of parameter group {index}"
            fragments = self._fragments.get(id(tensor), [Fragment(unnamed, None, 0, 0, local(tensor).numel())])
            self._tensors[id(tensor)] = (fragments[0].name, rule, tensor)
            for fragment in (fragment for fragment in fragments if fragment.size):
                if rule is None:
                    reason = f"{NO_FORMULA}{type(optimizer).__name__}"
                elif self._zero.has(fragment):
                    self._zero.note_before(group, tensor, fragment)
                    continue
                elif not rule.is_elementwise and id(tensor) not in smallest:
                    reason = f"{rule.name}{OF_SAMPLE}"
                else:
                    stride = math.ceil(fragment.size / quota) if rule.is_elementwise else 0
                    reason = self._note_part(optimizer, group, rule, tensor, fragment, stride)
                if reason:
                    self._unchecked[fragment.name] = reason

    def _add_squares(self, optimizer: Any, tensors: Sequence[Any]) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # that a fused optimizer divides the gradients by
        for gradient in (local(tensor.grad) for tensor in tensors):
            wide = torch.promote_types(gradient.dtype, torch.float32)
            norm = float(torch.linalg.vector_norm(gradient, dtype=wide))
            self.squares += (norm if scale is None else norm / float(scale)) ** 2
            self.num_elements += gradient.numel()

    def _note_part(
        self, optimizer: Any, group: dict[str, Any], rule: Rule, tensor: Any, fragment: Fragment, stride: int
    ) -> str:
        """Record what the optimizer gets of a parameter. Return why that is not possible, or an empty text."""
        states = optimizer.state.get(tensor, {})
        kept = {key: states[key] for key in rule.states if isinstance(states.get(key), torch.Tensor)}
        number = states.get("step", group.get("step"))
        if (
            type(optimizer).__name__ == "FusedAdam"
        ):  # it counts only for the last tensor of a group, and uses that number
            numbers = (optimizer.state.get(own, {}).get("step", 0) for own in group["params"])
            number = max(number or 0, *numbers, 0)
        overflow, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if tensor.is_complex() or tensor.grad.is_sparse:
            return "complex parameters and sparse gradients are not checked"
        gradient = _placed_as(tensor, tensor.grad)
        if gradient is None:
            return "its gradient is sharded differently"
        if overflow is not None and float(overflow):
            return "the update was skipped because of an overflow"
        if rule.needs_number and (number is None or not kept):
            return f"{rule.name} had no states for it before the step"
        if not stride and local(tensor).shape != tensor.shape:
            return self._note_shard(group, rule, tensor, gradient, fragment, kept)

        def values(of: Any) -> torch.Tensor:
            return elements(of, fragment, stride) if stride else _whole(of)

        # With a fused optimizer, GradScaler leaves it to the optimizer to unscale the gradients.
        factor = 1 if scale is None else 1 / float(scale)
        inputs = UpdateInputs(
            values(tensor),
            values(gradient) * factor,
            {key: values(value) for key, value in kept.items()},
            {key: value for key, value in group.items() if key != "params"},
            None if number is None else int(number) + 1,
            torch.finfo(tensor.dtype).eps,
        )
        if any(each.dtype in (torch.bfloat16, torch.float16) for each in (tensor, *kept.values())):
            rule = rule._replace(tolerance=max(rule.tolerance, rules.TOLERANCE_OF_16_BITS))
        self._parts.append(_Part(fragment, rule, tensor, stride, inputs))
        return ""

    def _note_shard(
        self, group: dict[str, Any], rule: Rule, tensor: Any, gradient: Any, fragment: Fragment, kept: dict[str, Any]
    ) -> str:
        """Record this rank's part of a matrix, which the ranks exchange. Return why that is not possible."""
        settings = muon.settings_of(group)
        shard = muon.shard_of_matrix(tensor, settings) if rule.name == "Muon" else None
        if shard is None:
            return f"{rule.name}'s formula needs the whole parameter"
        start, weight = shard.pop("start"), elements(tensor, fragment)
        for key, value in {"weight": tensor, "gradient": gradient, **kept}.items():
            shard[key] = muon.packed(elements(value, fragment), start)
        self._shards[fragment.name] = (tensor, weight, shard)
        return ""

    # ---------------------------------------------------------------- after the update

    def report(self) -> UpdateReport:
        """Return what this rank observed of the update. The result may be written as JSON."""
        report: UpdateReport = {
            "compared": {}, "shards": {}, "unchecked": {}, "stateless": {}, "kinds": {}, "changed": [],
            "wrong_states": [], "reason": self._reason, "error": None, "without_muon": self._zero.lost,
        }  # fmt: skip
        if not (self._reason or self._error):
            try:
                with torch.no_grad():
                    self._fill(report)
            except Exception as error:  # the other results of the proof do not depend on it
                self._error = f"{type(error).__name__}: {error}"
        report["error"] = self._error
        return report

    def _fill(self, report: UpdateReport) -> None:
        for part in self._parts:
            inputs, name = part.inputs, part.fragment.name
            if not all(bool(values.isfinite().all()) for values in (inputs.weight, inputs.gradient)):
                self._unchecked[name] = "its weight or gradient is not finite"
                continue
            after = elements(part.tensor, part.fragment, part.stride) if part.stride else _whole(part.tensor)
            change = part.rule.formula(inputs)
            expected = change.of(inputs.weight)
            values = compare(after - inputs.weight, expected, inputs, part.rule.rounding(inputs, expected))
            report["compared"][name] = [part.rule.name, part.rule.tolerance, *values]
            if part.rule.is_elementwise:
                report["wrong_states"] += self._wrong_states(part, change.states)
        self._zero.end()
        for name, (tensor, weight, shard) in self._shards.items():
            start = shard["weight"]["start"]
            shard["change"] = muon.packed(local(tensor).reshape(-1).cpu().double() - weight, start)
            report["shards"][name] = shard
        report["shards"] |= self._zero.shards
        report["unchecked"] = self._unchecked | self._zero.unchecked()
        report["stateless"] = self._stateless()
        report["kinds"] = self._kinds()
        report["changed"] = self._changed_by_sharding()

    def _wrong_states(self, part: _Part, right: States) -> list[list[str]]:
        """Return those states of a parameter that the update did not leave as the formula gives, with its name."""
        states, wrong = self._base.state.get(part.tensor, {}), list[list[str]]()
        for key, expected in right.items():
            if not isinstance(states.get(key), torch.Tensor):
                continue  # reported as an optimizer without states
            actual = elements(states[key], part.fragment, part.stride)
            before = part.inputs.states.get(key, torch.zeros_like(expected))
            allowed = part.rule.tolerance * float(expected.norm()) + ROUNDINGS * part.inputs.eps * float(before.norm())
            if float((actual - expected).norm()) > allowed:
                wrong.append([key, part.fragment.name])
        return wrong

    def _stateless(self) -> dict[str, list[int]]:
        """Return for each rule how many tensors lack states after the update, and how many there are.

        Rules that keep no states are left out.
        """
        counts: dict[str, list[int]] = {}
        for _, rule, tensor in self._tensors.values():
            if rule is not None and rule.states and local(tensor).numel():
                states = self._base.state.get(tensor, {})
                count = counts.setdefault(rule.name, [0, 0])
                count[0] += not any(isinstance(states.get(key), torch.Tensor) for key in rule.states)
                count[1] += 1
        return counts

    def _kinds(self) -> dict[str, list[str]]:
        """Return the kinds of the states of each of the model's own parameters, for example "exp_avg: float32"."""
        own = ((name, t) for name, _, t in self._tensors.values() if id(t) in self._fragments and local(t).numel())
        return {name: [f"{key}: {kind}" for key, kind in _kinds_of(self._base.state.get(t, {}))] for name, t in own}

    def _changed_by_sharding(self) -> list[str]:
        """Return the names of parameters for which the optimizer would keep other states if they were not sharded.

        Only torchao's low-bit optimizers have a method that tells this.
        """
        make = getattr(self._base, "_new_buffer", None)
        names = []
        for name, _, tensor in self._tensors.values():
            shard, size = local(tensor), tensor.numel()
            if make is None or not 0 < shard.numel() < size <= muon.LARGEST_MATRIX:
                continue
            kinds = {kind for key, kind in _kinds_of(self._base.state.get(tensor, {})) if key != "step"}
            whole = torch.empty(tuple(tensor.shape), dtype=shard.dtype, device=shard.device)
            if kinds and kind_of_state(make(whole, True)) not in kinds:
                names.append(name)
        return names


def compare(
    actual: torch.Tensor, expected: torch.Tensor, inputs: UpdateInputs, rounding_inside: float = 0.0
) -> Comparison:
    """Compare a parameter's change with the one that the optimizer's formula gives.

    `rounding_inside` is the norm of the difference that rounding within the formula may cause.
    """
    rounding = (ROUNDINGS * inputs.eps) ** 2 * inputs.weight.square().sum() + rounding_inside**2
    difference = (actual - expected).square().sum()
    sums = (actual.square().sum(), expected.square().sum(), (actual * expected).sum(), difference, rounding)
    return Comparison(*map(float, sums))


def _smallest(tensors: Iterable[Any]) -> set[int]:
    """Return the ids of the smallest matrices and vectors of a group, for formulas that need whole parameters."""
    ordered = sorted((t for t in tensors if t.numel() <= muon.LARGEST_MATRIX), key=lambda t: int(t.numel()))
    kinds = ([t for t in ordered if (t.dim() > 1) == is_matrix] for is_matrix in (True, False))
    return {id(t) for kind in kinds for t in kind[: muon.MATRICES_OF_GROUP]}


def _placed_as(tensor: Any, gradient: Any) -> Any | None:
    """Return a gradient with the placements of its tensor, or None if that needs a collective.

    Tensor parallelism leaves the whole gradient of an embedding whose rows are divided on every rank.
    """
    placements, of_gradient = getattr(tensor, "placements", ()), getattr(gradient, "placements", ())
    if not placements or placements == of_gradient:
        return gradient
    is_whole = of_gradient and all(placement.is_replicate() for placement in of_gradient)
    return gradient.redistribute(placements=placements) if is_whole else None


def _whole(tensor: Any) -> torch.Tensor:
    device = "cpu" if tensor.device.type == "mps" else tensor.device  # mps has no float64
    return local(tensor).detach().to(device, torch.float64, copy=True)


def _kinds_of(states: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted((str(key), kind_of_state(value)) for key, value in states.items() if isinstance(value, torch.Tensor))


# ---------------------------------------------------------------- of all ranks


class Judgment(NamedTuple):
    """The result of checking an update on all ranks."""

    findings: list[str]
    notes: list[str]
    errors: list[str]  # what the check could not do because of an error
    summary: str  # the answer, for the terminal
    numbers: dict[str, Any]  # for proof.json
    not_checked: list[str]  # why the update of most parameters, or of all parameters of an optimizer, is not checked


def judge(reports: Sequence[UpdateReport], device: torch.device | None = None) -> Judgment:
    """Judge the update from the reports of all ranks, which are in rank order.

    `device` is where formulas of whole matrices are computed, the CPU by default.
    """
    unchecked = {name: reason for report in reports for name, reason in report["unchecked"].items()}
    compared = _added(reports)
    for name in sorted({name for report in reports for name in report["shards"]}):
        shards = [report["shards"][name] for report in reports if name in report["shards"]]
        whole = muon.put_together(shards, device or torch.device("cpu"))
        if whole is None:
            unchecked[name] = "parts of the matrix or of its gradient are missing"
        else:
            inputs, change = whole
            expected = rules.MUON.formula(inputs).of(inputs.weight)
            values = compare(change, expected, inputs, rules.MUON.rounding(inputs, expected))
            compared[name] = (rules.MUON.name, rules.MUON.tolerance, values)
    for name, (_, tolerance, values) in list(compared.items()):
        if not math.isfinite(values.difference):
            unchecked[name] = "its weight or its change is not finite"
        elif values.is_right(tolerance) and values.is_hidden(tolerance):
            unchecked[name] = HIDDEN_BY_ROUNDING if values.actual else LOST_BY_ROUNDING
        else:
            continue
        del compared[name]
    unchecked = {name: reason for name, reason in unchecked.items() if name not in compared}
    findings = [*_without_muon(reports), *_without_states(reports), *_wrong_updates(compared), *_unlike_states(reports),
                *_states_of_another_update(reports, compared)]  # fmt: skip
    reasons = [report["reason"] for report in reports if report["reason"]]
    errors = sorted({report["error"] for report in reports if report["error"]})
    return Judgment(findings, _changed_states(reports), errors, _summary(compared, unchecked, reasons), {
        "num_checked": len(compared),
        "num_not_checked": len(unchecked),
        "not_checked": dict(Counter(unchecked.values())),
        "rules": _rules(compared),
    }, reasons or _missing_checks(compared, unchecked))  # fmt: skip


_Compared = dict[str, tuple[str, float, Comparison]]  # name of a parameter -> rule, tolerance, sums


def _added(reports: Sequence[UpdateReport]) -> _Compared:
    """Return the sums of each parameter over all ranks."""
    added: _Compared = {}
    for report in reports:
        for name, (rule, tolerance, *values) in report["compared"].items():
            before = added[name][2] if name in added else Comparison(0, 0, 0, 0, 0)
            added[name] = (rule, tolerance, Comparison(*(a + b for a, b in zip(before, values, strict=True))))
    return added


def _missing_checks(compared: _Compared, unchecked: dict[str, str]) -> list[str]:
    """Return the reasons why the check of the update could not be made.

    Parameters that move by little more than their rounding do not count if most parameters were compared, because a
    low learning rate does this at the start of a warm-up. A formula that is checked on a sample of the parameters does
    not count either.
    """
    counts = Counter(reason for reason in unchecked.values() if not reason.endswith(OF_SAMPLE))
    if not compared and not counts:
        return ["no parameter had a gradient"]
    is_mostly_compared = len(compared) >= counts.total()
    return [
        f"{reason}: {terminal.count(number, 'parameter')}"
        for reason, number in counts.most_common()
        if reason != HIDDEN_BY_ROUNDING or not is_mostly_compared
    ]


def _rules(compared: _Compared) -> dict[str, dict[str, float]]:
    """Return the extremes of each rule's parameters."""
    rules: dict[str, dict[str, float]] = {}
    for rule in sorted({rule for rule, _, _ in compared.values()}):
        values = [sums for each, _, sums in compared.values() if each == rule]
        rules[rule] = {
            "num_checked": len(values),
            "lowest_norm_ratio": min(sums.ratio for sums in values),
            "highest_norm_ratio": max(sums.ratio for sums in values),
            "lowest_cosine": min(sums.cosine for sums in values),
        }
    return rules


def _wrong_updates(compared: _Compared) -> list[str]:
    """Return one finding per rule whose updates differ from its formula. It names the parameter that differs most."""
    wrong = {name: each for name, each in compared.items() if not each[2].is_right(each[1])}
    findings = []
    for rule in sorted({each[0] for each in wrong.values()}):
        names = [name for name, each in wrong.items() if each[0] == rule]
        worst = max(names, key=lambda name: abs(math.log(max(wrong[name][2].ratio, 1e-30))) - wrong[name][2].cosine)
        values, num = wrong[worst][2], sum(each[0] == rule for each in compared.values())
        findings.append(
            f"the update is not {rule}'s: the update of {worst} is {values.ratio:.3g} times as long as "
            f"{rule}'s formula gives for its gradient, and the cosine between the two is "
            f"{values.cosine:.3f}. {len(names)} of "
            f"the {num} checked parameters differ."
        )
    return findings


def _without_muon(reports: Sequence[UpdateReport]) -> list[str]:
    names: list[str] = next((report["without_muon"] for report in reports if report["without_muon"]), [])
    if not names:
        return []
    return [
        f"Muon trains no matrix: its optimizer trains all parameters with Adam, including {len(names)} "
        f"matrices, for example {names[0]}. Set `parameter.use_muon = True` for the matrices, or create "
        "the model outside of zero.Init."
    ]


def _without_states(reports: Sequence[UpdateReport]) -> list[str]:
    findings = []
    for rule in sorted({rule for report in reports for rule in report["stateless"]}):
        without, num = (sum(report["stateless"].get(rule, (0, 0))[i] for report in reports) for i in (0, 1))
        if without:
            findings.append(
                f"{rule} keeps no states for {without} of {num} tensors, although its formula needs "
                "them. Without these states, the update is that of a different optimizer."
            )
    return findings


def _states_of_another_update(reports: Sequence[UpdateReport], compared: _Compared) -> list[str]:
    """Return a finding on states that are wrong although the weights moved as the formula gives."""
    right = {name for name, (_, tolerance, values) in compared.items() if values.is_right(tolerance)}
    wrong = (pair for report in reports for pair in report["wrong_states"])
    names = list(dict.fromkeys(f"{key} of {name}" for key, name in wrong if name in right))
    if not names:
        return []
    return [
        f"optimizer states are not what the formula gives: {terminal.count(len(names), 'state')}, for "
        f"example {names[0]}. The next updates start from these states. Look for code that changes them "
        "within the update."
    ]


def _unlike_states(reports: Sequence[UpdateReport]) -> list[str]:
    """Return a finding if ranks keep different kinds of states for the same parameter."""
    kinds: dict[str, set[str]] = {}
    for report in reports:
        for name, each in report["kinds"].items():
            kinds.setdefault(name, set()).add(", ".join(each))
    unlike = {name: sorted(each) for name, each in kinds.items() if len(each) > 1}
    if not unlike:
        return []
    first = next(iter(unlike))
    return [
        f"ranks keep different kinds of optimizer states for {terminal.count(len(unlike), 'parameter')}, "
        f"for example {first}: {' or '.join(f'({each})' for each in unlike[first])}. This kind depends on the "
        "size of a rank's shard."
    ]


def _changed_states(reports: Sequence[UpdateReport]) -> list[str]:
    names = list(dict.fromkeys(name for report in reports for name in report["changed"]))
    if not names:
        return []
    return [
        f"sharding changes the kind of optimizer states of {terminal.count(len(names), 'parameter')}, "
        f"for example {names[0]}: the optimizer decides by the size of a rank's shard whether it "
        "quantizes the states. With "
        "another number of ranks, the training differs."
    ]


def _summary(compared: _Compared, unchecked: dict[str, str], reasons: Sequence[str]) -> str:
    """Return the answer in one sentence, or two if some parameters are not checked."""
    if reasons:
        return f"not checked: {reasons[0]}"
    why = "; ".join(f"{reason} ({number})" for reason, number in Counter(unchecked.values()).most_common())
    if not compared:
        return f"not checked: {why or 'no parameter had a gradient'}"
    right = sum(values.is_right(tolerance) for _, tolerance, values in compared.values())
    rules = " and ".join(sorted({rule for rule, _, _ in compared.values()}))
    rest = f"; {len(unchecked)} not checked: {why}" if unchecked else ""
    return (
        f"{right} of {terminal.count(len(compared), 'checked parameter')} changed as the formula of {rules} "
        f"predicts{rest}"
    )
