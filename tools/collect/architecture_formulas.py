"""Derive formulas for the counts of common architectures, for a planner that runs without PyTorch.

    python tools/collect/architecture_formulas.py              # all model types; takes about half an hour
    python tools/collect/architecture_formulas.py llama qwen3  # only these, which replace their entries

Writes zero_study/theory/shapes/architectures.json. For each model_type, models of random sizes are traced, and each
number of the counts is written as a sum of products of the sizes. A formula that another model type has for the same
number is tried first, then sums of few terms, then the best fit. Prints the largest error of each number on models that
were not used for the fit. With --keep FOLDER, traces are kept there, and a second run does not repeat them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pickle
import random
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from scipy.optimize import nnls
from transformers import CONFIG_MAPPING

from zero_study import files
from zero_study.dryrun import count
from zero_study.theory.shapes import formulas
from zero_study.theory.shapes.config_json import MODEL_TYPES
from zero_study.theory.shapes.counts import ModelCounts, PartCounts, Polynomial, SettingCounts

NAMES = list(MODEL_TYPES)
FEWEST, MOST = 4, 12  # models of a block that a fit uses
HELD_OUT = 2
FEWEST_OUTSIDE, MOST_OUTSIDE = 2, 6  # the same for what is outside the blocks
LENGTHS = (1024, 1536)  # tokens; two suffice, because no number of a block has more than two terms
# Models with eager attention only have one peak in short sequences and another one in long ones.
EAGER_ONLY = ("gemma2", "gpt_neo", "gptj")
BOTH_LENGTHS = ((256, 512), (1536, 2040))
CLOSE = 1e-6  # relative error with which the numbers of a trace leave out terms
ROUGH = 0.02  # the same for bytes moved backward, of which a trace leaves out what comes from the weights
NOT_USED_OUTSIDE = ("temporary", "moved_forward", "moved_backward", "fused_forward", "fused_backward")
SAME = 2e-5  # relative error of a formula that counts as exact; norms' gradients make up this much
LONG = 4096  # tokens at which polynomials are compared
NEAR = 1e-3  # the same for peaks in eager attention
GRID = 128  # coefficients are multiples of 1 / GRID, if they are close to one
POWERS = ("constant", "per_token", "per_pair")
# Settings in which models are traced, because their blocks are then of all kinds, or as published models have them.
TRACED_WITH: dict[str, dict[str, Any]] = {
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512},
    "modernbert": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0]},
}
ACTIVATION = {"one kernel": "gelu", "relu": "relu", "gelu_new": "gelu_new"}
Sample = tuple[dict[str, int], ModelCounts]


# ---------------------------------------------------------------- traces


def draw(name: str, seed: int) -> dict[str, int]:
    """Return random sizes of a model, in the proportions of published ones."""
    keys, more = MODEL_TYPES[name].keys, MODEL_TYPES[name].more
    rng = random.Random(seed * 7919 + zlib.crc32(name.encode()))
    size = rng.choice([48, 64, 80, 96, 112, 128, 160])
    if name.startswith("gemma"):
        size = rng.choice([64, 96, 128, 192, 256])
    kv_heads = rng.choice([1, 2, 3, 4, 5, 6, 8])
    heads = kv_heads * rng.choice([1, 2, 3, 4, 5, 7])
    if "kv_heads" not in keys:
        kv_heads = heads = rng.choice([4, 6, 8, 10, 12, 16, 20])
    step, hidden = math.lcm(16, heads), heads * size
    if "head_size" in keys:
        hidden = step * max(1, round(hidden * rng.uniform(0.6, 1.6) / step))

    def wide(least: float, most: float) -> int:
        return 16 * round(hidden * rng.uniform(least, most) / 16)

    n = {"head_size": size, "kv_heads": kv_heads, "heads": heads, "hidden": hidden, "feed_forward": wide(1.5, 6)}
    if "experts" in keys:
        n["experts"] = rng.choice([8, 16, 24, 32, 60, 64, 128])
        n["experts_per_token"] = rng.choice([1, 2, 4, 6, 8][: 3 if n["experts"] < 16 else 5])
        n["feed_forward"] = wide(0.3, 3)
    if "dense" in more:
        n["dense"] = wide(1.5, 6)
    if "shared" in more:
        n["shared"] = wide(1, 4)
    if "rotary" in more:
        n["rotary"] = rng.choice([16, 24, 32, 40, 48])
    n["vocabulary"] = 16 * rng.randint(1500, 9000)
    n["positions"], n["labels"] = rng.choice([2048, 4096, 3072]), rng.randint(2, 9)
    return n


def numbers_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers by which formulas call sizes."""
    numbers = {"active" if name == "experts_per_token" else name: value for name, value in sizes.items()}
    queries, keys = sizes["heads"] * sizes["head_size"], sizes["kv_heads"] * sizes["head_size"]
    return {"queries": queries, "keys": keys, **numbers}


