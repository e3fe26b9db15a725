"""What do accelerate and DeepSpeed do with each key of a DeepSpeed JSON?

As accelerate 1.15.0 (utils/dataclasses.py, DeepSpeedPlugin; accelerator.py, _prepare_deepspeed) and DeepSpeed 0.19.8
(runtime/config.py; zero/config.py; precision_config.py; engine.py, _configure_basic_optimizer) do it, in a program that
calls `prepare`. Where Hugging Face's Trainer does otherwise (integrations/deepspeed.py), the finding says so.
"""

from __future__ import annotations

from typing import Any

from study.engines.doctor.findings import ABSENT, REMOVE, Condition, Finding, Instead, Rule, Settings, examine, misspelt
from study.engines.doctor.known import (
    DEEPSPEED_SECTIONS,
    DEEPSPEED_VALUES,
    FILLED,
    FILLED_BY_TRAINER,
    NOT_EXAMINED,
    OPTIMIZERS,
    REMOVED,
    REMOVED_ZERO,
    SCHEDULERS,
    TORCH_OPTIMIZERS,
)

_Z = "zero_optimization."
STAGES = (0, 1, 2, 3)
LARGE_BUCKET = 100_000_000  # elements


class DeepSpeedFile(Settings):
    """A DeepSpeed JSON, with what decides what its keys do."""

    @property
    def stage(self) -> int:
        """The ZeRO stage, also where it is written as text; "auto" is 2, silence is 0."""
        written = self.get(f"{_Z}stage", 0)
        return 2 if written == "auto" else next((stage for stage in STAGES if written in (stage, str(stage))), 0)

    def device(self, what: str) -> str:
        """Where the optimizer's states or the parameters are kept: none, cpu or nvme."""
        written = self.get(f"{_Z}offload_{what}.device", "none")
        return written if written in ("cpu", "nvme") else "none"

    @property
    def has_zero(self) -> bool:
        """Whether the section of ZeRO is there."""
        return isinstance(self.get("zero_optimization"), dict)

    @property
    def precision(self) -> str:
        """The 16 bits that the file itself asks for; an empty text where it asks for none, or leaves it open."""
        return next((name for name in ("bf16", "fp16") if self.get(f"{name}.enabled") is True), "")

    @property
    def optimizer(self) -> str:
        return str(self.get("optimizer.type", ""))

    @property
    def is_fused(self) -> bool:
        """Whether the optimizer is DeepSpeed's FusedAdam unless torch's is asked for."""
        offloads = self.device("optimizer") != "none" or bool(self.get(f"{_Z}cpu_offload", False))
        return not offloads and self.optimizer.lower() in ("adam", "adamw")


def _stage_is(*stages: int) -> Condition:
    return lambda value, file: file.stage in stages


def _is_written(text: str) -> Condition:
    return lambda value, file: value == text


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_off(precision: str) -> Condition:
    """Whether the file leaves a precision out, for the other keys of its section."""
    return lambda value, file: file.get(f"{precision}.enabled", False) is False and value != "auto"


def _device_is(what: str, device: str) -> Condition:
    """Whether this is where something is offloaded to, for the other keys of its section."""
    return lambda value, file: file.device(what) == device and value not in ("none", "auto")


