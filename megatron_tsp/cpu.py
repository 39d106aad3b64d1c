"""CPU mode: Megatron's own training loop, unedited, on CPU and gloo.

Megatron names "cuda" throughout and asks torch.cuda for devices, streams and generators.
`engage` answers with stand-ins when the machine has no GPU. Tensors stay ordinary CPU tensors
and `torch.cuda.is_available()` stays False (True would make data loaders pin memory). Streams
are no-ops, because CPU operations have finished when they return; so races between streams
cannot show here. What CPU mode cannot do faithfully raises instead of pretending.

Written for the torch and megatron-core versions that this package pins: it replaces private
names, and `engage` says which one a different version lacks.
"""

import importlib
import os
import sys

from megatron_tsp.errors import TSPError

_engaged = False

# Defaults that CPU mode needs, by argparse dest. None is a kernel or backend that a CPU has.
_REQUIRED = {
    "transformer_impl": "local",
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
    "async_strategy": "mcore",  # the other one's worker process insists on a GPU
}
_PREFERRED = {"num_workers": 0}  # loader processes cost more than they save on a small model

# dest: (flag, why CPU mode cannot honour it). Refused when set to anything but off.
_REFUSED_FLAGS = {
    "cuda_graph_impl": ("--cuda-graph-impl", "there are no CUDA graphs"),
    "enable_cuda_graph": ("--enable-cuda-graph", "there are no CUDA graphs"),
    "external_cuda_graph": ("--external-cuda-graph", "there are no CUDA graphs"),
    "log_memory_to_tensorboard": ("--log-memory-to-tensorboard", "there is no device memory"),
    "log_memory_interval": ("--log-memory-interval", "there is no device memory"),
    "log_device_memory_used": ("--log-device-memory-used", "there is no device memory"),
    "record_memory_history": ("--record-memory-history", "there is no device memory"),
    "log_straggler": ("--log-straggler", "Megatron's detector is silent without a GPU"),
    "log_energy": ("--log-energy", "it reads the GPU's counters"),
    "nvtx_ranges": ("--nvtx-ranges", "there is no GPU timeline"),
    "gpu_sniff_test_interval": ("--gpu-sniff-test-interval", "there is no GPU"),
    "inprocess_restart": ("--inprocess-restart", "it restarts NCCL"),
    "use_megatron_fsdp": ("--use-megatron-fsdp", "it needs CUDA device meshes"),
    "use_torch_fsdp2": ("--use-torch-fsdp2", "it needs CUDA device meshes"),
    "use_nccl_ub": ("--use-nccl-ub", "there is no NCCL"),
    "nccl_ub": ("--use-nccl-ub", "there is no NCCL"),
    "use_sharp": ("--use-sharp", "there is no NCCL"),
    "nccl_communicator_config_path": ("--nccl-communicator-config-path", "there is no NCCL"),
    "high_priority_stream_groups": ("--high-priority-stream-groups", "there is no NCCL"),
    "fp8": ("--fp8-format", "it needs Transformer Engine"),
    "fp4": ("--fp4-format", "it needs Transformer Engine"),
    "tp_comm_overlap": ("--tp-comm-overlap", "it needs Transformer Engine"),
    "batch_invariant_mode": ("--batch-invariant-mode", "its kernels are GPU kernels"),
    "moe_grouped_gemm": ("--moe-grouped-gemm", "its kernels are GPU kernels"),
    "optimizer_cpu_offload": ("--optimizer-cpu-offload", "all memory is the CPU's"),
    "cpu_offloading_num_layers": ("--cpu-offloading-num-layers", "all memory is the CPU's"),
    "fine_grained_activation_offloading": (
        "--fine-grained-activation-offloading",
        "all memory is the CPU's",
    ),
}


def engaged() -> bool:
    """Whether CPU mode is on in this process."""
    return _engaged


def engage() -> bool:
    """Install the stand-ins if this machine has no GPU; returns whether CPU mode is on.

    With a GPU it returns False and changes nothing. Repeated calls change nothing more. Works
    before and after Megatron's import; names that other code took out of torch itself beforehand
    (``from torch import empty``) are out of reach.
    Raises ``TSPError`` naming the first torch or Megatron name that the installed version lacks.
    """
    global _engaged
    if _engaged:
        return True
    import torch

    if torch.cuda.is_available():
        return False
    # Megatron's jit_fuser is torch.compile, which costs a compiler run for each fused function
    # and shape; the eager functions are the same arithmetic.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    importlib.import_module("torch._dynamo")  # its tables want torch's own functions
    torch.compiler.set_stance("force_eager")  # functions compiled earlier

    from megatron_tsp import cpu_torch, wheel

    for owner, name, stand_in in cpu_torch.stand_ins():
        _replace(owner, name, stand_in)
    _engaged = True
    from megatron_tsp import cpu_megatron  # imports Megatron: torch must be ready

    for owner, name, stand_in in cpu_megatron.stand_ins():
        _replace(owner, name, stand_in, everywhere=True)
    wheel.fill_gaps()
    if int(os.environ.get("RANK", "0")) == 0:
        print(
            "no accelerator: CPU mode (gloo; streams are no-ops, device memory is not measured)",
            flush=True,
        )
    return True


def default_flags() -> dict:
    """Values, by argparse dest, for the flags CPU mode needs where the user gives none."""
    return {**_REQUIRED, **_PREFERRED}


def check_flags(args) -> None:
    """Raise ``TSPError`` for a parsed flag that CPU mode cannot honour, naming it."""
    for dest, needed in _REQUIRED.items():
        given = getattr(args, dest, needed)
        if given != needed:
            flag = "--" + dest.replace("_", "-")
            raise TSPError(
                f"CPU mode (no GPU found) needs {flag} {needed}, not {given!r}. Leave the flag "
                "out, or run on a GPU."
            )
    for dest, (flag, reason) in _REFUSED_FLAGS.items():
        given = getattr(args, dest, None)
        if given and given != "none":
            _refuse_flag(flag if given is True else f"{flag} {given}", reason)
    if getattr(args, "moe_token_dispatcher_type", None) == "flex":
        _refuse_flag("--moe-token-dispatcher-type flex", "DeepEP and HybridEP are GPU libraries")
    if getattr(args, "profile", False) and not args.use_pytorch_profiler:
        _refuse_flag("--profile", "Nsight profiles a GPU; add --use-pytorch-profiler")


def _refuse_flag(flag, reason):
    raise TSPError(f"CPU mode (no GPU found) cannot honour {flag}: {reason}.")


def _replace(owner, name, stand_in, everywhere=False) -> None:
    original = getattr(owner, name, None)
    if original is None and not hasattr(owner, name):
        import torch

        raise TSPError(
            f"CPU mode: this torch ({torch.__version__}) or megatron-core has no "
            f"{getattr(owner, '__name__', owner)}.{name}, which CPU mode replaces. Install the "
            "versions that this package pins."
        )
    setattr(owner, name, stand_in)
    if everywhere:  # modules that took the function by name before
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("megatron."):
                for key, value in list(vars(module).items()):
                    if value is original:
                        setattr(module, key, stand_in)
