"""Build the models that are traced: those with formulas in theory, and others that transformers can build.

A dry run counts what the engine and the modules themselves hold and send, so it needs no formulas.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.auto import modeling_auto

from study.dryrun import count
from study.dryrun.model_parts import in_words, turn_off_dropout
from study.errors import Refusal, refusing
from study.ranks import forks
from study.theory import adapters, shapes
from study.theory.activations import is_eager
from study.theory.engine import Engine, Job
from study.theory.shapes import DEFAULT_LENGTH, ModelShape
from study.theory.shapes.adapter import ALL_LINEAR
from study.theory.shapes.config_json import MODEL_TYPES, ignored_settings
from study.theory.shapes.counts import Polynomial, from_content, to_content

LARGEST_ROTARY = 64  # the rotary dimension of GPT-J, as published
# If a config.json names no class, the first of these that has its model_type determines the class.
MAPPINGS = (
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)
# Names of the maximum sequence length in the configurations of models.
LENGTHS = ("max_position_embeddings", "n_positions", "max_source_positions")
LONGEST = 1 << 17  # tokens; the positions of a model whose configuration names no maximum
NOT_SETTINGS = ("architectures", "model_type", "quantization_config", "transformers_version", "torch_dtype", "dtype")
LABELS_PER_SEQUENCE = ("ForSequenceClassification",)  # endings of classes that have one label per sequence


@dataclass(frozen=True)
class Trainable:
    """A model that can be trained on batches of zeros."""

    name: str
    num_params: int
    sequence_length: int  # in tokens; the same for the encoder and the decoder of an encoder-decoder
    notes: tuple[str, ...]
    build: Callable[[Job], Any]  # the model, in fp32
    loss: Callable[[Any, dict[str, Tensor]], Any]
    batch: Callable[[Job], dict[str, Tensor]]
    blocks: Callable[[Any], list[str]]  # names of the classes that FSDP2 shards one by one


def find(name: str, sequence_length: int | None) -> Trainable:
    """Return a model by a known name, a config.json, an id on the hub, or the name of a transformers class.

    Raises Refusal if theory has no formulas for the model, and transformers cannot build it either.
    """
    try:
        with refusing():
            shape, length, notes = shapes.find_for_length(name, sequence_length)
    except Refusal as not_counted:
        if (class_and_config := find_class(name)) is None:
            raise not_counted from None
        return _of_class(*class_and_config, name, sequence_length)
    return of_shape(shape, length, tuple(notes))


def of_shape(shape: ModelShape, sequence_length: int, notes: tuple[str, ...] = ()) -> Trainable:
    """Return a trainable model of a shape from theory, with parameters in fp32."""
    if shape.config is not None:
        return _of_class(*class_of(shape.config, shape.name), shape.name, sequence_length, notes)
    return Trainable(
        shape.name,
        shape.num_params,
        sequence_length,
        notes,
        build=lambda job: build_model(shape, job, torch.float32),
        loss=lambda model, batch: loss(model, batch, shape),
        batch=partial(make_batch, shape),
        blocks=lambda model: [block_class(model, shape)],
    )


def with_adapter(described: Trainable, shape: ModelShape, engine: Engine) -> Trainable:
    """Return a trainable model with the adapter of its shape, as PEFT adds it. Without an adapter, the model itself.

    The frozen weights and the adapter have the types that theory describes. Raises Refusal if PEFT is not installed.
    """
    adapter = shape.adapter
    if adapter is None:
        return described
    if find_spec("peft") is None:
        raise Refusal("PEFT is not installed, so adapters cannot be traced. Run: pip install peft")
    import peft  # before there are fake tensors

    targets = adapters.target_names(shape, adapter)
    settings = peft.LoraConfig(
        r=adapter.rank,
        target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets),
        use_dora=adapter.kind == "dora",
        modules_to_save=list(adapter.modules_to_save) or None,
    )

    def build(job: Job) -> Any:
        model = described.build(job)
        if adapters.frozen_size(engine, adapter) == 2:
            model = model.bfloat16()
        return peft.get_peft_model(model, copy.copy(settings), autocast_adapter_dtype=adapter.in_fp32)

    return replace(described, build=build)


# ---------------------------------------------------------------- a shape's model


def model_config(shape: ModelShape, job: Job) -> Any:
    """Return the configuration of a shape's model as transformers needs it, without dropout.

    Settings that are not part of the shape are as published, or have transformers' defaults.
    """
    model_type, kind_of_model = next(
        (name, kind) for name, kind in MODEL_TYPES.items() if kind.architecture == shape.architecture
    )
    settings = {key: getattr(shape, part) for part, key in kind_of_model.keys.items()}
    if shape.architecture == "gpt-neo":
        settings["attention_types"] = [[["global", "local"], shape.layers // 2], [["global"], shape.layers % 2]]
    if shape.architecture == "gpt-j":
        settings["rotary_dim"] = min(LARGEST_ROTARY, shape.head_size)
    if shape.architecture == "mistral":
        settings["sliding_window"] = None  # which the planner ignores too
    settings |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    has_fused = shape.counts is None or any(kind.attention != Polynomial() for kind in shape.counts.kinds)
    attention = "eager" if is_eager(shape, job) or not has_fused else job.attention
    config = transformers.AutoConfig.for_model(
        model_type, num_labels=shape.labels, use_cache=False, attn_implementation=attention, **settings
    )
    turn_off_dropout(config)
    return config


def build_model(shape: ModelShape, job: Job, dtype: torch.dtype) -> Any:
    """Build the model in training mode. Its blocks are checkpointed if the job says so."""
    classes = next(kind.classes for kind in MODEL_TYPES.values() if kind.architecture == shape.architecture)
    name = next(name for name, head in classes.items() if head == shape.head)
    model = getattr(transformers, name)._from_config(model_config(shape, job), dtype=dtype).train()
    if shape.head == "tokens" and not shape.is_encoder:
        # Transformers would find no loss type for GPT2LMHeadModel, warn, and use this one.
        model.loss_type = "ForCausalLM"
    if job.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def block_class(model: nn.Module, shape: ModelShape) -> str:
    """Return the name of the class of the model's blocks.

    The blocks are found in the list of modules that has as many entries as the shape has layers.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == shape.layers]
    return type(lists[0][0]).__name__


