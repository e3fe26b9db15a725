"""Build DeepSpeed's compiled extensions before a run that needs them, and make DeepSpeed load them.

Without this module, DeepSpeed compiles an extension inside the training process, which takes minutes without a message.
A build that was killed leaves a lock for which every later process waits forever, and a path with a space breaks the
linker's command. Here, `provide` builds extensions before the training processes start, and prints its progress. Its
lock is released by the kernel when the process ends, and a folder gets its final name only when the build is complete.
`use_built` then makes DeepSpeed load these files. Only `use_built` imports torch, because a build runs in a process of
its own.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from .. import processes, terminal
from ..errors import Refusal
from ..files import ROOT, belongs_to_others, can_be_written, own_temporary_folder

EXTENSIONS_DIR = ROOT / ".torch_extensions"
DEVICES = Path("/dev")


@dataclass(frozen=True, kw_only=True)
class Extension:
    module: str  # DeepSpeed's module with the builder
    builder: str
    parts: tuple[str, ...]  # the shared libraries that it consists of; the last one has the extension's name
    purpose: str
    duration: str  # duration of the build on two cores
    strategies: str  # the strategies that need it, as a pattern for messages


OF_STRATEGIES = {
    "cpu_adam": Extension(
        module="deepspeed.ops.op_builder",
        builder="CPUAdamBuilder",
        parts=("cpu_adam",),
        purpose="updates offloaded optimizer states on the CPU",
        duration="about 1 min",
        strategies="zero*_offload",
    ),
    # The builder for CPUs compiles the same sources as the one for GPUs, which needs a CUDA toolkit and its libraries.
    "async_io": Extension(
        module="deepspeed.ops.op_builder.cpu",
        builder="AsyncIOBuilder",
        parts=("pin_memory", "async_io"),
        purpose="swaps model states to a disk",
        duration="about 3 min",
        strategies="zero*_nvme_offload",
    ),
}

# Only the conformance tests of optimizers need these.
OF_OPTIMIZERS = {
    "fused_adam": Extension(
        module="deepspeed.ops.op_builder",
        builder="FusedAdamBuilder",
        parts=("fused_adam",),
        purpose="is the Adam that DeepSpeed builds if its file names the optimizer",
        duration="about 1 min",
        strategies="an optimizer in DeepSpeed's file",
    ),
    "cpu_lion": Extension(
        module="deepspeed.ops.op_builder",
        builder="CPULionBuilder",
        parts=("cpu_lion",),
        purpose="updates offloaded states of Lion on the CPU",
        duration="about 1 min",
        strategies="Lion under offload",
    ),
}
EXTENSIONS = OF_STRATEGIES | OF_OPTIMIZERS

HEARTBEAT_SECONDS = 10
FAILURE_LINES = 12

# A path that needs no quoting for a shell, ninja or the linker. PyTorch quotes only some of the paths that it writes.
_PLAIN_PATH = re.compile(r"[\w@%+=:,./-]*", re.ASCII)

_failures: dict[Path, str] = {}  # builds that failed in this process, so that they are not repeated for every run


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def folder() -> Path:
    """Return the folder of compiled extensions, which is in TORCH_EXTENSIONS_DIR or in a default folder.

    The folder's name has a digest of what a build depends on: the releases of Python, torch and DeepSpeed, the device,
    and the processor. Several machines can therefore share a home directory.
    """
    facts = [sys.implementation.cache_tag, _version("torch"), _version("deepspeed"), _device(), _processor()]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    return _base_folder() / f"zero-study-{digest}"


def _base_folder() -> Path:
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    if configured:
        return Path(configured)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~").expanduser() / ".cache")
    in_home = cache / "zero-study" / "extensions"
    if can_be_written(EXTENSIONS_DIR):
        folder = EXTENSIONS_DIR
    elif can_be_written(in_home) and not belongs_to_others(in_home):
        folder = in_home
    else:
        folder = own_temporary_folder("zero-study-extensions")
    # DeepSpeed compiles for a GPU under the same names with other flags.
    return folder / _device()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device() -> str:
    return "cuda" if sees_gpu() else "cpu"


def _processor() -> list[str]:
    """Return the processor's architecture and instruction sets, as far as Linux lists them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return [platform.machine(), *sorted(line.partition(":")[2].split())]
    return [platform.machine()]


