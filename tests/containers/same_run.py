"""The run of a stack once more, in one process of this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.config.load import load
from coterie.config.run import RunSettings
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load as load_dataset
from coterie.studies.run_data import make_feed

EXAMPLES = Path(__file__).parents[2] / "examples"


def in_one_process(example: str, environment: Mapping[str, str], sets: Sequence[str]) -> dict[str, Any]:
    """Train what a stack trains, with sums in clear; return what the report says of it.

    `environment` is the stack's, `sets` says what its files do.
    """
    keys = {name: text for name, text in environment.items() if "__" in name or name == "COTERIE_REFERENCE"}
    settings = load(RunSettings, EXAMPLES / f"{example}.toml", sets=sets, environ=keys).settings
    feed = make_feed(settings, load_dataset(settings), 0)
    return train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None).known
