"""Define the commands that predict: the best strategy, and the memory and time of a study's runs on other GPUs."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zero_study.cli.options import PATH, TRACING, Statuses, command, require
from zero_study.command_line import Option, given, options_of
from zero_study.errors import Refusal
from zero_study.planner.request import GPUS, WORK, Request
from zero_study.progress import after_two_seconds

if TYPE_CHECKING:
    from zero_study.answers.envelope import Answer
    from zero_study.planner.choose import Advice
    from zero_study.planner.machines import Comparison, Machine
    from zero_study.verdict import Verdict

OUTPUT = "Output"

# Ways to distribute a training that are not predicted, with the case in which they are needed.
PARALLELISMS = {
    "tensor": "if one layer is too large for a GPU, or if the batch is too small for more data parallel ranks. It "
    "works well only over a fast link such as NVLink.",
    "pipeline": "if a model is too large for FSDP2 or ZeRO-3 over a slow network between nodes.",
    "expert": "for mixtures of experts that have too many experts to gather all of them for every layer.",
}


def _refuse_parallelism(_: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None:
        name = option.opts[0].removeprefix("--").removesuffix("-parallel")
        raise Refusal(
            f"--{name}-parallel: the planner cannot predict {name} parallelism, only data parallelism, sharded or not, "
            f"and GPUs that share sequences (--context-parallel, --sequence-parallel). {name.capitalize()} parallelism "
            f"is needed {PARALLELISMS[name]} Remove the option to see whether the training fits without it."
        )


class _PositiveNumber(click.ParamType):
    """An option type: a number above 0, which may have one of the given units."""

    name = "number"

    def __init__(self, sign: str = "", **units: float) -> None:
        self.units, self.sign = units, sign

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().removeprefix(self.sign).replace(",", "")
        unit = next((unit for unit in self.units if text.endswith(unit)), "")
        try:
            number = float(text.removesuffix(unit)) * self.units.get(unit, 1.0)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            ending = f", with or without the ending {' or '.join(self.units)}" if self.units else ""
            self.fail(f"{value!r} is not a number above 0{ending}", param, ctx)
        return number


POSITIVE = _PositiveNumber()
DOLLARS = _PositiveNumber("$")
HOURS = _PositiveNumber(d=24.0, h=1.0, m=1 / 60)


@command(
    "advise",
    "Does my model fit, with which strategy, how fast, at what price?",
    "advise --model llama-3.1-8b --gpu a100-80gb --gpus 4",
    statuses=Statuses(
        "a strategy fits",
        "no strategy fits, or no machine keeps the limits",
        "the request is refused",
        "nothing could be predicted",
    ),
    params=[
        Option(
            ["--model"],
            group=WORK,
            is_common=True,
            metavar="NAME",
            help="Model: a known name (gpt2-xl, llama-2-7b ...), an id of the Hugging Face hub, or a config.json file. "
            "`--model list` prints all known names.",
        ),
        *options_of(Request),
        Option(
            ["--this-machine"],
            group=GPUS,
            is_common=True,
            is_flag=True,
            help="Use the kind and number of GPUs, the host memory and the cores of this machine. Other options take "
            "precedence. This option needs a GPU.",
        ),
        Option(
            ["--budget"],
            group=GPUS,
            type=DOLLARS,
            metavar="DOLLARS",
            help="Find the machines on which the whole training costs at most this amount. Needs --tokens or "
            "--examples.",
        ),
        Option(
            ["--deadline"],
            group=GPUS,
            type=HOURS,
            metavar="HOURS",
            help="Find the machines on which the whole training takes at most this time, in hours, or with a unit: 3d, "
            "12h or 90m.",
        ),
        Option(
            ["--measured-step-seconds"],
            group=OUTPUT,
            type=POSITIVE,
            metavar="SECONDS",
            help="Time of an optimizer step that you measured in a training with --strategy and the other options. The "
            "largest part of this step (computation, communication or offload) is scaled accordingly in the predicted "
            "times of all other strategies.",
        ),
        Option(
            ["--measured"],
            group=OUTPUT,
            multiple=True,
            metavar="LOG",
            help="Log from which to read the measured time of a step, in any format that `zero-study import` knows. "
            "STRATEGY=LOG is the log of another strategy with the same global batch. The option can be repeated.",
        ),
        *(
            Option([f"--{name}-parallel"], group=GPUS, hidden=True, expose_value=False, callback=_refuse_parallelism)
            for name in PARALLELISMS
        ),
        Option(
            ["--all", "everything"],
            group=OUTPUT,
            is_common=True,
            is_flag=True,
            help="Print everything: all strategies, assumptions and evidence.",
        ),
        Option(
            ["--json", "as_json"],
            group=OUTPUT,
            is_common=True,
            is_flag=True,
            help="Print the answer as JSON, with the unit of every number (docs/json.md).",
        ),
        Option(
            ["--write"],
            group=OUTPUT,
            is_common=True,
            type=PATH,
            metavar="FILE",
            help="Write the configuration file that the launch command reads.",
        ),
        Option(
            ["--kubernetes"],
            group=OUTPUT,
            is_flag=True,
            help="With --write, also write the manifest of a Kubeflow TrainJob (docs/containers.md).",
        ),
        Option(
            ["--trace"],
            group=OUTPUT,
            is_flag=True,
            help="Determine the memory from simulated steps of the model with fake tensors, which have no data. The "
            "simulation takes up to a minute per strategy.",
        ),
    ],
)
def _advise(
    model: str | None,
    this_machine: bool,
    everything: bool,
    as_json: bool,
    write: Path | None,
    kubernetes: bool,
    trace: bool,
    budget: float | None,
    deadline: float | None,
    measured_step_seconds: float | None,
    measured: tuple[str, ...],
    **requested: Any,
) -> Verdict | Answer | None:
    """Choose a strategy for a model and GPUs.

    Without --model, the command finds the largest GPT for the GPUs. Without --gpus, it finds how many GPUs the model
    needs. Without --gpu, or with the names of several GPUs, it compares machines.
    """
    from zero_study import planner
    from zero_study.planner import advice_text, json_answer, launch, machines, machines_text

    if requested["gpu"] == "list":
        if as_json:
            return json_answer.of_gpus()
        _print_gpus()
        return None
    if model == "list":
        if as_json:
            return json_answer.of_models()
        _print_models()
        return None
    if this_machine:
        from zero_study.planner import own_machine

        requested = own_machine.options(requested)
    num_gpus = requested["num_gpus"]
    compared = None if model is None else _compared_gpus(requested, budget, deadline)
    _check_complete(
        model is not None and num_gpus is not None and compared is None,
        {"--trace": trace, "--measured-step-seconds": measured_step_seconds, "--measured": measured},
    )
    if kubernetes and write is None:
        raise Refusal("--kubernetes: the manifest belongs to a file. Add --write FILE.")
    if write is not None:
        if model is None:
            raise Refusal(f"--write {write}: there is a file for one model only. Add --model.")
        launch.check_free(write, requested["stack"])
    show = functools.partial(_show, as_json, write is not None)
    if model is not None and compared is not None:
        comparison = _compare(model, requested, compared, budget, deadline)
        verdict = show(
            comparison,
            functools.partial(machines_text.text_of_comparison, everything=everything),
            machines_text.content_of_comparison,
        )
        _write_for(comparison.cheapest, comparison.request, write, as_json, kubernetes)
        return verdict
    if model is None and num_gpus is None:
        raise Refusal(
            "--model and --gpus are both missing. Add --model to find GPUs for a model, --gpus to find a model for "
            "GPUs, or both."
        )
    request = request_of(requested)
    if trace:
        require(*TRACING)
    if model is None:
        largest = planner.largest_models(request)
        return show(largest, advice_text.text_of_largest, advice_text.content_of_largest)
    if num_gpus is None:
        with _quietly(as_json), after_two_seconds("Predicting numbers of GPUs"):
            numbers = machines.numbers_of_gpus(model, request)
        verdict = show(
            numbers,
            functools.partial(machines_text.text_of_numbers, everything=everything),
            machines_text.content_of_numbers,
        )
        comfortable = (machine for machine in numbers.machines if machine.is_comfortable)
        _write_for(next(comfortable, None), numbers.fewest.request, write, as_json, kubernetes)
        return verdict
    with _quietly(as_json), after_two_seconds("Looking up the model and predicting every strategy"):
        advice = _advise_by_traces(model, request) if trace else planner.advise(model, request, None)
    steps = dict(_measured(log, request.strategy) for log in measured)
    if measured_step_seconds is not None:
        steps[request.strategy] = measured_step_seconds
    text: Callable[[Any], str] = functools.partial(
        advice_text.text_of_all if everything else advice_text.text, path=write
    )
    content: Callable[[Any], dict[str, Any]] = functools.partial(advice_text.content, path=write)
    if steps:
        advice, text, content = _calibrated(advice, steps, text, content)
    verdict = show(advice, text, content)
    if write is not None:
        _write(advice, write, as_json, kubernetes)
    return verdict


def _measured(text: str, strategy: str | None) -> tuple[str | None, float]:
    """Return a strategy and the seconds per step in its log, without the first steps.

    Raises Refusal if the log states no times.
    """
    from zero_study.logs import imported
    from zero_study.public_runs import quantities

    name, _, path = text.rpartition("=")
    runs = imported.read([Path(path)])
    if len(runs) != 1:
        raise Refusal(
            f"--measured {text}: this log has {len(runs)} runs. State the time of one of them "
            "with --measured-step-seconds."
        )
    seconds = quantities.seconds_per_step(runs[0].run)
    if not seconds:
        raise Refusal(
            f"--measured {text}: this log does not contain the time of a step. State it with --measured-step-seconds."
        )
    return name or strategy, seconds


def _calibrated(
    advice: Advice,
    steps: dict[str | None, float],
    text: Callable[[Any], str],
    content: Callable[[Any], dict[str, Any]],
) -> tuple[Advice, Callable[[Any], str], Callable[[Any], dict[str, Any]]]:
    """Return the advice corrected by measured step times, and two functions that make its text and its JSON."""
    from zero_study.planner import advice_text, calibration

    found = calibration.calibrate(advice, steps)
    lines = [*advice_text.wrapped(calibration.sentences(found)), "", *advice_text.aligned(calibration.rows(found)), ""]
    return (
        calibration.measured_advice(advice, found),
        lambda given_advice: "\n".join([*lines, text(given_advice)]),
        lambda given_advice: {**content(given_advice), "calibration": calibration.content(found)},
    )


def _quietly(as_json: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which progress messages are not part of the JSON output."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def _compared_gpus(requested: dict[str, Any], budget: float | None, deadline: float | None) -> list[str] | None:
    """Return the names of the GPUs to compare. An empty list stands for all GPUs with a price.

    None if the question is about one machine.
    """
    gpu, has_limits = requested["gpu"], budget is not None or deadline is not None
    if gpu is not None:
        names = [name.strip() for name in gpu.split(",")]
        return names if len(names) > 1 or has_limits else None
    if requested["gpu_memory"] is not None:
        return None
    return []


def _compare(
    model: str, requested: dict[str, Any], names: list[str], budget: float | None, deadline: float | None
) -> Comparison:
    from zero_study.errors import refusing
    from zero_study.planner import machines
    from zero_study.planner.request import reading
    from zero_study.theory import hardware

    with refusing():
        gpus = [hardware.find_gpu(name).name for name in names]
    num_gpus = requested.pop("num_gpus")
    request = request_of(requested | {"gpu": gpus[0] if gpus else "a100-80gb"})
    with after_two_seconds("Predicting every machine"):
        comparison = machines.compare(model, request, gpus, num_gpus, budget, deadline)
    comparison.notes.extend(filter(None, map(reading, names)))
    return comparison


def _write_for(
    machine: Machine | None, request: Request, path: Path | None, is_silent: bool, for_kubernetes: bool
) -> None:
    """Write the files for the recommended machine of a comparison, if a path is requested, and print the command.

    Raises Refusal if there is no such machine.
    """
    from zero_study.planner import advice_text
    from zero_study.planner.choose import Advice

    if path is None:
        return
    if machine is None:
        raise Refusal(f"--write {path}: no machine keeps the limits and leaves enough memory free. Change a limit.")
    option = machine.option
    request = request.replace(num_gpus=machine.num_gpus, gpu=request.gpu and machine.gpu.name)
    advice = Advice(option.shape, request, option.prediction.box, [], [option], option)
    _write(advice, path, is_silent, for_kubernetes)
    if not is_silent:
        print("\n".join(advice_text.start_lines(advice, path=path)))


def _write(advice: Advice, path: Path, is_silent: bool, for_kubernetes: bool) -> None:
    """Write the files of the recommended strategy, and print their names unless `is_silent`."""
    from zero_study.planner import launch

    written = launch.write(advice, path, for_kubernetes)
    if is_silent:
        return
    kind = {"axolotl": "axolotl", "deepspeed": "DeepSpeed"}.get(advice.request.stack, "accelerate")
    change = "" if advice.change is None else f", with {advice.change.flags},"
    print(f"\nWrote the {kind} file of the recommended strategy{change} to {path}")
    for more in written[1:]:
        is_manifest = for_kubernetes and more == written[-1]
        print(
            f"Wrote {more}. Start: kubectl apply -f {more}" if is_manifest else f"Wrote {more}, which this file needs"
        )


def request_of(requested: dict[str, Any]) -> Request:
    """Return the planner's input for the options of `advise`. Raises Refusal if they name no GPU or are not valid."""
    if requested["gpu"] is None and requested["gpu_memory"] is None:
        raise Refusal(
            "--gpu is missing. Name a GPU, for instance a100-80gb (`--gpu list` prints all names), or give its numbers "
            "with --gpu-memory, --gpu-tflops and --gpu-bandwidth. --this-machine takes the GPUs of this machine."
        )
    return Request(**given(requested))


