"""Adapters of vision-language models: the modules that PEFT adapts, and the memory of a traced step."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from typing import Any

import pytest
import samples

from zero_study.theory import adapters, computation, peaks, shapes
from zero_study.theory.adapters import Adapter
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes import ModelShape

pytest.importorskip("peft")
torch = pytest.importorskip("torch")

TOWERS = ".*(visual|vision_tower|multi_modal_projector).*"
ALL = ("all-linear",)
ATTENTION = ("q_proj", "v_proj")
# InternVL with few layers. The vocabulary is small, so that logits do not dominate the memory.
INTERNVL = {
    "model_type": "internvl",
    "architectures": ["InternVLForConditionalGeneration"],
    "image_token_id": 5,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096,
    },
    "vision_config": {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024},
}  # fmt: skip


@functools.cache
def internvl() -> ModelShape:
    from zero_study.dryrun import models

    return models.shape_of_class(*models.class_of(INTERNVL, "internvl"), "internvl", True, has_adapters=True)


def counted_by_peft(shape: ModelShape, adapter: Adapter, freezes: bool) -> tuple[int, int]:
    """Return the numbers of trainable and of all parameters of the model of transformers with adapters."""
    import peft

    from zero_study.dryrun import models

    assert shape.config is not None
    built, config = models.class_of(shape.config, shape.name)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = built(copy.deepcopy(config))
        settings = peft.LoraConfig(
            r=adapter.rank,
            target_modules="all-linear" if adapter.targets == ALL else list(adapter.targets or ()),
            exclude_modules=TOWERS if freezes else None,
        )
        counted = peft.get_peft_model(model, settings).get_nb_trainable_parameters()
    return counted


@pytest.mark.computes
@pytest.mark.parametrize(
    ("name", "targets", "freezes"),
    samples.each_once_with_slow_rest(
        name=["internvl", "llava-1.5-7b", "qwen2.5-vl-7b", "qwen3-vl-2b"],
        targets=[ALL, ATTENTION],
        freezes=[False, True],
    ),
)
def test_parameters_are_those_that_peft_counts(name: str, targets: tuple[str, ...], freezes: bool) -> None:
    shape = internvl() if name == "internvl" else shapes.KNOWN[name]
    adapter = Adapter(16, targets)
    adapted = adapters.with_adapter(shape.with_images(1, freezes), adapter)
    counted = counted_by_peft(shape, adapter, freezes)
    assert (adapters.num_trainable(adapted), adapters.num_total(adapted)) == counted


ENGINES = [Engine("torch", 0, 1, "bf16-autocast", 4), Engine("ddp", 0, 2, "bf16-autocast", 4)]


@pytest.mark.computes
@pytest.mark.parametrize(
    ("engine", "freezes", "is_checkpointed"),
    samples.each_once_with_slow_rest(engine=ENGINES, freezes=[False, True], is_checkpointed=[False, True]),
)
def test_a_step_with_images_is_traced_as_it_is_predicted(engine: Engine, freezes: bool, is_checkpointed: bool) -> None:
    from zero_study.dryrun.trace import trace

    shape = adapters.with_adapter(internvl().with_images(1, freezes), Adapter(8, ALL))
    job = StepConfig(2, 1024, activation_checkpointing=is_checkpointed)
    traced, predicted = trace(shape, engine, job), peaks.peak(shape, engine, job)
    assert traced.parts["optimizer_states"] == pytest.approx(8 * adapters.num_trainable(shape), rel=1e-3)
    assert predicted.parts["parameters"] == pytest.approx(traced.parts["parameters"], rel=1e-3)
    assert predicted.total == pytest.approx(traced.total, rel=0.08)


@pytest.mark.parametrize("name", ["llava-1.5-7b", "qwen2.5-vl-7b", "qwen3-vl-2b"])
def test_a_frozen_tower_saves_nothing_and_runs_forward(name: str) -> None:
    engine, job = ENGINES[0], StepConfig(1, 2048)
    tower, frozen = (
        adapters.with_adapter(shapes.KNOWN[name].with_images(1, freezes), Adapter(16, ALL)) for freezes in (False, True)
    )
    assert adapters.num_trainable(frozen) < adapters.num_trainable(tower)
    assert adapters.num_total(tower) - adapters.num_trainable(tower) == shapes.KNOWN[name].num_params
    assert adapters.num_total(frozen) - adapters.num_trainable(frozen) == shapes.KNOWN[name].num_params
    assert adapters.frozen_bytes(tower, engine) == adapters.frozen_bytes(frozen, engine)
    assert peaks.peak(frozen, engine, job).total < peaks.peak(tower, engine, job).total
    of_text = adapters.with_adapter(shapes.KNOWN[name].with_images(0, True), Adapter(16, ALL))
    flops = [computation.model_flops_per_sequence(shape, 2048) for shape in (of_text, frozen, tower)]
    assert flops == sorted(flops)
    assert flops[0] < flops[1] < flops[2]


def test_quantized_weights_include_those_of_the_tower() -> None:
    for freezes in (False, True):
        shape = shapes.KNOWN["qwen2.5-vl-7b"].with_images(1, freezes)
        quantized = dataclasses.replace(shape, adapter=Adapter(16, ALL, frozen="nf4"))
        whole = adapters.frozen_bytes(dataclasses.replace(shape, adapter=Adapter(16, ALL)), ENGINES[0])
        assert adapters.frozen_bytes(quantized, ENGINES[0]) < 0.45 * whole
