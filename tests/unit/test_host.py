import pytest
from coterie_client.host import catalogued, objections_to_owners, require_holdings, without_owners

from coterie.crypto.authority import logical_name
from coterie.crypto.verification import VerificationError
from coterie.errors import PeerError
from coterie.rounds.plan_hash import holding_of
from coterie.wire.v1.orchestrator_pb2 import Catalogue, CatalogueOwner

HOLDINGS = [holding_of("comedy", ["i0", "i1"]), holding_of("drama", ["i1", "i2"])]


def catalogue(*names, tls_names=()):
    """Return a catalogue of three items, of which each owner has two, as `HOLDINGS` says."""
    told = tls_names or [logical_name("data-owner", f"process-{name}") for name in names]
    return Catalogue(
        version=7,
        items=["i0", "i1", "i2"],
        owners=[CatalogueOwner(name=name, tls_name=tls) for name, tls in zip(names, told, strict=True)],
        owner_counts=[1, 2, 1],
        owner_positions=[0, 0, 1, 1],
    )


@pytest.mark.parametrize("holdings", [HOLDINGS, []], ids=["signed", "unsigned"])
def test_nothing_is_said_against_data_owners_with_the_items_that_the_operator_states(holdings):
    assert objections_to_owners(catalogue("comedy", "drama"), holdings) == {}


@pytest.mark.parametrize("holdings", [HOLDINGS, []], ids=["signed", "unsigned"])
@pytest.mark.parametrize("other", [logical_name("client", "host-1"), "127.0.0.1", "localhost", ""])
def test_an_owner_whose_certificate_is_no_data_owners_is_objected_to(holdings, other):
    told = catalogue("comedy", "drama", tls_names=[logical_name("data-owner", "comedy"), other])
    (reason,) = objections_to_owners(told, holdings).values()
    assert "introduces as a data owner what is none" in reason
    assert list(objections_to_owners(told, holdings)) == [1]


def test_an_owner_that_the_operator_does_not_name_or_with_other_items_is_objected_to():
    told = catalogue("comedy", "stranger")
    assert list(objections_to_owners(told, HOLDINGS)) == [1]
    told = catalogue("drama", "comedy")
    assert list(objections_to_owners(told, HOLDINGS)) == [0, 1]
    with pytest.raises(VerificationError, match="are not those of the signed plan"):
        require_holdings(told, HOLDINGS)


def test_two_owners_of_one_name_are_both_objected_to():
    assert list(objections_to_owners(catalogue("comedy", "comedy"), [])) == [0, 1]


def test_a_catalogue_whose_items_and_owners_do_not_fit_is_refused():
    told = catalogue("comedy", "drama")
    told.owner_positions[0] = 2
    with pytest.raises(PeerError, match="do not fit together"):
        objections_to_owners(told, [])


def test_without_an_owner_its_items_stay_in_their_places():
    left = without_owners(catalogue("comedy", "drama"), [0])
    assert [one.name for one in left.owners] == ["drama"]
    found = catalogued(left, [b"drama"])
    assert found.version == 7
    assert list(found.index) == ["i0", "i1", "i2"]
    assert found.member.tolist() == [[False], [True], [True]]
