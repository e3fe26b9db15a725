"""Runs that silently are something else: each is refused here, or is now what was written.

Measured on accelerate 1.15, deepspeed 0.19.8, transformers 5.23 and torch 2.13. What a file, a flag or a variable may
silently change is in test_strategy.py and test_launcher.py, what every strategy trains in test_parity.py.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import launching
import numpy as np
import pytest
import torch
import yaml
from launching import ROOT
from refusing import refusal
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from study.config import build_config
from study.records.schema import ModelStateBytes
from study.run import Run, make_run
from study.running.checks import check
from study.training import accelerators, optimizer_steps, weights
from study.training.memory import BucketBytes, PhaseMemory, model_state_bytes
from zero_study.engines import workarounds
from zero_study.strategy import file
from zero_study.strategy.file import CONFIGS, read_strategy

BF16 = {"precision": "bf16", "micro_batch_size": 2}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """A box without a GPU, as the launches see it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def changed(folder: Path, name: str, section: str | None = None, **changes) -> Path:
    """Write a shipped accelerate file with these keys changed, or the keys of one of its sections."""
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    (content[section] if section else content).update(changes)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def checking(config: dict, chosen: file.Strategy) -> str:
    return refusal(check, make_run(build_config(**config), chosen, 2))


def plugin(name: str, monkeypatch: pytest.MonkeyPatch, **flags) -> dict:
    """The DeepSpeed configuration of a run on two processes, as the launcher and the study make it."""
    chosen = file.read_by_name(name)
    section = chosen.content["deepspeed_config"]
    with monkeypatch.context() as launcher:  # for this call only: a run that the test starts would be refused for it
        for key in [key for key in os.environ if key.startswith("ACCELERATE_")]:
            launcher.delenv(key)
        launcher.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        if "deepspeed_config_file" in section:
            launcher.chdir(ROOT)
            launcher.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", section["deepspeed_config_file"])
        else:
            launcher.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(section["zero_stage"]))
        return accelerators._deepspeed_plugin(Run(build_config(**flags), chosen, 2, Path("run"))).deepspeed_config


@pytest.mark.parametrize("written", [None, "auto", 0.0])
def test_no_clipping_is_clipping_at_one(written, tmp_path, monkeypatch):
    """gradient_clipping absent, auto or 0.0 in the YAML."""
    path = changed(tmp_path, "zero2", "deepspeed_config", gradient_clipping=written)
    if written is None:
        content = yaml.safe_load(path.read_text())
        del content["deepspeed_config"]["gradient_clipping"]
        path.write_text(yaml.safe_dump(content))
    chosen = read_strategy(path)
    if written == 0.0:
        assert "gradient_clipping 0.0 differs from the run's 1.0. Write 'auto'" in checking({}, chosen)
    else:
        assert chosen.gradient_clipping is None
    assert plugin("zero2", monkeypatch, gradient_clipping=0)["gradient_clipping"] == 0


def test_clip_grad_norm_under_deepspeed_clips_nothing():
    """accelerator.clip_grad_norm_(...) under DeepSpeed: the study asks the engine, which clips, for the norm before."""
    engine = SimpleNamespace(zero_optimization_stage=lambda: 2, get_global_grad_norm=lambda: 7.0)
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value="DEEPSPEED"))
    assert optimizer_steps.gradient_norm_reader(accelerator, engine, build_config())() == 7.0


def test_no_two_runs_share_a_swap_folder(tmp_path):
    """Which is emptied at start."""
    config, chosen = build_config(swap_dir=tmp_path), file.read_by_name("zero3_nvme_offload")
    runs = [Run(config, chosen, 2, tmp_path / name) for name in ("one/a", "one/b", "two/a")]  # two of one name
    for run in runs:
        run.swap_folder.mkdir()
    runs[0].remove_swap_folder()
    assert [run.swap_folder.exists() for run in runs] == [False, True, True]
    assert all(run.swap_folder.parent == tmp_path for run in runs)


@pytest.mark.parametrize("name", ["zero3_tuned", "zero2"])
def test_an_engine_is_made_of_what_was_read(tmp_path, monkeypatch, name):
    """A file that was edited after the study had read it made another engine than the one that was recorded."""
    shutil.copytree(CONFIGS, tmp_path / CONFIGS.name)
    monkeypatch.chdir(tmp_path)
    run = Run(build_config(), read_strategy(Path(CONFIGS.name, f"{name}.yaml")), 2, tmp_path / "run")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")  # as the launcher has read it
    if run.strategy.deepspeed_json:
        edited = tmp_path / CONFIGS.name / f"{name}.json"
        edited.write_text(json.dumps({"zero_optimization": {"stage": 1, "overlap_comm": True}}))
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(edited))
    zero = accelerators._deepspeed_plugin(run).deepspeed_config["zero_optimization"]
    assert zero["stage"] == run.strategy.zero_stage
    assert "overlap_comm" not in zero


