"""Find the complete checkpoints of a run by their manifests, and the one to resume from.

A checkpoint is a folder: the engine's state of model and optimizer, the progress of the run, the random state of each
rank, and finally a manifest with the digest of every other file. A folder without a manifest, or with another digest,
is no checkpoint.

Engines use pickle, and loading a pickle runs the code in it. Digests detect damage and mistakes, not malice: `auto`
loads only from the run's own folder, and `--resume PATH` trusts PATH as one trusts a program.
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

from study import files
from study.config import NOT_TRAINED
from study.errors import Refusal
from study.records import machine
from study.records.schema import Facts
from study.run import Run
from study.training import engine_state

MANIFEST = "manifest.json"
ENGINE = "engine"  # the folder with what accelerate and the engine save
MODEL = "model"  # the folder with transformers' description of the model, and the tokenizer

_NAME = re.compile(r"step-([0-9]{8,})")  # of a checkpoint's folder, as `folder_of` makes it


class Identity(Facts):
    """Whose state a checkpoint is: what must be equal for another process to go on from it."""

    strategy: str
    strategy_sha256: str  # of the strategy's file, with its JSON
    world_size: int
    device: str  # the GPU's name, or cpu: another has other arithmetic, and other random numbers
    config: dict[str, Any]
    libraries: dict[str, str]
    arithmetic: dict[str, Any] = Field(default_factory=dict)  # as machine.arithmetic says it of the variables


class Manifest(Facts):
    """What a checkpoint is of, and every file in it."""

    format_version: Literal[1] = 1
    run_id: str
    step: int  # the last one done
    engine: str  # as engine_state.kind_of names it
    identity: Identity
    code_sha256: str | None = None  # of the study's modules; None: from before 2026-11-23
    processor: str | None = None  # its model; None: not known, or from before 2026-11-26
    num_threads: int | None = None  # of each process; None: from before 2026-11-26
    files: dict[str, tuple[int, str]]  # path in the folder -> bytes, SHA-256


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint that a run is to go on from."""

    folder: Path
    manifest: Manifest
    is_exact: bool = False  # the run can go on bit by bit: same ranks, same strategy, same device, same libraries


def identity_of(run: Run) -> Identity:
    strategy = run.strategy
    content = [strategy.content, strategy.deepspeed_json, strategy.ddp_json]
    libraries = ("torch", "accelerate", "transformers", *(["deepspeed"] if strategy.zero_stage is not None else []))
    return Identity(
        strategy=strategy.name,
        strategy_sha256=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        world_size=run.world_size,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        config=run.config.model_dump(mode="json", exclude=set(NOT_TRAINED)),
        libraries={name: importlib.metadata.version(name) for name in libraries},
        arithmetic=machine.arithmetic({"environment": machine.environment(os.environ)}),
    )


# ---------------------------------------------------------------- finding one


def folder_of(folder: Path, step: int) -> Path:
    """Where a run's checkpoint of a step lies, or is to."""
    return folder / f"step-{step:08d}"


def in_order(folder: Path) -> list[Path]:
    """What bears a checkpoint's name in a folder, the oldest first; what is named otherwise is nobody's."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=_step)


def _step(folder: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(folder.name.removeprefix("step-"))


def set_aside(folder: Path, resumed_step: int) -> None:
    """Rename what was not taken, before the first one is written: another run's, or damaged.

    It would be taken for this run's newest, and those that this run writes would be the old ones.
    `resumed_step`: the step of the checkpoint that the run resumes from; 0: it resumes from none.
    """
    for path in in_order(folder):
        if _step(path) > resumed_step:
            aside = path.with_name(f"not-taken-{path.name}")
            if aside.exists():
                remove(aside)
            path.rename(aside)
            print(f"kept as {aside}: it was not taken; delete it where it is not needed", flush=True)


def remove(folder: Path) -> None:
    """Delete a checkpoint, or a file in its place; of a link the link alone. Raises OSError."""
    shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink()


def choose(run: Run, accelerator: Accelerator) -> Checkpoint | None:
    """Return the checkpoint that a run goes on from; None: it begins anew. Collective.

    With `auto` each that does not do is named, and the one before it taken. Raises Refusal for a PATH that does not do.
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
        requested = whole(Path(run.config.resume))
        if difference := _difference(requested.manifest, run, is_named=True):
            raise Refusal(f"{requested.folder}: cannot be resumed: {difference}. Use another checkpoint")
        _check_code(requested, run)
        _say_what_rounds_otherwise(requested)
        return replace(requested, is_exact=requested.manifest.identity == identity_of(run))
    if run.config.resume == "never":
        for path in in_order(folder):
            remove(path)
        return None
    for path in reversed(in_order(folder)):
        try:
            candidate = whole(path)
            if difference := _difference(candidate.manifest, run):
                raise Refusal(f"{path}: this checkpoint belongs to another run: {difference}")
        except Refusal as refusal:
            print(f"not taken: {refusal}", flush=True)
            continue
        _check_code(candidate, run)
        print(f"going on from {path}, after step {candidate.manifest.step} of {run.config.num_steps}", flush=True)
        _say_what_rounds_otherwise(candidate)
        return replace(candidate, is_exact=True)
    return None


