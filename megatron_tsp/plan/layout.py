"""A way to spread one model over many ranks: what the planner compares."""

from dataclasses import dataclass

#: Megatron's names of the exchanges.
CP_COMM_TYPES = {"ring": "p2p", "allgather": "all_gather", "alltoall": "a2a"}


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
        """'TSP 8 × DP 128'."""
        sizes = [("TSP" if self.fold else "TP", self.degree), ("CP", self.context)]
        sizes += [("PP", self.pipeline), ("DP", self.data)]
        words = [f"{name} {size}" for name, size in sizes if size > 1]
        if not self.fold and self.degree > 1:
            words[0] += "+SP"
        return " × ".join(words) or "one rank"

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
            words.append(f"{self.recompute} recompute")
        if self.virtual > 1:
            words.append(f"{self.virtual} virtual stages")
        return ", ".join(words)

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches of a step on each rank."""
        return global_batch // (self.data * self.micro_batch)

    def flags(self) -> list[str]:
        """The flags of this layout, as `megatron_tsp.pretrain_gpt` takes them."""
        words = []
        if self.fold:
            words += ["--tsp-size", str(self.degree)]
            words += ["--tsp-attention-exchange", self.exchange]
            for kind in ("attention", "mlp", "vocab"):
                words += [f"--tsp-{kind}-schedule", getattr(self, f"{kind}_schedule")]
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
