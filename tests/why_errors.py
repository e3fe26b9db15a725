"""Raise the errors that rules of `zero-study why` know, with the installed packages, on a CPU.

Each function has the name of the rule whose message it provokes. It raises, or returns what a program printed.
"""

# The functions call packages in ways that their types forbid, and call functions without types.
# mypy: disable-error-code="no-untyped-call, override, arg-type, attr-defined"

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn


class Tools(NamedTuple):
    """What a function needs to raise its error."""

    folder: Path
    patch: pytest.MonkeyPatch
    make_group: Callable[[], None]  # makes a process group of one rank, until the test ends


Raiser = Callable[[Tools], str | None]
RAISERS: dict[str, Raiser] = {}


def raises(rule: str) -> Callable[[Raiser], Raiser]:
    """Register a function that raises the error of a rule."""

    def register(function: Raiser) -> Raiser:
        assert rule not in RAISERS, rule
        RAISERS[rule] = function
        return function

    return register


def _printed(*command: str, folder: Path | None = None) -> str:
    """Return what a program prints that ends with an error."""
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert result.returncode, command
    return result.stdout + result.stderr


def _parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def _model(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 16,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _arguments(tools: Tools, **options: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(str(tools.folder), use_cpu=True, report_to=[], **options)


def _trainer(tools: Tools, model: Any = None, *, dataset: Any = (), **options: Any) -> Any:
    from transformers import Trainer

    return Trainer(
        model or _model(), _arguments(tools, **options), train_dataset=dataset or [{"input_ids": [1], "labels": [1]}]
    )


def _mesh(tools: Tools) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    tools.make_group()
    return init_device_mesh("cpu", (1,))


# --- wrapping by FSDP and DDP


@raises("start-up/wrap-class")
def _(tools: Tools) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["BertLayer"]
    )
    plugin.set_auto_wrap_policy(_model())


def _flatten(use_orig_params: bool, *tensors: torch.Tensor) -> None:
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    FlatParamHandle._validate_tensors_to_flatten(SimpleNamespace(_use_orig_params=use_orig_params), list(tensors))  # type: ignore[arg-type]


@raises("start-up/flatten-dtype")
def _(tools: Tools) -> None:
    _flatten(True, _parameter(2, dtype=torch.bfloat16), _parameter(2, dtype=torch.float16))


@raises("start-up/flatten-requires-grad")
def _(tools: Tools) -> None:
    _flatten(False, _parameter(2), _parameter(2).requires_grad_(False))


@raises("start-up/fsdp-scalar")
def _(tools: Tools) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(2, 2)
    model.scale = _parameter()
    fully_shard(model, mesh=_mesh(tools))


@raises("start-up/fsdp-no-device")
def _(tools: Tools) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    tools.make_group()
    FullyShardedDataParallel(nn.Linear(2, 2))


@raises("start-up/fsdp-sync-module-states")
def _(tools: Tools) -> None:
    from accelerate.utils.launch import prepare_multi_gpu_env

    options = ("--fsdp_cpu_ram_efficient_loading", "true", "--fsdp_sync_module_states", "")
    prepare_multi_gpu_env(_launch_arguments("--use_fsdp", *options))


def _launch_arguments(*options: str) -> Any:
    from accelerate.commands.launch import launch_command_parser

    common = ("--mixed_precision", "no", "--num_machines", "1", "--num_processes", "2", "--dynamo_backend", "no")
    return launch_command_parser().parse_args([*common, *options, "train.py"])


@raises("start-up/fsdp-not-distributed")
def _(tools: Tools) -> None:
    _trainer(tools, fsdp="full_shard")


@raises("start-up/mixed-dtensor")
def _(tools: Tools) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    DTensor.from_local(torch.ones(2), _mesh(tools), [Replicate()]) + torch.ones(2)


@raises("start-up/no-backend-for-device")
def _(tools: Tools) -> None:
    tools.make_group()
    group = torch.distributed.new_group([0], backend="cpu:gloo")
    group._get_backend(torch.device("cuda"))  # as any collective of a tensor on a GPU does


@raises("start-up/not-gathered")
def _(tools: Tools) -> None:
    nn.functional.embedding(torch.tensor([0]), torch.empty(0))


@raises("launch/no-process-group")
def _(tools: Tools) -> None:
    torch.distributed.get_world_size(torch.distributed.new_group([0]))


# --- DeepSpeed's configuration


def _deepspeed_config(**config: Any) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(config)


@raises("start-up/batch-size-product")
def _(tools: Tools) -> None:
    _deepspeed_config(train_batch_size=32, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2)


@raises("start-up/auto-values")
def _(tools: Tools) -> None:
    _deepspeed_config(
        train_batch_size="auto", train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto"
    )


@raises("start-up/deepspeed-fp16-and-bf16")
def _(tools: Tools) -> None:
    _deepspeed_config(train_batch_size=1, fp16={"enabled": True}, bf16={"enabled": True})


@raises("start-up/deepspeed-unknown-key")
def _(tools: Tools) -> None:
    _deepspeed_config(train_batch_size=1, zero_optimization={"stage": 2, "overlap_com": True})


@raises("start-up/deepspeed-config-path")
def _(tools: Tools) -> None:
    from accelerate.utils import HfDeepSpeedConfig

    HfDeepSpeedConfig("configs/zero3.json")


@raises("start-up/accelerate-precision-mismatch")
def _(tools: Tools) -> None:
    from accelerate.utils import DeepSpeedPlugin

    DeepSpeedPlugin(
        {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    ).set_mixed_precision("bf16")


@raises("start-up/zero3-device-map")
def _(tools: Tools) -> None:
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        _saved_model(tools)
        type(_model()).from_pretrained(tools.folder, device_map="auto")
    finally:
        del kept


# The following call methods of DeepSpeed's engine without an engine, which would build an extension.


@raises("start-up/no-sync-zero")
def _(tools: Tools) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine: Any = SimpleNamespace(zero_optimization_partition_gradients=lambda: True, zero_optimization_stage=lambda: 2)
    with DeepSpeedEngine.no_sync(engine):
        pass


@raises("start-up/untested-optimizer")
def _(tools: Tools) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine: Any = SimpleNamespace(
        get_data_types=lambda: (torch.float32, torch.float32), zero_optimization=lambda: True,
        zero_allow_untested_optimizer=lambda: False,
    )  # fmt: skip
    tools.patch.setattr("deepspeed.comm.get_rank", lambda *_: 0)
    DeepSpeedEngine._do_optimizer_sanity_check(engine, torch.optim.Rprop([_parameter(1)]))


# --- accelerate and Trainer


@raises("start-up/evaluation-strategy")
def _(tools: Tools) -> None:
    _arguments(tools, evaluation_strategy="steps")


@raises("start-up/accelerate-argument")
def _(tools: Tools) -> None:
    from accelerate import Accelerator

    Accelerator(dispatch_batches=False)


@raises("start-up/num-items-in-batch")
def _(tools: Tools) -> None:
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            raise AssertionError

    trainer = Own(_model(), _arguments(tools), train_dataset=[{"input_ids": [1], "labels": [1]}])
    trainer.compute_loss_func = None
    trainer.training_step(trainer.model, {"input_ids": torch.tensor([[1]])}, torch.tensor(1))


@raises("start-up/split-batches")
def _(tools: Tools) -> None:
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    BatchSamplerShard(BatchSampler(SequentialSampler(range(9)), 9, False), num_processes=4, split_batches=True)


@raises("start-up/no-loss")
def _(tools: Tools) -> None:
    from transformers import Trainer

    trainer = SimpleNamespace(
        label_smoother=None, compute_loss_func=None, model_accepts_loss_kwargs=False,
        args=SimpleNamespace(past_index=-1), accelerator=SimpleNamespace(parallelism_config=None),
    )  # fmt: skip
    Trainer.compute_loss(trainer, lambda **inputs: {"logits": 1}, {"input_ids": 1})  # type: ignore[arg-type]


@raises("start-up/no-columns")
def _(tools: Tools) -> None:
    from datasets import Dataset

    trainer = _trainer(tools, dataset=Dataset.from_dict({"text": ["a"]}))
    trainer.get_train_dataloader()


@raises("start-up/checkpointing-not-supported")
def _(tools: Tools) -> None:
    model = _model()
    model.supports_gradient_checkpointing = False
    model.gradient_checkpointing_enable()


@raises("start-up/accelerate-missing")
def _(tools: Tools) -> None:
    tools.patch.setattr("transformers.training_args.is_accelerate_available", lambda *_: False)
    _ = _arguments(tools).device


@raises("start-up/quantized-without-adapter")
def _(tools: Tools) -> None:
    from transformers.trainer_utils import validate_quantization_for_training

    validate_quantization_for_training(SimpleNamespace(is_quantized=True))


@raises("start-up/bitsandbytes-binary")
def _(tools: Tools) -> None:
    from bitsandbytes import cextension

    tools.patch.setattr(cextension, "get_cuda_specs", lambda: SimpleNamespace(cuda_version_string="99", has_imma=True))
    tools.patch.setattr(
        cextension, "get_cuda_bnb_library_path", lambda specs: tools.folder / "libbitsandbytes_cuda99.so"
    )
    cextension.get_native_library()


@raises("start-up/quantized-offload")
def _(tools: Tools) -> None:
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    Bnb4BitHfQuantizer(BitsAndBytesConfig(load_in_4bit=True)).validate_environment(
        device_map={"model": 0, "lm_head": "cpu"}
    )


@raises("start-up/lora-targets")
def _(tools: Tools) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(_model(), LoraConfig(target_modules=["query_key_value"]))


@raises("start-up/lora-no-targets")
def _(tools: Tools) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig())


@raises("start-up/lora-module-type")
def _(tools: Tools) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(_model(), LoraConfig(target_modules=["input_layernorm"]))


# --- the first step


@raises("start-up/no-grad")
def _(tools: Tools) -> None:
    torch.ones(1).sum().backward()


@raises("start-up/matrix-types")
def _(tools: Tools) -> None:
    torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16)