def sees_gpu() -> bool:
    """Return whether torch will probably see a GPU, without importing torch.

    It looks for a device of NVIDIA's driver or of WSL, and checks that CUDA_VISIBLE_DEVICES does not hide all GPUs.
    A wrong guess does little harm: the name of a folder depends on it, and what `doctor` says if NVML finds no GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip().partition(",")[0] in ("", "-1"):  # CUDA stops at the first bad one
        return False
    return any(any(DEVICES.glob(pattern)) for pattern in ("nvidia[0-9]*", "dxg"))


def use_own_folder() -> None:
    """Set the ninja program and the folder with which torch compiles extensions other than those in `EXTENSIONS`.

    This changes the environment of this process and its children.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = str(_base_folder())
    os.environ["PATH"] = _search_path()


def _search_path() -> str:
    """Return PATH with the folder of this Python's scripts first, so that torch finds the ninja that pip installed.

    A version of ninja does not read the log of another version. If one run used the system's ninja and the next run
    that of pip, each of them would compile everything again.
    """
    scripts = sysconfig.get_path("scripts")
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join([scripts, *(entry for entry in entries if entry != scripts)])


# ---------------------------------------------------------------- built extensions, and obstacles to building


def is_built(name: str) -> bool:
    """Return whether a run can load an extension without compiling it."""
    return all(_library(part).is_file() or _is_precompiled(part) for part in EXTENSIONS[name].parts)


def _library(part: str) -> Path:
    return folder() / part / f"{part}.so"


def _is_precompiled(part: str) -> bool:
    """Return whether the installed DeepSpeed contains a compiled library (DS_BUILD_OPS=1), as in NVIDIA's images."""
    spec = importlib.util.find_spec("deepspeed")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return any(any(Path(folder).glob(f"ops/*/{part}_op*.so")) for folder in folders)


def check(needs: Collection[str]) -> None:
    """Raise Refusal if a needed extension is not built and cannot be built here. This takes milliseconds."""
    for name in sorted(needs):
        if reason := obstacle(name):
            raise Refusal(str(reason))


class Obstacle(NamedTuple):
    """The reason why something cannot be built, and the remedy, each in one or more sentences."""

    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"


def obstacle(name: str) -> Obstacle | None:
    """Return the reason why an extension cannot be built. None if it can, or if it is built already."""
    if is_built(name):
        return None
    failure = f"DeepSpeed's {name}, which {EXTENSIONS[name].purpose}, cannot be compiled"
    if shutil.which("ninja", path=_search_path()) is None:
        return Obstacle(f"{failure}: ninja is not on PATH.", "Run `pip install ninja`.")
    command = os.environ.get("CXX") or "c++"
    compiler = shutil.which(shlex.split(command)[0])
    if compiler is None:
        return Obstacle(
            f"{failure}: there is no C++ compiler, because {command} is not on PATH.",
            "To install g++, run `apt-get install g++` or `dnf install gcc-c++`. Or set CXX.",
        )
    if without_header := missing_header(failure):
        return without_header
    if name == "async_io" and (missing := _missing_of_libaio(compiler)):
        return Obstacle(
            f"{failure}: the compiler does not find {missing}.",
            "To install it, run `apt-get install libaio-dev` or `dnf install libaio-devel`. If libaio is somewhere "
            "else, set CPATH and LIBRARY_PATH.",
        )
    return None


def missing_header(failure: str) -> Obstacle | None:
    """Return an Obstacle if Python's C header Python.h is missing, otherwise None.

    `failure` says what fails without it.
    """
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Obstacle(
        f"{failure}: {header} is missing.",
        f"To install it, run `apt-get install python{version}-dev` or `dnf install python{version}-devel`.",
    )


