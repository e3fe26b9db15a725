"""Check a saved adapter: what PEFT loads of it, its modules and ranks, and whether it was trained.

If the base model's configuration is there, PEFT itself decides which tensors it loads. The rules here explain what it
does not load, and they are all that can be checked without a base model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ..engines.readback.parameters import ADAPTER_PREFIX, base_name, without_base_layers, wrapper_of
from ..verdict import Checked
from . import expected, loading
from .content import Saved, Tensor
from .expected import Expected
from .number_types import check_types
from .values import values_of

_LORA = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.([^.]+?))??(?:\.weight)?")
_OF_LORA = re.compile(r"\.lora_|^lora_")
_MAGNITUDE = ".lora_magnitude_vector"
_TOKENS = "trainable_tokens_delta"
_HEADS = {"classifier", "score"}  # PEFT names both for a classification, and a model has one of them


def check_adapter(saved: Saved, base: dict[str, Any] | None) -> None:
    """Report where a saved adapter contradicts its configuration, or the base model if that is known."""
    config = saved.config
    if not saved.tensors:
        if not any(finding.kind == "unreadable" for finding in saved.findings):
            saved.wrong("empty", "The adapter has no tensors.")
        return
    if config is None:
        saved.unchecked.append("ranks and modules of the adapter, because there is no readable adapter_config.json")
        return
    check_types(saved, None, None)
    model = _base_of(saved, base)
    loaded = _load(saved, config, model)
    is_whole = loaded is not None and loaded.is_whole
    if not is_whole:
        _check_names(saved, config)
    if config.get("peft_type") == "LORA":
        _check_lora(saved, config, model, is_whole)
    elif loaded is None and model is None:
        saved.unchecked.append(
            f"names and shapes of the tensors, because those of {config.get('peft_type')} are not known "
            "without the base model"
        )
    if loaded is not None:
        _report(saved, loaded)


def _load(saved: Saved, config: dict[str, Any], model: Expected | None) -> loading.Loaded | None:
    """Return what PEFT loads of an adapter. None if that is not known."""
    if model is None:
        return None
    rows = _num_rows(saved)
    try:
        if model.num_tokens is not None and rows > model.num_tokens:
            loading.resize(model.model, rows)
            saved.note(
                "partial",
                f"The adapter has embeddings of {rows:,} tokens, but its base model only has "
                f"{model.num_tokens:,} tokens. Call "
                f"resize_token_embeddings({rows}) of the base model before PEFT loads the adapter.",
            )
        return loading.adapter(model.model, config, saved.tensors.values())
    except loading.NoSuchModules as error:
        saved.wrong("unexpected", f"PEFT cannot load the adapter into its base model: {str(error).rstrip('.')}.")
    except expected.NotKnown as reason:
        saved.unchecked.append(f"what PEFT loads of the adapter, because {reason}")
    return None


def _base_of(saved: Saved, base: dict[str, Any] | None) -> Expected | None:
    settings = saved.config or {}
    name = settings.get("base_model_name_or_path")
    config = base or expected.find_config(name if isinstance(name, str) else None, saved.folder)
    if config is None:
        saved.unchecked.append(
            f"shapes and modules of the adapter against its base model, because {name or 'no base model'} is "
            f"{'not on this machine' if name else 'named'} (--model FOLDER)"
        )
        return None
    try:
        expected.class_of(config)  # also raises if transformers is not installed
        model_class = loading.base_class(settings)
        task = str(settings.get("task_type"))
        labels = _num_labels(saved) if "SEQ_CLS" in task or task == "TOKEN_CLS" else None
        return expected.from_config(config | ({"num_labels": labels} if labels else {}), model_class)
    except expected.NotKnown as reason:
        saved.unchecked.append(f"shapes and modules of the adapter against its base model, because {reason}")
        return None


def _num_labels(saved: Saved) -> int | None:
    """Return the number of labels: the rows of the last head in the adapter, which the base model does not have."""
    rows = [
        tensor.shape[0]
        for name, tensor in saved.tensors.items()
        if len(tensor.shape) == 2 and _HEADS & set(name.split(".")) and not _OF_LORA.search(name)
    ]
    return min(rows) if rows else None


def _check_names(saved: Saved, config: dict[str, Any]) -> None:
    """Report names that PEFT does not load: with a wrapper's prefix, or with a missing or doubled prefix of PEFT."""
    if config.get("num_virtual_tokens") is not None:  # a method that trains a prompt, and no modules
        if loading.PROMPT not in saved.tensors:
            saved.wrong(
                "missing",
                f"The adapter has no tensor {loading.PROMPT}, so PEFT cannot load it.",
                [loading.PROMPT],
            )
        return
    wrapped = {name: part for name in saved.tensors if (part := wrapper_of(name)) is not None}
    if wrapped:
        text, wrapper = next(iter(wrapped.values()))
        saved.wrong(
            "unexpected",
            f"These names contain {text}, a part that {wrapper} adds. PEFT does not know them and ignores "
            f"the tensors. Unwrap the model before you save it, or remove {text} from the names.",
            wrapped,
        )
    doubled = [name for name in saved.tensors if name.startswith(ADAPTER_PREFIX * 2)]
    if doubled:
        saved.wrong(
            "unexpected",
            f"These names begin with {ADAPTER_PREFIX} twice. PEFT does not know them and ignores the tensors. Save the "
            "PEFT model itself, or remove one of the prefixes.",
            doubled,
        )
    lacking = [name for name in saved.tensors if not name.startswith(ADAPTER_PREFIX) and name not in wrapped]
    if lacking and not wrapped and config.get("peft_type") == "LORA":
        saved.wrong(
            "unexpected",
            f"These names do not begin with {ADAPTER_PREFIX}. PEFT does not know them and ignores the tensors. Add the "
            "prefix to the names, or save with the PEFT model's save_pretrained.",
            lacking,
        )


