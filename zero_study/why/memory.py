"""Explain why memory ran out, from the numbers in PyTorch's message and from the phase in which it was raised."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zero_study.terminal import bytes_text, count
from zero_study.why import frame_signs, memory_messages, phases, tensors
from zero_study.why.cause import Cause, Certainty
from zero_study.why.known import conclude
from zero_study.why.log import Failure, Line, Log, mask
from zero_study.why.memory_messages import OutOfMemory
from zero_study.why.phases import Phase
from zero_study.why.setting import Setting
from zero_study.why.steps import Steps

GIB = 1 << 30
OTHERS = 0.05  # share of a GPU that other processes use if they are named as the cause
OUTSIDE, FAR_OUTSIDE = 4 * GIB, 8 * GIB  # bytes of a process outside of PyTorch that are more than usual, and far more
SMALL = 0.5  # share of the allocated memory that model states take if activations are most of it
NEARLY_ALL = 0.9  # share of a GPU with which a process nearly fills it by itself
UNUSED = 0.1  # share of a GPU that is reserved and unallocated if fragmentation is named as the cause
ALIKE = 0.01  # relative difference of printed sizes that count as equal
LARGE = 0.2  # share of a GPU from which the size of a single tensor is explained
LONG_SAMPLE = 8.0  # times the typical length
WHOLE_MODEL = 3.0  # times the memory of a step
NEAR = 30  # lines between what a program announces and a message
MOST = 20  # messages that are examined
BYTES_OF_WEIGHT = 2  # per parameter, in 16 bits
BYTES_OF_STATES = 16  # per parameter, of all model states of mixed precision with Adam
SHARDED = ("zero3", "fsdp", "fsdp2")  # strategies that divide all model states
LATE = 20  # steps after which a training has shown that its usual steps fit


_STATED_SIZE = re.compile(r"\b(\d+\.\d+) ?(GiB|GB|MiB|MB)\b")
LONGEST_LINE = 120  # characters of a line that are quoted in a sentence

_ENGINE_START = re.compile(
    r"vllm/.*(?:profile|determine_num_available_blocks|initialize_cache|_allocate_kv_cache|initialize_kv_cache|"
    r"load_model|create_weights)|sglang/.*(?:init_memory_pool|load_model)"
)
# Functions that show more than the phase. The first one that is found decides.
_PLACES = tuple(
    (id, re.compile(pattern, re.MULTILINE))
    for id, pattern in (
        ("memory/evaluation-outputs", r"nested_concat|pad_across_processes|nested_gather|:gather_for_metrics|"
         r"trainer_pt_utils\.py:(?:add|numpy_pad_and_concatenate|torch_pad_and_concatenate)"),
        ("memory/inference-engine-start", rf"{_ENGINE_START.pattern}|\bLLM\($"),
        ("memory/state-dict-8-bit", r"bitsandbytes/nn/\w+\.py:_save_to_state_dict|undo_layout"),
        ("memory/loaded-checkpoint", r"torch/serialization\.py:|_load_optimizer_and_scheduler|:load_optimizer_state|"
         r"optimizer\.py:load_state_dict|torch/_utils\.py:_rebuild|:_load_from_checkpoint|torch\.load\("),
        ("memory/clip-gradients", r"clip_grad(?:_norm|s)?\w*\.py:|:clip_grad_norm_?$|_foreach_norm|:_clip_grads"),
        ("memory/entropy", r"compute_entropy\w*(?:$|\()|entropy_from_logits\w*$|:entropy$"),
        ("memory/log-probabilities", r"logprobs?_from_logits|selective_log_softmax|per_token_logps|compute_log_?probs?|"
         r"calculate_log_probs|get_batch_logps|logps|entropy_from_logits|log_probs_and_entropy|_logprob"),
        ("memory/merge", r"merge_and_unload|:merge_adapter|get_delta_weight"),
    )
)  # fmt: skip
_BY_PHASE: dict[Phase | None, str] = {
    "building": "memory/building", "wrapping": "memory/wrapping", "optimizer step": "memory/optimizer-states",
    "gathering": "memory/gathered-parameters", "loss": "memory/logits", "attention": "memory/attention",
    "recomputation": "memory/activations-recomputed", "backward": "memory/activations-and-gradients",
    "forward": "memory/activations",
    "weight transfer": "memory/generation", "evaluation": "memory/evaluation", "generation": "memory/generation",
    "saving": "memory/saving", None: "memory/too-large",
}  # fmt: skip


def messages(log: Log) -> list[OutOfMemory]:
    """Return the out-of-memory messages of a log, from exceptions and from lines that quote them."""
    found = [message for failure in log.failures if (message := memory_messages.read(failure)) is not None]
    known_lines = {message.failure.number for message in found}
    # Warnings and reports of other programs quote the message.
    quoted = [
        Failure(line.number, line.rank, "OutOfMemoryError", line.text)
        for line in log.lines
        if line.number not in known_lines and "Tried to allocate" in line.text
    ]
    return [*found, *(message for failure in quoted[:5] if (message := memory_messages.read(failure)) is not None)]


def causes(found: Sequence[OutOfMemory], steps: Steps, setting: Setting) -> list[Cause]:
    """Return the causes of out-of-memory messages. `memory/too-large` is left out if another cause is known."""
    causes_of_all = [cause for message in found[:MOST] for cause in _of(message, steps, setting)]
    known = [cause for cause in causes_of_all if cause.id != "memory/too-large"]
    return known or causes_of_all


# Phases in which a traceback without its last line is most often of memory.
_OFTEN_MEMORY: tuple[Phase | None, ...] = (
    "building",
    "wrapping",
    "optimizer step",
    "saving",
    "loss",
    "backward",
    "evaluation",
)


def of_cut_off(log: Log) -> list[Cause]:
    """Return likely causes for a traceback that ends before the line with its exception.

    The list is empty if the frames do not suggest that memory ran out.
    """
    if not log.open_frames:
        return []
    if any(map(_ENGINE_START.search, frame_signs.names_of(log.open_frames[-3:]))):
        line = Line(log.num_lines, None, str(log.open_frames[-1]))
        happened = (
            "The traceback ends where the inference engine reserves its memory at its start. The last line, which "
            "names the exception, is missing. At this point, the usual exception says that the GPU has too little "
            "memory."
        )
        return [
            replace(
                conclude("memory/inference-engine-start", (line,), "possible", happened=happened), symptom="possible"
            )
        ]
    inner = phases.phase_of(log.open_frames[-3:])  # the last functions decide, if they show a phase
    phase = inner or phases.phase_of(log.open_frames, log.open_code)
    if phase is None or phase not in _OFTEN_MEMORY:
        return []
    happened = (
        f"The traceback ends {phases.place_of(phase)}. The last line, which names the exception, is missing. The usual "
        "exception at this point is that the GPU has too little memory."
    )
    line = Line(log.num_lines, None, str(log.open_frames[-1]))
    basis = "the last functions of an incomplete traceback"
    cause = conclude(
        _BY_PHASE[phase], (line,), "possible", happened=happened, tensor="", late="", short="", basis=basis
    )  # fmt: skip
    return [replace(cause, symptom="possible")]


def _of(message: OutOfMemory, steps: Steps, setting: Setting) -> Iterator[Cause]:
    phase = phases.phase_of(message.failure.frames, message.failure.before) or _activity(message, steps)
    happened = _happened(message, phase, steps)
    evidence = (Line(message.failure.number, message.failure.rank, message.failure.first_line),)
    is_shared = "engine" in setting.features or phase == "weight transfer"
    yield from _by_numbers(message, happened, evidence, is_shared)
    if cause := _long_sample(message, happened, evidence, steps):
        yield cause
    if cause := _growth(message, happened, evidence, steps):
        yield cause
    if phase == "gathering" and (cause := _whole_model(message, happened, evidence, steps)):
        yield cause
    tensor = tensors.identify(message.tried, phase, setting) if message.tried else None
    yield from _by_place(message, phase, happened, evidence, setting, steps)
    yield _by_phase(message, phase, happened, evidence, steps, tensor, setting)


def _by_place(
    message: OutOfMemory, phase: Phase | None, happened: str, evidence: tuple[Line, ...], setting: Setting, steps: Steps
) -> Iterator[Cause]:
    """Yield the causes that certain functions in the traceback show, or the setting that the log states."""
    frames = "\n".join(frame_signs.names_of(message.failure.frames))
    code = "\n".join(message.failure.before)
    features = setting.features
    for id, pattern in _PLACES:
        if pattern.search(frames) or pattern.search(code):
            yield conclude(id, evidence, happened=happened, tokens=_tokens(message, setting))
            return
    if setting.is_resumed and not steps.num_steps and phase in (None, "optimizer step", "building"):
        yield conclude("memory/resumed", evidence, happened=happened)
    if phase == "building" and "quantized" in features:
        yield conclude("memory/building-quantized", evidence, happened=happened)
    if "large images" in features and phase in (None, "forward", "attention", "backward", "recomputation"):
        yield conclude("memory/large-images", evidence, happened=happened)
    may_be_activations = phase in (None, "forward", "attention", "backward")
    if may_be_activations and not steps.num_steps and "no checkpointing" in features:
        yield conclude("memory/no-checkpointing", evidence, happened=happened)
    if phase is None and {"engine", "reinforcement"} <= features:
        yield conclude(
            "memory/generation", evidence, "possible", 1, happened=happened, tensor="", late="", short="",
            basis="the kind of training that the log states, and no traceback",
        )  # fmt: skip
    total = message.total or 0
    if phase is None and message.tried >= max(GIB, LARGE * total) and total:
        share = f"{message.tried / total:.0%}".replace("%", " %")
        yield conclude(
            "memory/one-large-tensor", evidence, happened=happened, tried=bytes_text(message.tried), share=share,
            tokens=_tokens(message, setting),
        )  # fmt: skip
    if phase is None and (states := _stated_states(setting)) and (full := _is_full(message)):
        size, what = states
        if size < SMALL * full and "engine" not in features:
            yield conclude(
                "memory/activations-dominate", evidence, happened=happened, allocated=bytes_text(full),
                states=bytes_text(size), what=what,
            )  # fmt: skip
    if phase is None and "quantized" in features and "checkpointing" not in features:
        yield conclude("memory/quantized-activations", evidence, happened=happened)


def _is_full(message: OutOfMemory) -> int:
    """Return the bytes of this process's tensors if they take nearly all of the GPU, and 0 otherwise."""
    allocated, total = message.allocated or 0, message.total or 0
    is_nearly_all = total and allocated >= NEARLY_ALL * total and (message.unused or 0) < (1 - NEARLY_ALL) * total
    return allocated if is_nearly_all else 0


