"""Format a proof as lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import terminal

NOT_CHECKED = "not checked: "  # begins a note on something that could not be checked


def engine_lines(facts: dict[str, Any]) -> list[str]:
    """Return the lines of a proof on the engine, its ranks, the precision and the optimizer."""
    engine = facts["engine_class"]
    if facts["engine"] == "DeepSpeed":
        engine += f", ZeRO stage {facts['zero_stage']}"
        for part, word in (("optimizer", "optimizer states"), ("param", "parameters")):
            device = facts[f"offload_{part}_device"]
            engine += f", {word} on {device}" if device != "none" else ""
    elif facts["engine"] == "FSDP2":
        units = sum(facts["units"].values())
        engine = f"FSDP2 ({engine}), {units} units{', on the host' if facts['offloads'] else ''}"
    ranks = (
        f"{facts['world_size']} over {facts['backend']}"
        if facts["backend"]
        else f"{facts['world_size']}, without a process group"
    )
    types = "+".join(facts["parameter_dtypes"])
    masters = f", master weights {'+'.join(facts['master_dtypes'])}" if facts.get("master_dtypes") else ""
    clipping, accumulation = facts["gradient_clipping"], facts["gradient_accumulation_steps"]
    steps = "" if clipping is None else f", gradients clipped at {clipping}"
    steps += "" if accumulation is None else f", accumulation steps {accumulation}"
    return [
        _line("engine", engine),
        _line("ranks", f"{ranks}, on {facts['device']}"),
        _line("precision", f"{facts['precision'] or 'known after the step'} (parameters {types}{masters})"),
        _line("optimizer", f"{facts['optimizer_class']}{steps}"),
    ]


def request_line(sources: list[str], num_agreed: int) -> str:
    """Return the line that names the sources of the request, and says how many requested settings agree."""
    if not sources:
        return _line(
            "requested", "unknown, because no launcher and no file requests anything (name a file with config=)"
        )
    settings = "1 setting agrees" if num_agreed == 1 else f"{num_agreed} settings agree"
    return _line("requested", f"{settings} with {', '.join(sources)}")


def finding_lines(
    wrong_in_release: Sequence[str], findings: Sequence[str], differences: list[str], notes: list[str]
) -> list[str]:
    """Return the lines of the proof on faults, differences, unchecked settings and notes, in this order.

    Faults and differences from the request begin with a word in capitals.
    """
    unchecked = [note.removeprefix(NOT_CHECKED) for note in notes if note.startswith(NOT_CHECKED)]
    words = {
        "KNOWN WRONG": wrong_in_release,
        "WRONG": findings,
        "NOT AS REQUESTED": differences,
        "not checked": unchecked,
        "note": [note for note in notes if not note.startswith(NOT_CHECKED)],
    }
    return [_line(word, text) for word, texts in words.items() for text in texts]


def result_line(
    steps: str, num_faults: int, num_differences: int, not_checked: Sequence[str], share: float | None = None
) -> str:
    """Return the line that counts the faults and differences in the checked steps.

    `not_checked` names the checks that could not be made. `share` is the share of the time that checks took.
    """
    faults = {0: "no fault", 1: "1 fault"}.get(num_faults, f"{num_faults} faults")
    differences = {0: "", 1: " and 1 difference from the request"}.get(
        num_differences, f" and {num_differences} differences from the request"
    )
    incomplete = ""
    if not_checked:
        number_of_checks = terminal.count(len(not_checked), "check")
        incomplete = f"; {number_of_checks} could not be made: {', '.join(not_checked)}"
    cost = "" if share is None else f". The checks took {100 * share:.2g} % of the time"
    return _line("result", f"{faults}{differences} found in {steps}{incomplete}{cost}")


def step_lines(step: dict[str, Any], update: str, precision: str, num_params: int) -> list[str]:
    """Return the lines that describe the checked step, the model states of this rank, and its collectives.

    `update` says how the change of the weights compares with the optimizer's formula.
    """
    states = step["model_states"]
    parts = {name: states[name] / num_params for name in ("parameters", "gradients", "optimizer_states")}
    summary = ", ".join(f"{value:.3f} for {name.replace('_', ' ')}" for name, value in parts.items())
    sent = ", ".join(
        f"{c['count']} {c['kind']} ({c['bytes'] / 1e6:.3f} MB)" if c["bytes"] else f"{c['count']} {c['kind']}"
        for c in step["collectives"]
    )
    clipped = "" if step["clipped_at"] is None else f", gradients clipped at {step['clipped_at']}"
    return [
        _line(
            f"step {step['number']}",
            f"{step['forward_passes']} forward {'pass' if step['forward_passes'] == 1 else 'passes'} in "
            f"{precision}{clipped}",
        ),
        _line("update", update),
        _line(
            "memory",
            f"model states of rank 0: {sum(parts.values()):.3f} bytes per parameter ({summary}) of {num_params:,} "
            "parameters",
        ),
        _line("communication", sent or "nothing was sent"),
    ]


def _line(word: str, text: str) -> str:
    """Return one entry of a proof, wrapped to the terminal's width."""
    begin = f"proof  {word:<{len('NOT AS REQUESTED')}}  "
    return terminal.wrap(text, begin, " " * len(begin))
