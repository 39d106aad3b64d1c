"""Activations moved to the host by Megatron's fine-grained offloading, through `pretrain`.

There is one kind of memory here: what Megatron would move to the host is copied, and has to be let
go of. A stand-in replaces the switch of Transformer Engine's that Megatron's code flips.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training import LLAMA, SEQ_LENGTH, assert_same, grad_norms, losses, train

OFFLOAD = (
    "--transformer-impl transformer_engine --fine-grained-activation-offloading "
    "--min-offloaded-tensor-size 200 --offload-modules"
)
ALL = "qkv_linear core_attn attn_proj mlp_norm"


def _offload_on_cpu():
    """And write what was moved, by group, and what of it was still there when the first came back:
    all in the first step."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload
    from megatron.core.pipeline_parallel import utils
    from megatron.training import get_args
    from torch.multiprocessing.reductions import StorageWeakRef

    from megatron_tsp import cpu

    cpu._REFUSED_FLAGS.pop("fine_grained_activation_offloading")
    cpu._REQUIRED.pop("transformer_impl")
    transformer_engine.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)
    utils.set_ideal_affinity_for_current_gpu = lambda: None
    handler, moved, found = offload.ChunkOffloadHandler, [], {}
    handler._can_manage_tensor_for_offload = staticmethod(
        lambda tensor: not isinstance(tensor, torch.nn.Parameter)
    )
    move, come_back = handler.offload, handler.reload

    def watched_move(self, tensor, **kwargs):
        moved.append(StorageWeakRef(tensor.untyped_storage()))
        return move(self, tensor, **kwargs)

    def watched_return(self, *args, **kwargs):
        if not found:
            found.update(moved=len(moved), there=sum(not m.expired() for m in moved))
        return come_back(self, *args, **kwargs)

    handler.offload, handler.reload = watched_move, watched_return
    report = offload.print_offload_summary_table

    def write(sizes):
        text = json.dumps({**sizes, **found})
        Path(get_args().tsp_record, f"moved{os.environ['RANK']}.json").write_text(text)
        report(sizes)

    offload.print_offload_summary_table = write


def _moved(folder, rank=0):
    return json.loads((folder / f"moved{rank}.json").read_text())


def test_what_a_layer_keeps_leaves_and_comes_back(reference, tmp_path):
    flags = "--tsp-size 2"
    kept = train(tmp_path / "kept", 2, flags)
    ranks = train(tmp_path / "moved", 2, f"{flags} {OFFLOAD} {ALL}", before=_offload_on_cpu)
    assert losses(ranks) == losses(kept) and grad_norms(ranks) == grad_norms(kept)
    assert_same(ranks, reference(""))
    tokens = 2 * SEQ_LENGTH // 2
    unit = tokens * 64 * 4  # bytes of [s/D, b, h]
    # Megatron leaves the last layer where it is: it is wanted first.
    # Moved are x; q, k and v packed, out, the log-sum-exp of 8 heads; out again; the MLP's input.
    sizes = {"core_attn": 4 * unit + tokens * 8 * 4, "attn_proj": unit, "mlp_norm": unit}
    for rank in (0, 1):
        found = _moved(tmp_path / "moved", rank)
        assert found.pop("there") == 0, "nothing else holds on to what was moved"
        assert found.pop("moved") == 2 * (1 + 4 + 1 + 1)
        assert found == {"qkv_linear": unit, **sizes}


EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 64"
SELECTIVE = "--recompute-granularity selective --recompute-modules moe layernorm core_attn"


@pytest.mark.parametrize(
    ("world", "flags", "modules"),
    [
        (4, f"{LLAMA} --tsp-size 2 --num-layers 4 --pipeline-model-parallel-size 2 "
            "--mtp-num-layers 1 --tsp-attention-exchange alltoall", ALL),
        (2, f"{LLAMA} --tsp-size 2 {EXPERTS} --expert-model-parallel-size 2 {SELECTIVE}", ALL),
        (2, f"{LLAMA} --tsp-size 2 --tsp-blocks mlp --eval-iters 1 --eval-interval 2 "
            "--split 90,10,0", f"attn_norm {ALL}"),
        (2, "--tsp-size 2 --hidden-dropout 0.1 --num-layers 4 --hybrid-layer-pattern *-*-",
         "attn_norm mlp_norm"),
    ],
)  # fmt: skip
def test_it_changes_no_bit(tmp_path, world, flags, modules):
    model = "hybrid" if "hybrid" in flags else "gpt"
    flags += " --train-iters 3"
    kept = train(tmp_path / "kept", world, flags, model=model)
    offload = f"{flags} {OFFLOAD} {modules}"
    ranks = train(tmp_path / "moved", world, offload, before=_offload_on_cpu, model=model)
    assert losses(ranks) == losses(kept) and grad_norms(ranks) == grad_norms(kept)
    names = set(modules.split())
    if "mlp" not in flags:
        names = {name.replace("attn_norm", "qkv_linear") for name in names}
    assert names <= _moved(tmp_path / "moved").keys()


def _one_comes_back_otherwise():
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    _offload_on_cpu()
    come_back = ChunkOffloadHandler.reload

    def broken(self, *args, **kwargs):
        return come_back(self, *args, **kwargs).mul_(1.01)

    ChunkOffloadHandler.reload = broken


def test_twin_that_comes_back_otherwise_differs(reference, tmp_path):
    flags = f"--tsp-size 2 {OFFLOAD} mlp_norm"
    broken = train(tmp_path, 2, flags, before=_one_comes_back_otherwise)
    with pytest.raises(AssertionError):
        assert_same(broken, reference(""))