def _num_rows(saved: Saved) -> int:
    """Return the number of rows of the token embeddings that an adapter saves unsharded; 0 if it saves none."""
    whole = [
        tensor
        for name, tensor in saved.tensors.items()
        if len(tensor.shape) == 2 and re.search(r"(embed_tokens|wte|word_embeddings|lm_head|shared)\b", name)
        if not _OF_LORA.search(name) and _TOKENS not in name
    ]
    return max((tensor.shape[0] for tensor in whole), default=0)


def _report(saved: Saved, loaded: loading.Loaded) -> None:
    """Report what PEFT does not load, if the rules have not explained it."""
    reported_names = {name for finding in saved.findings if finding.is_wrong for name in finding.names}
    plain_names = {base_name(name) for name in reported_names}
    missing = [name for name in loaded.missing if not _is_explained(name, plain_names)]
    unexpected = [name for name in loaded.unexpected if not _is_explained(name, plain_names)]
    reshaped = [name for name in loaded.reshaped if not _is_explained(name, plain_names)]
    if missing:
        saved.wrong("missing", "PEFT needs these tensors, but the adapter does not have them.", missing)
    if unexpected:
        saved.wrong("unexpected", "PEFT ignores these tensors, because neither the model nor its adapter has them.",
                    unexpected)  # fmt: skip
    for name in reshaped:
        saved_shape, needed_shape = loaded.reshaped[name]
        saved.wrong("partial", f"{name} has shape {saved_shape}, but PEFT needs {needed_shape}.", [name])
    saved.checked.append(Checked(len(saved.tensors), "tensor", "compared with what PEFT loads"))


def _is_explained(name: str, plain_names: set[str]) -> bool:
    plain = base_name(name)
    module = without_base_layers(_OF_LORA.split(plain)[0])
    return bool({plain, module} & plain_names) or any(plain.startswith(f"{prefix}.") for prefix in plain_names)


# ---------------------------------------------------------------- LoRA


def _check_lora(saved: Saved, config: dict[str, Any], model: Expected | None, is_whole: bool) -> None:
    """Check a LoRA adapter. `is_whole` says that PEFT itself loads all that it needs."""
    pairs: dict[str, dict[str, Tensor]] = {}  # the matrices A and B of each module; those of an embedding are EA and EB
    for name, tensor in saved.tensors.items():
        if match := _LORA.fullmatch(name):
            pairs.setdefault(base_name(match[1]), {})[("E" if match[2] else "") + match[3]] = tensor
    if not is_whole and all(tensor.size for tensor in saved.tensors.values()):
        _check_pairs(saved, pairs, config, model)
        _check_magnitudes(saved, pairs, config)
    if not is_whole:
        _check_targets(saved, pairs, config, model)
        _check_tokens(saved, config)
    _check_saved_modules(saved, config)
    _check_training(saved, pairs)
    patterns = config.get("alpha_pattern")
    alphas = {"lora_alpha": config.get("lora_alpha"), **(patterns if isinstance(patterns, dict) else {})}
    if odd := [f"{key} = {alpha:g}" for key, alpha in alphas.items() if alpha is not None and not alpha > 0]:
        text = "The matrices are multiplied by a number that is not positive ({}), so the adapter is lost."
        saved.wrong("zero", text.format(", ".join(odd)), ["adapter_config.json"])
    if model is None:
        saved.checked.append(Checked(len(pairs), "module", "compared with adapter_config.json"))


