"""Certificate files that were damaged: named with what to do, mended by the token, and taken up when put back."""

import asyncio

import pytest

from coterie.errors import CertificateError
from coterie.net.renewal import Renewal
from coterie.wire.v1.thirdparty_pb2 import LookupRequest


def cut(path):
    """Truncate a file, and return what it was."""
    whole = path.read_bytes()
    path.write_bytes(whole[:300])
    return whole


def flip(path, position):
    """Flip a bit of a file, and return what it was."""
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[position] ^= 1
    path.write_bytes(bytes(changed))
    return whole


@pytest.mark.parametrize("file", ["chain", "authority"])
async def test_a_truncated_certificate_is_had_again_by_the_same_token(third_party, file):
    anna = await third_party.enrol("client", f"cut-{file}", 1)
    whole = cut(getattr(anna.tls, file))
    again = await third_party.enrol_with("client", anna.settings, 1)
    assert (again.bundles, again.fingerprint) == (anna.bundles, anna.fingerprint)
    assert getattr(anna.tls, file).read_bytes() == whole


async def test_a_flipped_bit_of_a_certificate_is_noticed(third_party):
    anna = await third_party.enrol("client", "flipped", 1)
    # Within the base64 of the signature at the certificate's end.
    end = anna.tls.chain.read_bytes().index(b"-----END")
    flip(anna.tls.chain, end - 12)
    assert "chain.pem is damaged" in anna.tls.damage()
    again = await third_party.enrol_with("client", anna.settings, 1)
    assert again.fingerprint == anna.fingerprint
    assert anna.tls.damage() is None


async def test_without_its_token_the_damaged_file_is_named_with_the_remedy_and_recovers_when_put_back(
    third_party,
):
    anna = await third_party.enrol("client", "no-token", 1)
    whole = cut(anna.tls.chain)
    anna.settings.enrol.token_file.unlink()
    with pytest.raises(CertificateError) as refused:
        await third_party.enrol_with("client", anna.settings, 1)
    assert f"{anna.tls.chain} is damaged: not a certificate in PEM" in refused.value.message
    assert "put the file back from a backup" in refused.value.hint
    assert "coterie certs token --role client --name no-token" in refused.value.hint
    anna.tls.chain.write_bytes(whole)
    assert (await third_party.enrol_with("client", anna.settings, 1)).fingerprint == anna.fingerprint


async def test_a_damaged_chain_in_use_names_itself_and_what_to_do(third_party):
    anna = await third_party.enrol("client", "in-use")
    cut(anna.tls.chain)
    with pytest.raises(CertificateError) as refused:
        anna.tls.identity()
    assert str(anna.tls.chain) in refused.value.message
    assert "put it back from a backup" in refused.value.hint


async def test_a_running_party_puts_its_certificate_back_at_the_second_look(third_party):
    anna = await third_party.enrol("client", "running")
    looks = asyncio.Semaphore(0)
    asleep = asyncio.Event()

    async def sleep(_):
        asleep.set()
        await looks.acquire()

    renewal = Renewal(anna.tls, lambda: third_party.channel(anna), lambda: None, sleep=sleep)
    task = asyncio.create_task(renewal.run())
    try:
        for mended in (False, True):
            await asyncio.wait_for(asleep.wait(), 10)
            asleep.clear()
            if not mended:
                whole = cut(anna.tls.chain)
            looks.release()
            await asyncio.wait_for(asleep.wait(), 10)
            assert (anna.tls.chain.read_bytes() == whole) is mended
            asleep.set()
    finally:
        task.cancel()
    # An operator's chain that is half written at one look is not overwritten.
    assert renewal.end


async def test_a_running_service_serves_on_and_takes_the_chain_that_was_put_back(start_third_party):
    service = start_third_party()
    anna = await service.enrol("client", "anna")
    chain = service.state / "tls" / "chain.pem"
    whole = cut(chain)
    assert (
        not (await service.directory(anna).Lookup(LookupRequest(participants=[bytes(32)]))).entries[0].revoked
    )
    bert = await service.enrol("client", "bert")
    chain.write_bytes(whole)
    await service.directory(bert).Lookup(LookupRequest(participants=[bytes(32)]))
    assert service.healthy()


async def test_a_third_party_certifies_itself_again_when_its_chain_is_damaged(start_third_party):
    service = start_third_party()
    anna = await service.enrol("client", "anna")
    service.stop()
    cut(service.state / "tls" / "chain.pem")
    service.start()
    await service.directory(anna).Lookup(LookupRequest(participants=[bytes(32)]))
