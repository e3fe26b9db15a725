"""Test that advice and predicted records follow the models, and that senseless requests are refused in one message."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
from pathlib import Path
from typing import get_args

import launching
import planner_accuracy
import pytest
import yaml
from refusing import refusal

from study import run_in_theory
from study.config import build_config
from study.records import schema
from study.report.pages import plan
from study.running import predictions, studies
from zero_study import cli, files, planner
from zero_study.dryrun.traced import Traced
from zero_study.errors import Refusal
from zero_study.planner import Request, advice_text, answer, choose
from zero_study.planner import request as requests
from zero_study.planner.trace import trace_options
from zero_study.strategy import file, theory_engine
from zero_study.theory import hardware, measured_by_others, peaks, prediction, shapes
from zero_study.theory.engine import LossKernel
from zero_study.theory.shapes import config_json

CASE = ["--model", "gpt2-xl", "--gpu", "a100-80gb", "--gpus", "8", "--sequence-length", "1024"]
FUSED = ["--kernels", "fused", "--sync-each-batch"]


def printed(capsys, *arguments: str) -> str:
    assert cli.run(["advise", *arguments]) == 0
    return capsys.readouterr().out


def told(capsys, *arguments: str) -> dict:
    return json.loads(printed(capsys, *arguments, "--json"))


def test_every_strategy_of_the_project_is_there(capsys):
    result = told(capsys, *CASE, "--global-batch-size", "64")
    names = [option["strategy"] for option in result["strategies"]]
    assert names == [name for name in file.names() if name != "single"]
    assert result["recommended"] in names
    for option in result["strategies"]:
        assert sum(option["memory"].values()) == pytest.approx(option["peak_bytes_per_gpu"], abs=10)
        assert option["fits"] == (option["free_bytes_per_gpu"] >= 0)
        assert option["micro_batch_size"] * option["gradient_accumulation_steps"] * 8 == 64
        assert option["micro_batch_size"] <= option["largest_micro_batch_size"]
        assert option["seconds_per_step_low"] < option["seconds_per_step"] < option["seconds_per_step_high"]
        tokens = 64 * 1024 / 8 / option["seconds_per_step"]
        assert option["tokens_per_second_per_gpu"] == pytest.approx(tokens)
        assert option["dollars_per_billion_tokens"] == pytest.approx(result["price_per_gpu_hour"] / 3600 / tokens * 1e9)
    offloaded = {option["strategy"]: option["host_bytes_per_node"] for option in result["strategies"]}
    assert offloaded["zero2"] == 0 < offloaded["zero2_cpu_offload"]


def test_what_to_take_comes_first_in_80_columns(capsys):
    lines = printed(capsys, "--model", "llama-2-7b", "--gpu", "a100-80gb", "--gpus", "3", *FUSED[:2]).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("Use ")
    answer = " ".join(lines[: lines.index("")])
    free = re.search(r"\((\d+) %\) of each GPU stay free", answer)
    assert int(free[1]) >= 100 * choose.ENOUGH_FREE
    head = next(place for place, line in enumerate(lines) if line.startswith("strategy  "))
    table = [line.split()[0] for line in lines[head + 1 : lines.index("", head)]]
    assert table[0] == answer.split()[1]
    assert {"ddp", "zero1", "zero2", "zero3", "fsdp2"} <= set(table)
    question = [
        "--model",
        "llama-2-70b",
        "--gpu",
        "t4",
        "--gpus",
        "1",
        "--host-memory",
        "48",
        "--lora-rank",
        "16",
        "--all",
    ]
    assert cli.run(["advise", *question]) == 1
    none = capsys.readouterr().out
    assert none.startswith("No strategy fits.")
    nearest = none.split(" comes nearest")[0].split()[-1]
    assert f"\n{nearest} " in none  # in the table, too


def test_every_strategy_is_shown_within_the_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for words in (("--gpus", "8", "--all"), ("--gpus", "8"), ()):
        text = printed(capsys, "--model", "llama-2-7b", "--gpu", "a100-80gb", *words)
        assert max(map(len, text.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    text = printed(capsys, "--model", "llama-2-7b", "--gpu", "a100-80gb", "--gpus", "8", "--all")
    assert text.startswith("Use ")
    assert len(re.findall("^fsdp2_hybrid ", text, re.MULTILINE)) == 2  # one table of all, and one of parts of memory


def test_a_loss_kernel_changes_the_bytes_of_the_logits(capsys):
    """--loss-kernel: transformers' own loss keeps several copies of them; a chunked loss never has them all at once."""
    arguments = ["--strategy", "fsdp2", "--micro-batch-size", "32", "--activation-checkpointing", "full"]
    peaks_by_kernel, assumptions = {}, {}
    for kernel in get_args(LossKernel):
        advice = told(capsys, *CASE, *arguments, "--loss-kernel", kernel)
        peaks_by_kernel[kernel] = advice["strategies"][0]["peak_bytes_per_gpu"]
        assumptions[kernel] = advice["assumed"]
    assert sorted(peaks_by_kernel, key=peaks_by_kernel.get) == ["chunked", "fused", "upcast", "eager"]
    assert len({pairs["loss"] for pairs in assumptions.values()}) == len(assumptions)


