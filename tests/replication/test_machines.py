"""Several machines: what each is told, says of the others, sends and brings home; counted, on the wire, predicted."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import laboratory
import launching
import psutil
import pytest
from laboratory import Lab
from launching import ROOT

from study.compare import communication_views
from study.config import build_config
from study.records import find, schema
from study.records.laboratory import LABORATORY
from study.records.schema import Network
from study.run import make_run
from study.running import launch, outcome, plan, studies
from study.training import counters, journal, proof, rank_failures, rendezvous
from zero_study.errors import Refusal
from zero_study.strategy import theory_engine
from zero_study.strategy.file import read_by_name
from zero_study.theory import communication, hardware, shapes, step_time
from zero_study.theory.communication import ExpectedCollective, on_wire
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.hardware import Cluster


def two_machines(**changes):
    run = make_run(build_config(collective_timeout=20), read_by_name("ddp"), 4, num_machines=2)
    return replace(run, **changes)


# ---------------------------------------------------------------- what a machine is told


def test_each_machine_but_the_first_has_a_folder_of_its_own():
    first, second = two_machines(), two_machines(machine_rank=1)
    assert first.own_folder == first.folder == second.folder
    assert second.own_folder == second.folder / "machine1"
    assert second.swap_folder.parent == second.own_folder.resolve()
    assert second.initial_weights_folder.parent == second.own_folder
    assert "2machines" in first.run_id
    assert [first.is_first_of_machine(rank) for rank in range(4)] == [True, False, True, False]


def test_processes_that_machines_cannot_share_are_refused():
    run = make_run(build_config(), read_by_name("ddp"), 3, num_machines=2)
    with pytest.raises(Refusal, match=r"3 processes .* among 2 machines.* Use --num_processes 2$"):
        run.check_machines()
    with pytest.raises(
        Refusal, match=r"machine_rank 2 of 2 machine\(s\) does not exist, because machines are counted from 0"
    ):
        two_machines(machine_rank=2).check_machines()


def test_a_run_of_several_machines_is_not_started_on_one(monkeypatch):
    here = SimpleNamespace(gpu_memory_bytes=[], host_memory_bytes=10**12)
    study = studies.find("smoke")
    assert "needs 2 machines" in plan.missing_resources(study, two_machines(), here)
    assert "needs a simulated network" in plan.missing_resources(study, two_machines(laboratory="unlimited"), here)
    monkeypatch.setenv(LABORATORY, "unlimited")
    reached = two_machines(laboratory="unlimited", main_process_ip="10.77.0.1")
    assert plan.missing_resources(study, reached, here) is None
    assert "rate of 8mbit" in plan.missing_resources(study, replace(reached, laboratory="8mbit"), here)


def test_ranks_are_where_they_were_asked_to_be():
    assert proof.verify_machines([0, 0, 1, 1], two_machines()) == [2, 2]
    with pytest.raises(
        Refusal, match=r"the run requests 2 ranks on each of 2 machines, but the machines have \[3, 1\] ranks"
    ):
        proof.verify_machines([0, 0, 0, 1], two_machines())


def test_a_rank_that_has_read_something_else_is_named():
    proof.verify_alike("data", ["a", "a", "a", "a"], two_machines())
    with pytest.raises(Refusal, match=r"^data: rank 2 \(machine 1\) has a different value from rank 0 \(b, a\)"):
        proof.verify_alike("data", ["a", "a", "b", "a"], two_machines())


# ---------------------------------------------------------------- how machines that do not find each other are told

STORE, NETWORK = "torch.distributed.DistStoreError: ", "torch.distributed.DistNetworkError: The client socket has "
ALL_CAME, SILENT = "one of their ranks did not connect within 30 s", "machine 0 did not answer at "


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            STORE + "Timed out after 31 seconds waiting for clients. 1/2 clients joined.",
            "1 of 2 machines connected within",
        ),
        (NETWORK + "timed out after 30000ms while trying to connect to (10.7.0.1, 29500).", SILENT + "10.7.0.1:29500"),
        (NETWORK + "failed to connect to any network address of (10.7.0.9, 29500). The ", SILENT + "10.7.0.9:29500"),
        (STORE + "wait timeout after 30000ms, keys: /none/torchelastic/role_info/0, /none/torchelastic/...", ALL_CAME),
        (STORE + "wait timeout after 30000ms, keys: /none/torchelastic/assigned_ranks/1", ALL_CAME),
    ],
)
def test_machines_that_do_not_find_each_other(said, message):
    end = outcome.classify_exit(["Traceback (most recent call last):", said], None, 1)
    assert end.status == "misconfigured"
    assert message in end.message


class Store(dict):
    """The store that machines share, as far as they use it."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)

    def wait(self, keys, timeout):
        if not self.check(keys):
            raise RuntimeError("wait timeout")


