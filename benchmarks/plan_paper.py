"""The planner beside the paper's figures: ``python -m benchmarks.plan_paper``.

arXiv 2604.26294 reports a 7B at 128K tokens on 1,024 MI300X, 8 a replica: TSP against T
tensor-parallel by Σ sequence-parallel ranks (weights replicated over Σ: Megatron's context
parallelism).
"""

from dataclasses import replace

from megatron_tsp.plan import hardware
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model
from megatron_tsp.plan.prediction import layer_phases, predict
from megatron_tsp.plan.timeline import COMPUTE

GPUS = 1024
MODEL = Model(
    layers=32, hidden=4096, heads=32, kv_heads=32, channels=128, ffn=16384, gated=True, vocab=32000,
    sequence=131072, global_batch=GPUS // 8,
)  # fmt: skip
#: (layout, the paper's GiB a GPU).
LAYOUTS = (
    (Layout(fold=True, degree=8), 38.8),
    (Layout(fold=True, degree=8, mlp_schedule="broadcast", vocab_schedule="broadcast"), None),
    (Layout(fold=False, degree=8), 70.0),
    (Layout(fold=False, degree=4, context=2), 85.0),
    (Layout(fold=False, degree=2, context=4), 140.0),
)
#: The authors' tokens/s, TSP and T×Σ, and the press's of T×Σ.
CLAIMED = 173e6, 86e6, 66.3e6


def main() -> None:
    """Print the table, and what the claimed rates would need."""
    machine = hardware.load("mi300x")
    heads = ["layout", "schedules", "forward only, M tokens/s", "training, M tokens/s"]
    heads += ["TSP to it, forward", "TSP to it, training", "seconds of transfers to TSP's, forward"]
    heads += ["GiB", "GiB in the paper"]
    print("| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", sep="\n")
    base = None
    for layout, paper in LAYOUTS:
        layout = replace(layout, data=GPUS // 8)
        step = predict(MODEL, layout, machine)
        one = replace(MODEL, layers=1, global_batch=1)
        forward, _ = layer_phases(one, replace(layout, data=1), machine)
        rate = GPUS / 8 * MODEL.sequence / (MODEL.layers * forward.total)
        moved = sum(s for stream, s in forward.busy.items() if stream != COMPUTE)
        base = base or (rate, step.tokens_per_s, moved)
        schedules = f"{layout.attention_schedule}, {layout.mlp_schedule}" if layout.fold else ""
        print(
            f"| {layout.grid} | {schedules} | {rate / 1e6:.2f} | {step.tokens_per_s / 1e6:.2f} | "
            f"{base[0] / rate:.2f} | {base[1] / step.tokens_per_s:.2f} | {moved / base[2]:.2f} | "
            f"{step.memory.peak / 2**30:.1f} | {paper or ''} |"
        )
    weights = MODEL.layers * (MODEL.attention_weights + MODEL.mlp_weights)
    weights += MODEL.vocab * MODEL.hidden
    attention = 2 * MODEL.layers * MODEL.sequence * MODEL.q_width
    peak = machine.numbers["matmul"] * 1e12 * GPUS
    print(f"\nforward FLOPs a token: {2 * weights / 1e9:.1f} G of products with weights, ", end="")
    print(f"{attention / 1e9:.1f} G of causal attention")
    for name, flops in (("", 2 * weights + attention), (" without attention", 2 * weights)):
        print(
            f"tokens/s at the peak of {GPUS} GPUs, forward only{name}: {peak / flops / 1e6:.1f} M"
        )
    ours, theirs, press = CLAIMED
    print(
        f"claimed: {ours / 1e6:.0f} M; to T×Σ {ours / theirs:.1f}, in the press {ours / press:.1f}"
    )


if __name__ == "__main__":
    main()
