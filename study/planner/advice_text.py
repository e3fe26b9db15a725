"""Format advice as sentences and tables or as JSON, and write it as an accelerate file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from tabulate import tabulate

from study import files, terminal
from study.errors import Refusal
from study.planner.choose import EQUALLY_FAST, gib
from study.planner.request import CHECKPOINTED
from study.strategy import file
from study.theory import hardware, model_states, peaks
from study.theory.prediction import ALLOCATOR_SLACK, RESERVED, Prediction, predict

if TYPE_CHECKING:
    from study.planner.choose import Advice, FewestGpus, LargestModels, Option
    from study.planner.request import Request
    from study.theory.engine import Kernels, Numbers
    from study.theory.hardware import Box
    from study.theory.shapes import ModelShape

NARROW = 80  # characters
ROWS = 5  # of the short table
KERNELS_IN_WORDS: dict[Kernels, str] = {"fused": "fused kernels", "transformers": "transformers' own kernels"}
FAMILIAR = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
# The share of a GPU that has to be free, so that the allocator can reserve as much as usual.
ROOM = 1 - (1 + ALLOCATOR_SLACK) / RESERVED


def text(advice: Advice) -> str:
    """Return the advice as a short text of 80 columns: the answer, a table, and the meaning of its columns."""
    lines = [*_answer(advice), "", f"{_setting(advice)}. {_basis(advice)}."]
    chosen = _few(advice)
    places = (0, 2, 3, 4, 5, 7, -1 if advice.is_traced else 8)  # 80 columns have space for only one of the two
    rows = [["strategy", "fits", "GiB", "free", "batch", "s/step", HEAD[places[-1]]]]
    rows += [[cells[place] for place in places] for cells in map(_row, chosen)]
    more = f"{len(advice.options) - len(chosen)} more strategies, " if len(advice.options) > len(chosen) else ""
    notes = f", and {terminal.counted(len(advice.notes), 'note')}" if advice.notes else ""
    legend = "GiB, free: memory needed and left per GPU. batch: micro batch x accumulation steps"
    legend += "; c: with activation checkpointing." if any(" c" in row[4] for row in rows) else "."
    legend += " s/step: predicted seconds per optimizer step, with the interval of the prediction."
    last = f"--all shows {more}the parts of the memory and the evidence behind the times{notes}."
    return "\n".join([*_wrapped(lines), "", *_aligned(rows), "", *_wrapped([legend, last])])


def _wrapped(lines: Iterable[str]) -> list[str]:
    return [part for line in lines for part in terminal.wrapped(line, columns=NARROW).split("\n")]


def _setting(advice: Advice) -> str:
    box, length = advice.box, advice.request.sequence_length
    return f"{advice.shape.name} on {box.num_gpus} x {box.gpu.name}, {length:,} tokens per sequence"


def _answer(advice: Advice) -> list[str]:
    """Return which strategy to use, how much memory stays free, and why. A warning follows if little memory is free."""
    option = advice.recommended
    if option is None:
        nearest = max(advice.options, key=lambda option: option.free_bytes)
        lacking = nearest.prediction.lacking or f"{gib(-nearest.free_bytes)} GiB per GPU"
        return [f"No strategy fits. {nearest.strategy.name} comes nearest: it lacks {lacking}. Use more GPUs."]
    prediction = option.prediction
    how = "traced" if option.traced_bytes is not None else "predicted"
    free = f"{gib(option.free_bytes)} GiB ({_free(option):.0%}) of each GPU".replace("%)", " %)")
    first = (
        f"Use {option.strategy.name} with a micro batch of {prediction.job.micro_batch_size}: a step is predicted to "
        f"take {prediction.step.total:.3g} s, and by the {how} memory {free} stay free."
    )
    fastest = max((o for o in advice.options if o.fits), key=_speed)
    if len(advice.options) == 1:
        second = "No other strategy was requested."
    elif fastest is option:
        second = "It is predicted to be the fastest of the strategies that fit."
    else:
        ahead = 100 * (1 - _speed(option) / _speed(fastest))
        second = (
            f"It is the simplest strategy within {100 * EQUALLY_FAST:.0f} % of the fastest, which is "
            f"{fastest.strategy.name} ({ahead:.1f} % faster)."
        )
    return [f"{first} {second}", *_warning(advice)]


def _speed(option: Option) -> float:
    return float(option.prediction.tokens_per_second_per_gpu)


def _warning(advice: Advice) -> list[str]:
    """Return a warning if PyTorch's allocator may need more memory than is free; else an empty list.

    The threshold is how much more the allocator reserved than the tensors needed in published runs.
    """
    if advice.recommended is None or _free(advice.recommended) >= ROOM:
        return []
    free = f"{100 * max(0.0, _free(advice.recommended)):.0f} %"
    warning = (
        f"Little headroom: only {free} of the GPU stays free, and PyTorch's allocator often reserves more than the "
        f"tensors need ({RESERVED:.1f} times as much in published runs)."
    )
    return [f"{warning} If you run out of memory, {_remedy(advice, advice.recommended)}."]


def _remedy(advice: Advice, option: Option) -> str:
    """Return what to do if the recommended strategy runs out of memory."""
    if half := _with_half_the_micro_batch(advice, option):
        free = float(half.free_bytes) / half.usable_bytes
        slower = float(half.step.total / option.prediction.step.total) - 1
        time = f"take {slower:.0%} longer".replace("%", " %") if slower >= 0.005 else "take no longer"
        return (
            f"reduce the micro batch to {half.job.micro_batch_size}, which is predicted to leave {100 * free:.0f} % "
            f"free and to {time}"
        )
    roomy = [candidate for candidate in advice.options if candidate.fits and _free(candidate) >= ROOM]
    if roomy:
        return f"use {max(roomy, key=_speed).strategy.name}, the fastest strategy that leaves more"
    return "use more GPUs, because no strategy leaves more here"


def _with_half_the_micro_batch(advice: Advice, option: Option) -> Prediction | None:
    """Predict an option with half its micro batch.

    None if the micro batch is odd, or if halving it does not free memory. Halving can even need more memory, because
    gradients that are accumulated over micro batches may need buffers of their own.
    """
    job = option.prediction.job
    if job.micro_batch_size % 2:
        return None
    smaller = dataclasses.replace(
        job,
        micro_batch_size=job.micro_batch_size // 2,
        gradient_accumulation_steps=2 * job.gradient_accumulation_steps,
    )
    half = predict(advice.shape, option.prediction.engine, smaller, advice.box)
    return half if half.free_bytes > option.free_bytes else None


def _free(option: Option) -> float:
    """Return the share of a GPU's usable memory that stays free, from 0 to 1.

    It is negative if the option does not fit.
    """
    return float(option.free_bytes) / option.prediction.usable_bytes


def _basis(advice: Advice) -> str:
    return "Memory is traced or predicted, the rest is predicted" if advice.is_traced else "Predicted, not measured"


def _few(advice: Advice) -> list[Option]:
    """Return the strategies of the short table, at most five.

    The recommended strategy comes first. Then come the strategies of `FAMILIAR`, before all others. In both groups,
    strategies that fit come first, the fastest ones before slower ones.
    """
    first = [option for option in (advice.recommended,) if option]
    remaining = [option for option in advice.options if option not in first]
    remaining.sort(key=lambda option: (option.strategy.name not in FAMILIAR, not option.fits,
                                  -float(option.prediction.tokens_per_second_per_gpu)))  # fmt: skip
    return first + remaining[: ROWS - len(first)]


def text_of_all(advice: Advice) -> str:
    """Return the advice in full, within the terminal's width.

    It has the answer, all strategies, the parts of their memory, and the evidence behind the times.
    """
    request, box, shape = advice.request, advice.box, advice.shape
    nodes = f" in {box.num_nodes} nodes" if box.num_nodes > 1 else ""
    usable = gib(advice.options[0].prediction.usable_bytes)
    lines = [
        *_answer(advice),
        "",
        f"{_setting(advice)}{nodes}. The model has {_size(shape)}. {usable} GiB of each GPU are usable.",
        f"Assumed: {assumed(request, box, _groups(advice))}.",
        f"{_basis(advice)}.",
        *(f"Note: {note}." for note in advice.notes),
    ]
    rows = [row if advice.is_traced else row[:-1] for row in map(_row, advice.options)]
    meanings = [
        f"GiB a GPU: the tensors at the peak, and {100 * ALLOCATOR_SLACK:.0f} % for the allocator.",
        "batch: micro batch x accumulation steps; c: activation checkpointing; s: selective checkpointing.",
        "largest: the largest micro batch that fits. sent: by one rank per step. host, disk: per node.",
        "precision: autocast keeps fp32 parameters. The other 16-bit rows compute in 16 bits with fp32 master "
        "weights, as "
        "DeepSpeed and FSDP2 do.",
    ]
    parts = [part for part in peaks.PEAK_PARTS if any(option.prediction.peak.parts[part] for option in advice.options)]
    head = ["strategy", *(part.replace("_", " ") for part in parts), "peak at"]
    memory = [
        [
            option.strategy.name,
            *(gib(option.prediction.peak.parts[part]) for part in parts),
            peaks.PEAK_MOMENTS[int(option.prediction.peak.moment)],
        ]
        for option in advice.options
    ]
    return "\n".join(
        [
            *map(terminal.wrapped, lines),
            "",
            *terminal.table(HEAD[: len(rows[0])], rows),
            "",
            *map(terminal.wrapped, meanings),
            "",
            f"Parts of a GPU's memory at its peak, in GiB{', as predicted' * advice.is_traced}:",
            "",
            *terminal.table(head, memory),
            "",
            "Evidence behind the times:",
            *map(terminal.wrapped, _evidence(advice)),
        ]
    )


def _evidence(advice: Advice) -> list[str]:
    """Return the evidence behind the intervals of the times, one line for all strategies that share it."""
    names: dict[str, list[str]] = {}
    for option in advice.options:
        if not option.is_short:  # a note says that no evidence is known for short steps
            names.setdefault(option.prediction.step.evidence.sentence, []).append(option.strategy.name)
    return [f"s/step of {', '.join(sharing)}: {sentence}." for sentence, sharing in names.items()]


def _size(shape: ModelShape) -> str:
    """Return the number of parameters in words, with the model's head if it is not the usual one of a decoder."""
    size = f"{shape.num_params:,} parameters"
    if shape.experts:
        size += f", of which a token meets {shape.active_params:,}"
    match shape.head:
        case "tokens":
            return f"{size}; a logit for every word" if shape.is_encoder else size
        case "none":
            return f"{size}; no head"
    return f"{size}; {shape.labels} {shape.head}"


