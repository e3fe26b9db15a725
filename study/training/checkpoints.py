"""Write and load checkpoints, so that a resumed run continues as if it had not been interrupted.

A checkpoint is written to a temporary folder, which gets its final name once all files are on the disk.
"""

from __future__ import annotations

import copy
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from study.records.schema import Checkpointing, Continued, Facts
from study.training import engine_state, rank_failures
from study.training.journal import Journal, Progress
from study.training.manifest import (
    ENGINE,
    MANIFEST,
    MODEL,
    Manifest,
    folder_of,
    identity_of,
    in_order,
    quarantine,
    read_complete,
    remove,
)
from study.training.observer import Observed
from study.training.setup import Built
from study.workloads import sources
from zero_study import files
from zero_study.errors import Failed, Refusal


class RankState(Facts):
    """The state of one rank that the engine does not save."""

    random: dict[str, str]  # device -> state of torch's random generator, in hexadecimal digits
    observed: Observed


class Checkpoints:
    """The checkpoints of one run, which it writes, and the one that it resumes from."""

    def __init__(self, built: Built, journal: Journal) -> None:
        self._built = built
        self._journal = journal
        self._every = built.run.config.checkpoint_every
        self._seconds = 0.0
        self._count = 0
        self._load_seconds: float | None = None
        self._bytes: int | None = None
        taken = built.checkpoint
        is_own = taken is not None and taken.folder.parent == built.run.checkpoints_folder
        self._taken = taken.manifest.step if taken and is_own else 0

    def facts(self) -> Checkpointing | None:
        if self._every is None:
            return None
        return Checkpointing(
            count=self._count, seconds=self._seconds, last_bytes=self._bytes, load_seconds=self._load_seconds
        )

    def check(self) -> None:
        """Raise Refusal if the run's data or initial weights differ from those of the checkpoint to resume from."""
        built, checkpoint = self._built, self._built.checkpoint
        if checkpoint is None:
            return
        progress = self._progress_of(checkpoint.folder)
        for description, theirs, ours in (
            ("data", progress.data, built.splits.description),
            ("initial weights", progress.initial_sha256, built.initial_parameters.sha256),
        ):
            if theirs != ours:
                raise Refusal(
                    f"{checkpoint.folder}: its {description} are {theirs}, but those of this run are {ours}. To start"
                    " from the first step, add --resume never"
                )

    @staticmethod
    def _progress_of(folder: Path) -> Progress:
        return Progress.model_validate_json((folder / "progress.json").read_bytes())

    def load(self) -> int:
        """Load the checkpoint that the run resumes from and return its step, or 0 if there is none.

        Call this after the first batch has been drawn, because drawing it uses random numbers. Collective: every rank
        must call this.
        """
        built, checkpoint = self._built, self._built.checkpoint
        if checkpoint is None:
            return 0
        began, folder, manifest = time.perf_counter(), checkpoint.folder, checkpoint.manifest
        progress = self._progress_of(folder)
        is_exact = checkpoint.is_exact
        engine_state.load(
            built.accelerator,
            built.model,
            built.optimizer,
            built.run,
            folder / ENGINE,
            manifest.step,
            anew=not is_exact,
        )
        built.accelerator.wait_for_everyone()
        self._load_seconds = time.perf_counter() - began
        start, observed = progress.continues, None
        if is_exact:
            state = RankState.model_validate_json(self._rank_file(folder).read_bytes())
            for device, digits in state.random.items():
                _generator_module(device).set_rng_state(torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8))
            observed = state.observed
        else:  # another number of ranks draws other dropout masks
            torch.manual_seed(
                (built.run.config.seed * 1_000_003 + manifest.step) * 1_003 + built.accelerator.process_index
            )
            start = Continued(
                run_id=manifest.run_id,
                strategy=manifest.identity.strategy,
                world_size=manifest.identity.world_size,
                step=manifest.step,
            )
        self._journal.observer.resume_from(manifest.step, observed)
        resumed_at = [*progress.resumed_at, manifest.step]
        self._journal.resume_from(progress.model_copy(update={"resumed_at": resumed_at, "continues": start}))
        return manifest.step

    def write_where_due(self, step: int) -> None:
        """Write a checkpoint if one is due: every --checkpoint-every steps, and after the last step.

        Collective: every rank must call this.
        """
        config = self._built.run.config
        is_due = self._every is not None and step % self._every == 0
        if is_due or (step == config.num_steps and (self._every is not None or config.save_model)):
            began = time.perf_counter()
            memory = self._built.memory
            phase = memory.current
            memory.begin("checkpoint")  # the copies that writing needs must not count as a step's peak
            with rank_failures.explain_write_errors(self._built.run.folder):
                self._write(step)
            memory.begin(phase)
            self._seconds += time.perf_counter() - began
            self._count += 1

    def _write(self, step: int) -> None:
        built, accelerator = self._built, self._built.accelerator
        folder = folder_of(built.run.checkpoints_folder, step)
        part = folder.with_suffix(".part")
        if accelerator.is_main_process:
            if not self._count:
                quarantine(folder.parent, self._taken)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        accelerator.wait_for_everyone()
        engine_state.save(accelerator, built.model, built.optimizer, built.run, part / ENGINE)
        devices = ["cpu", *(["cuda"] if accelerator.device.type == "cuda" else [])]
        state = RankState(
            random={device: _generator_module(device).get_rng_state().numpy().tobytes().hex() for device in devices},
            observed=self._journal.observer.observed(),
        )
        self._rank_file(part).write_text(state.model_dump_json())
        if accelerator.is_main_process:
            (part / "progress.json").write_text(self._journal.progress().model_dump_json())
            self._describe_model(part / MODEL)
        accelerator.wait_for_everyone()
        digests = self._digests(part)
        if accelerator.is_main_process:
            manifest = Manifest(
                run_id=built.run.run_id,
                step=step,
                engine=engine_state.kind_of(built.run),
                identity=identity_of(built.run),
                code_sha256=self._journal.code.sha256,
                processor=self._journal.code.processor,
                num_threads=self._journal.code.num_threads,
                files=digests,
            )
            files.write_json(part / MANIFEST, manifest.model_dump(mode="json"))
            os.replace(part, folder)
            files.sync_folder(folder.parent)
            for old in in_order(folder.parent)[: -built.run.config.keep]:
                remove(old)
        accelerator.wait_for_everyone()

    def _describe_model(self, folder: Path) -> None:
        built = self._built
        model = built.accelerator.unwrap_model(built.model)
        if built.run.config.lora_rank is not None:
            model.peft_config["default"].save_pretrained(folder)
            model = model.get_base_model()
        described = copy.deepcopy(model.config)
        described.architectures = [type(model).__name__.removeprefix("FSDP")]  # `fully_shard` adds this prefix
        described.save_pretrained(folder)
        sources.load_tokenizer(built.run.config).save_pretrained(folder)

    def export(self) -> None:
        """Write the model of the last step's checkpoint to the folder model/. Only rank 0 calls this.

        If the run did not request checkpoints, they are deleted afterwards. Raises Failed if the model cannot be
        written; the checkpoint is kept in that case.
        """
        from study.training import export

        run = self._built.run
        try:
            last = read_complete(folder_of(run.checkpoints_folder, run.config.num_steps))
            export.export(last, run.model_folder, data_dir=run.config.data_dir)
        except (OSError, Refusal) as error:
            raise Failed(
                f"the run is recorded, but its model is not written: {error}. Run `zero-study export {run.folder}`."
            ) from None
        if self._every is None:
            for old in in_order(run.checkpoints_folder):
                remove(old)
            if not run.checkpoints_folder.is_symlink():
                files.remove_empty([run.checkpoints_folder])

    def _digests(self, folder: Path) -> dict[str, tuple[int, str]]:
        """Return the size in bytes and the SHA-256 digest of every file in a folder, once the files are on the disk.

        The ranks divide the files among themselves. Raises Failed if the ranks do not see the same files. Collective:
        every rank must call this.
        """
        accelerator = self._built.accelerator
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        mine = {}
        for name in names[accelerator.process_index :: accelerator.num_processes]:
            path = folder / name
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            mine[name] = (path.stat().st_size, files.sha256(path))
        shares = gather_object([(names, mine)])
        if any(theirs != names for theirs, _ in shares):
            raise Failed(
                f"{folder}: the ranks see different files in this folder. Use a folder that all machines share."
            )
        digests = {name: entry for _, share in shares for name, entry in share.items()}
        self._bytes = sum(size for size, _ in digests.values())
        return digests

    def _rank_file(self, folder: Path) -> Path:
        return folder / f"rank-{self._built.accelerator.process_index}.json"


def _generator_module(device: str) -> Any:
    """Return the torch module that reads and sets the random state of a kind of device.

    For "cuda", it is the current GPU's.
    """
    return torch.cuda if device == "cuda" else torch
