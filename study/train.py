"""Train one model under one strategy, verify the strategy, and write a record.

    accelerate launch --config_file accelerate_configs/zero3.yaml study/train.py [--preset paper] [--seed 1] ...

Exit status: 0 if the run succeeded, 1 if it failed (the record describes the failure), 2 if the request was refused.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Remove this file's folder and the current folder from the search path, so that no file there replaces a standard
    # module. Python adds the first one, and accelerate's DeepSpeed launcher the second one.
    _own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) not in (_own, os.getcwd())]
    sys.path.append(os.path.dirname(_own))

import math
import signal
import time
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config import build_config, parse_flags
from study.records import imports
from study.run import Run
from study.running import caches, checks, lock, memory_limits
from study.running.launch import QUIET_ENVIRONMENT
from study.running.outcome import FAILED, REFUSED
from study.training import rendezvous
from study.training.journal import SMALLEST_SWAP_BYTES, Journal
from study.training.request import check_as_launched, requested_run
from study.training.setup import Built, build, start
from study.training.warnings_log import LibraryWarnings, tell_launcher, tidy_launcher
from zero_study import processes
from zero_study.engines import extensions
from zero_study.errors import Failed, Interrupted, Refusal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from study.records.schema import Checksum, Proof
    from study.training.checkpoints import Checkpoints
    from study.training.observer import Observed


def main() -> None:
    """Run the training of the command line and exit the process with its status.

    The process exits without Python's finalization, which could otherwise turn a finished run into a failed one.
    """
    processes.die_with_parent()  # `requested_run` refuses if the launcher has ended already
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    status, cause = 0, None
    local_rank = os.environ.get("LOCAL_RANK", "0")  # as the launcher set it
    try:
        run(sys.argv[1:])
    except Refusal as refusal:
        if local_rank != "0":
            # Only rank 0 should print the message. If rank 0 refuses too, the launcher ends this rank within two
            # seconds. Otherwise, this rank prints the message itself.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(2)
        status, cause = 2, f"{REFUSED}{refusal}"
        _say(cause)
    except (Failed, Interrupted) as failure:
        status, cause = 1, f"{FAILED}{failure}"
        if local_rank == "0":
            _say(cause)
    except Exception as error:
        status, cause = 1, f"{FAILED}{type(error).__name__}: {error}"
        _say(traceback.format_exc())
    except SystemExit as end:  # --help
        status = int(end.code or 0)
    with suppress(OSError):  # a full disk
        if cause is not None:
            tell_launcher(cause)
        else:
            tidy_launcher()
        sys.stdout.flush()
        sys.stderr.flush()
    # Skip Python's finalization, in which a gloo worker thread aborts the process in one of five runs (pytorch
    # #190489). Nothing is lost: every file is closed, and every rank has passed the last barrier.
    os._exit(status)


def _say(cause: str) -> None:
    """Print a line to stderr. An OSError is ignored, because stderr may be a file on a full disk."""
    with suppress(OSError):
        print(cause, file=sys.stderr)


def _interrupt(number: int, _: Any) -> None:
    name = signal.Signals(number).name
    raise Interrupted(f"interrupted by {name}, from the user or from the launcher because another process ended")


def run(arguments: list[str]) -> None:
    """Check the request, then build, train and evaluate the model, and write the record.

    Raises Refusal if the request cannot be run. A refused run leaves no files behind.
    """
    is_launched = any(name.startswith("ACCELERATE_") for name in os.environ)
    if is_launched and os.environ.get("RANK", "0") == "0" and not {"--help", "--help-all", "-h"} & {*arguments}:
        print("Loading PyTorch and the engine, which takes about 10 seconds ...", file=sys.stderr, flush=True)
    imports.check(Path(sys.argv[0]))
    extensions.use_own_folder()
    os.environ.update(QUIET_ENVIRONMENT | caches.outside_home() | dict(os.environ))
    library_warnings = LibraryWarnings()
    requested = requested_run(build_config(**parse_flags(arguments)))
    memory_limits.apply(requested, rank=int(os.environ.get("RANK", "0")))
    check_as_launched(requested.strategy, os.environ)
    checks.check_folder(requested)
    # Only rank 0 needs the lock, because it writes for all ranks. If zero-study launched the run, it has locked the
    # folder already.
    with lock.locked_run(requested.folder) if os.environ.get("RANK", "0") == "0" else nullcontext():
        try:
            checks.check_folder(requested)  # another run may have finished there in the meantime
            checks.check(requested)
            is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
            checks.provide_extensions(requested, extensions.say_on_stderr if is_first_here else lambda line: None)
        except Refusal as refusal:
            rendezvous.refuse_to_join(requested, refusal)
            raise
        _run(requested, library_warnings, rendezvous.join(requested))


def _run(requested: Run, library_warnings: LibraryWarnings, store: Store | None) -> None:
    journal = Journal(requested, store)
    try:
        accelerator = start(requested)
        journal.has_folder = True
        if accelerator.is_main_process:
            checks.check_folder(requested)  # without a lock, another run may have ended there
        built = build(requested, accelerator)
        from study.training.checkpoints import Checkpoints

        checkpoints = Checkpoints(built, journal)
        checkpoints.check()
        journal.open(built)
        library_warnings.write_to(requested.own_folder)
        train(built, journal, checkpoints)
        finish(built, journal, checkpoints)
    except Refusal:
        journal.discard()
        raise
    except BaseException as error:
        cause = journal.fail(error)
        with suppress(OSError):
            # If another rank refused, this rank must not create the folder, nor write into the folder of another run.
            if requested.own_folder.exists() and journal.has_folder:
                library_warnings.write_to(requested.own_folder)
        if cause is error:
            raise
        raise cause from None


def train(built: Built, journal: Journal, checkpoints: Checkpoints) -> None:
    """Train all steps. This is the only training loop of the study."""
    import torch
    from tqdm.auto import tqdm

    from study.training import weights
    from study.training.optimizer_steps import gradient_norm_reader, make_clock

    config, accelerator, workload = built.run.config, built.accelerator, built.workload
    model, optimizer, observer = built.model, built.optimizer, journal.observer
    accumulation = built.run.gradient_accumulation_steps
    clip_and_measure_norm = gradient_norm_reader(accelerator, model, config)
    now = make_clock(accelerator.device)
    batches = iter(built.train_batches)
    batch: Any = next(batches, None)
    steps_done = checkpoints.load()
    if config.eval_every and not steps_done:
        journal.add_evaluation(0, evaluate(built))
    observer.begin()
    model.train()
    began = now() - journal.elapsed_seconds
    steps = range(steps_done + 1, config.num_steps + 1)
    bar = tqdm(steps, disable=not accelerator.is_main_process, unit="step", mininterval=1.0)
    for step in bar:
        journal.step = step
        learning_rate = config.learning_rate_at(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        loss_sum = torch.zeros((), device=accelerator.device)
        tokens = torch.zeros((), device=accelerator.device)
        samples, waited = 0, 0.0

        with observer.step(step):
            start = now()
            for _ in range(accumulation):
                with accelerator.accumulate(model):
                    loss = workload.loss(model(**workload.inputs(batch)), batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        gradient_norm = clip_and_measure_norm()
                    optimizer.step()
                    optimizer.zero_grad()
                loss_sum += loss.detach()
                tokens += batch["attention_mask"].sum()
                samples += len(batch["labels"])
                wait_began = time.perf_counter()
                batch = next(batches, None)  # copied while the GPU still computes; None after the last
                waited += time.perf_counter() - wait_began
            seconds = now() - start

        norm = float(gradient_norm)
        overflowed = config.precision.startswith("fp16") and not math.isfinite(norm)  # the loss scaler skips it
        skipped = overflowed or accelerator.optimizer_step_was_skipped
        each = torch.stack([loss_sum / accumulation, tokens, *loss_sum.new_tensor([samples, seconds, waited])])
        every = accelerator.gather(each.unsqueeze(0)).double().cpu()  # (world_size, 5)
        journal.add(
            {
                "step": step,
                "loss": every[:, 0].mean().item(),
                "learning_rate": learning_rate,
                "grad_norm": None if skipped else norm,
                "seconds": every[:, 3].max().item(),  # a step ends when its slowest rank ends
                "elapsed_seconds": time.perf_counter() - began,  # since training began, with the time between steps
                "data_wait_seconds": every[:, 4].max().item(),
                "tokens": int(every[:, 1].sum()),
                "samples": int(every[:, 2].sum()),
            }
        )
        bar.set_postfix_str(f"loss {every[:, 0].mean():.4f}", refresh=False)
        if config.digest_every and (step % config.digest_every == 0 or step == config.num_steps):
            built.digests.append(weights.digest_states(step, model, optimizer))
        if step == config.num_steps or (config.eval_every and step % config.eval_every == 0):
            journal.add_evaluation(step, evaluate(built))
            model.train()
        checkpoints.write_where_due(step)


def evaluate(built: Built) -> dict[str, float]:
    """Return the metrics of the model on the held-out examples, by name. The name of the mean loss is "loss".

    The samples that pad the last batch are dropped. Collective: every rank must call this.
    """
    import torch

    from study.training import accelerators

    interrupted_phase = built.memory.current
    built.memory.begin("evaluation")
    built.model.eval()
    losses = []
    with torch.no_grad():
        for batch in built.eval_batches:
            output = built.model(**built.workload.inputs(batch))
            rows = (built.workload.sequence_losses(output, batch), *built.workload.predictions(output, batch))
            loss, predictions, references = built.accelerator.gather_for_metrics(rows)
            losses.append(loss.cpu())
            if built.metric is not None:
                built.metric.add_batch(predictions=predictions.cpu(), references=references.cpu())
    accelerators.reshard(built.model)
    result = {"loss": torch.cat(losses).double().mean().item()}
    if built.metric is not None:
        result |= {name: float(value) for name, value in built.metric.compute().items()}
    built.memory.begin(interrupted_phase)
    return result


def finish(built: Built, journal: Journal, checkpoints: Checkpoints) -> None:
    """Check that the model was trained, gather the measurements of every rank, and write the record on rank 0.

    Collective: every rank must call this.
    """
    from accelerate.utils import gather_object

    from study.training import weights

    built.memory.begin(None)
    final = weights.checksum(built.model)
    check_trained(built, journal, final)
    ranks: list[Observed] = gather_object([journal.observer.observed()])
    machines = journal.other_machines()
    proof = complete_proof(built, journal.observer.proof, ranks)
    for tracker in built.accelerator.trackers:
        tracker.finish()
    built.accelerator.wait_for_everyone()
    if built.run.is_first_of_machine(built.accelerator.process_index):
        built.run.remove_swap_folder()
    if built.accelerator.is_main_process:
        from study.compare import summary  # imported here because only rank 0 needs it

        write_record(built, journal, checkpoints, proof, final, ranks, machines)
        print(summary.of_run(built.run.folder), flush=True)
        if built.run.config.save_model:
            checkpoints.export()
    built.accelerator.wait_for_everyone()


def check_trained(built: Built, journal: Journal, final: Checksum) -> None:
    """Raise Failed if no parameter changed, or if the number of trained tokens is not the planned one."""
    if final.sha256 == built.initial_parameters.sha256:
        raise Failed(f"no parameter changed in {built.run.config.num_steps} steps")
    tokens = journal.total("tokens")
    if tokens != built.planned_tokens:
        raise Failed(f"the run trained on {tokens} tokens, but {built.planned_tokens} were planned")


def complete_proof(built: Built, proof: Proof, ranks: list[Observed]) -> Proof:
    """Return the proof of a run, with the bytes that each rank swapped if the strategy offloads to NVMe.

    The proof is returned unchanged for other strategies. Raises Failed if Adam's moments do not have the type that the
    study's AdamW uses, or if a rank of an NVMe strategy swapped nothing.
    """
    moment_dtype = "float64" if built.run.config.precision == "fp64" else "float32"
    if proof.moment_dtypes not in (None, [moment_dtype]):
        raise Failed(
            f"moment_dtypes: the study's AdamW keeps {[moment_dtype]}, but the engine has {proof.moment_dtypes}"
        )
    if not built.run.strategy.offloads_to_nvme:
        return proof
    read, written = [rank.swap_bytes_read for rank in ranks], [rank.swap_bytes_written for rank in ranks]
    if min(written) < SMALLEST_SWAP_BYTES:
        if built.run.config.lora_rank is not None:
            raise Failed(
                f"the ranks wrote only {written} bytes to the disk, because DeepSpeed swaps no shard below 1 MiB and "
                "the adapter's shards are smaller. Use zero3_cpu_offload, or a larger --lora-rank."
            )
        raise Failed(
            f"NVMe offload was requested, but nothing was swapped, because the ranks wrote only {written} bytes"
        )
    return proof.model_copy(update={"swap_bytes_read": read, "swap_bytes_written": written})


def write_record(
    built: Built,
    journal: Journal,
    checkpoints: Checkpoints,
    proof: Proof,
    final: Checksum,
    ranks: list[Observed],
    machines: list[dict[str, Any]] | None,
) -> None:
    """Write the record of a successful run. Only rank 0 calls this."""
    from study.training import optimizer_steps, weights

    config, observer = built.run.config, journal.observer
    with weights.unpartitioned():
        flops = optimizer_steps.model_flops_per_sequence(built.workload, config, built.splits)
    timing = optimizer_steps.summarize(
        journal.lines, config.timing_warmup_steps, observer.probed_steps, journal.progress().resumed_at
    )
    journal.write(
        "ok",
        proof=proof,
        model_flops_per_sequence=flops,
        **measured_memory(ranks, config.measure),
        collectives_per_step=observer.collectives,
        energy_joules=None if ranks[0].energy_joules is None else [rank.energy_joules for rank in ranks],
        final_parameters=final,
        digests=built.digests or None,
        tokens=journal.total("tokens"),
        samples=journal.total("samples"),
        timing=timing,
        checkpointing=checkpoints.facts(),
        load=observer.load(ranks),
        other_machines=machines,
        network=[rank.network for rank in ranks if rank.network] or None,
    )


def measured_memory(ranks: list[Observed], is_measured: bool) -> dict[str, Any]:
    """Return the memory fields of a run's record, measured on each rank.

    Each field has one value per rank, or is None if the run does not measure.
    """
    if not is_measured:
        return {"model_state_bytes": None, "resting_state_bytes": None, "peak_memory": None}
    return {
        "model_state_bytes": [rank.model_states for rank in ranks],
        "resting_state_bytes": [rank.resting_states for rank in ranks],
        "peak_memory": [rank.peaks for rank in ranks],
    }


if __name__ == "__main__":
    main()
