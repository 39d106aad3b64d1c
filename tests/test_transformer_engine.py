"""Which of Transformer Engine's modules a TSP model asks for, on stand-ins that record just that.

What they compute is checked on a GPU, by benchmarks/gpu/transformer_engine.py.
"""

import pytest
import torch
from layers_common import config, start
from megatron.core.process_groups_config import ProcessGroupCollection
from ranks import run

from megatron_tsp.options import TSPOptions

TE = "transformer_engine"


def _asked(blocks, installed, implementation):
    """(widths of the stand-ins that were built, the classes of a layer's modules)."""
    from megatron.core.extensions import transformer_engine

    from megatron_tsp.models.gpt import TSPGPTModelBuilder, TSPGPTModelConfig

    norms = []

    class Norm(torch.nn.Module):
        def __init__(self, config, hidden_size, eps):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))
            norms.append(hidden_size)

    transformer_engine.HAVE_TE = installed
    transformer_engine.TENorm = Norm
    start(2)
    transformer = config(2, kv_channels=4, qk_layernorm=True, transformer_impl=implementation)
    gpt = TSPGPTModelConfig(
        transformer=transformer, vocab_size=48, seq_length=48, tsp=TSPOptions(blocks=blocks)
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = TSPGPTModelBuilder(gpt).build_model(groups).decoder.layers[0]
    return norms, {type(module).__name__ for module in layer.modules()}


@pytest.mark.parametrize(
    ("blocks", "of_each_layer"),
    [
        ("all", [4, 4]),  # of queries and keys; the others are inside the streamed blocks
        ("mlp", [24, 4, 4]),  # and in front of an attention that stays tensor-parallel
        ("attention", [4, 4, 24]),
    ],
)
def test_norms_that_stand_alone_are_its_and_the_rest_stays(blocks, of_each_layer):
    for norms, classes in run(_asked, 2, blocks, True, TE):
        assert norms == of_each_layer * 2 + [24]
        assert {"Norm", "TSPCoreAttention", "TSPLayerNormColumnParallelLinear"} <= classes
        assert "TSPNorm" not in classes and not any(name.startswith("TE") for name in classes)


@pytest.mark.parametrize(("installed", "implementation"), [(False, TE), (True, "local")])
def test_without_it_or_without_asking_they_are_tsps(installed, implementation):
    norms, classes = run(_asked, 2, "all", installed, implementation)[0]
    assert norms == [] and "TSPNorm" in classes
