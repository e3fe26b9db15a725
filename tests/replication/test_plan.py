"""Test that a study file is read correctly, and that its plan says what will run, is kept, or cannot run and why."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusing import refusal

from study.config import build_config
from study.records import find as records
from study.records import schema
from study.records.laboratory import LABORATORY
from study.records.machine import FORKED
from study.records.schema import Outcome
from study.run import Run, make_run
from study.running import checks, estimate, plan, studies
from study.running.estimate import Estimate, History
from zero_study import files
from zero_study.engines import this_machine
from zero_study.engines.this_machine import Machine
from zero_study.errors import Refusal
from zero_study.strategy import file
from zero_study.strategy.file import read_by_name
from zero_study.theory import hardware

FIXTURES = Path(__file__).parents[1] / "fixtures" / "records"
ANY = SimpleNamespace(device="any")
GPU_ONLY = SimpleNamespace(device="gpu")
T4 = 15_835_660_288
CPU_BOX = Machine((), 25_000_000_000)


def lacking(here: Machine, name: str = "single", num_processes: int = 1, study=ANY, **flags) -> str | None:
    return plan.missing_resources(study, make_run(build_config(**flags), read_by_name(name), num_processes), here)


# ---------------------------------------------------------------- what a machine lacks


def test_gpus_that_are_not_there():
    two = Machine((T4, T4), 10**12)
    assert lacking(CPU_BOX, "ddp", 4, GPU_ONLY) == "needs 4 GPUs, found 0"
    assert lacking(two, "ddp", 4) == "needs 4 GPUs, found 2"
    assert lacking(CPU_BOX, "single", 1, GPU_ONLY) == "needs 1 GPU, found 0"
    assert lacking(two, "ddp", 2, GPU_ONLY) is None
    assert lacking(CPU_BOX, "ddp", 4) is None  # any number of processes on a CPU


def test_ranks_that_share_a_gpu_need_one_with_room_for_all():
    """BERT-large: 335 million parameters x 16 bytes on each rank."""
    large = {"size": "large", "data": "hub", "share_device": True}
    assert lacking(CPU_BOX, "ddp", 4, GPU_ONLY, **large) == "needs 1 GPU, found 0"
    assert lacking(Machine((30 * 10**9,), 10**12), "ddp", 4, **large) is None
    small = Machine((T4,), 10**12)
    assert re.search(r"5\.4 GB per rank x 4 ranks .* GPU has only 15\.8 GB", lacking(small, "ddp", 4, **large))
    assert lacking(small, "zero3", 4, **large) is None


GPT_6B = {"workload": "gpt-wikitext", "size": "6b", "attention": "eager", "precision": "bf16", "data": "hub"}


def test_model_states_that_cannot_fit_on_the_gpu():
    """6.05e9 parameters x (2 + 2 + 12) bytes."""
    assert re.search(r"96\.8 GB per rank .* GPU has only 15\.8 GB", lacking(Machine((T4,), 10**12), "zero2", **GPT_6B))
    assert lacking(Machine((150 * 10**9,), 10**12), "zero2", **GPT_6B) is None
    assert "12.1 GB per rank" in lacking(Machine((10**10,) * 8, 10**12), "zero3", 8, **GPT_6B, global_batch_size=8)


def test_offload_moves_model_states_to_the_host():
    """On the GPU parameters stay, 2 bytes each; Adam's states and fp32 gradients, 16 bytes, go to the host."""
    assert lacking(Machine((T4,), 10**12), "zero2_cpu_offload", **GPT_6B) is None
    short = Machine((T4,), 50 * 10**9)
    assert re.search(r"96\.8 GB per rank .* host has only 50\.0 GB", lacking(short, "zero2_cpu_offload", **GPT_6B))
    # With parameters on the host too, and in the end on a disk.
    assert "108.9 GB per rank" in lacking(short, "zero3_cpu_offload", **GPT_6B)
    assert lacking(Machine((10**9,), 10**9), "zero3_nvme_offload", **GPT_6B) is None


# ---------------------------------------------------------------- this machine


