"""Test the theory of adapters: parameters as PEFT counts them, saved activations, model states and published rows."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import samples

from study import run_in_theory
from study.config import RunConfig, build_config
from study.records.find import find
from zero_study.errors import Refusal
from zero_study.files import ROOT
from zero_study.planner import Request, advice_text, advise, choose, launch
from zero_study.strategy.file import read_by_name
from zero_study.theory import (
    adapters,
    communication,
    computation,
    measured_by_others,
    peaks,
    prediction,
    shapes,
    step_time,
)
from zero_study.theory.adapters import Adapter
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes import formulas
from zero_study.theory.shapes.adapter import ALL_LINEAR
from zero_study.theory.shapes.config_json import MODEL_TYPES, from_config

SIZES = {"hidden": 48, "layers": 2, "heads": 4, "vocabulary": 96, "positions": 64, "feed_forward": 80, "kv_heads": 2}
ADAPTER_DROPOUT = 0.125
ZERO = Engine("deepspeed", 2, 4, "bf16", 2, reduce_bucket_size=1000, multi_rank_allreduce=False)
ZERO_3 = dataclasses.replace(
    ZERO, zero_stage=3, prefetch_bucket_size=1000, max_live_parameters=10**9, max_reuse_distance=10**9
)
SINGLE = Engine("torch", 0, 1, "bf16-autocast", 4)


def small_config(model_type: str, class_name: str | None = None, **changes: Any) -> Any:
    """Return a configuration of transformers with small sizes."""
    from transformers import CONFIG_MAPPING

    kind = MODEL_TYPES[model_type]
    class_of = CONFIG_MAPPING[model_type]
    own = {value: key for key, value in getattr(class_of, "attribute_map", {}).items()}
    settings = {own.get(key, key): SIZES[part] for part, key in kind.keys.items() if part in SIZES}
    if model_type == "gpt_neo":
        settings["attention_types"] = [[["global"], SIZES["layers"]]]
    if "experts" in kind.keys:
        settings |= {kind.keys["experts"]: 4, kind.keys["experts_per_token"]: 2}
    if "head_size" in kind.keys:
        settings[kind.keys["head_size"]] = 12
    if model_type == "gptj":
        settings["rotary_dim"] = 4
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    class_name = class_name or next(name for name, head in kind.classes.items() if head == "tokens")
    return class_of(**settings, **tokens, **changes, architectures=[class_name])


def small_model(config: Any) -> Any:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, config.architectures[0])(config)


def with_peft(model: Any, adapter: Adapter, **options: Any) -> Any:
    """Return a model with the adapters of PEFT."""
    import peft

    targets: Any = None if adapter.targets is None else list(adapter.targets)
    if adapter.targets == (ALL_LINEAR,):
        targets = ALL_LINEAR
    config = peft.LoraConfig(
        r=adapter.rank,
        target_modules=targets,
        lora_dropout=ADAPTER_DROPOUT if adapter.has_dropout else 0.0,
        use_dora=adapter.kind == "dora",
        modules_to_save=list(adapter.modules_to_save) or None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config, **options)


@pytest.mark.computes
@pytest.mark.parametrize(
    ("model_type", "targets"),
    samples.each_once_with_slow_rest(model_type=sorted(adapters.DEFAULT_TARGETS), targets=[None, ("all-linear",)]),
)
def test_parameters_are_those_that_peft_counts(model_type: str, targets: tuple[str, ...] | None) -> None:
    pytest.importorskip("peft")
    config = small_config(model_type)
    shape = from_config(config.to_dict(), "small")
    model = small_model(config)
    assert shape.num_params == model.num_parameters()
    for kind in ("lora", "dora"):
        adapter = Adapter(3, targets, kind)  # type: ignore[arg-type]
        adapted = dataclasses.replace(shape, adapter=adapter)
        counted = with_peft(small_model(config), adapter).get_nb_trainable_parameters()
        assert (adapters.num_trainable(adapted), adapters.num_total(adapted)) == counted, kind


@pytest.mark.computes
@pytest.mark.parametrize(
    ("model_type", "class_name", "targets"),
    [
        ("bert", "BertForSequenceClassification", ("query", "value")),
        ("bert", "BertForSequenceClassification", ("dense",)),
        ("bert", "BertForTokenClassification", ("all-linear",)),
        ("gpt2", "GPT2ForSequenceClassification", ("c_attn", "c_proj")),
        ("roberta", "RobertaForSequenceClassification", ("query",)),
    ],
)
def test_heads_are_trained_in_whole(model_type: str, class_name: str, targets: tuple[str, ...]) -> None:
    pytest.importorskip("peft")
    config = small_config(model_type, class_name, num_labels=3)
    shape = from_config(config.to_dict(), "small")
    adapter = Adapter(2, targets, modules_to_save=adapters.HEADS)
    adapted = dataclasses.replace(shape, adapter=adapter)
    of_model = dataclasses.replace(
        adapter, modules_to_save=tuple(n for n in adapters.HEADS if n in dir(small_model(config)))
    )
    counted = with_peft(small_model(config), of_model).get_nb_trainable_parameters()
    assert (adapters.num_trainable(adapted), adapters.num_total(adapted)) == counted


@pytest.mark.computes
@pytest.mark.parametrize(
    ("model_type", "targets", "changes"),
    [
        ("mixtral", ("all-linear",), {}),
        ("mixtral", ("w1", "w2", "w3"), {}),
        ("mixtral", ("q_proj", "w2"), {}),
        ("qwen3_moe", ("all-linear",), {}),
        ("qwen3_moe", ("q_proj", "gate"), {}),
        # PEFT then adapts no Linear module of the dense block, because its names are those of experts.
        ("qwen3_moe", ("all-linear",), {"mlp_only_layers": [0]}),
        ("qwen3_moe", ("v_proj", "down_proj"), {"mlp_only_layers": [0]}),
    ],
)  # fmt: skip
def test_experts_and_routers_are_adapted_as_peft_does(
    model_type: str, targets: tuple[str, ...], changes: dict[str, Any]
) -> None:
    pytest.importorskip("peft")
    config = small_config(model_type, **changes)
    adapter = Adapter(3, targets)
    adapted = dataclasses.replace(from_config(config.to_dict(), "small"), adapter=adapter)
    model = with_peft(small_model(config), adapter)
    assert (adapters.num_trainable(adapted), adapters.num_total(adapted)) == model.get_nb_trainable_parameters()
    matrices = sorted(each.numel() for each in model.parameters() if each.requires_grad)
    assert sorted(adapters.trained_sizes(adapted).matrices) == matrices


@pytest.mark.computes
@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b"])
def test_adapters_of_whole_mixtures_of_experts_are_those_of_peft(name: str) -> None:
    pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    from transformers import CONFIG_MAPPING

    shape = shapes.find(name)
    assert shape.config is not None
    model_type = shape.config["model_type"]
    keys = MODEL_TYPES[model_type].keys
    sizes = {key: getattr(shape, part) for part, key in keys.items() if hasattr(shape, part)}
    config = CONFIG_MAPPING[model_type](**{**sizes, **shape.config})
    adapter = Adapter(16, ("all-linear",))
    with torch.device("meta"):
        model = with_peft(small_model(config), adapter)
    adapted = dataclasses.replace(shape, adapter=adapter)
    assert (adapters.num_trainable(adapted), adapters.num_total(adapted)) == model.get_nb_trainable_parameters()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora_target": "w1,w2"}, "w3"),
        ({"lora_target": "all-linear", "adapter": "dora"}, "--adapter dora"),
        ({"lora_target": "all-linear", "lora_dropout": 0.1}, "--lora-dropout"),
        ({"lora_target": "q_proj,nothing"}, "w1, w3, w2"),
    ],
)
def test_adapters_of_experts_that_peft_refuses_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(Refusal, match=named):
        advise("mixtral-8x7b", request(**options))


def test_default_targets_are_those_of_peft() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    of_peft = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    # PEFT lists mixtral, but stops with an error. Adapters of gpt_bigcode are refused here.
    for name in MODEL_TYPES.keys() - {"mixtral", "gpt_bigcode"}:
        assert list(adapters.DEFAULT_TARGETS.get(name, ())) == of_peft.get(name, []), name


# ---------------------------------------------------------------- what autograd saves

BATCH, LENGTH = 2, 32


class Saved:
    """A tensor that autograd saved. It is gone when the graph that needs it is."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def saved_bytes(model: Any, arithmetic: str) -> int:
    """Return the bytes that a forward pass leaves saved, without parameters and buffers. Shared memory counts once."""
    import torch

    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved = weakref.WeakSet[Saved]()

    def pack(tensor: Any) -> Saved:
        kept = Saved(tensor)
        saved.add(kept)
        return kept

    words = torch.randint(1, SIZES["vocabulary"] - 1, (BATCH, LENGTH))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=arithmetic == "autocast"),
    ):
        outputs = model(input_ids=words)
    storages = {each.tensor.untyped_storage().data_ptr(): each.tensor.untyped_storage() for each in saved}
    assert outputs is not None
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in own)


