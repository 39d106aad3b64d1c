"""Installs megatron_tsp; everything else about the package is in pyproject.toml."""

from setuptools import setup

setup()
