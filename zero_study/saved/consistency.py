"""Check that the files of one checkpoint belong together: their step numbers, and whether one of them is missing."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import Refusal
from . import foreign, invariants, pickles
from .content import OptimizerFacts, Saved, names_text

TRAINER_STATE, MANIFEST = "trainer_state.json", "manifest.json"
_STEP_IN_NAME = re.compile(r"(?:checkpoint|global_step|step|iter)[-_]?0*(\d{1,15})(?:_universal)?")
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
_RANDOM = {
    "trainer": re.compile(r"rng_state_(\d{1,6})\.pth"),
    "accelerate": re.compile(r"random_states_(\d{1,6})\.pkl"),
}
_TRAINER_FILES = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin"}
_SCALER = "scaler.pt"
_SCHEDULERS = ("scheduler.pt", "scheduler.bin")
_STATEFUL = ("betas", "beta1", "beta2", "scale_parameter", "alpha", "rho", "lr_decay", "momentum_decay")
_OF_ENGINE = re.compile(r"pytorch_model.*|optimizer(?:_\d+)?|global_step\d+.*")
_CONDITIONAL = re.compile(r"expert|moe|layer_?drop|kv_shared|router", re.IGNORECASE)
# Decoders without experts or other parts that a batch may leave out, so that each weight has a gradient in every step.
_DENSE = {
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox", "gptj",
    "phi", "phi3", "opt", "olmo", "olmo2", "olmo3", "starcoder2", "stablelm", "falcon", "cohere", "cohere2", "granite",
    "smollm3", "bloom", "mpt", "glm", "glm4", "exaone4", "nemotron", "codegen",
}  # fmt: skip


class _Files(NamedTuple):
    """The files of one folder by name, with the saved model that was read from them."""

    saved: Saved
    paths: dict[str, Path]
    engines: list[Saved]  # checkpoints of an engine in folders inside


# ---------------------------------------------------------------- the optimizer's own counters


def facts_of(file: str, content: Mapping[str, Any]) -> OptimizerFacts:
    """Return the step counters of an optimizer's state_dict, in which weights have numbers instead of names."""
    groups = [group for group in content["param_groups"] if isinstance(group, dict)]
    numbers = [number for group in groups for number in _listed(group.get("params"))]
    states = {number: state for number, state in content["state"].items() if isinstance(state, dict)}
    steps = _numbers({f"weight {number}": state.get("step") for number, state in states.items()})
    if not steps:  # some optimizers count for a whole group
        steps = _numbers({f"group {at}": group.get("step") for at, group in enumerate(groups)})
    return OptimizerFacts(
        file=file,
        steps=steps,
        num_weights=len(numbers),
        without_state=[f"weight {number}" for number in numbers if not states.get(number)],
        needs_states=any(any(key in group for key in _STATEFUL) or group.get("momentum") for group in groups),
        groups=groups,
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: number for name, value in values.items() if (number := number_of(value)) is not None}


def _listed(value: Any) -> list[Any]:
    return [entry for entry in value if isinstance(entry, int | str)] if isinstance(value, list | tuple) else []


