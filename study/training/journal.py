"""Collect the results of a run, and write them to steps.jsonl and record.json on rank 0, however the run ends."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import secrets
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from study.records import machine, schema
from study.run import Run
from study.running import lock, memory_limits
from study.running.launch import command
from study.running.outcome import is_out_of_memory, memory_of, shown_command
from study.training import rank_failures
from study.training.rank_failures import RankReports
from study.training.request import launcher_command
from study.training.setup import Built
from zero_study import files
from zero_study.errors import Failed, Interrupted, MachineLost, OutputFailed, PeerLost, Refusal, Stalled
from zero_study.files import missing_folders, remove_empty

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# DeepSpeed swaps tensors of at least this size. A process that wrote fewer bytes has only written records.
SMALLEST_SWAP_BYTES = 1 << 20


class Progress(schema.Facts):
    """The results of a run up to a checkpoint."""

    steps: list[dict[str, Any]]  # the lines of steps.jsonl
    evaluation: list[dict[str, float | None]]
    wall_seconds: float
    resumed_at: list[int]
    code: list[schema.Code] = Field(default_factory=list)  # empty in checkpoints from before 2026-11-23
    continues: schema.Continued | None
    initial_sha256: str
    data: dict[str, Any]


class Journal:
    """The results of a run so far. Rank 0 writes them to steps.jsonl and record.json, however the run ends."""

    def __init__(self, run: Run, store: Store | None = None) -> None:
        self.run = run
        self.rank = int(os.environ.get("RANK", "0"))
        self._reports = RankReports(run, store)
        self.step: int | None = None  # the last step that was begun
        self.lines: list[dict[str, Any]] = []
        self.evaluation: list[dict[str, float | None]] = []
        self.observer: Any = None
        # Rank 0 has locked the folder. If the study's launcher did not lock it before, the other ranks learn of it
        # after all ranks have connected.
        self.has_folder = self.rank == 0 or lock.is_ours(run.own_folder)
        self._file: Any = None
        self._folder: int | None = None  # an open handle, to notice if the folder is removed
        self._accelerator: Any = None
        self._created = missing_folders(run.own_folder)
        self._started = time.perf_counter()
        self._configuration: dict[str, Any] | None = None  # content of config.json; None if it was not written
        config, launcher = run.config, launcher_command()
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
            "strategy_file": run.strategy.written,
            "launcher": None if launcher is None else shown_command(launcher),
            "code": [machine.running_code()] if self.rank == 0 else [],  # read when the process starts
        }

    def open(self, built: Built) -> None:
        """Create the files of the run directory. Call this after the strategy has been verified.

        Raises Refusal if another run has started in the folder.
        """
        from study.training import weights
        from study.training.observer import Observer
        from study.workloads import sources

        config, accelerator, strategy = self.run.config, built.accelerator, self.run.strategy
        # Probe the first step after warm-up, or the last step if the run ends before.
        probed = min(config.timing_warmup_steps + 1, config.num_steps) if config.measure else None
        folder = self.run.swap_folder if strategy.offloads_to_nvme else None
        self.observer = Observer(
            built.model,
            built.optimizer,
            built.memory,
            built.proof,
            probed,
            folder,
            built.bucket_bytes,
            config.num_steps,
            config.compile,
            self.run.num_machines > 1 and self.run.is_first_of_machine(self.rank),
        )
        self._accelerator = accelerator
        self._facts |= {
            "num_params": weights.num_params(built.model),
            "num_trainable_params": weights.num_params(built.model, only_trainable=True),
            "data": built.splits.description,
            "weights_sha256": None if config.weights is None else sources.weights_sha256(config.weights),
            "proof": built.proof,
            "initial_parameters": built.initial_parameters,
        }
        if config.log_with != "none":
            accelerator.init_trackers("zero-study", config={k: str(v) for k, v in self._facts["config"].items()})
        self.run.own_folder.mkdir(parents=True, exist_ok=True)
        self._folder = os.open(self.run.own_folder, os.O_RDONLY)
        if self.rank == 0:
            self._configuration = {
                "config": self._facts["config"],
                "strategy": self._facts["strategy_file"],
                "proof": built.proof.model_dump(mode="json"),
                "writer": secrets.token_hex(16),  # identifies this writer, even among equal runs
            }
            try:
                self._file = open(self.run.folder / "steps.jsonl", "xb", buffering=0)  # noqa: SIM115 - for the whole run
            except FileExistsError:
                raise Refusal(
                    f"{self.run.folder}: another run has started in this folder. Use another --output-dir"
                ) from None
            files.write_json(self.run.folder / "config.json", self._configuration)
            # Delete the record of a run whose steps.jsonl this run has just replaced. That run notices the new
            # config.json and writes nothing more.
            (self.run.folder / "record.json").unlink(missing_ok=True)

    def resume_from(self, progress: Progress) -> None:
        """Continue with the results of the process that wrote the checkpoint."""
        self.lines, self.evaluation = progress.steps, progress.evaluation
        self._started -= progress.wall_seconds
        self._facts |= {"resumed_at": progress.resumed_at, "continues": progress.continues}
        self._facts["code"] = [*progress.code, *self._facts["code"]]
        self._append(self.lines)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of training up to the last step, summed over all processes of a resumed run.

        It is 0 before the first step.
        """
        return self.lines[-1]["elapsed_seconds"] if self.lines else 0.0

    @property
    def code(self) -> schema.Code:
        """The version of the code and the processor of this process. Only rank 0 has it."""
        code: schema.Code = self._facts["code"][-1]
        return code

    def progress(self) -> Progress:
        """Return the results that another process needs to resume the run from here."""
        return Progress(
            steps=self.lines,
            evaluation=self.evaluation,
            wall_seconds=time.perf_counter() - self._started,
            resumed_at=self._facts.get("resumed_at", []),
            code=self._facts["code"],
            continues=self._facts.get("continues"),
            initial_sha256=self._facts["initial_parameters"].sha256,
            data=self._facts["data"],
        )

    def add(self, line: dict[str, Any]) -> None:
        """Append the results of one step to the journal. Every rank must pass the same results.

        Raises Failed if the loss is not finite, or if the gradient norm is zero or not finite. Raises OutputFailed if
        the run directory was removed or cannot be written to.
        """
        if self._is_removed():
            raise rank_failures.removed_folder(self.run.own_folder)
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in line.items()}
        self._append([finite])
        self.lines.append(finite)
        if not math.isfinite(line["loss"]):
            raise Failed(f"step {line['step']}: the loss is {line['loss']}")
        norm = line["grad_norm"]
        if norm is not None and (not math.isfinite(norm) or norm == 0):
            raise Failed(f"step {line['step']}: the gradient norm is {norm}")
        self._accelerator.log({k: v for k, v in finite.items() if v is not None}, step=line["step"])

    def _append(self, lines: list[dict[str, Any]]) -> None:
        """Write complete lines to steps.jsonl on rank 0. Raises OutputFailed if the disk cannot take all of them.

        In that case none of the lines remains in the file.
        """
        if self._file is None:
            return
        whole = self._file.tell()
        unwritten = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        with rank_failures.explain_write_errors(self.run.folder):
            try:
                while unwritten:
                    unwritten = unwritten[self._file.write(unwritten) :]
            except OSError:
                self._file.truncate(whole)
                raise

    def _is_removed(self) -> bool:
        handles = [] if self._file is None else [self._file.fileno()]
        return self._folder is not None and files.is_removed(self._folder, *handles)

    def add_evaluation(self, step: int, result: dict[str, float]) -> None:
        """Append the results of one evaluation to the journal. Raises Failed if the loss is not finite.

        Other metrics that are not finite become None, for instance a perplexity that is too large.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in result.items()}
        self.evaluation.append({"step": step, **finite})
        if finite["loss"] is None:
            raise Failed(f"step {step}: the evaluation loss is {result['loss']}")

    def total(self, name: Literal["tokens", "samples"]) -> int:
        """Return the sum of one field over all steps."""
        return sum(line[name] for line in self.lines)

    def other_machines(self) -> list[dict[str, Any]] | None:
        """Return the descriptions of all machines except that of rank 0, in the order of the machines.

        None if there is only one machine. Collective: every rank must call this.
        """
        if self.run.num_machines == 1:
            return None
        from accelerate.utils import gather_object

        described = gather_object([machine.describe() if self.run.is_first_of_machine(self.rank) else None])
        return [machine_described for machine_described in described if machine_described][1:]

    def write(self, status: str, **facts: Any) -> None:
        file, self._file = self._file, None  # if this is interrupted, `fail` calls it again
        if file:
            with file:
                os.fsync(file.fileno())  # after a power cut, the steps of a record exist too
            if status != "ok":  # the run may have ended after writing a line, before appending it here
                written = (_content(self.run.folder / "steps.jsonl") or b"").splitlines(keepends=True)
                further = written[len(self.lines) :]
                self.lines += [json.loads(line) for line in further if line.endswith(b"\n")]
        tied = digests_of_files(self.run.folder, self.lines, self._configuration, is_result=status == "ok")
        # one of an earlier attempt was deleted before
        if status == "ok" and (self.run.folder / "record.json").exists():
            raise Failed(f"{self.run.folder}: another run has meanwhile written its record into this folder")
        earlier = {**self._facts, **tied, **facts, "status": status}
        schema.write(
            self.run.folder,
            schema.Record(
                wall_seconds=time.perf_counter() - self._started,
                steps_done=len(self.lines),
                final_loss=self.lines[-1]["loss"] if self.lines else None,
                evaluation=self.evaluation,
                machine={**machine.describe(), **memory_limits.described},
                **earlier,
            ),
        )

    def fail(self, error: BaseException) -> BaseException:
        """Record a run that failed, and return the error that caused the failure.

        The returned error differs from `error` if its cause is known to be another one, such as a full disk or a
        missing rank. This is not collective: it waits only a few seconds for reports of other ranks.
        """
        # The launcher ends all ranks as soon as one has ended. Ignore its signals, so that this rank can still write
        # its report.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if (self.run.folder / "record.json").exists():  # the run succeeded; the error came later
            return error
        if self.rank and self.observer is None and isinstance(error, Interrupted):
            return error  # nothing had begun; rank 0 reports why, and a refused run must leave no files
        if not self.has_folder or _is_of_another_run(self.run.folder, self._configuration):
            return error
        at, error = time.time(), rank_failures.cause_of(error, self.run, self._is_removed())
        try:
            self.run.own_folder.mkdir(parents=True, exist_ok=True)
            self.run.remove_scratch()
            error = self._with_others(error, at)
            if self.rank == 0:
                self._record(self._own(error, at))
        except OSError as unwritten:  # the record cannot be written, so report that instead
            if not isinstance(error, OutputFailed):
                message = f"{unwritten.strerror} while recording {type(error).__name__}: {error}"
                error = OutputFailed(f"{self.run.folder}: {message}")
        return error

    def _with_others(self, error: BaseException, at: float) -> BaseException:
        """Report the error to the other ranks, and return the cause that the reports of all ranks show together.

        Raises OSError if the report cannot be written, for instance because the disk is full.
        """
        several = self.run.num_machines > 1
        if self.rank or several or isinstance(error, Stalled):
            self._reports.post(self.rank, self._own(error, at))
        if isinstance(error, Stalled):
            missing = self._reports.missing()
            error = rank_failures.stalled_by(missing, self.run)
        elif isinstance(error, PeerLost) and several:  # on one machine, the launcher reports which rank ended
            missing = self._reports.missing()
            error = rank_failures.lost_ranks(missing, self.run) if missing else error
        else:
            return error
        if self.rank and 0 in missing:
            self._reports.post(self.rank, self._own(error, at))
        return error

    def _own(self, error: BaseException, at: float) -> dict[str, Any]:
        """Return this rank's report of its failure."""
        message = files.redact_paths(f"{type(error).__name__}: {error}"[:2000])
        return {"at": at, "status": _status(error), "step": self.step, "error": message}

    def _record(self, own: dict[str, Any]) -> None:
        """Write the record with the failure of the rank that failed first.

        The error of this rank may only be a consequence.
        """
        time.sleep(2 if self._facts["world_size"] > 1 else 0)
        reports = self._reports.read().values()
        # If several ranks waited in vain, use this rank's report, which names the missing ranks.
        others = [report for report in reports if (report["status"], own["status"]) != ("stalled", "stalled")]
        first = min([own, *others], key=lambda report: report["at"])
        memory = memory_of(first["error"]) if first["status"] == "out_of_memory" else None
        failure = schema.Failure(step=first["step"], error=first["error"], memory=memory)
        self.write(first["status"], failure=failure)
        self._reports.remove()

    def discard(self) -> None:
        """Remove the files of a refused run. Files that existed before the run are kept.

        Only the first rank of each machine removes files.
        """
        if not self.run.is_first_of_machine(self.rank) or not self.run.folder.exists():
            return
        self.run.remove_scratch()
        remove_empty(self._created)


