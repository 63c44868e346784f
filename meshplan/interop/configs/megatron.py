"""Megatron-LM's flags, in a shell script or an argument file, and Megatron-Bridge's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshplan.errors import Problem
from meshplan.interop.configs.flags import parse_flags
from meshplan.interop.configs.importing import ConfigTool, parse_any
from meshplan.interop.configs.statements import Draft, Facts, StatedFact, mixed
from meshplan.interop.configs.table import (
    ABSENT,
    ConfigKey,
    ConfigTable,
    Refusal,
    flag,
    positive,
    refuse,
    say,
    skip,
    whole,
    words,
)
from meshplan.spec.values import PlanValue

_OWN: Final = "the training program decides it, not the parallelism"
_MODEL: Final = "the model is the program's: name its config or its function under model"
_TUNED: Final = "it changes how kernels and collectives run, not what they compute"
SECTIONS: Final = ("model", "train", "optimizer", "ddp", "dist", "rng", "comm_overlap",
                   "mixed_precision", "scheduler", "dataset", "logger", "tokenizer", "checkpoint",
                   "validation", "profiling", "ft", "straggler", "nvrx_straggler",
                   "rerun_state_machine", "peft")  # fmt: skip
"""Sections of Megatron-Bridge's ConfigContainer; a key means the same as the flag of its name."""