def _missing_of_libaio(compiler: str) -> str | None:
    """Return the file of the library libaio that the compiler does not find. None if it finds all of them.

    The preprocessor is asked for the header, and the compiler driver for the library. This is much faster than to
    compile.
    """

    def ask(*arguments: str, source: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([compiler, *arguments], input=source, capture_output=True, text=True, check=False)

    if ask("-E", "-x", "c++", "-", source="#include <libaio.h>\n").returncode != 0:
        return "libaio.h"
    # If there is no such file, the compiler prints the bare name.
    present = any(
        Path(ask(f"-print-file-name={name}").stdout.strip()).is_absolute() for name in ("libaio.so", "libaio.a")
    )
    return None if present else "libaio.so"


# ---------------------------------------------------------------- building


def provide(needs: Collection[str], needed_by: str, say: Callable[[str], None] = say_on_stderr) -> None:
    """Build all extensions of `needs` that are not built yet.

    If another process is building one, wait for it. `needed_by` names the strategy in the printed lines. Raises Refusal
    if an extension cannot be built. The first line of the message is the cause, and the others are the compiler's last
    lines.
    """
    for name in sorted(needs):
        check([name])
        if is_built(name):
            continue
        place = folder()
        if place / name in _failures:
            raise Refusal(_failures[place / name])
        try:
            place.mkdir(parents=True, exist_ok=True)
            with _one_builder(place, name, say):
                if not is_built(name):
                    _build(name, place, needed_by, say)
        except OSError as error:
            raise Refusal(
                f"{place}: DeepSpeed's {name} cannot be built in this folder ({error.strerror}). Set "
                "TORCH_EXTENSIONS_DIR to a folder that can be written."
            ) from None


@contextmanager
def _one_builder(place: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock for building one extension in a folder, and print messages while another process holds it.

    Each extension has its own lock, so that a run that needs cpu_adam does not wait the minutes that async_io takes.
    """
    lock = FileLock(place / f"{name}.lock")
    began, waiting = time.monotonic(), False
    while True:
        try:
            lock.acquire(timeout=HEARTBEAT_SECONDS if waiting else 0)
            break
        except Timeout:
            if not waiting:
                duration = EXTENSIONS[name].duration
                say(f"Waiting for DeepSpeed's {name}, which another process compiles ({duration} on two cores) ...")
                waiting = True
            else:
                say(f"  ... waiting, {time.monotonic() - began:.0f} s")
    try:
        yield
    finally:
        lock.release()


def _build(name: str, place: Path, needed_by: str, say: Callable[[str], None]) -> None:
    """Build one extension in a temporary folder, and move its libraries to their final place."""
    extension = EXTENSIONS[name]
    say(
        f"Building DeepSpeed's {name}, which {extension.purpose}: {needed_by} needs it. This takes "
        f"{extension.duration} on two cores, once."
    )
    for abandoned in place.glob(f"building-{name}-*"):  # by killed builds, because this process has the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"building-{name}-", dir=place))
    began = time.monotonic()
    try:
        with _plain_paths(scratch) as (target, search_path):
            status, output = _load_in_a_process(extension, target, search_path, scratch, say)
        missing = [part for part in extension.parts if not (scratch / part / f"{part}.so").is_file()]
        if status or missing:
            lines = [line[:300].rstrip() for line in output.splitlines() if line.strip()] or ["it printed nothing"]
            cause = next((line.strip() for line in lines if "error:" in line), lines[-1].strip())
            details = "\n".join(f"  | {line}" for line in lines[-FAILURE_LINES:])
            _failures[place / name] = (
                f"DeepSpeed's {name}, which {needed_by} needs, could not be built: {cause}\n{details}"
            )
            raise Refusal(_failures[place / name])
        for part in extension.parts:  # the one with the extension's name comes last
            shutil.rmtree(place / part, ignore_errors=True)
            (scratch / part).rename(place / part)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"  DeepSpeed's {name} is built ({time.monotonic() - began:.0f} s).")


@contextmanager
def _plain_paths(scratch: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folder of a build and Python's search path, without characters that would need quoting.

    PyTorch does not quote every path that it passes to the linker. A path that has a space, for instance, is replaced
    during the build by a link in a temporary folder.
    """
    search_path = [os.path.abspath(entry) for entry in sys.path if entry]
    if all(_PLAIN_PATH.fullmatch(path) for path in [str(scratch), *search_path]):
        yield scratch, search_path
        return
    places = [path for path in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm") if _PLAIN_PATH.fullmatch(path)]
    with tempfile.TemporaryDirectory(prefix="zero-study-", dir=next(filter(os.path.isdir, places))) as name:

        def linked(path: str) -> str:
            if _PLAIN_PATH.fullmatch(path):
                return path
            link = Path(name) / str(len(os.listdir(name)))
            link.symlink_to(path)
            return str(link)

        yield Path(linked(str(scratch.absolute()))), [linked(path) for path in search_path]


# -g0 removes the debug information that DeepSpeed requests, which takes a quarter of the compiler's time.
_LOAD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch.utils.cpp_extension as compiling
load = compiling.load
compiling.load = lambda extra_cflags, **options: load(extra_cflags=[*extra_cflags, "-g0"], **options)
from {module} import {builder}
{builder}().load()
"""


def _load_in_a_process(
    extension: Extension, target: Path, search_path: list[str], scratch: Path, say: Callable[[str], None]
) -> tuple[int, str]:
    """Run a process in which DeepSpeed builds and loads an extension. Return its exit status and its output."""
    code = _LOAD.format(module=extension.module, builder=extension.builder)
    command = processes.with_parent_death_signal([sys.executable, "-c", code, json.dumps(search_path)])
    environment = {**os.environ, "PATH": _search_path(), "TORCH_EXTENSIONS_DIR": str(target)}
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=scratch
        )
        try:
            while True:
                try:
                    status = process.wait(HEARTBEAT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  ... {_progress(scratch)}{time.monotonic() - began:.0f} s")
        finally:
            processes.end(process)
        log.seek(0)
        return status, log.read().decode(errors="replace")


def _progress(scratch: Path) -> str:
    """Return a text that says how many files ninja has compiled. Empty if ninja has no files yet."""
    planned = sum(text.read_text().count(": compile ") for text in scratch.glob("*/build.ninja"))
    return f"{len([*scratch.glob('*/*.o')])} of {planned} files compiled, " if planned else ""


# ---------------------------------------------------------------- using what is built


def use_built() -> None:
    """Make DeepSpeed in this process load the extensions that `provide` has built, instead of compiling them again.

    On a CPU, DeepSpeed also loads a kernel for all-reduces in shared memory as it starts. Only inference and tensor
    parallelism call it, and without it DeepSpeed uses torch.distributed for all-reduces, as on machines that do not
    support the kernel. No training here needs it, so it is not compiled.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    backend = importlib.import_module("deepspeed.comm.torch")  # as an attribute of deepspeed.comm, `torch` is PyTorch
    compile_and_load = OpBuilder.jit_load
    if hasattr(compile_and_load, "loads_built"):
        return

    def jit_load(builder: Any, verbose: bool = True) -> Any:
        library = _library(builder.name)
        return _import(builder.name, library) if library.is_file() else compile_and_load(builder, verbose)

    jit_load.loads_built = True  # type: ignore[attr-defined]
    OpBuilder.jit_load = jit_load
    if hasattr(backend, "build_shm_op"):
        backend.build_shm_op = lambda: None  # type: ignore[attr-defined]


@cache  # DeepSpeed asks for a module once per object that uses it
def _import(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(names: Collection[str]) -> int:
    """Build the named extensions, or all extensions if none is named. Return 1 if one cannot be built, otherwise 0."""
    signal.signal(signal.SIGTERM, _end)
    if importlib.util.find_spec("deepspeed") is None:
        raise Refusal("deepspeed is not installed. Run `pip install deepspeed`.")
    if unknown := sorted(set(names) - set(EXTENSIONS)):
        raise Refusal(f"there is no extension {', '.join(unknown)}. Choose from {', '.join(EXTENSIONS)}.")
    complete = True
    for name in names or EXTENSIONS:
        try:
            provide([name], f"every strategy {EXTENSIONS[name].strategies}")
        except Refusal as refusal:
            complete = False
            terminal.print_error(refusal)
    return 0 if complete else 1


def _end(number: int, _: Any) -> None:
    sys.exit(128 + number)  # as an exception, so that a build ends the compilers that it has started


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refusal as refusal:
        terminal.print_error(refusal)
        sys.exit(2)
