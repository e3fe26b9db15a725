"""Test that the printed command starts the predicted training: every option that changes a prediction is in it.

tests/launch_reading.py reads what is printed and written back into the fields of the request.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any, get_args

import launch_reading
import pytest
import samples
from refusing import refusal

from zero_study import cli, planner
from zero_study.cli import web
from zero_study.command_line import _declaration, choices, kind
from zero_study.errors import Refusal
from zero_study.planner import Request, choose, launch, stack_tables
from zero_study.planner.request import GPUS, MACHINE
from zero_study.strategy import file
from zero_study.theory import adapters
from zero_study.theory import engine as engines
from zero_study.theory.stacks import STACKS, StackName

# Fields that describe the machine, which a command cannot change, or that name the strategy, the program or its file.
OF_MACHINE = {name for name, field in Request.model_fields.items() if _declaration(field).group in (MACHINE, GPUS)}
OF_LENGTH = {"tokens", "examples", "epochs"}  # of how long the training is, which changes no step
OF_IMAGES = {"images", "freeze_vision_tower"}  # of vision-language models, in test_images.py
NOT_SET = OF_MACHINE | OF_LENGTH | OF_IMAGES | {"strategy", "stack", "shard_group_size"}
# Values of the fields that are neither words nor switches.
VALUES: dict[str, list[Any]] = {
    "sequence_length": [512], "global_batch_size": [64], "micro_batch_size": [1], "gradient_accumulation_steps": [4],
    "lora_rank": [8], "lora_target": ["q_proj,v_proj", "all-linear"], "lora_dropout": [0.5],
    "context_parallel": [2], "sequence_parallel": [2],
}  # fmt: skip
OF_ADAPTERS = ("lora_target", "lora_dropout", "adapter", "load_in_4bit")
STRATEGIES = ["ddp", "zero0", "zero1", "zero2", "zero3", "zero2_cpu_offload", "fsdp2", "fsdp2_cpu_offload"]
BASE: dict[str, Any] = {
    "micro_batch_size": 2, "gradient_accumulation_steps": 2, "activation_checkpointing": "none", "precision": "bf16",
}  # fmt: skip


Change = dict[str, Any]


def changes() -> Iterator[tuple[str, Any, Change]]:
    """Yield every value of every field that can change what a program trains, with the fields that it needs."""
    for name, field in Request.model_fields.items():
        if name in NOT_SET:
            continue
        values = list(choices(field)) or ([True, False] if kind(field) is bool else VALUES.get(name))
        assert values, f"{name} is a new option: write values of it into VALUES, and how programs are set here"
        needed: Change = {"lora_rank": 8} if name in OF_ADAPTERS else {}
        needed |= {"gradient_accumulation_steps": None} if name == "global_batch_size" else {}
        for value in values:
            yield name, value, needed | {name: value}


def combinations() -> Iterator[Change]:
    """Yield options that belong together."""
    yield {"compile": True, "loss_kernel": "eager"}
    yield {"compile": True, "loss_kernel": "chunked"}
    yield {"compile": True, "loss_kernel": "upcast"}
    yield {"compile": True, "kernels": "fused"}
    for loss in get_args(engines.LossKernel):
        yield {"kernels": "fused", "loss_kernel": loss}
    yield {"optimizer": "sgd", "optimizer_kernel": "foreach"}
    yield {"grad_accum_dtype": "fp32", "precision": "fp16"}
    yield {"grad_accum_dtype": "model", "precision": "fp16"}
    yield {"reduce_dtype": "fp32", "precision": "fp16"}
    yield {"optimizer": "adamw-8bit", "attention": "eager", "compile": True, "dropout": True}


def all_changes() -> list[Change]:
    return [*(change for _, _, change in changes()), *combinations()]


def ask(model: str, stack: StackName, strategy: str, **settings: Any) -> choose.Advice:
    num_gpus = 1 if strategy == "single" else 4
    gpu = "b200" if settings.get("attention") == "flash-4" else "h200"
    return planner.advise(model, Request(gpu, num_gpus, stack=stack, strategy=strategy, **BASE | settings))


def predicted(advice: choose.Advice) -> tuple[Any, ...]:
    """Return what a prediction says, without the names of its settings."""
    prediction = advice.options[0].prediction
    step = dataclasses.asdict(prediction.step)
    return prediction.peak.total, dict(prediction.peak.parts), {key: step[key] for key in step if key != "evidence"}


def started(advice: choose.Advice) -> launch.Launch:
    """Return the launch of the only option, also if it does not fit."""
    start = launch.launch(dataclasses.replace(advice, recommended=advice.options[0]))
    assert start is not None
    return start


def expected(advice: choose.Advice) -> dict[str, Any]:
    """Return the fields of a request as `launch_reading.read` returns them."""
    request, engine = advice.request, advice.options[0].prediction.engine
    fields = {name: getattr(request, name) for name in Request.model_fields if name not in NOT_SET}
    precision = engine.precision if engine.kind == "deepspeed" else engine.precision.removesuffix("-autocast")
    job = advice.options[0].prediction.job
    batch = {name: getattr(job, name) for name in ("micro_batch_size", "gradient_accumulation_steps")}
    adapter = advice.shape.adapter
    if request.stack == "axolotl" and adapter is not None and adapter.targets is None:  # its file names the defaults
        fields["lora_target"] = ",".join(adapters.target_names(advice.shape, adapter))
    return fields | batch | {"loss_kernel": request.job().loss, "precision": precision}


def effective(name: str, advice: choose.Advice) -> bool:
    """Whether a field of a request has an effect on what is launched."""
    request, engine = advice.request, advice.options[0].prediction.engine
    is_sharded_in_16_bits = engine.kind == "fsdp" and engine.compute_bytes == 2 and engine.precision != "pure-bf16"
    return {
        "reduce_dtype": is_sharded_in_16_bits,
        "sync_each_batch": engine.kind == "fsdp" and advice.options[0].prediction.job.gradient_accumulation_steps > 1,
        "grad_accum_dtype": engine.kind == "deepspeed" and engine.precision in ("bf16", "fp16"),
        # Offload has its own optimizer, and so has DeepSpeed in these programs.
        "optimizer_kernel": engine.offload_optimizer == "none"
        and request.optimizer == "adamw"
        and request.stack not in ("deepspeed", "study"),
    }.get(name, True)


def refused(model: str, stack: StackName, strategy: str, change: Change) -> str | None:
    """Return the message with which a launch is refused. None if it is not."""
    try:
        started(ask(model, stack, strategy, **change))
    except Refusal as refusal:
        return str(refusal)
    return None


def check(model: str, stack: StackName, strategy: str) -> None:
    """Check all options with one program, model and strategy."""
    usual = ask(model, stack, strategy)
    without = started(usual)
    for change in all_changes():
        words = f"{model} {stack} {strategy} {change}"
        if (message := refused(model, stack, strategy, change)) is not None:
            assert re.match(r"--[a-z-]+ ?\S*: .+\. [A-Z]|fp8 is predicted only", message), f"{words}: {message}"
            continue
        advice = ask(model, stack, strategy, **change)
        start = started(advice)
        keeps_dropout = advice.shape.default_dropout and change == {"dropout": True}  # then the launch leaves it on
        if predicted(advice) != predicted(usual) and not (keeps_dropout and stack != "study"):
            assert start != without, f"{words}: the prediction changes, but not the launch"
        reading, wanted = launch_reading.read(start), expected(advice)
        for name in reading.keys() & wanted.keys():
            if name == "dropout" and reading[name] is None:  # as the model has it by default
                assert not wanted[name] or advice.shape.default_dropout or not advice.shape.counts.has_dropout, words
            elif effective(name, advice):
                assert reading[name] == wanted[name], f"{words}: {name}\n{start.command}\n{start.settings}"


# A model with kernels of Liger and without dropout, and one the other way round.
MODELS = ["qwen2.5-0.5b", "opt-1.3b"]


@pytest.mark.parametrize(
    ("stack", "strategy"), samples.each_once_with_slow_rest(stack=get_args(StackName), strategy=STRATEGIES)
)
def test_every_option_that_changes_a_prediction_is_in_the_launch(stack, strategy):
    if file.read_by_name(strategy).distributed_type not in STACKS[stack].runs:
        strategy = {"deepspeed": "zero1", "torchtitan": "fsdp2"}[stack]
    for model in MODELS:
        check(model, stack, strategy)


FLASH: set[tuple[str, Any]] = {("attention", f"flash-{release}") for release in (1, 2, 3, 4)}
SHARED: set[tuple[str, Any]] = {("context_parallel", 2), ("sequence_parallel", 2)}
# Options that a program refuses for all of its strategies. The others must be possible with one of them.
REFUSED: dict[StackName, set[tuple[str, Any]]] = {
    "accelerate": set(),
    "trainer": {("optimizer", "muon")},
    "trl": {("kernels", "fused"), ("attention", "flash-1"), ("optimizer", "muon")},
    "axolotl": {
        ("activation_checkpointing", "selective"), ("activation_checkpointing", "selective-op"), ("kernels", "fused"),
        ("attention", "flash-1"), ("loss_kernel", "fused"), ("optimizer", "lamb"), *SHARED,
    },
    "deepspeed": {*SHARED, ("precision", "fp8"), ("optimizer_kernel", "foreach"), ("optimizer_kernel", "loop")},
    "torchtitan": {
        *SHARED,
        ("precision", "tf32"), ("precision", "fp16"), ("precision", "fp16-autocast"),
        ("activation_checkpointing", "selective"), ("activation_checkpointing", "offload"),
        ("kernels", "transformers"), ("attention", "eager"),
        *FLASH, ("dropout", True), ("loss_kernel", "upcast"),
        ("loss_kernel", "fused"),
        ("optimizer", "adamw-8bit"), ("optimizer", "lamb"), ("optimizer", "muon"), ("optimizer", "adafactor"),
        ("optimizer", "sgd"), ("lora_rank", 8), ("lora_target", "q_proj,v_proj"), ("lora_target", "all-linear"),
        ("lora_dropout", 0.5), ("adapter", "lora"), ("adapter", "dora"), ("load_in_4bit", True),
        ("load_in_4bit", False),
    },
    "study": {
        *SHARED,
        ("precision", "tf32"), ("precision", "pure-bf16"), ("precision", "fp8"),
        ("activation_checkpointing", "selective"), ("activation_checkpointing", "selective-op"),
        ("activation_checkpointing", "offload"), ("kernels", "fused"),
        *FLASH, ("loss_kernel", "upcast"), ("loss_kernel", "fused"),
        ("loss_kernel", "chunked"), ("optimizer", "adamw-8bit"), ("optimizer", "lamb"), ("optimizer", "muon"),
        ("optimizer", "adafactor"),
        ("optimizer", "sgd"), ("optimizer_kernel", "foreach"), ("optimizer_kernel", "loop"), ("adapter", "dora"),
    },
}  # fmt: skip


@pytest.mark.parametrize("stack", get_args(StackName))
def test_nothing_is_refused_that_a_program_can_do(stack):
    strategies = ["single", *STRATEGIES]
    possible = [name for name in strategies if file.read_by_name(name).distributed_type in STACKS[stack].runs]
    impossible = {
        (name, value)
        for name, value, change in changes()
        if all(refused(MODELS[0], stack, strategy, change) for strategy in possible)
    }
    assert impossible == REFUSED[stack]


@pytest.mark.parametrize(
    ("model", "gpu", "num_gpus", "settings", "flags", "printed", "needed"), [
        ("llama-3.1-8b", "l40s", 4, {"optimizer": "adamw-8bit"}, "--optim adamw_torch_8bit", 28.3, 40.4),
        ("llama-3.1-8b", "a100-80gb", 8, {"loss_kernel": "chunked", "sequence_length": 8192},
         "--use_liger_kernel True", 51.0, 90.9),
    ],
)  # fmt: skip
def test_the_examples_of_the_issue(model, gpu, num_gpus, settings, flags, printed, needed):
    """Before, the command for the first number of GiB trained with the second one."""
    advice = planner.advise(model, Request(gpu, num_gpus, stack="trainer", **settings))
    option = advice.recommended
    job = {name: getattr(option.prediction.job, name) for name in ("micro_batch_size", "gradient_accumulation_steps")}
    job["activation_checkpointing"] = "full" if option.prediction.job.activation_checkpointing else "none"
    usual = {name: value for name, value in settings.items() if name not in ("optimizer", "loss_kernel")}
    request = Request(gpu, num_gpus, stack="trainer", strategy=option.strategy.name, **job, **usual)
    plain = planner.advise(model, request)
    both = [each.needed_bytes / 2**30 for each in (option, plain.options[0])]
    assert both == pytest.approx([printed, needed], abs=0.1)
    start = launch.launch(advice)
    words = shlex.split(start.command.replace("\\\n", " "))
    assert flags in " ".join(words)
    assert flags.split()[0] in next(iter(start.files.values()))  # a comment repeats the command


# ---------------------------------------------------------------- refusals

CASE = ["--model", "qwen2.5-1.5b", "--gpu", "a100-80gb", "--gpus", "8"]


def test_what_a_program_cannot_train_is_refused(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    for words, message in (
        (["--stack", "study", "--loss-kernel", "chunked"],
         "--loss-kernel chunked: this project's trainer has no such loss. Leave --loss-kernel out, or use --stack "
         "accelerate."),
        (["--strategy", "zero2_cpu_offload", "--optimizer", "adamw-8bit"],
         "--optimizer adamw-8bit: DeepSpeed updates offloaded weights with its own AdamW in fp32. Use --optimizer "
         "adamw, or a strategy without DeepSpeed's offload."),
    ):  # fmt: skip
        assert refusal(cli.run, ["advise", *CASE, *words, "--write", str(path)]) == message
        assert web.answer([*CASE, *words]) == {"refusal": message}
    assert not path.exists()
    # Without a model, too.
    assert refusal(cli.run, ["advise", "--gpu", "l4", "--gpus", "8", "--stack", "study", "--optimizer", "sgd"])
    assert refusal(cli.run, ["advise", "--gpu", "l4", "--model", "gpt2", "--stack", "study", "--optimizer", "sgd"])
    assert capsys.readouterr().out == ""


def test_a_strategy_that_cannot_be_started_is_left_out(capsys):
    assert cli.run(["advise", *CASE, "--optimizer", "adamw-8bit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"zero2_cpu_offload", "zero3_nvme_offload"}.isdisjoint(each["strategy"] for each in found["strategies"])
    assert any(
        " left out: " in note and note.endswith("DeepSpeed updates offloaded weights with its own AdamW in fp32")
        for note in found["notes"]
    )
    assert found["launch"] == web.as_json([*CASE, "--optimizer", "adamw-8bit"])["launch"]
    assert web.answer([*CASE, "--optimizer", "adamw-8bit"])["launch"] == found["launch"]


def test_kernels_that_liger_does_not_have_are_refused_or_described():
    def of(model: str, stack: StackName, **settings: Any) -> str:
        start = launch.launch(planner.advise(model, Request("a100-80gb", 4, stack=stack, **settings)))
        return "\n".join(start.settings)

    assert "Liger has none for gpt2" in of("gpt2", "accelerate", kernels="fused")
    assert "apply_liger_kernel_to_gemma2(rope=False, rms_norm=False, geglu=False)" in of(
        "gemma-2-2b", "deepspeed", loss_kernel="chunked"
    )
    for stack in ("trainer", "axolotl"):
        message = refusal(of, "gpt2", stack, loss_kernel="chunked")
        assert message.startswith("--loss-kernel chunked: Liger has no fused loss for gpt2. Use --stack trl")
    assert refusal(of, "gpt2", "trl", kernels="fused", loss_kernel="chunked").startswith("--kernels fused: Liger has")
    assert refusal(of, "granite-3.1-2b", "trainer", loss_kernel="chunked")
    assert "'cross_entropy': False" in of("granite-3.1-2b", "trainer", kernels="fused", loss_kernel="eager")


def test_dropout_is_stated_where_a_model_has_none_by_default():
    def of(model: str, stack: StackName, **settings: Any) -> tuple[launch.Launch, str]:
        start = launch.launch(planner.advise(model, Request("a100-80gb", 1, stack=stack, **settings)))
        return start, "\n".join(start.settings)

    for model in ("gpt2", "bert-base", "albert-base-v2", "vit-base"):  # nobody is told to train without dropout
        for stack in ("accelerate", "trainer", "deepspeed"):
            assert "drop" not in of(model, stack)[1], (model, stack)
    assert "drop" not in of("gpt2", "trainer", dropout=True)[1]
    assert "dropout" not in of("llama-3.2-1b", "trainer")[1]
    assert "attention_dropout=0.1" in of("llama-3.2-1b", "trainer", dropout=True)[1]
    assert "dropout" not in of("convnext-tiny", "accelerate", dropout=True)[1]
    assert "--dropout 0 " in of("gpt2", "study")[0].command + " "
    settings = of("llama-3.2-1b", "trl", dropout=True)[1]
    assert 'in sft.py: training_args.model_init_kwargs |= {"attention_dropout": 0.1}' in settings
    assert "attention_dropout: 0.1" in of("llama-3.2-1b", "axolotl", dropout=True)[0].files["axolotl.yaml"]
    assert refusal(of, "gpt2", "torchtitan", dropout=True).startswith("--dropout: torchtitan's models have no dropout")


# ---------------------------------------------------------------- the names in the tables


def all_parts() -> Iterator[stack_tables.Parts]:
    tables = [table for table in vars(stack_tables).values() if isinstance(table, dict)]
    for cells in (cells for table in tables for cells in table.values() if isinstance(cells, dict)):
        for cell in cells.values():
            yield from (part for part in ([cell] if not isinstance(cell, dict) else cell.values())
                        if isinstance(part, stack_tables.Parts))  # fmt: skip


def test_the_classes_in_the_tables_exist():
    lines = " ".join(line for part in all_parts() for line in (*part.lines, *part.accelerator))
    names = set(re.findall(r"\b((?:torch|bitsandbytes|transformers)(?:\.\w+)+)\b", lines)) - {"torch.bfloat16"}
    assert len(names) > 8
    for name in names:
        module, _, attribute = name.rpartition(".")
        if module == "torch":
            continue
        assert hasattr(importlib.import_module(module), attribute), name


def test_transformers_takes_the_flags_of_its_trainer():
    from transformers import HfArgumentParser, TrainingArguments

    parser, flags = HfArgumentParser(TrainingArguments), set()
    for change in all_changes():
        if refused("qwen2.5-0.5b", "trainer", "fsdp2", change):
            continue
        words = shlex.split(started(ask("qwen2.5-0.5b", "trainer", "fsdp2", **change)).command.replace("\\\n", " "))
        words = words[words.index("train.py") + 1 :]
        flags |= {word for word in words if word.startswith("--")}
        # transformers checks bf16 and tf32 against the machine that it runs on.
        namespace = vars(parser.parse_args([*words, "--output_dir", "x"]))
        assert namespace["optim"] in {"adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "sgd"}
    assert {"--optim", "--use_liger_kernel", "--torch_compile", "--accelerator_config", "--tf32"} <= flags


def test_a_trace_is_refused_for_a_program_with_its_own_modules():
    words = ["advise", *CASE, "--stack", "torchtitan", "--trace"]
    expected = "--trace can only trace the models of transformers, but torchtitan trains its own. "
    assert refusal(cli.run, words).startswith(expected)