def _print_gpus() -> None:
    """Print all GPUs that --gpu accepts, with their main numbers and the sources of their prices."""
    from zero_study import terminal
    from zero_study.planner.training_text import price_source_of
    from zero_study.theory import gpus

    meaning = (
        "TFLOP/s: the dense peak in bf16 with accumulation in fp32 (t4 and v100: in fp16). mem.: the GPU's memory. "
        "link: the bandwidth between the GPUs of a node, in one direction. $/hour: US dollars per GPU, rented on "
        "demand. --gpu also takes the name that torch.cuda.get_device_name() returns."
    )
    names: dict[str, list[str]] = {}
    for gpu in gpus.GPUS.values():
        if gpu.price_per_hour is not None:
            names.setdefault(price_source_of(gpu), []).append(gpu.name)
    sources = [terminal.wrap(f"{', '.join(sharing)}: {source}", "  ", "    ") for source, sharing in names.items()]
    lines = [*terminal.table(*gpus.table()), "", terminal.wrap(meaning), "", "Prices, with their date:", *sources]
    print("\n".join(lines))


def _print_models() -> None:
    """Print all models that --model accepts by name."""
    from zero_study import terminal
    from zero_study.theory.shapes.known_models import KNOWN

    meaning = (
        "million: millions of parameters. positions: the longest sequence, in tokens. --model also takes the id of a "
        "model on the Hugging Face hub, and the path of a config.json."
    )
    rows = [[name, f"{shape.num_params / 1e6:,.1f}", f"{shape.positions:,}"] for name, shape in KNOWN.items()]
    print("\n".join([*terminal.table(["name", "million", "positions"], rows), "", terminal.wrap(meaning)]))


