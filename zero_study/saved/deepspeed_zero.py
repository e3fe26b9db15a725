"""Read a checkpoint of DeepSpeed's ZeRO stages 0 to 3, and check whether its files belong together.

Each rank saves its part of the fp32 master weights. Stages 1 and 2 divide whole groups, and stage 3 divides each
parameter.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..engines.readback.dtypes import dtype_name
from . import consistency, invariants, pickles
from .content import Kind, OptimizerFacts, Saved, Tensor, add_numbered_states, in_memory, names_text
from .values import same

_RANK_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt")
_MODEL_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_UNSUPPORTED_FILE = re.compile(r"(layer_\d+.*_states|(bf16_|fp16_)?expp_rank_.*_states|.*_expert_.*_states)\.pt")
_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")  # of stages 1 and 2, of stage 3
_UNLIKE = "The model's weights are not the rounded master weights, so they are of different steps or trainings."
_FIRST_UPDATE = (
    1  # BF16_Optimizer, and others in earlier releases, make an update without gradients when they are built
)
_PREFIX = 1 << 20  # elements that are compared to find copies
_STATES = ("base_optimizer_state", "optimizer_state_dict")


class _Files(NamedTuple):
    """The files of a checkpoint that could be read, by the number of their rank."""

    model: dict[int, Any]
    optimizer: dict[int, Any]
    paths: dict[tuple[str, int], Path]


def is_one(folder: Path) -> bool:
    """Return whether a folder such as global_step40 directly contains files of a DeepSpeed checkpoint."""
    return any(folder.glob("*mp_rank_*_states.pt")) and not (folder / "zero").is_dir()


def read(folder: Path, trust: bool) -> Saved:
    """Read the DeepSpeed checkpoint in a folder such as global_step40, and check it."""
    saved = Saved(folder, "DeepSpeed")
    listed = sorted(path for path in folder.iterdir() if path.is_file())
    skipped = [path.name for path in listed if _UNSUPPORTED_FILE.fullmatch(path.name)]
    tensor_parallel = [
        path.name
        for path in listed
        if (match := _RANK_FILE.fullmatch(path.name) or _MODEL_FILE.fullmatch(path.name))
        and int(match[2] if match.re is _RANK_FILE else match[1])
    ]
    if skipped or tensor_parallel:
        saved.unchecked.append(
            f"the files of pipeline stages, experts or tensor parallel ranks ({names_text(skipped + tensor_parallel)})"
        )
        return saved
    files = _load(saved, listed, trust)
    _check_ranks(saved, files)
    _check_settings(saved, files)
    _check_steps(saved, files)
    _check_identity(saved, files)
    if files.model:
        _read_weights(saved, files)
    return saved


def _load(saved: Saved, listed: Iterable[Path], trust: bool) -> _Files:
    files = _Files({}, {}, {})
    for path in listed:
        if match := _RANK_FILE.fullmatch(path.name):
            rank, kind = int(match[1]), match[3]
        elif match := _MODEL_FILE.fullmatch(path.name):
            rank, kind = -1, "model"  # one file for all ranks
        else:
            continue
        files.paths[kind, rank] = path
        try:
            content = pickles.load(path, trust)
        except pickles.Unreadable as reason:
            saved.wrong("unreadable", f"{path.name} cannot be read: {reason}.", [path.name])
            continue
        needed = "module" if kind == "model" else "optimizer_state_dict"
        if not isinstance(content, dict) or needed not in content:
            saved.wrong(
                "unreadable", f"{path.name} is not a file of a ZeRO checkpoint: it has no {needed}.", [path.name]
            )
            continue
        (files.model if kind == "model" else files.optimizer)[rank] = content
    _forget_mixed(saved, files)
    return files


def _forget_mixed(saved: Saved, files: _Files) -> None:
    """Report model files of two trainings, and ignore those that do not belong to the optimizer's files."""
    if -1 in files.model and len(files.model) > 1:
        names = [path.name for (kind, _), path in files.paths.items() if kind == "model"]
        saved.wrong(
            "shards",
            "There are model files of stage 3 and of another stage, so the folder contains files of two trainings.",
            names,
        )
        optimizer = next(iter(files.optimizer.values()), None)
        is_stage_3 = optimizer is not None and _masters_of(optimizer)[0] == _MASTERS[1]
        for rank in [rank for rank in files.model if (rank == -1) == is_stage_3]:
            del files.model[rank]


