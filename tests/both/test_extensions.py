"""DeepSpeed's extensions are built when first needed, by one process at a time; what is in the way is said before."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from refusing import refusal

from study.config import build_config
from study.run import make_run
from study.running import checks
from zero_study.engines import extensions, inductor
from zero_study.strategy.file import read_by_name

# A compiler with libaio's header and library, each of which a test can take away.
STUB_COMPILER = """#!/bin/sh
case "$1" in
-E) exit {header_status} ;;
-print-file-name=libaio.so) echo {library} ;;
-print-file-name=*) echo "${{1#*=}}" ;;
esac
"""

# A DeepSpeed whose builders leave a library of each part where torch would: after `BEFORE` of the test.
BUILDERS = """
import os, pathlib, sys, time
import torch.utils.cpp_extension

class Builder:
    def load(self):
        target = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"])
        for part in self.parts:
            (target / part).mkdir()
            (target / part / "build.ninja").write_text("build a.o: compile a.cpp\\nbuild b.o: compile b.cpp\\n")
            (target / part / "a.o").touch()
            {before}
            (target / part / (part + ".so")).write_text(repr([str(target), sys.path]))

class CPUAdamBuilder(Builder):
    parts = ["cpu_adam"]

class AsyncIOBuilder(Builder):
    parts = ["pin_memory", "async_io"]
"""


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    base = tmp_path / "torch extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(base))
    monkeypatch.setattr(extensions, "_failures", {})
    return base


@pytest.fixture(autouse=True)
def devices(tmp_path, monkeypatch):
    """An empty /dev and an environment that does not speak of GPUs: a machine without any."""
    devices = tmp_path / "dev"
    devices.mkdir()
    monkeypatch.setattr(extensions, "DEVICES", devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return devices


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A PATH of one empty folder, which also stands for the one where pip puts ninja; and no CXX."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    get_path = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tools) if name == "scripts" else get_path(name))
    return tools


def put_tool(path: Path, text: str = "#!/bin/sh\n") -> None:
    path.write_text(text)
    path.chmod(0o755)


def put_compiler(tools: Path, header_status: int = 0, library: str = "/usr/lib/libaio.so") -> None:
    put_tool(tools / "ninja")
    put_tool(tools / "c++", STUB_COMPILER.format(header_status=header_status, library=library))


def put_built(*parts: str) -> None:
    for part in parts:
        library = extensions.folder() / part / f"{part}.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()


def refused(*needs: str) -> str:
    return refusal(extensions.check, needs)


# ---------------------------------------------------------------- what is in the way


def test_without_a_compiler_only_what_needs_an_extension_is_refused(tools):
    put_tool(tools / "ninja")
    for name in extensions.EXTENSIONS:
        assert re.match(f"DeepSpeed's {name}.* no C.. compiler.*apt-get install g..", refused(name))
    offloading = make_run(build_config(), read_by_name("zero3_nvme_offload"), 2)
    assert refusal(checks.check, offloading) == refused("cpu_adam", "async_io")  # before anything is started
    for name in ("zero1", "zero2_tuned", "zero3", "ddp", "fsdp2"):
        checks.check(make_run(build_config(), read_by_name(name), 2))
        assert not read_by_name(name).needed_extensions
    put_built("cpu_adam")
    extensions.check({"cpu_adam"})  # what is built needs no compiler


@pytest.mark.parametrize(
    ("compiler", "missing"), [({"header_status": 1}, "libaio.h"), ({"library": "libaio.so"}, "libaio.so")]
)
def test_without_libaio_only_the_disk_is_refused(compiler, missing, tools):
    put_compiler(tools, **compiler)
    extensions.check({"cpu_adam"})
    message = refused("async_io")
    assert f"the compiler does not find {missing}" in message
    assert "libaio-dev" in message
    assert "libaio-devel" in message


def test_every_obstacle_names_its_remedy_and_no_other_command_of_ours(tools):
    said = [refused("cpu_adam")]
    put_tool(tools / "ninja")
    said.append(refused("cpu_adam"))
    put_compiler(tools, header_status=1)
    said.append(refused("async_io"))
    for line in said:
        assert re.search("install", line)
        assert not re.search("make |zero-study|python -m", line)


def test_what_is_built_for_another_processor_or_release_is_not_taken(tools, monkeypatch):
    put_compiler(tools)
    put_built("cpu_adam")
    assert extensions.is_built("cpu_adam")
    for name, value in (("_processor", ["x86_64", "another"]), ("_version", "0.0"), ("_device", "cuda")):
        with monkeypatch.context() as other:
            other.setattr(extensions, name, lambda *_, value=value: value)
            assert not extensions.is_built("cpu_adam")


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(extensions, "EXTENSIONS_DIR", tmp_path / "own")
    assert extensions.folder().is_relative_to(tmp_path / "own")
    (tmp_path / "own").touch()  # in the place of a folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert extensions.folder().is_relative_to(tmp_path / "cache")


# ---------------------------------------------------------------- what torch.compile needs


@pytest.mark.parametrize(
    ("num_gpus", "compiler", "variable", "package"), [(1, "gcc", "CC", "gcc"), (1, "clang", "CC", "gcc"),
                                                      (0, "g++", "CXX", "gcc-c++")],
)  # fmt: skip
def test_without_a_compiler_only_a_run_that_compiles_its_model_is_refused(
    num_gpus, compiler, variable, package, tools, monkeypatch
):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(checks, "_num_gpus", lambda: num_gpus)
    compiled, eager = (make_run(build_config(compile=value), read_by_name("ddp"), 1) for value in (True, False))
    checks.check(eager)
    message = refusal(checks.check, compiled)
    assert message.startswith("--compile")
    assert f"dnf install {package}`" in message
    put_tool(tools / compiler)
    checks.check(compiled)
    monkeypatch.setenv(variable, "another")
    assert "another" in refusal(checks.check, compiled)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_compiling_a_model_needs_the_header_of_python(on_gpu, tools, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    for name in ("gcc", "g++"):
        put_tool(tools / name)
    assert inductor.obstacle(on_gpu) is None
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tools))
    assert "Python.h" in inductor.obstacle(on_gpu).message


# ---------------------------------------------------------------- building


@pytest.fixture
def build(tmp_path, tools, monkeypatch):
    """Have a process of its own provide extensions from a stand-in for DeepSpeed; return the process."""
    put_compiler(tools)
    packages = tmp_path / "a folder of packages"
    package = packages / "deepspeed" / "ops" / "op_builder"
    package.mkdir(parents=True)
    compiling = packages / "torch" / "utils" / "cpp_extension.py"
    compiling.parent.mkdir(parents=True)
    compiling.write_text("def load(**options): ...\n")
    for parent in (package.parent, package.parent.parent, compiling.parent, compiling.parent.parent):
        (parent / "__init__.py").touch()

    def start(
        names: list[str], before: str = "pass", wait: bool = True, as_program: bool = False
    ) -> subprocess.Popen[str]:
        for module in ("__init__.py", "cpu.py"):
            (package / module).write_text(BUILDERS.format(before=before))
        code = f"""