@dataclass
class Traces:
    """Traces of models, which are kept in a folder if there is one."""

    folder: Path | None

    def sample(self, name: str, seed: int, class_name: str, tied: bool, variant: str, has_eager: bool) -> Sample:
        """Return the numbers and the counts of a random model. Outside the blocks, eager attention is left out."""
        sizes = draw(name, seed) | ({"labels": 2} if class_name.endswith("QuestionAnswering") else {})
        numbers = numbers_of(sizes)
        file = f"{name}-{seed}-{variant}-{class_name}-{tied}{'' if has_eager else '-sdpa'}.pkl"
        path = None if self.folder is None else self.folder / file
        if path is not None and path.is_file():
            return numbers, pickle.loads(path.read_bytes())
        config = _config(name, sizes, variant, tied)
        usual = count.LENGTHS
        count.LENGTHS = BOTH_LENGTHS[seed % 2] if name in EAGER_ONLY else LENGTHS  # type: ignore[assignment]
        attention = ("sdpa", "eager") if has_eager else ("sdpa",)
        try:
            counts = count.count(getattr(transformers, class_name), config, attention)
        finally:
            count.LENGTHS = usual
        if path is not None:
            path.write_bytes(pickle.dumps(counts))
        return numbers, counts


def _config(name: str, sizes: Mapping[str, int], variant: str, tied: bool) -> Any:
    kind = MODEL_TYPES[name]
    settings: dict[str, Any] = {key: sizes[part] for part, key in (kind.keys | kind.more).items() if part in sizes}
    fields_of = {each.name for each in fields(CONFIG_MAPPING[name])}
    own_names = {own: name for name, own in CONFIG_MAPPING[name].attribute_map.items() if name in fields_of}
    settings = {own_names.get(key, key): value for key, value in settings.items()}
    settings |= TRACED_WITH.get(name, {})
    lists = [value for value in settings.values() if isinstance(value, list) and len(value) > 1]
    settings[kind.keys["layers"]] = len(lists[0]) if lists else 2
    for word in variant.split(" and ") if variant else []:
        settings |= {kind.keys["activation"]: ACTIVATION[word]} if word in ACTIVATION else {word: True}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    configuration: Any = CONFIG_MAPPING[name]
    return configuration(**settings, **tokens, tie_word_embeddings=tied, num_labels=sizes["labels"])


# ---------------------------------------------------------------- formulas


Columns = dict[str, np.ndarray[Any, Any]]


class Fitter:
    """Finds formulas for values, from those that it has found before or from sums of few terms."""

    def __init__(self) -> None:
        self.known: dict[str, Counter[str]] = defaultdict(Counter)

    def copy(self) -> Fitter:
        result = Fitter()
        result.known.update({quantity: Counter(known) for quantity, known in self.known.items()})
        return result

    def fit(
        self,
        quantity: str,
        values: Sequence[float],
        numbers: Sequence[Mapping[str, int]],
        terms: str,
        tolerance: float = SAME,
    ) -> str:
        """Return a formula for values of a quantity.

        `terms` are the terms that it may have, separated by spaces. Formulas with an error of `tolerance` are exact.
        """
        y = np.array(values, dtype=float)
        if (np.abs(y) < 1e-3).all():
            return "0"
        for formula, _ in self.known[quantity].most_common():
            if _error(formula, numbers, y) < tolerance:
                self.known[quantity][formula] += 1
                return formula
        columns = _columns(terms, numbers, len(y))
        formula = (
            _sparse(y, columns, tolerance=tolerance, fewest=1 if tolerance == SAME else 0)
            or self._difference(quantity, y, numbers, columns)
            or (_maximum(y, columns) if quantity.endswith("temporary per_token") else None)
            or _whole_fit(y, columns)
        )
        if _error(formula, numbers, y) < tolerance:
            self.known[quantity][formula] += 1
        return formula

    def _difference(
        self, quantity: str, y: np.ndarray[Any, Any], numbers: Sequence[Mapping[str, int]], columns: Columns
    ) -> str | None:
        """Return a known formula with a few other terms."""
        for formula, _ in self.known[quantity].most_common(6):
            if formulas.MAXIMUM in formula:
                continue
            try:
                values = np.array([formulas.evaluate(formula, each) for each in numbers])
            except KeyError:  # it has numbers that this model type does not have
                continue
            changes = _sparse(y - values, columns, scale=y)
            if changes is not None:
                return _sum(Counter(_terms(formula)) + Counter(), _terms(changes))
        return None


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> str:
    terms: dict[str, float] = defaultdict(float)
    for addend in (one, other):
        for name, factor in addend.items():
            terms[name] += factor
    return _text(terms)


