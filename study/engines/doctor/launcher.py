"""What does `accelerate launch` do with each key of an accelerate file?

As accelerate 1.15.0 does it: commands/config/config_args.py reads the file, commands/launch.py
(_validate_launch_command) lays it under the flags, utils/launch.py (prepare_*_env) hands a part of it to the program
as variables, which the plugins of utils/dataclasses.py read. What is on none of these ways is lost without a word.
"""

from __future__ import annotations

import math
from typing import Any

from study.engines.doctor.findings import ABSENT, REMOVE, Condition, Finding, Rule, Settings, examine, misspelt
from study.engines.doctor.known import (
    ACCELERATE,
    CONVERTED,
    DEEPSPEED_SECTION,
    DISTRIBUTED_TYPES,
    DYNAMO_SECTION,
    FSDP_SECTION,
    FSDP_UNFLAGGED,
    NOT_BESIDE_A_JSON,
    PARALLELISM_SECTION,
)

SECTIONS = {
    "deepspeed_config": DEEPSPEED_SECTION,
    "fsdp_config": FSDP_SECTION | FSDP_UNFLAGGED,
    "dynamo_config": DYNAMO_SECTION,
    "parallelism_config": PARALLELISM_SECTION,
    "mpirun_config": frozenset({"mpirun_hostfile"}),
}
PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}  # which the launcher adds where a key lacks it
HARDWARE = DISTRIBUTED_TYPES - {"NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP"}
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "1", "2", "3", "4", "5")
STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
STAGES = ("0", "1", "2", "3")  # which the launcher hands on as text
PRECISIONS = ("no", "fp8", "fp16", "bf16")


class AccelerateFile(Settings):
    """An accelerate file, with what decides the way of its keys."""

    @property
    def kind(self) -> str:
        """Its distributed_type; an unquoted NO is YAML for false, and does as 'NO' does."""
        written = self.get("distributed_type", "")
        return "NO" if written is False else str(written)

    @property
    def machines(self) -> int:
        written = self.get("num_machines", 1)
        return written if isinstance(written, int) else 1

    @property
    def json_named(self) -> str | None:
        """The DeepSpeed JSON that the file names."""
        written = self.get("deepspeed_config.deepspeed_config_file", None)
        return str(written) if self.kind == "DEEPSPEED" and written not in (None, "none") else None

    @property
    def stage(self) -> int | None:
        """The ZeRO stage that the file itself says; None: not DeepSpeed, or the JSON says it."""
        if self.kind != "DEEPSPEED" or self.json_named is not None:
            return None
        written = self.get("deepspeed_config.zero_stage", 2)
        return int(written) if str(written) in STAGES else 2

    def fsdp(self, name: str, default: Any = ABSENT) -> Any:
        """A key of the fsdp section, with its prefix or without."""
        written = self.get(f"fsdp_config.fsdp_{name}")
        return self.get(f"fsdp_config.{name}", default) if written is ABSENT else written

    @property
    def fsdp_version(self) -> int:
        return 2 if str(self.fsdp("version", 1)) == "2" else 1


def _type_is(*kinds: str) -> Condition:
    return lambda value, file: file.kind in kinds


def _type_is_not(*kinds: str) -> Condition:
    return lambda value, file: file.kind not in kinds


def _one_machine(value: Any, file: Any) -> bool:
    return bool(file.machines == 1)


def _pdsh(value: Any, file: Any) -> bool:
    """Whether DeepSpeed's own launcher starts the machines."""
    chosen = file.get("deepspeed_config.deepspeed_multinode_launcher", None)
    return file.kind == "DEEPSPEED" and file.machines > 1 and chosen in (None, "pdsh")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _degrees(file: Any) -> int:
    names = (f"parallelism_config.parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp"))
    return math.prod(size for name in names if isinstance(size := file.get(name, 1), int))