def test_a_slower_network_slows_only_what_leaves_the_node(capsys):
    """--network-gbps: what a node sends to all others, in Gbit/s; within one node there is no such link."""
    arguments = ["--model", "gpt2-xl", "--gpu", "a100-40gb", "--strategy", "zero3", "--micro-batch-size", "4"]

    def seconds(num_gpus: str, *network: str) -> float:
        return told(capsys, *arguments, "--gpus", num_gpus, *network)["strategies"][0]["seconds_per_step"]

    assert seconds("16", "--network-gbps", "10") > 2 * seconds("16", "--network-gbps", "400")
    assert seconds("8", "--network-gbps", "10") == seconds("8")
    message = refusal(cli.run, ["advise", *arguments, "--gpus", "16", "--network-gbps", "0"])
    assert "network_gbps=0.0: must be a number above 0" in message


def test_a_fixed_case(capsys):
    arguments = ["--strategy", "zero3", "--micro-batch-size", "8", "--gradient-accumulation-steps", "3"]
    result = told(capsys, *CASE, *arguments, "--precision", "bf16", "--activation-checkpointing", "full")
    (option,) = result["strategies"]
    request = {"micro_batch_size": 8, "gradient_accumulation_steps": 3, "activation_checkpointing": "full"}
    assert {key: option[key] for key in request} == request
    assert option["precision"] == "bf16"
    assert option["global_batch_size"] == 192
    kept = told(capsys, *CASE, *arguments, "--activation-checkpointing", "none")["strategies"][0]
    assert kept["memory"]["activations"] > 4 * option["memory"]["activations"]
    assert kept["seconds_per_step"] < option["seconds_per_step"]


@pytest.mark.parametrize("row", measured_by_others.cases_of("mpt_throughput")[::9], ids=lambda row: row.name)
def test_published_rows_are_what_the_command_predicts(row, capsys):
    """The command's defaults are the models that were held against the published rows."""
    sharded = "fsdp2" if row.engine.reshard_after_forward else "fsdp2_no_reshard"
    arguments = ["--model", row.shape.name, "--gpu", row.box.gpu.name, "--gpus", str(row.box.num_gpus)]
    arguments += ["--sequence-length", str(row.job.sequence_length), "--strategy", sharded, "--precision", "bf16"]
    arguments += ["--micro-batch-size", str(row.job.micro_batch_size)]
    arguments += ["--gradient-accumulation-steps", str(row.job.gradient_accumulation_steps)]
    arguments += ["--activation-checkpointing", "full" if row.job.activation_checkpointing else "none"]
    arguments += [*FUSED, "--attention", "flash-1", "--optimizer-kernel", "foreach"]
    (option,) = told(capsys, *arguments)["strategies"]
    assert option["fits"]
    engine = dataclasses.replace(row.engine, precision="bf16")
    predicted = prediction.predict(row.shape, engine, row.job, row.box)
    # But for the position embedding: the published models have as many rows as a sequence has tokens.
    assert option["peak_bytes_per_gpu"] == pytest.approx(predicted.peak.total, rel=0.002)
    assert option["tokens_per_second_per_gpu"] == pytest.approx(predicted.tokens_per_second_per_gpu, rel=0.002)


