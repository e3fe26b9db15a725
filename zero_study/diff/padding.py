"""Find the positions of a batch that are padding, so that rows can be compared without it.

A row of tokens is padded at its end or at its beginning. Its padding is where the attention mask is 0, or, without a
mask, where the token is the padding token of the model and has no label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

NO_LABEL = -100  # the label that PyTorch's losses ignore
_LABELS = ("label", "labels", "target", "targets")
_NO_TOKENS = ("position", "token_type", "segment")  # beginnings of names that end in "ids"


class Filling(NamedTuple):
    """How a model pads the rows of its batches: its padding token, and whether it is an encoder-decoder."""

    token: int | None  # None if it is unknown
    is_encoder_decoder: bool  # the labels are those of the decoder, and have a length of their own


def filling(model: Any) -> Filling:
    """Return the padding token of a model, and whether the model is an encoder-decoder.

    The token is that of the configuration, or else that of the first embedding that has one.
    """
    modules = list(model.modules())
    configurations = [config for module in modules if (config := getattr(module, "config", None)) is not None]
    tokens = [getattr(config, "pad_token_id", None) for config in configurations]
    tokens += [getattr(module, "padding_idx", None) for module in modules]
    token = next((token for token in tokens if type(token) is int and token >= 0), None)
    return Filling(token, any(getattr(config, "is_encoder_decoder", False) is True for config in configurations))


def kept_positions(tensors: Mapping[str, torch.Tensor], fill: Filling) -> dict[str, np.ndarray]:
    """Return a mask of the positions that are not padding, for each input that has one value per position.

    Masks have the shape (rows, length). Inputs whose padding is unknown are left out.
    """
    last_names = {name: name.rpartition(".")[2].lower() for name in tensors}
    is_of_decoder = {
        name: last.startswith("decoder_") or (fill.is_encoder_decoder and last in _LABELS)
        for name, last in last_names.items()
    }
    positions: dict[str, np.ndarray] = {}
    for decoder in (False, True):
        side = {name: tensor for name, tensor in tensors.items() if is_of_decoder[name] == decoder and tensor.ndim > 1}
        positions |= _kept_of_side({name: (last_names[name], tensor) for name, tensor in side.items()}, fill)
    return positions


def _kept_of_side(side: Mapping[str, tuple[str, torch.Tensor]], fill: Filling) -> dict[str, np.ndarray]:
    """Return a mask of the positions that are not padding, for the inputs of the encoder or of the decoder."""
    numbers = {
        name: (last, tensor.cpu().numpy())
        for name, (last, tensor) in side.items()
        if tensor.ndim == 2 and tensor.numel() and tensor.dtype in _WHOLE_NUMBERS
    }
    masks = [_meaning(last, values) for last, values in numbers.values() if _is_mask(last)]
    tokens = [values for last, values in numbers.values() if _is_tokens(last) and values.dtype.kind in "iu"]
    labels = [values for last, values in numbers.values() if last in _LABELS]
    positions = masks[0] if masks and masks[0].any(axis=1).all() else _kept_without_mask(tokens, labels, fill.token)
    if positions is None:
        return {}
    alike = {name: positions for name, (_, tensor) in side.items() if tuple(tensor.shape[:2]) == positions.shape}
    for name in alike:
        last, values = numbers.get(name, ("", positions))
        if last in _LABELS:  # a label at a padded position counts in the loss, unless it is the padding token
            repeats = [values == row for row in tokens if row.shape == values.shape]
            alike[name] = positions | ((values != NO_LABEL) & ~(repeats[0] if repeats else False))
    return alike


_WHOLE_NUMBERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32}


def _is_mask(last: str) -> bool:
    return last in ("mask", "input_mask") or last.endswith(("attention_mask", "padding_mask"))


def _meaning(last: str, values: np.ndarray) -> np.ndarray:
    """Return a mask of the positions to which attention is paid. A Boolean padding mask of PyTorch marks the others."""
    is_of_padding = last.endswith("padding_mask") and values.dtype == bool
    meaning: np.ndarray = ~values if is_of_padding else values != 0
    return meaning


def _is_tokens(last: str) -> bool:
    is_positional = last.startswith("argument ")
    return is_positional or last in ("ids", "tokens", "x") or (last.endswith("ids") and not last.startswith(_NO_TOKENS))


def _kept_without_mask(tokens: list[np.ndarray], labels: list[np.ndarray], pad: int | None) -> np.ndarray | None:
    """Return a mask of the positions that are not padding at an end of a row. None if padding cannot be known."""
    if not tokens:
        return ~_runs(labels[0] == NO_LABEL) if labels else None
    ids = tokens[0]
    unlabeled = [array == NO_LABEL for array in labels if array.shape == ids.shape]
    if pad is None and not unlabeled:
        return None
    if pad is None:  # only a run at the end is known to be padding; a prompt has no labels, too
        return ~_trailing((ids == ids[:, -1:]) & unlabeled[0])
    return ~_runs((ids == pad) & unlabeled[0] if unlabeled else ids == pad)


def _runs(is_filled: np.ndarray) -> np.ndarray:
    """Return a mask of the filled positions at the beginning and at the end of each row."""
    leading = np.logical_and.accumulate(is_filled, axis=1)
    runs: np.ndarray = leading | _trailing(is_filled)
    return runs


def _trailing(is_filled: np.ndarray) -> np.ndarray:
    """Return a mask of the filled positions at the end of each row."""
    trailing: np.ndarray = np.logical_and.accumulate(is_filled[:, ::-1], axis=1)[:, ::-1]
    return trailing