def number_of(value: Any) -> float | None:
    """Convert a counter, a number or a tensor of one element, to a number. None if it is neither or not finite."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and not value.is_meta and not value.is_complex() else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 2**53 and math.isfinite(value) else None


def check_counters(saved: Saved) -> None:
    """Check that the optimizer updated all weights equally often, and that it has states."""
    facts = saved.optimizer
    if facts is None:
        return
    if facts.num_weights and len(facts.without_state) == facts.num_weights and not facts.steps:
        if facts.needs_states and saved.step != 0:
            saved.wrong(
                "optimizer",
                f"{facts.file} has no state of any weight, so a resumed training starts with a new optimizer.",
                [facts.file],
            )
        return
    # Each trained weight of these models has a gradient in every step.
    config = saved.config or {}
    is_listed = config.get("model_type") in _DENSE and not saved.is_adapter
    is_dense = is_listed and not any(_CONDITIONAL.search(key) and value for key, value in config.items())
    if facts.without_state and is_dense and facts.needs_states:
        saved.wrong(
            "optimizer",
            f"{facts.file} has no state of {len(facts.without_state)} of the {facts.num_weights} weights. Every weight "
            "of this model gets a gradient in each step, so these states were lost.",
            facts.without_state,
        )
    _check_equal_counts(saved, facts, is_dense)


def _check_equal_counts(saved: Saved, facts: OptimizerFacts, is_dense: bool) -> None:
    counts = Counter(facts.steps.values())
    if len(counts) < 2:
        return
    usual = max(counts, key=lambda step: (counts[step], step))
    odd = {name: step for name, step in facts.steps.items() if step != usual}
    listed = names_text(f"{step:g}" for step in set(odd.values()))
    text = (
        f"{facts.file} says that these weights were updated {listed} times, but that all other weights were updated "
        f"{usual:g} times."
    )
    if not is_dense and _may_lag(saved, odd, facts.steps):
        saved.note("optimizer", f"{text} This is correct if some batches do not use these weights.", odd)
    else:
        saved.wrong("optimizer", f"{text} The states are of different steps.", odd)


def _may_lag(saved: Saved, odd: Mapping[str, float], steps: Mapping[str, float]) -> bool:
    """Return whether weights may have been updated less often than others, because some batches do not use them.

    Such weights are experts, or whole modules. A single matrix of a module whose other matrices were always used is not
    of this kind.
    """
    if any(step > max(set(steps.values()) - {*odd.values()}, default=0.0) for step in odd.values()):
        return False
    described = [*(key for key, value in (saved.config or {}).items() if value), *saved.tensors, *steps]
    if any(_CONDITIONAL.search(name) for name in described):
        return True
    if all(re.fullmatch(r"(?:weight|group) \d+", name) for name in steps):
        return len(odd) > 1
    modules = {name.rpartition(".")[0].rpartition(".")[0] for name in odd}
    return all(
        name in odd for name in steps if name.rpartition(".")[0].rpartition(".")[0] in modules and modules != {""}
    )


def updates_of(saved: Saved) -> int | None:
    """Return the number of updates that the optimizer made. None if it does not count them."""
    steps = [] if saved.optimizer is None else list(saved.optimizer.steps.values())
    return int(max(Counter(steps).items(), key=lambda item: (item[1], item[0]))[0]) if steps else None


# ---------------------------------------------------------------- the files of one folder


def check(saved: list[Saved], root: Path, trust: bool) -> None:
    """Report files that do not belong together, and missing files, in each folder with saved models."""
    for saved_part in saved:
        with foreign.guarded(saved_part, "The counters of the optimizer"):
            check_counters(saved_part)
            invariants.check_optimizer(saved_part)
    folders = {saved_part.folder for saved_part in saved} | {
        saved_part.folder.parent for saved_part in saved if saved_part.folder != root
    }
    for folder in sorted(folders):
        files = _files_of(folder, saved)
        if files is not None:
            with foreign.guarded(files.saved, f"Whether the files of {folder.name} belong together"):
                _check_files(files, folder, root, trust)
    _check_lost_weights(saved, root)


def _files_of(folder: Path, saved: list[Saved]) -> _Files | None:
    """Return the files in a folder, with the engines' checkpoints below it. None if it cannot be read."""
    try:
        paths = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    except OSError:
        return None
    own = next((saved_part for saved_part in saved if saved_part.folder == folder), None)
    engines = [
        saved_part for saved_part in saved if saved_part.folder != folder and folder in saved_part.folder.parents
    ]
    first = own or next(iter(engines), None)
    return None if first is None else _Files(first, paths, engines)


def _check_files(files: _Files, folder: Path, root: Path, trust: bool) -> None:
    names = files.paths.keys()
    is_trainers = bool(_CHECKPOINT.fullmatch(folder.name)) and bool(_TRAINER_FILES & names)
    if TRAINER_STATE in names or is_trainers:
        _check_trainer(files, folder, trust)
        for name in sorted(name for name in names if name.startswith("rng_state")):
            invariants.check_random_states(files.saved, name, _loaded(files.saved, files.paths[name], trust))
    elif any(_RANDOM["accelerate"].fullmatch(name) for name in names) or "optimizer.bin" in names:
        _check_accelerate(files, trust)
    if _SCALER in names and isinstance(scaler := _loaded(files.saved, files.paths[_SCALER], trust), dict):
        invariants.check_numbers(files.saved, _SCALER, [scaler])
    if MANIFEST in names:
        _check_manifest(files, folder)
    if files.saved.folder == folder:
        _check_named(files.saved, folder, root)


