"""Every setting of Megatron's, classified: carried, without effect, or refused.

Settings are the flags of Megatron's parser (by dest) and the fields of `TransformerConfig` and
`DistributedDataParallelConfig`. tests/test_arguments.py fails when the installed Megatron has one
that is not listed here or in `refusals.py`, and when one that is listed is gone. The entry refuses
a flag that is not listed, so that an upgrade of Megatron brings in no setting that TSP ignores.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

from megatron_tsp.errors import TSPError
from megatron_tsp.refusals import REFUSED

#: TSP honours them; docs/compatibility.md names the tests.
CARRIED = {
    "sizes": """
        num_layers hidden_size num_attention_heads num_query_groups group_query_attention
        ffn_hidden_size kv_channels seq_length max_position_embeddings vocab_size
        padded_vocab_size make_vocab_size_divisible_by pad_vocab_size
    """,
    "batch": """
        micro_batch_size global_batch_size eval_micro_batch_size eval_global_batch_size
        calculate_per_token_loss eod_mask_loss
    """,
    "layers": """
        normalization layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm qk_l2_norm
        add_bias_linear add_qkv_bias swiglu squared_relu quick_geglu gated_linear_unit
        activation_func glu_linear_offset activation_func_clamp_value softmax_scale
        hidden_dropout untie_embeddings_and_output_weights rotary_base rotary_percent
        rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling
        rope_scaling_factor use_rotary_position_embeddings add_position_embedding
    """,
    "attention": """
        attention_dropout attention_backend flash_attention_version window_size
        window_attn_skip_freq softmax_type attention_output_gate no_rope_freq
        reset_attention_mask reset_position_ids dataloader_inter_document_masking sft
        sft_tokenizer_prompt_format mrope_section
        rotary_scaling_factor mscale mscale_all_dim yarn_original_max_position_embeddings
        yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int
    """,
    "multi-latent attention": """
        multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    """,
    "layers that scan the sequence": """
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
        mamba_training_ssm_states_dtype linear_conv_kernel_dim linear_key_head_dim
        linear_value_head_dim linear_num_key_heads linear_num_value_heads
    """,
    "parallelism": """
        tensor_model_parallel_size sequence_parallel create_attention_mask_in_dataloader
        pipeline_model_parallel_size virtual_pipeline_model_parallel_size
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        microbatch_group_size_per_vp_stage decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        overlap_p2p_comm overlap_p2p_comm_warmup_flush batch_p2p_comm use_tp_pp_dp_mapping
        context_parallel_size cp_comm_type
    """,
    "data parallel": """
        use_distributed_optimizer num_distributed_optimizer_instances overlap_grad_reduce
        overlap_param_gather align_grad_reduce
        align_param_gather ddp_bucket_size bucket_size ddp_num_buckets num_buckets
        ddp_average_in_collective average_in_collective
        ddp_param_name_patterns_for_fp32_local_accumulation
        param_name_patterns_for_fp32_local_accumulation gradient_reduce_div_fusion
        ddp_pad_buckets_for_high_nccl_busbw pad_buckets_for_high_nccl_busbw
        use_gloo_process_groups
    """,
    "precision": """
        fp16 bf16 params_dtype loss_scale initial_loss_scale min_loss_scale loss_scale_window
        hysteresis accumulate_allreduce_grads_in_fp32 grad_reduce_in_fp32 grad_reduce_in_bf16
        gradient_accumulation_fusion deterministic_mode
    """,
    "recompute": """
        recompute_granularity recompute_method recompute_num_layers recompute_activations
        moe_layer_recompute
    """,
    "offloading": """
        fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
        delta_offload_bytes_across_pp_ranks activation_offload_fraction
        fine_grained_offloading_max_inflight_offloads
    """,
    "experts": """
        num_experts num_moe_experts expert_model_parallel_size expert_tensor_parallel_size
        moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size
        moe_shared_expert_gate moe_grouped_gemm moe_apply_probs_on_input
    """,
    "hybrid models": """
        hybrid_layer_pattern hybrid_override_pattern is_hybrid_model
    """,
    "multi-token prediction": """
        mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer
        mtp_hybrid_override_pattern
    """,
    "routers": """
        moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
        moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_router_score_function
        moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_router_quantile_balancing_ema moe_router_force_load_balancing
        moe_router_force_biased moe_aux_loss_coeff moe_z_loss_coeff
    """,
    "optimizer": """
        clip_grad decoupled_lr decoupled_min_lr sgd_momentum weight_decay
        apply_wd_to_qk_layernorm no_weight_decay_cond_type log_params_norm log_num_zeros_in_grad
        check_for_nan_in_loss_and_grad check_for_nan_in_grad check_for_spiky_loss
    """,
    "checkpoints": """
        save load save_interval ckpt_step finetune pretrained_checkpoint no_save_optim
        no_save_rng no_load_optim no_load_rng use_checkpoint_args
        use_mp_args_from_checkpoint_args async_save async_strategy use_persistent_ckpt_worker
        dist_ckpt_optim_fully_reshardable ckpt_fully_parallel_save ckpt_fully_parallel_load
        ckpt_assume_constant_structure dist_ckpt_strictness
        distrib_optim_fully_reshardable_mem_efficient
    """,
}

#: By the setting, refused, without which they do nothing. Whoever makes that one work classifies
#: these anew.
PART_OF = {
    "perform_rl_step": """
        rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag
        rl_submission_granularity rl_consumption_granularity grpo_iterations
        grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight
        grpo_filter_groups_with_same_reward langrl_env_config rl_default_temperature
        rl_default_top_p rl_default_top_k rl_offload_optimizer_during_inference
        rl_kv_cache_management_mode rl_persist_cuda_graphs rl_partial_rollouts
        rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef
        rl_use_sequence_packing rl_sequence_packing_max_sequences_per_bin
        rl_sequence_packing_algo rl_training_cuda_graphs rl_inference_tensor_model_parallel_size
        rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size
        rl_inference_expert_tensor_model_parallel_size rl_inference_model_unified_memory_level
        rl_offload_inference_model_weights_when_idle refit_method rl_verify_model_weights_swap
        rl_skip_bos_token rl_profile rl_profile_dir rl_inference_parsers
    """,
    "logits_save_dir": """
        logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype
    """,
    "logits_load_dir": """
        logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth
        logits_load_kd_loss_alpha logits_load_ignore_errors
    """,
    "experimental_attention_variant": """
        dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq
        dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
        dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
        experimental_attention_variant_loss_scale_func
    """,
    "use_mup": """
        mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim
        mup_attn_scale_power
    """,
    "qk_clip": """
        qk_clip_alpha qk_clip_threshold
    """,
    "tp_comm_overlap": """
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_comm_bootstrap_backend
        tp_comm_overlap_cfg tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_overlap_disable_qkv
        tp_comm_overlap_disable_fc1
    """,
    "use_megatron_fsdp": """
        strict_fsdp_dtensor_load fsdp_manual_registration fsdp_double_buffer
        torch_fsdp2_reshard_after_forward megatron_fsdp_main_params_dtype
        megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
        fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync
        megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
        data_parallel_sharding_strategy outer_dp_sharding_strategy
        suggested_communication_unit_size keep_fp8_transpose_cache enable_full_sharding_in_hsdp
        create_all_gather_group
    """,
    "fp8": """
        fp8_recipe fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
        fp8_amax_compute_algo fp8_wgrad fp8_output_proj first_last_layers_bf16
        moe_router_padding_for_quantization moe_router_padding_for_fp8
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4_recipe fp4_quantizer_factory
        reuse_grad_buf_for_mxfp8_param_ag tp_only_amax_red
    """,
    "cuda_graph_impl": """
        moe_pad_experts_for_cuda_graph_inference cuda_graph_warmup_steps
        delay_offload_until_cuda_graph cuda_graph_scope_deprecated cuda_graph_modules
        decode_only_cuda_graphs cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
        cuda_graph_scope
    """,
    "cpu_offloading_num_layers": """
        cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering
    """,
    "cross_entropy_loss_fusion": """
        cross_entropy_fusion_impl
    """,
    "defer_embedding_wgrad_compute": """
        wgrad_deferral_limit
    """,
    "hybrid_context_parallel": """
        max_seqlen_per_dp_cp_rank
    """,
    "optimizer": """
        muon_momentum muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec
        muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
        muon_scalar_optimizer use_layer_wise_param_layout
    """,
    "non_persistent_ckpt_type": """
        non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo replication
        replication_jump replication_factor
    """,
    "ckpt_convert_format": """
        ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format
    """,
    "overlap_moe_expert_parallel_comm": """
        ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream
    """,
    "moe_token_dispatcher_type": """
        moe_enable_deepep moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep
        moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms moe_deepep_num_sms
        moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy
        moe_expert_rank_capacity_factor
    """,
    "moe_expert_capacity_factor": """
        moe_pad_expert_input_to_capacity moe_token_drop_policy moe_token_dropping
    """,
    "moe_paged_stash": """
        moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_buffer_size_factor_cpu
    """,
    "moe_routing_trace_path": """
        moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
        moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights
    """,
    "moe_use_upcycling": """
        moe_upcycling_granularity
    """,
    "expert_gtp_weight_remat_size": """
        expert_tensor_parallel_num_weight_shards
    """,
    "use_transformer_engine_op_fuser": """
        moe_single_grouped_weight moe_single_grouped_bias moe_mlp_glu_interleave_size
    """,
}

#: They do not reach TSP, by the reason.
WITHOUT_EFFECT = {
    "Megatron's alone: how parameters are created and initialized": """
        perform_initialization use_cpu_initialization init_method init_method_std
        init_method_xavier_uniform output_layer_init_method embedding_init_method
        embedding_init_method_std seed data_parallel_random_init inference_rng_tracker
        inference_sampling_seed
    """,
    "Megatron's alone: groups, time-outs, transport": """
        distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init
        local_rank nccl_communicator_config_path use_sharp sharp_enabled_group
        high_priority_stream_groups flight_recorder_dump_path flight_recorder_trace_buffer_size
        flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
        flight_recorder_include_only_active flight_recorder_extra_dump_on_exec
        pipeline_model_parallel_comm_backend use_ring_exchange_p2p batch_p2p_sync pipeline_dtype
        deallocate_pipeline_outputs nccl_ub disable_symmetric_registration disable_jit_fuser
    """,
    "set by Megatron for its schedules": """
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func
        param_sync_func moe_grad_scale_func mtp_grad_scale_func autocast_dtype
        barrier_with_L1_time
        _cpu_offloading_context
    """,
    "kernels of modules that TSP replaces, or a fusion with the same result": """
        masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion bias_activation_fusion
        bias_dropout_fusion apply_rope_fusion no_persist_layer_norm persist_layer_norm
        memory_efficient_layer_norm clone_scatter_output_in_embedding use_flash_attn
        attention_softmax_in_fp32 disable_parameter_transpose_cache kitchen_attention_backend
        moe_permute_fusion moe_router_fusion use_fused_weighted_squared_relu
    """,
    "Megatron's alone: the optimizer and its schedule": """
        adam_beta1 adam_beta2 adam_eps lr lr_decay_style lr_wsd_decay_style lr_decay_iters
        lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples lr_warmup_fraction
        lr_warmup_iters lr_warmup_samples lr_warmup_init override_opt_param_scheduler
        use_checkpoint_opt_param_scheduler start_weight_decay end_weight_decay
        weight_decay_incr_style warmup min_lr freeze_all_layers optimizer_cpu_offload
        optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d dump_param_to_param_group_map pin_cpu_grads pin_cpu_params
        use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype
        exp_avg_sq_dtype lion_beta1 lion_beta2 ddp_reduce_scatter_with_fp32_accumulation
        reduce_scatter_with_fp32_accumulation
    """,
    "Megatron's alone: the length of a run, batch sizes, evaluation, memory": """
        rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed
        empty_unused_memory_level check_weight_hash_across_dp_replicas_interval
        gpu_sniff_test_interval
        train_sync_interval train_iters train_samples exit_interval exit_duration_in_mins
        exit_signal_handler exit_signal exit_signal_handler_for_dataloader
        exit_signal_handler_for_training manual_gc manual_gc_interval manual_gc_eval
        iterations_to_skip check_for_large_grads result_rejected_tracker_filename eval_iters
        eval_interval start_eval_at_iter skip_train test_mode full_validation
        multiple_validation_sets validation_set_names error_injection_rate error_injection_type
        rerun_mode adlr_autoresume adlr_autoresume_interval phase_transition_iterations
    """,
    "data and tokenizer": """
        data_path split train_data_path valid_data_path test_data_path data_args_path
        per_split_data_args_path per_dataset_sequences_path dataloader_fast_cache_load
        dataloader_defer_npy_index_mmap data_cache_path mmap_bin_files mock_data
        encoder_seq_length decoder_seq_length sample_rate mask_prob short_seq_prob num_workers
        num_dataset_builder_threads object_storage_cache_path mid_level_dataset_surplus
        allow_ambiguous_pad_tokens fim_data fim_rate fim_spm_rate fim_split_sample
        fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token
        fim_pad_token fim_eod_token vocab_file merge_file vocab_extra_ids tokenizer_type
        tokenizer_model metadata_path special_tokens tiktoken_pattern
        tiktoken_num_special_tokens tokenizer_sentencepiece_legacy
        tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast
        tokenizer_hf_no_include_special_tokens trust_remote_code null_tokenizer_eod_id
        null_tokenizer_pad_id chat_template dataloader_type
    """,
    "Megatron's alone: where and when checkpoints are written": """
        save_retain_interval save_params_interval non_persistent_save_interval
        non_persistent_global_ckpt_dir exit_on_missing_checkpoint
        use_tokenizer_model_from_checkpoint_args override_ckpt_iteration async_ckpt_cpu_priority
        async_ckpt_io_priority async_ckpt_use_cpu_shm ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group
        ckpt_load_validate_sharding_integrity verify_integrity dist_ckpt_workers
        load_main_params_from_ckpt stream_ckpt_dequant dist_ckpt_save_pre_mcore_014
        save_wgrads_interval use_dist_ckpt_deprecated dist_ckpt_format_deprecated
        ckpt_fully_parallel_save_deprecated hetereogenous_dist_checkpoint
    """,
    "logging, profiling, fault tolerance": """
        moe_per_layer_logging save_tokens_per_expert_interval
        log_interval log_throughput log_progress timing_log_level timing_log_option
        tensorboard_dir tensorboard_log_interval tensorboard_queue_size
        log_timers_to_tensorboard log_loss_scale_to_tensorboard
        log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_memory_interval
        log_device_memory_used log_world_size_to_tensorboard wandb_project wandb_exp_name
        wandb_save_dir wandb_entity logging_level log_energy profile profile_step_start
        profile_step_end use_pytorch_profiler pytorch_profiler_collect_shapes
        pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra profile_ranks
        record_memory_history memory_snapshot_path record_shapes nvtx_ranges log_straggler
        straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup
        run_workload_inspector_server enable_one_logger one_logger_project one_logger_run_name
        one_logger_async app_tag_run_name app_tag_run_version inprocess_max_iterations
        inprocess_monitor_thread_interval inprocess_monitor_process_interval
        inprocess_progress_watchdog_interval inprocess_heartbeat_interval inprocess_soft_timeout
        inprocess_hard_timeout inprocess_heartbeat_timeout inprocess_barrier_timeout
        inprocess_completion_timeout inprocess_last_call_wait inprocess_termination_grace_time
        inprocess_granularity inprocess_active_world_size inprocess_empty_cuda_cache
        enable_ft_package calc_ft_timeouts ft_num_warmup_iters fault_injector_ranks
        fault_injector_num_ranks fault_injector_fault_types fault_injector_fault_probabilities
        fault_injector_fault_delay fault_injector_delay_start_iteration
        fault_injector_mtti_seconds fault_injector_offset_seconds fault_injector_seed
        config_logger_dir
    """,
    "inference": """
        inference_batch_times_seqlen_threshold max_tokens_to_oom output_bert_embeddings
        bert_embedder_type use_legacy_static_engine inference_max_requests
        inference_max_seq_length inference_dynamic_batching
        inference_dynamic_batching_buffer_size_gb
        inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_block_size
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_num_cuda_graphs
        inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_track_generated_token_events
        inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_dynamic_batching_unified_memory_level enable_chunked_prefill
        num_speculative_tokens inference_dynamic_batching_enable_prefix_caching
        inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_routing_alpha
        inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution
        inference_dynamic_batching_sampling_backend offset_sampling_seed_by_dp_rank
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_logprobs_mode
        inference_logging_step_interval inference_text_gen_server_logging
        inference_wandb_logging inference_coordinator_port
        inference_use_synchronous_zmq_collectives inference_disable_ep_consensus
        inference_shards inference_cuda_graph_scope inference_fuse_tp_communication
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        flash_decode nccl_all_reduce_for_prefill mlp_chunks_for_prefill
        cache_mla_latents mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype
    """,
    "not read by Megatron's GPT, or another name of one above": """
        apply_residual_connection_post_layernorm openai_gelu onnx_safe bert_binary_head
        encoder_num_layers decoder_num_layers batch_size model_parallel_size
        checkpoint_activations deprecated_use_mcore_models enable_experimental rope_type
        relative_attention_num_buckets relative_attention_max_distance lazy_mpu_init
        disable_msc_deprecated enable_msc
    """,
    "other models: BERT, retrieval, vision": """
        ict_head_size biencoder_projection_dim biencoder_shared_query_context_model ict_load
        bert_load titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path
        retriever_report_topk_accuracies retriever_score_scaling block_data_path embedding_path
        indexer_batch_size indexer_log_interval num_classes img_h img_w num_channels patch_dim
        classes_fraction data_per_class_fraction data_sharding head_lr_mult vision_pretraining
        vision_pretraining_type vision_backbone_type swin_backbone_type mask_type mask_factor
        iter_per_epoch dino_local_img_size dino_local_crops_number dino_head_hidden_size
        dino_bottleneck_size dino_freeze_last_layer dino_norm_last_layer
        dino_warmup_teacher_temp dino_teacher_temp dino_warmup_teacher_temp_epochs
    """,
}

#: The entry refuses them with TSP and without; see `training/gpt.py` and `training/main.py`.
REFUSED_BY_ENTRY = """
    logits_load_dir inprocess_restart yaml_cfg tensor_parallel_num_weight_shards
"""


def names(table: dict[str, str]) -> set[str]:
    """The settings in one of the tables above."""
    return set(chain.from_iterable(words.split() for words in table.values()))


def known() -> set[str]:
    """Every setting that is classified."""
    listed = names(CARRIED) | names(PART_OF) | names(WITHOUT_EFFECT) | set(REFUSED_BY_ENTRY.split())
    return listed | {refusal.dest for refusal in REFUSED}


def refuse_unknown(written: Iterable[str], flags: Mapping[str, str]) -> None:
    """Stop a run that gives a flag of a newer Megatron, which nothing here knows.

    Args:
        written: the flags on the command line.
        flags: the dest of each flag of Megatron's parser.

    Raises:
        TSPError: naming the flag.
    """
    listed = known()
    for flag in sorted(written):
        if flag in flags and flags[flag] not in listed:
            raise TSPError(
                f"{flag} is new in this Megatron and unknown to megatron-tsp: nothing shows that "
                "it works with --tsp-size. Drop it, or use the megatron-core that is pinned"
            )
