"""A way to spread one model over many ranks: what the planner compares."""

from dataclasses import dataclass
from functools import cached_property

#: Megatron's names of the exchanges.
CP_COMM_TYPES = {"ring": "p2p", "allgather": "all_gather", "alltoall": "a2a"}
#: What does not change how a layer is computed.
_AROUND = dict(
    data=1, pipeline=1, virtual=1, distributed_optimizer=False, overlap_grads=False,
    overlap_params=False,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a training run is spread.

    Ranks are numbered as Megatron does: the tensor-parallel (or TSP) group innermost, then
    context, data, pipeline.

    Attributes:
        fold: TSP; else Megatron's tensor and sequence parallelism, with the norm and attention core
            that `--tsp-baseline-core` gives it.
        degree: D, or the tensor-parallel size.
        context, pipeline, data: sizes of the other dimensions.
        expert: ranks that experts are spread over, of those of the other dimensions but pipeline.
        virtual: virtual stages a pipeline rank.
        micro_batch: sequences.
        recompute: "none"; "selective", of `modules`; "full", `recompute_layers` at a time.
        save_activations, save_kv: `--tsp-mlp-save-activations`, `--tsp-save-kv`.
        exchange: how queries meet the keys of other ranks: "allgather", "alltoall", and for context
            parallelism without a fold also "ring".
        attention_schedule, mlp_schedule, vocab_schedule: as the `--tsp-*` flags.
        distributed_optimizer, overlap_grads, overlap_params: as Megatron's flags.
    """

    fold: bool
    degree: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    virtual: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    modules: tuple[str, ...] = ()
    recompute_layers: int = 1
    save_activations: bool = False
    save_kv: bool = False
    exchange: str = "allgather"
    attention_schedule: str = "broadcast"
    mlp_schedule: str = "ring"
    vocab_schedule: str = "ring"
    distributed_optimizer: bool = False
    overlap_grads: bool = False
    overlap_params: bool = False

    @property
    def ranks(self) -> int:
        """Ranks of the whole run."""
        return self.degree * self.context * self.pipeline * self.data

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.degree * self.context * self.data // self.expert

    @property
    def token_ranks(self) -> int:
        """Ranks that a sequence is spread over inside attention."""
        return self.degree * self.context if self.fold else self.context

    def recomputes(self, module: str) -> bool:
        """Whether "core_attn", "mlp" or "layernorm" is computed again in the backward."""
        return self.recompute == "selective" and module in self.modules

    @property
    def kind(self) -> str:
        """The name of the family: TSP, TP+SP or TP x CP."""
        if self.fold:
            return "TSP"
        return "TP+SP" if self.context == 1 else "TP×CP"

    @property
    def grid(self) -> str:
        """'TSP 8 × DP 128', and ', EP 8' if experts are spread."""
        sizes = [("TSP" if self.fold else "TP", self.degree), ("CP", self.context)]
        sizes += [("PP", self.pipeline), ("DP", self.data)]
        words = [f"{name} {size}" for name, size in sizes if size > 1]
        if not self.fold and self.degree > 1:
            words[0] += "+SP"
        grid = " × ".join(words) or "one rank"
        return f"{grid}, EP {self.expert}" if self.expert > 1 else grid

    @property
    def options(self) -> str:
        """What else differs between layouts of one grid, in a few words."""
        words = [f"micro-batch {self.micro_batch}"]
        if self.token_ranks > 1:
            words.append(f"{self.exchange} of {'heads' if self.exchange == 'alltoall' else 'K/V'}")
        if self.fold and self.degree > 1:
            schedules = {self.attention_schedule, self.mlp_schedule}
            words.append(
                schedules.pop()
                if len(schedules) == 1
                else f"{self.attention_schedule}/{self.mlp_schedule}"
            )
        if self.save_activations:
            words.append("activations saved")
        if self.save_kv:
            words.append("gathered K/V saved")
        if self.recompute != "none":
            words.append(" ".join((self.recompute, "recompute", *self._of_modules)))
        if self.virtual > 1:
            words.append(f"{self.virtual} virtual stages")
        return ", ".join(words)

    @cached_property
    def group_only(self) -> "Layout":
        """What a layer's time and memory depend on: this, without the dimensions around it."""
        return self.but(**_AROUND)

    @property
    def ends_only(self) -> "Layout":
        """Of this what the embedding's and the loss's time depends on."""
        return self.but(
            expert=1, recompute="none", modules=(), recompute_layers=1, exchange="allgather",
            save_activations=False, save_kv=False, attention_schedule="broadcast",
            mlp_schedule="ring",
        )  # fmt: skip

    @cached_property
    def grid_only(self) -> "Layout":
        """What parameters depend on: this, without how a layer is computed."""
        return self.but(
            micro_batch=1, recompute="none", modules=(), recompute_layers=1, exchange="allgather",
            save_activations=False, save_kv=False, attention_schedule="broadcast",
            mlp_schedule="ring", vocab_schedule="ring", overlap_grads=False, overlap_params=False,
        )  # fmt: skip

    @property
    def _of_modules(self) -> tuple[str, ...]:
        return ("of", " and ".join(self.modules)) if self.modules else ()

    def but(self, **changes) -> "Layout":
        """As `dataclasses.replace`, in a tenth of its time; the search makes many."""
        other = object.__new__(Layout)
        other.__dict__.update(self.__dict__, **changes)
        other.__dict__.pop("grid_only", None)
        if not changes.keys() <= _AROUND.keys():
            other.__dict__.pop("group_only", None)
        return other

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of a step on each rank."""
        return global_batch // (self.data * self.micro_batch)

    def flags(self) -> list[str]:
        """The flags of this layout, as `megatron_tsp.pretrain_gpt` takes them."""
        words = []
        if self.fold:
            words += ["--tsp-size", str(self.degree)]
            words += ["--tsp-attention-exchange", self.exchange]
            # A schedule of what a model does not have is refused: only those that are not defaults.
            for kind in ("attention", "mlp", "vocab"):
                name = f"{kind}_schedule"
                if getattr(self, name) != getattr(Layout, name):
                    words += [f"--tsp-{kind}-schedule", getattr(self, name)]
            if self.save_activations:
                words.append("--tsp-mlp-save-activations")
            if self.save_kv:
                words.append("--tsp-save-kv")
        else:
            words += ["--tensor-model-parallel-size", str(self.degree)]
            if self.degree > 1:
                words.append("--sequence-parallel")
            words.append("--tsp-baseline-core")
        if self.context > 1:
            words += ["--context-parallel-size", str(self.context)]
            if not self.fold:
                words += ["--cp-comm-type", CP_COMM_TYPES[self.exchange]]
        if self.pipeline > 1:
            words += ["--pipeline-model-parallel-size", str(self.pipeline)]
        if self.expert > 1:
            words += ["--expert-model-parallel-size", str(self.expert)]
            words += ["--expert-tensor-parallel-size", "1"]
        if self.virtual > 1:
            words += ["--num-virtual-stages-per-pipeline-rank", str(self.virtual)]
        words += ["--micro-batch-size", str(self.micro_batch)]
        if self.recompute == "selective":
            words += ["--recompute-granularity", "selective"]
            words += ["--recompute-modules", *self.modules]
        elif self.recompute == "full":
            words += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
            words += ["--recompute-num-layers", str(self.recompute_layers)]
        if self.distributed_optimizer:
            words.append("--use-distributed-optimizer")
        if self.overlap_grads:
            words.append("--overlap-grad-reduce")
        if self.overlap_params:
            words.append("--overlap-param-gather")
        return words
