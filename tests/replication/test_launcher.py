"""Test what flags of a launcher, environment variables and other packages may change: only what the record proves."""

from __future__ import annotations

import os
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from doctor_program import handed_on
from launching import ROOT, attempt
from refusing import refusal
from test_strategy import FOUND, Ancestor

from study.config import build_config
from study.records import imports, machine, schema
from study.run import make_run
from study.running import launch
from study.training import proof, request
from zero_study.engines.keys import allowed
from zero_study.errors import Failed, Refusal
from zero_study.strategy.file import CONFIGS, read_by_name, read_strategy

SMALL = ["--max-steps", "2", "--num-train-examples", "32", "--num-eval-examples", "8", "--no-measure"]
TRAIN = ROOT / "study" / "train.py"
KINDS = [CONFIGS / f"{name}.yaml" for name in ("single", "ddp", "zero2", "zero3_tuned", "fsdp2")]


def flags() -> dict[str, list[str]]:
    """Every flag of the installed `accelerate launch`, with a value, by the launcher's own name for it."""
    from accelerate.commands.launch import launch_command_parser

    words = {}
    for action in launch_command_parser()._actions:
        if not action.option_strings or action.dest == "help":
            continue
        value = [] if action.nargs == 0 else [str(next(iter(action.choices or ()), "1"))]
        if action.dest == "fp8_override_linear_precision":
            value = ["true,true,true"]
        for spelling in action.option_strings:
            words[spelling] = [action.dest, spelling, *value]
    return words


FLAGS = flags()


def test_every_flag_of_the_launcher_is_known():
    """A new one of accelerate's is refused until somebody has said what it does."""
    names = {name for name, *_ in FLAGS.values()}
    assert len(names) > 100
    assert not [name for name in names if allowed._closest("flags", name) is None]
    unused = [p for p in allowed.rules("flags") if p != "help" and not any(fnmatchcase(name, p) for name in names)]
    assert not unused
    assert not allowed.of_flag("from_tomorrow").is_accepted


@pytest.mark.parametrize("path", KINDS, ids=lambda path: path.stem)
def test_every_flag_with_every_kind_of_strategy(path, monkeypatch):
    """Accepted, or refused by its name; whichever way it is spelled."""
    monkeypatch.chdir(ROOT)
    requested, accepted = build_config(global_batch_size=24), set()
    for name, *words in FLAGS.values():
        words = [words[0], "2"] if name == "num_processes" else words
        words = ["accelerate-launch", *words, "--config_file", str(path.relative_to(ROOT)), "study/train.py"]
        ancestor = Ancestor(" ".join(words), ROOT)
        monkeypatch.setattr(psutil.Process, "parents", lambda self, ancestor=ancestor: [ancestor])
        monkeypatch.setattr(allowed, "check_rank", lambda *_: None)
        if allowed.of_flag(name).is_accepted:
            run = request.requested_run(requested)
            assert run.strategy.path == path.relative_to(ROOT)
            accepted.add(name)
        else:
            output = refusal(request.requested_run, requested)
            assert output.startswith(f"accelerate launch --{name} is not accepted: ")
            assert re.search(r"[.,] (Unset|Remove|Write|pass|Name|Set) ", output)
    assert accepted == {name for name, *_ in FLAGS.values() if allowed.of_flag(name).is_accepted}


ACCEPTED = ("ACCELERATE_LOG_LEVEL", "DS_SKIP_CUDA_CHECK", "DS_BUILD_OPS", "TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS",
            "NCCL_ALGO", "HF_TOKEN")  # fmt: skip
REFUSED = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_USE_CPU", "ACCELERATE_FROM_TOMORROW", "FSDP_VERSION",
           "PARALLELISM_CONFIG_CP_SIZE", "DS_PIN_MEMORY_BACKEND", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE",
           "DEEPSPEED_USE_HPU", "MEGATRON_LM_TP_DEGREE")  # fmt: skip


def test_variables():
    allowed.check_variables(dict.fromkeys(ACCEPTED, "1"))
    for variable in REFUSED:
        output = refusal(allowed.check_variables, {"PATH": "/bin", variable: "a secret"})
        assert output.startswith(f"{variable} is set in the environment: ")
        assert "a secret" not in output


