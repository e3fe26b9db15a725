"""Check saved tensors: their values, their names and shapes against the configuration, their types, and adapters."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from ..readback.dtypes import TORCH_NAMES
from . import expected, pickles
from .content import Saved, Tensor
from .expected import Expected, Layout
from .values import same

_LORA = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.([^.]+?))??(?:\.weight)?")


def check_values(saved: Saved) -> None:
    """Read every tensor once, and report empty ones, zeros, and values that are NaN or infinite."""
    empty: list[str] = []
    found: dict[str, list[str]] = defaultdict(list)
    for name, tensor in [*saved.tensors.items(), *saved.states.items()]:
        is_state = name in saved.states
        if not tensor.size:
            if not is_state:
                empty.append(name)
            continue
        try:
            values = tensor.read()
        except (pickles.Unreadable, OSError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            saved.wrong("unreadable", f"The values of {name} cannot be read: {reason}.", [name])
            continue
        if not values.is_floating_point():
            continue
        if not _is_finite(values):
            found["state" if is_state else "weight"].append(name)
        elif not is_state and values.ndim > 1 and not _may_be_zero(name) and not bool(values.any()):
            found["zero"].append(name)
        elif name.endswith("/exp_avg_sq") and bool((values < 0).any()):
            found["negative"].append(name)
    if empty:
        saved.wrong("empty", _empty_text(saved, empty), empty)
    if found["weight"]:
        saved.wrong("not finite", "These weights have values that are NaN or infinite.", found["weight"])
    if found["state"]:
        saved.wrong("not finite", "These optimizer states have values that are NaN or infinite.", found["state"])
    if found["negative"]:
        saved.wrong("optimizer", "These second moments have negative values.", found["negative"])
    if found["zero"]:
        saved.wrong("zero", "All values of these tensors are zero.", found["zero"])


def _empty_text(saved: Saved, empty: list[str]) -> str:
    how_many = "All tensors" if len(empty) == len(saved.tensors) else "These tensors"
    return (
        f"{how_many} have no elements. Under ZeRO-3, this happens if a model is saved without gathering its parameters "
        "(deepspeed.zero.GatheredParameters)."
    )


def _is_finite(values: torch.Tensor) -> bool:
    # The sum is NaN or infinite if an element is; the second look is for a sum that is too large.
    return bool(values.float().sum().isfinite()) or bool(values.float().isfinite().all())


def _may_be_zero(name: str) -> bool:
    """Return whether a tensor is a bias, or the matrix of LoRA that starts at zero: B, or an embedding's A."""
    if name.endswith("bias"):
        return True
    match = _LORA.fullmatch(name)
    return match is not None and match[3] == ("A" if match[2] else "B")


# ---------------------------------------------------------------- names, shapes and types


def plain_name(name: str) -> str:
    """Return a tensor's name without the parts that wrappers add."""
    for prefix in ("module.", "_orig_mod.", "base_model.model."):
        while name.startswith(prefix):
            name = name.removeprefix(prefix)
    for part in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name


def check_model(saved: Saved, config: dict[str, Any] | None) -> None:
    """Compare the tensors with those of the model that the configuration describes."""
    if config is None:
        saved.unchecked.append("names and shapes of the tensors, because there is no config.json (--model FOLDER)")
        _check_types(saved, None, None)
        return
    try:
        model = expected.from_config(config)
    except expected.NotKnown as reason:
        saved.unchecked.append(f"names and shapes of the tensors, because {reason}")
        _check_types(saved, config, None)
        return
    tensors = {plain_name(name): tensor for name, tensor in saved.whole().items()}
    if any(".lora_" in name for name in tensors):
        saved.unchecked.append("names and shapes of the tensors, because the model has an adapter")
        return
    layout = model.layout_of(tensors)
    partner = {name: group for group in layout.groups for name in group}
    missing = [
        name
        for name in layout.shapes
        if not any(each in tensors for each in partner.get(name, [name])) and not _matches(model.ignored, name)
    ]
    unexpected = [name for name in tensors if name not in layout.shapes and not _matches(model.ignored, name)]
    if missing and unexpected and (len(missing) == len(layout.shapes) or len(model.layouts) > 1):
        saved.unchecked.append("names and shapes of the tensors, because they have other names than the model's")
    else:
        if missing:
            saved.wrong("missing", "The model of config.json has these tensors, but they were not saved.", missing)
        if unexpected:
            saved.wrong(
                "unexpected", "These tensors were saved, but the model of config.json does not have them.", unexpected
            )
    for name in layout.shapes.keys() & tensors.keys():
        there, needed = tensors[name].shape, layout.shapes[name]
        if there != needed and tensors[name].size:
            saved.wrong("partial", f"{name} has shape {list(there)}, but config.json says {list(needed)}.", [name])
    _check_tied(saved, layout, tensors)
    _check_types(saved, config, model)


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _check_tied(saved: Saved, layout: Layout, tensors: dict[str, Tensor]) -> None:
    """Check that tensors that share a parameter in the model have the same values."""
    for group in layout.groups:
        there = [name for name in group if name in tensors and tensors[name].size]
        first, *others = there or [""]
        if there:
            saved.ties |= {name: _own_name(saved, first) for name in group if name not in tensors}
        for name in others:
            if tensors[name] is tensors[first]:
                continue
            a, b = _values(tensors[first]), _values(tensors[name])
            if a is not None and b is not None and not same(a, b):
                saved.wrong(
                    "untied",
                    f"config.json ties {name} to {first}, but they were saved with different values. Loading keeps "
                    "only one of them.",
                    [first, name],
                )


