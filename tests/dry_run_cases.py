"""A rank that is pretended holds and sends what one that is there does, and ranks that would hang are told apart.

test_dry_run.py runs these in a Python of their own, whose forks the ranks are.
"""

from __future__ import annotations

import json
from itertools import count, product
from pathlib import Path

import launching
import pytest
from dry_run_program import HANGS, MODELS, STRATEGIES, ask, differences, held, in_theory, of_torch, parted

from study import cli
from study.engines.dry_run import order
from study.engines.dry_run.watch import Call
from study.errors import Refusal
from study.files import ROOT
from study.planner import dry_run
from study.strategy import file
from study.strategy.in_theory import engine_of
from study.theory.case import Engine, Job

PORTS = count(29600)
CALL = Call("all_gather", (), "float32", 64, "first", "train.py:1")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_pretended_rank_is_as_one_that_is_there(strategy: str) -> None:
    there = ask(strategy, "gpt2", 2, [1], port=next(PORTS), precision="bf16", accumulation=2)
    (pretended,) = ask(strategy, "gpt2", 2, [1], precision="bf16", accumulation=2).values()
    assert differences(pretended, there[1]) in ([], ["peak_bytes"])
    # gloo's threads let go late of what is reduced: a rank that is there may have held it longer.
    assert pretended["peak_bytes"] <= there[1]["peak_bytes"]
    assert pretended["calls"]


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_strategy_on_more_ranks(strategy: str, world_size: int) -> None:
    if strategy == "fsdp2_hybrid" and world_size != 4:
        pytest.skip("its file is for four ranks")
    launching.use()  # in the forks: DeepSpeed's CPU Adam asks a Python of its own what the processor can do
    asked = [0, world_size - 1]
    there = ask(strategy, "bert", world_size, asked, port=next(PORTS))
    for rank, pretended in ask(strategy, "bert", world_size, asked).items():
        assert differences(pretended, there[rank]) in ([], ["peak_bytes"])
        assert bool(pretended["reserved_bytes"]) == ("offload" not in strategy)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_without_memory_it_is_the_same(strategy: str) -> None:
    (real,), (fake,) = (ask(strategy, "gpt2", 64, [63], has_memory=has).values() for has in (True, False))
    assert differences(fake, real) == []
    assert fake["reserved_bytes"] == real["reserved_bytes"]


def test_a_planners_engine_is_as_its_file() -> None:
    engine = engine_of(file.read_strategy(file.find_strategy("zero3_tuned")), MODELS["gpt2"].hidden, 8, "bf16")
    (asked,) = ask("zero3_tuned", "gpt2", 8, [0], precision="bf16", has_memory=False).values()
    traced = dry_run.trace(MODELS["gpt2"], engine, Job(2, 32))
    assert [traced.total, traced.reserved_bytes] == [asked["peak_bytes"], asked["reserved_bytes"]["default"]]


def test_what_dtensor_only_imagines_is_not_played() -> None:
    said = of_torch(MODELS["gpt2 of two layers"], Engine("fsdp", 3, 8, "bf16", 4), Job(2, 32))
    assert said["peak_bytes"] < said["reserved_bytes"]["expandable_segments"] < 1.5 * said["peak_bytes"]


def test_states_are_those_of_theory_on_a_thousand_ranks() -> None:
    (said,) = ask("zero2", "gpt2", 1024, [1023]).values()
    assert held(said) == in_theory("zero2", 1024)


SOUND = [pytest.param(strategy, "sound", marks=pytest.mark.slow) for strategy in ("ddp", "zero2", "fsdp2")]


@pytest.mark.parametrize(("strategy", "which"), [*product(["zero3"], ["sound", *HANGS]), *SOUND])
def test_hangs(strategy: str, which: str) -> None:
    found = parted(strategy, which)
    assert bool(found) == (which != "sound")
    if which == "skipped":
        assert [call and call.module for call in found[0].calls] == ["module.tower", "module.last"]


def test_calls_are_compared_within_the_groups_that_two_ranks_share() -> None:
    own = Call("all_reduce", (1, 3), "float32", 8, "", "")
    assert order.partings({0: [CALL], 1: [own, CALL]}) == []
    (parting,) = order.partings({0: [CALL], 1: [CALL, CALL], 3: [CALL, own]})[:1]
    assert (parting.ranks, parting.number, parting.calls) == ((0, 1), 2, (None, CALL))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "said.json"
    words = ["dry-run", "--world", "8", "--ranks", "7", "--output", str(output), "zero2"]
    script = str(ROOT / "tests" / "dry_run_script.py")
    assert cli.run([*words, script, "sound"]) == 0
    said = json.loads(output.read_text())
    assert said["world_size"] == 8
    assert [*said["ranks"]] == ["7"]
    assert "all_reduce" in capsys.readouterr().out


REFUSED = {
    "--world 8 --ranks 8 zero2": "from 0 to 7",
    "--world 8 single": "one process",
    "--world 8 --model llama-2-70b fsdp2": "smaller model",
    "--world 8 zero2 nowhere.py": "nowhere.py",
    "--world 8 fsdp2_hybrid": "for 4 ranks",
    "[]": "no keys",  # what stands in a file
    "{distributed_type: FSDP,fsdp_config: {fsdp_version: 2},parallelism_config: {parallelism_config_tp_size: 4}}": "TP",
    "{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_config_file: nowhere.json}}": "nowhere.json",
    "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 8}}": "says .* 8",
    "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3, offload_param_device: nvme}}": "NVMe",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_pretended(words: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(words)
    asked = words.split() if words.startswith("-") else ["--world", "4", str(tmp_path / "own.yaml")]
    with pytest.raises(Refusal, match=REFUSED[words]):
        cli.run(["dry-run", *asked])
