"""Test that a practitioner can trust the answers of `advise`: 20 questions, and each rule of the choice."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import samples
import yaml
from refusing import refusal

from zero_study import cli, planner
from zero_study.errors import Refusal
from zero_study.planner import Request, advice_text, choose, launch, reasons
from zero_study.strategy import file

# Model, GPU, number of GPUs and further settings of a request.
QUESTIONS = [
    ("qwen2.5-1.5b", "a100-80gb", 1, {}),
    ("qwen2.5-1.5b", "a100-40gb", 8, {"sequence_length": 2048}),
    ("qwen2.5-1.5b", "l4", 4, {"sequence_length": 4096}),
    ("gpt2-xl", "a10g", 8, {"global_batch_size": 64}),
    ("mpt-3b", "a100-80gb", 4, {"sequence_length": 8192}),
    ("llama-2-7b", "a100-40gb", 8, {}),
    ("llama-2-7b", "a100-80gb", 2, {"sequence_length": 4096}),
    ("llama-2-7b", "l4", 8, {"sequence_length": 2048}),
    ("mistral-7b", "h100-sxm", 8, {"sequence_length": 4096}),
    ("mistral-7b", "h100-sxm", 8, {"sequence_length": 4096, "micro_batch_size": 4}),
    ("llama-3.1-8b", "a100-80gb", 1, {}),
    ("llama-3.1-8b", "a100-80gb", 8, {}),
    ("llama-3.1-8b", "a100-80gb", 8, {"global_batch_size": 32}),
    ("llama-3.1-8b", "h100-sxm", 64, {"sequence_length": 8192, "global_batch_size": 512}),
    ("llama-3.1-8b", "h100-sxm", 4, {"micro_batch_size": 8, "sequence_length": 8192}),
    ("llama-2-13b", "a100-80gb", 8, {"sequence_length": 4096}),
    ("llama-2-13b", "h100-sxm", 16, {"sequence_length": 2048, "global_batch_size": 1024}),
    ("llama-2-70b", "h100-sxm", 16, {"sequence_length": 4096}),
    ("llama-2-70b", "a100-80gb", 32, {"sequence_length": 2048}),
    ("llama-3.1-70b", "h100-sxm", 64, {"sequence_length": 8192}),
]


# A few of each kind of answer: on one GPU and on many, small and large, with and without offload.
FAST = QUESTIONS[::3]


def ask(question) -> choose.Advice:
    model, gpu, num_gpus, settings = question
    return _answered(model, gpu, num_gpus, tuple(settings.items()))


@cache
def _answered(model: str, gpu: str, num_gpus: int, settings: tuple) -> choose.Advice:
    return planner.advise(model, Request(gpu, num_gpus, **dict(settings)))


def each_question(test):
    """Give the test every question; those that are not among the fast tests are marked `slow`."""
    questions = [pytest.param(each, marks=[] if each in FAST else pytest.mark.slow) for each in QUESTIONS]
    return pytest.mark.parametrize("question", questions, ids=lambda one: "-".join(map(str, one[:3])))(test)


def every_split(advice: choose.Advice) -> list[choose.StrategyPrediction]:
    """Every strategy at every split of the batch that the request allows, with and without checkpointing."""
    return [
        choose.option_of(advice.shape, option.strategy, split)
        for option in advice.options
        for split in choose.splits(advice.shape, advice.request, option.prediction.engine, advice.box)
    ]


@each_question
def test_no_answer_takes_itself_back(question):
    """What is recommended is not full while something else leaves more and is within the error of the prediction."""
    advice = ask(question)
    chosen = advice.recommended
    candidates = every_split(advice)
    if chosen is None:
        assert not any(option.fits for option in candidates)
        return
    assert chosen.fits
    if not chosen.has_enough_free:
        fastest = min((option for option in candidates if option.fits), key=lambda option: option.seconds)
        assert not [o for o in candidates if o.has_enough_free and o.seconds <= fastest.slowest_seconds]
    if chosen.offloads:  # a smaller micro batch comes before offload
        assert not [o for o in candidates if o.has_enough_free and not o.offloads and o.seconds <= chosen.seconds]
    answer = reasons.answer(advice)
    for other in advice.options:  # no strategy with offload is named as a remedy
        if other.offloads and not chosen.offloads:
            assert other.strategy.name not in answer
    assert 2 <= len([part for part in answer.replace("...", "").split(". ") if part]) <= 6
    text = advice_text.text(advice)
    assert max(map(len, text.splitlines())) <= 80
    assert "Careful" not in text


@each_question
def test_all_rows_have_the_same_global_batch(question):
    advice = ask(question)
    sequences = advice.request.batch()[0]
    jobs = [option.prediction.job for option in advice.options]
    assert {job.micro_batch_size * job.gradient_accumulation_steps for job in jobs} == {sequences}
    text = " ".join(advice_text.text(advice).split())
    assert f"global batch {sequences * advice.box.num_gpus}" in text


def test_a_micro_batch_alone_does_not_change_the_global_batch():
    assert Request("l4", 8, micro_batch_size=4).batch() == (8, 4, 2)
    assert Request("l4", 8).batch() == (8, None, None)
    other = Request("l4", 8, micro_batch_size=5)
    assert (other.batch(), other.has_other_default_batch) == ((5, 5, 1), True)
    assert Request("l4", 8, micro_batch_size=16).batch() == (16, 16, 1)
    text = advice_text.text(planner.advise("gpt2", other))
    assert "global batch 40 (5 per GPU, because" in " ".join(text.split())


def test_the_memory_that_a_host_lacks_is_shared_by_its_gpus():
    request = Request("a100-80gb", 8, host_memory=64, strategy="zero3_cpu_offload")
    advice = planner.advise("llama-2-7b", request)
    (option,) = advice.options
    lacking = float(option.host_needed_bytes) - 64 * 2**30
    assert lacking > 0
    assert option.free_bytes > 0  # of the GPUs
    assert option.missing_bytes == pytest.approx(lacking / 8)


def test_rows_are_sorted_by_speed_and_then_by_missing_memory():
    advice = ask(("llama-3.1-8b", "a100-80gb", 8, {"global_batch_size": 32}))
    ranked = advice.ranked
    assert ranked[0] is advice.recommended
    fitting = [option.seconds for option in ranked[1:] if option.fits]
    missing = [option.missing_bytes for option in ranked if not option.fits]
    assert fitting == sorted(fitting)
    assert missing == sorted(missing)
    assert len(missing) > 1
    assert [option.fits for option in ranked] == sorted((option.fits for option in ranked), reverse=True)


def test_other_precisions_have_a_mark():
    text = advice_text.text(ask(("llama-3.1-8b", "a100-80gb", 8, {})))
    lines = [line for line in text.splitlines() if line.split()[1:2] == ["*"]]
    assert [line.split()[0] for line in lines] == ["ddp"]
    assert (
        "*: these strategies train fp32 parameters under bf16 autocast. The other strategies train bf16 parameters"
        in " ".join(text.split())
    )
    axolotl = advice_text.text(ask(("llama-3.1-8b", "a100-80gb", 8, {"stack": "axolotl"})))
    assert "*: these strategies train everything in bf16, without fp32 master weights" in " ".join(axolotl.split())
    same = advice_text.text(ask(("qwen2.5-1.5b", "a100-80gb", 8, {"precision": "bf16-autocast"})))
    assert "*: these strategies train fp32" not in same


@pytest.mark.parametrize("gpu", ["a100-40gb", "h100-sxm"])
@pytest.mark.parametrize("model", ["bert-large-uncased", "gpt2", "qwen2.5-1.5b"])
def test_one_gpu_needs_no_engine(model, gpu):
    advice = planner.advise(model, Request(gpu, 1))
    assert advice.recommended.strategy.name == "single"
    phrases = reasons.why_not(advice)
    assert "nothing to" in phrases["ddp"]
    assert "single" not in phrases


def test_offload_is_the_answer_on_one_gpu_only_if_nothing_else_fits():
    advice = planner.advise("llama-2-7b", Request("a100-40gb", 1))
    assert advice.recommended.offloads
    assert not any(option.fits and not option.offloads for option in advice.options)
    assert {remedy.kind for remedy in advice.remedies} >= {"adapters", "gpus"}


def test_a_smaller_micro_batch_is_offered_before_offload_and_more_gpus():
    """The requested micro batch does not fit without offload, a smaller one does."""
    advice = planner.advise("llama-3.1-8b", Request("a100-80gb", 8, sequence_length=8192, micro_batch_size=32))
    assert advice.recommended is None
    assert re.search(r"comes nearest: .*\. Use .*\(.*--micro-batch-size \d+ ?.*\): ", reasons.answer(advice))
    # The requested micro batch fills the GPU: the answer names a smaller one, what it leaves free and what it costs.
    settings = {"micro_batch_size": 9, "activation_checkpointing": "none", "kernels": "fused"}
    fixed = Request("a100-80gb", 8, strategy="zero2_tuned", **settings)
    full = planner.advise("llama-3.1-8b", fixed)
    assert full.recommended.fits
    assert not full.recommended.has_enough_free
    answer = reasons.answer(full)
    assert answer.startswith(f"Use activation checkpointing ({full.remedies[0].flags}): zero2_tuned ")
    assert "then fits" not in answer  # it fits already
    assert re.search(r"Without the change, zero2_tuned .* and (takes \d+ % (longer|less time)|is as fast)\.$", answer)


def test_every_expected_strategy_has_a_phrase():
    for question in FAST:
        advice = ask(question)
        phrases = reasons.why_not(advice)
        chosen = advice.recommended and advice.recommended.strategy.name
        assert {"ddp", "zero1", "zero2", "zero3", "fsdp2"} <= {*phrases, chosen}
        assert any("offload" in name for name in [*phrases, chosen or ""])
        assert all(phrases.values())
        for name, phrase in phrases.items():
            option = next((o for o in advice.options if o.strategy.name == name), None)
            if option is not None and not option.fits:
                assert phrase.startswith("lacks ")


MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
    "max_position_embeddings": 32768, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip


def test_a_mixture_of_experts_is_called_rough_and_has_no_upper_end(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    advice = planner.advise(str(tmp_path / "config.json"), Request("h100-sxm", 64))
    assert all(option.is_rough for option in advice.options)
    content = advice_text.content(advice)
    assert all(option["seconds_per_step_high"] is None for option in content["strategies"])
    assert "rough" in reasons.reason(advice)


def test_little_free_memory_is_marked_in_a_search_for_gpus():
    fewest = planner.fewest_gpus("llama-3.1-8b", Request("a100-80gb"))
    lines = {line.split()[0]: line for line in advice_text.text_of_fewest(fewest).splitlines() if line.strip()}
    shares = {name: result[2] for name, result in fewest.fewest.items() if result is not None}
    assert any(share < choose.ENOUGH_FREE for share in shares.values())
    for name, share in shares.items():
        assert lines[name].endswith("tight") == (share < choose.ENOUGH_FREE)


# ---------------------------------------------------------------- how to start it

STACKS = ["accelerate", "trainer", "trl", "axolotl", "study"]


@pytest.mark.parametrize(
    ("stack", "strategy"),
    samples.each_once_with_slow_rest(
        stack=STACKS, strategy=["ddp", "ddp_tuned", "zero2", "zero3_tuned", "zero3_cpu_offload", "fsdp2"]
    ),
)
def test_each_stack_has_a_command_and_its_files(stack, strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = Request("a100-80gb", 8, global_batch_size=64, micro_batch_size=2, strategy=strategy, stack=stack)
    advice = planner.advise("qwen2.5-1.5b", request)
    start = launch.launch(advice)
    words = shlex.split(start.command.replace("\\\n", " "))
    assert words[0] == (stack if stack in ("axolotl", "trl") else "accelerate")
    assert next(iter(start.files)) in words
    written = launch.write(advice, tmp_path / "mine.yaml")
    content = yaml.safe_load(written[0].read_text())
    if stack == "axolotl":
        assert (content["micro_batch_size"], content["gradient_accumulation_steps"]) == (2, 4)
        assert ("deepspeed" in content) == strategy.startswith("zero")
        assert ("fsdp_config" in content) == strategy.startswith("fsdp2")
        return
    read = file.read_strategy(written[0])
    shipped = file.read_by_name(strategy)
    assert (read.num_processes, read.zero_stage) == (8, shipped.zero_stage)
    assert read.ddp_json == shipped.ddp_json
    zero, shipped_zero = ((one.deepspeed_json or {}).get("zero_optimization") for one in (read, shipped))
    assert zero == shipped_zero
    if shipped.deepspeed_json is None:
        assert content["mixed_precision"] == "bf16"
    else:
        assert "mixed_precision" not in content  # accelerate refuses it beside a JSON
    output = " ".join([start.command, *start.settings])
    assert {"accelerate": "gradient_accumulation_steps=4", "study": "--global-batch-size 64"}.get(
        stack, "--gradient_accumulation_steps 4"
    ) in output


def stated_precision(paths: list[Path], stack: str) -> set[str]:
    """Return the precision that written files state: a class of precision, or "no" if products are in fp32."""
    contents = [yaml.safe_load(path.read_text()) for path in paths]
    if stack == "axolotl":
        keys = {"bf16": "bf16", "fp16": "fp16", "bfloat16": "pure-bf16", "tf32": "tf32"}
        stated = {name for key, name in keys.items() if contents[0].get(key)} or {"no"}
    else:
        stated = {content["mixed_precision"] for content in contents if "mixed_precision" in content}
    for content in contents[1:] if stack != "deepspeed" else contents:
        if "zero_optimization" in content:
            of_json = {key for key in ("bf16", "fp16") if content.get(key, {}).get("enabled")}
            autocast = content.get("torch_autocast", {}).get("dtype")
            stated = of_json or (
                {{"bfloat16": "bf16", "float16": "fp16"}[autocast] + "-autocast"} if autocast else {"no"}
            )
    return stated


@pytest.mark.parametrize(
    ("stack", "precision"),
    samples.each_once_with_slow_rest(
        stack=[*STACKS, "deepspeed"],
        precision=[None, "fp32", "tf32", "bf16", "fp16", "bf16-autocast", "fp16-autocast"],
    ),
)
def test_written_files_state_the_precision_of_the_prediction(stack, precision, tmp_path, monkeypatch):
    """Launched with a script that sets no precision, they would otherwise train in fp32."""
    monkeypatch.chdir(tmp_path)
    if (stack, precision) == ("study", "tf32"):
        assert refusal(Request("h100-sxm", 8, stack=stack, precision=precision).strategies, 8)
        return
    for strategy in [chosen.name for chosen in Request("h100-sxm", 8, stack=stack, precision=precision).strategies(8)]:
        request = Request("h100-sxm", 8, strategy=strategy, stack=stack, precision=precision)
        advice = planner.advise("gpt2", request)
        engine = advice.recommended.prediction.engine
        paths = launch.write(advice, tmp_path / (f"{strategy}.json" if stack == "deepspeed" else f"{strategy}.yaml"))
        expected = "no" if engine.precision in ("fp32", "tf32") else engine.precision
        # DDP and FSDP2 have one way to train in 16 bits each, so the type is enough.
        if engine.kind != "deepspeed":
            expected = expected.removesuffix("-autocast")
        if stack == "study" and engine.precision.endswith("-autocast") and engine.kind == "deepspeed":
            assert f"--precision {engine.precision}" in paths[0].read_text()
            continue
        if stack == "axolotl" and engine.precision == "tf32" and engine.kind != "deepspeed":
            expected = "tf32"
        assert stated_precision(paths, stack) == {expected}, (strategy, engine.precision)
        # Our trainer sets its own autocast and its own folder on a disk.
        is_ours = "autocast" not in expected and ("nvme" not in strategy or stack == "study")
        if is_ours and stack not in ("axolotl", "deepspeed"):
            assert file.read_strategy(paths[0]).mixed_precision == (None if expected == "no" else expected)


def test_deepspeed_and_torchtitan_start_what_they_can_run(tmp_path):
    def of(strategy: str, stack: str) -> launch.Launch:
        settings = {"micro_batch_size": 2, "activation_checkpointing": "full"}
        request = Request("h100-sxm", 16, strategy=strategy, stack=stack, **settings)
        return launch.launch(planner.advise("llama-3.1-8b", request))

    start = of("zero3", "deepspeed")
    content = json.loads(next(iter(start.files.values())))
    assert content["zero_optimization"]["stage"] == 3
    assert (content["train_micro_batch_size_per_gpu"], content["gradient_accumulation_steps"]) == (2, 4)
    assert content["bf16"] == {"enabled": True}
    assert "auto" not in json.dumps(content)
    assert "auto" not in json.dumps(json.loads(next(iter(of("zero3_tuned", "deepspeed").files.values()))))
    words = shlex.split(of("fsdp2_hybrid", "torchtitan").command.replace("\\\n", " "))
    assert words[words.index("--training.global_batch_size") + 1] == "128"
    assert words[words.index("--parallelism.data_parallel_replicate_degree") + 1] == "2"
    assert words[words.index("--parallelism.data_parallel_shard_degree") + 1] == "8"
    assert words[-1] == "activation-checkpoint:full"
    nvme = json.loads(next(iter(of("zero3_nvme_offload", "deepspeed").files.values())))["zero_optimization"]
    assert nvme["offload_param"]["nvme_path"] == nvme["offload_optimizer"]["nvme_path"]
    assert nvme["offload_param"]["buffer_size"] > 0
    for strategy, stack in (("zero3", "torchtitan"), ("fsdp2", "deepspeed")):
        with pytest.raises(Refusal, match=f"--strategy {strategy}: {stack} has no "):
            of(strategy, stack)


def test_json_has_units_reasons_and_the_launch(capsys):
    assert cli.run(["advise", "--model", "llama-3.1-8b", "--gpu", "a100-80gb", "--gpus", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {*result["why_not"], result["recommended"]} >= {"ddp", "zero1"}
    assert isinstance(result["assumed"], dict)
    assert result["launch"]["command"].startswith("accelerate launch --config_file ")
    assert result["dollars_per_hour"] == pytest.approx(8 * result["price_per_gpu_hour"])
    one = result["strategies"][0]
    numbers = {key for key, value in one.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
    without_unit = {"gradient_accumulation_steps"}  # a count
    assert numbers - set(result["units"]) <= without_unit
    assert one["free_share"] == pytest.approx(one["free_bytes_per_gpu"] / result["usable_bytes_per_gpu"], abs=1e-6)


def test_a_choice_is_not_changed_by_the_order_of_strategies():
    advice = ask(QUESTIONS[11])
    assert choose.recommend(advice.options[::-1]) is advice.recommended
    assert dataclasses.replace(advice, options=advice.options[::-1]).ranked == advice.ranked
