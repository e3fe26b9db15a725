"""The changes that the planner names if memory is missing: each works, and they come in the order of an expert."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from zero_study import planner
from zero_study.planner import advice_text, choose, launch, reasons, remedies
from zero_study.planner.choose import Advice
from zero_study.planner.request import Request
from zero_study.theory import shapes

QUESTIONS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "long on 8 H100": ("qwen3-8b", "h100-sxm", 8, {"sequence_length": 32768}),
    "8k on 4 A100": ("qwen2.5-14b", "a100-80gb", 4, {"sequence_length": 8192}),
    "128k on 8 H100": ("llama-3.1-8b", "h100-sxm", 8, {"sequence_length": 131072}),
    "128k on 64 H100": ("llama-3.1-8b", "h100-sxm", 64, {"sequence_length": 131072}),
    "one 4090": ("llama-3.1-8b", "rtx-4090", 1, {}),
    "two 4090": ("llama-3.1-8b", "rtx-4090", 2, {}),
    "two 4090 in a known host": ("llama-3.1-8b", "rtx-4090", 2, {"host_memory": 256.0}),
    "7B on one A100": ("mistral-7b", "a100-80gb", 1, {"sequence_length": 4096, "stack": "trainer"}),
    "70B on 16 H100": ("llama-3.1-70b", "h100-sxm", 16, {"sequence_length": 4096}),
    "13B on one 3090": ("llama-2-13b", "rtx-3090", 1, {}),
    "70B QLoRA on two 3090": ("llama-3.1-70b", "rtx-3090", 2, {"lora_rank": 16, "load_in_4bit": True}),
    "micro batch too large": ("llama-3.1-8b", "a100-80gb", 8, {"sequence_length": 8192, "micro_batch_size": 32}),
    "no checkpointing": ("llama-3.1-8b", "a100-80gb", 8, {
        "sequence_length": 8192, "activation_checkpointing": "none", "loss_kernel": "chunked", "micro_batch_size": 2,
    }),
    "tight": ("qwen3-8b", "h100-sxm", 2, {"sequence_length": 2048}),
    "70B at 32k on 8 H100": ("llama-3.1-70b", "h100-sxm", 8, {"sequence_length": 32768}),
    "32B at 32k on 4 A100": ("qwen3-32b", "a100-80gb", 4, {"sequence_length": 32768}),
    "72B at 32k on 8 A100": ("qwen2.5-72b", "a100-80gb", 8, {"sequence_length": 32768}),
    "32B at 64k on 8 H100": ("qwen3-32b", "h100-sxm", 8, {"sequence_length": 65536}),
    "70B at 128k on 16 H100": ("llama-3.1-70b", "h100-sxm", 16, {"sequence_length": 131072}),
    "hardly any free with offload": ("qwen3-14b", "h100-sxm", 2, {"sequence_length": 32768}),
    "hardly any free": ("llama-3.1-8b", "h100-sxm", 8, {"sequence_length": 131072, "stack": "trl"}),
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
            assert again.offloads == (remedy.kind == "offload")
        assert again.needed_bytes == pytest.approx(remedy.option.needed_bytes, rel=1e-6)
        assert again.seconds == pytest.approx(remedy.option.seconds, rel=1e-6)


@pytest.mark.parametrize("name", ["long on 8 H100", "8k on 4 A100", "tight"])
def test_the_chunked_loss_comes_before_offload(name: str) -> None:
    first = ask(name).remedies[0]
    assert (first.kind, dict(first.changes)) == ("same", {"loss_kernel": "chunked"})
    assert reasons.answer(ask(name)).startswith("Use a chunked loss (--loss-kernel chunked): ")


def test_adapters_on_few_gpus_come_before_many_gpus_for_all_weights() -> None:
    advice = planner.advise("llama-3.1-70b", Request("rtx-4090", 1))
    adapters, full = (remedy for remedy in advice.remedies if "num_gpus" in remedy.changes)
    assert (adapters.kind, full.kind, advice.change) == ("adapters", "gpus", adapters)
    assert adapters.request.num_gpus < full.request.num_gpus
    assert f"(QLoRA) and {adapters.request.num_gpus} GPUs ({adapters.flags})" in reasons.answer(advice)
    # The nearest strategy lacks memory of the GPU and of the host, and the answer names both.
    missing = reasons.lacks(next(option for option in advice.options if option.strategy.name == "fsdp2_cpu_offload"))
    assert re.fullmatch(r"lacks [\d.]+ GiB per GPU and [\d,]+ GiB of host memory per node", missing)


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
    assert re.search(r"GPUs per sequence.* \(--context-parallel ", reasons.answer(advice))
    for name, remedy in shared.items():
        ranks = remedy.changes[name]
        assert remedy.option.is_rough
        assert remedy.option.prediction.job.sequence_ranks == ranks
        # Fewer GPUs would leave too little room.
        assert remedy.option.free_share >= choose.COMFORTABLY_FREE
        if ranks > 2:
            fewer = advice.request.replace(**{**remedy.changes, name: ranks // 2, "global_batch_size": None})
            less = choose.recommend(choose.options_of(advice.shape, fewer.box(), fewer, has_offload=False)[0])
            assert less is None or less.free_share < choose.COMFORTABLY_FREE


@pytest.mark.parametrize("name", ["70B at 32k on 8 H100", "32B at 32k on 4 A100", "72B at 32k on 8 A100"])
def test_the_same_training_with_offload_comes_before_another_training(name: str) -> None:
    advice = ask(name)
    assert advice.recommended is None
    assert advice.change is not None
    assert (advice.change.kind, dict(advice.change.changes)) == ("offload", {"loss_kernel": "chunked"})
    assert advice.change.option.offloads
    assert advice.change.option.has_enough_free
    adapters = next(remedy for remedy in advice.remedies if remedy.kind == "adapters")
    assert adapters.option.seconds == pytest.approx(advice.change.option.seconds, rel=choose.EQUALLY_FAST_IF_ROOMIER)


@pytest.mark.parametrize("name", ["70B at 32k on 8 H100", "32B at 64k on 8 H100", "70B at 128k on 16 H100"])
def test_more_gpus_also_share_sequences_if_fewer_are_enough_then(name: str) -> None:
    advice = ask(name)
    (more,) = (remedy for remedy in advice.remedies if remedy.kind == "gpus")
    assert more.changes.keys() & {"context_parallel", "sequence_parallel"}
    assert more.option.free_share >= choose.COMFORTABLY_FREE
    # Without sharing, this number of GPUs is not enough.
    alone = {"num_gpus": more.changes["num_gpus"], "loss_kernel": "chunked", "sync_each_batch": True}
    assert not choose.could_leave_free(advice.shape, advice.request.replace(**alone), alone["num_gpus"])


@pytest.mark.parametrize("name", ["hardly any free", "hardly any free with offload"])
def test_a_training_that_leaves_hardly_any_memory_free_is_not_recommended(name: str) -> None:
    advice = ask(name)
    assert advice.recommended is not None
    assert advice.recommended.free_share < choose.VERY_LITTLE_FREE
    assert advice.change is not None
    assert advice.change.kind in ("sequence", "offload")  # another training would come later
    assert advice.change.option.free_share >= choose.COMFORTABLY_FREE


@pytest.mark.parametrize(
    ("model", "num_gpus", "settings"),
    [("qwen3-32b", 16, {"sequence_length": 4096}), ("llama-3.1-70b", 64, {"sequence_length": 4096})],
)
def test_gradients_that_stay_unsharded_are_named_with_the_change(model: str, num_gpus: int, settings: Any) -> None:
    advice = planner.advise(model, Request("h100-sxm", num_gpus, **settings))
    before = next(option for option in advice.options if option.strategy.name == "fsdp2")
    assert not before.has_enough_free
    (after,), _ = choose.options_of(
        advice.shape, advice.box, advice.request.replace(strategy="fsdp2", sync_each_batch=True)
    )
    assert after.has_enough_free
    phrase = reasons.why_not(advice)["fsdp2"]
    assert "--sync-each-batch" in phrase
    assert reasons.percent(after.free_share) in phrase
    assert phrase.startswith(reasons.lacks(before))
    in_trainer = advice.request.replace(sync_each_batch=True)
    assert "--sync-each-batch" not in str(reasons.why_not(planner.advise(model, in_trainer)))


def test_one_gpu_shares_no_sequence() -> None:
    advice = planner.advise("llama-3.1-8b", Request("h100-sxm", 1, sequence_length=131072))
    assert "sequence" not in {remedy.kind for remedy in advice.remedies}


def test_adapters_are_named_where_all_weights_need_offload() -> None:
    def of_adapters(name: str) -> dict[str, Any]:
        return next(dict(remedy.changes) for remedy in ask(name).remedies if remedy.kind == "adapters")

    assert "load_in_4bit" not in of_adapters("two 4090")
    assert of_adapters("13B on one 3090")["load_in_4bit"]
    # LoRA fits one 4090, too, but it is slower than QLoRA and leaves less free, so that it does not help.
    (quantized,) = (remedy for remedy in ask("one 4090").remedies if remedy.kind == "adapters")
    assert "load_in_4bit" in quantized.changes
    assert quantized.option.free_share >= choose.COMFORTABLY_FREE


def test_offload_is_tried_with_an_assumed_host_and_says_so() -> None:
    option = ask("two 4090").recommended
    assert option is not None
    assert option.strategy.name == "fsdp2_cpu_offload"
    assert "of host memory, and we assume that there are 256 GiB" in reasons.answer(ask("two 4090"))
    assert ask("two 4090").change is not None  # nobody has confirmed the host, so adapters come first
    assert ask("two 4090 in a known host").change is None
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


# ---------------------------------------------------------------- the host's memory


def offloading(host_memory: float) -> choose.StrategyPrediction:
    """Return the prediction of an offload on one GPU in a host with so many GiB."""
    request = Request("rtx-4090", 1, host_memory=host_memory)
    shape, request, _ = choose.find_model("llama-3.1-8b", request)
    options, _ = choose.options_of(shape, request.box(), request)
    return next(option for option in options if option.strategy.name == "fsdp2_cpu_offload")


def test_a_host_needs_more_than_the_offloaded_data_and_some_free_memory() -> None:
    stored = offloading(1000.0).prediction.host_bytes_per_node / 2**30
    needed = offloading(1000.0).host_needed_bytes / 2**30
    assert needed == pytest.approx(stored + 2 + 4)
    for memory, fits, has_enough_free in (
        (stored + 1, False, False), (needed + 1, True, False), (needed / 0.88, True, True),
    ):  # fmt: skip
        option = offloading(memory)
        assert (option.fits, option.has_enough_free) == (fits, has_enough_free)
        assert option.lacking == (None if fits else "host memory")


def test_an_offload_that_fills_an_assumed_host_is_not_recommended() -> None:
    advice = ask("one 4090")
    assert advice.recommended is not None
    assert advice.recommended.offloads
    assert not advice.recommended.has_enough_free
    assert advice.change is not None
    assert advice.change.kind == "adapters"
    answer = reasons.answer(advice)
    whole = min((other for other in advice.options if not other.offloads), key=lambda other: -other.free_bytes)
    first, *_ = answer.split(". ")
    assert "Full training" in first
    assert f"{choose.gib(-whole.free_bytes)} GiB" in answer
    assert not re.search("--|LoRA", first)
    assert "QLoRA" in answer.partition(advice.change.flags)[0]
    assert re.search(r"needs 12\d GiB of host memory, and we assume that there are 128 GiB", answer)


# ---------------------------------------------------------------- pure bf16


def test_pure_bf16_is_named_on_one_gpu_with_what_it_costs() -> None:
    advice = ask("7B on one A100")
    kinds = [remedy.kind for remedy in advice.remedies]
    assert kinds[:3] == ["precision", "precision", "adapters"]
    changes = [dict(remedy.changes) for remedy in advice.remedies[:2]]
    pure = {"precision": "pure-bf16"}
    assert changes == [{**pure, "optimizer": "adamw-8bit"}, pure]
    text = " ".join(advice_text.text(advice).split())
    assert text.count("stochastic rounding") == 1
    assert "Kahan summation" in text
    assert "precision" not in {remedy.kind for remedy in ask("70B on 16 H100").remedies}  # which can shard the masters


def test_eight_bits_of_optimizer_come_before_offload() -> None:
    advice = ask("70B on 16 H100")
    assert advice.recommended is not None
    assert advice.recommended.offloads
    assert advice.change is not None
    assert advice.change.kind == "optimizer"


# ---------------------------------------------------------------- the recommended change is what is started


@pytest.mark.parametrize("name", ["long on 8 H100", "8k on 4 A100", "tight", "one 4090", "128k on 8 H100"])
def test_the_command_and_the_files_are_of_the_recommended_training(name: str, tmp_path: Path) -> None:
    advice = ask(name)
    change, changed = advice.change, advice.changed
    assert change is not None
    assert changed is not None
    model, gpu, num_gpus, settings = QUESTIONS[name]
    again = planner.advise(model, Request(**{"gpu": gpu, "num_gpus": num_gpus, **settings, **change.changes}))
    assert again.change is None or again.change.kind != change.kind
    assert launch.launch(changed) == launch.launch(again)
    text = advice_text.text(advice)
    start = launch.launch(changed)
    assert start is not None
    for line in start.command.split("\n"):
        assert line in text
    option = again.recommended
    assert option is not None
    table = text.partition("\nstrategy ")[2].splitlines()[1]
    assert table.split()[0] == option.strategy.name
    assert f"For {option.strategy.name}, nvidia-smi" in " ".join(text.split())
    assert reasons.why_not(changed).keys() == reasons.why_not(again).keys()
    content = advice_text.content(advice)
    assert content["launch"]["command"] == start.command
    assert content["recommended_change"]["options"] == change.flags
    assert content["recommended_change"]["strategy"] == option.strategy.name
    path = tmp_path / "mine.yaml"
    launch.write(advice, path)
    assert path.read_text() == next(iter((launch.launch(again, path) or start).files.values()))


def test_without_a_change_everything_is_about_the_question() -> None:
    advice = ask("two 4090 in a known host")
    content = advice_text.content(advice)
    assert advice.to_start is advice
    assert content["recommended_change"] is None
    assert content["launch_without_change"] is None


# ---------------------------------------------------------------- what is recommended


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100-sxm"])
@pytest.mark.parametrize("num_gpus", [2, 4, 8])
@pytest.mark.parametrize("model", ["bert-base-uncased", "gpt2"])
def test_small_models_are_trained_by_the_simplest_strategy(model: str, num_gpus: int, gpu: str) -> None:
    """FSDP2 casts its weights to bf16, so that it was compared with DDP in another precision, and was recommended."""
    option = planner.advise(model, Request(gpu, num_gpus)).recommended
    assert option is not None
    assert option.strategy.name == "ddp"


@pytest.mark.parametrize(
    ("model", "gpu", "num_gpus"),
    [("bert-base", "rtx-3090", 2), ("gpt2", "rtx-3090", 4), ("gpt2", "rtx-4090", 2), ("bert-large", "rtx-3090", 2)],
)
def test_ddp_is_compared_in_the_precision_of_the_others(model: str, gpu: str, num_gpus: int) -> None:
    advice = planner.advise(model, Request(gpu, num_gpus))
    option = advice.recommended
    assert option is not None
    assert option.strategy.name == "ddp"
    fastest = reasons.fastest_of_preferred(advice)
    assert fastest is not None
    assert choose.seconds_in_precision_of(fastest, option) < option.seconds
    assert "in the same precision" in reasons.answer(advice)
    # An option that shards is never compared in another precision.
    assert choose.seconds_in_precision_of(option, fastest) == fastest.seconds


@pytest.mark.parametrize(
    ("model", "request_of_model"),
    [
        ("qwen3-0.6b", Request("rtx-4090", 2)),
        ("llama-2-70b", Request("a100-80gb", 8, lora_rank=16, load_in_4bit=True)),
        ("gpt2-xl", Request("a100-80gb", 8)),
    ],
)
def test_a_difference_that_precision_does_not_explain_counts(model: str, request_of_model: Request) -> None:
    option = planner.advise(model, request_of_model).recommended
    assert option is not None
    assert option.prediction.engine.zero_stage > 0


def test_two_gpus_are_not_predicted_to_be_more_than_twice_as_fast() -> None:
    of_qlora = {"lora_rank": 16, "load_in_4bit": True}
    one, two = (planner.advise("llama-2-7b", Request("rtx-4090", count, **of_qlora)).recommended for count in (1, 2))
    assert one is not None
    assert two is not None
    assert two.total_tokens_per_second < 2.05 * one.total_tokens_per_second


@pytest.mark.parametrize("length", [2048, 8192])
def test_groups_in_one_node_are_not_recommended_if_a_simpler_strategy_is_as_good(length: int) -> None:
    request = Request("h100-sxm", 8, lora_rank=16, lora_target="all-linear", sequence_length=length)
    advice = planner.advise("llama-3.1-70b", request)
    option = advice.recommended
    assert option is not None
    assert option.strategy.name == "fsdp2"
    assert option in advice.options
    assert option.has_enough_free
    hybrid = next(other for other in advice.options if other.strategy.name == "fsdp2_hybrid")
    assert option.seconds <= (1 + choose.EQUALLY_FAST) * hybrid.seconds


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


def test_other_changes_are_compared_with_the_recommended_training():
    """Not with the training without a change, which may be much slower."""
    advice = planner.advise("qwen3-30b-a3b", Request("h100-sxm", 8, sequence_length=4096))
    recommended = advice.to_start.recommended
    assert advice.change is not None
    for change, (flags, predicted) in zip(
        [each for each in advice.remedies if each is not advice.change], reasons.changes(advice), strict=True
    ):
        gpus = change.option.prediction.box.num_gpus / advice.box.num_gpus
        ratio = gpus * change.option.tokens_per_second / recommended.tokens_per_second
        assert change.flags == flags
        assert ("slower" in predicted) == (ratio < 1 - choose.EQUALLY_FAST), predicted


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_change_of_a_training_that_fits_is_faster_or_leaves_more_memory_free(name):
    advice = ask(name)
    now = advice.to_start.recommended
    for change in advice.remedies:
        if change is not advice.change and advice.recommended is not None:
            ratio = change.option.prediction.box.num_gpus / now.prediction.box.num_gpus
            faster = ratio * change.option.tokens_per_second > (1 + choose.EQUALLY_FAST) * now.tokens_per_second
            assert faster or change.option.free_share >= now.free_share + remedies.LEANER, change.flags


def test_the_largest_model_that_fits_comes_first_if_nothing_helps():
    advice = planner.advise("llama-3.1-405b", Request("t4", 1))
    assert advice.recommended is None
    assert advice.change is None
    largest = advice.largest_known
    assert largest is not None
    assert largest.name in reasons.answer(advice).split(". ")[0]
    fits = choose.could_leave_free
    assert fits(largest, advice.request, 1)
    larger = [known for known in shapes.KNOWN.values() if known.num_params > largest.num_params]
    own = advice.shape
    assert not [
        known.name
        for known in larger
        if known.num_params < own.num_params and known.head == own.head and known.reads_images == own.reads_images
        and known.positions >= 1024 and fits(known, advice.request, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "question", [("qwen2.5-7b", "a100-80gb", 4, {"sequence_length": 4096, "global_batch_size": 32}),
                 ("gpt2", "rtx-4090", 2, {}), ("bert-large", "t4", 4, {}), ("llama-2-7b", "a100-80gb", 4, {})],
)  # fmt: skip
def test_one_difference_has_one_word(question):
    """Every strategy that takes as much longer is described in the same words, without a word on whether it matters."""
    model, gpu, num_gpus, settings = question
    advice = planner.advise(model, Request(gpu, num_gpus, **settings))
    by_name = {option.strategy.name: option for option in advice.options}
    for name, phrase in reasons.why_not(advice).items():
        if not by_name[name].fits:
            continue
        ratio = by_name[name].seconds / advice.recommended.seconds
        if abs(ratio - 1) <= choose.EQUALLY_FAST:
            assert "is as fast" in phrase
        elif ratio < 1.95:
            assert f"takes {100 * abs(ratio - 1):.0f} % {'longer' if ratio > 1 else 'less time'}" in phrase
        assert not re.search("matter|acceptable|error", phrase)
    assert not re.search("matters|smaller than the error", reasons.answer(advice))


def test_an_axolotl_file_names_the_modules_of_the_adapter():
    """axolotl passes an empty list if the file names none, and PEFT has no default then."""
    request = Request("rtx-3090", 4, lora_rank=16, load_in_4bit=True, stack="axolotl")
    content = yaml.safe_load(launch.launch(planner.advise("llama-3.1-8b", request), Path("a.yaml")).files["a.yaml"])
    assert content["lora_target_modules"] == ["q_proj", "v_proj"]