def measured_block(model_type: str, adapter: Adapter | None, arithmetic: str) -> float:
    """Return the bytes that a block saves: half of the difference of models with four and with two blocks."""
    import torch

    layers = MODEL_TYPES[model_type].keys["layers"]
    totals = []
    for count in (2, 4):
        config = small_config(model_type)
        setattr(config, layers, count)
        config.use_cache = False  # the keys and values of a cache are copies
        if hasattr(config, "layer_types"):
            config.layer_types = ["full_attention"] * count
        model = small_model(config).to(torch.float32 if arithmetic == "fp32" else torch.bfloat16).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if adapter is not None:
            model = with_peft(model, adapter, autocast_adapter_dtype=adapter.in_fp32).train()
            model.enable_input_require_grads()
        totals.append(saved_bytes(model, arithmetic))
    return (totals[1] - totals[0]) / 2


def predicted_block(model_type: str, adapter: Adapter, arithmetic: str) -> float:
    """Return the predicted bytes, with autocast's copies of the adapters."""
    precision: Any = {"fp32": "fp32", "autocast": "bf16-autocast"}.get(arithmetic, "pure-bf16")
    shape = dataclasses.replace(from_config(small_config(model_type).to_dict(), "small"), adapter=adapter)
    copies = 2 * adapters.num_trainable(shape) / shape.layers if arithmetic == "autocast" else 0.0
    engine = Engine("torch", 0, 1, precision, 4)
    return computation.block_bytes(shape, engine, StepConfig(BATCH, LENGTH, device="cpu")) + copies


