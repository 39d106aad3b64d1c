"""Recompute that lets go of what it has used: torch's own in the place of Megatron's.

Megatron's `tensor_parallel.checkpoint` runs a backward inside the backward. The recomputed output
and its gradient, [s/D, b, h] each, are then held until the backward of all that was recomputed is
done. torch's `checkpoint` without reentrance recomputes when the first saved tensor is asked for,
inside the one backward there is, and a tensor goes with its last user.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.utils.checkpoint
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random


def install() -> None:
    """Use `checkpoint` wherever Megatron asks for its own."""
    tensor_parallel.checkpoint = checkpoint


def checkpoint(function, distribute_saved_activations: bool, *args):
    """function(*args), to be computed again in the backward, as Megatron's of this name: with the
    same random numbers, also of Megatron's trackers.

    Unlike there, gradients are enabled in the forward too: a mixture of experts takes that for the
    sign that it is the second time, and counts its losses.
    """
    assert not distribute_saved_activations  # TSP refuses it
    states = random._get_all_rng_states()
    # A context, not a keyword: torch has the keyword from 2.9.
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return torch.utils.checkpoint.checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), _random_states(states)),
        )


@contextmanager
def _random_states(states: tuple) -> Iterator[None]:
    with random._fork_rng():
        random._set_all_rng_states(*states)
        yield
