"""Count the saved activations, multiplications and moved bytes of a training step, for any transformers model.

The model is built without memory. One block of each kind, and everything outside the blocks, then run a forward and a
backward pass over fake tensors, at a few lengths. From that follow the numbers that the predictions need, for any
batch, length and number of blocks.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import transformers
from torch import nn

from zero_study.dryrun.build_model import first_setting, in_words, positions, reads_images
from zero_study.dryrun.model_parts import ARITHMETIC, EXPERTS, ModelInParts
from zero_study.dryrun.one_pass import OUTSIDE, PartSeen, Seen
from zero_study.errors import Refusal
from zero_study.theory.shapes.counts import (
    POLYNOMIALS,
    Item,
    LinearCounts,
    ModelCounts,
    PartCounts,
    Polynomial,
    SettingCounts,
)

BATCH = 64  # sequences in a traced batch
IMAGES = 4  # the same if each has an image, because attention in windows has many operators for each image
ATTENTION = ("sdpa", "eager")
LENGTHS = (512, 1024, 1536)  # tokens
SHORT_LENGTHS = (16, 32, 48)  # for models that loop over tokens
MORE_KERNELS = 1.3  # times as many kernels for three times as many tokens show a loop over tokens
FAR = 0.02  # an error with which a polynomial describes the longest sequences only
CLOSE = 2e-3  # the largest error of a polynomial, as a share of the largest value
ATTENTION_NAME = re.compile(r"(attn|attention)", re.IGNORECASE)
# Names of the number of experts that a token uses in the configurations of models.
ACTIVE_EXPERTS = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k", "moe_k", "experts_per_token",
)  # fmt: skip


def count(
    built: type[Any],
    config: Any,
    attention: Sequence[str] = ATTENTION,
    has_image: bool = False,
    has_frozen_tower: bool = False,
    has_adapters: bool = False,
) -> ModelCounts:
    """Return the saved activations, multiplications and moved bytes of a training step, as inputs for predictions.

    `attention` has the attention kernels to count. With `has_image`, each text has one image, whose tokens are among
    those of the text. The model must then be one of `images.FAMILIES`. With `has_frozen_tower`, the tower that encodes
    the images is frozen. With `has_adapters`, the counts have what adapters on frozen weights need.

    Raises Refusal with what could not be built or traced.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Operators that fail print no traceback, because the caller gets it as an exception.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL + 1)
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        parts = ModelInParts(built, config, has_image, has_frozen_tower)
        return _Counting(parts, IMAGES if has_image else BATCH, has_adapters).counts(attention)