BATCH, GROUP, ON_ONE = ["--global-batch-size"], ["--shard-group-size"], ["--model", "gpt2", "--gpus", "1"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "gpt2", "--gpu", "l4", "--gpus", "0"], "--gpus 0: must be a whole number of at least 1"),
        ([*CASE, *BATCH, "60"], "--global-batch-size 60 cannot be divided equally among --gpus 8"),
        ([*CASE, *BATCH, "64", "--micro-batch-size", "3"], "--global-batch-size 64 on --gpus 8 is 8 sequences per GPU"),
        (
            [*CASE, *BATCH, "64", "--micro-batch-size", "4", "--gradient-accumulation-steps", "4"],
            "--global-batch-size 64 is not 128, the product of --micro-batch-size 4",
        ),
        (
            [*ON_ONE, "--gpu", "t4", "--precision", "bf16"],
            "--precision bf16: t4 does not support it. It supports fp32, fp16.",
        ),
        ([*CASE, "--strategy", "zero9"], "strategy 'zero9' is unknown"),
        (
            [*CASE, "--strategy", "single"],
            "--strategy single: this strategy runs one process, but --gpus is 8. Use ddp",
        ),
        (["--gpu", "l4"], "--model and --gpus are both missing"),
        (["--gpu", "l4", "--model", "gpt2", "--micro-batch-size", "8"], "--micro-batch-size needs both --model"),
        ([*CASE, "--gradient-accumulation-steps", "4"], "--gradient-accumulation-steps needs --micro-batch-size"),
        (["--model", "x" * 5000, "--gpu", "l4", "--gpus", "1"], "unknown model 'x"),
        (["--model", "gpt2-xxl", "--gpu", "l4", "--gpus", "1"], "unknown model 'gpt2-xxl': similar names are gpt2-xl"),
        ([*ON_ONE, "--gpu", "v100"], "the GPU 'v100' can be v100-16gb, v100-32gb, "),
        ([*ON_ONE, "--gpu", "h1000-sxm"], "unknown GPU 'h1000-sxm'. Did you mean h100-sxm?"),
        ([*ON_ONE, "--gpu", ""], "unknown GPU ''. Use one of the names"),
        (
            ["--model", "gpt2", "--gpu", "a100-80gb", "--gpus", "12"],
            "12 GPUs cannot be divided equally among nodes of 8",
        ),
        (["--model", "gpt2", "--gpu", "l4", "--gpus", "1" + 23 * "0"], "--gpus 1000"),
        ([*CASE, "--write", "/proc/x.yaml"], "--write /proc/x.yaml: "),
        ([*CASE, "--write", "x.json"], "--write x.json: accelerate would read a file of this name as JSON"),
        ([*CASE, *GROUP, "4"], "--shard-group-size works only with --strategy fsdp2_hybrid, zero1 or zero2"),
        ([*CASE, "--strategy", "zero3", *GROUP, "4"], "--shard-group-size 4: zero3 does not shard within groups"),
        (
            [*CASE, "--strategy", "zero1", *GROUP, "3"],
            "--shard-group-size 3: the size must be at least 2, and --gpus 8 must be a multiple",
        ),
        (
            [*CASE, "--strategy", "zero1", *GROUP, "4", "--write", "x.yaml"],
            "--write x.yaml: DeepSpeed can only shard stages 1",
        ),
        (
            [*CASE, "--strategy", "zero2", "--stack", "deepspeed", "--optimizer-kernel", "foreach"],
            "--optimizer-kernel foreach: zero2 has",
        ),
        (["--gpu", "l4", "--gpus", "1", "--write", "x.yaml"], "--write x.yaml: there is a file for one model only"),
        (
            ["--model", "llama-2-70b", "--gpu", "l4", "--gpus", "1", "--strategy", "single", "--write", "x.yaml"],
            "--write x.yaml: there is no recommended strategy to write. ",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, expected):
    assert refusal(cli.run, ["advise", *arguments]).startswith(expected)


