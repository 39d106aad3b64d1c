"""Which of Transformer Engine's modules a TSP model asks for, on stand-ins that record just that.

What they compute is checked on a GPU, by benchmarks/gpu/transformer_engine.py.
"""

import pytest
import torch
from layers_common import config, start
from megatron.core.process_groups_config import ProcessGroupCollection
from ranks import RankFailed, run

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


def _grouped(installed):
    """The linears that the experts of a layer are built from, as (class, experts, in, out)."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.extensions import transformer_engine_spec_provider as provider

    from megatron_tsp.models.gpt import TSPGPTModelBuilder, TSPGPTModelConfig

    asked = []

    class Grouped(torch.nn.Module):
        def __init__(self, experts, size_in, size_out, **settings):
            super().__init__()
            assert settings["is_expert"]
            asked.append((type(self).__name__, experts, size_in, size_out))

    class Column(Grouped):
        pass

    class Row(Grouped):
        pass

    transformer_engine.HAVE_TE = installed
    provider.TEColumnParallelGroupedLinear = Column
    provider.TERowParallelGroupedLinear = Row
    start(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    transformer = config(
        2, num_moe_experts=4, moe_ffn_hidden_size=16, moe_grouped_gemm=True,
        moe_shared_expert_intermediate_size=32, expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )  # fmt: skip
    gpt = TSPGPTModelConfig(
        transformer=transformer, vocab_size=48, seq_length=48, tsp=TSPOptions()
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = TSPGPTModelBuilder(gpt).build_model(groups).decoder.layers[0]
    classes = {type(module).__name__ for module in layer.mlp.modules()}
    return asked, classes


def test_grouped_experts_are_its_and_shared_ones_stream():
    for asked, classes in run(_grouped, 2, True):
        assert asked == [("Column", 2, 24, 2 * 16), ("Row", 2, 16, 24)] * 2
        assert {"TEGroupedMLP", "TSPSharedExpertMLP"} <= classes


def test_grouped_experts_without_it_are_refused():
    with pytest.raises(RankFailed, match="--moe-grouped-gemm needs Transformer Engine"):
        run(_grouped, 2, False)
