"""Every layer, forward and backward, against plain unsharded torch in fp64."""

from functools import cache

import dropout_common
import kernel_stand_ins
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kernels_common import KERNELS
from layers_common import config, random, start
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from ranks import RankFailed, run

from megatron_tsp import zigzag
from megatron_tsp.gradients import Gradients
from megatron_tsp.layers import (
    core_attention,
    dropout,
    embedding,
    head_exchange,
    kv_gather,
    linear,
    loss,
    mlp,
    norm,
    sinks,
    varlen,
)
from megatron_tsp.layers.block import Block
from megatron_tsp.layers.mask import Mask
from megatron_tsp.streaming import Ring, stream

SEQ, BATCH, HIDDEN = 48, 2, 24  # 48 = 2 x 24: cut by D = 1, 2, 3, 4
DEGREES = (1, 2, 3, 4)


def _local(full, degree, rank, dim=0):
    return zigzag.take(full, dim, degree, rank).detach().clone()


def _rows(full, degree, rank):
    """A rank's shard of a weight cut along its first dimension."""
    return full.chunk(degree)[rank].clone()


def _columns(full, degree, rank):
    return full.chunk(degree, dim=1)[rank].contiguous()


class Case:
    """One layer: what ranks compute (`sharded`) and what they should (`reference`).

    `sharded(degree, rank)` returns named tensors. `reference()` returns the same names with whole
    tensors; `layouts` says how a rank's part is cut from each: "tokens", "rows", "columns", "same".
    """

    layouts: dict
    degrees = DEGREES

    def sharded(self, degree, rank):
        raise NotImplementedError

    def reference(self):
        raise NotImplementedError

    def expected(self, degree, rank):
        cut = {"tokens": _local, "rows": _rows, "columns": _columns, "same": lambda t, *_: t}
        whole = self.reference()
        return {
            name: cut[self.layouts[name]](tensor, degree, rank) for name, tensor in whole.items()
        }


class Column(Case):
    layouts = {"y": "tokens", "dx": "tokens", "dw": "rows", "db": "rows"}

    def __init__(self, bias):
        self.bias = bias

    def whole(self):
        x, w = random(SEQ, BATCH, HIDDEN), random(36, HIDDEN, seed=1)
        return x, w, random(36, seed=2), random(SEQ, BATCH, 36, seed=3)

    def sharded(self, degree, rank):
        x, w, b, dy = self.whole()
        layer = linear.TSPColumnParallelLinear(
            HIDDEN, 36, config=config(degree), init_method=lambda w: None, bias=self.bias,
            gather_output=False, skip_bias_add=False,
        )  # fmt: skip
        layer.weight.data.copy_(_rows(w, degree, rank))
        if self.bias:
            layer.bias.data.copy_(_rows(b, degree, rank))
        x = _local(x, degree, rank).requires_grad_()
        y, _ = layer(x)
        y.backward(_local(dy, degree, rank))
        out = {"y": y, "dx": x.grad, "dw": layer.weight.grad}
        return {**out, "db": layer.bias.grad} if self.bias else out

    def reference(self):
        x, w, b, dy = (t.requires_grad_() for t in self.whole())
        y = F.linear(x, w, b if self.bias else None)
        y.backward(dy)
        out = {"y": y, "dx": x.grad, "dw": w.grad}
        return {**out, "db": b.grad} if self.bias else out


class Row(Case):
    layouts = {"y": "tokens", "dx": "tokens", "dw": "columns"}

    def whole(self):
        x, w = random(SEQ, BATCH, 36), random(HIDDEN, 36, seed=1)
        return x, w, random(SEQ, BATCH, HIDDEN, seed=3)

    def sharded(self, degree, rank):
        x, w, dy = self.whole()
        layer = linear.TSPRowParallelLinear(
            36, HIDDEN, config=config(degree), init_method=lambda w: None, bias=False,
            input_is_parallel=True, skip_bias_add=False,
        )  # fmt: skip
        layer.weight.data.copy_(_columns(w, degree, rank))
        x = _local(x, degree, rank).requires_grad_()
        y, _ = layer(x)
        y.backward(_local(dy, degree, rank))
        return {"y": y, "dx": x.grad, "dw": layer.weight.grad}

    def reference(self):
        x, w, dy = (t.requires_grad_() for t in self.whole())
        y = F.linear(x, w)
        y.backward(dy)
        return {"y": y, "dx": x.grad, "dw": w.grad}