def test_two_kinds_of_bf16(monkeypatch):
    """DDP with bf16 against DeepSpeed bf16."""
    engine = plugin("zero0", monkeypatch, precision="bf16-autocast")
    assert engine["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert "bf16" not in engine


def test_fp16_norm_without_clipping_is_unscaled():
    """Gradients of fp16 autocast are scaled until accelerate clips, which a run without clipping does not."""
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(value="MULTI_GPU"), unscale_gradients=lambda: scaler.unscale_(optimizer)
    )
    norm = optimizer_steps.gradient_norm_reader(accelerator, model, build_config(gradient_clipping=0))
    scaler.scale(model(torch.tensor([3.0, 4.0])).sum()).backward()
    assert norm().item() == pytest.approx(5.0)
    scaler.step(optimizer)  # and it is not unscaled a second time
    assert model.weight.grad.tolist() == [[3.0, 4.0]]


@pytest.mark.slow
@pytest.mark.launches
def test_bf16_accumulates_in_fp32(monkeypatch):
    """DeepSpeed bf16 with accumulation adds gradients up in bf16."""
    assert plugin("zero2", monkeypatch, **BF16)["data_types"] == {"grad_accum_dtype": "fp32"}
    found = launching.run("zero2", **BF16).record.proof
    assert found.gradient_accumulation_steps == 2
    assert found.precision == "bf16"
    assert found.parameter_dtypes == ["bfloat16"]
    assert found.gradient_dtypes == found.master_dtypes == found.moment_dtypes == ["float32"]


def test_biases_and_norms_do_not_decay():
    """An optimizer in the DeepSpeed config puts weight decay on biases and LayerNorm."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    matrices, vectors = weights.parameter_groups(model, 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert matrices["params"] == [model[0].weight]
    assert {id(p) for p in vectors["params"]} == {id(p) for p in (model[0].bias, *model[1].parameters())}
    model[0].weight.ds_shape, model[0].weight.data = torch.Size([4, 4]), torch.empty(0)  # as zero.Init leaves it
    assert weights.parameter_groups(model, 0.1)[0]["params"] == [model[0].weight]


def test_accumulation_is_the_runs(tmp_path):
    """The program's accumulation differs from the DeepSpeed config's."""
    path = changed(tmp_path, "zero2", "deepspeed_config", gradient_accumulation_steps=4)
    assert "gradient_accumulation_steps 4 differs from the run's 1. Remove this key" in checking(
        {}, read_strategy(path)
    )


def test_peaks_are_those_of_their_phase():
    """max_memory_allocated in a second run is the first run's peak: here each phase resets it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("needs a writable /proc/self/clear_refs, found none")
    memory = PhaseMemory(torch.device("cpu"), enabled=True)
    memory.begin("large")
    large = torch.ones(2**26)  # 256 MiB, given back to the system when freed
    del large
    memory.begin("small")
    memory.begin(None)
    peaks = memory.phases()
    assert peaks["large"].resident_bytes - peaks["small"].resident_bytes > 200 * 2**20


