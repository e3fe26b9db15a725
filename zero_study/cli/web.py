"""Answer questions from the planner's web page, which runs this module in the browser.

A question consists of the options of `zero-study advise`, so the page gives the answers that the command gives. The
module imports neither numpy nor PyTorch, which the browser does not have.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zero_study import cli, command_line, planner, terminal
from zero_study.cli import plan
from zero_study.errors import Refusal
from zero_study.planner import advice_text, json_answer, machines, machines_text, reasons, remedies
from zero_study.planner.choose import gib
from zero_study.planner.launch import Launch
from zero_study.planner.machines import NumbersOfGpus
from zero_study.planner.request import Request
from zero_study.planner.training_text import whole_training_sentence
from zero_study.strategy import file
from zero_study.terminal import printable
from zero_study.theory import gpus
from zero_study.theory.shapes import KNOWN

if TYPE_CHECKING:
    from zero_study.planner.choose import Advice, StrategyPrediction

CONFIG = "config.json"  # the name of a pasted configuration
# The question that the page shows first. Its answer is a part of the page, because loading the program takes seconds.
FIRST = {"model": "llama-3.1-8b", "gpu": "h100-sxm", "gpus": "8"}
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


def answer(words: Sequence[str], config: str | None = None, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what the web page shows for a question, as data for JSON. `words` are options of `zero-study advise`.

    `config` is the text of a config.json, which replaces a model's name. `labels` are the labels of the form's fields
    by option, with which the sentences name the options. If the command refuses the question, the result has only the
    message, with the key "refusal".
    """
    try:
        _check_types(words, config)
        with _options(words, config) as options:
            predicted = _predict(options)
            content = _numbers(predicted) if isinstance(predicted, NumbersOfGpus) else _content(predicted)
            content["command"] = shlex.join(["zero-study", "advise", *options])
    except Refusal as refusal:
        content = {"refusal": printable(str(refusal))}
    except click.exceptions.Exit:
        content = {"refusal": "--help: the page does not show the help. Run the command in a terminal."}
    return content if labels is None else labeled(content, labels)


COMMANDS = ("command", "launch", "options")  # parts of an answer that are not for reading
# An option and its value, after which another option follows.
_FOLLOWED = re.compile(r"(--[a-z0-9-]+(?: (?!and |or |-)\S+)?) (?=--)")
_ADAPTERS = re.compile(r"--lora-rank \d+, --lora-target all-linear(, --load-in-4bit)?")
_OPTION = re.compile(r"`[^`]*`|--([a-z0-9-]+)(?!\w)")  # or a command, which stays as it is


