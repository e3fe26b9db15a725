"""Which strategy a file is, what is refused before a start, and what the engine must prove after it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import psutil
import pytest
import torch

from study import proof, strategy
from study.config import Refusal, build_config
from study.record import Proof
from study.strategy import Launch, check, find_strategy, read_strategy

HEAD = "num_processes: 2\nmixed_precision: 'no'\n"


@pytest.fixture(autouse=True)
def box(monkeypatch):
    """A box without a GPU, its extensions built, in the folder from which the files name their JSON."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(strategy.extensions, "check", lambda needs: None)
    monkeypatch.chdir(strategy.CONFIGS.parent)


def shipped(name: str) -> strategy.Strategy:
    return read_strategy(find_strategy(name))


def reading(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(Refusal) as caught:
        read_strategy(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def checking(name: str, world_size: int = 2, **flags) -> str:
    with pytest.raises(Refusal) as caught:
        check(build_config(**flags), shipped(name), world_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no keys; copy one of accelerate_configs/"),
        ("- a", "holds no keys"),
        ("a: [", "cannot be read as YAML"),
        (HEAD, "distributed_type is missing"),
        (HEAD + "distributed_type: TPU", "distributed_type='TPU': input should be 'NO', 'MULTI_GPU', "),
        (
            HEAD + "distributed_type: DEEPSPEED",
            "distributed_type: DEEPSPEED and a deepspeed_config section belong together",
        ),
        (HEAD + "distributed_type: MULTI_GPU\ndeepspeed_config: {zero_stage: 2}", "belong together"),
        (HEAD + "distributed_type: FSDP", "distributed_type: FSDP and an fsdp_config section belong together"),
        (HEAD.replace("2", "'2'") + "distributed_type: 'NO'", "num_processes='2': input should be a valid integer"),
        (
            HEAD + "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, gradient_accumulation_steps: auto}",
            "deepspeed_config.gradient_accumulation_steps: auto crashes accelerate; remove it",
        ),
    ],
)
def test_files_are_read_strictly(tmp_path, text, expected):
    assert expected in reading(tmp_path, text)


def test_file_that_is_not_there(tmp_path):
    with pytest.raises(Refusal, match="cannot be read as YAML"):
        read_strategy(tmp_path / "mine.yaml")


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(HEAD + "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, gradient_clipping: 0.5}")
    read = read_strategy(find_strategy(str(path)))
    assert (read.name, read.zero_stage, read.gradient_clipping, read.zero3_init) == ("mine", 2, 0.5, False)
    check(build_config(gradient_clipping=0.5), read, 2)


def test_a_json_says_what_a_yaml_cannot():
    read = shipped("zero3_nvme_offload")
    assert (read.zero_stage, read.offload_optimizer_device, read.offload_param_device) == (3, "nvme", "nvme")
    assert read.needed_extensions == {"cpu_adam", "async_io"}
    assert shipped("zero2_cpu_offload").needed_extensions == {"cpu_adam"}
    assert shipped("zero3_tuned").needed_extensions == set()


# ---------------------------------------------------------------- before a start


@pytest.mark.parametrize("name", [name for name in strategy.names() if name != "fsdp2"])
def test_what_is_whole_passes(name):
    chosen = shipped(name)
    check(build_config(), chosen, chosen.num_processes)


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("fsdp2", {}, "fsdp2 needs GPUs: on a CPU accelerate does not shard and trains something else"),
        (
            "ddp",
            {"precision": "fp16-autocast"},
            "--precision fp16-autocast needs a GPU; use bf16 or bf16-autocast on a CPU",
        ),
        ("zero2", {"precision": "fp16"}, "--precision fp16 needs a GPU"),
        (
            "zero2",
            {"accumulation_dtype": "bf16"},
            "--accumulation-dtype bf16 goes with --precision bf16, not with fp32",
        ),
        ("zero2", {"global_batch_size": 9}, "global_batch_size=9 does not divide over 2 processes"),
    ],
)
def test_what_cannot_run_here(name, flags, expected):
    assert checking(name, **flags).startswith(expected)


def test_without_deepspeed(monkeypatch):
    monkeypatch.setattr(strategy.importlib.util, "find_spec", lambda name: None)
    assert checking("zero2") == "zero2 needs deepspeed, which is not installed; `make setup` installs it"
    check(build_config(), shipped("ddp"), 2)


