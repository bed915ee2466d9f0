from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from coterie.secure_sum.repeats import MARK_BYTES, is_repeat, mark_of

MESSAGES = st.binary(max_size=100)


@given(MESSAGES, MESSAGES, st.binary(max_size=40))
def test_only_the_same_bytes_are_a_repetition_whatever_else_the_note_says(
    message: bytes, other: bytes, rest: bytes
) -> None:
    note = mark_of(message) + rest
    assert len(mark_of(message)) == MARK_BYTES
    assert is_repeat(note, message)
    assert is_repeat(note, other) == (message == other)


@given(MESSAGES, st.data())
def test_a_message_with_one_changed_bit_or_one_byte_more_or_less_is_another(
    message: bytes, data: st.DataObject
) -> None:
    note = mark_of(message)
    others = [message + b"\0", b"\0" + message, message[:-1] if message else b"\1"]
    if message:
        bit = data.draw(st.integers(0, 8 * len(message) - 1))
        others.append((int.from_bytes(message) ^ 1 << bit).to_bytes(len(message)))
    assert not any(is_repeat(note, other) for other in others)


@given(MESSAGES, MESSAGES, st.binary(max_size=40))
def test_a_note_of_a_release_before_marks_begins_with_a_sha_256(
    message: bytes, other: bytes, rest: bytes
) -> None:
    note = hashlib.sha256(message).digest() + rest
    assert is_repeat(note, message)
    assert is_repeat(note, other) == (message == other)


def test_a_mark_is_the_same_in_every_process_and_release() -> None:
    # Stores and databases have them.
    nothing = "f59536975f4e43dc19cc588bd6dd7851"  # pragma: allowlist secret
    hundred = "98f2c28dbf3ec1788510ee0ffdba8940"  # pragma: allowlist secret
    assert mark_of(b"").hex() == nothing + 32 * "0"
    assert mark_of(bytes(range(100))).hex() == hundred + 32 * "0"