def test_what_the_launcher_itself_sets_is_not_asked(monkeypatch):
    """The launcher's own environment is looked at, not the one that it has made for its children."""
    command = "accelerate-launch --config_file accelerate_configs/zero2.yaml study/train.py"
    ancestor = Ancestor(command, ROOT)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [ancestor])
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert request.requested_run(build_config()).world_size == 2
    monkeypatch.setenv("RANK", "2")
    assert refusal(request.requested_run, build_config()).startswith(
        "RANK=2 and WORLD_SIZE=2 are set in the environment"
    )
    monkeypatch.setattr(ancestor, "environ", lambda: {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"})
    with pytest.raises(Refusal, match=r"^ACCELERATE_DEEPSPEED_ZERO_STAGE is set in the environment"):
        request.requested_run(build_config())

    def unreadable() -> dict[str, str]:
        raise psutil.AccessDenied

    monkeypatch.setattr(ancestor, "environ", unreadable)
    ancestor.pid = 7
    with pytest.raises(Refusal, match=r"^process 7: its environment cannot be read"):
        request.requested_run(build_config())


def as_launched(path: Path) -> dict[str, str]:
    """What the installed launcher makes of a strategy's file for its ranks."""
    return handed_on(["--config_file", str(path), "--main_process_port", "0", "train.py"])[0]


@pytest.fixture
def bare(monkeypatch):
    """The environment of a launch: an Accelerator of another test may have left variables there."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_file_as_the_launcher_has_read_it(bare, path):
    request.check_as_launched(read_strategy(path), as_launched(path))


@pytest.mark.parametrize(
    ("name", "before", "after", "variable"),
    [
        ("zero3", "init_flag: true", "init_flag: false", "ZERO3_INIT=true, but now the value is False"),
        (
            "zero3_cpu_offload",
            "  offload_param_device: cpu\n",
            "",
            "OFFLOAD_PARAM_DEVICE=cpu, but now the value is None",
        ),
        ("zero2_tuned", "zero2_tuned.json", "zero3_tuned.json", "CONFIG_FILE=accelerate_configs/zero2_tuned.json"),
        ("fsdp2_hybrid", "replicate_size: 2", "replicate_size: 4", "DP_REPLICATE_SIZE=2, but now the value is 4"),
        ("ddp", "mixed_precision: 'no'", "mixed_precision: bf16", "MIXED_PRECISION=no, but now the value is bf16"),
    ],
)
def test_a_file_that_was_edited_since_the_launcher_has_read_it(bare, tmp_path, name, before, after, variable):
    """The record would say what the launcher has not launched."""
    path = tmp_path / f"{name}.yaml"
    text = (CONFIGS / path.name).read_text()
    path.write_text(text)
    environment = as_launched(path)
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(
        Refusal, match=rf"{name}.yaml: the file was changed while the run started. The launcher read .*{variable}"
    ):
        request.check_as_launched(read_strategy(path), environment)


@pytest.mark.parametrize(
    ("environment", "is_distributed", "message"),
    [
        ({}, False, None),
        ({"MASTER_PORT": "1"}, False, None),  # of no use to one process, and harmless
        ({"RANK": "3"}, False, "RANK=3 is set in the environment, but this run is a single process"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, False, "OMPI_COMM_WORLD_SIZE=4 is set in the environment"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True, None),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            True,
            "RANK=2 and WORLD_SIZE=2 are set in the environment, but the run requests 2",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True, "RANK=0 and WORLD_SIZE=1"),
        ({}, True, "RANK= and WORLD_SIZE="),
    ],
)
def test_a_rank_that_the_run_has_not(environment, is_distributed, message):
    if message is None:
        allowed.check_rank(environment, 2, is_distributed)
    else:
        assert refusal(allowed.check_rank, environment, 2, is_distributed).startswith(message)


def test_a_launch_passes_on_no_rank(monkeypatch, tmp_path):
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PMI_SIZE"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("RANKING", "kept")
    passed_on = launch._environment(make_run(build_config(output_dir=tmp_path), read_by_name("single"), 1))
    assert {name for name in passed_on if allowed.says_which_rank(name)} == set()
    assert passed_on["RANKING"] == "kept"


def test_a_record_keeps_names_and_values_without_secrets_and_places():
    plain = {"GLOO_SOCKET_IFNAME": "eth0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    dropped = ("HF_TOKEN", "HF_HOME", "WANDB_API_KEY", "TORCH_X_PASSWORD", "DS_SECRET", "PATH", "USER")
    cut = {"HF_ENDPOINT": "https://somebody:password@host/x", "CUDA_SOMETHING": "/a/b:/c/d"}
    kept = machine.environment({**plain, **dict.fromkeys(dropped, "somebody"), **cut})
    assert kept == {**plain, "HF_ENDPOINT": "https://host/x", "CUDA_SOMETHING": ".../b:.../d"}


def test_a_compiled_function_is_counted():
    """By TorchDynamo's own counters."""
    import torch
    import torch._dynamo.utils as dynamo

    before = dynamo.counters["stats"]["unique_graphs"]
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
    assert proof.prove_compiled(FOUND, is_asked=True).compiled_graphs == before + 1
    with pytest.raises(Failed, match=r"compile: the run requests no compilation, but \d+ graphs were compiled"):
        proof.prove_compiled(FOUND, is_asked=False)
    dynamo.counters["stats"]["unique_graphs"] = before


# ---------------------------------------------------------------- from where modules are imported


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A folder on PYTHONPATH that is not the current one."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.mark.parametrize("name", ["html.py", "sitecustomize.py", "json/__init__.py", "random.cpython-311-x86_64.so"])
def test_what_stands_before_pythons_own_is_refused(path, name):
    imports.check(TRAIN)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).touch()
    with pytest.raises(Refusal, match=rf"PYTHONPATH: .* import {path / Path(name).parts[0]} instead of Python's own"):
        imports.check(TRAIN)


def test_what_was_imported_from_the_current_folder_is_refused(path, monkeypatch):
    """A .pth file that imports does so before the program takes that folder away."""
    monkeypatch.chdir(path)
    (path / "html.py").touch()
    imports.check(TRAIN)
    monkeypatch.setitem(sys.modules, "html", SimpleNamespace(__file__=str(path / "html.py")))
    with pytest.raises(Refusal, match=rf"PYTHONPATH: .* import {path}/html.py instead of"):
        imports.check(TRAIN)


@pytest.mark.parametrize("library", ["accelerate", "numpy"])
def test_a_library_from_elsewhere_is_refused(path, monkeypatch, library):
    (path / library).mkdir()
    (path / library / "__init__.py").touch()
    monkeypatch.syspath_prepend(path)
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(Refusal, match=rf"{library}: .* would be imported from {path}"):
        imports.check(TRAIN)


def test_another_copy_of_the_study_is_refused(tmp_path):
    (tmp_path / "train.py").touch()
    with pytest.raises(Refusal, match=rf"{tmp_path / 'train.py'} was started, but Python imports the project from"):
        imports.check(tmp_path / "train.py")


def test_a_changed_file_of_a_library_changes_its_digest_and_is_named(tmp_path, monkeypatch):
    import accelerate.optimizer

    told = imports.describe()["libraries"]["accelerate"]
    assert told["changed"] == []
    installed = Path(accelerate.optimizer.__file__)
    read = Path.read_bytes
    monkeypatch.setattr(imports, "_digest", imports._digest.__wrapped__)  # without what it remembers
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"# mine\n" * (path == installed))
    changed = imports.describe()["libraries"]["accelerate"]
    assert changed["changed"] == ["accelerate/optimizer.py"]
    assert changed["sha256"] != told["sha256"]
    arithmetic = [machine.arithmetic({"imports": {"libraries": {"accelerate": each}}}) for each in (told, changed)]
    assert arithmetic == [{}, {"changed accelerate": changed["sha256"][:12]}]  # so that such runs are not compared