class MLP(Case):
    """Weights are kept per shard: gated ones as [gate; up] of each shard."""

    layouts = {"y": "tokens", "dx": "tokens", "dw1": "rows", "dw2": "columns", "db1": "rows"}

    def __init__(self, gated, activation, bias=False, **changes):
        self.gated, self.bias = gated, bias
        self.changes = dict(
            gated_linear_unit=gated, activation_func=activation, add_bias_linear=bias, **changes
        )

    def whole(self):
        width = 96 if self.gated else 48
        x, w1 = random(SEQ, BATCH, HIDDEN), random(width, HIDDEN, seed=1)
        w2, b1 = random(HIDDEN, 48, seed=2), random(width, seed=4)
        return x, w1, w2, b1, random(SEQ, BATCH, HIDDEN, seed=3)

    def shard1(self, whole, degree, rank):
        if not self.gated:
            return _rows(whole, degree, rank)
        return torch.cat([_rows(half, degree, rank) for half in whole.chunk(2)])

    def expected(self, degree, rank):
        whole = self.reference()
        out = {n: _local(whole[n], degree, rank) for n in ("y", "dx")}
        out["dw2"] = _columns(whole["dw2"], degree, rank)
        for name in ("dw1", "db1"):
            if name in whole:
                out[name] = self.shard1(whole[name], degree, rank)
        return out

    def sharded(self, degree, rank):
        x, w1, w2, b1, dy = self.whole()
        settings = config(degree, **self.changes)
        spec = MLPSubmodules(
            linear_fc1=linear.TSPColumnParallelLinear, linear_fc2=linear.TSPRowParallelLinear
        )
        layer = mlp.TSPMLP(settings, spec, ffn_hidden_size=48)
        layer.linear_fc1.weight.data.copy_(self.shard1(w1, degree, rank))
        layer.linear_fc2.weight.data.copy_(_columns(w2, degree, rank))
        if self.bias:
            layer.linear_fc1.bias.data.copy_(self.shard1(b1, degree, rank))
        x = _local(x, degree, rank).requires_grad_()
        y, _ = layer(x)
        y.backward(_local(dy, degree, rank))
        fc1, fc2 = layer.linear_fc1, layer.linear_fc2
        out = {"y": y, "dx": x.grad, "dw1": fc1.weight.grad, "dw2": fc2.weight.grad}
        return {**out, "db1": fc1.bias.grad} if self.bias else out

    def reference(self):
        x, w1, w2, b1, dy = (t.requires_grad_() for t in self.whole())
        z = F.linear(x, w1, b1 if self.bias else None)
        function = self.changes["activation_func"]
        clamp = self.changes.get("activation_func_clamp_value")
        if self.gated:
            gate, up = z.chunk(2, -1)
            if clamp:
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
            active = function(gate) * (up + self.changes.get("glu_linear_offset", 0.0))
        else:
            active = function(z)
        y = F.linear(active, w2)
        y.backward(dy)
        out = {"y": y, "dx": x.grad, "dw1": w1.grad, "dw2": w2.grad}
        return {**out, "db1": b1.grad} if self.bias else out


#: Boundaries of each sample's documents: inside chunks, on their borders, of one token, none.
DOCUMENTS = ((0, 5, 17, 18, 24, 40, SEQ), (0, 31, SEQ))
#: So many that a kernel gets them in one call, if it can.
MANY = ((0, 1, 3, 9, 10, 20, 23, 29, 31, 40, 42, SEQ), (0, 2, 4, 18, 26, 33, 35, 46, SEQ))


