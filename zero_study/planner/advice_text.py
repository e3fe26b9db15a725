"""Format advice as sentences and tables or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_study import terminal
from zero_study.errors import Refusal
from zero_study.planner import assumptions, launch, reasons
from zero_study.planner.choose import ENOUGH_FREE, HOST_BYTES_OF_SYSTEM, HOST_BYTES_PER_PROCESS, gib
from zero_study.planner.launch import Launch
from zero_study.planner.machines import whole_training
from zero_study.planner.request import CHECKPOINTED, SEQUENCES_PER_GPU, Request
from zero_study.planner.training_text import price_source_of, whole_training_sentence
from zero_study.planner.units import price_in_words, unit_of
from zero_study.strategy import file
from zero_study.theory import adapters, frozen, hardware, intervals, model_states, peaks, prediction
from zero_study.theory.adapters import AdapterKind
from zero_study.theory.prediction import ALLOCATOR_SLACK
from zero_study.theory.shapes.config_json import unread_settings

if TYPE_CHECKING:
    from zero_study.planner.choose import Advice, FewestGpus, LargestModels, Remedy, StrategyPrediction
    from zero_study.planner.machines import WholeTraining
    from zero_study.theory.hardware import Cluster
    from zero_study.theory.shapes import ModelShape

NARROW = 80  # characters
MEASURED = "You measured this time"  # as evidence of a time
MARK = "*"  # of rows with another precision than the requested one


def text(advice: Advice, path: Path | None = None) -> str:
    """Return the advice as a text of 80 columns. `path` is the file that --write writes, or None.

    The text has the answer, a table with the meaning of its columns, why other strategies are not recommended, how to
    start the training, and what is assumed. If the answer recommends a change of the request, the text describes the
    training with the change.
    """
    start = advice.to_start
    lines = [reasons.answer(advice), *filter(None, [whole_training_sentence(start)])]
    lines += ["", f"{setting(advice)}. {_basis(start)}.", *adapter_lines(start.shape)]
    lines += [f"Note: {note}." for note in (*start.request.notes_of_file, *unread_settings(start.shape.config or {}))]
    chosen = short_list(start)
    has_price, unit = start.box.gpu.price_per_hour is not None, unit_of(start.shape)
    # 80 columns have space for only one of these.
    last = ("memory is",) if start.is_traced else (unit.price_column,) if has_price else (unit.rate_column,)
    shown = ("strategy", "fits", "GiB", "free", "batch", "s/step", *last)
    rows = [list(shown), *([cells(option, start.request)[column] for column in shown] for option in chosen)]
    return "\n".join(
        [
            *wrapped(lines),
            "",
            *aligned(rows),
            "",
            *wrapped([" ".join([*legend(chosen, start.request), *shown_line(start)])]),
            *_reasons(start),
            *_changes(advice),
            *start_lines(start, path=path),
            "",
            *block_lines("Assumed", _assumed_briefly(start)),
            "",
            *wrapped([_more(start, len(chosen))]),
        ]
    )


def setting(advice: Advice) -> str:
    """Return one line on the training that is recommended: model, machine, batch and the recommended change."""
    change = "" if advice.change is None else f", with {advice.change.flags}"
    return f"{setting_line(advice.to_start)}{change}"


def wrapped(lines: Iterable[str]) -> list[str]:
    return [part for line in lines for part in terminal.wrap(line, columns=NARROW).split("\n")]


def _more(advice: Advice, shown: int) -> str:
    more = [f"{len(advice.options) - shown} more strategies"] if len(advice.options) > shown else []
    notes = [terminal.count(len(advice.notes), "note")] if advice.notes else []
    parts = ["all assumptions", "the parts of the memory", "the accuracy of such predictions"]
    return f"--all shows {terminal.listed([*more, *parts, *notes])}."


def shown_line(advice: Advice) -> list[str]:
    """Predict in a sentence what nvidia-smi will show for the recommended strategy. Empty if none is recommended."""
    option = advice.recommended
    if option is None:
        return []
    low, usual, high = (gib(shown) for shown in _shown(option))
    name, card = option.strategy.name, gib(advice.box.gpu.memory_bytes)
    if usual == card:
        return [
            f"For {name}, nvidia-smi may show that all memory is in use ({low} to {high} GiB), because PyTorch does "
            "not return the memory of deleted tensors to the driver. This does not mean that the training runs out of "
            "memory."
        ]
    return [
        f"For {name}, nvidia-smi will show about {usual} GiB ({low} to {high}), because PyTorch does not return the "
        "memory of deleted tensors to the driver."
    ]


def _shown(option: StrategyPrediction) -> tuple[float, float, float]:
    """Return the bytes that nvidia-smi shows if PyTorch's allocator reserves little, as usual, or much."""
    peak, box = option.prediction.peak, option.prediction.box
    least, most = prediction.RESERVED_RANGE
    low, usual, high = (
        prediction.shown_bytes(peak, box, factor=factor) for factor in (max(1.0, least), prediction.RESERVED, most)
    )
    return low, usual, high