class _Counting:
    """A model whose operations are counted, by passes at several sequence lengths."""

    def __init__(self, parts: ModelInParts, batch: int, has_adapters: bool = False) -> None:
        self._parts = parts
        self._batch = batch
        self._has_adapters = has_adapters
        self._frozen: dict[str, list[Seen]] = {}  # passes with frozen weights by arithmetic

    def counts(self, attention: Sequence[str]) -> ModelCounts:
        """Return the counts of the model, or raise Refusal if a training step cannot be traced."""
        try:
            return self._counts(attention)
        except Refusal:
            raise
        except Exception as error:  # the code of any model may come here and raise anything
            raise Refusal(
                f"{self._parts.name}: a training step of this model cannot be traced ({in_words(error)})"
            ) from None

    def _counts(self, kernels: Sequence[str]) -> ModelCounts:
        lengths, first = self._first_pass()
        if not first.executed:
            raise Refusal(f"{self._parts.name}: the model has no repeated blocks that are modules")
        has_fused_attention = self._parts.has_sdpa and any(part.attention for part in first.parts.values())
        runs: dict[str, list[Seen]] = {}
        for setting in (f"{arithmetic} {attention}" for attention in kernels for arithmetic in ARITHMETIC):
            if setting.endswith("eager") and not has_fused_attention:
                continue
            # A model that cannot be cast to 16 bits computes under autocast there.
            traced = setting.replace("half", "autocast") if self._parts.needs_autocast else setting
            last = [first] if traced == self._parts.half else []
            runs[setting] = runs.get(traced) or [
                *(self._parts.run(traced, self._batch, length) for length in lengths[: len(lengths) - len(last)]),
                *last,
            ]
        for setting in [name for name in runs if name.endswith("sdpa")] if self._has_adapters else ():
            traced = setting.replace("half", "autocast") if self._parts.needs_autocast else setting
            passes = [self._parts.run(traced, self._batch, length, is_frozen=True) for length in lengths]
            self._frozen[setting.split()[0]] = passes
        parts = range(-1, len(self._parts.kinds))
        counted = {part: self._part(part, runs, lengths) for part in parts}
        before, after = self._outer_layout(first)
        executions = Counter(first.executed)
        executed = [kind for kind in self._parts.order for _ in range(executions[kind] // self._parts.modules_of(kind))]
        counts = ModelCounts(
            outside=counted[OUTSIDE],
            before=before,
            after=after,
            kinds=tuple(counted[part] for part in parts if part != OUTSIDE),
            executed=tuple(executed),
            copies=tuple(kind.copies for kind in self._parts.kinds),
            hidden=first.hidden or first_setting(self._parts.config, "hidden_size", "d_model", default=1),
            logits=fit([seen.logits / self._batch for seen in runs["half sdpa"]], lengths),
            output=self._output_parameters(),
            embedding=self._largest_embedding(),
            tied=self._is_tied(),
        )
        counts = self._with_frozen(counts)
        num_frozen = 0 if counts.frozen is None else counts.frozen.num_params
        if counts.num_params + num_frozen != self._parts.num_params:
            raise Refusal(
                f"{self._parts.name}: its blocks share parameters in a way that is not supported "
                f"({counts.num_params:,} of {self._parts.num_params:,} parameters were counted)"
            )
        return counts

    def _with_frozen(self, counts: ModelCounts) -> ModelCounts:
        """Return counts in which the frozen blocks and the frozen parameters around them are marked as `frozen`.

        What frozen modules outside the blocks compute, such as patches, stays in the counts of the outside.
        """
        is_frozen = [self._parts.is_frozen(kind) for kind in range(len(counts.kinds))]
        if not any(is_frozen):
            return counts
        named = self._parts.frozen_outside()
        nothing = SettingCounts(Polynomial(), Polynomial(), Polynomial(), Polynomial(), Polynomial(), kernels=0)
        polynomials: dict[str, Any] = {name: Polynomial() for name in POLYNOMIALS}
        outside = replace(
            counts.outside,
            parameters=tuple(p.numel() for _, p in named),
            rows=tuple(p.shape[0] if p.dim() else 1 for _, p in named),
            vectors=tuple(number for number, (_, p) in enumerate(named) if p.dim() <= 1),
            linear=(),
            attention_parameters=0,
            weights=0,
            buffers=0,
            **polynomials,
            settings=dict.fromkeys(counts.outside.settings, nothing),
            linears=(),
        )
        frozen = replace(
            _only(counts, is_frozen), outside=outside, before=(), after=(), logits=Polynomial(), output=(),
            embedding=None, tied=False,
        )  # fmt: skip
        return replace(_only(counts, [not each for each in is_frozen]), frozen=frozen)

    def _first_pass(self) -> tuple[tuple[int, ...], Seen]:
        """Return the sequence lengths at which to trace the model, and a pass at the longest of them.

        A model that loops over tokens in Python has more kernels for more tokens, and is traced at short lengths.
        """
        lengths = self._lengths()
        if len(lengths) > 1:
            try:
                longer = self._parts.first_run(self._batch, SHORT_LENGTHS[-1])
                shorter = self._parts.run(self._parts.half, self._batch, SHORT_LENGTHS[0])
            except Refusal:  # a model that needs long sequences
                return lengths, self._parts.first_run(self._batch, lengths[-1])
            if longer.kernels > MORE_KERNELS * shorter.kernels:
                return SHORT_LENGTHS, longer
            return lengths, self._parts.run(self._parts.half, self._batch, lengths[-1])
        return lengths, self._parts.first_run(self._batch, lengths[-1])

    def _lengths(self) -> tuple[int, ...]:
        """Return the sequence lengths in tokens at which the model is traced. A single image has no length."""
        if reads_images(self._parts.model):
            return (1,)
        longest = min([LENGTHS[-1], *(value - 2 for value in positions(self._parts.config))])
        if longest >= LENGTHS[-1]:
            return LENGTHS
        step = max(1, longest // 3)
        step -= step % 16 if step > 32 else 0
        return step, 2 * step, 3 * step

    def _output_parameters(self) -> tuple[int, ...]:
        """Return the indices of the parameters outside the blocks that make the output."""
        output = getattr(self._parts.model, "get_output_embeddings", lambda: None)()
        own = set() if output is None else {id(p) for p in output.parameters(recurse=False)}
        named = self._parts.named_parameters(OUTSIDE)
        return tuple(number for number, (_, p) in enumerate(named) if id(p) in own)

    def _largest_embedding(self) -> int | None:
        embeddings = {id(each.weight) for each in self._parts.model.modules() if isinstance(each, nn.Embedding)}
        own = [
            (p.numel(), number)
            for number, (_, p) in enumerate(self._parts.named_parameters(OUTSIDE))
            if id(p) in embeddings
        ]
        return max(own)[1] if own else None

    def _is_tied(self) -> bool:
        output = getattr(self._parts.model, "get_output_embeddings", lambda: None)()
        weight = getattr(output, "weight", None)
        embeddings = [part for part in self._parts.model.modules() if isinstance(part, nn.Embedding)]
        return weight is not None and any(part.weight is weight for part in embeddings)

    def _part(self, part: int, runs: dict[str, list[Seen]], lengths: tuple[int, ...]) -> PartCounts:
        named = self._parts.named_parameters(part)
        linear = {id(m.weight) for m in self._parts.model.modules() if isinstance(m, nn.Linear)}
        linear |= {id(m.bias) for m in self._parts.model.modules() if isinstance(m, nn.Linear) and m.bias is not None}
        seen = runs["half sdpa"]
        executions = self._executions(part, seen[-1])
        experts = self._experts(named, seen[-1].parts[part].expert_rows, lengths[-1])

        def fitted(value: Callable[[PartSeen], float], among: list[Seen] = seen) -> Polynomial:
            return fit([value(each.parts[part]) / self._batch / executions for each in among], lengths)

        return PartCounts(
            parameters=tuple(p.numel() for _, p in named),
            rows=tuple(p.shape[0] if p.dim() else 1 for _, p in named),
            vectors=tuple(number for number, (_, p) in enumerate(named) if p.dim() <= 1),
            linear=tuple(number for number, (_, p) in enumerate(named) if id(p) in linear),
            layout=() if part == OUTSIDE else self._layout(part, seen[-1]),
            attention_parameters=sum(p.numel() for name, p in named if ATTENTION_NAME.search(name)),
            products=fitted(lambda each: each.products),
            product_elements=fitted(lambda each: each.product_elements),
            weights=round(seen[-1].parts[part].weight_elements / self._parts.modules_of(part)),
            attention=fitted(lambda each: each.attention),
            causal=0.5 if seen[-1].parts[part].is_causal else 1.0,
            composed=fitted(_composed, runs["fp32 sdpa"]),
            gated=fitted(lambda seen: min(seen.gated, seen.activated), runs["fp32 sdpa"]),
            fused_forward=fitted(lambda each: _fused_moved(each, executions)[0]),
            fused_backward=fitted(lambda each: _fused_moved(each, executions)[1]),
            unused_experts=experts,
            dropped=fitted(lambda each: each.dropped),
            dropped_scores=self._dropped_scores(part, runs, lengths),
            ends_in_dropout=part != OUTSIDE and self._ends_in_dropout(part, seen[-1]),
            buffers=sum(b.numel() * b.element_size() for b in self._parts.buffers(part)),
            settings={
                name: self._setting(part, among, lengths, arithmetic := name.split()[0], runs[f"{arithmetic} sdpa"])
                for name, among in runs.items()
            },
            linears=self._linears(part, lengths) if self._has_adapters else (),
        )

    def _linears(self, part: int, lengths: tuple[int, ...]) -> tuple[LinearCounts, ...]:
        """Return the Linear modules of one block of a kind, or those outside the blocks."""
        inside = {module for block in self._parts.kind_of for module in block.modules()}
        root = self._parts.model if part == OUTSIDE else self._parts.kinds[part].module
        output = getattr(self._parts.model, "get_output_embeddings", lambda: None)()
        found, groups = list[LinearCounts](), dict[int, str]()
        for name, module in root.named_modules():
            if not isinstance(module, nn.Linear) or (part == OUTSIDE and module in inside):
                continue
            passes = [seen.linears.get(module, (0.0, id(module), False)) for seen in self._frozen["fp32"]]
            _, storage, is_saved = passes[-1]
            executions = self._executions(part, self._frozen["fp32"][-1]) // self._parts.modules_of(part)
            is_down = module.in_features > module.out_features and not ATTENTION_NAME.search(name)
            linear = LinearCounts(
                name, module.in_features, module.out_features,
                rows=fit([rows / self._batch / max(1, executions) for rows, *_ in passes], lengths),
                has_bias=module.bias is not None and part == OUTSIDE,
                is_output=module is output,
                group=groups.setdefault(storage, name),
                input_is_saved=is_saved,
                is_down=is_down,
            )  # fmt: skip
            found.append(linear)
        return tuple(found)

    def _dropped_scores(self, part: int, runs: dict[str, list[Seen]], lengths: tuple[int, ...]) -> Polynomial:
        """Return how many more elements dropout processes with eager attention than with fused attention."""
        if "half eager" not in runs:
            return Polynomial()
        executions = self._executions(part, runs["half sdpa"][-1])
        pairs = zip(runs["half eager"], runs["half sdpa"], strict=True)
        more = [eager.parts[part].dropped - fused.parts[part].dropped for eager, fused in pairs]
        return fit([value / self._batch / executions for value in more], lengths)

    def _executions(self, part: int, seen: Seen) -> int:
        """Return how often blocks of one kind were executed in a pass."""
        return max(1, seen.executed.count(part))

    def _setting(
        self, part: int, among: list[Seen], lengths: tuple[int, ...], arithmetic: str, trained: list[Seen]
    ) -> SettingCounts:
        executions = self._executions(part, among[-1])
        frozen = self._frozen.get(arithmetic, trained)

        def fitted(
            value: Callable[[PartSeen], float],
            is_sum: bool = True,
            has_constant: bool = True,
            among: list[Seen] = among,
        ) -> Polynomial:
            shares = [value(each.parts[part]) / self._batch / (executions if is_sum else 1) for each in among]
            return fit(shares, lengths, has_constant)

        def temporary(among: list[Seen]) -> Polynomial:
            return fitted(lambda each: each.temporary, is_sum=False, has_constant=is_fixed, among=among)

        def saved(among: list[Seen]) -> Polynomial:
            return fitted(lambda each: each.saved, among=among)

        entering = fitted(lambda each: each.entering, is_sum=False)
        is_fixed = not entering.per_token  # an input that is as long for every text, such as an image
        return SettingCounts(
            saved=saved(among),
            entering=entering,
            temporary=temporary(among),
            moved_forward=fitted(lambda each: each.forward.num_bytes, has_constant=is_fixed),
            moved_backward=fitted(lambda each: each.backward.num_bytes, has_constant=is_fixed),
            kernels=round(among[-1].parts[part].forward.kernels / executions),
            casts=round(among[-1].parts[part].casts / self._parts.modules_of(part)),
            for_weights=_beyond(saved(trained), saved(frozen)),
            freed_early=_beyond(temporary(frozen), temporary(trained)),
        )

    def _experts(self, named: list[tuple[str, Any]], rows: float, length: int) -> int:
        """Return the number of elements in the experts of a block that a token does not use."""
        per_token: float = (
            rows / (self._batch * length) if rows else first_setting(self._parts.config, *ACTIVE_EXPERTS, default=0)
        )
        count: int = first_setting(self._parts.config, *EXPERTS, default=0)
        if not per_token or not count:
            return 0
        idle = 0.0
        for name, parameter in named:
            if "shared" in name or "expert" not in name:
                continue
            if parameter.dim() == 3:  # of all experts together
                idle += parameter.numel() * max(0.0, 1 - per_token / parameter.shape[0])
            elif re.search(r"experts\.\d+\.", name):
                idle += parameter.numel() * max(0.0, 1 - per_token / count)
        return round(idle)

    # ------------------------------------------------------------ layout

    def _outer_layout(self, seen: Seen) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
        """Return the modules outside the blocks that come before the first block, and those after the last."""
        places = [at for at, (part, _, _) in enumerate(seen.events) if part != OUTSIDE]
        last = places[-1] if places else 0
        numbers = {id(p): number for number, (_, p) in enumerate(self._parts.named_parameters(OUTSIDE))}
        passing = _with_gradients(seen.events)
        before: list[Item] = []
        after: list[Item] = []
        first = places[0] if places else len(seen.events)
        for at, (part, action, module) in enumerate(seen.events):
            if part != OUTSIDE or not passing[at]:
                continue
            items = _items(action, module, numbers)
            if first < at < last:  # between an encoder and a decoder
                items = [item for item in items if not isinstance(item, str)]
            (after if at > last else before).extend(items)
        return _without_repeats(before), _without_repeats(after)

    def _layout(self, part: int, seen: Seen) -> tuple[Item, ...]:
        """Return the modules of the first block of a kind, in the order of the forward pass."""
        numbers = {id(p): number for number, (_, p) in enumerate(self._parts.named_parameters(part))}
        numbers |= {
            id(p): -1 - number
            for number, (_, p) in enumerate(self._parts.named_parameters(OUTSIDE))
            if id(p) not in numbers
        }
        module = self._parts.kinds[part].module
        passing = _with_gradients(seen.events)
        layout: list[Item] = []
        for at, (of_part, action, each) in enumerate(seen.events):
            if of_part == part and passing[at]:
                layout.extend(_items(action, each, numbers))
                if each is module and action.startswith("leave"):
                    break
        return tuple(layout)

    def _ends_in_dropout(self, part: int, seen: Seen) -> bool:
        """Return whether the last module that a kind of block visits is a dropout."""
        block = self._parts.kinds[part].module
        last = None
        for of_part, action, each in seen.events:
            if of_part == part and action == "enter" and not each._modules:
                last = each
            if each is block and action.startswith("leave"):
                break
        return isinstance(last, nn.Dropout)


def _beyond(larger: Polynomial, smaller: Polynomial) -> Polynomial:
    """Return how much larger a quantity is than another one."""
    pairs = zip(astuple(larger), astuple(smaller), strict=True)
    return Polynomial(*(max(0.0, value - base) for value, base in pairs))


def _only(counts: ModelCounts, wanted: Sequence[bool]) -> ModelCounts:
    """Return counts that contain only the wanted kinds of blocks."""
    numbers = [number for number, is_wanted in enumerate(wanted) if is_wanted]
    return replace(
        counts,
        kinds=tuple(counts.kinds[number] for number in numbers),
        copies=tuple(counts.copies[number] for number in numbers),
        executed=tuple(numbers.index(kind) for kind in counts.executed if wanted[kind]),
    )


def _with_gradients(events: list[tuple[int, str, nn.Module]]) -> list[bool]:
    """Return, for each event, whether it belongs to a module whose output has a gradient."""
    result = [True] * len(events)
    entered: dict[nn.Module, list[int]] = defaultdict(list)
    for at, (_, action, module) in enumerate(events):
        if action == "enter":
            entered[module].append(at)
        elif entered[module]:
            begin = entered[module].pop()
            if action == "leave without gradient":
                result[begin] = result[at] = False
    return result


def _items(action: str, module: nn.Module, numbers: dict[int, int]) -> list[Item]:
    own = tuple(numbers[id(p)] for p in getattr(module, "_meta_parameters", ()) if id(p) in numbers)
    is_container = bool(module._modules)
    if action == "enter":
        return ["(", *([own] if own else [])] if is_container else [own]
    return [")"] if is_container else []


def _without_repeats(layout: list[Item]) -> tuple[Item, ...]:
    """Return a layout without parameters that an enclosing module has too, such as a tied bias.

    They are gathered for the enclosing module, and are still there. A module's own parameters come first in it.
    """
    around: list[tuple[int, ...]] = []
    result: list[Item] = []
    for item in layout:
        if item == "(":
            around.append(())
        elif item == ")":
            around = around[:-1]
        elif not isinstance(item, str):
            if around and result and result[-1] == "(":
                around[-1] = item
            else:
                item = tuple(number for number in item if not any(number in own for own in around))
        result.append(item)
    return tuple(result)


def _composed(seen: PartSeen) -> float:
    """Return how many elements norms and activation functions save, beyond one for each element of their inputs."""
    inputs = seen.normed + seen.activated
    return max(0.0, seen.saved_in_kernels / 4 - inputs)


def _fused_moved(seen: PartSeen, executions: int) -> tuple[float, float]:
    """Return the elements that a part moves in forward and backward if each norm and activation is one kernel.

    Each kernel reads its inputs and writes its outputs once.
    """
    normed, inside = seen.normed, seen.activated
    gated = min(seen.gated, inside)
    rotated, biased = seen.rotated, seen.biased
    added = 2 * seen.entering_elements * executions  # the two additions of a block to the residual stream
    forward = 2 * normed + 3 * added + 2 * inside + 3 * gated + 3 * rotated
    backward = 5 * normed + 3 * added + 3 * inside + 6 * gated + 3 * rotated + biased
    return forward, backward


def fit(values: Sequence[float], lengths: Sequence[int], has_constant: bool = True) -> Polynomial:
    """Return a polynomial in the sequence length through the given values, with as few terms as suffice.

    The values are those of one sequence. Without `has_constant`, constants are what comes from the weights and not from
    the sequence, and are left out.
    """
    if len(lengths) == 1:
        return Polynomial(constant=float(values[0]))
    highest = max(values)
    if highest <= 0:
        return Polynomial()
    powers = {"constant": 0, "per_token": 1, "per_pair": 2}
    x, y = np.array(lengths, dtype=float), np.array(values, dtype=float)
    best: tuple[float, Polynomial] | None = None
    for names in (("per_token",), ("constant",), ("constant", "per_token"), ("per_token", "per_pair"), tuple(powers)):
        columns = np.stack([x ** powers[name] for name in names], axis=1)
        scale = columns.max(axis=0)
        found = np.linalg.lstsq(columns / scale, y, rcond=None)[0] / scale
        if (found < 0).any():
            continue
        worst = float(np.abs(columns @ found - y).max() / highest)
        polynomial = Polynomial(**{name: round(float(value), 4) for name, value in zip(names, found, strict=True)})
        if best is None or worst < best[0]:
            best = worst, polynomial
        if worst < CLOSE:
            break
    if best is None:
        return Polynomial(per_token=float(values[-1] / lengths[-1]))
    chosen = best[1] if worst >= CLOSE else polynomial
    if best[0] >= FAR:
        # The peak of long sequences is in another place, which grows with pairs of tokens and needs less besides.
        (x1, x2), (y1, y2) = lengths[-2:], values[-2:]
        per_pair = (y2 / x2 - y1 / x1) / (x2 - x1)
        if per_pair > 0:
            return Polynomial(0.0, round(y2 / x2 - per_pair * x2, 4), round(per_pair, 4))
    return chosen if has_constant else Polynomial(0.0, chosen.per_token, chosen.per_pair)