@raises("start-up/meta-tensor")
def _(tools: Tools) -> None:
    nn.Linear(2, 2, device="meta").to("cpu")


@raises("start-up/unscale-fp16")
def _(tools: Tools) -> None:
    scaler, weight = torch.amp.GradScaler("cpu"), _parameter(1, dtype=torch.float16)
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)


@raises("start-up/no-inf-checks")
def _(tools: Tools) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(torch.optim.SGD([_parameter(1)], 0.1))


@raises("start-up/type-not-implemented")
def _(tools: Tools) -> None:
    torch.linalg.svd(torch.ones(2, 2, dtype=torch.float16))


class _Ending(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os._exit(1)


@raises("start-up/data-worker")
def _(tools: Tools) -> None:
    next(iter(torch.utils.data.DataLoader(_Ending(), num_workers=1)))


@raises("start-up/fork-after-cuda")
def _(tools: Tools) -> None:
    tools.patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    torch.zeros(1).cuda() if torch.backends.cuda.is_built() else torch.cuda._lazy_init()


@raises("launch/no-cuda")
def _(tools: Tools) -> None:
    torch.zeros(1).to("cuda")


# --- models, tokenizers and the hub


def _saved_model(tools: Tools) -> None:
    _model().save_pretrained(tools.folder)


@raises("start-up/nested-lists")
def _(tools: Tools) -> None:
    _tokenizer()(["a", "a b"], return_tensors="pt")


@raises("start-up/auto-class")
def _(tools: Tools) -> None:
    from transformers import AutoModelForCausalLM, ViTConfig

    AutoModelForCausalLM.from_config(ViTConfig())


@raises("start-up/flash-attention-missing")
def _(tools: Tools) -> None:
    model = _model()
    type(model)._from_config(model.config, attn_implementation="flash_attention_2")


def _hub_answers(tools: Tools, error: str, status: int, code: str) -> None:
    """Load a configuration while the hub answers with an error."""
    import httpx2
    from huggingface_hub.utils import _http
    from transformers import AutoConfig

    request = httpx2.Request("HEAD", "https://huggingface.co/meta-llama/Llama-3.1-8B/resolve/main/config.json")
    response = httpx2.Response(status, request=request, headers={"X-Error-Code": code, "X-Error-Message": error})

    def answer(*_: Any, **__: Any) -> Any:
        _http.hf_raise_for_status(response)

    tools.patch.setattr("huggingface_hub.file_download.get_hf_file_metadata", answer)
    AutoConfig.from_pretrained("meta-llama/Llama-3.1-8B", cache_dir=tools.folder)


@raises("start-up/hub-gated")
def _(tools: Tools) -> None:
    _hub_answers(tools, "Access to model meta-llama/Llama-3.1-8B is restricted", 401, "GatedRepo")


@raises("start-up/hub-cache")
def _(tools: Tools) -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained("meta-llama/Llama-3.1-8B", cache_dir=tools.folder, local_files_only=True)


@raises("start-up/hub-name")
def _(tools: Tools) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download("./models/llama/checkpoint-500")


@raises("save/torch-load-version")
def _(tools: Tools) -> None:
    from transformers.utils import import_utils

    tools.patch.setattr(import_utils, "is_torch_greater_or_equal", lambda *_: False)
    import_utils.check_torch_load_is_safe()


@raises("save/no-weights-file")
def _(tools: Tools) -> None:
    model = _model()
    model.config.save_pretrained(tools.folder)
    type(model).from_pretrained(tools.folder)


# --- packages that do not fit each other, and extensions


@raises("launch/mpi-instead-of-launcher")
def _(tools: Tools) -> None:
    from deepspeed.comm.comm import mpi_discovery

    tools.patch.delitem(sys.modules, "mpi4py", raising=False)
    tools.patch.setattr(sys, "path", [])  # so that an installed mpi4py is not found
    mpi_discovery()


@raises("start-up/numpy-2")
def _(tools: Tools) -> None:
    import numpy

    _ = numpy.float_


@raises("start-up/library-not-linked")
def _(tools: Tools) -> str:
    (tools.folder / "a.c").write_text("int main(void) { return 0; }", encoding="utf-8")
    return _printed("gcc", "a.c", "-lcurand_of_no_toolkit", folder=tools.folder)


@raises("start-up/header-missing")
def _(tools: Tools) -> str:
    (tools.folder / "a.c").write_text("#include <cusparse_of_no_toolkit.h>\n", encoding="utf-8")
    return _printed("gcc", "a.c", folder=tools.folder)


@raises("start-up/extension-build")
def _(tools: Tools) -> None:
    from torch.utils import cpp_extension

    (tools.folder / "a.cpp").write_text("int broken(", encoding="utf-8")
    cpp_extension.load("broken", [str(tools.folder / "a.cpp")], build_directory=str(tools.folder))


@raises("start-up/cuda-home")
def _(tools: Tools) -> None:
    from torch.utils import cpp_extension

    tools.patch.setattr(cpp_extension, "CUDA_HOME", None)
    cpp_extension._join_cuda_home("bin", "nvcc")


@raises("start-up/cuda-versions")
def _(tools: Tools) -> None:
    from deepspeed.ops.op_builder import builder

    tools.patch.setattr(builder, "installed_cuda_version", lambda *_: (11, 7))
    tools.patch.setattr(torch.version, "cuda", "12.4")
    builder.assert_no_cuda_mismatch()


@raises("start-up/ninja")
def _(tools: Tools) -> None:
    from torch.utils import cpp_extension

    tools.patch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    cpp_extension.verify_ninja_availability()


@raises("start-up/op-of-other-torch")
def _(tools: Tools) -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    OpBuilder.validate_torch_version({"version": "1.13"})


@raises("start-up/cpu-adam-half-made")
def _(tools: Tools) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adam = object.__new__(DeepSpeedCPUAdam)
    _ = adam.ds_opt_adam


# --- saving and loading


@raises("save/shared-tensors")
def _(tools: Tools) -> None:
    from safetensors.torch import save_file

    weight = torch.ones(2)
    save_file({"embed_tokens.weight": weight, "lm_head.weight": weight}, tools.folder / "a.safetensors")


@raises("save/not-contiguous")
def _(tools: Tools) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2, 3).T}, tools.folder / "a.safetensors")