def legend(options: Sequence[StrategyPrediction], request: Request) -> list[str]:
    """Return the legend of the table: what its columns and marks mean."""
    kinds = {MARKS[option.prediction.job.activation_checkpointing] for option in options}
    words = {"c": "", "s": "selective "}
    marks = [f"{mark}: with {words[mark]}activation checkpointing" for mark in words if f" {mark}" in kinds]
    sentences = [
        "GiB: memory that each GPU needs. free: GiB of each GPU that stay free.",
        f"batch: micro batch x accumulation steps{''.join(f' ({mark})' for mark in marks)}.",
        "s/step: seconds per optimizer step, as you measured them."
        if any(option.is_measured for option in options)
        else "s/step: predicted seconds per optimizer step, and the range in which the real time should be.",
    ]
    recommended, *_ = options
    if recommended.host_needed_bytes or any(option.host_free_share < ENOUGH_FREE for option in options):
        process, system = (gib(size, digits=0) for size in (HOST_BYTES_PER_PROCESS, HOST_BYTES_OF_SYSTEM))
        sentences.append(
            f"With offload, {100 * ENOUGH_FREE:.0f} % of the host's memory should stay free, too, in addition to "
            f"{process} GiB for each process and {system} GiB for the operating system."
        )
    if any(option.fits and not option.has_enough_free for option in options):
        sentences.insert(0, f"tight: fits, but leaves less than {100 * ENOUGH_FREE:.0f} % free{_of_host(options)}.")
    others = {option.prediction.engine.precision for option in options} - {request.chosen_precision}
    if others:
        kind = request.chosen_precision.removesuffix("-autocast")
        precisions = PRECISIONS if request.lora_rank is None else PRECISIONS_OF_ADAPTERS
        meanings = " or ".join(precisions.get(other, other).format(kind=kind) for other in sorted(others))
        usual = precisions.get(request.chosen_precision, "{kind}").format(kind=kind)
        sentences.append(f"{MARK}: these strategies train {meanings}. The other strategies train {usual}.")
    return sentences


def _of_host(options: Sequence[StrategyPrediction]) -> str:
    """Return a note that host memory limits the choice too, if an option leaves too little of it free."""
    is_of_host = any(option.fits and option.host_free_share < ENOUGH_FREE for option in options)
    return " of the GPU or of the host" if is_of_host else ""


# What the precision classes with 16-bit products keep in fp32.
PRECISIONS = {
    "bf16": "{kind} parameters with fp32 master weights",
    "fp16": "{kind} parameters with fp32 master weights",
    "bf16-autocast": "fp32 parameters under {kind} autocast",
    "fp16-autocast": "fp32 parameters under {kind} autocast",
    "pure-bf16": "everything in {kind}, without fp32 master weights",
}
# The same for adapters, which are the only trained parameters.
PRECISIONS_OF_ADAPTERS = {
    "bf16": "{kind} adapters with fp32 master weights (fp32 adapters under FSDP2)",
    "fp16": "{kind} adapters with fp32 master weights (fp32 adapters under FSDP2)",
    "bf16-autocast": "adapters without master weights under {kind} autocast",
    "fp16-autocast": "adapters without master weights under {kind} autocast",
    "pure-bf16": "everything in {kind}, without fp32 master weights",
}


def _autocast(request: Request) -> str:
    if request.lora_rank is None:
        return "the parameters are in fp32"
    return "the adapters have no master weights"


def setting_line(advice: Advice) -> str:
    """Return one line with the model, the machine, its price, and the batch with which the table is computed."""
    box, length, request = advice.box, advice.request.sequence_length, advice.request
    price = box.gpu.price_per_hour
    hourly = "" if price is None else f" (${price * box.num_gpus:,.2f} per hour)"
    each = request.batch()[0]
    why = ""
    if request.has_other_default_batch:
        why = f" ({each} per GPU, because the default of {SEQUENCES_PER_GPU} is not a multiple of it)"
    nodes = f" in {box.num_nodes} nodes" if box.num_nodes > 1 else ""
    batch = (
        f"{advice.shape.name} on {box.num_gpus} x {box.gpu.name}{nodes}{hourly}, "
        f"global batch {each * request.num_groups}"
    )
    if advice.shape.reads_images:
        return f"{batch} images of {advice.shape.image}{why}"
    return (
        f"{batch}{why}, {length:,} {'token' if length == 1 else 'tokens'} per sequence"
        f"{'' if request.sequence_ranks == 1 else f', each shared by {request.sequence_ranks} GPUs'}"
        f"{_images_in_words(advice.shape)}"
    )


def _images_in_words(shape: ModelShape) -> str:
    """Describe the images in each sequence. The text is empty without images."""
    if not shape.num_images:
        return ""
    takes = "takes" if shape.num_images == 1 else "take"
    return f", of which {terminal.count(shape.num_images, 'image')} {takes} {shape.num_image_tokens:,}"