TOP = (
    *(
        Rule(
            key=key, effect="crashes", whole=True, mend=REMOVE, error="has been removed",
            message="was removed from DeepSpeed, which stops", remedy="remove it",
        )
        for key in [*sorted(REMOVED), *(f"{_Z}{name}" for name in sorted(REMOVED_ZERO))]
    ),
    *(Rule(key=key, effect="not examined", whole=True) for key in sorted(NOT_EXAMINED)),
    Rule(
        key="zero_optimization", of_absent=True, effect="crashes", error="Please specify the ZeRO optimization config",
        message="accelerate refuses a JSON without it (deepspeed.initialize alone takes stage 0)",
        remedy='write "zero_optimization": {"stage": 1}, or the stage that is wanted', mend={"stage": 1},
    ),
    Rule(
        key="zero_optimization", effect="crashes", when=lambda value, file: not isinstance(value, dict),
        message="accelerate wants a section here", remedy='write {"stage": 1}', mend={"stage": 1},
    ),
    Rule(
        key="train_micro_batch_size_per_gpu", of_absent=True, effect="crashes", mend="auto",
        when=lambda value, file: file.get("train_batch_size") is ABSENT,
        error="Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
        message="DeepSpeed wants one of the two batch sizes", remedy='write "auto": the DataLoader\'s is taken',
    ),
    Rule(
        key="train_micro_batch_size_per_gpu", of_absent=True, effect="crashes", mend="auto",
        when=lambda value, file: file.get("train_batch_size") == "auto",
        error="not found in kwargs", message='without it accelerate cannot fill "auto" into train_batch_size',
        remedy='write "auto": the DataLoader\'s is taken',
    ),
    Rule(
        key="train_batch_size", effect="means something else", mend="auto",
        when=lambda value, file: _is_number(value) and file.get("train_micro_batch_size_per_gpu") is ABSENT,
        message="DeepSpeed divides it by the processes, and by the accumulation, for a micro batch of its own: it "
        "stops where that is 0, and the DataLoader's may be another",
        remedy='write "auto", and "train_micro_batch_size_per_gpu": "auto"', error="has to be greater than 0",
    ),
    Rule(
        key="train_batch_size", effect="means something else", mend="auto", error="train_batch_size is not equal",
        when=lambda value, file: _is_number(value),
        message="DeepSpeed stops unless it is the micro batch x accumulation x processes of this very run",
        remedy='write "auto"',
    ),
    Rule(
        key="train_micro_batch_size_per_gpu", effect="means something else", mend="auto", matters=False,
        when=lambda value, file: _is_number(value),
        message="DeepSpeed counts with it; what is trained is the DataLoader's batch (Trainer stops where they differ)",
        remedy='write "auto"',
    ),
    Rule(
        key="gradient_accumulation_steps", of_absent=True, effect="means something else", engine_has=1, mend="auto",
        message="without it accelerate takes 1, whatever the program says", remedy='write "auto"',
    ),
    Rule(
        key="gradient_accumulation_steps", effect="overridden",
        when=lambda value, file: _is_number(value) and isinstance(file.get(f"{_Z}zenflow"), dict),
        message="ZenFlow takes its update_interval instead", remedy="write update_interval",
    ),
    Rule(
        key="gradient_accumulation_steps", effect="honoured", when=lambda value, file: _is_number(value),
        message="it beats what the program says, with a warning (Trainer stops where they differ)",
    ),
    Rule(
        key="gradient_clipping", of_absent=True, effect="means something else", engine_has=1.0, mend=1.0,
        message="without it DeepSpeed clips at 1.0 since 0.19.3", remedy="write 1.0, or 0.0 for no clipping",
    ),
    Rule(
        key="gradient_clipping", effect="means something else", engine_has=1.0, mend=1.0,
        when=lambda value, file: value == "auto",
        message="accelerate fills in 1.0; what the program gives clip_grad_norm_ clips nothing (Trainer fills in its "
        "max_grad_norm)", remedy="write the number",
    ),
    Rule(
        key="steps_per_print", effect="overridden", matters=False, engine_has=float("inf"),
        message="accelerate sets infinity: DeepSpeed prints nothing",
    ),
    Rule(
        key="zero_allow_untested_optimizer", effect="overridden", matters=False, engine_has=True,
        when=lambda value, file: value is False and not file.optimizer,
        message="accelerate sets true for an optimizer of the program",
    ),
    Rule(
        key="zero_force_ds_cpu_optimizer", effect="ignored", matters=False,
        when=lambda value, file: file.device("optimizer") == "none" or file.optimizer,
        message="is for an optimizer of the program under offload",
    ),
    Rule(
        key="communication_data_type", effect="crashes", error="Invalid communication_data_type",
        when=lambda value, file: str(value).lower() not in ("fp32", "fp16", "bf16"), mend=REMOVE,
        message="DeepSpeed knows fp32, fp16 and bf16", remedy="write one of them",
    ),
    Rule(
        key="wall_clock_breakdown", effect="honoured", when=lambda value, file: value is True, matters=False,
        message="its timers wait for the GPU at every part of a step",
    ),
    Rule(
        key="comms_logger.enabled", effect="honoured", when=lambda value, file: value is True,
        message="every collective blocks while it is on",
    ),
    Rule(
        key="activation_checkpointing", effect="ignored", whole=True,
        message="only a model that calls deepspeed.checkpointing reads it; those of transformers do not",
        remedy="call model.gradient_checkpointing_enable(), or pass gradient_checkpointing to Trainer", mend=REMOVE,
    ),
    Rule(
        key="aio", effect="ignored", whole=True, matters=False,
        when=lambda value, file: "nvme" not in (file.device("optimizer"), file.device("param")),
        message="nothing is offloaded to NVMe",
    ),
)  # fmt: skip

