"""Say in sentences what public runs answer: about A100 and H100, one GPU and several, DDP, ZeRO and FSDP."""

from __future__ import annotations

from functools import cache

import numpy as np

from study.compare import public_cards, public_comparisons, public_pairs
from study.compare.differences import t_interval
from study.public_runs import archive
from study.report.public_figures import signed
from zero_study.public_runs.schema import PublicRun
from zero_study.terminal import percent

REGISTERED = "GPU seconds per sample, all intervals"  # until values were known
MORE_GPUS = "one-and-eight-h100-prefix"
VERSIONS = ("one-and-eight-h100", MORE_GPUS)  # of the program
LIGHTNING = "lightning-minigpt"  # a source in which one program trained one model under several strategies
STRATEGIES = {
    "DDP": "DDP",
    "DeepSpeed-ZeRO-Stage-2": "ZeRO-2",
    "DeepSpeed-ZeRO-Stage-3": "ZeRO-3",
    "DeepSpeed-ZeRO-Stage-3-Offload": "ZeRO-3 with CPU offload",
}


@cache
def result(name: str) -> public_comparisons.Result:
    """Return the result of a comparison of public runs by its name."""
    (comparison,) = (candidate for candidate in public_comparisons.comparisons() if candidate.name == name)
    return public_comparisons.answer(comparison)


def difference(name: str, quantity: str) -> public_comparisons.Difference:
    """Return the difference of one quantity in a comparison of public runs."""
    (found,) = (candidate for candidate in result(name).differences if candidate.quantity == quantity)
    return found


@cache
def pairs_of(name: str) -> list[public_pairs.Pair]:
    """Return the pairs of a comparison of public runs by its name."""
    (comparison,) = (candidate for candidate in public_comparisons.paired() if candidate.name == name)
    return public_pairs.pairs_of(comparison, archive.source(comparison.source))


def spread_of(name: str, quantity: str) -> public_pairs.Spread:
    """Return the median and the ranges of one quantity over the pairs of a comparison."""
    spread = public_pairs.spread([getattr(pair, quantity) for pair in pairs_of(name)])
    assert spread is not None
    return spread


def cards() -> str:
    """Say how much longer an A100 takes than an H100, by the two sources with the most pairs."""
    pairs = spread_of("a100-h100-foundry", "time")
    return (
        f"In {pairs.num} pairs of FSDP trainings on one machine with eight GPUs, a step takes {pairs.median:.2f} times "
        f"as long on A100 as on H100 in the median ({pairs.least:.2f} to {pairs.most:.2f}; MosaicML, one run each, "
        "all stated settings equal). In small tests of Megatron-LM, the median is "
        f"{_medians('megatron')}, depending on the cluster with H100."
    )


def _medians(source: str) -> str:
    rows = [row for row in public_cards.rows() if row.comparison.source == source]
    medians = [row.spread.median for row in rows if row.quantity != REGISTERED]
    return f"{min(medians):.2f} to {max(medians):.2f}"


def _in_other_sources() -> str:
    least, most = (pick(row.spread.median for row in public_cards.rows() if row.repeats) for pick in (min, max))
    return (
        f"In other sources, in which more than the GPU differs, it is {least:.2f} to {most:.2f} (see the next section)."
    )


def more_about_cards() -> str:
    """Say how large the ratios are whose machines or batches differ, and which definition was changed."""
    bert = public_comparisons.groups(result("bert-a100-h100").comparison)
    h100, a100 = (members[0].setting for members in bert.values())
    registered = 1 + difference("zero3-a100-h100", REGISTERED).relative
    return (
        f"For LoRA of a 70B model under ZeRO-3, the ratio is {_medians('mlperf-llama2-lora')}, with different numbers "
        "of GPUs (Juniper, MLPerf® Training, unverified). The larger value, for 64 A100 and 32 H100, is "
        f"{registered:.2f} by the definition that was registered. When values were known, we changed this definition "
        f"to leave out intervals that contain an evaluation. For BERT-large, the ratio is {_medians('mlperf-bert')} "
        f"(MLPerf® Training, unverified), but the H100 have another batch (on eight GPUs {h100.global_batch_size} "
        f"instead of {a100.global_batch_size}) and another learning rate ({h100.learning_rate} instead of "
        f"{a100.learning_rate})."
    )


