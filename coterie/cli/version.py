"""``coterie version``: print the versions of Coterie and of its main dependencies."""

from __future__ import annotations

from coterie.cli.options import JsonOption
from coterie.cli.output import Output

__all__ = ["version"]

_PACKAGES = {"grpc": "grpcio", "protobuf": "protobuf", "numpy": "numpy"}


def version(as_json: JsonOption = False) -> None:
    """Print the versions of Coterie, Python and the main packages."""
    import platform
    from importlib import metadata

    from coterie import kernels
    from coterie.wire.versions import NEWEST, OLDEST

    # Metadata are read a hundred times faster than the packages are imported.
    found = {
        "version": metadata.version("coterie"),
        "protocol": f"{OLDEST} to {NEWEST}",
        "python": platform.python_version(),
        **{name: metadata.version(package) for name, package in _PACKAGES.items()},
        "kernels": kernels.state(),
        "platform": platform.platform(),
    }
    output = Output("version", as_json=as_json)
    output.say(f"coterie {found['version']}")
    for name in list(found)[1:]:
        output.say(f"  {name} {found[name]}")
    output.finish(found)