def test_the_written_file_is_a_strategy_for_the_box(tmp_path, capsys):
    for name in ("zero2", "zero3_tuned", "ddp_tuned", "fsdp2_no_reshard", "fsdp2_hybrid"):
        path = tmp_path / f"{name}.yaml"
        arguments = ["--model", "gpt2-xl", "--gpu", "a100-80gb", "--gpus", "16", "--strategy", name]
        text = printed(capsys, *arguments, "--write", str(path))
        assert f"Wrote the accelerate file of the recommended strategy to {path}" in text.splitlines()
        path.write_text(path.read_text().replace("FILL_IN", "10.0.0.1"))
        written, shipped = file.read_strategy(path), file.read_strategy(file.find_strategy(name))
        assert written.num_processes == 16
        assert written.zero_stage == shipped.zero_stage
        zero, shipped_zero = ((one.deepspeed_json or {}).get("zero_optimization") for one in (written, shipped))
        assert zero == shipped_zero
        assert written.ddp_json == shipped.ddp_json
        assert "--machine_rank 1" in path.read_text().split("compute_environment")[0]
        launcher = written.content.get("deepspeed_config", {}).get("deepspeed_multinode_launcher")
        assert launcher == ("standard" if name.startswith("zero") else None)  # not pdsh, which is accelerate's default
        with pytest.raises(Refusal, match="already exists"):
            cli.run(["advise", *arguments, "--write", str(path)])
    assert file.read_strategy(tmp_path / "fsdp2_hybrid.yaml").mesh == [2, 8]
    (tmp_path / "ddp_tuned.yaml").unlink()  # its JSON would make of a plain ddp what it is not
    plain = ["--model", "gpt2-xl", "--gpu", "a100-80gb", "--gpus", "16", "--strategy", "ddp"]
    with pytest.raises(Refusal, match=r"ddp_tuned\.json already exists"):
        cli.run(["advise", *plain, "--write", str(tmp_path / "ddp_tuned.yaml")])


def test_the_simplest_of_the_equally_fast_is_recommended(monkeypatch):
    options = planner.advise("gpt2", Request("a100-80gb", 8)).options
    speeds = dict.fromkeys((option.strategy.name for option in options), 100.0)
    monkeypatch.setattr(choose, "_speed", lambda option: speeds[option.strategy.name])
    assert choose.recommend(options).strategy.name == "ddp"
    speeds["ddp"] = 84.0  # more than EQUALLY_FAST_IF_MUCH_FREE behind
    assert choose.recommend(options).strategy.name == "zero0"
    speeds["zero3"] = 200.0
    assert choose.recommend(options).strategy.name == "zero3"


def test_a_simpler_strategy_that_is_hardly_slower_is_recommended():
    advice = planner.advise("bert-large-uncased", Request("a100-80gb", 8, micro_batch_size=32))
    fastest = max((option for option in advice.options if option.prediction.fits), key=choose._speed)
    assert fastest is not advice.recommended
    least = 1 - choose.EQUALLY_FAST_IF_MUCH_FREE
    assert least < choose._speed(advice.recommended) / choose._speed(fastest) < 1


def test_the_largest_model_of_a_box(capsys):
    result = told(capsys, "--gpu", "a100-40gb", "--gpus", "8")
    sizes = {one["strategy"]: one["num_params"] for one in result["largest_models"]}
    assert sizes["ddp"] < sizes["zero1"] < sizes["zero2"] < sizes["zero3"] < sizes["zero3_nvme_offload"]
    # It fits, and the next of the family does not.
    advice = planner.largest_models(Request("a100-40gb", 8, strategy="zero2"))
    shape = advice.shapes["zero2"]
    (chosen,), box = advice.request.strategies(8), advice.request.box()
    job = choose._smallest_job(advice.request, "--model")
    for candidate, fits in ((shape, True), (choose.gpt(shape.hidden + 256, 2048), False)):
        engine = choose.engine_for(candidate, advice.request, chosen, 8)
        assert prediction.fits(peaks.peak(candidate, engine, job), box) == fits
    text = advice_text.text_of_largest(planner.largest_models(Request("a100-40gb", 8)))
    rows = re.findall(r"^[a-z]\w+ .* ([\d.]+)$", text, re.MULTILINE)
    assert len(rows) > 10
    assert rows == sorted(rows, key=float, reverse=True)


def test_the_fewest_gpus_of_a_model(capsys):
    result = told(capsys, "--gpu", "a100-40gb", "--model", "llama-2-7b")
    fewest = {one["strategy"]: one["num_gpus"] for one in result["fewest_gpus"]}
    assert fewest["ddp"] is None  # 16 bytes for each of 6.7e9 parameters, on however many
    assert fewest["zero3"] <= fewest["zero2"]
    in_fp32 = printed(capsys, "--gpu", "a100-40gb", "--model", "llama-2-7b", "--grad-accum-dtype", "fp32", "--all")
    rows = [line.split() for line in in_fp32.splitlines()]
    assert {row[0] for row in rows if row[1:] == ["never"]} == {"single", "zero0", "ddp", "ddp_tuned"}
    assert ["zero1", "more", "than", "1024"] in rows
    assert fewest["zero1"] is not None  # DeepSpeed accumulates in the model's type by default
    assert "never" not in printed(capsys, "--gpu", "a100-40gb", "--model", "gpt2", "--all")


