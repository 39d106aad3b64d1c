"""Which kernels' packages are installed, and what their functions take."""

import importlib
import inspect
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from types import ModuleType

from packaging.version import Version


def first_module(names: Iterable[str]) -> ModuleType | None:
    """The first of these modules that is installed, imported; None without one."""
    return next((importlib.import_module(name) for name in names if _exists(name)), None)


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


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
