"""What a step sends and takes on a network of a rate: counted, by the backend's algorithms, on the wire, predicted."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import launching
import pytest
from laboratory import Lab

from study.compare import network
from study.files import ROOT
from study.records import find
from study.records.machine import LABORATORY
from study.records.schema import Network
from study.strategy import in_theory
from study.strategy.file import read_by_name
from study.theory import communication, hardware, shapes, step_time
from study.theory.case import Engine, Job
from study.theory.communication import on_wire
from study.theory.hardware import Box


class Asked(NamedTuple):
    kind: str
    bytes: int
    count: int = 1


def engine(world_size, **changes):
    return Engine(kind="ddp", zero_stage=0, world_size=world_size, precision="fp32", accumulation_bytes=4, **changes)


@pytest.mark.parametrize(
    ("asked", "world_size", "machines", "gloo", "nccl"),
    [
        ("all_reduce", 4, 4, 150, 150),  # 2 (n - 1) / n
        ("all_reduce", 4, 2, 150, 150),  # one rank of each machine has its neighbour on the other
        ("all_reduce", 4, 1, 0, 0),
        ("all_gather", 4, 2, 75, 75),
        ("reduce_scatter", 4, 2, 150, 75),
        ("reduce", 2, 2, 75, 50),  # and the half that the other rank has, once for both machines
        ("reduce", 4, 2, 100, 75),
    ],
)
def test_what_a_machine_sends_for_a_collective(asked, world_size, machines, gloo, nccl):
    for backend, expected in (("gloo", gloo), ("nccl", nccl)):
        found = on_wire.sent_bytes([Asked(asked, 100)], engine(world_size), machines, backend)
        assert found == pytest.approx(expected), backend


@pytest.mark.launches
@launching.in_laboratory
@pytest.mark.parametrize(("num_machines", "ranks_each"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("num_bytes", [12 << 20, 96 << 10])
def test_gloo_sends_what_its_algorithms_are_said_to(num_machines, ranks_each, num_bytes):
    """By the interfaces' counters; what is beyond the payload are headers and acknowledgements."""
    launching.use()
    world_size, count = num_machines * ranks_each, max(2, (24 << 20) // num_bytes)
    python, program = sys.executable, str(Path(__file__).with_name("wire_program.py"))
    with Lab(num_machines) as lab:
        ranks = [
            lab.start(
                rank // ranks_each,
                [python, program, *map(str, (rank, world_size, lab.main_ip, num_bytes, count))],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        said = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    for kind in said[0]:
        sent = statistics.mean(each[kind] for each in said)
        expected = on_wire.sent_bytes([Asked(kind, count * num_bytes, count)], engine(world_size), num_machines, "gloo")
        assert expected < sent < 1.04 * expected, (kind, sent / expected)


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3_tuned", "zero3_hpz", "fsdp2", "fsdp2_hybrid"])
def test_the_planner_sends_between_nodes_what_rings_send_between_machines(name, monkeypatch):
    """Two nodes of two GPUs, links within a node that take no time, and no latency: what is left is bytes."""
    monkeypatch.setattr(step_time, "LINK_EFFICIENCY", 1.0)
    monkeypatch.setattr(step_time, "COLLECTIVE_SECONDS", 0.0)
    gpu = replace(hardware.find_gpu("a100-80gb"), link_bandwidth=1e30)
    box = Box(gpu, 4, gpus_per_node=2, node_bandwidth=1e9)
    shape = shapes.find("gpt2")
    chosen = in_theory.advised_engine(read_by_name(name), shape.hidden, 4, "bf16")
    job = Job(micro_batch_size=1, sequence_length=128)
    speed = SimpleNamespace(constants=SimpleNamespace(hop_seconds=0.0))
    moved = step_time._communication(shape, chosen, job, box, speed)
    seconds = moved.forward + moved.backward + moved.last_backward + moved.serial + moved.step
    sent = on_wire.sent_bytes(communication.collectives(chosen, shape, job), chosen, 2, "nccl")
    assert seconds * 1e9 == pytest.approx(sent, rel=1e-6)


# ---------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def records():
    """A run of each of three strategies on one machine, with its steps."""
    of = {}
    for file in find.find([ROOT / "reports" / "cpu" / "records" / "cpu"]):
        r = file.record
        if r.world_size == 2 and r.proof.gradient_accumulation_steps == 1 and r.timing:
            of.setdefault(r.strategy, file)
    return {strategy: of[strategy] for strategy in ("ddp", "zero2", "zero3")}


def on_two_machines(file, rate, seconds, sent):
    """The same run, as two machines of one rank would have left it."""
    r, carried = file.record, {"num_steps": 10, "sent_bytes": 10 * sent, "received_bytes": 0}
    each = Network(interfaces=["eth0"], rate_bits_per_second=rate, **carried)
    changed = {
        "proof": r.proof.model_copy(update={"ranks_of_machines": [1, 1]}),
        "network": [each, each],
        "machine": r.machine | {"environment": {LABORATORY: "unlimited"}},  # where `tc` shows no rate
        "timing": r.timing.model_copy(update={"median_seconds": seconds}),
    }
    return file._replace(record=r.model_copy(update=changed))


def test_bytes_are_counted_by_gloo_and_on_the_wire(records):
    size = 4 * records["ddp"].record.num_params
    (cell,) = network.cells([on_two_machines(records["zero3"], None, 0.5, 2 * size)])
    assert (cell.layout[:3], cell.rate) == ((2, 1, 1), math.inf)
    assert cell.on_the_wire == pytest.approx(2)
    assert cell.by_theory == pytest.approx(cell.by_gloo, rel=1e-3)
    assert cell.by_nccl < cell.by_gloo  # whose reduce-scatter is an all-reduce


def test_a_prediction_is_the_unlimited_step_and_the_bytes_through_the_rate(records):
    ddp = on_two_machines(records["ddp"], None, 0.1, 0)
    unlimited = network.cells([ddp])[0]
    bits = 8 * unlimited.by_gloo * unlimited.parameter_bytes
    assert network.predicted_seconds(unlimited, 1e6) == pytest.approx(0.1 + bits / 1e6, rel=1e-4)
    measured = replace(unlimited, rate=1e6, seconds=(2 * network.predicted_seconds(unlimited, 1e6),))
    assert network.prediction_error(measured, unlimited) == pytest.approx(-0.5)
