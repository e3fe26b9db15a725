"""When is a bucket of gradients full, and what is then sent? Sizes in elements, and in bytes where that is said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from study.theory.case import Engine
from study.theory.communication.model_order import Parameter

Collective = tuple[str, int]  # its kind, and the bytes of its whole tensor

ENGINE_BUCKET_ELEMENTS = 500_000_000  # engine.py, MEMORY_OPT_ALLREDUCE_SIZE: without ZeRO, whatever is configured


def sent_bytes(engine: Engine, parameter: Parameter) -> int:
    """Bytes of an element as it is sent; engine.py, communication_data_type, and torch_autocast.py."""
    return 2 if parameter.is_lowered else engine.parameter_bytes


def chunks(numels: Iterable[int], limit: int) -> Iterator[int]:
    """Yield elements of flat tensors that are closed when they hold more than a limit (engine.py)."""
    held = 0
    for numel in numels:
        held += numel
        if held > limit:
            yield held
            held = 0
    if held:
        yield held


def full_buckets(engine: Engine, order: Sequence[Parameter]) -> Iterator[tuple[int, list[Parameter]]]:
    """Yield full buckets, with the bytes of their elements: one is open for each type that is communicated."""
    held: dict[int, list[Parameter]] = defaultdict(list)
    elements: dict[int, int] = defaultdict(int)
    for parameter in order:
        size = sent_bytes(engine, parameter)
        if held[size] and elements[size] + parameter.numel > engine.reduce_bucket_size:
            yield size, held.pop(size)
            elements[size] = 0
        held[size].append(parameter)
        elements[size] += parameter.numel
    yield from held.items()