class Scaler:
    """An object that torch.load refuses, as DeepSpeed's loss scaler was."""


@raises("save/weights-only")
def _(tools: Tools) -> None:
    torch.save({"loss_scaler": Scaler()}, tools.folder / "a.pt")
    torch.load(tools.folder / "a.pt")


@raises("save/disk-full")
def _(tools: Tools) -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"a")


@raises("save/write-failed")
def _(tools: Tools) -> None:
    torch.save(torch.ones(1 << 16), "/dev/full")


def _system_error(number: int) -> None:
    raise OSError(number, os.strerror(number), "/mnt/run/checkpoint-500/model.safetensors")


@raises("save/quota")
def _(tools: Tools) -> None:
    import errno

    _system_error(errno.EDQUOT)


@raises("save/optimizer-groups")
def _(tools: Tools) -> None:
    saved = torch.optim.AdamW([_parameter(1), _parameter(1)]).state_dict()
    torch.optim.AdamW([_parameter(1)]).load_state_dict(saved)


@raises("save/zero3-empty-shape")
def _(tools: Tools) -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.empty(0))
    model.load_state_dict(nn.Linear(2, 2).state_dict())


@raises("save/size-mismatch")
def _(tools: Tools) -> None:
    nn.Linear(2, 2).load_state_dict(nn.Linear(2, 3).state_dict())


