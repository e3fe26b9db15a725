"""Compare the built engine with the request, and look up known faults of the release."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..engines.readback.demands import Demand, by_fact, compare, fact_name
from ..engines.readback.dtypes import computed_in, precision_of


class ConfigMismatch(RuntimeError):
    """The built engine or the checked step differs from the request. Raised only with `strict=True`."""


class TrainingFault(RuntimeError):
    """The checked step trained wrongly. Raised only with `strict=True`."""


class KnownFault(RuntimeError):
    """This release of DeepSpeed has a known fault in the built engine. Not raised with `allow_known_bad=True`."""


class Unverified(RuntimeError):
    """Something could not be checked. Raised only with `strict=True`."""


# Settings that the counted step shows for every engine.
_SEEN_IN_STEP = ("gradient_accumulation_steps", "gradient_clipping", "precision", "fp16.enabled", "bf16.enabled")


class RequestComparison(NamedTuple):
    """The result of comparing the requested settings with the built engine."""

    differences: list[str]  # not as requested
    notes: list[str]
    num_agreed: int
    unread: list[str]  # requested settings that no fact of the engine answers


def compare_with_request(demands: Sequence[Demand], facts: dict[str, Any]) -> RequestComparison:
    """Compare each requested setting with the built engine.

    If several sources request the same setting, the last one counts. If the script built another engine than requested,
    only the engine and the number of ranks are compared.
    """
    engine = by_fact(demands).get("engine")
    if engine is not None and engine.value != facts["engine"]:
        world_size = [demand for demand in demands if demand.name == "world_size"]
        differences = [_other_engine(engine, facts), *compare_with_request(world_size, facts).differences]
        return RequestComparison(differences, [], 0, [])
    judged = compare(demands, facts, lambda demand, actual: _is_same(demand, actual, facts))
    differences = [
        f"{fact_name(demand)}: {demand.source} requests {demand.value}, but the engine has {actual}"
        for demand, outcome, actual, _ in judged
        if outcome == "contradicted"
    ]
    notes = [
        f"{fact_name(demand)}: {demand.source} requests {demand.value}, but {decisive.source} overrides it"
        for demand, outcome, _, decisive in judged
        if outcome == "overridden" and demand.value != decisive.value
    ]
    unread = [f"{fact_name(each.demand)} ({each.demand.source})" for each in judged if each.outcome == "unread"]
    return RequestComparison(differences, notes, sum(each.outcome == "agreed" for each in judged), unread)


def _other_engine(engine: Demand, facts: dict[str, Any]) -> str:
    built = facts["engine"] if facts["engine"] != "none" else f"a plain {facts['engine_class']}"
    is_dropped = built == "DDP" and facts["device"] == "cpu" and engine.value.startswith("FSDP")
    return f"engine: {engine.source} requests {engine.value}, but the script built {built}" + (
        " (accelerate drops FSDP on a CPU)" if is_dropped else ""
    )


def compare_step_with_request(
    demands: Sequence[Demand], facts: dict[str, Any], forward_passes: int, clipped_at: float | None, num_short: int
) -> tuple[list[str], list[str]]:
    """Compare the checked step with the request, and return differences and notes.

    `forward_passes` is their number in the step. `clipped_at` is the norm at which PyTorch's functions clipped, or None
    if they did not. `num_short` is how many steps in a row, including this one, had fewer forward passes than
    requested.
    """
    strongest = by_fact(demands)
    differences: list[str] = []
    notes: list[str] = []
    if facts["gradient_accumulation_steps"] is None:  # not DeepSpeed, which has that number and clips by itself
        _compare_clipping(strongest.get("gradient_clipping"), clipped_at, differences, notes)
    if not forward_passes:
        notes.append(
            "forward passes were not seen, because the script calls a part of the model or a wrapper around it"
        )
    elif facts["gradient_accumulation_steps"] is None:
        accumulation = strongest.get("gradient_accumulation_steps")
        if accumulation is not None and forward_passes < accumulation.value:
            differences.append(
                f"gradient_accumulation_steps: {accumulation.source} requests {accumulation.value}, but {num_short} "
                f"steps in a row had fewer forward passes, the last one {forward_passes}"
            )
    number = passes_of_step(demands, facts)
    if number is not None and forward_passes > number:
        notes.append(
            f"gradient_accumulation_steps is {number}, but the step had {forward_passes} forward passes: the script "
            "accumulates by itself, or calls the model more than once"
        )
    return differences, notes


def _compare_clipping(
    clipping: Demand | None, clipped_at: float | None, differences: list[str], notes: list[str]
) -> None:
    """Compare PyTorch's clipping in the step with the request, if the engine does not clip by itself.

    Appends to `differences` and `notes`.
    """
    if clipping is None:
        if clipped_at is not None:
            notes.append(f"gradient_clipping: no file requests it, but the script clips at {clipped_at}")
    elif clipping.value != (clipped_at or 0):
        request = f"gradient_clipping: {clipping.source} requests {clipping.value}"
        if clipped_at is None:  # the script may clip by other means than torch's function
            notes.append(f"{request}, but torch's clip_grad_norm_ was not called with parameters of the model")
        else:
            differences.append(f"{request}, but the step clipped at {clipped_at}")


def passes_of_step(demands: Sequence[Demand], facts: dict[str, Any]) -> int | None:
    """Return how many forward passes a step should have, according to DeepSpeed or the request.

    None if neither sets the number.
    """
    requested = by_fact(demands).get("gradient_accumulation_steps")
    number: int | None = facts["gradient_accumulation_steps"] or (None if requested is None else requested.value)
    return number


def defaults_worth_knowing(demands: Sequence[Demand], facts: dict[str, Any]) -> list[str]:
    """Return notes on properties of the engine that nobody requested and that a user may not expect."""
    notes = []
    if facts["gradient_clipping"] and "gradient_clipping" not in by_fact(demands):
        notes.append(f"gradient_clipping was not requested, but gradients are clipped at {facts['gradient_clipping']}")
    if facts["world_size"] > 1 and facts.get("partitioned_parameters") == 0:
        notes.append(
            "stage 3 shards no parameter: all of them are below the engine's persistence threshold, so every rank "
            "keeps the full parameters"
        )
    if frozen := facts["num_params"] - facts["num_trainable_params"]:
        notes.append(
            f"{facts['num_trainable_params']:,} of {facts['num_params']:,} parameters are trained; the other "
            f"{frozen:,} are frozen (requires_grad is False)"
        )
    return notes


def known_wrong(facts: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the known fault of this DeepSpeed release with these settings, and a note.

    Each is None if there is none. The note names a fault that affects only some models, or says why the faults could
    not be looked up.
    """
    if facts["engine"] != "DeepSpeed":
        return None, None
    try:
        from ..upgrade.faults import find, sentence

        version = sys.modules["deepspeed"].__version__
        fault = find(
            deepspeed=version,
            zero_stage=facts["zero_stage"],
            offload=facts["offload_optimizer_device"],
            precision=facts["precision"],
            sums_in_fp32=facts["accumulation_dtype"] == "float32",
            micro_batches=facts["gradient_accumulation_steps"],
            variations=["part_outside"],  # nothing here rules out this variation; a fault of it becomes a note
        )
        message = None if fault is None else sentence(fault, version)
    except Exception as error:  # the other results of the proof do not depend on it
        return None, f"not checked: known faults of the release ({type(error).__name__}: {error})"
    if fault is not None and fault.models is not None:
        return None, message
    return message, None