def _parameters(config: dict[str, Any]) -> list[str]:
    """Return the parameters that have matrices of their own, such as mlp.experts.down_proj."""
    parameters = config.get("target_parameters")
    return [name for name in parameters if isinstance(name, str)] if isinstance(parameters, list) else []


def _is_of_parameter(module: str, config: dict[str, Any]) -> bool:
    """Return whether a module's matrices are those of a parameter. Those of a second one are in its inner layer."""
    owner = without_base_layers(module)
    return any(_is_target(owner, [name.rpartition(".")[0]]) for name in _parameters(config))


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
        if a.shape[0] != b.shape[1] or not _has_rank(a.shape[0], rank, module, config):
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


def _has_rank(rows: int, rank: int, module: str, config: dict[str, Any]) -> bool:
    """Return whether a matrix A has the right number of rows. The rows of all experts are stacked."""
    if rows == rank or not _is_of_parameter(module, config):
        return rows == rank
    return rank > 0 and (bool(config.get("rank_pattern")) or rows % rank == 0)


def _check_magnitudes(saved: Saved, pairs: dict[str, dict[str, Tensor]], config: dict[str, Any]) -> None:
    """Check that each module has the magnitude of DoRA if the configuration says so, and none otherwise."""
    magnitudes = {base_name(name.split(_MAGNITUDE)[0]): name for name in saved.tensors if _MAGNITUDE in name}
    if config.get("use_dora"):
        lacking = [m for m in pairs if m not in magnitudes and not _is_of_parameter(m, config)]
        if lacking:
            saved.wrong(
                "missing",
                "These modules have no magnitude, although the adapter uses DoRA (use_dora). PEFT loads "
                "a different adapter from the one that was trained.",
                lacking,
            )
    elif magnitudes:
        saved.wrong(
            "unexpected",
            "These are magnitudes of DoRA, but adapter_config.json does not say use_dora, so PEFT "
            "ignores them and loads a different adapter from the one that was trained.",
            magnitudes.values(),
        )


def _rank_of(module: str, config: dict[str, Any]) -> int:
    patterns = config.get("rank_pattern")
    for pattern, rank in patterns.items() if isinstance(patterns, dict) else ():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return int(rank)
    rank = config.get("r", 0)
    return rank if isinstance(rank, int) else 0


