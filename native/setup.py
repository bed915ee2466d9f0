"""Builds the extension module; everything else of the distribution stands in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=["build_kernels.py:ffibuilder"],
    # One wheel serves every CPython from 3.11 on.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
