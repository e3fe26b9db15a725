"""Find attention between the documents of packed rows, whose position ids start again at 0 within a row."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SOFTMAX = (torch.Tensor.softmax, torch.softmax, functional.softmax)
_EXCLUDES = -1e4  # a number in a mask that is not larger excludes a key
_CHECK = "attention between packed documents"


class Packing:
    """The packed documents of a step, and the borders between them that attention crosses."""

    def __init__(self) -> None:
        self.num_borders = 0  # between two documents of one row, in the forward passes of the step
        self.num_read = 0  # calls of attention that could be read
        self.num_crossed = 0  # borders that the attention of at least one layer crosses
        self._shape: tuple[int, ...] = ()  # (batch, sequence) of the current pass, if it has packed rows
        # The row and the position at which a document follows another, and whether attention crosses this border.
        self._borders: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._padding: torch.Tensor | None = None

    def observed(self) -> TorchFunctionMode:
        """Return a context for a forward pass in which the calls of attention are read."""
        return _Attention(self)

    def note_inputs(self, options: dict[str, Any]) -> None:
        """Take the position ids and the padding from the named inputs of the model or of one of its modules."""
        mask, positions = _rows_of_integers(options, "attention_mask"), _rows_of_integers(options, "position_ids")
        if mask is not None:
            self._padding = mask == 0
        if self._borders is None and positions is not None:
            rows, starts = _borders(positions, self._padding)
            self._shape, self._borders = tuple(positions.shape), (rows, starts, torch.zeros_like(rows).bool())
            self.num_borders += len(rows)

    def end_forward(self) -> None:
        """Count the crossed borders of the forward pass that ends."""
        self.num_crossed += 0 if self._borders is None else int(self._borders[2].sum())
        self._borders = self._padding = None

    def note_mask(self, query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **__: Any) -> None:
        """Read the mask of a call of `scaled_dot_product_attention`. Without a mask, every border is crossed."""
        if self._fits(query, query.shape[-2]) and key.shape[-2] == query.shape[-2]:
            self._note(attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask > _EXCLUDES)

    def note_weights(self, weights: Any) -> None:
        """Read the results of a softmax, if they have the shape of attention weights."""
        if self._fits(weights, weights.shape[-1]) and weights.shape[-2:-1] == weights.shape[-1:]:
            self._note(weights > 0)

    def _fits(self, tensor: Any, length: int) -> bool:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        return is_plain and tensor.dim() == 4 and self._borders is not None and length == self._shape[1]

    def _note(self, allowed: torch.Tensor | None) -> None:
        """Record the borders at which the first token of a document may attend to the token before it."""
        assert self._borders is not None
        rows, starts, crossed = self._borders
        self.num_read += 1
        if allowed is None:
            crossed[:] = True
            return
        heads = allowed.reshape((1,) * (4 - allowed.dim()) + allowed.shape)
        heads = heads.expand(self._shape[0], *heads.shape[1:])
        crossed |= heads[rows, :, starts, starts - 1].any(1)

    def findings(self) -> list[str]:
        if not self.num_crossed:
            return []
        return [
            "attention crosses documents: the position ids start again at 0 within rows of the batch, but the mask "
            "lets a token attend to the document before its own. Pass a mask that separates the documents. Models of "
            "transformers make one from the position ids if attention_mask is None and use_cache is False."
        ]

    def not_checked(self) -> list[str]:
        """Return why the attention of packed rows could not be checked. Empty if it was, or if no row is packed."""
        if not self.num_borders or self.num_read:
            return []
        return [f"{_CHECK} (neither scaled_dot_product_attention nor a softmax over whole rows was called)"]


class _Attention(TorchFunctionMode):
    def __init__(self, packing: Packing) -> None:
        super().__init__()
        self._packing = packing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is functional.scaled_dot_product_attention:
            self._packing.note_mask(*args, **(kwargs or {}))
        elif func in _SOFTMAX:
            self._packing.note_weights(result)
        return result


def _rows_of_integers(options: dict[str, Any], name: str) -> torch.Tensor | None:
    """Return the named input if it is a tensor of integers with the shape (batch, sequence)."""
    value = options.get(name)
    is_rows = isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim() == 2
    return value if is_rows else None


def _borders(positions: torch.Tensor, padding: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the position of the first token of each document that follows another in its row.

    `positions` and `padding` have the shape (batch, sequence). A single token before a border counts as padding, whose
    position is 0 or 1.
    """
    starts = positions == 0
    if padding is not None and padding.shape == positions.shape:
        starts &= ~padding
        starts[:, 1:] &= ~padding[:, :-1]
    continues = torch.zeros_like(starts)
    continues[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
    is_border = starts.clone()
    is_border[:, :1] = False
    is_border[:, 1:] &= continues[:, :-1]  # the token before it belongs to a document of at least two tokens
    is_border[:, :-1] &= continues[:, 1:]  # so does this one
    is_border[:, -1:] = False
    rows, places = is_border.nonzero(as_tuple=True)
    return rows, places
