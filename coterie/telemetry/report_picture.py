"""The picture of a federation at the top of a report: its parties, and how much they sent each other."""

from __future__ import annotations

import html
import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from coterie.telemetry.plots import Plot
from coterie.telemetry.quantities import count, volume
from coterie.telemetry.report import Calls, Report

__all__ = ["picture"]

_WIDTH, _HEIGHT = 580, 290
_SERVES = {
    "Orchestrator": "cos",
    "Operator": "cos",
    "ExpansionRelay": "cos",
    "LatentRelay": "cos",
    "DataOwner": "data-owner",
    "KeyDirectory": "thirdparty",
    "Enrolment": "thirdparty",
    "TransparencyLog": "thirdparty",
    "GraphExpansion": "thirdparty",
    "MetaLatents": "thirdparty",
}
"""Role whose process offers a service, for services of which the picture shows the traffic."""
_MODULES = ("orchestrator", "operator", "data_owner", "client", "thirdparty", "log", "expansion", "latents")


@dataclass(frozen=True)
class _Box:
    """Place of a role's parties in the picture: the middle of a box, and its name for one party and for several."""

    x: int
    y: int
    one: str
    several: str


_BOXES = {
    "client": _Box(86, 145, "client host", "client hosts"),
    "cos": _Box(290, 145, "COS", "COS"),
    "data-owner": _Box(492, 45, "data owner", "data owners"),
    "decrypting-client": _Box(492, 145, "decrypting client", "decrypting clients"),
    "thirdparty": _Box(492, 245, "third party", "third parties"),
}
_HALF_W, _HALF_H = 80, 28


def picture(report: Report) -> Plot | None:
    """Return the picture of a run's federation; None for a run without services.

    Parties are those whose CPU time the report has.  An arrow ends at the party that was called; the figure at it is
    what all callers sent there and got back.
    """
    parties = Counter(party.partition("/")[0] for party in report.cpu_seconds)
    if "cos" not in parties:
        return None
    users = report.dataset.users
    volumes = _by_callee(report.traffic)
    arrows = [("client", "cos"), ("data-owner", "cos"), ("decrypting-client", "cos"), ("cos", "thirdparty")]
    if volumes.get("data-owner"):
        arrows.append(("client", "data-owner"))
    shapes = [_arrow(*pair) for pair in arrows if parties[pair[0]] and parties[pair[1]]]
    for role, box in _BOXES.items():
        if number := parties[role]:
            notes = {
                "client": f"{count(users)} users" if users is not None else "",
                "cos": _called(volumes, "cos"),
                "data-owner": _called(volumes, "data-owner"),
                "thirdparty": _called(volumes, "thirdparty"),
            }
            shapes.append(_box(box, number, notes.get(role, "")))
    described = ", ".join(
        f"{count(number)} {_BOXES[role].one if number == 1 else _BOXES[role].several}"
        for role, number in parties.items()
        if role in _BOXES
    )
    description = f"{described}. " + " ".join(
        f"Calls to the {_BOXES[role].one} took {volume(size)}." for role, size in volumes.items() if size
    )
    title = "Parties of this federation"
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="picture-title picture-description" '
        'style="font-family: var(--sans)">'
        f'<title id="picture-title">{title}</title>'
        f'<desc id="picture-description">{html.escape(description)}</desc>'
        '<defs><marker id="picture-tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 10 5 0 10z" style="fill: var(--s1)"/></marker></defs>'
        f"{''.join(shapes)}</svg>"
    )
    return Plot("picture", title, description, svg)


def _by_callee(traffic: Mapping[str, Calls]) -> dict[str, float]:
    """Return the bytes of all calls by the role that was called."""
    roles = _roles_of_methods()
    found: dict[str, float] = {}
    for name, calls in traffic.items():
        if role := roles.get(name):
            found[role] = found.get(role, 0.0) + (calls.bytes_out or 0) + (calls.bytes_in or 0)
    return found


def _roles_of_methods() -> dict[str, str]:
    """Return the role that offers each RPC, by the RPC's name, as far as one role alone offers it."""
    found: dict[str, set[str]] = {}
    for name in _MODULES:
        file = importlib.import_module(f"coterie.wire.v1.{name}_pb2").DESCRIPTOR
        for service in file.services_by_name.values():
            for method in service.methods:
                found.setdefault(method.name, set()).add(_SERVES.get(service.name, ""))
    return {name: role for name, roles in found.items() if len(roles) == 1 and (role := next(iter(roles)))}


def _called(volumes: Mapping[str, float], role: str) -> str:
    return f"calls: {volume(volumes[role])}" if volumes.get(role) else ""


def _box(box: _Box, number: int, note: str) -> str:
    name = box.one if number == 1 else f"{count(number)} {box.several}"
    x, y = box.x - _HALF_W, box.y - _HALF_H
    size = f'width="{2 * _HALF_W}" height="{2 * _HALF_H}" rx="8"'
    style = "fill: var(--raised); stroke: var(--muted); stroke-width: 1.2"
    behind = f'<rect x="{x + 6}" y="{y + 6}" {size} style="{style}"/>' if number > 1 else ""
    lines = f'<text x="{box.x}" y="{box.y - 2 if note else box.y + 5}" style="{_text("ink", 15, 600)}">{name}</text>'
    if note:
        lines += (
            f'<text x="{box.x}" y="{box.y + 16}" style="{_text("muted", 13, 400)}">{html.escape(note)}</text>'
        )
    return f'{behind}<rect x="{x}" y="{y}" {size} style="{style}"/>{lines}'


def _text(colour: str, size: int, weight: int) -> str:
    return f"fill: var(--{colour}); font-size: {size}px; font-weight: {weight}; text-anchor: middle"


def _arrow(caller: str, callee: str) -> str:
    """Return an arrow from the caller's box to the callee's, along a line that avoids other boxes."""
    a, b = _BOXES[caller], _BOXES[callee]
    style = "fill: none; stroke: var(--s1); stroke-width: 1.6"
    if (caller, callee) == ("client", "data-owner"):
        path = f"M{a.x} {a.y - _HALF_H} C{a.x} {b.y} {a.x + 90} {b.y} {b.x - _HALF_W - 3} {b.y}"
    elif a.x < b.x:
        path = f"M{a.x + _HALF_W + 8} {a.y} L{b.x - _HALF_W - 3} {b.y}"
    else:
        path = f"M{a.x - _HALF_W} {a.y} L{b.x + _HALF_W + 3} {b.y + _nearer(a.y, b.y)}"
    return f'<path d="{path}" style="{style}" marker-end="url(#picture-tip)"/>'


def _nearer(y: int, other: int) -> int:
    """Return how far above or below the middle of a box an arrow ends that comes from another height."""
    return 0 if y == other else (-12 if y < other else 12)