def _model_content(shape: ModelShape) -> dict[str, Any]:
    return {
        "model": shape.name,
        "num_params": shape.num_params,
        "num_active_params": shape.active_params,
        "head": shape.head,
        "num_labels": shape.labels if shape.head in ("sequence classes", "token classes") else None,
    }


_CHECKPOINTING = {value: name for name, value in CHECKPOINTED.items()}
MARKS = {False: "", True: " c", "selective": " s", "selective-op": " s"}
HEAD = ("strategy", "precision", "fits", "GiB a GPU", "free", "batch", "largest", "s/step", "tokens/s/GPU", "MFU",
        "sent GB", "$/1e9 tokens", "host", "disk GiB", "memory is")  # fmt: skip


def assumed(request: Request, box: Box, groups: str = "") -> str:
    """Return the assumptions of a prediction that its table does not show, in the words of the options."""
    job = request.job()
    kernels = "compiled" if request.compile else KERNELS_IN_WORDS[request.kernels]
    # FlashAttention-2 needs 16-bit types and a GPU since Ampere. Otherwise PyTorch uses another kernel that does not
    # store the scores.
    has_flash = hardware.has_flash_attention(box.gpu) and "32" not in request.chosen_precision
    attention = {
        "sdpa": f"sdpa ({'FlashAttention-2' if has_flash else 'memory-efficient'})",
        "flash-1": "FlashAttention of 2022",
    }.get(request.attention, "eager")
    own = " (DeepSpeed: its own)" if request.optimizer_kernel != "fused" else ""
    assumptions = [
        kernels,
        f"attention {attention}",
        f"dropout {'on' if request.dropout else 'off'}",
        f"loss {job.loss}",
        f"{request.optimizer}, {request.optimizer_kernel}{own}",
        f"nodes of {box.gpus_per_node}, {box.node_bandwidth * 8e-9:g} Gbit/s" if box.num_nodes > 1 else "",
        groups,
    ]
    return "; ".join(filter(None, assumptions))


