"""Models that read images: the unit of their answers, and vision-language models with a frozen vision tower."""

import json

import pytest

from zero_study import planner
from zero_study.errors import Refusal
from zero_study.planner import advice_text, launch, machines, machines_text
from zero_study.planner.request import Request
from zero_study.theory import adapters, computation, peaks, shapes
from zero_study.theory.engine import StepConfig

VISION_LANGUAGE = ("llava-1.5-7b", "qwen2.5-vl-7b")


def of(model: str, num_gpus: int = 4, **settings):
    return planner.advise(model, Request("a100-80gb", num_gpus, **settings))


# ---------------------------------------------------------------- models of images only


@pytest.mark.parametrize("model", ["vit-base", "convnext-tiny", "dinov2-small"])
def test_a_model_of_images_is_answered_in_images(model):
    advice = of(model, examples=1_000_000, epochs=2.0)
    for text in (advice_text.text(advice), advice_text.text_of_all(advice)):
        assert "token" not in text
        assert "$/1e6" in text
        assert "The whole training of 2,000,000 images" in " ".join(text.split())
    content = advice_text.content(advice)
    for strategy in content["strategies"]:
        assert strategy["images_per_second_per_gpu"] == strategy["tokens_per_second_per_gpu"]
        assert strategy["dollars_per_million_images"] == pytest.approx(strategy["dollars_per_billion_tokens"] / 1000)
        assert strategy["whole_training"]["images"] == 2_000_000
    assert not any("dropout" in setting or "sequences" in setting for setting in content["launch"]["settings"])


def test_numbers_of_gpus_and_machines_are_answered_in_images():
    request = Request("a100-80gb", examples=1000)
    numbers = machines.numbers_of_gpus("vit-base", request)
    compared = machines.compare("vit-base", request, ["a100-80gb", "h100-sxm"], 2, budget=1e6)
    for text in (machines_text.text_of_numbers(numbers, everything=True), machines_text.text_of_comparison(compared)):
        assert "images per second" in text
        assert "token" not in text
    for machine in machines_text.content_of_numbers(numbers)["machines"]:
        assert machine["images_per_second"] == machine["tokens_per_second"]
        assert machine["whole_training"]["images"] == 1000


@pytest.mark.parametrize(
    ("settings", "option"),
    [({"tokens": 1e9}, "--tokens"), ({"sequence_length": 197}, "--sequence-length"), ({"stack": "trl"}, "--stack trl"),
     ({"images": 1}, "--images 1"), ({"freeze_vision_tower": True}, "--freeze-vision-tower")],
)  # fmt: skip
def test_options_of_texts_are_refused_for_images(settings, option):
    with pytest.raises(Refusal, match=option):
        of("vit-base", **settings)


def test_a_text_model_has_no_keys_of_images():
    assert "images" not in json.dumps(advice_text.content(of("gpt2"))["strategies"])


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize(("model", "rate"), [("bert-base", "hidden_dropout_prob 0.1"), ("gpt2", "resid_pdrop 0.1"),
                                             ("t5-base", "dropout_rate 0.1")])  # fmt: skip
def test_dropout_that_a_model_has_by_default_is_an_assumption(model, rate):
    text = advice_text.text(of(model))
    assumed = " ".join(text.partition("Assumed:")[2].split())
    assert f"dropout: not counted, although {model} has it by default ({rate}" in assumed
    assert "dropout" not in text.partition("Assumed:")[0]


@pytest.mark.parametrize("model", ["vit-large", "llama-3.2-1b", "whisper-tiny", "mpt-1b"])
def test_nothing_is_said_of_dropout_where_the_rates_are_0(model):
    assert "dropout" not in advice_text.text(of(model))


@pytest.mark.parametrize("model", ["vit-large", "whisper-large-v3", "t5-base", "bert-base", "xlm-roberta-base"])
def test_dropout_is_counted(model):
    def activations(dropout: bool) -> float:
        return of(model, micro_batch_size=8, strategy="ddp", dropout=dropout).options[0].prediction.peak.total

    assert activations(True) > activations(False)


# ---------------------------------------------------------------- texts with images


def shape_of(model: str, images: int, freezes: bool):
    return shapes.KNOWN[model].with_images(images, freezes)


@pytest.mark.parametrize("model", VISION_LANGUAGE)
def test_without_images_the_counts_are_those_of_the_text(model):
    text, none = shapes.KNOWN[model], shape_of(model, 0, False)
    assert none.num_params == text.num_params
    assert none.layers == text.layers
    job = StepConfig(2, 1024)
    engine = of(model, strategy="zero2").options[0].prediction.engine
    assert peaks.peak(none, engine, job).total == pytest.approx(peaks.peak(text, engine, job).total, rel=1e-3)


@pytest.mark.parametrize("model", VISION_LANGUAGE)
def test_each_image_adds_the_same_work(model):
    flops = [computation.model_flops_per_sequence(shape_of(model, images, False), 4096) for images in range(3)]
    assert flops[2] - flops[1] == pytest.approx(flops[1] - flops[0], rel=1e-6)
    assert flops[1] > flops[0]