def _masters_of(content: Any) -> tuple[str, list[torch.Tensor]]:
    """Return the key of the master weights in an optimizer's file, and this rank's part of each group."""
    states = content["optimizer_state_dict"]
    key = next((key for key in _MASTERS if key in states), "")
    groups = states.get(key) or []
    return key, list(groups) if isinstance(groups, list | tuple) else [groups]


def _stage_of(files: _Files) -> int:
    if not files.optimizer:
        is_sharded = any(kind == "optim" for kind, _ in files.paths)
        return (3 if min(files.model, default=-1) >= 0 else 1) if is_sharded or min(files.model, default=0) >= 0 else 0
    return int(next(iter(files.optimizer.values()))["optimizer_state_dict"].get("zero_stage", 0))


def _world_size(files: _Files) -> int:
    """Return the number of data-parallel ranks that wrote the checkpoint, as its files say."""
    for content in files.optimizer.values():
        count = content["optimizer_state_dict"].get("partition_count")
        if count:
            return int(max(count) if isinstance(count, list | tuple) else count)
    for content in files.model.values():
        if content.get("dp_world_size"):
            return int(content["dp_world_size"])
    return max(1, len(files.optimizer))


def _check_ranks(saved: Saved, files: _Files) -> None:
    """Check that there is a file of each rank, and none of other ranks."""
    stage, world_size = _stage_of(files), _world_size(files)
    saved.world_size = world_size
    for rank, content in files.model.items() if stage else ():
        said = content.get("dp_world_size")
        if said and said != world_size and "mics_shard_size" not in repr(content.get("ds_config")):
            text = f"The model file says that {said} ranks wrote the checkpoint, but the optimizer files {world_size}."
            saved.wrong("shards", text, [files.paths["model", rank].name])
    saved.step = next((int(c["global_steps"]) for c in files.model.values() if "global_steps" in c), None)
    at = "" if saved.step is None else f", step {saved.step}"
    saved.format = f"DeepSpeed ZeRO-{stage}, {world_size} rank{'s' * (world_size > 1)}{at}"
    has_states = any(kind == "optim" for kind, _ in files.paths)
    _check_kind(saved, files, "model", [-1] if stage < 3 else list(range(world_size)))
    if stage or has_states:
        _check_kind(saved, files, "optim", list(range(world_size)))


def _check_kind(saved: Saved, files: _Files, kind: str, ranks: list[int]) -> None:
    """Check that the files of one kind are those of these ranks, and ignore the others."""
    noun, contents = ("model", files.model) if kind == "model" else ("optimizer", files.optimizer)
    stored_ranks = {rank for file_kind, rank in files.paths if file_kind == kind}
    further = stored_ranks - {*ranks}
    if missing := [rank for rank in ranks if rank not in stored_ranks]:
        of = "" if missing == [-1] else f" of rank {names_text(map(str, missing), 8)} of {saved.world_size}"
        saved.wrong(
            "shards", f"The {noun} file{of} is missing, so parts of the weights or of the states were not saved.",
            [f"{noun} file{of}"],
        )  # fmt: skip
    if extra := [files.paths[kind, rank].name for rank in further if rank >= 0]:
        saved.wrong(
            "shards",
            f"The checkpoint is of {saved.world_size} ranks, but there are {noun} files of further "
            "ranks. They were written by another training, or by the same training on more ranks.",
            extra,
        )
    for rank in further:
        contents.pop(rank, None)


def _check_settings(saved: Saved, files: _Files) -> None:
    """Check that all ranks saved the same step of the same training."""
    facts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for kind, contents in (("model", files.model), ("optim", files.optimizer)):
        for rank, content in contents.items():
            for fact, value in _facts(kind, content):
                facts[fact][repr(value)].append(files.paths[kind, rank].name)
    for fact, values in facts.items():
        if len(values) > 1:
            most = max(values.values(), key=len)
            odd = [name for names in values.values() if names is not most for name in names]
            listed = names_text((value[:60] for value in values), 3)
            saved.wrong(
                "shards", f"The files have different values of {fact} ({listed}), so they do not belong together.", odd
            )