def _terms(formula: str) -> dict[str, float]:
    """Return the factor of each term of a formula, by the names in it."""
    terms: dict[str, float] = defaultdict(float)
    for term in formula.split(" + "):
        words = [word for word in term.split("*") if word[0].isalpha()]
        terms["*".join(words) or "1"] += math.prod(float(word) for word in term.split("*") if not word[0].isalpha())
    return terms


def _text(terms: Mapping[str, float]) -> str:
    def term(name: str, factor: float) -> str:
        number = str(int(factor)) if factor == int(factor) else repr(round(factor, 6))
        return number if name == "1" else name if factor == 1 else f"{number}*{name}"

    return " + ".join(term(name, factor) for name, factor in terms.items() if abs(factor) > 1e-9) or "0"


def _product(one: str, other: str) -> str:
    terms: dict[str, float] = defaultdict(float)
    for (a, x), (b, y) in itertools.product(_terms(one).items(), _terms(other).items()):
        terms["*".join(sorted(word for word in (*a.split("*"), *b.split("*")) if word != "1")) or "1"] += x * y
    return _text(terms)


def _error(formula: str, numbers: Sequence[Mapping[str, int]], y: np.ndarray[Any, Any]) -> float:
    try:
        values = np.array([formulas.evaluate(formula, each) for each in numbers])
    except KeyError:
        return math.inf
    return _relative(values, y)


def _relative(values: Any, y: Any) -> float:
    """Return the largest relative error. Values that are small compared with the largest count less."""
    return float(np.max(np.abs(values - y) / np.maximum(np.abs(y), 1e-3 * np.max(np.abs(y)) + 1e-9)))


def _columns(terms: str, numbers: Sequence[Mapping[str, int]], count: int) -> Columns:
    """Return the values of terms, without those that are constant or that equal another term in all models."""
    columns: Columns = {}
    for term in terms.split():
        if not all(word in numbers[0] or not word[0].isalpha() for word in term.split("*")):
            continue
        values = np.array([formulas.evaluate(term, each) for each in numbers], dtype=float)
        if (term == "1" or np.ptp(values) > 0 or count == 1) and not any(
            np.allclose(values, other) for other in columns.values()
        ):
            columns[term] = values
    return columns


