"""Find models for dry runs: those that the predictions know by formulas, and others that transformers can build.

A dry run counts what the engine and the modules themselves hold and send, so it needs no formulas.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from zero_study import terminal
from zero_study.dryrun import build_model, count, images
from zero_study.dryrun.build_model import block_lists, in_words, positions, reads_images
from zero_study.dryrun.one_pass import is_float
from zero_study.errors import Refusal, refusing
from zero_study.ranks import forks
from zero_study.theory import adapters, shapes
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes import DEFAULT_LENGTH, ModelShape
from zero_study.theory.shapes.adapter import ALL_LINEAR
from zero_study.theory.shapes.config_json import ignored_settings
from zero_study.theory.shapes.counts import ImageCounts, ModelCounts, from_content, to_content

# If a config.json names no class, the first of these that has its model_type determines the class.
MAPPINGS = (
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
LONGEST = 1 << 17  # tokens; the positions of a model whose configuration names no maximum
NOT_SETTINGS = ("architectures", "model_type", "quantization_config", "transformers_version", "torch_dtype", "dtype")


@dataclass(frozen=True)
class Trainable:
    """A model that a dry run can build and train on batches of zeros."""

    name: str
    num_params: int
    sequence_length: int  # in tokens; the same for the encoder and the decoder of an encoder-decoder
    notes: tuple[str, ...]
    build: Callable[[StepConfig], Any]  # the model, in fp32
    loss: Callable[[Any, dict[str, Tensor]], Any]
    batch: Callable[[StepConfig], dict[str, Tensor]]
    blocks: Callable[[Any], list[str]]  # names of the classes that FSDP2 shards one by one
    reads_images: bool = False  # whether a sequence is one image

    def batch_in_words(self, micro_batch_size: int) -> str:
        """Return the size of a micro batch as text."""
        if self.reads_images:
            return terminal.count(micro_batch_size, "image")
        return f"{micro_batch_size} x {self.sequence_length} tokens"


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
    """Return a trainable model with the shape of a known model, with parameters in fp32."""
    if shape.config is None:
        raise Refusal(
            f"{shape.name}: only the numbers of its parameters are known, so transformers "
            "cannot build it. Choose another model."
        )
    built, config = class_of(shape.config, shape.name)
    described = _of_class(built, config, shape.name, sequence_length, notes)
    return _with_images(described, shape, config) if shape.num_images else described


def _with_images(described: Trainable, shape: ModelShape, config: Any) -> Trainable:
    """Return a trainable model that reads texts with images, and whose vision tower may be frozen."""

    def build(job: StepConfig) -> Any:
        model = described.build(job)
        if shape.counts.frozen is not None:
            images.freeze(model)
        return model

    def batch(job: StepConfig) -> dict[str, Tensor]:
        number = int(job.micro_batch_size) * shape.num_images
        return described.batch(job) | images.make_images(config, number, torch.float32)

    def loss(model: Any, batch: dict[str, Tensor]) -> Any:
        with images.readable_sizes(getattr(model, "module", model)):
            return described.loss(model, batch)

    return replace(described, build=build, batch=batch, loss=loss)


def with_adapter(described: Trainable, shape: ModelShape, engine: Engine) -> Trainable:
    """Return a trainable model with the adapter of its shape, as PEFT adds it, or the model itself without an adapter.

    The frozen weights and the adapter have the data types that `engine` describes. Raises Refusal if PEFT is not
    installed.
    """
    adapter = shape.adapter
    if adapter is None:
        return described
    if find_spec("peft") is None:
        raise Refusal("PEFT is not installed, so adapters cannot be traced. Run `pip install peft`.")
    import peft  # before there are fake tensors

    targets = adapters.target_names(shape, adapter)
    settings = peft.LoraConfig(
        r=adapter.rank,
        target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets),
        exclude_modules=".*(visual|vision_tower|multi_modal_projector).*" if shape.counts.frozen is not None else None,
        use_dora=adapter.kind == "dora",
        modules_to_save=list(adapter.modules_to_save) or None,
    )

    def build(job: StepConfig) -> Any:
        model = described.build(job)
        if adapters.frozen_size(engine, adapter) == 2:
            model = model.bfloat16()
        return peft.get_peft_model(model, copy.copy(settings), autocast_adapter_dtype=adapter.in_fp32)

    return replace(described, build=build)


# ---------------------------------------------------------------- transformers' own


def find_class(name: str) -> tuple[type[Any], Any] | None:
    """Return the transformers class and the configuration of the model `name`. None if there is no such class.

    The name is that of a transformers class, the path of a config.json or an id on the hub. Raises Refusal if
    transformers has no class for the configuration, or rejects it.
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
    if (model_type := content.get("model_type")) is None:
        return None
    own_code = " Its own code (auto_map) is not read." if content.get("auto_map") else ""
    raise Refusal(
        f"{source}: transformers {transformers.__version__} has no class for model_type {model_type!r}.{own_code} Use "
        "the config.json of a model that transformers has, or install a release that has this model type."
    )


