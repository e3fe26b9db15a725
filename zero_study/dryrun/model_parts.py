"""Build a model of transformers without memory and with one block of each kind, and run it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zero_study.dryrun import build_model, images
from zero_study.dryrun.build_model import block_lists, first_setting, in_words, with_sub_configs
from zero_study.dryrun.fake import without_memory
from zero_study.dryrun.one_pass import OUTSIDE, PassTracker, Seen, is_float
from zero_study.errors import Refusal

# The type of the parameters, and whether the forward pass runs under autocast.
ARITHMETIC = {"fp32": (torch.float32, False), "autocast": (torch.float32, True), "half": (torch.bfloat16, False)}
# Names of the number of experts in the configurations of models.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


@dataclass
class Kind:
    """Blocks with the same class and the same parameter shapes. Only the first block of a kind is traced."""

    module: nn.Module
    copies: int = 0


def _signature(block: nn.Module) -> tuple[Any, ...]:
    kinds = tuple(getattr(block, name, None) for name in ("attention_type", "layer_type", "block_type"))
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    return (type(block), tuple(map(str, kinds)), shapes)


class ModelInParts:
    """A model without memory, in which one block of each kind stands for all blocks of that kind.

    Raises Refusal if transformers cannot build the model.
    """

    casts_buffers = False  # whether buffers have the type of the parameters
    adds_image = False  # whether the model needs an image beside its text
    needs_autocast = False  # whether the model cannot be cast to 16 bits

    def __init__(self, built: type[Any], config: Any, has_image: bool = False, has_frozen_tower: bool = False) -> None:
        """Build the model. With `has_image`, each text of a pass has an image, and the vision tower may be frozen."""
        self.name = built.__name__
        self._built = built
        self._config = config
        self._has_image = has_image
        self._has_frozen_tower = has_frozen_tower
        build_model.prepare(config)
        self._build()
        self._find_kinds(cut=True)

    def _build(self) -> None:
        """Build the model on the meta device, with fused attention if it has that."""
        with torch.device("meta"):
            self.model, self.has_sdpa = build_model.build(self._built, self._config)
            if self._has_frozen_tower:
                images.freeze(self.model)
        self.config = self.model.config
        self.num_params = sum(p.numel() for p in self.model.parameters())

    def _find_kinds(self, cut: bool) -> None:
        """Find the kinds of blocks. With `cut`, remove all blocks but one of each kind from the model."""
        self.kinds: list[Kind] = []
        self.kind_of: dict[nn.Module, int] = {}
        self.order: list[int] = []  # the kind of each block of the whole model
        by_signature: dict[tuple[Any, ...], int] = {}
        seen: set[int] = set()  # parameters
        for module in self.model.modules():
            own: Any = [p for p in module._parameters.values() if p is not None]
            module._meta_parameters = own
        for owner, blocks in block_lists(self.model):
            kept: list[int] = []
            for place, block in enumerate(blocks):
                indexed = _indexed(self.config, len(blocks), place) if self._has_image else ()
                signature = (id(owner), _signature(block), _listed(self.config, len(blocks), place), indexed)
                number = by_signature.setdefault(signature, len(self.kinds))
                if number == len(self.kinds):
                    self.kinds.append(Kind(block))
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
                _cut_indices(self.model, owner, kept)
                for part in with_sub_configs(self.config):
                    _cut_lists(part, len(blocks), kept)

    # ------------------------------------------------------------ running

    @property
    def half(self) -> str:
        """The name of the variant in which the model computes in 16 bits."""
        return "autocast sdpa" if self.needs_autocast else "half sdpa"

    def run(self, setting: str, batch: int, length: int, is_frozen: bool = False) -> Seen:
        """Run a forward and a backward pass, and return the operations that were observed.

        `setting` is one of those of `zero_study.theory.shapes.counts.Setting`. With `is_frozen`, no weight has a
        gradient, but the inputs of all blocks have one, as if adapters were trained.
        """
        arithmetic, attention = setting.split()
        dtype, is_autocast = ARITHMETIC[arithmetic]
        if self.has_sdpa:
            self.model.set_attn_implementation(attention)
        with ExitStack() as stack:
            stack.enter_context(without_memory())
            trained = [block for block, kind in self.kind_of.items() if not self.is_frozen(kind)]
            stack.enter_context(_materialized(self.model, dtype, self.casts_buffers, is_frozen))
            for block in trained if is_frozen else ():
                handle = block.register_forward_pre_hook(_with_gradient, with_kwargs=True)
                stack.callback(handle.remove)
            inputs = build_model.make_inputs(self.model, batch, length, dtype, self.adds_image)
            experts = first_setting(self.config, *EXPERTS, default=0)
            watch = PassTracker(self.model, self.kind_of, experts, is_padded="attention_mask" in inputs)
            stack.enter_context(watch)
            with (
                saved_tensors_hooks(watch.pack, watch.unpack),
                torch.autocast("cpu", torch.bfloat16, enabled=is_autocast),
            ):
                encoded = self._encoded(batch, dtype)
                outputs = self.model(**inputs)
            logits = _logits(outputs)
            if logits is None:
                raise Refusal(f"{self.name}: its forward pass returns nothing that depends on its parameters")
            watch.seen.logits = logits.numel()
            gradient = torch.ones_like(logits)
            del outputs
            gradients = [gradient, *map(torch.ones_like, encoded)]
            watch.begin_backward([logits, *encoded, *gradients])
            torch.autograd.backward([logits, *encoded], gradients)
            watch.end_backward([p.grad for p in self.model.parameters() if p.grad is not None])
            for part in watch.seen.parts.values():
                part.weight_elements = sum(watch.parameter_storages[storage] for storage in part.weights)
        return watch.seen

    def _encoded(self, batch: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the tokens of an image for each text of a batch. Empty without images."""
        if not self._has_image:
            return []
        with images.readable_sizes(self.model):
            features = images.features(self.model, images.make_images(self.config, batch, dtype))
        return [each for each in features if each.requires_grad]

    def first_run(self, batch: int, length: int) -> Seen:
        """Run the model once, and choose settings with which its code can be traced.

        That is with one block of each kind, or else with all blocks, with an image, with buffers in 16 bits, or under
        autocast. Raises Refusal with the first reason if no way is possible.
        """
        try:
            return self.run("half sdpa", batch, length)
        except Exception as error:  # the code of any model may come here and raise anything
            reason = in_words(error)
        has_image = "pixel_values" in inspect.signature(self.model.forward).parameters
        attempts = [(False, False, False), (True, True, False), (False, True, False)]
        for cut, casts_buffers, adds_image in ([(True, False, True)] if has_image else []) + attempts:
            self._build()
            self._find_kinds(cut)
            self.casts_buffers, self.adds_image = casts_buffers, adds_image
            try:
                return self.run("half sdpa", batch, length)
            except Exception:  # the first reason is the one to report
                continue
        self._build()
        self._find_kinds(cut=True)
        self.casts_buffers, self.needs_autocast = False, True
        try:
            return self.run("autocast sdpa", batch, length)
        except Exception:
            raise Refusal(f"{self.name}: a training step cannot be traced ({reason})") from None

    def modules_of(self, part: int) -> int:
        """Return how many blocks of a kind the traced model contains."""
        return max(1, sum(kind == part for kind in self.kind_of.values()))

    def buffers(self, part: int) -> list[Tensor]:
        """Return the buffers of one block of a kind, or of everything outside the blocks."""
        if part != OUTSIDE:
            return list(self.kinds[part].module.buffers())
        inside = {id(b) for block in self.kind_of for b in block.buffers()}
        return [b for b in self.model.buffers() if id(b) not in inside]

    def named_parameters(self, part: int) -> list[tuple[str, Any]]:
        """Return the names and the parameters of a kind of block, or of everything outside the blocks.

        Frozen parameters outside the blocks are left out.
        """
        if part != OUTSIDE:
            return list(self.kinds[part].module.named_parameters())
        return [(name, p) for name, p in self._named_outside() if p.requires_grad]

    def _named_outside(self) -> list[tuple[str, Any]]:
        inside = {id(p) for block in self.kind_of for p in block.parameters()}
        return [(name, p) for name, p in self.model.named_parameters() if id(p) not in inside]

    def frozen_outside(self) -> list[tuple[str, Any]]:
        """Return the names and the parameters outside the blocks that are frozen."""
        return [(name, p) for name, p in self._named_outside() if not p.requires_grad]

    def is_frozen(self, kind: int) -> bool:
        """Return whether all parameters of a kind of block are frozen."""
        return not any(p.requires_grad for p in self.kinds[kind].module.parameters())


