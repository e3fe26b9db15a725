"""Let a process act as one rank of a world whose other ranks do not exist.

The process gets the rank's environment and a process group. PyTorch's fake process group returns what it is given, so
the shapes, sizes and order of the calls are the engine's own, but the values are not. If an engine needs values from
other ranks before it continues, this module supplies them (for PyTorch 2.13, DeepSpeed 0.19.8 and accelerate 1.15).
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_study import files
from zero_study.engines import extensions
from zero_study.engines.hooks import wrap_function
from zero_study.engines.workarounds import ring_attention_on_cpu, shard_on_cpu
from zero_study.errors import Refusal
from zero_study.theory.engine import Engine

# Imported before ranks are forked, because each rank would need seconds for it. Also, zero.Init fails if it causes the
# first import while a dispatch mode is active.
IMPORTED = ("torch._dynamo", "torch._inductor.compile_fx", "deepspeed")
PORT = 29500  # no process listens at this port
PLENTY = 1 << 60  # bytes
# The timeout of ranks that exchange real values; their parent process ends ranks that wait forever.
PATIENCE = timedelta(days=1)
MOST_REAL_RANKS = 8  # that exchange real values on one machine
WEIGHT = 0.01  # the value of weights that rank 0 would have sent
# Supported settings of a launch, in lower case. Other values are refused.
SUPPORTED = {"ACCELERATE_USE_MEGATRON_LM": "false", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "false"}
SUPPORTED |= {"PARALLELISM_CONFIG_TP_SIZE": "1"}
ONE_PROCESS = "ZERO_STUDY_ONE_PROCESS"  # a variable of ranks that are launched without a process group
UNSUPPORTED_LAUNCHERS = ("tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher")

Environment = dict[str, str]  # variables that a launcher sets for its ranks


# ---------------------------------------------------------------- what a launch says


def launch_environment(
    file: Path, world_size: int, mixed_precision: str | None = None, is_script: bool = False
) -> Environment:
    """Return the environment variables that accelerate's launcher sets for a strategy file. Also import the engines.

    `is_script` says that a script will run, which may start DeepSpeed whatever the file names. Raises Refusal if the
    file cannot be run here.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for one
    files.read_yaml(file, Path("accelerate_configs"))  # raises a Refusal that says what is wrong with the file
    variables = _launched(file, world_size, mixed_precision)
    if not variables:
        raise Refusal(
            f"{file}: this file starts one process, or uses no GPUs. Use --world 1, or a file with distributed_type "
            "MULTI_GPU, FSDP or DEEPSPEED."
        )
    variables["CUDA_VISIBLE_DEVICES"] = ""  # a file may name some
    _check_supported(file, world_size, variables)
    import_engines(may_use_deepspeed="ACCELERATE_USE_DEEPSPEED" in variables or is_script)
    return variables


def _launched(file: Path, world_size: int, mixed_precision: str | None) -> Environment:
    """Return the environment variables with which accelerate would start a script.

    Empty if accelerate would start a single process although `world_size` is larger, or would use a launcher that is
    not supported.
    """
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    words = ["--config_file", str(file), "--num_processes", str(world_size), "--num_machines", "1"]
    words += ["--main_process_port", str(PORT)]
    words += ["--mixed_precision", mixed_precision] if mixed_precision else []
    launchers: dict[str, Callable[[Any], Environment]] = dict.fromkeys(UNSUPPORTED_LAUNCHERS, lambda _: {})
    launchers["simple_launcher"] = lambda arguments: (
        prepare.prepare_simple_launcher_cmd_env(arguments)[1] | {ONE_PROCESS: "1"} if world_size == 1 else {}
    )
    launchers["deepspeed_launcher"] = lambda arguments: prepare.prepare_deepspeed_cmd_env(arguments)[1]
    launchers["multi_gpu_launcher"] = prepare.prepare_multi_gpu_env
    variables: Environment = {}
    with ExitStack() as stack:
        for name, make_environment in launchers.items():
            keep = partial(lambda make, _, *arguments: variables.update(make(arguments[-1])), make_environment)
            stack.enter_context(wrap_function(launch, name, keep))
        try:
            launch.launch_command(launch.launch_command_parser().parse_args([*words, "script.py"]))
        except (ValueError, KeyError, TypeError, SystemExit) as error:
            raise Refusal(f"{file}: accelerate cannot launch with this file ({error}).") from None
    return variables