def test_extensions_of_a_box_without_a_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(strategy.extensions, "check", asked.append)
    for name in ("ddp", "zero1", "zero1_cpu_offload"):
        check(build_config(), shipped(name), 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check(build_config(), shipped("zero1"), 2)
    assert asked == [set(), {"deepspeed_shm_comm"}, {"deepspeed_shm_comm", "cpu_adam"}, set()]


def test_writable(tmp_path):
    assert strategy.is_writable(tmp_path)
    assert not list(tmp_path.iterdir())
    assert not strategy.is_writable(tmp_path / "nowhere")
    assert not strategy.is_writable(Path("/proc"))


# ---------------------------------------------------------------- who started this process


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("/env/bin/python /env/bin/accelerate launch --config_file a.yaml train.py", 3),
        ("/env/bin/python -m accelerate.commands.launch --config_file a.yaml train.py", 3),
        ("/env/bin/accelerate-launch --config_file a.yaml train.py", 1),
        ("python /env/bin/accelerate config", None),
        ("bash -c accelerate", None),
        ("", None),
    ],
)
def test_command_of_a_launcher(command, first):
    assert strategy._launch_arguments(command.split()) == first


class Ancestor:
    def __init__(self, command: str, folder: Path) -> None:
        self.command, self.folder = command, folder

    def cmdline(self) -> list[str]:
        return self.command.split()

    def cwd(self) -> str:
        return str(self.folder)


@pytest.mark.parametrize(("flags", "num_processes"), [("", 2), ("--num_processes 4", 4)])
def test_launch_is_read_from_the_launchers_command(monkeypatch, flags, num_processes):
    command = f"python -m accelerate.commands.launch --config_file accelerate_configs/zero3.yaml {flags} study/train.py"
    ancestors = [Ancestor("bash", Path("/")), Ancestor(command, strategy.CONFIGS.parent)]
    monkeypatch.setattr(psutil.Process, "parents", lambda self: ancestors)
    launch = strategy.read_launch()
    assert launch.strategy == dataclasses.replace(shipped("zero3"), path=launch.strategy.path)
    assert str(launch.strategy.path) == "accelerate_configs/zero3.yaml"  # as a record may show it
    assert launch.num_processes == num_processes


def test_launch_without_a_file(monkeypatch):
    ancestor = Ancestor("python -m accelerate.commands.launch study/train.py", strategy.CONFIGS.parent)
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [ancestor])
    with pytest.raises(Refusal, match=r"^no accelerate file: start it as `accelerate launch --config_file"):
        strategy.read_launch()


# ---------------------------------------------------------------- after it

FOUND = Proof(
    world_size=2, distributed_type="DEEPSPEED", backend="gloo", device="cpu", engine_class="DeepSpeedEngine",
    optimizer_class="AdamW", zero_stage=3, gradient_clipping=1.0, gradient_accumulation_steps=1, micro_batch_size=4,
    precision="fp32", parameter_dtypes=["float32"], master_dtypes=["float32"], param_persistence_threshold=100_000,
    partitioned_parameters=10,
)  # fmt: skip


def verify(found: Proof, **flags) -> None:
    proof.verify(found, build_config(**flags), Launch(shipped("zero3"), 2), Path("run"))


def test_what_was_asked_passes():
    verify(FOUND)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("world_size", 1, "num_processes in "),
        ("distributed_type", "MULTI_CPU", "distributed_type in "),
        ("zero_stage", 2, "zero_stage in "),
        ("offload_optimizer_device", "cpu", "offload_optimizer_device in "),
        ("offload_param_device", "nvme", "offload_param_device in "),
        ("gradient_clipping", 0.0, "or --gradient-clipping"),
        ("gradient_accumulation_steps", 2, "or --micro-batch-size"),
        ("micro_batch_size", 8, "--micro-batch-size or --global-batch-size"),
        ("precision", "bf16", "or --precision"),
        ("device", "cuda", "CUDA_VISIBLE_DEVICES"),
        ("swap_folder", "none", "--swap-dir"),
        ("parameter_dtypes", ["bfloat16"], "or zero3_init_flag in "),
    ],
)
def test_whatever_differs_is_refused(name, value, remedy):
    with pytest.raises(Refusal) as caught:
        verify(FOUND.model_copy(update={name: value}))
    message = str(caught.value)
    assert message.startswith(f"{name}: the run asks for {getattr(FOUND, name)}, the engine has {value}; change ")
    assert remedy in message


def test_masters_of_sixteen_bits():
    found = {"precision": "bf16", "parameter_dtypes": ["bfloat16"], "accumulation_dtype": "bfloat16"}
    with pytest.raises(
        Refusal, match=r"^accumulation_dtype: the run asks for float32, the engine has bfloat16; change"
    ):
        verify(FOUND.model_copy(update=found), precision="bf16")
    found |= {"accumulation_dtype": "float32", "master_dtypes": ["bfloat16"]}
    with pytest.raises(Refusal, match=r"^master_dtypes: the run asks for \['float32'\], the engine has \['bfloat16'\]"):
        verify(FOUND.model_copy(update=found), precision="bf16")


def test_stage_3_that_shards_nothing():
    with pytest.raises(
        Refusal, match=r"^partitioned_parameters: stage 3 shards none .* of 100000 elements; change --size"
    ):
        verify(FOUND.model_copy(update={"partitioned_parameters": 0}))
