"""What is running: which part of the model, in which phase of the step.

Hooks on the modules follow the forward (and what is computed again in the backward); hooks on the
gradients of their inputs and outputs follow the backward.
"""

import re

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_tsp import traffic

#: Ends of module names, and what they are called. The block kind of their traffic is in `_KINDS`.
_PARTS = (
    (r"embedding", "embedding"),
    (r"decoder\.layers\.(\d+)\.self_attention", "layer {} attention"),
    (r"decoder\.layers\.(\d+)\.mlp", "layer {} MLP"),
    (r"decoder\.layers\.(\d+)", "layer {}"),
    (r"decoder\.final_layernorm", "final norm"),
    (r"output_layer", "loss"),
)
_KINDS = (("attention", "attention"), ("MLP", "mlp"), ("embedding", "embedding"), ("loss", "loss"))

START = "start of the step"


class Where:
    """What is running: `label`, such as "layer 3 MLP"; `kind`, of `traffic.BLOCKS`; and `phase`:
    forward, recompute, backward, gradient reduction or optimizer."""

    def __init__(self):
        self.set(START, "")

    def set(self, label: str, phase: str) -> None:
        """From now on it is this."""
        self.label, self.phase = label, phase
        self.kind = next((kind for part, kind in _KINDS if part in label), "other")
        traffic.set_kind(self.kind)

    def follow(self, chunk: GPTModel) -> None:
        """Follow a model chunk. Its layers are numbered from 1, as in the whole model."""
        layers = chunk.decoder.layers
        first_layer = layers[0].layer_number if len(layers) else 1
        for name, module in chunk.named_modules():
            label = _label(name, first_layer)
            if label is not None:
                self._follow(module, label)
        ends = "loss" if chunk.post_process else None
        self._follow(chunk.decoder, "decoder", then=ends)
        self._follow(chunk, "model", backward=ends)

    def _follow(self, module, label: str, then: str | None = None, backward: str | None = None):
        """Set `label` while the module runs; `then`: what runs after its forward, by default what
        ran before; `backward`: where its backward begins, by default in the module itself."""
        before: list[tuple[str, str]] = []

        def enter(module, args, kwargs):
            outer = self.label, self.phase
            before.append(outer)
            again = torch._C._current_graph_task_id() != -1  # inside a backward
            for tensor in _tensors((args, kwargs)):
                # The gradient of its input is there: its backward is done.
                tensor.register_hook(lambda _: self.set(outer[0], "backward"))
            self.set(label, "recompute" if again else "forward")

        def leave(module, args, result):
            outer = before.pop()
            for tensor in _tensors(result):
                tensor.register_hook(lambda _: self.set(backward or label, "backward"))
            self.set(*(outer if then is None else (then, self.phase)))

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    def during(self, label: str, phase: str, function):
        """`function`, during which it is this."""

        def called(*args, **kwargs):
            outer = self.label, self.phase
            self.set(label, phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.set(*outer)

        return called


def _label(name: str, first_layer: int) -> str | None:
    for pattern, label in _PARTS:
        found = re.fullmatch(pattern, name)
        if found:
            return label.format(*(first_layer + int(number) for number in found.groups()))
    return None


def _tensors(value):
    """The tensors of nested values that get a gradient."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