@pytest.mark.computes
@pytest.mark.parametrize(
    ("targets", "kind", "has_dropout", "arithmetic"),
    samples.pairwise_with_slow_rest(
        targets=[("q_proj", "v_proj"), ("all-linear",), ("o_proj", "down_proj")],
        kind=["lora", "dora"],
        has_dropout=[False, True],
        arithmetic=["fp32", "autocast", "16-bit adapters", "fp32 adapters"],
    ),
)
def test_a_block_saves_what_is_predicted(
    targets: tuple[str, ...], kind: Any, has_dropout: bool, arithmetic: str
) -> None:
    pytest.importorskip("peft")
    adapter = Adapter(4, targets, kind, has_dropout, in_fp32=arithmetic != "16-bit adapters")
    measured, predicted = (of("llama", adapter, arithmetic) for of in (measured_block, predicted_block))
    assert measured == pytest.approx(predicted, rel=0.02)


@pytest.mark.computes
@pytest.mark.parametrize(
    ("model_type", "arithmetic"),
    samples.each_once_with_slow_rest(
        model_type=["gpt2", "bert", "qwen3", "gemma2", "opt", "gpt_neox"], arithmetic=["fp32", "fp32 adapters"]
    ),
)
def test_freezing_a_block_changes_what_it_saves_as_predicted(model_type: str, arithmetic: str) -> None:
    """Some kernels on a CPU save more than those on a GPU, so the difference is compared."""
    pytest.importorskip("peft")
    adapter = Adapter(4)
    measured = measured_block(model_type, adapter, arithmetic) - measured_block(model_type, None, arithmetic)
    shape = from_config(small_config(model_type).to_dict(), "small")
    engine, job = Engine("torch", 0, 1, "fp32" if arithmetic == "fp32" else "pure-bf16", 4), StepConfig(BATCH, LENGTH)
    frozen = dataclasses.replace(shape, adapter=adapter)
    predicted = computation.block_bytes(frozen, engine, job) - computation.block_bytes(shape, engine, job)
    assert measured == pytest.approx(predicted, rel=0.02)


