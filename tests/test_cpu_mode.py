"""CPU mode: its stand-ins, what it refuses, and that it leaves a machine with a GPU alone."""

import argparse
import subprocess
import sys
import textwrap

import pytest
import torch

from megatron_tsp import cpu
from megatron_tsp.errors import TSPError

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def in_new_process(code):
    """Run code in a fresh interpreter: stand-ins stay for a process's whole life."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Args:
    """Parsed arguments, as far as `check_flags` reads them."""

    def __init__(self, **changed):
        vars(self).update(cpu.default_flags(), **changed)


def test_machine_with_gpu_is_left_alone():
    in_new_process(
        """
        import os
        import sys
        import torch
        from megatron_tsp import cpu

        torch.cuda.is_available = lambda: True
        watched = torch, torch.Tensor, torch.cuda, torch.cuda.memory
        before = [dict(vars(owner)) for owner in watched] + [dict(os.environ)]
        assert cpu.engage() is False and not cpu.engaged()
        assert before == [dict(vars(owner)) for owner in watched] + [dict(os.environ)]
        assert "megatron.core" not in sys.modules
        """
    )


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without any sign of a GPU; gives the folder that stands for /dev."""
    for name in ("SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", cpu.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    exists = cpu.os.path.exists
    monkeypatch.setattr(
        cpu.os.path,
        "exists",
        lambda path: exists(str(path).replace("/dev/", f"{tmp_path}/", 1)),
    )
    return tmp_path


@pytest.mark.parametrize("device", ["nvidiactl", "kfd"])
def test_a_driver_is_a_sign_of_a_gpu(bare, device):
    assert cpu.sign_of_gpu() is None
    (bare / device).touch()
    assert cpu.sign_of_gpu() == f"/dev/{device} exists"


@pytest.mark.parametrize("name", ["SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"])
def test_a_schedulers_word_is_a_sign_of_a_gpu(bare, monkeypatch, name):
    monkeypatch.setenv(name, "")
    assert cpu.sign_of_gpu() is None
    monkeypatch.setenv(name, "0")  # an id, or a count
    assert (cpu.sign_of_gpu() is None) == (name == "SLURM_GPUS_ON_NODE")
    monkeypatch.setenv(name, "2,3")
    assert cpu.sign_of_gpu() == f"{name}=2,3"


def test_a_gpu_that_torch_does_not_see_is_an_error(monkeypatch):
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "_engaged", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "sign_of_gpu", lambda: "/dev/nvidiactl exists")
    empty = torch.empty
    with pytest.raises(TSPError) as error:
        cpu.engage()
    for part in ("/dev/nvidiactl exists", "torch build", "driver", "set MEGATRON_TSP_CPU=1"):
        assert part in str(error.value)
    assert not cpu.engaged() and torch.empty is empty


def test_the_variable_does_not_hide_a_gpu_that_torch_sees(monkeypatch):
    monkeypatch.setenv(cpu.VARIABLE, "1")
    monkeypatch.setattr(cpu, "_engaged", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(TSPError, match="torch sees a GPU. Set CUDA_VISIBLE_DEVICES="):
        cpu.engage()


@no_gpu
def test_the_variable_means_it():
    in_new_process(
        """
        import os
        from megatron_tsp import cpu

        cpu.sign_of_gpu = lambda: "/dev/nvidiactl exists"
        os.environ["MEGATRON_TSP_CPU"] = "1"
        assert cpu.engage() and cpu.engaged()
        """
    )


def test_default_flags_pass():
    cpu.check_flags(Args())


def test_flags_are_named_as_megatrons_parser_names_them():
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {action.dest: action for action in parser._actions}
    for dest, (flag, needed) in cpu._REQUIRED.items():
        assert flag in flags[dest].option_strings, (dest, flag)
        if isinstance(needed, bool):  # giving the flag sets what is needed
            assert flags[dest].const is needed, (dest, flag)
        wrong = not needed if isinstance(needed, bool) else "other"
        with pytest.raises(TSPError, match=f"needs {flag}[ .]"):
            cpu.check_flags(Args(**{dest: wrong}))
    for dest, (flag, _) in cpu._REFUSED_FLAGS.items():
        assert flag in flags[dest].option_strings, (dest, flag)


def test_flags_that_the_entry_does_not_carry_are_megatrons():
    from megatron.training.arguments import add_megatron_arguments

    from megatron_tsp.training import gpt

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {action.dest: action.option_strings for action in parser._actions}
    for dest, flag in gpt.NOT_CARRIED.items():
        assert flag in flags[dest], (dest, flag)
        with pytest.raises(TSPError, match=f"does not carry {flag};"):
            gpt.check_args(argparse.Namespace(**{dest: True}))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tsp-size 1 --perform-rl-step", "--perform-rl-step does not work with --tsp-size"),
        ("--tsp-size 2 --fp8-format hybrid", "--fp8-format hybrid does not work with --tsp-size"),
        ("--perform-rl-step", "does not carry --perform-rl-step"),
        ("--fp8-format hybrid", "CPU mode (no GPU found) cannot honour --fp8-format hybrid"),
        ("--tsp-size 1 --log-energy", "CPU mode (no GPU found) cannot honour --log-energy"),
    ],
)
def test_a_tsp_user_sees_the_tsp_refusal(flags, message, monkeypatch):
    from megatron_tsp.training import main

    argv = ["train", *"--num-layers 1 --hidden-size 8 --num-attention-heads 2".split()]
    argv += ["--attention-dropout", "0", *flags.split()]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(TSPError) as error:
        main.parse(on_cpu=True)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl"),
        ({"apply_rope_fusion": True}, "--no-rope-fusion"),
        ({"distributed_backend": "nccl"}, "--distributed-backend"),
        ({"async_strategy": "nvrx"}, "--async-strategy"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        ({"log_memory_to_tensorboard": True}, "--log-memory-to-tensorboard"),
        ({"record_memory_history": True}, "--record-memory-history"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"fp8": "hybrid"}, "--fp8-format"),
        ({"use_mamba_mem_eff_path": False}, "--disable-mamba-mem-eff-path:"),
        ({"high_priority_stream_groups": ["dp", "pp"]}, "--high-priority-stream-groups dp pp:"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({"profile": True, "use_pytorch_profiler": False}, "--profile"),
    ],
)
def test_flag_is_refused_by_name(changed, named):
    with pytest.raises(TSPError, match=named):
        cpu.check_flags(Args(**changed))


