"""The bar of the tests of the entry: TP 1, the same flags, loss to one unit in the last place."""

from functools import cache

import pytest
from training import grad_norms, losses, train

ULP = 4.8e-7  # of an fp32 loss between 4 and 8


def references(before=None, model="gpt"):
    """A fixture: TP 1 by Megatron's own model, once for each set of flags."""

    @pytest.fixture(scope="module")
    def reference(tmp_path_factory):
        @cache
        def get(flags):
            return train(tmp_path_factory.mktemp("tp1"), 1, flags, before=before, model=model)

        return get

    return reference


def assert_same(ranks, expected, loss=1.5 * ULP, grad_norm=1e-6):
    """Losses and gradient norms by iteration, within these bars."""
    got, want = losses(ranks), losses(expected)
    assert len(got) == len(want)
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= loss, (got, want)
    norms = list(zip(grad_norms(ranks), grad_norms(expected), strict=True))
    assert max(abs(a - b) / b for a, b in norms) <= grad_norm, norms
