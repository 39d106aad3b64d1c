"""TSP x pipeline: layouts of the stages, from one checkpoint, against one rank.

Pipeline stages draw other weights than one rank does: all start from one checkpoint.
"""

import pytest
from training import GPT2, LLAMA, assert_same, train

PP = "--tsp-size 2 --pipeline-model-parallel-size 2"
DEPTH = "--num-layers 4 --micro-batch-size 1 --train-iters 3"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """One rank's run of three steps, saved after one: (flags to load that, the other steps)."""
    runs = {}

    def get(model):
        if model not in runs:
            folder = tmp_path_factory.mktemp("begun")
            saving = f"{model} {DEPTH} --save {folder}/ckpt --save-interval 1"
            steps = train(folder / "whole", 1, saving)[0][1:]
            runs[model] = f"{model} {DEPTH} --load {folder}/ckpt --ckpt-step 1", steps
        return runs[model]

    return get


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (GPT2, f"--decoder-first-pipeline-num-layers 1 {BLOCK}"),
        (GPT2, "--num-layers-per-virtual-pipeline-stage 1"),
        (LLAMA, "--decoder-last-pipeline-num-layers 1 --use-tp-pp-dp-mapping"),
        (f"{LLAMA} --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
         "--num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce --overlap-param-gather "
         "--ddp-bucket-size 5000 --microbatch-group-size-per-virtual-pipeline-stage 4 "
         "--overlap-p2p-communication-warmup-flush"),
        # the first stage only embeds, the last has the labels and no layer
        (LLAMA, "--pipeline-model-parallel-layout E|tt|tt|L"),
        (GPT2, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"),
    ],
)  # fmt: skip
def test_a_pipeline_continues_what_one_rank_began(begun, tmp_path, model, flags):
    loading, expected = begun(model)
    ranks = train(tmp_path, 4, f"{loading} {PP} {flags}")
    last = next(rank for rank in ranks if rank[0]["loss"] is not None)
    assert_same([last], [expected])


def _stage_hands_on_other_tokens():
    from megatron.core.pipeline_parallel import schedules

    step = schedules.forward_step

    def broken(*args, **kwargs):
        output, tokens = step(*args, **kwargs)
        stages = output if isinstance(output, list) else [output]
        stages = [t.roll(1, 0) if t.dim() == 3 else t for t in stages]  # not the loss
        return (stages if isinstance(output, list) else stages[0]), tokens

    schedules.forward_step = broken


def test_twin_whose_stage_hands_on_other_tokens_differs(begun, tmp_path):
    loading, expected = begun(LLAMA)
    ranks = train(tmp_path, 4, f"{loading} {PP}", before=_stage_hands_on_other_tokens)
    last = next(rank for rank in ranks if rank[0]["loss"] is not None)
    with pytest.raises(AssertionError):
        assert_same([last], [expected])
