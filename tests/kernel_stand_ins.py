"""flash-attn 2 and 3 and Transformer Engine, as far as the kernels call them: for a test on a CPU.

Each stand-in has the documented arguments, computes from the definition in fp64, and asserts what
the real one checks, or takes for granted and reads wrongly otherwise. fp64 passes as well as bf16
and fp16, so that results can be compared to the last digits.
"""

import sys
from importlib.machinery import ModuleSpec
from itertools import count, pairwise
from types import ModuleType

import torch

#: The functions that were called, in order.
CALLS: list[str] = []


def module(name: str, **contents) -> ModuleType:
    """A module of these contents, to be put in `sys.modules`."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    made.__dict__.update(contents)
    return made


def install(name: str, put=None) -> None:
    """Make a stand-in importable, by `put(sys.modules, name, module)` or for good."""
    for made in STAND_INS[name]():
        (put or dict.__setitem__)(sys.modules, made.__name__, made)


# --- the definition, for one sequence: [s, n, d], keys [t, g, d] ------------------------------


def _logits(q, k, scale, causal):
    k = k.repeat_interleave(q.size(1) // k.size(1), 1)
    logits = torch.einsum("snd,tnd->nst", q, k) * scale
    if causal:
        assert q.size(0) == k.size(0)
        logits = logits.masked_fill(torch.ones(logits.shape[1:]).triu(1).bool(), -torch.inf)
    return logits


def _kept(weights, drops):
    """What dropout leaves of [n, s, t]; drops: (p, seed, which sequence of the call), or None."""
    if drops is None:
        return weights
    p, seed, number = drops
    random = torch.Generator().manual_seed((seed + 7919 * number) % 2**63)
    keep = torch.rand(weights.shape, generator=random, dtype=torch.float64) >= p
    return weights * keep / (1 - p)


def _forward(q, k, v, scale, causal, drops=None):
    """(out [s, n, d], lse [n, s])"""
    q, k, v = (t.double() for t in (q, k, v))
    logits = _logits(q, k, scale, causal)
    v = v.repeat_interleave(q.size(1) // v.size(1), 1)
    weights = _kept(logits.softmax(-1), drops)
    return torch.einsum("nst,tnd->snd", weights, v), logits.logsumexp(-1)


def _backward(dout, q, k, v, out, lse, scale, causal, drops=None):
    """(dq, dk, dv) under a given out and lse, which may be of more keys than these."""
    dout, q, k, v, out, lse = (t.double() for t in (dout, q, k, v, out, lse))
    shared = q.size(1) // k.size(1)
    weights = (_logits(q, k, scale, causal) - lse.unsqueeze(-1)).exp()
    delta = (dout * out).sum(-1).t().unsqueeze(-1)
    dweights = _kept(torch.einsum("snd,tnd->nst", dout, v.repeat_interleave(shared, 1)), drops)
    dlogits = weights * (dweights - delta) * scale
    dq = torch.einsum("nst,tnd->snd", dlogits, k.repeat_interleave(shared, 1))
    dk = torch.einsum("nst,snd->tnd", dlogits, q)
    dv = torch.einsum("nst,snd->tnd", _kept(weights, drops), dout)
    return dq, *(d.unflatten(1, (-1, shared)).sum(2) for d in (dk, dv))


def _wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- flash-attn -------------------------------------------------------------------------------


def _check_rows(dimensions, dtype, *rows):
    assert dtype in (torch.bfloat16, torch.float16, torch.float64)
    for t in rows:
        assert t.dim() == dimensions and t.dtype == dtype and t.stride(-1) == 1, t.shape
        assert t.size(-1) % 8 == 0 and t.size(-1) <= 256


def _check_lengths(cumulated, tokens, longest):
    assert cumulated.dtype == torch.int32 and cumulated.is_contiguous()
    bounds = cumulated.tolist()
    assert bounds[0] == 0 and bounds[-1] == tokens
    lengths = [b - a for a, b in pairwise(bounds)]
    assert min(lengths) > 0 and max(lengths) <= longest
    return list(pairwise(bounds))


def _sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """((first, last) of the queries, of the keys) of each sequence."""
    of_queries = _check_lengths(cu_seqlens_q, len(q), max_seqlen_q)
    of_keys = _check_lengths(cu_seqlens_k, len(k), max_seqlen_k)
    return list(zip(of_queries, of_keys, strict=True))


def _each(dropout):
    """`drops` of one sequence of a call after the other."""
    return ((*dropout, number) if dropout else None for number in count())


def _flash_forward(q, k, v, scale, causal, lengths, dropout=None):
    """(out, lse): [B, s, n, d] and [B, n, s]; with lengths [tokens, n, d] and [n, tokens]."""
    assert q.size(-2) % k.size(-2) == 0 and k.shape == v.shape
    if lengths is None:
        _check_rows(4, q.dtype, q, k, v)
        rows = zip(q, k, v, _each(dropout), strict=False)
        parts = [_forward(*row, scale, causal, drops) for *row, drops in rows]
        out, lse = (torch.stack(t) for t in zip(*parts, strict=True))
    else:
        _check_rows(3, q.dtype, q, k, v)
        parts = [
            _forward(q[a:b], k[c:d], v[c:d], scale, causal, drops)
            for ((a, b), (c, d)), drops in zip(
                _sequences(q, k, *lengths), _each(dropout), strict=False
            )
        ]
        out, lse = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], 1)
    return out.to(q.dtype), lse.to(_wide(q.dtype))


def _flash_backward(dout, q, k, v, out, lse, dq, dk, dv, scale, causal, lengths, dropout=None):
    """Write the gradients; the lse is read by its address, so it has to be contiguous."""
    assert lse.is_contiguous() and lse.dtype == _wide(q.dtype)
    if lengths is None:
        _check_rows(4, q.dtype, dout, q, k, v, out, dq, dk, dv)
        assert lse.shape == (len(q), q.size(2), q.size(1))
        rows = zip(dout, q, k, v, out, lse, _each(dropout), strict=False)
        grads = [_backward(*row, scale, causal, drops) for *row, drops in rows]
        grads = (torch.stack(t) for t in zip(*grads, strict=True))
    else:
        _check_rows(3, q.dtype, dout, q, k, v, out, dq, dk, dv)
        assert lse.shape == (q.size(1), len(q))
        grads = [
            _backward(
                dout[a:b], q[a:b], k[c:d], v[c:d], out[a:b], lse[:, a:b], scale, causal, drops
            )
            for ((a, b), (c, d)), drops in zip(
                _sequences(q, k, *lengths), _each(dropout), strict=False
            )
        ]
        grads = (torch.cat(t) for t in zip(*grads, strict=True))
    for into, grad in zip((dq, dk, dv), grads, strict=True):
        into.copy_(grad)


def _flash_attn_2():
    def plain(window_size_left, window_size_right, softcap, alibi_slopes):
        assert (window_size_left, window_size_right) == (-1, -1)
        assert softcap == 0.0 and alibi_slopes is None

    def drawn(p):
        """Forward: from the default generator."""
        return (p, torch.default_generator.initial_seed()) if p else None

    def told(p, rng_state):
        """Backward: from (seed, offset)."""
        if not p:
            return None
        assert rng_state.shape == (2,) and rng_state.dtype == torch.int64 and rng_state[1] == 0
        return p, int(rng_state[0])

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax,
    ):  # fmt: skip
        CALLS.append("forward")
        plain(window_size_left, window_size_right, softcap, alibi_slopes)
        out, lse = _flash_forward(q, k, v, softmax_scale, causal, None, drawn(dropout_p))
        return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        CALLS.append("varlen_forward")
        plain(window_size_left, window_size_right, softcap, alibi_slopes)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = _flash_forward(q, k, v, softmax_scale, causal, lengths, drawn(dropout_p))
        return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        CALLS.append("backward")
        plain(window_size_left, window_size_right, softcap, alibi_slopes)
        rows = dout, q, k, v, out, softmax_lse, dq, dk, dv
        _flash_backward(*rows, softmax_scale, causal, None, told(dropout_p, rng_state))
        return softmax_lse

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        CALLS.append("varlen_backward")
        plain(window_size_left, window_size_right, softcap, alibi_slopes)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        rows = dout, q, k, v, out, softmax_lse, dq, dk, dv
        _flash_backward(*rows, softmax_scale, causal, lengths, told(dropout_p, rng_state))
        return softmax_lse

    functions = (
        _flash_attn_forward, _flash_attn_varlen_forward, _flash_attn_backward,
        _flash_attn_varlen_backward,
    )  # fmt: skip
    contents = {function.__name__: function for function in functions}
    return [module("flash_attn"), module("flash_attn.flash_attn_interface", **contents)]


def _lengths_of_3(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    if cu_seqlens_q is None:
        assert cu_seqlens_k is max_seqlen_q is max_seqlen_k is None
        return None
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


def _flash_attn_3_beta():
    """3.0.0b1: what is not used has to be given as None."""

    def _flash_attn_forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
        seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
        rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        lengths = _lengths_of_3(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        CALLS.append("varlen_forward" if lengths else "forward")
        unused = (
            k_new, v_new, qv, out, cu_seqlens_k_new, seqused_q, seqused_k, page_table,
            kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
            v_descale,
        )  # fmt: skip
        assert all(argument is None for argument in unused)
        return (*_flash_forward(q, k, v, softmax_scale, causal, lengths), None, None)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
        max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1),
        softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        lengths = _lengths_of_3(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        CALLS.append("varlen_backward" if lengths else "backward")
        assert sequed_q is sequed_k is None
        rows = dout, q, k, v, out, softmax_lse, dq, dk, dv
        _flash_backward(*rows, softmax_scale, causal, lengths)
        return dq, dk, dv, softmax_lse

    contents = {f.__name__: f for f in (_flash_attn_forward, _flash_attn_backward)}
    return [module("flash_attn_interface", **contents)]


def _flash_attn_3_of_2024():
    """Before 3.0.0b1: sequences of different lengths had functions of their own."""

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window_size,
        deterministic=False,
    ):  # fmt: skip
        raise AssertionError("to be refused")

    return [module("flash_attn_interface", _flash_attn_backward=_flash_attn_backward)]


class _Operator:
    """A function registered with torch.library: what it takes is seen at `_init_fn` only."""

    def __init__(self, function):
        self._init_fn = function

    def __call__(self, *args, **kwargs):
        return self._init_fn(*args, **kwargs)


def _flash_attn_3():
    """3.0.0: everything has a default, and `causal` of the backward another name."""

    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None,
        rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,
        num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        lengths = _lengths_of_3(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        CALLS.append("varlen_forward" if lengths else "forward")
        return (*_flash_forward(q, k, v, softmax_scale, causal, lengths), None, None)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
        sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
        softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        lengths = _lengths_of_3(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        CALLS.append("varlen_backward" if lengths else "backward")
        rows = dout, q, k, v, out, softmax_lse, dq, dk, dv
        _flash_backward(*rows, softmax_scale, is_causal, lengths)
        return softmax_lse

    contents = {f.__name__: _Operator(f) for f in (_flash_attn_forward, _flash_attn_backward)}
    return [
        module("flash_attn_3"), module("flash_attn_3.flash_attn_interface", **contents)
    ]  # fmt: skip


# --- Transformer Engine -----------------------------------------------------------------------

_TYPES = {torch.bfloat16: "kBFloat16", torch.float16: "kFloat16", torch.float64: "fp64"}
_LAYOUT = "sbhd_sbhd_sbhd"


def _check_fused(q, k, cu_q, cu_kv, longest, backend, layout, mask, window, rows):
    """Strides are not read: [s, B, n, d] is taken to be contiguous."""
    assert backend == "arbitrary" and layout == _LAYOUT
    assert longest == (q.size(0), k.size(0)) and q.size(1) == k.size(1)
    for cumulated, t in ((cu_q, q), (cu_kv, k)):
        assert cumulated.dtype == torch.int32
        assert cumulated.tolist() == [i * t.size(0) for i in range(t.size(1) + 1)]
    # Of a window with another end cuDNN 9.2 to 9.5 have no kernel.
    assert {"causal": (-1, 0), "no_mask": (-1, -1)}[mask] == window
    for t in rows:
        assert t.is_contiguous() and t.dim() == 4 and t.dtype == q.dtype and t.dtype in _TYPES


def _fused_forward(
    is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
    backend, scale, layout, mask, window, rng_gen, p,
):  # fmt: skip
    CALLS.append("forward")
    longest = max_seqlen_q, max_seqlen_kv
    _check_fused(
        q, k, cu_seqlens_q, cu_seqlens_kv, longest, backend, layout, mask, window, (q, k, v)
    )
    assert is_training and fake_dtype == q.dtype
    assert isinstance(rng_gen, torch.Generator), "it would advance the model's"
    drops = _each((p, rng_gen.initial_seed()) if p else None)
    rows = zip(q.unbind(1), k.unbind(1), v.unbind(1), drops, strict=False)
    parts = [_forward(*row, scale, mask == "causal", drop) for *row, drop in rows]
    out = torch.stack([p[0] for p in parts], 1).to(q.dtype)
    lse = torch.stack([p[1] for p in parts]).to(_wide(q.dtype))
    return out, [lse.unsqueeze(-1), torch.empty(2, dtype=torch.int64)]


def _fused_backward(
    max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux,
    backend, scale, layout, mask, window, p,
):  # fmt: skip
    CALLS.append("backward")
    longest, rows = (max_seqlen_q, max_seqlen_kv), (q, k, v, o, d_o)
    _check_fused(q, k, cu_seqlens_q, cu_seqlens_kv, longest, backend, layout, mask, window, rows)
    assert fake_dtype == q.dtype
    stats, rng_state = aux
    assert stats.shape == (q.size(1), q.size(2), q.size(0), 1) and stats.is_contiguous()
    assert stats.dtype == _wide(q.dtype)
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
    assert not p or rng_state[1] == 0
    drops = _each((p, int(rng_state[0])) if p else None)
    by_sample = zip(*(t.unbind(1) for t in (d_o, q, k, v, o)), stats[..., 0], drops, strict=False)
    grads = [_backward(*row, scale, mask == "causal", drop) for *row, drop in by_sample]
    return [*(torch.stack(t, 1).to(q.dtype) for t in zip(*grads, strict=True)), None, None]


def _transformer_engine(fused_attn_fwd, fused_attn_bwd):
    backends = {"F16_arbitrary_seqlen": "arbitrary", "FP8": "fp8", "No_Backend": "none"}
    names = "transformer_engine", "transformer_engine.pytorch"
    return [
        *(module(name) for name in names),
        module("transformer_engine.pytorch.constants", TE_DType=_TYPES),
        module(
            "transformer_engine.pytorch.cpp_extensions", FusedAttnBackend=backends,
            fused_attn_fwd=fused_attn_fwd, fused_attn_bwd=fused_attn_bwd,
        ),
    ]  # fmt: skip


def _transformer_engine_2_8():
    """Up to 2.14: the backward is told the type of the gradients."""

    def fused_attn_fwd(
        is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
        fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None, page_table_k=None, page_table_v=None, s_quantizer=None,
        o_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d",
        attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla",
        window_size=(-1, -1), rng_gen=None, softmax_offset=None,
    ):  # fmt: skip
        return _fused_forward(
            is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v,
            fake_dtype, fused_attention_backend, attn_scale, qkv_layout, attn_mask_type,
            window_size, rng_gen, dropout,
        )  # fmt: skip

    def fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype,
        dqkv_dtype, aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None, s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None,
        attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d",
        attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla",
        window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        assert dqkv_dtype == _TYPES[q.dtype]
        return _fused_backward(
            max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype,
            aux_ctx_tensors, fused_attention_backend, attn_scale, qkv_layout, attn_mask_type,
            window_size, dropout,
        )  # fmt: skip

    return _transformer_engine(fused_attn_fwd, fused_attn_bwd)


def _transformer_engine_2_18():
    """From 2.15 on: formats of the output and of the gradients."""

    def fused_attn_fwd(
        is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
        fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None, page_table_k=None, page_table_v=None, s_quantizer=None,
        o_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d",
        o_format="sbhd", qkv_scale_inv_format=None, attn_bias_type="no_bias",
        attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1),
        bottom_right_diagonal=None, rng_gen=None, softmax_offset=None, return_max_logit=False,
        cuda_graph=False,
    ):  # fmt: skip
        assert o_format == "sbhd"
        return _fused_forward(
            is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v,
            fake_dtype, fused_attention_backend, attn_scale, qkv_layout, attn_mask_type,
            window_size, rng_gen, dropout,
        )  # fmt: skip

    def fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype,
        aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None, s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None,
        attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd",
        do_format="sbhd", dqkv_layout="sbh3d", qkv_scale_inv_format=None,
        do_scale_inv_format=None, attn_bias_type="no_bias", attn_mask_type="padding",
        softmax_type="vanilla", window_size=(-1, -1), bottom_right_diagonal=None,
        deterministic=False, cuda_graph=False,
    ):  # fmt: skip
        assert (o_format, do_format, dqkv_layout) == ("sbhd", "sbhd", _LAYOUT)
        return _fused_backward(
            max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype,
            aux_ctx_tensors, fused_attention_backend, attn_scale, qkv_layout, attn_mask_type,
            window_size, dropout,
        )  # fmt: skip

    return _transformer_engine(fused_attn_fwd, fused_attn_bwd)


STAND_INS = {
    "flash-attn 2": _flash_attn_2,
    "flash-attn 3.0.0b1": _flash_attn_3_beta,
    "flash-attn 3": _flash_attn_3,
    "flash-attn 3 of 2024": _flash_attn_3_of_2024,
    "Transformer Engine 2.8": _transformer_engine_2_8,
    "Transformer Engine 2.18": _transformer_engine_2_18,
}