def adapter_lines(shape: ModelShape) -> list[str]:
    """Describe the adapters or the frozen weights in a sentence, with the number of trainable parameters.

    Nothing is returned if all parameters are trained.
    """
    adapter, what = shape.adapter, "Frozen vision tower"
    if adapter is not None:
        parts = (linear.name.split(".") for linear in adapters.targeted(shape, adapter))
        names = dict.fromkeys(next(part for part in reversed(each) if not part.isdigit()) for each in parts)
        what = f"{_ADAPTERS[adapter.kind]} of rank {adapter.rank} on {', '.join(names)}"
    elif shape.counts.frozen is None:
        return []
    trainable, total = adapters.num_trainable(shape), adapters.num_total(shape)
    return [f"{what}: {trainable:,} trainable parameters of {total:,} in total ({100 * trainable / total:.2f} %)."]


_ADAPTERS: dict[AdapterKind, str] = {"lora": "LoRA", "dora": "DoRA"}


def _basis(advice: Advice) -> str:
    if advice.is_traced:
        return "The memory is traced or predicted, and everything else is predicted"
    is_measured = any(option.is_measured for option in advice.options)
    return "The time is measured, and everything else is predicted" if is_measured else "Predicted, not measured"


def short_list(advice: Advice) -> list[StrategyPrediction]:
    """Return the strategies that the short table lists, in the order of `Advice.ranked`.

    They are the recommended one, or the one that lacks the least memory if none fits; those of `reasons.EXPECTED`; the
    fastest one with offload that fits; and the fastest one with which the reason compares the recommended one.
    """
    ranked, compared = advice.ranked, reasons.fastest_of_preferred(advice)
    offloading = next((option for option in ranked if option.offloads and option.fits), None)
    return [
        option
        for option in ranked
        if option in (ranked[0], offloading, compared)
        or option.strategy.name in reasons.EXPECTED
        or len(advice.options) == 1
    ]