def _facts(kind: str, content: Any) -> Iterable[tuple[str, Any]]:
    """Yield what must be equal in all files of a checkpoint."""
    for fact in ("ds_version", "ds_config"):
        if fact in content:
            yield fact, content[fact]
    if kind == "model":
        for fact in ("global_steps", "dp_world_size", "global_samples"):
            if fact in content:
                yield fact, content[fact]
        shapes = [{name: tuple(shape) for name, shape in group.items()} for group in content.get("param_shapes") or []]
        yield "param_shapes", shapes
        return
    states = content["optimizer_state_dict"]
    for fact in ("zero_stage", "partition_count"):
        if fact in states:
            yield fact, states[fact] if isinstance(states[fact], list) else int(states[fact])
    yield "the key of the master weights", _masters_of(content)[0]
    steps = _steps_of(content)
    if steps:
        yield "the optimizer's step", sorted(set(steps))


def _steps_of(content: Any) -> list[float]:
    """Return the optimizer's counter of each group, in one rank's file."""
    counters = (consistency.number_of(state.get("step")) for state in _group_states(content))
    return [step for step in counters if step is not None]


def _check_steps(saved: Saved, files: _Files) -> None:
    """Check that the optimizer and the scheduler made as many steps as the model's file says."""
    model: dict[str, Any] = next(iter(files.model.values()), {})
    saved.num_skipped = int(consistency.number_of(model.get("skipped_steps")) or 0)
    saved.has_scheduler = model.get("lr_scheduler") is not None
    _read_counters(saved, files)
    if saved.step is None:
        return
    updates_due, updates = saved.step - saved.num_skipped, consistency.updates_of(saved)
    if updates is not None and updates not in (updates_due, updates_due + _FIRST_UPDATE):
        saved.wrong(
            "optimizer",
            f"The optimizer was updated {updates} times, but the model's file says {updates_due} times, so they are of "
            "different steps or trainings.",
            [] if saved.optimizer is None else [saved.optimizer.file],
        )
    scheduler = consistency.scheduler_steps(model.get("lr_scheduler"))
    if scheduler is not None:
        _check_scheduler(saved, scheduler, saved.step, files.paths["model", min(files.model)].name)


def _read_counters(saved: Saved, files: _Files) -> None:
    """Read the optimizer's counters, and check that it has states after its first update."""
    first = next(iter(files.optimizer), None)
    if first is None:
        return
    steps = {f"group {at}": step for at, step in enumerate(_steps_of(files.optimizer[first]))}
    file = files.paths["optim", first].name
    groups = [group for content in files.optimizer.values() for group in _groups_of(content)]
    saved.optimizer = OptimizerFacts(file, steps, len(steps), [], needs_states=True, groups=groups)
    for rank, content in files.optimizer.items():
        scaler = content["optimizer_state_dict"].get("loss_scaler")
        scale = vars(scaler) if isinstance(scaler, pickles.Plain) else {}
        invariants.check_numbers(saved, files.paths["optim", rank].name, [scale, *_group_states(content)])
    lacks_states = not any(map(_group_states, files.optimizer.values())) and _has_layout(files.optimizer[first])
    if lacks_states and (saved.step or 0) > saved.num_skipped:
        saved.wrong(
            "optimizer", "The optimizer files have no states, so a resumed training starts with a new optimizer.",
            [files.paths["optim", rank].name for rank in files.optimizer],
        )  # fmt: skip


def _check_scheduler(saved: Saved, scheduler: int, step: int, file: str) -> None:
    """Compare the number of the scheduler's steps with the step of the model's file."""
    updates_due = step - saved.num_skipped
    if updates_due and scheduler > max(updates_due, step) and scheduler % updates_due:
        saved.wrong(
            "optimizer", f"The scheduler made {scheduler} steps, but the model's file is of step {step}.", [file]
        )
    elif scheduler < updates_due:
        saved.note(
            "optimizer",
            f"The scheduler made {scheduler} steps, but the optimizer made {updates_due} updates. This "
            "is right if the schedule was started again.",
            [file],
        )


def _groups_of(content: Any) -> list[dict[str, Any]]:
    """Return the settings of the groups in an optimizer's file."""
    states = content["optimizer_state_dict"]
    bases = (states.get(key) for key in _STATES)
    base = next((base for base in bases if isinstance(base, dict) and "param_groups" in base), states)
    return [group for group in base.get("param_groups") or [] if isinstance(group, dict)]


def _has_layout(content: Any) -> bool:
    """Return whether the states of an optimizer's file are stored per group, even if there are none."""
    states = content["optimizer_state_dict"]
    base = next((states[key] for key in _STATES if states.get(key) is not None), None)
    if not isinstance(base, dict) or not isinstance(base.get("state"), dict):
        return isinstance(base, list)
    groups = base.get("param_groups")
    return isinstance(groups, list) and any(isinstance(group, dict) and "betas" in group for group in groups)