def _class_names(content: Mapping[str, Any]) -> list[str]:
    """Return the names of the classes that fit a config.json. Those that it names come first."""
    kind = content.get("model_type")
    of_type = [mapping[kind] for mapping in MAPPINGS if isinstance(kind, str) and kind in mapping]
    named = content.get("architectures") or []
    return [name for name in [*(named if isinstance(named, list) else []), *of_type] if isinstance(name, str)]


def class_of(content: Mapping[str, Any], source: str) -> tuple[type[Any], Any]:
    """Return the transformers class and the configuration that a config.json describes.

    Raises Refusal if transformers rejects the configuration.
    """
    class_name = next(name for name in _class_names(content) if inspect.isclass(getattr(transformers, name, None)))
    settings = {key: value for key, value in content.items() if key not in NOT_SETTINGS}
    try:
        config = transformers.AutoConfig.for_model(content["model_type"], **settings)
    except Exception as error:  # a configuration class may raise anything
        raise Refusal(
            f"{source}: transformers cannot make a {class_name} from this file ({in_words(error)}). Correct the file."
        ) from None
    if quantization := content.get("quantization_config"):  # only for the note that it is ignored
        config.quantization_config = quantization
    return getattr(transformers, class_name), config


def shape_of_class(
    built: type[Any],
    config: Any,
    name: str,
    has_image: bool = False,
    freezes: tuple[bool, ...] = (False, True),
    has_adapters: bool = False,
) -> ModelShape:
    """Return the shape of a transformers model as an input for predictions, from a trace of its modules.

    With `has_image`, the shape of a model of one of `images.FAMILIES` has its counts with images, too, for a trained
    and a frozen vision tower (`freezes`). With `has_adapters`, the counts have what adapters on frozen weights need.

    Raises Refusal if it cannot be built or traced.
    """
    content = config.to_diff_dict() | {"model_type": config.model_type, "architectures": [built.__name__]}
    rates = build_model.dropout_rates(config)
    counts = _counted(built, config, has_adapters=has_adapters)
    image = size_of_image(built, config) if reads_images(built) else None
    notes = ignored_settings(content, window_switch="use_sliding_window" if "use_sliding_window" in content else None)
    with_image = None
    if has_image and images.family_of(config) is not None:
        of_images = {
            is_frozen: _counted(
                built,
                config,
                attention=("sdpa",),
                has_image=True,
                has_frozen_tower=is_frozen,
                has_adapters=has_adapters,
            )
            for is_frozen in freezes
        }
        side, tokens = images.size(config)
        with_image = ImageCounts(f"{side} x {side} pixels", tokens, of_images.get(False), of_images.get(True))
    return shapes.shape_from_counts(
        name, counts, _longest(built, config), tuple(notes), content, rates, image, with_image
    )


