"""Test that traced figures equal a step of the model, that the planner predicts them, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import launching
import pytest
import samples
import torch
import traced_cases

from study.config import build_config
from study.training.memory import CpuPeak
from study.workloads import WORKLOADS
from study.workloads.sources import Splits
from zero_study import cli, files
from zero_study.dryrun import models
from zero_study.dryrun.trace import trace
from zero_study.errors import Refusal
from zero_study.planner import Request, advice_text, advise
from zero_study.planner.trace import trace_options
from zero_study.theory import adapters, hardware, measured_by_others, peaks, prediction, shapes
from zero_study.theory.adapters import Adapter
from zero_study.theory.engine import Engine, StepConfig

TINY = shapes.replace_parts(shapes.find("bert-tiny"), vocabulary=1000, positions=64)
DECODER = shapes.replace_parts(shapes.find("gpt2"), layers=2, hidden=64, heads=4, head_size=16, kv_heads=4,
                         feed_forward=256, vocabulary=1000, positions=64)  # fmt: skip
JOB = StepConfig(2, 64)
SINGLE = Engine("torch", 0, 1, "fp32", 4)
FSDP2 = Engine("fsdp", 3, 4, "bf16", 4, reduces_in_fp32=True)


@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "shape", [pytest.param(DECODER, id="decoder"), pytest.param(TINY, marks=pytest.mark.slow, id="encoder")]
)
def test_a_trace_is_what_a_real_step_allocates(shape, checkpointed):
    """The same model over real tensors of a CPU: the highest moment of forward and backward."""
    job = dataclasses.replace(JOB, activation_checkpointing=checkpointed)
    described = models.of_shape(shape, job.sequence_length)
    real, batch = described.build(job), described.batch(job)
    if "attention_mask" in batch:
        batch["attention_mask"][0, -1] = 0  # a mask without a zero is no mask
    described.loss(real, batch).backward()
    real.zero_grad()
    with CpuPeak() as before:
        pass
    with CpuPeak() as highest:
        described.loss(real, batch).backward()
    measured = highest.tensor_bytes - before.tensor_bytes
    traced = trace(shape, SINGLE, job)
    assert traced.moment == "forward and backward"
    counted = traced.total - 12 * shape.num_params  # parameters and moments
    # Two gradients of a block's input, which autograd adds in place, have their sum beside them in a trace.
    one_sum = 4 * job.tokens * shape.hidden
    assert -0.005 * measured <= counted - measured <= 1.1 * one_sum + 0.005 * measured


@pytest.mark.parametrize(
    ("engine", "share"),
    [
        pytest.param(SINGLE, 1.0, marks=pytest.mark.slow, id="single"),
        pytest.param(Engine("ddp", 0, 2, "bf16-autocast", 4), 1.0, id="ddp"),
        pytest.param(Engine("ddp", 0, 2, "fp32", 4, gradient_as_bucket_view=True), 1.0,
            marks=pytest.mark.slow, id="ddp_tuned"),
        pytest.param(FSDP2, 0.25, id="fsdp2"),
        pytest.param(
            dataclasses.replace(FSDP2, reshard_after_forward=False), 0.25,
            marks=pytest.mark.slow, id="fsdp2_no_reshard",
        ),
        pytest.param(dataclasses.replace(FSDP2, replicas=2), 0.5, marks=pytest.mark.slow, id="fsdp2_hybrid"),
    ],
)  # fmt: skip
def test_states_are_those_of_a_rank(engine, share):
    traced = trace(DECODER, engine, JOB)
    assert traced.parts["optimizer_states"] == pytest.approx(share * 8 * DECODER.num_params, rel=0.01)
    assert traced.parts["parameters"] >= share * 4 * DECODER.num_params
    assert traced.total == pytest.approx(peaks.peak(DECODER, engine, JOB).total, rel=0.05)
    if engine.kind == "ddp":  # its buckets, or the gradients that are views of them
        assert traced.parts["communication_buffers"] + traced.parts["gradients"] >= 4 * DECODER.num_params


def test_gradients_accumulate_beside_ddps_buckets():
    engine = Engine("ddp", 0, 2, "fp32", 4)
    once, often = (trace(DECODER, engine, StepConfig(2, 64, steps)) for steps in (1, 8))
    assert often.total - once.total == pytest.approx(4 * DECODER.num_params, rel=0.1)


@pytest.mark.parametrize(
    ("engine", "kind", "times"),
    [
        (Engine("ddp", 0, 2, "fp32", 4), "all_reduce", 1),
        pytest.param(FSDP2, "reduce_scatter", 5, marks=pytest.mark.slow),
        *(
            pytest.param(dataclasses.replace(FSDP2, syncs_each_micro_step=False), *expected, marks=pytest.mark.slow)
            for expected in (("reduce_scatter", 1), ("all_gather", 5))
        ),
    ],
)
def test_collectives_are_those_of_all_micro_steps(engine, kind, times):
    """Not all micro steps are traced: DDP reduces in the last one, FSDP2 in each of them or in the last one."""
    once, often = (
        {each["kind"]: each for each in trace(DECODER, engine, StepConfig(2, 64, steps)).collectives}[kind]
        for steps in (1, 5)
    )
    assert (often["count"], often["bytes"]) == (times * once["count"], times * once["bytes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "in_fp32", "num_bytes"),
    [("bf16", True, 4), ("fp32", False, 4), ("bf16", False, 2)],
)
def test_whole_gradients_accumulate_if_fsdp2_reduces_only_once(precision, in_fp32, num_bytes):
    """Their type is that of the reduction. Reduced in every micro step, they are shards in fp32."""
    engine = Engine("fsdp", 3, 4, precision, 4, reduces_in_fp32=in_fp32, syncs_each_micro_step=False)
    job = StepConfig(4, 64, 4)
    synced, deferred = (
        trace(DECODER, dataclasses.replace(engine, syncs_each_micro_step=syncs), job) for syncs in (True, False)
    )
    assert deferred.total - synced.total == pytest.approx((num_bytes - 1) * DECODER.num_params, rel=0.2)
    assert deferred.total == pytest.approx(peaks.peak(DECODER, engine, job).total, rel=0.07)
    once = dataclasses.replace(job, gradient_accumulation_steps=1)
    assert trace(DECODER, engine, once).total < deferred.total


def test_a_trace_as_json(capsys):
    """It was refused; the lines that say how the traces get on are on stderr."""
    words = "--model bert-tiny --gpu l4 --gpus 1 --strategy single --sequence-length 32 --micro-batch-size 1"
    assert cli.run(["advise", *words.split(), "--trace", "--json"]) == 0
    printed = capsys.readouterr()
    (option,) = json.loads(printed.out)["strategies"]
    assert option["traced"]["peak_bytes"] == sum(option["traced"]["parts"].values())
    assert option["traced"]["collectives_per_step"] == []
    assert "single, 1 x 8: traced" in printed.err


LORA = Adapter(4, ("c_attn",))


@pytest.mark.parametrize(
    ("engine", "kind"),
    samples.each_once_with_slow_rest(
        engine=[SINGLE, Engine("torch", 0, 1, "bf16-autocast", 4), Engine("ddp", 0, 2, "bf16-autocast", 4)],
        kind=["lora", "dora"],
    ),
)
def test_adapters_are_traced_as_they_are_predicted(engine, kind):
    pytest.importorskip("peft")
    shape = dataclasses.replace(DECODER, adapter=dataclasses.replace(LORA, kind=kind))
    traced, whole = trace(shape, engine, JOB), trace(DECODER, engine, JOB)
    assert traced.parts["optimizer_states"] == pytest.approx(8 * adapters.num_trainable(shape), rel=0.02)
    assert traced.total < 0.9 * whole.total
    assert traced.total == pytest.approx(peaks.peak(shape, engine, JOB).total, rel=0.05)


@pytest.mark.slow
@pytest.mark.launches
def test_advice_for_adapters_rests_on_traces_of_deepspeed_too(tmp_path):
    pytest.importorskip("peft")
    content = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(content))
    words = "--gpu l4 --gpus 2 --strategy zero2 --sequence-length 64 --micro-batch-size 1 --lora-rank 8"
    completed = launching.command_line(["advise", "--model", str(tmp_path), *words.split(), "--trace", "--json"])
    assert completed.returncode == 0, completed.stderr
    (option,) = json.loads(completed.stdout)["strategies"]
    shape = dataclasses.replace(shapes.from_config(content, "small"), adapter=Adapter(8, ("c_attn",)))
    sent = sum(each["bytes"] for each in option["traced"]["collectives_per_step"] if each["kind"] == "all_reduce")
    assert sent == pytest.approx(8 * 2 * adapters.num_trainable(shape), rel=0.01)  # in each of 8 micro steps
    assert option["traced"]["peak_bytes"] > 2 * shape.num_params  # frozen weights in bf16


def test_a_missing_peft_is_reported(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match="pip install peft"):
        trace(dataclasses.replace(DECODER, adapter=LORA), SINGLE, JOB)


def test_foreach_holds_one_copy_more_than_fused():
    """Where the optimizer's step is the highest moment: hardly a token."""
    job = StepConfig(1, 8, activation_checkpointing=True)
    engine = Engine("torch", 0, 1, "pure-bf16", 2)
    fused, foreach, loop = (
        trace(DECODER, dataclasses.replace(engine, optimizer_kernel=kernel), job)
        for kernel in ("fused", "foreach", "loop")
    )
    held = 8 * DECODER.num_params  # 2 parameters, 2 gradients, 4 moments
    assert foreach.moment == "optimizer step"
    assert foreach.total == pytest.approx(held + 2 * DECODER.num_params, rel=0.01)
    assert held * 0.99 < fused.total < foreach.total
    assert fused.total <= loop.total < foreach.total