def _check_named(saved: Saved, folder: Path, root: Path) -> None:
    """Compare the name of an engine's checkpoint with the step in its files."""
    match = re.fullmatch(r"global_step(\d{1,15})(?:_universal)?", folder.name)
    if match and saved.step is not None and saved.format.startswith("DeepSpeed") and int(match[1]) != saved.step:
        saved.wrong(
            "shards", f"The folder is named {folder.name}, but its files are of step {saved.step}.", [folder.name]
        )
    has_latest = any((folder.parent / name).is_file() for name in ("latest", "latest_universal"))
    if match and saved.format.startswith("DeepSpeed") and not has_latest:
        (saved.note if folder == root else saved.wrong)(
            "missing", "There is no file `latest` next to the folder, so DeepSpeed resumes only if it is given the tag "
            f"{folder.name}.", ["latest"],
        )  # fmt: skip


def named_step(folder: Path) -> int | None:
    """Return the step in the name of a folder, such as 40 of global_step40."""
    match = _STEP_IN_NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


# ---------------------------------------------------------------- transformers' Trainer


def _check_trainer(files: _Files, folder: Path, trust: bool) -> None:
    saved, paths, _ = files
    if TRAINER_STATE not in paths:
        has_more = any(name != "training_args.bin" for name in _TRAINER_FILES & paths.keys())
        add = saved.wrong if has_more or files.engines else saved.note
        add("missing", f"There is no {TRAINER_STATE}, which Trainer writes last, so it cannot resume.", [TRAINER_STATE])
        return
    try:
        state = foreign.read_object(paths[TRAINER_STATE])
    except foreign.Unusual as reason:
        saved.wrong("unreadable", f"{TRAINER_STATE} {reason}.", [TRAINER_STATE])
        return
    step = int(state["global_step"])
    match = _CHECKPOINT.fullmatch(folder.name)
    if match and int(match[1]) != step:
        saved.wrong(
            "shards", f"The folder is named {folder.name}, but {TRAINER_STATE} is of step {step}.", [TRAINER_STATE]
        )
    _check_trainer_set(files)
    _check_ranks(files, _RANDOM["trainer"])
    _check_trainer_steps(files, step, int(number_of(state.get("epoch")) or 0), trust)


def _check_trainer_set(files: _Files) -> None:
    """Check that the files are there from which Trainer resumes. A checkpoint of only the model has none of them."""
    saved, paths, engines = files
    has_scheduler = any(name in paths for name in _SCHEDULERS) or any(engine.has_scheduler for engine in engines)
    has_random = any(name.startswith("rng_state") for name in paths)
    has_optimizer = any(re.fullmatch(r"(?:.*-)?optimizer\.(?:pt|bin)", name) for name in paths) or bool(engines)
    presence = {"optimizer.pt": has_optimizer, "scheduler.pt": has_scheduler, "rng_state.pth": has_random}
    missing = [name for name, is_present in presence.items() if not is_present]
    if not missing:
        return
    if len(missing) == len(presence):
        only_model = (
            pickles.flag_of(paths["training_args.bin"], "save_only_model") if "training_args.bin" in paths else None
        )
        if only_model:
            return
        text = "The checkpoint has no optimizer, scheduler and random states, so a training cannot be resumed from it."
        if only_model is None:
            saved.note("missing", f"{text} This is right with `save_only_model`.", missing)
            return
        saved.wrong("missing", f"{text} The file training_args.bin does not set `save_only_model`.", missing)
        return
    saved.wrong(
        "missing", "Trainer saves these files with each checkpoint, but they are missing, so a resumed training starts "
        "with new ones.", missing,
    )  # fmt: skip


def _check_trainer_steps(files: _Files, step: int, num_epochs: int, trust: bool) -> None:
    """Compare Trainer's step with those of the optimizer, of the engine and of the scheduler."""
    saved, _, engines = files
    may_skip = _may_skip(files)
    update_counts = [
        (saved_part, updates) for saved_part in (saved, *engines) if (updates := updates_of(saved_part)) is not None
    ]
    scheduler = _scheduler_steps(files, trust)
    for saved_part, updates in update_counts:
        if saved_part is not saved and saved_part.step is not None:
            _check_engine_step(saved_part, saved_part.step, step, num_epochs)
        elif updates != step and not (may_skip and updates < step and scheduler in (None, updates)):
            file = saved_part.optimizer.file if saved_part.optimizer else saved_part.format
            saved.wrong(
                "optimizer",
                f"{file} was updated {updates} times, but {TRAINER_STATE} is of step {step}, so they are of different "
                "steps or trainings.",
                [file],
            )
    allowed = {step, *(updates for _, updates in update_counts), *(engine.step for engine in engines)}
    _check_scheduler(files, scheduler, step, allowed, may_lag=may_skip and not update_counts)


