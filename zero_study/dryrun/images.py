"""Describe the images that vision-language models of transformers read, and the vision tower that encodes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_study.dryrun.fake import with_memory
from zero_study.engines.hooks import wrap_function

# Functions of transformers.vision_utils that compute from the sizes of images, and read the results.
OF_SIZES = ("get_vision_position_ids", "get_vision_attention_seqlens", "get_vision_window_index", "get_max_seqlen")


@dataclass(frozen=True)
class Family:
    """The vision-language models of one model_type: where their vision tower is, and the assumed size of an image."""

    tower: str  # a module of the model without its head
    projectors: tuple[str, ...] = ()  # modules inside the tower that make tokens of its output. Empty: they are outside
    side: int | None = None  # pixels, of models that read images of any size. None: as the configuration says


# 756 and 768 pixels: the largest multiples of 28 and 32 in a square of 768 x 768 pixels, LLaMA-Factory's default
# image_max_pixels. An image of InternVL is one tile.
FAMILIES = {
    "llava": Family("vision_tower"),
    "internvl": Family("vision_tower"),
    "qwen2_vl": Family("visual", ("merger",), 756),
    "qwen2_5_vl": Family("visual", ("merger",), 756),
    "qwen3_vl": Family("visual", ("merger", "deepstack_merger_list"), 768),
}


def family_of(config: Any) -> Family | None:
    """Return the family of a model by its configuration. None if its images are not counted."""
    return FAMILIES.get(config.model_type)


def size(config: Any) -> tuple[int, int]:
    """Return the side length of an image in pixels, and its number of tokens.

    The configuration must be of a model that has a family.
    """
    family, vision = FAMILIES[config.model_type], config.vision_config
    side = family.side or _first(vision.image_size)
    merged = getattr(vision, "spatial_merge_size", round(1 / getattr(config, "downsample_ratio", 1)))
    return side, (side // _first(vision.patch_size) // merged) ** 2


def _first(size: Any) -> int:
    """Return the first of two equal sizes, or the only size."""
    return int(size[0] if isinstance(size, list | tuple) else size)


def freeze(model: Any) -> None:
    """Freeze the vision tower of a model, but not the projector that turns its output into tokens."""
    family = FAMILIES[model.config.model_type]
    tower = getattr(model.model, family.tower)
    tower.requires_grad_(False)
    for name in family.projectors:
        getattr(tower, name).requires_grad_(True)


def make_images(config: Any, count: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `count` images of zeros as input for a model."""
    vision, (side, _) = config.vision_config, size(config)
    if FAMILIES[config.model_type].side is None:
        return {"pixel_values": torch.zeros(count, 3, side, side, dtype=dtype)}
    patches = side // vision.patch_size
    values = 3 * vision.temporal_patch_size * vision.patch_size**2
    with_values = with_memory(torch.tensor, [[1, patches, patches]] * count)
    return {
        "pixel_values": torch.zeros(count * patches**2, values, dtype=dtype),
        "image_grid_thw": with_values,
    }


def features(model: Any, images: dict[str, Tensor]) -> list[Tensor]:
    """Return the embeddings of the image tokens into which a model turns images."""
    return list(model.get_image_features(**images).pooler_output)


@contextmanager
def readable_sizes(model: Any) -> Iterator[None]:
    """Let a model read numbers that it computes from the sizes of images, inside the `with` block.

    It does not compare the number of image tokens in a text with the images, because tokens have no values here.
    """
    if hasattr(model, "get_base_model"):  # with adapters of PEFT
        model = model.get_base_model()
    own = next(each for each in type(model).__mro__ if each.__module__.startswith("transformers.models."))
    module = sys.modules[own.__module__]
    with ExitStack() as stack:
        stack.enter_context(wrap_function(module, "torch_compilable_check", lambda call, *arguments, **options: None))
        for name in OF_SIZES:
            if hasattr(module, name):
                stack.enter_context(wrap_function(module, name, with_memory))
        yield
