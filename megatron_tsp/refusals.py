"""What TSP does not carry: one table of settings, each with the reason and what to do instead.

An ignored setting is a wrong result, so a run with one of these stops before it starts. The other
settings of Megatron are listed in `settings.py`.
"""

from typing import NamedTuple

from megatron_tsp.errors import TSPError


class Refusal(NamedTuple):
    """A setting that stops a TSP run.

    Attributes:
        dest: the attribute of the parsed arguments, or of Megatron's configs.
        flag: as the user typed it; the dest where no flag sets it.
        reason: why not, and what to do.
        carried: the values that are fine; any value that is false as well. Of a list, each.
    """

    dest: str
    flag: str
    reason: str
    carried: tuple = ()


_MOE = "not carried yet; train with tensor parallelism"
_VARIANT = "a GPT model's attention is multi-head, grouped-query or multi-latent in TSP"
_FP8 = "TSP streams fp32, fp16 and bf16 shards only; train in bf16 (--bf16)"
_FSDP = "TSP shards the weights itself; use Megatron's DDP or its distributed optimizer"
_GRAPH = "the streams are not captured in CUDA graphs yet"
_TRACKER = (
    "it is for CUDA graphs, and outside of them what is recomputed would draw other dropout masks; "
    "drop the flag"
)
_CE = "TSP computes the loss itself, streaming the vocabulary in fp32; drop the flag"
_OVERLAP = "TSP has no tensor-parallel activation traffic to overlap; drop the flag"
_CORE = "TSP has its own attention core; drop the flag"
_OFFLOAD = (
    "Transformer Engine moves what its own modules mark, and TSP's blocks are not among them; use "
    "--fine-grained-activation-offloading"
)
_DEBUG = "it reads layers from their modules' inputs and outputs, and TSP's blocks fuse them"
_MUP = "TSP's embedding and loss do not scale for muP"

