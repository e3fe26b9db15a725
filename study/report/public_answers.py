"""Say in sentences what public runs answer: about A100 and H100, one GPU and several, DDP, ZeRO and FSDP."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from study.compare import public_cards, public_comparisons, public_pairs
from study.compare.public_pairs import LossDifference
from study.public_runs import archive
from zero_study.public_runs.schema import PublicRun
from zero_study.terminal import count, percent

REGISTERED = "GPU seconds per sample, all intervals"  # until values were known
MORE_GPUS = "one-and-eight-h100-prefix"
LORA = "fms-adapters-one-two"
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
    """Say how much faster an H100 is than an A100, by the two sources with the most pairs."""
    pairs = spread_of("a100-h100-foundry", "time")
    return (
        f"An H100 is {pairs.median:.2f} times as fast as an A100 in the median of {pairs.num} pairs of FSDP trainings "
        f"on one machine with eight GPUs ({pairs.least:.2f} to {pairs.most:.2f}; MosaicML, one run each, all stated "
        f"settings equal). In small tests of Megatron-LM, the median is {_medians('megatron')} times, depending on the "
        "cluster with H100."
    )


def _medians(source: str) -> str:
    rows = [row for row in public_cards.rows() if row.comparison.source == source]
    medians = [row.spread.median for row in rows if not row.is_registered]
    return f"{min(medians):.2f} to {max(medians):.2f}"


def more_about_cards() -> str:
    """Say how much faster an H100 is if machines or batches differ, too, and which definition was changed."""
    bert = public_comparisons.groups(result("bert-a100-h100").comparison)
    h100, a100 = (members[0].setting for members in bert.values())
    registered = 1 + difference("zero3-a100-h100", REGISTERED).relative
    return (
        f"For LoRA of a 70B model under ZeRO-3, an H100 is {_medians('mlperf-llama2-lora')} times as fast, with "
        "different numbers of GPUs (Juniper, MLPerf® Training, unverified). The larger value, for 64 A100 and 32 H100, "
        f"is {registered:.2f} by the definition that was registered. When values were known, we changed this "
        "definition to leave out intervals that contain an evaluation. For BERT-large, an H100 is "
        f"{_medians('mlperf-bert')} times as fast (MLPerf® Training, unverified), but the H100 have another batch (on "
        f"eight GPUs {h100.global_batch_size} instead of {a100.global_batch_size}) and another learning rate "
        f"({h100.learning_rate} instead of {a100.learning_rate})."
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
        "has weights in fp32, and DeepSpeed in fp16, which is a part of the difference in memory."
    )


def more_about_lightning() -> str:
    """Say in which sizes and with which engines sharding is faster than DDP in the same comparison."""
    smaller = [[of_lightning(size, entry) for size in ("250m", "500m")] for entry in list(STRATEGIES)[:2]]
    ddp, zero2 = ([run.totals["seconds_per_step"] for run in runs] for runs in smaller)
    assert all(theirs < ours for theirs, ours in zip(zero2, ddp, strict=True))
    return (
        "With 0.25 and 0.5 billion parameters, ZeRO-2 is faster than DDP. FairScale's sharded trainings of one billion "
        f"parameters are faster than DDP, too ({_fairscale()})."
    )


def _fairscale() -> str:
    runs = [of_lightning("1", entry) for entry in ("Fully-Sharded-Training-Wrap", "Sharded-Training")]
    return ", ".join(
        f"{run.totals['seconds_per_step']:.2f} s and {run.totals['peak_allocated_bytes'] / 2**30:.1f} GiB"
        for run in runs
    )


def of_lightning(size: str, entry: str) -> PublicRun:
    (run,) = (run for run in archive.source(LIGHTNING) if run.name == f"{size}-{entry}")
    return run


def one_and_two() -> str:
    """Say how full fine-tuning on one A100 and, with FSDP, on two A100 differs: its loss, time and memory."""
    loss, masters, adapters = (of_pairs(name) for name in ("fms-full-one-two", "fms-full-masters-one-two", LORA))
    time, peak = (spread_of("fms-full-one-two", quantity) for quantity in ("time", "peak"))
    of_masters = spread_of("fms-full-masters-one-two", "peak")
    return (
        "In full fine-tuning with accelerate, the mean training loss with FSDP on two A100 differs from that on one "
        f"A100 by {loss.shown} nats (95 % interval over {loss.num_models} models {loss.interval}). A step "
        f"takes {time.median:.2f} times as long ({time.tenth:.2f} to {time.ninetieth:.2f} in eight of ten pairs), and "
        f"each GPU needs {peak.median:.2f} times the memory for tensors ({loss.num_pairs} pairs of IBM's "
        "fms-acceleration, 100 steps, weights in bf16, AdamW's eps 1e-4, one run each). If FSDP has weights in fp32 "
        f"instead, the loss differs by {masters.shown} nats ({masters.interval}; {masters.num_pairs} pairs), "
        f"and each GPU needs {of_masters.median:.2f} times the memory. With LoRA, whose dropout depends on the number "
        f"of GPUs, the loss differs by {adapters.shown} nats ({adapters.interval}; {adapters.num_pairs} pairs)."
    )


def eight() -> str:
    """Say how the training of modded-nanogpt on one H100 and on eight H100 differs: its loss, time and memory."""
    seconds = difference(MORE_GPUS, "seconds in all")
    before, after = (sum(values) / len(values) / 60 for values in (seconds.control, seconds.arm))
    loss = of_groups(difference(MORE_GPUS, "last evaluation loss"))
    return (
        f"modded-nanogpt takes {before:.1f} minutes on one H100 and {after:.1f} minutes on eight, which shard most "
        f"gradients and optimizer states ({len(seconds.control)} and {len(seconds.arm)} runs). The last held-out "
        f"loss differs by {loss.shown} nats (95 % interval {loss.interval}). The eight GPUs need "
        f"{percent(difference(MORE_GPUS, 'GPU seconds').relative)} more GPU time, and each needs "
        f"{percent(-difference(MORE_GPUS, 'peak of tensors').relative)} less memory for tensors. The releases of CUDA "
        "and PyTorch also differ."
    )


def of_pairs(name: str) -> LossDifference:
    """Return the mean difference of the training losses of a comparison of pairs."""
    found = public_pairs.in_nats(pairs_of(name))
    assert found is not None
    return found


def of_groups(found: public_comparisons.Difference) -> LossDifference:
    """Return a difference of losses, which is relative to the mean of the control, in nats."""
    scale = float(np.mean(found.control))
    low, high = (None if bound is None else bound * scale for bound in (found.low, found.high))
    return LossDifference(found.relative * scale, low, high)


def losses() -> list[dict[str, Any]]:
    """Return a table of how losses differ between numbers of GPUs, with a row per comparison that has a margin."""
    rows = []
    for paired in public_comparisons.paired():
        if paired.in_overview and paired.margin:
            loss = of_pairs(paired.name)
            runs = f"{loss.num_pairs} pairs of {count(loss.num_models, 'model')}"
            rows.append(_row(paired.label, f"mean training loss, {runs}", loss, paired.margin))
    for comparison in public_comparisons.comparisons():
        if comparison.in_overview and comparison.margin:
            found = public_comparisons.answer(comparison).differences
            last = {each.arm_name: each for each in found if public_comparisons.is_learned(each.quantity)}
            for each in last.values():
                control = comparison.control.name.split(", ")[-1]  # without the company, which is that of the arm
                what = f"{comparison.label}: {each.arm_name}, relative to {control}"
                runs = f"{len(each.arm)} and {len(each.control)} runs"
                rows.append(_row(what, f"{each.quantity}, {runs}", of_groups(each), comparison.margin))
    return rows


def _row(what: str, quantity: str, loss: LossDifference, margin: float) -> dict[str, Any]:
    is_within = loss.low is not None and loss.high is not None and -margin < loss.low and loss.high < margin
    return {
        "comparison": what,
        "loss": quantity,
        "difference (nats)": loss.shown,
        "95 % interval": loss.interval,
        "within the margin": f"{'yes' if is_within else 'no'} ({margin:g})",
    }


def _fsdp() -> str:
    near, memory = (spread_of("ptd-ddp-fsdp-one-node", quantity) for quantity in ("time", "peak"))
    far, of_ddp = (spread_of(name, "time") for name in ("ptd-ddp-fsdp-four-nodes", "ptd-ddp-nodes"))
    return (
        f"On eight A100 of one machine, FSDP takes {near.median:.2f} times as long as DDP ({near.tenth:.2f} to "
        f"{near.ninetieth:.2f} in eight of ten settings, of {near.num}), and needs {memory.median:.2f} times the "
        f"memory ({memory.tenth:.2f} to {memory.ninetieth:.2f}). On four machines with 100 Gbit/s between them, FSDP "
        f"takes {far.median:.2f} times as long as DDP, and DDP takes {of_ddp.median:.1f} times as long as on "
        f"one machine ({of_ddp.tenth:.1f} to {of_ddp.ninetieth:.1f}; ptd_benchmark, 2021, before FSDP's release; SGD "
        "without optimizer states, one run each)."
    )


def in_short() -> list[str]:
    """Return the answers that README begins with."""
    eight = of_groups(difference(MORE_GPUS, "last evaluation loss"))
    two, adapters = of_pairs("fms-full-one-two"), of_pairs(LORA)
    seconds, cards = difference(MORE_GPUS, "seconds in all"), spread_of("a100-h100-foundry", "time")
    faster, halves = np.mean(seconds.control) / np.mean(seconds.arm), spread_of("fms-full-one-two", "time").median
    measured = {name: of_lightning("1", entry).totals for entry, name in STRATEGIES.items()}
    gib = {name: f"{run['peak_allocated_bytes'] / 2**30:.1f} GiB" for name, run in measured.items()}
    step = {name: f"{run['seconds_per_step']:.2f} s" for name, run in measured.items()}
    return [
        "**Does it train the same as one GPU?** No difference was measured if all weights are trained. The loss "
        f"differs by {eight.shown} nats (95 % interval {eight.interval}) between one H100 and eight that "
        f"shard most of the model states, and by {two.shown} ({two.interval}) between one A100 and two with "
        "FSDP. On our CPUs, ZeRO-3 trains [the same weights](docs/losses.md) as one process, apart from rounding. With "
        "LoRA on two A100, where dropout depends on the number of GPUs, the loss differs by "
        f"{adapters.shown} ({adapters.interval}).",
        f"**What does ZeRO save, and cost?** For 1 billion parameters on 8 A100, ZeRO-3 takes {gib['ZeRO-3']} per GPU "
        f"and {step['ZeRO-3']} per step, ZeRO-2 {gib['ZeRO-2']} and {step['ZeRO-2']}. CPU offload saves more "
        f"({gib['ZeRO-3 with CPU offload']}), but costs {step['ZeRO-3 with CPU offload']}. DDP's {gib['DDP']} and "
        f"{step['DDP']} are not comparable: its weights are in fp32, not fp16.",
        f"**How much faster are more GPUs?** Eight H100 are {faster:.1f} times as fast as one, and two A100 "
        f"{1 / halves:.1f} times (full fine-tuning in bf16).",
        f"**A100 or H100?** An H100 is {cards.median:.1f} times as fast in the median ({cards.least:.1f} to "
        f"{cards.most:.1f}, {cards.num} pairs), and {_medians('megatron')} times in NVIDIA's small tests.",
    ]


def answers() -> list[str]:
    """Return the answers that the notebook `gpus` begins with."""
    return [
        f"**A100 or H100?** {cards()}",
        f"**One GPU or two?** {one_and_two()}",
        f"**One GPU or eight?** {eight()}",
        f"**DDP or ZeRO?** On eight A100 (Lightning, 2021, one run each): {lightning()}",
        f"**DDP or FSDP?** {_fsdp()}",
    ]