def _may_skip(files: _Files) -> bool:
    """Return whether updates may have been skipped, because a gradient in fp16 was infinite."""
    return _SCALER in files.paths or any(engine.num_skipped for engine in files.engines)


def _check_scheduler(files: _Files, scheduler: int | None, step: int, allowed: set[int | None], may_lag: bool) -> None:
    """Compare the number of steps of the learning rate schedule with those that the other files state."""
    if scheduler is None or scheduler in allowed or (may_lag and scheduler < step):
        return
    files.saved.wrong(
        "optimizer",
        f"The scheduler made {scheduler} steps, but {TRAINER_STATE} is of step {step}, so a resumed training "
        "continues with a different learning rate.",
        [next(name for name in _SCHEDULERS if name in files.paths)],
    )


def _check_engine_step(engine: Saved, engine_step: int, step: int, num_epochs: int) -> None:
    """Compare DeepSpeed's step with Trainer's, which may be one per epoch larger if an epoch ends between updates."""
    if engine_step == step:
        return
    text = f"{engine.folder.name} is of step {engine_step}, but {TRAINER_STATE} is of step {step}."
    if 0 < step - engine_step <= num_epochs:
        engine.note(
            "shards", f"{text} This is right if the last batches of each epoch were too few for an update.",
            [engine.folder.name],
        )  # fmt: skip
    else:
        engine.wrong("shards", f"{text} The files are of different steps or trainings.", [engine.folder.name])


def _scheduler_steps(files: _Files, trust: bool) -> int | None:
    """Return the number of steps that the learning rate schedule made; None if it does not count updates."""
    path = next((files.paths[name] for name in _SCHEDULERS if name in files.paths), None)
    content = None if path is None else _loaded(files.saved, path, trust)
    if path is not None:
        invariants.check_schedule(files.saved, path.name, content, is_certain=TRAINER_STATE in files.paths)
    return scheduler_steps(content)


def scheduler_steps(content: Any) -> int | None:
    """Return the number of steps in the state_dict of a learning rate scheduler. None if it does not count updates."""
    if not isinstance(content, dict) or "num_bad_epochs" in content:  # ReduceLROnPlateau counts evaluations
        return None
    if (last := number_of(content.get("last_batch_iteration"))) is not None:  # DeepSpeed's, from -1
        return int(last) + 1
    last = number_of(content.get("last_epoch"))
    return None if last is None else int(last)


def _loaded(saved: Saved, path: Path, trust: bool) -> Any:
    """Return the content of a file of torch.save. None if it would run code, or if it is damaged, which is reported."""
    try:
        return pickles.load(path, trust)
    except pickles.Unreadable as reason:
        saved.wrong("unreadable", f"{path.name} cannot be read: {reason}.", [path.name])
    except Refusal:
        saved.unchecked.append(f"{path.name}, because loading it would run code (--trust-pickle)")
    return None


# ---------------------------------------------------------------- accelerate's save_state


def _check_accelerate(files: _Files, trust: bool) -> None:
    saved, paths, engines = files
    random = {name: path for name, path in paths.items() if _RANDOM["accelerate"].fullmatch(name)}
    has_optimizer = any(re.fullmatch(r"optimizer(?:_\d+)?\.bin", name) for name in paths)
    has_engine = any(_OF_ENGINE.fullmatch(engine.folder.name) for engine in engines)
    if random and not has_optimizer and not has_engine:
        saved.wrong(
            "missing", "There are random states of accelerate's save_state, but no optimizer.bin, so a resumed "
            "training starts with a new optimizer.", ["optimizer.bin"],
        )  # fmt: skip
    if not random and has_optimizer and saved.config is None:
        saved.wrong(
            "missing", "accelerate's save_state writes a file of random states per process. These "
            "files are missing, so a resumed training fails.", ["random_states_0.pkl"],
        )  # fmt: skip
    if further := [name for name in paths if re.fullmatch(r"optimizer_\d+\.bin", name)]:
        saved.unchecked.append(f"the further optimizers of accelerate's save_state ({names_text(further)})")
    _check_ranks(files, _RANDOM["accelerate"])
    _check_micro_steps(saved, random, trust)
    _check_updates(files, len(random), trust)