PRECISION = (
    Rule(
        key="bf16.enabled", effect="crashes", mend=False, error="cannot be simultaneously enabled",
        when=lambda value, file: value is True and file.get("fp16.enabled") is True,
        message="DeepSpeed stops where fp16 is enabled as well", remedy="enable one of them",
    ),
    Rule(
        key="data_types.grad_accum_dtype", of_absent=True, effect="means something else", mend="fp32",
        when=lambda value, file: file.precision and file.stage > 0
        and _is_number(n := file.get("gradient_accumulation_steps")) and n > 1,
        message="without it gradients accumulate in the 16 bits in which is computed", remedy='write "fp32"',
    ),
    *(
        rule
        for name in ("bf16", "fp16")
        for rule in (
            Rule(
                key=f"{name}.enabled", effect="means something else",
                when=lambda value, file: value is True and file.stage == 0 and file.has_zero,
                message="at stage 0 DeepSpeed's wrapper takes an empty Adam step as it is built: the first update is "
                "0.73 of what it should be, and every later one is off by a step",
                remedy='write "stage": 1, or "torch_autocast": {"enabled": true}',
            ),
            Rule(
                key=f"{name}.enabled", effect="honoured", when=lambda value, file: value is True,
                message=f"parameters in {name} with fp32 masters, not autocast; gradients accumulate in {name} unless "
                "data_types.grad_accum_dtype is set; a program that asks for the other 16 bits stops",
            ),
            Rule(
                key=f"{name}.enabled", effect="means something else", matters=False,
                when=lambda value, file: value == "auto", engine_has=False,
                message="is true where the program, --mixed_precision or Trainer's flag asks for it; an accelerate "
                "file that names this JSON cannot ask", remedy="write true or false",
            ),
            Rule(key=f"{name}.enabled", effect="honoured", when=lambda value, file: value is False),
            Rule(key=f"{name}.*", effect="ignored", matters=False, when=_is_off(name), message=f"{name} is off"),
        )
    ),
    Rule(
        key="fp16.fp16_master_weights_and_grads", effect="means something else",
        when=lambda value, file: value is True,
        message="master weights and gradients are kept in fp16, without fp32 masters", remedy="write false", mend=False,
    ),
    Rule(
        key="bfloat16", effect="overridden", whole=True, mend=Instead("bf16"),
        when=lambda value, file: file.get("bf16") is ABSENT,
        message='accelerate adds "bf16": {"enabled": false}, which DeepSpeed reads first: fp32',
        remedy='write "bf16" instead of "bfloat16"', engine_has=False,
    ),
    Rule(
        key="bfloat16", effect="ignored", whole=True, mend=REMOVE, message="DeepSpeed reads bf16 first",
        remedy="remove it",
    ),
)  # fmt: skip

