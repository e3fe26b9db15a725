"""Measure the memory of a rank: exact model states, peaks per phase, and the traffic to the swap folder."""

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

from study.records.schema import ModelStateBytes, PeakMemory
from zero_study.engines.readback.states import StorageCounter, count_states


def model_state_bytes(
    model: Any, optimizer: Any, swap_folder: Path | None, bucket_bytes: int | None = None
) -> ModelStateBytes:
    """Return the bytes of the model states that this rank stores now.

    `bucket_bytes` is the size of DDP's buckets, as measured by `BucketBytes`. None if the engine is not DDP, or if the
    buckets were not measured.
    """
    return ModelStateBytes(
        **count_states(model, optimizer, bucket_bytes),
        swapped=None if swap_folder is None else sum(p.stat().st_size for p in swap_folder.rglob("*") if p.is_file()),
    )


def swap_traffic() -> tuple[int, int]:
    """Return the bytes that this process has read from disks and written to disks so far (/proc/self/io)."""
    counters = psutil.Process().io_counters()
    return counters.read_bytes, counters.write_bytes


def _live_tensor_bytes() -> int:
    """Return the bytes of all CPU storages that Python can reach."""
    gc.collect()
    counter = StorageCounter()
    # Compare exact types: isinstance would trigger the imports of lazy module proxies, which gc also returns.
    kinds = (torch.Tensor, torch.nn.Parameter)
    return counter.claim(o for o in gc.get_objects() if type(o) in kinds and o.device.type == "cpu")[0]


def _changes(trace: profile) -> list[int]:
    """Return the changes of allocated CPU memory in a profile, in bytes and in order. Releases are negative."""
    assert trace.kineto_results is not None  # it has results after it has ended
    events: list[Any] = trace.kineto_results.events()
    changes = (
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    )
    return [change for _, change in sorted(changes)]


class BucketBytes:
    """The bytes of the gradient buckets that DDP's reducer allocates in a `with` block.

    Python cannot reach the buckets, because they are C++ tensors. Only the reducer's construction is measured, and not
    all of `prepare`: threads of gloo release DDP's broadcast tensors there, which the profiler does not see. On a GPU,
    these are the requested bytes, before the allocator rounds them up. DDP rearranges its buckets in the second step,
    but their total size stays the same.
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
    """The peak bytes of live CPU tensors in a `with` block.

    They are the bytes before the block plus the changes that the allocator reports in it. The profiler does not report
    a release by a gloo thread. Such bytes count as alive until the end of the block, so the peak may be too large.
    `CollectiveProbe` therefore waits for these threads. `unreleased_bytes` says how many bytes were missed
    nevertheless.
    """

    def __init__(self) -> None:
        self.tensor_bytes: int | None = None
        self.unreleased_bytes: int | None = None  # the most by which `tensor_bytes` can be too large

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
    """The memory peaks of this rank by phase. A phase begins when the previous one ends, and resets the peaks.

    If a phase begins again, for instance after an evaluation between steps, the larger peak is kept.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.device = device
        self._enabled = enabled
        self._phases: dict[str, PeakMemory] = {}
        self.current: str | None = None
        self._sampler: _ProcessMemorySampler | None = None
        self._is_reset = False  # on a CPU: whether the process's peak was reset when the phase began

    def begin(self, name: str | None) -> None:
        """End the current phase and begin the phase `name`. None ends the last phase."""
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

    def resume_from(self, earlier: dict[str, PeakMemory]) -> None:
        """Merge the peaks from before the run was resumed: the larger peak of each phase is kept."""
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
        assert self._sampler is not None  # begin() has started it
        peak, average = self._sampler.stop()
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            "process_bytes": peak,
            "process_average_bytes": average,
        }


def _reset_resident_peak() -> bool:
    """Reset the kernel's peak of this process's resident memory to the current value (proc(5), clear_refs).

    Returns False if this is not permitted, as in some containers. The peak then also covers earlier phases.
    """
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        return file.write("5") > 0
    return False


def _resident_peak() -> int | None:
    with suppress(OSError, StopIteration), open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    return None


def nvml_handle(device: torch.device) -> Any:
    """Return NVML's handle of a GPU, independent of CUDA_VISIBLE_DEVICES. Raises pynvml.NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(device).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())


class _ProcessMemorySampler(threading.Thread):
    """A thread that samples the GPU memory of this process with NVML every 100 ms. It includes the CUDA context."""

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
        except pynvml.NVMLError:  # not permitted, or the container hides processes
            self._samples.clear()

    def stop(self) -> tuple[int | None, int | None]:
        self._done.set()
        self.join()
        if not self._samples:
            return None, None
        return max(self._samples), sum(self._samples) // len(self._samples)
