"""A rank that is pretended holds and sends what one that is there does, and ranks that would hang are told apart.

test_dry_run.py runs these in a Python of their own, whose forks the ranks are.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from functools import partial
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace

import launching
import psutil
import pytest
from dry_run_program import HANGS, MODELS, STRATEGIES, ask, differences, held, in_theory, mismatches

from zero_study import cli
from zero_study.dryrun import chosen, command, deadlock, json_answer, real_ranks, trace
from zero_study.dryrun.tracker import Call
from zero_study.errors import Refusal
from zero_study.files import ROOT
from zero_study.ranks import forks
from zero_study.strategy import file
from zero_study.strategy.theory_engine import engine_of_strategy
from zero_study.theory import peaks
from zero_study.theory.engine import Engine, StepConfig

Capture = pytest.CaptureFixture[str]

PORTS = count(29600)
DECISIONS = Path(__file__).with_name("dry_run_decisions.py")
RANKS = Path(__file__).with_name("dry_run_ranks.py")
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
CALL = Call("all_gather", (), "float32", 64, "first", "train.py:1")
SMALLER = Call("all_gather", (), "float32", 32, "first", "train.py:2")


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp", marks=NIGHTLY),
        pytest.param("zero2", marks=NIGHTLY),
        pytest.param("zero3", marks=SLOW),
        "fsdp2",
    ],
)
def test_a_pretended_rank_is_as_one_that_is_there(strategy: str) -> None:
    there = ask(strategy, "gpt2", 2, [1], port=next(PORTS), precision="bf16", accumulation=2)
    (pretended,) = ask(strategy, "gpt2", 2, [1], precision="bf16", accumulation=2).values()
    assert differences(pretended, there[1]) in ([], ["peak_bytes"])
    # gloo's threads let go late of what is reduced: a rank that is there may have held it longer.
    assert pretended["peak_bytes"] <= there[1]["peak_bytes"]
    assert pretended["calls"]


@pytest.mark.nightly
@pytest.mark.launches
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        *((strategy, world_size) for strategy in STRATEGIES for world_size in (2, 4)
          if (strategy, world_size) != ("fsdp2_hybrid", 2)),  # its file is for four ranks
        ("zero3", 8),  # reports/dry_run/checked.json has a record of all strategies on 8 ranks
    ],
)  # fmt: skip
def test_every_strategy_on_more_ranks(strategy: str, world_size: int) -> None:
    launching.use()  # in the forks: DeepSpeed's CPU Adam asks a Python of its own what the processor can do
    asked = [0, world_size - 1]
    there = ask(strategy, "bert", world_size, asked, port=next(PORTS))
    for rank, pretended in ask(strategy, "bert", world_size, asked).items():
        assert differences(pretended, there[rank]) in ([], ["peak_bytes"])
        assert bool(pretended["reserved_bytes"]) == ("offload" not in strategy)


@pytest.mark.parametrize(
    ("which", "status", "said"),
    [
        ("joins", 0, "No hang: the 2 ranks make the same calls"),
        ("decides", 0, "No hang: the 2 ranks make the same calls"),
        pytest.param("sleeps", 0, "No hang: the 2 ranks make the same calls", marks=SLOW),
        ("sends", 0, "No hang: the 2 ranks make the same calls"),
        pytest.param("prepares", 0, "No hang: the 2 ranks make the same calls", marks=SLOW),
        ("leaves", 0, "No hang: the 2 ranks make the same calls"),
        ("other sizes", 1, "rank 1: all_gather of 40 bytes float32 dry_run_decisions.py"),
        ("is killed", 1, "rank 1 was ended by signal 9 (SIGKILL)"),
        ("decides alone", 1, "HANG: ranks 0 and 1 make different calls at their collective number"),
        ("receives", 1, "HANG: ranks 0, 1 waited until the dry run ended them"),
        ("raises", 1, "rank 1 raised ValueError: no such file"),
    ],
)
def test_all_ranks_of_a_small_world_exchange_what_is_real(
    which: str, status: int, said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP's `join`, and a decision by an all-reduce, were reported as hangs: no rank had another one's value."""
    monkeypatch.setattr(real_ranks, "WAITING_SECONDS", 1.5)
    assert cli.run(["dry-run", "--world", "2", "ddp", str(DECISIONS), which]) == status
    printed = capsys.readouterr().out
    assert "exchanged real values" in " ".join(printed.split())
    assert said in " ".join(printed.split())
    assert status == 0 or "Connection closed" not in printed
    assert which not in ("raises", "is killed") or " ".join(printed.split()).startswith(said)  # the hang follows