class NVMLError(Exception):
    pass


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (1, 2, 3)),
        ("2,0", (3, 1)),
        ("", ()),
        ("0,9,1", (1,)),  # CUDA stops at the first bad one
        ("GPU-b, 0", (2, 1)),
    ],
)
def test_gpus_are_those_that_cuda_would_show(monkeypatch, visible, expected):
    def by_name(names):
        def find(name):
            if name not in names:
                raise NVMLError
            return list(names).index(name)

        return find

    fake = SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=by_name(range(3)), nvmlDeviceGetName=lambda index: "NVIDIA H200",
        nvmlDeviceGetHandleByUUID=by_name(["GPU-a", "GPU-b", "GPU-c"]),
        nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(total=index + 1),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = this_machine.find()
    assert here.gpu_memory_bytes == expected
    assert here.gpu_name == ("NVIDIA H200" if expected else None)


def planned(batch: int, name: str = "ddp", num_processes: int = 2, **flags) -> Run:
    config = build_config(num_train_examples=2048, global_batch_size=batch, **flags)
    return Run(config, read_by_name(name), num_processes, Path(f"{name}-{batch}"))


def test_a_larger_batch_than_one_that_ran_out_of_memory_is_skipped():
    exhausted = [planned(32)]
    assert plan.too_large_batch(planned(64), exhausted) == "ddp-32 ran out of memory with a smaller batch"
    assert plan.too_large_batch(planned(64, seed=3, max_steps=5), exhausted)  # which change no memory
    assert plan.too_large_batch(planned(16), exhausted) is None
    assert plan.too_large_batch(planned(32, seed=1), exhausted) is None  # another seed is tried
    for other in (
        planned(64, name="zero2"),
        planned(64, num_processes=4),
        planned(64, precision="bf16-autocast"),
        planned(64, sequence_length=32),
        planned(64, activation_checkpointing=True),
        planned(64, micro_batch_size=8),  # accumulates: needs less than the 16 a rank that did not fit
    ):
        assert plan.too_large_batch(other, exhausted) is None


# ---------------------------------------------------------------- how long


def past(seconds_per_step: float, wall_seconds: float, **facts) -> schema.Record:
    """A run of 100 steps of 8 x 64 tokens."""
    found = schema.read(FIXTURES / "auto-ddp")
    config = {**found.config, "global_batch_size": 8, "sequence_length": 64}
    timing = found.timing.model_copy(update={"median_seconds": seconds_per_step})
    facts = {"config": config, "timing": timing, "wall_seconds": wall_seconds, "steps_done": 100, **facts}
    return found.model_copy(update=facts)


def seen(wall_seconds: float) -> SimpleNamespace:
    return SimpleNamespace(wall_seconds=wall_seconds)


HALF = make_run(build_config(max_steps=50), read_by_name("ddp"), 2)  # half as many tokens


def test_time_comes_from_the_most_alike_runs():
    history = History(on_gpu=False)
    history.add(past(0.5, 60.0, strategy="zero3"), seen(70.0), of_report=True)
    assert history.estimate(HALF) == Estimate(pytest.approx(20 + 25), 1)  # equal workload and size
    history.add(past(0.2, 30.0, world_size=4), seen(40.0), of_report=True)
    assert history.estimate(HALF) == Estimate(pytest.approx(20 + 10), 1)  # and strategy
    for wall_seconds in (20.0, 30.0, 90.0):
        history.add(past(0.1, 1.0), seen(wall_seconds), of_report=True)
    assert history.estimate(HALF) == Estimate(pytest.approx(20 + 5), 3)  # and world size: the median
    history.add(past(0.4, 42.0), None)  # of this folder; its launch was not timed
    expected = Estimate(pytest.approx(42 + estimate.UNRECORDED_SECONDS - 40 + 20), 1)
    assert history.estimate(HALF) == expected
    assert str(history.estimate(HALF)) == "30 s (1 earlier run)"


def test_the_time_of_forked_runs_comes_from_forked_ones():
    machine = past(0.1, 1.0).machine
    forked = past(0.1, 1.0, machine={**machine, "environment": {FORKED: "1"}})
    for is_forked, seconds in ((False, 90.0), (True, 13.0)):
        history = History(on_gpu=False, forked=is_forked)
        history.add(past(0.1, 1.0), seen(90.0))
        history.add(forked, seen(13.0))
        assert history.estimate(HALF) == Estimate(pytest.approx(seconds - 10 + 5), 1)
    guess = History(on_gpu=False).estimate(HALF).seconds - estimate.LAUNCH_SECONDS
    assert History(on_gpu=False, forked=True).estimate(HALF).seconds == pytest.approx(guess + estimate.FORK_SECONDS)