def make_batch(shape: ModelShape, job: Job) -> dict[str, Tensor]:
    """Return one rank's micro batch of zeros, with shape (micro_batch_size, sequence_length).

    An encoder also gets an attention mask, because its real inputs are padded.
    """
    ids = torch.zeros(int(job.micro_batch_size), int(job.sequence_length), dtype=torch.long)
    labels = ids[:, 0] if shape.head == "sequence classes" else ids
    mask = {"attention_mask": torch.ones_like(ids)} if shape.is_encoder else {}
    return {"input_ids": ids, "labels": labels, **mask}


def loss(model: nn.Module, batch: dict[str, Tensor], shape: ModelShape) -> Any:
    """Return the loss as the study's workloads compute it.

    A model with tokens as outputs uses the loss of transformers. A model with classes uses cross-entropy in fp32.
    """
    if shape.head == "tokens":
        return model(**batch).loss
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return functional.cross_entropy(model(**inputs).logits.float().flatten(0, -2), batch["labels"].flatten())


# ---------------------------------------------------------------- transformers' own


def find_class(name: str) -> tuple[type[Any], Any] | None:
    """Return the transformers class and the configuration that a name stands for. None if it stands for no class.

    The name is that of a transformers class, the path of a config.json or an id on the hub. Raises Refusal if
    transformers rejects the configuration.
    """
    named_class = getattr(transformers, name, None)
    configuration: Any = getattr(named_class, "config_class", None)
    if inspect.isclass(named_class) and configuration is not None:
        return named_class, configuration()
    try:
        content, source = shapes.read_config(name)
    except ValueError:  # the caller raises the earlier Refusal for this name
        return None
    if any(inspect.isclass(getattr(transformers, name, None)) for name in _class_names(content)):
        return class_of(content, source)
    return None


def _class_names(content: Mapping[str, Any]) -> list[str]:
    """Return the names of the classes that a config.json stands for, those that it names first."""
    kind = content.get("model_type")
    of_type = [mapping[kind] for mapping in MAPPINGS if isinstance(kind, str) and kind in mapping]
    named = content.get("architectures") or []
    return [name for name in [*(named if isinstance(named, list) else []), *of_type] if isinstance(name, str)]


