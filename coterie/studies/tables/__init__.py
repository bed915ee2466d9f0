"""Tables of the papers, run again: one harness, and a module for each table.

Versions and options are chosen on validation data and never on test data; every row of a table gets the same number of
trials; trivial rows stand beside.
"""

from coterie.errors import ConfigError, nearest
from coterie.studies.tables.table import Table, chosen_rows, evaluate, stem
from coterie.studies.tables.tuning import Trials, tune
from coterie.systems.drift.study.table import DRIFT
from coterie.systems.fedmf.study.table import FEDMF
from coterie.systems.fedmvmf.study.metric_variants import PRIVMVMF_READINGS
from coterie.systems.fedmvmf.study.table import PRIVMVMF
from coterie.systems.fedncf.study.table import FEDNCF

__all__ = ["TABLES", "Table", "Trials", "chosen_rows", "evaluate", "find", "stem", "tune"]

TABLES = {table.name: table for table in (DRIFT, FEDNCF, PRIVMVMF, PRIVMVMF_READINGS, FEDMF)}
"""Every table, by name."""


def find(name: str) -> Table:
    """Return a table by its name.

    Raises
    ------
    ConfigError
        No such table.
    """
    if name not in TABLES:
        guess = nearest(name, TABLES)
        raise ConfigError(
            f"{name!r} is no table; there are {', '.join(TABLES)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    return TABLES[name]
