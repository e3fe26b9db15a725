"""A small program that `accelerate launch` starts with a configuration file; rank 0 prints what the engine has.

It takes its settings from the file: DummyOptim and DummyScheduler where that has them, accelerate's own classes
elsewhere. Two things stand in for a GPU: fp16 counts as supported, and FSDP is asked through its plugin.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs

from zero_study.engines import extensions


def say(found: dict[str, Any]) -> None:
    if os.environ.get("RANK", "0") == "0":
        print("FOUND " + json.dumps(found, default=str), flush=True)


def plain(value: Any) -> Any:
    """A setting as JSON holds it; what is no number, word or mapping, by its name."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    return getattr(value, "value", None) if isinstance(getattr(value, "value", None), str) else str(value)


def fsdp() -> dict[str, Any]:
    """The plugin that accelerate makes of the launcher's variables on a box with GPUs."""
    from accelerate.utils import FullyShardedDataParallelPlugin, dataclasses

    dataclasses.is_cuda_available = lambda: True
    torch.cuda.current_device = lambda: 0
    plugin = FullyShardedDataParallelPlugin()
    names = (
        "fsdp_version", "sharding_strategy", "reshard_after_forward", "backward_prefetch", "forward_prefetch",
        "use_orig_params", "sync_module_states", "cpu_ram_efficient_loading", "activation_checkpointing",
        "transformer_cls_names_to_wrap", "min_num_params", "state_dict_type", "cpu_offload",
    )  # fmt: skip
    found = {name: str(getattr(plugin, name)) for name in names}
    policy = plugin.auto_wrap_policy
    return found | {"auto_wrap_policy": getattr(policy, "__name__", str(policy))}


def engine(accelerator: Accelerator) -> dict[str, Any]:
    """What DeepSpeed's engine has after `prepare` of a tiny BERT."""
    from deepspeed.accelerator import get_accelerator
    from transformers import BertConfig, BertForSequenceClassification

    type(get_accelerator()).is_fp16_supported = lambda self: True
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    written = sorted(settings)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    has_optimizer = "optimizer" in settings and "--own-optimizer" not in sys.argv
    make = DummyOptim if has_optimizer else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-3)
    data = torch.utils.data.DataLoader(torch.zeros(16, 8, dtype=torch.long), batch_size=2)
    objects: list[Any] = [model, optimizer, data]
    if "scheduler" in settings:
        objects.append(DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2))
    prepared = accelerator.prepare(*objects)[0]
    read = vars(prepared._config)
    found = {key: plain(value) for key, value in read.items() if not key.startswith("_")}
    optimizer = prepared.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    group = optimizer.param_groups[0]
    return found | {
        "settings": plain(settings), "written": written, "gradient_clipping": prepared.gradient_clipping(),
        "optimizer_class": type(optimizer).__name__, "lr": group["lr"], "weight_decay": group.get("weight_decay"),
        "scheduler_class": type(prepared.lr_scheduler).__name__,
        "parameter_dtype": str(next(model.parameters()).dtype),
    }  # fmt: skip


def run() -> None:
    """Do what a program does first, and say what came of it."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        say({"plugin": fsdp()})
        return
    # gloo: a DeepSpeed program on a CPU needs it; a program of DDP says cpu=True instead.
    gloo = InitProcessGroupKwargs(backend="gloo")
    under_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    settings: dict[str, Any] = {"kwargs_handlers": [gloo]} if under_deepspeed else {"cpu": True}
    accelerator = Accelerator(gradient_accumulation_steps=3, **settings)
    found = {
        "num_processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "mixed_precision": accelerator.mixed_precision,
        "dynamo_backend": accelerator.state.dynamo_plugin.backend.value,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "cpu_affinity": os.environ.get("ACCELERATE_CPU_AFFINITY", "0") == "1",
    }
    if accelerator.distributed_type.value == "DEEPSPEED":
        found["engine"] = engine(accelerator)
    say(found)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def handed_on(words: list[str]) -> tuple[dict[str, str], int | None]:
    """What `accelerate launch` sets for its processes, by its own functions, and the port where several meet."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch as of_accelerate

    arguments, defaults, from_config = _validate_launch_command(launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_config else [])]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return of_accelerate.prepare_deepspeed_cmd_env(arguments)[1], arguments.main_process_port
    if arguments.use_fsdp or arguments.multi_gpu or arguments.use_megatron_lm:
        return of_accelerate.prepare_multi_gpu_env(arguments), arguments.main_process_port
    return of_accelerate.prepare_simple_launcher_cmd_env(arguments)[1], None


def launched(words: list[str]) -> None:
    """Set what `accelerate launch` would set for the first of its processes, as the only one."""
    environment, port = handed_on(words)
    os.environ.update(environment)
    if port is not None:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({**alone, "MASTER_PORT": str(port)})


def many(cases: list[dict[str, Any]]) -> None:
    """Run cases one after another, each in a fork of this process, which has imported what takes its seconds."""
    import deepspeed  # noqa: F401
    import transformers.models.bert.modeling_bert  # noqa: F401

    for case in cases:
        if os.fork() == 0:
            os.chdir(case["folder"])
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600), number)
            sys.argv = ["doctor_program.py", *case["arguments"]]
            signal.alarm(500)
            try:
                launched([*case["words"], "doctor_program.py"])
                run()
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.wait()


def main() -> None:
    extensions.use_own_folder()
    extensions.use_built()  # or DeepSpeed compiles for minutes
    if sys.argv[1:2] == ["--many"]:
        many(json.loads(Path(sys.argv[2]).read_text()))
    else:
        run()
        sys.stdout.flush()
        os._exit(0)  # gloo aborts some programs as they end


if __name__ == "__main__":
    main()