@raises("save/wrapper-prefix")
def _(tools: Tools) -> None:
    state = {f"module.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}
    nn.Linear(2, 2).load_state_dict(state)


@raises("save/other-keys")
def _(tools: Tools) -> None:
    nn.Linear(2, 2).load_state_dict({"kernel": torch.ones(2, 2)})


@raises("save/dcp-missing-key")
def _(tools: Tools) -> None:
    from torch.distributed import checkpoint

    checkpoint.save({"a": torch.ones(1)}, checkpoint_id=tools.folder, no_dist=True)
    checkpoint.load({"b": torch.ones(1)}, checkpoint_id=tools.folder, no_dist=True)


@raises("save/file-damaged")
def _(tools: Tools) -> None:
    path = tools.folder / "a.pt"
    torch.save(torch.ones(100), path)
    path.write_bytes(path.read_bytes()[:300])
    torch.load(path)


@raises("save/safetensors-damaged")
def _(tools: Tools) -> None:
    from safetensors.torch import load_file, save_file

    path = tools.folder / "a.safetensors"
    save_file({"weight": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    load_file(path)


@raises("save/lfs-pointer")
def _(tools: Tools) -> None:
    path = tools.folder / "a.bin"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", encoding="utf-8")
    torch.load(path, weights_only=False)


@raises("save/device-of-other-machine")
def _(tools: Tools) -> None:
    from torch import serialization

    serialization._validate_device("cuda:3", "cuda")


@raises("save/zero-files-missing")
def _(tools: Tools) -> None:
    from deepspeed.utils import zero_to_fp32

    path = tools.folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {"zero_stage": 2, "partition_count": 8}}, path)
    zero_to_fp32.parse_optim_states([str(path)], str(tools.folder))


@raises("save/zero-no-latest")
def _(tools: Tools) -> None:
    from deepspeed.utils import zero_to_fp32

    zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tools.folder))


