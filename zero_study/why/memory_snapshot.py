"""State what a memory snapshot of PyTorch shows: which code allocated the memory, and which pieces are free."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from zero_study.terminal import bytes_text, count
from zero_study.why.fact import Fact
from zero_study.why.plain_pickle import number, place, read, refusing

ADVICE = "Name a file that torch.cuda.memory._dump_snapshot wrote."
SMALL = 1 << 20  # bytes up to which PyTorch serves a request from the segments of small pieces
OF_ALL = {"segment_pool_id": (0, 0), "is_expandable": False}  # segments of no graph, that cannot grow
_Entries = list[dict[str, Any]]
CHANGE = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def facts(path: Path) -> list[Fact]:
    """Return what a snapshot shows, for each device. Raises Refusal if the file is not a memory snapshot."""
    devices: dict[int, _Entries] = {}
    with refusing(path, "a memory snapshot of PyTorch", ADVICE):
        content = read(path)
        for segment in content["segments"]:
            devices.setdefault(number(segment.get("device", 0)), []).append(segment)
        traces = dict(enumerate(content.get("device_traces", [])))
        found = [_fact(device, devices[device], traces.get(device, [])) for device in sorted(devices)]
        if not found:
            raise ValueError("it has no segments")
    return found


def _fact(device: int, segments: _Entries, trace: _Entries) -> Fact:
    """Return the fact of a device. Raises ValueError, or another error of Python, if the snapshot is damaged."""
    reserved, allocated = (sum(number(each[key]) for each in segments) for key in ("total_size", "allocated_size"))
    by_place: Counter[str] = Counter()
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                by_place[place(block.get("frames")) or " at places that were not recorded"] += number(block["size"])
    places = "; ".join(f"{bytes_text(size)}{where}" for where, size in by_place.most_common(3))
    happened = (
        f"On GPU {device}, PyTorch reserved {bytes_text(reserved)}. {bytes_text(allocated)} of them are allocated: "
        f"{places or 'none'}. {_free(segments)[0]}"
    )
    # A snapshot adds an entry to the trace. After any other entry, the free pieces are not those of the error.
    last = next((each for each in reversed(trace) if each["action"] != "snapshot"), {"action": ""})
    because, changes = "", tuple[str, ...]()
    if last["action"] == "oom":
        request, unused = number(last["size"]), bytes_text(number(last["device_free"]))
        happened += f" Then a request for {bytes_text(request)} failed, while {unused} of the GPU were not reserved."
        kind = "small" if request <= SMALL else "large"
        text, usable = _free(segments, stream=last.get("stream"), segment_type=kind, **OF_ALL)
        if sum(usable) >= request > max(usable):
            because, changes = f"The free memory for such a request is fragmented: {text}", (CHANGE,)
    id = "memory/snapshot-fragmented" if because else "memory/snapshot"
    return Fact(id, "memory", happened, because, "computed", "the snapshot", (), changes)


def _free(segments: _Entries, **needed: object) -> tuple[str, list[int]]:
    """Return the sizes of the free pieces in the segments that are as needed, in a sentence and as numbers."""
    sizes = [
        number(block["size"])
        for each in segments
        if all(each.get(key, value) == value for key, value in needed.items())
        for block in each["blocks"]
        if block["state"] == "inactive"
    ]
    largest = f", of which the largest has {bytes_text(max(sizes))}" if sizes else ""
    return f"{bytes_text(sum(sizes))} are free, in {count(len(sizes), 'piece')}{largest}.", sizes
