"""Check this machine for everything that would stop or disturb a run, without training anything."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from .. import processes, terminal
from ..engines import extensions, inductor, this_machine, torch_locks
from ..engines.keys import allowed
from ..errors import Refusal, RunFailed, install_command
from ..files import ROOT, why_not_writable
from ..upgrade import changes
from ..verdict import Checked, NotChecked
from ..verdict import Verdict as OfCommand

Verdict = Literal["ok", "note", "bites", "unknown"]

DISK_BYTES = 1 << 28  # bytes that are written and read back to measure the disk
RANKS_SECONDS = 90
PORT = 29500  # the default of accelerate and torchrun
WITHOUT_NVCC = (
    "DeepSpeed therefore cannot compile its extensions for GPUs. A DeepSpeed file with an optimizer section needs "
    "FusedAdam, unless it sets torch_adam. Outside this project, offload to a disk needs async_io. Runs of this "
    "project need neither FusedAdam nor async_io."
)
KNOWN_FAULTS = "known of"  # the first words in the names of checks for known faults

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
    """The result of one check of this machine."""

    name: str
    verdict: Verdict
    message: str
    remedy: str = ""


def examine(disk: Path) -> list[Check]:
    """Run all checks of this machine, and return their results.

    `disk` is a folder on the disk that runs write to, or that NVMe offload swaps to.
    """
    return [
        *_packages(),
        *_known_faults(),
        *_extensions(),
        _compile(),
        *_cuda(),
        *_gpus(),
        *_ranks(),
        _pinned_memory(),
        _host_memory(),
        *_disk(disk),
        _port(),
        _inherited(),
    ]


# The groups of checks as they are printed, the worst first.
GROUPS: dict[Verdict, str] = {"bites": "Stops a run", "unknown": "Not checked", "note": "Notes", "ok": "OK"}


def text(checks: list[Check]) -> str:
    """Return the results as text for a terminal: the summary, then each check with its remedy, the worst first."""
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in GROUPS}
    problems = {0: "nothing would stop a run", 1: "1 problem would stop a run"}.get(
        counts["bites"], f"{counts['bites']} problems would stop a run"
    )
    details = f"{counts['ok']} checks passed, {counts['note']} notes, {counts['unknown']} not checked"
    lines = [terminal.wrap(f"This machine: {problems} ({details}).")]
    for verdict, title in GROUPS.items():
        of_verdict = [check for check in checks if check.verdict == verdict]
        if of_verdict:
            lines += ["", f"{title}:"]
        lines += [
            terminal.wrap(f"{_title(check)}{check.message} {check.remedy}".strip(), "  ", "    ")
            for check in of_verdict
        ]
    return "\n".join(lines)


def _title(check: Check) -> str:
    """Return the words with which a check begins in the text.

    They are empty for known faults, because those messages name the package themselves.
    """
    return "" if check.name.startswith(KNOWN_FAULTS) else f"{check.name}: "


def verdict(checks: list[Check]) -> OfCommand:
    """Return the verdict on this machine, from which the exit status follows.

    The known faults of an unknown release cannot be looked up, which stops no run. Every other check is needed.
    """
    checked = Checked(sum(check.verdict != "unknown" for check in checks), "check", "of this machine")
    unknown = [
        NotChecked(check.name, check.message.rstrip("."), not check.name.startswith(KNOWN_FAULTS))
        for check in checks
        if check.verdict == "unknown"
    ]
    return OfCommand.of(sum(check.verdict == "bites" for check in checks), [checked], unknown)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _packages() -> Iterator[Check]:
    missing = [name for name in ("torch", "accelerate", "transformers", "deepspeed") if not _has(name)]
    if missing:
        yield Check(
            "packages", "bites", f"{', '.join(missing)} not installed.", f"Run `pip install {' '.join(missing)}`."
        )
    else:
        yield Check("packages", "ok", "torch, accelerate, transformers and deepspeed are installed.")


def _known_faults() -> Iterator[Check]:
    """Check the installed releases for known faults."""
    installed = {name: importlib.metadata.version(name) for name in filter(_has, changes.index().packages)}
    for package, version in installed.items():
        if reason := changes.why_unknown(package, version):
            yield Check(
                f"{KNOWN_FAULTS} {package}",
                "unknown",
                f"{reason}.",
                "Check this release with `zero-study conformance`.",
            )
        for fault in changes.known_faults():
            if fault.package == package and fault.kind != "change" and fault.is_among(installed):
                yield Check(
                    f"{KNOWN_FAULTS} {package}", "note", f"{package} {version} has a known fault: {fault.summary}."
                )


def _extensions() -> Iterator[Check]:
    """Check which of DeepSpeed's extensions are built, and whether the missing ones can be built.

    Building needs a compiler, headers, ninja and libaio. Stale locks of earlier builds are removed.
    """
    for name, extension in extensions.OF_STRATEGIES.items():
        if extensions.is_built(name):
            yield Check(f"DeepSpeed's {name}", "ok", "The extension is built for this Python.")
        elif obstacle := extensions.obstacle(name):
            yield Check(f"DeepSpeed's {name}", "bites", *obstacle)
        else:
            message = (
                f"The extension is built when the first run of {extension.strategies} needs it, which takes "
                f"{extension.duration}."
            )
            yield Check(f"DeepSpeed's {name}", "note", message)
    for removed in torch_locks.remove_stale():
        yield Check("torch's extensions", "note", str(removed))
    for lock in torch_locks.unclear():
        yield Check("torch's extensions", "note", torch_locks.description(lock))


def _compile() -> Check:
    """Check whether torch.compile finds a compiler and the header of Python."""
    obstacle = inductor.obstacle(on_gpu=_has_gpu())
    if obstacle:
        return Check("torch.compile", "bites", *obstacle)
    return Check("torch.compile", "ok", "A compiler and Python's header files were found.")


def _has_gpu() -> bool:
    """Return whether NVIDIA's management library (NVML) or the folder of devices shows a GPU."""
    return bool(this_machine.find().gpu_memory_bytes) or extensions.sees_gpu()