import sys
sys.path.insert(0, {str(packages)!r})
from zero_study.engines import extensions
from zero_study.errors import Refusal
extensions.DEVICES = extensions.Path({str(tmp_path / "dev")!r})
extensions.HEARTBEAT_SECONDS = 0.2
extensions._search_path = lambda: {str(tools)!r}
print("ready", flush=True)
try:
    extensions.{f"main({names!r})" if as_program else f"provide({names!r}, 'this test')"}
except Refusal as refusal:
    print("REFUSED", refusal, file=sys.stderr)
    sys.exit(2)
"""
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        if wait:
            process.output, process.errors = process.communicate(timeout=60)
        return process

    return start


def built_parts(base: Path) -> set[str]:
    return {path.stem for path in base.glob("zero-study-*/*/*.so")}


@pytest.mark.parametrize("swaps_with_gds", [True, False])
def test_no_run_compiles_gpudirect_storage(swaps_with_gds, monkeypatch):
    monkeypatch.setattr(extensions, "check", lambda _: None)
    strategy = read_by_name("zero3_nvme_offload")
    content = {**strategy.deepspeed_json, "aio": {"use_gds": swaps_with_gds}}
    run = make_run(build_config(), replace(strategy, deepspeed_json=content), 1)
    if swaps_with_gds:
        assert "use_gds" in refusal(checks.check, run)
    else:
        checks.check(run)


# A machine with a GPU and without a CUDA toolkit, up to the call that would compile.
WITHOUT_TOOLKIT = """
import importlib, torch, torch.utils.cpp_extension as compiling
torch.cuda.is_available = lambda: True
compiling.CUDA_HOME = None
compiling.load = lambda name, with_cuda, extra_ldflags, **_: print(name, with_cuda, extra_ldflags)
for module, name in {builders}:
    builder = getattr(importlib.import_module(module), name)()
    builder.is_compatible = lambda *_: True
    builder.load()