# FLOPs of one text of 1,024 tokens with one image, forward and backward, by torch.utils.flop_counter in transformers
# 5.23, with a trained and a frozen vision tower. The counter leaves out the CPU's kernel of attention.
COUNTED = {
    "llava-1.5-7b": (41_685_806_481_408, 41_012_329_709_568),
    "qwen2.5-vl-7b": (54_674_182_864_896, 47_317_494_644_736),
}


@pytest.mark.parametrize(
    ("model", "freezes"),
    [("llava-1.5-7b", False), ("llava-1.5-7b", True), ("qwen2.5-vl-7b", False), ("qwen2.5-vl-7b", True)],
)
def test_flops_agree_with_those_of_torch(model, freezes):
    shape = shape_of(model, 1, freezes)

    def attention(counts) -> float:
        return sum(counts.executed.count(at) * kind.attention.of(1, 1024) for at, kind in enumerate(counts.kinds))

    own = computation.model_flops_per_sequence(shape, 1024) - 3 * attention(shape.counts)
    own -= attention(shape.counts.frozen) if freezes else 0
    assert own == pytest.approx(COUNTED[model][freezes], rel=1e-3)


@pytest.mark.parametrize("model", VISION_LANGUAGE)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_frozen_tower_has_no_gradients_and_no_states(model, strategy):
    job = StepConfig(1, 1024)
    engine = of(model, strategy=strategy).options[0].prediction.engine
    trained, frozen = (shape_of(model, 1, freezes) for freezes in (False, True))
    assert adapters.num_total(frozen) == trained.num_params
    assert trained.num_params - frozen.num_params > 3e8
    states = [peaks.states(engine, shape, "stepping").device for shape in (trained, frozen)]
    ratio = frozen.num_params / trained.num_params
    for part in ("gradients", "optimizer_states"):
        assert states[1][part] == pytest.approx(ratio * states[0][part], rel=0.05)
    assert states[1]["parameters"] == pytest.approx(states[0]["parameters"], rel=0.02)
    saved = [computation.block_bytes(shape, engine, job) * shape.layers for shape in (trained, frozen)]
    assert saved[1] < saved[0]


def test_a_frozen_tower_is_in_the_answer_and_the_launch():
    advice = of("llava-1.5-7b", 8, images=1, freeze_vision_tower=True, sequence_length=2048)
    text = advice_text.text(advice)
    assert "6,759,919,616 trainable parameters of 7,063,427,072" in " ".join(text.split())
    assert "of which 1 image takes 576" in " ".join(text.split())
    assert any("vision_tower.requires_grad_(False)" in setting for setting in launch.launch(advice).settings)
    content = advice_text.content(advice)
    assert content["num_params"] == content["num_total_params"] == 7_063_427_072
    assert content["num_trainable_params"] == 6_759_919_616
    assert content["num_image_tokens"] == 576


@pytest.mark.parametrize("stack", ["accelerate", "trainer", "deepspeed"])
@pytest.mark.parametrize(("model", "frozen"), [("llava-1.5-7b", "vision_tower"), ("qwen2.5-vl-7b", "visual")])
def test_images_and_the_frozen_tower_are_in_every_launch(model, frozen, stack):
    usual, changed = (
        launch.launch(of(model, 8, stack=stack, strategy="zero3", **settings)).settings
        for settings in ({}, {"images": 1, "freeze_vision_tower": True})
    )
    assert not any("image" in setting or "requires_grad" in setting for setting in usual)
    assert any(setting.startswith("1 image of ") for setting in changed)
    assert any(f"model.model.{frozen}.requires_grad_(False)" in setting for setting in changed)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("gpt2", {"images": 1}, "cannot read images"),
        ("gpt2", {"freeze_vision_tower": True}, "cannot read images"),
        ("gemma3-4b", {"images": 1}, "images cannot be predicted for gemma3-4b"),
        ("gemma3-4b", {"lora_rank": 8}, "gemma3-4b: the names of its modules are unknown"),
        ("llava-1.5-7b", {"images": 2}, "become 1,152 tokens, but a sequence has only 1,024"),
        ("llava-1.5-7b", {"images": 1, "stack": "trl"}, "--stack trl"),
    ],
)
def test_images_that_are_not_counted_are_refused(model, settings, message):
    with pytest.raises(Refusal, match=message):
        of(model, **settings)


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-2B-Instruct", "llava-1.5-7b"])
def test_adapters_of_vision_language_models_are_answered(model):
    settings = {"lora_rank": 16, "images": 1, "sequence_length": 2048}
    tower, frozen, whole = (
        of(model, 1, **settings | more) for more in ({}, {"freeze_vision_tower": True}, {"lora_rank": None})
    )
    assert tower.recommended is not None
    assert tower.recommended.free_bytes > whole.options[0].free_bytes
    assert "LoRA of rank 16 on " in advice_text.text(frozen)
    assert adapters.num_trainable(frozen.shape) < adapters.num_trainable(tower.shape)
    calls = [" ".join(launch.launch(advice).settings) for advice in (tower, frozen)]
    assert all('target_modules="all-linear"' in call for call in calls)
    assert ["exclude_modules" in call for call in calls] == [False, True]
    assert not any("requires_grad_" in call for call in calls)


def test_a_prediction_of_texts_only_says_so():
    assert "none, because all sequences are text" in " ".join(advice_text.text(of("qwen3-vl-8b", 8)).split())
