"""How does a process become one rank of many that are not there? By its environment, and a group that answers itself.

Torch's fake process group gives back what it is given: shapes, bytes and order of the calls are an engine's own, values
are not. What an engine asks of other ranks before it goes on is answered here for them (torch 2.13, DeepSpeed 0.19.8,
accelerate 1.15).
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from study.engines.listening import listening
from study.engines.sharding_on_cpu import shard_on_cpu
from study.errors import Refusal

# Before ranks are forked, which would need seconds each; zero.Init under a mode does not survive the first import.
IMPORTED = ("torch._dynamo", "torch._inductor.compile_fx", "deepspeed")
PORT = 29500  # which nobody listens at
PLENTY = 1 << 60  # bytes
WEIGHT = 0.01  # in the place of what rank 0 would have sent


def environment(file: Path, world_size: int, mixed_precision: str | None = None) -> dict[str, str]:
    """What `accelerate launch` would make of a file for its ranks, by accelerate's own functions; imports the engine.

    Raises Refusal for a file that it refuses, and for a kind of training that it launches otherwise.
    """
    from accelerate.commands import launch
    from accelerate.utils import launch as made

    words = ["--config_file", str(file), "--num_processes", str(world_size), "--num_machines", "1"]
    words += ["--main_process_port", str(PORT)]
    words += ["--mixed_precision", mixed_precision] if mixed_precision else []
    found: dict[str, str] = {}
    used: list[str] = []
    launchers: dict[str, Callable[[Any], dict[str, str]]] = {
        "deepspeed_launcher": lambda given: made.prepare_deepspeed_cmd_env(given)[1],
        "multi_gpu_launcher": made.prepare_multi_gpu_env,
        "simple_launcher": lambda given: made.prepare_simple_launcher_cmd_env(given)[1],
    }

    def launched(name: str, given: Any) -> None:
        used.append(name)
        found.update(launchers[name](given))

    with ExitStack() as stack:
        for name in launchers:
            stack.enter_context(listening(launch, name, lambda _, given, name=name: launched(name, given)))
        try:
            launch.launch_command(launch.launch_command_parser().parse_args([*words, "script.py"]))
        except (ValueError, KeyError, TypeError, SystemExit) as error:
            raise Refusal(f"{file}: accelerate launches nothing by it: {error}") from None
    if not used:
        raise Refusal(f"{file}: accelerate launches it otherwise than DDP, FSDP or DeepSpeed, which is not pretended")
    if used == ["simple_launcher"]:
        raise Refusal(f"{file}: is of one process; take a file with distributed_type MULTI_GPU, FSDP or DEEPSPEED")
    mesh = _mesh(found)
    if mesh is not None and mesh.total_size != world_size:
        raise Refusal(
            f"{file}: parallelism_config is for {mesh.total_size} ranks, --world says {world_size}; change one of them"
        )
    for name in IMPORTED if "ACCELERATE_USE_DEEPSPEED" in found else IMPORTED[:1]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    return found


@contextmanager
def rank_of_many(rank: int, world_size: int, local_world_size: int, made: dict[str, str]) -> Iterator[None]:
    """Be this rank: its environment, its group, and an answer to all that an engine asks of others. For good."""
    os.environ.update(made)
    os.environ.update(environment_of(rank, world_size, local_world_size))
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    with ExitStack() as stack:
        stack.enter_context(listening(DistributedDataParallel, "__init__", _reduce_by_hook))
        stack.enter_context(listening(dist, "broadcast_object_list", _refuse_objects))
        if made.get("ACCELERATE_USE_DEEPSPEED") == "true":
            for answered in _of_deepspeed():
                stack.enter_context(answered)
        stack.enter_context(on_a_cpu(made))
        yield


def environment_of(rank: int, world_size: int, local_world_size: int) -> dict[str, str]:
    """What a launcher tells one rank of the others."""
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size, "RANK": rank}
    sizes |= {"LOCAL_RANK": rank % local_world_size, "GROUP_RANK": rank // local_world_size}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    return {name: str(value) for name, value in sizes.items()} | meeting


@contextmanager
def on_a_cpu(made: dict[str, str]) -> Iterator[None]:
    """Let accelerate build on a CPU what it builds on GPUs: it drops FSDP there, and DeepSpeed where it is told."""
    import accelerate

    is_deepspeed = made.get("ACCELERATE_USE_DEEPSPEED") == "true"
    is_fsdp = made.get("ACCELERATE_USE_FSDP") == "true"

    def build(call: Callable[..., None], accelerator: Any, *arguments: Any, **options: Any) -> None:
        from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs

        plugin, mesh = options.pop("fsdp_plugin", None), options.pop("parallelism_config", None)
        handlers = [h for h in options.pop("kwargs_handlers", None) or [] if not isinstance(h, InitProcessGroupKwargs)]
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # what it says is read below
        call(
            accelerator, *arguments, **options, kwargs_handlers=[*handlers, InitProcessGroupKwargs(backend="gloo")],
            cpu=not is_deepspeed,
        )  # fmt: skip
        if is_fsdp:
            shard_on_cpu(accelerator, plugin or FullyShardedDataParallelPlugin(), mesh or _mesh(made))

    with listening(accelerate.Accelerator, "__init__", build):
        yield


def _mesh(made: dict[str, str]) -> Any:
    """The mesh of replicas and shards that a file asks for; None: it asks for none."""
    from accelerate import ParallelismConfig

    names = {"dp_replicate_size": "DP_REPLICATE_SIZE", "dp_shard_size": "DP_SHARD_SIZE"}
    sizes = {own: int(made.get(f"PARALLELISM_CONFIG_{name}", "1")) for own, name in names.items()}
    return ParallelismConfig(**sizes) if max(sizes.values()) > 1 else None


# ---------------------------------------------------------------- answers for ranks that are not there


def _reduce_by_hook(call: Callable[..., None], model: Any, *arguments: Any, **options: Any) -> None:
    """Have DDP reduce by a hook: a future of the fake group holds None, at which its reducer stops (comm.cpp)."""

    call(model, *arguments, **options)
    model.register_comm_hook(None, lambda _, bucket: _reduced(bucket.buffer()))


def _reduced(bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket)
    return done(bucket)


def done(reduced: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """What a hook of DDP's returns where there is nobody to wait for."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(reduced)
    return future


