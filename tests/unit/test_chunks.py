from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.wire.chunks import CHUNK_BYTES, Assembler, split
from coterie.wire.refusal import Refusal
from coterie.wire.v1.common_pb2 import Chunk

LIMIT = 1 << 20


def sha256(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()


def together(chunks: list[Chunk], digest: bytes) -> bytes | str:
    """Return the payload of chunks, or the reason why they have none."""
    assembler = Assembler(LIMIT)
    try:
        for chunk in chunks:
            assembler.add(chunk)
        return assembler.payload(digest)
    except Refusal as refusal:
        return refusal.name


@st.composite
def cut_payloads(draw: st.DrawFn) -> tuple[bytes, list[Chunk]]:
    """Draw a payload cut anywhere, also into empty pieces: what a peer may rightly send."""
    payload = draw(st.binary(max_size=60))
    cuts = sorted(draw(st.lists(st.integers(0, len(payload)), max_size=6)))
    pieces = list(zip([0, *cuts], [*cuts, len(payload)], strict=True))
    chunks = [Chunk(offset=first, data=payload[first:end]) for first, end in pieces]
    chunks[-1].last = True
    return payload, chunks


@pytest.mark.parametrize(
    "length", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES + 5]
)
def test_a_payload_is_cut_into_chunks_of_one_mebibyte_and_put_together_again(length: int) -> None:
    payload = bytes(length - 1) + b"x" if length else b""
    chunks = list(split(payload))
    assert len(chunks) == max(1, -(-length // CHUNK_BYTES))
    assert [len(chunk.data) for chunk in chunks[:-1]] == [CHUNK_BYTES] * (len(chunks) - 1)
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assembler = Assembler(length)
    for chunk in chunks:
        assert not assembler.complete
        assembler.add(Chunk.FromString(chunk.SerializeToString()))
    assert assembler.complete
    assert assembler.payload(sha256(payload)) == payload


@given(cut_payloads())
def test_however_a_payload_is_cut_it_comes_together(cut: tuple[bytes, list[Chunk]]) -> None:
    payload, chunks = cut
    assembler = Assembler(len(payload))
    for chunk in chunks:
        assembler.add(chunk)
    assert assembler.payload(sha256(payload)) == payload


@given(cut_payloads(), st.data())
def test_a_chunk_that_is_lost_doubled_or_out_of_order_never_gives_another_payload(
    cut: tuple[bytes, list[Chunk]], data: st.DataObject
) -> None:
    payload, chunks = cut
    sent = data.draw(
        st.one_of(
            st.permutations(chunks),
            st.lists(st.sampled_from(chunks), max_size=len(chunks) + 2),
        )
    )
    assert together(sent, sha256(payload)) in (payload, "TRUNCATED")


@given(cut_payloads())
def test_a_stream_that_ends_early_is_refused(cut: tuple[bytes, list[Chunk]]) -> None:
    payload, chunks = cut
    assembler = Assembler(LIMIT)
    for chunk in chunks[:-1]:
        assembler.add(chunk)
    with pytest.raises(Refusal) as refused:
        assembler.payload(sha256(payload))
    assert (refused.value.name, refused.value.field) == ("TRUNCATED", "chunk.last")


def test_a_gap_names_the_offset_that_is_due() -> None:
    assembler = Assembler(LIMIT)
    assembler.add(Chunk(offset=0, data=b"abc"))
    with pytest.raises(Refusal) as refused:
        assembler.add(Chunk(offset=4, data=b"e"))
    assert (refused.value.field, refused.value.expected) == ("chunk.offset", "3")


def test_nothing_follows_the_last_chunk() -> None:
    assembler = Assembler(LIMIT)
    assembler.add(Chunk(offset=0, data=b"abc", last=True))
    with pytest.raises(Refusal) as refused:
        assembler.add(Chunk(offset=3, data=b""))
    assert (refused.value.name, refused.value.expected) == ("TRUNCATED", "no further chunk")


@given(st.integers(0, 20), st.integers(1, 20))
def test_a_payload_above_the_limit_is_refused_with_the_chunk_that_passes_it(limit: int, more: int) -> None:
    assembler = Assembler(limit)
    assembler.add(Chunk(offset=0, data=bytes(limit)))
    with pytest.raises(Refusal) as refused:
        assembler.add(Chunk(offset=limit, data=bytes(more), last=True))
    assert refused.value.name == "TOO_LARGE"
    assert str(limit) in refused.value.expected
    assert not assembler.complete


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_other_bytes_than_declared_are_refused(payload: bytes, declared: bytes) -> None:
    assembler = Assembler(LIMIT)
    assembler.add(Chunk(data=payload, last=True))
    if payload == declared:
        assert assembler.payload(sha256(declared)) == payload
        return
    for digest in (sha256(declared), b"", sha256(payload)[:-1]):
        with pytest.raises(Refusal) as refused:
            assembler.payload(digest)
        assert (refused.value.name, refused.value.field) == ("HASH_MISMATCH", "sha256")


def test_a_payload_of_one_chunk_may_lack_its_digest_where_that_is_allowed() -> None:
    one, several = Assembler(LIMIT), Assembler(LIMIT)
    one.add(Chunk(data=b"whole", last=True))
    assert one.payload(b"", optional=True) == b"whole"
    for chunk in (Chunk(data=b"two"), Chunk(offset=3, data=b"parts", last=True)):
        several.add(chunk)
    for assembler, digest in ((one, sha256(b"other")), (several, b"")):
        with pytest.raises(Refusal):
            assembler.payload(digest, optional=True)
