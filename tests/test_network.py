"""What a step sends and takes on a network of a rate: counted, by the backend's algorithms, on the wire, predicted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest

from study.compare import network
from study.errors import Refusal
from study.files import ROOT
from study.records import find, schema
from study.records.schema import Network
from study.running import studies
from study.theory.case import Engine
from study.theory.communication import on_wire


class Asked(NamedTuple):
    kind: str
    bytes: int


def engine(world_size, **changes):
    return Engine(kind="ddp", zero_stage=0, world_size=world_size, precision="fp32", accumulation_bytes=4, **changes)


@pytest.mark.parametrize(
    ("asked", "world_size", "machines", "gloo", "nccl"),
    [
        ("all_reduce", 2, 2, 100, 100),  # 2 (n - 1) / n
        ("all_reduce", 4, 4, 150, 150),
        ("all_reduce", 4, 2, 150, 150),  # one rank of each machine has its neighbour on the other
        ("all_reduce", 4, 1, 0, 0),
        ("all_gather", 4, 2, 75, 75),
        ("reduce_scatter", 2, 2, 100, 50),
        ("reduce_scatter", 4, 2, 150, 75),
    ],
)
def test_what_a_machine_sends_for_a_collective(asked, world_size, machines, gloo, nccl):
    for backend, expected in (("gloo", gloo), ("nccl", nccl)):
        found = on_wire.sent_bytes([Asked(asked, 100)], engine(world_size), machines, backend)
        assert found == pytest.approx(expected), backend


def test_groups_within_a_machine_send_nothing_to_others():
    hierarchy = engine(4, secondary_partition_size=2)
    gather = [Asked("subgroup_all_gather", 100)]
    assert on_wire.sent_bytes(gather, hierarchy, 2, "gloo") == 0
    assert on_wire.sent_bytes(gather, hierarchy, 4, "gloo") == 50
    assert on_wire.sent_bytes(gather, engine(4, secondary_partition_size=4), 2, "gloo") == 75


def test_replicas_send_each_shard_over_all_machines():
    hybrid = engine(4, replicas=2)  # of two shards
    assert on_wire.sent_bytes([Asked("subgroup_all_reduce", 50)], hybrid, 2, "nccl") == 100  # two ranks of each
    assert on_wire.sent_bytes([Asked("subgroup_reduce_scatter", 100)], hybrid, 2, "nccl") == 0


def test_a_reduce_to_one_rank_is_not_known():
    assert on_wire.is_known([Asked("subgroup_all_gather", 1)])
    assert not on_wire.is_known([Asked("all_gather", 1), Asked("reduce", 1)])


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
        "timing": r.timing.model_copy(update={"median_seconds": seconds}),
    }
    return file._replace(record=r.model_copy(update=changed))


def test_bytes_are_counted_by_gloo_and_on_the_wire(records):
    size = 4 * records["ddp"].record.num_params
    found = network.cells([on_two_machines(records["zero3"], None, 0.5, 2 * size)])
    assert len(found) == 1
    cell = found[0]
    assert (cell.layout, cell.rate) == ((2, 1, 1), math.inf)
    assert cell.on_the_wire == pytest.approx(2)
    assert cell.by_theory == pytest.approx(cell.by_gloo, rel=1e-3)
    assert cell.by_nccl < cell.by_gloo  # whose reduce-scatter is an all-reduce


def test_a_prediction_is_the_unlimited_step_and_the_bytes_through_the_rate(records):
    ddp = on_two_machines(records["ddp"], None, 0.1, 0)
    unlimited = network.cells([ddp])[0]
    bits = 8 * unlimited.by_gloo * unlimited.parameter_bytes
    assert network.predicted_seconds(unlimited, 1e6) == pytest.approx(0.1 + bits / 1e6, rel=1e-4)
    slower = replace(unlimited, seconds=(0.2,), by_gloo=unlimited.by_gloo / 2)
    assert network.crossing(unlimited, slower) == pytest.approx(bits / 2 / 0.1)
    assert network.crossing(unlimited, unlimited) is None


def test_the_page_has_a_block_for_each_layout(records, monkeypatch, tmp_path):
    runs = [
        on_two_machines(file, rate, seconds, 1000)
        for file in records.values()
        for rate, seconds in ((None, 0.1), (100_000_000, 1.0))
    ]
    monkeypatch.setattr(network.records, "find", lambda _: [*runs, *records.values()])
    page = network.table([tmp_path])
    assert "## 2 machines, 1 rank on each" in page
    assert "| seconds a step | unlimited | 100 Mbit/s |" in page
    for name in records:
        assert f"| `{name}` | 0.100 | 1.000 (" in page
        assert f"| `{name}` | 0e+00 | " in page  # its steps are those of the run on one machine


def test_a_page_of_no_machines_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(network.records, "find", lambda _: [])
    with pytest.raises(Refusal, match=r"run: zero-study run network$"):
        network.table([tmp_path])


def test_runs_of_one_machine_are_no_cells(records):
    assert network.cells(records.values()) == []


def test_every_part_of_the_study_is_of_machines_and_a_rate():
    study = studies.find("network")
    assert all(part.machines > 1 and part.rate for part in study.parts)
    planned = studies.runs(study)
    assert len({run.run_id for run in planned}) == len(planned)
    assert {run.num_machines for run in planned} == {2, 4}
    assert schema.Network.model_fields["rate_bits_per_second"].is_required()
