"""Test the defaults of the programs that train, and what a request makes of them."""

from __future__ import annotations

import dataclasses
import json
from typing import get_args

import pytest
from refusing import refusal

from study import run_in_theory
from study.config import build_config
from zero_study import cli
from zero_study.errors import Refusal
from zero_study.planner import Request, assumptions, choose
from zero_study.strategy import file
from zero_study.theory import peaks, prediction, shapes, stacks
from zero_study.theory.engine import Engine, OptimizerKernel, StepConfig
from zero_study.theory.stacks import DEFAULT_STACK, STACKS, Stack, StackName

LLAMA = shapes.find("llama-3-8b")
SETTINGS = {field.name for field in dataclasses.fields(Stack)} - {"name", "version", "runs", "sources"}


def engine(name: str, **request: object) -> Engine:
    requested = Request("a100-80gb", 8, **request)
    return choose.engine_for(LLAMA, requested, file.read_by_name(name), 8)


@pytest.mark.parametrize("name", get_args(StackName))
def test_every_setting_of_a_stack_has_a_source(name):
    assert set(STACKS[name].sources) == SETTINGS


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("value: 16-bit", "value: 16bit", ", axolotl: weights='16bit': input should be 'fp32' or '16-bit'"),
        ("value: true", "value: 1", ", torchtitan: sync_each_batch=1: input should be a valid boolean"),
        (', source: "sets none"', "", ", study: allocator needs a value and a source"),
        ('source: "sets none"', 'source: ""', ", study: sources.allocator='': string should have at least 1 character"),
        ("    runs: [DEEPSPEED]\n", "", ", deepspeed: runs is missing"),
        ('    runs: ["NO"', "    runs: [NO", ", accelerate: runs.0=False: input should be 'NO'"),
        ("    weights: {value: 16", "    weight: {value: 16", ", axolotl: unknown key 'weight'"),
        ("  study:\n", "  mine:\n", ": `stacks` must have the entries accelerate, trainer, trl"),
        ("  study:\n", "  trl:\n", ": cannot be read as YAML (line "),
    ],
)
def test_a_wrong_stack_is_refused_with_its_name(old, new, says, tmp_path):
    text, path = stacks.FILE.read_text(), tmp_path / "stacks.yaml"
    path.write_text(text.replace(old, new, 1))
    assert path.read_text() != text
    with pytest.raises(Refusal) as refused:
        stacks.read_stacks(path)
    assert str(refused.value).startswith(f"{path}{says}")


def test_the_default_is_accelerate_with_the_modules_of_transformers():
    requested = Request("a100-80gb", 8)
    assert (requested.stack, DEFAULT_STACK) == ("accelerate", "accelerate")
    assert (requested.kernels, requested.attention, requested.job().loss, requested.optimizer_kernel) == (
        "transformers", "sdpa", "eager", "fused",
    )  # fmt: skip
    assert requested.activation_checkpointing is None
    fsdp2 = engine("fsdp2")
    assert (fsdp2.syncs_each_micro_step, fsdp2.reduces_in_fp32) == (False, False)
    assert engine("zero1").accumulation_bytes == 2
    assert engine("zero1").reduce_bucket_size > 0  # DeepSpeed's usual optimizer, and not BF16_Optimizer


def test_the_stack_of_this_project_is_what_its_trainer_runs():
    config = build_config(workload="gpt-wikitext", size="124m", precision="bf16", dropout=0)
    for name in file.names():
        chosen = file.read_by_name(name)
        if not chosen.zero_stage and chosen.distributed_type != "FSDP":
            continue
        shape, trained = run_in_theory.of_run(config, chosen, 8)
        requested = Request("a100-80gb", 8, stack="study", precision="bf16")
        advised = choose.engine_for(shape, requested, chosen, 8)
        assert dataclasses.replace(advised, replicas=trained.replicas) == trained
    job = Request("a100-80gb", 8, stack="study").job()
    trained_job = run_in_theory.job_of(config, 8, "gpu")
    assert (job.kernels, job.attention, job.loss) == (trained_job.kernels, trained_job.attention, trained_job.loss)


