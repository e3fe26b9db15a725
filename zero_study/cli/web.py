"""Answer questions from the planner's web page, which runs this module in the browser.

A question consists of the options of `zero-study advise`, so the page gives the answers that the command gives. The
module imports neither numpy nor PyTorch, which the browser does not have.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zero_study import cli, command_line, planner, terminal
from zero_study.cli import plan
from zero_study.errors import Refusal
from zero_study.planner import advice_text, json_answer, reasons, remedies
from zero_study.planner.choose import gib
from zero_study.planner.launch import Launch
from zero_study.planner.request import Request
from zero_study.planner.training_text import whole_training_sentence
from zero_study.strategy import file
from zero_study.terminal import printable
from zero_study.theory import gpus
from zero_study.theory.shapes import KNOWN

if TYPE_CHECKING:
    from zero_study.planner.choose import Advice, StrategyPrediction

CONFIG = "config.json"  # the name of a pasted configuration
# Options of the command that make no sense on the page.
NOT_ON_PAGE = {
    "write": "--write: the page has no files. Use the buttons that copy a file.",
    "trace": "--trace: the page has no PyTorch. Run the command in a terminal.",
    "budget": "--budget: the page compares no machines. Run the command in a terminal.",
    "deadline": "--deadline: the page compares no machines. Run the command in a terminal.",
    "measured": "--measured: the page reads no files. Run the command in a terminal.",
    "measured_step_seconds": "--measured-step-seconds: the page has no comparison with a run. Run the command in a "
    "terminal.",
    "this_machine": "--this-machine: the page does not see the GPUs of your machine. Choose a GPU in the form.",
}


def answer(words: Sequence[str], config: str | None = None) -> dict[str, Any]:
    """Return what the web page shows for a question, as data for JSON. `words` are options of `zero-study advise`.

    `config` is the text of a config.json, which replaces a model's name. If the command refuses the question, the
    result has only the message, with the key "refusal".
    """
    try:
        _check_types(words, config)
        with _options(words, config) as options:
            return _content(_advise(options), options)
    except Refusal as refusal:
        return {"refusal": printable(str(refusal))}
    except click.exceptions.Exit:
        return {"refusal": "--help: the page does not show the help. Run the command in a terminal."}


def _check_types(words: object, config: object) -> None:
    """Raise Refusal unless all parts of a question are texts, because anyone can change the page and its address."""
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise Refusal("the request is not a list of options. Reload the page.")
    if config is not None and not isinstance(config, str):
        raise Refusal("the configuration is not a text. Paste the content of a config.json.")
    try:
        "".join([*words, config or ""]).encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        raise Refusal("the request has characters that are not Unicode. Remove them.") from None


def as_json(words: Sequence[str], config: str | None = None) -> dict[str, Any]:
    """Return what `zero-study advise --json` prints for the options `words`. The options must be valid."""
    with _options(words, config) as options:
        advice = _advise(options)
        return json_answer.of(advice, advice_text.content(advice)).content


@contextmanager
def _options(words: Sequence[str], config: str | None) -> Iterator[Sequence[str]]:
    """Yield the options of a question. A pasted config.json is in a file during the `with` block only.

    If the file stayed, a later question that names it would be answered for an earlier configuration.
    """
    if config is None:
        yield words
        return
    path = Path(CONFIG)
    path.write_text(config, encoding="utf-8")
    try:
        yield [*words, "--model", CONFIG]
    finally:
        path.unlink()


def _advise(words: Sequence[str]) -> Advice:
    parameters = cli.parse(["advise", *words]).params
    for name, reason in NOT_ON_PAGE.items():
        if parameters[name]:
            raise Refusal(reason)
    model, requested = parameters["model"], {name: parameters[name] for name in Request.model_fields}
    for flag, value in (("--model", model), ("--gpus", requested["num_gpus"])):
        if value is None:
            raise Refusal(f"{flag} is missing. The page needs a model, a GPU and the number of GPUs.")
    return planner.advise(model, plan.request_of(requested))


def _content(advice: Advice, words: Sequence[str]) -> dict[str, Any]:
    asked, advice = advice, advice.to_start
    shown, start = advice_text.short_list(advice), advice_text.launch_or_why(advice)
    why_not = reasons.why_not(advice)
    usable = advice.options[0].prediction.usable_bytes
    return {
        "command": shlex.join(["zero-study", "advise", *words]),
        "answer": reasons.answer(asked),
        "setting": advice_text.setting(asked),
        "trained": advice_text.adapter_lines(advice.shape),
        "capacity": {"bytes": usable, "text": f"{gib(usable)} GiB"},
        "strategies": [
            _strategy(advice, option) | {"is_shown": option in shown, "why_not": why_not.get(option.strategy.name)}
            for option in advice.ranked
        ],
        "left_out": {name: phrase for name, phrase in why_not.items() if name in advice.left_out},
        "legend": advice_text.legend(advice.options, advice.request),
        "training": whole_training_sentence(advice),
        "change": asked.change.flags if asked.change else None,
        "changes": [{"options": flags, "predicted": predicted} for flags, predicted in reasons.changes(asked)],
        "adapters": [*_adapters(asked)],
        "notes": advice.notes,
        "launch": _launch(start) if isinstance(start, Launch) else None,
        "no_launch": start if isinstance(start, str) else None,
        "assumed": advice_text.assumed_settings(
            advice.request, advice.box, advice_text.groups_of(advice), advice.shape
        ),
        "evidence": _evidence(advice),
    }


def _adapters(advice: Advice) -> Iterator[dict[str, str]]:
    """Yield LoRA and QLoRA as suggestions if no strategy fits, unless the answer already names them."""
    named = {remedy.flags for remedy in advice.remedies}
    for remedy in remedies.with_adapters(advice):
        option = remedy.option
        if remedy.flags in named:
            continue
        if option.fits:
            predicted = (
                f"{option.strategy.name} fits: {gib(option.needed_bytes)} GiB per GPU, "
                f"{terminal.whole_percent(option.free_share)} free{', with offload to the host' * option.offloads}"
            )
        else:
            predicted = f"does not fit either. {option.strategy.name} comes nearest and lacks "
            predicted += option.lacking or f"{gib(-option.free_bytes)} GiB per GPU"
        yield {"options": remedy.flags, "predicted": f"{predicted}."}


def _strategy(advice: Advice, option: StrategyPrediction) -> dict[str, Any]:
    """Return one strategy for the page: its table row, its memory by part, and its time with interval.

    The memory is in bytes, in the order of the figures, and its last part is for the allocator. The time is the lower
    end, the predicted seconds, and the upper end (None if there is none).
    """
    step = option.prediction.step
    parts = {part.replace("_", " "): float(value) for part, value in option.prediction.peak.parts.items()}
    parts["activations and logits"] = parts.pop("activations") + parts.pop("logits")
    parts["allocator"] = option.needed_bytes - sum(parts.values())
    return {
        "name": option.strategy.name,
        "is_recommended": option is advice.recommended,
        "fits": option.fits,
        "needed_bytes": option.needed_bytes,
        "seconds": [step.low, step.total, None if option.is_rough else step.high],
        "parts": parts,
        "cells": advice_text.cells(option, advice.request),
    }


def _launch(start: Launch) -> dict[str, Any]:
    return {"stack": start.stack, "command": start.command, "files": start.files, "settings": start.settings}


def _evidence(advice: Advice) -> dict[str, str] | None:
    """Return the measured prediction errors for the recommended strategy, or the first one if none is recommended."""
    option = advice.recommended or advice.ranked[0]
    time = option.prediction.step.evidence.sentence
    if option.is_short:
        time = "The error of this time is not known, because no published step is as short"
    return {"strategy": option.strategy.name, "memory": advice_text.memory_evidence(option), "time": time}


def choices() -> dict[str, Any]:
    """Return all choices that the form of the web page offers, as data for JSON: models, GPUs, and other options.

    The key of such an option is its flag without the dashes, which is the name of its field in the form.
    """
    head, rows = gpus.table()
    fields = Request.model_fields.items()
    words = {command_line.flag(name, field)[2:]: command_line.choices(field) for name, field in fields}
    return {
        "models": [{"name": name, "hub_ids": ids} for name, ids in sorted(KNOWN.hub_ids.items())],
        "gpus": [dict(zip(head, row, strict=True)) for row in rows],
        "options": {flag: values for flag, values in words.items() if values} | {"strategy": file.names()},
    }
