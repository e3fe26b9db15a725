"""Where what was built is not what was asked, what a user may not expect all the same, and a proof's lines of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..keys import known_keys
from .demands import Demand
from .read_back import precision


class NotAsAsked(RuntimeError):
    """What was built is not what was asked; only with `strict=True`."""


class TrainsWrong(RuntimeError):
    """The counted step trained wrongly; only with `strict=True`."""


class KnownBad(RuntimeError):
    """This release of DeepSpeed is known to train wrongly what was built; not with `allow_known_bad=True`."""


class NotChecked(RuntimeError):
    """What was to be proven could not be checked; only with `strict=True`."""


# What the counted step shows, whichever engine there is.
_SEEN_IN_STEP = ("gradient_accumulation_steps", "gradient_clipping", "precision", "fp16.enabled", "bf16.enabled")


class Held(NamedTuple):
    """Demands, held against facts."""

    differences: list[str]  # not as asked
    notes: list[str]
    num_agreed: int
    unread: list[str]  # demands that no fact answers


def hold(demands: Sequence[Demand], facts: dict[str, Any]) -> Held:
    """Hold each demand against what was built; of several for one thing, the last was asked by the strongest source."""
    engine = next((d for d in reversed(demands) if d.name == "engine"), None)
    if engine is not None and engine.value != facts["engine"]:
        said = f"engine: asked {engine.value} by {engine.source}, built {_named(facts)}"
        if facts["engine"] == "DDP" and facts["device"] == "cpu" and engine.value.startswith("FSDP"):
            said += " (accelerate drops FSDP on a CPU)"
        size = [demand for demand in demands if demand.name == "world_size"]
        return Held([said, *hold(size, facts).differences], [], 0, [])
    strongest = {_fact(demand): demand for demand in demands}
    differences, notes, agreed, unread = [], [], 0, []
    for demand in demands:
        name, decides = _fact(demand), strongest[_fact(demand)]
        known, actual = _built(name, facts)
        if not known:
            unread.append(f"{name} ({demand.source})")
        elif _same(name, demand.value, actual, facts):
            agreed += 1
        elif demand is decides:
            differences.append(f"{name}: asked {demand.value} by {demand.source}, built {actual}")
        elif demand.value != decides.value:
            notes.append(f"{name}: {demand.source} says {demand.value}; {decides.source} overrides it")
    return Held(differences, notes, agreed, unread)


def hold_step(
    demands: Sequence[Demand], facts: dict[str, Any], forward_passes: int, clipped_at: float | None, num_short: int
) -> tuple[list[str], list[str]]:
    """Hold what the step did against what was asked: differences, and notes.

    `num_short`: how many steps in a row had fewer forward passes than asked, this one too.
    """
    differences, notes = [], []
    strongest = {_fact(demand): demand for demand in demands}
    clipping, accumulation = strongest.get("gradient_clipping"), strongest.get("gradient_accumulation_steps")
    has_number = facts["gradient_accumulation_steps"] is not None  # DeepSpeed, which clips by itself too
    if not has_number and clipping is not None and clipping.value != (clipped_at or 0):
        asked = f"gradient_clipping: asked {clipping.value} by {clipping.source}"
        if clipped_at is None:  # there are other means than torch's function
            notes.append(f"{asked}, not seen: no call of torch's clip_grad_norm_ with parameters of the model")
        else:
            differences.append(f"{asked}, the step had clipping at {clipped_at}")
    elif not has_number and clipping is None and clipped_at is not None:
        notes.append(f"gradient_clipping: no file asks for it, the script clips at {clipped_at}")
    if not forward_passes:
        notes.append("forward passes: not seen, the script calls a part of the model, or a wrapper of it")
    elif not has_number and accumulation is not None and forward_passes < accumulation.value:
        differences.append(
            f"gradient_accumulation_steps: asked {accumulation.value} by {accumulation.source}, {num_short} steps in "
            f"a row had fewer forward passes, the last {forward_passes}"
        )
    number = accumulates(demands, facts)
    if number is not None and forward_passes > number:
        notes.append(
            f"gradient_accumulation_steps: {number}, and the step had {forward_passes} forward passes; the script "
            "accumulates by itself, or calls the model more than once"
        )
    return differences, notes


def accumulates(demands: Sequence[Demand], facts: dict[str, Any]) -> int | None:
    """How many forward passes a step is to have: as DeepSpeed has it, or as asked; None: nobody says it."""
    asked = {_fact(demand): demand.value for demand in demands}.get("gradient_accumulation_steps")
    number: int | None = facts["gradient_accumulation_steps"] or asked
    return number


def surprises(demands: Sequence[Demand], facts: dict[str, Any]) -> list[str]:
    """What nobody asked otherwise, and a user may not expect."""
    found = []
    names = {_fact(demand) for demand in demands}
    if facts["gradient_clipping"] and "gradient_clipping" not in names:
        found.append(f"gradient_clipping: nobody asked, the gradients are clipped at {facts['gradient_clipping']}")
    if facts["world_size"] > 1 and facts.get("partitioned_parameters") == 0:
        found.append(
            "stage 3 keeps each parameter whole on all ranks: all are below the engine's persistence threshold"
        )
    if frozen := facts["num_params"] - facts["num_trainable_params"]:
        found.append(f"{frozen:,} of {facts['num_params']:,} parameters are frozen (requires_grad is False)")
    return found


def known_wrong(facts: dict[str, Any]) -> tuple[str | None, str | None]:
    """What this release of DeepSpeed trains wrongly with these settings, as far as it is known.

    Of all models, and a note: of some, or why it is not known.
    """
    if facts["engine"] != "DeepSpeed":
        return None, None
    try:
        from ..known_bad import find, sentence

        version = sys.modules["deepspeed"].__version__
        known = find(
            deepspeed=version,
            zero_stage=facts["zero_stage"],
            offload=facts["offload_optimizer_device"],
            precision=facts["precision"],
            sums_in_fp32=facts["accumulation_dtype"] == "float32",
            micro_batches=facts["gradient_accumulation_steps"],
            twists=["part_outside"],  # which nothing here rules out: a note
        )
        said = None if known is None else sentence(known, version)
    except Exception as error:  # what else is proven does not need it
        return None, f"releases known to be wrong: not looked up, {type(error).__name__}: {error}"
    if known is not None and known.models is not None:
        return None, said
    return said, None


def unread_keys(content: dict[str, Any], demands: Sequence[Demand]) -> list[str]:
    """What somebody asked for in a DeepSpeed JSON and nothing reads, by the project's rules: a line for each reason.

    `content`: the whole of it as the engine has it, where accelerate has filled in keys that nobody wrote.
    """
    from ..doctor.config_files import of_json

    names = {demand.name for demand in demands}
    ignored = [f for f in of_json("", content) if f.effect == "ignored" and f.key in names]
    keys: dict[str, list[str]] = {}
    for finding in ignored:
        keys.setdefault(finding.message or "nothing reads it", []).append(finding.key)
    return [f"{', '.join(unread)}: {why}" for why, unread in keys.items()]


def not_checkable(asked: Mapping[str, Any], demands: Sequence[Demand], unread: Sequence[str], engine: str) -> list[str]:
    """Say what an explicit request holds that nothing here can check.

    `asked`: its content. `unread`: demands that no fact answers; DeepSpeed has keys that cannot be read back, any other
    engine is asked for something that it does not have.
    """
    from ..doctor.config_files import of_accelerate, of_json

    is_accelerate = "distributed_type" in asked or "compute_environment" in asked
    found = (of_accelerate if is_accelerate else of_json)("", asked)
    ignored = [finding for finding in found if finding.matters and finding.effect == "ignored"]
    said = [f"{finding.key}: {finding.message or 'nothing reads it'}" for finding in ignored]
    if engine != "DeepSpeed":
        kind = "the plain model" if engine == "none" else engine
        names = {f"{_fact(demand)} ({demand.source})" for demand in demands if _fact(demand) not in _SEEN_IN_STEP}
        said += [f"{name}: {kind} has no such setting" for name in unread if name in names]
    return said


def _fact(demand: Demand) -> str:
    name: str = known_keys.read()["facts"]["json"].get(demand.name, demand.name)
    return name


def _built(name: str, facts: dict[str, Any]) -> tuple[bool, Any]:
    """Whether a fact is known, and its value."""
    for where in (facts, facts.get("settings", {})):
        if where.get(name) is not None:
            return True, where[name]
    return name in facts.get("settings", {}), None


def _same(name: str, asked: Any, actual: Any, facts: dict[str, Any]) -> bool:
    if name != "precision":
        return bool(asked == actual)
    if str(asked) == "no" and facts["engine"] != "DeepSpeed":  # nothing mixed: the model's own types
        return bool(actual == precision(facts["parameter_dtypes"]))
    # By the launcher's word, whichever way the engine does it.
    return str(actual).removesuffix("-autocast") == {"no": "fp32"}.get(str(asked), str(asked))


def _named(facts: dict[str, Any]) -> str:
    return facts["engine"] if facts["engine"] != "none" else f"a plain {facts['engine_class']}"


# ---------------------------------------------------------------- the lines of a proof


def of_built(facts: dict[str, Any]) -> list[str]:
    """Who trains, how the model is split, and in which precision."""
    engine = facts["engine_class"]
    if facts["engine"] == "DeepSpeed":
        engine += f", ZeRO stage {facts['zero_stage']}"
        for part, word in (("optimizer", "optimizer states"), ("param", "parameters")):
            device = facts[f"offload_{part}_device"]
            engine += f", {word} on {device}" if device != "none" else ""
    elif facts["engine"] == "FSDP2":
        units = sum(facts["units"].values())
        engine = f"FSDP2 ({engine}), {units} units{', on the host' if facts['offloads'] else ''}"
    ranks = f"{facts['world_size']} over {facts['backend']}" if facts["backend"] else f"{facts['world_size']}, no group"
    types = "+".join(facts["parameter_dtypes"])
    masters = f", masters {'+'.join(facts['master_dtypes'])}" if facts.get("master_dtypes") else ""
    said = {"clips at": facts["gradient_clipping"], "accumulates": facts["gradient_accumulation_steps"]}
    steps = "".join(f", {word} {number}" for word, number in said.items() if number is not None)
    return [
        _line("engine", engine),
        _line("ranks", f"{ranks}, on {facts['device']}"),
        _line("precision", f"{facts['precision'] or 'seen in the step'} (parameters {types}{masters})"),
        _line("optimizer", f"{facts['optimizer_class']}{steps}"),
    ]


def of_asked(sources: list[str], num_agreed: int) -> str:
    """By whom something was asked, and how much of it was built."""
    if not sources:
        return _line("asked", "unknown: no file and no launcher says it (asked= names a file)")
    return _line("asked", f"{num_agreed} setting(s) as asked by {', '.join(sources)}")


def of_findings(known: Sequence[str], findings: Sequence[str], differences: list[str], notes: list[str]) -> list[str]:
    """What trains wrongly and what is not as asked, in capitals, and what a user may not expect."""
    words = {"KNOWN WRONG": known, "WRONG": findings, "NOT AS ASKED": differences, "note": notes}
    return [_line(word, text) for word, texts in words.items() for text in texts]


def of_step(step: dict[str, Any], precision: str, num_params: int) -> list[str]:
    """What the step did, what this rank holds, and what it sent."""
    states = step["model_states"]
    parts = {name: states[name] / num_params for name in ("parameters", "gradients", "optimizer_states")}
    each = " + ".join(f"{value:.3f} {name.replace('_', ' ')}" for name, value in parts.items())
    sent = "; ".join(
        f"{c['count']} {c['kind']} of {c['bytes'] / 1e6:.3f} MB" if c["bytes"] else f"{c['count']} {c['kind']}"
        for c in step["collectives"]
    )
    clipped = "" if step["clipped_at"] is None else f", gradients clipped at {step['clipped_at']}"
    return [
        _line(f"step {step['number']}", f"{step['forward_passes']} forward pass(es) in {precision}{clipped}"),
        _line("held", f"{sum(parts.values()):.3f} bytes per parameter of {num_params:,}, by rank 0"),
        _line("of which", each),
        _line("sent", sent or "nothing"),
    ]


def _line(word: str, text: str) -> str:
    return f"proof  {word:<12}  {text}"
