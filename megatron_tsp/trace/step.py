"""Run Megatron's own `pretrain` up to the end of its second step on fakes, and report that step."""

import contextlib
import os
import sys
import time
from dataclasses import asdict

#: The step that is measured: by then the optimizer has its state.
MEASURED = 2

#: Fake groups have no gloo twin.
_FLAGS = ("--disable-gloo-process-groups",)


class _Done(Exception):
    """The measured step is over."""


def trace(argv: list[str], rank: int, world: int, environment: dict[str, str]) -> dict:
    """What rank `rank` of `world` needs in a training step; a process can do this once.

    Args:
        argv: flags of ``megatron_tsp.pretrain_gpt``.
        environment: the job's environment variables.

    Returns:
        The fields of `result.Trace` that come from the run.

    Raises:
        TSPError: a flag or combination that cannot run, as from `pretrain`.
    """
    os.environ.update(environment)
    from megatron.training import training

    from megatron_tsp import traffic
    from megatron_tsp.trace import fake
    from megatron_tsp.trace.fake_mode import FakeMode
    from megatron_tsp.training.main import run

    counter = traffic.install()
    fake.start(rank, world)
    tracer = _Tracer(FakeMode(), counter)
    training.setup_model_and_optimizer = tracer.setup(training.setup_model_and_optimizer)
    training.build_train_valid_test_data_iterators = tracer.data
    training.train_step = tracer.step(training.train_step)
    sys.argv = ["pretrain_gpt.py"]
    started = time.perf_counter()
    with contextlib.suppress(_Done):
        run([*argv, *_FLAGS])
    if tracer.result is None:
        raise _error(f"training ended before step {MEASURED}: give --train-iters {MEASURED}")
    return {**tracer.result, "seconds": time.perf_counter() - started}


def _error(message: str):
    from megatron_tsp.errors import TSPError

    return TSPError(message)


class _Tracer:
    """The three places where `pretrain` is met: model, data, step."""

    def __init__(self, mode, counter):
        from megatron_tsp.trace.where import Where

        self.mode, self.counter = mode, counter
        self.where = Where()
        self.steps = 0
        self.result: dict | None = None

    def setup(self, setup_model_and_optimizer):
        """The model and the optimizer, of fake tensors, with hooks that follow the step."""

        def wrapped(*args, **kwargs):
            from megatron.core.utils import unwrap_model
            from megatron.training import get_args

            from megatron_tsp.trace import experts

            experts.check(get_args())
            with self.mode:
                built = setup_model_and_optimizer(*args, **kwargs)
            self.chunks, self.optimizer, _ = built
            for chunk in self.chunks:
                chunk.finish_grad_sync = self.where.during(
                    "gradients", "gradient reduction", chunk.finish_grad_sync
                )
                self.where.follow(unwrap_model(chunk))
            self.optimizer.step = self.where.during("optimizer", "optimizer", self.optimizer.step)
            return built

        return wrapped

    def data(self, provider):
        """(training, validation, test) iterators: what a data loader gives, without contents."""
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.training import get_args

        args = get_args()
        args.do_train, args.do_valid, args.do_test = True, False, False
        return RerunDataIterator(self._batches(args.micro_batch_size, args.seq_length)), None, None

    def _batches(self, b, s):
        import torch

        while True:
            with self.mode:
                ids = {
                    key: torch.zeros(b, s, dtype=torch.int64)
                    for key in ("tokens", "labels", "position_ids")
                }
                batch = {**ids, "loss_mask": torch.ones(b, s)}
            yield batch

    def step(self, train_step):
        """Megatron's `train_step`; the measured one is the last."""

        def wrapped(*args, **kwargs):
            self.steps += 1
            if self.steps < MEASURED:
                with self.mode, self._shallow():
                    train_step(*args, **kwargs)
                # What the loop goes on with: no losses, no reason to stop, a norm of 1.
                return {}, False, False, False, 0, 1.0, 0, None
            self._measure(lambda: train_step(*args, **kwargs))
            raise _Done

        return wrapped

    @contextlib.contextmanager
    def _shallow(self):
        """Two layers only: what a step leaves behind (optimizer state, buffers of the streams) does
        not depend on the number of layers, but the time to trace it does."""
        from megatron.core.utils import unwrap_model
        from torch.nn import ModuleList

        decoders = [unwrap_model(chunk).decoder for chunk in self.chunks]
        whole = [(one.layers, one.num_layers_per_pipeline_rank) for one in decoders]
        config = self.chunks[0].ddp_config
        overlap = config.overlap_grad_reduce
        if self.chunks[0].config.num_moe_experts is None:  # else layers may differ
            config.overlap_grad_reduce = False  # it waits for gradients of all layers
            for one in decoders:
                one.layers = ModuleList(list(one.layers)[:2])
                one.num_layers_per_pipeline_rank = len(one.layers)
        yield
        config.overlap_grad_reduce = overlap
        for one, (layers, number) in zip(decoders, whole, strict=True):
            one.layers, one.num_layers_per_pipeline_rank = layers, number

    def _measure(self, run) -> None:
        from megatron_tsp.trace.ledger import Ledger

        ledger = Ledger(self.where)
        # The last word counts: an optimizer refers to gradients, and in fp32 to the parameters.
        ledger.own(self._optimizer_state(), "optimizer")
        ledger.own(self._gradients(), "gradients")
        ledger.own(self._parameters(), "parameters")
        self.counter.reset()
        with ledger, self.mode.shown_to(ledger):
            before = dict(ledger.split)
            run()
        sent = self.counter.snapshot()
        self.result = {
            "peak": asdict(ledger.peak_at),
            "at_start": before,
            "flops": ledger.flops,
            "sent": [[*key, size] for key, size in sorted(sent.items())],
            "timeline": ledger.timeline,
            "marks": ledger.marks,
            "microbatches": _microbatches(),
        }

    def _parameters(self):
        for chunk in self.chunks:
            yield from chunk.parameters()
            for buffer in self._buffers(chunk):
                yield buffer.param_data

    def _gradients(self):
        for chunk in self.chunks:
            for buffer in self._buffers(chunk):
                yield buffer.grad_data
            yield from (parameter.grad for parameter in chunk.parameters())

    @staticmethod
    def _buffers(chunk):
        return [*getattr(chunk, "buffers", []), *getattr(chunk, "expert_parallel_buffers", [])]

    def _optimizer_state(self):
        for one in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner = one.optimizer
            for group in inner.param_groups:
                yield from group["params"]
                yield from (parameter.grad for parameter in group["params"])
            for state in inner.state.values():
                yield from state.values()


def _microbatches() -> int:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return get_num_microbatches()
