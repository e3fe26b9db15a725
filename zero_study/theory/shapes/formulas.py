"""Compute the counts of common architectures from the numbers of their configuration, without PyTorch.

architectures.json has, by model_type, the counts of zero_study/dryrun/count.py as formulas of a few numbers, such as
"4*hidden + 2*queries". tools/collect/architecture_formulas.py derives them from traces of models of many sizes.
linear_modules.json has the Linear modules by model_type, and the bytes that a block saves only for the gradients of its
weights. A finished measurement (reports/README.md) read both from small models.

The numbers are `hidden`, `queries` (heads times the size of a head), `keys` (the same for key and value heads),
`feed_forward`, `heads`, `kv_heads`, `head_size`, `vocabulary`, `positions`, `labels`, for mixtures `experts` and
`active` (experts per token), and those of `ModelType.more`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from zero_study.theory.shapes.counts import Item, LinearCounts, ModelCounts, PartCounts, Polynomial, SettingCounts

FORMULAS_FILE = Path(__file__).with_name("architectures.json")
LINEAR_MODULES_FILE = Path(__file__).with_name("linear_modules.json")
MAXIMUM = " | "  # separates formulas of which the largest counts


@cache
def architectures() -> dict[str, Any]:
    """Return the content of architectures.json: the formulas by model_type."""
    content: dict[str, Any] = json.loads(FORMULAS_FILE.read_text(encoding="utf-8"))
    return content


@cache
def linear_modules() -> dict[str, Any]:
    """Return the content of linear_modules.json: the Linear modules by model_type."""
    content: dict[str, Any] = json.loads(LINEAR_MODULES_FILE.read_text(encoding="utf-8"))
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
    modules = linear_modules().get(model_type, {"blocks": {"block": {}}, "outsides": {}})
    of_blocks = modules["blocks"]
    only = next(iter(of_blocks.values())) if len(of_blocks) == 1 else None  # if all kinds have the same modules
    return ModelCounts(
        outside=_part(outside["part"], numbers, modules["outsides"].get(class_name, {})),
        before=_layout(outside["before"]),
        after=_layout(outside["after"]),
        kinds=tuple(_part(blocks[name], numbers, only or of_blocks.get(name, {})) for name in names),
        executed=executed,
        copies=tuple(executed.count(kind) for kind in range(len(names))),
        hidden=int(numbers["hidden"]),
        logits=_polynomial(outside["logits"], numbers),
        output=tuple(outside["output"]),
        embedding=outside["embedding"],
        tied=tied,
    )


def _part(part: Mapping[str, Any], numbers: Mapping[str, float], modules: Mapping[str, Any]) -> PartCounts:
    sizes = [(_whole(rows, numbers), _whole(columns, numbers)) for rows, columns in part["sizes"]]
    in_feed_forward = {**numbers, "hidden": 0, "queries": 0, "keys": 0}
    for_weights = modules.get("saved_for_weights", {})
    further = ("group", "input_is_saved") if for_weights else ("has_bias", "is_output")
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
        settings={
            name: _setting(setting, numbers, for_weights.get(name.split()[0], "0"), in_feed_forward)
            for name, setting in part["settings"].items()
        },
        linears=tuple(
            LinearCounts(
                name, _whole(inner, numbers), _whole(outer, numbers), is_down=_whole(inner, in_feed_forward) > 0,
                **dict(zip(further, rest, strict=True)),
            )
            for name, inner, outer, *rest in modules.get("linears", ())
        ),
    )  # fmt: skip


def _setting(
    setting: Mapping[str, Any], numbers: Mapping[str, float], for_weights: str, in_feed_forward: Mapping[str, float]
) -> SettingCounts:
    return SettingCounts(
        saved=_polynomial(setting["saved"], numbers),
        entering=_polynomial(setting["entering"], numbers),
        temporary=_polynomial(setting["temporary"], numbers),
        moved_forward=_polynomial(setting["moved_forward"], numbers),
        moved_backward=_polynomial(setting["moved_backward"], numbers),
        kernels=setting["kernels"],
        casts=_whole(setting["casts"], numbers),
        temporary_elsewhere=_polynomial(setting.get("temporary_elsewhere", "0"), numbers),
        # The backward pass begins with the feed-forward part, and frees what this part saved before its peak.
        for_weights=_polynomial(for_weights, numbers),
        freed_early=_polynomial(for_weights, in_feed_forward),
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
