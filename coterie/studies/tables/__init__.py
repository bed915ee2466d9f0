"""Reproduction of the papers' tables, for ``coterie evaluate`` and ``coterie tune``.

Versions and options are chosen on validation data and never on test data; every row of a table gets the same number of
trials; each table also has trivial rows.
"""

from coterie.errors import ConfigError, nearest
from coterie.studies.study import studies
from coterie.studies.tables.compared_table import NAME as COMPARE
from coterie.studies.tables.folded import NAME as FOLD_IN
from coterie.studies.tables.noise_cost import NAME as PRIVACY
from coterie.studies.tables.paper_table import PaperTable, chosen_rows, evaluate, stem
from coterie.studies.tables.poisoned import NAME as POISONING
from coterie.studies.tables.trade_off import NAME as FLOORS
from coterie.studies.tables.tuning import Trials, tune

__all__ = [
    "COMPARE",
    "FLOORS",
    "FOLD_IN",
    "POISONING",
    "PRIVACY",
    "PaperTable",
    "Trials",
    "chosen_rows",
    "evaluate",
    "find",
    "stem",
    "tables",
    "tune",
]


def tables() -> dict[str, PaperTable]:
    """Return the tables of every system, by name."""
    return {table.name: table for study in studies() for table in study.tables}


def find(name: str) -> PaperTable:
    """Return a table by its name.

    Raises
    ------
    ConfigError
        There is no such table.
    """
    known = tables()
    if name not in known:
        others = (*known, COMPARE, FLOORS, POISONING, PRIVACY, FOLD_IN)
        guess = nearest(name, others)
        raise ConfigError(
            f"{name!r} is no table; there are {', '.join(others)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    return known[name]