def _cuda() -> Iterator[Check]:
    name = "CUDA toolkit"
    if not (_has("torch") and _has_gpu()):
        yield Check(name, "note", "No GPU was found, so no CUDA toolkit is needed.")
        return
    import torch

    chosen = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")  # as torch.utils.cpp_extension chooses
    on_path = None if chosen else shutil.which("nvcc")
    compiler = on_path or str(Path(chosen or "/usr/local/cuda") / "bin" / "nvcc")
    if torch.version.cuda is None:
        yield Check(
            name,
            "bites",
            "This machine has a GPU, but the installed torch is a build for CPUs only.",
            "Install torch for CUDA.",
        )
    elif not Path(compiler).exists():
        yield Check(name, "note", f"There is no nvcc. {WITHOUT_NVCC}", "Install the CUDA toolkit, or set CUDA_HOME.")
    else:
        output = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        yield _toolkit(output, ".".join(torch.version.cuda.split(".")[:2]))


def _toolkit(nvcc_output: str, torch_cuda: str) -> Check:
    """Check that DeepSpeed accepts the installed CUDA toolkit together with torch's CUDA version."""
    name = "CUDA toolkit"
    release = re.search(r"release (\d+\.\d+)", nvcc_output)
    if release is None:
        return Check(name, "note", "The version of nvcc is unknown: nvcc --version does not print it.")
    message = f"nvcc has version {release[1]}, and torch is built with CUDA {torch_cuda}."
    if _fit(release[1], torch_cuda):
        return Check(name, "ok", message)
    remedy = f"Install the toolkit of version {torch_cuda}. DS_SKIP_CUDA_CHECK=1 switches DeepSpeed's check off."
    return Check(name, "note", f"{message} {WITHOUT_NVCC}", remedy)


def _fit(toolkit: str, torch_cuda: str) -> bool:
    """Return whether DeepSpeed accepts a CUDA toolkit with torch's CUDA version.

    It does if the versions are equal, or if DeepSpeed lists them as compatible.
    """
    if toolkit == torch_cuda:
        return True
    lists: dict[int, list[str]] = {}
    with suppress(importlib.metadata.PackageNotFoundError, OSError):
        source = importlib.metadata.distribution("deepspeed").locate_file("deepspeed/ops/op_builder/builder.py")
        # Importing DeepSpeed would take seconds and look for compilers itself.
        written = re.search(r"^cuda_minor_mismatch_ok = (\{.*?^\})", Path(str(source)).read_text(), re.M | re.S)
        lists = ast.literal_eval(written[1]) if written else {}
    return any(toolkit in versions and torch_cuda in versions for versions in lists.values())


def _gpus() -> Iterator[Check]:
    gpus = this_machine.gpu_users()
    if not gpus:
        yield Check("GPUs", "note", "No GPU was found.")
    for name, running in gpus:
        if running:
            users = ", ".join(
                f"process {pid} ({f'{size / 1e9:.1f} GB' if size else 'unknown memory'})" for pid, size in running
            )
            yield Check(
                name,
                "note",
                f"It is used by {users}.",
                "End these processes, or select other GPUs with CUDA_VISIBLE_DEVICES.",
            )
        else:
            yield Check(name, "ok", "No process uses it.")