def lightning() -> str:
    """Say what memory and time the strategies need in the comparison of Lightning's developers."""
    measured = {name: of_lightning("1", entry) for entry, name in STRATEGIES.items()}
    settings = {(run.setting.gpu, run.setting.num_gpus, run.setting.parameters) for run in measured.values()}
    assert settings == {("A100", 8, 1_000_000_000)}
    peaks = [f"{run.totals['peak_allocated_bytes'] / 2**30:.1f} GiB under {name}" for name, run in measured.items()]
    seconds = [f"{run.totals['seconds_per_step']:.2f}" for run in measured.values()]
    return (
        "for a GPT with one billion parameters, the peak of allocated memory per GPU is "
        f"{', '.join(peaks[:-1])}, and {peaks[-1]}. A step takes {', '.join(seconds[:-1])} and {seconds[-1]} s. DDP "
        "has weights in fp32, and DeepSpeed in fp16."
    )


def _more_about_lightning() -> str:
    """Say in which sizes and with which engines sharding is faster than DDP in the same comparison."""
    smaller = [[of_lightning(size, entry) for size in ("250m", "500m")] for entry in list(STRATEGIES)[:2]]
    ddp, zero2 = ([run.totals["seconds_per_step"] for run in runs] for runs in smaller)
    assert all(theirs < ours for theirs, ours in zip(zero2, ddp, strict=True))
    return (
        "The precision of the weights is a part of the difference in memory. With 0.25 and 0.5 billion parameters, "
        "ZeRO-2 is faster than DDP. FairScale's sharded trainings of one billion parameters are faster than DDP, too "
        f"({_fairscale()})."
    )


def _fairscale() -> str:
    runs = [of_lightning("1", entry) for entry in ("Fully-Sharded-Training-Wrap", "Sharded-Training")]
    return ", ".join(
        f"{run.totals['seconds_per_step']:.2f} s and {run.totals['peak_allocated_bytes'] / 2**30:.1f} GiB"
        for run in runs
    )


def of_lightning(size: str, entry: str) -> PublicRun:
    """Return the run of Lightning's comparison with a size, such as "250m" or "1" (billion), and a strategy."""
    (run,) = (run for run in archive.source(LIGHTNING) if run.name == f"{size}-{entry}")
    return run


def one_and_two() -> str:
    """Say how full fine-tuning on one A100 and, with FSDP, on two A100 differs: its loss, time and memory."""
    pairs = pairs_of("fms-full-one-two")
    nats = np.array([pair.nats for pair in pairs if pair.nats is not None])
    models: dict[str, list[float]] = {}  # those that ran out of memory have no loss
    for pair in pairs:
        if pair.nats is not None:
            models.setdefault(pair.entry.split("/")[2], []).append(pair.nats)
    # The pairs of a model differ only in the batch and in kernels, so each model counts once.
    mean, low, high = t_interval(np.array([np.mean(values) for values in models.values()]))
    assert low is not None
    assert high is not None
    time, peak = (spread_of("fms-full-one-two", quantity) for quantity in ("time", "peak"))
    return (
        f"In {len(nats)} pairs of full fine-tunings with accelerate (IBM's fms-acceleration, {len(models)} models, 100 "
        "steps, weights in bf16, one run each), the mean training loss with FSDP on two A100 differs from that on one "
        f"A100 by {mean:+.4f} nats (95 % interval over models {low:+.4f} to {high:+.4f}). A step takes "
        f"{time.median:.2f} times as long ({time.tenth:.2f} to {time.ninetieth:.2f} in eight of ten pairs), and each "
        f"GPU needs {peak.median:.2f} times the memory for tensors. If FSDP has weights in fp32 instead, the loss "
        f"differs by {_nats('fms-full-masters-one-two'):+.3f}."
    ).replace("-0", "\N{MINUS SIGN}0")