@pytest.mark.computes
@pytest.mark.parametrize(
    ("model", "arithmetic"),
    samples.each_once_with_slow_rest(
        model=[("mixtral", "q_proj", "v_proj"), ("mixtral", "w2"), ("mixtral", "w1", "w3"), ("mixtral", "gate"),
               ("mixtral", "all-linear"), ("qwen3_moe", "all-linear")],
        arithmetic=["fp32", "autocast", "16-bit adapters", "fp32 adapters"],
    ),
)  # fmt: skip
def test_a_block_with_adapted_experts_saves_what_is_predicted(model: tuple[str, ...], arithmetic: str) -> None:
    """PEFT adds the adapters of experts to a copy of all experts, which autograd keeps."""
    model_type, *targets = model
    pytest.importorskip("peft")
    adapter = Adapter(4, tuple(targets), in_fp32=arithmetic != "16-bit adapters")
    measured, predicted = (of(model_type, adapter, arithmetic) for of in (measured_block, predicted_block))
    assert measured == pytest.approx(predicted, rel=0.02)


@pytest.mark.computes
@pytest.mark.parametrize(
    ("model_type", "has_dropout"),
    samples.each_once_with_slow_rest(model_type=["llama", "phi", "gpt2"], has_dropout=[False, True]),
)
def test_stage_3_saves_the_inputs_of_frozen_weights(
    monkeypatch: pytest.MonkeyPatch, model_type: str, has_dropout: bool
) -> None:
    """DeepSpeed's function takes the place of torch.nn.functional.linear. GPT-2's Conv1D does not call it."""
    import torch

    linear = pytest.importorskip("deepspeed.runtime.zero.linear")
    pytest.importorskip("peft")
    adapter = Adapter(4, has_dropout=has_dropout)
    shape = dataclasses.replace(from_config(small_config(model_type).to_dict(), "small"), adapter=adapter)
    stage_3 = dataclasses.replace(ZERO_3, precision="fp32", accumulation_bytes=4)
    stage_2, of_stage_3 = (
        computation.block_bytes(
            shape, dataclasses.replace(stage_3, zero_stage=stage), StepConfig(BATCH, LENGTH, device="cpu")
        )
        for stage in (2, 3)
    )
    assert measured_block(model_type, adapter, "fp32") == pytest.approx(stage_2, rel=0.02)
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "linear", linear.zero3_linear_wrap)
        assert measured_block(model_type, adapter, "fp32") == pytest.approx(of_stage_3, rel=0.02)
    assert (of_stage_3 > stage_2) == (model_type != "gpt2")


def test_stage_3_saves_inputs_in_fp32_and_no_casts_under_autocast() -> None:
    """A run of BERT-base in one process needed 744.3 MiB. Before, 788.8 MiB were predicted."""
    adapter = Adapter(16, frozen="fp32", modules_to_save=adapters.HEADS)
    bert = shapes.replace_parts(shapes.find("bert-base"), vocabulary=8192)
    bert = dataclasses.replace(bert, adapter=adapter)
    engine = dataclasses.replace(
        ZERO_3, world_size=1, precision="bf16-autocast", accumulation_bytes=4, reduce_bucket_size=768**2,
        prefetch_bucket_size=int(0.9 * 768**2), max_live_parameters=0, max_reuse_distance=0,
    )  # fmt: skip
    assert computation.cast_bytes(bert, engine) == 0 < computation.cast_bytes(bert, SINGLE)
    peak = peaks.peak(bert, engine, StepConfig(8, 128, device="cpu"))
    assert peak.total == pytest.approx(744.3 * 2**20, rel=0.02)


def test_the_models_of_conv1d_are_known() -> None:
    from transformers.pytorch_utils import Conv1D

    of_tables = [name for name in MODEL_TYPES if name in formulas.linear_modules()]
    result = {
        name
        for name in of_tables
        if any(isinstance(module, Conv1D) for module in small_model(small_config(name)).modules())
    }
    assert result == set(adapters.CONV1D_TYPES)


def test_adapted_experts_take_as_much_memory_as_another_copy_of_them() -> None:
    mixtral, job = shapes.find("mixtral-8x7b"), StepConfig(1, 2048)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    without, whole = (dataclasses.replace(mixtral, adapter=Adapter(16, each)) for each in (attention, (ALL_LINEAR,)))
    of_experts = 32 * 8 * 3 * 4096 * 14336
    added = peaks.peak(whole, SINGLE, job).total - peaks.peak(without, SINGLE, job).total
    assert 2 * of_experts < added < 3.2 * of_experts
    assert computation.model_flops_per_sequence(whole, 1) > 1.3 * computation.model_flops_per_sequence(without, 1)


# ---------------------------------------------------------------- states, communication and time

