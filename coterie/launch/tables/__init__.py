"""Tables of the papers, run again: one harness, and a module for each table.

Versions and options are chosen on validation data and never on test data; every row of a table gets the same number of
trials; trivial rows stand beside.
"""

from coterie.errors import ConfigError, nearest
from coterie.launch.tables.drift import DRIFT
from coterie.launch.tables.fedmf import FEDMF
from coterie.launch.tables.fedncf import FEDNCF
from coterie.launch.tables.privmvmf import PRIVMVMF
from coterie.launch.tables.readings import PRIVMVMF_READINGS
from coterie.launch.tables.table import Table, chosen_rows, evaluate, stem
from coterie.launch.tables.tuning import Trials, tune

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