def _counted(built: type[Any], config: Any, **settings: Any) -> ModelCounts:
    """Return counts from a process of its own, because one in which a backward pass has run cannot be forked later."""
    return from_content(forks.run(lambda: to_content(count.count(built, config, **settings)), {0: nullcontext()})[0])


def size_of_image(built: type[Any], config: Any) -> str:
    """Return the size of an image that a model reads, as text."""
    image = build_model.image_shape(config, set(inspect.signature(built.forward).parameters))
    return f"{image[0]} patches" if len(image) == 2 else f"{image[1]} x {image[2]} pixels"


def _longest(built: type[Any], config: Any) -> int:
    """Return the longest sequence that a model accepts, in tokens. For a model of images, it is 1."""
    return 1 if reads_images(built) else min([LONGEST, *positions(config)])


def _of_class(
    built: type[Any], config: Any, name: str, sequence_length: int | None, notes: tuple[str, ...] | None = None
) -> Trainable:
    """Return a trainable model of a transformers class.

    Raises Refusal if transformers cannot build it.
    """
    build_model.prepare(config)
    try:
        with torch.device("meta"):
            model, _ = build_model.build(built, config)
    except Refusal as refusal:
        raise Refusal(f"{name}: {refusal}. Correct its config.json.") from None
    return Trainable(
        built.__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        sequence_length or min(DEFAULT_LENGTH, _longest(built, config)),
        notes
        if notes is not None
        else (f"theory has no formulas for {built.__name__}, so transformers builds and runs the model",),
        build=lambda job: _build(built, config, job),
        loss=_loss,
        batch=lambda job: _batch(model, job),
        blocks=block_classes,
        reads_images=reads_images(built),
    )


def _build(built: type[Any], config: Any, job: StepConfig) -> Any:
    """Build the model in fp32, with activation checkpointing if the job says so."""
    model, _ = build_model.build(built, config, "eager" if job.attention == "eager" else "sdpa")
    if getattr(model, "loss_type", "") is None:
        # Transformers would find no loss type for GPT2LMHeadModel, warn, and use this one.
        model.loss_type = "ForCausalLM"
    if job.activation_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise Refusal(f"{built.__name__}: {error} Leave activation checkpointing off.") from None
    return model.float()


def _batch(model: nn.Module, job: StepConfig) -> dict[str, Any]:
    """Return one rank's micro batch of zeros with labels, for a model whose tensors may be on another device."""
    batch, length = int(job.micro_batch_size), int(job.sequence_length)
    labels = build_model.make_labels(model, batch, length)
    return build_model.make_inputs(model, batch, length, torch.float32) | labels


def _loss(model: Any, batch: dict[str, Any]) -> Any:
    """Return the loss that a model computes. Images and sound are cast to the type of its parameters."""
    dtype = next(model.parameters()).dtype
    inputs = {name: tensor.to(dtype) if is_float(tensor) else tensor for name, tensor in batch.items()}
    try:
        loss = getattr(model(**inputs), "loss", None)
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"its forward pass with {' and '.join(inputs)} fails ({in_words(error)})"
        raise Refusal(
            f"{_class_name(model)}: {reason}. Run the dry run with your own script, or choose another strategy."
        ) from None
    if loss is None:
        raise Refusal(
            f"{_class_name(model)}: this model computes no loss. Name a class with a head, or run the dry run with "
            "your own script."
        )
    return loss


def _class_name(model: Any) -> str:
    """Return the name of a model's class, without the wrapper of an engine and the prefix that FSDP2 adds."""
    return type(getattr(model, "module", model)).__name__.removeprefix("FSDP")


def block_classes(model: nn.Module) -> list[str]:
    """Return the class names of the model's repeated blocks, which FSDP2 shards one by one."""
    return sorted({type(block).__name__ for _, blocks in block_lists(model) for block in blocks})