def unread_keys(content: dict[str, Any], demands: Sequence[Demand]) -> list[str]:
    """Return one text per reason why DeepSpeed does not read some requested keys of its JSON.

    Doctor's rules decide which keys are read. `content` is the whole configuration of the engine, including keys that
    accelerate has filled in.
    """
    from ..doctor.config_files import of_json

    names = {demand.name for demand in demands}
    ignored = [f for f in of_json("", content) if f.effect == "ignored" and f.key in names]
    keys: dict[str, list[str]] = {}
    for finding in ignored:
        keys.setdefault(finding.message or "Nothing reads this key.", []).append(finding.key)
    return [f"{', '.join(unread)}: {reason}" for reason, unread in keys.items()]


def not_checkable(asked: Mapping[str, Any], demands: Sequence[Demand], unread: Sequence[str], engine: str) -> list[str]:
    """Return the settings of an explicit request that cannot be checked, one text per setting.

    `asked` is the content of the request, `demands` are its settings, and `unread` names the settings that no fact of
    the engine answers. For DeepSpeed, `unread` is not reported, because the engine may have a setting that cannot be
    read back. Other engines do not have such a setting at all.
    """
    from ..doctor.config_files import of_accelerate, of_json

    is_accelerate = "distributed_type" in asked or "compute_environment" in asked
    checked = (of_accelerate if is_accelerate else of_json)("", asked)
    ignored = [finding for finding in checked if finding.matters and finding.effect == "ignored"]
    lines = [f"{finding.key}: {finding.message or 'Nothing reads this key.'}" for finding in ignored]
    if engine != "DeepSpeed":
        kind = "the plain model" if engine == "none" else engine
        names = {
            f"{fact_name(demand)} ({demand.source})" for demand in demands if fact_name(demand) not in _SEEN_IN_STEP
        }
        lines += [f"{name}: {kind} does not have this setting" for name in unread if name in names]
    return lines


def _is_same(demand: Demand, actual: Any, facts: dict[str, Any]) -> bool:
    """Say whether a built setting equals the requested one.

    A precision is requested in the launcher's terms: no, fp16 or bf16.
    """
    if demand.name != "precision":
        return bool(demand.value == actual)
    # No mixed precision, so the model's own types count.
    if str(demand.value) == "no" and facts["engine"] != "DeepSpeed":
        return bool(actual == precision_of(facts["parameter_dtypes"]))
    # An engine may use autocast or parameters in 16 bits. Both count.
    return str(actual).removesuffix("-autocast") == {"no": "fp32"}.get(str(demand.value), str(demand.value))


def other_products(
    demands: Sequence[Demand], multiplications: Mapping[str, int], autocast: str | None = None
) -> list[str]:
    """Return a difference if most matrix products of a step are computed in another precision than was requested.

    `multiplications` has their number for each data type. `autocast` is the short name of the type of autocast, if a
    module was called within it. Because a script may use it for a part of the model, one such product is enough.
    """
    demand, least = by_fact(demands).get("precision"), 0.5
    if autocast is not None and (demand is None or demand.value not in ("bf16", "fp16")):
        demand, least = Demand("precision", autocast, "torch.autocast"), 0.0
    total = sum(multiplications.values())
    if demand is None or demand.value not in ("bf16", "fp16") or not total:
        return []
    share = multiplications.get(computed_in(demand.value), 0) / total
    if share > least:
        return []
    return [
        f"precision: {demand.value} is requested ({demand.source}), but only {share:.0%} of the multiplications in "
        f"matrix products used it. The others used {' and '.join(sorted(multiplications))}"
    ]
