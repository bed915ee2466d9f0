from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto import explicit
from coterie.crypto.explicit import encode, further
from coterie.errors import CryptoError

purposes = st.from_regex(r"[a-z0-9]{1,4}(-[a-z0-9]{1,4}){0,2}", fullmatch=True)
fields = st.lists(
    st.one_of(st.binary(max_size=12), st.text(max_size=6), st.integers(min_value=0, max_value=2**64 - 1)),
    max_size=4,
)


def content(field: bytes | str | int) -> bytes:
    if isinstance(field, int):
        return field.to_bytes(8, "big")
    return field.encode() if isinstance(field, str) else field


def decode(encoded: bytes) -> tuple[str, list[bytes]]:
    """Read explicit bytes back, by their definition alone."""
    label = encoded.partition(b"\0")[0]
    rest = encoded[len(label) :]
    contents = []
    while rest:
        (length,) = struct.unpack(">I", rest[:4])
        assert len(rest) >= 4 + length
        contents.append(rest[4 : 4 + length])
        rest = rest[4 + length :]
    return label.decode().removeprefix("coterie/v1/"), contents


def test_the_layout_is_label_then_length_and_content_of_each_field():
    assert encode("bundle", b"\x01\x02", "é", 258) == (
        b"coterie/v1/bundle"
        b"\x00\x00\x00\x02\x01\x02"
        b"\x00\x00\x00\x02\xc3\xa9"
        b"\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x01\x02"
    )


@given(purposes, fields)
def test_purpose_and_contents_can_be_read_back_so_the_encoding_is_injective(purpose, values):
    assert decode(encode(purpose, *values)) == (purpose, [content(value) for value in values])


@given(purposes, fields, purposes, fields)
def test_two_calls_agree_only_for_the_same_purpose_and_contents(purpose, values, other, others):
    same = (purpose, [content(v) for v in values]) == (other, [content(v) for v in others])
    assert (encode(purpose, *values) == encode(other, *others)) is same


def test_moving_a_byte_from_one_field_to_the_next_changes_the_encoding():
    assert encode("p", b"ab", b"c") != encode("p", b"a", b"bc")


def test_the_end_of_the_purpose_is_not_confused_with_a_field():
    assert encode("ab") != encode("a", b"b")
    assert encode("a", b"") != encode("a")


@pytest.mark.parametrize("purpose", ["", "Bundle", "a b", "a--b", "-a", "a-", "a/b", "a\0", "a\n", "ä"])
def test_a_purpose_of_another_form_is_refused(purpose):
    with pytest.raises(CryptoError, match="purpose"):
        encode(purpose)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_an_integer_that_does_not_fit_eight_bytes_is_refused(value):
    with pytest.raises(CryptoError, match=r"field 1 of 'p'.*2\^64"):
        encode("p", b"", value)


@pytest.mark.parametrize("value", [True, 1.0, None, bytearray(b"a")])
def test_a_field_of_another_type_is_refused(value):
    with pytest.raises(CryptoError, match=type(value).__name__):
        encode("p", value)


def test_a_string_without_utf8_form_is_refused():
    with pytest.raises(CryptoError, match="UTF-8"):
        encode("p", "\ud800")


def test_a_field_whose_length_would_not_begin_with_a_zero_byte_is_refused(monkeypatch):
    assert explicit.MAX_FIELD.to_bytes(4, "big")[0] == 0
    monkeypatch.setattr(explicit, "MAX_FIELD", 3)
    assert encode("p", b"abc")
    with pytest.raises(CryptoError, match="4 bytes, expected at most 3"):
        encode("p", b"abcd")


def test_more_fields_follow_as_if_all_had_been_encoded_at_once():
    assert encode("p", b"a", 7) + further("p", "b", b"") == encode("p", b"a", 7, "b", b"")
    with pytest.raises(CryptoError, match="float"):
        further("p", 1.0)


def test_errors_do_not_repeat_the_value_of_a_field():
    with pytest.raises(CryptoError) as caught:
        encode("p", 2**64 + 987654321)
    assert str(2**64 + 987654321) not in str(caught.value)
