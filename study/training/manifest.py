"""Find the complete checkpoints of a run by their manifests, and choose the one to resume from.

A checkpoint is a folder with the engine's state of model and optimizer, the results of the run so far, and the random
state of each rank. Its manifest is written last and has the digest of every other file. A folder without a manifest, or
with a file whose digest differs, is not a checkpoint.

Engines use pickle, and loading a pickle runs the code in it. The digests detect damage and mistakes, but not
manipulation. `--resume auto` loads only from the run's own folder. Use `--resume PATH` only with a folder that you
trust as you trust a program.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from pydantic import Field, ValidationError

from study.config import NOT_TRAINED
from study.records import machine
from study.records.schema import Facts
from study.records.simulation import SIMULATED, simulates_gpus
from study.run import Run
from study.training import engine_state
from zero_study import files
from zero_study.errors import Refusal

MANIFEST = "manifest.json"
ENGINE = "engine"  # folder for the files that accelerate and the engine save
MODEL = "model"  # folder for the model's configuration (transformers) and the tokenizer

_NAME = re.compile(r"step-([0-9]{8,})")  # name of a checkpoint's folder, as `folder_of` returns it


class Identity(Facts):
    """The settings that must be equal for another process to resume a checkpoint exactly."""

    strategy: str
    strategy_sha256: str  # digest of the strategy's file with its JSON
    world_size: int
    device: str  # the GPU's name, or cpu; other devices compute and draw other numbers
    config: dict[str, Any]
    libraries: dict[str, str]
    # settings from environment variables, by machine.arithmetic
    arithmetic: dict[str, Any] = Field(default_factory=dict)


class Manifest(Facts):
    """The description of a checkpoint: which run and step it belongs to, and the digest of every file in it."""

    format_version: Literal[1] = 1
    run_id: str
    step: int  # the last completed step
    engine: str  # layout of the states, by engine_state.kind_of
    identity: Identity
    code_sha256: str | None = None  # digest of the study's modules; None before 2026-11-23
    processor: str | None = None  # model name; None if unknown, or before 2026-11-26
    num_threads: int | None = None  # threads of each process; None before 2026-11-26
    files: dict[str, tuple[int, str]]  # path in the folder -> size in bytes, SHA-256


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint that a run can resume from."""

    folder: Path
    manifest: Manifest
    is_exact: bool = False  # True if the run can continue bit by bit: same ranks, strategy, device and libraries


def identity_of(run: Run) -> Identity:
    strategy = run.strategy
    content = [strategy.content, strategy.deepspeed_json, strategy.ddp_json]
    libraries = ["torch", "accelerate", "transformers"]
    libraries += ["deepspeed"] if strategy.zero_stage is not None else []
    libraries += ["peft"] if run.config.lora_rank is not None else []
    libraries += ["bitsandbytes"] if run.config.load_in_4bit else []
    return Identity(
        strategy=strategy.name,
        strategy_sha256=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        world_size=run.world_size,
        device=_device(),
        config=run.config.model_dump(mode="json", exclude=set(NOT_TRAINED)),
        libraries={name: importlib.metadata.version(name) for name in libraries},
        arithmetic=machine.arithmetic({"environment": machine.environment(os.environ)}),
    )


def _device() -> str:
    """Return the name of the GPU, or cpu. A simulated GPU is another device than the real one of that name."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"{SIMULATED if simulates_gpus() else ''}{torch.cuda.get_device_name()}"


# ---------------------------------------------------------------- finding one


def folder_of(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step, whether or not it exists."""
    return folder / f"step-{step:08d}"


def in_order(folder: Path) -> list[Path]:
    """Return the folders in `folder` that are named like a checkpoint, the oldest step first.

    Other names are ignored.
    """
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=_step)


