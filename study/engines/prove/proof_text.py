"""How is a proof said? About ten lines for people, and a JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
    steps = "".join(
        f", {word} {facts[name]}"
        for name, word in (("gradient_clipping", "clips at"), ("gradient_accumulation_steps", "accumulates"))
        if facts[name] is not None
    )
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


def of_findings(wrong: Sequence[str], differences: list[str], notes: list[str]) -> list[str]:
    """What trains wrongly and what is not as asked, in capitals, and what a user may not expect."""
    words: dict[str, Sequence[str]] = {"KNOWN WRONG": wrong, "NOT AS ASKED": differences, "note": notes}
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