def _check_identity(saved: Saved, files: _Files) -> None:
    """Check that each file is of the rank that its name says, and that no rank has the copy of another one's."""
    paths = [path for (_, rank), path in files.paths.items() if rank >= 0]
    consistency.check_names_inside(saved, paths, _RANK_FILE)
    ranks = sorted(files.optimizer)
    for first, second in pairwise(ranks):
        if _is_copy(files.optimizer[first], files.optimizer[second]):
            names = [files.paths["optim", rank].name for rank in (first, second)]
            saved.wrong(
                "shards", "These files of two ranks have the same contents, so one of them is a copy and parts of the "
                "weights were lost.", names,
            )  # fmt: skip


def _is_copy(first: Any, second: Any) -> bool:
    """Return whether two ranks have the same master weights and states, which are not all equal numbers."""
    parts = [[*_masters_of(content)[1], *_moments(content)] for content in (first, second)]
    a, b = (
        [part.reshape(-1)[:_PREFIX] for part in own if isinstance(part, torch.Tensor) and part.numel() > 1]
        for own in parts
    )
    is_varied = any(not bool((part == part[0]).all()) for part in a)
    return bool(a) and len(a) == len(b) and is_varied and all(map(same, a, b))


def _moments(content: Any) -> list[torch.Tensor]:
    values = (state.get("exp_avg") for state in _group_states(content))
    return [value for value in values if isinstance(value, torch.Tensor)]


def _group_states(content: Any) -> list[dict[str, Any]]:
    """Return the optimizer's states of each group, in one rank's file; an empty list if they are in another layout."""
    states = content["optimizer_state_dict"]
    base = next((states[key] for key in _STATES if states.get(key) is not None), None)
    if isinstance(base, dict) and isinstance(base.get("state"), dict):
        order = sorted(base["state"], key=lambda key: (0, key, "") if isinstance(key, int) else (1, 0, str(key)))
        return [base["state"][key] for key in order if isinstance(base["state"][key], dict)]
    return [state for state in base if isinstance(state, dict)] if isinstance(base, list) else []


# ---------------------------------------------------------------- weights


def _read_weights(saved: Saved, files: _Files) -> None:
    stage = _stage_of(files)
    first = files.model[min(files.model)]
    shapes = _shapes_of(first)
    saved.ties = dict(first.get("shared_params") or {})
    buffers = set(first.get("buffer_names") or [])
    module: dict[str, Any] = {n: t for n, t in first["module"].items() if isinstance(t, torch.Tensor)}
    file = files.paths["model", min(files.model)].name
    for name in buffers & module.keys():
        saved.tensors[name] = in_memory(name, module[name], file)
    _read_frozen(saved, files, stage)
    if not any(kind == "optim" for kind, _ in files.paths) and stage < 3:  # stage 0 keeps the whole model
        saved.tensors |= {n: in_memory(n, t, file) for n, t in module.items() if n not in saved.ties}
        _check_ties(saved, module)
        _check_stage_0(saved, first, file)
        return
    _read_masters(saved, files, stage, shapes)
    _check_stored(saved, module, {name for group in shapes for name in group})
    if stage < 3:
        _check_ties(saved, module)
        _check_rounding(saved, module)


