"""Which keys do accelerate 1.15.0 and DeepSpeed 0.19.8 know? Held against the installed ones by a test."""

from __future__ import annotations

from typing import NamedTuple


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# An accelerate file: the fields of commands/config/config_args.py, ClusterConfig, and two that it converts.
ACCELERATE = _words(
    """command_file commands compute_environment debug deepspeed_config distributed_type downcast_bf16 dynamo_config
    enable_cpu_affinity fp8_config fsdp_config gpu_ids machine_rank main_process_ip main_process_port
    main_training_function megatron_lm_config mixed_precision mpirun_config num_machines num_processes
    parallelism_config rdzv_backend same_network tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone
    use_cpu"""
)
CONVERTED = _words("fp16 dynamo_backend")
DISTRIBUTED_TYPES = _words(
    """NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU MULTI_HPU MULTI_NEURON DEEPSPEED FSDP
    XLA MEGATRON_LM"""
)

# Its sections: the flags of `accelerate launch` that a key of the section becomes.
DEEPSPEED_SECTION = _words(
    """deepspeed_config_file zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path
    offload_param_nvme_path gradient_accumulation_steps gradient_clipping zero3_init_flag zero3_save_16bit_model
    deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher
    deepspeed_moe_layer_cls_names"""
)
FSDP_SECTION = _words(
    """fsdp_version fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy fsdp_reshard_after_forward
    fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch fsdp_state_dict_type
    fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading fsdp_sync_module_states
    fsdp_activation_checkpointing fsdp_activation_checkpointing_offload"""
)
FSDP_UNFLAGGED = _words("fsdp_ignored_modules")  # read by the launcher, though it is no flag
DYNAMO_SECTION = _words(
    "dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation"
)
PARALLELISM_SECTION = _words(
    """parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_tp_size
    parallelism_config_cp_size parallelism_config_cp_backend parallelism_config_cp_comm_strategy
    parallelism_config_sp_size parallelism_config_sp_backend parallelism_config_sp_seq_length
    parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation"""
)
# What a DeepSpeed JSON leaves no room for (utils/dataclasses.py, DeepSpeedPlugin._deepspeed_config_checks).
NOT_BESIDE_A_JSON = _words(
    """gradient_accumulation_steps gradient_clipping zero_stage offload_optimizer_device offload_param_device
    offload_param_nvme_path offload_optimizer_nvme_path zero3_save_16bit_model mixed_precision"""
)


class Section(NamedTuple):
    """The keys of a section of a DeepSpeed JSON."""

    keys: frozenset[str]
    is_strict: bool  # an unknown key stops DeepSpeed; else it is ignored


OFFLOAD_OPTIMIZER = _words(
    """buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio
    super_offload"""
)
OFFLOAD_PARAM = _words("buffer_count buffer_size device max_in_cpu nvme_path pin_memory")
# stage3_x is the name in a JSON of the field x; both are taken.
STAGE_3_ALIASES = _words(
    """prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params
    allgather_sequential"""
)
ZERO = (
    _words(
        """stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
        elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param
        cpu_offload_use_pin_memory cpu_offload stage3_gather_fp16_weights_on_model_save ignore_unused_parameters
        legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights
        zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
        pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
        save_muon_momentum_buffer_in_memory leaf_module"""
    )
    | STAGE_3_ALIASES
    | {f"stage3_{name}" for name in STAGE_3_ALIASES}
)
REMOVED = _words(
    """nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention elasticity
    graph_harvesting curriculum_learning progressive_layer_drop"""
)
REMOVED_ZERO = _words("mics_shard_size mics_hierarchical_params_gather zeropp_loco_param")

# The top of a DeepSpeed JSON: constants of runtime/constants.py and of the sections' own modules.
DEEPSPEED_VALUES = _words(
    """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print gradient_clipping communication_data_type
    seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op
    disable_allgather dump_state disable_python_gc vocabulary_size wall_clock_breakdown memory_breakdown
    dataloader_drop_last use_data_before_expert_parallelism log_level sequence_parallel_size"""
)
DEEPSPEED_SECTIONS = {
    "zero_optimization": Section(ZERO, True),
    "zero_optimization.offload_optimizer": Section(OFFLOAD_OPTIMIZER, True),
    "zero_optimization.offload_param": Section(OFFLOAD_PARAM, True),
    "zero_optimization.leaf_module": Section(_words("classes names name_suffixes"), True),
    "fp16": Section(
        _words(
            """auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power
            loss_scale loss_scale_window min_loss_scale"""
        ),
        True,
    ),
    "bf16": Section(
        _words("bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update"),
        True,
    ),
    "bfloat16": Section(_words("enabled immediate_grad_update check_grad_overflow"), True),
    "compile": Section(
        _words(
            """autoep_non_moe debug_log deepcompile double_buffer free_activation free_activation_threshold
            keep_all_input_tensors keep_int_input_tensors offload_activation offload_activation_pin_memory
            offload_opt_states offload_parameters passes symmetric_memory sync_after_allgather sync_after_reduce
            sync_before_allgather sync_before_reduce"""
        ),
        True,
    ),
    "comms_logger": Section(_words("debug enabled prof_all prof_ops verbose"), True),
    "tensorboard": Section(_words("enabled job_name output_path"), True),
    "csv_monitor": Section(_words("enabled job_name output_path"), True),
    "wandb": Section(_words("enabled group project team"), True),
    "comet": Section(
        _words("api_key enabled experiment_key experiment_name mode online project samples_log_interval workspace"),
        True,
    ),
    "optimizer": Section(_words("type params legacy_fusion"), False),
    "scheduler": Section(_words("type params"), False),
    "aio": Section(_words("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds"), False),
    "data_types": Section(_words("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"), False),
    "torch_autocast": Section(_words("enabled dtype lower_precision_safe_modules"), False),
    "activation_checkpointing": Section(
        _words(
            """partition_activations number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary
            profile cpu_checkpointing"""
        ),
        False,
    ),
    "flops_profiler": Section(
        _words("enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"), False
    ),
}
# Sections of DeepSpeed in which nothing is looked at.
NOT_EXAMINED = _words(
    """autotuning checkpoint data_efficiency hybrid_engine pipeline tensor_parallel expert_parallel
    weight_quantization timers datastates_ckpt"""
)
OPTIMIZERS = _words("adagrad adam adamw lamb muadam muadamw musgd lion muon")  # or a class of torch.optim
TORCH_OPTIMIZERS = _words(
    "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam"
)
SCHEDULERS = _words("LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR")  # or one of torch

# What accelerate's `prepare` puts in the place of "auto" (accelerator.py, _prepare_deepspeed); any other stops it.
FILLED = _words(
    """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping fp16.enabled
    bf16.enabled optimizer.params.lr optimizer.params.weight_decay scheduler.params.warmup_min_lr
    scheduler.params.warmup_max_lr scheduler.params.warmup_num_steps scheduler.params.total_num_steps
    zero_optimization.stage zero_optimization.offload_optimizer.device zero_optimization.offload_param.device
    zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_param.nvme_path
    zero_optimization.reduce_bucket_size zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_gather_16bit_weights_on_model_save"""
)
FILLED_BY_TRAINER = _words("optimizer.params.betas optimizer.params.eps")