def _listed(config: Any, count: int, place: int) -> tuple[str, ...]:
    """Return what a configuration lists for one of several layers, such as the type of its attention."""
    found = []
    for part in with_sub_configs(config):
        for name, value in sorted(vars(part).items()):
            if isinstance(value, list | tuple) and len(value) == count and isinstance(value[0], str | bool | int):
                found.append(f"{name} {value[place]}")
    return tuple(found)


def _indexed(config: Any, count: int, place: int) -> tuple[str, ...]:
    """Return which lists of block indices in an image configuration contain the index of one block."""
    vision = config.vision_config
    if getattr(vision, "depth", count) != count:
        return ()
    found = [name for name in vars(vision) if name.endswith("_indexes") and place in (getattr(vision, name) or ())]
    return tuple(sorted(found))


def _cut_indices(model: nn.Module, owner: nn.Module, kept: Sequence[int]) -> None:
    """Renumber the lists of block indices in the module that contains a list of blocks, after blocks were removed."""
    for module in model.modules():
        if any(child is owner for child in module.children()):
            for name, value in list(vars(module).items()):
                if name.endswith("_indexes") and isinstance(value, list | tuple):
                    setattr(module, name, [kept.index(place) for place in value if place in kept])


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
def _materialized(model: nn.Module, dtype: torch.dtype, casts_buffers: bool, is_frozen: bool) -> Iterator[None]:
    """Replace the meta parameters and buffers of a model by ones without memory, in a floating-point type."""
    new: dict[int, Any] = {}
    before: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                if id(parameter) not in new:
                    has_gradient = parameter.requires_grad and not is_frozen
                    new[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=kind), has_gradient)
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


class _NeedsGradient(torch.autograd.Function):
    """Returns a tensor that has a gradient, which is then dropped, like that of the input of the first adapter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def _with_gradient(module: nn.Module, arguments: Any, options: Any) -> Any:
    """Return the arguments of a block, with a gradient of the first tensor among them."""
    leaves, structure = tree_flatten((arguments, options))
    place = next(place for place, leaf in enumerate(leaves) if is_float(leaf))
    if not leaves[place].requires_grad:
        leaves[place] = _NeedsGradient.apply(leaves[place], torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
    return tree_unflatten(leaves, structure)


def _logits(outputs: Any) -> Tensor | None:
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        value = getattr(outputs, name, None)
        if isinstance(value, Tensor) and value.requires_grad:
            return value
    return next(
        (
            leaf
            for leaf in tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
            if is_float(leaf) and leaf.requires_grad
        ),
        None,
    )