def test_without_earlier_runs_time_is_a_guess_by_parameters_and_tokens():
    """6 x 1 527 938 parameters x 50 x 512 tokens at 5e10 a second on a CPU, and at 2e13 on each of 2 GPUs."""
    built = 1_527_938 * estimate.SECONDS_PER_PARAMETER
    on_cpu = History(on_gpu=False).estimate(HALF)
    assert on_cpu == Estimate(pytest.approx(estimate.LAUNCH_SECONDS + built + 4.694, abs=0.01), 0)
    assert str(on_cpu) == "25 s (a guess)"
    on_gpus = History(on_gpu=True).estimate(HALF)
    assert on_gpus.seconds == pytest.approx(estimate.GPU_LAUNCH_SECONDS + built + 0.0059, abs=0.001)


def test_on_a_gpu_that_theory_knows_steps_are_the_planners():
    large = {"size": "large", "data": "hub", "max_steps": 31, "num_train_examples": 800}
    large |= {"global_batch_size": 32, "sequence_length": 512, "precision": "bf16-autocast"}
    expected = {}
    for name in ("t4", "h200"):
        history = History(True, hardware.find_gpu(name))
        expected[name] = history.estimate(make_run(build_config(**large), read_by_name("single"), 1)).seconds
    fixed = estimate.GPU_LAUNCH_SECONDS + 335_143_938 * estimate.SECONDS_PER_PARAMETER
    assert fixed < expected["h200"] < fixed + 10
    # A T4 has no bf16, so theory has no step of it, and the guess by tokens stands in.
    assert expected["t4"] == pytest.approx(fixed + 6 * 335_143_938 * 31 * 32 * 512 / 2e13, rel=1e-3)


# ---------------------------------------------------------------- what is kept

FLAGS = {"max_steps": 3}


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def write_record(run_dir: Path, status: str = "ok", **flags) -> None:
    content = json.loads((FIXTURES / "auto-ddp" / "record.json").read_text())
    config = build_config(**FLAGS, **flags).model_dump(mode="json")
    failure = None if status == "ok" else {"step": 1, "error": "OutOfMemoryError: CUDA out of memory."}
    content |= {"run_id": "run", "status": status, "config": config, "failure": failure}
    content["proof"] |= {"precision": "fp32"}
    (run_dir / "config.json").write_text("{}")
    content["config_sha256"] = files.sha256(run_dir / "config.json")
    (run_dir / "record.json").write_text(json.dumps(content))
    shutil.copy(FIXTURES / "auto-ddp" / "steps.jsonl", run_dir)


def write_outcome(run_dir: Path, status: str, wall_seconds: float | None = 100.0, flags=FLAGS) -> None:
    config = build_config(**flags, output_dir=Path("elsewhere/run")).model_dump(mode="json")
    facts = Outcome(
        study="mine", run_id="run", status=status, message="as told", workload="bert-imdb", size="tiny", strategy="ddp",
        world_size=2, seed=0, global_batch_size=8, config=config, round=0, position=1,
        started_at="2026-01-01T00:00:00+00:00",
        wall_seconds=wall_seconds, returncode=1, stderr_tail=[], command=["accelerate", "launch"],
    )  # fmt: skip
    (run_dir / "outcome.json").write_text(facts.model_dump_json())


def finished(run_dir: Path, timeout_seconds: float = 60.0) -> str | None:
    return plan.finished(Run(build_config(**FLAGS), read_by_name("ddp"), 2, run_dir), timeout_seconds)


def test_results_are_kept(run_dir):
    assert finished(run_dir) is None
    write_record(run_dir)
    assert finished(run_dir) == "ok"  # also where the runner was killed before it wrote the outcome
    write_outcome(run_dir, "crashed")
    assert finished(run_dir) == "crashed"
    write_record(run_dir, "out_of_memory")
    assert finished(run_dir) == "out_of_memory"
    write_record(run_dir, "interrupted")
    write_outcome(run_dir, "failed")
    assert finished(run_dir) is None
    (run_dir / "record.json").unlink()
    write_outcome(run_dir, "out_of_memory", flags={"max_steps": 4})  # of another run
    assert finished(run_dir) is None


