"""The third party's store."""

import asyncio
import base64
import hashlib
import time
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.authority import Authority, PeerIdentity, make_csr, new_tls_key
from coterie.store.thirdparty import Published, Redemption, Renewed, ThirdPartyStore
from coterie.wire.refusal import Refusal


def digest(text):
    return hashlib.sha256(text.encode()).digest()


def chain(text):
    """Return a text as a certificate in PEM: the store does not look into it."""
    return b"-----BEGIN CERTIFICATE-----\n%s\n-----END CERTIFICATE-----\n" % base64.b64encode(text.encode())


def redemption(token="token", key="key", party="client/anna", participants=3):
    return Redemption(
        token_hash=digest(token),
        party=party,
        participants=participants,
        public_key_hash=digest(key),
        fingerprint=digest(f"{token} {key}"),
        chain=chain(f"chain for {token} {key}"),
        redeemed=1_700_000_000,
    )


def published(name, version=1, content=""):
    return Published(
        digest(name), version, f"{name} {version} {content}".encode(), f"{name} {version}".encode()
    )


@pytest.fixture
def store(tmp_path):
    opened = ThirdPartyStore(tmp_path / "directory.db")
    yield opened
    opened.close()


async def test_the_same_token_and_key_give_the_first_certificate_again(store):
    first = await store.enrol(redemption(), [])
    again = await store.enrol(redemption()._replace(chain=chain("newer"), fingerprint=digest("newer")), [])
    assert again == first == redemption().chain


async def test_a_token_used_with_another_key_is_refused(store):
    await store.enrol(redemption(), [])
    with pytest.raises(Refusal) as refused:
        await store.enrol(redemption(key="stolen"), [published("a")])
    assert refused.value.name == "BAD_TOKEN"
    assert (await store.lookup([digest("a")])).messages == {}


async def test_a_refused_bundle_leaves_the_token_unused(store):
    await store.enrol(redemption("other", party="client/berta"), [published("a")])
    with pytest.raises(Refusal):
        await store.enrol(redemption(), [published("b"), published("a")])
    assert await store.redeemed(digest("token")) is None
    assert digest("b") not in (await store.lookup([digest("b")])).messages


async def test_of_two_that_race_for_a_token_one_wins(store):
    answers = await asyncio.gather(
        *(store.enrol(redemption(key=f"key {n}"), []) for n in range(20)), return_exceptions=True
    )
    assert sum(isinstance(answer, bytes) for answer in answers) == 1
    assert {answer.name for answer in answers if isinstance(answer, Refusal)} == {"BAD_TOKEN"}


async def test_a_new_token_brings_an_allowance_of_its_own(store):
    await store.enrol(redemption(participants=1), [published("a")])
    again = redemption("second", participants=2)
    await store.enrol(again, [published("b"), published("a", version=2)])
    assert await outcome(store.publish(again.fingerprint, [published("c")])) == "TOO_LARGE"
    assert await outcome(store.publish(redemption().fingerprint, [published("c")])) is None


async def test_a_participant_of_another_party_is_refused(store):
    await store.enrol(redemption(), [published("a")])
    berta = redemption("other", party="client/berta")
    assert await outcome(store.enrol(berta, [published("a", version=2)])) == "UNKNOWN_PARTICIPANT"


async def test_the_allowance_of_the_token_bounds_the_participants_of_a_party(store):
    await store.enrol(redemption(participants=2), [published("a")])
    await store.publish(redemption().fingerprint, [published("b")])
    with pytest.raises(Refusal) as refused:
        await store.publish(redemption().fingerprint, [published("c")])
    assert refused.value.name == "TOO_LARGE"
    await store.publish(redemption().fingerprint, [published("a", version=2)])  # a replacement needs no room


async def test_a_certificate_without_a_token_publishes_nothing(store):
    assert await outcome(store.publish(digest("unknown certificate"), [published("a")])) == "WRONG_STATE"


@pytest.mark.parametrize(("version", "content"), [(1, ""), (2, "changed")])
async def test_a_version_that_is_not_above_the_held_one_is_refused(store, version, content):
    await store.enrol(redemption(), [published("a", version=2)])
    with pytest.raises(Refusal) as refused:
        await store.publish(redemption().fingerprint, [published("a", version, content)])
    assert refused.value.name == "OLD_VERSION"
    assert (await store.lookup([digest("a")])).messages == {digest("a"): published("a", 2).message}


