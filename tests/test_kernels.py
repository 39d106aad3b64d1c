"""Attention kernels: the CPU's against fp64; the GPU's as far as their calls can be made here."""

import pytest
import torch
from kernels_common import SHAPES, errors
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_tsp.errors import TSPError
from megatron_tsp.layers import kernels
from megatron_tsp.layers.kernels import of_torch


@pytest.mark.parametrize("kernel", [kernels.choose(gpu=False), kernels.Tiled])
@pytest.mark.parametrize("logits", [1.0, 100.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 5e-2)]
)
def test_equals_fp64(dtype, bar, causal, logits, kernel):
    for shape in SHAPES[: 2 if causal else 3]:
        for whole in (True, False):
            found = errors(kernel, shape, causal, dtype, "cpu", logits, whole)
            assert max(found.values()) < bar, (shape, whole, found)


class _OwnLse(of_torch.TorchFlash):
    """A backward that takes the part's own lse for the whole one."""

    def backward(self, dout, q, k, v, out, lse, causal):
        return super().backward(dout, q, k, v, *self.forward(q, k, v, causal), causal)


def test_twin_with_each_parts_own_lse_differs():
    found = errors(_OwnLse, SHAPES[0], False, torch.float64, "cpu")
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


@pytest.mark.parametrize("version", [2, 3])
def test_a_package_that_is_not_installed_is_refused(version):
    module = {2: "flash_attn", 3: "flash_attn_interface"}[version]
    if kernels.flash_attn.find_spec(module):
        pytest.skip(f"{module} is installed")
    with pytest.raises(TSPError, match=f"flash-attn {version} is not installed"):
        kernels.choose("flash", version, gpu=True)


@pytest.mark.parametrize(
    ("channels", "half", "message"),
    [(64, False, "pass --bf16"), (60, True, "the nearest is 64"), (320, True, "nearest is 256")],
)
def test_heads_and_dtypes_that_gpu_kernels_do_not_take_are_refused(channels, half, message):
    with pytest.raises(TSPError, match=message):
        kernels.check_shapes(channels, half)