@pytest.mark.parametrize("name", ["gpt-neo-125m", "gpt-j-6b", "llama-2-7b", "qwen2-0.5b", "gemma2-2b"])
def test_known_models_are_built_as_they_are_counted(name):
    shape = shapes.find(name)
    described = models.of_shape(shape, JOB.sequence_length)
    assert described.num_params == shape.num_params
    with torch.device("meta"):
        built = described.build(JOB)
    assert set(described.blocks(built)) <= set(built._no_split_modules)


SETTINGS = {  # that a shape has, by the names of each workload's configuration
    "bert-imdb": ("hidden_size", "num_hidden_layers", "intermediate_size", "hidden_act", "num_labels", "vocab_size"),
    "gpt-wikitext": ("n_embd", "n_layer", "n_head", "n_positions", "activation_function", "vocab_size"),
}


@pytest.mark.parametrize(
    ("workload", "size"), [("bert-imdb", "base"), ("gpt-wikitext", "124m"), ("gpt-wikitext", "6b")]
)
def test_a_workloads_model_is_the_one_that_is_trained(workload, size):
    point = traced_cases.point(workload, size, "single", 1, "fp32", False)
    _, traced = models.class_of(point.shape.config, point.shape.name)
    config = build_config(workload=workload, size=size, data="hub", dropout=0.0)
    splits = Splits(train=None, evaluation=None, vocab_size=point.shape.vocabulary, pad_token_id=0, description={})
    trained = WORKLOADS[workload].model_config(config, splits)
    assert type(traced) is type(trained)
    for name in SETTINGS[workload]:
        assert getattr(traced, name) == getattr(trained, name)


