"""The file of enrolment tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.authority import TokenRecord, new_token
from coterie.store.tokens import TokenFile, append_token

records = st.builds(
    TokenRecord,
    token_hash=st.binary(min_size=32, max_size=32),
    role=st.sampled_from(["cos", "client", "data-owner"]),
    name=st.from_regex(r"[a-z0-9]{1,20}", fullmatch=True),
    expiry=st.integers(0, 2**40),
    max_participants=st.integers(0, 10**6),
)


@settings(max_examples=30, deadline=None)
@given(written=st.lists(records, max_size=8, unique_by=lambda record: record.token_hash))
def test_what_is_appended_is_found(written, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.jsonl"
    tokens = TokenFile(path)
    for record in written:
        assert tokens.find(record.token_hash) is None
        append_token(path, record)
        assert tokens.find(record.token_hash) == record
    assert [tokens.find(record.token_hash) for record in written] == written


def test_a_missing_file_holds_no_tokens(tmp_path):
    assert TokenFile(tmp_path / "absent").find(b"t" * 32) is None


def test_a_token_whose_line_is_removed_holds_no_longer(tmp_path):
    path = tmp_path / "tokens.jsonl"
    _, kept = new_token("client", "anna", 10, 1)
    _, removed = new_token("client", "berta", 10, 1)
    append_token(path, kept)
    append_token(path, removed)
    tokens = TokenFile(path)
    assert tokens.find(removed.token_hash) == removed
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert tokens.find(removed.token_hash) is None
    assert tokens.find(kept.token_hash) == kept


@pytest.mark.parametrize("line", ["{", "[]", '{"role": "client"}', '"text"', '{"token_sha256": "xyz"}'])
def test_a_bad_line_takes_no_other_token_away(tmp_path, line):
    path = tmp_path / "tokens.jsonl"
    _, record = new_token("client", "anna", 10, 1)
    path.write_text(f"{line}\n\n")
    append_token(path, record)
    assert TokenFile(path).find(record.token_hash) == record
