"""DeepSpeed's extensions: whether those that a run needs are built and load here; `python -m` builds them.

DeepSpeed compiles them at their first use, silently and for minutes; where such a build was killed, every later one
waits for ever. So setup builds them once, into a folder of the project's own, and a run asks `check` before it starts.
Nothing here imports torch: a build is a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from study.errors import Refusal
from study.files import ROOT

EXTENSIONS_DIR = ROOT / ".torch_extensions"
DEVICES = Path("/dev")


@dataclass(frozen=True, kw_only=True)
class Extension:
    module: str  # where DeepSpeed keeps its builder
    builder: str
    folders: tuple[str, ...]  # that it is built in, below `folder()`
    duration: str  # of the build, on two cores
    strategies: str  # the files in accelerate_configs/ that cannot do without it
    cpu_only: bool = False  # needed, and built, only where there is no GPU


EXTENSIONS = {
    # Loaded by DeepSpeed whenever it starts without a GPU, whatever it is then asked to do.
    "deepspeed_shm_comm": Extension(
        module="deepspeed.ops.op_builder.cpu",
        builder="ShareMemCommBuilder",
        folders=("deepspeed_shm_comm",),
        duration="about 30 s",
        strategies="zero*.yaml",
        cpu_only=True,
    ),
    "cpu_adam": Extension(
        module="deepspeed.ops.op_builder",
        builder="CPUAdamBuilder",
        folders=("cpu_adam",),
        duration="about 40 s",
        strategies="*_offload.yaml",
    ),
    "async_io": Extension(
        module="deepspeed.ops.op_builder",
        builder="AsyncIOBuilder",
        folders=("pin_memory", "async_io"),
        duration="2 to 3 min",
        strategies="*_nvme_offload.yaml",
    ),
}

HEARTBEAT_SECONDS = 20
FAILURE_LINES = 12


def folder() -> Path:
    """Return where extensions are built: TORCH_EXTENSIONS_DIR if that is set, the project's own folder otherwise.

    The project's own is one per device, because DeepSpeed compiles for a GPU under the same names with other flags: in
    one folder, a run on the CPU of a GPU box would compile everything again, and the next one on its GPUs once more.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else EXTENSIONS_DIR / ("cuda" if sees_gpu() else "cpu")


def sees_gpu() -> bool:
    """Guess what torch will see: a device of NVIDIA's driver, or of WSL's, unless CUDA_VISIBLE_DEVICES hides them all.

    Only a folder hangs on it: a box that this misjudges builds there what it needs.
    """
    return any(any(DEVICES.glob(pattern)) for pattern in ("nvidia[0-9]*", "dxg")) and not _hides_gpus()


def _hides_gpus() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.strip().partition(",")[0] in ("", "-1")  # CUDA stops at the first bad one


