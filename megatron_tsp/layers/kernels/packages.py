"""Which kernels' packages are installed, and what their functions take."""

import importlib
import inspect
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from types import ModuleType

from packaging.version import Version

from megatron_tsp.errors import TSPError


def first_module(names: Iterable[str]) -> ModuleType | None:
    """The first of these modules that is installed, imported; None without one.

    Raises:
        TSPError: it is there, and importing it fails.
    """
    for name in names:
        try:
            if _exists(name):
                return importlib.import_module(name)
        except (ImportError, OSError) as error:
            raise TSPError(f"{name} is installed, and importing it fails: {error}") from error
    return None


def _exists(name: str) -> bool:
    package = name.rpartition(".")[0]
    return (not package or _exists(package)) and find_spec(name) is not None


def version(distribution: str) -> Version | None:
    """The installed version of a distribution; None where it is not."""
    try:
        return Version(installed_version(distribution))
    except PackageNotFoundError:
        return None


def parameters(function: Callable) -> dict[str, bool]:
    """A function's parameters by name: whether each has to be given. Also of a custom operator."""
    signature = inspect.signature(getattr(function, "_init_fn", function))
    return {name: p.default is p.empty for name, p in signature.parameters.items()}
