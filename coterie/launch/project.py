"""A small project for runs of one system: the file of the run, a place for data, a compose file, a page to read."""

from __future__ import annotations

import re
from pathlib import Path

from coterie.config.run import RunSettings
from coterie.data import SyntheticSpec, generate
from coterie.data.written import write_ml_latest
from coterie.errors import ConfigError, PreflightError, nearest
from coterie.systems.registry import combination, systems

__all__ = ["new_project"]

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_HOSTS = 3
_OWNERS = 2
_ITEM_FILE = "movies.csv"


def new_project(folder: Path, system: str) -> list[Path]:
    """Write a project into a new or empty folder, and return its files.

    Its data is synthetic, so that it runs at once, and is there to be replaced.

    Parameters
    ----------
    folder : Path
        Its last part names the runs.
    system : str
        Name of the learning system.

    Raises
    ------
    ConfigError
        There is no such system, or the folder's name is no name of runs.
    PreflightError
        The folder holds files, or cannot be written.
    """
    name = folder.absolute().name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"project {name!r}; expected lower-case letters, digits and hyphens, at most 32: it names the runs"
        )
    if system not in systems():
        near = nearest(system, systems())
        raise ConfigError(
            f"there is no system {system!r}",
            hint=f"did you mean {near!r}?" if near else f"systems: {', '.join(sorted(systems()))}",
        )
    run = _run_file(name, system)
    settings = RunSettings.model_validate({"system": system, "secure_sum": _sum_of(system)})
    in_rounds = settings.description.in_rounds
    files = {
        "run.toml": run,
        "compose.yaml": _compose(name, 1 if in_rounds else _OWNERS),
        "README.md": _readme(name, system, settings.description.title, in_rounds=in_rounds),
        ".gitignore": "runs/\n",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if strange := next(folder.iterdir(), None):
            raise PreflightError(
                f"{folder} holds {strange.name!r}; expected a folder that does not exist, or an empty one"
            )
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PreflightError(f"cannot write into {folder}: {error.strerror}") from error
    spec = SyntheticSpec(users=120, items=150, interactions=5000)
    ratings, items = folder / "data" / "ratings.csv", folder / "data" / _ITEM_FILE
    write_ml_latest(generate(spec), ratings, items)
    return [*(folder / file for file in files), ratings, items]


def _sum_of(system: str) -> str:
    """Return the sum of a new project: masked where the system's usual form has it."""
    form = RunSettings.model_validate({"system": system}).form
    return "masked" if combination(system, "masked", form).allowed else "clear"


def _run_file(name: str, system: str) -> str:
    in_rounds = systems()[system].in_rounds
    rounds = (
        """
[rounds]
# Users of a cohort and of a group. A run begins with rounds.min_cohort users or more (20 unless it is set).
cohort = 60
group = 60
"""
        if in_rounds
        else ""
    )
    owners = f"owners = {_OWNERS}\n" if not in_rounds else ""
    return f'''# {name}: `coterie run run.toml`. Every key is described in docs/configuration.md of Coterie, and by
# `coterie config reference`; `coterie preflight run.toml` checks this file, the data and the machine.
name = "{name}"
system = "{system}"
# How contributions are summed; `coterie systems` says which sums {system} has.
secure_sum = "{_sum_of(system)}"
seeds = [0]

[data]
# Synthetic ratings: put your own into their place (README.md).
path = "data"
{rounds}
[federation]
hosts = {_HOSTS}
{owners}'''


def _compose(name: str, owners: int) -> str:
    parties = [
        ("thirdparty", "thirdparty", ""),
        ("cos", "cos", "thirdparty: {condition: service_healthy}"),
        *((f"owner-{n}", "data-owner", "cos: {condition: service_healthy}") for n in range(owners)),
        *((f"host-{n}", "client", "cos: {condition: service_healthy}") for n in range(_HOSTS)),
    ]
    services = []
    for party, image, after in parties:
        after = after or "bootstrap: {condition: service_completed_successfully}"
        services.append(
            f"""  {party}:
    <<: *party
    image: coterie-{image}:${{COTERIE_TAG:-latest}}
    volumes: ["{party}:/party"]
    depends_on:
      {after}
"""
        )
    joined = "\n".join(services)
    mounts = "\n".join(f"      - {party}:/federation/{party}" for party, _, _ in parties)
    started = "\n".join(f"      {party}: {{condition: service_started}}" for party, _, _ in parties[2:])
    volumes = "\n".join(f"  {party}:" for party, _, _ in parties)
    return f"""# The run of run.toml with each party in a container of its own: `docker compose up`, and
# `docker compose down --volumes` to forget everything. The images are built from a clone of Coterie, by
# `docker compose build` in its folder deploy/, with docker-compose.yml and docker-compose.data.yml.
name: {name}

x-container: &container
  read_only: true
  tmpfs: ["/tmp:mode=1777,size=64m"]
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  pull_policy: never

x-party: &party
  <<: *container
  restart: unless-stopped
  networks: [federation]
  stop_grace_period: 20s

services:
  # Once: authority, tokens, data and configuration, each party's in a volume of its own.
  bootstrap:
    <<: *container
    image: coterie-data:${{COTERIE_TAG:-latest}}
    network_mode: none
    command: bootstrap /project/run.toml --into /federation --set data.path=/project/data
    volumes:
      - ./run.toml:/project/run.toml:ro
      - ./data:/project/data:ro
{mounts}
      - operator:/federation/operator

{joined}
  # Once: starts the run, watches it, prints the table, and leaves the report in a volume.
  operator:
    <<: *container
    image: coterie-operator:${{COTERIE_TAG:-latest}}
    networks: [federation]
    command: operate --config /party/config.toml --set output=/report
    volumes: ["operator:/party", "report:/report"]
    depends_on:
      cos: {{condition: service_healthy}}
{started}

networks:
  # No way in or out.
  federation: {{internal: true}}

volumes:
{volumes}
  operator:
  report:
"""


def _readme(name: str, system: str, title: str, *, in_rounds: bool) -> str:
    model = (
        """
## The model

```sh
coterie runs model newest model
coterie serve-model model
```
"""
        if in_rounds
        else ""
    )
    return f"""# {name}

A federation that trains {title} with Coterie. Reading the data needs `pip install 'coterie[data]'`, the report's page
`pip install 'coterie[report]'`.

## Run it

```sh
coterie preflight run.toml
coterie run run.toml
coterie runs list
```

`run.toml` describes the run, `runs/` gets its results.

## Your own data

Put your files into the place of `data/`, which holds synthetic ones of the layout `ml-latest`: `ratings.csv` has
the columns userId, movieId, rating and timestamp, `{_ITEM_FILE}` titles and genres. Another file is named in
`run.toml`:

```toml
[data]
path = "data/mine.csv"
columns = {{user = "customer", item = "sku"}}
```

`coterie data describe data` says what is read. Fewer than 60 users need smaller `rounds.cohort` and `rounds.group`.

## In containers

`compose.yaml` starts the same parties, each in a container: `docker compose up`. Its first lines say where the
images come from.
If you change `federation.hosts` or `federation.owners` in `run.toml`, add the parties there.
{model}
Other sums and systems: `coterie systems`.
""".replace("Other sums and systems", f"Other sums of {system}, and other systems")