def _snapped(factors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    near = np.round(factors * GRID) / GRID
    return np.where(np.abs(near - factors) < 2e-3, near, factors)


def _sparse(
    y: np.ndarray[Any, Any],
    columns: Columns,
    scale: np.ndarray[Any, Any] | None = None,
    tolerance: float = SAME,
    fewest: int = 1,
    most: int = 3,
) -> str | None:
    """Return an exact sum of one to `most` terms with simple factors, or None.

    `scale` are the values whose error counts, if y is only a part of them.
    """
    scale = y if scale is None else scale
    if (np.abs(y) <= SAME * np.abs(scale)).all():
        return "0"
    names = list(columns)
    for size in range(1, most + 1):
        # Two models may have a sum of two terms by chance.
        if len(y) < size + (0 if size == 1 else 1) + fewest or math.comb(len(names), size) > 3000:
            break
        for chosen in itertools.combinations(names, size):
            matrix = np.stack([columns[name] for name in chosen], axis=1)
            factors = _solved(matrix, y, scale)
            factors = _snapped(factors) if tolerance == SAME else np.round(factors)
            if _relative_to(matrix @ factors - y, scale) < tolerance and (np.abs(factors * GRID % 1) < 1e-9).all():
                return _text(dict(zip(chosen, map(float, factors), strict=True)))
    return None


def _maximum(y: np.ndarray[Any, Any], columns: Columns) -> str | None:
    """Return the maximum of two sums of few terms, as a peak has that may be at two moments, or None."""
    names = list(columns)
    for size in (1, 2):
        for chosen in itertools.combinations(names, size):
            matrix = np.stack([columns[name] for name in chosen], axis=1)
            tried: set[tuple[float, ...]] = set()
            for places in itertools.combinations(range(len(y)), size):
                try:
                    factors = np.round(np.linalg.solve(matrix[list(places)], y[list(places)]))
                except np.linalg.LinAlgError:
                    continue
                if tuple(factors) in tried or (factors == 0).any() or factors.max() < 0:
                    continue
                tried.add(tuple(factors))
                values = matrix @ factors
                is_equal = np.abs(values - y) < SAME * y
                if is_equal.sum() < size + 2 or (values > y * (1 + SAME)).any():
                    continue
                rest = ~is_equal
                other = _sparse(y[rest], {name: column[rest] for name, column in columns.items()}, fewest=0, most=4)
                if other is None:
                    continue
                terms = {name: float(factor) for name, factor in zip(chosen, factors, strict=True)}
                others = sum(factor * columns[name] for name, factor in _terms(other).items())
                if (np.abs(np.maximum(values, others) - y) < SAME * y).all():
                    return f"{_text(terms)}{formulas.MAXIMUM}{other}"
    return None


def _relative_to(difference: Any, scale: Any) -> float:
    return float(np.max(np.abs(difference) / np.maximum(np.abs(scale), 1e-3 * np.max(np.abs(scale)) + 1e-9)))


def _solved(matrix: np.ndarray[Any, Any], y: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]) -> Any:
    weights = 1 / np.maximum(np.abs(scale), 1e-3 * np.max(np.abs(scale)) + 1e-9)
    sizes = matrix.max(axis=0)
    return np.linalg.lstsq(matrix / sizes * weights[:, None], y * weights, rcond=None)[0] / sizes


def _whole_fit(y: np.ndarray[Any, Any], columns: Columns) -> str:
    """Return the sum of all terms that fits best; with factors of at least 0, unless those below make it exact."""
    matrix = np.stack(list(columns.values()), axis=1)
    candidates = [_nonnegative(matrix, y)]
    if len(y) > len(columns):
        candidates.insert(0, _solved(matrix, y, y))
    best: tuple[float, Any] | None = None
    for factors in candidates:
        for candidate in (_tidy(_snapped(factors), matrix, y), factors):
            error = _relative(matrix @ candidate, y)
            if error < SAME:
                return _text(dict(zip(columns, map(float, candidate), strict=True)))
            if (candidate >= 0).all() and (best is None or error < 0.999 * best[0]):
                best = error, candidate
    assert best is not None
    return _text(dict(zip(columns, map(float, best[1]), strict=True)))


def _tidy(factors: Any, matrix: Any, y: Any) -> Any:
    """Return factors without those of terms that are nowhere a notable part."""
    shares = np.max(np.abs(factors * matrix) / np.maximum(np.abs(y), 1e-9)[:, None], axis=0)
    return np.where(shares < SAME / 10, 0.0, factors)