def _is_target(module: str, targets: Any) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _names(value: Any) -> list[str]:
    """Return the names in a list of a configuration."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _check_targets(saved: Saved, pairs: dict[str, Any], config: dict[str, Any], model: Expected | None) -> None:
    """Check that each module that the configuration targets has its matrices, and that no other module has any."""
    targets = config.get("target_modules")
    targets = targets if isinstance(targets, str) else _names(targets)
    lost = [name for name in _parameters(config) if not _count_of(name, pairs, config)]
    if lost:
        saved.wrong(
            "missing", "adapter_config.json targets these parameters, but the adapter has no matrices for them.", lost
        )
    if targets == "all-linear":
        if model is None:
            saved.unchecked.append("which modules have matrices, because target_modules is all-linear")
        return
    own = [module for module in pairs if not _is_of_parameter(module, config)]
    if untargeted := [module for module in own if not _is_target(module, targets)]:
        saved.wrong(
            "unexpected",
            "The adapter has matrices for these modules, but adapter_config.json does not target them.",
            untargeted,
        )
    if model is None:  # otherwise PEFT itself says which modules lack matrices
        _check_layers(saved, own, targets, config)


def _count_of(parameter: str, pairs: dict[str, Any], config: dict[str, Any]) -> bool:
    """Return whether a module has as many pairs of matrices as it has parameters that are targets."""
    owner, _, _ = parameter.rpartition(".")
    num_targets = sum(name.rpartition(".")[0] == owner for name in _parameters(config))
    counts: dict[str, int] = defaultdict(int)
    for module in pairs:
        plain = without_base_layers(module)
        counts[plain] += _is_target(plain, [owner])
    return any(counts.values()) and all(count in (0, num_targets) for count in counts.values())


def _check_layers(saved: Saved, modules: list[str], targets: str | list[str], config: dict[str, Any]) -> None:
    """Check, without the base model, that each target has matrices, and that it has some in every layer."""
    limits = [key for key in ("layers_to_transform", "exclude_modules", "layer_replication") if config.get(key)]
    if limits:
        saved.unchecked.append(f"whether all modules have their matrices, because {limits[0]} is set")
        return
    if isinstance(targets, str):
        return  # a regular expression
    of_target = {target: [module for module in modules if _is_target(module, [target])] for target in targets}
    if missing := [target for target, own in of_target.items() if not own]:
        saved.wrong(
            "missing", "adapter_config.json targets these modules, but the adapter has no matrices for them.", missing
        )
        return
    if gaps := _gaps(of_target):
        saved.note(
            "missing",
            "The adapter has no matrices for these modules, but for other modules of the same layers. "
            "This is right if the model does not have these modules.",
            gaps,
        )


def _gaps(of_target: dict[str, list[str]]) -> list[str]:
    """Return the layers in which a target has no matrices, although others have some."""
    layers = {target: set(map(_layer, own)) for target, own in of_target.items()}
    every = set().union(*layers.values())
    return [f"{target} of layer {at}" for target, own in layers.items() for at in every - own if at is not None]


def _layer(module: str) -> int | None:
    numbers = re.findall(r"\.(\d+)\.", f".{module}.")
    return int(numbers[0]) if numbers else None


def _check_saved_modules(saved: Saved, config: dict[str, Any]) -> None:
    """Check that trained copies of whole modules are saved, and that no weights of the base model are."""
    modules = _names(config.get("modules_to_save"))
    names = [base_name(name) for name in saved.tensors if not _OF_LORA.search(name) and _TOKENS not in name]
    if lost := _lost_copies(names, modules):
        saved.wrong("missing", "modules_to_save names these modules, but they were not saved.", lost)
    if config.get("bias", "none") != "none":
        names = [name for name in names if not name.endswith("bias")]
    _report_spare(saved, [name for name in names if not any(_has_part([name], module) for module in modules)])


def _lost_copies(names: list[str], modules: list[str]) -> list[str]:
    """Return the modules whose trained copy is missing. PEFT names both heads, of which a model has one."""
    lost = [module for module in modules if not _has_part(names, module)]
    if set(modules) >= _HEADS and len(_HEADS & set(lost)) == 1:
        return [module for module in lost if module not in _HEADS]
    return lost


def _report_spare(saved: Saved, spare: list[str]) -> None:
    """Report tensors of the base model in an adapter. PEFT itself saves the embeddings after a resize."""
    embeddings = [name for name in spare if re.search(r"(embed|wte|lm_head)", name)]
    if embeddings:
        saved.note(
            "unexpected",
            "The adapter also contains embeddings of its base model, which PEFT saves after a resize.",
            embeddings,
        )
    if weights := [name for name in spare if name not in embeddings]:
        saved.wrong("unexpected", "These tensors are weights of the base model, and not of the adapter.", weights)


def _has_part(names: Iterable[str], module: str) -> bool:
    """Return whether one of the tensors belongs to a module. PEFT finds modules by the ends of their names."""
    return any(f"{module}." in f"{name}." for name in names)


def _check_tokens(saved: Saved, config: dict[str, Any]) -> None:
    """Check the rows of single trained tokens: one tensor for each embedding, with a row for each token."""
    indices = config.get("trainable_token_indices")
    row_tensors = {base_name(name): tensor for name, tensor in saved.tensors.items() if _TOKENS in name}
    lists = {"": indices} if isinstance(indices, list) else indices if isinstance(indices, dict) else {}
    if not lists:
        if row_tensors:
            saved.wrong(
                "unexpected",
                "These are rows of trained tokens, but adapter_config.json has no trainable_token_indices, so PEFT "
                "ignores them.",
                row_tensors,
            )
        return
    if not row_tensors:
        saved.wrong(
            "missing",
            "adapter_config.json has trainable_token_indices, but the rows of these tokens were not saved.",
            [_TOKENS],
        )
    for name, tensor in row_tensors.items():
        rows = {len(own) for module, own in lists.items() if not module or _has_part([name], module)}
        if tensor.shape and rows and tensor.shape[0] not in rows:
            listed = " or ".join(map(str, sorted(rows)))
            saved.wrong(
                "partial",
                f"{name} has {tensor.shape[0]} rows, but adapter_config.json lists {listed} tokens.",
                [name],
            )


def _check_training(saved: Saved, pairs: dict[str, dict[str, Tensor]]) -> None:
    """Check that the adapter was trained: LoRA starts with B equal to zero, and A never is."""
    zero_b = []
    for module, own in pairs.items():
        b = own.get("B") or own.get("EA")  # an embedding starts with A equal to zero
        if b is not None and b.size and (values := values_of(b)) is not None and not bool(values.any()):
            zero_b.append(module)
    if zero_b and len(zero_b) == len(pairs):
        saved.wrong(
            "untrained",
            "lora_B is zero in every module, as it is before the first step, so the adapter changes nothing.",
            zero_b,
        )
    elif zero_b:
        saved.note("untrained", "lora_B is zero in these modules, as it is before the first step.", zero_b)