async def test_publishing_the_same_again_changes_nothing(store):
    await store.enrol(redemption(), [published("a")])
    before = await store.lookup([digest("a")])
    await store.publish(redemption().fingerprint, [published("a")])
    assert await store.lookup([digest("a")]) == before


async def test_a_participant_that_comes_twice_in_a_request_is_refused(store):
    with pytest.raises(Refusal) as refused:
        await store.enrol(redemption(), [published("a"), published("a", version=2)])
    assert refused.value.name == "INVALID_FIELD"


async def test_a_revoked_participant_publishes_no_more(store):
    await store.enrol(redemption(), [published("a")])
    await store.revoke([digest("a")], [])
    with pytest.raises(Refusal) as refused:
        await store.publish(redemption().fingerprint, [published("a", version=2)])
    assert refused.value.name == "REVOKED"
    assert (await store.lookup([digest("a")])).revoked == {digest("a")}


async def test_revoking_twice_keeps_the_revision_and_everything_survives_a_restart(tmp_path):
    store = ThirdPartyStore(tmp_path / "directory.db")
    await store.enrol(redemption(), [published("a")])
    revision = await store.revoke([digest("a")], [digest("certificate")])
    assert await store.revoke([digest("a")], [digest("certificate")]) == revision
    held = await store.revocations()
    store.close()

    reopened = ThirdPartyStore(tmp_path / "directory.db")
    assert await reopened.revocations() == held
    assert held.newest == held.revision == revision
    assert (held.participants, held.certificates) == ((digest("a"),), (digest("certificate"),))
    assert await reopened.redeemed(digest("token")) == redemption()
    reopened.close()


steps = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.integers(1, 4), st.booleans()), max_size=12
)


@settings(max_examples=15, deadline=None)
@given(steps=steps)
def test_the_store_follows_its_rules_in_any_order_of_requests(steps, tmp_path_factory):
    async def scenario():
        store = ThirdPartyStore(tmp_path_factory.mktemp("store") / "directory.db")
        await store.enrol(redemption(participants=3), [])
        versions: dict[str, int] = {}
        revoked: set[str] = set()
        revision = 0
        for name, version, revoke in steps:
            if revoke:
                await store.revoke([digest(name)], [])
                revoked.add(name)
            expected = None
            if name in revoked:
                expected = "REVOKED"
            elif version < versions.get(name, 0):
                expected = "OLD_VERSION"
            elif name not in versions and len(versions) == 3:
                expected = "TOO_LARGE"
            else:
                versions[name] = version
            assert (
                await outcome(store.publish(redemption().fingerprint, [published(name, version)])) == expected
            )
            found = await store.lookup([digest(n) for n in "abcd"])
            assert found.messages == {digest(n): published(n, v).message for n, v in versions.items()}
            assert found.revoked == {digest(n) for n in revoked}
            assert found.revision >= revision
            revision = found.revision
        store.close()

    asyncio.run(scenario())


async def outcome(request):
    try:
        await request
    except Refusal as refusal:
        return refusal.name
    return None


# --- Renewals ----------------------------------------------------------------------------------------------------


def renewed(name, key="key"):
    return Renewed(digest(name), digest(key), chain(f"chain {name}"), 1_700_000_001)


async def test_a_certificate_is_followed_by_one_other_however_often_it_is_asked_for(store):
    await store.enrol(redemption(), [])
    first = redemption().fingerprint
    assert await store.renew(first, renewed("second")) == chain("chain second")
    assert await store.renew(first, renewed("another")) == chain("chain second")
    with pytest.raises(Refusal) as refused:
        await store.renew(first, renewed("other", key="other"))
    assert refused.value.name == "CONFLICT"
    assert await store.renew(digest("second"), renewed("third", key="other")) == chain("chain third")


async def test_a_certificate_that_no_token_stands_for_is_not_renewed(store):
    with pytest.raises(Refusal) as refused:
        await store.renew(digest("unknown"), renewed("second"))
    assert refused.value.name == "WRONG_STATE"


@pytest.mark.parametrize("which", ["first", "second", "third"])
async def test_who_revokes_one_certificate_revokes_the_whole_line_and_its_renewal(store, which):
    await store.enrol(redemption()._replace(fingerprint=digest("first")), [])
    await store.enrol(redemption("other", party="client/berta"), [])
    await store.renew(digest("first"), renewed("second"))
    await store.renew(digest("second"), renewed("third"))
    await store.revoke([], [digest(which)])
    line = {digest(name) for name in ("first", "second", "third")}
    assert set((await store.revocations()).certificates) == line
    for shown in line:
        with pytest.raises(Refusal) as refused:
            await store.renew(shown, renewed("fourth"))
        assert refused.value.name == "REVOKED"