LLAMA = shapes.find("llama-3.1-8b")
LORA = dataclasses.replace(LLAMA, adapter=Adapter(16, ("q_proj", "v_proj")))
QLORA = dataclasses.replace(LLAMA, adapter=Adapter(16, ("q_proj", "v_proj"), frozen="nf4"))


def test_stages_1_and_2_shard_only_the_adapters() -> None:
    """ZeRO's partitions have trainable parameters only, so every rank keeps the frozen weights whole."""
    trained = adapters.num_trainable(LORA)
    for stage in (1, 2):
        states = peaks.states(dataclasses.replace(ZERO, zero_stage=stage, world_size=4), LORA, "stepping").device
        assert states["parameters"] == pytest.approx(2 * (LLAMA.num_params + trained), rel=1e-6)
        assert states["optimizer_states"] == pytest.approx(12 * trained / 4, rel=1e-6)


@pytest.mark.parametrize("engine", [ZERO_3, Engine("fsdp", 3, 4, "bf16", 4)], ids=["zero3", "fsdp2"])
def test_stage_3_and_fsdp2_shard_the_frozen_weights_too(engine: Engine) -> None:
    states = peaks.states(engine, LORA, "resting").device
    assert states["parameters"] == pytest.approx(2 * LLAMA.num_params / 4, rel=0.01)
    whole = peaks.peak(LORA, engine, StepConfig(1, 1024)).parts["gathered_parameters"]
    assert whole == peaks.peak(LLAMA, engine, StepConfig(1, 1024)).parts["gathered_parameters"] or whole > 0


def gathered_whole(shape: shapes.ModelShape, job: StepConfig, **settings: Any) -> tuple[float, str]:
    """Return the bytes of gathered weights at the peak under stage 3 that gathers for one module only, and when."""
    engine = dataclasses.replace(ZERO_3, max_live_parameters=0, max_reuse_distance=0, **settings)
    peak = peaks.peak(shape, engine, job)
    return peak.parts["gathered_parameters"] + peak.parts["temporary_buffers"], peaks.PEAK_MOMENTS[peak.moment]


def test_the_output_layer_is_gathered_while_the_gradient_of_the_logits_exists() -> None:
    """With few tokens, this exceeds the loss, which needs the most with many tokens. Gloo makes a copy."""
    gpt = dataclasses.replace(shapes.find("gpt2"), adapter=Adapter(16))
    embedding = 2 * 50257 * 768
    assert gathered_whole(gpt, StepConfig(1, 64)) == (embedding, "output layer")
    assert gathered_whole(gpt, StepConfig(1, 64, device="cpu")) == (2 * embedding, "output layer")
    assert gathered_whole(gpt, StepConfig(8, 1024)) == (0, "loss")
    assert gathered_whole(gpt, StepConfig(1, 64), world_size=1) == (0, "loss")


def test_the_embedding_of_a_classifier_is_gathered_in_the_forward_pass() -> None:
    """Its output layer is small. With many tokens, the blocks need more."""
    bert = dataclasses.replace(shapes.find("bert-base"), adapter=Adapter(16))
    assert gathered_whole(bert, StepConfig(1, 16)) == (2 * 30522 * 768, "embedding")
    assert gathered_whole(bert, StepConfig(1, 16, device="cpu")) == (2 * 2 * 30522 * 768, "embedding")
    assert gathered_whole(bert, StepConfig(8, 512))[1] == "last block"


def test_a_recomputed_frozen_block_is_gathered_whole() -> None:
    """Until the module that needed the recomputation has used its weights. Trained weights are released at once."""
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
              "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip
    shape = dataclasses.replace(from_config(config, "small"), adapter=Adapter(4))
    jobs = StepConfig(1, 16, activation_checkpointing=True), StepConfig(1, 16)
    (whole, moment), (once, _) = (gathered_whole(shape, job, reduce_bucket_size=1000) for job in jobs)
    assert (whole, moment) == (2 * shape.block_params, "last block")
    assert 2 * 256 * 1024 <= once < 0.5 * whole


def test_frozen_weights_that_were_recomputed_are_gathered_again() -> None:
    """Stage 3 releases them even if its limits would let it keep them for the rest of the backward pass."""
    jobs = StepConfig(1, 16), StepConfig(1, 16, activation_checkpointing=True)
    kept, again = (
        sum(each.bytes for each in communication.collectives(ZERO_3, LORA, job) if each.kind == "all_gather")
        for job in jobs
    )
    of_blocks = 2 * 32 * LLAMA.block_params
    assert 0.7 * of_blocks < again - kept < 1.1 * of_blocks


