"""Read recordings of PyTorch: the calls of its flight recorder, a memory snapshot, or a trace of its profiler."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_study.errors import Refusal
from zero_study.files import decompressed, read_whole
from zero_study.terminal import bytes_text, count, printable
from zero_study.why import hangs, plain_pickle
from zero_study.why.cause import Cause
from zero_study.why.known import conclude

GIB = 1 << 30
IDLE, EXPOSED, COPIED = 0.35, 0.25, 0.15  # shares of the time from which a cause is named
PIECES = 0.15  # share of the reserved memory that is free from which memory is called fragmented
LARGEST_TRACE = GIB // 2  # bytes
LARGEST_RATIO = 100  # between a trace and its gzip file; JSON of a profiler has up to 30
_RANK = re.compile(r"(\d+)(?:\.\w+)*$")


def flight_recordings(folder: Path) -> list[Cause]:
    """Return the causes that the flight recorder's files of a folder show. Raises Refusal if the folder has none."""
    paths = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else [folder]
    entries: dict[int, Sequence[Mapping[str, object]]] = {}
    for path in paths:
        content = plain_pickle.read(path, "a recording of PyTorch's flight recorder")
        calls = content.get("entries") if isinstance(content, dict) else None
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise Refusal(
                f"{path}: this is not a recording of PyTorch's flight recorder. Leave only its files in the folder."
            )
        rank = content.get("rank")
        number = _RANK.search(path.name)
        rank = rank if isinstance(rank, int) else int(number[1]) if number else len(entries)
        if rank in entries:
            raise Refusal(
                f"{path}: another file in the folder is of rank {rank}, too. Leave only one run's files in it."
            )
        entries[rank] = calls
    if len(entries) < 2:
        raise Refusal(f"{folder}: one recording alone cannot be compared. Collect those of all ranks in a folder.")
    return hangs.causes_of_recordings(entries)


def snapshot(path: Path) -> list[Cause]:
    """Return the causes that a memory snapshot shows. Raises Refusal if the file is not a memory snapshot."""
    content = plain_pickle.read(path, "a memory snapshot of PyTorch")
    segments = content.get("segments") if isinstance(content, dict) else None
    if not isinstance(segments, list) or not segments or not all(isinstance(each, dict) for each in segments):
        raise Refusal(
            f"{path}: this is not a memory snapshot of PyTorch (torch.cuda.memory._dump_snapshot). Name its file."
        )
    reserved = sum(_size(path, each, "total_size") for each in segments)
    allocated = sum(_size(path, each, "allocated_size") for each in segments)
    blocks = [block for each in segments for block in _blocks(path, each)]
    free = [_size(path, block, "size") for block in blocks if block.get("state") == "inactive"]
    by_place: Counter[str] = Counter()
    for block in blocks:
        if str(block.get("state", "")).startswith("active"):
            by_place[_place(block.get("frames"))] += _size(path, block, "size")
    top = "; ".join(f"{bytes_text(size)} at {place}" for place, size in by_place.most_common(3))
    happened = f"{bytes_text(reserved)} were reserved, and {bytes_text(allocated)} of them allocated: {top}."
    unused = reserved - allocated
    if reserved and unused > PIECES * reserved and free:
        return [
            conclude(
                "memory/snapshot-fragmented",
                (),
                happened=happened,
                unused=bytes_text(unused),
                pieces=count(len(free), "piece"),
                largest=bytes_text(max(free)),
            )
        ]
    return [conclude("memory/snapshot", (), happened=happened)]


def _size(path: Path, entry: Mapping[str, Any], name: str) -> int:
    """Return a number of bytes in a snapshot. Raises Refusal if it is not one."""
    value = entry.get(name, 0)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Refusal(f"{path}: the snapshot is damaged: {name} is not a number of bytes. Record it again.")
    return value


def _blocks(path: Path, segment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    blocks = segment.get("blocks", [])
    if not isinstance(blocks, list | tuple) or not all(isinstance(block, dict) for block in blocks):
        raise Refusal(f"{path}: the snapshot is damaged: the blocks of a segment are not a list. Record it again.")
    return list(blocks)


def _place(frames: object) -> str:
    """Return the innermost line of the user's or a model's code at which a block was allocated."""
    if not isinstance(frames, list):
        return "an unknown place"
    for frame in frames:
        name = str(frame.get("filename", "")) if isinstance(frame, dict) else ""
        if name.endswith(".py") and "/torch/" not in name:
            return printable(f"{Path(name).name}:{frame.get('line')} ({frame.get('name')})")
    return "an unknown place"


def trace(path: Path) -> list[Cause]:
    """Return the causes that a trace of PyTorch's profiler shows. Raises Refusal if the file is not a trace."""
    events = _events(path)
    kernels = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if len(kernels) < 10:
        raise Refusal(f"{path}: it has no kernels of a GPU. Profile with ProfilerActivity.CUDA, for some steps.")
    spans = [(float(each["ts"]), float(each["ts"]) + float(each.get("dur", 0)), each) for each in kernels]
    begin, end = min(start for start, _, _ in spans), max(stop for _, stop, _ in spans)
    if (whole := end - begin) <= 0:
        raise Refusal(f"{path}: all kernels of this trace take no time, so that it shows nothing. Record it again.")
    communication = _union((start, stop) for start, stop, each in spans if "nccl" in str(each.get("name", "")).lower())
    copies = _union(
        (start, stop)
        for start, stop, each in spans
        if each.get("cat") == "gpu_memcpy" and "DtoD" not in str(each.get("name"))
    )
    compute = _union(
        (start, stop) for start, stop, each in spans
        if "nccl" not in str(each.get("name", "")).lower() and each.get("cat") == "kernel"
    )  # fmt: skip
    busy = _length(_union([*communication, *copies, *compute]))
    exposed = _length(_union([*communication, *compute])) - _length(compute)
    copied = _length(_union([*copies, *compute])) - _length(compute)
    shares = {"idle": 1 - busy / whole, "exposed": exposed / whole, "copied": copied / whole}
    happened = (
        f"In {whole / 1e6:,.3g} s of the trace, the GPU computes {_length(compute) / whole:.0%} of the time, waits for "
        f"communication {shares['exposed']:.0%}, copies from or to the host {shares['copied']:.0%}, and is idle "
        f"{shares['idle']:.0%}."
    )
    return _of_shares(happened, shares) or [conclude("slow/computing", (), happened=happened)]


def _of_shares(happened: str, shares: Mapping[str, float]) -> list[Cause]:
    limits = {
        "slow/communication": ("exposed", EXPOSED),
        "slow/copies": ("copied", COPIED),
        "slow/idle": ("idle", IDLE),
    }
    return [
        conclude(id, (), happened=happened, share=f"{shares[name]:.0%}")
        for id, (name, limit) in limits.items()
        if shares[name] >= limit
    ]


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        raw = read_whole(path)
        if raw[:2] == b"\x1f\x8b":
            raw = decompressed(raw, min(LARGEST_TRACE, LARGEST_RATIO * len(raw)))
        content = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(f"{path}: this is not a trace of PyTorch's profiler ({error}). Name the JSON file.") from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise Refusal(
            f"{path}: it has no traceEvents, so that it is not a trace of PyTorch's profiler. Name the JSON file."
        )
    return [
        each for each in events if isinstance(each, dict) and all(map(_is_time, (each.get("ts"), each.get("dur", 0))))
    ]


def _is_time(value: object) -> bool:
    """Return whether a value is a time in microseconds that a trace may have."""
    return isinstance(value, int | float) and 0 <= value < 1e18  # false for NaN


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping time spans, and return them in order."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in spans)
