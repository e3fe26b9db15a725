"""Compare a saved model with another saved model, or with tensors in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..engines.readback.dtypes import dtype_name
from ..engines.readback.parameters import adapter_name
from . import loading
from .content import Finding, Saved, names_text
from .expected import NotKnown
from .values import same

WIDEST_FIRST = ("float64", "float32", "float16", "bfloat16")
# Settings that do not change what a loaded model computes: names, versions, types, caches, initial values, dropout,
# generation, training, and outputs.
_NEUTRAL = re.compile(
    r"_.*|architectures|auto_map.*|(torch_)?dtype|.*_version|use_cache|(?!init_lora_weights).*init.*|.*drop.*"
    r"|((forced_)?[be]os|decoder_start)_token_id|output_.*|return_.*|.*aux_loss.*|id2label|label2id|task_.*"
    r"|base_model_name_or_path|revision|inference_mode|megatron_.*|gradient_checkpointing|problem_type"
    r"|num_(beams|beam_groups|return_sequences)|(max|min)_length|do_sample|top_p|(repetition|length)_penalty"
)
_CHANGES_BASE = re.compile("pissa|olora|corda|loftq", re.IGNORECASE)  # initial values of LoRA, also if it is loaded

Value = TypeVar("Value")


@dataclass
class Comparison:
    """The result of comparing the tensors of a saved model with other tensors of the same names."""

    other: str  # what they were compared with
    equal: list[str] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)  # equal if the wider type is rounded to the narrower one
    close: list[str] = field(default_factory=list)  # only known to agree within the rounding of their type
    different: dict[str, float] = field(default_factory=dict)  # name -> largest difference of an element, or NaN
    reshaped: dict[str, str] = field(default_factory=dict)  # name -> both shapes, if they differ
    missing: list[str] = field(default_factory=list)  # in what was saved, but the other side has them
    extra: list[str] = field(default_factory=list)  # in what was saved only
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    is_requested: bool = False  # by --against, and not a comparison of files in one folder
    has_sketches: bool = False  # a recording has sketches of the tensors, and not their elements
    num_settings: int = 0  # of config.json or adapter_config.json that were compared

    @property
    def num_compared(self) -> int:
        return sum(map(len, (self.equal, self.rounded, self.close, self.different, self.reshaped)))


def compare(saved: Saved, other: Saved | Mapping[str, torch.Tensor], title: str = "the other tensors") -> Comparison:
    """Compare the tensors of a saved model bit by bit with those of another one, or with tensors in memory.

    If two types differ, the wider one is first rounded to the narrower one.
    """
    ours = named_alike(saved.whole())
    theirs: dict[str, Callable[[], torch.Tensor]]
    if isinstance(other, Saved):
        theirs = {name: tensor.read for name, tensor in named_alike(other.whole()).items()}
    else:
        theirs = {name: tensor.detach for name, tensor in named_alike(other).items()}
    result = Comparison(title)
    scaled = with_scales(saved.tensors)
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name].dtype not in WIDEST_FIRST and ours[name].name in scaled:
            result.unchecked.append(f"the values of {name}, because they are quantized: compare them before that")
            continue
        try:
            a, b = ours[name].read().detach(), theirs[name]().detach().cpu()
            _judge(result, name, a, b)
        except Exception as error:  # a damaged file, or types that cannot be compared
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            result.unchecked.append(f"the values of {name}, because {reason}")
    own_groups = {id(tensor): name for name, tensor in ours.items() if name in theirs}
    result.extra = [name for name, tensor in ours.items() if name not in theirs and id(tensor) not in own_groups]
    result.missing = [name for name in theirs if name not in ours]
    if not isinstance(other, Saved) or saved.is_adapter != other.is_adapter:
        ignore_base_weights(result, saved)
    report(result)
    if not (isinstance(other, Saved) and saved.is_adapter == other.is_adapter and result.num_compared):
        return result
    if saved.config and other.config:
        _compare_settings(result, saved.config, other.config, saved.is_adapter)
    return result


def _compare_settings(result: Comparison, ours: Mapping[str, Any], theirs: Mapping[str, Any], is_adapter: bool) -> None:
    """Compare the settings that decide what the tensors compute, and add a finding if some differ."""
    only_one: list[str] = []  # names that one side lacks
    reason = ""
    try:
        ours, theirs = (loading.with_defaults(dict(config), is_adapter) for config in (ours, theirs))
    except NotKnown as error:
        reason = str(error)
    if is_adapter:  # PEFT writes sets as lists
        ours, theirs = (
            {key: sorted(value, key=str) if isinstance(value, list | set) else value for key, value in config.items()}
            for config in (ours, theirs)
        )
    pairs = list(_settings(ours, theirs, only_one))
    if only_one and reason:  # there are no defaults for them
        result.unchecked.append(f"settings that only one of the files has ({names_text(only_one)}), because {reason}")
    result.num_settings = len(pairs)
    differing = [f"{name} is {str(a)[:80]} and not {str(b)[:80]}" for name, a, b in pairs if a != b]
    if differing:
        file = "adapter_config.json" if is_adapter else "config.json"
        text = f"{file} differs from that in {result.other}: {', '.join(differing)}."
        remedy = "With other settings, the same tensors compute something else. Save the settings of the training."
        result.findings.append(Finding("different", f"{text} {remedy}", [file]))


def _settings(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], only_one: list[str], name: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each setting that both sides have, without neutral ones.

    Releases have different settings, so a key that one side lacks is left out, and added to `only_one`. An exception
    is a section such as alpha_pattern, whose keys are no settings with defaults.
    """
    needs_both = not name or name.endswith("config")
    if "rope_" in name:
        ours, theirs = _rope(ours), _rope(theirs)
    for key in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(key), theirs.get(key)
        full_name = f"{name}.{key}".lstrip(".")
        if (
            _NEUTRAL.fullmatch(key)
            or (key == "init_lora_weights" and not _CHANGES_BASE.search(f"{a} {b}"))
            or (key == "max_position_embeddings" and _ignores_length(ours) and _ignores_length(theirs))
        ):
            continue
        if needs_both and not (key in ours and key in theirs):
            only_one.append(full_name)
        elif isinstance(a, dict) and isinstance(b, dict):
            yield from _settings(a, b, only_one, full_name)
        else:
            yield full_name, a, b