OPTIMIZER = (
    Rule(
        key="optimizer.type", effect="crashes", error="is not a supported DeepSpeed Optimizer", mend="AdamW",
        when=lambda value, file: str(value).lower() not in OPTIMIZERS and str(value) not in TORCH_OPTIMIZERS,
        message="neither DeepSpeed nor torch has such an optimizer", remedy="write AdamW",
    ),
    Rule(
        key="optimizer.type", effect="means something else", engine_has="adam", mend="AdamW",
        when=lambda value, file: str(value).lower() == "adam" and file.get("optimizer.params.adam_w_mode", True),
        message="Adam is AdamW here: its weight decay is decoupled", remedy='write "AdamW", or "adam_w_mode": false',
    ),
    Rule(
        key="optimizer.params.adam_w_mode", effect="overridden", engine_has=True, mend=REMOVE,
        when=lambda value, file: value is False and file.optimizer.lower() == "adamw",
        message="AdamW decouples its weight decay whatever this says", remedy='remove it, or write the type "Adam"',
    ),
    Rule(
        key="optimizer.params.max_grad_norm", effect="crashes", mend=Instead("gradient_clipping"),
        error="'max_grad_norm' is not supported as an optimizer parameter", message="DeepSpeed stops",
        remedy="remove it, and write gradient_clipping at the top",
    ),
    *(
        Rule(
            key=f"optimizer.params.{name}", effect="crashes", when=lambda value, file: value == "auto", mend=mend,
            error="not found in kwargs", message="accelerate's prepare does not fill it and stops; Trainer fills it",
            remedy=f"write {mend}",
        )
        for name, mend in {"betas": [0.9, 0.999], "eps": 1e-8}.items()
    ),
    Rule(
        key="optimizer.params.torch_adam", effect="honoured", when=lambda value, file: value is True,
        message="torch's AdamW instead of DeepSpeed's FusedAdam, which nvcc compiles",
    ),
    Rule(
        key="optimizer.params.torch_adam", of_absent=True, effect="means something else", mend=True,
        when=lambda value, file: file.is_fused and file.get("optimizer.params.bias_correction") is ABSENT,
        message="without it the optimizer is DeepSpeed's FusedAdam, which nvcc compiles in the run, and not torch's",
        remedy="write true",
    ),
    Rule(
        key="optimizer.params.torch_adam", of_absent=True, effect="means something else",
        when=lambda value, file: file.is_fused and file.get("optimizer.params.bias_correction") is not ABSENT,
        message="without it the optimizer is DeepSpeed's FusedAdam, which nvcc compiles in the run, and not torch's, "
        "which has no bias_correction", remedy="write true, and remove bias_correction",
    ),
    Rule(
        key="optimizer.params.bias_correction", effect="crashes", mend=REMOVE,
        when=lambda value, file: file.get("optimizer.params.torch_adam", False) is True,
        error="unexpected keyword argument 'bias_correction'", message="torch's AdamW has none",
        remedy="remove it, or torch_adam",
    ),
    Rule(
        key="optimizer", effect="means something else", matters=False,
        error="You cannot specify an optimizer in the config file and in the code",
        message="a program that gives prepare an optimizer of its own stops: it must give DummyOptim (Trainer does)",
    ),
    Rule(
        key="scheduler.type", effect="crashes", error="does not recognize LR scheduler", mend="WarmupLR",
        when=lambda value, file: str(value) not in SCHEDULERS and not str(value).endswith(("LR", "WarmRestarts")),
        message="neither DeepSpeed nor torch has such a schedule",
        remedy=f"write one of {', '.join(sorted(SCHEDULERS))}",
    ),
    Rule(
        key="scheduler.params.total_num_steps", effect="means something else", when=lambda value, file: value == "auto",
        matters=False, message="accelerate fills in the program's number divided by the processes, but "
        "warmup_num_steps undivided (Trainer fills in its own)", remedy="write the number of optimizer steps",
    ),
    Rule(
        key="scheduler.params.warmup_num_steps", effect="crashes", mend=1, error="must be a positive integer",
        when=lambda value, file: value != "auto" and (not isinstance(value, int) or value < 1),
        message="DeepSpeed wants a whole number of at least 1", remedy="write 1 or more",
    ),
    Rule(
        key="scheduler.params.warmup_type", of_absent=True, effect="means something else", matters=False, mend="linear",
        when=lambda value, file: file.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR"),
        message="without it the warm-up grows as the logarithm of the step, not linearly", remedy='write "linear"',
    ),
    Rule(
        key="scheduler", effect="means something else", matters=False,
        message="a program that gives prepare a scheduler of its own stops: it must give DummyScheduler (Trainer does)",
    ),
)  # fmt: skip

