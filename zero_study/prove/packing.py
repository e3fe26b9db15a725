"""Find causal attention between the documents of packed rows, whose position ids start again within a row."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SOFTMAX = (torch.Tensor.softmax, torch.softmax, functional.softmax)  # they take `dim` as second argument
_EXCLUDES = -50.0  # a mask adds a smaller number to exclude a key: exp(-50) is 2e-22
_NOTHING = 1e-12  # a smaller attention weight is none
_MOST_BORDERS = 16  # that are judged in a forward pass
_CHECK = "attention between packed documents"


class _Border(NamedTuple):
    """Two neighboring documents of a row, by the places of tokens in it."""

    row: int
    before: int  # the first token of the document before the border
    last: int  # its last token
    first: int  # the first token of the document after the border


class Packing:
    """The packed documents of a step, and whether attention crosses the borders between them.

    Only causal attention is judged, because a bidirectional model may attend to several segments on purpose.
    """

    def __init__(self) -> None:
        self._borders: list[_Border] = []  # of the current forward pass
        self._shape: tuple[int, int] = (0, 0)  # rows and tokens of the position ids
        self._has_borders = self._was_read = self._is_crossed = False
        self._error: str | None = None

    def observed(self, arguments: dict[str, Any]) -> TorchFunctionMode:
        """Return a context for a forward pass with these named arguments, in which calls of attention are read."""
        self._borders = []
        self._guarded(self._note_inputs, arguments)
        self._has_borders = self._has_borders or bool(self._borders)
        return _Attention(self)

    def note_call(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """Read a call of a function of PyTorch, if it is attention of packed rows."""
        if self._borders:
            self._guarded(self._note_call, function, arguments, options, result)

    def findings(self) -> list[str]:
        if not self._is_crossed:
            return []
        return [
            "attention crosses documents: the position ids start again within rows of the batch, but the causal mask "
            "lets a token attend to the document before its own. Pass a mask that separates the documents. Models of "
            "transformers make one from the position ids if attention_mask is None and use_cache is False."
        ]

    def not_checked(self) -> list[str]:
        """Return why the attention of packed rows could not be checked. Empty if it was, or if no row is packed."""
        if self._error is not None:
            return [f"{_CHECK} ({self._error})"]
        if not self._has_borders or self._was_read:
            return []
        return [f"{_CHECK} (no causal scaled_dot_product_attention or softmax over whole rows was called)"]

    def _guarded(self, read: Callable[..., None], *arguments: Any) -> None:
        try:
            read(*arguments)
        except Exception as error:  # the training continues
            self._borders, self._error = [], f"{type(error).__name__}: {error}"

    def _note_inputs(self, arguments: dict[str, Any]) -> None:
        positions = _rows(arguments.get("position_ids"))
        if positions is None or any("decoder" in name for name in arguments):  # the decoder has its own documents
            return
        self._shape = (len(positions), positions.shape[1])
        is_padding, is_unused = (
            torch.zeros_like(positions) if values is None or values.shape != positions.shape else values == excluded
            for values, excluded in (
                (_rows(arguments.get("attention_mask")), 0),
                (_rows(arguments.get("labels")), -100),
            )
        )
        for row, numbers in enumerate(positions.tolist()):
            # Padding may have position ids of its own, but no labels.
            documents = [
                own for own in _documents(numbers, is_padding[row].tolist())
                if not is_unused[row, own.start : own.stop].all()
            ]  # fmt: skip
            self._borders += [
                _Border(row, before.start, before.stop - 1, after.start)
                for before, after in itertools.pairwise(documents)
                if numbers[after.start] <= numbers[before.stop - 1]
            ]
        del self._borders[_MOST_BORDERS:]

    def _note_call(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        if function is functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), arguments, strict=False))
            named |= options
            query, key, mask = named["query"], named["key"], named.get("attn_mask")
            if query.shape[-2] == key.shape[-2] and self._fits(query, query.shape[-2]):
                if mask is not None:
                    self._judge(mask, lambda value: bool(value) if mask.dtype == torch.bool else value > _EXCLUDES)
                elif named.get("is_causal"):
                    self._was_read = self._is_crossed = True
        elif function in _SOFTMAX and result.shape[-2:-1] == result.shape[-1:] and self._fits(result, result.shape[-1]):
            dim = options.get("dim", arguments[1] if len(arguments) > 1 else None)
            if dim in (-1, 3):
                self._judge(result.detach(), lambda value: value > _NOTHING)

    def _fits(self, tensor: Any, length: int) -> bool:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        rows, tokens = self._shape
        return is_plain and tensor.dim() == 4 and length == tokens and (rows == 1 or tensor.shape[0] == rows)

    def _judge(self, values: torch.Tensor, allows: Callable[[float], bool]) -> None:
        """Judge a mask or attention weights, whose shape can be broadcast to (batch, heads, tokens, tokens)."""
        whole = values.reshape((1,) * (4 - values.dim()) + values.shape)

        def attends(row: int, query: int, key: int) -> bool:
            place = (row, 0, query, key)  # one head is enough, because all heads of a layer have the same mask
            clipped = (min(number, size - 1) for number, size in zip(place, whole.shape, strict=True))
            return allows(float(whole[tuple(clipped)]))

        for row, before, last, first in self._borders:
            is_crossed = attends(row, first, last)
            is_causal = not attends(row, before, before + 1) and not attends(row, last, first)
            self._was_read = self._was_read or is_causal or not is_crossed
            self._is_crossed = self._is_crossed or (is_causal and is_crossed)


class _Attention(TorchFunctionMode):
    def __init__(self, packing: Packing) -> None:
        super().__init__()
        self._packing = packing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._packing.note_call(func, args, kwargs or {}, result)
        return result


def _rows(value: Any) -> torch.Tensor | None:
    """Return integers with the shape (rows, tokens) on the CPU. None if a value is something else."""
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dim() not in (1, 2):
        return None
    return value.detach().cpu().reshape(-1, value.shape[-1])


def _documents(numbers: list[int], is_padding: list[bool]) -> list[range]:
    """Return the runs of at least two tokens whose positions rise by one, without padding."""
    documents, begin = [], 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1 or is_padding[place]:
            own = [each for each in range(begin, place) if not is_padding[each]]
            if len(own) > 1:
                documents.append(range(own[0], own[-1] + 1))
            begin = place
    return documents