def _rope(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of RoPE with its type under one key. Sections for images (mrope) need no type of their own."""
    kind = section.get("rope_type") or section.get("type") or "default"
    rest = {key: value for key, value in section.items() if key != "type"}
    return {**rest, "rope_type": "default" if kind == "mrope" else kind}


def _ignores_length(config: Mapping[str, Any]) -> bool:
    """Return whether positions have a RoPE that does not depend on the largest length."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return bool(rope or "rope_theta" in config) and not re.search("'(dynamic|yarn|longrope|su)'", str(rope))


_SCALES = re.compile(r"scale|SCB|absmax|codebook", re.IGNORECASE)


def with_scales(names: Iterable[str]) -> set[str]:
    """Return the names of tensors next to which there are the scales of quantized values."""
    names = list(names)
    modules = {name.rpartition(".")[0] for name in names if _SCALES.search(name.rpartition(".")[2])}
    return {name for name in names if name in modules or name.rpartition(".")[0] in modules}


def named_alike(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Return the tensors by comparable names: without wrappers' prefixes, and for adapters as in PEFT's files."""
    return {plain: value for name, value in tensors.items() if (plain := adapter_name(name)) is not None}


def _judge(result: Comparison, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compare one tensor, and add it to the result."""
    if a.shape != b.shape:
        result.reshaped[name] = f"{list(a.shape)} instead of {list(b.shape)}"
    elif same(a, b):
        result.equal.append(name)
    elif a.dtype != b.dtype and same(*_narrowed(a, b)):
        result.rounded.append(name)
    else:
        a, b = _narrowed(a, b)
        difference = (a.double() - b.double()).abs()
        result.different[name] = float(difference.max()) if difference.numel() else float("nan")


def _narrowed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors in the narrower of their types. Types of less than 16 bits and integers are no rounding."""
    if a.dtype == b.dtype:
        return a, b
    if not all(dtype_name(tensor.dtype) in WIDEST_FIRST for tensor in (a, b)):
        return a.double(), b.double()
    narrow = max((a, b), key=lambda tensor: WIDEST_FIRST.index(dtype_name(tensor.dtype))).dtype
    return a.to(narrow), b.to(narrow)


def ignore_base_weights(result: Comparison, saved: Saved) -> None:
    """Do not report tensors of the base model as missing or extra if only one of the compared models has them."""
    if saved.is_adapter:
        result.missing = [name for name in result.missing if ".lora_" in name]
    elif any(".lora_" in name for name in (*result.equal, *result.rounded, *result.different, *result.reshaped)):
        result.extra = [name for name in result.extra if ".lora_" in name]


def report(result: Comparison) -> None:
    """Add findings to a comparison that say which tensors differ, are missing or could not be compared."""
    if not result.num_compared:
        result.unchecked.append(f"the values, because no tensor has the same name in {result.other}")
        return
    if result.different:
        largest = max(result.different.values(), key=lambda value: -1.0 if value != value else value)
        result.findings.append(
            Finding(
                "different",
                f"{len(result.different)} of {result.num_compared} tensors differ from those in {result.other}. "
                f"The largest difference between two elements is {largest:.3g}.",
                sorted(result.different),
            )
        )
    if result.reshaped:
        shapes = ", ".join(sorted(set(result.reshaped.values()))[:3])
        result.findings.append(
            Finding(
                "partial",
                f"These tensors have different shapes in {result.other} ({shapes}).",
                sorted(result.reshaped),
            )
        )
    if result.missing:
        result.findings.append(
            Finding("missing", f"{result.other} has these tensors, but they were not saved.", sorted(result.missing))
        )
    if result.extra:
        result.findings.append(
            Finding(
                "unexpected", f"These tensors were saved, but {result.other} does not have them.", sorted(result.extra)
            )
        )


def cross_check(saved: list[Saved]) -> list[Comparison]:
    """Compare the saved models of one folder with each other, such as model.safetensors with an engine's checkpoint."""
    compared = []
    for outer in saved:
        for inner in saved:
            if inner.folder.parent != outer.folder or not (outer.tensors and inner.tensors):
                continue
            result = compare(outer, inner, f"{inner.folder.name} ({inner.format})")
            result.findings = [finding for finding in result.findings if finding.kind in ("different", "partial")]
            result.unchecked = []
            if result.num_compared:
                compared.append(result)
    return compared


def difference_text(result: Comparison) -> str:
    """Say how many tensors are equal, equal after rounding, or different."""
    kinds = (
        (result.equal, "have identical sketches" if result.has_sketches else "are bitwise identical"),
        (result.rounded, "are identical after rounding to the narrower type"),
        (result.close, "are the same within the rounding of their type"),
        (list(result.different), "are different"),
        (list(result.reshaped), "have a different shape"),
    )
    first, *further = [(len(names), relation) for names, relation in kinds if names]
    texts = [
        f"{first[0]} of {result.num_compared} tensors {first[1]}",
        *(f"{count} {relation}" for count, relation in further),
    ]
    return ", ".join(texts)