def use_own_folder() -> None:
    """Set, for this process and its children, where torch looks for extensions and for ninja."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder())
    os.environ["PATH"] = _search_path()


def look_at_the_processor_once() -> None:
    """Spare this process a second at each load of an extension: DeepSpeed asks anew what the processor is."""
    with suppress(ModuleNotFoundError):
        import cpuinfo  # comes with DeepSpeed

        cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)


def check(needs: Collection[str]) -> None:
    """Raise Refusal where a run that needs these of `EXTENSIONS` would fail to load one, wait for ever, or build it."""
    if unknown := set(needs) - set(EXTENSIONS):
        raise ValueError(f"unknown extensions {sorted(unknown)}; there are {', '.join(EXTENSIONS)}")
    for name in sorted(needs):
        if found := obstacle(name):
            raise Refusal(found)
    missing = {name: reason for name in sorted(needs) if (reason := unbuilt(name))}
    if missing:
        command = f"{'CUDA_VISIBLE_DEVICES= ' if _hides_gpus() else ''}python -m study.engines.extensions"
        reasons = " and ".join(sorted(set(missing.values())))
        raise Refusal(
            f"DeepSpeed's {' and '.join(missing)}, which this strategy needs{'' if sees_gpu() else ' on a CPU'}, "
            f"{'are' if len(missing) > 1 else 'is'} {reasons}; run: {command}"
        )


def stale_locks() -> list[Path]:
    """Find the locks of builds that were killed: torch's FileBaton holds its file open for as long as it builds.

    A lock is passed over when its holder could be out of sight: a Python process of the lock's owner whose descriptors
    this user may not read. A holder on another machine or in another container cannot be seen at all.
    """
    locks = {}
    for path in sorted(folder().glob("*/lock")):
        with suppress(FileNotFoundError):  # released while we looked
            status = path.stat()
            locks[status.st_dev, status.st_ino] = (path, status.st_uid)
    if not locks or not Path("/proc/self/fd").exists():
        return []

    held, unreadable_owners = set(), set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # ended while we looked
            try:
                held |= _open_locks(process)
            except PermissionError:
                if b"python" in (process / "cmdline").read_bytes().partition(b"\0")[0]:
                    unreadable_owners.add(process.stat().st_uid)
    return [
        path
        for inode, (path, owner) in locks.items()
        if inode not in held and owner not in unreadable_owners and path.exists()
    ]


def _open_locks(process: Path) -> set[tuple[int, int]]:
    """Return device and inode of each file called lock that this folder of /proc shows as open."""
    locks = set()
    for descriptor in os.listdir(process / "fd"):
        link = process / "fd" / descriptor
        with suppress(FileNotFoundError):  # closed while we looked
            if os.readlink(link).endswith("/lock"):
                status = link.stat()
                locks.add((status.st_dev, status.st_ino))
    return locks


def build(names: Collection[str] = ()) -> int:
    """Build what can be built here of these, or of all, saying so; return 0 if each can now be loaded, 1 otherwise."""
    if unknown := sorted(set(names) - set(EXTENSIONS)):
        raise Refusal(f"no extension is named {', '.join(unknown)}; there are {', '.join(EXTENSIONS)}")
    use_own_folder()
    complete = True
    for name in names or EXTENSIONS:
        extension = EXTENSIONS[name]
        if extension.cpu_only and sees_gpu():
            continue
        failure = obstacle(name) or _load(name)
        if failure:
            complete = False
            strategies = sorted(path.stem for path in (ROOT / "accelerate_configs").glob(extension.strategies))
            where = " where there is no GPU" if extension.cpu_only else ""
            print(f"{failure}\n  until then these strategies are skipped{where}: {', '.join(strategies)}", flush=True)
    return 0 if complete else 1


def _search_path() -> str:
    """Return PATH with the folder of this Python's scripts in front: pip put ninja there, and torch asks PATH for it.

    In front, because one ninja does not read another version's log: were it the system's in one run and pip's in the
    next, each would compile everything again.
    """
    scripts = sysconfig.get_path("scripts")
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join([scripts, *(entry for entry in entries if entry != scripts)])


def unbuilt(name: str) -> str | None:
    """Say why a run would compile an extension as it starts, for minutes; None: it would not."""
    if not _is_built(name):
        return "not built yet"
    # torch compiles again what was compiled by another command, which names the folder of its headers.
    headers = f"{_folder_of('torch')}/include"
    for part in EXTENSIONS[name].folders:
        commands = folder() / part / "build.ninja"
        if commands.is_file() and headers not in commands.read_text():
            return "built for another Python, or in another folder"
    return None


def _folder_of(package: str) -> str | None:
    found = importlib.util.find_spec(package)
    places = list(found.submodule_search_locations or []) if found else []
    return places[0] if places else None


def building(name: str) -> bool:
    """Whether a process is building an extension at this moment, as far as its lock says."""
    locks = [folder() / part / "lock" for part in EXTENSIONS[name].folders]
    return any(lock.exists() for lock in locks) and not {*locks} & {*stale_locks()}


def _is_built(name: str) -> bool:
    return all((folder() / part / f"{part}.so").is_file() or _came_along(part) for part in EXTENSIONS[name].folders)


def _came_along(part: str) -> bool:
    """Say whether DeepSpeed was installed with this one compiled (DS_BUILD_OPS=1), as NVIDIA's images have it."""
    place = _folder_of("deepspeed")
    return place is not None and any(Path(place).glob(f"ops/*/{part}_op*.so"))