def _own_name(saved: Saved, plain: str) -> str:
    """Return the name under which a tensor was saved."""
    return next(name for name in saved.whole() if plain_name(name) == plain)


def _values(tensor: Tensor) -> torch.Tensor | None:
    try:
        return tensor.read()
    except (pickles.Unreadable, OSError, RuntimeError, ValueError):
        return None  # check_values reports it


def _check_types(saved: Saved, config: dict[str, Any] | None, model: Expected | None) -> None:
    """Check that the weights have one type: the one that the configuration names."""
    if saved.format.startswith("DeepSpeed"):
        return  # trained parameters have fp32 master weights, and frozen ones do not
    in_fp32 = model.in_fp32 if model else []
    of = {
        name: tensor.dtype
        for name, tensor in saved.tensors.items()
        if tensor.dtype in TORCH_NAMES.values() and not any(part in name for part in in_fp32)
    }
    kinds = Counter(of.values())
    named = str((config or {}).get("dtype") or (config or {}).get("torch_dtype") or "").removeprefix("torch.")
    is_of_hub = saved.format.startswith("Hugging Face")
    if is_of_hub and named in TORCH_NAMES.values() and set(kinds) - {named}:
        odd = [name for name, kind in of.items() if kind != named]
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        saved.wrong("dtype", f"config.json says {named}, but the tensors are: {listed}.", odd)
    elif len(kinds) > 1:
        common = kinds.most_common(1)[0][0]
        odd = [name for name, kind in of.items() if kind != common]
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        add = saved.wrong if is_of_hub and model else saved.note
        add("dtype", f"The weights have several types: {listed}.", odd)


# ---------------------------------------------------------------- adapters


def check_adapter(saved: Saved, base: dict[str, Any] | None) -> None:
    """Check an adapter against its configuration, and against that of its base model if it is there."""
    config = saved.config
    if not saved.tensors:
        if not any(finding.kind == "unreadable" for finding in saved.findings):
            saved.wrong("empty", "The adapter has no tensors.")
        return
    if config is None:
        saved.unchecked.append("ranks and modules of the adapter, because there is no readable adapter_config.json")
        return
    if config.get("peft_type") != "LORA":
        saved.unchecked.append(
            f"names and shapes of the tensors: only those of LoRA are known, not {config.get('peft_type')}"
        )
        return
    model = _base_of(saved, base)
    pairs = _pairs(saved)
    if all(tensor.size for tensor in saved.tensors.values()):
        _check_pairs(saved, pairs, config, model)
    _check_targets(saved, pairs, config, model)
    _check_saved_modules(saved, config)
    _check_training(saved, pairs)
    _check_types(saved, None, None)


def _base_of(saved: Saved, base: dict[str, Any] | None) -> Expected | None:
    name = (saved.config or {}).get("base_model_name_or_path")
    config = base or expected.find_config(name, saved.folder)
    if config is None:
        saved.unchecked.append(
            f"shapes and modules of the adapter against its base model, because {name or 'no base model'} is "
            f"{'not on this machine' if name else 'named'} (--model FOLDER)"
        )
        return None
    try:
        return expected.from_config(config)
    except expected.NotKnown as reason:
        saved.unchecked.append(f"shapes and modules of the adapter against its base model, because {reason}")
        return None


def _pairs(saved: Saved) -> dict[str, dict[str, Tensor]]:
    """Return the matrices of each module: A and B. An embedding's are EA and EB."""
    pairs: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in saved.tensors.items():
        if match := _LORA.fullmatch(name):
            pairs[plain_name(match[1])][("E" if match[2] else "") + match[3]] = tensor
    return dict(pairs)