def test_one_process_keeps_four_bits_of_quantized_weights() -> None:
    """Embedding and output layer of Llama stay in 16 bits. All other matrices take 4.127 bits per weight."""
    quantized = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    others = LLAMA.num_params - quantized
    assert pytest.approx(4.127, abs=1e-3) == adapters.NF4_BITS
    assert adapters.frozen_bytes(QLORA, SINGLE) == pytest.approx(quantized * adapters.NF4_BITS / 8 + 2 * others)
    in_fp32 = dataclasses.replace(LLAMA, adapter=Adapter(16, ("q_proj",), frozen="nf4", unquantized="fp32"))
    assert adapters.frozen_bytes(in_fp32, SINGLE) == pytest.approx(quantized * adapters.NF4_BITS / 8 + 4 * others)


def test_only_adapters_are_reduced_but_all_weights_are_gathered() -> None:
    trained, job = adapters.num_trainable(LORA), StepConfig(1, 1024)
    sent = {each.kind: each.bytes for each in communication.collectives(ZERO, LORA, job)}
    assert sent["reduce"] == 2 * trained
    assert sent["all_gather"] == 2 * trained
    to_all = dataclasses.replace(ZERO, multi_rank_allreduce=True)
    assert {each.kind for each in communication.collectives(to_all, LORA, job)} == {"all_reduce", "all_gather"}
    fsdp = Engine("fsdp", 3, 4, "bf16", 4)
    sent = {each.kind: each.bytes for each in communication.collectives(fsdp, LORA, job)}
    of_all = {each.kind: each.bytes for each in communication.collectives(fsdp, LLAMA, job)}
    assert sent["reduce_scatter"] == 2 * trained
    assert sent["all_gather"] == pytest.approx(of_all["all_gather"], rel=0.01)
    quantized = {each.kind: each.bytes for each in communication.collectives(fsdp, QLORA, job)}
    assert quantized["all_gather"] < 0.4 * sent["all_gather"]
    alone = dataclasses.replace(ZERO, world_size=1)
    assert {each.kind for each in communication.collectives(alone, LORA, job)} == {"reduce"}


def test_frozen_embeddings_are_not_gathered_again_in_the_backward_pass() -> None:
    """The records of the study lora, of which ZeRO-3 with small buckets gathers the most often."""
    runs = [run.record for run in find([ROOT / "reports/cpu/records/lora"]) if run.record.strategy == "zero3_tuned"]
    adapted = [record for record in runs if record.config["lora_rank"]]
    assert len(adapted) == 3
    for record in adapted:
        config = RunConfig.model_construct(**record.config)
        shape, engine = run_in_theory.of_run(config, read_by_name("zero3_tuned"), 2)
        expected = communication.collectives(engine, shape, run_in_theory.job_of(config, 2, "cpu"))
        sizes = [sum(each.moved_bytes for each in result) for result in (expected, record.collectives_per_step or [])]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_frozen_weights_need_two_thirds_of_the_flops_of_products() -> None:
    """Attention has no weights: it needs as many FLOPs as before."""
    forward = computation.blocks_flops_per_sequence(LLAMA, 1) + computation.head_flops_per_sequence(LLAMA, 1)
    assert computation.model_flops_per_sequence(LLAMA, 1) == 3 * forward
    assert computation.model_flops_per_sequence(LORA, 1) == pytest.approx(2 * forward, rel=0.01)


def test_a_step_of_adapters_is_faster_and_smaller_and_quantization_makes_it_slower_and_smaller() -> None:
    box, job = Request(gpu="a100-80gb").box(1), StepConfig(1, 2048)
    seconds = [step_time.seconds(shape, SINGLE, job, box).total for shape in (LLAMA, LORA, QLORA)]
    assert seconds[1] < seconds[2] < seconds[0]
    totals = [peaks.peak(shape, SINGLE, job).total for shape in (LLAMA, LORA, QLORA)]
    assert totals[0] > totals[1] > totals[2]


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "fsdp2"])
def test_two_ranks_store_what_is_predicted(name: str) -> None:
    """DeepSpeed and FSDP2 shard a small Llama with adapters on the CPU. What they store is counted after a step."""
    pytest.importorskip("peft")
    program = Path(__file__).parents[1] / "adapter_states_program.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        [*launcher, str(program), name], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert "STATES" in completed.stdout, completed.stderr[-2000:]
    stored = json.loads(completed.stdout.rpartition("STATES")[2].strip())
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
              "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip
    shape = dataclasses.replace(from_config(config, "small"), adapter=Adapter(4, ("q_proj", "v_proj")))
    engines = {
        "zero1": dataclasses.replace(ZERO, zero_stage=1, world_size=2),
        "zero2": dataclasses.replace(ZERO, world_size=2),
        "zero3": dataclasses.replace(ZERO_3, world_size=2),
        "fsdp2": Engine("fsdp", 3, 2, "bf16", 4),
    }
    predicted = peaks.states(engines[name], shape, "resting").device
    for part in ("parameters", "optimizer_states"):
        assert stored[part] == pytest.approx(predicted[part], abs=64), part  # type: ignore[literal-required]


