"""How much one rank has to do in a layer, and how long each piece takes on a machine."""

from dataclasses import dataclass
from functools import cached_property

from megatron_tsp.plan import experts, traffic
from megatron_tsp.plan.hardware import Hardware
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model

#: Reads and writes of a tensor by kernels that are not products, counted in the layers' code, for
#: elements of 2 and 4 bytes (with 2, some of them are of fp32).
NORM = {2: 14, 4: 5}
NORM_BACKWARD = {2: 44, 4: 22}
ROPE = 10
PACK = 4
MERGE = {2: 16, 4: 10}
ACTIVATION = 5
ACTIVATION_BACKWARD = 17
RESIDUAL = 3
#: fp32 numbers of a router, one for each token and expert: scores, top k, map, and their backward.
ROUTER = 12
CROSS_ENTROPY = {2: 20, 4: 10}
CROSS_ENTROPY_BACKWARD = {2: 12, 4: 7}
#: Flash attention's backward has 5 products for the forward's 2 (arXiv 2205.14135).
ATTENTION_BACKWARD = 2.5
#: A head group's K and V are gathered by no less than this (`kv_gather._WORTH_SPLITTING`).
WORTH_SPLITTING = 4 * 2**20
#: ... and by no more than this, or a head (`kv_gather._TOO_MANY`).
TOO_MANY = 128 * 2**20


@dataclass(frozen=True)
class Work:
    """The sizes of one rank's work in a layer; `moe`: in one with a mixture of experts."""

    model: Model
    layout: Layout
    hardware: Hardware
    moe: bool = False

    @cached_property
    def tokens(self) -> int:
        """Tokens that a rank holds between blocks."""
        return traffic.tokens(self.model, self.layout) // self.layout.degree

    @cached_property
    def group_tokens(self) -> int:
        """Tokens of the tensor-parallel group."""
        return traffic.tokens(self.model, self.layout)

    @property
    def ffn(self) -> int:
        """Width of the MLP, or of the shared experts; 0 without."""
        return self.model.mixture.shared if self.moe else self.model.ffn

    @property
    def fc1_width(self) -> int:
        """Output features of its first linear."""
        return self.ffn * self.model.gates

    @property
    def local_weights(self) -> float:
        """Weights of a layer on a rank."""
        sharded = traffic.sharded_weights(self.model, self.moe) / self.layout.degree
        if self.moe:
            sharded += experts.held(self.model, self.layout)
        return sharded

    def matmul(self, m: float, n: float, k: float) -> float:
        """Seconds of [m, k] times [k, n]."""
        size = (m * k + k * n + m * n) * self.model.element
        return self.hardware.matmul(2 * m * n * k, size)

    def elementwise(self, passes: float, elements: float) -> float:
        """Seconds of kernels that read or write `elements` `passes` times."""
        return self.hardware.elementwise(passes * elements * self.model.element)

    @cached_property
    def attention_flops(self) -> float:
        """Forward, causal, of one rank."""
        model, layout = self.model, self.layout
        whole = 2 * layout.micro_batch * model.sequence**2 * model.q_width
        return whole / (layout.degree * layout.context)

    def seconds(self, transfer: traffic.Transfer, parts: int = 1) -> float:
        """Of one of `parts` equal operations that send `transfer` together."""
        ranks, stride = self.group(transfer.group)
        sent = float(transfer.sent) / parts
        return self.hardware.transfer(transfer.collective, sent, ranks, stride)

    def group(self, name: str) -> tuple[int, int]:
        """(ranks, stride) of a process group."""
        layout = self.layout
        inner = layout.degree * layout.context
        return {
            "tsp-weights": (layout.degree, 1),
            "tp": (layout.degree, 1),
            "tsp": (layout.degree, 1),
            "tsp-kv": (inner, 1),
            "cp": (layout.context, layout.degree),
            "dp-cp": (layout.data * layout.context, layout.degree),
            "pp": (2, inner * layout.data),
            "world": (2, inner * layout.data),
            "tp-cp": (inner, 1),
            "ep": (layout.expert, 1),
            "expert-tensor-and-model-parallel": (layout.expert, 1),
            "expert-data-parallel": (layout.expert_replicas, layout.expert),
            "embedding": (2, inner * layout.data * max(layout.pipeline - 1, 1)),
        }[name]
