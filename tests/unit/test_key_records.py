"""Rosters and records of Paillier keys survive their way over the wire."""

from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.key_record import Countersignature, KeyFields, KeyRecord
from coterie.crypto.roster import Roster
from coterie.parties.key_records import record_from_wire, record_to_wire, roster_from_wire, roster_to_wire
from coterie.wire.v1.thirdparty_pb2 import PaillierRecord
from coterie.wire.v1.thirdparty_pb2 import Roster as WireRoster

contents = st.binary(max_size=70)
texts = st.text(max_size=20)
seconds = st.integers(0, 2**63 - 1)
fields = st.builds(
    KeyFields, texts, st.integers(0, 2**32 - 1), contents, contents, st.integers(0, 2**64 - 1), contents
)
records = st.builds(
    KeyRecord,
    fields,
    st.integers(0, 2**64 - 1),
    st.lists(contents, max_size=4).map(tuple),
    contents,
    contents,
    st.lists(st.builds(Countersignature, contents, contents), max_size=4).map(tuple),
)
rosters = st.builds(
    Roster, texts, texts, st.lists(contents, max_size=4).map(tuple), seconds, seconds, contents
)


@given(records)
def test_a_record_is_the_same_after_its_way_over_the_wire_whatever_is_in_it(record):
    sent = record_to_wire(record).SerializeToString()
    assert record_from_wire(PaillierRecord.FromString(sent)) == record


@given(rosters)
def test_a_roster_is_the_same_after_its_way_over_the_wire_whatever_is_in_it(roster):
    sent = roster_to_wire(roster).SerializeToString()
    assert roster_from_wire(WireRoster.FromString(sent)) == roster
