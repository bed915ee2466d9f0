"""A device that was away until its certificate had expired trains on in the run where it still is."""

import asyncio
import time

import pytest

from coterie.crypto.authority import validity_of

from .test_fedncf_faults import SMALL, feed_of, settings_of
from .test_renewal import SECONDS

VALID_S = 20


@pytest.mark.full("takes a minute, and tests/integration/test_late_renewal.py has it in small")
@pytest.mark.long
async def test_a_device_that_was_away_until_its_certificate_had_expired_trains_on(small, federation):
    settings = settings_of(small, party_per_user=True)
    keys = {"thirdparty": {"certificate_days": VALID_S * SECONDS}}
    async with federation(settings, feed=feed_of(settings), keys=keys) as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        running.children[SMALL].kill()
        await running.change(SMALL, "lost")
        tls = running.children[SMALL].state / "tls" / "chain.pem"
        ended = validity_of(tls.read_bytes())[1]
        await running.a_round("a round without it", summed=24, dropped=6, reason="")
        await asyncio.sleep(max(0.0, ended - time.time()) + 1)
        token = running.children[SMALL].folder / "token"
        before = token.read_bytes()
        running.children[SMALL].start()
        await running.change(SMALL, "returned")
        await running.a_round("a round over everybody again", summed=30, dropped=0, reason="")
        log = [line["event"] for line in running.log(SMALL)]
        await running.stop()
    assert "renewed an expired certificate" in log
    assert token.read_bytes() == before