def _stated_states(setting: Setting) -> tuple[float, str] | None:
    """Return the bytes of model states per GPU with a description. None if the log lacks the model or the method."""
    shape = tensors.shape_of(setting.model)
    if shape is None:
        return None
    if {"adapter", "quantized"} & setting.features:
        return BYTES_OF_WEIGHT * shape.num_params, "the frozen weights in 16 bits; the adapters are small"
    ranks = setting.num_gpus or 1
    if setting.strategy in SHARDED and ranks > 1:
        size = BYTES_OF_STATES * shape.num_params / ranks
        return size, f"weights, gradients and Adam states, sharded over {ranks} GPUs"
    return None


def _of_full(message: OutOfMemory, setting: Setting) -> str:
    """Return sentences on a GPU that is full of tensors of this process. Empty if it is not full."""
    full, shape = _is_full(message), tensors.shape_of(setting.model)
    if not full or "engine" in setting.features:
        return ""
    size = bytes_text(full)
    text = f" {size} are tensors of this process, so that fragmentation and other processes explain little."
    weights = BYTES_OF_WEIGHT * shape.num_params if shape is not None else full
    if weights < SMALL * full:
        text += (
            f" The weights of {setting.model} take {bytes_text(weights)} in 16 bits. If only adapters are trained, "
            "nearly all of the rest is activations, which grow with the length of the longest sample."
        )
    return text


