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

#: "1" engages CPU mode on a machine whose GPUs torch does not see.
VARIABLE = "MEGATRON_TSP_CPU"

# Defaults that CPU mode needs, by argparse dest, and the flag that sets each. None is a kernel or
# backend that a CPU has.
_REQUIRED = {
    "transformer_impl": ("--transformer-impl", "local"),
    "distributed_backend": ("--distributed-backend", "gloo"),
    "use_cpu_initialization": ("--use-cpu-initialization", True),
    "apply_rope_fusion": ("--no-rope-fusion", False),
    "gradient_accumulation_fusion": ("--no-gradient-accumulation-fusion", False),
    "masked_softmax_fusion": ("--no-masked-softmax-fusion", False),
    "no_persist_layer_norm": ("--no-persist-layer-norm", True),
    # the other one's worker process insists on a GPU
    "async_strategy": ("--async-strategy", "mcore"),
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
    "nccl_ub": ("--use-nccl-ub", "there is no NCCL"),
    "use_sharp": ("--use-sharp", "there is no NCCL"),
    "nccl_communicator_config_path": ("--nccl-communicator-config-path", "there is no NCCL"),
    "high_priority_stream_groups": ("--high-priority-stream-groups", "there is no NCCL"),
    "fp8": ("--fp8-format", "it needs Transformer Engine"),
    "fp4": ("--fp4-format", "it needs Transformer Engine"),
    "tp_comm_overlap": ("--tp-comm-overlap", "it needs Transformer Engine"),
    "batch_invariant_mode": ("--batch-invariant-mode", "its kernels are GPU kernels"),
    "moe_grouped_gemm": ("--moe-grouped-gemm", "its kernels are GPU kernels"),
    "mamba_training_ssm_states_dtype": (
        "--mamba-training-ssm-states-dtype",
        "states are in fp32",
    ),
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

    With a GPU it returns False and changes nothing. With a GPU that torch does not see it refuses
    to go on, unless `VARIABLE` is 1. Repeated calls change nothing more. Works before and after
    Megatron's import; names that other code took out of torch itself beforehand
    (``from torch import empty``) are out of reach.
    Raises ``TSPError`` for a GPU that torch does not see, for `VARIABLE` on a machine whose GPU it
    sees, and naming the first torch or Megatron name that the installed version lacks.
    """
    global _engaged
    if _engaged:
        return True
    import torch

    meant = os.environ.get(VARIABLE) == "1"
    if torch.cuda.is_available():
        if meant:
            raise TSPError(
                f"{VARIABLE}=1 asks for CPU mode, but torch sees a GPU. Set CUDA_VISIBLE_DEVICES= "
                f"(empty) as well, or unset {VARIABLE}."
            )
        return False
    sign = None if meant else sign_of_gpu()
    if sign:
        raise TSPError(
            f"this machine has a GPU ({sign}), but torch {torch.__version__} does not see one. "
            "Install the torch build for it, or fix its driver or CUDA_VISIBLE_DEVICES; to train "
            f"on the CPU, set {VARIABLE}=1."
        )
    # Megatron's jit_fuser is torch.compile, which costs a compiler run for each fused function
    # and shape; the eager functions are the same arithmetic.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    importlib.import_module("torch._dynamo")  # its tables want torch's own functions
    torch.compiler.set_stance("force_eager")  # functions compiled earlier

    from megatron_tsp import cpu_torch, wheel

    for owner, name, stand_in in cpu_torch.stand_ins():
        _replace(owner, name, stand_in)
    _engaged = True
    from megatron_tsp import cpu_megatron, cpu_recurrent  # import Megatron: torch must be ready

    for owner, name, stand_in in cpu_megatron.stand_ins():
        _replace(owner, name, stand_in, everywhere=True)
    for owner, name, stand_in in cpu_recurrent.stand_ins():
        _replace(owner, name, stand_in)
    wheel.fill_gaps()
    if int(os.environ.get("RANK", "0")) == 0:
        print(
            "no accelerator: CPU mode (gloo; streams are no-ops, device memory is not measured)",
            flush=True,
        )
    return True


def sign_of_gpu() -> str | None:
    """What says that this machine has a GPU, or that the job was given one, whatever torch sees."""
    for device in ("/dev/nvidiactl", "/dev/kfd"):  # NVIDIA's and AMD's drivers
        if os.path.exists(device):
            return f"{device} exists"
    # a list of ids, where 0 is a GPU; a count, where it is none
    for name, none in (("SLURM_JOB_GPUS", ""), ("SLURM_GPUS_ON_NODE", "0")):
        value = os.environ.get(name, "").strip()
        if value not in ("", none):
            return f"{name}={value}"
    return None


def default_flags() -> dict:
    """Values, by argparse dest, for the flags CPU mode needs where the user gives none."""
    return {dest: needed for dest, (_, needed) in _REQUIRED.items()} | _PREFERRED


def check_flags(args) -> None:
    """Raise ``TSPError`` for a parsed flag that CPU mode cannot honour, naming it."""
    for dest, (flag, needed) in _REQUIRED.items():
        given = getattr(args, dest, needed)
        if given == needed:
            continue
        if isinstance(needed, bool):
            raise TSPError(f"CPU mode (no GPU found) needs {flag}. Give it, or run on a GPU.")
        raise TSPError(
            f"CPU mode (no GPU found) needs {flag} {needed}, not {given}. Leave the flag out, or "
            "run on a GPU."
        )
    for dest, (flag, reason) in _REFUSED_FLAGS.items():
        given = getattr(args, dest, None)
        if given and given != "none":
            words = given if isinstance(given, list) else [given]
            _refuse_flag(flag if given is True else " ".join([flag, *map(str, words)]), reason)
    if getattr(args, "moe_token_dispatcher_type", None) == "flex":
        _refuse_flag("--moe-token-dispatcher-type flex", "DeepEP and HybridEP are GPU libraries")
    if not getattr(args, "use_mamba_mem_eff_path", True):
        _refuse_flag("--disable-mamba-mem-eff-path", "its other path is for GPUs")
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
