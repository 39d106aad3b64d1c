"""Gaps of Megatron's wheel without Transformer Engine and Apex, on any machine.

Each is a defect on Megatron's side that stops or silently bends a run; each fix is inert where
the gap is not there.
"""

import functools
import importlib
import pathlib


def fill_gaps() -> None:
    """Close the gaps of the installed megatron-core; safe to call more than once.

    Raises ``AttributeError`` naming the function when this Megatron no longer has it.
    """
    from megatron.core.datasets import utils
    from megatron.core.optimizer import distrib_optimizer

    if not (pathlib.Path(utils.__file__).parent / "Makefile").exists():
        utils.compile_helpers = _check_helpers
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        cls = distrib_optimizer.DistributedOptimizer
        _wrap(cls, "load_state_dict", _own_steps)
        _wrap(cls, "load_parameter_state_from_dp_reshardable", _without_grad)


def _wrap(owner, name, wrapper) -> None:
    original = getattr(owner, name)
    if not hasattr(original, "fills_gap"):
        wrapped = functools.wraps(original)(wrapper(original))
        wrapped.fills_gap = True
        setattr(owner, name, wrapped)


def _check_helpers() -> None:
    # Megatron runs `make` in a folder whose Makefile the wheel leaves out, and exits. The wheel
    # ships the compiled module instead: import it, so that a broken one fails here, by name.
    importlib.import_module("megatron.core.datasets.helpers_cpp")


def _own_steps(load_state_dict):
    # torch's Adam counts steps in one tensor per parameter. Megatron's load gives every parameter
    # the same tensor, which then counts once per parameter and update: wrong bias correction.
    def load(self, state_dict):
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load


def _without_grad(load_parameter_state):
    # Copies into fp32 parameters in place; every other layout's loader has its own no_grad.
    def load(self, state_dict):
        import torch

        with torch.no_grad():
            return load_parameter_state(self, state_dict)

    return load
