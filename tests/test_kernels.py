"""Attention kernels against fp64: the CPU's; those of packages for GPUs on stand-ins of these.

A stand-in (kernel_stand_ins.py) computes in plain torch what its package computes, and asserts what
that demands of its arguments. benchmarks/gpu/kernels.py makes the same checks of the real ones.
"""

import kernel_stand_ins
import pytest
import torch
from kernels_common import (
    CHANNELS,
    KERNELS,
    MASKS,
    SHAPES,
    _inputs,
    dropout_error,
    errors,
    masked_errors,
)
from layers_common import config
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu import kernels as benchmark
from megatron_tsp.errors import TSPError
from megatron_tsp.layers import flash, kernels, varlen
from megatron_tsp.layers.core_attention import TSPCoreAttention
from megatron_tsp.layers.dropout import Dropout
from megatron_tsp.layers.kernels import flash_attn, of_torch, packages
from megatron_tsp.layers.mask import Span

PACKING = [name for name in KERNELS if name.startswith("flash-attn")]
DROPPING = [name for name, kernel in KERNELS.items() if kernel.has_dropout]


@pytest.fixture(autouse=True)
def one_thread():
    """For tensors as small as these more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def kernel(request, monkeypatch):
    """The kernel of that name, with the stand-in of its package installed."""
    if request.param in kernel_stand_ins.STAND_INS:
        kernel_stand_ins.install(request.param, monkeypatch.setitem)
    kernel_stand_ins.CALLS.clear()
    return KERNELS[request.param]


@pytest.mark.parametrize("logits", [1.0, 100.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dtype", "bar"),
    [
        *((name, torch.float64, 1e-12) for name in KERNELS),
        *((name, torch.float32, 1e-4) for name in ("PyTorch", "tiled")),  # no GPU kernel takes it
        *((name, torch.bfloat16, 5e-2) for name in KERNELS),
    ],
    indirect=["kernel"],
)
def test_equals_fp64(kernel, dtype, bar, causal, logits):
    for shape in SHAPES[: 2 if causal else 3]:
        for whole in (True, False):
            found = errors(kernel, shape, causal, dtype, "cpu", logits, whole)
            assert max(found.values()) < bar, (shape, whole, found)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_windows_documents_and_sinks_equal_fp64(kernel, dtype, bar, mask, sinks):
    found = masked_errors(kernel, MASKS[mask], sinks, dtype, "cpu")
    assert max(found.values()) < bar, found


def _slopes(kernel, mask, backward_key=None):
    """(by differences, by the backward) of Σ dout·out along a direction, with dropout, in fp64."""
    *inputs, dout = _inputs(64, 64, 3, torch.float64, "cpu", 1.0, batch=4)
    made, whole, key = kernel(CHANNELS**-0.5), Span(0, 64), 2**62 + 12345
    tiles = mask.tiles(whole, [whole])

    def drops(key):
        return Dropout(0.3, key, samples=2, heads=6).of(inputs[0], [whole], [whole])

    def value(step):
        q, k, v = (t + step * way for t, way in zip(inputs, ways, strict=True))
        return (flash.attend(q, k, v, tiles, made, None, drops(key))[0] * dout).sum()

    generator = torch.Generator().manual_seed(1)
    ways = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in inputs]
    out, lse = flash.attend(*inputs, tiles, made, None, drops(key))
    grads = [torch.zeros_like(t) for t in inputs]
    drop = drops(backward_key or key)
    flash.attend_backward(dout, *inputs, out, lse, tiles, made, *grads, drop)
    differences = (value(1e-5) - value(-1e-5)) / 2e-5
    return differences, sum((g * way).sum() for g, way in zip(grads, ways, strict=True)), out


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", DROPPING, indirect=True)
def test_dropout_has_the_gradients_of_what_it_computes(kernel, mask):
    state = torch.default_generator.get_state()
    expected, got, out = _slopes(kernel, MASKS[mask])
    assert abs(got - expected) < 1e-6 * abs(expected)
    assert torch.equal(torch.default_generator.get_state(), state)
    _, got, again = _slopes(kernel, MASKS[mask], backward_key=1)  # twin
    assert torch.equal(out, again) and abs(got - expected) > 1e-2 * abs(expected)
    assert dropout_error(kernel, MASKS[mask], torch.bfloat16, "cpu") < 1e-2
    assert dropout_error(kernel, MASKS[mask], torch.bfloat16, "cpu", other_key=1) > 5e-2


@pytest.mark.parametrize("kernel", PACKING, indirect=True)
def test_documents_are_one_call(kernel):
    masked_errors(kernel, MASKS["documents"], False, torch.bfloat16, "cpu")
    assert kernel_stand_ins.CALLS == ["varlen_forward", "varlen_backward"]
    kernel_stand_ins.CALLS.clear()
    masked_errors(kernel, MASKS["window"], False, torch.bfloat16, "cpu")
    assert not any(name.startswith("varlen") for name in kernel_stand_ins.CALLS)
    masked_errors(kernel, MASKS["documents-window"], False, torch.bfloat16, "cpu")
    assert 0 < sum(name == "varlen_forward" for name in kernel_stand_ins.CALLS) <= 4


def _without_a_boundary(rows):
    """The first two sequences are one."""
    found, longest, cumulated = rows
    return found, 2 * longest, torch.cat((cumulated[:1], cumulated[2:]))


def _in_natural_order(rows):
    """Those of an edge too."""
    found, *rest = rows
    order = (found.sample * 10**6 + found.place).argsort()
    return found._replace(sample=found.sample[order], place=found.place[order]), *rest


@pytest.mark.parametrize("broken", [_without_a_boundary, _in_natural_order])
@pytest.mark.parametrize("kernel", ["flash-attn 2"], indirect=True)
def test_twins_with_broken_packs_differ(kernel, broken, monkeypatch):
    rows = varlen._rows
    monkeypatch.setattr(varlen, "_rows", lambda *args: broken(rows(*args)))
    varlen._packed.cache_clear()
    found = masked_errors(kernel, MASKS["documents-window"], False, torch.float64, "cpu")
    varlen._packed.cache_clear()
    assert min(found[name] for name in ("out", "dq", "dk")) > 1e-2


class _OwnLse(of_torch.TorchFlash):
    """A backward that takes the part's own lse for the whole one."""

    def backward(self, dout, q, k, v, out, lse, causal):
        return super().backward(dout, q, k, v, *self.forward(q, k, v, causal), causal)


