"""Bytes of a step of the real model, counted by torch's memory tracker over fake tensors and fake ranks.

Nothing is allocated and nothing is sent, so that a laptop traces seven billion parameters. What is traced is what
`study/training` builds: the modules of transformers, accelerate's sharding, torch's DDP and AdamW.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin, convert_outputs_to_fp32
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import _TOTAL_KEY, MemTracker, _MemRefType, _UpdateType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

from study.engines.dry_run.pretend import done
from study.planner.trace import Moment, Part, Traced, check_traceable
from study.theory.engine import Engine, Job
from study.theory.residual import is_eager
from study.theory.shapes import ModelShape
from study.theory.shapes.config_json import MODEL_TYPES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES: dict[str, Part] = {
    _MemRefType.PARAM: "parameters", _MemRefType.BUFFER: "buffers", _MemRefType.GRAD: "gradients",
    _MemRefType.OTH: "communication_buffers", _MemRefType.OPT: "optimizer_states",
    _MemRefType.ACT: "activations", _MemRefType.TEMP: "temporary_buffers",
}  # fmt: skip
c10d = torch.ops.c10d
LARGEST_ROTARY = 64  # of GPT-J, as published


# ---------------------------------------------------------------- the model


def model_config(shape: ModelShape, job: Job) -> Any:
    """Describe the model as transformers does, without dropout; what no shape has is as published, or the default."""
    model_type, known = next(
        (name, kind) for name, kind in MODEL_TYPES.items() if kind.architecture == shape.architecture
    )
    settings = {key: getattr(shape, part) for part, key in known.keys.items()}
    if shape.architecture == "gpt-neo":
        settings["attention_types"] = [[["global", "local"], shape.layers // 2], [["global"], shape.layers % 2]]
    if shape.architecture == "gpt-j":
        settings["rotary_dim"] = min(LARGEST_ROTARY, shape.head_size)
    if shape.architecture == "mistral":
        settings["sliding_window"] = None  # which the planner ignores too
    settings |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    attention = "eager" if is_eager(shape, job) else job.attention
    config = transformers.AutoConfig.for_model(
        model_type, num_labels=shape.labels, use_cache=False, attn_implementation=attention, **settings
    )
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def build_model(shape: ModelShape, job: Job, dtype: torch.dtype) -> Any:
    """Build the model, in training mode; its blocks are checkpointed where the job says so."""
    classes = next(kind.classes for kind in MODEL_TYPES.values() if kind.architecture == shape.architecture)
    name = next(name for name, head in classes.items() if head == shape.head)
    model = getattr(transformers, name)._from_config(model_config(shape, job), dtype=dtype).train()
    if shape.head == "tokens" and not shape.is_encoder:
        model.loss_type = "ForCausalLM"  # transformers finds none for GPT2LMHeadModel, warns, and takes this one
    if job.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def block_class(model: nn.Module, shape: ModelShape) -> str:
    """Name the class of the model's blocks: what its one list of as many modules as there are layers holds."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == shape.layers]
    return type(lists[0][0]).__name__


def make_batch(shape: ModelShape, job: Job) -> dict[str, Tensor]:
    """Make one rank's micro batch: (micro_batch_size, sequence_length). An encoder's is padded, as reviews are."""
    ids = torch.zeros(int(job.micro_batch_size), int(job.sequence_length), dtype=torch.long)
    labels = ids[:, 0] if shape.head == "sequence classes" else ids
    mask = {"attention_mask": torch.ones_like(ids)} if shape.is_encoder else {}
    return {"input_ids": ids, "labels": labels, **mask}


def loss(model: nn.Module, batch: dict[str, Tensor], shape: ModelShape) -> Any:
    """Take the loss as the study's workloads do: of tokens transformers' own, of classes cross-entropy in fp32."""
    if shape.head == "tokens":
        return model(**batch).loss
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return functional.cross_entropy(model(**inputs).logits.float().flatten(0, -2), batch["labels"].flatten())


@contextmanager
def one_document_a_sequence() -> Iterator[None]:
    """Let transformers ask no values of fake positions whether several documents share a sequence: none do here.

    Where it cannot ask, it makes a mask, with which attention takes another kernel than in a run.
    """
    kept = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = kept


# ---------------------------------------------------------------- a step of it


class _Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """Torch's tracker, which keeps the peak of the whole only, and whose peak learns what its tensors became.

    Torch's names a gradient once it is one, after the operator that made it, and a peak is often just there.
    """

    makes_buckets = False
    _num_made = 0  # tensors, so far
    _num_made_at_peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if self.makes_buckets and isinstance(result, Tensor):
            self.track_external(result)
        elif func is torch.ops.fsdp.chunk_cat.default:  # a unit's gradients into what is reduced
            for gradient in args[0]:
                self._update_and_maybe_create_winfos(gradient, _MemRefType.GRAD)
            self.track_external(kwargs["out"])
        elif func is c10d._allgather_base_.default:
            self._update_and_maybe_create_winfos(args[0], _MemRefType.PARAM)
        elif func is torch.ops.fsdp.split_with_sizes_copy.default:
            for whole in kwargs["out"]:
                self._update_and_maybe_create_winfos(whole, _MemRefType.PARAM)
        return result

    def _update_snap(
        self, u_type: _UpdateType, winfo: Any, old_mem_consumed: int | None = None, old_reftype: Any = None
    ) -> None:
        super()._update_snap(u_type, winfo, old_mem_consumed, old_reftype)
        if u_type is _UpdateType.ADD:
            self._num_made += 1
            winfo.number = self._num_made
        elif u_type is _UpdateType.REF and winfo.number <= self._num_made_at_peak:
            self._peak_mem_snap[winfo.device][old_reftype] -= winfo.mem_consumed
            self._peak_mem_snap[winfo.device][winfo.reftype] += winfo.mem_consumed

    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, held in self._curr_mem_snap.items():
            if held[_TOTAL_KEY] > self._peak_mem.get(device, 0):
                self._peak_mem[device] = held[_TOTAL_KEY]
                self._peak_mem_snap[device] = dict(held)
                self._num_made_at_peak = self._num_made

    def parts(self, which: str) -> dict[Part, int]:
        """What is held now ("current"), or was at the highest moment since the tracker was entered ("peak")."""
        (snapshot,) = self.get_tracker_snapshot(which).values()  # of the one device
        return {name: snapshot[kind] for kind, name in NAMES.items()}


