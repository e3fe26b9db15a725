"""Test that `advise --this-machine` takes the GPUs, memory and cores that the machine reports."""

from __future__ import annotations

import importlib.util
import json

import pytest
import simulated
from refusing import refusal

from zero_study import cli
from zero_study.engines import this_machine
from zero_study.engines.this_machine import Machine

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"
MODEL = ["--model", "gpt2-xl", "--this-machine"]


@pytest.fixture
def machine(monkeypatch):
    def make(*memory_gib: float, name: str | None = H100) -> None:
        sizes = tuple(round(size * GIB) for size in memory_gib)
        monkeypatch.setattr(this_machine, "find", lambda: Machine(sizes, 500 * GIB, name))
        monkeypatch.setattr(this_machine, "usable_cores", lambda: 40.0)

    return make


def asked(capsys, *arguments: str) -> dict:
    status = cli.run(["advise", *arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert status == answer["exit_status"] in (0, 1)  # 1: no strategy fits
    return answer


def test_gpus_memory_and_cores_are_those_of_the_machine(machine, capsys):
    machine(79.6, 79.6)
    inputs = ["--gpu", "h100-sxm", "--gpus", "2", "--host-memory", "500", "--host-cores", "40"]
    assert asked(capsys, *MODEL) == asked(capsys, "--model", "gpt2-xl", *inputs)


def test_an_option_replaces_what_the_machine_reports(machine, capsys):
    machine(79.6, 79.6)
    inputs = ["--gpu", "a100-80gb", "--gpus", "1", "--host-memory", "64", "--host-cores", "8"]
    assert asked(capsys, *MODEL, *inputs) == asked(capsys, "--model", "gpt2-xl", *inputs)


def test_more_gpus_than_the_machine_has_are_several_machines(machine, capsys):
    machine(79.6, 79.6)
    inputs = ["--gpu", "h100-sxm", "--gpus-per-node", "2", "--host-memory", "500", "--host-cores", "40"]
    assert asked(capsys, *MODEL, "--gpus", "4") == asked(capsys, "--model", "gpt2-xl", *inputs, "--gpus", "4")


@pytest.mark.parametrize("gib", [24, 48])
def test_a_card_with_other_memory_has_what_the_driver_reports(machine, capsys, gib):
    """An RTX 4090 has 24 GiB, and some are sold with 48."""
    machine(gib, name="NVIDIA GeForce RTX 4090")
    assert asked(capsys, *MODEL)["usable_bytes_per_gpu"] == pytest.approx(gib * GIB, rel=0.05)


def test_a_gpu_that_the_planner_does_not_know_needs_only_its_rates(machine, capsys):
    machine(48, name="NVIDIA X9000")
    rates = ["--gpu-tflops", "362", "--gpu-bandwidth", "864"]
    assert asked(capsys, *MODEL, *rates)["num_gpus"] == 1


@pytest.mark.parametrize(
    ("sizes", "name"), [((), None), ((80, 40), None), ((48,), "NVIDIA X9000")], ids=["none", "two kinds", "unknown"]
)
def test_what_the_machine_lacks_is_refused(machine, sizes, name):
    machine(*sizes, name=name)
    assert "--gpu" in refusal(cli.run, ["advise", *MODEL])


def test_the_package_that_finds_gpus_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install nvidia-ml-py" in refusal(cli.run, ["advise", *MODEL])


@pytest.mark.launches
def test_a_machine_with_gpus_is_read():
    gpus = {**simulated.H100, "count": 2}
    own = simulated.command(["-m", "zero_study", "advise", *MODEL, "--json"], gpus)
    assert own.returncode == 0, own.stderr
    advice = json.loads(own.stdout)
    assert (advice["gpu"], advice["num_gpus"]) == ("h100-sxm", 2)
