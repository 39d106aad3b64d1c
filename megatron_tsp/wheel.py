"""Gaps of Megatron's wheel, most of them without Transformer Engine and Apex, on any machine.

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
    from megatron.core.tensor_parallel import random

    if not (pathlib.Path(utils.__file__).parent / "Makefile").exists():
        utils.compile_helpers = _check_helpers
    if not random.HAVE_TE:
        _wrap(random.CheckpointWithoutOutput, "__init__", _without_fp8)
    cls = distrib_optimizer.DistributedOptimizer
    _wrap(cls, "sharded_param_state_fully_reshardable", _with_places_in_what_is_gathered)
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        _wrap(cls, "state_dict", _with_adam_state)
        _wrap(cls, "load_state_dict", _with_own_steps)
        _wrap(cls, "_set_main_param_and_optimizer_states", _without_step_and_grad)


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


def _without_fp8(init):
    # Recompute of the layernorm takes its default, fp8=False, for fp8 and asks Transformer Engine.
    def init_without(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.fp8 = False

    return init_without


def _with_places_in_what_is_gathered(sharded):
    # What is gathered for a checkpoint has lost the padding behind each bucket of gradients, and
    # Megatron cuts it by the parameters' places with the padding: with several buckets of a size
    # that is padded, the state of one parameter is saved as another's.
    def cut(self, *args, **kwargs):
        places = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = _without_padding(buffer)
            return sharded(self, *args, **kwargs)
        finally:
            for buffer, own in zip(self.buffers, places, strict=True):
                buffer.param_index_map = own

    return cut


def _without_padding(buffer) -> dict:
    """param -> (start, end, bucket) among the buckets of a buffer laid end to end, unpadded."""
    shift, begin = [], 0
    for bucket in buffer.buckets:
        shift.append(begin - bucket.offset)
        begin += bucket.numel_unpadded
    return {
        param: (start + shift[bucket], end + shift[bucket], bucket)
        for param, (start, end, bucket) in buffer.param_index_map.items()
    }


# Without Transformer Engine and Apex the distributed optimizer runs torch's Adam, which keeps a
# step count in each parameter's state; theirs keep it in the parameter group. Megatron's save
# handles both; its load, in three places, only theirs.


def _with_adam_state(state_dict):
    # A load starts from state_dict(), which wants one step count: torch's Adam has none before
    # its first update. This is the state that Adam itself would begin with.
    def get(self):
        import torch

        adam = self.optimizer
        if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)) and not adam.state:
            for group in adam.param_groups:
                for param in group["params"]:
                    adam.state[param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
        return state_dict(self)

    return get


def _with_own_steps(load_state_dict):
    # The load gives all parameters one step tensor, which then counts once per parameter and
    # update: a wrong bias correction, silently.
    def load(self, state):
        load_state_dict(self, state)
        for param_state in self.optimizer.state.values():
            if "step" in param_state:
                param_state["step"] = param_state["step"].clone()

    return load


def _without_step_and_grad(set_states):
    # The step was loaded already, from the parameter groups: what comes here is missing, or the
    # count from before the load. Anything that is not a tensor is left alone. And fp32 main
    # parameters are leaves that require grad, into which dp_reshardable's load copies in place.
    def set_without_step(self, model_param, tensors):
        import torch

        with torch.no_grad():
            set_states(self, model_param, {**tensors, "step": None})

    return set_without_step
