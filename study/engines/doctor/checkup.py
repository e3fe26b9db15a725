"""Check this machine: what would stop or disturb a run, each with its remedy. Nothing is trained."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from ... import processes
from ...errors import Refusal, RunFailed
from ...files import ROOT, why_not_writable
from .. import extensions, this_machine, torch_locks, upgrade
from ..keys import allowed

Verdict = Literal["ok", "note", "bites", "unknown"]

DISK_BYTES = 1 << 28  # written and read back
RANKS_SECONDS = 90
PORT = 29500  # accelerate's and torchrun's, where none is named

# Two processes of this machine add 1 and 2, as a run's first collective does. They start in the user's folder, which
# may have a package `study` of its own.
RANKS = """\
import datetime, os, sys, torch, torch.distributed as dist
from zero_study import processes
backend, rank = sys.argv[1], int(os.environ["RANK"])
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(device)
dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
tensor = torch.full((1,), float(rank + 1), device=device)
dist.all_reduce(tensor)
processes.send_result(tensor.item())
os._exit(0)
"""


@dataclass(frozen=True)
class Check:
    """One thing that a run depends on."""

    name: str
    verdict: Verdict
    message: str
    remedy: str = ""


def examine(disk: Path) -> list[Check]:
    """Make all checks. `disk`: a folder on the disk that runs write to, or that NVMe offload swaps to."""
    return [
        *_packages(),
        *_known_bad(),
        *_extensions(),
        *_cuda(),
        *_gpus(),
        *_ranks(),
        _pinned_memory(),
        _host_memory(),
        *_disk(disk),
        _port(),
        _inherited(),
    ]


def text(checks: list[Check]) -> str:
    """Return a line for each check, with its remedy."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        remedy = f"; {check.remedy}" if check.remedy else ""
        lines.append(f"{check.verdict:7}  {check.name:{width}}  {check.message}{remedy}")
    return "\n".join(lines)


def as_json(checks: list[Check]) -> str:
    return json.dumps([asdict(check) for check in checks], indent=1)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _packages() -> Iterator[Check]:
    missing = [name for name in ("torch", "accelerate", "transformers", "deepspeed", "datasets") if not _has(name)]
    if missing:
        yield Check("packages", "bites", f"{', '.join(missing)} not installed", "pip install 'zero-study[train]'")
    else:
        yield Check("packages", "ok", "torch, accelerate, transformers, deepspeed and datasets are installed")


def _known_bad() -> Iterator[Check]:
    """Check the installed releases for known faults."""
    installed = {name: importlib.metadata.version(name) for name in filter(_has, upgrade.index()["packages"])}
    for package, version in installed.items():
        if reason := upgrade.why_unknown(package, version):
            yield Check(f"known of {package}", "unknown", reason, "ask it: zero-study conformance")
        for fault in upgrade.known_faults():
            if fault.package == package and fault.is_among(installed):
                yield Check(f"known of {package}", "note", f"{version}: {fault.summary}")


def _extensions() -> Iterator[Check]:
    """Check which extensions are built, and whether the others can be: compiler, headers, ninja, libaio."""
    for name, extension in extensions.EXTENSIONS.items():
        if extensions.is_built(name):
            yield Check(f"DeepSpeed's {name}", "ok", "is built for this Python")
        elif obstacle := extensions.obstacle(name):
            message, _, remedy = obstacle.rpartition("; ")
            yield Check(f"DeepSpeed's {name}", "bites", message, remedy)
        else:
            message = f"is built when the first run of {extension.strategies} needs it, in {extension.duration}"
            yield Check(f"DeepSpeed's {name}", "note", message)
    for lock in torch_locks.stale():
        message, _, remedy = torch_locks.description(lock).rpartition("; ")
        yield Check("torch's extensions", "bites", message, remedy)


def _cuda() -> Iterator[Check]:
    name = "CUDA toolkit"
    if not _has("torch") or not extensions.sees_gpu():
        yield Check(name, "note", "no GPU is seen, so none is needed")
        return
    import torch

    compiler = shutil.which("nvcc") or str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc")
    if torch.version.cuda is None:
        yield Check(name, "bites", "there is a GPU, and torch is a build for CPUs", "install torch for CUDA")
    elif not Path(compiler).exists():
        message = "no nvcc: DeepSpeed's extensions for GPUs cannot be compiled; offload needs them"
        yield Check(name, "note", message, "install CUDA's toolkit, or set CUDA_HOME")
    else:
        output = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        yield _toolkit(output, torch.version.cuda)


def _toolkit(nvcc_output: str, torch_cuda: str) -> Check:
    """Compare the major version of the toolkit with that of torch's CUDA."""
    release = re.search(r"release (\d+)\.(\d+)", nvcc_output)
    version = ".".join(release.groups()) if release else "of unknown version"
    is_compatible = release is not None and release[1] == torch_cuda.partition(".")[0]
    message = f"nvcc {version}, torch is built with CUDA {torch_cuda}"
    remedy = "" if is_compatible else "install a toolkit of that first number: DeepSpeed compiles with no other"
    return Check("CUDA toolkit", "ok" if is_compatible else "bites", message, remedy)