ZERO = (
    Rule(
        key=f"{_Z}stage", of_absent=True, effect="means something else", engine_has=0, mend=2,
        when=lambda value, file: file.has_zero,
        message="without it DeepSpeed takes stage 0: nothing is sharded", remedy="write the stage",
    ),
    Rule(
        key=f"{_Z}stage", effect="means something else", engine_has=2, mend=2, when=lambda value, file: value == "auto",
        message="accelerate fills in 2", remedy="write the stage",
    ),
    *(
        Rule(
            key=f"{_Z}stage", effect="means something else", engine_has=stage, mend=stage, remedy=f"write {stage}",
            when=_is_written(str(stage)),
            message="DeepSpeed reads the number; accelerate and transformers compare the text with numbers, and do "
            "nothing of what they do for the stage (partitioned loading, gathering what is saved)",
        )
        for stage in STAGES
    ),
    Rule(
        key=f"{_Z}stage", effect="crashes", when=lambda value, file: value not in STAGES,
        message="there are stages 0 to 3", remedy="write a number from 0 to 3", error="stage",
    ),
    Rule(
        key=f"{_Z}cpu_offload", effect="crashes", error="ZeRO-Offload with a client provided optimizer",
        when=lambda value, file: value is True and not file.optimizer,
        message="is the old name of offload_optimizer, which accelerate does not know: it leaves the program's "
        "optimizer in its place, and DeepSpeed refuses it", mend=Instead(f"{_Z}offload_optimizer", {"device": "cpu"}),
        remedy='write "offload_optimizer": {"device": "cpu"}',
    ),
    Rule(
        key=f"{_Z}cpu_offload", effect="honoured", when=lambda value, file: value is True,
        message='is deprecated: write "offload_optimizer": {"device": "cpu"}',
    ),
    Rule(
        key=f"{_Z}cpu_offload_use_pin_memory", effect="ignored", mend=REMOVE,
        message="is deprecated, and replaced by nothing", remedy='write "pin_memory" into the offload section',
    ),
    Rule(
        key=f"{_Z}stage3_gather_fp16_weights_on_model_save", effect="honoured",
        message="is deprecated: write stage3_gather_16bit_weights_on_model_save",
    ),
    Rule(
        key=f"{_Z}legacy_stage1", effect="crashes", when=lambda value, file: value is True and file.stage == 1,
        error="deprecated version of ZeRO Stage 1", mend=REMOVE, message="DeepSpeed stops", remedy="remove it",
    ),
    Rule(
        key=f"{_Z}elastic_checkpoint", effect="means something else", mend=REMOVE,
        when=lambda value, file: value is True and file.stage == 3,
        message="stage 3 has none any more: it trains, and DeepSpeed stops as it saves or loads a checkpoint",
        remedy="remove it, and convert with DeepSpeed's ds_to_universal",
    ),
    Rule(
        key=f"{_Z}offload_param", effect="ignored", whole=True, mend=REMOVE,
        when=lambda value, file: file.device("param") != "none" and file.stage != 3,
        message="only stage 3 offloads parameters", remedy='write "stage": 3, or remove it',
    ),
    Rule(
        key=f"{_Z}offload_optimizer", effect="crashes", mend=REMOVE, error="'NoneType' object has no attribute 'get'",
        when=lambda value, file: value is None and not file.optimizer, message="accelerate looks into it",
        remedy="remove it",
    ),
    Rule(
        key=f"{_Z}offload_optimizer", effect="means something else", whole=True, mend=REMOVE,
        when=lambda value, file: file.device("optimizer") != "none" and file.stage == 0,
        message="stage 0 offloads nothing, and takes DeepSpeed's CPU Adam all the same",
        remedy="write a stage of 1 to 3, or remove it",
    ),
    Rule(
        key=f"{_Z}offload_optimizer.device", effect="means something else", matters=False,
        when=lambda value, file: value in ("cpu", "nvme") and not file.optimizer
        and file.get("zero_force_ds_cpu_optimizer", True) is not False,
        message="the program's optimizer is replaced by DeepSpeed's CPU Adam, whatever it is, with its learning rate "
        "and weight decay only", remedy='write "zero_force_ds_cpu_optimizer": false to keep it',
    ),
    *(
        rule
        for what in ("optimizer", "param")
        for rule in (
            Rule(
                key=f"{_Z}offload_{what}.device", effect="crashes", error="Input should be 'none', 'cpu' or 'nvme'",
                when=lambda value, file: value not in ("none", "cpu", "nvme", "auto"), mend="none",
                message="DeepSpeed knows none, cpu and nvme, in small letters", remedy="write one of them",
            ),
            Rule(
                key=f"{_Z}offload_{what}.nvme_path", of_absent=True, effect="crashes",
                when=_device_is(what, "nvme"), error="not NoneType", message="NVMe wants a folder",
                remedy="write a folder of a fast disk that no other run uses",
            ),
            Rule(
                key=f"{_Z}offload_{what}.*", effect="ignored", matters=False,
                when=_device_is(what, "none"), message="nothing is offloaded there",
            ),
            Rule(
                key=f"{_Z}offload_{what}.nvme_path", effect="ignored", matters=False,
                when=_device_is(what, "cpu"),
                message="the device is cpu",
            ),
            Rule(
                key=f"{_Z}offload_{what}.nvme_path", effect="honoured",
                when=_device_is(what, "nvme"),
                message="the folder is emptied at the start: two runs must not share it; tensors below 1 MiB are not "
                "swapped",
            ),
        )
    ),
    Rule(
        key=f"{_Z}offload_param.max_in_cpu", effect="ignored", matters=False,
        when=lambda value, file: file.device("param") == "cpu", message="is for NVMe",
    ),
    Rule(
        key=f"{_Z}offload_optimizer.ratio", effect="crashes",
        error="Partial offloading only supported for ZeRO Stage 3",
        when=lambda value, file: _is_number(value) and value < 1 and file.stage != 3, mend=1.0,
        message="only stage 3 offloads a part", remedy="write 1.0",
    ),
    Rule(
        key=f"{_Z}offload_optimizer.ratio", effect="means something else", mend=1.0,
        when=lambda value, file: _is_number(value) and value < 1,
        message="leaves a part of the states to a second AdamW, whose learning rate stays as it began",
        remedy="write 1.0",
    ),
    Rule(
        key=f"{_Z}*", effect="ignored", matters=False, message="stage 0 shards nothing",
        when=lambda value, file: file.stage == 0 and not isinstance(value, dict) and value != "auto",
    ),
    Rule(
        key=f"{_Z}reduce_bucket_size", effect="crashes", when=lambda value, file: _is_number(value) and value <= 0,
        error="greater than 0", message="DeepSpeed wants a number above 0", remedy='write "auto"', mend="auto",
    ),
    Rule(
        key=f"{_Z}reduce_bucket_size", effect="honoured", when=lambda value, file: _is_number(value)
        and value >= LARGE_BUCKET,
        message="it counts elements, not bytes, and is allocated whole (twice with overlap_comm), whatever the model; "
        '"auto" is the square of the hidden size',
    ),
    Rule(
        key=f"{_Z}reduce_bucket_size", of_absent=True, effect="means something else", matters=False, mend="auto",
        when=lambda value, file: file.stage > 0, engine_has=500_000_000,
        message="without it DeepSpeed takes 5e8 elements, allocated whole, whatever the model", remedy='write "auto"',
    ),
    *(
        Rule(
            key=f"{_Z}{key}", effect="means something else", matters=False, when=lambda value, file: value == "auto",
            message=f"accelerate fills in {rule} of the model's configuration, and stops where it has none",
        )
        for key, rule in {
            "reduce_bucket_size": "the square of hidden_size",
            "stage3_prefetch_bucket_size": "0.9 times the square of hidden_size",
            "stage3_param_persistence_threshold": "10 times hidden_size",
        }.items()
    ),
    Rule(
        key=f"{_Z}allgather_bucket_size", effect="ignored", matters=False,
        when=lambda value, file: _is_number(value), message="today's torch gathers into one buffer",
    ),
    Rule(
        key=f"{_Z}stage3_gather_16bit_weights_on_model_save", effect="means something else", engine_has=False,
        mend=True,
        when=lambda value, file: value == "auto" and file.stage == 3,
        message="accelerate fills in false unless zero3_save_16bit_model is set: save_16bit_model then writes no file",
        remedy="write true",
    ),
    *(
        Rule(
            key=f"{_Z}{key}", effect="ignored", matters=False, message="is for stage 3",
            when=lambda value, file: file.stage < 3 and value != "auto",
        )
        for key in ("stage3_*", "sub_group_size", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size",
                    "param_persistence_threshold", "gather_16bit_weights_on_model_save", "zero_hpz_partition_size",
                    "zero_quantized_weights", "memory_efficient_linear")
    ),
    *(
        Rule(key=f"{_Z}{key}", effect="ignored", matters=False, message="is for stages 1 and 2", when=_stage_is(3))
        for key in ("round_robin_gradients", "allgather_partitions", "use_multi_rank_bucket_allreduce")
    ),
    Rule(
        key=f"{_Z}zero_quantized_*", effect="means something else", when=lambda value, file: value is True,
        message="needs DeepSpeed's CUDA quantizer, and changes what is trained", remedy="write false", mend=False,
    ),
    Rule(key=f"{_Z}zenflow", effect="not examined", whole=True),
)  # fmt: skip