@pytest.mark.parametrize("status", ["ok", "out_of_memory"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("")], ids=["removed", "emptied"])
@pytest.mark.parametrize("name", ["config.json", "steps.jsonl"])
def test_a_record_whose_files_are_damaged_is_run_again(run_dir, name, damage, status, capsys):
    """As for `compare`, whose words say why it is not kept."""
    write_record(run_dir, status)
    write_outcome(run_dir, status)
    assert finished(run_dir) == status
    assert not capsys.readouterr().out
    damage(run_dir / name)
    assert finished(run_dir) is None
    with pytest.raises(Refusal, match=rf"{name}: ") as caught:
        list(records.find_runs([run_dir.parent]))
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("run will run again")
    assert printed.endswith(str(caught.value))


def test_a_run_that_timed_out_is_kept_until_it_is_given_more_time(run_dir):
    write_outcome(run_dir, "timed_out", wall_seconds=61.0)
    assert finished(run_dir, timeout_seconds=60.0) == "timed_out"
    assert finished(run_dir, timeout_seconds=600.0) is None
    write_outcome(run_dir, "timed_out", wall_seconds=None)  # Slurm ended a job that never began
    assert finished(run_dir, timeout_seconds=60.0) is None


@pytest.mark.parametrize("then", [{"data_dir": "there"}, {"data_dir": "here", "swap_dir": "nvme"}])
def test_where_things_lay_is_no_part_of_a_run(run_dir, then):
    """The record has the digest of the text, and a checkpoint is taken as well."""
    run = Run(build_config(**FLAGS, data="files", data_dir="here"), read_by_name("ddp"), 2, run_dir)
    write_record(run_dir, data="files", **then)
    assert plan.finished(run, 60) == "ok"
    (run_dir / "record.json").unlink()
    write_outcome(run_dir, "out_of_memory", flags={**FLAGS, "data": "files", **then})
    assert plan.finished(run, 60) == "out_of_memory"


@pytest.mark.parametrize("status", ["ok", "out_of_memory", "failed"])
def test_a_record_of_other_flags_is_refused(run_dir, status):
    write_record(run_dir, status, learning_rate=0.5)
    message = refusal(finished, run_dir)
    assert message.startswith(f"{run_dir / 'record.json'}: ")
    assert "learning_rate=0.5, but the study plans 0.001. Use another --runs-dir" in message


def test_a_record_of_a_file_that_was_changed_since_is_refused(run_dir):
    """The study's strategy has the same name; its engine would be another."""
    write_record(run_dir)
    record = schema.read(run_dir)
    written = read_by_name("ddp").written
    schema.write(run_dir, record.model_copy(update={"strategy_file": {**written, "file": "elsewhere.yaml"}}))
    assert finished(run_dir) == "ok"
    for key, other in (
        ("JSON", {**written, "json": {"gradient_as_bucket_view": True}}),
        ("distributed_type", {**written, "yaml": {**written["yaml"], "distributed_type": "NO"}}),
    ):
        schema.write(run_dir, record.model_copy(update={"strategy_file": other}))
        assert f"a run of ddp, but the strategy's file had a different {key}" in refusal(finished, run_dir)


@pytest.mark.parametrize(("then", "is_refused"), [("1gbit", True), ("200mbit", False), (None, False)])
def test_a_record_of_another_networks_rate_is_refused(run_dir, then, is_refused):
    write_record(run_dir)
    record = schema.read(run_dir)
    schema.write(run_dir, record.model_copy(update={"machine": {"environment": {LABORATORY: then} if then else {}}}))
    run = Run(build_config(**FLAGS), read_by_name("ddp"), 2, run_dir, laboratory="200mbit")
    if is_refused:
        assert "on a network with a rate of 1gbit, but the study plans 200mbit" in refusal(plan.finished, run, 60)
    else:
        assert plan.finished(run, 60) == "ok"


# ---------------------------------------------------------------- the whole