# ---------------------------------------------------------------- published rows


def errors(*quantities: str, family: str = "") -> list[float]:
    return [
        float(prediction.predicted_memory(case)) / case.published - 1
        for case in measured_by_others.cases_of("adapters")
        if case.quantity in quantities and case.family.startswith(family)
    ]


def median(values: list[float]) -> float:
    return statistics.median(map(abs, values))


def test_published_memory_is_predicted_as_expected() -> None:
    """The limits were written down in measured_by_others/README.md before the predictions were computed."""
    assert median(errors("peak_reserved_bytes", "used_bytes")) <= 0.15
    assert median(errors("peak_allocated_bytes")) <= 0.10


def test_nothing_that_trained_is_predicted_not_to_fit() -> None:
    fits = [case for case in measured_by_others.cases_of("adapters") if case.quantity == "fits" and case.published]
    assert len(fits) > 70
    assert [case.name for case in fits if not prediction.predicted_memory(case)] == []


def test_what_ran_out_of_memory_on_one_gpu_is_predicted_not_to_fit() -> None:
    cases = [each for each in measured_by_others.cases_of("adapters") if each.quantity == "fits" and not each.published]
    alone = [each for each in cases if each.box.num_gpus == 1]
    assert alone
    assert not any(prediction.predicted_memory(each) for each in alone)


def test_the_factor_of_varying_lengths_is_the_median_of_every_second_row() -> None:
    """The other rows judge it."""
    cases = [each for each in measured_by_others.cases_of("adapters") if each.allocator == "varying lengths"]
    cases = [each for each in cases if each.quantity == "peak_reserved_bytes"]

    def factor(case: measured_by_others.MeasuredCase) -> float:
        peak = peaks.peak(case.shape, case.engine, case.job)
        return (case.published - peak.frozen_bytes) / (peak.total - peak.frozen_bytes)

    assert statistics.median(map(factor, cases[::2])) == pytest.approx(prediction.RESERVED_IF_LENGTHS_VARY, abs=0.01)
    others = [float(prediction.predicted_memory(case)) / case.published - 1 for case in cases[1::2]]
    assert median(others) <= 0.15


# ---------------------------------------------------------------- advise


def request(**options: Any) -> Request:
    return Request(**{"gpu": "a100-80gb", "num_gpus": 2, "lora_rank": 16} | options)


def test_the_answer_has_trainable_and_total_parameters() -> None:
    advice = advise("llama-3.1-8b", request())
    text = " ".join(advice_text.text(advice).split())
    assert "6,815,744 trainable parameters of 8,037,076,992 in total" in text
    assert "predicted" in text
    content = advice_text.content(advice)
    assert (content["num_trainable_params"], content["num_total_params"]) == (6_815_744, 8_037_076_992)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora_target": "nothing"}, "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ({"lora_target": " , "}, "--lora-target"),
        ({"lora_dropout": 1.0}, "--lora-dropout"),
        ({"lora_rank": 0}, "lora_rank"),
        ({"lora_rank": None, "load_in_4bit": True}, "--lora-rank"),
        ({"lora_rank": None, "lora_target": "q_proj"}, "--lora-rank"),
        ({"lora_rank": None, "adapter": "dora"}, "--lora-rank"),
        ({"adapter": "vera"}, "lora, dora"),
        ({"stack": "torchtitan"}, "torchtitan"),
    ],
)
def test_requests_that_make_no_sense_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(Refusal, match=named):
        advise("llama-3.1-8b", request(**options))


def test_models_without_known_modules_are_refused() -> None:
    with pytest.raises(Refusal, match="names of its"):
        advise("t5-base", request())