def obstacle(name: str) -> str | None:
    """Say in one line what keeps an extension from being loaded, None if nothing seen; takes milliseconds."""
    for lock in stale_locks():
        if lock.parent.name in EXTENSIONS[name].folders:
            return (
                f"{lock} was left by a build that was killed, and every run would wait for it for ever; run: "
                f"rm {shlex.quote(str(lock))}"
            )
    if shutil.which("ninja", path=_search_path()) is None:
        return f"ninja, which torch needs to load DeepSpeed's {name}, is not on PATH; run: pip install ninja"

    # DeepSpeed links a program against libaio whenever it loads async_io; the others, once built, need no compiler.
    if _is_built(name) and name != "async_io":
        return None
    wanted = os.environ.get("CXX") or "c++"
    compiler = shutil.which(shlex.split(wanted)[0])
    if compiler is None:
        return (
            f"no C++ compiler: {wanted} is not on PATH, and DeepSpeed's {name} needs it; install g++ "
            "(apt-get install g++, dnf install gcc-c++) or set CXX, then run: make setup"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not _is_built(name) and not header.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"{header} is missing, which compiling DeepSpeed's {name} needs; install python{version}-dev (apt-get) "
            f"or python{version}-devel (dnf), then run: make setup"
        )
    if name == "async_io" and (lacking := _lacking_of_libaio(compiler)):
        return (
            f"the compiler finds no {lacking}, which DeepSpeed's async_io needs; install libaio-dev (apt-get) or "
            "libaio-devel (dnf), or set CPATH and LIBRARY_PATH to where libaio is, then run: make setup"
        )
    return None


def _lacking_of_libaio(compiler: str) -> str | None:
    """Ask the preprocessor for the header and the driver for the library: much cheaper than to compile."""

    def ask(*arguments: str, source: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([compiler, *arguments], input=source, capture_output=True, text=True, check=False)

    if ask("-E", "-x", "c++", "-", source="#include <libaio.h>\n").returncode != 0:
        return "libaio.h"
    # The bare name comes back where there is no such file.
    present = any(
        Path(ask(f"-print-file-name={name}").stdout.strip()).is_absolute() for name in ("libaio.so", "libaio.a")
    )
    return None if present else "libaio.so"


def _load(name: str) -> str | None:
    """Load one extension as a run will, in a process of its own, so that DeepSpeed builds it; return why it failed."""
    extension = EXTENSIONS[name]
    parts = " and ".join(extension.folders)
    if _is_built(name):
        print(f"checking DeepSpeed's {parts} ...", flush=True)
    else:
        print(f"building DeepSpeed's {parts} ({extension.duration}, once) ...", flush=True)
    load = f"from {extension.module} import {extension.builder}; {extension.builder}().load()"
    command = [sys.executable, "-c", load]
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=HEARTBEAT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                print(f"  ... {time.monotonic() - start:.0f} s", flush=True)
    if process.returncode == 0:
        return None
    lines = [line[:300] for line in output.splitlines() if line.strip()][-FAILURE_LINES:]
    return "\n".join([f"DeepSpeed's {name} does not build; its last lines:", *(f"  | {line}" for line in lines)])


if __name__ == "__main__":
    if importlib.util.find_spec("deepspeed") is None:
        sys.exit("zero-study: deepspeed is not installed; run: pip install 'zero-study[train]'")
    try:
        sys.exit(build(sys.argv[1:]))
    except Refusal as refusal:
        print(f"zero-study: {refusal}", file=sys.stderr)
        sys.exit(2)