def test_twin_with_each_parts_own_lse_differs():
    found = errors(_OwnLse, SHAPES[0], False, torch.float64, "cpu")
    assert found["out"] < 1e-12 and min(found[name] for name in ("dq", "dk", "dv")) > 1e-2


@pytest.mark.parametrize("kernel", [*KERNELS][1:], indirect=True)
def test_twins_whose_backward_takes_the_parts_own_lse_differ(kernel):
    def backward(self, dout, q, k, v, out, lse, causal):
        return kernel.backward(self, dout, q, k, v, *self.forward(q, k, v, causal), causal)

    twin = type("OwnLse", (kernel,), {"backward": backward})
    found = errors(twin, SHAPES[0], False, torch.float64, "cpu")
    assert found["out"] < 1e-12 and min(found[name] for name in ("dq", "dk", "dv")) > 1e-2


@pytest.mark.parametrize("kernel", [of_torch.TorchFlash, of_torch.Cudnn])
@pytest.mark.parametrize("heads", [1, 4])
def test_the_calls_on_a_gpu_have_the_arguments_that_pytorch_wants(kernel, heads):
    """Shapes and arguments only: nothing is computed."""
    with FakeTensorMode():
        like = {"device": "cuda", "dtype": torch.bfloat16}
        q, k = torch.empty(2, heads, 32, 64, **like), torch.empty(2, 1, 32, 64, **like)
        made = kernel(0.125)
        out, lse = made.forward(q, k, k, True)
        assert out.shape == q.shape and out.is_cuda
        assert lse.shape == q.shape[:3] and lse.dtype == torch.float32
        grads = made.backward(out, q, k, k, out, lse, True)
        assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


def test_the_packed_calls_on_a_gpu_have_the_arguments_that_pytorch_wants():
    with FakeTensorMode():
        like = {"device": "cuda", "dtype": torch.bfloat16}
        q, k = torch.empty(96, 6, 64, **like), torch.empty(128, 2, 64, **like)
        bounds = torch.empty(4, device="cuda", dtype=torch.int32)
        made = of_torch.TorchFlash(0.125)
        assert made.packs(q)
        lengths = kernels.Lengths(bounds, bounds, 64, 96)
        out, lse = made.forward_packed(q, k, k, lengths, False)
        assert out.shape == q.shape and lse.shape == (6, 96) and lse.dtype == torch.float32
        grads = made.backward_packed(out, q, k, k, out, lse, lengths, False)
        assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