@pytest.mark.parametrize("stack", ["accelerate", "trl", "axolotl"])
@pytest.mark.parametrize("model", ["phi-4", "mixtral-8x7b"])
def test_the_default_is_all_linear_if_peft_has_none(model: str, stack: Any) -> None:
    advice = advise(model, request(stack=stack))
    assert advice.shape == advise(model, request(stack=stack, lora_target="all-linear")).shape
    started = launch.launch(advice)
    assert started is not None
    texts = " ".join([started.command, *started.files.values(), *started.settings])
    assert "all-linear" in texts or "lora_target_linear: true" in texts


@pytest.mark.parametrize("stack", ["accelerate", "trainer", "trl", "axolotl", "deepspeed", "study"])
def test_the_launch_has_the_adapters(stack: Any) -> None:
    advice = advise("llama-3.1-8b", request(stack=stack, lora_target="q_proj,v_proj", load_in_4bit=True))
    start = launch.launch(advice)
    assert start is not None
    everything = " ".join([start.command, *start.files.values(), *start.settings])
    assert "q_proj" in everything
    assert "4bit" in everything
    assert "16" in everything


def test_sharded_weights_are_quantized_in_a_type_that_can_be_sharded() -> None:
    sharded = advise("llama-3.1-8b", request(strategy="fsdp2", load_in_4bit=True))
    start = launch.launch(sharded)
    assert start is not None
    assert "bnb_4bit_quant_storage" in " ".join(start.settings)
    whole = launch.launch(advise("llama-3.1-8b", request(strategy="ddp", load_in_4bit=True)))
    assert whole is not None
    assert "bnb_4bit_quant_storage" not in " ".join(whole.settings)


OF_QLORA = {"lora_rank": 16, "load_in_4bit": True}


@pytest.mark.parametrize("stack", ["accelerate", "trainer", "trl", "axolotl"])
def test_quantized_weights_that_fill_a_gpu_are_loaded_on_the_host(stack: Any) -> None:
    """transformers 5.23 loads them onto the GPU of each process otherwise, as a whole."""
    advice = advise("llama-3.1-70b", Request("rtx-3090", 2, stack=stack, **OF_QLORA))
    option = advice.recommended
    assert option is not None
    assert option.loaded_bytes > option.prediction.usable_bytes
    assert option.loads_on_host
    assert option.host_needed_bytes >= 2 * option.loaded_bytes  # one copy in each process
    start = launch.launch(advice)
    assert start is not None
    everything = " ".join([*start.files.values(), *start.settings])
    assert ("cpu_ram_efficient_loading: true" if stack == "axolotl" else 'device_map={"": "cpu"}') in everything
    small = launch.launch(advise("llama-3.1-8b", Request("rtx-3090", 2, stack=stack, strategy="fsdp2", **OF_QLORA)))
    assert small is not None
    assert "device_map" not in " ".join(small.settings)  # training needs more than loading


def test_zero3_is_refused_if_it_cannot_load_quantized_weights() -> None:
    advice = advise("llama-3.1-70b", Request("rtx-3090", 2, **OF_QLORA))
    assert "zero3" in advice.left_out
    with pytest.raises(Refusal, match="DeepSpeed places all 4-bit weights on each GPU"):
        advise("llama-3.1-70b", Request("rtx-3090", 2, strategy="zero3", **OF_QLORA))
    assert choose.fewest_gpus("llama-3.1-70b", Request("rtx-3090", **OF_QLORA)).fewest["zero3"] is None


def test_a_study_with_adapters_is_predicted_with_them():
    whole, adapter = (build_config(workload="gpt-wikitext", size="1.5b", lora_rank=rank) for rank in (None, 16))
    zero2 = read_by_name("zero2_tuned")
    (shape, engine), (adapted, _) = (run_in_theory.of_run(config, zero2, 8) for config in (whole, adapter))
    assert adapters.num_trainable(adapted) == 48 * 16 * (1600 + 3 * 1600)  # the matrix for query, key and value
    job = run_in_theory.job_of(adapter, 8, "gpu")
    assert peaks.peak(adapted, engine, job).total < 0.7 * peaks.peak(shape, engine, job).total


def test_a_target_that_no_module_has_is_refused_before_a_run():
    config = build_config(workload="gpt-wikitext", lora_rank=16, lora_target="q_proj")
    with pytest.raises(Refusal, match="q_proj"):
        run_in_theory.of_run(config, read_by_name("ddp"), 2)