ROWS: Final[tuple[ConfigKey, ...]] = (
    # Axes
    say("tensor_model_parallel_size", "mesh.tp", whole()),
    say("pipeline_model_parallel_size", "mesh.pp", whole()),
    say("context_parallel_size", "mesh.cp", whole()),
    say("expert_model_parallel_size", "mesh.ep", whole()),
    say("sequence_parallel", "sequence_parallel", flag()),
    say("num_virtual_stages_per_pipeline_rank", "pipeline.virtual", whole()),
    say("virtual_pipeline_model_parallel_size", "pipeline.virtual", whole(), is_written=False),
    say("num_layers_per_virtual_pipeline_stage", "layers_per_stage", whole(), is_written=False),
    say("num_layers", "num_layers", whole(), "with num_layers_per_virtual_pipeline_stage",
        is_written=False),
    say("cp_comm_type", "context.attention", words({
        "all_gather": "all_gather", "allgather": "all_gather", "a2a": "all_to_all",
        "p2p": "all_gather", "a2a+p2p": Refusal("use a2a or all_gather")}),
        "p2p sends keys and values around a ring; here they are gathered, with the same result"),
    say("expert_tensor_parallel_size", "expert_shards", words(
        {1: 1, "1": 1}, Refusal("experts are not sharded over tp: write 1"))),
    *refuse("experts are not sharded over tp", "moe_extended_tp", harmless=(False,)),
    *refuse("write pipeline.split", "num_layers_in_first_pipeline_stage "
            "num_layers_in_last_pipeline_stage decoder_first_pipeline_num_layers "
            "decoder_last_pipeline_num_layers pipeline_model_parallel_layout "
            "pipeline_model_parallel_split_rank standalone_embedding_stage"),
    *skip("stages are balanced by parameters, embedding and head counted",
          "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"),
    *refuse("write one of all_gather and all_to_all", "hierarchical_context_parallel_sizes "
            "hybrid_context_parallel"),
    *refuse("ranks of tp are adjacent, then those of cp, dp and pp", "use_tp_pp_dp_mapping"),
    # Data parallelism
    say("use_distributed_optimizer", "shards_optimizer", flag(), "zero1"),
    say("data_parallel_sharding_strategy", "sharding", words({
        "no_shard": "ddp", "optim": "zero1", "optim_grads": "zero2",
        "optim_grads_params": "full_shard"}), "of Megatron-FSDP"),
    say("use_megatron_fsdp", "is_fsdp", flag(), "FSDP2 does what Megatron-FSDP does"),
    say("use_custom_fsdp", "is_fsdp", flag(), is_written=False),
    say("use_torch_fsdp2", "is_torch_fsdp", flag(), is_written=False),
    say("torch_fsdp2_no_reshard_after_forward", "keeps_whole", flag(), is_written=False),
    *refuse("write strategy: hybrid_shard with sizes of dp_replicate and dp_shard",
            "num_distributed_optimizer_instances outer_dp_sharding_strategy "
            "enable_full_sharding_in_hsdp", harmless=(1, False, "no_shard")),
    # Batch
    say("micro_batch_size", "batch.micro", whole()),
    say("global_batch_size", "batch.global", whole()),
    say("seq_length", "batch.seq_len", whole()),
    *refuse("state the batch for each phase in a plan of its own, or accumulate by epoch",
            "rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed"),
    # Precision
    say("bf16", "precision", flag(mixed("bfloat16"))),
    say("fp16", "precision", flag(mixed("float16", "float16")),
        "gradients in float16 too without accumulate_allreduce_grads_in_fp32"),
    say("mixed_precision", "precision", words({
        "bf16_mixed": mixed("bfloat16"), "16-mixed": mixed("float16", "float16"),
        "fp16_mixed": mixed("float16", "float16"), "bf16-mixed": mixed("bfloat16")},
        Refusal("no plan trains in fp8 or below yet; use bf16_mixed")), is_written=False),
    say("grad_reduce_in_bf16", "precision.reduce", flag("bfloat16"), "gradients in bfloat16"),
    say("grad_reduce_in_fp32", "precision.reduce", flag("float32", "param"),
        "false reduces in the dtype of the parameters", is_written=False),
    say("accumulate_allreduce_grads_in_fp32", "precision.reduce", flag("float32", "param")),
    *refuse("no plan trains in fp8 or below yet; use bf16", "fp8 fp8_format fp8_param "
            "fp8_param_gather fp8_recipe fp4 fp4_recipe fp4_param fp4_format "
            "fp8_dot_product_attention fp8_multi_head_attention activation_func_fp8_input_store "
            "use_kitchen use_kitchen_attention first_last_layers_bf16 "
            "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"),
    *refuse("optimizer state has the dtype of the master weights", "use_precision_aware_optimizer "
            "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype "
            "megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype",
            harmless=(False, "fp32", "float32", "torch.float32")),
    *skip("the loss scale starts at 2**16 and follows overflows, as torch's GradScaler does",
          "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis "
          "params_dtype pipeline_dtype autocast_dtype enable_autocast grad_scale_func"),
    # Recomputation and offload
    say("recompute_granularity", "activation_checkpointing", words({
        "full": "full", "selective": "selective"}),
        "selective: a plan keeps the products and attention, and recomputes the rest"),
    say("recompute_activations", "activation_checkpointing", flag("selective"), is_written=False),
    say("recompute_method", "recompute_method", words({
        "uniform": ABSENT, "block": Refusal("write rules with activation_checkpointing for the "
                                            "blocks that are recomputed")}),
        "all blocks are recomputed"),
    say("recompute_num_layers", "recompute_layers", words({1: ABSENT, **dict.fromkeys(
        range(2, 129), Refusal("blocks are recomputed one by one: write 1"))}),
        "blocks are recomputed one by one"),
    *refuse("list the operations whose outputs are kept: {mode: selective, save: [mm, sdpa]}",
            "recompute_modules", harmless=(["core_attn"], "core_attn")),
    *refuse("sequence_parallel: true shards activations over tp",
            "distribute_saved_activations"),
    say("optimizer_cpu_offload", "offload.optimizer", flag()),
    *refuse("the optimizer state is offloaded as a whole", "optimizer_offload_fraction",
            harmless=(1, 1.0)),
    *refuse("write offload: {activations: true}, for all blocks or in rules", "cpu_offloading "
            "cpu_offloading_num_layers fine_grained_activation_offloading offload_modules",
            harmless=(False, 0)),
    say("clip_grad", "clip_grad_norm", positive(off=0), default=1.0, none=0.0),
    say("optimizer", "optimizer", words({"adam": "adamw", "sgd": "sgd_momentum", "muon": "muon",
                                         "lion": "lion"},
        Refusal("no plan has a word for the state of this optimizer; use adam")),
        "for the bytes of its state; adam decays weights as AdamW", default="adam"),
    say("calculate_per_token_loss", "loss", flag("tokens")),
    # NeMo: a Trainer of Lightning beside the model's flags
    say("trainer.devices", "hardware.gpus_per_node", whole(), "of NeMo", is_written=False),
    say("trainer.num_nodes", "hardware.nodes", whole(), "of NeMo", is_written=False),
    say("trainer.precision", "precision", words({
        "bf16": mixed("bfloat16"), "bf16-mixed": mixed("bfloat16"), "32": mixed("float32"),
        32: mixed("float32"), "16": mixed("float16", "float16"), 16: mixed("float16", "float16"),
        "16-mixed": mixed("float16", "float16")},
        Refusal("write bf16-mixed, 16-mixed or 32")), is_written=False),
    say("trainer.gradient_clip_val", "clip_grad_norm", positive(off=0), is_written=False),
    *refuse("the microbatches of a step follow from global_batch_size",
            "trainer.accumulate_grad_batches", harmless=(1,)),
    say("activations_checkpoint_granularity", "activation_checkpointing", words({
        "full": "full", "selective": "selective"}), is_written=False),
    say("optim.name", "optimizer", words({
        **dict.fromkeys(("adam", "adamw", "fused_adam", "megatron_fused_adam",
                         "distributed_fused_adam"), "adamw"), "sgd": "sgd_momentum"},
        Refusal("no plan has a word for the state of this optimizer; use adamw")),
        "for the bytes of its state", is_written=False),
    *refuse("blocks are recomputed one by one", "activations_checkpoint_num_layers",
            harmless=(1,)),
    *skip("all blocks are recomputed", "activations_checkpoint_method"),
    *skip(_OWN, "trainer.** exp_manager.** optim.** data.** model.tokenizer.** name "
          "restore_from_path megatron_amp_O2 mcore_gpt"),
    # Experts
    *refuse("no token is dropped: experts.capacity reserves memory only",
            "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_dropping"),
    # torchrun's flags
    say("nproc_per_node", "hardware.gpus_per_node", whole(), "of torchrun"),
    say("nnodes", "hardware.nodes", whole(), "of torchrun"),
    *skip("meshplan launch, or torchrun, starts the ranks", "node_rank master_addr master_port "
          "use_env rdzv_id rdzv_backend rdzv_endpoint rdzv_conf max_restarts tee log_dir m module "
          "distributed_backend distributed_timeout_minutes nccl_communicator_config_path "
          "use_gloo_process_groups enable_gloo_process_groups use_sharp lazy_mpu_init local_rank "
          "use_cpu_initialization init_model_with_meta_device flight_recorder_dump_path "
          "high_priority_stream_groups N n ntasks ntasks_per_node gpus_per_node nodes partition "
          "account job_name time o e output error container_image container_mounts"),
    *skip("FSDP2 and DDP have buckets of their own", "overlap_grad_reduce overlap_param_gather "
          "align_param_gather ddp_num_buckets ddp_bucket_size bucket_size "
          "ddp_average_in_collective average_in_collective ddp_pad_buckets_for_high_nccl_busbw "
          "pad_buckets_for_high_nccl_busbw suggested_communication_unit_size "
          "fsdp_double_buffer nccl_ub keep_fp8_transpose_cache preserve_fp32_weights "
          "gradient_reduce_div_fusion disable_symmetric_registration fsdp_manual_registration "
          "reduce_scatter_with_fp32_accumulation reuse_grad_buf_for_mxfp8_param_ag "
          "overlap_param_gather_with_optimizer_step delay_wgrad_compute "
          "no_gradient_accumulation_fusion gradient_accumulation_fusion megatron_fsdp_version"),
    *skip("gradients are checked once, before the optimizer", "check_for_nan_in_loss_and_grad "
          "check_for_nan_in_grad check_for_large_grads no_check_for_nan_in_loss_and_grad "
          "check_weight_hash_across_dp_replicas_interval rerun_mode"),
    *skip(_TUNED, "tp_comm_overlap tp_comm_overlap_cfg tp_comm_bulk_wgrad tp_comm_bulk_dgrad "
          "tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag "
          "tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_bootstrap_backend "
          "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 overlap_p2p_comm "
          "batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p overlap_p2p_comm_warmup_flush "
          "deallocate_pipeline_outputs defer_embedding_wgrad_compute wgrad_deferral_limit "
          "microbatch_group_size_per_vp_stage async_tensor_model_parallel_allreduce "
          "no_async_tensor_model_parallel_allreduce barrier_with_L1_time timers "
          "overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release "
          "pipeline_model_parallel_comm_backend variable_seq_lengths max_seqlen_per_dp_cp_rank "
          "use_flash_attn attention_backend transformer_impl use_mcore_models use_te_rng_tracker "
          "te_rng_tracker inference_rng_tracker cross_entropy_loss_fusion "
          "cross_entropy_fusion_impl no_bias_gelu_fusion no_bias_swiglu_fusion "
          "no_bias_dropout_fusion no_masked_softmax_fusion no_rope_fusion bias_activation_fusion "
          "bias_dropout_fusion bias_dropout_add_fusion masked_softmax_fusion apply_rope_fusion "
          "persist_layer_norm no_persist_layer_norm memory_efficient_layer_norm moe_grouped_gemm "
          "moe_use_legacy_grouped_gemm moe_token_dispatcher_type moe_enable_deepep "
          "moe_flex_dispatcher_backend moe_permute_fusion moe_router_fusion "
          "moe_shared_expert_overlap moe_deepep_num_sms moe_hybridep_num_sms enable_cuda_graph "
          "cuda_graph_impl cuda_graph_scope cuda_graph_warmup_steps external_cuda_graph "
          "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph "
          "num_microbatches_with_partial_activation_checkpoints deterministic_mode "
          "batch_invariant_mode manual_gc manual_gc_interval manual_gc_eval "
          "use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads "
          "pin_cpu_params no_pin_cpu_grads no_pin_cpu_params store_param_remainders "
          "cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering "
          "min_offloaded_tensor_size clone_scatter_output_in_embedding symmetric_ar_type "
          "disable_parameter_transpose_cache use_te_activation_func quant_recipe "
          "mtp_standalone empty_unused_memory_level disable_bf16_reduced_precision_matmul "
          "use_fused_weighted_squared_relu fused_single_qkv_rope tp_only_amax_red "
          "kitchen_attention_backend flash_decode inference_sampling_seed log_max_attention_logit "
          "use_inference_optimized_layers inference_fuse_tp_communication use_mamba_mem_eff_path "
          "mlp_chunks_for_prefill fp8_margin fp8_interval fp8_amax_history_len "
          "fp8_amax_compute_algo fp8_wgrad"),
    *skip(_MODEL, "hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups "
          "group_query_attention max_position_embeddings position_embedding_type rotary_base "
          "rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor "
          "use_rotary_position_embeddings use_rope_scaling rope_scaling_factor normalization "
          "norm_epsilon layernorm_epsilon layernorm_zero_centered_gamma swiglu squared_relu "
          "gated_linear_unit activation_func hidden_dropout attention_dropout disable_bias_linear "
          "add_bias_linear add_qkv_bias untie_embeddings_and_output_weights "
          "share_embeddings_and_output_weights make_vocab_size_divisible_by vocab_size "
          "padded_vocab_size init_method init_method_std init_method_xavier_uniform "
          "output_layer_init_method embedding_init_method embedding_init_method_std "
          "perform_initialization attention_softmax_in_fp32 apply_query_key_layer_scaling "
          "no_query_key_layer_scaling softmax_scale softmax_type qk_layernorm qk_l2_norm qk_clip "
          "window_size window_attn_skip_freq attention_output_gate multi_latent_attention "
          "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim num_experts "
          "num_moe_experts moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff "
          "moe_z_loss_coeff moe_router_dtype moe_router_score_function "
          "moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_pre_softmax "
          "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk "
          "moe_router_topk_limited_devices moe_router_force_load_balancing moe_input_jitter_eps "
          "moe_token_drop_policy moe_layer_recompute moe_layer_freq moe_ffn_hidden_size "
          "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_per_layer_logging "
          "moe_apply_probs_on_input moe_latent_size moe_enable_routing_replay "
          "moe_router_padding_for_quantization moe_router_padding_for_fp8 mtp_num_layers "
          "mtp_loss_scaling_factor fp32_residual_connection "
          "apply_residual_connection_post_layernorm is_hybrid_model hybrid_override_pattern "
          "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads spec model_type "
          "encoder_num_layers decoder_num_layers encoder_seq_length decoder_seq_length _target_ "
          "no_rope_freq experimental_attention_variant linear_attention_freq "
          "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
          "linear_num_value_heads dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk "
          "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss qk_clip_alpha qk_clip_threshold "
          "activation_func_clamp_value glu_linear_offset mrope_section heterogeneous_block_specs "
          "hetereogenous_dist_checkpoint heterogeneous_layers_config_path test_mode"),
    *skip("meshplan.save writes states that load under any plan", "save load save_interval "
          "ckpt_format dist_ckpt_format use_dist_ckpt async_save fully_parallel_save "
          "ckpt_fully_parallel_save ckpt_fully_parallel_load fully_parallel_load "
          "dist_ckpt_strictness no_save_optim no_save_rng no_load_optim no_load_rng finetune "
          "pretrained_checkpoint ckpt_step non_persistent_save_interval non_persistent_ckpt_type "
          "auto_detect_ckpt_format exit_on_missing_checkpoint save_optim save_rng load_optim "
          "load_rng most_recent_k use_checkpoint_args async_strategy verify_integrity"),
    *skip(_OWN, "train_iters train_samples exit_interval exit_duration_in_mins "
          "exit_signal_handler lr min_lr lr_decay_style lr_decay_iters lr_decay_samples "
          "lr_warmup_iters lr_warmup_samples lr_warmup_fraction lr_warmup_init "
          "lr_wsd_decay_style lr_wsd_decay_iters weight_decay start_weight_decay end_weight_decay "
          "weight_decay_incr_style adam_beta1 adam_beta2 adam_eps sgd_momentum decoupled_lr "
          "decoupled_min_lr use_checkpoint_opt_param_scheduler override_opt_param_scheduler "
          "seed data_parallel_random_init data_path split "
          "data_cache_path train_data_path valid_data_path test_data_path mock_data tokenizer_type "
          "tokenizer_model tokenizer_name_or_path vocab_file merge_file vocab_extra_ids "
          "reset_position_ids reset_attention_mask eod_mask_loss num_workers dataloader_type "
          "num_dataset_builder_threads no_mmap_bin_files blend blend_per_split sequence_length "
          "create_attention_mask_in_dataloader path_to_cache random_seed "
          "no_create_attention_mask_in_dataloader eval_iters eval_interval skip_train "
          "log_interval log_throughput log_params_norm log_num_zeros_in_grad log_progress "
          "log_timers_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard "
          "log_world_size_to_tensorboard log_straggler timing_log_level timing_log_option "
          "tensorboard_dir tensorboard_log_interval tensorboard_queue_size wandb_project "
          "wandb_exp_name wandb_entity wandb_save_dir profile profile_step_start "
          "profile_step_end profile_ranks use_pytorch_profiler record_memory_history "
          "memory_snapshot_path distributed_timeout config_logger_dir decoupled_weight_decay "
          "muon_momentum muon_split_qkv muon_use_nesterov muon_num_ns_steps muon_tp_mode "
          "muon_scale_mode muon_extra_scale_factor muon_fp32_matmul_prec "
          "apply_wd_to_qk_layernorm dataset.** scheduler.** logger.** tokenizer.** checkpoint.** "
          "rng.** validation.** profiling.** ft.** straggler.** nvrx_straggler.** peft.** "
          "rerun_state_machine.** comm_overlap.** dist.**"),
)  # fmt: skip