def _nats(name: str) -> float:
    """Return the mean difference of the losses of a comparison of pairs, in nats per token."""
    return float(np.mean([pair.nats for pair in pairs_of(name) if pair.nats is not None]))


def eight() -> str:
    """Say how the training of modded-nanogpt on one H100 and on eight H100 differs: its loss, time and memory."""
    seconds = difference(MORE_GPUS, "seconds in all")
    before, after = (sum(values) / len(values) / 60 for values in (seconds.control, seconds.arm))
    return (
        f"modded-nanogpt takes {before:.1f} minutes on one H100 and {after:.1f} minutes on eight, with sharded "
        f"gradients and optimizer states ({len(seconds.control)} and {len(seconds.arm)} runs). The last held-out loss "
        f"differs by {_change(MORE_GPUS)}. The eight GPUs need "
        f"{percent(difference(MORE_GPUS, 'GPU seconds').relative)} more GPU time, and each needs "
        f"{percent(-difference(MORE_GPUS, 'peak of tensors').relative)} less memory for tensors. The releases of CUDA "
        "and PyTorch also differ."
    )


def _change(name: str) -> str:
    loss = difference(name, "last evaluation loss")
    assert loss.low is not None
    assert loss.high is not None
    return f"{signed(loss.relative)} (95 % interval {signed(loss.low)} to {signed(loss.high)})"


def _margin() -> str:
    losses = [difference(name, "last evaluation loss") for name in VERSIONS]
    assert {candidate.verdict for candidate in losses} == {"equivalent"}
    return (
        f"In an earlier version of the program, the loss differs by {_change(VERSIONS[0])}. Both intervals are within "
        f"the margin of {percent(min(loss.margin or 0 for loss in losses))}, which was chosen when the differences "
        "were known."
    )


def _fsdp() -> str:
    near, memory = (spread_of("ptd-ddp-fsdp-one-node", quantity) for quantity in ("time", "peak"))
    far = spread_of("ptd-ddp-fsdp-four-nodes", "time")
    return (
        f"On eight A100 of one machine, FSDP takes {near.median:.2f} times as long as DDP ({near.tenth:.2f} to "
        f"{near.ninetieth:.2f} in eight of ten settings, of {near.num}), and needs {memory.median:.2f} times the "
        f"memory ({memory.tenth:.2f} to {memory.ninetieth:.2f}). With eight A100 in four machines with 100 "
        f"Gbit/s between them, it takes {far.median:.2f} times as long (ptd_benchmark, 2021, before FSDP's release; "
        "SGD without optimizer states, one run each)."
    )


def _machines() -> str:
    nodes = spread_of("ptd-ddp-nodes", "time")
    return (
        f"In settings that FSDP also has, DDP on eight A100 takes {nodes.median:.1f} times as long on four machines as "
        f"on one ({nodes.tenth:.1f} to {nodes.ninetieth:.1f} in eight of ten settings). Between the machines are 100 "
        "Gbit/s (ptd_benchmark)."
    )


def answers() -> list[str]:
    """Return the answers that the notebook `gpus` begins with, the strongest evidence first."""
    return [
        f"**A100 or H100?** {cards()} {_in_other_sources()}",
        f"**One GPU or two?** {one_and_two()}",
        f"**One GPU or eight?** {eight()} {_margin()}",
        f"**DDP or ZeRO?** On eight A100 (Lightning, 2021, one run each): {lightning()} {_more_about_lightning()}",
        f"**DDP or FSDP?** {_fsdp()}",
        f"**One machine or several?** {_machines()}",
    ]
