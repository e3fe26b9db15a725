"""Compute what follows from values in single messages: signals, types, batch sizes and GPUs."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator

from zero_study.logs.printed_failures import Failure, Log
from zero_study.logs.printed_settings import Setting
from zero_study.logs.printed_steps import Line
from zero_study.why.fact import Fact, Kind

_HOST_MEMORY = re.compile(
    r"(?i)oom[-_]kill|low on memory|killed process|memory cgroup|cpu virtual memory|host memory|ram usage|\brss\b|"
    r"memory pressure|available memory"
)
_BATCH = re.compile(
    r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size\s+"
    r"(?P<batch>\d{1,15}) != (?P<micro>\d{1,15}) \* (?P<accumulation>\d{1,15}) \* (?P<world>\d{1,15})"
)
_METADATA = re.compile(
    r"tensor at position \d+:\s*saved metadata: (?P<saved>\{[^{}]*\})\s*recomputed metadata: (?P<again>\{[^{}]*\})"
)
_ENTRY = re.compile(r"'(\w+)': ((?:torch\.Size\([^)]*\)|device\([^)]*\)|[^,}]+))")
_INCOMPATIBLE = re.compile(r"(?P<gpu>[A-Z].{2,60}?) with CUDA capability (?P<own>sm_\d+\w?) is not compatible")
_SUPPORTED = re.compile(r"supports CUDA capabilities (?P<list>(?:(?:sm|compute)_\d+\w? ?)+)")


def facts(log: Log, setting: Setting) -> Iterator[Fact]:
    """Yield the facts that follow from the values of single messages."""
    for failure in log.failures:
        yield from _recomputed(failure)
        yield from _batch(failure, setting)
    yield from _architecture(log)


def of_signal(failure: Failure, log: Log) -> Fact:
    """Return what a signal says that ended a process, with the last line on the memory of the host before it."""
    who = "A process" if failure.rank is None else f"Rank {failure.rank}"
    text = f"{who} was ended by {failure.kind} (signal {failure.signal})."
    about = [line for line in log.lines if line.number <= failure.number and _HOST_MEMORY.search(line.text)]
    evidence: tuple[Line, ...] = (failure.evidence,)
    because = ""
    if about and about[-1].number == failure.number:
        because = "The kernel ended it, because the memory of the machine or the limit of the job was used up."
    elif about:
        text += " The last line on the memory of the host is quoted below."
        evidence = (failure.evidence, about[-1])
    elif failure.signal == signal.SIGKILL:
        text += " The log has no line on the memory of the host. A process cannot print why it got this signal."
    kind: Kind = "memory" if about and failure.signal == signal.SIGKILL else "launch"
    return Fact("launch/signal", kind, text, because, "computed", "the message", evidence)


def _recomputed(failure: Failure) -> Iterator[Fact]:
    text = failure.text.replace("\n", " ")
    differences: Counter[str] = Counter()
    for each in _METADATA.finditer(text):
        saved, again = dict(_ENTRY.findall(each["saved"])), dict(_ENTRY.findall(each["again"]))
        different = [name for name in saved if saved[name] != again.get(name)]
        differences.update(f"{name}: saved {saved[name]}, recomputed {again.get(name)}" for name in different)
    if differences:
        listed = "; ".join(
            f"{what} ({number} tensor{'s' * (number != 1)})" for what, number in differences.most_common(4)
        )
        yield Fact(
            "start-up/recomputed-types", "start-up", f"Saved and recomputed tensors differ: {listed}.",
            "The recomputed function did not run under the same conditions as the first time.", "computed",
            "the values in the message", (failure.evidence,),
        )  # fmt: skip


def _batch(failure: Failure, setting: Setting) -> Iterator[Fact]:
    if not (match := _BATCH.search(failure.text.replace("\n", " "))):
        return
    micro, accumulation, world = int(match["micro"]), int(match["accumulation"]), int(match["world"])
    text = (
        f"{micro} x {accumulation} x {world} = {micro * accumulation * world:,}, but train_batch_size is "
        f"{int(match['batch']):,}. DeepSpeed counted {world} processes."
    )
    launched = setting.num_gpus
    is_cause = launched is not None and launched != world and micro * accumulation * launched == int(match["batch"])
    yield Fact(
        "start-up/batch-product", "start-up", text,
        f"The launch line or the options state {launched} processes, with which the product fits." if is_cause else "",
        "computed", "the values in the message", (failure.evidence,),
    )  # fmt: skip


def _architecture(log: Log) -> Iterator[Fact]:
    found = next(log.search(_INCOMPATIBLE), None)
    if found is None:
        return
    line, match = found
    supported = next((each["list"].split() for _, each in log.search(_SUPPORTED)), [])
    listed = f" This build has {', '.join(supported)}." if supported else ""
    yield Fact(
        "start-up/gpu-architecture", "start-up",
        f"PyTorch says that its build has no kernels for this GPU: {match['gpu'].strip()}, {match['own']}.{listed}",
        f"{match['own']} is not in the list of the build." if supported and match["own"] not in supported else "",
        "computed", "the two lists in the message", (line,),
        (f"install a build of PyTorch whose torch.cuda.get_arch_list() has {match['own']}",),
        check='python -c "import torch; print(torch.cuda.get_arch_list())"',
    )  # fmt: skip
