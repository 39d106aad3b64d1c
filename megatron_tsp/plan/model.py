"""What the planner has to know of a model and its training, from Megatron's flags."""

from argparse import Namespace
from dataclasses import dataclass

from megatron_tsp.errors import TSPError

#: Settings that change a layer's memory, traffic or work in ways that the closed forms do not have.
_NOT_PRICED = {
    "num_experts": "--num-experts",
    "multi_latent_attention": "--multi-latent-attention",
    "mtp_num_layers": "--mtp-num-layers",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "heterogeneous_layers_config_encoded_json": "--heterogeneous-layers-config-encoded-json",
    "experimental_attention_variant": "--experimental-attention-variant",
    "linear_attention_freq": "--linear-attention-freq",
    "window_size": "--window-size",
    "attention_output_gate": "--attention-output-gate",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
}


@dataclass(frozen=True)
class Model:
    """A dense decoder and how it is trained.

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
        return self.ffn * (2 if self.gated else 1)

    @property
    def attention_weights(self) -> int:
        """Elements of QKV, its bias, and the output projection."""
        width = self.q_width + 2 * self.kv_width
        bias = width if self.biases or self.qkv_bias else 0
        return self.hidden * (width + self.q_width) + bias

    @property
    def mlp_weights(self) -> int:
        """Elements of both linears and the first one's bias."""
        bias = self.fc1_width if self.biases else 0
        return self.hidden * (self.fc1_width + self.ffn) + bias

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

    def padded_vocab(self, degree: int) -> int:
        """The vocabulary as Megatron pads it for tensor parallel size `degree`."""
        multiple = self.vocab_divisor * degree
        return -(-self.vocab // multiple) * multiple

    @property
    def parameters(self) -> int:
        """Of the whole model, its vocabulary as it is."""
        per_layer = self.attention_weights + self.mlp_weights + self.replicated_per_layer
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = self.learned_positions * self.hidden
        return self.layers * per_layer + tables + positions + self.norm_size


def from_args(args: Namespace) -> Model:
    """The model of parsed flags, with what Megatron's `validate_args` would fill in.

    Raises:
        TSPError: a size is missing, or the model has parts that the closed forms do not price.
    """
    for dest, flag in _NOT_PRICED.items():
        if getattr(args, dest, None):
            raise TSPError(
                f"megatron-tsp plan does not price {flag}: its closed forms are of dense GPT "
                "layers with causal attention; use megatron-tsp trace"
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
    )
