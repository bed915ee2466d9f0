"""A federation of three hosts, where one of a single person runs as an agent with the person's own page."""

import json
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from coterie.config.run import RunSettings
from coterie.launch.bootstrap import bootstrap
from coterie.launch.children import Child, free_port

from .looking import WAIT_S

HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>\u202egpj.exe"
USERS = ("ada", "bob", "cyd", "dee")


def written(path: Path) -> Path:
    """Write ratings of four users, who all have different items."""
    draw = random.Random(3)
    rows = ["user,item,rating,timestamp"]
    for user in USERS:
        rows += [
            f"{user},film-{item:02},{draw.randint(3, 5)},{1000 + at}"
            for at, item in enumerate(draw.sample(range(24), 12))
        ]
    path.write_text("\n".join(rows) + "\n")
    return path


def coterie(*arguments: str, wait: bool = True) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", "coterie", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if wait:
        assert process.wait(WAIT_S) == 0
    return process


def printed(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.read())["result"]


class People:
    """A federation that stands: two hosts as services, and the one of a single person as an agent."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder
        data = {"data": {"path": str(written(folder / "ratings.csv"))}}
        settings = RunSettings.model_validate({**tomllib.loads(run), **data})
        names = ("thirdparty", "enrol", "cos", "owner-0", "host-0", "host-1", "host-2")
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
        bootstrap(settings, folder, "people", addresses=self.addresses)
        self.host = next(name for name in ("host-0", "host-1", "host-2") if len(self.users(name)) == 1)
        (self.person,) = self.users(self.host)
        roles = {"thirdparty": "thirdparty", "cos": "cos", "owner": "data-owner", "host": "client"}
        self.children: dict[str, Child] = {}
        for name in (one for one in names if one not in ("enrol", self.host)):
            config = tomllib.loads((folder / name / "config.toml").read_text())
            more = [f"enrol_listen={self.addresses['enrol']}"] if name == "thirdparty" else []
            child = Child(roles[name.partition("-")[0]], config["name"], folder / name)
            child.start(f"listen={self.addresses[name]}", f"metrics=127.0.0.1:{free_port()}", *more)
            self.children[name] = child
        # As `coterie run` lays a run out, for its commands.
        (folder / "operator" / "tls").symlink_to(folder / "operator" / "state" / "tls")
        config = folder / self.host / "config.toml"
        listen = tomllib.loads(config.read_text())["listen"]
        config.write_text(config.read_text().replace(listen, self.addresses[self.host]))
        titles = folder / "titles.csv"
        shown = {item: f"{HOSTILE} {item}" for item in (f"film-{n:02}" for n in range(24))}
        quoted = (f'{item},"{title.replace(chr(34), chr(34) * 2)}"' for item, title in shown.items())
        titles.write_text("\n".join(["item,title", *quoted]) + "\n")
        self.agent, self.link = self.started("--titles", str(titles))

    def users(self, host: str) -> set[str]:
        rows = (self.folder / host / "histories.csv").read_text().splitlines()[1:]
        return {row.partition(",")[0] for row in rows}

    def started(self, *more: str) -> tuple["subprocess.Popen[str]", str]:
        """Start the person's agent and return it with the link that it prints."""
        config = ("--config", str(self.folder / self.host / "config.toml"))
        process = coterie("agent", *config, f"--set=metrics=127.0.0.1:{free_port()}", *more, wait=False)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("own page: http://127.0.0.1:"), line
        return process, line.partition(": ")[2].strip()

    def asked(self, command: str) -> Any:
        """Return what a command says of the person, by the run's operator."""
        given = ("--run", str(self.folder), "--user", self.person, "--json")
        return printed(coterie(command, *given))

    @property
    def stance(self) -> Any:
        """What the person has chosen, as the device keeps it."""
        return json.loads((self.folder / self.host / "state" / "stance.json").read_text())

    def stop(self) -> None:
        """End everything."""
        if self.agent.poll() is None:
            self.agent.kill()
            self.agent.wait()
        for child in reversed(self.children.values()):
            child.kill()
