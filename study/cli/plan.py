"""The commands that predict: which strategy to choose, and memory and time of a study's runs on other GPUs."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from study.cli.options import A_STUDY, PATH, TRACING, command, require
from study.command_line import NUMBER, Option, given, options_of
from study.errors import Refusal
from study.planner.request import GPUS, WORK, Request
from study.progress import after_two_seconds

if TYPE_CHECKING:
    from study.planner.choose import Advice
    from study.verdict import Verdict

OUTPUT = "Output"


@command(
    "advise",
    params=[
        Option(
            ["--model"],
            group=WORK,
            is_common=True,
            metavar="NAME",
            help="A known name (gpt2-xl, llama-2-7b ...), an id of the Hugging Face hub, or a config.json file.",
        ),
        *options_of(Request),
        Option(
            ["--this-machine"],
            group=GPUS,
            is_common=True,
            is_flag=True,
            help="Take kind and number of the GPUs, host memory and cores of this machine, where no other option gives "
            "them. It needs a GPU.",
        ),
        Option(
            ["--all", "everything"],
            group=OUTPUT,
            is_common=True,
            is_flag=True,
            help="Print every strategy, the parts of its memory, and the evidence behind the times.",
        ),
        Option(
            ["--json", "as_json"],
            group=OUTPUT,
            is_common=True,
            is_flag=True,
            help="Print the answer as JSON, with the unit of every number.",
        ),
        Option(
            ["--write"],
            group=OUTPUT,
            is_common=True,
            type=PATH,
            metavar="FILE",
            help="Write the file that the launch command reads.",
        ),
        Option(
            ["--trace"],
            group=OUTPUT,
            is_flag=True,
            help="Trace the model over fake tensors to determine its memory. Takes up to a minute per strategy.",
        ),
    ],
)
def _advise(
    model: str | None,
    this_machine: bool,
    everything: bool,
    as_json: bool,
    write: Path | None,
    trace: bool,
    **requested: Any,
) -> Verdict | None:
    """Choose a strategy for a model and GPUs.

    Predicts memory, time and price of each strategy.

    Without --model, it finds the largest model for the GPUs. Without --gpus, it finds the smallest number of GPUs for
    the model.

    Exit status: 0 if a strategy fits; 1 if none does; 2 if the request is refused; 3 if nothing could be predicted.
    """
    from study import planner
    from study.planner import advice_text

    if requested["gpu"] == "list":
        _print_gpus()
        return None
    if this_machine:
        from study.planner import own_machine

        requested = own_machine.options(requested)
    num_gpus = requested["num_gpus"]
    if model is None and num_gpus is None:
        raise Refusal(
            "--model and --gpus are both missing. Add --model to find GPUs for a model, --gpus to find a model for "
            "GPUs, or both."
        )
    request = request_of(requested)
    is_complete = model is not None and num_gpus is not None
    if trace:
        if not is_complete:
            raise Refusal("--trace needs both --model and --gpus. Add the missing one.")
        require(*TRACING)
    if write is not None:
        _check_write(write, is_complete, request)
    show = _print_json if as_json else _print_text
    if model is None:
        largest = planner.largest_models(request)
        return show(largest, advice_text.text_of_largest, advice_text.content_of_largest)
    if num_gpus is None:
        fewest = planner.fewest_gpus(model, request)
        return show(fewest, advice_text.text_of_fewest, advice_text.content_of_fewest)
    # Progress messages of a trace are not part of the JSON output.
    diverted = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with diverted, after_two_seconds("Looking up the model and predicting every strategy"):
        advice = _advise_by_traces(model, request) if trace else planner.advise(model, request, None)
    verdict = show(advice, advice_text.text_of_all if everything else advice_text.text, advice_text.content)
    if write is not None:
        _write(advice, write, is_silent=as_json)
    return verdict


def _write(advice: Advice, path: Path, is_silent: bool) -> None:
    """Write the files of the recommended strategy, and say which ones unless `is_silent`."""
    from study.planner import launch

    written = launch.write(advice, path)
    if is_silent:
        return
    kind = {"axolotl": "axolotl", "deepspeed": "DeepSpeed"}.get(advice.request.stack, "accelerate")
    print(f"\nWrote the {kind} file of the recommended strategy to {path}")
    for more in written[1:]:
        print(f"Wrote {more}, which belongs to it")


def request_of(requested: dict[str, Any]) -> Request:
    """Return the request that the options of `advise` make. Raises Refusal if they name no GPU, or are not valid."""
    if requested["gpu"] is None and requested["gpu_memory"] is None:
        raise Refusal(
            "--gpu is missing. Name a GPU, for instance a100-80gb (`--gpu list` prints all names), or give its numbers "
            "with --gpu-memory, --gpu-tflops and --gpu-bandwidth. --this-machine takes the GPUs of this machine."
        )
    return Request(**given(requested))


def _print_gpus() -> None:
    """Print all GPUs that --gpu takes, with their main numbers."""
    from study import terminal
    from study.theory import gpus

    meaning = (
        "TFLOP/s: the dense peak in bf16 with accumulation in fp32 (t4 and v100: in fp16). link: between the GPUs of a "
        "node, in one direction. The name that torch.cuda.get_device_name() returns works too."
    )
    print("\n".join([*terminal.table(*gpus.table()), "", terminal.wrap(meaning)]))


def _check_write(path: Path, is_complete: bool, request: Request) -> None:
    from study.planner import launch

    if not is_complete:
        raise Refusal(f"--write {path}: needs both --model and --gpus. Add the missing one.")
    launch.check_free(path, request.stack)


def _print_json(advice: Any, _: Callable[[Any], str], content: Callable[[Any], dict[str, Any]]) -> Verdict:
    import json

    verdict: Verdict = advice.verdict
    print(json.dumps({**content(advice), **verdict.content()}, indent=1))
    return verdict


def _print_text(advice: Any, text: Callable[[Any], str], _: Callable[[Any], dict[str, Any]]) -> Verdict:
    verdict: Verdict = advice.verdict
    print(text(advice))
    return verdict


def _advise_by_traces(model: str, request: Request) -> Advice:
    """Return advice that is based on traces of the model in transformers, run with fake tensors."""
    from study import planner
    from study.dryrun.trace import trace as trace_step
    from study.planner.trace import trace_options
    from study.theory.stacks import STACKS

    if STACKS[request.stack].kernels != "transformers":
        raise Refusal(
            f"--trace traces the models of transformers, but {request.stack} trains its own. Leave --trace out, or use "
            "another --stack."
        )
    request = request.replace(kernels="transformers")
    return planner.advise(model, request, functools.partial(trace_options, trace_step))


@command("predict")
@click.argument("study", required=False, help=A_STUDY)
@click.option("--gpu", metavar="NAME", help="Kind of GPU, as in `zero-study advise`.")
@click.option("--gpus", "num_gpus", type=NUMBER, help="Number of GPUs. [default: 1]")
@click.option("--output", type=PATH, default="reports/predicted", help="Folder to write to.")
def _predict(study: str | None, gpu: str | None, num_gpus: int | None, output: Path) -> None:
    """Predict a study's runs on other GPUs.

    Writes predicted memory and time to a JSON file. Without a study, all predictions of the project's reports are
    written.
    """
    from study.running import predictions, studies

    if study is None:
        if gpu or num_gpus:
            raise Refusal(
                "--gpu and --gpus need a study. Name one, or leave both out to write all predictions of the reports."
            )
        for path in predictions.write_all(output):
            print(f"Wrote {path}")
        return
    if gpu is None:
        raise Refusal("--gpu is missing. For instance: zero-study predict STUDY --gpu a100-80gb --gpus 8")
    print(f"Wrote {predictions.write(output, predictions.predict_study(studies.find(study), gpu, num_gpus or 1))}")


COMMANDS = (_advise, _predict)