def test_what_is_asked_for_is_what_is_taken():
    assert kernels.choose("auto", gpu=False) is of_torch.TorchFlash
    assert kernels.choose("flash", gpu=False) is of_torch.TorchFlash
    assert kernels.choose("auto", gpu=True) is of_torch.TorchFlash
    assert kernels.choose("auto", gpu=False, dropout=True) is kernels.Tiled
    with pytest.raises(TSPError, match="--attention-backend flash: this kernel has no attention"):
        kernels.choose("flash", gpu=False, dropout=True)


@pytest.mark.parametrize(
    ("backend", "version", "gpu", "message"),
    [
        ("fused", None, False, "--attention-backend fused needs cuDNN and its GPU"),
        ("unfused", None, True, "--attention-backend unfused builds scores of s x s"),
        ("local", None, False, "--attention-backend local builds scores of s x s"),
        ("auto", 2, False, "--flash-attention-version 2 needs a GPU"),
        ("flash", 4, True, "--flash-attention-version 4: TSP takes 2 and 3"),
        ("fused", 3, True, "contradicts --attention-backend fused"),
    ],
)
def test_what_is_not_there_is_refused_by_its_flag(backend, version, gpu, message):
    with pytest.raises(TSPError) as error:
        kernels.choose(backend, version, gpu)
    assert message in str(error.value)


@pytest.fixture
def gpu(monkeypatch):
    """A function that says which GPU, and which packages in which versions, there are."""

    def there(*stand_ins, capability=9, hip=None, **versions):
        for name in stand_ins:
            kernel_stand_ins.install(name, monkeypatch.setitem)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: not hip)
        monkeypatch.setattr(torch.version, "hip", hip)

        def version(distribution):
            if distribution in versions:
                return versions[distribution]
            raise packages.PackageNotFoundError(distribution)

        monkeypatch.setattr(packages, "installed_version", version)

    return there


def test_fused_is_transformer_engines_where_it_is_installed(gpu):
    gpu()
    assert kernels.choose("fused", gpu=True) is of_torch.Cudnn
    gpu("Transformer Engine 2.18", transformer_engine="2.18.0+abcdef")
    assert kernels.choose("fused", gpu=True) is kernels.TransformerEngineFused
    gpu("Transformer Engine 2.18", transformer_engine="3.0")
    with pytest.raises(TSPError, match="fused: Transformer Engine 3.0, and TSP takes 2.x"):
        kernels.choose("fused", gpu=True)
    gpu("Transformer Engine 2.18", transformer_engine="2.18", hip="7.0")
    with pytest.raises(TSPError, match="fused needs cuDNN and its GPU"):
        kernels.choose("fused", gpu=True)


def test_auto_is_transformer_engines_where_the_model_is_to_be_its_own(gpu):
    gpu()
    assert kernels.choose("auto", gpu=True, engine=True) is of_torch.TorchFlash
    gpu("Transformer Engine 2.18", transformer_engine="2.18.0+abcdef")
    assert kernels.choose("auto", gpu=True) is of_torch.TorchFlash
    assert kernels.choose("auto", gpu=False, engine=True) is of_torch.TorchFlash
    fused = kernels.TransformerEngineFused
    assert kernels.choose("auto", gpu=True, engine=True) is fused
    assert kernels.choose("auto", gpu=True, engine=True, dropout=True) is fused
    gpu("Transformer Engine 2.18", transformer_engine="3.0")
    assert kernels.choose("auto", gpu=True, engine=True) is of_torch.TorchFlash
    gpu("Transformer Engine 2.18", transformer_engine="2.18", hip="7.0")
    assert kernels.choose("auto", gpu=True, engine=True) is of_torch.TorchFlash


def test_flash_is_the_newest_flash_attn_that_the_gpu_runs(gpu):
    gpu()
    assert kernels.choose("flash", gpu=True) is of_torch.TorchFlash
    both = "flash-attn 2", "flash-attn 3"
    gpu(*both, flash_attn="2.8.3")
    assert kernels.choose("flash", gpu=True) is flash_attn.FlashAttention3
    assert kernels.choose("flash", gpu=True, dropout=True) is flash_attn.FlashAttention2
    with pytest.raises(TSPError, match="version 3: this kernel has no attention dropout"):
        kernels.choose("auto", 3, gpu=True, dropout=True)
    gpu(*both, flash_attn="2.8.3", capability=8)
    assert kernels.choose("flash", gpu=True) is flash_attn.FlashAttention2
    gpu(*both, flash_attn="2.7.4.post1", hip="7.0")  # an MI300X says that its capability is 9.4
    assert kernels.choose("flash", gpu=True) is flash_attn.FlashAttention2


