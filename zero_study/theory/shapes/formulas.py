"""Compute the counts of common architectures from the numbers of their configuration, without PyTorch.

architectures.json has, by model_type, the counts of zero_study/dryrun/count.py as formulas of a few numbers, such as
"4*hidden + 2*queries". tools/collect/architecture_formulas.py derives them from traces of models of many sizes. The
numbers are `hidden`, `queries` (heads times the size of a head), `keys` (the same for key and value heads),
`feed_forward`, `heads`, `kv_heads`, `head_size`, `vocabulary`, `positions`, `labels`, for mixtures `experts` and
`active` (experts per token), and those of `ModelType.more`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from zero_study.theory.shapes.counts import Item, ModelCounts, PartCounts, Polynomial, SettingCounts

FORMULAS_FILE = Path(__file__).with_name("architectures.json")
MAXIMUM = " | "  # separates formulas of which the largest counts


@cache
def architectures() -> dict[str, Any]:
    """Return the content of architectures.json: the formulas by model_type."""
    content: dict[str, Any] = json.loads(FORMULAS_FILE.read_text(encoding="utf-8"))
    return content


def evaluate(formula: str, numbers: Mapping[str, float]) -> float:
    """Return the value of a formula: a sum of products, or the largest of several sums."""
    return max(sum(_product(term.split("*"), numbers) for term in each.split(" + ")) for each in formula.split(MAXIMUM))


def _product(factors: Sequence[str], numbers: Mapping[str, float]) -> float:
    result: float = 1
    for factor in factors:
        result *= numbers[factor] if factor[0].isalpha() else float(factor)
    return result


def counts(
    model_type: str, numbers: Mapping[str, float], class_name: str, tied: bool, variant: str, layers: Sequence[str]
) -> ModelCounts:
    """Return the counts of a model (parameters, saved bytes, FLOPs) by the formulas of its model_type.

    `variant` names the settings that differ from those of most models, `tied` says whether the output layer shares the
    weights of the embedding, and `layers` has the kind of each block. Raises KeyError if there is no formula for one of
    these.
    """
    formulas = architectures()[model_type]
    outside = formulas["outsides"][f"{class_name} tied" if tied else class_name]
    blocks = formulas["blocks"][variant]
    names = list(dict.fromkeys(layers))
    executed = tuple(names.index(name) for name in layers)
    return ModelCounts(
        outside=_part(outside["part"], numbers),
        before=_layout(outside["before"]),
        after=_layout(outside["after"]),
        kinds=tuple(_part(blocks[name], numbers) for name in names),
        executed=executed,
        copies=tuple(executed.count(kind) for kind in range(len(names))),
        hidden=int(numbers["hidden"]),
        logits=_polynomial(outside["logits"], numbers),
        output=tuple(outside["output"]),
        embedding=outside["embedding"],
        tied=tied,
    )


def _part(part: Mapping[str, Any], numbers: Mapping[str, float]) -> PartCounts:
    sizes = [(_whole(rows, numbers), _whole(columns, numbers)) for rows, columns in part["sizes"]]
    return PartCounts(
        parameters=tuple(rows * columns for rows, columns in sizes),
        rows=tuple(rows for rows, _ in sizes),
        vectors=tuple(part["vectors"]),
        linear=tuple(part["linear"]),
        layout=_layout(part["layout"]),
        attention_parameters=_whole(part["attention_parameters"], numbers),
        products=_polynomial(part["products"], numbers),
        product_elements=_polynomial(part["product_elements"], numbers),
        weights=_whole(part["weights"], numbers),
        attention=_polynomial(part["attention"], numbers),
        causal=part["causal"],
        composed=_polynomial(part["composed"], numbers),
        gated=_polynomial(part["gated"], numbers),
        fused_forward=_polynomial(part["fused_forward"], numbers),
        fused_backward=_polynomial(part["fused_backward"], numbers),
        unused_experts=_whole(part["unused_experts"], numbers),
        dropped=_polynomial(part["dropped"], numbers),
        dropped_scores=_polynomial(part["dropped_scores"], numbers),
        ends_in_dropout=part["ends_in_dropout"],
        buffers=_whole(part["buffers"], numbers),
        settings={name: _setting(setting, numbers) for name, setting in part["settings"].items()},
    )


def _setting(setting: Mapping[str, Any], numbers: Mapping[str, float]) -> SettingCounts:
    return SettingCounts(
        saved=_polynomial(setting["saved"], numbers),
        entering=_polynomial(setting["entering"], numbers),
        temporary=_polynomial(setting["temporary"], numbers),
        moved_forward=_polynomial(setting["moved_forward"], numbers),
        moved_backward=_polynomial(setting["moved_backward"], numbers),
        kernels=setting["kernels"],
        casts=_whole(setting["casts"], numbers),
        temporary_elsewhere=_polynomial(setting.get("temporary_elsewhere", "0"), numbers),
    )


def _polynomial(formulas: str | Sequence[str], numbers: Mapping[str, float]) -> Polynomial:
    """Return a polynomial from the formulas of its three numbers, or from the formula of its number per token."""
    if isinstance(formulas, str):
        return Polynomial(0.0, evaluate(formulas, numbers))
    return Polynomial(*(evaluate(formula, numbers) for formula in formulas))


def _whole(formula: str, numbers: Mapping[str, float]) -> int:
    return round(evaluate(formula, numbers))


def _layout(content: Sequence[Any]) -> tuple[Item, ...]:
    return tuple(item if isinstance(item, str) else tuple(item) for item in content)
