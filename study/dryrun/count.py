"""Count what a model of transformers saves, multiplies and moves in a training step, for any architecture.

The model is built without memory. One block of each kind, and everything outside the blocks, then run a forward and a
backward pass over fake tensors, at a few lengths. The numbers of theory for any batch, length and number of blocks
follow from that.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from study.dryrun.fake import without_memory
from study.dryrun.tracker import TensorTracker
from study.errors import Refusal
from study.theory.shapes.counts import Item, ModelCounts, PartCounts, Polynomial, SettingCounts

BATCH = 64  # sequences in a traced batch
OUTSIDE = -1  # in place of the kind of a block
ARITHMETIC = {"fp32": (torch.float32, False), "autocast": (torch.float32, True), "half": (torch.bfloat16, False)}
ATTENTION = ("sdpa", "eager")
LENGTHS = (512, 1024, 1536)  # tokens
SHORT_LENGTHS = (16, 32, 48)  # for models that loop over tokens
LONG_RUN = 4.0  # seconds of processor time of one pass
SAMPLES = 16_000  # of a second of sound
CLOSE = 2e-3  # the largest error of a polynomial, as a share of the largest value
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions")
ACTIVATION = re.compile(r"(Activation|GELU|SiLU|ReLU|Swish|Mish|Tanh|Sigmoid|GeluAct)", re.IGNORECASE)
NORM = re.compile(r"norm", re.IGNORECASE)
ATTENTION_NAME = re.compile(r"(attn|attention)", re.IGNORECASE)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
ACTIVE_EXPERTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k",
    "moe_k",
    "experts_per_token",
)
FUSED_ATTENTION = "_scaled_dot_product"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "mv", "addmv", "addbmm", "dot")


def _quiet() -> None:
    """Do not print the traceback of an operator that fails, because the caller gets it as an exception."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL + 1)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def count(built: type[Any], config: Any, attention: Sequence[str] = ATTENTION) -> ModelCounts:
    """Count a model of a class and a configuration of transformers, with these kernels of attention.

    Raises Refusal with what could not be built or traced.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _quiet()
        return _Counting(built, config).counts(attention)


def prepare(config: Any) -> None:
    """Turn off dropout, cache and dropped layers in a configuration, and set what a forward pass needs."""
    for part in _with_sub_configs(config):
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
        part.use_cache = False
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(part, name, None) is None:
                setattr(part, name, 0)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0


def _with_sub_configs(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            yield from _with_sub_configs(part)


# ---------------------------------------------------------------- blocks


@dataclass
class _Kind:
    """Blocks that have the same class and the same shapes of parameters, of which the first one is traced."""

    module: nn.Module
    copies: int = 0


def _block_lists(model: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Return the lists of repeated blocks, each with its blocks.

    These are the blocks that transformers says must not be split, or else the members of the outermost lists.
    """
    whole = set(getattr(model, "_no_split_modules", None) or ())
    lists = [(each, list(each)) for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    named = [(each, blocks) for each, blocks in lists if blocks and all(type(b).__name__ in whole for b in blocks)]
    chosen: list[tuple[nn.Module, list[nn.Module]]] = []
    inside: set[nn.Module] = set()
    for each, blocks in named or lists:
        if each in inside or not any(True for block in blocks for _ in block.parameters()):
            continue
        if not named and not (isinstance(each, nn.ModuleList) and len({type(block) for block in blocks}) == 1):
            continue
        chosen.append((each, blocks))
        inside.update(part for block in blocks for part in block.modules())
    return chosen


def _signature(block: nn.Module) -> tuple[Any, ...]:
    kinds = tuple(getattr(block, name, None) for name in ("attention_type", "layer_type", "block_type"))
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    return (type(block), tuple(map(str, kinds)), shapes)


# ---------------------------------------------------------------- one pass


@dataclass
class _Ops:
    """What the operators of one part did in one pass."""

    moved: float = 0.0
    kernels: int = 0


@dataclass
class _Seen:
    """What one forward and backward pass did, by part of the model."""

    saved: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    in_norms: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # beyond their inputs
    entering: dict[int, float] = field(default_factory=dict)
    widest: dict[int, float] = field(default_factory=dict)  # elements of a block's input
    temporary: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    forward: dict[int, _Ops] = field(default_factory=lambda: defaultdict(_Ops))
    backward: dict[int, _Ops] = field(default_factory=lambda: defaultdict(_Ops))
    casts: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    products: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    product_elements: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    attention: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    is_causal: dict[int, bool] = field(default_factory=dict)
    weights: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # storages
    weight_elements: dict[int, int] = field(default_factory=dict)
    normed: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    activated: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    gated: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    rotated: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    biased: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    experts_per_token: dict[int, float] = field(default_factory=dict)
    executed: list[int] = field(default_factory=list)
    events: list[tuple[int, str, nn.Module]] = field(default_factory=list)  # part, enter or leave, module
    logits: float = 0.0
    hidden: int = 0


class _Watch(TensorTracker):  # type: ignore[no-untyped-call]
    """Record what each part of a model saves, multiplies and moves."""

    def __init__(self, model: nn.Module, kinds: dict[nn.Module, int], experts: int) -> None:
        super().__init__()
        self.seen = _Seen()
        self._kinds = kinds
        self._experts = experts
        self._running: list[nn.Module] = []
        self._part = OUTSIDE
        self._is_backward = False
        self._norms = {part for part in model.modules() if NORM.search(type(part).__name__)}
        self._acts = {
            part
            for part in model.modules()
            if ACTIVATION.search(type(part).__name__) and not list(part.children()) and not list(part.parameters())
        }
        parameters = list(model.parameters())
        self.parameter_storages = {p.untyped_storage()._cdata: p.numel() for p in parameters}
        self._fixed = {b.untyped_storage()._cdata for b in model.buffers()} | set(self.parameter_storages)
        self._keeps = [*parameters, *model.buffers()]
        self._cast_of: dict[int, int] = {}  # storage of a cast -> storage of its parameter
        self._saved: dict[int, tuple[int, Any]] = {}  # storage -> part and reference
        self._activated_storages: set[int] = set()
        self.windows: list[tuple[int, int]] = []  # part, and number of memory changes when its backward pass begins
        self._alive: list[Tensor] = []

    # ------------------------------------------------------------ modules

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        super()._begin_forward(module, inputs)
        if self._is_backward:
            return
        self._running.append(module)
        if module in self._kinds:
            self._part = self._kinds[module]
            self.seen.executed.append(self._part)
            first = next((leaf for leaf in tree_leaves(inputs) if _is_float(leaf)), None)
            if first is not None:
                self.seen.entering[self._part] = first.numel() * first.element_size()
                self.seen.widest[self._part] = first.numel()
                self.seen.hidden = int(first.shape[-1])
        self.seen.events.append((self._part, "enter", module))

    def _end_forward(self, module: nn.Module, inputs: Any = None, output: Any = None) -> None:
        super()._end_forward(module, inputs, output)
        if self._is_backward:
            return
        tensors = [leaf for leaf in tree_leaves(output) if _is_float(leaf)]
        if module in self._norms and tensors:
            self.seen.normed[self._part] += tensors[0].numel()
        if module in self._acts and tensors:
            self._note_activation(tensors[0])
        has_gradient = any(leaf.requires_grad for leaf in tensors)
        self.seen.events.append((self._part, "leave" if has_gradient else "leave without gradient", module))
        if module in self._running:
            del self._running[self._running.index(module) :]
        if module in self._kinds:
            self._part = OUTSIDE

    def _note_activation(self, output: Tensor) -> None:
        key = output.untyped_storage()._cdata
        if key not in self._activated_storages:
            self.seen.activated[self._part] += output.numel()
            self._activated_storages.add(key)
            self._alive.append(output)

    # ------------------------------------------------------------ saved tensors

    def pack(self, tensor: Tensor) -> Any:
        if _is_plain(tensor):
            key = tensor.untyped_storage()._cdata
            if key not in self._fixed and key not in self._cast_of and key not in self._saved:
                self._saved[key] = (self._part, tensor)
                num_bytes = tensor.untyped_storage().nbytes()
                self.seen.saved[self._part] += num_bytes
                if any(module in self._norms or module in self._acts for module in self._running[-2:]):
                    self.seen.in_norms[self._part] += num_bytes
        return tensor, self._part

    def unpack(self, packed: Any) -> Tensor:
        tensor, part = packed
        if not self.windows or self.windows[-1][0] != part:
            self.windows.append((part, len(self._changes or ())))
        self._part = part
        result: Tensor = tensor
        return result

    # ------------------------------------------------------------ operators

    def _run(self, func: Any, args: Any, options: Any) -> Any:
        if func is torch.ops.aten.nonzero.default and self._experts:
            # The tokens of one expert, if all experts have equally many.
            result = args[0].new_empty((args[0].numel() // self._experts, args[0].dim()), dtype=torch.long)
        else:
            result = func(*args, **options)
        self._count(func, args, options, result)
        return result

    def _count(self, func: Any, args: Any, options: Any, result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        inputs = [leaf for leaf in tree_leaves((args, options)) if _is_plain(leaf)]
        outputs = [leaf for leaf in tree_leaves(result) if _is_plain(leaf)]
        if (
            not outputs
            or func.is_view
            or name in ("detach", "alias", "_unsafe_view", "lift_fresh", "empty", "empty_like")
        ):
            return
        part, seen = self._part, self.seen
        keys = [leaf.untyped_storage()._cdata for leaf in inputs]
        if name == "_to_copy" and not self._is_backward and inputs and self._is_matrix(inputs[0]):
            self._cast_of[outputs[0].untyped_storage()._cdata] = keys[0]
            self._alive.append(outputs[0])
            seen.casts[part] += outputs[0].numel() * outputs[0].element_size()
            return
        in_pass = seen.backward if self._is_backward else seen.forward
        in_pass[part].kernels += 1
        if name.startswith(FUSED_ATTENTION):
            if not self._is_backward:
                query, key, value = inputs[:3]
                heads, width = query.shape[1], query.shape[-1] + value.shape[-1]
                seen.attention[part] += 2 * query.shape[0] * heads * query.shape[2] * key.shape[2] * width
                seen.is_causal[part] = _is_causal(func, args, options)
            return
        if name in PRODUCTS:
            if not self._is_backward:
                self._count_product(func, name, args, options, result, inputs, outputs, keys)
            return
        moved = sum(leaf.numel() * leaf.element_size() for leaf in (*inputs, *outputs))
        in_pass[part].moved += moved
        if self._is_backward:
            return
        if name in ("gelu", "silu", "relu", "sigmoid", "tanh", "hardtanh", "leaky_relu", "elu") and part != OUTSIDE:
            if not any(module in self._acts for module in self._running):
                self._note_activation(outputs[0])
        elif name == "mul" and len(keys) > 1 and any(key in self._activated_storages for key in keys):
            if inputs[0].numel() == inputs[1].numel():
                seen.gated[part] += outputs[0].numel()
        elif name == "cat":
            seen.rotated[part] += outputs[0].numel()

    def _is_matrix(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the whole of a parameter with at least two dimensions."""
        return tensor.dim() > 1 and self.parameter_storages.get(tensor.untyped_storage()._cdata) == tensor.numel()

    def _count_product(
        self, func: Any, name: str, args: Any, options: Any, result: Any, inputs: Any, outputs: Any, keys: Any
    ) -> None:
        seen, part = self.seen, self._part
        packet = func.overloadpacket
        flops = float(flop_registry[packet](*args, **options, out_val=result)) if packet in flop_registry else 0.0
        weights = {self._cast_of.get(key, key) for key in keys} & set(self.parameter_storages)
        seen.products[part] += flops
        seen.weights[part] |= weights
        moved = sum(
            leaf.numel() for leaf, key in zip(inputs, keys, strict=True) if self._cast_of.get(key, key) not in weights
        )
        seen.product_elements[part] += moved + sum(leaf.numel() for leaf in outputs)
        if name == "addmm" and inputs[0].dim() == 1:
            seen.biased[part] += outputs[0].numel()
        if name == "_grouped_mm":
            seen.experts_per_token[part] = inputs[0].shape[0]

    # ------------------------------------------------------------ memory

    def begin_backward(self, kept: Sequence[Tensor]) -> None:
        self._is_backward = True
        self._running.clear()
        self._keep = {tensor.untyped_storage()._cdata for tensor in kept}
        self._alive.clear()
        self._saved_sizes = {key: tensor.untyped_storage().nbytes() for key, (_, tensor) in self._saved.items()}
        self._saved_storages = {self._storages[key] for key in self._saved if key in self._storages}
        self._not_counted = {
            self._storages[key] for key in (*self._fixed, *self._cast_of, *self._keep) if key in self._storages
        }
        self._saved.clear()
        self.start_peak()

    def end_backward(self, gradients: Sequence[Tensor]) -> None:
        """Find the peak of each part's backward pass, without parameters, their casts and their gradients."""
        assert self._changes is not None
        not_counted = self._not_counted | {
            self._storages[key]
            for key in (gradient.untyped_storage()._cdata for gradient in gradients)
            if key in self._storages
        }
        saved = {storage: self._held_at_start.get(storage, 0) for storage in self._saved_storages}
        held: float = sum(size for storage, size in self._held_at_start.items() if storage not in not_counted)
        held_saved: float = sum(saved.values())
        begins = [*self.windows, (OUTSIDE, len(self._changes))]
        at = 0
        for (part, begin), (_, end) in pairwise(begins):
            while at < begin:
                held, held_saved = self._step(at, not_counted, saved, held, held_saved)
                at += 1
            base = held_saved
            highest = held
            while at < end:
                held, held_saved = self._step(at, not_counted, saved, held, held_saved)
                at += 1
                highest = max(highest, held)
            self.seen.temporary[part] = max(self.seen.temporary[part], highest - base)

    def _step(self, at: int, not_counted: Any, saved: Any, held: float, held_saved: float) -> tuple[float, float]:
        assert self._changes is not None
        storage, change = self._changes[at]
        if storage in not_counted:
            return held, held_saved
        return held + change, held_saved + (change if storage in saved else 0)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type != "meta" and leaf.layout == torch.strided


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_causal(func: Any, args: Any, options: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | options
    return bool(values.get("is_causal")) or values.get("attn_mask", values.get("attn_bias")) is not None


# ---------------------------------------------------------------- the whole


class _Counting:
    """The tracing of one model."""

    casts_buffers = False  # whether buffers have the type of the parameters
    adds_image = False  # whether the model needs an image beside its text
    needs_autocast = False  # whether the model cannot be cast to 16 bits

    def __init__(self, built: type[Any], config: Any) -> None:
        self.name = built.__name__
        self._built = built
        self._config = config
        prepare(config)
        self._build()
        self._find_kinds(cut=True)

    def _build(self) -> None:
        """Build the model on the meta device, with fused attention if it has that."""
        make = getattr(self._built, "_from_config", None) or (lambda config, **_: self._built(config))
        self.has_sdpa = True
        try:
            with torch.device("meta"):
                try:
                    self.model = make(copy.deepcopy(self._config), attn_implementation="sdpa")
                except (ValueError, ImportError, TypeError) as error:
                    if "scaled_dot_product" not in str(error) and "attn_implementation" not in str(error):
                        raise
                    self.has_sdpa = False
                    self.model = make(copy.deepcopy(self._config), attn_implementation="eager")
        except Exception as error:  # any class and configuration may come here and raise anything
            raise Refusal(f"{self.name}: transformers cannot build it ({in_words(error)})") from None
        self.config = self.model.config
        self.model.train()
        if hasattr(self.model, "set_default_language"):
            self.model.set_default_language(self.config.languages[0])
        self.total = sum(p.numel() for p in self.model.parameters())

    def _find_kinds(self, cut: bool) -> None:
        """Find the kinds of blocks. With `cut`, only one block of each kind stays in the model."""
        self.kinds: list[_Kind] = []
        self.kind_of: dict[nn.Module, int] = {}
        self.order: list[int] = []  # the kind of each block
        by_signature: dict[tuple[Any, ...], int] = {}
        seen: set[int] = set()  # parameters
        for module in self.model.modules():
            own: Any = [p for p in module._parameters.values() if p is not None]
            module._meta_parameters = own
        for owner, blocks in _block_lists(self.model):
            kept: list[int] = []
            for place, block in enumerate(blocks):
                signature = (id(owner), _signature(block), _listed(self.config, len(blocks), place))
                number = by_signature.setdefault(signature, len(self.kinds))
                if number == len(self.kinds):
                    self.kinds.append(_Kind(block))
                    kept.append(place)
                self.order.append(number)
                parameters = {id(p) for p in block.parameters()}
                if not parameters <= seen:
                    self.kinds[number].copies += 1
                seen |= parameters
                if not cut or place in kept:
                    self.kind_of[block] = number
            if cut and len(kept) < len(blocks):
                _cut(owner, kept)
                for part in _with_sub_configs(self.config):
                    _cut_lists(part, len(blocks), kept)

    # ------------------------------------------------------------ running

    def run(self, setting: str, batch: int, length: int) -> _Seen:
        arithmetic, attention = setting.split()
        dtype, is_autocast = ARITHMETIC[arithmetic]
        if self.has_sdpa:
            self.model.set_attn_implementation(attention)
        with ExitStack() as stack:
            stack.enter_context(without_memory())
            stack.enter_context(_materialized(self.model, dtype, self.casts_buffers))
            watch = _Watch(self.model, self.kind_of, _first(self.config, *EXPERTS, default=0))
            inputs = self._inputs(batch, length, dtype)
            stack.enter_context(watch)
            with (
                saved_tensors_hooks(watch.pack, watch.unpack),
                torch.autocast("cpu", torch.bfloat16, enabled=is_autocast),
            ):
                outputs = self.model(**inputs)
            logits = _logits(outputs)
            if logits is None:
                raise Refusal(f"{self.name}: its forward pass returns nothing that depends on its parameters")
            watch.seen.logits = logits.numel()
            gradient = torch.ones_like(logits)
            del outputs
            watch.begin_backward([logits, gradient])
            torch.autograd.backward([logits], [gradient])
            watch.end_backward([p.grad for p in self.model.parameters() if p.grad is not None])
            sizes = watch.parameter_storages
            for part, storages in list(watch.seen.weights.items()):
                watch.seen.weight_elements[part] = sum(sizes[storage] for storage in storages)
        return watch.seen

    def _inputs(self, batch: int, length: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return a batch of zeros of the kind that the model reads: tokens, images or sound."""
        accepted = inspect.signature(self.model.forward).parameters
        main = getattr(self.model, "main_input_name", "input_ids")
        tokens = torch.zeros(batch, length, dtype=torch.long)
        inputs: dict[str, Any] = {}
        if main == "pixel_values" or self.adds_image:
            inputs["pixel_values"] = torch.zeros(batch, *self._image_shape(set(accepted)), dtype=dtype)
        if main == "input_features":  # a spectrogram
            bins = _first(self.config, "num_mel_bins", "input_feat_per_channel", default=80)
            frames = 2 * _first(self.config, "max_source_positions", default=1500)
            inputs["input_features"] = torch.zeros(batch, bins, frames, dtype=dtype)
        elif main == "input_values":  # a second of sound
            inputs["input_values"] = torch.zeros(batch, SAMPLES, dtype=dtype)
        elif main != "pixel_values":
            inputs["input_ids"] = tokens
        if "decoder_input_ids" in accepted and getattr(self.config, "is_encoder_decoder", True):
            inputs["decoder_input_ids"] = tokens
        if "use_cache" in accepted:
            inputs["use_cache"] = False
        return inputs

    def _image_shape(self, accepted: set[str]) -> tuple[int, ...]:
        """Return the shape of an image, or of its patches for models that read patches of images of any size."""
        channels = _first(self.config, "num_channels", "in_channels", "in_chans", default=3)
        if {"pixel_attention_mask", "spatial_shapes"} <= accepted:
            patch, patches = (_first(self.config, name, default=16) for name in ("patch_size", "num_patches"))
            return patches, channels * patch**2
        size = _first(self.config, "image_size", default=224)
        height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
        return channels, height, width

    def counts(self, attention: Sequence[str]) -> ModelCounts:
        """Return the counts of the model. Raises Refusal with the reason if a training step cannot be traced."""
        try:
            return self._counts(attention)
        except Refusal:
            raise
        except Exception as error:  # the code of any model may come here and raise anything
            raise Refusal(f"{self.name}: a training step cannot be traced ({in_words(error)})") from None

    def _counts(self, kernels: Sequence[str]) -> ModelCounts:
        lengths = self._lengths()
        began = time.process_time()
        first = self._first_run(lengths[-1])
        if time.process_time() - began > LONG_RUN and len(lengths) > 1:
            lengths = SHORT_LENGTHS
            first = self.run("autocast sdpa" if self.needs_autocast else "half sdpa", BATCH, lengths[-1])
        runs: dict[str, list[_Seen]] = {}
        for setting in (f"{arithmetic} {attention}" for attention in kernels for arithmetic in ARITHMETIC):
            if setting.endswith("eager") and not (self.has_sdpa and any(first.attention.values())):
                continue
            # A model that cannot be cast to 16 bits computes under autocast there.
            traced = setting.replace("half", "autocast") if self.needs_autocast else setting
            runs[setting] = runs.get(traced) or [self.run(traced, BATCH, length) for length in lengths]
        parts = range(-1, len(self.kinds))
        counted = {part: self._part(part, runs, lengths) for part in parts}
        before, after = self._outer_layout(first)
        executions = Counter(first.executed)
        executed = [kind for kind in self.order for _ in range(executions[kind] // max(1, self._modules_of(kind)))]
        outputs = [part for part in self._outside_numbers if part[0] in self._output_parameters()]
        counts = ModelCounts(
            outside=counted[OUTSIDE],
            before=before,
            after=after,
            kinds=tuple(counted[part] for part in parts if part != OUTSIDE),
            executed=tuple(executed),
            copies=tuple(kind.copies for kind in self.kinds),
            hidden=first.hidden or _first(self.config, "hidden_size", "d_model", default=1),
            logits=fit([seen.logits / BATCH for seen in runs["half sdpa"]], lengths),
            output=tuple(number for _, number in outputs),
            embedding=self._largest_embedding(),
            tied=self._is_tied(),
            buffers=sum(b.numel() * b.element_size() for b in self.model.buffers()),
        )
        if counts.num_params != self.total:
            raise Refusal(
                f"{self.name}: its blocks share parameters in a way that is not counted "
                f"({counts.num_params:,} counted of {self.total:,})"
            )
        return counts

    def _first_run(self, length: int) -> _Seen:
        """Run the model with one block of each kind, or with all blocks if its code needs them."""
        try:
            return self.run("half sdpa", BATCH, length)
        except Exception as error:  # the code of any model may come here and raise anything
            reason = in_words(error)
        has_image = "pixel_values" in inspect.signature(self.model.forward).parameters
        attempts = [(False, False, False), (True, True, False), (False, True, False)]
        for cut, casts_buffers, adds_image in ([(True, False, True)] if has_image else []) + attempts:
            self._build()
            self._find_kinds(cut)
            self.casts_buffers, self.adds_image = casts_buffers, adds_image
            try:
                return self.run("half sdpa", BATCH, length)
            except Exception as error:
                reason = reason or in_words(error)
        self._build()
        self._find_kinds(cut=True)
        self.casts_buffers, self.needs_autocast = False, True
        try:
            return self.run("autocast sdpa", BATCH, length)
        except Exception:
            raise Refusal(f"{self.name}: a training step cannot be traced ({reason})") from None

    def _lengths(self) -> tuple[int, ...]:
        if getattr(self.model, "main_input_name", "input_ids") == "pixel_values":
            return (1,)
        positions = [
            value
            for part in _with_sub_configs(self.config)
            for name in LENGTH_KEYS
            if isinstance(value := getattr(part, name, None), int) and value > 0
        ]
        longest = min([LENGTHS[-1], *(value - 2 for value in positions)])
        if longest >= LENGTHS[-1]:
            return LENGTHS
        step = max(1, longest // 3)
        step -= step % 16 if step > 32 else 0
        return step, 2 * step, 3 * step

    @property
    def _outside_numbers(self) -> list[tuple[str, int]]:
        inside = {id(p) for kind in self.kinds for p in kind.module.parameters()}
        names = [name for name, p in self.model.named_parameters() if id(p) not in inside]
        return [(name, number) for number, name in enumerate(names)]

    def _output_parameters(self) -> set[str]:
        output = getattr(self.model, "get_output_embeddings", lambda: None)()
        if output is None:
            return set()
        own = {id(p) for p in output.parameters(recurse=False)}
        return {name for name, p in self.model.named_parameters() if id(p) in own}

    def _largest_embedding(self) -> int | None:
        embeddings = {id(each.weight) for each in self.model.modules() if isinstance(each, nn.Embedding)}
        own = [(p.numel(), number) for number, (_, p) in enumerate(self._named(OUTSIDE)) if id(p) in embeddings]
        return max(own)[1] if own else None

    def _is_tied(self) -> bool:
        output = getattr(self.model, "get_output_embeddings", lambda: None)()
        weight = getattr(output, "weight", None)
        embeddings = [part for part in self.model.modules() if isinstance(part, nn.Embedding)]
        return weight is not None and any(part.weight is weight for part in embeddings)

    def _part(self, part: int, runs: dict[str, list[_Seen]], lengths: tuple[int, ...]) -> PartCounts:
        named = self._named(part)
        linear = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Linear)}
        linear |= {id(m.bias) for m in self.model.modules() if isinstance(m, nn.Linear) and m.bias is not None}
        seen = runs["half sdpa"]
        executions = self._executions(part, seen[-1])
        experts = self._experts(named, seen[-1].experts_per_token.get(part), lengths[-1])

        def fitted(name: str, among: list[_Seen] = seen) -> Polynomial:
            return fit([getattr(each, name).get(part, 0.0) / BATCH / executions for each in among], lengths)

        return PartCounts(
            parameters=tuple(p.numel() for _, p in named),
            rows=tuple(p.shape[0] if p.dim() else 1 for _, p in named),
            vectors=tuple(number for number, (_, p) in enumerate(named) if p.dim() <= 1),
            linear=tuple(number for number, (_, p) in enumerate(named) if id(p) in linear),
            layout=() if part == OUTSIDE else self._layout(part, seen[-1]),
            attention_parameters=sum(p.numel() for name, p in named if ATTENTION_NAME.search(name)),
            products=fitted("products"),
            product_elements=fitted("product_elements"),
            weights=round(seen[-1].weight_elements.get(part, 0) / self._modules_of(part)),
            attention=fitted("attention"),
            causal=0.5 if seen[-1].is_causal.get(part) else 1.0,
            composed=fit([_composed(each, part) / BATCH / executions for each in runs["fp32 sdpa"]], lengths),
            fused_forward=fit([_fused_moved(each, part)[0] / BATCH / executions for each in seen], lengths),
            fused_backward=fit([_fused_moved(each, part)[1] / BATCH / executions for each in seen], lengths),
            unused_experts=experts,
            settings={name: self._setting(part, among, lengths) for name, among in runs.items()},
        )

    def _executions(self, part: int, seen: _Seen) -> int:
        """Return how often blocks of a kind were executed in a run."""
        return max(1, seen.executed.count(part))

    def _modules_of(self, part: int) -> int:
        """Return how many blocks of a kind are in the model that is run."""
        return max(1, sum(kind == part for kind in self.kind_of.values()))

    def _named(self, part: int) -> list[tuple[str, Any]]:
        if part == OUTSIDE:
            inside = {id(p) for kind in self.kinds for p in kind.module.parameters()}
            return [(name, p) for name, p in self.model.named_parameters() if id(p) not in inside]
        return list(self.kinds[part].module.named_parameters())

    def _setting(self, part: int, among: list[_Seen], lengths: tuple[int, ...]) -> SettingCounts:
        executions = self._executions(part, among[-1])

        def fitted(values: Callable[[_Seen], float], is_sum: bool = True, has_constant: bool = True) -> Polynomial:
            shares = [values(each) / BATCH / (executions if is_sum else 1) for each in among]
            return fit(shares, lengths, has_constant)

        entering = fitted(lambda each: each.entering.get(part, 0.0), is_sum=False)
        is_fixed = not entering.per_token  # an input that is as long for every text, such as an image
        return SettingCounts(
            saved=fitted(lambda each: each.saved.get(part, 0.0)),
            entering=entering,
            temporary=fitted(lambda each: each.temporary.get(part, 0.0), is_sum=False, has_constant=is_fixed),
            moved_forward=fitted(lambda each: each.forward[part].moved, has_constant=is_fixed),
            moved_backward=fitted(lambda each: each.backward[part].moved, has_constant=is_fixed),
            kernels=round(among[-1].forward[part].kernels / executions),
            casts=round(among[-1].casts.get(part, 0.0) / self._modules_of(part)),
        )

    def _experts(self, named: list[tuple[str, Any]], rows: float | None, length: int) -> int:
        """Return the elements of the experts of a block that a token does not use."""
        per_token: float = rows / (BATCH * length) if rows else _first(self.config, *ACTIVE_EXPERTS, default=0)
        count: int = _first(self.config, *EXPERTS, default=0)
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

    def _outer_layout(self, seen: _Seen) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
        places = [at for at, (part, _, _) in enumerate(seen.events) if part != OUTSIDE]
        last = places[-1] if places else 0
        numbers = {id(p): number for number, (_, p) in enumerate(self._named(OUTSIDE))}
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
        return tuple(before), tuple(after)

    def _layout(self, part: int, seen: _Seen) -> tuple[Item, ...]:
        numbers = {id(p): number for number, (_, p) in enumerate(self._named(part))}
        numbers |= {id(p): -1 - number for number, (_, p) in enumerate(self._named(OUTSIDE)) if id(p) not in numbers}
        module = self.kinds[part].module
        passing = _with_gradients(seen.events)
        layout: list[Item] = []
        for at, (of_part, action, each) in enumerate(seen.events):
            if of_part == part and passing[at]:
                layout.extend(_items(action, each, numbers))
                if each is module and action.startswith("leave"):
                    break
        return tuple(layout)


def _with_gradients(events: list[tuple[int, str, nn.Module]]) -> list[bool]:
    """Say of each event whether it belongs to a module whose output has a gradient."""
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


def _composed(seen: _Seen, part: int) -> float:
    """Return the elements that norms and activation functions save beyond one for each of their inputs."""
    inputs = seen.normed.get(part, 0.0) + seen.activated.get(part, 0.0)
    return max(0.0, seen.in_norms.get(part, 0.0) / 4 - inputs)


def _fused_moved(seen: _Seen, part: int) -> tuple[float, float]:
    """Return the elements that a part moves in forward and backward with one kernel for each norm and activation.

    Each kernel reads its inputs and writes its outputs once.
    """
    normed, inside = seen.normed.get(part, 0.0), seen.activated.get(part, 0.0)
    is_gated = seen.gated.get(part, 0.0) >= 0.5 * inside > 0
    rotated, biased, added = seen.rotated.get(part, 0.0), seen.biased.get(part, 0.0), 0.0
    if part in seen.entering:  # the two additions of a block to the residual stream
        added = 2 * seen.widest.get(part, 0.0) * seen.executed.count(part)
    forward = 2 * normed + 3 * added + (5 if is_gated else 2) * inside + 3 * rotated
    backward = 5 * normed + 3 * added + (9 if is_gated else 3) * inside + 3 * rotated + biased
    return forward, backward


def fit(values: Sequence[float], lengths: Sequence[int], has_constant: bool = True) -> Polynomial:
    """Return the polynomial through the values of one sequence at several lengths, with as few terms as suffice.

    Without `has_constant`, constants are what comes from the weights and not from the sequence, and are left out.
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
    return chosen if has_constant else Polynomial(0.0, chosen.per_token, chosen.per_pair)


def _first(config: Any, *names: str, default: Any) -> Any:
    for part in _with_sub_configs(config):
        for name in names:
            if (value := getattr(part, name, None)) is not None:
                return value
    return default


def _listed(config: Any, count: int, place: int) -> tuple[str, ...]:
    """Return what the configuration says of one of several layers, such as the type of its attention."""
    found = []
    for part in _with_sub_configs(config):
        for name, value in sorted(vars(part).items()):
            if isinstance(value, list | tuple) and len(value) == count and isinstance(value[0], str | bool | int):
                found.append(f"{name} {value[place]}")
    return tuple(found)


def _cut(owner: nn.Module, kept: Sequence[int]) -> None:
    children = list(owner)  # type: ignore[call-overload]
    owner._modules.clear()
    for number, place in enumerate(kept):
        owner._modules[str(number)] = children[place]


def _cut_lists(config: Any, count: int, kept: Sequence[int]) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count and value and isinstance(value[0], str | bool | int):
            setattr(config, name, [value[place] for place in kept])


@contextmanager
def _materialized(model: nn.Module, dtype: torch.dtype, casts_buffers: bool) -> Iterator[None]:
    """Give a model on the meta device parameters and buffers without memory, in a floating-point type."""
    new: dict[int, Any] = {}
    before: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                if id(parameter) not in new:
                    new[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=kind), parameter.requires_grad)
                before.append((module._parameters, name, parameter))
                module._parameters[name] = new[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in new:
                    kind = dtype if casts_buffers and buffer.is_floating_point() else buffer.dtype
                    new[id(buffer)] = torch.empty(buffer.shape, dtype=kind)
                before.append((module._buffers, name, buffer))
                module._buffers[name] = new[id(buffer)]
    try:
        yield
    finally:
        for place, name, tensor in before:
            place[name] = tensor


def _logits(outputs: Any) -> Tensor | None:
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        value = getattr(outputs, name, None)
        if isinstance(value, Tensor) and value.requires_grad:
            return value
    return next(
        (
            leaf
            for leaf in tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
            if _is_float(leaf) and leaf.requires_grad
        ),
        None,
    )


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