def _check_updates(files: _Files, num_processes: int, trust: bool) -> None:
    """Compare the scheduler's steps with the optimizer's. Accelerate's scheduler makes one per process and update."""
    saved, _, engines = files
    updates, steps = updates_of(saved), _scheduler_steps(files, trust)
    if updates is None:
        updates = next((count for engine in engines if (count := updates_of(engine)) is not None), None)
    if updates is None or steps is None or steps in (updates, updates * max(1, num_processes)):
        return
    text = f"The scheduler made {steps} steps, but the optimizer made {updates} updates."
    if steps > updates * max(1, num_processes):
        saved.wrong("optimizer", f"{text} Their files are of different steps or trainings.", ["scheduler.bin"])
    else:
        saved.note(
            "optimizer", f"{text} This is right if the scheduler makes a step per epoch.", ["scheduler.bin"]
        )  # fmt: skip


def _check_micro_steps(saved: Saved, random: Mapping[str, Path], trust: bool) -> None:
    """Check that all processes saved their random states after the same number of batches."""
    counts: dict[float, list[str]] = {}
    for name, path in random.items():
        content = _loaded(saved, path, trust)
        invariants.check_random_states(saved, name, content)
        step = number_of(content.get("step")) if isinstance(content, dict) else None
        if step is not None:
            counts.setdefault(step, []).append(name)
        elif isinstance(content, dict):
            saved.note("missing", f"{name} has no step, so accelerate does not load these random states.", [name])
    if len(counts) > 1:
        listed = names_text(f"{step:g}" for step in counts)
        saved.wrong(
            "shards", f"The random states of the processes are of different steps ({listed}).",
            [name for names in counts.values() for name in names],
        )  # fmt: skip


def _check_ranks(files: _Files, pattern: re.Pattern[str]) -> None:
    """Check that each process has its own file of random states."""
    ranks = {int(match[1]): name for name in files.paths if (match := pattern.fullmatch(name))}
    if not ranks:
        return
    world_size = max([max(ranks) + 1, *(engine.world_size for engine in files.engines)])
    if world_size > len(ranks) and world_size <= 1 << 20:
        missing = names_text([str(rank) for rank in range(world_size) if rank not in ranks], 8)
        files.saved.wrong(
            "missing", f"The random states of rank {missing} of {world_size} are missing.", [f"rank {missing}"]
        )
    check_names_inside(files.saved, (files.paths[name] for name in ranks.values()), pattern)


def check_names_inside(saved: Saved, paths: Iterable[Path], pattern: re.Pattern[str]) -> None:
    """Check that a rank's file was written by that rank: torch.save stores the name of the file inside it."""
    for path in paths:
        inside = pickles.name_inside(path)
        match = None if inside is None else pattern.fullmatch(f"{inside}{path.suffix}")
        own = pattern.fullmatch(path.name)
        if match and own and match.groups() != own.groups():
            saved.wrong(
                "shards",
                f"{path.name} was saved as {inside}{path.suffix}, so it is the file of another rank.",
                [path.name],
            )


# ---------------------------------------------------------------- a checkpoint of this project, and lost weights


def _check_manifest(files: _Files, folder: Path) -> None:
    """Compare the step of a checkpoint of `zero-study run` with its folder's name and with the optimizer."""
    try:
        step = number_of(foreign.read_object(files.paths[MANIFEST]).get("step"))
    except foreign.Unusual as reason:
        files.saved.wrong("unreadable", f"{MANIFEST} {reason}.", [MANIFEST])
        return
    if step is None:
        return
    match = re.fullmatch(r"step-(\d{8,15})", folder.name)
    if match and int(match[1]) != step:
        files.saved.wrong(
            "shards", f"The folder is named {folder.name}, but {MANIFEST} is of step {step:g}.", [MANIFEST]
        )
    for engine in files.engines:
        engine.step = int(step) if engine.step is None else engine.step
        updates = updates_of(engine)
        if updates is not None and updates + engine.num_skipped > step:
            engine.wrong(
                "optimizer",
                f"The optimizer was updated {updates} times, but {MANIFEST} is of step {step:g}.",
                [MANIFEST],
            )


def _check_lost_weights(saved: list[Saved], root: Path) -> None:
    """Report optimizer states without weights, unless the user named the optimizer's own folder."""
    if any(saved_part.tensors for saved_part in saved):
        return
    for saved_part in saved:
        is_incomplete = any(finding.is_wrong for finding in saved_part.findings)
        if (
            saved_part.states
            and saved_part.folder != root
            and not is_incomplete
            and not saved_part.format.startswith("DeepSpeed")
        ):
            saved_part.wrong(
                "missing", "There are optimizer states, but no weights of the model, so the weights were lost or not "
                "saved.", [saved_part.folder.name],
            )  # fmt: skip
