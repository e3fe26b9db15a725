"""The commands that predict: which strategy to take, and what the runs of a study would take on other GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from study.cli.options import A_STUDY, NUMBER, PATH, TRACING, choice, command, require
from study.errors import Refusal
from study.theory import engine as engine_types

if TYPE_CHECKING:
    from study.planner import Request
    from study.planner.choose import Advice


@command("advise")
@click.option("--model", metavar="NAME", help="a known name (gpt2-xl, llama-2-7b ...), a hub id or a config.json")
@click.option(
    "--gpu", required=True, metavar="NAME", help="t4, l4, a10g, v100-16gb, a100-40gb, a100-80gb, h100-sxm, h200 ..."
)
@click.option("--gpus", "num_gpus", type=NUMBER, help="how many")
@click.option("--sequence-length", type=NUMBER, help="tokens [default: 1024, or as many as the model has positions]")
@click.option("--global-batch-size", type=NUMBER, help="sequences per optimizer step [default: 8 per GPU]")
@click.option("--strategy", metavar="NAME", help="only this one: a name or a file")
@click.option(
    "--micro-batch-size", type=NUMBER, help="sequences per GPU and forward pass [default: the fastest that fits]"
)
@click.option("--gradient-accumulation-steps", type=NUMBER, help="micro steps [default: what the batch sizes leave]")
@choice("--precision", engine_types.PrecisionClass, "[default: bf16 where the GPU has it, else fp16]")
@choice(
    "--activation-checkpointing",
    engine_types.Checkpointing,
    "recompute each block, or every second [default: full, where it makes a strategy fit, or faster]",
)
@choice(
    "--kernels",
    engine_types.Kernels,
    "norms, activation functions and loss in one each, or composed as transformers has them",
    "fused",
)
@click.option("--compile", is_flag=True, help="torch.compile fuses what transformers composes")
@choice(
    "--attention",
    engine_types.Attention,
    "PyTorch's (FlashAttention-2 where the card and the type have it), operators, or FlashAttention as of 2022",
    "sdpa",
)
@click.option("--dropout", is_flag=True, help="with dropout")
@choice(
    "--loss-kernel",
    engine_types.LossKernel,
    "fp32 logits and copies, fp32 logits, 16-bit logits, or never all logits [default: as --kernels]",
)
@choice("--optimizer", engine_types.Optimizer, "whose states are kept; sgd: without momentum", "adamw")
@choice(
    "--optimizer-kernel",
    engine_types.OptimizerKernel,
    "foreach, PyTorch's default, takes one more copy of what is updated",
    "fused",
)
@click.option("--network-gbps", type=float, metavar="GBIT", help="of a node to all others [default: as one rents it]")
@click.option("--gpus-per-node", type=NUMBER, help="[default: as one rents it]")
@click.option(
    "--shard-group-size",
    type=NUMBER,
    help="GPUs that share one copy of the states (hybrid sharding, ZeRO-1 within nodes) [default: hybrid, a node's]",
)
@click.option(
    "--all", "everything", is_flag=True, help="every strategy, where the bytes are, and what the times rest on"
)
@click.option("--json", "as_json", is_flag=True, help="print bytes and seconds as JSON")
@click.option("--write", type=PATH, metavar="FILE", help="also write the recommended accelerate file")
@click.option("--trace", is_flag=True, help="choose by traces of the model over fake tensors, a minute or less each")
def _advise(
    model: str | None,
    num_gpus: int | None,
    everything: bool,
    as_json: bool,
    write: Path | None,
    trace: bool,
    **options: Any,
) -> None:
    """Say which strategy to take for a model and GPUs.

    Predicts memory, time and price of each.

    Without --model: the largest model for the GPUs. Without --gpus: the fewest GPUs for the model.
    """
    from study import planner
    from study.planner import advice_text

    if model is None and num_gpus is None:
        raise Refusal("--model or --gpus is missing: a model for its GPUs, GPUs for their model, or both")
    request = planner.Request(num_gpus=num_gpus or 1, **options)
    is_complete = model is not None and num_gpus is not None
    if trace:
        if not is_complete:
            raise Refusal("--trace goes with both --model and --gpus; add them")
        require(*TRACING)
    if write is not None:
        _check_write(write, is_complete)
    show = _print_json if as_json else _print_text
    if model is None:
        show(planner.largest_models(request), advice_text.text_of_largest, advice_text.content_of_largest)
    elif num_gpus is None:
        show(planner.fewest_gpus(model, request), advice_text.text_of_fewest, advice_text.content_of_fewest)
    else:
        # What a trace prints while it works is not JSON.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            advice = _advise_by_traces(model, request) if trace else planner.advise(model, request, None)
        show(advice, advice_text.text_of_all if everything else advice_text.text, advice_text.content)
        if write is not None:
            advice_text.write(advice, write)
            if not as_json:
                print(f"\nWritten: {write}")


def _check_write(path: Path, is_complete: bool) -> None:
    from study.planner import advice_text

    if not is_complete:
        raise Refusal(f"--write {path}: needs both --model and --gpus")
    advice_text.check_free(path)


def _print_json(advice: Any, _: Callable[[Any], str], content: Callable[[Any], dict[str, Any]]) -> None:
    import json

    print(json.dumps(content(advice), indent=1))


def _print_text(advice: Any, text: Callable[[Any], str], _: Callable[[Any], dict[str, Any]]) -> None:
    print(text(advice))


def _advise_by_traces(model: str, request: Request) -> Advice:
    """Choose by traces of the model over fake tensors, whose modules are those of transformers."""
    from study import planner
    from study.dryrun.trace import trace as trace_step
    from study.planner.trace import trace_options

    request = dataclasses.replace(request, kernels="transformers")
    return planner.advise(model, request, functools.partial(trace_options, trace_step))


@command("predict")
@click.argument("study", required=False, help=A_STUDY)
@click.option("--gpu", metavar="NAME", help="as `zero-study advise` names it")
@click.option("--gpus", "num_gpus", type=NUMBER, help="how many [default: 1]")
@click.option("--output", type=PATH, default="reports/predicted", help="folder to write to")
def _predict(study: str | None, gpu: str | None, num_gpus: int | None, output: Path) -> None:
    """Predict a study's runs on other GPUs.

    Without a study, all of the reports'.
    """
    from study.running import predictions, studies

    if study is None:
        if gpu or num_gpus:
            raise Refusal("--gpu and --gpus go with a study; name one, or leave them out for all of the reports'")
        for path in predictions.write_all(output):
            print(path)
        return
    if gpu is None:
        raise Refusal("--gpu is missing: predict STUDY --gpu a100-80gb --gpus 8")
    print(predictions.write(output, predictions.predict_study(studies.find(study), gpu, num_gpus or 1)))


COMMANDS = (_advise, _predict)
