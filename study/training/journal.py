"""What does a run report so far? On rank 0 it becomes steps.jsonl and record.json, however the run ends."""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import signal
import time
from typing import Any

from study import files
from study.errors import Failed, Interrupted
from study.files import missing_folders, remove_empty
from study.records import schema
from study.run import Run
from study.running.ending import is_out_of_memory, shown_command
from study.running.launch import command
from study.training.built import Built

# DeepSpeed swaps tensors of at least this size; a process that wrote less to disks only wrote its own records.
SMALLEST_SWAP_BYTES = 1 << 20


class Journal:
    """What a run has to tell so far; on rank 0 it becomes steps.jsonl and record.json, however the run ends."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rank = int(os.environ.get("RANK", "0"))
        self.step: int | None = None  # the last one begun
        self.lines: list[dict[str, Any]] = []
        self.evaluation: list[dict[str, float | None]] = []
        self.swapped = (0, 0)  # bytes read and written
        self.energy: float | None = None  # joules
        self.observer: Any = None
        self._file: Any = None
        self._accelerator: Any = None
        self._created = missing_folders(run.folder)
        self._started = time.perf_counter()
        config = run.config
        self._facts: dict[str, Any] = {
            "run_id": run.run_id,
            "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shown_command(command(run)),
            "workload": config.workload,
            "size": config.size,
            "strategy": run.strategy.name,
            "world_size": run.world_size,
            "seed": config.seed,
            "init": config.effective_init,
            "config": config.model_dump(mode="json"),
        }

    def open(self, built: Built) -> None:
        """Begin the run directory, once the proof holds."""
        from study.training import weights
        from study.training.observer import Observer

        config, accelerator, strategy = self.run.config, built.accelerator, self.run.strategy
        # A steady step: after warm-up, or the last one of a run that is all warm-up.
        probed = min(config.timing_warmup_steps + 1, config.num_steps) if config.measure else None
        folder = self.run.swap_folder if strategy.offloads_to_nvme else None
        self.observer = Observer(
            built.model, built.optimizer, built.memory, built.proof, probed, folder, built.bucket_bytes
        )
        self._accelerator = accelerator
        self._facts |= {
            "num_params": weights.num_params(built.model),
            "data": built.splits.description,
            "proof": built.proof,
            "initial_parameters": built.initial_parameters,
        }
        if config.log_with != "none":
            accelerator.init_trackers("zero-study", config={k: str(v) for k, v in self._facts["config"].items()})
        if self.rank == 0:
            self.run.folder.mkdir(parents=True, exist_ok=True)
            files.write_json(
                self.run.folder / "config.json",
                {
                    "config": self._facts["config"],
                    "strategy": {
                        "file": str(strategy.path),
                        "yaml": strategy.content,
                        "json": strategy.deepspeed_json or strategy.ddp_json,
                    },
                    "proof": built.proof.model_dump(mode="json"),
                },
            )
            self._file = open(self.run.folder / "steps.jsonl", "w")  # noqa: SIM115 - open for the whole run

    def add(self, line: dict[str, Any]) -> None:
        """Append one step. Raises Failed where it is not one of a run that trains; all ranks see the same line."""
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in line.items()}
        self.lines.append(finite)
        if self._file:
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()
        if not math.isfinite(line["loss"]):
            raise Failed(f"step {line['step']}: the loss is {line['loss']}")
        norm = line["grad_norm"]
        if norm is not None and (not math.isfinite(norm) or norm == 0):
            raise Failed(f"step {line['step']}: the gradient norm is {norm}")
        self._accelerator.log({k: v for k, v in finite.items() if v is not None}, step=line["step"])

    def add_evaluation(self, step: int, result: dict[str, float]) -> None:
        """Append one evaluation. Raises Failed where its loss is no number; a perplexity may be too large for one."""
        finite = {name: value if math.isfinite(value) else None for name, value in result.items()}
        self.evaluation.append({"step": step, **finite})
        if finite["loss"] is None:
            raise Failed(f"step {step}: the evaluation loss is {result['loss']}")

    def write(self, status: str, **facts: Any) -> None:
        from study.records import machine

        if self._file:
            os.fsync(self._file.fileno())  # a record that outlives a power cut names steps that do, too
            self._file.close()
            self._file = None  # this may be cut off, and `fail` write once more
        steps = self.run.folder / "steps.jsonl"
        known = {**self._facts, **facts}
        schema.write(
            self.run.folder,
            schema.Record(
                status=status,
                wall_seconds=time.perf_counter() - self._started,
                steps_done=len(self.lines),
                final_loss=self.lines[-1]["loss"] if self.lines else None,
                evaluation=self.evaluation,
                machine=machine.describe(),
                steps_sha256=files.sha256(steps) if steps.exists() else None,
                **known,
            ),
        )

    def fail(self, error: BaseException) -> None:
        """Record a run that did not end well. Rank-local: nothing here waits for another rank."""
        # The launcher ends every rank as soon as one has ended; what there is to tell is told all the same.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if (self.run.folder / "record.json").exists():  # the result is there, whatever came after it
            return
        if self.rank and self.observer is None and isinstance(error, Interrupted):
            return  # nothing had begun: rank 0 says why, and where it has refused nothing is to be left
        own = {
            "at": time.time(),
            "status": _status(error),
            "step": self.step,
            "error": f"{type(error).__name__}: {error}"[:2000],
        }
        self.run.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.run.folder / "initial_weights", ignore_errors=True)
        self.run.remove_swap_folder()
        if self.rank:
            files.write_json(self.run.folder / f"failure-rank{self.rank}.json", own)
            return
        # The rank that failed first knows why; this one may only have lost its peer.
        time.sleep(2 if self._facts["world_size"] > 1 else 0)
        reports = sorted(self.run.folder.glob("failure-rank*.json"))
        first = min([own, *(json.loads(path.read_text()) for path in reports)], key=lambda report: report["at"])
        self.write(first["status"], failure=schema.Failure(step=first["step"], error=first["error"]))
        for path in reports:
            path.unlink()

    def discard(self) -> None:
        """Remove what a refused run left, on rank 0; what was there before stays."""
        if self.rank or not self.run.folder.exists():
            return
        self.run.remove_swap_folder()
        shutil.rmtree(self.run.folder / "initial_weights", ignore_errors=True)
        remove_empty(self._created)


def _status(error: BaseException) -> str:
    import torch

    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return "interrupted"
    return "out_of_memory" if isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(str(error)) else "failed"
