"""The commands that predict: which strategy to choose, and memory and time of a study's runs on other GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from study.cli.options import A_STUDY, NUMBER, PATH, READ_AND_WRITE, TRACING, choice, command, require
from study.errors import Refusal
from study.progress import after_two_seconds
from study.theory import adapters, stacks
from study.theory import engine as engine_types

if TYPE_CHECKING:
    from study.planner import Request
    from study.planner.choose import Advice
    from study.verdict import Verdict


@command("advise")
@click.option(
    "--model",
    metavar="NAME",
    help="A known name (gpt2-xl, llama-2-7b ...), an id of the Hugging Face hub, or a config.json file.",
)
@click.option(
    "--gpu",
    metavar="NAME",
    help="Kind of GPU: a100-80gb, h100-sxm, b200, l40s, rtx-4090, mi300x ... `--gpu list` prints all names.",
)
@click.option("--gpus", "num_gpus", type=NUMBER, help="Number of GPUs.")
@click.option(
    "--this-machine",
    is_flag=True,
    help="Take kind and number of the GPUs, host memory and cores of this machine, where no other option gives them. "
    "It needs a GPU.",
)
@click.option(
    "--gpu-memory",
    type=float,
    metavar="GIB",
    help="Memory of the GPU. Use the three options --gpu-memory, --gpu-tflops and --gpu-bandwidth for a GPU without a "
    "name, or some of them to change a GPU that --gpu names.",
)
@click.option(
    "--gpu-tflops", type=float, metavar="TFLOPS", help="Peak rate of the GPU in bf16, dense, with accumulation in fp32."
)
@click.option("--gpu-bandwidth", type=float, metavar="GB/S", help="Bandwidth of the GPU's memory.")
@click.option(
    "--sequence-length",
    type=NUMBER,
    help="Tokens per sequence. [default: 1024, or the model's maximum if that is less]",
)
@click.option("--global-batch-size", type=NUMBER, help="Sequences per optimizer step. [default: 8 per GPU]")
@click.option("--strategy", metavar="NAME", help="Predict only this strategy: a name, or an accelerate file.")
@click.option(
    "--micro-batch-size",
    type=NUMBER,
    help="Sequences per GPU and forward pass. [default: the fastest that leaves enough memory free]",
)
@click.option(
    "--gradient-accumulation-steps",
    type=NUMBER,
    help="Micro batches per optimizer step. [default: as the batch sizes require]",
)
@choice(
    "--precision",
    engine_types.PrecisionClass,
    "Precision of the training. [default: bf16 if the GPU supports it, otherwise fp16]",
)
@choice(
    "--stack",
    stacks.StackName,
    "The program that trains. It decides the defaults of the settings below, which the answer lists.",
    stacks.DEFAULT_STACK,
)
@choice(
    "--activation-checkpointing",
    engine_types.Checkpointing,
    "Recompute the activations of every block (full), of every second one (selective), or of some operators in every "
    "block (selective-op, as torchtitan does) in the backward pass. "
    "[default: as the stack; if that has it off, full if that makes a strategy fit or faster]",
)
@choice(
    "--kernels",
    engine_types.Kernels,
    "fused: norms, activation functions and loss are one kernel each. transformers: several kernels, as its models "
    "do. [default: as the stack]",
)
@click.option(
    "--compile", is_flag=True, help="Assume torch.compile, which fuses these kernels and the copies of the logits."
)
@choice(
    "--attention",
    engine_types.Attention,
    "sdpa: PyTorch's (FlashAttention-2 if GPU and precision support it). eager: separate operators. flash-1: "
    "FlashAttention of 2022. [default: as the stack]",
)
@click.option("--dropout", is_flag=True, help="Assume dropout.")
@choice(
    "--loss-kernel",
    engine_types.LossKernel,
    "How the loss handles logits: fp32 logits and copies, fp32 logits, 16-bit logits, or never all logits at once. "
    "[default: as the stack, or as --kernels if that is given]",
)
@choice(
    "--grad-accum-dtype",
    stacks.GradientType,
    "Type in which DeepSpeed accumulates gradients (grad_accum_dtype): fp32, or the model's type. [default: as the "
    "stack]",
)
@click.option(
    "--sync-each-batch/--no-sync-each-batch",
    default=None,
    help="Whether FSDP2 reduces gradients in every micro step. Otherwise every GPU keeps unsharded gradients until the "
    "last one. [default: as the stack]",
)
@choice(
    "--reduce-dtype",
    stacks.GradientType,
    "Type in which FSDP2 reduces gradients: fp32, or the model's type. [default: as the stack]",
)
@choice(
    "--optimizer",
    engine_types.Optimizer,
    "Optimizer, which determines the optimizer states. sgd: without momentum.",
    "adamw",
)
@choice(
    "--optimizer-kernel",
    engine_types.OptimizerKernel,
    "foreach, PyTorch's default, needs one more copy of what is updated. Under ZeRO, loop needs two, because its "
    "parameters are a few large tensors. [default: as the stack]",
)
@click.option(
    "--lora-rank",
    type=NUMBER,
    help="Train adapters of this rank (LoRA), and freeze the weights of the model. [default: train all weights]",
)
@click.option(
    "--lora-target",
    metavar="NAMES",
    help="Modules with an adapter: names with commas, such as q_proj,v_proj, or all-linear. [default: as PEFT chooses]",
)
@click.option("--lora-dropout", type=float, default=0.0, help="Dropout of the adapters' inputs. [default: 0]")
@choice("--adapter", adapters.AdapterKind, "Kind of the adapters. dora: with magnitudes of the weights.", "lora")
@click.option(
    "--load-in-4bit",
    is_flag=True,
    help="Keep the frozen weights of Linear modules in four bits (QLoRA: NF4 with double quantization).",
)
@click.option(
    "--network-gbps", type=float, metavar="GBIT", help="Network rate of a node. [default: as cloud providers offer it]"
)
@click.option("--gpus-per-node", type=NUMBER, help="GPUs in one node. [default: as cloud providers offer it]")
@click.option(
    "--link-bandwidth",
    type=float,
    metavar="GB/S",
    help="Bandwidth of a GPU to the other GPUs of its node, in one direction. [default: as in the GPU's data sheet]",
)
@click.option(
    "--host-memory",
    type=float,
    metavar="GIB",
    help="Host memory of a node, which offload needs. [default: as cloud providers offer it]",
)
@click.option("--host-cores", type=NUMBER, help="Physical cores of a node.")
@click.option("--host-bandwidth", type=float, metavar="GB/S", help="Bandwidth of a node's host memory.")
@click.option("--disk", type=float, metavar="TB", help="Size of a node's local NVMe disks.")
@click.option(
    "--disk-bandwidth",
    type=READ_AND_WRITE,
    metavar="READ[,WRITE]",
    help="GB/s with which a node's disks read and write. One number counts for both.",
)
@click.option(
    "--shard-group-size",
    type=NUMBER,
    help="GPUs that share one copy of the model states (hybrid sharding, ZeRO-1 within nodes). [default: for hybrid "
    "sharding, the GPUs of a node]",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Print every strategy, the parts of its memory, and the evidence behind the times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON, with the unit of every number.")
@click.option("--write", type=PATH, metavar="FILE", help="Write the file that the launch command reads.")
@click.option(
    "--trace",
    is_flag=True,
    help="Trace the model over fake tensors to determine its memory. Takes up to a minute per strategy.",
)
def _advise(
    model: str | None,
    num_gpus: int | None,
    this_machine: bool,
    everything: bool,
    as_json: bool,
    write: Path | None,
    trace: bool,
    **options: Any,
) -> Verdict | None:
    """Choose a strategy for a model and GPUs.

    Predicts memory, time and price of each strategy.

    Without --model, it finds the largest model for the GPUs. Without --gpus, it finds the smallest number of GPUs for
    the model.

    Exit status: 0 if a strategy fits; 1 if none does; 2 if the request is refused; 3 if nothing could be predicted.
    """
    from study import planner
    from study.planner import advice_text

    if options["gpu"] == "list":
        _print_gpus()
        return None
    if this_machine:
        from study.planner import own_machine

        options, num_gpus = own_machine.options(options, num_gpus)
    if model is None and num_gpus is None:
        raise Refusal(
            "--model and --gpus are both missing. Add --model to find GPUs for a model, --gpus to find a model for "
            "GPUs, or both."
        )
    request = request_of(num_gpus, options)
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


def request_of(num_gpus: int | None, options: dict[str, Any]) -> Request:
    """Return the request that the options of `advise` make. Raises Refusal if they name no GPU, or are not valid."""
    from study import planner

    if options["gpu"] is None and options["gpu_memory"] is None:
        raise Refusal(
            "--gpu is missing. Name a GPU, for instance a100-80gb (`--gpu list` prints all names), or give its numbers "
            "with --gpu-memory, --gpu-tflops and --gpu-bandwidth. --this-machine takes the GPUs of this machine."
        )
    return planner.Request(num_gpus=num_gpus or 1, **options)


def _print_gpus() -> None:
    """Print all GPUs that --gpu takes, with their main numbers."""
    from study import terminal
    from study.theory import gpus

    meaning = (
        "TFLOP/s: the dense peak in bf16 with accumulation in fp32 (t4 and v100: in fp16). link: between the GPUs of a "
        "node, in one direction. The name that torch.cuda.get_device_name() returns works too."
    )
    print("\n".join([*terminal.table(*gpus.table()), "", terminal.wrapped(meaning)]))


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

    request = dataclasses.replace(request, kernels="transformers")
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