def _check_complete(is_complete: bool, options: dict[str, Any]) -> None:
    """Raise Refusal for an option about one machine if the question is not about one model on one machine."""
    for name, value in options.items():
        if value and not is_complete:
            raise Refusal(f"{name} needs --model, --gpus and one --gpu. Add the missing options.")


def _show(
    as_json: bool,
    is_written: bool,
    predicted: Any,
    text: Callable[[Any], str],
    content: Callable[[Any], dict[str, Any]],
) -> Verdict | Answer:
    """Return the answer for --json, or print the text and return the verdict.

    If a file is written next, it does not matter whether anybody reads the text: `zero-study advise ... | head`.
    """
    from zero_study.planner import json_answer

    if as_json:
        return json_answer.of(predicted, content(predicted))
    verdict: Verdict = predicted.verdict
    with contextlib.suppress(*[BrokenPipeError] * is_written):
        print(text(predicted))
    return verdict


def _advise_by_traces(model: str, request: Request) -> Advice:
    """Return advice that is based on simulated steps of the model from transformers, with fake tensors."""
    from zero_study import planner
    from zero_study.dryrun.trace import trace as trace_step
    from zero_study.planner.trace import trace_options
    from zero_study.theory.stacks import STACKS

    if STACKS[request.stack].kernels != "transformers":
        raise Refusal(
            f"--trace can only trace the models of transformers, but {request.stack} trains its own. Remove --trace, "
            "or use another --stack."
        )
    request = request.replace(kernels="transformers")
    return planner.advise(model, request, functools.partial(trace_options, trace_step))


COMMANDS = (_advise,)
