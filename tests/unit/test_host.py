import time

import pytest
from coterie_client.host import catalogued, objections_to_owners, require_holdings, without_owners
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.authority import logical_name
from coterie.crypto.identity import Identity, countersign
from coterie.crypto.verification import VerificationError
from coterie.errors import PeerError
from coterie.rounds.plan_hash import holding_of
from coterie.secure_sum.bundles import bundle_to_wire
from coterie.wire.v1.orchestrator_pb2 import Catalogue, CatalogueOwner

HOLDINGS = [holding_of("comedy", ["i0", "i1"], "cinema"), holding_of("drama", ["i1", "i2"], "theatre")]
PARTIES = {one.owner: one.party for one in HOLDINGS}
DIRECTORY = Ed25519PrivateKey.generate()
DIRECTORY_KEY = DIRECTORY.public_key().public_bytes_raw()


def keys_of(party, directory=DIRECTORY):
    """Return new keys that a party enrolled."""
    now = int(time.time())
    bundle = Identity.generate().bundle(1, (now - 60, now + 3600))
    return bundle_to_wire(countersign(bundle, directory, party))


def introduced(name, process=None, role="data-owner", **other):
    """Return an owner as a COS introduces it; truthfully if only its name is given."""
    process = process or PARTIES.get(name, name)
    honest = {"tls_name": logical_name(role, process), "bundle": keys_of(f"{role}/{process}")}
    return CatalogueOwner(name=name, **{**honest, **other})


def catalogue(*owners):
    """Return a catalogue of three items, of which each of two owners has two, as `HOLDINGS` says."""
    return Catalogue(
        version=7,
        items=["i0", "i1", "i2"],
        owners=[introduced(one) if isinstance(one, str) else one for one in owners],
        owner_counts=[1, 2, 1],
        owner_positions=[0, 0, 1, 1],
    )


def objections(*owners, holdings=HOLDINGS):
    return objections_to_owners(catalogue(*owners), holdings, DIRECTORY_KEY)


@pytest.mark.parametrize("holdings", [HOLDINGS, []], ids=["signed", "unsigned"])
def test_nothing_is_said_against_data_owners_as_the_operator_states_them(holdings):
    assert objections("comedy", "drama", holdings=holdings) == {}


@pytest.mark.parametrize("holdings", [HOLDINGS, []], ids=["signed", "unsigned"])
@pytest.mark.parametrize("other", [logical_name("client", "host-1"), "127.0.0.1", "localhost", ""])
def test_an_owner_whose_certificate_is_no_data_owners_is_objected_to(holdings, other):
    found = objections("comedy", introduced("drama", tls_name=other), holdings=holdings)
    assert list(found) == [1]
    assert "introduces as a data owner what is none" in found[1]


@pytest.mark.parametrize("holdings", [HOLDINGS, []], ids=["signed", "unsigned"])
@pytest.mark.parametrize(
    ("party", "said"),
    [
        ("client/theatre", "is of 'client/theatre', expected 'data-owner/theatre'"),
        ("data-owner/cinema", "is of 'data-owner/cinema', expected 'data-owner/theatre'"),
        ("", "does not name its party"),
    ],
    ids=["a-clients", "another-owners", "nobodys"],
)
def test_an_owner_with_keys_that_its_process_did_not_enrol_is_objected_to(holdings, party, said):
    found = objections("comedy", introduced("drama", bundle=keys_of(party)), holdings=holdings)
    assert list(found) == [1]
    assert said in found[1]


def test_an_owner_with_keys_that_the_directory_did_not_countersign_is_objected_to():
    forged = keys_of("data-owner/theatre", Ed25519PrivateKey.generate())
    found = objections("comedy", introduced("drama", bundle=forged))
    assert list(found) == [1]
    assert "directory" in found[1]


def test_a_certified_data_owner_in_the_place_of_another_is_objected_to_by_the_signed_plan_alone():
    posing = introduced("drama", process="accomplice")
    assert objections("comedy", posing) == {
        1: "the COS introduces data owner 'drama' as one of 'accomplice', and the signed plan says 'theatre'"
    }
    assert objections("comedy", posing, holdings=[]) == {}


def test_an_owner_that_the_operator_does_not_name_or_with_other_items_is_objected_to():
    assert list(objections("comedy", "stranger")) == [1]
    assert list(objections("drama", "comedy")) == [0, 1]
    with pytest.raises(VerificationError, match="are not those of the signed plan"):
        require_holdings(catalogue("drama", "comedy"), HOLDINGS)


def test_two_owners_of_one_name_are_both_objected_to():
    assert list(objections("comedy", "comedy", holdings=[])) == [0, 1]


def test_a_catalogue_whose_items_and_owners_do_not_fit_is_refused():
    told = catalogue("comedy", "drama")
    told.owner_positions[0] = 2
    with pytest.raises(PeerError, match="do not fit together"):
        objections_to_owners(told, [], DIRECTORY_KEY)


def test_without_an_owner_its_items_stay_in_their_places():
    left = without_owners(catalogue("comedy", "drama"), [0])
    assert [one.name for one in left.owners] == ["drama"]
    found = catalogued(left, [b"drama"])
    assert found.version == 7
    assert list(found.index) == ["i0", "i1", "i2"]
    assert found.member.tolist() == [[False], [True], [True]]