def class_of(content: Mapping[str, Any], source: str) -> tuple[type[Any], Any]:
    """Return the transformers class and the configuration of a config.json that stands for a class.

    Raises Refusal if transformers rejects the configuration.
    """
    class_name = next(name for name in _class_names(content) if inspect.isclass(getattr(transformers, name, None)))
    settings = {key: value for key, value in content.items() if key not in NOT_SETTINGS}
    try:
        return getattr(transformers, class_name), transformers.AutoConfig.for_model(content["model_type"], **settings)
    except Exception as error:  # a configuration class may raise anything
        raise Refusal(
            f"{source}: transformers cannot make a {class_name} from it ({in_words(error)}). Correct the file."
        ) from None


def shape_of_class(built: type[Any], config: Any, name: str) -> ModelShape:
    """Return the shape of a model of a class and a configuration of transformers, from a trace of its modules.

    Raises Refusal if it cannot be built or traced.
    """
    content = config.to_diff_dict() | {"model_type": config.model_type, "architectures": [built.__name__]}
    # In a fork, because a process in which a backward pass has run cannot be forked later.
    answer = forks.run(lambda: to_content(count.count(built, config)), {0: nullcontext()})[0]
    counts = from_content(answer)
    fixed = getattr(built, "main_input_name", "input_ids") == "pixel_values"
    positions = 1 if fixed else min([LONGEST, *_positions(config)])
    notes = ["each sequence is one image, and the tokens per second are images per second"] if fixed else []
    notes += ignored_settings(content, window_switch="use_sliding_window" if "use_sliding_window" in content else None)
    return shapes.traced(name, counts, positions, tuple(notes), content)


def _of_class(
    built: type[Any], config: Any, name: str, sequence_length: int | None, notes: tuple[str, ...] | None = None
) -> Trainable:
    """Return a trainable model of a transformers class for which theory has no formulas.

    Raises Refusal if transformers cannot build it.
    """
    _prepare(config)
    make = getattr(built, "_from_config", built)
    try:
        with torch.device("meta"):
            model = make(config)
    except Exception as error:  # any class and configuration may come here and raise anything
        reason = f"transformers cannot build {built.__name__} ({in_words(error)})"
        raise Refusal(f"{name}: {reason}. Correct its config.json.") from None
    return Trainable(
        built.__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        sequence_length or min([DEFAULT_LENGTH, *_positions(config)]),
        notes
        if notes is not None
        else (f"theory has no formulas for {built.__name__}, so it is built and run by transformers",),
        build=lambda job: _build(make, config, job),
        loss=lambda model, batch: _loss(model, batch, built.__name__),
        batch=lambda job: _batch(job, built.__name__),
        blocks=_blocks,
    )


def _prepare(config: Any) -> None:
    """Turn off dropout and the cache in a configuration, and set the decoder's first token if it has none."""
    turn_off_dropout(config)
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0


def _positions(config: Any) -> list[int]:
    """Return the maximum sequence lengths that a configuration names."""
    lengths = (getattr(config, key, None) for key in LENGTHS)
    return [length for length in lengths if isinstance(length, int) and length > 0]


def _build(make: Callable[[Any], Any], config: Any, job: Job) -> Any:
    model = make(config).float().train()
    if job.attention == "eager" and hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    if job.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _batch(job: Job, class_name: str) -> dict[str, Tensor]:
    """Return one rank's micro batch of zeros, with shape (micro_batch_size, sequence_length).

    The labels are the tokens themselves, or one label per sequence for a sequence classifier.
    """
    ids = torch.zeros(int(job.micro_batch_size), int(job.sequence_length), dtype=torch.long)
    return {"input_ids": ids, "labels": ids[:, 0] if class_name.endswith(LABELS_PER_SEQUENCE) else ids}


def _loss(model: Any, batch: dict[str, Tensor], class_name: str) -> Any:
    try:
        loss = getattr(model(**batch), "loss", None)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"its forward pass with tokens and labels fails ({in_words(error)})"
        raise Refusal(
            f"{class_name}: {reason}. Run the dry run with your own script, or choose another strategy."
        ) from None
    if loss is None:
        raise Refusal(
            f"{class_name}: this model computes no loss. Name a class with a head, or run the dry run with your own "
            "script."
        )
    return loss


def _blocks(model: nn.Module) -> list[str]:
    """Return the names of the classes of the model's repeated blocks.

    If transformers lists some of them as modules that must not be split, only these are returned.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    listed = {type(part).__name__ for modules in lists for part in modules}
    whole = getattr(model, "_no_split_modules", None) or ()
    return sorted(listed & set(whole)) or sorted(listed)