@pytest.mark.parametrize(
    ("shape", "engine", "job", "said"),
    [
        (DECODER, dataclasses.replace(SINGLE, kind="deepspeed"), JOB, "ZeRO-0 in fp32 cannot be traced"),
        (DECODER, dataclasses.replace(FSDP2, offload_param="cpu"), JOB, "offload cannot be traced"),
        (DECODER, dataclasses.replace(SINGLE, precision="bf16"), JOB, "Use bf16-autocast"),
        (DECODER, SINGLE, dataclasses.replace(JOB, dropout=True), "dropout is not traced"),
        (DECODER, SINGLE, dataclasses.replace(JOB, kernels="fused"), "fused kernels cannot be traced"),
        (dataclasses.replace(DECODER, head="none"), SINGLE, JOB, "has no loss"),
        (dataclasses.replace(DECODER, experts=4), SINGLE, JOB, "mixture of experts"),
        (dataclasses.replace(TINY, head="tokens"), FSDP2, JOB, "has a shared bias"),
        (dataclasses.replace(DECODER, adapter=Adapter(4, frozen="nf4")), SINGLE, JOB, "in 4 bits"),
        (dataclasses.replace(DECODER, adapter=Adapter(4)), FSDP2, JOB, "not traced under FSDP2"),
        (dataclasses.replace(DECODER, adapter=Adapter(4, has_dropout=True)), SINGLE, JOB, "dropout is not traced"),
        (
            dataclasses.replace(DECODER, adapter=Adapter(4)),
            dataclasses.replace(SINGLE, precision="pure-bf16"),
            JOB,
            "Use bf16-autocast",
        ),
    ],
)
def test_what_cannot_be_traced_is_refused(shape, engine, job, said):
    with pytest.raises(Refusal, match=said):
        trace(shape, engine, job)
    assert not torch.distributed.is_initialized()


def trace_torch_only(shape, engine, job):
    """DeepSpeed's rank is a fork of a process in which no backward pass has run (dry_run_cases.py)."""
    if engine.kind == "deepspeed":
        raise Refusal("DeepSpeed's engine is not traced here")
    return trace(shape, engine, job)


