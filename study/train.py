"""Train one workload under one strategy, prove which strategy it was, and leave a record.

    accelerate launch --config_file accelerate_configs/zero3.yaml study/train.py [--preset paper] [--seed 1] ...

Exit status: 0 the record is complete and ok; 1 the run failed, and the record says how; 2 the request was refused.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.config import RunConfig, build_config, parse_flags
from study.errors import Refusal
from study.preflight import extensions
from study.preflight.checks import check, check_output_dir
from study.run import default_output_dir, remove_swap_folder
from study.running import bound
from study.running.ending import FAILED, REFUSED
from study.running.launch import QUIET
from study.training.accelerators import build_accelerator
from study.training.gradient_norm import gradient_norm_reader
from study.training.journal import SMALLEST_SWAP_BYTES, Built, Failed, Interrupted, Journal
from study.training.request import Launch, read_launch

if TYPE_CHECKING:
    pass


def main() -> None:
    """Run, and end in a way that cannot turn a finished run into a failed one."""
    bound.die_with_parent()  # where the launcher has ended before, `read_launch` finds none and refuses
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    status = 0
    local_rank = os.environ.get("LOCAL_RANK", "0")  # as it was launched
    try:
        run(sys.argv[1:])
    except Refusal as refusal:
        if local_rank != "0":
            # Rank 0 has the word, and the launcher ends all ranks once one has ended; unless only this one refuses.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(2)
        print(f"{REFUSED}{refusal}", file=sys.stderr)
        status = 2
    except (Failed, Interrupted) as failure:
        if local_rank == "0":
            print(f"{FAILED}{failure}", file=sys.stderr)
        status = 1
    except Exception:
        traceback.print_exc()
        status = 1
    except SystemExit as end:  # --help
        status = int(end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    # A gloo worker thread that meets the finalising interpreter aborts it, one run in five (pytorch #190489): by now
    # every file is closed and every rank has passed the last barrier, so there is nothing left to finalise.
    os._exit(status)


def _interrupt(number: int, _: Any) -> None:
    name = signal.Signals(number).name
    raise Interrupted(f"interrupted by {name}, from the user or from the launcher because another process ended")


def run(arguments: list[str]) -> None:
    """Check, build, train, evaluate, record. Raises Refusal with nothing left behind."""
    extensions.use_own_folder()
    os.environ.update(QUIET | dict(os.environ))
    config = build_config(**parse_flags(arguments))
    launch = read_launch()
    run_dir = config.output_dir or default_output_dir(config, launch)
    check_output_dir(run_dir)
    check(config, launch.strategy, launch.num_processes, launch.num_machines)

    journal = Journal(config, launch, run_dir, arguments)
    try:
        built = build(config, launch, run_dir)
        journal.open(built)
        train(built, journal)
        finish(built, journal)
    except Refusal:
        journal.discard()
        raise
    except BaseException as error:
        journal.fail(error)
        raise


def build(config: RunConfig, launch: Launch, run_dir: Path) -> Built:
    """Build everything, and refuse to go on unless the engine is what was asked for."""
    import torch
    import transformers
    from accelerate.utils import gather_object
    from torch.utils.data import DataLoader

    from study.training import proof, weights
    from study.training.measure.memory import PhaseMemory
    from study.training.order import TrainingOrder
    from study.workloads import WORKLOADS, load_metric

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    accelerator = build_accelerator(config, launch, launch.num_processes, run_dir)
    if accelerator.num_processes != launch.num_processes:
        raise Refusal(
            f"world_size: the run asks for {launch.num_processes}, the engine has {accelerator.num_processes}; "
            f"change distributed_type in {launch.strategy.path}"
        )
    micro_batch_size, accumulation = config.batches(launch.num_processes)
    accelerator.print(
        f"{config.workload} {config.size} under {launch.strategy.name}: {launch.num_processes} process(es) x "
        f"{micro_batch_size} sequence(s) x {accumulation} micro step(s) = {config.global_batch_size} sequences of "
        f"{config.sequence_length} tokens a step, {config.num_steps} steps, {config.precision}"
    )

    if accelerator.is_main_process:  # what an unfinished run left here is not this one's
        for stale in [run_dir / "steps.jsonl", *run_dir.glob("failure-rank*.json")]:
            stale.unlink(missing_ok=True)
        shutil.rmtree(run_dir / "initial_weights", ignore_errors=True)
        remove_swap_folder(config, launch.strategy, run_dir)
    workload = WORKLOADS[config.workload]
    splits = workload.load(config)
    memory = PhaseMemory(accelerator.device, config.measure)
    memory.begin("built")
    model = weights.build_model(accelerator, workload, config, splits, launch.strategy, run_dir)
    if config.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        weights.parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
    order = TrainingOrder(len(splits.train), config.global_batch_size, config.num_steps, config.seed)
    pinned = accelerator.device.type == "cuda"
    train_batches = DataLoader(splits.train, micro_batch_size, sampler=order, pin_memory=pinned)
    eval_batches = DataLoader(splits.evaluation, micro_batch_size, pin_memory=pinned)

    memory.begin("prepared")
    model, optimizer, train_batches, eval_batches = accelerator.prepare(model, optimizer, train_batches, eval_batches)
    found = proof.read_back(accelerator, model, optimizer, config, launch)
    proof.verify(found, config, launch, run_dir)
    gpus = gather_object([proof.gpu_of(accelerator.device)])
    found = found.model_copy(update={"num_gpus": proof.verify_gpus(gpus, config, launch)})
    memory.begin(None)
    # Dropout's stream starts here, whatever random numbers building the model took.
    torch.manual_seed(config.seed * 1_000_003 + accelerator.process_index)
    return Built(
        config=config,
        launch=launch,
        run_dir=run_dir,
        accelerator=accelerator,
        workload=workload,
        splits=splits,
        model=model,
        optimizer=optimizer,
        train_batches=train_batches,
        eval_batches=eval_batches,
        metric=load_metric(workload.METRIC) if accelerator.is_main_process else None,
        memory=memory,
        proof=found,
        initial_parameters=weights.checksum(model),
        planned_tokens=sum(int(splits.train[i]["attention_mask"].sum()) for i in order),
    )


def train(built: Built, journal: Journal) -> None:
    """Train all steps: the study's only training loop."""
    import torch
    from tqdm.auto import tqdm

    from study.training.measure.clock import make_clock
    from study.training.measure.energy import energy_joules
    from study.training.measure.memory import swap_traffic

    config, accelerator, workload = built.config, built.accelerator, built.workload
    model, optimizer, observer = built.model, built.optimizer, journal.observer
    _, accumulation = config.batches(accelerator.num_processes)
    clip_and_measure_norm = gradient_norm_reader(accelerator, model, config)
    now = make_clock(accelerator.device)
    batches = iter(built.train_batches)
    batch = next(batches)
    steps = range(1, config.num_steps + 1)
    journal.swapped = swap_traffic()
    journal.energy = energy_joules(accelerator.device)
    model.train()
    began = now()
    for step in tqdm(steps, disable=not accelerator.is_main_process, unit="step", mininterval=1.0):
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
                asked = time.perf_counter()
                batch = next(batches, None)  # its copy runs while a GPU still computes; None after the last
                waited += time.perf_counter() - asked
            seconds = now() - start

        norm = float(gradient_norm)
        overflowed = config.precision.startswith("fp16") and not math.isfinite(norm)  # its loss scaler skips the update
        skipped = overflowed or accelerator.optimizer_step_was_skipped
        each = torch.stack([loss_sum / accumulation, tokens, *loss_sum.new_tensor([samples, seconds, waited])])
        every = accelerator.gather(each.unsqueeze(0)).double().cpu()  # (world_size, 5)
        journal.add(
            {
                "step": step,
                "loss": every[:, 0].mean().item(),
                "learning_rate": learning_rate,
                "grad_norm": None if skipped else norm,
                "seconds": every[:, 3].max().item(),  # the step is over when its slowest rank is
                "elapsed_seconds": time.perf_counter() - began,  # since training began, all between steps included
                "data_wait_seconds": every[:, 4].max().item(),
                "tokens": int(every[:, 1].sum()),
                "samples": int(every[:, 2].sum()),
            }
        )
        if step == config.num_steps or (config.eval_every and step % config.eval_every == 0):
            journal.add_evaluation(step, evaluate(built))
            model.train()
    journal.swapped = tuple(after - before for before, after in zip(journal.swapped, swap_traffic(), strict=True))
    if journal.energy is not None:
        journal.energy = energy_joules(accelerator.device) - journal.energy