def _groups(advice: Advice) -> str:
    """Return how many GPUs share one copy of the model states. The text is empty if all GPUs do."""
    grouped = [option for option in advice.options if option.prediction.engine.replicas > 1]
    return f"{grouped[0].strategy.name} in groups of {grouped[0].prediction.engine.num_shards}" if grouped else ""


def _short(seconds: Numbers) -> str:
    return f"{seconds:.2g}" if float(seconds) < 99.5 else f"{seconds:,.0f}"


def _row(option: Option) -> list[str]:
    prediction = option.prediction
    job = prediction.job
    dollars = prediction.dollars_per_billion_tokens
    batch = f"{job.micro_batch_size} x {job.gradient_accumulation_steps}{MARKS[job.activation_checkpointing]}"
    return [
        option.strategy.name,
        prediction.engine.precision,
        "yes" if option.fits else f"no: {prediction.lacking}" if prediction.lacking else "no",
        gib(option.needed_bytes),
        gib(option.free_bytes),
        batch,
        str(option.largest_micro_batch),
        f"{prediction.step.total:.3g} ({_short(prediction.step.low)}-"
        f"{'?' if option.is_short else _short(prediction.step.high)})",
        f"{prediction.tokens_per_second_per_gpu:,.0f}",
        f"{100 * prediction.mfu:.0f} %",
        f"{prediction.communicated_bytes / 1e9:.2f}",
        "?" if dollars is None else f"{dollars:,.0f}",
        gib(prediction.host_bytes_per_node) if prediction.peak.host_bytes else "",
        gib(prediction.disk_bytes_per_node) if prediction.peak.disk_bytes else "",
        option.basis,
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of text. The first column is aligned to the left, the others to the right."""
    sides = ["left", *["right"] * (len(rows[0]) - 1)]
    text = tabulate(rows, tablefmt="plain", colalign=sides, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def content(advice: Advice) -> dict[str, Any]:
    """Return the advice as plain data for JSON, in bytes and seconds."""
    gpu = advice.box.gpu
    return {
        **_model_content(advice.shape),
        "gpu": gpu.name,
        "num_gpus": advice.box.num_gpus,
        "num_nodes": advice.box.num_nodes,
        "sequence_length": advice.request.sequence_length,
        "assumed": assumed(advice.request, advice.box, _groups(advice)),
        "usable_bytes_per_gpu": advice.options[0].prediction.usable_bytes,
        "price_per_gpu_hour": gpu.price_per_hour,
        "price_source": f"{gpu.price_source} ({gpu.price_date})" if gpu.price_date else gpu.price_source,
        "notes": advice.notes,
        "strategies": [
            _option_content(option, advice.shape.num_params) | (_traced_content(option) if advice.is_traced else {})
            for option in advice.options
        ],
        "recommended": advice.recommended.strategy.name if advice.recommended else None,
        "reason": advice.reason,
    }


def _option_content(option: Option, num_params: int) -> dict[str, Any]:
    prediction, job = option.prediction, option.prediction.job
    paper = model_states.paper_bytes_by_place(prediction.engine, num_params)
    return {
        "strategy": option.strategy.name,
        "fits": option.fits,
        "lacking": prediction.lacking,
        "peak_bytes_per_gpu": _whole(prediction.peak.total),
        "needed_bytes_per_gpu": _whole(option.needed_bytes),
        "free_bytes_per_gpu": _whole(option.free_bytes),
        "memory": {part: _whole(value) for part, value in prediction.peak.parts.items()},
        "highest_moment": peaks.PEAK_MOMENTS[int(prediction.peak.moment)],
        "paper_model_state_bytes": {place: round(getattr(paper, place)) for place in ("device", "host", "disk")},
        "precision": prediction.engine.precision,
        "micro_batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "global_batch_size": job.micro_batch_size * job.gradient_accumulation_steps * prediction.box.num_gpus,
        "activation_checkpointing": _CHECKPOINTING[job.activation_checkpointing],
        "largest_micro_batch_size": option.largest_micro_batch,
        "seconds_per_step": float(prediction.step.total),
        "seconds_per_step_low": float(prediction.step.low),
        "seconds_per_step_high": None if option.is_short else float(prediction.step.high),
        "seconds_per_step_rests_on": None if option.is_short else prediction.step.evidence.sentence,
        "tokens_per_second_per_gpu": float(prediction.tokens_per_second_per_gpu),
        "mfu": float(prediction.mfu),
        "communicated_bytes_per_step": _whole(prediction.communicated_bytes),
        "collectives_per_step": [
            {"kind": collective.kind, "count": int(collective.count), "bytes": int(collective.bytes)}
            for collective in prediction.collectives
        ],
        "dollars_per_billion_tokens": prediction.dollars_per_billion_tokens,
        "host_bytes_per_node": _whole(prediction.host_bytes_per_node),
        "disk_bytes_per_node": _whole(prediction.disk_bytes_per_node),
    }


def _traced_content(option: Option) -> dict[str, Any]:
    """Return the traced memory of an option for JSON, in bytes of one GPU.

    The value of the key "traced" is None if the option was not traced.
    """
    traced = option.traced
    if traced is None:
        return {"traced": None}
    return {
        "traced": {
            "peak_bytes": traced.total,
            "parts": dict(traced.parts),
            "moment": traced.moment,
            "reserved_bytes": traced.reserved_bytes,
            "collectives_per_step": traced.collectives,
            "seconds": traced.seconds,
        }
    }


def _whole(value: Numbers) -> int:
    return round(float(value))


def check_free(path: Path) -> None:
    """Raise Refusal if no accelerate file can be written to a path.

    The path must not exist, its folder must exist, and its name must not end in .json.
    """
    if path.suffix == ".json":
        raise Refusal(
            f"--write {path}: accelerate would read a file of this name as JSON, but it is YAML. Use a name that "
            "ends in "
            ".yaml."
        )
    if path.exists():
        raise Refusal(f"--write {path}: the file already exists. Use another name.")
    if not path.parent.is_dir():
        raise Refusal(f"--write {path}: the folder {path.parent} does not exist. Create it first.")


def write(advice: Advice, path: Path) -> None:
    """Write the recommended strategy as an accelerate file for the requested GPUs.

    Raises Refusal if no strategy is recommended, or if the file cannot be written.
    """
    if advice.recommended is None:
        raise Refusal(f"--write {path}: there is nothing to write. {' '.join(_answer(advice))}")
    check_free(path)
    option, box = advice.recommended, advice.box
    precision = option.prediction.engine.precision
    content = {**option.strategy.content, "num_processes": box.num_gpus, "num_machines": box.num_nodes}
    replicas, shards = option.prediction.engine.replicas, option.prediction.engine.num_shards
    if option.strategy.mesh:
        sizes = {"parallelism_config_dp_replicate_size": replicas, "parallelism_config_dp_shard_size": shards}
        content["parallelism_config"] = {**content["parallelism_config"], **sizes}
    elif replicas > 1:
        raise Refusal(
            f"--write {path}: DeepSpeed can only shard stages 1 and 2 over all GPUs. Leave --shard-group-size out."
        )
    comments = [
        f"{option.strategy.name} for {advice.shape.name} on {box.num_gpus} x {box.gpu.name}, by `zero-study advise`.",
        "What is trained are flags of the study's trainer:",
        f"accelerate launch --config_file {path} study/train.py {' '.join(_flags(advice, option))}",
    ]
    if precision not in ("fp32", "bf16") and option.prediction.engine.kind == "fsdp":
        comments.append("(which trains FSDP2 in fp32 and bf16 only.)")
    if box.num_nodes > 1:
        comments.append(
            "On every machine: its own machine_rank, and the first one's main_process_ip and main_process_port."
        )
        # The launcher is started by hand on each machine, and not by pdsh, which is accelerate's default.
        if "deepspeed_config" in content:
            content["deepspeed_config"] = {**content["deepspeed_config"], "deepspeed_multinode_launcher": "standard"}
    json_path = path.with_suffix(".json")  # DDP's YAML file cannot name a JSON file, so it is found by its name
    # It would be read without being requested.
    if option.strategy.distributed_type == "MULTI_GPU" and json_path.exists():
        raise Refusal(
            f"--write {path}: {json_path} already exists, and DDP would read it with this file. Use another name."
        )
    if option.strategy.ddp_json is not None:
        in_a_program = "(In your own program: DistributedDataParallelKwargs.)"
        comments.append(f"{json_path.name} beside it belongs to it. {in_a_program}")
    commented = "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(content, sort_keys=False)
    try:
        if option.strategy.ddp_json is not None:
            files.write_json(json_path, option.strategy.ddp_json)
        files.write_whole(path, commented.encode())
    except OSError as error:
        raise Refusal(f"--write {path}: the file cannot be written ({error.strerror}). Use another name.") from None


def _flags(advice: Advice, option: Option) -> list[str]:
    """Return the predicted batch, precision and checkpointing as options of study/train.py."""
    job, precision = option.prediction.job, option.prediction.engine.precision
    values = {
        "sequence-length": job.sequence_length,
        "global-batch-size": job.micro_batch_size * job.gradient_accumulation_steps * advice.box.num_gpus,
        "micro-batch-size": job.micro_batch_size,
        "precision": precision,
    }
    switch = ["--activation-checkpointing"] if job.activation_checkpointing is True else []
    return [*(f"--{name} {value}" for name, value in values.items()), *switch]


def text_of_largest(largest: LargestModels) -> str:
    """Return the largest model of each strategy as a text with a table."""
    rows = [["strategy", "largest GPT", "billions of parameters"]]
    for name, shape in largest.shapes.items():
        rows.append([name, *((shape.name, f"{shape.num_params / 1e9:.3g}") if shape else ("none", ""))])
    request = largest.request
    head = f"Largest GPT on {request.num_gpus} x {request.box().gpu.name} (width x layers, in the proportions of GPT-3)"
    return "\n".join([*_with_conditions(head, request, request.box(), largest.shapes), "", *_aligned(rows)])


def content_of_largest(largest: LargestModels) -> dict[str, Any]:
    """Return the largest model of each strategy as plain data for JSON."""
    models = [
        {"strategy": name, **({"hidden": shape.hidden, "layers": shape.layers} if shape else {}),
         "num_params": shape.num_params if shape else None}
        for name, shape in largest.shapes.items()
    ]  # fmt: skip
    box = largest.request.box()
    return {
        "gpu": box.gpu.name,
        "num_gpus": box.num_gpus,
        "assumed": _assumed_of_memory(largest.request, box, largest.shapes),
        "largest_models": models,
    }


def text_of_fewest(fewest: FewestGpus) -> str:
    """Return the smallest number of GPUs for a model, by strategy, as a text with a table."""
    rows = [["strategy", "GPUs", "GiB free per GPU"]]
    for name, fitting in sorted(fewest.fewest.items(), key=lambda item: item[1] or (1 << 30, 0)):
        beyond = "never" if name in fewest.unsharded else f"more than {fewest.most}"
        rows.append([name, str(fitting[0]), gib(fitting[1])] if fitting else [name, beyond, ""])
    shape, request = fewest.shape, fewest.request
    head = f"Smallest number of {request.box(1).gpu.name} for {shape.name} ({_size(shape)}), among powers of two"
    notes = [f"Note: {note}." for note in fewest.notes]
    never = ["", "never: the strategy does not shard, so every GPU needs memory for all of it."]
    foot = never if any(row[1] == "never" for row in rows) else []
    return "\n".join(
        [*_with_conditions(head, request, request.box(1), fewest.fewest), *notes, "", *_aligned(rows), *foot]
    )


def content_of_fewest(fewest: FewestGpus) -> dict[str, Any]:
    """Return the smallest number of GPUs for a model, by strategy, as plain data for JSON."""
    strategies = [
        {"strategy": name, "num_gpus": fitting and fitting[0], "free_bytes_per_gpu": fitting and round(fitting[1])}
        for name, fitting in fewest.fewest.items()
    ]
    shape = fewest.shape
    return {
        **_model_content(shape),
        "gpu": fewest.request.box(1).gpu.name,
        "assumed": _assumed_of_memory(fewest.request, fewest.request.box(1), fewest.fewest),
        "notes": fewest.notes,
        "fewest_gpus": strategies,
    }


def _assumed_of_memory(request: Request, box: Box, names: Iterable[str]) -> str:
    """Return the assumptions, as `assumed` does, of a prediction for several models or several numbers of GPUs."""
    size, hybrids = request.shard_group_size, [name for name in names if file.read_by_name(name).mesh]
    groups = (
        f"{', '.join(hybrids)} with one copy of the model states per node (in a single node two copies)"
        if hybrids
        else ""
    )
    return assumed(request, box, f"groups of {size}" if size else groups)


def _with_conditions(head: str, request: Request, box: Box, names: Iterable[str]) -> list[str]:
    checkpointed = {"none": "", "selective": " and selective activation checkpointing"}.get(
        request.activation_checkpointing or "full", " and activation checkpointing"
    )
    return [
        terminal.wrapped(
            f"{head}, with one sequence of {request.sequence_length:,} tokens per GPU{checkpointed}. Predicted, not "
            "measured."
        ),
        terminal.wrapped(f"Assumed: {_assumed_of_memory(request, box, names)}."),
    ]
