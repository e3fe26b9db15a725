"""The changes that the planner names if memory is missing: each works, and they come in the order of an expert."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from study import planner
from study.planner import advice_text, choose, reasons, remedies
from study.planner.choose import Advice
from study.planner.request import Request

QUESTIONS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "long on 8 H100": ("qwen3-8b", "h100-sxm", 8, {"sequence_length": 32768}),
    "8k on 4 A100": ("qwen2.5-14b", "a100-80gb", 4, {"sequence_length": 8192}),
    "128k on 8 H100": ("llama-3.1-8b", "h100-sxm", 8, {"sequence_length": 131072}),
    "128k on 64 H100": ("llama-3.1-8b", "h100-sxm", 64, {"sequence_length": 131072}),
    "one 4090": ("llama-3.1-8b", "rtx-4090", 1, {}),
    "two 4090": ("llama-3.1-8b", "rtx-4090", 2, {}),
    "13B on one 3090": ("llama-2-13b", "rtx-3090", 1, {}),
    "70B QLoRA on two 3090": ("llama-3.1-70b", "rtx-3090", 2, {"lora_rank": 16, "load_in_4bit": True}),
    "micro batch too large": ("llama-3.1-8b", "a100-80gb", 8, {"sequence_length": 8192, "micro_batch_size": 32}),
    "no checkpointing": ("llama-3.1-8b", "a100-80gb", 8, {
        "sequence_length": 8192, "activation_checkpointing": "none", "loss_kernel": "chunked", "micro_batch_size": 2,
    }),
    "tight": ("qwen3-32b", "h100-sxm", 8, {}),
}  # fmt: skip


@functools.cache
def ask(name: str) -> Advice:
    model, gpu, num_gpus, settings = QUESTIONS[name]
    return planner.advise(model, Request(gpu, num_gpus, **settings))


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_change_works_when_it_is_asked_for(name: str) -> None:
    model, gpu, num_gpus, settings = QUESTIONS[name]
    for remedy in ask(name).remedies:
        given = {"gpu": gpu, "num_gpus": num_gpus, **settings, **remedy.changes}
        again = planner.advise(model, Request(**given)).recommended
        assert again is not None
        assert again.fits
        if not name.startswith("128k"):
            assert again.has_enough_free
            assert not again.offloads
        assert again.needed_bytes == pytest.approx(remedy.option.needed_bytes, rel=1e-6)
        assert again.seconds == pytest.approx(remedy.option.seconds, rel=1e-6)


@pytest.mark.parametrize("name", ["long on 8 H100", "8k on 4 A100", "tight"])
def test_the_chunked_loss_comes_before_offload(name: str) -> None:
    first = ask(name).remedies[0]
    assert (first.kind, dict(first.changes)) == ("same", {"loss_kernel": "chunked"})
    assert reasons.answer(ask(name)).startswith("Use --loss-kernel chunked: ")


@pytest.mark.parametrize("name", ["128k on 8 H100", "128k on 64 H100"])
def test_more_gpus_are_not_named_where_they_do_not_help(name: str) -> None:
    advice = ask(name)
    assert advice.recommended is None
    assert remedies.cause(advice.ranked[0])[0] == "logits and loss"
    assert "gpus" not in {remedy.kind for remedy in advice.remedies}


@pytest.mark.parametrize("name", ["128k on 8 H100", "128k on 64 H100"])
def test_gpus_share_sequences_that_fit_on_no_number_of_gpus(name: str) -> None:
    advice = ask(name)
    shared = {next(iter(remedy.changes)): remedy for remedy in advice.remedies if remedy.kind == "sequence"}
    assert shared.keys() == {"context_parallel", "sequence_parallel"}
    assert advice.remedies[0].kind == "sequence"
    assert reasons.answer(advice).split(". ")[2].startswith("Use --context-parallel 2 ")
    for remedy in shared.values():
        assert remedy.option.has_enough_free
        assert remedy.option.is_rough
        assert remedy.option.prediction.job.sequence_ranks == 2


def test_one_gpu_shares_no_sequence() -> None:
    advice = planner.advise("llama-3.1-8b", Request("h100-sxm", 1, sequence_length=131072))
    assert "sequence" not in {remedy.kind for remedy in advice.remedies}
    assert "--context-parallel" in (reasons._whole_sequences(advice) or "")


def test_adapters_are_named_where_all_weights_need_offload() -> None:
    def of_adapters(name: str) -> dict[str, Any]:
        return next(dict(remedy.changes) for remedy in ask(name).remedies if remedy.kind == "adapters")

    assert "load_in_4bit" not in of_adapters("one 4090")
    assert of_adapters("13B on one 3090")["load_in_4bit"]


def test_offload_is_tried_with_an_assumed_host_and_says_so() -> None:
    option = ask("two 4090").recommended
    assert option is not None
    assert option.strategy.name == "fsdp2_cpu_offload"
    assert "of host memory, and 256 GiB are assumed" in reasons.answer(ask("two 4090"))
    own = planner.advise("llama-3.1-8b", Request("rtx-4090", 2, host_memory=64.0))
    assert all(option.prediction.lacking == "host memory" for option in own.options if option.offloads)
    assert own.recommended is None


def test_a_smaller_micro_batch_and_checkpointing_are_named_if_the_request_fixes_them() -> None:
    assert "micro_batch_size" in ask("micro batch too large").remedies[0].changes
    assert dict(ask("no checkpointing").remedies[0].changes) == {"activation_checkpointing": "full"}


def test_nothing_is_named_if_there_is_enough_memory() -> None:
    assert planner.advise("gpt2", Request("a100-80gb", 8)).remedies == []
    short = planner.advise("bert-base-uncased", Request("a100-80gb", 4, sequence_length=256))
    assert short.remedies == []  # although DDP is predicted to be slower than FSDP2


def test_json_and_text_have_the_changes() -> None:
    advice = ask("two 4090")
    content = advice_text.content(advice)["remedies"]
    assert [each["options"] for each in content] == [remedy.flags for remedy in advice.remedies]
    for remedy in advice.remedies:
        assert remedy.flags in " ".join(advice_text.text(advice).split())


# ---------------------------------------------------------------- what is recommended


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100-sxm"])
@pytest.mark.parametrize("num_gpus", [2, 4, 8])
@pytest.mark.parametrize("model", ["bert-base-uncased", "gpt2"])
def test_small_models_are_trained_by_the_simplest_strategy(model: str, num_gpus: int, gpu: str) -> None:
    """FSDP2 casts its weights to bf16, so that it was compared with DDP in another precision, and was recommended."""
    option = planner.advise(model, Request(gpu, num_gpus)).recommended
    assert option is not None
    assert option.strategy.name == "ddp"


GRID = [
    (model, gpu, num_gpus)
    for model in ("llama-3.2-1b", "llama-3.1-8b", "qwen3-32b", "mistral-7b", "qwen2.5-14b")
    for gpu in ("a100-80gb", "h100-sxm", "rtx-4090")
    for num_gpus in (1, 4, 8)
]


def test_little_memory_is_left_only_if_everything_else_is_far_slower() -> None:
    for model, gpu, num_gpus in GRID:
        shape, request, _ = choose.find_model(model, Request(gpu, num_gpus))
        options, _ = choose.options_of(shape, request.box(), request)
        chosen = choose.recommend(options)
        if chosen is None or chosen.free_share >= choose.VERY_LITTLE_FREE:
            continue
        for other in options:
            if other.fits and other.free_share > chosen.free_share:
                assert other.seconds > choose.FAR_SLOWER * chosen.seconds, (model, gpu, num_gpus, other.strategy.name)