def test_small_steps_take_the_time_of_their_launches(capsys):
    """Their interval is one of its own. Compiled small steps have no upper end, because nobody published one."""
    arguments = ["--model", "gpt2", "--gpu", "a100-80gb", "--gpus", "8", "--strategy", "ddp"]
    arguments += ["--sequence-length", "512", "--micro-batch-size"]
    for size, words, basis in (
        ("1", [], "waits for the launches"), ("64", [], "in 16 bits with fused attention"),
        ("1", ["--compile"], "the time is a rough guess"),
    ):  # fmt: skip
        text = " ".join(printed(capsys, *arguments, size, *words, "--all").split())
        assert (basis in text, "-?)" in text) == (True, words != [])
        (option,) = told(capsys, *arguments, size, *words)["strategies"]
        assert (option["seconds_per_step_high"] is None) == (words != [])


def test_a_network_without_rdma_is_slow_and_has_no_upper_end(capsys):
    arguments = ["--model", "gpt2-xl", "--gpu", "a100-40gb", "--gpus", "32", "--strategy", "zero2"]
    found = {}
    for name, words in {"rdma": ["--network", "rdma"], "tcp": ["--network", "tcp"], "given": []}.items():
        (found[name],) = told(capsys, *arguments, "--network-gbps", "100", *words)["strategies"]
    assert found["tcp"]["seconds_per_step"] > 1.5 * found["rdma"]["seconds_per_step"]
    assert found["given"] == found["tcp"]  # up to 100 Gbit/s, no RDMA is assumed
    assert (found["tcp"]["seconds_per_step_high"], found["rdma"]["seconds_per_step_high"] is None) == (None, False)
    assert "100 Gbit/s per node (given), without RDMA (TCP)" in " ".join(
        printed(capsys, *arguments, "--network-gbps", "100", "--all").split()
    )
    (usual,) = told(capsys, *arguments)["strategies"]
    assert usual["seconds_per_step_high"] is not None


def test_heads_that_tensor_cores_cannot_read_are_named(capsys):
    arguments = ["--model", "facebook/opt-1.3b", "--gpu", "a100-80gb", "--gpus", "8", "--attention"]
    assert "tensor cores cannot multiply them" not in printed(capsys, *arguments, "eager")
    uneven = shapes.replace_parts(shapes.find("gpt2-xl"), hidden=2064, heads=24, kv_heads=24, head_size=86)
    for attention, is_said in (("eager", True), ("sdpa", False)):
        request = Request("a100-80gb", 8, attention=attention)
        notes = answer._predicted(uneven, request, []).notes
        assert any("tensor cores cannot multiply" in note for note in notes) == is_said


def test_hybrid_sharding_is_within_nodes(capsys):
    nodes = ["--model", "llama-2-7b", "--gpu", "a100-80gb", "--gpus", "64", "--strategy"]
    assumed = " ".join(printed(capsys, *nodes, "fsdp2_hybrid", "--all").split()).partition("Assumed:")[2]
    assert "fsdp2_hybrid shards within groups of 8" in assumed

    def states(*words: str) -> float:
        (option,) = told(capsys, *nodes, *words)["strategies"]
        return option["memory"]["optimizer_states"]

    assert states("fsdp2_hybrid") == pytest.approx(2 * states("fsdp2_hybrid", *GROUP, "16"), rel=0.01)
    assert states("zero1", *GROUP, "8") == pytest.approx(8 * states("zero1"), rel=0.01)


@pytest.mark.parametrize("name", ["internlm-7b, 256 x a100-80gb, zero1 node", "tinyllama-1.1b, 16 x a100-40gb, hsdp"])
def test_published_groups_can_be_asked_for(name):
    """Of rows of InternEvo and TinyLlama: as many copies of the states as theirs."""
    published = next(case for case in measured_by_others.cases() if case.name.startswith(name))
    strategy = "zero1" if published.engine.kind == "deepspeed" else "fsdp2_hybrid"
    gpus, size = published.box.num_gpus, published.engine.num_shards
    one = Request(published.box.gpu.name, gpus, strategy=strategy, gpus_per_node=published.box.gpus_per_node)
    one = one.replace(shard_group_size=size if strategy == "zero1" else None)
    assert choose.engine_for(published.shape, one, *one.strategies(gpus), gpus).replicas == published.engine.replicas


