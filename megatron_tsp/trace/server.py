"""``python -m megatron_tsp.trace.server``: traces, each in a process forked from this one.

Megatron's state is global, so a process can trace once; its imports take longer than most traces,
so they are made once. Requests come on stdin and answers go to stdout, one JSON object a line.
"""

import json
import os
import sys
import traceback

# Also where there is a GPU: fake tensors of a GPU need its driver in the backward.
os.environ.update(CUDA_VISIBLE_DEVICES="", MEGATRON_TSP_CPU="1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Megatron prints
    if not os.environ.get("MEGATRON_TSP_TRACE_LOG"):
        os.dup2(1, 2)
    from megatron_tsp import cpu

    cpu.engage()
    import megatron.training  # noqa: F401

    import megatron_tsp.models.gpt
    import megatron_tsp.trace.ledger
    import megatron_tsp.trace.where  # noqa: F401

    for request in sys.stdin:
        child = os.fork()
        if child == 0:
            _answer(json.loads(request), answers)
            answers.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            json.dump({"crash": f"the tracing process ended with status {status}"}, answers)
            answers.write("\n")
            answers.flush()


def _answer(request: dict, answers) -> None:
    from megatron_tsp.errors import TSPError
    from megatron_tsp.trace import step

    try:
        answer = {"result": step.trace(**request)}
    except TSPError as error:
        answer = {"refused": str(error)}
    except BaseException as error:
        answer = {"crash": traceback.format_exc(), "megatron": _refusal(error)}
    json.dump(answer, answers)
    answers.write("\n")


def _refusal(error: BaseException) -> str | None:
    """What Megatron says against the flags, where its checks of them raised."""
    frames = traceback.extract_tb(error.__traceback__)
    checked = any(frame.name in ("validate_args", "parse_args") for frame in frames)
    if isinstance(error, (AssertionError, ValueError, RuntimeError)) and checked:
        return str(error) or frames[-1].line
    return None


if __name__ == "__main__":
    main()