class _MegatronTable(ConfigTable):
    """The rows by flag; in Megatron-Bridge's YAML the same names stand under sections."""

    def row(self, path: str) -> ConfigKey | None:
        """Return the row of a flag, of a key under a section, or of a whole section."""
        found = super().row(path)
        section, _, key = path.partition(".")
        return super().row(key) if found is None and section in SECTIONS and key else found

    def covers(self, path: str) -> bool:
        """Return True as all tables, but look into sections that have the names of flags."""
        return path not in ("optimizer", "mixed_precision") and super().covers(path)


_STATED: Final = {row.path for row in ROWS if row.verdict == "honoured"}


def parse(text: str, name: str) -> PlanValue:
    """Return the flags of a script, or the sections of a YAML."""
    return (
        parse_any(text, name)
        if name.endswith((".yaml", ".yml"))
        else parse_flags(text, name, _STATED)
    )


_FLAGS: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size",
                 "micro_batch_size", "use_distributed_optimizer")  # fmt: skip


def recognises(root: PlanValue) -> bool:
    """Return True for flags of Megatron-LM, or sections with keys of their names."""
    inside = [each.data for each in root.data.values() if isinstance(each.data, dict)]
    return any(name in data for data in [root.data, *inside] for name in _FLAGS)


def settle(draft: Draft, root: PlanValue) -> None:
    """Find the strategy of the flags, and the virtual stages."""
    draft.moved |= dict.fromkeys(
        ("shards_optimizer", "sharding", "is_fsdp", "is_torch_fsdp", "keeps_whole"), "strategy"
    )
    shards, is_fsdp = draft.facts.get("shards_optimizer"), draft.facts.get("is_fsdp")
    is_torch = draft.facts.get("is_torch_fsdp")
    sharding = draft.facts.get("sharding")
    if is_fsdp and is_torch:
        what = "use_megatron_fsdp and use_torch_fsdp2 both choose a strategy"
        draft.problems.append(Problem(what, is_torch.origin, "remove one of them"))
    if "trainer" in root.data:
        _settle_nemo(draft, root)
        shards = shards or draft.facts.get("shards_optimizer")
    if is_torch:
        word = "zero2" if draft.get("keeps_whole") else "full_shard"
        draft.facts["strategy"] = StatedFact(word, is_torch.sources, is_torch.origin)
    elif is_fsdp:
        draft.facts["strategy"] = sharding or StatedFact("ddp", is_fsdp.sources, is_fsdp.origin)
    elif shards:
        draft.facts["strategy"] = StatedFact("zero1", shards.sources, shards.origin)
    else:
        draft.facts["strategy"] = StatedFact("ddp", ("without use_distributed_optimizer",))
    for name, flag_, counts in (
        ("sharding", "use_megatron_fsdp", is_fsdp), ("keeps_whole", "use_torch_fsdp2", is_torch)
    ):  # fmt: skip
        if not counts:
            draft.moved.pop(name)
            draft.pop(name, f"it decides nothing without {flag_}")
    if draft.get("precision.reduce") == "param":
        param = draft.get("precision", {}).get("param", "float32")
        draft.set("precision.reduce", param)
    for name in ("shards_optimizer", "sharding", "is_fsdp", "is_torch_fsdp", "keeps_whole"):
        draft.pop(name)
    has_whole = draft.pop("expert_shards", "experts are whole on each rank of tp") == 1
    if draft.get("mesh.ep", 1) > 1 and draft.get("mesh.tp", 1) > 1 and not has_whole:
        why = (
            "experts are sharded over tp, too, if expert_tensor_parallel_size is left out, and no "
        )
        draft.refuse("mesh.ep", why + "plan does so: write expert_tensor_parallel_size 1")
    layers, per_stage = draft.get("num_layers"), draft.get("layers_per_stage")
    draft.pop("num_layers", "the model is the program's")
    pp = draft.get("mesh.pp", 1)
    if per_stage is not None and layers is not None and layers % (pp * per_stage) == 0:
        draft.set("pipeline.virtual", layers // (pp * per_stage), after="layers_per_stage")
        draft.moved["layers_per_stage"] = "pipeline.virtual"
    elif per_stage is not None:
        what = "num_layers_per_virtual_pipeline_stage does not divide the layers of a stage"
        origin = draft.origin("layers_per_stage")
        draft.problems.append(Problem(what, origin, "state num_layers, a multiple of both"))
    draft.pop("layers_per_stage")
    if draft.get("pipeline.virtual", 1) > 1:
        draft.set("pipeline.schedule", "Interleaved1F1B", after="pipeline.virtual")
    else:
        draft.pop("pipeline.virtual", "1 is what a plan assumes")


def _settle_nemo(draft: Draft, root: PlanValue) -> None:
    """State what the optimizer's name says, and leave out the defaults of Megatron-LM."""
    clip = draft.facts.get("clip_grad_norm")
    if clip is not None and clip.is_default:
        draft.pop("clip_grad_norm")
    name = draft.facts.get("optimizer")
    if name is not None and any("distributed_fused_adam" in each for each in name.sources):
        draft.facts["shards_optimizer"] = StatedFact(True, name.sources, name.origin)


def unsettle(facts: Facts) -> Mapping[str, str]:
    """State a strategy by Megatron's flags."""
    whys: dict[str, str] = {}
    strategy = facts.get("strategy", "ddp")
    if strategy == "zero1":
        facts["shards_optimizer"] = True
    elif strategy in ("zero2", "full_shard"):
        facts["is_fsdp"], facts["sharding"] = True, strategy
    elif strategy != "ddp":
        whys["strategy"] = "its distributed optimizer has replicas, its FSDP has not"
        facts.pop("strategy")
    precision = facts.get("precision")
    if isinstance(precision, dict) and precision.get("param") in ("bfloat16", "float16"):
        other = {"bfloat16": "bfloat16", "float16": "float32"}[precision["param"]]
        if precision == mixed(precision["param"], other):
            facts["precision.reduce"] = other
            facts["precision"] = mixed(
                precision["param"], "float32" if other == "bfloat16" else "float16"
            )
    elif precision == mixed("float32"):
        facts.pop("precision")
    if facts.get("mesh.ep", 1) > 1 and facts.get("mesh.tp", 1) > 1:
        facts["expert_shards"] = 1
    schedule = facts.pop("pipeline.schedule", "1F1B")
    if schedule != ("Interleaved1F1B" if facts.get("pipeline.virtual", 1) > 1 else "1F1B"):
        whys["pipeline.schedule"] = "it has 1F1B, and Interleaved1F1B with virtual stages"
    return whys


def dump(tree: Any) -> str:
    """Return a tree as a script that starts its ranks; without ranks, as a flag on each line."""
    ranks = [f"--{key.replace('_', '-')} {tree.pop(key)}"
             for key in ("nnodes", "nproc_per_node") if key in tree]  # fmt: skip
    # Flags without which Megatron-LM refuses some of the others.
    if tree.get("recompute_granularity") == "full":
        tree |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    is_fsdp = tree.get("use_megatron_fsdp", False)
    if is_fsdp:
        tree["ckpt_format"] = "fsdp_dtensor"
    flags = [f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}")
             for key, value in tree.items()]  # fmt: skip
    if not ranks:
        return "\n".join(flags) + "\n"
    is_cut = any(f"{name}_parallel_size" in tree for name in ("tensor_model", "context"))
    lines = ["# Add the flags of your model, its data and its training; another program than",
             "# pretrain_gpt.py takes the same flags."]  # fmt: skip
    if is_fsdp:
        lines.append("unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP refuses 1")
    elif is_cut:
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1  # tp and cp need it before Blackwell")
    start = " ".join(["torchrun", *ranks, "pretrain_gpt.py"])
    return "\n".join([*lines, " \\\n    ".join([start, *flags])]) + "\n"


TOOL: Final = ConfigTool(
    name="megatron",
    title="Megatron-LM",
    looked_for="flags such as --tensor-model-parallel-size, or a YAML of Megatron-Bridge",
    table=_MegatronTable(ROWS),
    suffixes=(".sh", ".txt", ".args", ".yaml", ".yml"),
    written=("flags", (".sh", ".txt", ".args")),
    parse=parse,
    recognises=recognises,
    settle=settle,
    always=("",),
    unsettle=unsettle,
    dump=dump,
    implied=("strategy", "pipeline.schedule"),
    assumed={"precision": mixed("float32")},
)