# ---------------------------------------------------------------- the planner


def test_front_is_beaten_by_nothing_that_fits():
    advice = planner.advise("gpt-j-6b", Request("a100-40gb", 8, global_batch_size=16))
    engines = [option.prediction.engine for option in advice.options]
    every = [split for engine in engines for split in choose.splits(advice.shape, advice.request, engine, advice.box)]
    fitting = [split for split in every if split.fits]
    front = [split for _, split in plan.front(advice)]
    assert 1 < len(front) < len(fitting) < len(every)
    for kept in front:
        speed = kept.tokens_per_second_per_gpu
        assert not [p for p in fitting if p.peak.total < kept.peak.total and p.tokens_per_second_per_gpu > speed]
    assert front[-1].tokens_per_second_per_gpu == max(p.tokens_per_second_per_gpu for p in fitting)


def traced(*kinds: str) -> choose.Advice:
    """Advice where tensors of engines of these kinds are traced as 2.1 times what is predicted of them."""

    def tracer(shape, engine, job):
        if engine.kind not in kinds:
            raise Refusal("has no trace here")
        return Traced({}, None, 0.0, int(2.1 * peaks.peak(shape, engine, job).total))

    request = Request("a100-40gb", 8, sequence_length=1024, global_batch_size=64, kernels="transformers")
    return planner.advise("gpt-j-6b", request, functools.partial(trace_options, tracer))


def test_a_traced_peak_changes_the_choice_and_a_strategys_split():
    before = traced()
    assert advice_text.text_of_all(before) == advice_text.text_of_all(planner.advise("gpt-j-6b", before.request))
    first = before.recommended
    after = traced(first.prediction.engine.kind)
    (same,) = [option for option in after.options if option.strategy == first.strategy]
    assert same.fits
    assert same.needed_bytes == pytest.approx(2.1 * same.prediction.needed_bytes)
    assert same.seconds >= first.seconds
    assert after.recommended.strategy != first.strategy
    table = advice_text.text(after).partition("strategy ")[2].partition("\n\n")[0]
    displayed = {line.split()[0]: line.split()[-1] for line in table.splitlines()}
    traced_ones = {option.strategy.name for option in after.options if option.traced_bytes is not None}
    assert {name for name, basis in displayed.items() if basis == "traced"} == traced_ones & set(displayed)


# ---------------------------------------------------------------- predicted records

COMMITTED = launching.ROOT / "reports" / "predicted"
FLAGS = "workload: gpt-wikitext, size: 124m, sequence_length: 512, init: scratch, global_batch_size: 16"


def read_predictions(path):
    return schema.parse(path, files.load(path, "predicted records"), predictions.PredictedStudy)


def study_of(tmp_path, parts: str) -> studies.Study:
    path = tmp_path / "mine.yaml"
    path.write_text(f"question: Which?\ncontrol: zero2\ntext: real\nparts:\n{parts}\n")
    return studies.find(str(path))


def test_one_prediction_per_configuration(tmp_path):
    """Seeds, repeats, steps and a part's label change no memory and no time; batches and processes do."""
    study = study_of(
        tmp_path,
        f"""
  - {{flags: {{{FLAGS}}}, strategies: [single, ddp, zero2], world_sizes: [2, 4], seeds: [0, 1], repeats: 2}}
  - {{flags: {{{FLAGS}, max_steps: 3}}, strategies: [zero2, zero3], world_sizes: [2], label: short}}""",
    )
    result = predictions.predict_study(study, "a100-80gb", 4)
    assert [(one.strategy, one.world_size) for one in result.predictions] == [
        ("single", 1), ("ddp", 2), ("zero2", 2), ("ddp", 4), ("zero2", 4), ("zero3", 2),
    ]  # fmt: skip
    assert result.left_out == []
    assert [one.micro_batch_size for one in result.predictions] == [16, 8, 8, 4, 4, 8]


