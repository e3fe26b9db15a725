"""What would hang or fail inside a run is refused before it, in one line that says what to do."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusing import refusal

from study.config import build_config
from study.engines import extensions
from study.errors import Refusal
from study.run import make_run
from study.running import checks
from study.strategy.file import read_by_name

HOLD = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); sys.stdin.read()"

# A compiler with libaio's header and library, each of which a test can take away.
STUB_COMPILER = """#!/bin/sh
case "$1" in
-E) exit {header_status} ;;
-print-file-name=libaio.so) echo {library} ;;
-print-file-name=*) echo "${{1#*=}}" ;;
esac
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "torch extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def devices(tmp_path, monkeypatch):
    """An empty /dev and an environment that does not speak of GPUs: a box without any."""
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


def put_built(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{name}.so").touch()


ALL = ("deepspeed_shm_comm", "cpu_adam", "pin_memory", "async_io")


def refused(*needs: str) -> str:
    return refusal(extensions.check, needs)


@pytest.mark.launches
def test_lock_is_stale_only_once_its_builder_is_dead(folder):
    lock = folder / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout.readline() == "held\n"
        assert extensions.stale_locks() == []
        builder.kill()
        builder.wait()
    assert extensions.stale_locks() == [lock]


def test_check_names_a_stale_lock_and_the_command_that_deletes_it(folder, tools):
    put_compiler(tools)
    put_built(folder, *ALL)
    lock = folder / "pin_memory" / "lock"
    lock.touch()
    message = refused("async_io", "cpu_adam")
    assert str(lock) in message
    command = message.rpartition("run: ")[2]
    subprocess.run(["/bin/sh", "-c", f"PATH=/usr/bin:/bin; {command}"], check=True)
    assert not lock.exists()
    extensions.check({"async_io", "cpu_adam"})


def test_check_refuses_without_a_compiler(tools):
    put_tool(tools / "ninja")
    for name in extensions.EXTENSIONS:
        assert re.match(f"no C.. compiler: c.. is not on PATH.*{name}.*apt-get install g..", refused(name))
    run = make_run(build_config(), read_by_name("zero3_nvme_offload"), 2)
    assert refusal(checks.check, run) == refused("cpu_adam", "async_io")  # before anything is started


@pytest.mark.parametrize(
    ("compiler", "lacking"), [({"header_status": 1}, "libaio.h"), ({"library": "libaio.so"}, "libaio.so")]
)
def test_check_refuses_async_io_without_libaio(compiler, lacking, tools):
    put_compiler(tools, **compiler)
    message = refused("async_io")
    assert message.startswith(f"the compiler finds no {lacking}")
    assert "libaio-dev" in message
    assert "libaio-devel" in message
    assert refused("cpu_adam", "async_io") == message  # before what one command mends


def test_check_refuses_what_is_not_built_and_names_the_command(folder, devices, tools, monkeypatch):
    put_compiler(tools)
    put_built(folder, "pin_memory")
    command = "python -m study.engines.extensions"
    on_a_cpu = refused("cpu_adam", "async_io")
    assert re.match("DeepSpeed's async_io and cpu_adam, .* on a CPU, are not built", on_a_cpu)
    assert on_a_cpu.endswith(f"run: {command}")
    (devices / "nvidia0").touch()
    assert " on a CPU" not in refused("cpu_adam", "async_io")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refused("cpu_adam", "async_io").endswith(f"run: CUDA_VISIBLE_DEVICES= {command}")
    put_built(folder, "cpu_adam")
    assert refused("cpu_adam", "async_io").startswith("DeepSpeed's async_io, which ")
    put_built(folder, "async_io")
    extensions.check({"cpu_adam", "async_io"})


@pytest.fixture
def deepspeed(tmp_path, monkeypatch):
    """A DeepSpeed whose builders are what the test puts in this file."""
    package = tmp_path / "packages" / "deepspeed" / "ops" / "op_builder"
    (package / "cpu").mkdir(parents=True)
    (package / "cpu" / "__init__.py").write_text("class ShareMemCommBuilder:\n    def load(self): pass\n")
    for parent in (package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "packages" / "deepspeed")])
    monkeypatch.setattr(extensions.importlib.util, "find_spec", lambda name: found)
    return package / "__init__.py"


@pytest.mark.launches
def test_build_shows_why_it_failed_and_which_strategies_are_skipped(deepspeed, tools, capsys):
    """One whose build fails, and one that cannot be built; it goes on with the others."""
    put_compiler(tools, header_status=1)
    fault = "raise RuntimeError('Error building extension:\\ncpu_adam.cpp:1:10: fatal error: no such thing')"
    deepspeed.write_text(f"class CPUAdamBuilder:\n    def load(self): {fault}\n")
    assert extensions.build() == 1
    output = capsys.readouterr().out
    assert "  | cpu_adam.cpp:1:10: fatal error: no such thing" in output
    assert "the compiler finds no libaio.h" in output
    by_adam, by_async_io = (line for line in output.splitlines() if "strategies are skipped" in line)
    assert {"zero2_cpu_offload,", "zero3_nvme_offload"} <= set(by_adam.split())
    assert by_async_io.endswith("strategies are skipped: zero3_nvme_offload")


def test_check_refuses_what_was_built_in_another_folder(folder, tools):
    """A copied project has extensions that torch would compile again inside a run."""
    put_tool(tools / "ninja")
    put_built(folder, "cpu_adam")
    commands = folder / "cpu_adam" / "build.ninja"
    commands.write_text("cflags = -isystem /elsewhere/site-packages/torch/include\n")
    with pytest.raises(Refusal, match=r"is built for another Python, or in another folder; run: "):
        extensions.check({"cpu_adam"})
    place = extensions._folder_of("torch")
    commands.write_text(f"cflags = -isystem {place}/include\n")
    extensions.check({"cpu_adam"})