STUDY = """\
question: Which one?
parts:
  - flags: {max_steps: 3}
    strategies: [single, ddp, fsdp2_cpu_offload]
    world_sizes: [2]
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(STUDY)
    monkeypatch.setattr(files, "ROOT", tmp_path)  # no reports
    monkeypatch.setattr(this_machine, "find", lambda: CPU_BOX)
    return studies.find(str(tmp_path / "mine.yaml"))


def test_a_refusal_of_the_check_is_why_a_run_is_skipped(study, tmp_path, monkeypatch):
    def refuse(run):
        if run.strategy.name == "ddp":
            raise Refusal("no C++ compiler is on PATH")

    monkeypatch.setattr(checks, "check", refuse)
    created = plan.make_plan(study, plan.select(study, None, "", tmp_path), tmp_path, 60)
    assert [one.skipped for one in created.runs] == [None, "no C++ compiler is on PATH", None]


def test_forked_runs_that_wait_for_an_extension_come_last(tmp_path, monkeypatch, study):
    content = STUDY.replace("[single, ddp, fsdp2_cpu_offload]", "[zero2_cpu_offload, ddp, zero2]")
    (tmp_path / "mine.yaml").write_text(content)
    study = studies.find(str(tmp_path / "mine.yaml"))
    monkeypatch.setattr(checks, "check", lambda *_: None)
    orders = {}
    for forked, is_built in ((False, False), (True, True), (True, False)):
        monkeypatch.setattr(plan, "is_built", lambda name, is_built=is_built: is_built)
        created = plan.make_plan(study, plan.select(study, None, "", tmp_path), tmp_path, 60, forked=forked)
        orders[forked, is_built] = [planned.run.strategy.name for planned in created.runs]
    first, *others = orders[False, False]
    assert first == "zero2_cpu_offload"
    assert orders == {(False, False): [first, *others], (True, True): [first, *others], (True, False): [*others, first]}


def test_timed_runs_come_after_those_that_wait_for_a_build(tmp_path, monkeypatch):
    """A build beside them would slow their steps down. The study that everybody runs first is an example."""
    monkeypatch.setattr(checks, "check", lambda *_: None)
    monkeypatch.setattr(plan, "is_built", lambda _: False)
    study = studies.find("smoke")
    created = plan.make_plan(study, plan.select(study, None, "", tmp_path), tmp_path, 60, forked=True)
    timed = [each.run.config.timing_warmup_steps < each.run.config.num_steps for each in created.runs]
    assert timed == sorted(timed)
    assert {each.run.strategy.name for each in created.runs} >= set(file.names())
    assert {"single", "ddp", "zero2_tuned", "zero3_tuned", "fsdp2"} <= {
        each.run.strategy.name for each, is_timed in zip(created.runs, timed, strict=True) if is_timed
    }


def test_runs_are_chosen_and_left_out_by_a_text_in_their_id(study, tmp_path):
    every = [run.run_id for run in plan.select(study, None, "", tmp_path)]
    without = [run.run_id for run in plan.select(study, None, "", tmp_path, skip="-ddp-")]
    assert without == [run_id for run_id in every if "-ddp-" not in run_id] != every
    only = plan.select(study, None, "-ddp-", tmp_path)
    assert {run.run_id for run in only} | set(without) == set(every)
    assert refusal(plan.select, study, None, "-ddp-", tmp_path, skip="ddp").startswith("--skip ddp: ")


def test_a_study_of_gpus_is_not_trained_on_the_cpu(study, tmp_path, monkeypatch):
    """NVML sees a GPU, this torch none."""
    monkeypatch.setattr(checks, "check", lambda *_: None)
    monkeypatch.setattr(this_machine, "find", lambda: Machine((T4,), 10**11))
    of_gpus = study.model_copy(update={"device": "gpu"})
    created = plan.make_plan(of_gpus, plan.select(of_gpus, None, "single", tmp_path), tmp_path, 60)
    assert [one.skipped for one in created.runs] == [
        "the installed PyTorch finds no GPU. Install PyTorch's build for CUDA"
    ]


# ---------------------------------------------------------------- a study's file, and the order of its runs

QUESTION = "question: Which one?\n"


@pytest.fixture
def find(tmp_path):
    def write_and_find(text: str) -> studies.Study:
        (tmp_path / "mine.yaml").write_text(text)
        return studies.find(str(tmp_path / "mine.yaml"))

    return write_and_find


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parts:\n  - {}\n", "question is missing"),
        (QUESTION, "parts is missing"),
        (QUESTION + "parts: []\n", "parts=(): tuple should have at least 1 item"),
        (QUESTION + "name: mine\nparts: [{}]\n", "name is not a key of a study"),
        (QUESTION + "text: reel\nparts: [{}]\n", "text='reel': input should be 'bundled' or 'real'"),
        (
            QUESTION + "control: zero9\nparts: [{}]\n",
            "control 'zero9' is not a strategy. Name a strategy, or remove this key to use 'ddp'.",
        ),
        (QUESTION + "parts: [{flag: {}}]\n", "unknown key 'parts.0.flag'"),
        (QUESTION + "parts: [{}, {flags: {sze: tiny}}]\n", "parts.1: flags.sze is not an option of training"),
        (QUESTION + "parts: [{flags: {size: huge}}]\n", "parts.0: bert-imdb's size 'huge' is unknown"),
        (QUESTION + "parts: [{seeds: [010]}]\n", "cannot be read as YAML (line 2: '010' is a number that YAML reads"),
        (QUESTION + "parts: [{world_sizes: [true]}]\n", "parts.0.world_sizes.0=True: input should be a valid integer"),
        (QUESTION + "parts: [{seeds: [4294967296]}]\n", "parts.0.seeds.0=4294967296: input should be less than or"),
        (QUESTION + "parts: [{flags: {max_steps: 10000000000}}]\n", "parts.0: max_steps 10000000000 is more than 1,0"),
        (
            QUESTION + "parts: [{flags: {seed: 1}}]\n",
            "parts.0: flags.seed is not an option of a part: list it under seeds",
        ),
        (
            QUESTION + "parts: [{flags: {data: hub}}]\n",
            "parts.0: flags.data is not an option of a part: write text: real, or",
        ),
        (QUESTION + "parts: [{flags: {measure: 'no'}}]\n", "parts.0: flags.measure='no': write true or false"),
        (QUESTION + "parts: [{flags: {max_steps: true}}]\n", "parts.0: flags.max_steps=True: write a value"),
        (QUESTION + "parts: [{seeds: 3}]\n", "parts.0.seeds=3: input should be a valid tuple"),
        (QUESTION + "parts: [{seeds: [-1]}]\n", "parts.0.seeds.0=-1: input should be greater than or equal to 0"),
        (QUESTION + "parts: [{world_sizes: [0]}]\n", "parts.0.world_sizes.0=0: input should be greater than"),
        (QUESTION + "parts: [{strategies: [zero9]}]\n", "parts.0: strategy 'zero9' is unknown. Did you mean zero"),
        (QUESTION + "parts: [{strategies: [ddp, ddp]}]\n", "parts.0: strategies: ddp is listed twice"),
        (QUESTION + "parts: [{strategies: []}]\n", "parts.0: strategies is empty"),
        (QUESTION + "parts: [{repeats: 0}]\n", "parts.0.repeats=0: input should be greater than or equal to 1"),
        (QUESTION + "parts: [{label: A-b}]\n", "parts.0.label='A-b': string should match pattern"),
        (QUESTION + "parts: [{flags: {global_batch_size: 8}, global_batch_sizes: [8]}]\n", "parts.0: flags.global_"),
        (QUESTION + "parts: [{global_batch_sizes: [512]}]\n", "parts.0: num_train_examples 256 is less than one"),
        ("[]", "the file has no keys. Start from a copy of a file in studies/"),
    ],
)
def test_a_mistake_is_refused_by_its_key(find, tmp_path, text, message):
    assert refusal(find, text).startswith(f"{tmp_path / 'mine.yaml'}: {message}")


def test_parts_that_differ_in_flags_only_need_labels(find):
    study = find(QUESTION + "parts: [{strategies: [ddp]}, {strategies: [ddp], flags: {max_steps: 3}}]\n")
    with pytest.raises(Refusal, match="two runs have the id bert-imdb-tiny-ddp-2x-seed0"):
        studies.runs(study)


def test_repeats_are_interleaved_and_the_order_rotates(find):
    study = find(QUESTION + "parts: [{strategies: [ddp, zero1, zero2], seeds: [5, 6], repeats: 2}]\n")
    runs = studies.runs(study)
    assert [run.round for run in runs] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    rounds = [[run.strategy.name for run in runs[start : start + 3]] for start in (0, 3, 6, 9)]
    assert all(sorted(names) == ["ddp", "zero1", "zero2"] for names in rounds)
    assert len({names[0] for names in rounds}) == 3  # each is first once
    assert [run.config.seed for run in runs[::3]] == [5, 6, 5, 6]
    assert [run.run_id.endswith("-repeat1") for run in runs] == [False] * 6 + [True] * 6


def test_no_strategy_always_runs_first_or_after_the_same_one():
    runs = studies.runs(studies.find("multi-gpu"))
    assert len({runs[at].strategy.name for at in range(0, len(runs), 8)}) > 2
    before: dict[str, set[str]] = {}
    for one, other in pairwise(runs):
        before.setdefault(other.strategy.name, set()).add(one.strategy.name)
    assert all(len(names) > 1 for name, names in before.items() if name != "single")


def test_a_ladder_is_halved():
    assert studies.bisecting(list("abcdefg")) == ["d", "b", "f", "a", "c", "e", "g"]


def test_single_is_run_once_and_ddp_on_one_process_too(find):
    study = find(QUESTION + "parts: [{strategies: [single, ddp, zero2], world_sizes: [1, 2]}]\n")
    found = [(run.strategy.name, run.world_size) for run in studies.runs(study)]
    assert found == [("single", 1), ("ddp", 1), ("zero2", 1), ("ddp", 2), ("zero2", 2)]


def test_real_text_comes_from_the_folder_or_the_hub(find, tmp_path):
    bundled, real = (QUESTION + f"text: {text}\nparts: [{{strategies: [single]}}]\n" for text in ("bundled", "real"))
    assert studies.runs(find(real))[0].config.data == "hub"
    assert studies.runs(find(real), tmp_path)[0].config.data_dir == tmp_path
    with pytest.raises(Refusal, match=r"trains on the bundled sample\. Leave --data-dir out"):
        studies.runs(find(bundled), tmp_path)


def test_a_plan_of_too_many_runs_is_refused_in_a_second(find):
    seeds = ", ".join(map(str, range(100_000)))
    started = time.monotonic()
    for part in (f"seeds: [{seeds}]", "repeats: 999999999999", f"world_sizes: [{seeds[3:]}]"):
        with pytest.raises(Refusal, match="runs are planned, but a study has at most 10,000"):
            find(QUESTION + f"parts: [{{strategies: [ddp], {part}}}]\n")
    assert time.monotonic() - started < 30  # 3 s, on a machine with nothing else to do


# ---------------------------------------------------------------- where a plan is made, and how it reads


def test_a_study_runs_from_any_folder(tmp_path, monkeypatch):
    """The files that strategies name are found wherever the command is started."""

    def skipped() -> dict[str, str | None]:
        study = studies.find("smoke")
        created = plan.make_plan(study, plan.select(study, None, "", tmp_path), tmp_path, 60)
        return {planned.run.run_id: planned.skipped for planned in created.runs}

    monkeypatch.chdir(files.ROOT)
    in_the_clone = skipped()
    monkeypatch.chdir(tmp_path)
    assert skipped() == in_the_clone
    assert not [reason for reason in in_the_clone.values() if reason and "deepspeed_config_file" in reason]
    for path in file.CONFIGS.rglob("*.yaml"):  # as the ranks of a launch read it, and the check before it
        file.read_strategy(path).check_json_is_seen()


def test_a_plan_begins_with_its_summary_and_fits_the_width(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    study = studies.find("smoke")
    text = plan.show(plan.make_plan(study, plan.select(study, None, "", tmp_path), tmp_path, 60))
    assert max(map(len, text.splitlines())) <= 80
    summary, _, runs = text.partition("\n\n")
    assert re.search(r"\d+ to run, 0 kept, \d+ skipped; about ", summary)
    assert len(re.findall(r"^ *\d+  (run|skip) ", runs, re.MULTILINE)) == 23
