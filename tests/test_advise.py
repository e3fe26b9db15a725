"""Is the advice what the models say, and is what makes no sense refused in one line?"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from study import cli, planner
from study.errors import Refusal
from study.planner import Asked, advice_text, choose
from study.strategy import file
from study.theory import measured_by_others, on_box

CASE = ["--model", "gpt2-xl", "--gpu", "a100-80gb", "--gpus", "8", "--sequence-length", "1024"]


def printed(capsys, *arguments: str) -> str:
    assert cli.run(["advise", *arguments]) == 0
    return capsys.readouterr().out


def told(capsys, *arguments: str) -> dict:
    return json.loads(printed(capsys, *arguments, "--json"))


def test_every_strategy_of_the_project_is_there(capsys):
    found = told(capsys, *CASE, "--global-batch-size", "64")
    names = [option["strategy"] for option in found["strategies"]]
    assert names == [name for name in file.names() if name != "single"]
    assert {"fsdp2", "fsdp2_no_reshard", "fsdp2_hybrid"} <= set(names)
    assert found["recommended"] in names
    for option in found["strategies"]:
        assert sum(option["memory"].values()) == pytest.approx(option["peak_bytes_per_gpu"], abs=10)
        assert option["fits"] == (option["free_bytes_per_gpu"] >= 0)
        assert option["micro_batch_size"] * option["gradient_accumulation_steps"] * 8 == 64
        assert option["micro_batch_size"] <= option["largest_micro_batch_size"]
        low, high = option["seconds_per_step_low"], option["seconds_per_step_high"]
        assert low < option["seconds_per_step"] < high
        tokens = 64 * 1024 / 8 / option["seconds_per_step"]
        assert option["tokens_per_second_per_gpu"] == pytest.approx(tokens)
        assert option["dollars_per_billion_tokens"] == pytest.approx(found["price_per_gpu_hour"] / 3600 / tokens * 1e9)
    offloaded = {option["strategy"]: option["host_bytes_per_node"] for option in found["strategies"]}
    assert offloaded["zero2"] == 0 < offloaded["zero2_cpu_offload"]


def test_what_to_take_comes_first_in_80_columns(capsys):
    lines = printed(capsys, "--model", "llama-2-7b", "--gpu", "a100-80gb", "--gpus", "3").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].startswith("Take fsdp2: ")
    assert any(line.startswith("Careful: 7% of a GPU is free") for line in lines)
    rows = lines[lines.index("") + 1 :][lines[3:].index("") + 2 :]
    assert [row.split()[0] for row in rows[:6]] == ["strategy", "fsdp2", "zero3", "zero2", "zero1", "ddp"]
    assert not any("Careful" in line for line in printed(capsys, *CASE).splitlines())
    assert "Careful" not in (none := printed(capsys, "--model", "llama-2-70b", "--gpu", "t4", "--gpus", "1"))
    assert "none fits" in none


def test_a_fixed_case(capsys):
    arguments = ["--strategy", "zero3", "--micro-batch-size", "8", "--gradient-accumulation-steps", "3"]
    found = told(capsys, *CASE, *arguments, "--precision", "bf16", "--activation-checkpointing", "full")
    (option,) = found["strategies"]
    asked = {"micro_batch_size": 8, "gradient_accumulation_steps": 3, "activation_checkpointing": "full"}
    assert {key: option[key] for key in asked} == asked
    assert option["precision"] == "bf16"
    assert option["global_batch_size"] == 192
    kept = told(capsys, *CASE, *arguments, "--activation-checkpointing", "none")["strategies"][0]
    assert kept["memory"]["activations"] > 4 * option["memory"]["activations"]
    assert kept["seconds_per_step"] < option["seconds_per_step"]


@pytest.mark.parametrize("row", measured_by_others.throughput_rows()[::9], ids=lambda row: row.title)
def test_published_rows_are_what_the_command_predicts(row, capsys):
    """The command's defaults are the models that were held against the published rows."""
    sharded = "fsdp2" if row.engine.reshard_after_forward else "fsdp2_no_reshard"
    arguments = ["--model", f"mpt-{row.model}", "--gpu", row.box.gpu.name, "--gpus", str(row.box.num_gpus)]
    arguments += ["--sequence-length", str(row.job.sequence_length), "--strategy", sharded, "--precision", "bf16"]
    arguments += ["--micro-batch-size", str(row.job.micro_batch_size)]
    arguments += ["--gradient-accumulation-steps", str(row.job.gradient_accumulation_steps)]
    arguments += ["--activation-checkpointing", "full" if row.job.activation_checkpointing else "none"]
    arguments += ["--attention", "flash-1", "--optimizer-kernel", "foreach"]
    (option,) = told(capsys, *arguments)["strategies"]
    assert option["fits"]
    # They reduced gradients in bf16, which this project's program does not.
    engine = dataclasses.replace(row.engine, precision="bf16", reduces_in_fp32=True)
    predicted = on_box.predict(row.shape, engine, row.job, row.box)
    # But for the position embedding: the published models have as many rows as a sequence has tokens.
    assert option["peak_bytes_per_gpu"] == pytest.approx(predicted.peak.total, rel=0.002)
    assert option["tokens_per_second_per_gpu"] == pytest.approx(predicted.tokens_per_second_per_gpu, rel=0.002)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "gpt2-xxl", "--gpu", "l4", "--gpus", "1"], "unknown model 'gpt2-xxl': near are gpt2-xl"),
        (["--model", "gpt2", "--gpu", "a100-90gb", "--gpus", "1"], "unknown GPU 'a100-90gb': near are a100-80gb"),
        (["--model", "gpt2", "--gpu", "l4", "--gpus", "12"], "12 GPUs do not fill nodes of 8"),
        (["--model", "gpt2", "--gpu", "l4", "--gpus", "0"], "--gpus 0: must be a whole number of at least 1"),
        ([*CASE, "--global-batch-size", "60"], "--global-batch-size 60 does not divide over --gpus 8"),
        (
            [*CASE, "--global-batch-size", "64", "--micro-batch-size", "3"],
            "--global-batch-size 64 on --gpus 8 is 8 sequences per GPU, which --micro-batch-size 3 does not divide",
        ),
        (
            [*CASE, "--global-batch-size", "64", "--micro-batch-size", "4", "--gradient-accumulation-steps", "4"],
            "--global-batch-size 64 is not --micro-batch-size 4 x --gradient-accumulation-steps 4 x --gpus 8 = 128",
        ),
        (
            ["--model", "gpt2", "--gpu", "t4", "--gpus", "1", "--precision", "bf16"],
            "--precision bf16: t4 cannot multiply in it; take fp16 or fp32",
        ),
        ([*CASE, "--strategy", "zero9"], "strategy 'zero9' is unknown"),
        ([*CASE, "--strategy", "single"], "--strategy single: runs one process, --gpus asks for 8; take ddp"),
        (["--gpu", "l4"], "--model or --gpus is missing"),
        (["--gpu", "l4", "--model", "gpt2", "--micro-batch-size", "8"], "--micro-batch-size goes with both --model"),
        ([*CASE, "--gradient-accumulation-steps", "4"], "--gradient-accumulation-steps goes with --micro-batch-size"),
        ([*CASE, "--strategy", "zero*"], "strategy 'zero"),
        (["--model", "x" * 5000, "--gpu", "l4", "--gpus", "1"], "unknown model 'x"),
        (["--model", "gpt2", "--gpu", "l4", "--gpus", "1" + 23 * "0"], "--gpus 1000"),
        ([*CASE, "--write", "/proc/x.yaml"], "--write /proc/x.yaml: "),
        ([*CASE, "--write", "x.json"], "--write x.json: accelerate would read it as JSON"),
        ([*CASE, "--shard-group-size", "4"], "--shard-group-size goes with --strategy fsdp2_hybrid, zero1 or zero2"),
        ([*CASE, "--strategy", "zero3", "--shard-group-size", "4"], "--shard-group-size 4: zero3 has no groups"),
        ([*CASE, "--strategy", "zero1", "--shard-group-size", "3"], "--shard-group-size 3: --gpus 8 must be a"),
        (
            [*CASE, "--strategy", "zero1", "--shard-group-size", "4", "--write", "x.yaml"],
            "--write x.yaml: DeepSpeed splits stages 1 and 2 over all GPUs only",
        ),
        ([*CASE, "--strategy", "zero2", "--optimizer-kernel", "foreach"], "--optimizer-kernel foreach: zero2 has"),
        (["--gpu", "l4", "--gpus", "1", "--write", "x.yaml"], "--write x.yaml: needs both --model and --gpus"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, expected):
    with pytest.raises(Refusal, match="^" + expected.replace("(", r"\(").replace("?", r"\?")) as refusal:
        cli.run(["advise", *arguments])
    assert "\n" not in str(refusal.value)