def _status(error: BaseException) -> str:
    import torch

    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return "interrupted"
    for kind, status in ((Stalled, "stalled"), (OutputFailed, "killed"), (MachineLost, "killed")):
        if isinstance(error, kind):
            return status
    return "out_of_memory" if isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(str(error)) else "failed"


# ---------------------------------------------------------------- whether the files are what this run wrote


def digests_of_files(
    folder: Path, lines: list[dict[str, Any]], configuration: dict[str, Any] | None, is_result: bool
) -> dict[str, str | None]:
    """Return the SHA-256 digests of steps.jsonl and config.json for the record.

    A digest is None if the file is missing.

    `lines` and `configuration` are the content that this run wrote. If `is_result`, Failed is raised if the files
    contain something else.
    """
    steps, config = _content(folder / "steps.jsonl"), _content(folder / "config.json")
    if is_result:
        _check(folder / "steps.jsonl", steps, lines)
        if configuration is not None:
            _check(folder / "config.json", config, [configuration])
        numbers = [line["step"] for line in lines]
        if numbers != list(range(1, len(lines) + 1)):
            raise Failed(f"{folder / 'steps.jsonl'}: its steps are not numbered from 1 to {len(lines)} without gaps")
    return {
        "steps_sha256": None if steps is None else hashlib.sha256(steps).hexdigest(),
        "config_sha256": None if config is None or configuration is None else hashlib.sha256(config).hexdigest(),
    }


def _is_of_another_run(folder: Path, configuration: dict[str, Any] | None) -> bool:
    """Return whether another run has replaced this run's config.json.

    False if this run wrote none (`configuration` is None).
    """
    content: Any = None
    with suppress(ValueError):
        content = json.loads(_content(folder / "config.json") or b"null")
    if configuration is None or not isinstance(content, dict):
        return False
    return bool(content.get("writer") != configuration["writer"])


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _check(path: Path, content: bytes | None, written: list[Any]) -> None:
    """Raise Failed unless a file contains the JSON values that this run wrote."""
    if content is None:
        raise Failed(f"{path}: another program has removed this file, which this run had written")
    try:
        whole = [json.loads(content)] if path.suffix == ".json" else [json.loads(line) for line in content.splitlines()]
    except ValueError:
        whole = None
    if whole != written:
        raise Failed(f"{path}: another program has changed this file, which this run had written")