def _ranks() -> Iterator[Check]:
    """Check that two processes can communicate over gloo, and over NCCL if there are two GPUs."""
    if not _has("torch"):
        yield Check("two ranks", "unknown", "torch is not installed.", f"Run `{install_command('check')}`.")
        return
    num_gpus = len(this_machine.find().gpu_memory_bytes)
    for backend in ("gloo", *(["nccl"] if num_gpus > 1 else [])):
        start = time.monotonic()
        failure = _why_no_sum(backend)
        seconds = time.monotonic() - start
        if failure is None:
            yield Check(
                f"two {backend} ranks", "ok", f"Two processes started and added two numbers in {seconds:.0f} s."
            )
        else:
            remedy = (
                "Set GLOO_SOCKET_IFNAME to the name of the network interface."
                if backend == "gloo"
                else "Run this again with NCCL_DEBUG=INFO to see the reason."
            )
            yield Check(f"two {backend} ranks", "bites", failure, remedy)


def _why_no_sum(backend: str) -> str | None:
    """Start two ranks that add two numbers, and return why they fail. None if they succeed."""
    inherited = {name: value for name, value in os.environ.items() if not allowed.says_which_rank(name)}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (inherited.get("PYTHONPATH"), str(ROOT))))
    try:
        ranks = processes.run(["-c", RANKS, backend], 2, timeout_seconds=RANKS_SECONDS, environment=inherited)
    except RunFailed:
        return f"The two test processes do not connect within {RANKS_SECONDS} s."
    if [rank.result for rank in ranks] == [3, 3]:
        return None
    lines = [line for rank in ranks for line in rank.errors]
    return (
        f"The two test processes fail: {lines[-1][:200]}"
        if lines
        else "The two test processes end without an error message."
    )


def _pinned_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("pinned memory", "ok", "It has no limit.")
    verdict: Verdict = "ok" if soft >= 1 << 30 else "note"
    message = (
        f"It is limited to {soft / 2**20:.0f} MiB per process (ulimit -l). NVMe offload needs "
        "pinned memory for its buffers."
    )
    return Check(
        "pinned memory", verdict, message, "" if verdict == "ok" else "If NVMe offload fails, raise the limit."
    )


def _host_memory() -> Check:
    total, available = this_machine.find().host_memory_bytes, psutil.virtual_memory().available
    free = min(total, available)
    message = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free. Offload in fp32 needs 16 bytes per parameter."
    return Check("host memory", "ok" if free > total / 4 else "note", message)


def _disk(folder: Path) -> Iterator[Check]:
    """Check the free space and the speed of the disk on which a folder is.

    In each step, NVMe offload reads and writes the master weights and both moments, which take 12 bytes per parameter.
    """
    name = f"disk of {folder}"
    if not folder.is_dir() or why_not_writable(folder):
        yield Check(name, "bites", "This is not a folder that can be written.", "Name another folder with --disk.")
        return
    free = shutil.disk_usage(folder).free
    if free < 2 * DISK_BYTES:
        yield Check(
            name,
            "bites",
            f"Only {free / 1e9:.1f} GB are free.",
            "Free more space: NVMe offload needs 12 bytes per parameter.",
        )
        return
    write_speed, read_speed = _speed(folder)
    seconds = 12e9 / write_speed + 12e9 / read_speed
    message = (
        f"{free / 1e9:.0f} GB are free. The disk writes {write_speed / 1e9:.2f} and reads {read_speed / 1e9:.2f} GB/s: "
        f"with NVMe offload of 1e9 parameters, each step would wait {seconds:.0f} s for the disk."
    )
    yield Check(name, "ok", message)


def _speed(folder: Path) -> tuple[float, float]:
    """Measure the write speed and the read speed of a disk in bytes per second.

    Writing includes the sync to the disk. Reading bypasses the kernel's cache where the operating system allows that.
    """
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
            message = f"Port {PORT} is in use, and `accelerate launch` uses it by default."
            return Check("port", "note", message, "Pass --main_process_port 0, as zero-study does.")
    return Check("port", "ok", f"Port {PORT} is free.")


def _inherited() -> Check:
    """Check the environment for variables that would disturb a run.

    These are variables of a surrounding launcher, and variables that change a run without being in its configuration.
    """
    rank_variables = sorted(filter(allowed.says_which_rank, os.environ))
    if rank_variables:
        message = f"{', '.join(rank_variables)} would make a run believe that it is one of several processes."
        return Check("environment", "bites", message, f"Run `unset {' '.join(rank_variables)}`.")
    try:
        allowed.check_variables(os.environ)
    except Refusal as refusal:
        message, _, remedy = str(refusal).partition(". ")
        return Check("environment", "bites", f"{message}.", remedy)
    return Check(
        "environment",
        "ok",
        "The environment has no variable that only a launcher sets, and none that makes a run stop.",
    )
