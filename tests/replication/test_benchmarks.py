"""Test that the benchmarks compare the same work and compute correctly. No test here depends on a time."""

from __future__ import annotations

import dataclasses
import json

import pairs
import pytest
import throughput

from study.compare import acceptance
from study.config import build_config
from zero_study.errors import Refusal, RunFailed

pytestmark = pytest.mark.measurements

# Seconds long, with dropout and with clipping that acts.
TINY = {**throughput.FLAGS, "size": "tiny", "global_batch_size": 8, "num_train_examples": 48, "max_steps": 6}
TINY |= {"timing_warmup_steps": 2, "gradient_clipping": 0.5}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which a benchmark would set for good


PROOF = dict.fromkeys(throughput.SAME) | {"world_size": 2, "engine_class": "DistributedDataParallel", "device": "cpu"}


def start(*words: str) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as end:
        throughput.main.main(list(words))
    return end.value.code


def arm(wall: float, step: float, losses: tuple[float, ...] = (0.7, 0.5), **proof: object) -> dict[str, object]:
    rates = {"wall_samples_per_second": wall, "step_samples_per_second": step, "peak_samples_per_second": None}
    return {**rates, "losses": list(losses), "proof": {**PROOF, **proof}}


def pair(ours: dict[str, object], trainer: dict[str, object]) -> dict[str, object]:
    return {"order": ["ours", "trainer"], "ours": ours, "trainer": trainer}


def summarize(*completed: dict[str, object]) -> dict[str, object]:
    return throughput.summarize([throughput.reduced(one, acceptance.LOSS_TOLERANCE) for one in completed])


def test_arms_alternate_so_that_each_is_first_in_turn():
    said = []
    arms = {name: lambda name=name: {"from": name} for name in ("a", "b")}
    completed = [pairs.run_pair(arms, number, lambda *each: said.append(each)) for number in (1, 2, 3)]
    expected = [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert said == [(name, number, {"from": name}) for name, number in expected]
    assert [one["order"] for one in completed] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert all(one[name] == {"from": name} for one in completed for name in ("a", "b"))


def test_ratios_are_ours_over_theirs_pair_by_pair():
    result = summarize(pair(arm(90, 100), arm(100, 80)), pair(arm(110, 100), arm(100, 100)))
    assert [one["wall_ratio"] for one in result["pairs"]] == [0.9, 1.1]
    assert [one["step_ratio"] for one in result["pairs"]] == [1.25, 1.0]
    assert result["wall_ratio"] == pairs.summarize([0.9, 1.1])
    first = result["pairs"][0]
    assert first["ours"]["final_loss"] == 0.5
    assert "losses" not in first["ours"]
    assert set(first["trainer"]["proof"]) == set(throughput.SAME)
    assert first["largest_loss_difference"] == 0


def test_arms_that_are_not_the_same_work_are_not_compared():
    with pytest.raises(RunFailed, match=r"step 2 has loss 0\.5 in ours, 0\.4995"):
        summarize(pair(arm(1, 1, (0.7, 0.5)), arm(1, 1, (0.7, 0.5 / 1.001))))
    with pytest.raises(RunFailed, match="step 2 has loss nan in ours"):
        summarize(pair(arm(1, 1, (0.7, float("nan"))), arm(1, 1)))
    with pytest.raises(RunFailed, match=r"'world_size': 1"):
        summarize(pair(arm(1, 1), arm(1, 1, world_size=1)))


def test_a_benchmark_in_slots_does_what_is_left(monkeypatch, tmp_path, capsys):
    compared = []

    def compare(work, number, num_pairs):
        compared.append((work.strategy.name, work.world_size, number))
        assert output.exists() == (len(compared) > 1)  # were this killed, the pairs before would be kept
        clock[0] += 100
        return throughput.reduced(pair(arm(2, 2), arm(1, 1)), acceptance.LOSS_TOLERANCE)

    clock = [0.0]
    monkeypatch.setattr(throughput, "compare", compare)
    monkeypatch.setattr(throughput.time, "monotonic", lambda: clock[0])
    output = tmp_path / "result.json"
    words = ["--work", "bert-large", "--num-processes", "1", "--pairs", "3", "--output", str(output)]
    words += ["--size", "tiny", "--strategies", "ddp,zero2"]
    assert start(*words, "--minutes", "4") == throughput.SOME_MISSING
    assert compared == [("ddp", 1, 1), ("ddp", 1, 2)]
    assert "left for the next call, from pair 3 on: ddp and those after it" in capsys.readouterr().out
    assert start(*words, "--minutes", "5") == throughput.SOME_MISSING
    assert compared[2:] == [("ddp", 1, 3), ("zero2", 1, 1), ("zero2", 1, 2)]
    assert start(*words) == 0
    assert compared[5:] == [("zero2", 1, 3)]
    counts = {name: len(one["pairs"]) for name, one in json.loads(output.read_text())["strategies"].items()}
    assert counts == {"ddp": 3, "zero2": 3}
    assert start(*words, "--size", "mini") == 2
    assert "holds the result of other work; name another file" in capsys.readouterr().err


@pytest.mark.launches
def test_an_arm_that_fails_says_how():
    work = throughput.plan("ddp", TINY)
    broken = dataclasses.replace(work, config=build_config(**{**TINY, "schedule": "cosine"}))
    with pytest.raises(Refusal, match="schedule='cosine': Trainer is compared for 'linear' only"):
        throughput.other(broken)


TINY_GPT = {**TINY, "workload": "gpt-wikitext", "precision": "bf16"}


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize(
    ("strategy", "num_processes", "flags"),
    [
        ("ddp", 2, TINY),
        pytest.param("ddp", 1, {**TINY_GPT, "precision": "fp32"}, marks=pytest.mark.nightly),
        pytest.param("zero3_cpu_offload", 1, TINY_GPT, marks=pytest.mark.nightly),
    ],
)
def test_both_arms_train_the_same_work(strategy, num_processes, flags):
    """The licence of this comparison: with dropout and clipping, every step's loss agrees."""
    work = throughput.plan(strategy, flags, num_processes)
    completed = pair(throughput.ours(work), throughput.other(throughput.of_trainer(work)))
    assert len(set(completed["ours"]["losses"])) == TINY["max_steps"] == len(completed["trainer"]["losses"])
    limit = acceptance.tolerance(work.config.precision)
    same = [name for name in throughput.SAME if (name, strategy, num_processes) != ("engine_class", "ddp", 1)]
    kept = throughput.reduced(completed, limit, same)  # raises where losses or engines differ
    assert kept["largest_loss_difference"] <= limit
    for name in ("ours", "trainer"):
        assert completed[name]["proof"]["world_size"] == num_processes
        assert completed[name]["proof"]["gradient_clipping"] == TINY["gradient_clipping"]
        assert completed[name]["wall_samples_per_second"] > 0
