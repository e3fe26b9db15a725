"""Measure the memory of a rank: exact model states, peaks per phase, and traffic to the swap folder."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile

from study.engines.readback.states import StorageCounter, count_states
from study.records.schema import ModelStateBytes, PeakMemory


def model_state_bytes(
    model: Any, optimizer: Any, swap_folder: Path | None, bucket_bytes: int | None = None
) -> ModelStateBytes:
    """Count the bytes of model states that this rank holds at this moment.

    `bucket_bytes`: of DDP's buckets, as `BucketBytes` measured them; None: not DDP, or its buckets are not asked for.
    """
    return ModelStateBytes(
        **count_states(model, optimizer, bucket_bytes),
        swapped=None if swap_folder is None else sum(p.stat().st_size for p in swap_folder.rglob("*") if p.is_file()),
    )


def swap_traffic() -> tuple[int, int]:
    """Bytes that this process has read from and written to disks so far, by the kernel's count (/proc/self/io)."""
    counters = psutil.Process().io_counters()
    return counters.read_bytes, counters.write_bytes


def _live_tensor_bytes() -> int:
    """Bytes of all CPU storages that Python can reach."""
    gc.collect()
    counter = StorageCounter()
    # Exact types, because isinstance wakes lazy module proxies that gc also holds.
    kinds = (torch.Tensor, torch.nn.Parameter)
    return counter.claim(o for o in gc.get_objects() if type(o) in kinds and o.device.type == "cpu")[0]


def _changes(trace: profile) -> list[int]:
    """What a CPU's allocator gave out (positive) and took back (negative) while it was profiled, in bytes, in order."""
    assert trace.kineto_results is not None  # of a profile that has ended
    events: list[Any] = trace.kineto_results.events()
    changes = (
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    )
    return [change for _, change in sorted(changes)]


class BucketBytes:
    """Bytes that DDP's reducer allocates as it is built inside a `with` block: its buckets.

    They are C++ tensors, which no tensor of Python's reaches. The whole of `prepare` cannot be measured so: gloo's
    threads let go of what DDP broadcasts, and the profiler does not see it. A GPU's bytes are those requested, which
    its allocator rounds up. In the second step DDP arranges its buckets anew, in as many bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reducer = vars(torch.distributed)["Reducer"]
        self.num_bytes: int | None = None  # None: no reducer was built

    def __enter__(self) -> BucketBytes:
        torch.distributed.Reducer = self._build  # type: ignore[attr-defined, misc, assignment]
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.distributed.Reducer = self._reducer  # type: ignore[attr-defined, misc, assignment]

    def _build(self, *arguments: Any, **options: Any) -> Any:
        if self._device.type == "cuda":
            before = self._requested_bytes()
            reducer = self._reducer(*arguments, **options)
            self.num_bytes = self._requested_bytes() - before
        else:
            with profile(profile_memory=True, record_shapes=False, use_device=None) as trace:
                reducer = self._reducer(*arguments, **options)
            self.num_bytes = sum(_changes(trace))
        return reducer

    def _requested_bytes(self) -> int:
        return int(torch.cuda.memory_stats(self._device)["requested_bytes.all.current"])


class CpuPeak:
    """Peak bytes of live CPU tensors inside a `with` block: those before it, plus what the allocator reports.

    What a thread of gloo's is the last to let go of, no profiler reports: such bytes are alive to the end, here. So
    `CollectiveProbe` waits for these threads, and `unreleased_bytes` says how much was missed nevertheless.
    """

    def __init__(self) -> None:
        self.tensor_bytes: int | None = None
        self.unreleased_bytes: int | None = None  # by as much is `tensor_bytes` too large, at most

    def __enter__(self) -> CpuPeak:
        self._before = _live_tensor_bytes()
        self._profile = profile(profile_memory=True, record_shapes=False, use_device=None)
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)  # type: ignore[no-untyped-call]
        if exception[0] is not None:
            return
        changes = _changes(self._profile)
        self.tensor_bytes = self._before + max(accumulate(changes, initial=0))
        self.unreleased_bytes = max(0, self._before + sum(changes) - _live_tensor_bytes())


class PhaseMemory:
    """Peaks of this rank per phase: one phase begins where the one before it ends, and peaks are reset there.

    A phase that is taken up again, after an evaluation between steps, keeps the larger of its peaks.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.device = device
        self._enabled = enabled
        self._phases: dict[str, PeakMemory] = {}
        self.current: str | None = None
        self._sampler: _ProcessMemorySampler | None = None
        self._is_reset = False  # the peak of a process on a CPU, as the current phase began

    def begin(self, name: str | None) -> None:
        """End the current phase and begin the next; None ends the last."""
        if not self._enabled:
            return
        if self.current is not None:
            self._update(self.current, **self._peaks())
        self.current = name
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            if name is not None:
                self._sampler = _ProcessMemorySampler(self.device)
                self._sampler.start()
        else:
            self._is_reset = _reset_resident_peak()

    def go_on(self, earlier: dict[str, PeakMemory]) -> None:
        """Keep the larger of the peaks of this process and of the one before it."""
        for name, peak in earlier.items():
            self._update(name, **peak.model_dump(exclude_none=True))

    def note_tensors(self, name: str, peak: CpuPeak) -> None:
        self._update(name, tensor_bytes=peak.tensor_bytes, unreleased_bytes=peak.unreleased_bytes)

    def phases(self) -> dict[str, PeakMemory]:
        return dict(self._phases)

    def _update(self, name: str, **peaks: int | None) -> None:
        earlier = self._phases.get(name, PeakMemory())
        larger = {
            k: max((v for v in (getattr(earlier, k), new) if v is not None), default=None) for k, new in peaks.items()
        }
        self._phases[name] = earlier.model_copy(update=larger)

    def _peaks(self) -> dict[str, int | None]:
        if self.device.type != "cuda":
            return {"resident_bytes": _resident_peak() if self._is_reset else None}
        assert self._sampler is not None  # as a phase has begun
        peak, average = self._sampler.stop()
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            "process_bytes": peak,
            "process_average_bytes": average,
        }


def _reset_resident_peak() -> bool:
    """Set the kernel's high-water mark of this process back to what is resident now (proc(5), clear_refs).

    False: some containers do not permit it, and the mark is of more than what comes now.
    """
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        return file.write("5") > 0
    return False


def _resident_peak() -> int | None:
    with suppress(OSError, StopIteration), open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    return None


def nvml_handle(device: torch.device) -> Any:
    """NVML's handle of a GPU, whatever CUDA_VISIBLE_DEVICES calls it. Raises pynvml.NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(device).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())


class _ProcessMemorySampler(threading.Thread):
    """Samples NVML's memory of this process, CUDA context and all, every 100 ms."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(daemon=True)
        self._device = device
        self._samples: list[int] = []
        self._done = threading.Event()

    def run(self) -> None:
        import pynvml

        try:
            handle = nvml_handle(self._device)
            while True:
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    if process.pid == os.getpid() and process.usedGpuMemory is not None:
                        self._samples.append(process.usedGpuMemory)
                if self._done.wait(0.1):
                    return
        except pynvml.NVMLError:  # no such permission, or a container that hides processes: unknown
            self._samples.clear()

    def stop(self) -> tuple[int | None, int | None]:
        self._done.set()
        self.join()
        if not self._samples:
            return None, None
        return max(self._samples), sum(self._samples) // len(self._samples)