REFUSED = (
    Refusal("hierarchical_context_parallel_sizes", "--hierarchical-context-parallel-sizes",
            "TSP spreads the sequence in one way only; drop the flag"),
    Refusal("apply_query_key_layer_scaling", "--apply-query-key-layer-scaling", "it keeps logits "
            "in the range of fp16, and TSP's kernels have them in fp32; drop the flag"),
    Refusal("qk_clip", "--qk-clip", "the kernels do not report the largest logit; drop the flag"),
    Refusal("log_max_attention_logit", "--log-max-attention-logit",
            "the kernels do not report the largest logit; drop the flag"),
    Refusal("use_kitchen_attention", "--use-kitchen-attention", _CORE),
    Refusal("mla_down_proj_fusion", "--mla-down-proj-fusion", "the projections to latents stream "
            "one by one; drop the flag"),
    Refusal("experimental_attention_variant", "--experimental-attention-variant", _VARIANT),
    Refusal("linear_attention_freq", "--linear-attention-freq", _VARIANT),
    Refusal("moe_token_dispatcher_type", "--moe-token-dispatcher-type", "its libraries are not "
            "carried yet; use allgather or alltoall", ("allgather", "alltoall")),
    Refusal("moe_router_load_balancing_type", "--moe-router-load-balancing-type", "it balances "
            "the tokens of one rank; use aux_loss, seq_aux_loss, global_aux_loss, "
            "quantile_balancing or none",
            ("aux_loss", "seq_aux_loss", "global_aux_loss", "quantile_balancing", "none")),
    Refusal("moe_expert_capacity_factor", "--moe-expert-capacity-factor", "experts have a capacity "
            "for each rank's tokens: what is dropped would depend on the layout; drop the flag"),
    Refusal("moe_input_jitter_eps", "--moe-input-jitter-eps", "every rank would draw the same "
            "noise for other tokens; drop the flag"),
    Refusal("moe_shared_expert_overlap", "--moe-shared-expert-overlap", "shared experts stream "
            "their weights and have no activation traffic to hide; drop the flag"),
    Refusal("use_grouped_gemm_for_shared_expert", "--use-grouped-gemm-for-shared-expert",
            "shared experts stream their weights as a dense MLP does; drop the flag"),
    Refusal("moe_shared_expert_glu_interleave_size", "--moe-shared-expert-glu-interleave-size",
            "shared experts stream their weights as a dense MLP does; drop the flag"),
    Refusal("moe_latent_size", "--moe-latent-size", _MOE),
    Refusal("moe_enable_routing_replay", "--moe-enable-routing-replay", _MOE),
    Refusal("moe_use_upcycling", "--moe-use-upcycling", "upcycle with tensor parallelism first, "
            "then load the checkpoint"),
    Refusal("moe_routing_trace_path", "--moe-routing-trace-path", "it numbers the tokens of a "
            "rank as a contiguous shard, and TSP's are in zigzag order; drop the flag"),
    Refusal("expert_gtp_weight_remat_size", "--expert-tensor-parallel-num-weight-shards",
            "experts stay whole on their rank; drop the flag", (1,)),
    Refusal("moe_paged_stash", "--moe-paged-stash", "it needs the dispatcher flex, which is "
            "not carried; drop the flag"),
    Refusal("mtp_detach_heads", "--mtp-detach-heads", "TSP's loss sums the gradients of all "
            "predictions into the output weights; drop the flag"),
    Refusal("mtp_standalone", "--mtp-standalone", "multi-token prediction and the loss share a "
            "pipeline stage in TSP; drop the flag"),
    Refusal("heterogeneous_layers_config_path", "--heterogeneous-layers-config-path",
            "all layers of a TSP model are alike"),
    Refusal("heterogeneous_layers_config_encoded_json",
            "--heterogeneous-layers-config-encoded-json", "all layers of a TSP model are alike"),
    Refusal("spec", "--spec", "TSP brings the layer spec; drop the flag"),
    Refusal("fp32_residual_connection", "--fp32-residual-connection", "TSP's blocks take their "
            "input in the parameters' dtype; drop the flag"),
    Refusal("ckpt_format", "--ckpt-format", "other formats name norms by module and would drop "
            "them in a flip; use torch_dist", ("torch_dist",)),
    Refusal("use_mup", "--use-mup", _MUP),
    Refusal("fp8", "--fp8-format", _FP8),
    Refusal("fp8_param_gather", "--fp8-param-gather", _FP8),
    Refusal("fp4", "--fp4-format", _FP8),
    Refusal("te_precision_config_file", "--te-precision-config-file", _FP8),
    Refusal("use_megatron_fsdp", "--use-megatron-fsdp", _FSDP),
    Refusal("use_torch_fsdp2", "--use-torch-fsdp2", _FSDP),
    Refusal("overlap_param_gather_with_optimizer_step",
            "--overlap-param-gather-with-optimizer-step", "Megatron does not carry it with "
            "torch_dist checkpoints; drop the flag"),
    Refusal("tp_comm_overlap", "--tp-comm-overlap", _OVERLAP),
    Refusal("delay_wgrad_compute", "--delay-wgrad-compute", "dW travels with the shards and "
            "cannot be delayed; drop the flag"),
    Refusal("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm",
            "its schedule calls a layer's modules one by one, and the streams count on their "
            "order; drop the flag"),
    Refusal("overlap_dispatch_backward_with_experts_wgrad",
            "--overlap-dispatch-backward-with-experts-wgrad", _MOE),
    Refusal("defer_embedding_wgrad_compute", "--defer-embedding-wgrad-compute", _CE),
    Refusal("cross_entropy_loss_fusion", "--cross-entropy-loss-fusion", _CE),
    Refusal("fp16_lm_cross_entropy", "--fp16-lm-cross-entropy", _CE),
    Refusal("enable_cuda_graph", "--enable-cuda-graph", _GRAPH),
    Refusal("external_cuda_graph", "--external-cuda-graph", _GRAPH),
    Refusal("cuda_graph_impl", "--cuda-graph-impl", _GRAPH, ("none",)),
    Refusal("optimizer_cuda_graph", "--optimizer-cuda-graph", _GRAPH),
    Refusal("te_rng_tracker", "--te-rng-tracker", _TRACKER),
    Refusal("use_te_rng_tracker", "use_te_rng_tracker", _TRACKER),
    Refusal("distribute_saved_activations", "--distribute-saved-activations",
            "each rank keeps its own tokens only: nothing is left to distribute; drop the flag"),
    Refusal("cpu_offloading_num_layers", "--cpu-offloading-num-layers", _OFFLOAD),
    Refusal("use_transformer_engine_op_fuser", "--use-transformer-engine-op-fuser",
            "the MLP is TSP's; drop the flag"),
    Refusal("use_te_activation_func", "--use-te-activation-func", "the MLP is TSP's; drop the "
            "flag"),
    Refusal("use_grouped_gemm_for_dense_mlp", "--use-grouped-gemm-for-dense-mlp",
            "the MLP is TSP's; drop the flag"),
    Refusal("mlp_chunks_for_training", "--mlp-chunks-for-training", "the MLP goes by shards; drop "
            "the flag", (1,)),
    Refusal("fused_residual_rmsnorm", "--fused-residual-rmsnorm", "the norm is TSP's; drop the "
            "flag"),
    Refusal("disable_bf16_reduced_precision_matmul", "--disable-bf16-reduced-precision-matmul",
            "TSP does not switch GEMM precision; drop the flag"),
    Refusal("batch_invariant_mode", "--batch-invariant-mode", "TSP's kernels are not batch "
            "invariant; drop the flag"),
    Refusal("transformer_impl", "--transformer-impl", "TSP is for training; use local or "
            "transformer_engine", ("local", "transformer_engine")),
    Refusal("position_embedding_type", "--position-embedding-type", "use rope, yarn, mrope, "
            "learned_absolute or none", ("rope", "yarn", "mrope", "learned_absolute", "none")),
    Refusal("optimizer", "--optimizer", "muon-like optimizers orthogonalize whole weights; use "
            "adam or sgd", ("adam", "sgd")),
    Refusal("perform_rl_step", "--perform-rl-step", "TSP is for pretraining"),
    Refusal("init_model_with_meta_device", "--init-model-with-meta-device",
            "TSP's modules are built on their device; drop the flag"),
    Refusal("hybrid_context_parallel", "--hybrid-context-parallel", "the TSP group spreads the "
            "sequence already; drop the flag"),
    Refusal("gtp_weight_remat_size", "--tensor-parallel-num-weight-shards", "TSP shards the "
            "weights itself; drop the flag", (1,)),
    Refusal("recompute_modules", "--recompute-modules", "TSP's layers have core_attn, "
            "layernorm, mlp, moe and shared_experts to recompute",
            ("core_attn", "layernorm", "mlp", "moe", "shared_experts")),
    Refusal("symmetric_ar_type", "--symmetric-ar-type", _OVERLAP),
    Refusal("save_activations_interval", "--save-activations-interval", _DEBUG),
    Refusal("save_dgrads_interval", "--save-dgrads-interval", _DEBUG),
    Refusal("non_persistent_ckpt_type", "--non-persistent-ckpt-type", "only global checkpoints "
            "are carried; use global", ("global",)),
    Refusal("auto_detect_ckpt_format", "--auto-detect-ckpt-format", "only torch_dist is carried; "
            "drop the flag"),
    Refusal("ckpt_convert_format", "--ckpt-convert-format", "only torch_dist is carried; convert "
            "with --tensor-model-parallel-size, without --tsp-size"),
    Refusal("fake_process_group", "--fake-process-group", "shards that a fake group sends never "
            "arrive; drop the flag"),
    Refusal("fp4_param_gather", "--fp4-param-gather", _FP8),
    Refusal("logits_save_dir", "--logits-save-dir", "TSP's loss never holds the logits; save them "
            "with --tensor-model-parallel-size, without --tsp-size"),
    # Settings of Megatron's configs that no flag reaches.
    Refusal("fp8_param", "fp8_param", _FP8),
    Refusal("fp4_param", "fp4_param", _FP8),
    Refusal("fp8_dot_product_attention", "fp8_dot_product_attention", _FP8),
    Refusal("fp8_multi_head_attention", "fp8_multi_head_attention", _FP8),
    Refusal("activation_func_fp8_input_store", "activation_func_fp8_input_store", _FP8),
    Refusal("quant_recipe", "quant_recipe", _FP8),
    Refusal("use_kitchen", "use_kitchen", _FP8),
    Refusal("enable_autocast", "enable_autocast", "TSP's blocks compute in the parameters' dtype"),
    Refusal("num_microbatches_with_partial_activation_checkpoints",
            "num_microbatches_with_partial_activation_checkpoints", "what is recomputed does not "
            "change from micro-batch to micro-batch in TSP"),
    Refusal("variable_seq_lengths", "variable_seq_lengths", "TSP cuts every sequence alike"),
    Refusal("cpu_offloading", "cpu_offloading", _OFFLOAD),
    Refusal("fused_single_qkv_rope", "fused_single_qkv_rope", "TSP rotates queries and keys "
            "itself"),
    Refusal("use_inference_optimized_layers", "use_inference_optimized_layers", "TSP is for "
            "training"),
    Refusal("heterogeneous_block_specs", "heterogeneous_block_specs", "all layers of a TSP model "
            "are alike"),
    Refusal("use_custom_fsdp", "use_custom_fsdp", _FSDP),
)  # fmt: skip