@pytest.mark.launches
def test_exit_status_and_time_of_the_command():
    """In a process of its own: status 2 and one line, and nothing of torch or transformers."""
    command = [sys.executable, "-m", "study", "advise", "--model", "gpt2-xxl", "--gpu", "l4", "--gpus", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    program = (
        "import sys; from study import cli; cli.run(['advise', '--model', 'gpt2', '--gpu', 'l4', '--gpus', '1']); "
        "assert not {'torch', 'transformers', 'pandas', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)


def test_the_written_file_is_a_strategy_for_the_box(tmp_path, capsys):
    for name in ("zero2", "zero3_tuned", "ddp_tuned", "fsdp2_no_reshard", "fsdp2_hybrid"):
        path = tmp_path / f"{name}.yaml"
        arguments = ["--model", "gpt2-xl", "--gpu", "a100-80gb", "--gpus", "16", "--strategy", name]
        text = printed(capsys, *arguments, "--write", str(path))
        assert text.splitlines()[-1] == f"Written: {path}"
        written, shipped = file.read_strategy(path), file.read_strategy(file.find_strategy(name))
        assert (written.num_processes, written.num_machines) == (16, 2)
        assert (written.zero_stage, written.deepspeed_json) == (shipped.zero_stage, shipped.deepspeed_json)
        assert written.ddp_json == shipped.ddp_json
        assert "machine_rank" in path.read_text().split("compute_environment")[0]
        launcher = written.content.get("deepspeed_config", {}).get("deepspeed_multinode_launcher")
        assert launcher == ("standard" if name.startswith("zero") else None)  # not pdsh, which is accelerate's default
        with pytest.raises(Refusal, match="is there already"):
            cli.run(["advise", *arguments, "--write", str(path)])
    assert file.read_strategy(tmp_path / "fsdp2_hybrid.yaml").mesh == [2, 8]
    (tmp_path / "ddp_tuned.yaml").unlink()  # its JSON would make of a plain ddp what it is not
    plain = ["--model", "gpt2-xl", "--gpu", "a100-80gb", "--gpus", "16", "--strategy", "ddp"]
    with pytest.raises(Refusal, match=r"ddp_tuned\.json: is there already"):
        cli.run(["advise", *plain, "--write", str(tmp_path / "ddp_tuned.yaml")])


def test_nothing_is_written_where_nothing_fits(tmp_path):
    path = tmp_path / "none.yaml"
    arguments = ["--model", "llama-2-70b", "--gpu", "l4", "--gpus", "1", "--global-batch-size", "1"]
    with pytest.raises(Refusal, match=r"nothing to write, since none fits; .* is nearest, short of"):
        cli.run(["advise", *arguments, "--write", str(path)])
    assert not path.exists()


def test_the_simplest_of_the_equally_fast_is_recommended(monkeypatch):
    options = planner.advise("gpt2", Asked("a100-80gb", 8)).options
    speeds = dict.fromkeys((option.strategy.name for option in options), 100.0)
    monkeypatch.setattr(choose, "_speed", lambda option: speeds[option.strategy.name])
    assert choose._recommend(options)[0].strategy.name == "ddp"
    speeds["ddp"] = 96.0  # more than EQUALLY_FAST behind
    assert choose._recommend(options)[0].strategy.name == "zero0"
    speeds["zero2_cpu_offload"] = 200.0
    chosen, reason = choose._recommend(options)
    assert chosen.strategy.name == "zero2_cpu_offload"
    assert reason.endswith("of those that fit it is predicted to be the fastest")


def test_the_largest_model_of_a_box(capsys):
    found = told(capsys, "--gpu", "a100-40gb", "--gpus", "8")
    sizes = {one["strategy"]: one["num_params"] for one in found["largest_models"]}
    assert sizes["ddp"] < sizes["zero1"] < sizes["zero2"] < sizes["zero3"] < sizes["zero3_nvme_offload"]
    # It fits, and the next of the family does not.
    advice = planner.largest_models(Asked("a100-40gb", 8, strategy="zero2"))
    shape = advice.shapes["zero2"]
    (chosen,), box = advice.asked.strategies(8), advice.asked.box()
    job = choose._smallest_job(advice.asked, "--model")
    for candidate, fits in ((shape, True), (choose.gpt(shape.hidden + 256, 2048), False)):
        assert on_box.fits(choose._peak(candidate, advice.asked, chosen, job, box), box) == fits
    assert "billions of parameters" in advice_text.text_of_largest(advice)


def test_the_fewest_gpus_of_a_model(capsys):
    found = told(capsys, "--gpu", "a100-40gb", "--model", "llama-2-7b")
    fewest = {one["strategy"]: one["num_gpus"] for one in found["fewest_gpus"]}
    assert fewest["ddp"] is None  # 16 bytes for each of 6.7e9 parameters, on however many
    assert fewest["zero3"] <= fewest["zero2"]
    lines = printed(capsys, "--gpu", "a100-40gb", "--model", "llama-2-7b").splitlines()
    assert [line.split() for line in lines if line.startswith(("ddp", "single", "zero0"))] == [
        ["single", "never"], ["zero0", "never"], ["ddp", "never"], ["ddp_tuned", "never"],
    ]  # fmt: skip
    assert lines[-1] == "never: it does not shard, so that every GPU holds all of the model."
    assert ["zero1", "more", "than", "1024"] in [line.split() for line in lines]
    assert "never" not in printed(capsys, "--gpu", "a100-40gb", "--model", "gpt2")


def note(text: str, begin: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"Note: {begin}")]


def test_a_short_step_has_no_upper_end(capsys):
    """The interval was never held against steps in which the host's launches of kernels may count."""
    arguments = ["--model", "gpt2", "--gpu", "a100-80gb", "--gpus", "8", "--strategy", "ddp"]
    arguments += ["--sequence-length", "512", "--micro-batch-size"]
    short, long = ([*arguments, size] for size in ("1", "64"))
    text = printed(capsys, *short, "--all")
    assert len(note(text, "short steps (all), below 4 ms of computing a layer and micro step")) == 1
    assert "-?)" in text
    assert "a factor of" not in text
    (option,) = told(capsys, *short)["strategies"]
    assert option["seconds_per_step_high"] is None is option["seconds_per_step_rests_on"]
    text = printed(capsys, *long, "--all")
    assert not note(text, "short steps")
    assert "a factor of" in text


def test_hybrid_sharding_is_within_nodes(capsys):
    nodes = ["--model", "llama-2-7b", "--gpu", "a100-80gb", "--gpus", "64", "--strategy"]
    text = printed(capsys, *nodes, "fsdp2_hybrid", "--all")
    (line,) = [line for line in text.splitlines() if "nodes of 8" in line]
    assert line.startswith("Assumed: ")
    assert line.endswith("; nodes of 8, 1600 Gbit/s; fsdp2_hybrid in groups of 8.")
    (by_node,) = told(capsys, *nodes, "fsdp2_hybrid")["strategies"]
    (by_two,) = told(capsys, *nodes, "fsdp2_hybrid", "--shard-group-size", "16")["strategies"]
    assert by_node["memory"]["optimizer_states"] == pytest.approx(2 * by_two["memory"]["optimizer_states"], rel=0.01)
    (in_groups,) = told(capsys, *nodes, "zero1", "--shard-group-size", "8")["strategies"]
    (over_all,) = told(capsys, *nodes, "zero1")["strategies"]
    assert in_groups["memory"]["optimizer_states"] == pytest.approx(
        8 * over_all["memory"]["optimizer_states"], rel=0.01
    )


@pytest.mark.parametrize("name", ["internlm-7b, 256 x a100-80gb, zero1 node", "tinyllama-1.1b, 16 x a100-40gb, hsdp"])
def test_published_groups_can_be_asked_for(name):
    """Of rows of InternEvo and TinyLlama: as many copies of the states as theirs."""
    published = next(case for case in measured_by_others.cases() if case.name.startswith(name))
    strategy = "zero1" if published.engine.kind == "deepspeed" else "fsdp2_hybrid"
    gpus = published.box.num_gpus
    size = published.engine.num_shards
    one = Asked(published.box.gpu.name, gpus, strategy=strategy, gpus_per_node=published.box.gpus_per_node)
    one = dataclasses.replace(one, shard_group_size=size if strategy == "zero1" else None)
    assert choose.engine_for(published.shape, one, *one.strategies(gpus), gpus).replicas == published.engine.replicas
