"""Names of Megatron's settings that `policy.megatron` does not accept, each with the reason.

Names are those of TransformerConfig, DistributedDataParallelConfig and OptimizerConfig. The config
is checked without Megatron: policy/megatron_settings.py compares the other names and the values
with the installed version.
"""

_REJECTED = {
    "the model folder decides it": """
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
        softmax_scale softmax_type normalization layernorm_epsilon layernorm_zero_centered_gamma
        apply_residual_connection_post_layernorm qk_layernorm qk_l2_norm add_bias_linear
        add_qkv_bias gated_linear_unit activation_func activation_func_clamp_value
        glu_linear_offset rotary_interleaved window_size window_attn_skip_freq no_rope_freq
        mrope_section attention_output_gate multi_latent_attention experimental_attention_variant
        dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
        dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
        mtp_num_layers mtp_loss_scaling_factor mtp_standalone is_hybrid_model mamba_state_dim
        mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
        heterogeneous_block_specs hetereogenous_dist_checkpoint num_moe_experts moe_layer_freq
        moe_ffn_hidden_size moe_router_topk moe_router_topk_limited_devices moe_router_num_groups
        moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
        moe_router_score_function moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_latent_size
        moe_apply_probs_on_input""",
    "policy.parallel decides it": """
        tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel
        virtual_pipeline_model_parallel_size pipeline_model_parallel_layout
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        context_parallel_size hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank
        hybrid_context_parallel expert_model_parallel_size expert_tensor_parallel_size
        moe_extended_tp num_distributed_optimizer_instances overlap_p2p_comm batch_p2p_comm""",
    "policy.precision decides it": """
        bf16 fp16 params_dtype pipeline_dtype enable_autocast autocast_dtype
        fp32_residual_connection""",
    "policy.fp8 decides it": "fp8 fp8_recipe fp8_quantizer_factory",
    "weight syncs and checkpoints read bf16 weights; policy.fp8 keeps them": """
        fp8_param fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache
        fp4 fp4_recipe fp4_param fp4_quantizer_factory use_kitchen use_kitchen_attention
        kitchen_attention_backend quant_recipe""",
    "policy.recompute decides it": """
        recompute_granularity recompute_method recompute_num_layers recompute_modules
        moe_layer_recompute distribute_saved_activations
        num_microbatches_with_partial_activation_checkpoints""",
    "policy.activation_offload_layers decides it": """
        cpu_offloading cpu_offloading_num_layers cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering""",
    "policy.moe_aux_loss_coef and policy.moe_z_loss_coef decide it": """
        moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff""",
    "the section optimizer decides it": """
        lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad optimizer_cpu_offload
        optimizer_offload_fraction""",
    "Adam is the only optimizer, with its state in fp32": """
        optimizer sgd_momentum muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode
        muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
        decoupled_weight_decay use_precision_aware_optimizer store_param_remainders
        main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype""",
    "logprobs would be random: a policy gradient compares them with those of the rollout": """
        hidden_dropout attention_dropout moe_input_jitter_eps moe_router_force_load_balancing""",
    "the result of a token would depend on the tokens that share its micro-batch": """
        moe_token_dropping moe_expert_capacity_factor moe_pad_expert_input_to_capacity
        moe_token_drop_policy""",
    "losses are weighted sums, which Megatron must neither divide nor average": """
        calculate_per_token_loss average_in_collective""",
    "gradients are summed in fp32, so that no packing or parallel layout changes them": """
        grad_reduce_in_fp32 reduce_scatter_with_fp32_accumulation""",
    "micro-batches differ in length": """
        variable_seq_lengths enable_cuda_graph external_cuda_graph cuda_graph_impl
        cuda_graph_scope cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
        cuda_graph_warmup_steps tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad
        tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
        tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv
        tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend""",
    "routing_replay.enabled decides it": "moe_enable_routing_replay",
    "rows of padding would take part in the routing; the grouped experts pad for FP8": """
        moe_router_padding_for_quantization moe_router_padding_for_fp8""",
    "the fused kernel takes frequencies by offset in a sequence, a trie has them by token": """
        apply_rope_fusion fused_single_qkv_rope""",
    "the output layer runs on loss rows only, with a softmax of its own": """
        cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute
        wgrad_deferral_limit""",
    "Megatron's combined schedule does not call the policy's forward pass": """
        overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
        moe_shared_expert_overlap""",
    "weight syncs and checkpoints read the buffers of the distributed optimizer": """
        use_distributed_optimizer use_megatron_fsdp use_custom_fsdp
        data_parallel_sharding_strategy outer_dp_sharding_strategy preserve_fp32_weights
        suggested_communication_unit_size fsdp_double_buffer fsdp_manual_registration""",
    "a step is complete before its weights are checked": """
        overlap_param_gather_with_optimizer_step""",
    "a gradient that is not finite skips the optimizer step (train/skipped)": """
        check_for_nan_in_grad check_for_large_grads""",
    "the device decides it: Transformer Engine's layers on a GPU, local ones on a CPU": """
        transformer_impl moe_grouped_gemm moe_use_legacy_grouped_gemm use_cpu_initialization""",
    "megastep loads or draws the weights itself": """
        init_method output_layer_init_method init_method_std embedding_init_method
        embedding_init_method_std perform_initialization init_model_with_meta_device""",
    "megastep sets it": """
        finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
        timers barrier_with_L1_time _cpu_offloading_context""",
    "it concerns inference, fp16 or logs, and has no effect here": """
        loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
        log_num_zeros_in_grad log_max_attention_logit qk_clip qk_clip_alpha qk_clip_threshold
        moe_per_layer_logging test_mode flash_decode inference_rng_tracker
        inference_sampling_seed use_inference_optimized_layers inference_fuse_tp_communication
        mlp_chunks_for_prefill symmetric_ar_type use_te_rng_tracker masked_softmax_fusion
        attention_softmax_in_fp32 apply_query_key_layer_scaling""",
}

REJECTED = {name: reason for reason, names in _REJECTED.items() for name in names.split()}

# Settings that need a GPU or its packages.
NEEDS_CUDA = (
    "gradient_accumulation_fusion",
    "moe_permute_fusion",
    "moe_router_fusion",
    "fine_grained_activation_offloading",
    "nccl_ub",
    "use_te_activation_func",
)
