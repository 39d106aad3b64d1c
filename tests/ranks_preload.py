"""Imported once by the process that all ranks are forked from."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_tsp import cpu  # noqa: E402

cpu.engage()

from argparse import ArgumentParser  # noqa: E402
from functools import cache  # noqa: E402

import megatron.core.models.gpt  # noqa: E402, F401
import megatron.training  # noqa: E402, F401
from megatron.training import argument_utils  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

import megatron_tsp.models.gpt  # noqa: E402, F401

# Megatron's parser reads its help texts out of source files, for a second, in every process.
_factory = argument_utils.ArgumentGroupFactory
_read = _factory._get_field_docstrings
_docstrings = cache(lambda cls: _read(_factory.__new__(_factory), cls))
_factory._get_field_docstrings = lambda self, cls: dict(_docstrings(cls))
add_megatron_arguments(ArgumentParser())