@pytest.mark.launches
def test_saved_weights_are_whole():
    """save_16bit_model at stage 3 returns False and writes no file."""
    run = launching.run("zero3", save_model=True)
    saved = load_file(run.run_dir / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == run.record.num_params
    assert sum(float(t.double().abs().sum()) for t in saved.values()) == run.record.final_parameters.absolute_sum


# ---------------------------------------------------------------- a gradient that lies on a disk is read

OFFSET, LENGTH = 192, 512  # of the second gradient: its slice begins off every 512 bytes


class Handle:
    """A disk that reads into memory aligned to 512 bytes, and through a buffer into what is not locked."""

    def __init__(self, locked: torch.Tensor) -> None:
        self.start, self.end = locked.data_ptr(), locked.data_ptr() + locked.nbytes
        self.asked = 0

    def has_buffers(self) -> bool:
        return True

    def swap_out_tensors(self, tensor_list: list[torch.Tensor], path_list: list[str]) -> None:
        for tensor, path in zip(tensor_list, path_list, strict=True):
            tensor.numpy().tofile(path)

    def async_pread(self, into: torch.Tensor, path: str, _: int) -> int:
        self.asked += 1
        if not self.is_pinned(into) or (into.data_ptr() - self.start) % 512 == 0:
            into.copy_(torch.from_numpy(np.fromfile(path, dtype=np.float32)))
        return 0

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        return self.start <= buffer.data_ptr() < self.end

    def wait(self) -> int:
        completed, self.asked = self.asked, 0
        return completed


@pytest.mark.parametrize("is_mended", [False, True])
def test_a_gradient_is_read_wherever_it_begins(tmp_path, monkeypatch, is_mended):
    """Through what both of DeepSpeed's swappers share: what is swapped out, and read back into one buffer."""
    utils = pytest.importorskip("deepspeed.runtime.swap_tensor.optimizer_utils")
    kind = pytest.importorskip(
        "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper"
    ).PartitionedOptimizerSwapper
    cut = utils.OptimizerSwapper._adjust_for_misaligned_lengths
    monkeypatch.setattr(utils.OptimizerSwapper, "_adjust_for_misaligned_lengths", cut)
    if is_mended:
        workarounds.align_swapped_gradients()
    parameter, buffer = torch.nn.Parameter(torch.zeros(OFFSET + LENGTH)), torch.zeros(OFFSET + LENGTH)
    parameter.ds_id = "0"
    handle = Handle(buffer)
    info = utils.OptimizerStateSwapInfo(parameter, parameter.numel(), str(tmp_path), handle)
    swapper = kind.__new__(kind)
    known = {"swap_element_size": 4, "min_aio_bytes": 1024, "numel_alignment": 256, "swap_params_info": {"0": info}}
    vars(swapper).update(known, aio_handle=handle, timers=None, timer_names=set())
    gradients = [torch.rand(OFFSET), torch.rand(LENGTH)]
    swapper._swap_out_gradients(parameter, [0, OFFSET], gradients, handle)
    swapper._swap_in_gradients(handle, parameter, buffer)
    assert torch.equal(buffer[:OFFSET], gradients[0])
    assert torch.equal(buffer[OFFSET:], gradients[1]) == is_mended


# ---------------------------------------------------------------- DDP's buckets are measured, not by a formula

INPUTS = torch.ones(2, 64)


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64), torch.nn.Linear(64, 2))


def built(model: torch.nn.Module, **options: object) -> tuple[DistributedDataParallel, int | None]:
    """A module in DDP, and the bytes of buckets that were measured meanwhile."""
    with BucketBytes(torch.device("cpu")) as buckets:
        ddp = DistributedDataParallel(model, **options)
    return ddp, buckets.num_bytes


def held(ddp: DistributedDataParallel, bucket_bytes: int | None) -> tuple[ModelStateBytes, ModelStateBytes]:
    """What is held in the third step as the optimizer is about to step, and after it."""
    optimizer = torch.optim.AdamW(ddp.parameters())
    for _ in range(3):
        ddp(INPUTS).sum().backward()
        stepping = model_state_bytes(ddp, optimizer, None, bucket_bytes)
        optimizer.step()
        optimizer.zero_grad()
    return stepping, model_state_bytes(ddp, optimizer, None, bucket_bytes)


def size(model: torch.nn.Module) -> int:
    return sum(4 * p.numel() for p in model.parameters())


def test_buckets_are_held_beside_the_gradients(group):
    ddp, measured = built(layers())
    stepping, resting = held(ddp, measured)
    assert measured == size(ddp)
    assert (stepping.gradients, stepping.communication_buffers) == (size(ddp), size(ddp))
    assert (resting.gradients, resting.communication_buffers) == (0, size(ddp))
    assert sum(stepping.by_device.values()) == stepping.model_states + stepping.communication_buffers


def test_other_buckets_are_other_bytes(group):
    """A formula over all parameters, or of 4 bytes each, would not see these."""
    frozen = layers()
    frozen[1].weight.requires_grad = False
    assert built(frozen)[1] == size(frozen) - 4 * 64 * 256
    halves = layers().to(torch.bfloat16)
    assert built(halves)[1] == size(halves) / 2


@pytest.mark.parametrize("view", [False, True])
def test_buckets_that_are_arranged_anew_are_as_large(view, group):
    """DDP begins with one bucket, and after the first backward pass makes those that it keeps."""
    ddp, measured = built(layers(), bucket_cap_mb=0.05, gradient_as_bucket_view=view)
    numbers = set()
    for _ in range(3):
        ddp(INPUTS).sum().backward()
        buckets = [bucket.buffer().nbytes for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
        assert sum(buckets) == measured
        numbers.add(len(buckets))
    assert len(numbers) == 2