def _tokens(message: OutOfMemory, setting: Setting) -> str:
    """Return a sentence with the number of tokens whose logits the allocation would hold, or an empty text."""
    vocabulary = tensors.vocabulary_of(setting, message.failure.before)
    if vocabulary is None or message.tried < 1 << 26:
        return ""
    tokens = message.tried / vocabulary / 4
    return (
        f" With a vocabulary of {vocabulary:,}, {bytes_text(message.tried)} are the logits of about {tokens:,.0f} "
        f"tokens in fp32, or {2 * tokens:,.0f} in 16 bits."
    )


def _activity(message: OutOfMemory, steps: Steps) -> Phase | None:
    """Return the phase that the program announced shortly before a message without a traceback."""
    near = [
        text for line, text in steps.activities
        if 0 <= message.failure.number - line.number <= NEAR and line.number <= message.failure.number
    ]  # fmt: skip
    last = near[-1].lower() if near else ""
    signs: dict[Phase, tuple[str, ...]] = {
        "evaluation": ("evaluat", "validat", "predict"), "saving": ("sav", "checkpoint"), "generation": ("generat",),
    }  # fmt: skip
    return next((phase for phase, words in signs.items() if any(word in last for word in words)), None)


def _happened(message: OutOfMemory, phase: Phase | None, steps: Steps) -> str:
    where = f"rank {message.failure.rank}" if message.failure.rank is not None else "a process"
    gpu = "its GPU" if message.gpu is None else f"GPU {message.gpu}"
    size = f" ({bytes_text(message.total)})" if message.total else ""
    what = bytes_text(message.tried) if message.tried else "memory"
    text = f"{where[0].upper()}{where[1:]} could not allocate {what} on {gpu}{size}"
    if message.free is not None and message.free < message.tried:
        text += f", of which {bytes_text(message.free)} {'was' if message.free else 'were'} free"
    if message.reserved is not None:
        text += f"; PyTorch had allocated {bytes_text(message.allocated or 0)} on it"
        if message.unused:
            text += f" and reserved another {bytes_text(message.unused)}"
    total, rest = message.total or 0, message.others or 0
    if not message.processes and message.own is None and rest >= OTHERS * total > 0:
        text += (
            f". A further {bytes_text(rest)} are not free and not used by PyTorch. The message does not say what uses "
            "them (libraries such as NCCL in this process, or other processes)"
        )
    if (line := _same_size(message)) is not None:
        text += f". An earlier line states the same size: {line!r}"
    text += f". It happened {phases.place_of(phase)}" if phase else ". The log does not show the phase"
    return f"{text}, after {count(steps.num_steps, 'step')}." if steps.num_steps else f"{text}."


