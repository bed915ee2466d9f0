"""``coterie participate``: a person pauses, takes part in fewer rounds, or leaves a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from coterie.cli.options import JsonOption, SetOption
from coterie.cli.output import Output

__all__ = ["participate"]


def participate(
    config: Annotated[
        Path,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Configuration of the client service, as `coterie agent` takes it.",
        ),
    ],
    pause: Annotated[bool, typer.Option("--pause", help="Take part in no round until --resume.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Take part again from the next round on.")] = False,
    rounds_per_day: Annotated[
        int | None,
        typer.Option(
            "--rounds-per-day",
            metavar="N",
            help="Take part in N rounds a day (UTC) at most; 0 for as many as the consent bears.",
        ),
    ] = None,
    leave: Annotated[
        bool,
        typer.Option(
            "--leave",
            help="Leave the run for good, and have what was published at the third party deleted. Says what that "
            "undoes and what it does not; with --yes it is done.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Leave, without the question.")] = False,
    sets: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Pause, take part in fewer rounds, or leave a run.

    Without an option it shows how this device takes part. It works while the service runs or not. A change holds from
    the next round on: a round that trains already keeps this device. In DRIFT, which has no rounds, it holds for
    records and visits to data owners, and a limit of rounds does nothing. What the device may do at most stands in
    its configuration, under [consent].
    """
    output = Output("participate", as_json=json)
    from coterie.config.load import load_service
    from coterie.config.services import ClientSettings
    from coterie.errors import ConfigError
    from coterie.rounds.stance import changed_stance, read_stance

    if pause and resume:
        raise ConfigError("both --pause and --resume; expected one of them")
    if yes and not leave:
        raise ConfigError("--yes without --leave, which alone asks a question")
    if leave and (pause or resume or rounds_per_day is not None):
        raise ConfigError("--leave with another change; expected it alone, as leaving is for good")
    settings = cast(ClientSettings, load_service("client", config, sets=sets or ()).settings)
    changes: dict[str, Any] = {}
    if pause or resume:
        changes["paused"] = pause
    if rounds_per_day is not None:
        changes["rounds_per_day"] = rounds_per_day
    if leave and yes:
        changes |= {"left": True, "forget": True}
    stance = changed_stance(settings.state, **changes) if changes else read_stance(settings.state)
    output.say(_words(stance.left, stance.paused, stance.rounds_per_day))
    if leave and not yes:
        output.say(
            "Leaving: from the next round on this device takes part in no sum of this run, for good; what it published "
            "at the third party (tags, an embedding, a vector) is deleted there by the service, within seconds while "
            "it runs, otherwise after its next start. In DRIFT it sends data owners nothing more.",
            "Not undone: what it gave to sums stays in them and in the models that came of them; other devices keep "
            "what they received, and DRIFT's data owners the records that they have.",
            f"Your history, the receipt and your part of the model are in {settings.state}: stop the service and "
            "delete that folder, and they are gone.",
            "Nothing was changed: --leave --yes leaves.",
        )
    output.finish(
        {
            "paused": stance.paused,
            "left": stance.left,
            "rounds_per_day": stance.rounds_per_day,
            "forget": stance.forget,
        }
    )


def _words(left: bool, paused: bool, limit: int) -> str:
    if left:
        return "this device has left the run: it takes part in no round any more"
    if paused:
        return "paused: this device takes part in no round until --resume"
    if limit:
        return f"this device takes part in {limit} rounds a day at most"
    return "this device takes part in every round that its consent bears"
