"""Coterie: a federated recommender system that runs as a real distributed system.

The Python interface is here by name (docs/python.md): ``load``, ``compare``, ``load_model``, and a class for each
registered system and each central model.

>>> import coterie as ct
>>> ct.Popularity()
Popularity()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.api import *  # noqa: F403
    from coterie.api.named import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Return a name of the Python interface; nothing of it is loaded before the first one is used (PEP 562)."""
    from importlib.util import find_spec

    # A module that is not loaded yet: `from coterie import errors` asks here first.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
        from coterie import api

        if name in api.__all__:
            return getattr(api, name)
        found = api.models()
        if name in found:
            return found[name]
        from coterie.errors import nearest

        if guess := nearest(name, [*api.__all__, *found]):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; did you mean {guess!r}?")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names, with those of the Python interface."""
    from coterie import api

    return sorted({*globals(), *api.__all__, *api.models()})