async def test_a_renewed_certificate_publishes_on_the_strength_of_the_first_token(store):
    await store.enrol(redemption(participants=1), [])
    await store.renew(redemption().fingerprint, renewed("second"))
    await store.publish(digest("second"), [published("a")])
    with pytest.raises(Refusal) as refused:
        await store.publish(digest("second"), [published("b")])
    assert refused.value.name == "TOO_LARGE"


# --- Devices that enrol by ID tokens -------------------------------------------------------------------------------


NAMES = ("client/oidc-anna", "client/oidc-anna-2")
DAY = 86_400


class Devices:
    """Certificates of an authority for devices, as the third party issues them."""

    def __init__(self):
        self.authority = Authority.create("test", 365)
        self.began = int(time.time()) - 100 * DAY
        self.keys = {}

    def redemption(self, token, *, day=0.0, key="key", party=NAMES[0], participants=1, authority=None):
        """Return an enrolment on a day with a certificate of 10 days."""
        issuing = authority or self.authority
        private = self.keys.setdefault(key, new_tls_key())
        at = self.began + int(day * DAY)
        pem = issuing.issue(make_csr(private), "client", "anna", 10, now=datetime.fromtimestamp(at, UTC))
        return Redemption(
            token_hash=digest(token),
            party=party,
            participants=participants,
            public_key_hash=digest(key),
            fingerprint=PeerIdentity.from_certificate(pem).fingerprint,
            chain=pem + issuing.certificate_pem,
            redeemed=at,
        )


async def test_a_device_has_one_line_of_certificates_whatever_number_of_id_tokens_it_shows(store):
    devices = Devices()
    first = devices.redemption("1")
    assert await store.enrol_device(first, [published("a")], NAMES) == first.chain
    assert await store.enrol_device(devices.redemption("2", day=4.9), [published("a")], NAMES) == first.chain
    second = devices.redemption("3", day=5.1)
    assert await store.enrol_device(second, [published("a")], NAMES) == second.chain
    assert await store.enrol_device(devices.redemption("4", day=6), [], NAMES) == second.chain
    third = devices.redemption("5", day=40)
    assert await store.enrol_device(third, [], NAMES) == third.chain
    # No certificate brings an allowance of its own.
    for chained in (first, second, third):
        with pytest.raises(Refusal) as refused:
            await store.publish(chained.fingerprint, [published("b")])
        assert refused.value.name == "TOO_LARGE"
    with pytest.raises(Refusal) as refused:
        await store.enrol_device(devices.redemption("6", day=80), [published("b")], NAMES)
    assert refused.value.name == "TOO_LARGE"


async def test_a_device_gets_a_certificate_of_an_authority_that_took_the_place_of_another(store):
    devices = Devices()
    await store.enrol_device(devices.redemption("1"), [], NAMES)
    other = devices.redemption("2", day=1, authority=Authority.create("other", 365))
    assert await store.enrol_device(other, [], NAMES) == other.chain


async def test_who_revokes_a_device_keeps_its_subject_out(store):
    devices = Devices()
    await store.enrol_device(devices.redemption("1"), [], NAMES)
    second = devices.redemption("2", day=9)
    await store.enrol_device(second, [], NAMES)
    await store.revoke([], [second.fingerprint])
    for party, key in ((NAMES[0], "key"), (NAMES[0], "new"), (NAMES[1], "new")):
        with pytest.raises(Refusal) as refused:
            await store.enrol_device(devices.redemption("3", day=20, party=party, key=key), [], NAMES)
        assert refused.value.name == "REVOKED"
    others = ("client/oidc-berta",)
    await store.enrol_device(devices.redemption("4", party=others[0], key="berta"), [], others)


async def test_of_keys_that_race_for_the_name_of_a_device_one_wins(store):
    devices = Devices()
    answers = await asyncio.gather(
        *(store.enrol_device(devices.redemption(f"{n}", key=f"key {n}"), [], NAMES) for n in range(10)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, bytes) for answer in answers) == 1
    assert {answer.name for answer in answers if isinstance(answer, Refusal)} == {"BAD_TOKEN"}
