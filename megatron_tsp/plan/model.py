"""What the planner has to know of a model and its training, from Megatron's flags."""

from argparse import Namespace
from dataclasses import dataclass

from megatron_tsp.errors import TSPError

#: Settings that change a layer's memory, traffic or work in ways that the closed forms do not have.
_NOT_PRICED = {
    "moe_expert_capacity_factor": "--moe-expert-capacity-factor",
    "moe_latent_size": "--moe-latent-size",
    "moe_shared_expert_overlap": "--moe-shared-expert-overlap",
    "moe_router_padding_for_quantization": "--moe-router-padding-for-quantization",
    "multi_latent_attention": "--multi-latent-attention",
    "mtp_num_layers": "--mtp-num-layers",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "heterogeneous_layers_config_encoded_json": "--heterogeneous-layers-config-encoded-json",
    "experimental_attention_variant": "--experimental-attention-variant",
    "linear_attention_freq": "--linear-attention-freq",
    "window_size": "--window-size",
    "attention_dropout": "--attention-dropout",
    "attention_output_gate": "--attention-output-gate",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
}


@dataclass(frozen=True)
class Experts:
    """The mixtures of experts of a model.

    Attributes:
        count, chosen, ffn: E experts; k of a token; width of one.
        shared: width of the experts that every token passes, 0 without; shared_gate: they have one.
        layers: for each layer of the model whether it has a mixture.
        dispatcher: "alltoall" or "allgather".
        router_element: bytes of a probability.
        counted: the tokens of each expert are summed over ranks, for an auxiliary loss.
    """

    count: int
    chosen: int
    ffn: int
    layers: tuple[bool, ...]
    shared: int = 0
    shared_gate: bool = False
    dispatcher: str = "alltoall"
    router_element: int = 2
    counted: bool = False


