"""Options that no study sets: they reach the optimizer of every engine, and the tracker that they name."""

from __future__ import annotations

import os
import sys
import time
import types

import launching
import pytest
import torch

from study.config import build_config
from study.training import weights
from study.training.memory import PhaseMemory

# Nothing of the default, so that an engine that drops one of them trains something else.
ADAM = {"adam_beta1": 0.5, "adam_beta2": 0.7, "adam_epsilon": 1e-3, "weight_decay": 0.2}
SHORT = {"max_steps": 4, "measure": False, "dropout": 0.0, "gradient_clipping": 0.0}


LOGGED = {**ADAM, "log_with": "tensorboard"}


def losses(strategy: str, **flags) -> list[float]:
    return [step["loss"] for step in launching.run(strategy, **SHORT, **flags).steps]


@pytest.mark.launches
@pytest.mark.parametrize(
    "name", ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero3_cpu_offload", "zero2"))]
)
def test_the_options_of_adam_reach_every_engine(name):
    assert losses(name, **ADAM) == pytest.approx(losses("ddp", **LOGGED), rel=1e-5)


def test_the_options_of_adam_are_those_of_the_optimizer():
    optimizer = weights.make_optimizer(torch.nn.Linear(2, 2), build_config(**ADAM))
    decays = {group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {0.0, ADAM["weight_decay"]}  # of vectors, and of matrices
    for group in optimizer.param_groups:
        assert group["betas"] == (ADAM["adam_beta1"], ADAM["adam_beta2"])
        assert group["eps"] == ADAM["adam_epsilon"]


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize("option", ADAM)
def test_each_option_of_adam_changes_what_is_trained(option):
    plain = losses("ddp", **{name: value for name, value in ADAM.items() if name != option})
    assert losses("ddp", **ADAM)[2:] != pytest.approx(plain[2:], rel=1e-6)


@pytest.mark.launches
def test_a_tracker_is_given_what_every_step_says():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = launching.run("ddp", **SHORT, **LOGGED)
    events = next(run.run_dir.rglob("events.out.tfevents.*"))
    logged = EventAccumulator(str(events.parent))
    logged.Reload()
    tags = logged.Tags()["scalars"]
    name = next(tag for tag in tags if "loss" in tag and "eval" not in tag and "held" not in tag)
    assert [event.step for event in logged.Scalars(name)] == [1, 2, 3, 4]
    assert [event.value for event in logged.Scalars(name)] == pytest.approx([step["loss"] for step in run.steps])


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU as far as memory is concerned: torch's counters, and NVML with two processes on it."""

    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: {b"GPU-1234": "handle"}[uuid]
    own = iter([300, 500, 400])
    processes = [
        types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=None),
        types.SimpleNamespace(pid=1, usedGpuMemory=9),
    ]

    def running(handle):
        assert handle == "handle"
        processes[0].usedGpuMemory = next(own, 400)
        return processes

    nvml.nvmlDeviceGetComputeRunningProcesses = running
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 200)
    return nvml


def test_the_memory_of_a_process_on_a_gpu_is_sampled_of_this_process_only(fake_gpu):

    memory = PhaseMemory(torch.device("cuda", 0), enabled=True)
    memory.begin("steady_steps")
    time.sleep(0.35)  # a sample each 0.1 s
    memory.begin(None)
    peak = memory.phases()["steady_steps"]
    assert (peak.allocated_bytes, peak.reserved_bytes, peak.process_bytes) == (100, 200, 500)
    assert 300 <= peak.process_average_bytes <= 500


def test_what_nvml_does_not_show_is_unknown(fake_gpu):

    def refuse(handle):
        raise fake_gpu.NVMLError

    fake_gpu.nvmlDeviceGetComputeRunningProcesses = refuse
    memory = PhaseMemory(torch.device("cuda", 0), enabled=True)
    memory.begin("steady_steps")
    memory.begin(None)
    peak = memory.phases()["steady_steps"]
    assert (peak.process_bytes, peak.process_average_bytes) == (None, None)
    assert peak.allocated_bytes == 100