def test_an_option_overrides_the_stack():
    assert engine("fsdp2", sync_each_batch=True, reduce_dtype="fp32").syncs_each_micro_step
    assert engine("fsdp2", sync_each_batch=True, reduce_dtype="fp32").reduces_in_fp32
    assert engine("zero2", grad_accum_dtype="fp32").accumulation_bytes == 4
    assert engine("fsdp2", stack="study", sync_each_batch=False).syncs_each_micro_step is False
    assert engine("fsdp2", optimizer_kernel="foreach").optimizer_kernel == "foreach"
    # Under DeepSpeed, these programs pass torch's optimizer, which updates a rank's fp32 elements all at once.
    for name, elements in (("zero2", LLAMA.num_params / 8), ("zero3", 1e9)):
        peak = {
            kernel: peaks.peak(
                LLAMA, engine(name, stack="trainer", optimizer_kernel=kernel), StepConfig(1, 128)
            ).totals[-1]
            for kernel in get_args(OptimizerKernel)
        }
        assert peak["foreach"] - peak["fused"] == pytest.approx(4 * elements, rel=0.02)
        assert peak["loop"] - peak["fused"] == pytest.approx(8 * elements, rel=0.02)
    for name in ("deepspeed", "study"):
        with pytest.raises(Refusal, match="has a fused optimizer"):
            engine("zero2", stack=name, optimizer_kernel="foreach", strategy="zero2")
    assert engine("zero2", stack="study", optimizer_kernel="foreach").optimizer_kernel == "fused"
    assert Request("l4", stack="trl").activation_checkpointing == "full"
    assert Request("l4", stack="trl", activation_checkpointing="none").activation_checkpointing == "none"
    # The loss has the kind of the requested kernels, unless it is requested too.
    assert Request("l4", stack="trl").job().loss == "chunked"
    assert Request("l4", kernels="fused").job().loss == "fused"
    # A compiled eager loss keeps 8 bytes per logit. A loss in chunks stays one.
    assert Request("l4", compile=True).job().loss == "upcast"
    assert Request("l4", compile=True, kernels="fused").job().loss == "fused"
    assert Request("l4", compile=True, stack="torchtitan").job().loss == "chunked"
    assert Request("l4", compile=True, stack="torchtitan", kernels="transformers").job().loss == "upcast"
    assert Request("l4", kernels="fused", loss_kernel="eager").job().loss == "eager"


def test_weights_of_ddp_are_those_that_the_stack_loads():
    assert engine("ddp").precision == "bf16-autocast"
    assert engine("ddp", stack="axolotl").precision == "pure-bf16"
    assert {engine("zero2", stack=name).precision for name in ("accelerate", "axolotl")} == {"bf16"}
    assert engine("ddp", stack="axolotl", precision="fp32").precision == "fp32"


def test_a_stack_leaves_out_what_it_cannot_run(capsys):
    requested = Request("a100-80gb", 8, stack="torchtitan")
    assert {chosen.distributed_type for chosen in requested.strategies(8)} == {"MULTI_GPU", "FSDP"}
    assert requested.left_out(8)["zero3"] == "torchtitan has no ZeRO"
    assert {chosen.distributed_type for chosen in Request("l4", 1, stack="deepspeed").strategies(1)} == {"DEEPSPEED"}
    words = ["advise", "--model", "gpt2", "--gpu", "l4", "--gpus", "8", "--stack", "torchtitan"]
    assert refusal(cli.run, [*words, "--strategy", "zero3"]).startswith("--strategy zero3: torchtitan has no ZeRO")
    assert cli.run([*words, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any(" left out: " in note and note.endswith("torchtitan has no ZeRO") for note in notes)


def test_one_gpu_is_trained_without_an_engine_or_with_offload():
    names = [chosen.name for chosen in Request("l4", 1).strategies(1)]
    assert names[0] == "single"
    assert all("offload" in name for name in names[1:])
    assert Request("l4", 1).left_out(1)["zero2"] == "on one GPU there is nothing to shard or to average"
    assert [chosen.name for chosen in Request("l4", 1, strategy="zero2").strategies(1)] == ["zero2"]


@pytest.mark.parametrize("name", get_args(StackName))
def test_assumed_settings_are_described(name):
    described = dict(assumptions.described(Request("a100-80gb", 8, stack=name)))
    assert all(described.values())
    assert ("gradients under FSDP2" in described) == (name != "deepspeed")
    assert ("gradients under DeepSpeed" in described) == (name != "torchtitan")
    assert not any("requested" in value for value in described.values())
    compiled = dict(assumptions.described(Request("a100-80gb", 8, stack=name, compile=True)))
    assert not any("requested" in value for value in compiled.values())
    request = Request("a100-80gb", 8, stack=name, attention="eager", optimizer_kernel="loop")
    changed = dict(assumptions.described(request))
    assert {key for key in described if described[key] != changed[key]} == {"attention", "optimizer"}
    assert all("requested" in changed[key] for key in ("attention", "optimizer"))


def test_gradients_in_fp32_are_described_as_such():
    for precision, kind in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16-autocast", "fp32")):
        described = dict(assumptions.described(Request("a100-80gb", 8, precision=precision)))
        assert described["gradients under DeepSpeed"] == f"accumulated in {kind}"


def test_prices_are_of_all_gpus():
    requested = Request("a100-80gb", 8)
    box = requested.box()
    predicted = prediction.predict(LLAMA, engine("zero3"), requested.job(), box)
    assert predicted.dollars_per_hour == 8 * box.gpu.price_per_hour
    free = dataclasses.replace(box, gpu=dataclasses.replace(box.gpu, price_per_hour=None))
    unpriced = dataclasses.replace(predicted, box=free)
    assert unpriced.dollars_per_hour is None


def test_an_unknown_stack_is_refused():
    assert refusal(Request, "l4", stack="lightning").startswith(
        "stack='lightning': this value is unknown. Use one of accelerate,"
    )