@pytest.mark.slow
def test_advice_rests_on_traces(capsys):
    requested = Request("l4", 2, micro_batch_size=8, sequence_length=64, kernels="transformers")
    advice = advise("bert-tiny", requested, partial(trace_options, trace_torch_only))
    traced = {option.strategy.name: option for option in advice.options if option.basis == "traced"}
    assert set(traced) == {"ddp", "ddp_tuned", "fsdp2", "fsdp2_no_reshard"}
    ddp = traced["ddp"].prediction
    assert traced["ddp"].traced_bytes == trace(advice.shape, ddp.engine, ddp.job).total
    printed = capsys.readouterr().out
    assert "DeepSpeed's engine is not traced" in printed
    assert "; sends " in printed
    assert " all_reduce (0.0" in printed
    written = {option["strategy"]: option for option in advice_text.content(advice)["strategies"]}
    assert written["ddp"]["traced"]["peak_bytes"] == traced["ddp"].traced_bytes
    assert written["ddp"]["traced"]["reserved_bytes"] >= traced["ddp"].traced_bytes
    assert [each["kind"] for each in written["fsdp2"]["traced"]["collectives_per_step"]] == [
        "all_gather", "reduce_scatter",
    ]  # fmt: skip
    assert written["zero1"]["traced"] is None


# ---------------------------------------------------------------- the committed grid

PUBLISHED = files.ROOT / "reports" / "dry_run" / "published.json"
MARGIN = 0.03  # of the traced peak; fixed when 144 cases were traced, and all were within
# Of the 240 that were traced after that, those that are not: the planner's error is at most 0.08. The planner lacks
# a moment of theirs: most are FSDP2's on several ranks with checkpointed blocks in fp32, predicted too low.
MISSED = {
    *(f"bert-imdb-base-fsdp2-{n}x-fp32-checkpointed" for n in (4, 8)),
    "bert-imdb-large-ddp-2x-bf16", "bert-imdb-large-single-1x-bf16",
    "gpt-wikitext-124m-fsdp2-1x-bf16-checkpointed", "gpt-wikitext-355m-fsdp2_hybrid-4x-fp32-checkpointed",
    *(f"gpt-wikitext-{m}m-fsdp2-{n}x-fp32-checkpointed" for m, n in ((355, 2), (355, 4), (355, 8), (774, 4), (774, 8))),
}  # fmt: skip


def test_the_planner_predicts_what_was_traced():
    points = [(traced_cases.point_of(each), each.traced) for each in traced_cases.read(traced_cases.TRACES).traces]
    errors = {point.name: abs(point.predicted.total / traced.total - 1) for point, traced in points}
    assert len(errors) == 384
    assert max(errors.values()) <= 0.08
    assert {name for name, error in errors.items() if error > MARGIN} == MISSED  # one that is mended leaves the list


def test_a_traced_peak_has_the_margin_of_a_predicted_one():
    """Of published peaks of tensors, with all settings, a trace falls as short as a prediction: by next to nothing."""
    cases = {case.name: case for case in measured_by_others.cases("memory")}
    # The traces were recorded when names did not state the kernel of the loss.
    cases |= {name.replace(", eager loss", ""): case for name, case in cases.items()}
    short = []
    for _, name, grade, quantity, published, predicted, traced, _ in files.load(PUBLISHED, "traced rows")["rows"]:
        box = cases[name].box
        fits = prediction.needed_bytes(traced) <= hardware.usable_memory_bytes(box.gpu, box.num_gpus)
        assert fits == bool(published), name  # zero: it ran out of memory
        if (grade, quantity) == ("A", "peak_allocated_bytes"):
            short.append((published / predicted - 1, published / traced - 1))
    of_predicted, of_traced = map(max, zip(*short, strict=True))
    assert of_traced < 0.002
    assert round(prediction.ALLOCATOR_SLACK - (of_predicted - of_traced), 2) == prediction.ALLOCATOR_SLACK


@pytest.mark.slow
def test_the_trace_of_a_published_case_is_the_recorded_one():
    cases = {case.name: case for case in measured_by_others.cases("memory")}
    mistral = cases["mistral-7b, 1 x a100-80gb, single, pure-bf16, 4096 tokens x 4 x 1, checkpointing, eager loss"]
    result = trace(mistral.shape, mistral.engine, mistral.job)
    assert (result.moment, result.total) == ("optimizer step", pytest.approx(72_434_837_504, rel=0.001))