TOP = (
    Rule(
        key="distributed_type", of_absent=True, effect="crashes", error="A `distributed_type` must be specified",
        message="accelerate refuses a file without it", remedy="write NO, MULTI_GPU, FSDP or DEEPSPEED, in quotes",
    ),
    Rule(
        key="distributed_type", effect="means something else", when=lambda value, file: value is False, mend="NO",
        engine_has="NO",
        message="unquoted, YAML reads NO as false; accelerate starts one process as for 'NO'", remedy="write 'NO'",
    ),
    Rule(
        key="distributed_type", effect="crashes", when=lambda value, file: str(value) not in DISTRIBUTED_TYPES,
        error="is not a valid DistributedType", message="accelerate knows no such type (TPU is called XLA today)",
        remedy=f"write one of {', '.join(sorted(DISTRIBUTED_TYPES))}",
    ),
    Rule(
        key="distributed_type", effect="means something else", mend="MULTI_GPU",
        when=lambda value, file: value == "MULTI_CPU" and not file.get("mpirun_config.mpirun_hostfile", None),
        message="accelerate starts one process, whatever num_processes says, unless mpirun starts more",
        remedy="write MULTI_GPU, and Accelerator(cpu=True) in the program: that starts them without mpirun",
    ),
    Rule(
        key="distributed_type", effect="honoured", when=lambda value, file: value == "MULTI_CPU",
        message="mpirun starts the processes, and must be installed",
    ),
    Rule(
        key="distributed_type", effect="honoured", when=_type_is("FSDP"),
        message="on a box without a GPU accelerate leaves FSDP out, and the processes train plain DDP or apart",
    ),
    Rule(
        key="distributed_type", effect="honoured", when=_type_is("DEEPSPEED"),
        message="on a box without a GPU the program must choose gloo, or every process trains alone as rank 0",
    ),
    Rule(
        key="distributed_type", effect="not examined", when=lambda value, file: str(value) in HARDWARE,
        message="needs hardware or a package that the study does not have", error="is not installed",
    ),
    Rule(
        key="compute_environment", effect="not examined", when=lambda value, file: value != "LOCAL_MACHINE",
        message="only LOCAL_MACHINE is examined",
    ),
    Rule(
        key="num_processes", of_absent=True, effect="crashes", when=_type_is_not("NO"),
        error="You need to manually pass in `--num_processes`",
        message="accelerate stops unless --num_processes is on the command line",
        remedy="write the number of processes",
    ),
    Rule(
        key="num_processes", effect="ignored", engine_has=1,
        when=lambda value, file: file.kind == "NO" and _number(value) and value > 1,
        message="distributed_type 'NO' starts one process", remedy="write distributed_type: MULTI_GPU, or 1 here",
    ),
    Rule(
        key="num_processes", effect="means something else",
        when=lambda value, file: _number(value) and file.machines > 1 and value % file.machines != 0,
        message="is divided by num_machines and rounded down", remedy="write a multiple of num_machines",
    ),
    Rule(
        key="num_processes", effect="ignored", engine_has=1,
        when=lambda value, file: file.kind == "MULTI_CPU" and not file.get("mpirun_config.mpirun_hostfile", None),
        message="MULTI_CPU without mpirun starts one process", remedy="write distributed_type: MULTI_GPU",
    ),
    Rule(
        key="main_process_ip", of_absent=True, effect="crashes",
        when=lambda value, file: file.machines > 1 and not _pdsh(value, file),
        message="several machines need the address of the first", remedy="write the address of machine 0",
    ),
    Rule(
        key="main_process_ip", effect="ignored", matters=False, when=_one_machine, message="one machine needs none",
    ),
    Rule(
        key="main_process_port", effect="crashes", when=lambda value, file: value == 0 and file.machines > 1,
        message="each machine takes a free port of its own", remedy="write one port for all machines", mend=29500,
    ),
    Rule(
        key="main_process_port", effect="honoured", when=lambda value, file: value is None,
        message="29500; where that is taken, one machine finds another port", matters=False,
    ),
    Rule(key="machine_rank", effect="ignored", matters=False, when=_one_machine, message="one machine needs none"),
    Rule(
        key="rdzv_backend", effect="ignored", engine_has="static",
        when=lambda value, file: value != "static" and file.machines > 1,
        message="the launcher's flag has a default, so it never looks here: static is taken",
        remedy="pass --rdzv_backend {value} on the command line", mend=REMOVE,
    ),
    Rule(
        key="rdzv_backend", effect="ignored", matters=False, engine_has="static",
        when=lambda value, file: value != "static",
        message="the launcher's flag has a default, so it never looks here: static is taken", mend=REMOVE,
    ),
    Rule(
        key="same_network", effect="ignored", matters=False, engine_has=False,
        message="the launcher's flag is false unless it is on the command line; static rendezvous does the same",
    ),
    Rule(
        key="enable_cpu_affinity", effect="ignored", engine_has=False, when=lambda value, file: value is True,
        message="the launcher's flag is false unless it is on the command line",
        remedy="pass --enable_cpu_affinity, or set ACCELERATE_CPU_AFFINITY=1", mend=REMOVE,
    ),
    *(
        Rule(key=key, effect="ignored", matters=False, when=_type_is_not("XLA"), message="is for TPUs")
        for key in ("downcast_bf16", "tpu_*", "commands", "command_file", "main_training_function")
    ),
    Rule(
        key="use_cpu", effect="ignored", mend=False,
        when=lambda value, file: value is True and file.kind not in ("NO", "MULTI_CPU", "False"),
        message="only the launcher of one process hands it on; the program takes its GPUs all the same",
        remedy="set CUDA_VISIBLE_DEVICES= for a CPU, and Accelerator(cpu=True) in a program of DDP",
    ),
    Rule(
        key="gpu_ids", effect="crashes", error="has no attribute 'split'",
        when=lambda value, file: isinstance(value, int), message="a number is no text", remedy="write it in quotes",
    ),
    Rule(
        key="gpu_ids", effect="crashes", error="Less than two GPU ids", mend="all",
        when=lambda value, file: file.kind == "MULTI_GPU" and file.machines <= 1 and value not in ("all", None)
        and len(str(value).split(",")) < 2,
        message="MULTI_GPU wants two GPUs or more", remedy="write all, or the ids with commas between them",
    ),
    Rule(
        key="mixed_precision", effect="crashes", error="'bool' object has no attribute 'lower'", mend="no",
        when=lambda value, file: value is False, message="unquoted, YAML reads no as false", remedy="write 'no'",
    ),
    Rule(
        key="mixed_precision", effect="crashes", mend=REMOVE, error="following accelerate config variables will be",
        when=lambda value, file: file.json_named is not None and value is not None,
        message="accelerate stops where deepspeed_config_file is named beside it, even for 'no'",
        remedy='remove it; write "bf16": {"enabled": true} into the JSON',
    ),
    Rule(
        key="mixed_precision", effect="crashes", error="Unknown mixed_precision mode",
        when=lambda value, file: value is not None and str(value).lower() not in PRECISIONS,
        message="accelerate knows no such precision", remedy=f"write one of {', '.join(PRECISIONS)}, in quotes",
    ),
    Rule(
        key="mixed_precision", effect="not examined", when=lambda value, file: value == "fp8",
        message="needs TransformerEngine, MS-AMP or torchao; accelerate stops without", error="FP8 is not available",
    ),
    Rule(
        key="mixed_precision", effect="means something else",
        when=lambda value, file: file.stage == 0 and value in ("bf16", "fp16"),
        message="at stage 0 DeepSpeed's wrapper takes an empty Adam step as it is built: the first update is 0.73 of "
        "what it should be, and every later one is off by a step",
        remedy="write zero_stage: 1, or distributed_type: MULTI_GPU",
    ),
    Rule(
        key="mixed_precision", effect="honoured",
        when=lambda value, file: file.kind == "DEEPSPEED" and value in ("bf16", "fp16"),
        message="parameters in {value} with fp32 masters, not autocast; gradients accumulate in {value} unless a JSON "
        "sets data_types.grad_accum_dtype",
    ),
    Rule(
        key="mixed_precision", effect="honoured", when=lambda value, file: value in ("bf16", "fp16"),
        message="autocast over fp32 parameters, unlike DeepSpeed's",
    ),
    Rule(
        key="dynamo_config", effect="ignored", whole=True, mend=REMOVE, engine_has="NO",
        when=lambda value, file: file.kind == "DEEPSPEED" and value and value != {"dynamo_backend": "NO"},
        message="the launcher of DeepSpeed does not hand it on: nothing is compiled",
        remedy="remove it, and say Accelerator(dynamo_backend=...) in the program",
    ),
    Rule(
        key="fp8_config", effect="ignored", whole=True, matters=False,
        when=lambda value, file: value and file.get("mixed_precision", "no") != "fp8",
        message="is read with mixed_precision: fp8 only",
    ),
    Rule(key="fp8_config", effect="not examined", whole=True, when=lambda value, file: bool(value)),
    Rule(key="megatron_lm_config", effect="not examined", whole=True, when=lambda value, file: bool(value)),
    Rule(
        key="mpirun_config", effect="ignored", whole=True, when=lambda value, file: value and file.kind != "MULTI_CPU",
        message="mpirun starts MULTI_CPU only", matters=False,
    ),
    Rule(
        key="deepspeed_config", effect="ignored", whole=True, mend=REMOVE,
        when=lambda value, file: value and file.kind != "DEEPSPEED",
        message="is read with distributed_type: DEEPSPEED only", remedy="remove it, or write DEEPSPEED",
    ),
    Rule(
        key="fsdp_config", effect="ignored", whole=True, mend=REMOVE,
        when=lambda value, file: value and file.kind != "FSDP",
        message="is read with distributed_type: FSDP only", remedy="remove it, or write FSDP",
    ),
    Rule(
        key="parallelism_config", effect="crashes", whole=True, mend=REMOVE,
        when=lambda value, file: value and file.kind == "FSDP" and file.fsdp_version == 1,
        message="accelerate takes it with FSDP2 only", remedy="write fsdp_version: 2",
    ),
    Rule(
        key="parallelism_config", effect="crashes", error="does not match num_processes",
        when=lambda value, file: value and _number(n := file.get("num_processes")) and _degrees(file) not in (1, n),
        message="the product of its sizes is not num_processes", remedy="change the sizes or num_processes",
    ),
)  # fmt: skip