def evaluate(built: Built) -> dict[str, float]:
    """Evaluate on the held-out examples; the samples that fill up the last batch are dropped. Collective."""
    import torch

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
    result = {"loss": torch.cat(losses).double().mean().item()}
    if built.metric is not None:
        result |= {name: float(value) for name, value in built.metric.compute().items()}
    built.memory.begin(interrupted_phase)
    return result


def finish(built: Built, journal: Journal) -> None:
    """Check that the run trained, gather every rank's facts, and write the record on rank 0. Collective."""
    from accelerate.utils import gather_object

    from study.training import weights
    from study.training.measure import clock
    from study.training.measure.flops import model_flops_per_sequence

    config, accelerator, observer = built.config, built.accelerator, journal.observer
    built.memory.begin(None)
    final = weights.checksum(built.model)
    tokens = sum(line["tokens"] for line in journal.lines)
    if final.sha256 == built.initial_parameters.sha256:
        raise Failed(f"the parameters did not move in {config.num_steps} steps")
    if tokens != built.planned_tokens:
        raise Failed(f"trained on {tokens} tokens, {built.planned_tokens} were planned")
    mine = {
        "states": observer.model_states,
        "resting": observer.resting_states,
        "peaks": built.memory.phases(),
        "swapped": journal.swapped,
        "energy": journal.energy,
    }
    ranks = gather_object([mine])
    proof = observer.proof
    if proof.moment_dtypes not in (None, ["float32"]):
        raise Failed(f"moment_dtypes: the study's AdamW keeps ['float32'], the engine has {proof.moment_dtypes}")
    if built.launch.strategy.offloads_to_nvme:
        read, written = ([rank["swapped"][i] for rank in ranks] for i in (0, 1))
        if min(written) < SMALLEST_SWAP_BYTES:
            raise Failed(f"NVMe offload was asked, and the ranks wrote {written} bytes: nothing was swapped")
        proof = proof.model_copy(update={"swap_bytes_read": read, "swap_bytes_written": written})
    if config.save_model:
        weights.save(built.model, built.run_dir / "checkpoints", accelerator.is_main_process)
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        remove_swap_folder(config, built.launch.strategy, built.run_dir)
        with weights.unpartitioned():
            flops = model_flops_per_sequence(built.workload, config, built.splits)
        journal.write(
            "ok",
            proof=proof,
            model_flops_per_sequence=flops,
            model_state_bytes=[rank["states"] for rank in ranks] if config.measure else None,
            resting_state_bytes=[rank["resting"] for rank in ranks] if config.measure else None,
            peak_memory=[rank["peaks"] for rank in ranks] if config.measure else None,
            collectives_per_step=observer.collectives,
            energy_joules=None if journal.energy is None else [rank["energy"] for rank in ranks],
            final_parameters=final,
            tokens=tokens,
            samples=sum(line["samples"] for line in journal.lines),
            timing=clock.summarize(journal.lines, config.timing_warmup_steps, observer.probed_steps),
        )
        print(f"{built.run_dir / 'record.json'}: final loss {journal.lines[-1]['loss']:.4f}", flush=True)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
