"""``coterie dashboard``: an operator's page for a federation that stands: its runs; start, stop and preview of one."""

from __future__ import annotations

from typing import Annotated

import typer

from coterie.cli.operate import ConfigOption
from coterie.cli.options import PageOption, SetOption
from coterie.cli.output import Output

__all__ = ["dashboard"]


def dashboard(
    config: ConfigOption,
    page: PageOption = None,
    start: Annotated[bool, typer.Option("--start", help="Start the run at once, as `operate` does.")] = False,
    sets: SetOption = None,
) -> None:
    """Serve the operator's page for a federation that stands.

    Enrols the operator and prints the link that opens the page. The page lists all runs of the orchestration server,
    shows what the prepared run lets whom see, starts, stops and resumes it, and follows it as `coterie operate --watch`
    does. Ctrl-C ends the dashboard; the run goes on.
    """
    import asyncio

    from coterie.cli.live_page import live_page, page_settings
    from coterie.cli.progress import headline
    from coterie.config.load import load
    from coterie.config.operate import OperateSettings
    from coterie.launch.dashboard import keep_dashboard
    from coterie.launch.order import Order
    from coterie.telemetry.logs import configure

    output = Output("dashboard")
    settings = load(OperateSettings, config, sets=sets or (), relative_to=config.parent).settings
    configure("warning", service="operator")
    order = Order.load(settings.order)
    known = {row.label or name: row.metrics for name, row in order.reference.items()}
    with live_page(
        output,
        page_settings(watch=True, file=page),
        order.settings,
        order.run_id,
        headline(order.settings),
        None,
        references=known,
        required=True,
    ) as live:
        if live.actions is not None:
            asyncio.run(keep_dashboard(settings, order, live, live.actions, start_now=start))
