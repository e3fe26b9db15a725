"""Test that the counts of a traced model are those of its modules, and that theory derives the right memory of them."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import samples
import transformers
from test_activations import CLASSES, backward_bytes

from zero_study.dryrun import build_model, count, models
from zero_study.errors import Refusal
from zero_study.planner import Request, choose
from zero_study.theory import computation, peaks, shapes
from zero_study.theory.communication import collectives
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes.counts import Polynomial, from_content, to_content

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 160, "vocab_size": 300, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


@cache
def counted_phi3() -> shapes.ModelShape:
    return counted("Phi3ForCausalLM", **SMALL)


def counted(class_name: str, attention: list[str] | None = None, **settings: object) -> shapes.ModelShape:
    built = getattr(transformers, class_name)
    counts = count.count(built, built.config_class(**settings), attention or ["sdpa"])
    return shapes.shape_from_counts(class_name, counts, 4096)


@cache
def formulas_and_trace(name: str) -> tuple[shapes.ModelShape, shapes.ModelShape]:
    """The shape of a model that has formulas, and the one that a trace of its class gives."""
    formulas = shapes.find(name)
    counts = count.count(*models.class_of(formulas.config, name))
    return formulas, shapes.shape_from_counts(name, counts, formulas.positions)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert-base-uncased", marks=pytest.mark.slow)])
def test_counts_are_those_of_the_formulas(name):
    formulas, traced = formulas_and_trace(name)
    assert sorted(traced.parameters.matrices) == sorted(formulas.parameters.matrices)
    assert sorted(traced.parameters.vectors) == sorted(formulas.parameters.vectors)
    assert traced.block_params == formulas.block_params
    length = 512
    assert computation.model_flops_per_sequence(traced, length) == computation.model_flops_per_sequence(
        formulas, length
    )
    for precision in CLASSES.values():
        engine = Engine("ddp", 0, 8, precision, 4)
        assert computation.cast_bytes(traced, engine) == computation.cast_bytes(formulas, engine)
        for attention in ("sdpa", "eager"):
            job = StepConfig(4, length, attention=attention)
            result, expected = (computation.block_bytes(shape, engine, job) for shape in (traced, formulas))
            assert result == pytest.approx(expected, rel=1e-3)
    engine = Engine("ddp", 0, 8, "bf16", 4)
    fused = StepConfig(4, length, kernels="fused")
    result, expected = (computation.block_bytes(shape, engine, fused) for shape in (traced, formulas))
    assert result == pytest.approx(expected, rel=0.003)


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased"])
@pytest.mark.parametrize("stage", [2, 3])
def test_collectives_of_a_traced_model_are_those_of_the_formulas(name, stage):
    formulas, traced = formulas_and_trace(name)
    engine = Engine(
        "deepspeed", stage, 4, "bf16", 2, reduce_bucket_size=10_000_000, prefetch_bucket_size=1_000_000,
        persistence_threshold=10_000, max_live_parameters=30_000_000, max_reuse_distance=30_000_000,
    )  # fmt: skip
    result, expected = (
        {each.kind: (each.count, each.bytes) for each in collectives(engine, shape, StepConfig(2, 128))}
        for shape in (traced, formulas)
    )
    assert result.keys() == expected.keys()
    for kind, (number, num_bytes) in expected.items():
        assert result[kind][1] == pytest.approx(num_bytes, rel=1e-3), kind
        assert result[kind][0] == pytest.approx(number, abs=2, rel=0.05), kind


@pytest.mark.parametrize(
    ("model_type", "how"),
    samples.with_slow_rest([("phi3", "fp32")], model_type=["phi3", "olmo2"], how=list(CLASSES)),
)
def test_the_highest_moment_of_a_backward_pass_is_the_one_that_was_measured(model_type, how):
    """Of one process that takes no optimizer step, for architectures of which theory has no formulas."""
    settings = {**SMALL, "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 1024}
    settings["num_key_value_heads"] = 4
    config = transformers.AutoConfig.for_model(model_type, use_cache=False, **settings)
    build_model.prepare(config)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).train()
    built = type(model)
    measured = backward_bytes(model, how)
    shape = shapes.shape_from_counts(model_type, count.count(built, config, ["sdpa"]), 4096)
    engine = Engine("torch", 0, 1, CLASSES[how], 2 if how == "half" else 4)
    peak = peaks.peak(shape, engine, StepConfig(4, 128, device="cpu"))
    predicted = sum(peak.parts[part] for part in ("gradients", "activations", "logits", "temporary_buffers"))
    assert predicted == pytest.approx(measured, rel=0.03)


ARCHITECTURES = {  # class -> blocks
    "Phi3ForCausalLM": 3,
    "Olmo2ForCausalLM": 3,
    "GraniteForCausalLM": 3,
    "RobertaForMaskedLM": 3,
}


@pytest.mark.parametrize("class_name", samples.first_fast(list(ARCHITECTURES)))
def test_parameters_are_those_of_transformers(class_name):
    settings = {
        key: value for key, value in SMALL.items() if key != "num_key_value_heads" or "Roberta" not in class_name
    }
    shape = counted_phi3() if class_name == "Phi3ForCausalLM" else counted(class_name, **settings)
    config = getattr(transformers, class_name).config_class(**settings)
    assert shape.num_params == getattr(transformers, class_name)(config).num_parameters()
    assert shape.layers == ARCHITECTURES[class_name]
    assert shape.active_params == shape.num_params


def test_a_mixture_of_experts_has_total_and_active_parameters():
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    shape = counted("Qwen3MoeForCausalLM", **SMALL, **moe)
    expert = 3 * 64 * 32
    assert shape.num_params - shape.active_params == 3 * 6 * expert
    assert shape.experts


def test_an_encoder_and_a_decoder_are_counted_together():
    sizes = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128, "num_layers": 1, "num_decoder_layers": 2}
    shape = counted("T5ForConditionalGeneration", vocab_size=300, **sizes)
    built = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=300, **sizes))
    assert shape.num_params == built.num_parameters()
    assert shape.layers == 3
    assert len(shape.counts.kinds) > 1  # the first block of each half has the position bias


def test_an_image_is_one_sequence():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    shape = counted("ViTForImageClassification", image_size=64, patch_size=16, **sizes)
    engine = Engine("ddp", 0, 2, "bf16", 4)
    one, four = (computation.block_bytes(shape, engine, StepConfig(batch, 1)) for batch in (1, 4))
    assert 0 < one == pytest.approx(four / 4)


@pytest.mark.slow
def test_blocks_that_share_their_parameters_are_executed_more_often_than_they_exist():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.AlbertConfig(vocab_size=300, embedding_size=32, **sizes)
    shape = counted("AlbertForMaskedLM", vocab_size=300, embedding_size=32, **sizes)
    assert shape.num_params == transformers.AlbertForMaskedLM(config).num_parameters()
    assert (len(shape.counts.executed), sum(shape.counts.copies)) == (2, 1)


@pytest.mark.slow
def test_blocks_of_several_classes_are_found():
    """Of which transformers names only one as a module that must not be split."""
    shape = counted("SwiftFormerForImageClassification", image_size=32, depths=[1, 1, 1, 2], embed_dims=[8, 8, 16, 16])
    assert shape.layers > 1
    assert shape.labels == 2  # the number of logits of one image


def test_a_model_whose_blocks_do_not_run_as_modules_is_refused():
    sizes = {"hidden_size": 64, "embedding_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(Refusal, match="no repeated blocks"):
        counted("SqueezeBertForMaskedLM", vocab_size=300, intermediate_size=128, **sizes)


@pytest.mark.parametrize(
    "name",
    [
        *("albert-base-v2", "mixtral-8x7b", "t5-small"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mamba-130m", "vit-base", "whisper-tiny")),
    ],
)
def test_every_strategy_is_predicted_for_every_kind_of_model(name):
    shape, length, _ = shapes.find_for_length(name)
    request = Request("h100", 8, sequence_length=length)
    options, left_out = choose.options_of(shape, request.box(), request)
    assert len(options) > 10
    assert not any("error" in reason.lower() for reason in left_out.values())
    for option in options:
        assert 0 < option.prediction.peak.total < float("inf"), option.strategy.name
        assert 0 < option.seconds < float("inf"), option.strategy.name


def test_counts_survive_a_file():
    counts = counted_phi3().counts
    assert from_content(to_content(counts)) == from_content(to_content(from_content(to_content(counts))))
    assert from_content(to_content(counts)).num_params == counts.num_params


def test_a_polynomial_goes_through_the_values():
    lengths = (512, 1024, 1536)
    assert count.fit([7.0 * n for n in lengths], lengths) == Polynomial(per_token=pytest.approx(7.0))
    squared = count.fit([3.0 * n + 2.0 * n * n for n in lengths], lengths)
    assert (squared.per_token, squared.per_pair) == (pytest.approx(3.0), pytest.approx(2.0))
    assert count.fit([5.0, 5.0, 5.0], lengths) == Polynomial(constant=pytest.approx(5.0))


def test_a_refusal_names_what_cannot_be_traced():
    with pytest.raises(Refusal, match=r"TimmWrapperForImageClassification.*timm"):
        counted("TimmWrapperForImageClassification")