def test_is_what_the_planner_says(tmp_path):
    flags = f"{FLAGS}, precision: bf16, dropout: 0, activation_checkpointing: true, micro_batch_size: 4"
    study = study_of(tmp_path, f"  - {{flags: {{{flags}}}, strategies: [zero2]}}")
    (one,) = predictions.predict_study(study, "h100", 8).predictions
    config = build_config(**yaml.safe_load(f"{{{flags}}}"), data="hub")
    shape = run_in_theory.shape_of(config)
    engine = theory_engine.engine_of_strategy(file.read_strategy(file.find_strategy("zero2")), 768, 2, "bf16")
    box = hardware.typical_box(hardware.find_gpu("h100-sxm"), 2)  # of two, though the box has eight
    expected = prediction.predict(shape, engine, run_in_theory.job_of(config, 2, "gpu"), box)
    assert shape.vocabulary == 50257  # the published tokenizer's, as the study trains with
    assert one.num_params == shape.num_params
    assert (one.micro_batch_size, one.gradient_accumulation_steps) == (4, 2)
    assert one.peak_bytes_per_gpu == pytest.approx(expected.peak.total, rel=1e-3)
    assert sum(one.parts.values()) == pytest.approx(expected.peak.total, rel=1e-3)
    assert one.free_bytes == pytest.approx(expected.free_bytes, rel=1e-3)
    assert one.seconds_low < one.seconds_per_step < one.seconds_high
    assert one.seconds_per_step == pytest.approx(expected.step.total, rel=1e-3)
    assert one.mfu == pytest.approx(expected.mfu, rel=1e-3)
    assert one.collective_bytes == pytest.approx(expected.communicated_bytes, rel=1e-3)


def test_a_file_is_read_as_it_was_written(tmp_path):
    study = study_of(tmp_path, f"  - {{flags: {{{FLAGS}, precision: bf16}}, strategies: [ddp, zero3]}}")
    created = predictions.predict_study(study, "a100-80gb", 2)
    path = predictions.write(tmp_path, created)
    assert path == tmp_path / "a100-80gb-2x" / "mine.json"
    assert read_predictions(path) == created
    assert len([line for line in path.read_text().splitlines() if '"workload"' in line]) == 2  # one line for each
    content = json.loads(path.read_text())
    assert content["status"] == "predicted"
    del content["predictions"][0]["fits"]
    path.write_text(json.dumps(content))
    with pytest.raises(Refusal, match=r"mine\.json: predictions\.0\.fits is missing"):
        read_predictions(path)
    with pytest.raises(Refusal, match=r"mine\.json"):  # and it is no measured record
        schema.read(path)


# ---------------------------------------------------------------- what is committed


def test_committed_are_all():
    expected = {f"{gpu}-{n}x/{name}.json" for gpu, n in predictions.BOXES for name in predictions.STUDIES}
    assert {str(path.relative_to(COMMITTED)) for path in COMMITTED.glob("*x/*.json")} == expected
    assert max(path.stat().st_size for path in COMMITTED.glob("*x/*.json")) < 200_000


@pytest.mark.parametrize(("gpu", "num_gpus", "name"), [("h100-sxm", 8, "multi-gpu"), ("a100-40gb", 1, "single-gpu")])
def test_committed_are_what_theory_says_today(gpu, num_gpus, name):
    """`zero-study predict` makes them anew; numbers may differ by rounding."""
    committed = read_predictions(COMMITTED / f"{gpu}-{num_gpus}x" / f"{name}.json")
    created = predictions.predict_study(studies.find(name), gpu, num_gpus)
    assert planner_accuracy.is_same(committed.model_dump(mode="json"), created.model_dump(mode="json"))


# ---------------------------------------------------------------- verdicts, and odd models


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([*CASE], 0),
        (["--gpu", "list"], 0),
        (["--model", "list"], 0),
        (["--model", "llama-2-70b", "--gpu", "l4", "--gpus", "1", "--host-memory", "96"], 1),
        (["--model", "llama-2-70b", "--gpu", "l4", "--strategy", "ddp"], 1),
        (["--model", "gpt2", "--gpu", "l4"], 0),
        (["--gpu", "l4", "--gpus", "8"], 0),
    ],
)
def test_the_status_says_whether_a_strategy_fits(arguments, status, capsys):
    assert cli.run(["advise", *arguments]) == status
    if "list" not in arguments:
        capsys.readouterr()
        assert cli.run(["advise", *arguments, "--json"]) == status
        content = json.loads(capsys.readouterr().out)
        assert content["exit_status"] == status
        assert content["checked"][0]["number"] > 0


