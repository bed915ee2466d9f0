"""Entry point of the ``coterie`` command: registers all commands and turns errors into exit statuses.

Each command has a module of its own that imports nothing heavy at its top: NumPy, gRPC, pydantic and polars are
imported when the command runs, so that ``coterie --help`` answers at once.  A new command is registered by one line
below.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from coterie.cli import audit, certs, config_commands, data, runs
from coterie.cli.agent import agent
from coterie.cli.backup import backup, restore
from coterie.cli.bootstrap import bootstrap
from coterie.cli.check import check
from coterie.cli.dashboard import dashboard
from coterie.cli.enrol import enrol
from coterie.cli.evaluate import evaluate, tune
from coterie.cli.exits import exits
from coterie.cli.latency import latency
from coterie.cli.new import new
from coterie.cli.operate import operate, resume
from coterie.cli.output import Failure, Status, failure_of, print_failure
from coterie.cli.participate import participate
from coterie.cli.preferences import preferences
from coterie.cli.preflight import preflight
from coterie.cli.recommend import receipt, recommend
from coterie.cli.run import run
from coterie.cli.serve import serve
from coterie.cli.serve_model import serve_model
from coterie.cli.systems import systems
from coterie.cli.version import version
from coterie.errors import (
    CertificateError,
    ConfigError,
    DataError,
    PeerError,
    PreflightError,
    RunError,
    StoreError,
)

__all__ = ["app", "invoke", "main", "tree"]

app = typer.Typer(
    name="coterie",
    help="Train and run a federated recommender made of real gRPC services.",
    epilog="Each command has --help, too. docs/tutorial.md goes through a first run, docs/configuration.md describes "
    "configuration files, docs/exit-codes/ exit statuses.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help fits in 80 columns and in a pipe
    pretty_exceptions_enable=False,
)

_RUNNING = exits(ConfigError, PreflightError, DataError, PeerError, RunError, interrupted=True)
_ASKING = exits(DataError, CertificateError, PeerError, RunError, interrupted=True)
_SERVING = exits(ConfigError, PreflightError, DataError, CertificateError, StoreError, PeerError, RunError)
_JOINING = exits(ConfigError, PreflightError, DataError, CertificateError, PeerError)
_OPERATING = exits(ConfigError, PreflightError, CertificateError, PeerError, RunError, interrupted=True)
_MEASURING = exits(ConfigError, PreflightError, CertificateError, PeerError, RunError, interrupted=True)

app.command(epilog=_RUNNING)(run)
app.command(epilog=exits(ConfigError, PreflightError, DataError))(new)
app.command(epilog=_RUNNING)(evaluate)
app.command(epilog=_RUNNING)(tune)
app.command(epilog=exits(ConfigError, PreflightError))(preflight)
app.command(epilog=exits(ConfigError, PreflightError, StoreError))(check)
app.command(epilog=_ASKING)(recommend)
app.command(epilog=_ASKING)(receipt)
app.command(epilog=exits(ConfigError, DataError, CertificateError, PeerError, RunError, interrupted=True))(
    preferences
)
app.command(epilog=_SERVING)(serve)
app.command(epilog=_SERVING)(agent)
app.command(epilog=exits(ConfigError, DataError))(participate)
app.command(name="serve-model", epilog=exits(ConfigError, PreflightError, DataError, CertificateError))(
    serve_model
)
app.command(epilog=exits(ConfigError, StoreError))(backup)
app.command(epilog=exits(ConfigError, CertificateError, StoreError))(restore)
app.command(epilog=exits(ConfigError, PreflightError, DataError))(bootstrap)
app.command(epilog=_JOINING)(enrol)
app.command(epilog=_OPERATING)(operate)
app.command(epilog=_OPERATING)(resume)
app.command(epilog=_OPERATING)(dashboard)
app.command(epilog=_MEASURING)(latency)
app.add_typer(audit.app, name="audit")
app.add_typer(certs.app, name="certs")
app.add_typer(config_commands.app, name="config")
app.add_typer(data.app, name="data")
app.add_typer(runs.app, name="runs")
app.command(epilog=exits())(systems)
app.command(epilog=exits())(version)

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
"""gRPC's own log is turned off: its lines have another form than ours, and its errors also come as a call's status."""

_UsageError: Any = typer.BadParameter.__base__
"""Error that the parser raises for a wrong command line; typer does not export it."""


@functools.cache
def tree() -> Any:
    """Return the parser of the whole command line; built once, which takes as long as a tenth of a service's start."""
    return typer.main.get_command(app)


def main() -> NoReturn:
    """Run the command of ``sys.argv`` and end the process with its exit status."""
    status = invoke(sys.argv[1:])
    # The interpreter collects garbage several times while it ends, half a second for all modules of a run.
    gc.freeze()
    sys.exit(status)


def invoke(arguments: Sequence[str]) -> int:
    """Run one command, print any error as prose or JSON, and return the exit status.

    Parameters
    ----------
    arguments : sequence of str
        The command line, without the name of the program.

    Returns
    -------
    int
        Exit status: 0, that of the `CoterieError`, or one of `Status`.
    """
    as_json = _wants_json(arguments)
    root = tree()
    try:
        # Typer prints usage errors well, but only as prose: with --json they are caught below.
        status = root.main(list(arguments), prog_name="coterie", standalone_mode=not as_json)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except _UsageError as error:
        hint = "`coterie --help` lists the commands; each has --help too"
        failure = Failure("usage", error.format_message(), hint, Status.USAGE)
    except (Exception, KeyboardInterrupt) as error:
        failure = failure_of(error)
        if os.environ.get("COTERIE_DEBUG") == "1":
            traceback.print_exception(error)
    else:
        if status != Status.INTERRUPTED:  # typer returns it for KeyboardInterrupt
            return status if isinstance(status, int) else int(Status.OK)
        failure = failure_of(KeyboardInterrupt())
    print_failure(_command_name(root, arguments), failure, as_json=as_json)
    return int(failure.exit_code)


def _wants_json(arguments: Sequence[str]) -> bool:
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def _command_name(root: Any, arguments: Sequence[str]) -> str:
    """Return the words of the command line that name a command, as ``"data describe"``."""
    words: list[str] = []
    for argument in arguments:
        root = getattr(root, "commands", {}).get(argument)
        if root is None:
            break
        words.append(argument)
    return " ".join(words)


if __name__ == "__main__":
    main()
