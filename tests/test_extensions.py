"""Does `study.engines.extensions` refuse, in one line that says what to do, what would hang or fail inside a run?"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from study.engines import extensions
from study.errors import Refusal

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


def put_lock(folder: Path, name: str) -> Path:
    lock = folder / name / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    return lock


ALL = ("deepspeed_shm_comm", "cpu_adam", "pin_memory", "async_io")


def refusal(*needs: str) -> str:
    with pytest.raises(Refusal) as caught:
        extensions.check(needs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_lock_that_nobody_holds_is_stale(folder):
    lock = put_lock(folder, "async_io")
    assert extensions.stale_locks() == [lock]


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


def test_without_a_folder_there_are_no_locks():
    assert extensions.stale_locks() == []


def test_torch_marks_a_build_with_the_lock_that_is_looked_for(folder):
    file_baton = pytest.importorskip("torch.utils.file_baton")
    lock = folder / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    baton = file_baton.FileBaton(str(lock))
    assert baton.try_acquire()
    assert extensions.stale_locks() == []
    os.close(baton.fd)  # what the kernel does for a process that is killed
    assert extensions.stale_locks() == [lock]


def test_check_names_a_stale_lock_and_the_command_that_deletes_it(folder, tools):
    put_compiler(tools)
    put_built(folder, *ALL)
    lock = put_lock(folder, "pin_memory")
    message = refusal("async_io", "cpu_adam")
    assert str(lock) in message
    command = message.rpartition("run: ")[2]
    subprocess.run(["/bin/sh", "-c", f"PATH=/usr/bin:/bin; {command}"], check=True)
    assert not lock.exists()
    extensions.check({"async_io", "cpu_adam"})


def test_check_minds_no_lock_of_an_extension_that_the_run_does_not_load(folder, tools):
    put_compiler(tools)
    put_built(folder, "cpu_adam")
    put_lock(folder, "async_io")
    extensions.check({"cpu_adam"})


def test_check_needs_nothing_for_a_run_that_needs_nothing(folder, tools):
    put_lock(folder, "cpu_adam")
    extensions.check(set())


def test_check_knows_its_extensions():
    with pytest.raises(ValueError, match="fused_adam"):
        extensions.check({"fused_adam"})


@pytest.mark.parametrize("name", sorted(extensions.EXTENSIONS))
def test_check_refuses_without_a_compiler(name, tools):
    put_tool(tools / "ninja")
    message = refusal(name)
    assert message.startswith("no C++ compiler: c++ is not on PATH")
    assert name in message
    assert "apt-get install g++" in message


def test_check_looks_for_the_compiler_that_is_asked_for(tools, monkeypatch):
    put_compiler(tools)
    assert "not built yet" in refusal("cpu_adam")
    monkeypatch.setenv("CXX", "clang++-99 -v")
    assert "clang++-99 -v is not on PATH" in refusal("cpu_adam")


def test_check_needs_no_compiler_for_a_built_cpu_adam_but_for_a_built_async_io(folder, tools):
    put_tool(tools / "ninja")
    put_built(folder, "cpu_adam", "pin_memory", "async_io")
    extensions.check({"cpu_adam"})
    assert "no C++ compiler" in refusal("async_io")


def test_check_refuses_without_ninja_even_when_all_is_built(folder, tools):
    put_compiler(tools)
    put_built(folder, "cpu_adam")
    extensions.check({"cpu_adam"})
    (tools / "ninja").unlink()
    assert "ninja" in refusal("cpu_adam")


def test_check_refuses_without_the_headers_of_python_unless_built(folder, tools, tmp_path, monkeypatch):
    put_compiler(tools)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tools if name == "scripts" else tmp_path))
    message = refusal("cpu_adam")
    assert str(tmp_path / "Python.h") in message
    assert f"python3.{sys.version_info.minor}-dev" in message
    put_built(folder, "cpu_adam")
    extensions.check({"cpu_adam"})


@pytest.mark.parametrize(
    ("compiler", "lacking"), [({"header_status": 1}, "libaio.h"), ({"library": "libaio.so"}, "libaio.so")]
)
def test_check_refuses_async_io_without_libaio(compiler, lacking, tools):
    put_compiler(tools, **compiler)
    message = refusal("async_io")
    assert message.startswith(f"the compiler finds no {lacking}")
    assert "libaio-dev" in message
    assert "libaio-devel" in message
    assert refusal("cpu_adam", "async_io") == message  # before what one command mends


def test_check_refuses_what_is_not_built_and_names_the_command(folder, devices, tools, monkeypatch):
    put_compiler(tools)
    put_built(folder, "pin_memory")
    message = refusal("cpu_adam", "async_io")
    expected = "DeepSpeed's async_io and cpu_adam, which this strategy needs{}, are not built yet; run: {}"
    assert message == expected.format(" on a CPU", "python -m study.engines.extensions")
    (devices / "nvidia0").touch()
    assert refusal("cpu_adam", "async_io") == expected.format("", "python -m study.engines.extensions")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    message = refusal("cpu_adam", "async_io")
    assert message == expected.format(" on a CPU", "CUDA_VISIBLE_DEVICES= python -m study.engines.extensions")
    put_built(folder, "cpu_adam")
    assert "DeepSpeed's async_io, which this strategy needs on a CPU, is not built yet" in refusal(
        "cpu_adam", "async_io"
    )
    put_built(folder, "async_io")
    extensions.check({"cpu_adam", "async_io"})


def test_check_accepts_what_deepspeed_was_installed_with(tmp_path, tools, monkeypatch):
    put_compiler(tools)
    compiled = tmp_path / "deepspeed" / "ops" / "adam" / "cpu_adam_op.cpython-312-x86_64-linux-gnu.so"
    compiled.parent.mkdir(parents=True)
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "deepspeed")])
    monkeypatch.setattr(extensions.importlib.util, "find_spec", lambda name: found)
    assert "not built yet" in refusal("cpu_adam")
    compiled.touch()
    extensions.check({"cpu_adam"})


def test_a_real_compiler_answers_what_the_stub_answers(tmp_path, monkeypatch):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, found none")
    (tmp_path / "libaio.h").write_text("#error this is not the header\n")
    monkeypatch.setenv("CPATH", str(tmp_path))
    assert extensions._lacking_of_libaio(compiler) == "libaio.h"
    (tmp_path / "libaio.h").write_text("")
    (tmp_path / "libaio.so").touch()
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
    assert extensions._lacking_of_libaio(compiler) is None


def test_own_folder_is_set_unless_the_user_has_one(folder, monkeypatch):
    extensions.use_own_folder()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    extensions.use_own_folder()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(extensions.EXTENSIONS_DIR / "cpu")


def test_the_processor_is_looked_at_once(monkeypatch):
    asked = []
    monkeypatch.setattr("cpuinfo.get_cpu_info", lambda: asked.append("X86_64") or {"arch": asked[-1]})
    extensions.look_at_the_processor_once()
    import cpuinfo

    assert [cpuinfo.get_cpu_info(), cpuinfo.get_cpu_info()] == [{"arch": "X86_64"}] * 2
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        (None, None, "cpu"),
        (None, "0", "cpu"),
        ("nvidiactl", None, "cpu"),
        ("nvidia3", None, "cuda"),
        ("dxg", None, "cuda"),
        ("nvidia0", "0,1", "cuda"),
        ("nvidia0", "GPU-1", "cuda"),
        ("nvidia0", "", "cpu"),
        ("nvidia0", "-1,0", "cpu"),
    ],
)
def test_cpu_and_gpus_have_a_folder_each(devices, monkeypatch, device, visible, expected):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    if device:
        (devices / device).touch()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert extensions.folder() == extensions.EXTENSIONS_DIR / expected


def test_the_ninja_beside_this_python_comes_first(tools, tmp_path, monkeypatch):
    other = tmp_path / "usr"
    other.mkdir()
    for place in (tools, other):
        put_tool(place / "ninja")
    monkeypatch.setenv("PATH", f"{other}{os.pathsep}{tools}")
    extensions.use_own_folder()
    extensions.use_own_folder()
    assert shutil.which("ninja") == str(tools / "ninja")
    assert os.environ["PATH"].split(os.pathsep) == [str(tools), str(other)]


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
    put_compiler(tools)
    deepspeed.write_text(
        "class CPUAdamBuilder:\n"
        "    def load(self):\n"
        "        raise RuntimeError('Error building extension:\\ncpu_adam.cpp:1:10: fatal error: no such thing')\n"
        "class AsyncIOBuilder:\n"
        "    def load(self): pass\n"
    )
    assert extensions.build() == 1
    output = capsys.readouterr().out
    assert "building DeepSpeed's cpu_adam (about 40 s, once) ..." in output
    assert "  | cpu_adam.cpp:1:10: fatal error: no such thing" in output
    assert "building DeepSpeed's pin_memory and async_io" in output
    skipped = [line for line in output.splitlines() if "strategies are skipped" in line]
    assert len(skipped) == 1
    assert "zero2_cpu_offload" in skipped[0]
    assert "zero3_nvme_offload" in skipped[0]


@pytest.mark.launches
def test_build_goes_on_without_what_cannot_be_built(deepspeed, tools, capsys):
    put_compiler(tools, header_status=1)
    deepspeed.write_text("class CPUAdamBuilder:\n    def load(self): pass\n")
    assert extensions.build() == 1
    output = capsys.readouterr().out
    assert "building DeepSpeed's cpu_adam" in output
    assert "the compiler finds no libaio.h" in output
    assert "strategies are skipped: zero3_nvme_offload\n" in output


def test_build_without_a_compiler_says_what_that_costs(deepspeed, tools, capsys):
    put_tool(tools / "ninja")
    assert extensions.build() == 1
    output = capsys.readouterr().out
    assert "skipped where there is no GPU: zero0, zero1," in output
    assert "skipped: zero3_nvme_offload\n" in output
    assert "building" not in output


@pytest.mark.launches
def test_build_of_what_is_there_says_that_it_checks(deepspeed, folder, tools, capsys):
    put_compiler(tools)
    put_built(folder, *ALL)
    deepspeed.write_text("class CPUAdamBuilder:\n    def load(self): pass\nAsyncIOBuilder = CPUAdamBuilder\n")
    assert extensions.build() == 0
    assert "building" not in capsys.readouterr().out


@pytest.mark.launches
def test_build_for_a_gpu_leaves_out_what_only_a_cpu_needs(deepspeed, devices, tools, capsys):
    put_compiler(tools)
    (devices / "nvidia0").touch()
    deepspeed.write_text("class CPUAdamBuilder:\n    def load(self): pass\nAsyncIOBuilder = CPUAdamBuilder\n")
    assert extensions.build() == 0
    output = capsys.readouterr().out
    assert "building DeepSpeed's cpu_adam" in output
    assert "deepspeed_shm_comm" not in output


@pytest.mark.launches
def test_import_needs_no_torch():
    code = "import sys, study.engines.extensions; sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=extensions.ROOT, check=True)


def test_check_refuses_what_was_built_in_another_folder(folder, tools):
    """A copied project has extensions that torch would compile again inside a run."""
    put_tool(tools / "ninja")
    (folder / "cpu_adam").mkdir(parents=True)
    (folder / "cpu_adam" / "cpu_adam.so").touch()
    commands = folder / "cpu_adam" / "build.ninja"
    commands.write_text("cflags = -isystem /elsewhere/site-packages/torch/include\n")
    with pytest.raises(Refusal, match=r"is built for another Python, or in another folder; run: "):
        extensions.check({"cpu_adam"})
    place = extensions._folder_of("torch")
    commands.write_text(f"cflags = -isystem {place}/include\n")
    extensions.check({"cpu_adam"})