def _check_supported(file: Path, world_size: int, variables: Environment) -> None:
    """Raise Refusal if a strategy file has settings that cannot be simulated.

    Also changes the path of DeepSpeed's JSON in `variables`, so that the file is found.
    """
    # Context parallelism is torch's, for FSDP2, and sequence parallelism is DeepSpeed's.
    of_other_engine = "CP" if "ACCELERATE_USE_DEEPSPEED" in variables else "SP"
    for name, value in {**SUPPORTED, f"PARALLELISM_CONFIG_{of_other_engine}_SIZE": "1"}.items():
        if variables.get(name, value).lower() != value:
            raise Refusal(f"{file}: {name}={variables[name]} cannot be simulated. Use {value}.")
    if config_file := variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        present = [str(place) for place in (Path(config_file), files.ROOT / config_file) if place.is_file()]
        if not present:
            raise Refusal(f"{file}: this file refers to {config_file}, which does not exist. Correct the path.")
        variables["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = present[0]
    mesh = _parallelism(variables)
    if mesh is not None and mesh.total_size != world_size:
        raise Refusal(
            f"{file}: parallelism_config is for {mesh.total_size} ranks, but --world is {world_size}. "
            "Change one of them."
        )


def import_engines(may_use_deepspeed: bool) -> None:
    """Import the engines and libraries that the ranks need, before the ranks are forked."""
    has_deepspeed = may_use_deepspeed and find_spec("deepspeed") is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in IMPORTED if has_deepspeed else IMPORTED[:1]:
            importlib.import_module(name)
        if has_deepspeed:
            extensions.use_built()  # also skips a part of DeepSpeed's start that would wait for ranks that do not exist


def rank_environment(rank: int, world_size: int, local_world_size: int) -> Environment:
    """Return the environment variables by which a launcher tells a process its rank."""
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size, "RANK": rank}
    sizes |= {"LOCAL_RANK": rank % local_world_size, "GROUP_RANK": rank // local_world_size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    return {name: str(value) for name, value in sizes.items()} | address


# ---------------------------------------------------------------- a rank


@contextmanager
def rank_of_many(
    rank: int, world_size: int, local_world_size: int, variables: Environment, meeting: Path | None = None
) -> Iterator[None]:
    """Make this process one rank of a world, until the process ends.

    Sets the environment and the process group. `meeting` is a file through which all ranks of the world find each other
    to exchange real values. If it is None, only some of the ranks exist, and the values from other ranks are simulated.
    """
    os.environ.update(variables)
    if ONE_PROCESS in variables:
        with accelerate_on_cpu(variables):
            yield
        return
    os.environ.update(rank_environment(rank, world_size, local_world_size))
    with ExitStack() as stack:
        if meeting is None:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            stack.enter_context(wrap_function(DistributedDataParallel, "__init__", _reduce_by_hook))
            stack.enter_context(wrap_function(dist, "broadcast_object_list", _refuse_objects))
            stack.enter_context(wrap_function(dist, "recv", _receive))
            for name in _RECEIVE:
                stack.enter_context(wrap_function(dist, name, _refuse_to_receive))
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = FileStore(str(meeting), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
        # The script may call it, but the group exists already.
        stack.enter_context(wrap_function(dist, "init_process_group", lambda call, *_, **__: None))
        if "deepspeed" in sys.modules:  # `import_engines` has imported it if it may be used
            for answer in _answers_to_deepspeed(are_all_there=meeting is not None):
                stack.enter_context(answer)
        stack.enter_context(accelerate_on_cpu(variables))
        yield


@contextmanager
def first_rank(engine: Engine) -> Iterator[DeviceMesh | None]:
    """Make this process rank 0 of a simulated world under DDP or FSDP2, in a `with` block.

    Yields the mesh of all ranks, or None for a single process. The mesh is made before tensors lose their memory,
    because its code reads the numbers of the ranks.
    """
    if engine.kind == "torch":
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=engine.world_size)
    try:
        names, sizes = ("dp_replicate", "dp_shard"), (engine.replicas, engine.num_shards)
        first = 0 if engine.replicas > 1 else 1
        with wrap_function(DistributedDataParallel, "__init__", _reduce_by_hook):
            yield init_device_mesh("cpu", sizes[first:], mesh_dim_names=names[first:])
    finally:
        dist.destroy_process_group()


@contextmanager
def accelerate_on_cpu(variables: Environment) -> Iterator[None]:
    """Make accelerate build on a CPU what it would build on GPUs, in a `with` block.

    By itself, accelerate drops FSDP on a CPU, and drops DeepSpeed if it is told to use the CPU.
    """
    import accelerate

    is_deepspeed = variables.get("ACCELERATE_USE_DEEPSPEED") == "true"
    is_fsdp = variables.get("ACCELERATE_USE_FSDP") == "true"

    def begin(call: Callable[..., None], state: Any, cpu: bool = False, **options: Any) -> None:
        backend = {"backend": "gloo"} if dist.is_initialized() else {}
        call(state, not is_deepspeed, **options | backend)

    def build(call: Callable[..., None], accelerator: Any, *arguments: Any, **options: Any) -> None:
        plugin, mesh, _ = (options.pop(name, None) for name in ("fsdp_plugin", "parallelism_config", "cpu"))
        if (plugin and not is_fsdp) or (options.get("deepspeed_plugin") and not is_deepspeed):
            raise Refusal(
                "The script creates a plugin of FSDP or DeepSpeed, but the strategy file has a different "
                "distributed_type. Name a strategy file with the same distributed_type."
            )
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # its settings are read below
        call(accelerator, *arguments, **options, cpu=not is_deepspeed)
        if is_fsdp:
            plugin = plugin or accelerate.FullyShardedDataParallelPlugin()
            if accelerator.mixed_precision != "no":
                plugin.set_mixed_precision(accelerator.mixed_precision)  # as accelerate's state does on GPUs
            mesh = mesh or _parallelism(variables)
            if mesh is not None and mesh.cp_enabled:
                ring_attention_on_cpu()
            shard_on_cpu(accelerator, plugin, mesh)
        elif is_deepspeed and (mesh := mesh or _parallelism(variables)) is not None:
            accelerator.state.parallelism_config = mesh

    with (
        wrap_function(accelerate.PartialState, "__init__", begin),
        wrap_function(accelerate.Accelerator, "__init__", build),
    ):
        yield


def _parallelism(variables: Environment) -> Any:
    """Return the accelerate.ParallelismConfig that a file requests. None if it requests none.

    It has the replicas, the shards and the ranks per sequence.
    """
    names = ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size")
    sizes = {name: int(variables.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in names}
    if max(sizes.values()) == 1:
        return None
    from accelerate import ParallelismConfig  # since accelerate 1.10

    return ParallelismConfig(**sizes)


def _reduce_by_hook(call: Callable[..., None], model: Any, *arguments: Any, **options: Any) -> None:
    """Construct DDP with a hook that all-reduces its buckets, so that the call is recorded.

    Without a hook, DDP's reducer would take its bucket from a future of the fake group, which contains None (comm.cpp).
    """
    call(model, *arguments, **options)
    model.register_comm_hook(None, lambda _, bucket: _reduced(bucket.buffer(), model.process_group))


def _reduced(bucket: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket, group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket)
    return future


# Exchanges of Python objects by which every rank receives something, and the one message whose sender is unknown.
_RECEIVE = ("all_gather_object", "gather_object", "scatter_object_list", "recv_object_list")


def _cannot_receive(received: str, otherwise: str = "") -> Refusal:
    """Return a refusal that says which ranks to run, so that they exchange real values.

    `otherwise` is a second remedy.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    remedy = f"Choose a --world of at most {MOST_REAL_RANKS}, in which all ranks run and exchange real values"
    if world_size <= MOST_REAL_RANKS:
        remedy = f"Write --ranks {','.join(map(str, range(world_size)))}, so that they exchange real values"
    return Refusal(
        f"rank {rank}: the script receives {received}, but the ranks of a simulated process group exchange no values. "
        f"{remedy}{otherwise}."
    )


def _refuse_objects(
    call: Callable[..., None], objects: list[Any], src: int | None = None, *arguments: Any, **options: Any
) -> None:
    source = options.get("group_src", src) or 0
    if dist.get_rank() != source:
        raise _cannot_receive(
            f"a Python object from rank {source}", f", or run only rank {source} with --ranks {source}"
        )
    call(objects, src, *arguments, **options)


def _refuse_to_receive(call: Callable[..., Any], *_: Any, **__: Any) -> None:
    raise _cannot_receive("Python objects from other ranks")


def _receive(call: Callable[..., Any], tensor: torch.Tensor, src: int | None = None, *more: Any, **options: Any) -> Any:
    if src is None and options.get("group_src") is None:
        raise _cannot_receive("a message from any rank")
    return call(tensor, src, *more, **options)


def _answers_to_deepspeed(are_all_there: bool) -> Iterator[Any]:
    import deepspeed
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
    from deepspeed.runtime.zero import stage3, utils

    # Report plenty of memory, as on a GPU. Otherwise, stages 1 and 2 create their flat buffers in the host's memory.
    yield wrap_function(CPU_Accelerator, "available_memory", lambda call, *_: PLENTY)
    yield wrap_function(AsyncPartitionedParameterSwapper, "__init__", _refuse_swapping)
    yield wrap_function(stage3.DeepSpeedZeroOptimizer_Stage3, "_configure_tensor_swapping", _refuse_swapping)
    if are_all_there:
        return
    yield wrap_function(deepspeed, "initialize", _fill)
    # In zero/utils.py and partitioned_param_coordinator.py, the fake broadcast would leave the receiver's initial -1.
    yield wrap_function(utils, "assert_lst_len_same_as_other_ranks", lambda call, its: _send_list(call, [len(its)]))
    yield wrap_function(utils, "get_lst_from_rank0", _send_list)


NO_SWAPPING = "NVMe offload cannot be simulated, because it would empty its folder, which another run may be using."


def _refuse_swapping(call: Callable[..., None], *_: Any, **__: Any) -> None:
    raise Refusal(NO_SWAPPING)


def _send_list(call: Callable[..., list[int]], values: Sequence[int]) -> list[int]:
    dist.broadcast(torch.tensor(list(values)), src=0)
    return list(values)


def _fill(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Set the weights that rank 0 would have sent to a fixed value, and call deepspeed.initialize.

    With uninitialized memory, a norm may be NaN, and DeepSpeed would skip steps.
    """
    model = options.get("model", arguments[1] if len(arguments) > 1 else None)
    for parameter in model.parameters() if model is not None else ():
        for part in ("ds_tensor", "ds_secondary_tensor"):
            if getattr(parameter, part, None) is not None:
                getattr(parameter, part).data.fill_(WEIGHT)
    return call(*arguments, **options)