"""


@pytest.mark.slow
@pytest.mark.launches
def test_no_run_needs_a_cuda_toolkit(monkeypatch):
    """On a GPU, no extension that a strategy needs is compiled with nvcc, or linked with libraries of CUDA."""
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setenv("PATH", os.pathsep.join([extensions._search_path(), os.defpath]))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    needed = [extensions.OF_STRATEGIES[name] for name in extensions.OF_STRATEGIES]
    code = WITHOUT_TOOLKIT.format(builders=[(extension.module, extension.builder) for extension in needed])
    completed = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    parts = tuple(part for extension in needed for part in extension.parts)
    compiled = [line for line in completed.stdout.splitlines() if line.startswith(parts)]
    assert len(compiled) == len(parts), completed.stderr
    for line in compiled:
        assert "True" not in line
        assert "-lcuda" not in line


@pytest.mark.launches
def test_what_is_missing_is_built_once_with_progress_and_through_plain_paths(build, base):
    """The folders of this test have spaces in their names, of which PyTorch quotes only some."""
    first = build(["cpu_adam", "async_io"], before="time.sleep(0.7)")
    assert first.returncode == 0, first.errors
    assert built_parts(base) == {"cpu_adam", "pin_memory", "async_io"}
    lines = first.errors.splitlines()
    assert sum("this test needs it" in line for line in lines) == 2
    assert any("1 of 2 files compiled" in line for line in lines)
    assert not list(base.glob("zero-study-*/building-*"))
    for library in base.glob("zero-study-*/*/*.so"):
        assert "a folder of packages" not in library.read_text()
        assert "torch extensions" not in library.read_text()
    again = build(["cpu_adam", "async_io"], before="raise AssertionError")
    assert (again.returncode, again.errors) == (0, "")


@pytest.mark.launches
def test_of_two_that_start_at_once_one_builds_and_the_other_waits(build, base):
    before = f"time.sleep(1); open({str(base / 'count')!r}, 'a').write('built ')"
    both = [build(["cpu_adam"], before, wait=False) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert (base / "count").read_text() == "built "
    assert sorted("Waiting for DeepSpeed's" in text for text in errors) == [False, True]


def wait_for_a_file(base: Path, part: str) -> None:
    """Wait until a build has compiled its first file."""
    deadline = time.monotonic() + 60
    while not list(base.glob(f"zero-study-*/building-*/{part}/a.o")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.launches
def test_a_build_does_not_wait_for_that_of_another_extension(build, base):
    long = build(["async_io"], before="time.sleep(60)", wait=False)
    wait_for_a_file(base, "*")
    short = build(["cpu_adam"])
    assert (short.returncode, built_parts(base)) == (0, {"cpu_adam"}), short.errors
    assert "waiting" not in short.errors
    long.kill()
    long.communicate()


@pytest.mark.launches
def test_a_killed_build_does_not_block_the_next_one(build, base):
    killed = build(["cpu_adam"], before="time.sleep(60)", wait=False)
    wait_for_a_file(base, "cpu_adam")
    killed.kill()
    killed.communicate()
    assert not built_parts(base)
    next_one = build(["cpu_adam"])
    assert next_one.returncode == 0, next_one.errors
    assert built_parts(base) == {"cpu_adam"}
    assert not list(base.glob("zero-study-*/building-*"))


@pytest.mark.launches
def test_a_build_that_is_asked_to_end_ends_its_compilers(build, base):
    process = build(["cpu_adam"], before="time.sleep(60)", wait=False, as_program=True)
    wait_for_a_file(base, "cpu_adam")
    compilers = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert compilers
    assert psutil.wait_procs(compilers, timeout=10)[1] == []
    assert not list(base.glob("zero-study-*/building-*"))


@pytest.mark.launches
def test_a_failed_build_shows_why_and_leaves_nothing(build, base):
    fault = "raise RuntimeError('Error building extension:\\ncpu_adam.cpp:1:10: fatal error: no such thing')"
    failed = build(["cpu_adam"], before=fault.replace("\n", "\\n"))
    assert failed.returncode == 2
    assert "  | cpu_adam.cpp:1:10: fatal error: no such thing" in failed.errors
    assert not built_parts(base)
    assert not list(base.glob("zero-study-*/building-*"))


def test_a_failed_build_is_not_tried_again_by_the_same_process(monkeypatch):
    monkeypatch.setattr(extensions, "_failures", {extensions.folder() / "cpu_adam": "it failed"})
    monkeypatch.setattr(extensions, "check", lambda needs: None)
    assert refusal(extensions.provide, ["cpu_adam"], "a run") == "it failed"


def test_a_folder_that_nobody_can_write_is_refused_in_one_line(tools, monkeypatch):
    put_compiler(tools)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", os.devnull)
    assert re.search(
        "cannot be built in this folder .* Set TORCH_EXTENSIONS_DIR", refusal(extensions.provide, ["cpu_adam"], "")
    )


# ---------------------------------------------------------------- using


def test_deepspeed_takes_what_is_built_and_compiles_the_rest(monkeypatch):
    class OpBuilder:
        def jit_load(self, verbose=True):
            return "compiled"

    class Adam(OpBuilder):
        name = "cpu_adam"

    backend = SimpleNamespace(build_shm_op=lambda: "compiled")
    builder = SimpleNamespace(OpBuilder=OpBuilder)
    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.op_builder", "deepspeed.comm"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder.builder", builder)
    monkeypatch.setitem(sys.modules, "deepspeed.comm.torch", backend)
    monkeypatch.setattr(extensions, "_import", lambda name, library: ("loaded", name, library))
    extensions.use_built()
    extensions.use_built()
    assert Adam().jit_load() == "compiled"
    put_built("cpu_adam")
    assert Adam().jit_load() == ("loaded", "cpu_adam", extensions.folder() / "cpu_adam" / "cpu_adam.so")
    assert backend.build_shm_op() is None