@pytest.mark.parametrize(
    ("asked", "there", "message"),
    [
        (2, {}, "flash-attn 2 is not installed .no module flash_attn.flash_attn_interface"),
        (3, {}, "flash-attn 3 is not installed"),
        (3, {"capability": 10}, "flash-attn 3 is for Hopper GPUs"),
        (3, {"hip": "7.0"}, "flash-attn 3 is for Hopper GPUs"),
        (2, {"name": "flash-attn 2", "flash_attn": "2.6.3"}, "flash-attn 2.6.3: TSP takes 2.7"),
        (2, {"name": "flash-attn 2"}, "flash-attn of unknown version: TSP takes 2.7"),
        (3, {"name": "flash-attn 3 of 2024"}, "older than 3.0.0b1"),
    ],
)
def test_a_package_that_is_missing_or_of_another_version_is_refused(gpu, asked, there, message):
    there = dict(there)
    name = there.pop("name", None)
    gpu(*([name] if name else []), **there)
    with pytest.raises(TSPError, match=message):
        kernels.choose("flash", asked, gpu=True)


def test_a_package_that_cannot_be_imported_is_refused(tmp_path, monkeypatch):
    package = tmp_path / "built_for_another_torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    name = "built_for_another_torch.interface"
    with pytest.raises(TSPError, match=f"{name} is installed, and .* fails: undefined symbol"):
        packages.first_module(["not_installed.interface", name])


@pytest.mark.parametrize(
    ("layers", "backend", "version", "expected"),
    [
        ("local", "auto", None, of_torch.TorchFlash),
        ("transformer_engine", "auto", None, kernels.TransformerEngineFused),
        ("local", "flash", None, flash_attn.FlashAttention3),
        ("transformer_engine", "auto", 2, flash_attn.FlashAttention2),
        ("local", "fused", None, kernels.TransformerEngineFused),
    ],
)
def test_the_attention_core_has_the_kernel_that_the_flags_ask_for(
    gpu, monkeypatch, layers, backend, version, expected
):
    settings = config(
        1, attention_backend=AttnBackend[backend], flash_attention_version=version,
        transformer_impl=layers,
    )  # fmt: skip
    gpu(
        "flash-attn 2", "flash-attn 3", "Transformer Engine 2.18", flash_attn="2.8.3",
        transformer_engine="2.18.0",
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    core = TSPCoreAttention(settings, 1, AttnMaskType.causal, "self", softmax_scale=0.25)
    assert type(core.kernel) is expected and core.kernel.scale == 0.25


def test_the_check_on_a_gpu_checks_and_times(monkeypatch, capsys):
    """benchmarks/gpu/kernels.py on the CPU, shortened: what is good, what is wrong, what raises."""

    class Wrong(of_torch.TorchFlash):
        def forward(self, q, k, v, causal):
            out, lse = super().forward(q, k, v, causal)
            return out.flip(2), lse

    class Raises(of_torch.TorchFlash):
        def backward(self, *args):
            raise RuntimeError("no such kernel\nwith a stack behind it")

    for name, value in (("DEVICE", "cpu"), ("LONGER", []), ("TIMES", (1,))):
        monkeypatch.setattr(benchmark, name, value)
    monkeypatch.setattr(benchmark, "BARS", {torch.bfloat16: 5e-2})
    assert all(row["good"] for row in benchmark._checks(of_torch.TorchFlash))
    assert sum(not row["good"] for row in benchmark._checks(Wrong)) > 20
    assert {row.get("error") for row in benchmark._checks(Raises)} == {"no such kernel"}
    monkeypatch.setattr(benchmark, "TIMED", (64, 4, 2, 8))
    monkeypatch.setattr(benchmark, "DOCUMENT", 8)
    monkeypatch.setattr(benchmark, "_seconds", lambda call: call() is None or 1.0)
    causal, documents, one_by_one = benchmark._timings(of_torch.TorchFlash)
    assert causal["forward_tflops"] == 4 * (64 * 65 / 2) * 4 * 8 / 1e12
    assert documents["forward_tflops"] == one_by_one["forward_tflops"] < causal["forward_tflops"]
    assert list(benchmark._timings(Raises)) == []
    assert "TorchFlash bfloat16 documents, 64 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("channels", "half", "message"),
    [(64, False, "pass --bf16"), (60, True, "the nearest is 64"), (320, True, "nearest is 256")],
)
def test_heads_and_dtypes_that_gpu_kernels_do_not_take_are_refused(channels, half, message):
    with pytest.raises(TSPError, match=message):
        kernels.check_shapes(channels, half)