def _same_size(message: OutOfMemory) -> str | None:
    """Return an earlier line that states the size of the failed allocation. Programs often write GB for GiB."""
    for text in message.failure.before:
        for number, unit in _STATED_SIZE.findall(text):
            size = float(number) * (GIB if unit.startswith("G") else 1 << 20)
            if message.tried and "Tried to allocate" not in text and abs(size - message.tried) <= ALIKE * message.tried:
                return mask(text.strip())[:LONGEST_LINE]
    return None


def _by_numbers(
    message: OutOfMemory, happened: str, evidence: tuple[Line, ...], is_shared: bool = False
) -> Iterator[Cause]:
    """Yield the causes that the numbers of the message show. `is_shared`: an inference engine may use the same GPU."""
    total = message.total or 80 * GIB
    others, unused, outside = message.others, message.unused, message.outside
    if others is not None and _are_others_the_cause(message, total):
        number = max(1, len(message.processes) - (message.own is None))
        listed = count(number, "other process", "other processes")
        who = listed if message.processes else "Other processes, or libraries"
        basis = (
            "the numbers of the message" if message.processes
            else "the memory of the GPU that PyTorch in this process does not use"
        )  # fmt: skip
        yield conclude(
            "memory/other-process-engine" if is_shared and message.processes else "memory/other-process",
            evidence, happened=happened, who=who, others=bytes_text(others), basis=basis,
            certainty=_certainty_of_others(message, total),
        )  # fmt: skip
    if unused is not None and unused >= message.tried and unused >= UNUSED * total:
        yield conclude(
            "memory/fragmentation", evidence, happened=happened, unused=bytes_text(unused),
            tried=bytes_text(message.tried),
        )  # fmt: skip
    if outside is not None and outside > OUTSIDE and not (others and others > outside):
        certainty: Certainty = "likely" if outside > FAR_OUTSIDE else "possible"
        yield conclude("memory/outside-pytorch", evidence, certainty, happened=happened, outside=bytes_text(outside))