@raises("save/not-json")
def _(tools: Tools) -> None:
    import json

    json.dumps({"dtype": torch.bfloat16})


@raises("save/generation-config")
def _(tools: Tools) -> None:
    from transformers import GenerationConfig

    GenerationConfig(do_sample=False, temperature=0.5).save_pretrained(tools.folder)


@raises("save/best-metric")
def _(tools: Tools) -> None:
    trainer = _trainer(tools, metric_for_best_model="accuracy")
    trainer._determine_best_metric({"eval_loss": 1.0}, None)


@raises("save/trainer-state")
def _(tools: Tools) -> None:
    from transformers import TrainerState

    TrainerState.load_from_json(str(tools.folder / "trainer_state.json"))


@raises("save/temporary-folder")
def _(tools: Tools) -> None:
    os.rename(tools.folder / "tmp-checkpoint-500", tools.folder / "checkpoint-500")


@raises("save/random-state")
def _(tools: Tools) -> None:
    torch.set_rng_state(torch.ones(8))


@raises("save/sharded-save-only-model")
def _(tools: Tools) -> None:
    trainer = _trainer(tools, save_only_model=True)
    plugin = SimpleNamespace(state_dict_type="StateDictType.SHARDED_STATE_DICT", activation_checkpointing=False)
    state = SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=None)
    accelerator = SimpleNamespace(state=state, gather_for_metrics=lambda: None)
    tools.patch.setattr("transformers.trainer.Accelerator", lambda **_: accelerator)
    trainer.create_accelerator_and_postprocess()


