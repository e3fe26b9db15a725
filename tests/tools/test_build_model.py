"""Test that counts and dry runs build and feed the same models of transformers, of texts, images and sound."""

from __future__ import annotations

import pytest
import torch
import transformers

from zero_study.dryrun import build_model, count, models
from zero_study.dryrun.trace import trace
from zero_study.errors import Refusal
from zero_study.theory import computation, shapes
from zero_study.theory.engine import Engine, StepConfig

SINGLE = Engine("torch", 0, 1, "fp32", 4)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SMALL = {
    "ViTForImageClassification": {**SIZES, "image_size": 32, "patch_size": 16},
    "Wav2Vec2ForSequenceClassification": {
        **SIZES, "conv_dim": [16] * 3, "conv_kernel": [10, 3, 3], "conv_stride": [5, 2, 2], "vocab_size": 32,
        "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("class_name", SMALL)
def test_an_image_and_a_sound_are_counted_and_traced(class_name):
    """A dry run fed tokens to such models and failed with the text of an AttributeError."""
    built = getattr(transformers, class_name)
    config = built.config_class(**SMALL[class_name])
    shape = shapes.shape_from_counts(class_name, count.count(built, config, ["sdpa"]), 1, config={
        **config.to_diff_dict(), "model_type": config.model_type, "architectures": [class_name],
    })  # fmt: skip
    described = models.of_shape(shape, 1)
    assert described.num_params == shape.num_params
    (block,) = described.blocks(described.build(StepConfig(2, 1)))
    assert "Layer" in block
    one, four = (trace(shape, SINGLE, StepConfig(batch, 1)).total for batch in (1, 4))
    states = 16 * shape.num_params
    assert (
        12 * shape.num_params < one < four < states + 5 * 4 * computation.block_bytes(shape, SINGLE, StepConfig(4, 1))
    )


@pytest.mark.parametrize("class_name", SMALL)
def test_inputs_are_those_that_the_model_reads(class_name):
    built = getattr(transformers, class_name)
    config = built.config_class(**SMALL[class_name])
    build_model.prepare(config)
    model, has_fused = build_model.build(built, config)
    inputs = build_model.make_inputs(model, 2, 8, torch.float32)
    labels = build_model.make_labels(model, 2, 8)
    assert has_fused
    assert "input_ids" not in inputs
    assert labels["labels"].shape == (2,)
    assert model(**inputs, **labels).loss.isfinite()


def test_only_padded_texts_have_a_mask():
    masks = {}
    for class_name, settings in {
        "BertForMaskedLM": SIZES, "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 1, "n_head": 4},
    }.items():  # fmt: skip
        built = getattr(transformers, class_name)
        with torch.device("meta"):
            model, _ = build_model.build(built, built.config_class(**settings))
        masks[class_name] = "attention_mask" in build_model.make_inputs(model, 1, 8, torch.float32)
    assert masks == {"BertForMaskedLM": True, "GPT2LMHeadModel": False}


def test_what_transformers_cannot_build_is_refused():
    with pytest.raises(Refusal, match="BertModel: transformers cannot build it"):
        build_model.build(transformers.BertModel, transformers.BertConfig(hidden_size=10, num_attention_heads=3))
