"""What do the papers' own formulas say of a claim: bytes of model states, and what is moved? And counts of models."""

from __future__ import annotations

from typing import Any

from study.claims.observed import Observed
from study.claims.rules.cases import model_of, shape_of
from study.theory import communication, hardware, model_states
from study.theory.case import Engine


def paper_bytes_per_parameter(zero_stage: int, world_size: int, precision: str) -> Observed:
    """Bytes of model states that a rank holds per parameter."""
    parts = model_states.paper_bytes_per_parameter(zero_stage, world_size, precision)
    return Observed(parts.total, (_parts_in_words(parts),))


def paper_total_bytes(num_params: float, zero_stage: int, world_size: int, precision: str) -> Observed:
    """Bytes of model states that a rank holds."""
    parts = model_states.paper_bytes_per_parameter(zero_stage, world_size, precision)
    return Observed(num_params * parts.total, (f"{num_params:g} x ({_parts_in_words(parts)})",), in_bytes=True)


def paper_reduction(zero_stage: int, world_size: int, precision: str) -> Observed:
    """Bytes at stage 0 over those at this stage."""
    return paper_ratio(
        {"zero_stage": 0, "world_size": world_size, "precision": precision},
        {"zero_stage": zero_stage, "world_size": world_size, "precision": precision},
    )


def paper_peak_reduction(zero_stage: int, world_size: int, precision: str) -> Observed:
    """A peak at stage 0 over that at this stage: between none, where activations are all, and that of the states."""
    states = paper_reduction(zero_stage, world_size, precision)
    return Observed(states.value, states.evidence, (1.0, states.value), told="from activations alone to states alone")


def paper_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """Bytes per parameter of one case over another's."""
    above, below = paper_bytes_per_parameter(**of), paper_bytes_per_parameter(**to)
    return Observed(above.value / below.value, (f"({above.evidence[0]}) / ({below.evidence[0]})",))


def paper_saving_share(zero_stage: int, of_stage: int, world_size: int, precision: str) -> Observed:
    """What one stage saves against stage 0, over what another saves."""
    whole, mine, theirs = (
        model_states.paper_bytes_per_parameter(stage, world_size, precision).total
        for stage in (0, zero_stage, of_stage)
    )
    formula = f"({whole:g} - {mine:g}) / ({whole:g} - {theirs:g})"
    return Observed((whole - mine) / (whole - theirs), (formula,))


def paper_offload_reduction(world_size: int, precision: str) -> Observed:
    """Bytes on the device at stage 2 over those with the optimizer offloaded."""
    whole, offloaded = (
        model_states.paper_bytes_by_place(Engine("deepspeed", 2, world_size, precision, 2, offload), 1).device
        for offload in ("none", "cpu")
    )
    return Observed(whole / offloaded, (f"{whole:g} / {offloaded:g} bytes per parameter",))


def paper_volume(zero_stage: int, accumulation: int) -> Observed:
    """Parameters that a rank moves in a step, over the model's."""
    value = communication.paper_volume(zero_stage, 1, accumulation)
    micro_steps = f"{accumulation} micro step{'' if accumulation == 1 else 's'}"
    return Observed(float(value), (f"stage {zero_stage}, {micro_steps}: {value:g}",))


def paper_volume_ratio(of: dict[str, Any], to: dict[str, Any]) -> Observed:
    """Parameters moved in one case over those moved in another."""
    above, below = paper_volume(**of), paper_volume(**to)
    return Observed(above.value / below.value, (*above.evidence, *below.evidence))


def num_params(model: str | dict[str, Any]) -> Observed:
    """Parameters of a model."""
    shape = shape_of(model_of(model))
    return Observed(float(shape.num_params), (f"{shape.name}: {shape.num_params:,} counted",))


def link_bandwidth(gpu: str, directions: str) -> Observed:
    """GB/s of a GPU's links to the others of its node; directions: one or both."""
    card = hardware.find_gpu(gpu)
    if directions not in ("one", "both"):
        raise ValueError(f"directions {directions!r}: must be 'one' or 'both'")
    value = card.link_bandwidth * (2 if directions == "both" else 1) / 1e9
    return Observed(value, (f"{card.name}, {card.link}: {card.source}",))


def _parts_in_words(parts: model_states.Parts) -> str:
    return f"{parts.parameters:.6g} + {parts.gradients:.6g} + {parts.optimizer_states:.6g}"