def _nonnegative(matrix: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Any:
    weights = 1 / np.maximum(np.abs(y), 1e-3 * np.max(np.abs(y)) + 1e-9)
    sizes = matrix.max(axis=0)
    return nnls(matrix / sizes * weights[:, None], y * weights, maxiter=5000)[0] / sizes


# ---------------------------------------------------------------- parts

OF_BLOCK = (
    "1 hidden queries keys feed_forward heads kv_heads head_size dense shared experts active active*hidden "
    "active*feed_forward rotary heads*rotary"
)
OF_PAIRS = "hidden queries keys feed_forward active*feed_forward active*hidden dense shared heads"
OF_OUTSIDE = "1 hidden vocabulary labels head_size positions"
OF_BUFFERS = " positions positions*positions positions*rotary"
OF_COLUMNS = " hidden*feed_forward"


def part_formulas(fitter: Fitter, samples: Sequence[tuple[dict[str, int], PartCounts]], terms: str) -> dict[str, Any]:
    """Return the formulas of a part from its counts in several models."""
    numbers = [each for each, _ in samples]
    parts = [part for _, part in samples]
    place = "outside" if terms == OF_OUTSIDE else "block"

    def number(name: str, values: Sequence[float], of: str = terms) -> str:
        return fitter.fit(f"{place} {name}", values, numbers, of)

    sizes = []
    for index in range(len(parts[0].parameters)):
        rows = [part.rows[index] for part in parts]
        columns = [part.parameters[index] / part.rows[index] for part in parts]
        sizes.append([number("rows", rows), number("columns", columns, terms + OF_COLUMNS)])
    matrices = [_product(*size) for size in sizes]
    # A product with the matrices of experts is one with those that a token uses.
    used = [each.replace("experts", "active") if "shared" not in each else each for each in matrices]
    monomials = " ".join(dict.fromkeys(term for formula in (*matrices, *used) for term in _terms(formula)))

    def polynomial(name: str, values: Sequence[Polynomial], of: str = terms) -> str | list[str]:
        texts = [
            number(f"{name} {power}", [_at(value, power) for value in values], of if power != "per_pair" else terms)
            for power in POWERS
        ]
        return texts[1] if texts[0] == texts[2] == "0" else texts

    def setting(name: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        is_eager_only = name.endswith("sdpa")  # if bytes grow with pairs of tokens
        counts = [part.settings[name] for part in parts if name in part.settings]
        for key in (key.name for key in fields(SettingCounts) if key.name != "temporary_elsewhere"):
            values = [getattr(count, key) for count in counts]
            if key == "kernels":
                result[key] = Counter(values).most_common(1)[0][0]
            elif key == "casts":
                result[key] = number("casts", values, monomials)
            elif key == "temporary" and (pairs := _pairs(values, numbers, ROUGH if is_eager_only else NEAR)):
                lower, sizes_of = [values[at].per_token for at in pairs], [numbers[at] for at in pairs]
                per_token = fitter.fit(f"{place} {name} temporary with pairs", lower, sizes_of, OF_PAIRS, NEAR)
                if _error(per_token, sizes_of, np.array(lower)) > NEAR:
                    per_token = _per_token(lower, sizes_of)
                per_pair = round(values[pairs[0]].per_pair / numbers[pairs[0]]["heads"])
                result[key] = ["0", per_token, f"{per_pair}*heads"]
                others = [at for at, value in enumerate(values) if not value.per_pair]
                if others and is_eager_only:
                    result["temporary_elsewhere"] = fitter.fit(
                        f"{place} {name} temporary per_token",
                        [values[at].per_token for at in others],
                        [numbers[at] for at in others],
                        terms,
                    )
            else:
                result[key] = polynomial(f"{name} {key}", values)
        return result

    first = parts[0]
    return {
        "sizes": sizes,
        "vectors": first.vectors,
        "linear": first.linear,
        "layout": first.layout,
        "attention_parameters": number("attention_parameters", [p.attention_parameters for p in parts], monomials),
        "products": polynomial("products", [p.products for p in parts], monomials),
        "product_elements": polynomial("product_elements", [p.product_elements for p in parts]),
        "weights": number("weights", [p.weights for p in parts], monomials),
        "attention": polynomial("attention", [p.attention for p in parts]),
        "causal": first.causal,
        "composed": polynomial("composed", [p.composed for p in parts]),
        "gated": polynomial("gated", [p.gated for p in parts]),
        "fused_forward": polynomial("fused_forward", [p.fused_forward for p in parts]),
        "fused_backward": polynomial("fused_backward", [p.fused_backward for p in parts]),
        "unused_experts": number("unused_experts", [p.unused_experts for p in parts], monomials + _idle(matrices)),
        "dropped": polynomial("dropped", [p.dropped for p in parts]),
        "dropped_scores": polynomial("dropped_scores", [p.dropped_scores for p in parts]),
        "ends_in_dropout": first.ends_in_dropout,
        "buffers": number("buffers", [p.buffers for p in parts], terms + OF_BUFFERS),
        "settings": {name: setting(name) for name in first.settings},
    }


def _pairs(values: Sequence[Polynomial], numbers: Sequence[Mapping[str, int]], share: float) -> list[int]:
    """Return the places of models whose peak is in eager attention: the most bytes per pair of tokens and head.

    `share` is the share of these bytes by which a model's may differ.
    """
    ratios = [value.per_pair / each["heads"] for value, each in zip(values, numbers, strict=True)]
    largest = round(max(ratios))
    return [at for at, ratio in enumerate(ratios) if largest and abs(ratio - largest) < share * largest]


def _per_token(values: Sequence[float], numbers: Sequence[Mapping[str, int]]) -> str:
    """Return about the bytes per token by which the peak in eager attention is lower, from few models."""
    name = "active*feed_forward" if "active" in numbers[0] else "feed_forward"
    columns = _columns(f"hidden {name}", numbers, len(values))
    if len(values) <= len(columns):
        return "0"
    factors = _solved(np.stack(list(columns.values()), axis=1), np.array(values), np.array(values))
    return _text(dict(zip(columns, map(float, np.round(factors, 1)), strict=True)))


def _idle(matrices: Iterable[str]) -> str:
    """Return terms for experts that a token uses, by which the idle ones are fewer than all."""
    return "".join(f" {each.replace('experts', 'active')}" for each in matrices if "experts" in each)


def _at(value: Polynomial, power: str) -> float:
    """Return a coefficient without the digits that come from rounding."""
    largest = max(abs(value.constant), 1000 * abs(value.per_token), 1e6 * abs(value.per_pair))
    number: float = getattr(value, power)
    scale = {"constant": 1, "per_token": 1000, "per_pair": 1e6}[power]
    return number if scale * abs(number) > 1e-9 * largest else 0.0


def outside_formulas(fitter: Fitter, samples: Sequence[Sample], eager: Mapping[str, Any]) -> dict[str, Any]:
    """Return the formulas of what is outside the blocks of a class of models."""
    numbers, counts = [each for each, _ in samples], [each for _, each in samples]
    part = part_formulas(fitter, [(n, each.outside) for n, each in samples], OF_OUTSIDE)
    for name, setting in eager.items():  # differs from fused attention in its masks, which all classes make
        if name not in part["settings"]:
            own = part["settings"][name.replace("eager", "sdpa")]
            part["settings"][name] = {**own, "moved_forward": setting["moved_forward"], "kernels": setting["kernels"]}
    first = counts[0]

    def number(name: str, values: Sequence[float]) -> str:
        return fitter.fit(f"outside {name}", values, numbers, OF_OUTSIDE)

    logits = [number(f"logits {power}", [_at(each.logits, power) for each in counts]) for power in POWERS]
    return {
        "part": part,
        "before": first.before,
        "after": first.after,
        "logits": logits[1] if logits[0] == logits[2] == "0" else logits,
        "output": first.output,
        "embedding": first.embedding,
    }


# ---------------------------------------------------------------- a model type


def kinds_of(name: str) -> list[str]:
    """Return the kinds of the blocks of the models that are traced."""
    kind, settings = MODEL_TYPES[name], TRACED_WITH.get(name, {})
    lists = [value for value in settings.values() if isinstance(value, list) and len(value) > 1]
    count = len(lists[0]) if lists else 2
    return ["block"] * count if kind.layers is None else kind.layers(settings, count)


def variants_of(name: str) -> list[str]:
    """Return the settings that have formulas of their own, one at a time."""
    kind = MODEL_TYPES[name]
    return ["", *kind.activations[1:], *kind.switches]


def architecture(fitter: Fitter, traces: Traces, name: str) -> tuple[dict[str, Any], dict[str, float], Fitter]:
    """Return the formulas of a model_type, the largest error of each number on models that were not used, and a fitter.

    The fitter knows these formulas too.
    """
    kind = MODEL_TYPES[name]
    class_name = next(each for each, head in kind.classes.items() if head == "tokens")
    tied = bool(CONFIG_MAPPING[name]().tie_word_embeddings)
    kinds = list(dict.fromkeys(kinds_of(name)))
    blocks: dict[str, dict[str, Any]] = {}
    errors: dict[str, float] = defaultdict(float)
    base: list[Sample] = []

    for variant in variants_of(name):
        samples: list[Sample] = []
        for size in range(FEWEST if name not in EAGER_ONLY else 2 * FEWEST, MOST + 1):
            while len(samples) < size + HELD_OUT:
                samples.append(traces.sample(name, len(samples), class_name, tied, variant, True))
            fitted, held_out = samples[:size], samples[size:]
            trial = fitter.copy()
            blocks[variant] = {
                each: part_formulas(trial, [(n, counts.kinds[number]) for n, counts in fitted], OF_BLOCK)
                for number, each in enumerate(kinds)
            }
            wrong = {
                key: error
                for n, counts in held_out
                for number, each in enumerate(kinds)
                for key, error in part_errors(blocks[variant][each], n, counts.kinds[number]).items()
                if error > (ROUGH if key.endswith("moved_backward") else SAME) and not key.endswith("eager temporary")
            }
            if not wrong:
                break
        fitter = trial
        base = base or samples
        for n, counts in held_out:
            for number, each in enumerate(kinds):
                for key, error in part_errors(blocks[variant][each], n, counts.kinds[number]).items():
                    errors[key] = max(errors[key], error)

    outsides = {f"{class_name} tied" if tied else class_name: outside_formulas(fitter, base, {})}
    eager = {
        key: value for key, value in next(iter(outsides.values()))["part"]["settings"].items() if key.endswith("eager")
    }
    for class_title, head in kind.classes.items():
        for is_tied in (not tied,) if class_title == class_name else (tied,) if head != "tokens" else (True, False):
            key = f"{class_title} tied" if is_tied and head == "tokens" else class_title
            for size in range(FEWEST_OUTSIDE, MOST_OUTSIDE + 1):
                samples = [traces.sample(name, seed, class_title, is_tied, "", False) for seed in range(size + 1)]
                if size == FEWEST_OUTSIDE and len({n["labels"] for n, _ in samples[:-1]}) == 1:
                    continue  # else the number of labels would count as a constant
                trial = fitter.copy()
                outsides[key] = outside_formulas(trial, samples[:-1], eager)
                n, counts = samples[-1]
                found = part_errors(outsides[key]["part"], n, counts.outside)
                if not any(
                    error > SAME for quantity, error in found.items() if not quantity.endswith(NOT_USED_OUTSIDE)
                ):
                    break
            fitter = trial
            for quantity, error in found.items():
                errors[f"outside {quantity}"] = max(errors[f"outside {quantity}"], error)
    return {"blocks": blocks, "outsides": outsides}, errors, fitter


def part_errors(content: Mapping[str, Any], numbers: Mapping[str, int], part: PartCounts) -> dict[str, float]:
    """Return the relative error of each number of a part's formulas in one model."""
    computed = formulas._part(content, numbers, {})
    errors = {}
    for field in fields(PartCounts):
        if field.name != "settings":
            errors[field.name] = difference(getattr(computed, field.name), getattr(part, field.name))
    for setting, counts in part.settings.items():
        for field in fields(SettingCounts):
            own, true = getattr(computed.settings[setting], field.name), getattr(counts, field.name)
            if field.name == "temporary":
                own, true = peak(computed.settings, setting), peak(part.settings, setting)
            if field.name == "temporary_elsewhere":
                continue
            errors[f"{setting} {field.name}"] = difference(own, true)
    return errors


def peak(settings: Mapping[str, SettingCounts], name: str) -> float:
    """Return the largest temporary bytes of a part with a sequence of LONG tokens."""
    of_setting = (settings[name], settings[name.replace("eager", "sdpa")])
    return max(
        float(each.of(1, LONG)) for setting in of_setting for each in (setting.temporary, setting.temporary_elsewhere)
    )


def difference(one: Any, other: Any) -> float:
    """Return the relative difference of two numbers of counts: of polynomials, at LONG tokens."""
    if isinstance(one, Polynomial):
        one, other = float(one.of(1, LONG)), float(other.of(1, LONG))
    if isinstance(one, int | float):
        return abs(one - other) / max(abs(other), 1e-6) if abs(one - other) > 1e-6 else 0.0
    return 0.0 if one == other else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--keep", type=Path, help="folder in which traces are kept")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    path = formulas.FORMULAS_FILE
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    fitter, traces = Fitter(), Traces(arguments.keep)
    count.CLOSE = CLOSE
    for name in arguments.names or NAMES:
        content[name], errors, fitter = architecture(fitter, traces, name)
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(content[key])}" for key in NAMES if key in content)
        files.write_whole(path, f"{{\n{lines}\n}}\n".encode())
        notable = {key: error for key, error in errors.items() if error > SAME}
        print(f"{name}: {'all numbers are exact' if not notable else ''}", flush=True)
        for key, error in sorted(notable.items(), key=lambda each: -each[1]):
            print(f"    {key:40} {error:8.2%}", flush=True)


if __name__ == "__main__":
    main()