def met(theirs=None, **changes):
    """What machine 0 says to a machine whose facts are its own, but for some."""
    run, store = two_machines(**changes), Store()
    ours = rendezvous._facts(run) | {"shared run directory": True}
    for rank, facts in enumerate([ours, ours | (theirs or {})]):
        store.set(f"machine/{rank}", json.dumps(facts))
    return rendezvous._verdict(store, run, 0)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"transformers": "4.0.0"}, "machine 1 has transformers 4.0.0, but machine 0 has "),
        ({"seed": 1}, "machine 1 has seed 1, but machine 0 has 0."),
        ({"num_machines": 3}, "machine 1 has num_machines 3, but machine 0 has 2"),
        ({"device": "NVIDIA L4"}, "machine 1 has device NVIDIA L4, but machine 0 has cpu"),
        ({"code of sha256": "0"}, "machine 1 has code of sha256 0, but machine 0 has "),
        ({"strategy's file": {}}, "machine 1 has a different strategy's file from machine 0."),
        ({"shared run directory": False}, "machine 1 does not see the run directory of machine 0, but checkpoints"),
    ],
)
def test_what_machines_have_otherwise_is_named(theirs, said):
    assert met(theirs).startswith(said)


@pytest.mark.parametrize(
    ("theirs", "interface"),
    [
        ("10.0.0.2", "eth0"),  # though its own name leads machine 0 to its loopback
        ("127.0.0.1", "lo"),  # both are on one host
        ("", None),  # machine 1 knows no way either
    ],
)
def test_gloo_takes_the_interface_that_leads_from_machine_0_to_another(theirs, interface, monkeypatch):
    ways = {"this-host": "127.0.0.1", "10.0.0.2": "10.0.0.1", "127.0.0.1": "127.0.0.1", "": ""}
    has = {"lo": "127.0.0.1", "eth0": "10.0.0.1"}
    run, store = two_machines(), Store()
    facts = rendezvous._facts(run) | {"shared run directory": True}
    store.set("machine/1", json.dumps(facts))
    store.set("address/1", theirs)
    monkeypatch.setattr(rendezvous, "_store", lambda seconds: store)
    monkeypatch.setattr(rendezvous, "own_address", ways.__getitem__)
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {k: [SimpleNamespace(family=socket.AF_INET, address=v)] for k, v in has.items()}
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # and back, after the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for name, value in {"RANK": "0", "MASTER_ADDR": "this-host"}.items():
        monkeypatch.setenv(name, value)
    assert rendezvous.join(run) is store
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    assert store["address/0"] == b"127.0.0.1"


def test_what_ranks_of_other_machines_say_is_heard(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_failures, "WAIT_SECONDS", 0.0)
    store = Store()
    here, there = (two_machines(folder=tmp_path / name, machine_rank=rank) for rank, name in enumerate("ab"))
    there.own_folder.mkdir(parents=True)
    rank_failures.RankReports(there, store).post(2, {"status": "stalled"})
    assert rank_failures.RankReports(here, store).read() == {2: {"status": "stalled"}}
    assert rank_failures.RankReports(here, store).missing() == [0, 1, 3]
    assert here.machine_of(3) == "3 (machine 1)"


