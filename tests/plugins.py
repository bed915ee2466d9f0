"""Distributions with a learning system, as they lie on a disk: a module, and metadata with the entry point."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["BAD", "EXAMPLE", "Bad", "install", "install_bad", "install_example"]

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
"""The plug-in of docs/extending.md."""

_MADE_OF = """
from dataclasses import replace

from pydantic import Field

from coterie.privacy.declarations import anything
from coterie.systems.description import Driver
from coterie.systems.fcf import SYSTEM as FCF
from coterie.systems.settings import SystemSettings


class Settings(SystemSettings):
    width = property(lambda self: 1)
    room = property(lambda self: 100)


def less(form, secure_sum):
    rows = dict(FCF.declared(form, secure_sum))
    del rows["history"], rows["round_sum"]
    return rows

"""


@dataclass(frozen=True)
class Bad:
    """A system that cannot be used.

    Attributes
    ----------
    source : str
        What is in its module, after `_MADE_OF`.
    why : str
        Part of what is said of it.
    name : str
        Name of the entry point; that of the distribution unless given.
    """

    source: str
    why: str
    name: str = ""


def _system(changes: str, before: str = "") -> str:
    return f'{before}\nSYSTEM = replace(FCF, name="{{name}}", table="{{module}}", {changes})\n'


BAD: dict[str, Bad] = {
    "broken": Bad("import numpies\n", "it cannot be imported: No module named 'numpies'"),
    "no-module": Bad("", "has no attribute 'SYSTEM'"),
    "leaves": Bad("raise SystemExit(3)\n", "SystemExit: 3"),
    "raises": Bad("1 / 0\n", "ZeroDivisionError: division by zero"),
    "no-system": Bad("SYSTEM = 'fcf'\n", "it names a str; expected a coterie.systems.description.System"),
    "our-name": Bad(
        "SYSTEM = replace(FCF, name='fedncf')\n",
        "the name 'fedncf' is taken by FedNCF of coterie 0.1.0",
        "fedncf",
    ),
    "their-name": Bad(
        "SYSTEM = replace(FCF, name='popular')\n",
        "the name 'popular' is taken by Popular of coterie-popular 1.0.0",
        "popular",
    ),
    "two-names": Bad(
        "SYSTEM = replace(FCF, name='other')\n",
        "its entry point is called 'two-names' and the system 'other'",
    ),
    "Loud": Bad(_system(""), "the name 'Loud'; expected lower-case letters, digits and hyphens"),
    "our-table": Bad(
        "SYSTEM = replace(FCF, name='our-table', table='fcf')\n",
        "its table [fcf] is that of FCF of coterie 0.1.0",
    ),
    "their-table": Bad(
        "SYSTEM = replace(FCF, name='their-table', table='popular')\n",
        "its table [popular] is that of Popular of coterie-popular 1.0.0",
    ),
    "run-table": Bad(
        "SYSTEM = replace(FCF, name='run-table', table='rounds')\n",
        "its table [rounds] has a name that every run has for something else",
    ),
    "own-table": Bad(
        "SYSTEM = replace(FCF, name='own-table', table='own')\n",
        "its table [own] has a name that every run has",
    ),
    "spaced-table": Bad(
        "SYSTEM = replace(FCF, name='spaced-table', table='a b')\n", "its table is called 'a b'"
    ),
    "hidden": Bad(_system("declared=less"), "no visibility is declared for history, round_sum"),
    "silent": Bad(_system("declared=None"), "it declares no visibility (System.declared)"),
    "unheard-of": Bad(
        _system(
            "declared=lambda *of: {**FCF.declared(*of), 'history': ({'server': anything('it asks')}, '')}"
        ),
        "it declares what server may see, and there is no such role",
    ),
    "no-settings": Bad(
        _system("settings=dict"), "its settings are <class 'dict'>; expected a subclass of SystemSettings"
    ),
    "half-settings": Bad(
        _system("settings=Half", "class Half(SystemSettings):\n    bits: int = 8\n"),
        "TypeError: Can't instantiate abstract class Half",
    ),
    "no-default": Bad(
        _system("settings=Asks", "class Asks(Settings):\n    factors: int\n"),
        "its key no_default.factors has no default; expected one for every key",
    ),
    "bad-default": Bad(
        _system(
            "settings=Below",
            "class Below(Settings):\n    factors: int = Field(0, ge=1, validate_default=True)\n",
        ),
        "ValidationError",
    ),
    "shadows": Bad(
        _system("settings=Shadows", "class Shadows(Settings):\n    passes: int = 3\n"),
        "its key shadows.passes has the name of something that all settings answer",
    ),
    "unsendable": Bad(
        _system(
            "settings=Pattern",
            "import re\nfrom typing import Any\n\nclass Pattern(Settings):\n    names: Any = re.compile('a|b')\n",
        ),
        "its key unsendable.names is re.compile('a|b') by default, and 'a|b' after a plan has carried it",
    ),
    "unreadable": Bad(
        _system(
            "settings=Strict",
            "from typing import Any\n\nclass Strict(Settings):\n    bits: Any = Field(8)\n\n"
            "    @classmethod\n    def from_json(cls, text):\n        raise ValueError('no way back')\n",
        ),
        "a plan cannot carry its settings: ValueError: no way back",
    ),
    "whispers": Bad(
        _system("sums=('clear', 'whispered')"), "it runs under whispered; there are the sums clear, denoised"
    ),
    "no-sum": Bad(_system("sums=()"), "it runs under no sum (System.sums)"),
    "no-form": Bad(_system("forms={}"), "it has no form (System.forms)"),
    "no-host": Bad(_system("host=None"), "it is in rounds and has no side of the host (System.host)"),
    "no-server": Bad(_system("server=None"), "it is in rounds and has no side of the server (System.server)"),
    "odd-steps": Bad(
        _system("stepped='items'"), "it steps with 'items' (System.stepped); expected a tuple of names"
    ),
    "own-pace": Bad(
        _system("forms={'mine': Driver.ASYNCHRONOUS}, server=None, host=None"),
        "its form 'mine' has the driver ASYNCHRONOUS; expected ROUNDS for every form of zz-own-pace 2.1",
    ),
    "two-paces": Bad(
        _system("forms={**FCF.forms, 'mine': Driver.WINDOWS}"),
        "its form 'mine' has the driver WINDOWS; expected ROUNDS for every form of zz-two-paces 2.1",
    ),
    "no-driver": Bad(
        _system("forms={'hosts': 'rounds'}"),
        "its form 'hosts' has the driver 'rounds'; expected ROUNDS for every form of zz-no-driver 2.1",
    ),
    "no-study": Bad(_system("study='no_study.study'"), "it has no module no_study.study (System.study)"),
    "no-report": Bad(_system("report=dict"), "its report is <class 'dict'> (System.report)"),
    "lost-key": Bad(
        _system("moved={'study.rank': 'rank'}"),
        "its former key 'study.rank' is now lost_key.rank (System.moved)",
    ),
    "no-metric": Bad(_system("shown=()"), "it shows no metric (System.shown)"),
    "odd-usual": Bad(
        _system("usual={'rounds': {'pases': 3}}"),
        "it has a default for rounds.pases (System.usual), and no run has that",
    ),
}
"""Every way in which a plug-in may be wrong that the registry knows, by the name of its distribution."""


def install(folder: Path, distribution: str, version: str, entry: str) -> None:
    """Write the metadata of a distribution with one entry point of ``coterie.systems``."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[coterie.systems]\n{entry}\n")


def install_bad(folder: Path, distribution: str) -> None:
    """Write one of the distributions in `BAD`, version 2.1: its name begins with ``zz-``, so that it is found late."""
    bad = BAD[distribution]
    module = distribution.replace("-", "_")
    source = bad.source.replace("{name}", distribution).replace("{module}", module)
    (folder / f"{module}.py").write_text(_MADE_OF + source)
    install(folder, f"zz-{distribution}", "2.1", f"{bad.name or distribution} = {module}:SYSTEM")


def install_example(folder: Path) -> None:
    """Make Python find the plug-in's package as it lies in the repository, with metadata as its wheel has."""
    (folder / "coterie_popular").symlink_to(EXAMPLE / "coterie_popular", target_is_directory=True)
    install(folder, "coterie-popular", "1.0.0", "popular = coterie_popular:SYSTEM")
