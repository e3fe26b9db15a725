"""Recognize for which tool a configuration file is, by the names of its keys.

A key means different things to different tools. A file is therefore judged by the rules of its own tool only. It is not
judged if no tool is recognized.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from ..engines.keys import known_keys

Kind = Literal[
    "accelerate", "ddp", "deepspeed", "fsdp_config", "training_arguments", "trl", "axolotl", "llamafactory", "ms_swift",
    "torchtitan", "job",
]  # fmt: skip
OF_TRAINERS: frozenset[Kind] = frozenset({"training_arguments", "trl", "llamafactory", "ms_swift"})

TITLES: dict[Kind, str] = {
    "accelerate": "accelerate",
    "ddp": "options of DDP",
    "deepspeed": "DeepSpeed",
    "fsdp_config": "fsdp_config of a Trainer",
    "training_arguments": "TrainingArguments",
    "trl": "TRL",
    "axolotl": "axolotl",
    "llamafactory": "LLaMA-Factory",
    "ms_swift": "ms-swift",
    "torchtitan": "torchtitan",
    "job": "a job file",
}
ALL_TITLES = (
    "accelerate, DeepSpeed, Trainer (fsdp_config and TrainingArguments), TRL, axolotl, LLaMA-Factory, ms-swift, "
    "torchtitan, and jobs (shell, Slurm, SkyPilot and TrainJob)"
)

# A JSON that accompanies the accelerate file of DDP may have these keys and values. They have the same names as in
# DistributedDataParallelKwargs and in theory's Engine.
OF_DDP: dict[str, tuple[Any, ...]] = {"gradient_as_bucket_view": (False, True)}

# The keys of Trainer's fsdp_config, without the prefix fsdp_ that they may have. `training_args.py` of transformers
# reads these.
FSDP_KEYS = frozenset({
    "version", "reshard_after_forward", "cpu_offload", "activation_checkpointing", "cpu_ram_efficient_loading",
    "state_dict_type", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "xla", "xla_fsdp_v2",
    "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "forward_prefetch", "backward_prefetch", "use_orig_params",
    "sync_module_states", "limit_all_gathers",
})  # fmt: skip
# Keys that accelerate, axolotl or older releases read in such a section, and that Trainer ignores.
FSDP_KEYS_OF_OTHERS = frozenset({
    "offload_params", "sharding_strategy", "cpu_offload_pin_memory", "final_state_dict_type", "mixed_precision_policy",
    "activation_checkpointing_offload", "ignored_modules",
})  # fmt: skip

# The fields of transformers' TrainingArguments, and names that releases before 5 had.
ARGUMENTS = frozenset({
    "output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "optim_target_modules", "gradient_accumulation_steps", "average_tokens_across_devices",
    "max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32",
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode",
    "use_liger_kernel", "liger_kernel_config", "use_cache", "neftune_noise_alpha", "torch_empty_cache_steps",
    "auto_find_batch_size", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node",
    "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm",
    "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only", "eval_on_start",
    "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
    "batch_eval_metrics", "save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit",
    "enable_jit_checkpoint", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
    "hub_always_push", "hub_revision", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "ignore_data_skip", "restore_callback_states_from_checkpoint", "full_determinism", "seed", "data_seed", "use_cpu",
    "accelerator_config", "parallelism_config", "dataloader_drop_last", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns", "label_names",
    "train_sampling_strategy", "length_column_name", "ddp_find_unused_parameters", "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout", "fsdp", "fsdp_config", "deepspeed",
    "debug", "skip_memory_metrics", "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank",
    "warmup_ratio", "evaluation_strategy", "overwrite_output_dir", "logging_dir", "save_safetensors",
    "group_by_length", "no_cuda", "fp16_opt_level", "half_precision_backend", "dataset_num_proc", "adafactor",
    "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", "torchdynamo", "ray_scope", "past_index",
})  # fmt: skip
# Each of these names occurs in hardly any other configuration file.
OF_TRAINER_ONLY = frozenset({
    "per_device_train_batch_size", "num_train_epochs", "fsdp_config", "lr_scheduler_type", "gradient_checkpointing",
    "adam_epsilon", "eval_strategy", "evaluation_strategy", "save_total_limit", "accelerator_config",
})  # fmt: skip
OF_TRL = frozenset({
    "dataset_name", "dataset_mixture", "dataset_mixer", "use_peft", "dataset_text_field", "max_prompt_length",
    "num_generations", "assistant_only_loss", "dataset_train_split", "dataset_test_split", "loss_type",
    "use_vllm", "vllm_mode", "reward_funcs", "reward_model_path", "max_completion_length", "dataset_splits",
    "lora_target_modules", "ref_model_name_or_path", "packing_strategy", "eos_token", "beta",
    "reward_model_name_or_path",
})  # fmt: skip
OF_EXAMPLE_SCRIPTS = frozenset({"dataset_config_name", "block_size", "train_file", "validation_file", "task_name"})
OF_AXOLOTL = frozenset({
    "datasets", "pretraining_dataset", "adapter", "micro_batch_size", "sequence_len", "rl", "num_epochs",
    "sample_packing", "test_datasets", "val_set_size", "dataset_prepared_path",
})  # fmt: skip
OF_LLAMAFACTORY = frozenset({"model_name_or_path", "dataset", "template", "cutoff_len", "adapter_name_or_path"})
STAGES_OF_LLAMAFACTORY = ("pt", "sft", "rm", "ppo", "dpo", "kto")
OF_MS_SWIFT = frozenset({
    "torch_dtype", "split_dataset_ratio", "lora_rank", "attn_impl", "model_type", "max_length", "model_author",
    "loss_scale", "padding_free", "target_modules", "truncation_strategy",
})  # fmt: skip
OF_TORCHTITAN = frozenset({
    "job", "model", "training", "parallelism", "optimizer", "lr_scheduler", "checkpoint", "activation_checkpoint",
    "metrics", "profiling", "comm", "compile", "experimental", "float8", "mx", "quantize", "validation",
    "memory_estimation", "fault_tolerance", "debug",
})  # fmt: skip

CLOSE = 0.8  # similarity from which a name counts as a misspelt name


def kind_of(content: Mapping[str, Any], is_toml: bool = False) -> Kind | None:
    """Return the kind of a configuration file with this content. None if doctor does not know its kind."""
    names = {str(name) for name in content if not str(name).startswith("_")}
    if is_toml:
        return "torchtitan" if _is_torchtitan(content, names) else None
    if names and names <= OF_DDP.keys():
        return "ddp"
    if "distributed_type" in names or "compute_environment" in names:
        return "accelerate"
    tool = _tool_of(content, names)
    if tool is not None:
        return tool
    if "zero_optimization" in names:
        return "deepspeed"
    if _is_fsdp_section(names):
        return "fsdp_config"
    if _has_arguments(names):
        return "training_arguments"
    return _engine_of(content, names)


def without_prefix(name: str) -> str:
    """Return the name that Trainer uses for a key of an FSDP section: without the prefix fsdp_."""
    return name.removeprefix("fsdp_")


def near(name: str, known: Iterable[str]) -> str | None:
    """Return the known name of which a name is probably a misspelling. None if there is none."""
    matches = difflib.get_close_matches(name[:100], sorted(known), n=1, cutoff=CLOSE)
    return matches[0] if matches else None


def _tool_of(content: Mapping[str, Any], names: set[str]) -> Kind | None:
    """Return the tool that reads the file: axolotl, LLaMA-Factory, ms-swift or TRL. None if it is none of them."""
    if "base_model" in names and names & OF_AXOLOTL:
        return "axolotl"
    if _is_llamafactory(content, names):
        return "llamafactory"
    if _is_ms_swift(content, names):
        return "ms_swift"
    is_of_example_script = bool(names & OF_EXAMPLE_SCRIPTS)
    if names & OF_TRL and ("model_name_or_path" in names or _has_arguments(names)) and not is_of_example_script:
        return "trl"
    return None


def _is_llamafactory(content: Mapping[str, Any], names: set[str]) -> bool:
    if "finetuning_type" in names or {"cutoff_len", "template"} <= names:
        return True
    is_stage = content.get("stage") in STAGES_OF_LLAMAFACTORY and bool(names & OF_LLAMAFACTORY)
    is_second_version = isinstance(content.get("dist_config"), dict) and "model" in names
    return is_stage or is_second_version or ({"model_name_or_path", "template", "export_dir"} <= names)


def _is_ms_swift(content: Mapping[str, Any], names: set[str]) -> bool:
    if "model_name_or_path" in names or isinstance(content.get("model"), dict):
        return False
    is_tuning = bool(names & {"tuner_type", "train_type", "rlhf_type"}) and bool(names & {"model", "dataset"})
    return is_tuning or ({"model", "dataset"} <= names and bool(names & OF_MS_SWIFT) and bool(names & ARGUMENTS))


def _is_torchtitan(content: Mapping[str, Any], names: set[str]) -> bool:
    sections = {name for name in names & OF_TORCHTITAN if isinstance(content[name], dict)}
    return "tool" not in names and len(sections) > 1 and bool(sections & {"job", "training", "parallelism"})


def _is_fsdp_section(names: Collection[str]) -> bool:
    of_fsdp = {name for name in names if without_prefix(name) in FSDP_KEYS | FSDP_KEYS_OF_OTHERS}
    shared = {"version", "activation_checkpointing", "xla", "fsdp_config"}  # other files have these too
    return bool(of_fsdp - shared) and 2 * len(of_fsdp) >= len(names)


def _has_arguments(names: set[str]) -> bool:
    """Return whether most keys of a file are TrainingArguments, or several that only these have."""
    arguments = names & ARGUMENTS
    if not arguments & (OF_TRAINER_ONLY | {"deepspeed", "fsdp", "output_dir"}):
        return False
    is_most = 2 * len(arguments) >= len(names) and (
        len(arguments) > 1 or bool(arguments & {"fsdp_config", "deepspeed"})
    )
    return is_most or (len(arguments) > 3 and len(arguments & OF_TRAINER_ONLY) > 1)


def _engine_of(content: Mapping[str, Any], names: set[str]) -> Kind | None:
    """Return the engine whose keys, possibly misspelt, are at least half of the keys of a file."""
    key_names = known_keys.read()["named"]
    fields = {*known_keys.engine_schema("accelerate", "fields"), *key_names["converted"], "distributed_type"}
    top = {*key_names["top"], *(key for key in known_keys.json_sections() if "." not in key), "zero_optimization"}
    top |= {*known_keys.engine_list("removed"), "activation_checkpointing", "bfloat16"}
    shares = {"accelerate": _number_known(names, fields), "deepspeed": _number_known(names, top)}
    kind: Kind = "accelerate" if shares["accelerate"] > shares["deepspeed"] else "deepspeed"
    if kind == "deepspeed" and not any(_is_of_deepspeed(name, content[name]) for name in names if name in content):
        return None
    if kind == "accelerate" and not _is_of_launcher(names):
        return None
    return kind if names and 2 * shares[kind] >= len(names) else None


def _is_of_deepspeed(name: str, value: Any) -> bool:
    """Return whether hardly any file but DeepSpeed's has a key with this name and a value of this type."""
    if name in ("optimizer", "scheduler"):
        return isinstance(value, dict) and "params" in value
    if name in ("bf16", "fp16", "activation_checkpointing"):
        return isinstance(value, dict)
    names = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping")
    further = ("steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "communication_data_type")
    return near(name, (*names, *further)) is not None


def _is_of_launcher(names: set[str]) -> bool:
    needed = (
        "distributed_type",
        "compute_environment",
        "num_processes",
        "num_machines",
        "deepspeed_config",
        "mixed_precision",
    )
    return any(near(name, needed) for name in names)


def _number_known(names: Iterable[str], vocabulary: Collection[str]) -> int:
    return sum(name in vocabulary or near(name, vocabulary) is not None for name in names)