def test_a_machine_that_is_gone_is_named_by_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_failures, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(journal.signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", "0")
    run, store = two_machines(folder=tmp_path), Store({"failure/1": b"{}"})
    closed = RuntimeError("Read error [10.77.0.2]:7902: Connection reset by peer")
    monkeypatch.setattr(journal.Journal, "_record", lambda self, own: None)
    said = str(journal.Journal(run, store).fail(closed))
    assert said.startswith("the connection to ranks 2 (machine 1), 3 (machine 1) was lost")


def test_a_machine_gives_up_where_machine_0_has_gone(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = {"main_process_ip": "127.0.0.1", "main_process_port": server.getsockname()[1]}
        machine_0 = launch._MainMachine(two_machines(machine_rank=1, **where))
        never_there = launch._MainMachine(two_machines(machine_rank=1, **where | {"main_process_port": 9}))
        assert not machine_0.has_gone()
    now = time.monotonic()
    for seconds, has_gone in ((79, False), (81, True)):  # of which 20 are the ranks' time-out
        monkeypatch.setattr(launch.time, "monotonic", lambda later=now + seconds: later)
        assert machine_0.has_gone() is has_gone
    assert machine_0.says.startswith("machine 0 has not answered for 80 s")
    assert not never_there.has_gone()
    assert not launch._MainMachine(two_machines()).has_gone()


def test_a_store_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_failures, "ANSWER_SECONDS", 0.05)
    answered = threading.Event()
    store = Store()

    def check(keys):
        answered.wait(60)
        raise RuntimeError("the store is gone")

    store.check = check
    assert rank_failures.RankReports(two_machines(folder=tmp_path), store).read() == {}
    answered.set()


def test_traffic_is_counted_over_whole_steady_steps(monkeypatch):
    def carried(sent, received):
        counters = {"eth0": (sent, received), "eth1": (7, 7), "lo": (sent * 9, 0)}
        each = {name: SimpleNamespace(bytes_sent=up, bytes_recv=down) for name, (up, down) in counters.items()}
        monkeypatch.setattr(psutil, "net_io_counters", lambda **_: each)

    held = {"eth0": 25_000_000, "eth1": 125_000, "lo": 1}  # eth1 carried nothing
    displayed = json.dumps([{"kind": "tbf", "dev": name, "options": {"rate": rate}} for name, rate in held.items()])
    monkeypatch.setattr(counters.machine, "command_output", lambda *_: displayed)
    traffic = counters.Traffic(first_step=4)
    for step, sent in enumerate((100, 200, 300, 1000, 1500, 2000, 2600), start=1):
        carried(sent, 2 * sent)
        traffic.begin_step(step, step)
    result = traffic.network()
    assert (result.num_steps, result.sent_bytes, result.received_bytes) == (3, 1600, 3200)
    assert (result.interfaces, result.rate_bits_per_second) == (["eth0"], 200_000_000)
    assert counters.Traffic(first_step=4).network() is None
    assert counters._rate({"eth0", "eth1"}) == 1_000_000
    assert counters._rate({"eth2"}) is None


# ---------------------------------------------------------------- the laboratory


def sent_by(lab: Lab, machine: int) -> int:
    """Bytes, since the machine was made, by its interface."""
    displayed = laboratory._ip("-n", lab._namespace(machine), "-s", "-j", "link", "show", "dev", "eth0")
    return json.loads(displayed)[0]["stats64"]["tx"]["bytes"]


@pytest.mark.nightly
@pytest.mark.launches
@launching.in_laboratory
def test_a_laboratory_has_a_rate_disks_and_an_end(tmp_path):
    launching.use()
    own = tmp_path / "own"
    own.mkdir()
    with Lab(2, "8mbit", [own]) as lab:
        (own / "of machine 0").touch()
        seen = [lab.start(k, ["ls", str(own)], stdout=-1, text=True).communicate()[0].split() for k in (0, 1)]
        assert seen == [["of", "machine", "0"], []]
        name = lab._namespace(0)
        assert '"rate":1000000' in laboratory._run(["tc", "-n", name, "-j", "qdisc", "show", "dev", "eth0"])
        ask = "from study.training import counters; print(counters._rate({'eth0'}))"
        rate = lab.start(0, [sys.executable, "-c", ask], stdout=-1, text=True, env=launching.environment())
        assert rate.communicate()[0].split() == ["8000000"]
        assert name in laboratory._ip("netns", "list")
        before = sent_by(lab, 1)
        send = f"import socket; socket.socket(2, 2).sendto(bytes(1000), ('{lab.main_ip}', 9))"
        assert lab.start(1, [shutil.which("python3"), "-c", send]).wait() == 0
        assert sent_by(lab, 1) - before >= 1042  # with three headers
    assert name not in laboratory._ip("netns", "list")
    assert lab._disks is not None
    assert not lab._disks.exists()


def on_machines(strategy: str, num_processes: int, folder: Path, *flags: str) -> list[str]:
    """What a user types on each machine, for a laboratory's."""
    line = (
        f"accelerate launch --config_file accelerate_configs/{strategy}.yaml --num_processes {num_processes} "
        "--num_machines $NUM_MACHINES --machine_rank $MACHINE_RANK --main_process_ip $MAIN_PROCESS_IP study/train.py "
    )
    config = launching.words({**launching.DEFAULTS, "output_dir": folder})
    completed = launching.attempt(
        ["python", laboratory.__file__, "--own", str(folder), line + " ".join([*config, *flags])],
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    return [str(completed.returncode), *completed.stdout.splitlines()]


@pytest.mark.launches
@launching.in_laboratory
def test_stage_3_trains_on_two_machines_as_on_one(tmp_path):
    said = on_machines("zero3", 2, tmp_path / "run")
    assert said[0] == "0", said[-20:]
    record = schema.read(tmp_path / "run")
    assert record.proof.ranks_of_machines == [1, 1]
    assert [machine["libraries"] for machine in record.other_machines] == [record.machine["libraries"]]
    assert record.machine["environment"][LABORATORY] == "unlimited"
    assert socket.gethostname() not in record.model_dump_json()
    one = launching.run("zero3").record
    assert one.proof.ranks_of_machines == [2]
    assert record.final_loss == pytest.approx(one.final_loss, rel=1e-5)
    assert record.initial_parameters == one.initial_parameters
    for carried in record.network:
        assert (carried.interfaces, carried.rate_bits_per_second) == (["eth0"], None)
        assert carried.sent_bytes / carried.num_steps > record.num_params * 4
    assert not (tmp_path / "run" / "machine1").exists()


@pytest.mark.nightly
@pytest.mark.launches
@launching.in_laboratory
def test_another_seed_on_another_machine_is_refused_on_both(tmp_path):
    said = on_machines("ddp", 2, tmp_path / "run", "--seed $MACHINE_RANK")
    for rank in (0, 1):
        assert f"machine {rank}: zero-study: machine 1 has seed 1, but machine 0 has 0." in said
    assert not list((tmp_path / "run").glob("*.json"))
    assert str(ROOT) not in said[1]


# ---------------------------------------------------------------- what a step sends and takes on a network of a rate


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
        result = on_wire.sent_bytes([ExpectedCollective(asked, 1, 100)], engine(world_size), machines, backend)
        assert result == pytest.approx(expected), backend


@pytest.mark.nightly
@pytest.mark.launches
@launching.in_laboratory
@pytest.mark.parametrize(("num_machines", "ranks_each"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("num_bytes", [12 << 20, 96 << 10])
def test_gloo_sends_what_its_algorithms_are_said_to(num_machines, ranks_each, num_bytes):
    """By the interfaces' counters; what is beyond the payload are headers and acknowledgements."""
    launching.use()
    world_size, count = num_machines * ranks_each, max(2, (24 << 20) // num_bytes)
    python, program = sys.executable, str(Path(__file__).parents[1] / "wire_program.py")
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
        asked = ExpectedCollective(kind, count, count * num_bytes)
        expected = on_wire.sent_bytes([asked], engine(world_size), num_machines, "gloo")
        assert expected < sent < 1.04 * expected, (kind, sent / expected)


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3_tuned", "zero3_hpz", "fsdp2", "fsdp2_hybrid"])
def test_the_planner_sends_between_nodes_what_rings_send_between_machines(name, monkeypatch):
    """Two nodes of two GPUs, links within a node that take no time, and no latency: what is left is bytes."""
    monkeypatch.setattr(step_time, "LINK_EFFICIENCY", 1.0)
    monkeypatch.setattr(step_time, "COLLECTIVE_SECONDS", 0.0)
    gpu = replace(hardware.find_gpu("a100-80gb"), link_bandwidth=1e30)
    box = Cluster(gpu, 4, gpus_per_node=2, node_bandwidth=1e9)
    shape = shapes.find("gpt2")
    chosen = theory_engine.advised_engine(read_by_name(name), shape.hidden, 4, "bf16")
    job = StepConfig(micro_batch_size=1, sequence_length=128)
    moved = step_time._communication(shape, chosen, job, box, hop_seconds=0.0)
    seconds = moved.overlapped(1) + moved.serial + moved.step
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
    (cell,) = communication_views.network_cells([on_two_machines(records["zero3"], None, 0.5, 2 * size)])
    assert (cell.layout[:3], cell.rate) == ((2, 1, 1), math.inf)
    assert cell.on_the_wire == pytest.approx(2)
    assert cell.by_theory == pytest.approx(cell.by_gloo, rel=1e-3)
    assert cell.by_nccl < cell.by_gloo  # whose reduce-scatter is an all-reduce


def test_a_prediction_is_the_unlimited_step_and_the_bytes_through_the_rate(records):
    ddp = on_two_machines(records["ddp"], None, 0.1, 0)
    unlimited = communication_views.network_cells([ddp])[0]
    bits = 8 * unlimited.by_gloo * unlimited.parameter_bytes
    assert communication_views.predicted_seconds(unlimited, 1e6) == pytest.approx(0.1 + bits / 1e6, rel=1e-4)
    measured = replace(unlimited, rate=1e6, seconds=(2 * communication_views.predicted_seconds(unlimited, 1e6),))
    assert communication_views.prediction_error(measured, unlimited) == pytest.approx(-0.5)
