"""State how much of the time each GPU in a trace of PyTorch's profiler computes, communicates, copies and is idle."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

from zero_study.files import decompressed, read_whole
from zero_study.terminal import printable, significant, whole_percent
from zero_study.why.fact import Fact
from zero_study.why.plain_pickle import refusing

ADVICE = "Profile some steps with ProfilerActivity.CUDA, and pass the path of the exported JSON file."
LARGEST = 1 << 29  # bytes of JSON
LARGEST_RATIO = 100  # between a trace and its gzip file; JSON of a profiler has up to 30
# Kernels of NCCL, RCCL, MSCCL, NVSHMEM, PyTorch's symmetric memory, vLLM's all-reduce and DeepEP, and their copies.
_COMMUNICATION = re.compile(
    r"nccl|rccl|msccl|shmem|symm_?mem|symmetric_memory|multimem|(one|two)_shot|cross_device_reduce|deep_ep|"
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|PtoP|PeerToPeer",
    re.IGNORECASE,
)
_HOST = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost")
_Spans = list[tuple[float, float]]


def facts(path: Path) -> list[Fact]:
    """Return the shares of the time of each GPU. Raises Refusal if the file is not a trace, or has no kernels."""
    with refusing(path, "a trace of PyTorch's profiler with kernels of a GPU", ADVICE):
        raw = read_whole(path)
        if raw[:2] == b"\x1f\x8b":
            raw = decompressed(raw, min(LARGEST, LARGEST_RATIO * len(raw)))
        content = json.loads(raw)
        gpus: dict[str, tuple[_Spans, _Spans, _Spans]] = {}
        for event in content["traceEvents"] if isinstance(content, dict) else content:
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                start, name, process = float(event["ts"]), str(event["name"]), event.get("pid", 0)
                stop = start + float(event.get("dur", 0))
                if not 0 <= start <= stop < 1e18:  # also NaN
                    raise ValueError("the time of a kernel is damaged")
                kind = 1 if _COMMUNICATION.search(name) else 2 if _HOST.search(name) else 0
                device = event.get("args", {}).get("device", process)
                # Traces of several processes may have been merged.
                gpu = f"GPU {device}" if device == process else f"GPU {device} of process {process}"
                gpus.setdefault(printable(gpu[:80]), ([], [], []))[kind].append((start, stop))
        found = [_fact(gpu, *spans) for gpu, spans in gpus.items()]
        if not found:
            raise ValueError("it has none")
    return found


def _fact(gpu: str, compute: _Spans, communication: _Spans, copies: _Spans) -> Fact:
    """Return the shares of the time of a GPU. What overlaps with computing counts as computing."""
    busy = [*compute, *communication]
    every = [*busy, *copies]
    whole = max(stop for _, stop in every) - min(every)[0]
    if whole <= 0:
        raise ValueError("its kernels take no time")
    lengths = [0, _length(compute), _length(busy), _length(every), whole]
    shares = [whole_percent((end - start) / whole) for start, end in pairwise(lengths)]
    happened = (
        f"In {significant(whole / 1e6)} s, {gpu} computes {shares[0]} of the time, only communicates (or waits for "
        f"other ranks) {shares[1]}, only copies from or to the host {shares[2]}, and is idle {shares[3]}."
    )
    return Fact("slow/trace", "slow", happened, "", "computed", "the trace")


def _length(spans: _Spans) -> float:
    """Return the time that spans cover together."""
    total = end = 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
