"""``coterie agent``: a person's own device in a federation, with the person's own page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, cast

import typer

from coterie.cli.options import SetOption
from coterie.cli.output import Output

__all__ = ["agent"]


def agent(
    config: Annotated[
        Path,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Configuration of the client service, as `serve client` takes it.",
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(
            "--page-listen",
            metavar="HOST:PORT",
            help="Loopback address of the page; port 0 takes a free one.",
        ),
    ] = "127.0.0.1:0",
    titles: Annotated[
        Path | None,
        typer.Option("--titles", metavar="FILE", help="CSV file with columns item and title, for the page."),
    ] = None,
    sets: SetOption = None,
) -> None:
    """Run one person's client service and own page.

    Does what `coterie serve client` does for a host with one user, and prints the link that opens the page: what has
    left this device, the consent, preferences, recommendations with their reasons, and import of the own history.
    The page is on loopback only. Ctrl-C ends both.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from coterie.cli.serve import find_service
    from coterie.config.load import load_service
    from coterie.config.page import PageSettings
    from coterie.config.services import ClientSettings
    from coterie.errors import ConfigError
    from coterie.web.server import is_loopback, require_packages

    require_packages()
    loaded = load_service("client", config, sets=sets or ())
    try:
        page = PageSettings(listen=listen)
    except ValueError:
        raise ConfigError(f"--page-listen {listen!r}; expected HOST:PORT, as in 127.0.0.1:8020") from None
    if not is_loopback(page.host_and_port()[0]):
        raise ConfigError(
            f"--page-listen {listen!r} opens the page to other machines",
            hint="a person's page is on loopback only; expected 127.0.0.1:PORT",
        )
    from coterie.launch.agent import serve_agent
    from coterie.web.own_page import read_titles

    output = Output("agent")

    def said(link: str) -> None:
        output.say(f"own page: {link}")

    known = {} if titles is None else read_titles(titles)
    serve_agent(find_service("client"), cast(ClientSettings, loaded.settings), page, known, said)