_DS = "deepspeed_config."


def _no_json(value: Any, file: Any) -> bool:
    """Whether the accelerate file itself configures DeepSpeed."""
    return file.stage is not None


def _to_nvme(what: str) -> Condition:
    """Whether the accelerate file sends the optimizer's states or the parameters to NVMe."""
    return lambda value, file: file.get(f"{_DS}offload_{what}_device", "none") == "nvme"


DEEPSPEED = (
    Rule(
        key=f"{_DS}deepspeed_config_file", effect="crashes", when=lambda value, file: _beside_a_json(file) != [],
        error="following accelerate config variables will be ignored",
        message="accelerate stops where these stand beside it: see each of them", remedy="keep what the JSON says only",
    ),
    *(
        Rule(
            key=f"{_DS}{key}", effect="crashes", when=lambda value, file: file.json_named is not None, mend=REMOVE,
            error="following accelerate config variables will be ignored",
            message="accelerate stops where deepspeed_config_file is named beside it",
            remedy="remove it, and write it into the JSON",
        )
        for key in sorted(NOT_BESIDE_A_JSON - {"mixed_precision"})
    ),
    Rule(
        key=f"{_DS}zero_stage", of_absent=True, effect="means something else", when=_no_json, engine_has=2, mend=2,
        message="without it accelerate takes ZeRO-2", remedy="write zero_stage",
    ),
    Rule(
        key=f"{_DS}zero_stage", effect="crashes", when=lambda value, file: str(value) not in STAGES,
        message="there are stages 0 to 3", remedy="write a number from 0 to 3",
    ),
    Rule(
        key=f"{_DS}gradient_clipping", of_absent=True, effect="means something else", when=_no_json, engine_has=1.0,
        mend=1.0, message="without it DeepSpeed clips at 1.0 (and Hugging Face's Trainer at max_grad_norm)",
        remedy="write 1.0; for no clipping name a JSON with \"gradient_clipping\": 0.0",
    ),
    Rule(
        key=f"{_DS}gradient_clipping", effect="crashes", error="could not convert string to float",
        when=lambda value, file: not _number(value) and value != "auto", message="is no number",
        remedy="write a number above 0", mend=1.0,
    ),
    Rule(
        key=f"{_DS}gradient_clipping", effect="means something else", engine_has=1.0, mend=1.0,
        when=lambda value, file: value in ("auto", 0),
        message="DeepSpeed clips at 1.0 for {value} (Hugging Face's Trainer fills auto with max_grad_norm)",
        remedy="write 1.0; for no clipping name a JSON with \"gradient_clipping\": 0.0",
    ),
    Rule(
        key=f"{_DS}gradient_accumulation_steps", effect="crashes", error="invalid literal for int()", mend=REMOVE,
        when=lambda value, file: value == "auto", message="accelerate wants a number here",
        remedy="remove it: the program's number is taken then",
    ),
    Rule(
        key=f"{_DS}gradient_accumulation_steps", effect="honoured", when=lambda value, file: _number(value),
        message="it beats what the program says",
    ),
    *(
        Rule(
            key=f"{_DS}offload_{what}_nvme_path", effect="ignored", engine_has="none", mend=REMOVE,
            message="the launcher does not hand it on: swap files go to ./none of the current folder",
            remedy=f'name a JSON with "nvme_path", or set ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_NVME_PATH',
            when=_to_nvme(what),
        )
        for what in ("optimizer", "param")
    ),
    Rule(key=f"{_DS}offload_*_nvme_path", effect="ignored", matters=False, message="nothing is offloaded to NVMe"),
    *(
        Rule(
            key=f"{_DS}offload_{what}_device", effect="crashes", mend="none",
            when=lambda value, file: str(value).lower() not in ("none", "cpu", "nvme"),
            message="DeepSpeed knows none, cpu and nvme", remedy="write one of them",
        )
        for what in ("optimizer", "param")
    ),
    Rule(
        key=f"{_DS}offload_param_device", effect="ignored", mend="none",
        when=lambda value, file: value != "none" and file.stage != 3,
        message="only stage 3 offloads parameters", remedy="write none, or zero_stage: 3",
    ),
    Rule(
        key=f"{_DS}offload_optimizer_device", effect="means something else", mend="none",
        when=lambda value, file: value != "none" and file.stage == 0,
        message="stage 0 offloads nothing, and takes DeepSpeed's CPU Adam all the same",
        remedy="write none, or zero_stage: 2",
    ),
    Rule(
        key=f"{_DS}offload_optimizer_device", effect="honoured", when=lambda value, file: value != "none",
        message="the program's optimizer is replaced by DeepSpeed's CPU Adam, whatever it is",
    ),
    Rule(
        key=f"{_DS}zero3_init_flag", effect="ignored", matters=False, mend=REMOVE,
        when=lambda value, file: file.stage in (0, 1, 2) and str(value).lower() == "true", message="is for stage 3",
    ),
    Rule(
        key=f"{_DS}zero3_init_flag", effect="ignored", mend=True,
        when=lambda value, file: file.stage == 3 and str(value).lower() == "false",
        message="transformers builds its models under zero.Init at stage 3 all the same",
        remedy="write true, which is what happens",
    ),
    Rule(
        key=f"{_DS}zero3_save_16bit_model", effect="ignored", matters=False, message="is for stage 3",
        when=lambda value, file: file.stage in (0, 1, 2),
    ),
    Rule(
        key=f"{_DS}zero3_save_16bit_model", of_absent=True, effect="means something else", matters=False, mend=True,
        when=lambda value, file: file.stage == 3, engine_has=False,
        message="without it save_16bit_model writes no file and returns False", remedy="write true",
    ),
    Rule(
        key=f"{_DS}deepspeed_multinode_launcher", effect="ignored", matters=False, when=_one_machine,
        message="one machine needs none",
    ),
    *(
        Rule(
            key=f"{_DS}deepspeed_multinode_launcher", of_absent=absent, effect="means something else", when=_pdsh,
            mend="standard", message="pdsh starts the other machines over ssh, with a hostfile, and the whole "
            "environment is written to .deepspeed_env", remedy="write standard, and start accelerate on every machine",
        )
        for absent in (True, False)
    ),
    Rule(
        key=f"{_DS}deepspeed_hostfile", effect="ignored", matters=False,
        when=lambda value, file: not _pdsh(value, file), message="is for pdsh",
    ),
)  # fmt: skip