#: Where multi-latent attention would be Megatron's, over tensor-parallel ranks.
LATENT_OVER_TP = (
    "--multi-latent-attention over tensor-parallel ranks: without Transformer Engine Megatron's "
    "gradients are then not those of one rank; use --tsp-size with --tsp-blocks all or attention, "
    "or --tensor-model-parallel-size 1"
)

#: Layers that a hybrid pattern may name and TSP does not carry.
REFUSED_LAYERS = {
    "D": "sparse attention's indexer picks keys of the whole sequence for each query",
    "+": "multi-latent attention is carried in GPT models only; use megatron_tsp.pretrain_gpt with "
         "--multi-latent-attention",
}  # fmt: skip


def refuse_combinations(args) -> None:
    """Stop a run whose settings TSP carries one by one, and not together.

    Raises:
        TSPError: for a layer of --hybrid-layer-pattern, packed sequences in hybrid models or with
            multi-token prediction, context parallelism with the latter, multimodal RoPE with
            either, context parallelism or neighbouring pairs.
    """
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern or ""
    for symbol in pattern:
        if symbol in REFUSED_LAYERS:
            raise TSPError(
                f"--hybrid-layer-pattern {pattern}: {symbol} does not work with --tsp-size: "
                f"{REFUSED_LAYERS[symbol]}"
            )
    beside = {
        "--hybrid-layer-pattern": pattern,
        "--mtp-num-layers": args.mtp_num_layers,
        "--multi-latent-attention": args.multi_latent_attention,
    }
    for dest in ("sft", "dataloader_inter_document_masking", "reset_attention_mask"):
        for flag, given in beside.items():
            if given and getattr(args, dest):
                raise TSPError(
                    f"--{dest.replace('_', '-')} does not work with {flag} and --tsp-size: there "
                    "tokens are counted through the whole sequence; drop it"
                )
    if args.multi_latent_attention and not args.q_lora_rank:
        raise TSPError(
            "--multi-latent-attention does not work with --tsp-size without --q-lora-rank: queries "
            "that come from no latent are not carried yet"
        )
    if args.multi_latent_attention and args.mtp_num_layers:
        raise TSPError(
            "--mtp-num-layers does not work with --multi-latent-attention and --tsp-size: not "
            "carried together yet; drop one of them"
        )
    if args.multi_latent_attention and args.tsp_blocks == "mlp":
        raise TSPError(f"--tsp-blocks mlp does not work with {LATENT_OVER_TP}")
    if args.mtp_num_layers and args.context_parallel_size > 1:
        raise TSPError(
            f"--context-parallel-size {args.context_parallel_size} does not work with "
            "--mtp-num-layers and --tsp-size: Megatron weighs each rank's predictions by the "
            "tokens of that rank, so that gradients depend on the layout; raise --tsp-size instead"
        )
    if args.position_embedding_type == "mrope":
        _refuse_beside_mrope(args, pattern)