@pytest.mark.slow
@pytest.mark.launches
def test_a_file_of_the_current_folder_is_no_module_of_a_run(tmp_path):
    """accelerate's launcher of DeepSpeed puts that folder before Python's own modules; a `sitecustomize` is refused."""
    for name in ("html.py", "dataclasses.py"):
        (tmp_path / name).write_text("raise RuntimeError('of the current folder')")
    strategy = ROOT / "accelerate_configs" / "zero2.yaml"
    launch = ["accelerate", "launch", "--config_file", strategy, "--main_process_port", "0", TRAIN]
    launch += ["--max-steps", "2", "--no-measure", "--num-train-examples", "16", "--num-eval-examples", "8"]
    as_installed = {"PYTHONSAFEPATH": "1"}  # as the command `accelerate` starts
    completed = attempt([*launch, "--output-dir", "run"], cwd=tmp_path, env=as_installed)
    assert completed.returncode == 0, completed.stderr
    told = schema.read(tmp_path / "run").machine["imports"]
    assert not [name for name, each in told["libraries"].items() if each["changed"]]
    assert {"torch", "accelerate", "deepspeed", "transformers", "numpy"} <= told["libraries"].keys()
    (tmp_path / "sitecustomize.py").write_text("")
    completed = attempt([*launch, "--output-dir", "again"], cwd=tmp_path, env=as_installed)
    assert "sitecustomize.py instead of Python's own" in completed.stderr
    assert not (tmp_path / "again").exists()