def _shapes_of(content: Any) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the trained parameters of each group, in a model file."""
    groups = content.get("param_shapes") or []
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def _read_masters(saved: Saved, files: _Files, stage: int, shapes: list[dict[str, tuple[int, ...]]]) -> None:
    """Read the master weights of stages 1 to 3 if all ranks have saved their parts."""
    if not shapes or len(files.optimizer) != _world_size(files):
        names = [name for group in shapes for name in group]
        saved.wrong("partial", "Parts of these tensors are missing, so they cannot be put together.", names)
    elif stage == 3:
        _read_stage_3(saved, files, shapes)
    else:
        _read_stages_1_2(saved, files, shapes)


def _check_stored(saved: Saved, module: dict[str, Any], trained: set[str]) -> None:
    """Report tensors of the model that no file of the checkpoint has in a form that a resumed training reads."""
    stored_names = {*saved.tensors, *saved.ties, *trained}
    if unknown := [name for name in module if name not in stored_names]:
        saved.wrong(
            "missing",
            "The model has these tensors, but the checkpoint has neither a master weight nor a frozen copy of them, so "
            "a resumed training does not get them.",
            unknown,
        )


def _read_frozen(saved: Saved, files: _Files, stage: int) -> None:
    """Read the parameters that are not trained. Stage 3 divides them among the ranks."""
    first = files.model[min(files.model)]
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        shape = tuple(shape)
        fragments = [files.model[rank].get("frozen_param_fragments") or {} for rank in sorted(files.model)]
        parts = [own[name] for own in fragments if name in own]
        if len(parts) < len(fragments):
            saved.wrong("missing", f"The frozen parameter {name} was not saved by every rank.", [name])
            continue
        size = math.prod(shape)
        share = -(-size // _world_size(files)) if stage == 3 else size
        if any(part.numel() < share for part in parts) or (stage == 3 and len(parts) < _world_size(files)):
            kind: Kind = "partial" if any(part.numel() for part in parts) else "empty"
            saved.wrong(kind, f"Elements of the frozen parameter {name} are missing.", [name])
            continue
        saved.tensors[name] = Tensor(
            name, shape, dtype_name(parts[0].dtype), "model files", partial(_joined, parts, shape)
        )


def _joined(parts: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of a shape whose elements are in several parts, of which the last one may have padding."""
    return torch.cat([part.reshape(-1) for part in parts])[: math.prod(shape)].view(shape)


def _by_rank(files: _Files, parts: Callable[[Any], list[Any]]) -> list[list[Any]]:
    return [parts(files.optimizer[rank]) for rank in sorted(files.optimizer)]


def _states_of_group(states: list[list[dict[str, Any]]], index: int) -> list[dict[str, Any]]:
    """Return each rank's states of a group; empty where a rank has none."""
    return [rank_states[index] if index < len(rank_states) else {} for rank_states in states]


def _read_stages_1_2(saved: Saved, files: _Files, shapes: list[dict[str, tuple[int, ...]]]) -> None:
    """Read stages 1 and 2: a group is one vector, of which each rank has a part."""
    masters = _by_rank(files, lambda content: _masters_of(content)[1])
    states = _by_rank(files, _group_states)
    counts = sorted({len(groups) for groups in masters})
    if counts != [len(shapes)]:
        saved.wrong(
            "shards",
            f"The model file has {len(shapes)} groups of parameters, but the optimizer files have {counts}.",
            [files.paths["optim", rank].name for rank in sorted(files.optimizer)],
        )
        return
    paddings = files.optimizer[0]["optimizer_state_dict"].get("param_alignment_paddings")
    for index, group in enumerate(shapes):
        parts = [groups[index] for groups in masters]
        gaps = list(paddings[index]) if paddings is not None else [0] * len(group)
        need = sum(map(math.prod, group.values())) + sum(gaps)
        if not _has_size(sum(part.numel() for part in parts), need, len(parts)):
            _wrong_sizes(saved, group, parts, need)
            continue
        padded = [_padding_of(files.optimizer[rank], index) for rank in sorted(files.optimizer)]
        kinds = _kinds_of_states(saved, _states_of_group(states, index), parts, group, padded)
        offset = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            begin, end = offset, offset + math.prod(shape)
            saved.tensors[name] = _slice_of(name, shape, parts, begin, end)
            for kind in kinds:
                of_kind = [
                    rank_states[index][kind][: part.numel()] for rank_states, part in zip(states, parts, strict=True)
                ]
                saved.states[f"{name}/{kind}"] = _slice_of(f"{name}/{kind}", shape, of_kind, begin, end)
            offset = end + gap


def _padding_of(content: Any, index: int) -> int:
    """Return the number of elements that a rank's states have beyond its weights, in stages 1 and 2."""
    paddings = content["optimizer_state_dict"].get("group_paddings") or []
    return int(paddings[index]) if index < len(paddings) else 0