# --- launching


@raises("launch/port")
def _(tools: Tools) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    torch.distributed.TCPStore("127.0.0.1", store.port, is_master=True)


@raises("launch/no-nccl")
def _(tools: Tools) -> None:
    torch.distributed.init_process_group("nccl", init_method=f"file://{tools.folder}/group", rank=0, world_size=1)


@raises("launch/environment")
def _(tools: Tools) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        tools.patch.delenv(name, raising=False)
    torch.distributed.init_process_group("gloo")


@raises("launch/report")
def _(tools: Tools) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    raise ChildFailedError("train.py", {0: ProcessFailure(local_rank=0, pid=997, exitcode=1, error_file="<NONE>")})


@raises("launch/command-failed")
def _(tools: Tools) -> None:
    subprocess.run(["false"], check=True)


@raises("launch/hostfile")
def _(tools: Tools) -> None:
    from deepspeed.launcher.runner import _parse_hostfile

    _parse_hostfile(["worker-0 gpus=8\n"])


@raises("launch/deepspeed-host")
def _(tools: Tools) -> None:
    from deepspeed.launcher.runner import parse_resource_filter

    parse_resource_filter({"localhost": [0, 1, 2, 3]}, include_str="localhost:7")


@raises("launch/rendezvous")
def _(tools: Tools) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    create_backend(RendezvousParameters("c10d", "127.0.0.1:9", "run", 1, 1, is_host="false", read_timeout=1))


@raises("launch/local-rank-argument")
def _(tools: Tools) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        argparse.ArgumentParser("train.py").parse_args(["--local-rank=0"])
    return printed.getvalue()


@raises("launch/main-process-address")
def _(tools: Tools) -> None:
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    prepare_simple_launcher_cmd_env(_launch_arguments("--cpu", "--num_machines", "2"))


@raises("launch/mesh-size")
def _(tools: Tools) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    tools.make_group()
    init_device_mesh("cpu", (2, 4))


@raises("launch/parallelism-size")
def _(tools: Tools) -> None:
    from accelerate import ParallelismConfig

    ParallelismConfig(dp_shard_size=8)._validate_accelerator(
        SimpleNamespace(num_processes=4, is_fsdp2=True, multi_device=True, distributed_type="FSDP")  # type: ignore[arg-type]
    )


@raises("launch/notebook")
def _(tools: Tools) -> None:
    from accelerate import Accelerator, notebook_launcher

    Accelerator(cpu=True)
    notebook_launcher(print, num_processes=2)