def _check_pairs(
    saved: Saved, pairs: dict[str, dict[str, Tensor]], config: dict[str, Any], model: Expected | None
) -> None:
    """Check that each module has both matrices, of the rank that the configuration says, and of the base's sizes."""
    for module, own in pairs.items():
        kind = "E" if any(key.startswith("E") for key in own) else ""
        if len(own) < 2:
            lacking = "B" if kind + "A" in own else "A"
            saved.wrong("missing", f"{module} has no lora_{lacking}.", [f"{module}.lora_{lacking}"])
            continue
        a, b = own[kind + "A"], own[kind + "B"]
        rank = _rank_of(module, config)
        if len(a.shape) != 2 or len(b.shape) != 2 or config.get("use_qalora"):
            saved.unchecked.append(f"the rank of {module}, which is not a plain matrix")
            continue
        if a.shape[0] != rank or b.shape[1] != rank:
            saved.wrong(
                "partial",
                f"{module} has matrices of shapes {list(a.shape)} and {list(b.shape)}, but adapter_config.json says "
                f"rank {rank}.",
                [module],
            )
            continue
        sizes = None if model is None else (model.embeddings if kind else model.linear).get(module)
        if sizes is not None and (a.shape[1], b.shape[0]) != sizes:
            saved.wrong(
                "partial",
                f"{module} takes {a.shape[1]} inputs and has {b.shape[0]} outputs in the adapter, but {sizes[0]} and "
                f"{sizes[1]} in the base model.",
                [module],
            )
        if config.get("use_dora") and not any(
            plain_name(name).startswith(f"{module}.lora_magnitude_vector") for name in saved.tensors
        ):
            saved.wrong("missing", f"{module} has no magnitude, although the adapter uses DoRA.", [module])


def _rank_of(module: str, config: dict[str, Any]) -> int:
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return int(rank)
    return int(config.get("r", 0))


def _is_target(module: str, targets: Any) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _check_targets(saved: Saved, pairs: dict[str, Any], config: dict[str, Any], model: Expected | None) -> None:
    """Check that each module that the configuration targets has its matrices, and that no other module has any."""
    targets = config.get("target_modules") or []
    if targets == "all-linear":
        saved.unchecked.append("which modules have matrices, because target_modules is all-linear")
        return
    if other := [module for module in pairs if not _is_target(module, targets)]:
        saved.wrong("unexpected", "adapter_config.json does not target these modules.", other)
    limits = [key for key in ("layers_to_transform", "exclude_modules", "layer_replication") if config.get(key)]
    if limits:
        saved.unchecked.append(f"whether all modules have their matrices, because {limits[0]} is set")
        return
    if model is not None:
        needed = [module for module in (*model.linear, *model.embeddings) if _is_target(module, targets)]
        if missing := [module for module in needed if module not in pairs]:
            saved.wrong("missing", "adapter_config.json targets these modules, but they have no matrices.", missing)
        return
    if isinstance(targets, str):
        return
    if missing := [target for target in targets if not any(_is_target(module, [target]) for module in pairs)]:
        saved.wrong("missing", "adapter_config.json targets these modules, but none of them has matrices.", missing)
    layers = {target: {_layer(module) for module in pairs if _is_target(module, [target])} for target in targets}
    every = set().union(*layers.values()) if layers else set()
    gaps = [f"{target} of layer {at}" for target, own in layers.items() for at in every - own if own and at is not None]
    if gaps and not missing:
        saved.note("missing", "Other modules of these layers have matrices. Some models have no such modules.", gaps)


def _layer(module: str) -> int | None:
    numbers = re.findall(r"\.(\d+)\.", f".{module}.")
    return int(numbers[0]) if numbers else None


def _check_saved_modules(saved: Saved, config: dict[str, Any]) -> None:
    """Check that trained copies of whole modules are there, and that no weights of the base model are."""
    wanted = config.get("modules_to_save") or []
    others = [plain_name(name) for name in saved.tensors if not re.search(r"\.lora_|^lora_", name)]
    for module in wanted:
        if not any(re.search(rf"(^|\.){re.escape(module)}(\.|$)", name) for name in others):
            saved.wrong("missing", f"modules_to_save names {module}, but it was not saved.", [module])
    known = [*wanted, *(config.get("trainable_token_indices") or [])]
    if config.get("bias", "none") != "none":
        others = [name for name in others if not name.endswith("bias")]
    spare = [name for name in others if not any(re.search(rf"(^|\.){re.escape(m)}(\.|$)", name) for m in known)]
    embeddings = [name for name in spare if re.search(r"(embed|wte|lm_head)", name)]
    if embeddings:
        saved.note(
            "unexpected",
            "The adapter also has embeddings of its base model. PEFT saves them after a resize.",
            embeddings,
        )
    if rest := [name for name in spare if name not in embeddings and "token_adapter" not in name]:
        saved.wrong("unexpected", "These tensors are weights of the base model, and not of the adapter.", rest)


def _check_training(saved: Saved, pairs: dict[str, dict[str, Tensor]]) -> None:
    """Check that the adapter was trained: LoRA starts with B equal to zero, and A never is."""
    zero_b = []
    for module, own in pairs.items():
        b = own.get("B") or own.get("EA")  # an embedding starts with A equal to zero
        if b is not None and b.size and (values := _values(b)) is not None and not bool(values.any()):
            zero_b.append(module)
    if zero_b and len(zero_b) == len(pairs):
        saved.wrong(
            "untrained",
            "lora_B is zero in every module, as it is before the first step, so the adapter changes nothing.",
            zero_b,
        )
    elif zero_b:
        saved.note("untrained", "lora_B is zero in these modules, as it is before the first step.", zero_b)
