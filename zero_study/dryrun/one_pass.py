"""Record the saved activations, multiplications and moved bytes of a model's parts in a forward and backward pass."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zero_study.dryrun.tracker import TensorTracker
from zero_study.engines.hooks import wrap_function

OUTSIDE = -1  # everything outside the blocks, in place of the number of a kind of block
ACTIVATION = re.compile(r"(Activation|GELU|SiLU|ReLU|Swish|Mish|Tanh|Sigmoid)", re.IGNORECASE)
NORM = re.compile(r"norm", re.IGNORECASE)
ACTIVATION_OPERATORS = ("gelu", "silu", "relu", "sigmoid", "tanh", "hardtanh", "leaky_relu", "elu")
# Operators that move nothing.
VIEWS = ("detach", "alias", "_unsafe_view", "lift_fresh", "empty", "empty_like")
FUSED_ATTENTION = "_scaled_dot_product"  # the beginning of the names of its operators
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "mv", "addmv", "addbmm", "dot")


@dataclass
class Moved:
    """The bytes that the kernels of a part of a model move in one pass, and the number of its kernels.

    The bytes do not include matrix products and fused attention.
    """

    num_bytes: float = 0.0  # read and written
    kernels: int = 0  # with products and attention


@dataclass
class PartSeen:
    """The observed operations of one part of a model in a forward and backward pass.

    All bytes are those of the whole batch.
    """

    saved: float = 0.0  # bytes that are saved for the backward pass, without parameters and their casts
    saved_in_kernels: float = 0.0  # of these, the bytes that norms and activation functions save
    entering: float = 0.0  # bytes of the part's first input
    entering_elements: float = 0.0
    temporary: float = 0.0  # bytes at the peak of the backward pass, beyond all saved tensors and gradients
    casts: float = 0.0  # bytes of autocast's copies of the weights
    forward: Moved = field(default_factory=Moved)
    backward: Moved = field(default_factory=Moved)
    products: float = 0.0  # FLOPs of matrix products and convolutions in the forward pass
    product_elements: float = 0.0  # elements that they read and write, without weights
    weights: set[int] = field(default_factory=set)  # storages of the weights that they read
    weight_elements: int = 0
    attention: float = 0.0  # FLOPs of fused attention in the forward pass, with all pairs of tokens
    is_causal: bool = False
    normed: float = 0.0  # elements of the outputs of norms
    activated: float = 0.0  # elements of the outputs of activation functions
    gated: float = 0.0  # elements of products of such an output with another tensor
    rotated: float = 0.0  # elements of concatenated tensors, as rotary embeddings make them
    biased: float = 0.0  # elements of the outputs of products with a bias
    expert_rows: float = 0.0  # rows that all experts together multiply; 0 without a grouped product
    dropped: float = 0.0  # elements of the inputs of dropout, whatever its rate is


@dataclass
class Seen:
    """The observed operations of a whole model in one forward and backward pass, by part."""

    parts: dict[int, PartSeen] = field(default_factory=lambda: defaultdict(PartSeen))  # by kind of block, or OUTSIDE
    executed: list[int] = field(default_factory=list)  # the kinds of the blocks, in the order of the forward pass
    # The part, "enter", "leave" or "leave without gradient", and the module.
    events: list[tuple[int, str, nn.Module]] = field(default_factory=list)
    # By Linear module: the rows that it multiplies, the storage of its input, and whether another operator saves this.
    linears: dict[nn.Module, tuple[float, int, bool]] = field(default_factory=dict)
    logits: float = 0.0  # elements of the model's output
    hidden: int = 0  # width of a block's input

    @property
    def kernels(self) -> int:
        """The number of kernels in the forward pass."""
        return sum(part.forward.kernels for part in self.parts.values())


class PassTracker(TensorTracker):  # type: ignore[no-untyped-call]
    """A tracker that records the saved activations, multiplications and moved bytes of each part of a model."""

    def __init__(self, model: nn.Module, kinds: dict[nn.Module, int], experts: int, is_padded: bool = False) -> None:
        """Create a tracker that has recorded nothing.

        `is_padded` says that the attention mask hides the padding of texts, and not the tokens that follow.
        """
        super().__init__()
        self._is_padded = is_padded
        self.seen = Seen()
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
        self._saved: dict[int, Tensor] = {}  # by storage; they stay alive, so that no storage gets the same address
        self._activated_storages: set[int] = set()
        self.windows: list[tuple[int, int]] = []  # part, and number of memory changes when its backward pass begins
        self._alive: list[Tensor] = []
        self._last_name = ""  # of an operator that is no view

    def __enter__(self) -> PassTracker:
        super().__enter__()
        self._stack.enter_context(wrap_function(nn.functional, "dropout", self._drop))
        return self

    # ------------------------------------------------------------ modules

    def _drop(self, call: Any, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        if not self._is_backward:
            self.seen.parts[self._part].dropped += tensor.numel()
        return call(tensor, *arguments, **options)

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        super()._begin_forward(module, inputs)
        if self._is_backward:
            return
        self._running.append(module)
        if isinstance(module, nn.Linear):
            self._note_input(module, inputs)
        if module in self._kinds:
            self._part = self._kinds[module]
            self.seen.executed.append(self._part)
            first = next((leaf for leaf in tree_leaves(inputs) if is_float(leaf)), None)
            if first is not None:
                self.seen.parts[self._part].entering = first.numel() * first.element_size()
                self.seen.parts[self._part].entering_elements = first.numel()
                self.seen.hidden = int(first.shape[-1])
        self.seen.events.append((self._part, "enter", module))

    def _end_forward(self, module: nn.Module, inputs: Any = None, output: Any = None) -> None:
        super()._end_forward(module, inputs, output)
        if self._is_backward:
            return
        tensors = [leaf for leaf in tree_leaves(output) if is_float(leaf)]
        if module in self._norms and tensors:
            self.seen.parts[self._part].normed += tensors[0].numel()
        if module in self._acts and tensors:
            self._note_activation(tensors[0])
        has_gradient = any(leaf.requires_grad for leaf in tensors)
        self.seen.events.append((self._part, "leave" if has_gradient else "leave without gradient", module))
        if module in self._running:
            del self._running[self._running.index(module) :]
        if module in self._kinds:
            self._part = OUTSIDE

    def _note_input(self, module: nn.Linear, inputs: Any) -> None:
        tensor = next(leaf for leaf in tree_leaves(inputs) if is_float(leaf))
        rows, *_ = self.seen.linears.get(module, (0.0,))
        rows += tensor.numel() / module.in_features
        self.seen.linears[module] = rows, tensor.untyped_storage()._cdata, False
        self._alive.append(tensor)

    def _note_activation(self, output: Tensor) -> None:
        key = output.untyped_storage()._cdata
        if key not in self._activated_storages:
            self.seen.parts[self._part].activated += output.numel()
            self._activated_storages.add(key)
            self._alive.append(output)

    # ------------------------------------------------------------ saved tensors

    def pack(self, tensor: Tensor) -> Any:
        if _is_plain(tensor):
            key = tensor.untyped_storage()._cdata
            if key not in self._fixed and key not in self._cast_of and key not in self._saved:
                self._saved[key] = tensor
                num_bytes = tensor.untyped_storage().nbytes()
                self.seen.parts[self._part].saved += num_bytes
                if any(module in self._norms or module in self._acts for module in self._running[-2:]):
                    self.seen.parts[self._part].saved_in_kernels += tensor.numel() * tensor.element_size()
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
        if not outputs or func.is_view or name in VIEWS:
            return
        part, seen = self._part, self.seen
        keys = [leaf.untyped_storage()._cdata for leaf in inputs]
        if name == "_to_copy" and not self._is_backward and inputs and self._is_matrix(inputs[0]):
            self._cast_of[outputs[0].untyped_storage()._cdata] = keys[0]
            self._alive.append(outputs[0])
            seen.parts[part].casts += outputs[0].numel() * outputs[0].element_size()
            return
        in_pass = seen.parts[part].backward if self._is_backward else seen.parts[part].forward
        # Attention in windows is one kernel on a GPU, and several calls here.
        is_window = name.startswith(FUSED_ATTENTION) and self._last_name.startswith(FUSED_ATTENTION)
        in_pass.kernels += not is_window
        self._last_name = name
        if name.startswith(FUSED_ATTENTION):
            if not self._is_backward:
                query, key, value = inputs[:3]
                heads, width = query.shape[1], query.shape[-1] + value.shape[-1]
                seen.parts[part].attention += 2 * query.shape[0] * heads * query.shape[2] * key.shape[2] * width
                seen.parts[part].is_causal = not self._is_padded and _is_causal(func, args, options)
            return
        if name in PRODUCTS:
            if not self._is_backward:
                self._count_product(func, name, args, options, result, inputs, outputs, keys)
            return
        moved = sum(leaf.numel() * leaf.element_size() for leaf in (*inputs, *outputs))
        in_pass.num_bytes += moved
        if self._is_backward:
            return
        if name in ACTIVATION_OPERATORS and part != OUTSIDE:
            shape = outputs[0].shape
            is_cap = len(shape) == 4 and shape[-1] == shape[-2]  # of attention's scores, as in Gemma 2
            if not is_cap and not any(module in self._acts for module in self._running):
                self._note_activation(outputs[0])
        elif name == "mul" and len(keys) > 1 and any(key in self._activated_storages for key in keys):
            if inputs[0].numel() == inputs[1].numel():
                seen.parts[part].gated += outputs[0].numel()
        elif name == "cat":
            seen.parts[part].rotated += outputs[0].numel()

    def _is_matrix(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a complete parameter with at least two dimensions."""
        return tensor.dim() > 1 and self.parameter_storages.get(tensor.untyped_storage()._cdata) == tensor.numel()

    def _count_product(
        self, func: Any, name: str, args: Any, options: Any, result: Any, inputs: Any, outputs: Any, keys: Any
    ) -> None:
        seen, part = self.seen, self._part
        packet = func.overloadpacket
        if name == "_grouped_mm":  # PyTorch's counter has no formula: each row is multiplied with one of the matrices
            flops = 2.0 * inputs[0].shape[0] * inputs[1].shape[-2] * inputs[1].shape[-1]
        else:
            flops = float(flop_registry[packet](*args, **options, out_val=result)) if packet in flop_registry else 0.0
        weights = {self._cast_of.get(key, key) for key in keys} & set(self.parameter_storages)
        seen.parts[part].products += flops
        seen.parts[part].weights |= weights
        moved = sum(
            leaf.numel() for leaf, key in zip(inputs, keys, strict=True) if self._cast_of.get(key, key) not in weights
        )
        seen.parts[part].product_elements += moved + sum(leaf.numel() for leaf in outputs)
        if name == "addmm" and inputs[0].dim() == 1:
            seen.parts[part].biased += outputs[0].numel()
        if name == "_grouped_mm":
            seen.parts[part].expert_rows = inputs[0].shape[0]

    # ------------------------------------------------------------ memory

    def begin_backward(self, kept: Sequence[Tensor]) -> None:
        """Start to observe a backward pass. The memory of the tensors `kept` is not counted."""
        self._is_backward = True
        for module, (rows, storage, _) in self.seen.linears.items():
            self.seen.linears[module] = rows, storage, storage in self._saved
        self._running.clear()
        self._alive.clear()
        self._saved_storages = {self._storages[key] for key in self._saved if key in self._storages}
        kept_keys = (tensor.untyped_storage()._cdata for tensor in kept)
        self._not_counted = {
            self._storages[key] for key in (*self._fixed, *self._cast_of, *kept_keys) if key in self._storages
        }
        self._saved.clear()
        self.start_peak()

    def end_backward(self, gradients: Sequence[Tensor]) -> None:
        """Find the memory peak of each part's backward pass, without parameters, their casts and their gradients."""
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
            self.seen.parts[part].temporary = max(self.seen.parts[part].temporary, highest - base)

    def _step(self, at: int, not_counted: Any, saved: Any, held: float, held_saved: float) -> tuple[float, float]:
        assert self._changes is not None
        storage, change = self._changes[at]
        if storage in not_counted:
            return held, held_saved
        return held + change, held_saved + (change if storage in saved else 0)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type != "meta" and leaf.layout == torch.strided


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_causal(func: Any, args: Any, options: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | options
    return bool(values.get("is_causal")) or values.get("attn_mask", values.get("attn_bias")) is not None
