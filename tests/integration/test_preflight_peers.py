"""Preflight against a running service: whom it meets, and how far apart the clocks are."""

import time
from types import SimpleNamespace

import pytest

from coterie.config.base import Peer
from coterie.config.services import CosSettings
from coterie.launch import preflight_peer
from coterie.launch.preflight_service import check_service


@pytest.mark.parametrize(("shift_s", "status"), [(0, "ok"), (100, "warn"), (-700, "fail")])
async def test_the_offset_of_the_clocks_is_told_with_its_bound(third_party, monkeypatch, shift_s, status):
    party = await third_party.enrol("cos", f"clock-{abs(shift_s)}")
    settings = CosSettings(
        name=party.settings.name,
        state=party.settings.state,
        listen="[::1]:0" if shift_s else "127.0.0.1:0",
        thirdparty=Peer(address=third_party.address, name="directory"),
    )
    # Only there: gRPC makes its deadlines by the same clock.
    monkeypatch.setattr(
        preflight_peer, "time", SimpleNamespace(**vars(time) | {"time": lambda: time.time() + shift_s})
    )
    found = {one.check: one for one in await check_service("cos", settings, timeout_s=20)}
    clock = found["clock of thirdparty/directory"]
    assert clock.status == status
    said = clock.note or clock.problem
    assert "within 0." in said
    if shift_s:
        ahead = "ahead of" if shift_s < 0 else "behind"
        assert f"{ahead} this machine's" in said
        assert abs(float(said.split(" is ")[1].split(" s ")[0]) - abs(shift_s)) < 5
    assert found["peer thirdparty/directory"].note.endswith("mutual TLS, healthy")