def _say_what_rounds_otherwise(checkpoint: Checkpoint) -> None:
    """Print that sums are rounded otherwise from here on, if the processor or its threads are others than before.

    A run on a GPU says it too: what it offloads is updated on the processor.
    """
    before = (checkpoint.manifest.processor, checkpoint.manifest.num_threads)
    now = (machine.cpu_model(), torch.get_num_threads())
    for description, then, current in zip(("processor", "number of threads of a process"), before, now, strict=True):
        if then is not None and then != current:
            print(
                f"{checkpoint.folder}: the {description} was {then} and is {current} now; the run goes on, but on a "
                "CPU sums are rounded otherwise, so that its last bits are not those of a run that was never cut off",
                flush=True,
            )


def _check_code(checkpoint: Checkpoint, run: Run) -> None:
    """Refuse a checkpoint that other code has written, unless that is asked for: what it trained may be another run."""
    if checkpoint.manifest.code_sha256 != machine.code_sha256() and not run.config.resume_with_other_code:
        raise Refusal(
            f"{checkpoint.folder}: other code of the study has written it; go back to that, pass "
            "--resume-with-other-code, which the record says, or begin anew with --resume never"
        )


def read_manifest(folder: Path) -> Manifest:
    """Read what a checkpoint says it is. Raises Refusal where there is none, or a part of one."""
    if not (folder / MANIFEST).is_file():
        raise Refusal(f"{folder}: this is not a finished checkpoint, because it has no {MANIFEST}. Use another one")
    try:
        return Manifest.model_validate(files.load(folder / MANIFEST, "a checkpoint's manifest"))
    except ValidationError as error:
        raise Refusal(
            f"{folder / MANIFEST}: was written by another version of zero-study ({error.error_count()} keys differ)."
            " Use another checkpoint"
        ) from None


def whole(folder: Path) -> Checkpoint:
    """Read a checkpoint whose files are all as they were written. Raises Refusal for any other."""
    manifest = read_manifest(folder)
    if _NAME.fullmatch(folder.name) and _step(folder) != manifest.step:
        raise Refusal(
            f"{folder}: its {MANIFEST} belongs to step {manifest.step}, so the folder was renamed. Restore its name"
        )
    # Engines load whatever file has a fitting name.
    existing = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    if strange := existing - {MANIFEST, *manifest.files}:
        raise Refusal(
            f"{folder}: the checkpoint is damaged: {min(strange)} is not one of the files that were written. Use"
            " another checkpoint"
        )
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        with files.reading(path, "what was written"):  # a disk may fail
            is_unchanged = name in existing and path.stat().st_size == size and files.sha256(path) == digest
        if not is_unchanged:
            raise Refusal(
                f"{folder}: the checkpoint is damaged: {name} is not the file that was written. Use another checkpoint"
            )
    return Checkpoint(folder, manifest)


def _difference(manifest: Manifest, run: Run, is_named: bool = False) -> str | None:
    """Say in what a checkpoint's run is not this one; None: it is.

    One that is named may be of other ranks, another strategy and other libraries, where its engine's states can be
    laid out anew.
    """
    theirs, ours = manifest.identity, identity_of(run)
    if is_named:
        kind = engine_state.kind_of(run)
        if theirs != ours and manifest.engine == kind == "subgroups":
            return "states of NVMe offload are taken up by a run of the same processes and settings alone"
        if theirs != ours and manifest.engine != kind:
            return f"its states are laid out as {manifest.engine}, this run's as {kind}, and neither takes the other's"
        if manifest.step >= run.config.num_steps:
            return f"it is of step {manifest.step}, after which this run has none of its own"
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
                return f"its {key} is {there.get(key)}, this run's {here.get(key)}"
    return None