def trace(shape: ModelShape, engine: Engine, job: Job) -> Traced:
    """Trace one steady optimizer step of rank 0. Raises Refusal for what cannot be traced.

    Of several micro steps two are traced: all later ones find what the second does. Gradients are not clipped, which
    works in place. In this process no group of ranks may exist.
    """
    check_traceable(shape, engine, job)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    with warnings.catch_warnings(), ranks(engine) as mesh:
        warnings.simplefilter("ignore")  # of what could go wrong in a training, which this is not
        with one_document_a_sequence(), FakeTensorMode(allow_non_fake_inputs=True):
            peak, moment = _trace(shape, engine, job, mesh)
    return Traced(peak, moment, time.perf_counter() - began)


def _trace(shape: ModelShape, engine: Engine, job: Job, mesh: DeviceMesh | None) -> tuple[dict[Part, int], Moment]:
    model = build(shape, engine, job, mesh)
    if engine.precision.endswith("-autocast") and engine.kind != "fsdp":
        dtype = DTYPES[engine.precision.removesuffix("-autocast")]
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype)(model.forward))  # as accelerate does
    # One parameter after the other: of many DTensors at a time the tracker counts results that are never made.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    _make_states(optimizer)
    tracker = _Tracker()
    tracker.track_external(model, optimizer)
    trained: Any = _replicate(model, engine, tracker) if engine.kind == "ddp" else model
    micro_steps = min(int(job.gradient_accumulation_steps), 2)
    with tracker:
        for micro_step in range(micro_steps):
            tracker.reset_mod_stats()  # it knows one forward pass of a module
            is_last = micro_step == micro_steps - 1
            with nullcontext() if is_last or engine.kind != "ddp" else trained.no_sync():
                loss(trained, make_batch(shape, job), shape).backward()
        tracker.track_external(model)  # shards of gradients have not been named yet
        stepping = tracker.parts("current")
    computing = tracker.parts("peak")
    if engine.optimizer_kernel == "foreach":
        # torch/optim/adam.py, _multi_tensor_adam: the root of every second moment, at once.
        own = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
        stepping["temporary_buffers"] += sum(tensor.nbytes for tensor in own)
    if engine.optimizer_kernel == "loop":
        with tracker:
            optimizer.step()
        stepping = tracker.parts("peak")
    if sum(stepping.values()) > sum(computing.values()):
        return stepping, "optimizer step"
    return computing, "forward and backward"


def build(shape: ModelShape, engine: Engine, job: Job, mesh: DeviceMesh | None) -> nn.Module:
    """The model of a rank, sharded where its engine shards."""
    model: nn.Module = build_model(shape, job, torch.bfloat16 if engine.precision == "pure-bf16" else torch.float32)
    if mesh is not None and engine.kind == "fsdp":
        shard(model, shape, engine, mesh)
    return model


@contextmanager
def ranks(engine: Engine) -> Iterator[DeviceMesh | None]:
    """Pretend that this process is the first of the engine's; the mesh of all of them, None of a single one.

    The mesh reads its ranks' numbers, so that it is made before tensors are fake.
    """
    if engine.kind == "torch":
        yield None
        return
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=engine.world_size)
    try:
        names, sizes = ("dp_replicate", "dp_shard"), (engine.replicas, engine.num_shards)
        first = 0 if engine.replicas > 1 else 1
        yield init_device_mesh("cpu", sizes[first:], mesh_dim_names=names[first:])
    finally:
        distributed.destroy_process_group()


def shard(model: nn.Module, shape: ModelShape, engine: Engine, mesh: DeviceMesh) -> None:
    """Shard as a run does (study/training/accelerators.py), by the function with which accelerate prepares a model."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if engine.reduces_in_fp32 else None)
    if engine.precision not in ("fp32", "pure-bf16"):
        dtype = DTYPES[engine.precision.removesuffix("-autocast")]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=policy.reduce_dtype)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=engine.reshard_after_forward, cpu_offload=False,
        state_dict_type="SHARDED_STATE_DICT", activation_checkpointing=False, activation_checkpointing_offload=False,
        cpu_ram_efficient_loading=False, ignored_modules=[], auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[block_class(model, shape)], mixed_precision_policy=policy,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), torch_device_mesh=mesh, mixed_precision="no",
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        device=torch.device("cpu"), is_main_process=True,
    )  # fmt: skip
    fsdp2_prepare_model(accelerator, model)


def _replicate(model: nn.Module, engine: Engine, tracker: _Tracker) -> nn.Module:
    """Wrap in torch's DDP, whose buckets are communication buffers.

    It would compare the ranks' parameters, and read them; and the fake group's all-reduce ends in nothing, where a
    bucket is asked for.
    """
    with tracker:
        tracker.makes_buckets = True
        trained = DistributedDataParallel(
            model, init_sync=False, gradient_as_bucket_view=engine.gradient_as_bucket_view
        )
        tracker.makes_buckets = False
    trained.register_comm_hook(None, lambda state, bucket: done(bucket.buffer()))
    return trained


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """Take a step, after which the optimizer has its states, as it has in every step of a run but the first."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