@pytest.mark.parametrize(
    "allowed",
    [
        {"num_workers": 2},
        {"cuda_graph_impl": "none"},
        {"profile": True, "use_pytorch_profiler": True},
        {"use_persistent_ckpt_worker": True},
    ],
)
def test_flag_is_carried(allowed):
    cpu.check_flags(Args(**allowed))


def test_missing_name_is_reported():
    with pytest.raises(TSPError, match=r"torch\.cuda\._exchange_gadget"):
        cpu._replace(torch.cuda, "_exchange_gadget", None)


@no_gpu
def test_stand_ins():
    """One process for all: engaging imports Megatron, which takes seconds."""
    out = in_new_process(
        """
        import os
        import torch
        from megatron_tsp import cpu

        assert cpu.engage() and cpu.engage() and cpu.engaged()
        assert not torch.cuda.is_available()

        # devices
        cuda = torch.device("cuda", 0)
        index = torch.cuda.current_device()
        made = [
            torch.empty(2, device="cuda"),
            torch.tensor([1.0], device=cuda),
            torch.zeros(2, device=index),
            torch.empty_like(torch.ones(2), device="cuda:0"),
            torch.as_tensor([1.0], dtype=None, device="cuda"),
            torch.ones(2).new_empty(2, device=cuda),
            torch.empty(2, pin_memory=True),
            torch.ones(2).to("cuda"),
            torch.ones(2).to(index),
            torch.ones(2).to(device=cuda, dtype=torch.float64),
            torch.ones(2).cuda(non_blocking=True).pin_memory(),
            torch.nn.Linear(2, 2).cuda().weight,
            torch.nn.Linear(2, 2).to("cuda").weight,
        ]
        assert all(tensor.device.type == "cpu" for tensor in made), made
        assert torch.ones(1).to("meta").device.type == "meta"
        assert torch.ones(1).to(torch.int32).dtype == torch.int32
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.float16

        # one device and its generator, which is the CPU's
        assert torch.cuda.device_count() == 1
        with torch.cuda.device(0):
            torch.cuda.set_device(0)
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(3))
        # a data loader must not draw from it
        state = torch.get_rng_state()
        list(torch.utils.data.DataLoader([1, 2, 3]))
        assert torch.equal(state, torch.get_rng_state())

        # streams and events
        with torch.cuda.stream(torch.cuda.Stream(device="cuda", priority=0)) as stream:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            end.record(stream)
            stream.wait_event(end)
            stream.wait_stream(torch.cuda.current_stream())
            assert end.query() and start.elapsed_time(end) >= 0.0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

        # what cannot be measured or emulated says so
        for call in (
            torch.cuda.memory_allocated,
            torch.cuda.max_memory_allocated,
            torch.cuda.memory_stats,
            torch.cuda.mem_get_info,
            torch.cuda.memory._snapshot,
            torch.cuda.CUDAGraph,
            torch.cuda.graph_pool_handle,
            torch.cuda.MemPool,
        ):
            try:
                call()
            except RuntimeError as error:
                assert "CPU mode" in str(error), error
            else:
                raise AssertionError(f"{call} did not refuse")

        # Megatron's names, in the modules that use them
        from megatron.core.transformer.moe import token_dispatcher
        from megatron.training import training

        splits = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
        assert splits.tolist() == [1, 2] and not torch.is_tensor(splits)
        assert training.report_memory("anything") is None
        assert torch.compile(lambda x: x + 1)(torch.ones(1)).item() == 2.0
        """
    )
    assert out.count("no accelerator: CPU mode") == 1


@no_gpu
def test_every_replaced_name_exists_and_engaging_late_works():
    """Lists the torch and Megatron names that an installed version no longer has, all at once;
    then modules that took a function by name before must get the stand-in too."""
    in_new_process(
        """
        import torch
        from megatron.core.transformer.moe import token_dispatcher
        from megatron.training import training
        from megatron_tsp import cpu, cpu_megatron, cpu_torch

        gone = [
            f"{owner.__name__}.{name}"
            for module in (cpu_torch, cpu_megatron)
            for owner, name, stand_in in module.stand_ins()
            if not hasattr(owner, name)
        ]
        assert not gone, f"CPU mode replaces names that no longer exist: {gone}"

        original = training.initialize_megatron
        assert cpu.engage()
        assert training.initialize_megatron is not original
        assert not torch.is_tensor(
            token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1]), as_numpy=True)
        )
        """
    )


def test_entry_imports_nothing_heavy():
    """A checkpoint save may start processes that import the entry again."""
    in_new_process(
        """
        import sys
        import megatron_tsp.pretrain_gpt
        assert "torch" not in sys.modules and "megatron.core" not in sys.modules
        """
    )


def test_users_error_is_one_message(capsys, monkeypatch):
    from megatron_tsp.training.main import exit_with

    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stopped:
        exit_with(TSPError("--tsp-size 3 does not divide 32 tokens"))
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "megatron-tsp: error: --tsp-size 3 does not divide 32 tokens\n"
    )