def _reasons(advice: Advice) -> list[str]:
    """Return why strategies that people expect are not recommended, one line for each."""
    if advice.recommended is None:
        return []
    names: dict[str, list[str]] = {}
    for name, phrase in reasons.why_not(advice).items():
        names.setdefault(phrase, []).append(name)
    is_of_one = ("is ", "takes ", "lacks ", "leaves ")  # these phrases would need a plural
    together = {
        label: phrase
        for phrase, sharing in names.items()
        for label in (sharing if phrase.startswith(is_of_one) else [", ".join(sharing)])
    }
    size = max((len(name) for name in together if len(name) <= NARROW // 3), default=0)
    lines = [
        terminal.wrap(f"{name:<{size}}  {phrase}", "  ", " " * (size + 4), columns=NARROW)
        for name, phrase in together.items()
    ]
    return ["", "Why not another strategy?", *lines] if lines else []


def _changes(advice: Advice) -> list[str]:
    """Return the changes with which the training fits and leaves enough memory free, as lines of text."""
    lines = [
        terminal.wrap(f"{flags}: {predicted}", "  ", "      ", columns=NARROW)
        for flags, predicted in reasons.changes(advice)
    ]
    title = "Changes that help"
    if advice.change is not None:
        title = f"Other changes that help, in place of {advice.change.flags}"
    title += " (to get the launch command and the files of a change, run the command again with its options):"
    return ["", *wrapped([title]), *lines, *wrapped(reasons.price_of_changes(advice))] if lines else []


def start_lines(advice: Advice, begin: str = "Start it", path: Path | None = None) -> list[str]:
    """Return the command that starts the recommended strategy, and what the program has to set."""
    start = launch_or_why(advice, path)
    if start is None:
        return []
    if isinstance(start, str):
        return ["", *wrapped([f"No launch command: {start}"])]
    files = [Path(name).name for name in start.files]
    written = f" (--write {files[0]} writes the file)" if files and path is None else ""
    program = "this project's trainer" if start.stack == "study" else start.stack
    lines = [
        *wrapped([f"{begin} with {program}{written}:"]),
        "",
        *(f"    {line}" for line in start.command.split("\n")),
    ]
    if start.settings:
        lines += [
            "",
            "Also needed:",
            *(terminal.wrap(setting, "    ", columns=NARROW) for setting in start.settings),
        ]
    return ["", *lines]


def launch_or_why(advice: Advice, path: Path | None = None) -> Launch | str | None:
    """Return how to start the training, or why it cannot be started. None if no strategy is recommended.

    The launch reads the file `path`, or a file with the name of the strategy.
    """
    try:
        return launch.launch(advice, path)
    except Refusal as refusal:
        return str(refusal)


def block_lines(title: str, pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Format pairs of a label and a value as lines. Two short pairs in succession share a line."""
    half = NARROW // 2 - 2
    lines, left = [f"{title}:"], ""
    for cell in (f"{label}: {value}" for label, value in pairs):
        if left and len(cell) <= half:
            lines.append(f"  {left:<{half}}{cell}")
            left = ""
            continue
        lines += [f"  {left}"] if left else []
        left = cell if len(cell) < half else ""
        lines += [] if left else [terminal.wrap(cell, "  ", "    ", columns=NARROW)]
    return [*lines, *([f"  {left}"] if left else [])]


def text_of_all(advice: Advice, path: Path | None = None) -> str:
    """Return the advice in full, within the terminal's width. `path` is the file that --write writes, or None.

    It has what the short text has, all strategies, the parts of their memory, and the accuracy of the predictions.
    """
    asked, advice = advice, advice.to_start
    request, box, shape = advice.request, advice.box, advice.shape
    usable = gib(advice.options[0].prediction.usable_bytes)
    lines = [
        reasons.answer(asked),
        *filter(None, [whole_training_sentence(advice)]),
        "",
        f"{setting(asked)}. The model has {_size(shape)}. {usable} GiB of each GPU are usable.",
        f"{_basis(advice)}.",
        *adapter_lines(shape),
        *(f"Note: {note}." for note in advice.notes),
    ]
    ranked = advice.ranked
    columns = head_of(advice.shape) if advice.is_traced else head_of(advice.shape)[:-1]
    rows = [
        [(cells(option, advice.request) | {"largest": str(option.largest_micro_batch)})[column] for column in columns]
        for option in ranked
    ]
    meanings = [
        f'In the column "fits", "tight" means that less than {100 * ENOUGH_FREE:.0f} % of the GPU stays free.',
        f'The column "GiB" shows the memory of all tensors at the peak, plus {100 * ALLOCATOR_SLACK:.0f} % for the '
        "allocator.",
        'The column "batch" shows micro batch x accumulation steps (c: with activation checkpointing, s: with '
        "selective activation checkpointing).",
        'The column "largest" shows the largest micro batch that fits.',
        'The column "sent" shows the gigabytes that one rank sends per step.',
        'The columns "host" and "disk" show the memory and the disk space that one node needs.',
        f'The mark "{MARK}" means that a strategy trains in another precision than the requested one.',
        f"With autocast, {_autocast(request)}.",
        "The precisions bf16 and fp16 compute in 16 bits, and keep fp32 master weights. The precision pure-bf16 keeps "
        "nothing in fp32.",
    ]
    parts = [part for part in peaks.PEAK_PARTS if any(option.prediction.peak.parts[part] for option in advice.options)]
    head = ["strategy", *(part.replace("_", " ") for part in parts), "peak at"]
    memory = [
        [
            option.strategy.name,
            *(gib(option.prediction.peak.parts[part]) for part in parts),
            peaks.PEAK_MOMENTS[int(option.prediction.peak.moment)],
        ]
        for option in ranked
    ]
    return "\n".join(
        [
            *map(terminal.wrap, lines),
            "",
            *terminal.table(columns, rows),
            "",
            *map(terminal.wrap, [*meanings, *shown_line(advice)]),
            *_reasons(advice),
            *_changes(asked),
            *start_lines(advice, path=path),
            *(start_lines(asked, "Without the change, start it") if asked.changed else []),
            "",
            *block_lines("Assumed", assumed_settings(request, box, groups_of(advice), advice.shape)),
            "",
            f"Parts of a GPU's memory at its peak, in GiB{', as predicted' * advice.is_traced}:",
            "",
            *terminal.table(head, memory),
            "",
            "We compared predicted step times with published step times.",
            *(terminal.wrap(line, "  ", "    ") for line in _evidence(advice)),
            "",
            "We compared predicted memory with published memory.",
            *(terminal.wrap(line, "  ", "    ") for line in _memory_evidence(advice)),
        ]
    )


def _evidence(advice: Advice) -> list[str]:
    """Return the accuracy of the predicted times, one line for all strategies that share it."""
    names: dict[str, list[str]] = {}
    lacks: dict[str, dict[str, None]] = {}
    for option in advice.options:
        found = None if option.is_measured else option.prediction.step.evidence
        sentence = MEASURED if found is None else found.basis
        names.setdefault(sentence, []).append(option.strategy.name)
        lacks.setdefault(sentence, {}).update(dict.fromkeys(found.lacks if found else ()))
    return [
        f"With {terminal.listed(sharing)}, {sentence[0].lower()}{sentence[1:]}."
        + "".join(f" {missing}." for missing in [intervals.missing_times(lacks[sentence])] if missing)
        for sentence, sharing in names.items()
    ]


# The published values with which the predicted memory is compared.
_QUANTITIES = {
    "peak_allocated_bytes": "the peak memory of all tensors",
    "peak_reserved_bytes": "the peak memory that PyTorch reserved",
    "used_bytes": "the total memory in use on a GPU",
}


def memory_evidence(option: StrategyPrediction) -> str:
    """Describe in sentences how accurate the predicted memory is for engines similar to that of a strategy."""
    if option.shape.adapter is not None:
        return (
            'The section "Adapters" of the report "How accurate the planner is" compares the predicted and the '
            "published memory of trainings with adapters"
        )
    parts = list(map(_error, intervals.memory_errors(option.shape, option.prediction.engine)))
    if not parts:
        return "Nobody has published the memory of a training with this kind of engine"
    return ". ".join(parts)


def _error(errors: intervals.MemoryErrors) -> str:
    """Describe in sentences the error of predicted memory for one kind of published memory."""
    sources = terminal.count(errors.sources, "source")
    trainings = terminal.count(errors.count, "training")
    published = f"For {trainings}, {sources} published {_QUANTITIES[errors.quantity]}"
    worst = f"{100 * abs(errors.worst):.0f} %"
    if errors.count == 1:
        is_lower = f"{worst} {'lower' if errors.worst < 0 else 'higher'}"
        return f"{published}. The predicted memory is {is_lower} than the published memory"
    are = "is" if errors.too_low == 1 else "are"
    too_low = f", and {errors.too_low} of the {errors.count} predictions {are} too low" if errors.too_low else ""
    if errors.too_low == errors.count:
        too_low = f", and {'both' if errors.count == 2 else f'all {errors.count}'} predictions are too low"
    return (
        f"{published}. The predicted memory differs from the published memory by {100 * errors.median:.0f} % in the "
        f"median and by {worst} at most{too_low}"
    )


def _memory_evidence(advice: Advice) -> list[str]:
    """Return the accuracy of the predicted memory, one line for all strategies that share it."""
    names: dict[str, list[str]] = {}
    for option in advice.options:
        names.setdefault(memory_evidence(option), []).append(option.strategy.name)
    return [f"{_strategies(sharing)}: {sentence}." for sentence, sharing in names.items()]


def _strategies(names: Sequence[str]) -> str:
    """Return the names of strategies as the beginning of a line."""
    return f"Strateg{'y' if len(names) == 1 else 'ies'} {terminal.listed(names)}"


def _size(shape: ModelShape) -> str:
    """Return the number of parameters in words, with the model's head if it is not the usual one of a decoder."""
    size = f"{shape.num_params + frozen.num_params(shape):,} parameters"
    if shape.experts:
        size += f", of which each token uses {shape.active_params:,}"
    match shape.head:
        case "tokens":
            return f"{size}, and computes a logit for every word" if shape.architecture == "bert" else size
        case "none":
            return f"{size}, and no head"
    return f"{size}, and a head for {shape.labels} {shape.head}"


def _model_content(shape: ModelShape) -> dict[str, Any]:
    return {
        "model": shape.name,
        "num_params": shape.num_params + frozen.num_params(shape),
        "num_active_params": shape.active_params,
        "num_trainable_params": adapters.num_trainable(shape),
        "num_total_params": adapters.num_total(shape),
        **({"num_images": shape.num_images, "num_image_tokens": shape.num_image_tokens} if shape.num_images else {}),
        "head": shape.head,
        "num_labels": shape.labels if shape.head in ("sequence classes", "token classes") else None,
    }


_CHECKPOINTING = {value: name for name, value in CHECKPOINTED.items()}
MARKS = {False: "", True: " c", "offload": " c", "selective": " s", "selective-op": " s"}


def head_of(shape: ModelShape) -> tuple[str, ...]:
    """Return the column names of the table that has every strategy."""
    unit = unit_of(shape)
    return ("strategy", "precision", "fits", "GiB", "free", "batch", "largest", "s/step", unit.rate_column, "MFU",
            "sent GB", unit.price_column, "host GiB", "disk GiB", "memory is")  # fmt: skip


def assumed_settings(
    request: Request, box: Cluster, groups: str = "", shape: ModelShape | None = None
) -> list[tuple[str, str]]:
    """Return all assumed settings, of the program and of the machine, as pairs of label and value.

    `shape` is the model, if there is only one.
    """
    pairs = [*assumptions.described(request, shape), ("groups", groups), *hardware.described(box)]
    return [(label, value) for label, value in pairs if value]


def _assumed_briefly(advice: Advice) -> list[tuple[str, str]]:
    """Return the assumed settings of the short text: the program, the precision, and what is not the default.

    The host is one of them if the recommended strategy offloads.
    """
    request, shape = advice.request, advice.shape
    same = ("gpu", "num_gpus", "gpu_memory", "gpu_tflops", "gpu_bandwidth")
    usual = Request(**{name: getattr(request, name) for name in same})
    defaults = dict(assumed_settings(usual, usual.box(), shape=shape))
    offloads = advice.recommended is not None and advice.recommended.offloads
    always = {"name of the GPU", "stack", "precision", *(["host", "machine"] if offloads else [])}
    always |= {"images"} | ({"dropout"} if shape.default_dropout else set())
    pairs = assumed_settings(request, advice.box, shape=shape)
    return [
        (label, value)
        for label, value in pairs
        if (label in always or defaults.get(label) != value) and (label, value) != ("dropout", "off")
    ]


def groups_of(advice: Advice) -> str:
    """Return a text that says how many GPUs share one copy of the model states. Empty if all GPUs share it."""
    grouped = [option for option in advice.options if option.prediction.engine.replicas > 1]
    if not grouped:
        return ""
    shards = terminal.count(grouped[0].prediction.engine.num_shards, "GPU")
    return f"{grouped[0].strategy.name} shards within groups of {shards}"


def cells(option: StrategyPrediction, request: Request) -> dict[str, str]:
    """Return one strategy's row of the table, as a dictionary from column name to text.

    The column "largest" is missing, because it takes long to compute.
    """
    prediction = option.prediction
    job, unit = prediction.job, unit_of(option.shape)
    is_other = prediction.engine.precision != request.chosen_precision
    low = terminal.significant(option.fastest_seconds, 2)
    high = "?" if option.is_rough else terminal.significant(option.slowest_seconds, 2)
    interval = "measured" if option.is_measured else f"{low}-{high}"
    lacking = f"no, {option.lacking.split()[0]}" if option.lacking and option.free_bytes >= 0 else "no"
    return {
        "strategy": f"{option.strategy.name} {MARK}" if is_other else option.strategy.name,
        "precision": prediction.engine.precision,
        "fits": ("yes" if option.has_enough_free else "tight") if option.fits else lacking,
        "GiB": gib(option.needed_bytes),
        "free": gib(option.free_bytes),
        "batch": f"{job.micro_batch_size} x {job.gradient_accumulation_steps}{MARKS[job.activation_checkpointing]}",
        "s/step": f"{terminal.significant(prediction.step.total)} ({interval})",
        unit.rate_column: f"{prediction.tokens_per_second_per_gpu:,.0f}",
        "MFU": f"{100 * prediction.mfu:.0f} %",
        "sent GB": f"{prediction.communicated_bytes / 1e9:.2f}",
        unit.price_column: price_in_words(unit.dollars(prediction)),
        "host GiB": gib(option.host_needed_bytes) if option.host_needed_bytes else "",
        "disk GiB": gib(prediction.disk_bytes_per_node) if prediction.peak.disk_bytes else "",
        "memory is": option.basis,
    }


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table as aligned lines. The first row is the header, and only the first column is aligned left."""
    head, *others = rows
    return terminal.table(head, others, NARROW, sides="<" + ">" * (len(head) - 1))


# The units of the numbers in the JSON, by key. Keys that end in _bytes, or contain _bytes_, are in bytes.
UNITS = {
    "peak_bytes_per_gpu": "bytes",
    "needed_bytes_per_gpu": "bytes",
    "free_bytes_per_gpu": "bytes",
    "usable_bytes_per_gpu": "bytes",
    "memory": "bytes of a GPU",
    "paper_model_state_bytes": "bytes of a GPU",
    "communicated_bytes_per_step": "bytes of a GPU",
    "collectives_per_step.bytes": "bytes of a GPU",
    "host_bytes_per_node": "bytes",
    "host_needed_bytes_per_node": "bytes",
    "host_free_share": "share of the host's memory, at most 1",
    "disk_bytes_per_node": "bytes",
    "shown_by_nvidia_smi_bytes_per_gpu": "bytes",
    "free_share": "share of usable_bytes_per_gpu, at most 1",
    "seconds_per_step": "seconds",
    "seconds_per_step_low": "seconds",
    "seconds_per_step_high": "seconds",
    "tokens_per_second_per_gpu": "tokens per second; an image counts as one token",
    "images_per_second_per_gpu": "images per second, for models that read images only",
    "mfu": "share of the dense peak rate, at most 1",
    "price_per_gpu_hour": "US dollars",
    "dollars_per_hour": "US dollars, all GPUs",
    "dollars_per_billion_tokens": "US dollars",
    "dollars_per_million_images": "US dollars, for models that read images only",
    "sequence_length": "tokens",
    "global_batch_size": "sequences",
    "micro_batch_size": "sequences",
    "largest_micro_batch_size": "sequences",
    "traced.seconds": "seconds",
    "whole_training.hours": "hours",
    "whole_training.hours_low": "hours",
    "whole_training.hours_high": "hours",
    "whole_training.dollars": "US dollars",
}


def content(advice: Advice, path: Path | None = None) -> dict[str, Any]:
    """Return the advice as plain data for JSON. The key "units" has the unit of each number.

    `path` is the file that --write writes, or None.
    """
    gpu, start = advice.box.gpu, advice.to_start
    return {
        **_model_content(advice.shape),
        "gpu": gpu.name,
        "num_gpus": advice.box.num_gpus,
        "num_nodes": advice.box.num_nodes,
        "sequence_length": advice.request.sequence_length,
        "assumed": dict(assumed_settings(advice.request, advice.box, groups_of(advice), advice.shape)),
        "usable_bytes_per_gpu": advice.options[0].prediction.usable_bytes,
        "price_per_gpu_hour": gpu.price_per_hour,
        "dollars_per_hour": None if gpu.price_per_hour is None else gpu.price_per_hour * advice.box.num_gpus,
        "price_source": price_source_of(gpu),
        "notes": advice.notes,
        "strategies": [
            _option_content(option)
            | {"whole_training": _training_content(option, advice.request)}
            | (_traced_content(option) if advice.is_traced else {})
            for option in advice.options
        ],
        "recommended": advice.recommended.strategy.name if advice.recommended else None,
        "reason": reasons.reason(advice),
        "answer": reasons.answer(advice),
        "why_not": reasons.why_not(start),
        "remedies": [_remedy_content(remedy) for remedy in advice.remedies],
        "recommended_change": None if advice.change is None else _changed_content(advice.change, start),
        "launch": _launch_content(start, path),
        "launch_without_change": None if advice.change is None else _launch_content(advice),
        "units": UNITS,
    }


def _launch_content(advice: Advice, path: Path | None = None) -> dict[str, Any] | None:
    start = launch_or_why(advice, path)
    return None if start is None or isinstance(start, str) else dataclasses.asdict(start)


def _changed_content(change: Remedy, changed: Advice) -> dict[str, Any]:
    """Return the recommended change, and the advice about the training with it, for JSON."""
    return _remedy_content(change) | {
        "assumed": dict(assumed_settings(changed.request, changed.box, groups_of(changed), changed.shape)),
        "strategies": [
            _option_content(option) | {"whole_training": _training_content(option, changed.request)}
            for option in changed.options
        ],
    }


def _training_content(option: StrategyPrediction, request: Request) -> dict[str, Any] | None:
    training = whole_training(option, request)
    return None if training is None else training_content(training, option.shape)


def training_content(training: WholeTraining, shape: ModelShape) -> dict[str, Any]:
    """Return the time and price of a whole training as plain data for JSON."""
    images = {"images": training.tokens} if shape.reads_images else {}
    return dataclasses.asdict(training) | images


def _remedy_content(remedy: Remedy) -> dict[str, Any]:
    """Return a change of the request that makes a strategy fit, with its prediction."""
    option = remedy.option
    return {
        "kind": remedy.kind,
        "options": remedy.flags,
        "strategy": option.strategy.name,
        "needed_bytes_per_gpu": _whole(option.needed_bytes),
        "free_share": option.free_share,
        "micro_batch_size": option.prediction.job.micro_batch_size,
        "gradient_accumulation_steps": option.prediction.job.gradient_accumulation_steps,
        "seconds_per_step": option.seconds,
        "tokens_per_second_per_gpu": option.tokens_per_second,
        **images_content(option),
    }


def images_content(option: StrategyPrediction) -> dict[str, Any]:
    """Return images per second and their price as plain data for JSON. Empty for models that read no images."""
    if not option.shape.reads_images:
        return {}
    return {
        "images_per_second_per_gpu": option.tokens_per_second,
        "dollars_per_million_images": unit_of(option.shape).dollars(option.prediction),
    }


def _option_content(option: StrategyPrediction) -> dict[str, Any]:
    prediction, job, shape = option.prediction, option.prediction.job, option.shape
    paper = model_states.paper_bytes_by_place(prediction.engine, option.shape.num_params)
    by_paper = {place: round(getattr(paper, place)) for place in ("device", "host", "disk")}
    return {
        "strategy": option.strategy.name,
        "fits": option.fits,
        "lacking": option.lacking,
        "peak_bytes_per_gpu": _whole(prediction.peak.total),
        "needed_bytes_per_gpu": _whole(option.needed_bytes),
        "needed_bytes_rests_on": memory_evidence(option),
        "free_bytes_per_gpu": _whole(option.free_bytes),
        "free_share": option.free_share,
        "shown_by_nvidia_smi_bytes_per_gpu": _whole(_shown(option)[1]),
        "memory": {part: _whole(value) for part, value in prediction.peak.parts.items()},
        "highest_moment": peaks.PEAK_MOMENTS[int(prediction.peak.moment)],
        # The paper trains all weights.
        "paper_model_state_bytes": by_paper if adapters.num_trainable(shape) == adapters.num_total(shape) else None,
        "precision": prediction.engine.precision,
        "micro_batch_size": job.micro_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "global_batch_size": job.micro_batch_size
        * job.gradient_accumulation_steps
        * prediction.box.num_gpus
        // job.sequence_ranks,
        "activation_checkpointing": _CHECKPOINTING[job.activation_checkpointing],
        "largest_micro_batch_size": option.largest_micro_batch,
        "seconds_per_step": float(prediction.step.total),
        "seconds_per_step_low": option.fastest_seconds,
        "seconds_per_step_high": None if option.is_rough else option.slowest_seconds,
        "seconds_per_step_rests_on": _rests_on(option),
        "tokens_per_second_per_gpu": float(prediction.tokens_per_second_per_gpu),
        "mfu": float(prediction.mfu),
        "communicated_bytes_per_step": _whole(prediction.communicated_bytes),
        "collectives_per_step": [
            {"kind": collective.kind, "count": int(collective.count), "bytes": int(collective.bytes)}
            for collective in prediction.collectives
        ],
        "dollars_per_billion_tokens": prediction.dollars_per_billion_tokens,
        **images_content(option),
        "host_bytes_per_node": _whole(prediction.host_bytes_per_node),
        "host_needed_bytes_per_node": _whole(option.host_needed_bytes),
        "host_free_share": option.host_free_share,
        "disk_bytes_per_node": _whole(prediction.disk_bytes_per_node),
    }


def _rests_on(option: StrategyPrediction) -> str:
    """Return the published measurements behind the predicted time of an option."""
    return MEASURED if option.is_measured else option.prediction.step.evidence.sentence


def _traced_content(option: StrategyPrediction) -> dict[str, Any]:
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


def _whole(value: float) -> int:
    return round(float(value))


def text_of_largest(largest: LargestModels) -> str:
    """Return a table of the largest model that each strategy can train, as text."""
    rows = [["strategy", "largest GPT", "billions of parameters"]]
    sizes = {name: shape.num_params if shape else 0 for name, shape in largest.shapes.items()}
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # strategies of one size stay in their order
        shape = largest.shapes[name]
        rows.append([name, *((shape.name, f"{shape.num_params / 1e9:.3g}") if shape else ("none", ""))])
    request = largest.request
    head = f"Largest GPT on {request.num_gpus} x {request.box().gpu.name} (width x layers, in the proportions of GPT-3)"
    foot = (
        f"These models leave hardly any memory free. To keep {100 * ENOUGH_FREE:.0f} % of it free, use smaller models."
    )
    conditions = _with_conditions(head, request)
    block = block_lines("Assumed", _assumed_of_memory(request, request.box(), largest.shapes))
    return "\n".join([conditions, "", *aligned(rows), "", *wrapped([foot]), "", *block])


def content_of_largest(largest: LargestModels) -> dict[str, Any]:
    """Return the largest model that each strategy can train, as plain data for JSON."""
    models = [
        {"strategy": name, **({"hidden": shape.hidden, "layers": shape.layers} if shape else {}),
         "num_params": shape.num_params if shape else None}
        for name, shape in largest.shapes.items()
    ]  # fmt: skip
    box = largest.request.box()
    return {
        "gpu": box.gpu.name,
        "num_gpus": box.num_gpus,
        "assumed": dict(_assumed_of_memory(largest.request, box, largest.shapes)),
        "largest_models": models,
    }


def text_of_fewest(fewest: FewestGpus) -> str:
    """Return a table of the smallest number of GPUs on which each strategy can train a model, as text."""
    rows = [["strategy", "GPUs", "GiB free per GPU", "fits"]]
    for name, fitting in sorted(fewest.fewest.items(), key=lambda item: item[1] or (1 << 30, 0)):
        beyond = "never" if name in fewest.unsharded else f"more than {fewest.most}"
        if fitting is None:
            rows.append([name, beyond, "", ""])
            continue
        rows.append([name, str(fitting[0]), gib(fitting[1]), "tight" if fitting[2] < ENOUGH_FREE else "yes"])
    shape, request = fewest.shape, fewest.request
    head = f"Smallest number of {request.box(1).gpu.name} for {shape.name} ({_size(shape)}), among powers of two"
    notes = [f"Note: {note}." for note in fewest.notes]
    legend = []
    if any(row[3] == "tight" for row in rows):
        legend.append(
            f"tight: fits, but leaves less than {100 * ENOUGH_FREE:.0f} % of each GPU free. Use twice as many GPUs."
        )
    if any(row[1] == "never" for row in rows):
        legend.append("never: the strategy does not shard the model, so every GPU needs memory for all of it.")
    foot = ["", *legend] if legend else []
    block = block_lines("Assumed", _assumed_of_memory(request, request.box(1), fewest.fewest))
    conditions = _with_conditions(head, request, shape)
    return "\n".join([conditions, *notes, "", *aligned(rows), *foot, "", *block])


def content_of_fewest(fewest: FewestGpus) -> dict[str, Any]:
    """Return the smallest number of GPUs on which each strategy can train a model, as plain data for JSON."""
    strategies = [
        {
            "strategy": name,
            "num_gpus": fitting and fitting[0],
            "free_bytes_per_gpu": fitting and round(fitting[1]),
            "free_share": fitting and fitting[2],
        }
        for name, fitting in fewest.fewest.items()
    ]
    shape = fewest.shape
    return {
        **_model_content(shape),
        "gpu": fewest.request.box(1).gpu.name,
        "assumed": dict(_assumed_of_memory(fewest.request, fewest.request.box(1), fewest.fewest)),
        "notes": fewest.notes,
        "fewest_gpus": strategies,
    }


def _assumed_of_memory(request: Request, box: Cluster, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the assumptions, as `assumed` does, of a prediction for several models or several numbers of GPUs."""
    size, hybrids = request.shard_group_size, [name for name in names if file.read_by_name(name).mesh]
    groups = (
        f"{', '.join(hybrids)} with one copy of the model states per node (in a single node two copies)"
        if hybrids
        else ""
    )
    return assumed_settings(request, box, f"groups of {size}" if size else groups)


def _with_conditions(head: str, request: Request, shape: ModelShape | None = None) -> str:
    checkpointed = {"none": "", "selective": " and selective activation checkpointing"}.get(
        request.activation_checkpointing or "full", " and activation checkpointing"
    )
    example = f"one sequence of {request.sequence_length:,} tokens"
    if shape is not None and shape.reads_images:
        example = "one image"
    return terminal.wrap(f"{head}, with {example} per {request.group}{checkpointed}. Predicted, not measured.")
