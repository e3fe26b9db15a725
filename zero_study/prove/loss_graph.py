"""Read from the graph of a loss how much each target counts in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

SAME = 1e-3  # relative; targets whose weights differ by less count equally
SCALE_TOLERANCE = 0.025  # relative; a loss that is scaled by less is not reported
_OF_TARGETS = ("NllLossBackward0", "NllLoss2DBackward0")
# Their sums have no scale that everybody uses, so only their means are compared.
_OF_ELEMENTS = (
    "MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)  # fmt: skip
_MEAN, _SUM = 1, 2  # torch's numbers of reductions


class Weight(NamedTuple):
    """The weight of each target in the loss on which backward is called."""

    of_target: float
    num_targets: float


class Graph(NamedTuple):
    losses: list[Any]  # the nodes of loss functions that are met first
    goes_beside: bool  # the outputs or parameters are reached without passing through one of these nodes
    has_custom_function: bool
    leaves: set[int]  # ids of the parameters that are reached


def walk(roots: Iterable[Any], outputs: Sequence[Any]) -> Graph:
    """Follow the graph from the loss to the nodes of loss functions, of the model's outputs, or of parameters."""
    stops, visited = {id(node) for node in outputs}, dict[int, Any]()
    losses, leaves, is_bypassed, has_custom_function = [], set[int](), False, False
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in visited:
            continue
        visited[id(node)] = node
        if id(node) in stops or hasattr(node, "variable"):
            is_bypassed = True
            leaves |= {id(node.variable)} if hasattr(node, "variable") else set()
        elif _is_loss(node):
            losses.append(node)
        else:
            has_custom_function = has_custom_function or isinstance(node, torch.autograd.function.BackwardCFunction)
            waiting += [following for following, _ in node.next_functions]
    return Graph(losses, is_bypassed, has_custom_function, leaves)


def is_of_targets(graph: Graph) -> bool:
    """Return whether all loss functions of a graph have one target per row of scores, as a cross-entropy has."""
    return bool(graph.losses) and all(node.name() in _OF_TARGETS for node in graph.losses)


def _is_loss(node: Any) -> bool:
    name = node.name()
    return name in _OF_TARGETS or (name in _OF_ELEMENTS and node._saved_reduction == _MEAN)


def weight(losses: Sequence[Any], weights: Sequence[Any], graph: Graph) -> Weight | None:
    """Return by how much each target counts, if all targets count equally and nothing else counts."""
    if not graph.losses or graph.goes_beside:
        return None
    edges = [GradientEdge(node, 0) for node in graph.losses]
    factors = torch.autograd.grad(losses, edges, weights, retain_graph=True, allow_unused=True)
    node_weights = [
        _of_node(node, factor) for node, factor in zip(graph.losses, factors, strict=True) if factor is not None
    ]
    node_weights = [weight for weight in node_weights if weight is None or weight.num_targets]
    defined = [weight for weight in node_weights if weight is not None]
    if not defined or len(defined) != len(node_weights):
        return None
    if len(defined) > 1 and any(node._saved_reduction == _MEAN for node in graph.losses):
        return None  # a sum of several means has no scale that everybody uses
    first = defined[0].of_target
    if any(abs(weight.of_target - first) > SAME * abs(first) for weight in defined):
        return None
    return Weight(first, sum(weight.num_targets for weight in defined))


def _of_node(node: Any, factor: torch.Tensor) -> Weight | None:
    """Return how each target of a loss function counts. None if some count more than others."""
    if node.name() in _OF_ELEMENTS:
        number = node._saved_self.numel()
        return Weight(float(factor) / number, number)
    target = node._saved_target
    is_used = target != node._saved_ignore_index
    of_class = node._saved_weight
    counts = is_used.double() if of_class is None else of_class.double()[target * is_used] * is_used
    if node._saved_reduction in (_MEAN, _SUM):
        number = float(counts.sum())
        return Weight(float(factor) / (number if node._saved_reduction == _MEAN and number else 1.0), number)
    is_used = is_used & (factor != 0)  # a script may mask by itself
    used = factor[is_used].double()
    if not used.numel():
        return Weight(0.0, 0.0)
    if of_class is not None or float(used.max() - used.min()) > SAME * float(used.abs().max()):
        return None
    return Weight(float(used.mean()), float(is_used.sum()))


def scaled_loss(weights: Sequence[Sequence[Sequence[float] | None] | None]) -> tuple[list[str], list[str]]:
    """Return findings and notes on a cross-entropy that is divided by the wrong number.

    `weights` has for each rank, and for each of its backward calls, how much a target counts and the number of targets.
    The targets of all ranks together count as much as one mean over them, because the engine averages over the ranks.
    """
    of_ranks = [list(of_rank or (None,)) for of_rank in weights]
    pairs = [(float(pair[0]), float(pair[1])) for of_rank in of_ranks for pair in of_rank if pair is not None]
    if not pairs or any(pair is None for of_rank in of_ranks for pair in of_rank):
        return [], []
    total = sum(weight * number for weight, number in pairs) / len(weights)
    if not total or not math.isfinite(total) or abs(total - 1) <= SCALE_TOLERANCE:
        return [], []
    name = named_factor(total, len(weights), max(map(len, of_ranks)), [number for _, number in pairs])
    text = (
        f"the loss is scaled: the targets of the step count {total:.4g} times{name} as much as in a mean over the "
        "targets of all ranks and micro batches. Look at what the loss is divided by"
    )
    # A script may add up the losses of several tasks, or use their sum.
    is_certain = name and (total < 1 or ("ranks" in name and "micro" not in name and "targets" not in name))
    return ([f"{text}."], []) if is_certain else ([], [f"{text}, unless that is intended."])


def named_factor(ratio: float, num_ranks: int, num_passes: int, targets: Sequence[float]) -> str:
    """Return what a factor is, as words in brackets. Empty if it is not one of the known numbers.

    `num_passes` is the number of micro batches of a rank, and `targets` has the targets of each micro batch.
    """
    numbers = {
        "the number of ranks": num_ranks,
        "the number of micro batches": num_passes,
        "the number of ranks times micro batches": num_ranks * num_passes if min(num_ranks, num_passes) > 1 else 1,
        "the number of targets": sum(targets),
    }
    if len(set(targets)) == 1:
        numbers |= {"the targets of a rank": targets[0] * num_passes} if num_ranks > 1 else {}
        numbers |= {"the targets of a micro batch": targets[0]} if num_passes > 1 else {}
    for begin, factor in (("", ratio), ("1 divided by ", 1 / ratio if ratio else 0.0)):
        names = [name for name, number in numbers.items() if number > 1 and abs(factor / number - 1) < SCALE_TOLERANCE]
        if names:
            return f" ({begin}{', which is also '.join(names)})"
    return ""
