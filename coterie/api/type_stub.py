"""Writer of ``named.pyi``, which tells type checkers the classes of recommenders that `models` makes.

``python -m coterie.api.type_stub --write coterie/api/named.pyi``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from coterie.api.recommenders import CentralRecommender, FederatedRecommender, models
from coterie.systems.registry import distribution_of

__all__ = ["stub"]


def stub() -> str:
    """Return the stub: a class for each central model and each system that this distribution brings, sorted by name.

    Systems of plug-ins are known only where they are installed, and are left out.
    """
    lines = [
        '"""Classes of recommenders that are made of installed systems and central models; for type checkers only.',
        "",
        'Written by ``python -m coterie.api.type_stub``: do not edit it.\n"""',
        "",
        "from coterie.api.recommenders import CentralRecommender, FederatedRecommender",
        "",
    ]
    ours = {name: kind for name, kind in models().items() if _is_ours(kind)}
    names = ",\n".join(f'    "{name}"' for name in sorted(ours))
    lines.append(f"__all__ = [\n{names},\n]\n")
    lines += [f"class {name}({kind.__mro__[1].__name__}): ..." for name, kind in sorted(ours.items())]
    return "\n".join(lines) + "\n"


def _is_ours(kind: type) -> bool:
    if issubclass(kind, FederatedRecommender):
        return distribution_of(kind.system.name).startswith("coterie ")
    return issubclass(kind, CentralRecommender)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True, metavar="FILE", help="File to write.")
    parser.parse_args().write.write_text(stub(), encoding="utf-8")


if __name__ == "__main__":
    _main()
