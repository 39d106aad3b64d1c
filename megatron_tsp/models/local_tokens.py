"""What TSP changes in a language model of Megatron's: local tokens inside, nothing outside."""

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_tsp import parallel_state, streaming
from megatron_tsp.errors import TSPError
from megatron_tsp.layers.attention import TSPSelfAttention
from megatron_tsp.layers.block import Block
from megatron_tsp.layers.embedding import TSPLanguageModelEmbedding, TSPVocabParallelEmbedding
from megatron_tsp.layers.latent_attention import TSPLatentAttention
from megatron_tsp.layers.linear import TSPOutputLayer
from megatron_tsp.layers.loss import cross_entropy
from megatron_tsp.layers.mlp import TSPMLP
from megatron_tsp.models.order import link, recompute_units
from megatron_tsp.options import TSPOptions
from megatron_tsp.refusals import refuse


class LocalTokens:
    """In front of a `LanguageModel` of Megatron's among the bases: takes the whole sequence's token
    ids on every rank of the TSP group, and returns its loss there.

    Args as the model's, whose layer spec must be TSP's, and:
        options: TSP's own settings.

    Raises:
        TSPError: for a setting in `config` that TSP does not carry.
    """

    def __init__(self, config: TransformerConfig, *args, options: TSPOptions, **kwargs):
        refuse(config)
        super().__init__(config, *args, **kwargs)
        self.options = options
        if options.streams_attention:
            self._spread_tokens_in_zigzag()
        self._link_blocks()

    def _spread_tokens_in_zigzag(self) -> None:
        options = self.options
        if hasattr(self, "embedding"):
            _become(self.embedding, LanguageModelEmbedding, TSPLanguageModelEmbedding)
            _become(
                self.embedding.word_embeddings, VocabParallelEmbedding, TSPVocabParallelEmbedding
            )
            self.embedding.word_embeddings.set_block(options.vocab_schedule, options.wide_grads)
            if self.embedding.add_position_embedding:
                # Each rank sees its own positions only: Megatron sums such gradients.
                self.embedding.position_embeddings.weight.sequence_parallel = True
        if hasattr(self, "output_layer"):
            _become(self.output_layer, ColumnParallelLinear, TSPOutputLayer)
            self.output_layer.set_block(options.vocab_schedule, "loss", options.wide_grads)
        if hasattr(self, "rotary_pos_emb"):
            # Megatron slices RoPE over this group, in zigzag order.
            self.rotary_pos_emb.cp_group = parallel_state.token_group(self.pg_collection.tp)

    def _link_blocks(self) -> None:
        """Tell each block whose weights follow its own."""
        blocks: list[Block] = []
        units: list[int | None] = []
        layers = self.decoder.layers
        mixtures = [getattr(layer, "is_moe_layer", False) for layer in layers]
        for layer, unit in zip(layers, recompute_units(self.config, mixtures), strict=True):
            linears = _linears(layer) if self.options.streams_attention else ()
            blocks += [linear.block for linear in linears]
            units += [unit[0]] * len(linears)
            mlp = getattr(layer, "mlp", None)
            if isinstance(mlp, MoELayer):
                mlp = mlp.shared_experts
            if isinstance(mlp, TSPMLP):
                blocks.append(mlp.block)
                units.append(unit[1])
        # With multi-token prediction the loss is walked over several times; nothing is foretold.
        once = self.options.streams_attention and not self.config.mtp_num_layers
        ends_in_loss = self.post_process and once
        if ends_in_loss:
            block = self.output_layer.block
            block.fetch = lambda: (self._output_shard(),)
            blocks.append(block)
            units.append(None)
        link(blocks, units, ends_in_loss)

    def forward(self, *args, labels: Tensor | None = None, **kwargs) -> Tensor:
        """As the model's with labels: the loss of every token, fp32 [b, s].

        On a pipeline stage that is not the last: hidden states [s/D, b, h].

        Raises:
            TSPError: the last stage is called without labels.
        """
        if self.options.streams_attention and self.post_process and labels is None:
            raise TSPError(
                "a TSP model returns the loss and needs labels; for logits or inference load "
                "the checkpoint in Megatron with --tensor-model-parallel-size"
            )
        streaming.drop_prefetches()  # the weights may have changed since
        return super().forward(*args, labels=labels, **kwargs)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """The loss of every token, fp32 [b, s]; `logits` are what the output layer returned."""
        if not self.options.streams_attention:
            return super().compute_language_model_loss(labels, logits)
        loss, self.output_layer.hits = cross_entropy(
            logits,
            self._output_shard(),
            labels,
            self.output_layer.block,
            self.pg_collection.tp,
            self.options.loss_chunk,
        )
        return loss

    def _output_shard(self) -> Tensor:
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        return self.output_layer(None, weight=weight, shards_only=True)[0]


def _linears(layer: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The linears of a layer's attention, or of what scans the sequence, in the forward's order."""
    inner = layer.mixer if isinstance(layer, MambaLayer) else layer.self_attention
    if isinstance(inner, TSPSelfAttention):
        return inner.linear_qkv, inner.linear_proj
    if isinstance(inner, TSPLatentAttention):
        names = "q_down_proj kv_down_proj q_up_proj q_proj kv_up_proj proj".split()
        linears = (getattr(inner, f"linear_{name}", None) for name in names)
        return tuple(linear for linear in linears if linear is not None)
    if isinstance(inner, GatedDeltaNet | MambaMixer):
        return inner.in_proj, inner.out_proj
    return ()


def _become(module: torch.nn.Module, base: type, cls: type) -> None:
    """Give `module` the forward of `cls`: these models have no spec for embedding and output layer.

    Raises:
        TypeError: it is not exactly a `base`, so that this Megatron is not the one we know.
    """
    if type(module) is not base:
        raise TypeError(f"expected Megatron's {base.__name__}, found {type(module).__name__}")
    module.__class__ = cls