@dataclass(frozen=True)
class Model:
    """A decoder and how it is trained.

    Attributes:
        layers, hidden, heads, kv_heads, channels, ffn: L, h, query heads, KV heads, width of a
            head, width of the MLP.
        gated: the MLP has a gate.
        vocab, vocab_divisor: tokens, and what Megatron pads them to per tensor-parallel rank.
        tied: the output layer is the embedding.
        biases, qkv_bias: the linears have biases; QKV alone.
        layernorm: LayerNorm (weight and bias) and not RMSNorm.
        qk_norm: norms of query and key heads.
        learned_positions: rows of the position table, 0 without one.
        rope: rotary positions.
        sequence, global_batch: tokens of a sequence; sequences of a step.
        element: bytes of a parameter and of an activation.
        wide_grads: dW travels in fp32 between TSP's ranks.
        adam: two fp32 states a parameter; else SGD with `momentum`.
        fused_activation: Megatron's fused bias and activation in its own MLP.
        mixture: what replaces the MLP in some or all layers, or None.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    channels: int
    ffn: int
    gated: bool
    vocab: int
    sequence: int
    global_batch: int
    vocab_divisor: int = 128
    tied: bool = False
    biases: bool = False
    qkv_bias: bool = False
    layernorm: bool = False
    qk_norm: bool = False
    learned_positions: int = 0
    rope: bool = True
    element: int = 2
    wide_grads: bool = True
    adam: bool = True
    momentum: bool = True
    fused_activation: bool = True
    mixture: Experts | None = None

    @property
    def gates(self) -> int:
        """The first linear's output features to the MLP's width."""
        return 2 if self.gated else 1

    @property
    def q_width(self) -> int:
        """Features of all query heads."""
        return self.heads * self.channels

    @property
    def kv_width(self) -> int:
        """Features of K (and of V): kv in the formulas."""
        return self.kv_heads * self.channels

    @property
    def fc1_width(self) -> int:
        """Output features of the MLP's first linear: gate and up, or up."""
        return self.ffn * self.gates

    @property
    def attention_weights(self) -> int:
        """Elements of QKV, its bias, and the output projection."""
        width = self.q_width + 2 * self.kv_width
        bias = width if self.biases or self.qkv_bias else 0
        return self.hidden * (width + self.q_width) + bias

    @property
    def mlp_weights(self) -> int:
        """Elements of both linears and the first one's bias."""
        return self._mlp(self.ffn)

    @property
    def shared_weights(self) -> int:
        """The same of the shared experts."""
        return self._mlp(self.mixture.shared)

    @property
    def expert_weights(self) -> int:
        """The same of all routed experts of a layer."""
        return self.mixture.count * self._mlp(self.mixture.ffn)

    def _mlp(self, ffn: int) -> int:
        bias = ffn * self.gates if self.biases else 0
        return self.hidden * ffn * (self.gates + 1) + bias

    @property
    def norm_size(self) -> int:
        """Parameters of one norm over h."""
        return self.hidden * (2 if self.layernorm else 1)

    @property
    def replicated_per_layer(self) -> int:
        """Parameters of a layer that every rank of a tensor-parallel group holds whole."""
        norms = 2 * self.norm_size
        if self.qk_norm:
            norms += 2 * self.channels * (2 if self.layernorm else 1)
        return norms + (2 * self.hidden if self.biases else 0)

    @property
    def router_weights(self) -> int:
        """More such parameters of a layer with a mixture: its router, and the shared experts'
        gate."""
        return self.hidden * (self.mixture.count + self.mixture.shared_gate)

    def layers_of(self, stage: int, stages: int, virtual: int = 1) -> tuple[bool, ...]:
        """For each layer of a pipeline stage, in the order of the model, whether it has a mixture
        of experts."""
        if self.mixture is None:
            return (False,) * (self.layers // stages)
        length = self.layers // (stages * virtual)
        starts = range(stage * length, self.layers, stages * length)
        return tuple(moe for at in starts for moe in self.mixture.layers[at : at + length])

    def padded_vocab(self, degree: int) -> int:
        """The vocabulary as Megatron pads it for tensor parallel size `degree`."""
        multiple = self.vocab_divisor * degree
        return -(-self.vocab // multiple) * multiple

    @property
    def parameters(self) -> int:
        """Of the whole model, its vocabulary as it is."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = self.learned_positions * self.hidden
        layers = self.layers * (self.attention_weights + self.replicated_per_layer)
        for moe in self.layers_of(0, 1):
            if moe:
                layers += self.expert_weights + self.shared_weights + self.router_weights
            else:
                layers += self.mlp_weights
        return layers + tables + positions + self.norm_size

    @property
    def active_weights(self) -> int:
        """Weights that a token meets in the layers' products."""
        count = self.layers * self.attention_weights
        for moe in self.layers_of(0, 1):
            if moe:
                routed = self.expert_weights * self.mixture.chosen // self.mixture.count
                count += routed + self.shared_weights + self.router_weights
            else:
                count += self.mlp_weights
        return count


def from_args(args: Namespace) -> Model:
    """The model of parsed flags, with what Megatron's `validate_args` would fill in.

    Raises:
        TSPError: a size is missing, or the model has parts that the closed forms do not price.
    """
    for dest, flag in _NOT_PRICED.items():
        if getattr(args, dest, None):
            raise TSPError(
                f"megatron-tsp plan does not price {flag}: its closed forms are of GPT layers "
                "with causal attention; use megatron-tsp trace"
            )
    for dest in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if not getattr(args, dest, None):
            raise TSPError(f"MODEL_ARGS: --{dest.replace('_', '-')} is missing")
    if not args.vocab_size:
        raise TSPError("MODEL_ARGS: --vocab-size is missing: the planner loads no tokenizer")
    hidden, heads = args.hidden_size, args.num_attention_heads
    gated = bool(args.swiglu or getattr(args, "gated_linear_unit", False))
    ffn = args.ffn_hidden_size
    if not ffn:  # as in Megatron's validate_args
        ffn = int((4 * hidden * 2 / 3) / 64) * 64 if args.swiglu else 4 * hidden
    if not args.kv_channels and hidden % heads:
        raise TSPError(f"--hidden-size {hidden} is not divisible by {heads} heads")
    learned = args.position_embedding_type == "learned_absolute"
    batch = args.global_batch_size or args.micro_batch_size
    if not batch:
        raise TSPError("MODEL_ARGS: --global-batch-size is missing")
    return Model(
        layers=args.num_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=args.num_query_groups if args.group_query_attention else heads,
        channels=args.kv_channels or hidden // heads,
        ffn=ffn,
        gated=gated,
        vocab=args.vocab_size,
        sequence=args.seq_length,
        global_batch=batch,
        vocab_divisor=args.make_vocab_size_divisible_by,
        tied=not args.untie_embeddings_and_output_weights,
        biases=bool(args.add_bias_linear),
        qkv_bias=bool(args.add_qkv_bias),
        layernorm=args.normalization == "LayerNorm",
        qk_norm=bool(args.qk_layernorm),
        learned_positions=(args.max_position_embeddings or 0) if learned else 0,
        rope=args.position_embedding_type == "rope",
        element=2 if args.bf16 or args.fp16 else 4,
        wide_grads=args.tsp_grad_dtype == "fp32",
        adam=args.optimizer == "adam",
        momentum=bool(getattr(args, "sgd_momentum", 0.9)),
        fused_activation=bool(args.bias_swiglu_fusion if gated else args.bias_gelu_fusion),
        mixture=_mixture(args, ffn),
    )


def _mixture(args: Namespace, ffn: int) -> Experts | None:
    if not args.num_experts:
        return None
    dispatcher = args.moe_token_dispatcher_type
    if dispatcher not in ("alltoall", "allgather"):
        raise TSPError(
            f"--moe-token-dispatcher-type {dispatcher}: megatron-tsp plan prices alltoall and "
            "allgather"
        )
    layers, frequency = args.num_layers, args.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [at % frequency == 0 for at in range(layers)]
    if len(frequency) != layers:
        raise TSPError(f"--moe-layer-freq names {len(frequency)} layers of {layers}")
    balance, weight = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    coefficients = weight if isinstance(weight, list) else [weight]
    kinds = balance if isinstance(balance, list) else [balance]
    wide = args.moe_router_dtype in ("fp32", "fp64")
    return Experts(
        count=args.num_experts,
        chosen=args.moe_router_topk,
        ffn=args.moe_ffn_hidden_size or ffn,
        layers=tuple(bool(moe) for moe in frequency),
        shared=args.moe_shared_expert_intermediate_size or 0,
        shared_gate=bool(args.moe_shared_expert_gate),
        dispatcher=dispatcher,
        router_element=4 if wide or not (args.bf16 or args.fp16) else 2,
        counted=any(kind.endswith("aux_loss") for kind in kinds) and any(coefficients),
    )