KEY = 2**62 + 12345  # of the dropout


class Attention(Case):
    layouts = dict.fromkeys(("out", "dq", "dk", "dv"), "tokens")

    def __init__(
        self, kv_heads, scale=1.0, split=True, exchange="allgather", window=None, documents=None,
        sinks="vanilla", heads=12, degrees=DEGREES, dropout=0.0, kernel=None,
    ):  # fmt: skip
        self.kv_heads, self.scale, self.split = kv_heads, scale, split
        self.kernel, self.channels = kernel, 8 if kernel else 4
        self.exchange, self.window, self.documents, self.sinks = exchange, window, documents, sinks
        self.heads, self.degrees, self.dropout = heads, degrees, dropout
        if sinks == "learnable":
            self.layouts = {**self.layouts, "dsinks": "rows"}

    def whole(self):
        d = self.channels
        kv = (SEQ, BATCH, self.kv_heads, d)
        q, dout = (random(SEQ, BATCH, self.heads, d, seed=s) for s in (0, 3))
        return q * self.scale, random(*kv, seed=1), random(*kv, seed=2), dout

    def packed(self):
        if self.documents is None:
            return None
        bounds = [at * SEQ + end for at, ends in enumerate(self.documents) for end in ends]
        bounds = torch.tensor(sorted({*bounds}), dtype=torch.int32)
        return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)

    def sharded(self, degree, rank):
        q, k, v, dout = (_local(t, degree, rank) for t in self.whole())
        for t in (q, k, v):
            t.requires_grad_()
        groups = type("Groups", (), {"cp": dist.group.WORLD, "tp": None})
        window = None if self.window is None else (self.window, 0)
        settings = config(
            1, num_attention_heads=self.heads, num_query_groups=self.kv_heads,
            kv_channels=self.channels, window_size=window, softmax_type=self.sinks,
            attention_dropout=self.dropout,
        )  # fmt: skip
        core_attention.draw = self.draw
        for module in (kv_gather, head_exchange):
            module._WORTH_SPLITTING = 0 if self.split else 2**30
        core = core_attention.TSPCoreAttention(
            settings, 1, AttnMaskType.causal, "self", pg_collection=groups, exchange=self.exchange,
            sink_group=dist.group.WORLD,
        )  # fmt: skip
        if self.kernel:
            kernel_stand_ins.install(self.kernel)
            core.kernel = KERNELS[self.kernel](core.kernel.scale)
        if self.sinks == "learnable":
            core.softmax_offset.data.copy_(_rows(random(self.heads, seed=7), degree, rank))
        out = core(q, k, v, None, packed_seq_params=self.packed()).view_as(q)
        out.backward(dout)
        found = {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
        if self.sinks == "learnable":
            found["dsinks"] = core.softmax_offset.grad
        return found

    @staticmethod
    def draw():
        """The key of the dropout, alike on all ranks."""
        return KEY

    def hidden(self):
        """[b, 1, s, s]: the keys that a query does not see."""
        query, key = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None]
        hidden = (key > query) | (query - key > (SEQ if self.window is None else self.window))
        samples = []
        for bounds in self.documents or ((0, SEQ),) * BATCH:
            document = torch.bucketize(torch.arange(SEQ), torch.tensor(bounds[1:]), right=True)
            samples.append(hidden | (document[:, None] != document[None]))
        return torch.stack(samples).unsqueeze(1)

    def reference(self):
        q, k, v, dout = (t.requires_grad_() for t in self.whole())
        sinks = random(self.heads, seed=7).requires_grad_()
        repeat = self.heads // self.kv_heads
        heads = [t.permute(1, 2, 0, 3) for t in (q, *(
            t.repeat_interleave(repeat, 2) for t in (k, v)
        ))]  # fmt: skip
        scores = heads[0] @ heads[1].transpose(-1, -2) * self.channels**-0.5
        scores = scores.masked_fill(self.hidden(), -torch.inf)
        if self.sinks != "vanilla":
            logits = sinks if self.sinks == "learnable" else 0 * sinks
            column = logits.view(1, -1, 1, 1).expand(BATCH, -1, SEQ, -1)
            scores = torch.cat((scores, column), -1)
        kept = dropout_common.kept(KEY, self.dropout, BATCH, self.heads, SEQ)
        weights = scores.softmax(-1)[..., :SEQ] * kept / (1 - self.dropout)
        out = (weights @ heads[2]).permute(2, 0, 1, 3)
        out.backward(dout)
        found = {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
        return {**found, "dsinks": sinks.grad} if self.sinks == "learnable" else found


class Embedding(Case):
    layouts = {"y": "tokens", "dw": "rows"}

    def __init__(self, vocabulary, streams):
        self.vocabulary, self.streams = vocabulary, streams

    def whole(self):
        last = self.vocabulary - 1
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, last, (BATCH, SEQ), generator=generator)
        ids[0, :9] = last  # one owner is asked for much more than the others
        return ids, random(self.vocabulary, HIDDEN), random(SEQ, BATCH, HIDDEN, seed=3)

    def sharded(self, degree, rank):
        ids, table, dy = self.whole()
        layer = embedding.TSPVocabParallelEmbedding(
            self.vocabulary, HIDDEN, config=config(degree), init_method=lambda w: None
        )
        layer.set_block("ring", wide_grads=True)
        assert layer.streams_table(SEQ * BATCH // degree) == self.streams
        layer.weight.data.copy_(_rows(table, degree, rank))
        y = layer(ids)
        y.backward(_local(dy, degree, rank))
        return {"y": y, "dw": layer.weight.grad}

    def reference(self):
        ids, table, dy = self.whole()
        table.requires_grad_()
        y = F.embedding(ids, table).transpose(0, 1)
        y.backward(dy)
        return {"y": y, "dw": table.grad}


class Loss(Case):
    layouts = {"loss": "same", "dx": "tokens", "dw": "rows"}

    def __init__(self, chunk, scale=1.0):
        self.chunk, self.scale = chunk, scale

    def whole(self):
        labels = torch.randint(0, 48, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
        dloss = random(BATCH, SEQ, seed=3)
        dloss[:, 5:9] = 0  # masked tokens
        return self.scale * random(SEQ, BATCH, HIDDEN), random(48, HIDDEN, seed=1), labels, dloss

    def sharded(self, degree, rank):
        x, w, labels, dloss = self.whole()
        x = _local(x, degree, rank).requires_grad_()
        w = _rows(w, degree, rank).requires_grad_()
        group = dist.group.WORLD
        block = Block(stream("ring", group), "loss", lambda: (w,))
        value, _ = loss.cross_entropy(x, w, labels, block, group, self.chunk)
        value.backward(dloss)
        return {"loss": value, "dx": x.grad, "dw": w.grad}

    def reference(self):
        x, w, labels, dloss = self.whole()
        x.requires_grad_(), w.requires_grad_()
        logits = F.linear(x, w).permute(1, 2, 0)
        value = F.cross_entropy(logits, labels, reduction="none")
        value.backward(dloss)
        return {"loss": value, "dx": x.grad, "dw": w.grad}


class Norm(Case):
    """Parameter gradients are this rank's tokens' part: Megatron sums them over the group."""

    layouts = {"y": "tokens", "dx": "tokens"}
    eps = 1e-5

    def __init__(self, normalization):
        self.normalization = normalization

    def whole(self):
        return (
            random(SEQ, BATCH, HIDDEN),
            random(HIDDEN, seed=1),
            random(SEQ, BATCH, HIDDEN, seed=3),
        )

    def sharded(self, degree, rank):
        x, w, dy = self.whole()
        layer = norm.TSPNorm(config(degree, normalization=self.normalization), HIDDEN, self.eps)
        assert layer.weight.sequence_parallel == (degree > 1)
        layer.weight.data.copy_(w)
        x = _local(x, degree, rank).requires_grad_()
        y = layer(x)
        y.backward(_local(dy, degree, rank))
        total = layer.weight.grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, self.weight_grad())
        return {"y": y, "dx": x.grad}

    def _run(self):
        x, w, dy = (t.requires_grad_() for t in self.whole())
        if self.normalization == "RMSNorm":
            y = F.rms_norm(x, (HIDDEN,), w, self.eps)
        else:
            y = F.layer_norm(x, (HIDDEN,), w, None, self.eps)
        y.backward(dy)
        return x, w, y

    def weight_grad(self):
        return self._run()[1].grad

    def reference(self):
        x, _, y = self._run()
        return {"y": y, "dx": x.grad}


CASES = {
    "column": Column(bias=False),
    "column-bias": Column(bias=True),
    "row": Row(),
    "swiglu": MLP(True, F.silu),
    "geglu-bias": MLP(True, F.gelu, bias=True),
    "swiglu-clamped": MLP(True, F.silu, activation_func_clamp_value=0.7, glu_linear_offset=1.0),
    "gelu-bias": MLP(False, F.gelu, bias=True),
    "mha": Attention(12),
    "mha-in-one-exchange": Attention(12, split=False),
    "gqa": Attention(4),
    "gqa-fewer-than-ranks": Attention(2),
    "gqa-kept": Attention(4, exchange="allgather-kept"),
    "mqa": Attention(1),
    "mqa-on-8": Attention(1, heads=8, degrees=(8,), documents=DOCUMENTS, sinks="learnable"),
    "gqa-on-8": Attention(2, heads=8, degrees=(8,), window=7),
    "gqa-on-8-alltoall": Attention(2, heads=8, degrees=(8,), window=7, exchange="alltoall"),
    "mqa-on-8-ring": Attention(1, heads=8, degrees=(8,), scale=100.0, exchange="ring"),
    "mha-large-logits": Attention(12, scale=100.0),
    "mha-alltoall": Attention(12, exchange="alltoall"),
    "gqa-alltoall": Attention(4, exchange="alltoall"),
    "gqa-fewer-than-ranks-alltoall": Attention(2, exchange="alltoall"),
    "mqa-alltoall": Attention(1, exchange="alltoall"),
    "mha-alltoall-large-logits": Attention(12, scale=100.0, exchange="alltoall"),
    "gqa-alltoall-in-one": Attention(4, exchange="alltoall", split=False),
    "gqa-alltoall-heads-cut-unevenly": Attention(4, exchange="alltoall", degrees=(6,)),
    "gqa-alltoall-parts-of-a-kv-head": Attention(
        4, exchange="alltoall", heads=16, degrees=(8,), sinks="learnable"
    ),
    "mha-ring": Attention(12, exchange="ring"),
    "gqa-ring": Attention(4, exchange="ring"),
    "mqa-ring-large-logits": Attention(1, scale=100.0, exchange="ring"),
    "sinks-window-documents-ring": Attention(
        4, exchange="ring", sinks="learnable", window=9, documents=DOCUMENTS
    ),
    **{
        f"{name}{'-alltoall' if exchange == 'alltoall' else ''}": Attention(
            **settings, exchange=exchange
        )
        for exchange in ("allgather", "alltoall")
        for name, settings in {
            "window-0": dict(kv_heads=12, window=0),
            "window-5": dict(kv_heads=4, window=5),
            "window-of-two-chunks": dict(kv_heads=2, window=19),
            "documents": dict(kv_heads=4, documents=DOCUMENTS),
            "documents-large-logits": dict(kv_heads=1, documents=DOCUMENTS, scale=100.0),
            "documents-window-4": dict(kv_heads=12, documents=DOCUMENTS, window=4),
            "off-by-one": dict(kv_heads=12, sinks="off-by-one"),
            "sinks": dict(kv_heads=4, sinks="learnable"),
            "sinks-window-documents": dict(
                kv_heads=2, sinks="learnable", window=9, documents=DOCUMENTS
            ),
        }.items()
    },
    "dropout": Attention(4, dropout=0.3),
    "dropout-kept": Attention(2, exchange="allgather-kept", dropout=0.1, window=9),
    "dropout-alltoall": Attention(12, exchange="alltoall", dropout=0.1),
    "dropout-alltoall-heads-cut-unevenly": Attention(
        4, exchange="alltoall", degrees=(6,), dropout=0.3, documents=DOCUMENTS
    ),
    "dropout-ring": Attention(4, exchange="ring", dropout=0.1, documents=DOCUMENTS),
    "dropout-sinks-window-documents": Attention(
        1, dropout=0.5, sinks="learnable", window=9, documents=DOCUMENTS
    ),
    "dropout-sinks-window-documents-alltoall": Attention(
        2, exchange="alltoall", dropout=0.5, sinks="learnable", window=9, documents=DOCUMENTS
    ),
    "many-documents-flash-attn-2": Attention(4, documents=MANY, kernel="flash-attn 2"),
    "many-documents-window-flash-attn-2": Attention(
        2, documents=MANY, window=4, sinks="learnable", kernel="flash-attn 2"
    ),
    "many-documents-alltoall-flash-attn-3": Attention(
        4, documents=MANY, window=6, exchange="alltoall", kernel="flash-attn 3"
    ),
    "many-documents-ring-flash-attn-3": Attention(
        1, documents=MANY, exchange="ring", kernel="flash-attn 3.0.0b1"
    ),
    "mha-large-logits-transformer-engine": Attention(
        12, scale=100.0, kernel="Transformer Engine 2.18"
    ),
    "documents-window-alltoall-transformer-engine": Attention(
        4, documents=DOCUMENTS, window=4, exchange="alltoall", kernel="Transformer Engine 2.8"
    ),
    "embedding": Embedding(96, streams=False),
    "embedding-table": Embedding(12, streams=True),
    "loss": Loss(chunk=1000),
    "loss-chunked": Loss(chunk=7),
    "loss-large-logits": Loss(chunk=16, scale=100.0),
    "rmsnorm": Norm("RMSNorm"),
    "layernorm": Norm("LayerNorm"),
}


def _on_rank(degree, names):
    rank = start(degree).rank()
    results = {}
    for name in names:
        out = CASES[name].sharded(degree, rank)
        results[name] = {key: tensor.detach().clone() for key, tensor in out.items()}
    return results


@cache
def _results(degree):
    """All cases on one group: a case costs milliseconds."""
    names = tuple(name for name, case in CASES.items() if degree in case.degrees)
    return run(_on_rank, degree, degree, names)


def _compare(case, degree, results):
    for rank, result in enumerate(results):
        expected = case.expected(degree, rank)
        assert result.keys() == expected.keys()
        for name, want in expected.items():
            torch.testing.assert_close(
                result[name], want.detach(), rtol=1e-9, atol=1e-10,
                msg=lambda text, name=name, rank=rank: f"{name} on rank {rank}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "degree"), [(name, degree) for name, case in CASES.items() for degree in case.degrees]
)
def test_equals_the_unsharded_computation(name, degree):
    _compare(CASES[name], degree, [result[name] for result in _results(degree)])


def _wrong_chunks(rank, degree):
    """Contiguous halves instead of zigzag."""
    return (0,) if degree == 1 else (2 * rank, 2 * rank + 1)


def _break(what):
    if what == "zigzag":
        zigzag.chunks_of = _wrong_chunks
    elif what == "kv order":
        before = kv_gather._Layout.before
        kv_gather._Layout.before = lambda self, chunk: [
            span._replace(at=span.at - 1) for span in before(self, chunk)
        ]
    elif what == "delta":  # of another row
        delta = head_exchange.delta
        for exchange in (kv_gather, head_exchange):
            exchange.delta = lambda dout, out: delta(dout, out).roll(1, 0)
    elif what == "ring backward":  # every step with the keys that came first
        walk = Ring.backward

        def first_only(self, shards, grads, then=lambda: None):
            first = None
            for owner, held in walk(self, shards, grads, then):
                first = first or [t.clone() for t in held]
                yield owner, first

        Ring.backward = first_only
    elif what == "local window":  # from a chunk's own keys only
        before = kv_gather._Layout.before
        kv_gather._Layout.before = lambda self, chunk: [] if chunk.start else before(self, chunk)
    elif what in ("window", "documents"):
        tiles = Mask.tiles
        Mask.tiles = lambda self, *spans: tiles(
            Mask(self.window if what != "window" else None,
                 self.documents if what != "documents" else None), *spans
        )  # fmt: skip
    elif what == "documents of the first sample":
        tiles = Mask.tiles
        Mask.tiles = lambda self, *spans: tiles(
            Mask(self.window, self.documents[:1] * BATCH), *spans
        )
    elif what == "packed boundaries":  # the first two documents are one
        rows = varlen._rows

        def merged(*args):
            found, longest, cumulated = rows(*args)
            return found, 2 * longest, torch.cat((cumulated[:1], cumulated[2:]))

        varlen._rows = merged
    elif what == "sinks of the first rank":
        sinks.gather = lambda own, group: own.repeat(group.size())
    elif what == "a key for each rank":
        Attention.draw = staticmethod(lambda: KEY + dist.get_rank())
    elif what == "positions of the rank":
        dropout._positions = lambda spans, device: torch.arange(
            sum(span.stop - span.start for span in spans), device=device
        )
    elif what == "heads of the call":
        dropout.Dropout.of_heads = lambda self, some: self
    elif what == "doubled loss gradient":
        backward = loss._GatherTokens.backward
        loss._GatherTokens.backward = staticmethod(
            lambda ctx, dwhole: (2 * backward(ctx, dwhole)[0], None)
        )
    elif what == "dropped dW":
        add = Gradients.add_product
        Gradients.add_product = lambda self, index, dy, x: (
            add(self, index, dy, x) if dist.get_rank() else add(self, index, 0 * dy, x)
        )
        add_sum = Gradients.add
        Gradients.add = lambda self, index, value: add_sum(self, index, dist.get_rank() * value)


def _broken(what, degree, name):
    rank = start(degree).rank()
    _break(what)
    out = CASES[name].sharded(degree, rank)
    return {key: tensor.detach().clone() for key, tensor in out.items()}


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("zigzag", "mha"),
        ("zigzag", "embedding"),
        ("zigzag", "embedding-table"),
        ("dropped dW", "embedding-table"),
        ("kv order", "mha"),
        ("zigzag", "mha-alltoall"),
        ("zigzag", "mha-ring"),
        ("ring backward", "gqa-ring"),
        ("local window", "window-of-two-chunks"),
        ("window", "window-5"),
        ("window", "window-0-alltoall"),
        ("documents", "documents"),
        ("documents of the first sample", "documents"),
        ("packed boundaries", "many-documents-flash-attn-2"),
        ("sinks of the first rank", "sinks"),
        ("delta", "gqa-alltoall"),
        ("delta", "gqa"),
        ("a key for each rank", "dropout"),
        ("positions of the rank", "dropout"),
        ("heads of the call", "dropout-alltoall"),
        ("doubled loss gradient", "loss"),
        ("dropped dW", "swiglu"),
    ],
)
def test_twin_that_is_broken_on_purpose_differs(what, name):
    results = run(_broken, 3, what, 3, name)
    with pytest.raises(AssertionError, match="on rank"):
        _compare(CASES[name], 3, results)


def test_a_failing_rank_is_reported():
    with pytest.raises(RankFailed, match="rank 1 raised"):
        run(_fails_on_rank_one, 2)


def _fails_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