def _step(folder: Path) -> int:
    """Return the step number in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def quarantine(folder: Path, resumed_step: int) -> None:
    """Rename all checkpoints whose step is later than `resumed_step`. They are damaged or belong to another run.

    Without this, a later start would choose them as this run's newest checkpoints, and the run's own checkpoints would
    be deleted as the oldest ones. `resumed_step` is the step of the checkpoint that the run resumed from, or 0 if it
    did not resume.
    """
    for path in in_order(folder):
        if _step(path) > resumed_step:
            aside = path.with_name(f"not-taken-{path.name}")
            if aside.exists():
                remove(aside)
            path.rename(aside)
            print(
                f"A later checkpoint was not used, and is kept as {aside}. Delete this folder if you do not need it.",
                flush=True,
            )


def remove(folder: Path) -> None:
    """Delete a checkpoint's folder, or a file of that name. If it is a symbolic link, only the link is deleted.

    Raises OSError if it cannot be deleted.
    """
    shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink()


def choose(run: Run, accelerator: Accelerator) -> Checkpoint | None:
    """Return the checkpoint that a run resumes from. None if the run starts from the first step.

    With `--resume auto`, unusable checkpoints are printed and skipped. Raises Refusal if `--resume PATH` names an
    unusable one. Collective: every rank must call this.
    """
    chosen: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            chosen = [_choose(run)]
        except Refusal as refusal:
            chosen = [refusal]
    broadcast_object_list(chosen)
    checkpoint: Checkpoint | Refusal | None = chosen[0]
    if isinstance(checkpoint, Refusal):
        raise checkpoint
    return checkpoint


def _choose(run: Run) -> Checkpoint | None:
    folder = run.checkpoints_folder
    for unfinished in folder.glob("*.part"):
        remove(unfinished)
    if run.config.resume not in ("auto", "never"):
        requested = read_complete(Path(run.config.resume))
        if difference := _difference(requested.manifest, run, is_named=True):
            raise Refusal(
                f"{requested.folder}: this run cannot resume from this checkpoint: {difference}. Use another checkpoint"
            )
        _check_code(requested, run)
        _say_what_rounds_otherwise(requested)
        return replace(requested, is_exact=requested.manifest.identity == identity_of(run))
    if run.config.resume == "never":
        for path in in_order(folder):
            remove(path)
        return None
    for path in reversed(in_order(folder)):
        try:
            candidate = read_complete(path)
            if difference := _difference(candidate.manifest, run):
                raise Refusal(f"{path}: this checkpoint belongs to another run: {difference}")
        except Refusal as refusal:
            print(f"A checkpoint was not used. {refusal}", flush=True)
            continue
        _check_code(candidate, run)
        print(f"resuming from {path}, after step {candidate.manifest.step} of {run.config.num_steps}", flush=True)
        _say_what_rounds_otherwise(candidate)
        return replace(candidate, is_exact=True)
    return None


def _say_what_rounds_otherwise(checkpoint: Checkpoint) -> None:
    """Print a warning if the processor or the number of threads differs from that of the checkpoint.

    Sums are then rounded differently from here on. The warning also applies to a run on a GPU, because offloaded states
    are updated on the processor.
    """
    before = (checkpoint.manifest.processor, checkpoint.manifest.num_threads)
    now = (machine.cpu_model(), torch.get_num_threads())
    for description, then, current in zip(("processor", "number of threads of a process"), before, now, strict=True):
        if then is not None and then != current:
            print(
                f"{checkpoint.folder}: the {description} was {then} and is {current} now. The run continues, but "
                "sums on the CPU are rounded differently, so its last bits differ from those of an uninterrupted "
                "run.",
                flush=True,
            )


def _check_code(checkpoint: Checkpoint, run: Run) -> None:
    """Raise Refusal if another version of the code wrote the checkpoint, unless --resume-with-other-code is given.

    Another version may have trained something else.
    """
    if checkpoint.manifest.code_sha256 != machine.code_sha256() and not run.config.resume_with_other_code:
        raise Refusal(
            f"{checkpoint.folder}: another version of zero-study wrote this checkpoint. Install that version, pass "
            "--resume-with-other-code, or start again with --resume never."
        )


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises Refusal if it is missing or incomplete, or if another version wrote it.
    """
    if not (folder / MANIFEST).is_file():
        raise Refusal(f"{folder}: this is not a finished checkpoint, because it has no {MANIFEST}. Use another one")
    try:
        return Manifest.model_validate(files.load(folder / MANIFEST, "a checkpoint's manifest"))
    except ValidationError as error:
        raise Refusal(
            f"{folder / MANIFEST}: this file was written by another version of zero-study "
            f"({error.error_count()} keys differ)."
            " Use another checkpoint"
        ) from None


def read_complete(folder: Path) -> Checkpoint:
    """Return a checkpoint after verifying that none of its files has changed. Raises Refusal if one has."""
    manifest = read_manifest(folder)
    if _NAME.fullmatch(folder.name) and _step(folder) != manifest.step:
        raise Refusal(
            f"{folder}: its {MANIFEST} belongs to step {manifest.step}, so the folder was renamed. "
            "Restore the folder's name"
        )
    # An unknown file is an error, because engines load any file with a matching name.
    existing = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    if strange := existing - {MANIFEST, *manifest.files}:
        raise Refusal(
            f"{folder}: the checkpoint is damaged: {min(strange)} does not belong to it. Use another checkpoint"
        )
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        with files.reading(path, "what was written"):  # reading may fail on a defective disk
            is_unchanged = name in existing and path.stat().st_size == size and files.sha256(path) == digest
        if not is_unchanged:
            raise Refusal(
                f"{folder}: the checkpoint is damaged: {name} was changed or is missing. Use another checkpoint"
            )
    return Checkpoint(folder, manifest)


def _difference(manifest: Manifest, run: Run, is_named: bool = False) -> str | None:
    """Return the first difference between a checkpoint's run and this run, as text. None if there is none.

    `is_named` is True if the user chose the checkpoint with --resume PATH. Then ranks, strategy and libraries may
    differ, provided that the engine's states can be converted.
    """
    theirs, ours = manifest.identity, identity_of(run)
    if is_named:
        if theirs.device.startswith(SIMULATED) != ours.device.startswith(SIMULATED):
            return "the GPUs of one of the two runs are simulated, so a record of both would mix them"
        kind = engine_state.kind_of(run)
        if theirs != ours and manifest.engine == kind == "subgroups":
            return "states of NVMe offload can be resumed only with the same processes and settings"
        if theirs != ours and manifest.engine != kind:
            return (
                f"its states have the layout {manifest.engine}, but this run needs the layout {kind}, "
                "and they cannot be converted"
            )
        if manifest.step >= run.config.num_steps:
            return f"it is of step {manifest.step}, but this run ends before a later step"
        pairs = [({**theirs.config, "micro_batch_size": None}, {**ours.config, "micro_batch_size": None})]
    else:
        if manifest.run_id != run.run_id:
            return f"it was written by {manifest.run_id}"
        facts = ("strategy", "world_size", "device", "strategy_sha256")
        pairs = [({name: getattr(theirs, name) for name in facts}, {name: getattr(ours, name) for name in facts})]
        pairs += [(theirs.config, ours.config), (theirs.libraries, ours.libraries)]
        pairs += [(theirs.arithmetic, ours.arithmetic)]
    for there, here in pairs:
        for key in sorted({*there, *here}):
            if there.get(key) != here.get(key):
                return f"its {key} is {there.get(key)}, but that of this run is {here.get(key)}"
    return None
