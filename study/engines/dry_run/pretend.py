"""How does a process become one rank of many that are not there? By its environment, and a group that answers itself.

Torch's fake process group gives back what it is given: shapes, bytes and order of the calls are an engine's own, values
are not. What an engine asks of other ranks before it goes on is answered here for them (torch 2.13, DeepSpeed 0.19.8,
accelerate 1.15).
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from ... import files
from ...errors import Refusal
from .. import extensions
from ..hooks import listening
from ..workarounds import shard_on_cpu

# Before ranks are forked, which would need seconds each; zero.Init under a mode does not survive the first import.
IMPORTED = ("torch._dynamo", "torch._inductor.compile_fx", "deepspeed")
PORT = 29500  # which nobody listens at
PLENTY = 1 << 60  # bytes
PATIENCE = timedelta(days=1)  # of ranks that exchange what is real; who asks them ends those that wait for ever
WEIGHT = 0.01  # in the place of what rank 0 would have sent
# Of what a launch may say in its environment, in small letters.
PRETENDED = {"ACCELERATE_USE_MEGATRON_LM": "false", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "false"}
PRETENDED |= {f"PARALLELISM_CONFIG_{name}_SIZE": "1" for name in ("TP", "CP", "SP")}
OTHERS = ("simple_launcher", "tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher")


def environment(
    file: Path, world_size: int, mixed_precision: str | None = None, is_script: bool = False
) -> dict[str, str]:
    """Return what accelerate's own functions make of a file for its ranks; import the engine. Raises Refusal.

    `is_script`: a script may start DeepSpeed by itself, whatever the file names.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for one
    from accelerate.commands import launch
    from accelerate.utils import launch as made

    files.read_yaml(file, Path("accelerate_configs"))  # says what is wrong with what holds no keys
    words = ["--config_file", str(file), "--num_processes", str(world_size), "--num_machines", "1"]
    words += ["--main_process_port", str(PORT)]
    words += ["--mixed_precision", mixed_precision] if mixed_precision else []
    found: dict[str, str] = {}
    launchers: dict[str, Callable[..., dict[str, str]]] = dict.fromkeys(OTHERS, lambda *_: {})
    launchers["deepspeed_launcher"] = lambda given: made.prepare_deepspeed_cmd_env(given)[1]
    launchers["multi_gpu_launcher"] = made.prepare_multi_gpu_env
    with ExitStack() as stack:
        for name, prepare in launchers.items():
            answer = partial(lambda prepare, _, *given: found.update(prepare(*given)), prepare)
            stack.enter_context(listening(launch, name, answer))
        try:
            launch.launch_command(launch.launch_command_parser().parse_args([*words, "script.py"]))
        except (ValueError, KeyError, TypeError, SystemExit) as error:
            raise Refusal(f"{file}: accelerate launches nothing by it: {error}") from None
    if not found:
        raise Refusal(f"{file}: is of one process, or of no GPUs; take a distributed_type MULTI_GPU, FSDP or DEEPSPEED")
    found["CUDA_VISIBLE_DEVICES"] = ""  # a file may name some
    for name, value in PRETENDED.items():
        if found.get(name, value).lower() != value:
            raise Refusal(f"{file}: {name}={found[name]} is not pretended, only {value} is")
    if named := found.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        there = [str(place) for place in (Path(named), files.ROOT / named) if place.is_file()]
        if not there:
            raise Refusal(f"{file}: names {named}, which is not there")
        found["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = there[0]
    mesh = _mesh(found)
    if mesh is not None and mesh.total_size != world_size:
        raise Refusal(f"{file}: parallelism_config is for {mesh.total_size} ranks; change it, or --world {world_size}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        has_deepspeed = "ACCELERATE_USE_DEEPSPEED" in found or (is_script and find_spec("deepspeed") is not None)
        for name in IMPORTED if has_deepspeed else IMPORTED[:1]:
            importlib.import_module(name)
        if has_deepspeed:
            extensions.use_built()  # without what would wait, as DeepSpeed starts, for ranks that are not there
    return found


@contextmanager
def rank_of_many(
    rank: int, world_size: int, local_world_size: int, made: dict[str, str], meeting: Path | None = None
) -> Iterator[None]:
    """Be this rank: its environment, its group, and an answer to all that an engine asks of others. For good.

    `meeting`: a file by which all ranks of the world find each other, to exchange what is real; None: only some of the
    ranks are there.
    """
    os.environ.update(made | environment_of(rank, world_size, local_world_size))
    with ExitStack() as stack:
        if meeting is None:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            stack.enter_context(listening(DistributedDataParallel, "__init__", _reduce_by_hook))
            stack.enter_context(listening(dist, "broadcast_object_list", _refuse_objects))
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = FileStore(str(meeting), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
        stack.enter_context(listening(dist, "init_process_group", lambda call, *_, **__: None))  # the script's
        if "deepspeed" in sys.modules:  # which `environment` has imported, if it may be used
            for answered in _of_deepspeed(are_all_there=meeting is not None):
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

    def begin(call: Callable[..., None], state: Any, cpu: bool = False, **options: Any) -> None:
        call(state, not is_deepspeed, **{**options, "backend": "gloo"})

    def build(call: Callable[..., None], accelerator: Any, *arguments: Any, **options: Any) -> None:
        plugin, mesh, _ = (options.pop(name, None) for name in ("fsdp_plugin", "parallelism_config", "cpu"))
        if (plugin and not is_fsdp) or (options.get("deepspeed_plugin") and not is_deepspeed):
            raise Refusal("the script brings a plugin of FSDP or DeepSpeed; name a file of its distributed_type")
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # what it says is read below
        call(accelerator, *arguments, **options, cpu=not is_deepspeed)
        if is_fsdp:
            plugin = plugin or accelerate.FullyShardedDataParallelPlugin()
            if accelerator.mixed_precision != "no":
                plugin.set_mixed_precision(accelerator.mixed_precision)  # as accelerate's state does on GPUs
            shard_on_cpu(accelerator, plugin, mesh or _mesh(made))

    with listening(accelerate.PartialState, "__init__", begin), listening(accelerate.Accelerator, "__init__", build):
        yield


def _mesh(made: dict[str, str]) -> Any:
    """The mesh of replicas and shards that a file asks for; None: it asks for none."""
    from accelerate import ParallelismConfig

    names = ("dp_replicate_size", "dp_shard_size")
    sizes = {name: int(made.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in names}
    return ParallelismConfig(**sizes) if max(sizes.values()) > 1 else None


def _reduce_by_hook(call: Callable[..., None], model: Any, *arguments: Any, **options: Any) -> None:
    """Have DDP reduce by a hook: a future of the fake group holds None, at which its reducer stops (comm.cpp)."""

    call(model, *arguments, **options)
    model.register_comm_hook(None, lambda _, bucket: _reduced(bucket.buffer(), model.process_group))


def _reduced(bucket: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket, group=group)
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


def _of_deepspeed(are_all_there: bool) -> Iterator[Any]:
    import deepspeed
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
    from deepspeed.runtime.zero import stage3, utils

    # Of a GPU: stages 1 and 2 make their flat buffers in the host's memory where the card's is short.
    yield listening(CPU_Accelerator, "available_memory", lambda call, *_: PLENTY)
    yield listening(AsyncPartitionedParameterSwapper, "__init__", _refuse_swapping)
    yield listening(stage3.DeepSpeedZeroOptimizer_Stage3, "_configure_tensor_swapping", _refuse_swapping)
    if are_all_there:
        return
    yield listening(deepspeed, "initialize", _fill)
    # zero/utils.py and partitioned_param_coordinator.py: the fake broadcast leaves the -1 of the receiver.
    yield listening(utils, "assert_lst_len_same_as_other_ranks", lambda call, its: _send_list(call, [len(its)]))
    yield listening(utils, "get_lst_from_rank0", _send_list)


NO_SWAPPING = "NVMe offload is not pretended: it empties its folder, to which a run may be swapping"


def _refuse_swapping(call: Callable[..., None], *_: Any, **__: Any) -> None:
    raise Refusal(NO_SWAPPING)


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