def _has_size(size: int, need: int, num_ranks: int) -> bool:
    """Return whether a group has as many elements as its parameters, up to DeepSpeed's alignment."""
    aligned = 2 * num_ranks
    return size == need or -(-need // aligned) * aligned == size or need <= size < need + aligned


def _wrong_sizes(saved: Saved, group: dict[str, Any], parts: list[Any], need: int) -> None:
    sizes = [part.numel() for part in parts]
    kind: Kind = "partial" if sum(sizes) < need else "shards"
    saved.wrong(
        kind if sum(sizes) else "empty",
        f"The ranks have {' + '.join(map(str, sizes[:8]))}{' + ...' if len(sizes) > 8 else ''} elements of a group of "
        f"{need}, so these tensors cannot be put together.",
        group,
    )


def _slice_of(name: str, shape: tuple[int, ...], parts: list[torch.Tensor], begin: int, end: int) -> Tensor:
    """Return a tensor that is a contiguous part of the flat vector whose parts the ranks have."""

    def whole() -> torch.Tensor:
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + part.numel())
        pieces = [
            part[max(0, begin - start) : max(0, end - start)]
            for part, (start, stop) in zip(parts, pairwise(starts), strict=True)
            if start < end and stop > begin
        ]
        return torch.cat(pieces).view(shape) if pieces else parts[0].new_zeros(shape)

    return Tensor(name, shape, dtype_name(parts[0].dtype), "optimizer files", whole)