@pytest.mark.parametrize(
    ("of_rank_1", "first"), [([CALL], json_answer.FAILED), ([CALL, SMALLER], json_answer.HANG)], ids=["cause", "after"]
)
def test_a_failure_comes_before_the_hang_that_follows_from_it(of_rank_1: list[Call], first: str) -> None:
    mismatches = deadlock.first_mismatches({0: [CALL, CALL], 1: of_rank_1})
    findings = [*json_answer.findings(mismatches, [], {}, {1: "raised ValueError: no such file"})]
    assert {finding.id for finding in findings} == {json_answer.FAILED, json_answer.HANG}
    assert findings[0].id == first


@pytest.mark.slow
def test_a_child_that_computes_is_no_hang(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the ranks' own time was counted: a build of an extension was said to be a hang."""
    monkeypatch.setattr(real_ranks, "WAITING_SECONDS", 1.5)
    monkeypatch.setattr(real_ranks, "ASLEEP_SECONDS", 2.0)
    assert cli.run(["dry-run", "--world", "2", "ddp", str(DECISIONS), "compiles"]) == 0
    assert "No hang: the 2 ranks make the same calls" in capsys.readouterr().out


@pytest.mark.slow
def test_what_ranks_have_started_ends_with_them(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler went on, and torch's lock stayed, for which every other script waits."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(real_ranks, "WAITING_SECONDS", 1.5)
    monkeypatch.setattr(real_ranks, "ASLEEP_SECONDS", 3.0)
    assert cli.run(["dry-run", "--world", "2", "ddp", str(DECISIONS), "builds"]) == 1
    assert "HANG: ranks 0, 1 waited until the dry run ended them" in capsys.readouterr().out
    assert [*tmp_path.rglob("made_up")]
    assert not [*tmp_path.rglob("lock")]
    left = [each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [])[-1:] == ["98765"]]
    assert left == []


@pytest.mark.parametrize(
    ("journal", "a_second", "seconds"),
    [
        ("", 0.0, 60), ("", 0.004, 60), ("{}\n", 0.004, 10), ("{}\ndone\n", 0.004, 60), ("", 0.2, None),
    ],
)  # fmt: skip
def test_how_long_ranks_wait(
    journal: str, a_second: float, seconds: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without a call was said to be in one; two ticks of the clock between two looks were said to be work."""
    times = [tick / 4 for tick in range(480)]
    clock = iter([0.0, *times])
    monkeypatch.setattr(real_ranks, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for rank in range(2):
        real_ranks.journal(tmp_path, rank).write_text(journal)
    looks = iter(times)

    def look(running: dict[int, int]) -> dict[int, float]:
        used = math.floor(next(looks) * a_second / 0.02) * 0.02  # two ticks at once
        return dict.fromkeys(running, used)

    idle = real_ranks._Idle(tmp_path, SimpleNamespace(look=look))  # type: ignore[arg-type]
    found = next((now for now in times if idle.is_for_ever({0: 1, 1: 2})), None)
    assert found == seconds


@pytest.mark.parametrize(
    ("content", "strategy", "said"),
    [
        ({"model_type": "t5", "num_layers": 2, "d_model": 64, "d_kv": 16, "num_heads": 4}, "zero2", None),
        pytest.param(
            {"model_type": "bart", "encoder_layers": 1, "decoder_layers": 1, "d_model": 64}, "ddp", None, marks=NIGHTLY
        ),
        pytest.param({"model_type": "cohere2", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
                      "num_key_value_heads": 4, "intermediate_size": 128}, "fsdp2", None, marks=SLOW),
        ({"model_type": "vit", "hidden_size": 64, "num_attention_heads": 4,
          "architectures": ["ViTForImageClassification"]}, "zero1", None),
        ({"model_type": "olmo2", "hidden_size": 63, "num_attention_heads": 4}, "zero1", "RuntimeError: The size of"),
        ({"model_type": "nothing"}, "zero1", "has no class for model_type 'nothing'"),
    ],
)  # fmt: skip
def test_any_class_of_transformers_is_run(
    content: dict[str, object], strategy: str, said: str | None, tmp_path: Path, capsys: Capture
) -> None:
    """Encoder-decoders, and whatever theory does not count, were refused, although nothing needs counting."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"vocab_size": 512, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1} | content)
    )
    words = ["dry-run", "--world", "4", "--ranks", "3", "--sequence-length", "16", "--model", str(config), strategy]
    if said is None:
        assert cli.run(words) == 0
        assert "transformers builds and runs the model" in " ".join(capsys.readouterr().out.split())
    else:
        with pytest.raises(Refusal, match=said):
            cli.run(words)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), pytest.param("no", "float32", marks=SLOW)])