def _are_others_the_cause(message: OutOfMemory, total: int) -> bool:
    """Return whether the allocation failed because of the memory of other processes.

    Libraries in this process may also use memory that a message does not explain. Other processes are the cause only if
    this process would fit even with far more memory for libraries than usual.
    """
    if message.others is None or message.others < max(OTHERS * total, message.tried - (message.free or 0), GIB // 2):
        return False
    return bool(message.processes) or (message.reserved or 0) + message.tried + FAR_OUTSIDE <= total


def _certainty_of_others(message: OutOfMemory, total: int) -> Certainty:
    """Return how certain it is that other processes are the cause: less, if this process nearly fills the GPU."""
    if (message.reserved or 0) >= NEARLY_ALL * total:
        return "possible"
    return "certain" if message.processes and (message.others or 0) > 2 * message.tried else "likely"


def _long_sample(message: OutOfMemory, happened: str, evidence: tuple[Line, ...], steps: Steps) -> Cause | None:
    """Return the cause that one sample is far longer than the others, if a metric of the log says so."""
    lengths = steps.lengths
    if lengths is None or lengths.longest < LONG_SAMPLE * lengths.typical:
        return None
    return conclude(
        "memory/long-sample", (lengths.line, *evidence), happened=happened, longest=f"{lengths.longest:,.0f}",
        typical=f"{lengths.typical:,.0f}",
    )  # fmt: skip


def _growth(message: OutOfMemory, happened: str, evidence: tuple[Line, ...], steps: Steps) -> Cause | None:
    """Return the cause that memory grew from step to step, if the log states it for enough steps."""
    used = [row.memory for row in steps.rows if row.memory is not None]
    if len(used) < 8:
        return None
    rises = sum(later > earlier for earlier, later in itertools.pairwise(used))
    if used[-1] < 1.1 * used[len(used) // 4] or rises < 0.5 * (len(used) - 1):
        return None
    return conclude(
        "memory/growth", evidence, happened=happened, first=f"{used[0]:.1f}", last=f"{used[-1]:.1f}",
        rows=str(len(used)),
    )  # fmt: skip


def _whole_model(message: OutOfMemory, happened: str, evidence: tuple[Line, ...], steps: Steps) -> Cause | None:
    """Return the cause that far more memory was gathered than a step uses, if the log states the memory of a step."""
    used = [row.memory for row in steps.rows if row.memory]
    if not used or message.allocated is None or message.allocated < WHOLE_MODEL * max(used) * GIB:
        return None
    return conclude(
        "memory/whole-model-gathered", evidence, happened=happened, used=f"{max(used):.1f}",
        allocated=bytes_text(message.allocated),
    )  # fmt: skip


def _by_phase(
    message: OutOfMemory,
    phase: Phase | None,
    happened: str,
    evidence: tuple[Line, ...],
    steps: Steps,
    tensor: tensors.Tensor | None,
    setting: Setting,
) -> Cause:
    """Return the cause that the training needs too much memory in the phase of the message."""
    missing = None if message.free is None else message.tried - message.free
    short = f" At least {bytes_text(missing)} are missing." if missing and missing > 0 else ""
    late = ""
    if steps.num_steps >= LATE and phase in ("forward", "backward", "attention", "recomputation", "loss", None):
        late = (
            f" {steps.num_steps:,} earlier steps fitted: this batch is larger (longer samples), or memory use has "
            "grown since then."
        )
    id = "memory/logits" if tensor is not None and tensor.kind == "logits" else _BY_PHASE[phase]
    named = f" The failed allocation has the size of {tensor.name}." if tensor is not None else ""
    if not named and id == "memory/logits":
        named = _tokens(message, setting)
    basis = "the functions of the traceback" if phase else "only the message, without a traceback"
    if phase and not message.failure.frames:
        basis = "the lines before the message"
    if tensor is not None and phase is None:
        basis = "the size of the failed allocation"
    full = _of_full(message, setting) if id == "memory/too-large" else ""
    return conclude(id, evidence, happened=happened, tensor=named, late=late, short=short, full=full, basis=basis)