def _read_stage_3(saved: Saved, files: _Files, shapes: list[dict[str, tuple[int, ...]]]) -> None:
    """Read stage 3: each rank has a contiguous part of every parameter. A rank's groups follow one another."""
    world_size = len(files.optimizer)
    masters = _by_rank(files, lambda content: _masters_of(content)[1])
    flat: dict[str, tuple[int, ...]] = {}
    for group in shapes:
        flat |= group
    need = sum(-(-math.prod(shape) // world_size) for shape in flat.values())
    sizes = [sum(part.numel() for part in groups) for groups in masters]
    if any(size != need for size in sizes):
        _wrong_sizes(saved, flat, [torch.empty(size, device="meta") for size in sizes], need * world_size)
        return
    states = _by_rank(files, _group_states)
    kinds = set.intersection(
        *(
            _kinds_of_states(saved, _states_of_group(states, index), parts, flat)
            for index, parts in enumerate(zip(*masters, strict=True))
        )
    )
    _check_padding(saved, files, [math.prod(shape) for shape in flat.values()])
    offset = 0
    for name, shape in flat.items():
        share = -(-math.prod(shape) // world_size)
        saved.tensors[name] = _shares_of(name, shape, masters, offset, share)
        for kind in kinds:
            of_kind = [[state[kind] for state in rank_states] for rank_states in states]
            saved.states[f"{name}/{kind}"] = _shares_of(f"{name}/{kind}", shape, of_kind, offset, share)
        offset += share


def _check_padding(saved: Saved, files: _Files, sizes: list[int]) -> None:
    """Check that the padding is in the last rank's file: it has no gradients, so its first moments are zero."""
    ranks = sorted(files.optimizer)
    places, offset = [], 0
    for size in sizes:
        share = -(-size // len(ranks))
        if 0 < share * len(ranks) - size < share:
            places.append(offset + share - 1)  # the last element of the last rank's stretch is padding
        offset += share
    moments = [
        torch.cat([group_moment.reshape(-1) for group_moment in _moments(files.optimizer[rank])] or [torch.empty(0)])
        for rank in ranks
    ]
    if len(places) < 3 or any(len(moment) != offset for moment in moments):
        return
    is_zero = [moment[places] == 0 for moment in moments]
    padded_ranks = [rank for rank in ranks[:-1] if bool(is_zero[ranks.index(rank)].all())]
    if padded_ranks and not bool(is_zero[-1].any()):
        saved.wrong(
            "shards", f"The file of rank {padded_ranks[0]} has the padding that only the last rank's file has, so the "
            "files of the ranks were mixed up.",
            [files.paths["optim", rank].name for rank in (padded_ranks[0], ranks[-1])],
        )  # fmt: skip


def _shares_of(name: str, shape: tuple[int, ...], ranks: list[list[torch.Tensor]], offset: int, share: int) -> Tensor:
    """Return a tensor of which each rank has `share` contiguous elements, in one or several of its groups."""

    def whole() -> torch.Tensor:
        parts = [_slice_of("", (share,), groups, offset, offset + share).read() for groups in ranks]
        return _joined(parts, shape)

    return Tensor(name, shape, dtype_name(ranks[0][0].dtype), "optimizer files", whole)


# ---------------------------------------------------------------- checks


def _kinds_of_states(
    saved: Saved,
    ranks: list[dict[str, Any]],
    parts: Iterable[torch.Tensor],
    group: dict[str, Any],
    paddings: Iterable[int] = (),
) -> set[str]:
    """Return the names of a group's states that have one number per weight, and check that all ranks have them."""
    parts = list(parts)
    gaps = [*paddings] or [0] * len(parts)
    kinds = [
        {kind for kind, state in states.items() if isinstance(state, torch.Tensor) and state.ndim} for states in ranks
    ]
    everywhere = set.intersection(*kinds)
    if lacking := set.union(*kinds) - everywhere:
        ranks_without = [str(rank) for rank, own in enumerate(kinds) if not lacking <= own]
        saved.wrong(
            "optimizer",
            f"Rank {names_text(ranks_without, 8)} did not save {', '.join(sorted(lacking))}, which other ranks saved, "
            "so a resumed training continues with different optimizer states.",
            group,
        )
    whole = set()
    for kind in sorted(everywhere):
        sizes = [states[kind].numel() for states in ranks]
        if all(size in (part.numel(), part.numel() + gap) for size, part, gap in zip(sizes, parts, gaps, strict=True)):
            whole.add(kind)
        elif kind.startswith("exp_avg"):
            own = [part.numel() for part in parts]
            saved.wrong("optimizer", f"{kind} has different sizes ({sizes[:8]}) from the weights ({own[:8]}).", group)
    return whole


def _check_ties(saved: Saved, module: dict[str, Any]) -> None:
    """Check that the names that share a parameter have equal values in the model's file."""
    for name, of in saved.ties.items():
        if name in module and of in module and not same(module[name], module[of]):
            saved.wrong(
                "untied", f"{name} and {of} share one parameter, but were saved with different values.", [name, of]
            )


def _check_rounding(saved: Saved, module: dict[str, Any]) -> None:
    """Check that the model's own weights are the master weights, rounded to their type."""
    unlike, empty = [], []
    for name, tensor in module.items():
        master = saved.tensors.get(name)
        if master is None or not tensor.is_floating_point() or name in saved.ties:
            continue
        if not tensor.numel() and master.size:
            empty.append(name)
        elif tuple(tensor.shape) != master.shape or not same(tensor, master.read().to(tensor.dtype)):
            unlike.append(name)
    if empty:
        saved.wrong("empty", "The model file has no elements of these tensors.", empty)
    if unlike:
        saved.wrong("different", _UNLIKE, unlike)


def _check_stage_0(saved: Saved, content: Any, file: str) -> None:
    """Check the optimizer's states and the master weights, which stage 0 keeps in the model's file without names."""
    optimizer = content.get("optimizer")
    if not optimizer:
        saved.wrong(
            "optimizer",
            "The checkpoint has no optimizer states, so a resumed training starts with new ones. DeepSpeed before "
            "0.18.5 does not save the states at stage 0 in bf16.",
        )
        return
    if not isinstance(optimizer, dict):
        saved.unchecked.append("the optimizer states, whose layout is unknown")
        return
    inner = optimizer.get("optimizer_state_dict", optimizer)
    if isinstance(inner.get("state"), dict) and isinstance(inner.get("param_groups"), list):
        saved.optimizer = consistency.facts_of(file, inner)
        _check_updates(saved, file)
    add_numbered_states(saved, inner.get("state") or {}, file)
    _check_masters(saved, optimizer)


def _check_updates(saved: Saved, file: str) -> None:
    """Compare the number of updates of stage 0's optimizer with the step of the file."""
    updates = consistency.updates_of(saved)
    if updates is None or saved.step is None:
        return
    if updates - saved.step + saved.num_skipped not in (0, _FIRST_UPDATE):
        saved.wrong(
            "optimizer", f"The optimizer was updated {updates} times, but the file is of step {saved.step}.", [file]
        )


def _check_masters(saved: Saved, optimizer: dict[str, Any]) -> None:
    """Check that each master weight of stage 0 is one of the model's weights before rounding."""
    groups = optimizer.get("fp32_groups") or []
    masters = [master for group in groups for master in (group if isinstance(group, list | tuple) else [group])]
    weights = [tensor.read() for tensor in saved.tensors.values()]
    unlike = [
        f"master weight {number}"
        for number, master in enumerate(masters)
        if not any(master.shape == weight.shape and same(master.to(weight.dtype), weight) for weight in weights)
    ]
    if unlike:
        saved.wrong("different", f"{_UNLIKE} {len(unlike)} of {len(masters)} differ.", unlike)