def test_mixed_precision_is_what_accelerate_makes_of_it(precision: str, dtype: str) -> None:
    """Under FSDP2 it was dropped: collectives were float32, of twice the bytes."""
    (said,) = ask("fsdp2", "gpt2", 4, [3], precision=precision).values()
    sharded = {call["dtype"] for call in said["calls"] if call["kind"] in ("all_gather", "reduce_scatter")}
    assert sharded == {dtype}


@pytest.mark.slow
def test_autocast_keeps_gradients_as_parameters_are() -> None:
    (kept,), (cast,) = (ask("ddp", "gpt2", 4, [3], precision=of).values() for of in ("no", "bf16"))
    assert {call["dtype"] for call in cast["calls"]} == {"float32"}
    assert cast["peak_bytes"] < kept["peak_bytes"]


def test_some_ranks_of_a_world_get_no_values(capsys: Capture) -> None:
    assert cli.run(["dry-run", "--world", "8", "--ranks", "0,1", "ddp", str(DECISIONS), "decides alone"]) == 1
    assert "a simulated process group" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(Refusal, match="--world 999999999: engines keep lists of all ranks, so at most 16,384"):
        cli.run(["dry-run", "--world", "999999999", "ddp"])


@pytest.mark.parametrize(
    ("strategy", "model", "world_size"),
    [
        ("ddp", "gpt2", 64), ("single", "gpt2", 1),
        pytest.param("zero2", "gpt2", 64, marks=SLOW),
        pytest.param("fsdp2", "gpt2", 64, marks=SLOW),
        pytest.param("zero1", "gpt2", 64, marks=NIGHTLY),
        pytest.param("zero3", "gpt2", 64, marks=NIGHTLY),
        pytest.param("fsdp2_hybrid", "gpt2", 4, marks=NIGHTLY),
        # More parameters than fit into DDP's first bucket, which it therefore arranges anew after the first step.
        pytest.param("ddp", "gpt2 of two layers", 64, marks=NIGHTLY),
        pytest.param("fsdp2", "gpt2 of two layers", 64, marks=NIGHTLY),
    ],
)  # fmt: skip
def test_without_memory_it_is_the_same(strategy: str, model: str, world_size: int) -> None:
    real, fake = (
        ask(strategy, model, world_size, [world_size - 1], accumulation=2, has_memory=has_memory)[world_size - 1]
        for has_memory in (True, False)
    )
    assert differences(fake, real) == []
    for name in ("parts", "moment", "reserved_bytes"):
        assert fake[name] == real[name]


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("ddp", 64), pytest.param("fsdp2", 64, marks=SLOW), pytest.param("single", 1, marks=SLOW)],
)
def test_a_model_that_does_not_fit_here_is_run_without_memory(
    strategy: str, world_size: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dry-run --model llama-2-7b fsdp2` was refused: "takes 251 GiB here"."""
    monkeypatch.setattr(command, "SHARE", 0.0)
    words = ["--world", str(world_size), "--model", "bert-tiny", "--sequence-length", "32", strategy]
    assert cli.run(["dry-run", *words]) == 0
    printed = capsys.readouterr().out
    assert "reserved by CUDA's allocator" in printed
    assert ("all_reduce" in printed) == (world_size > 1)
    assert ("reduce_scatter" in printed) == (strategy == "fsdp2")
    with pytest.raises(Refusal, match="Name a smaller model, or a file without offload"):
        cli.run(["dry-run", "--world", "2", "--model", "bert-tiny", "zero2_cpu_offload"])


def test_ddp_and_fsdp2_are_traced_with_their_collectives() -> None:
    """DDP's all-reduces were hidden by the hook that made them possible on a group that is not there."""
    shape, job = MODELS["gpt2 of two layers"], StepConfig(2, 32)
    for engine in (Engine("ddp", 0, 8, "fp32", 4), Engine("fsdp", 3, 8, "bf16", 4)):
        answer = forks.run(partial(trace.trace_torch, shape, engine, job), {0: nullcontext()})[0]
        sums = [call for call in answer["calls"] if call["kind"] in ("all_reduce", "reduce_scatter")]
        num_bytes = 4 if engine.kind == "ddp" else 2  # per gradient
        assert sum(call["num_bytes"] for call in sums) == pytest.approx(num_bytes * shape.num_params, rel=1e-3)
        assert sum(answer["parts"].values()) == answer["peak_bytes"]
        # What DTensor tries out without memory, to learn what shape an operator gives, is not played.
        assert answer["peak_bytes"] < answer["reserved_bytes"]["expandable_segments"] < 1.5 * answer["peak_bytes"]


@pytest.mark.slow
def test_a_planners_engine_is_as_its_file() -> None:
    strategy, model = "zero3_tuned", "gpt2 of one layer"
    engine = engine_of_strategy(
        file.read_strategy(file.find_strategy(strategy)), MODELS[model].hidden, 8, "bf16", "bf16"
    )
    (asked,) = ask(strategy, model, 8, [0], precision="bf16", has_memory=False).values()
    traced = trace.trace(MODELS[model], engine, StepConfig(2, 32))
    assert [traced.total, traced.reserved_bytes] == [asked["peak_bytes"], asked["reserved_bytes"]["default"]]
    # Lines of this file differ, and nothing else.
    sent, expected = ([call | {"line": ""} for call in calls] for calls in (traced.calls, asked["calls"]))
    assert sent == expected


def test_stage_1_in_bf16_is_traced_though_it_has_no_bucket() -> None:
    """`advise --trace` without --strategy ended at it: DeepSpeed refuses a bucket of no elements."""
    engine = engine_of_strategy(
        file.read_strategy(file.find_strategy("zero1")), MODELS["gpt2"].hidden, 8, "bf16", "fp32"
    )
    traced = trace.trace(MODELS["gpt2"], engine, StepConfig(2, 32))
    assert engine.reduce_bucket_size == 0
    assert traced.total >= sum(peaks.states(engine, MODELS["gpt2"], "stepping").device.values()) > 0


@pytest.mark.nightly
def test_every_strategy_is_traced_or_it_is_said_why_not(tmp_path: Path, capsys: Capture) -> None:
    shape = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    question = "--gpu a100-80gb --gpus 4 --sequence-length 32 --trace"
    assert cli.run(["advise", "--model", str(tmp_path), *question.split()]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name in set(file.names()) - {"single"}:
        assert f" {name}, 8 x 1: traced" in printed or name in printed.partition("Not traced, only predicted:")[2]


def test_states_are_those_of_theory_on_a_thousand_ranks() -> None:
    (said,) = ask("zero2", "gpt2", 1024, [1023]).values()
    assert held(said) == in_theory("zero2", 1024)


# One fault within a step, one after the last step, and the sound script; the other faults are found in the same way.
FAST = [("zero3", "sound"), ("zero3", "skipped"), ("zero3", "unequal")]
LEFT = [
    *product(["zero3"], [which for which in HANGS if ("zero3", which) not in FAST]),
    *product(["ddp", "zero2", "fsdp2"], ["sound"]),
]


@pytest.mark.parametrize(("strategy", "which"), [*FAST, *(pytest.param(*case, marks=NIGHTLY) for case in LEFT)])
def test_hangs(strategy: str, which: str) -> None:
    found = mismatches(strategy, which)
    assert bool(found) == (which != "sound")
    if which == "skipped":
        assert [call and call.module for call in found[0].calls] == ["module.tower", "module.last"]


def test_calls_are_compared_within_the_groups_that_two_ranks_share() -> None:
    own = Call("all_reduce", (1, 3), "float32", 8, "", "")
    assert deadlock.first_mismatches({0: [CALL], 1: [own, CALL]}) == []
    (mismatch,) = deadlock.first_mismatches({0: [CALL], 1: [CALL, CALL], 3: [CALL, own]})[:1]
    assert (mismatch.ranks, mismatch.number, mismatch.calls) == ((0, 1), 2, (None, CALL))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A single rank of many was "No hang", or nothing was said of hangs."""
    output = tmp_path / "said.json"
    words = ["dry-run", "--world", "8", "--ranks", "7", "--output", str(output), "zero2"]
    script = str(ROOT / "tests" / "dry_run_script.py")
    assert cli.run([*words, script, "sound"]) == 3
    said = json.loads(output.read_text())
    assert (said["world_size"], said["verdict"], said["checked"][1]["number"]) == (8, "unknown", 0)
    assert [*said["ranks"]] == ["7"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "all_reduce" in printed
    assert "Nothing to compare: only rank 7 was run." in printed
    assert "Not checked: ranks 0 to 6 (not run)." in printed


@pytest.mark.parametrize(
    ("world_size", "which", "status", "said"),
    [
        (8, "a middle rank", 1, "HANG: ranks 0 and 3 make different calls"),
        (64, "a middle rank", 1, "HANG: ranks 0 and 3 make different calls"),
        (4, "other operations", 1, "WRONG VALUES: ranks 0 and 1 reduce with different operations"),
        (64, "other sources", 1, "with rank 0 as its source"),
        (64, "a receive", 1, "HANG: rank 1 sends 0 messages to rank 0, which expects 1 message."),
        (2, "does nothing", 3, "Nothing was compared"),
        (2, "leaves with 3", 1, "rank 0 raised SystemExit: 3"),
        (4, "a ring", 0, "No hang: the 4 ranks make the same calls"),
        (16, "a ring", 0, "No hang among ranks 0"),
        pytest.param(4, "a receive", 1, "HANG: rank 1 sends 0 messages to rank 0", marks=NIGHTLY),
        pytest.param(4, "other sources", 1, "with rank 0 as its source", marks=NIGHTLY),
        pytest.param(8, "few batches", 1, "rank 6: no further call", marks=NIGHTLY),  # rank 4 may be named, too
        pytest.param(16, "few batches", 1, "HANG", marks=NIGHTLY),
        pytest.param(8, "a skipped step", 1, "HANG: ranks 0 and 5 make different calls", marks=NIGHTLY),
        pytest.param(8, "an object", 0, "No hang: the 8 ranks make the same calls", marks=NIGHTLY),
    ],
)
def test_every_kind_of_rank_is_run_or_named(
    world_size: int, which: str, status: int, said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight ranks, two were run, and their sources, operations and messages were not compared."""
    monkeypatch.setattr(real_ranks, "WAITING_SECONDS", 3.0)
    assert cli.run(["dry-run", "--world", str(world_size), "ddp", str(RANKS), which]) == status
    printed = " ".join(capsys.readouterr().out.split())
    assert said in printed
    assert ("not run" in printed) == (world_size > 8)


def test_a_received_object_names_the_way_out() -> None:
    """It was said that rank 0 is not run, although it is."""
    for world_size, remedy in ((8, "--ranks 0,1,2,3,4,5,6,7"), (16, "--world of at most 8")):
        with pytest.raises(Refusal, match=remedy):
            cli.run(["dry-run", "--world", str(world_size), "--ranks", "0,7", "ddp", str(RANKS), "an object"])


CHOSEN = {  # code, and the ranks that a run on 64 ranks needs
    "pass": [0, 63],
    "if dist.get_rank() == 5: pass": [0, 63, 5],
    "if rank in (17, 18): pass": [0, 63, 17, 18],
    "SAVER = 9\nif rank == SAVER: pass": [0, 63, 9],
    "if rank != 3 and step % 100 == 0 and width < 4096: pass": [0, 63, 3],
    "few = {6: 2}.get(rank, 100)": [0, 63, 6],
    "match rank:\n case 12: pass": [0, 63, 12],
    "if rank ==": [0, 63],
}


@pytest.mark.parametrize("code", CHOSEN)
def test_ranks_that_a_script_distinguishes(code: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(code)
    needed, others = chosen.of_script(tmp_path / "train.py", [], 64, 8)
    assert sorted(needed) == sorted(CHOSEN[code])
    assert {1, 7, 8, 32, 62} - set(needed) <= set(others)
    assert not set(needed) & set(others)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [([3], "rank 3"), ([0, 7], "ranks 0 and 7"), ([0, 1, 2, 5], "ranks 0 to 2 and 5"), ([1, 2, 3], "ranks 1 to 3"),
     ([*range(0, 40, 2)], "20 ranks from 0 to 38")],
)  # fmt: skip
def test_ranks_in_words(numbers: list[int], said: str) -> None:
    assert chosen.in_words(numbers) == said


def call(kind: str, peer: int | None, operation: str = "", num_bytes: int = 4) -> Call:
    return Call(kind, (), "float32", num_bytes, "", "", peer, operation)


MESSAGES = [  # calls of ranks 0 and 1, and whether all messages arrive
    ([call("send", 1)], [call("recv", 0)], True),
    ([call("send", 1), call("recv", 1)], [call("recv", 0), call("send", 0)], True),
    ([call("send", 1)], [call("recv_any_source", None)], True),
    ([call("recv", 1)], [], False),
    ([call("send", 1)], [], False),
    ([call("send", 1)], [call("recv", 0), call("recv", 0)], False),
    ([call("send", 1)], [call("recv", 0, num_bytes=8)], False),
    ([call("send", 2)], [call("recv", 3)], True),  # of ranks that were not run
]


@pytest.mark.parametrize(("first", "second", "arrive"), MESSAGES)
def test_messages_are_sent_as_they_are_received(first: list[Call], second: list[Call], arrive: bool) -> None:
    assert (deadlock.lost_messages({0: first, 1: second}) == []) == arrive


def test_sources_and_operations_are_compared() -> None:
    for kind, ours, theirs, is_operation in (
        ("broadcast", (0, ""), (1, ""), False), ("all_reduce", (None, "SUM"), (None, "MAX"), True),
        ("reduce", (0, "SUM"), (1, "MAX"), False),
    ):  # fmt: skip
        (mismatch,) = deadlock.first_mismatches({0: [call(kind, *ours)], 1: [call(kind, *theirs)]})
        assert mismatch.is_only_operation == is_operation


REFUSED = {
    "--world 8 --ranks 8 zero2": "from 0 to 7",
    "--world 8 single": "one process",
    "--world 8 --model llama-2-70b zero2_cpu_offload": "smaller model",
    "--world 8 zero2 nowhere.py": "nowhere.py",
    "--world 8 fsdp2_hybrid": "for 4 ranks",
    "[]": "no keys",  # what stands in a file
    "{distributed_type: FSDP,fsdp_config: {fsdp_version: 2},parallelism_config: {parallelism_config_tp_size: 4}}": "TP",
    "{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_config_file: nowhere.json}}": "nowhere.json",
    "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 8}}": "sets .* 8",
    "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3, offload_param_device: nvme}}": "NVMe",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_pretended(words: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(words)
    asked = words.split() if words.startswith("-") else ["--world", "4", str(tmp_path / "own.yaml")]
    with pytest.raises(Refusal, match=REFUSED[words]):
        cli.run(["dry-run", *asked])