_F = "fsdp_config.fsdp_"


def _version(number: int) -> Condition:
    return lambda value, file: file.fsdp_version == number


def _true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "1")


FSDP = (
    Rule(
        key=f"{_F}version", of_absent=True, effect="means something else", matters=False, engine_has="1",
        when=lambda value, file: file.kind == "FSDP" and file.fsdp("version") is ABSENT,
        message="without it accelerate takes FSDP1",
        remedy="write fsdp_version: 2, and fsdp_reshard_after_forward for fsdp_sharding_strategy",
    ),
    Rule(
        key=f"{_F}sync_module_states", effect="crashes", mend=True, error="set `--fsdp_sync_module_states` to `True`",
        when=lambda value, file: not _true(value) and _true(file.fsdp("cpu_ram_efficient_loading", True)),
        message="fsdp_cpu_ram_efficient_loading, which is true unless it is written, needs it",
        remedy="write true, or fsdp_cpu_ram_efficient_loading: false",
    ),
    *(
        Rule(
            key=f"{_F}{name}", effect="ignored", matters=False, when=_version(2), mend=REMOVE, engine_has="None",
            message=f"FSDP2 {why}",
        )
        for name, why in {
            "sync_module_states": "needs none", "use_orig_params": "always has them",
            "forward_prefetch": "has none in accelerate", "backward_prefetch": "has none in accelerate",
        }.items()
    ),
    Rule(
        key=f"{_F}sharding_strategy", effect="ignored", when=_version(2), mend=REMOVE, engine_has="None",
        message="FSDP2 shards as fsdp_reshard_after_forward says", remedy="write fsdp_reshard_after_forward: true for "
        "FULL_SHARD, false for SHARD_GRAD_OP",
    ),
    Rule(
        key=f"{_F}sharding_strategy", effect="crashes", mend="FULL_SHARD",
        when=lambda value, file: str(value).upper() not in SHARDING, message="torch knows no such strategy",
        remedy=f"write one of {', '.join(SHARDING[:5])}",
    ),
    Rule(
        key=f"{_F}reshard_after_forward", effect="crashes", when=lambda value, file: file.fsdp_version == 2
        and str(value).lower() not in ("true", "false", "yes", "no", "1", "0", "y", "n", "t", "f", "on", "off"),
        mend=True, error="invalid truth value", message="FSDP2 wants true or false here",
        remedy="write true for FULL_SHARD, false for SHARD_GRAD_OP",
    ),
    Rule(
        key=f"{_F}reshard_after_forward", effect="ignored", when=_version(1), mend=REMOVE, engine_has="None",
        message="FSDP1 shards as fsdp_sharding_strategy says, which is FULL_SHARD unless it is written",
        remedy="write fsdp_version: 2, or fsdp_sharding_strategy",
    ),
    Rule(
        key=f"{_F}state_dict_type", effect="crashes", mend="SHARDED_STATE_DICT", error="LOCAL_STATE_DICT",
        when=lambda value, file: str(value).upper() not in STATE_DICTS
        or (file.fsdp_version == 2 and str(value).upper() == "LOCAL_STATE_DICT"),
        message="is no type that this version of FSDP has", remedy="write SHARDED_STATE_DICT or FULL_STATE_DICT",
    ),
    Rule(
        key=f"{_F}activation_checkpointing_offload", effect="crashes", mend=False,
        when=lambda value, file: _true(value)
        and (file.fsdp_version == 1 or not _true(file.fsdp("activation_checkpointing", False))),
        message="needs FSDP2 and fsdp_activation_checkpointing", remedy="write both, or false",
    ),
    Rule(
        key=f"{_F}auto_wrap_policy", of_absent=True, effect="means something else",
        when=lambda value, file: file.kind == "FSDP" and file.fsdp("auto_wrap_policy") is ABSENT,
        mend="TRANSFORMER_BASED_WRAP", engine_has="None",
        message="without it the whole model is one unit: it is gathered whole", remedy="write TRANSFORMER_BASED_WRAP",
    ),
    Rule(
        key=f"{_F}auto_wrap_policy", effect="means something else", when=lambda value, file: value == "NO_WRAP",
        engine_has="None", message="the whole model is one unit: it is gathered whole",
        remedy="write TRANSFORMER_BASED_WRAP", mend="TRANSFORMER_BASED_WRAP",
    ),
    Rule(
        key=f"{_F}auto_wrap_policy", effect="crashes", error="Invalid auto wrap policy",
        when=lambda value, file: str(value).upper() not in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        message="accelerate knows no such policy", remedy="write TRANSFORMER_BASED_WRAP", mend="TRANSFORMER_BASED_WRAP",
    ),
    Rule(
        key=f"{_F}transformer_layer_cls_to_wrap", of_absent=True, effect="means something else", matters=False,
        when=lambda value, file: file.kind == "FSDP" and file.fsdp("transformer_layer_cls_to_wrap") is ABSENT
        and file.fsdp("auto_wrap_policy") == "TRANSFORMER_BASED_WRAP", engine_has="None",
        message="the classes are those of the model's _no_split_modules; for BERT under FSDP2 they hold its "
        "embeddings, which are then sharded twice: TypeError", remedy="name the block, for BERT: BertLayer",
    ),
    Rule(
        key=f"{_F}transformer_layer_cls_to_wrap", effect="ignored", matters=False, mend=REMOVE,
        when=lambda value, file: file.fsdp("auto_wrap_policy") != "TRANSFORMER_BASED_WRAP",
        message="is read with TRANSFORMER_BASED_WRAP only",
    ),
    Rule(
        key=f"{_F}min_num_params", effect="ignored", matters=False, mend=REMOVE,
        when=lambda value, file: file.fsdp("auto_wrap_policy") != "SIZE_BASED_WRAP",
        message="is read with SIZE_BASED_WRAP only",
    ),
)  # fmt: skip