def _refuse_objects(
    call: Callable[..., None], objects: list[Any], src: int | None = None, *rest: Any, **how: Any
) -> None:
    if dist.get_rank() != (how.get("group_src", src) or 0):
        raise Refusal(
            f"rank {dist.get_rank()}: the script is sent an object by rank {src or 0}, and nobody is there to send it; "
            "ask rank 0 alone, or leave the sending out"
        )
    call(objects, src, *rest, **how)


def _of_deepspeed() -> Iterator[Any]:
    import deepspeed
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.runtime.zero import utils

    backend = importlib.import_module("deepspeed.comm.torch")
    yield listening(backend, "build_shm_op", lambda call: None)  # it would wait for ranks that are not there
    yield listening(deepspeed, "initialize", _fill)
    # Of a GPU: stages 1 and 2 make their flat buffers in the host's memory where the card's is short.
    yield listening(CPU_Accelerator, "available_memory", lambda call, *_: PLENTY)
    # zero/utils.py and partitioned_param_coordinator.py: the fake broadcast leaves the -1 of the receiver.
    yield listening(utils, "assert_lst_len_same_as_other_ranks", _send_length)
    yield listening(utils, "get_lst_from_rank0", _send_list)


def _send_length(call: Callable[..., None], values: Sequence[int]) -> None:
    dist.broadcast(torch.tensor(len(values)), src=0)


def _send_list(call: Callable[..., list[int]], values: Sequence[int]) -> list[int]:
    dist.broadcast(torch.tensor(list(values)), src=0)
    return list(values)


def _fill(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Give weights that rank 0 would have sent a value: with what is in memory, a norm is NaN and steps are skipped."""
    model = options.get("model", arguments[1] if len(arguments) > 1 else None)
    for parameter in model.parameters() if model is not None else ():
        for part in ("ds_tensor", "ds_secondary_tensor"):
            if getattr(parameter, part, None) is not None:
                getattr(parameter, part).data.fill_(WEIGHT)
    return call(*arguments, **options)