def findings(name: str, content: dict[str, Any]) -> list[Finding]:
    """What accelerate and DeepSpeed do with each key of a DeepSpeed JSON."""
    file = DeepSpeedFile(content)

    def unknown(key: str, value: Any) -> Finding | None:
        if key in DEEPSPEED_SECTIONS and not isinstance(value, dict) and value is not None:
            return Finding(
                file=name, key=key, value=value, effect="crashes", matters=True, mend=REMOVE,
                message="is no section", remedy='write {"...": ...}, or remove it',
            )  # fmt: skip
        if value == "auto" and key in FILLED:
            return Finding(
                file=name, key=key, value=value, effect="honoured", engine_has=value,
                message="the program's is filled in, by accelerate or by Trainer",
            )  # fmt: skip
        if value == "auto" and key not in FILLED_BY_TRAINER:
            return Finding(
                file=name, key=key, value=value, effect="crashes", matters=True, error="not found in kwargs",
                message="nothing fills it in, neither accelerate nor Trainer", remedy="write a value, or remove it",
                mend=REMOVE,
            )  # fmt: skip
        section, _, inner = key.rpartition(".")
        known = DEEPSPEED_SECTIONS.get(section)
        names = known.keys if known else DEEPSPEED_VALUES | set(DEEPSPEED_SECTIONS) if not section else frozenset()
        if not names or inner in names:
            return None
        stops = known is not None and known.is_strict
        return misspelt(
            name, key, value, names, effect="crashes" if stops else "ignored",
            message=f"DeepSpeed refuses an unknown key of {section}" if stops else "DeepSpeed reads no such key, and "
            "says nothing", error="Extra inputs are not permitted" if stops else "",
        )  # fmt: skip

    return examine(name, file, TOP + PRECISION + OPTIMIZER + ZERO, unknown)