def labeled(content: Any, labels: Mapping[str, str]) -> Any:
    """Return a part of an answer in which the labels of fields replace options, and "QLoRA" the options for it."""
    if isinstance(content, dict):
        return {key: value if key in COMMANDS else labeled(value, labels) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [labeled(each, labels) for each in content]
    if not isinstance(content, str):
        return content
    text = _ADAPTERS.sub(lambda match: "QLoRA" if match[1] else "LoRA", _FOLLOWED.sub(r"\1, ", content))
    text = re.sub(r" \(Q?LoRA\)", "", text)  # an aside after the name
    return _OPTION.sub(lambda match: f'"{labels[match[1]]}"' if match[1] in labels else match[0], text)


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
        predicted = _predict(options)
        if isinstance(predicted, NumbersOfGpus):
            return json_answer.of(predicted, machines_text.content_of_numbers(predicted)).content
        return json_answer.of(predicted, advice_text.content(predicted)).content


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


def _predict(words: Sequence[str]) -> Advice | NumbersOfGpus:
    parameters = cli.parse(["advise", *words]).params
    for name, reason in NOT_ON_PAGE.items():
        if parameters[name]:
            raise Refusal(reason)
    model, requested = parameters["model"], {name: parameters[name] for name in Request.model_fields}
    if model is None:
        raise Refusal("--model is missing. The page needs a model and a GPU.")
    request = plan.request_of(requested)
    return machines.numbers_of_gpus(model, request) if requested["num_gpus"] is None else planner.advise(model, request)


def _numbers(numbers: NumbersOfGpus) -> dict[str, Any]:
    shape, request = numbers.fewest.shape, numbers.fewest.request
    options = [machine.option for machine in numbers.machines]
    return {
        **machines_text.content_of_numbers(numbers),
        **_rows(options, request),
        "setting": f"{shape.name}, {machines_text.batch(shape, request)}",
        "trained": advice_text.adapter_lines(shape),
        "no_launch": "The launch command depends on the number of GPUs, so choose one.",
    }


def _content(advice: Advice) -> dict[str, Any]:
    asked, advice = advice, advice.to_start
    start = advice_text.launch_or_why(advice)
    named = {remedy.flags for remedy in asked.remedies}
    return {
        "answer": reasons.answer(asked),
        **_rows(advice.ranked, advice.request),
        "setting": advice_text.setting(asked),
        "trained": advice_text.adapter_lines(advice.shape),
        "recommended": advice.recommended and advice.recommended.strategy.name,
        "shown": [option.strategy.name for option in advice_text.short_list(advice)],
        "why_not": reasons.why_not(advice),
        "training": whole_training_sentence(advice),
        "change": _change(asked.change.flags) if asked.change else None,
        "changes": [_change(*each) for each in reasons.changes(asked)],
        "adapters": [
            _change(each.flags, _predicted(each.option))
            for each in remedies.with_adapters(asked)
            if each.flags not in named
        ],
        "notes": advice.notes,
        "launch": vars(start) if isinstance(start, Launch) else None,
        "no_launch": start if isinstance(start, str) else None,
        "assumed": dict(
            advice_text.assumed_settings(advice.request, advice.box, advice_text.groups_of(advice), advice.shape)
        ),
    }


def _rows(options: Sequence[StrategyPrediction], request: Request) -> dict[str, Any]:
    """Return predictions as rows, and what all of them share. The accuracy is that of the first prediction."""
    rows = [_strategy(option, request) for option in options]
    if not rows:
        return {"strategies": rows}
    usable = options[0].prediction.usable_bytes
    return {
        "strategies": rows,
        "capacity": {"bytes": usable, "text": f"{gib(usable)} GiB"},
        "legend": advice_text.legend(options, request),
        "evidence": _evidence(options[0]),
    }


def _change(flags: str, predicted: str = "") -> dict[str, str]:
    return {"options": flags, "words": flags, "predicted": predicted}


def _predicted(option: StrategyPrediction) -> str:
    """Return in a sentence whether a training fits."""
    if option.fits:
        return (
            f"{option.strategy.name} fits: {gib(option.needed_bytes)} GiB per GPU, "
            f"{terminal.whole_percent(option.free_share)} free{', with offload to the host' * option.offloads}."
        )
    lacking = option.lacking or f"{gib(-option.free_bytes)} GiB per GPU"
    return f"does not fit either. {option.strategy.name} comes nearest and lacks {lacking}."


def _strategy(option: StrategyPrediction, request: Request) -> dict[str, Any]:
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
        "fits": option.fits,
        "needed_bytes": option.needed_bytes,
        "seconds": [step.low, step.total, None if option.is_rough else step.high],
        "parts": parts,
        "cells": advice_text.cells(option, request),
    }


def _evidence(option: StrategyPrediction) -> dict[str, str]:
    """Return the measured errors of predictions such as this one."""
    evidence = {"memory": advice_text.memory_evidence(option), "time": option.prediction.step.evidence.sentence}
    return {"strategy": option.strategy.name, **evidence}


def choices() -> dict[str, Any]:
    """Return all choices that the form of the web page offers, as data for JSON: models, GPUs, and other options.

    The key of such an option is its flag without the dashes, which is the name of its field in the form. The first
    question and its answer are part of the data.
    """
    head, rows = gpus.table()
    fields = Request.model_fields.items()
    words = {command_line.flag(name, field)[2:]: command_line.choices(field) for name, field in fields}
    question = [word for name, value in FIRST.items() for word in (f"--{name}", value)]
    return {
        "first": {"question": FIRST, "answer": answer(question)},
        "models": [{"name": name, "hub_ids": ids} for name, ids in sorted(KNOWN.hub_ids.items())],
        "gpus": [dict(zip(head, row, strict=True)) for row in rows],
        "options": {flag: values for flag, values in words.items() if values} | {"strategy": file.names()},
    }