def _refuse_beside_mrope(args, pattern: str) -> None:
    reasons = {
        f"--hybrid-layer-pattern {pattern}": pattern and "Megatron's hybrid models have no "
        "multimodal RoPE; use a GPT model",
        f"--mtp-num-layers {args.mtp_num_layers}": args.mtp_num_layers and "the positions of "
        "further tokens are not carried yet; drop it",
        f"--context-parallel-size {args.context_parallel_size}": args.context_parallel_size > 1
        and "what cuts Megatron's batches over these ranks does not know positions [3, b, s]; "
        "raise --tsp-size instead",
        "--rotary-interleaved": args.rotary_interleaved and "Megatron's multimodal RoPE fails "
        "with it; drop it",
    }
    for flag, reason in reasons.items():
        if reason:
            raise TSPError(
                f"--position-embedding-type mrope does not work with {flag} and --tsp-size: "
                f"{reason}"
            )


def refuse(settings) -> None:
    """Stop a run whose settings TSP would not honour.

    Args:
        settings: parsed arguments, or one of Megatron's configs.

    Raises:
        TSPError: for the first such setting, naming the flag, why, and what to do.
    """
    for refusal in REFUSED:
        value = getattr(settings, refusal.dest, None)
        value = getattr(value, "name", value)  # of an enum
        wrong = [
            v
            for v in (value if isinstance(value, list) else [value])
            if v and v not in refusal.carried
        ]
        if wrong:
            shown = "" if value is True else " " + " ".join(map(str, wrong))
            raise TSPError(f"{refusal.flag}{shown} does not work with --tsp-size: {refusal.reason}")
