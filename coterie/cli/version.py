"""``coterie version``: print the versions of Coterie and of its main dependencies."""

from __future__ import annotations

from typing import Any

from coterie.cli.options import JsonOption
from coterie.cli.output import Output

__all__ = ["version"]

_PACKAGES = {"grpc": "grpcio", "protobuf": "protobuf", "numpy": "numpy"}


def version(as_json: JsonOption = False) -> None:
    """Print the versions of Coterie, Python and the main packages.

    Compiled kernels are compared with their references; it says which are not used here, and why.
    """
    import platform
    from importlib import metadata

    from coterie import kernels
    from coterie.wire.versions import NEWEST, OLDEST

    # Metadata are read a hundred times faster than the packages are imported.
    found: dict[str, Any] = {
        "version": metadata.version("coterie"),
        "protocol": f"{OLDEST} to {NEWEST}",
        "python": platform.python_version(),
        **{name: metadata.version(package) for name, package in _PACKAGES.items()},
        "left_out": _left_out(),
        "kernels": kernels.state(),
        "platform": platform.platform(),
    }
    output = Output("version", as_json=as_json)
    output.say(f"coterie {found['version']}")
    for name, value in list(found.items())[1:]:
        if name != "left_out":
            output.say(f"  {name} {value}")
    for kernel, why in found["left_out"].items():
        output.say(f"  {kernel} is not used: it {why}")
    output.finish(found)


def _left_out() -> dict[str, str]:
    """Compare every compiled kernel with its reference; return those that are not used here, and why."""
    import logging

    from coterie import kernels

    # What the log would say is said in the answer.
    logging.getLogger(kernels.__name__).addHandler(logging.NullHandler())
    if kernels.package() is not None:
        from coterie.crypto import masking
        from coterie.secure_sum import contribution
        from coterie.systems.registry import systems

        own = [compare for system in systems().values() for compare in system.kernels]
        for compare in (masking.compare_kernel, contribution.compare_kernel, *own):
            compare()
    return kernels.left_out()
