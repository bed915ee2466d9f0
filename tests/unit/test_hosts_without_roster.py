"""A host whose roster cannot be read trains without neighbours, or without meta-latents, and says so once."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from coterie_client.expansion import HostExpansion
from coterie_client.latents import HostLatents

from coterie.config.services import GraphSettings, KeySettings
from coterie.crypto.graph_key import GraphTerms


def host(folder: Path) -> Any:
    """Return what of a host is looked at before the first call to anybody."""
    return SimpleNamespace(
        settings=SimpleNamespace(run="run", state=folder, seed=None, expansion=None, latents=None),
        thirdparty=object(),
        directory=SimpleNamespace(bundles=None),
        identities=[object()],
        revoked=None,
        custody=None,
    )


@pytest.mark.parametrize("content", [None, b"no roster"])
def test_a_roster_that_cannot_be_read_stops_no_contribution_and_is_named_once(
    tmp_path: Path, content: bytes | None
) -> None:
    files = {"roster": tmp_path / "roster", "roster_key": tmp_path / "roster.key"}
    if content is not None:
        files["roster"].write_bytes(content)
    of_graph, of_latents = host(tmp_path), host(tmp_path)
    of_graph.settings.expansion = GraphSettings(**files)
    of_latents.settings.latents = KeySettings(**files)
    graph, latents = HostExpansion(of_graph), HostLatents(of_latents)
    unused: Any = None

    async def twice() -> None:
        for _ in range(2):
            await graph.before(unused, GraphTerms(4, 10, 10, 8), unused, unused, [], [0])
            await latents.before(unused, unused, unused, [0])

    with structlog.testing.capture_logs() as logs:
        asyncio.run(twice())
    assert [one["event"] for one in logs] == ["no neighbours", "no pseudo meta-latents"]
    assert all("roster" in one["reason"] for one in logs)
