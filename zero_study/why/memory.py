"""Compute from PyTorch's out-of-memory message what uses the memory of a GPU, and what would have fitted."""

from __future__ import annotations

import re
from collections.abc import Iterator

from zero_study.logs.printed_failures import Log
from zero_study.logs.printed_settings import Setting
from zero_study.logs.printed_steps import Steps
from zero_study.terminal import bytes_text, count
from zero_study.why import memory_messages, tensors, tracebacks
from zero_study.why.fact import Fact
from zero_study.why.memory_messages import OutOfMemory
from zero_study.why.tracebacks import Phase

GIB = 1 << 30
LARGE = 64 << 20  # bytes of an allocation from which its tokens are computed
ROOM = 1.1  # times the request that is free if memory was not missing (numbers are rounded, memory comes in blocks)
NOTED_REST = GIB  # bytes outside of PyTorch in this process that are worth a sentence
_EXPANDABLE = re.compile(r"PYTORCH_\w*ALLOC_CONF=expandable_segments:True")


def messages(log: Log) -> list[OutOfMemory]:
    """Return the out-of-memory messages of a log."""
    return [message for failure in log.failures if (message := memory_messages.read(failure)) is not None]


def facts(message: OutOfMemory, steps: Steps, setting: Setting) -> Iterator[Fact]:
    """Yield what follows from the numbers of a message: its parts, and what would have fitted."""
    evidence, phase = (message.failure.evidence,), tracebacks.phase_of(message.failure)
    text = _parts(message, phase, steps)
    missing = message.tried - (message.free or 0)
    if message.free is not None and message.tried and message.free > ROOM * message.tried:
        because = "The GPU had more free memory than was requested. So the failure was not due to a lack of GPU memory."
        yield Fact("memory/refused", "memory", text, because, "computed", "the numbers of the message", evidence)
        return
    if message.tried and message.free is not None and message.own is not None and message.others and missing > 0:
        if message.others >= max(missing, NOTED_REST):
            yield Fact(
                "memory/other-process", "memory", text,
                "Without the other processes on this GPU, the request would have fitted.",
                "computed", "the numbers of the message", evidence,
                check="nvidia-smi lists the processes of each GPU",
            )  # fmt: skip
            return
        text += " Without the other processes on this GPU, the request would not have fitted, either."
    if message.unused is not None and message.tried and message.unused > message.tried and not message.pools:
        name = _EXPANDABLE.search(message.failure.text)  # old releases do not have it
        yield Fact(
            "memory/fragmentation", "memory", text,
            f"PyTorch had reserved {bytes_text(message.unused)} that no tensor used. This is more than the request, "
            "but PyTorch could not use it for the request.",
            "computed", "the numbers of the message", evidence, (f"set {name[0]} before the start",) if name else (),
        )  # fmt: skip
        return
    yield Fact("memory/request", "memory", text, "", "computed", "the numbers of the message", evidence)
    if (tensor := tensors.identify(message.tried, phase, setting)) is not None:
        text = f"The request of {bytes_text(message.tried)} has the size of {tensor}."
        yield Fact("memory/tensor", "memory", text, "", "computed", "the size of the request", evidence)
    elif (tokens := _tokens(message, phase, setting)) is not None:
        yield Fact("memory/tokens", "memory", tokens, "", "computed", "the size of the request", evidence)


def _parts(message: OutOfMemory, phase: Phase | None, steps: Steps) -> str:
    """Return sentences with the numbers of the message, the phase, and the steps before it."""
    rank = "A process" if message.failure.rank is None else f"Rank {message.failure.rank}"
    gpu = "its GPU" if message.gpu is None else f"GPU {message.gpu}"
    text = f"{rank} requested {bytes_text(message.tried) if message.tried else 'memory'} on {gpu}."
    if message.total:
        free = "" if message.free is None else f", of which {bytes_text(message.free)} was free"
        text += f" The GPU has {bytes_text(message.total)}{free}."
    if message.allocated is not None:
        text += f" Its tensors used {bytes_text(message.allocated)}"
        text += "." if not message.unused else f", and PyTorch had reserved another {bytes_text(message.unused)}."
    if message.processes:
        listed = count(len(message.processes), "process", "processes")
        text += f" The message lists {listed} with {bytes_text(sum(message.processes))} in all"
        text += ", but not which of them is this one." if message.own is None else " besides this one."
    elif (message.others or 0) >= NOTED_REST:
        text += f" Other processes used {bytes_text(message.others or 0)}."
    elif (message.rest or 0) >= NOTED_REST:
        text += f" {bytes_text(message.rest or 0)} are neither free nor reserved by PyTorch in this process."
    if message.allowed is not None:
        text += f" The program had limited PyTorch to {bytes_text(message.allowed)}."
    if message.total and message.tried > message.total:
        text += f" The request is {message.tried / message.total:.2g} times the whole GPU."
    if message.free is not None and message.tried > message.free:
        text += f" {bytes_text(message.tried - message.free)} were missing."
    text += f" It happened {tracebacks.place_of(phase)}." if phase else ""
    before = [row for row in steps.rows if row.line.number < message.failure.number]
    if used := [row.memory for row in before if row.memory]:
        text += f" For the steps before it, the log states at most {max(used):.1f} GiB of memory."
    return text + (f" {count(steps.num_steps, 'step')} had been trained." if steps.num_steps else "")


def _tokens(message: OutOfMemory, phase: Phase | None, setting: Setting) -> str | None:
    """Return a sentence with the tokens whose logits the request would hold. None if they are not computed."""
    vocabulary = tensors.vocabulary_of(setting, message.failure.before)
    if vocabulary is None or message.tried < LARGE or phase not in ("loss", "forward", "backward", "evaluation", None):
        return None
    tokens = message.tried / vocabulary / 4
    return (
        f"With a vocabulary of {vocabulary:,}, {bytes_text(message.tried)} hold the logits of {tokens:,.0f} tokens in "
        f"fp32, or of {2 * tokens:,.0f} tokens in 16 bits."
    )