@pytest.mark.parametrize("name", ["falcon-7b", "falcon-40b"])
def test_a_sequence_longer_than_a_counted_model_is_refused(name):
    message = refusal(
        cli.run, ["advise", "--model", name, "--gpu", "h100-sxm", "--gpus", "8", "--sequence-length", "99999"]
    )
    assert "positions" in message
    assert "--sequence-length" in message


@pytest.mark.parametrize("name", ["a\nb.json", "gpt2\x1b[2J", "a\x00b"])
def test_control_characters_in_the_name_of_a_model_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "\x00" not in name:
        Path(name).write_text('{"model_type": "qwen2"}')
    message = refusal(cli.run, ["advise", "--model", name, "--gpu", "h100-sxm", "--gpus", "8", "--write", "x.yaml"])
    assert message.isprintable()
    assert not Path("x.yaml").exists()


ODD = [
    None, True, -1, 0, 3, 10**9, 10**30, 1.5, "", "x", "12", "\x1b[2J", "a\nb", [], [1], [[]], {}, {"a": 1},
    {"quant_method": "\x1b[31m"}, [None], "auto",
]  # fmt: skip
KEYS = [
    "architectures", "id2label", "num_labels", "quantization_config", "sliding_window", "layer_types", "rope_scaling",
    "mlp_only_layers", "no_rope_layers", "decoder_sparse_step", "model_type",
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        ({"n_routed_experts": 8, "num_experts_per_tok": 2}, "n_routed_experts"),
        ({"num_local_experts": 0}, None),
        ({}, None),
    ],
)
def test_the_short_answer_says_what_of_a_config_json_is_ignored(changes, words, tmp_path):
    content = {"model_type": "llama", **config_json._DEFAULTS["llama"]["defaults"], **changes}
    (path := tmp_path / "config.json").write_text(json.dumps(content))
    answer = " ".join(advice_text.text(planner.advise(str(path), Request("h100-sxm", 8))).split())
    assert ("Note: " in answer) == (words is not None)
    assert words is None or words in answer


@pytest.mark.parametrize("model_type", ["llama", "cohere2"])
def test_an_ignored_quantization_is_noted_for_formulas_and_for_traces(model_type, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    content = {"model_type": model_type, **sizes, "intermediate_size": 96, "vocab_size": 512}
    content["quantization_config"] = {"quant_method": "fp8"}
    (path := tmp_path / "config.json").write_text(json.dumps(content))
    answer = advice_text.text(planner.advise(str(path), Request("h100-sxm", 1, sequence_length=64)))
    assert "its quantization_config (fp8) is ignored" in " ".join(answer.split())


@pytest.mark.parametrize("own_code", [{}, {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}])
def test_an_unknown_model_type_is_refused_with_the_true_reason(own_code, tmp_path):
    (path := tmp_path / "config.json").write_text(json.dumps({"model_type": "internvl_chat", **own_code}))
    with pytest.raises(Refusal, match=r"transformers .* has no class for model_type 'internvl_chat'") as refused:
        planner.advise(str(path), Request("h100-sxm", 1))
    assert ("auto_map" in str(refused.value)) == bool(own_code)


@pytest.mark.parametrize("seed", range(6))
def test_odd_configurations_are_answered_or_refused_in_one_sentence(seed, tmp_path, monkeypatch):
    def not_traced(name: str, not_known: str, asked: object) -> None:
        raise Refusal(not_known)

    monkeypatch.setattr(requests, "_traced", not_traced)
    chosen = random.Random(seed)
    path = tmp_path / "config.json"
    for name, of_class in config_json._DEFAULTS.items():
        content = {"model_type": name, **of_class["defaults"]}
        for key in chosen.sample([*content, *KEYS], chosen.choice([1, 1, 2, 3])):
            content[key] = chosen.choice(ODD)
        path.write_text(json.dumps(content))
        try:
            shape, _, notes = requests.find_model(str(path), Request("h100-sxm", 8))
            texts = [shape.name, *notes]
        except Refusal as refused:
            texts = [str(refused)]
        assert all(text.isprintable() for text in texts), content


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"hidden_size": NaN}', "[" * 5000, '{"a": 1e999}', "\x00"])
def test_a_configuration_that_is_no_object_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    message = refusal(cli.run, ["advise", "--model", str(tmp_path / "config.json"), "--gpu", "h100-sxm", "--gpus", "8"])
    assert message.isprintable()
