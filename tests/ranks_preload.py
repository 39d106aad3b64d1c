"""Imported once by the process that all ranks are forked from."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_tsp import cpu  # noqa: E402

cpu.engage()

import megatron.core.models.gpt  # noqa: E402, F401
import megatron.training  # noqa: E402, F401

import megatron_tsp.models.gpt  # noqa: E402, F401