def _beside_a_json(file: Any) -> list[str]:
    section = file.get("deepspeed_config", {})
    beside = sorted(NOT_BESIDE_A_JSON & set(section if isinstance(section, dict) else ()))
    return beside + (["mixed_precision"] if file.get("mixed_precision", None) is not None else [])


def findings(name: str, content: dict[str, Any]) -> list[Finding]:
    """What accelerate's launcher does with each key of an accelerate file."""
    file = AccelerateFile(_with_prefixes(content))

    def unknown(key: str, value: Any) -> Finding | None:
        if key in SECTIONS and not isinstance(value, dict) and value is not None:
            return Finding(
                file=name, key=key, value=value, effect="crashes", matters=True, mend=REMOVE,
                message="is no section", remedy="write keys under it, or remove it",
            )  # fmt: skip
        section, _, inner = key.partition(".")
        if not inner:
            if key in ACCELERATE | CONVERTED:
                return None
            return misspelt(
                name, key, value, ACCELERATE, effect="crashes", error="unknown keys",
                message="accelerate refuses a file with an unknown key at its top",
            )  # fmt: skip
        known = SECTIONS.get(section)
        if known is None or inner in known or value is None:
            return None
        message = f"accelerate reads no such key of {section}, and says nothing"
        return misspelt(name, key, value, known, effect="ignored", message=message)

    return [f for f in examine(name, file, TOP + DEEPSPEED + FSDP, unknown) if f.value is not None or f.matters]


def _with_prefixes(content: dict[str, Any]) -> dict[str, Any]:
    """The file with the prefixes that the launcher itself adds to keys of two sections."""
    changed = dict(content)
    for section, prefix in PREFIXES.items():
        if isinstance(inner := content.get(section), dict):
            changed[section] = {k if k.startswith(prefix) else prefix + k: v for k, v in inner.items()}
    return changed
