"""Test the theory of adapters: parameters as PEFT counts them, saved activations, model states and published rows."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from typing import Any

import pytest

from study.theory import (
    activations,
    adapters,
)
from study.theory.adapters import Adapter
from study.theory.engine import Engine, Job
from study.theory.shapes.config_json import MODEL_TYPES, from_config

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
    if adapter.targets == (adapters.ALL_LINEAR,):
        targets = adapters.ALL_LINEAR
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
@pytest.mark.parametrize("targets", [None, ("all-linear",)], ids=["default", "all-linear"])
@pytest.mark.parametrize("model_type", sorted(adapters.DEFAULT_TARGETS))
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


def test_default_targets_are_those_of_peft() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    of_peft = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    for name in MODEL_TYPES.keys() - {"mixtral"}:  # listed, but PEFT stops with an error
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


def measured_block(model_type: str, adapter: Adapter, arithmetic: str) -> float:
    """Return the bytes that a block saves: half of the difference of models with four and with two blocks."""
    import torch

    layers = MODEL_TYPES[model_type].keys["layers"]
    totals = []
    for count in (2, 4):
        config = small_config(model_type)
        setattr(config, layers, count)
        model = small_model(config).to(torch.float32 if arithmetic == "fp32" else torch.bfloat16)
        adapted = with_peft(model, adapter, autocast_adapter_dtype=adapter.in_fp32).train()
        adapted.enable_input_require_grads()
        for module in adapted.modules():  # the model's own dropout, not that of the adapters
            if isinstance(module, torch.nn.Dropout) and module.p != ADAPTER_DROPOUT:
                module.p = 0.0
        totals.append(saved_bytes(adapted, arithmetic))
    return (totals[1] - totals[0]) / 2


def predicted_block(model_type: str, adapter: Adapter, arithmetic: str) -> float:
    """Return the predicted bytes, with autocast's copies of the adapters."""
    precision: Any = {"fp32": "fp32", "autocast": "bf16-autocast"}.get(arithmetic, "pure-bf16")
    shape = dataclasses.replace(from_config(small_config(model_type).to_dict(), "small"), adapter=adapter)
    copies = 2 * adapters.num_trainable(shape) / shape.layers if arithmetic == "autocast" else 0.0
    engine = Engine("torch", 0, 1, precision, 4)
    return activations.block_bytes(shape, engine, Job(BATCH, LENGTH, device="cpu")) + copies


@pytest.mark.computes
@pytest.mark.parametrize("arithmetic", ["fp32", "autocast", "16-bit adapters", "fp32 adapters"])
@pytest.mark.parametrize("has_dropout", [False, True], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("all-linear",), ("o_proj", "down_proj")], ids="-".join)
def test_a_block_saves_what_is_predicted(
    targets: tuple[str, ...], kind: Any, has_dropout: bool, arithmetic: str
) -> None:
    pytest.importorskip("peft")
    adapter = Adapter(4, targets, kind, has_dropout, in_fp32=arithmetic != "16-bit adapters")
    measured, predicted = (of("llama", adapter, arithmetic) for of in (measured_block, predicted_block))
    assert measured == pytest.approx(predicted, rel=0.015)


@pytest.mark.computes
@pytest.mark.parametrize("arithmetic", ["fp32", "autocast", "fp32 adapters"])
@pytest.mark.parametrize("model_type", ["gpt2", "bert", "qwen3", "gemma2", "opt", "gpt_neox"])
def test_a_block_of_other_models_saves_what_is_predicted(model_type: str, arithmetic: str) -> None:
    pytest.importorskip("peft")
    measured, predicted = (of(model_type, Adapter(4), arithmetic) for of in (measured_block, predicted_block))
    assert measured == pytest.approx(predicted, rel=0.03)
