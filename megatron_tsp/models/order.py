"""Which walk follows which, so that each block can fetch the next one's weights in time."""

from collections.abc import Sequence

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_tsp.layers.block import Block, Successor


def link(blocks: Sequence[Block], units: Sequence[int | None], ends_in_loss: bool) -> None:
    """Set the successors of a model chunk's blocks.

    Args:
        blocks: in the order of the forward.
        units: for each, the part of the model that is recomputed at once and that it belongs to, or
            None where nothing is recomputed.
        ends_in_loss: the last block's backward follows its forward; else what follows is another
            stage's, or another micro-batch's, and is not foretold.
    """
    for at, block in enumerate(blocks):
        following = blocks[at + 1] if at + 1 < len(blocks) else None
        if following is not None:
            block.after_forward = Successor(following, backward=False)
        elif ends_in_loss:
            block.after_forward = Successor(block, backward=True)
        if units[at] is not None:
            same = following is not None and units[at + 1] == units[at]
            block.after_recompute = Successor(following if same else block, backward=not same)
        if at:
            earlier = units[at - 1]
            if earlier is None or earlier == units[at]:
                block.after_backward = Successor(blocks[at - 1], backward=True)
            else:  # first the whole unit runs forward again
                block.after_backward = Successor(blocks[units.index(earlier)], backward=False)


def recompute_units(
    config: TransformerConfig, mixtures: Sequence[bool]
) -> list[tuple[int | None, int | None]]:
    """For each layer of a chunk the recompute units of its (attention, MLP), or None.

    mixtures: for each layer whether its MLP is a mixture of experts; of that the shared experts'
    weights stream.
    """
    layers = len(mixtures)
    if config.recompute_granularity == "full":
        if config.recompute_method == "block":
            unit = [at if at < config.recompute_num_layers else None for at in range(layers)]
        else:
            unit = [at // config.recompute_num_layers for at in range(layers)]
        return [(u, u) for u in unit]
    modules = config.recompute_modules if config.recompute_granularity == "selective" else ()
    again = {False: "mlp" in modules, True: bool({"moe", "shared_experts"} & set(modules))}
    return [(None, at if again[moe] else None) for at, moe in enumerate(mixtures)]