def _gpus() -> Iterator[Check]:
    gpus = this_machine.gpu_users()
    if not gpus:
        yield Check("GPUs", "note", "none")
    for name, running in gpus:
        if running:
            users = ", ".join(f"process {pid} ({size / 1e9:.1f} GB)" for pid, size in running)
            yield Check(name, "note", f"is used by {users}", "end them, or choose others by CUDA_VISIBLE_DEVICES")
        else:
            yield Check(name, "ok", "nobody uses it")


def _ranks() -> Iterator[Check]:
    """Let two processes communicate over gloo, and over NCCL if there are two GPUs."""
    if not _has("torch"):
        yield Check("two ranks", "unknown", "torch is not installed")
        return
    num_gpus = len(this_machine.find().gpu_memory_bytes)
    for backend in ("gloo", *(["nccl"] if num_gpus > 1 else [])):
        start = time.monotonic()
        failure = _why_no_sum(backend)
        seconds = time.monotonic() - start
        if failure is None:
            yield Check(f"two {backend} ranks", "ok", f"add two numbers, {seconds:.0f} s with their start")
        else:
            remedy = (
                "name the interface in GLOO_SOCKET_IFNAME" if backend == "gloo" else "run again with NCCL_DEBUG=INFO"
            )
            yield Check(f"two {backend} ranks", "bites", failure, remedy)


def _why_no_sum(backend: str) -> str | None:
    """Start two ranks that add two numbers; say why they fail, None if they do not."""
    inherited = {name: value for name, value in os.environ.items() if not allowed.says_which_rank(name)}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (inherited.get("PYTHONPATH"), str(ROOT))))
    try:
        ranks = processes.run(["-c", RANKS, backend], 2, timeout_seconds=RANKS_SECONDS, environment=inherited)
    except RunFailed:
        return f"they do not find each other in {RANKS_SECONDS} s"
    if [rank.result for rank in ranks] == [3, 3]:
        return None
    lines = [line for rank in ranks for line in rank.errors]
    return f"they fail: {lines[-1][:200]}" if lines else "they end without a word"


def _pinned_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("pinned memory", "ok", "has no limit")
    verdict: Verdict = "ok" if soft >= 1 << 30 else "note"
    message = f"is limited to {soft / 2**20:.0f} MiB a process (ulimit -l): NVMe offload pins its buffers"
    return Check(
        "pinned memory", verdict, message, "" if verdict == "ok" else "raise the limit where buffers do not fit"
    )


def _host_memory() -> Check:
    total, available = this_machine.find().host_memory_bytes, psutil.virtual_memory().available
    free = min(total, available)
    message = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free: offload needs 16 bytes a parameter of it in fp32"
    return Check("host memory", "ok" if free > total / 4 else "note", message)


def _disk(folder: Path) -> Iterator[Check]:
    """Free space and speed. A step of NVMe offload reads and writes masters and both moments, 12 bytes a parameter."""
    name = f"disk of {folder}"
    if not folder.is_dir() or why_not_writable(folder):
        yield Check(name, "bites", "is no folder that can be written", "name one with --disk")
        return
    free = shutil.disk_usage(folder).free
    if free < 2 * DISK_BYTES:
        yield Check(name, "bites", f"{free / 1e9:.1f} GB free", "make room: an NVMe offload needs 12 bytes a parameter")
        return
    write_speed, read_speed = _speed(folder)
    seconds = 12e9 / write_speed + 12e9 / read_speed
    message = (
        f"{free / 1e9:.0f} GB free, writes {write_speed / 1e9:.2f} and reads {read_speed / 1e9:.2f} GB/s: NVMe offload "
        f"of 1e9 parameters would wait {seconds:.0f} s a step for them, one after the other"
    )
    yield Check(name, "ok", message)


def _speed(folder: Path) -> tuple[float, float]:
    """Measure a disk: bytes per second written and synced, and bytes per second read back past the kernel's cache."""
    block = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(DISK_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        write_speed = DISK_BYTES / (time.perf_counter() - start)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(1 << 22):
            pass
        return write_speed, DISK_BYTES / (time.perf_counter() - start)


def _port() -> Check:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            message = f"{PORT} is taken, which `accelerate launch` takes where no other is named"
            return Check("port", "note", message, "pass --main_process_port 0, as zero-study does")
    return Check("port", "ok", f"{PORT} is free")


def _inherited() -> Check:
    """Check for variables of a surrounding launcher, and for those that change a run behind its configuration."""
    rank_variables = sorted(filter(allowed.says_which_rank, os.environ))
    if rank_variables:
        message = f"{', '.join(rank_variables)} would make one process of several out of a run"
        return Check("environment", "bites", message, f"unset {' '.join(rank_variables)}")
    try:
        allowed.check_variables(os.environ)
    except Refusal as refusal:
        message, _, remedy = str(refusal).rpartition("; ")
        return Check("environment", "bites", message, remedy)
    return Check("environment", "ok", "no variable of a launcher is inherited, and none that runs refuse")
