"""Transcripts: what is written is read again, whatever happened to the process in between."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import StoreError
from coterie.privacy import transcript
from coterie.privacy.transcript import (
    TranscriptEntry,
    TranscriptWriter,
    decode,
    message_class,
    read_transcript,
    role_of,
    transcript_party,
)
from coterie.wire.v1.client_pb2 import UserRecommendRequest, UserRecommendResponse
from coterie.wire.v1.data_owner_pb2 import OwnerInfoRequest, OwnerInfoResponse
from coterie.wire.v1.orchestrator_pb2 import (
    ExchangeRequest,
    ExchangeResponse,
    PollRequest,
    PollResponse,
    RecommendRequest,
    RecommendResponse,
)
from coterie.wire.v1.thirdparty_pb2 import EnrolRequest, LookupRequest, LookupResponse

NAMES = st.text(max_size=40).filter(lambda text: len(text.encode("utf-8", "surrogatepass")) <= 255)
PLAIN = NAMES.filter(lambda text: text.isprintable())
RECORDS = st.lists(
    st.tuples(PLAIN, PLAIN, st.sampled_from(("received", "sent")), st.binary(max_size=300)), max_size=12
)


def written(path: Path, payloads, party: str = "cos/cos") -> Path:
    with TranscriptWriter(path, party) as writer:
        for payload in payloads:
            writer.side("server").record(
                rpc="Poll", peer="client/host-0", direction="received", payload=payload
            )
    return path


@given(records=RECORDS, side=st.sampled_from(("server", "client")))
def test_what_is_recorded_is_read_in_order(tmp_path_factory, records, side):
    path = tmp_path_factory.mktemp("t") / "transcript.bin"
    before = time.time_ns()
    with TranscriptWriter(path, "cos/cos") as writer:
        for rpc, peer, direction, payload in records:
            writer.side(side).record(rpc=rpc, peer=peer, direction=direction, payload=payload)
    entries = list(read_transcript(path))
    assert [(e.rpc, e.peer, e.direction, e.payload) for e in entries] == records
    assert all(e.side == side and e.party == "cos/cos" for e in entries)
    assert all(before <= e.time_ns <= time.time_ns() for e in entries)


@given(payloads=st.lists(st.binary(max_size=60), min_size=1, max_size=5), data=st.data())
def test_a_file_cut_anywhere_gives_its_whole_entries_and_takes_more(tmp_path_factory, payloads, data):
    path = written(tmp_path_factory.mktemp("t") / "transcript.bin", payloads)
    ends = [0]
    whole = path.read_bytes()
    for count in range(len(payloads) + 1):
        part = written(path.with_name(f"part-{count}"), payloads[:count])
        ends.append(part.stat().st_size)
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = max(sum(end <= cut for end in ends[1:]) - 1, 0)
    assert [entry.payload for entry in read_transcript(path)] == payloads[:kept]
    written(path, [b"after the restart"])
    assert [entry.payload for entry in read_transcript(path)] == [*payloads[:kept], b"after the restart"]


def test_a_transcript_can_be_read_while_it_is_written(tmp_path):
    with TranscriptWriter(tmp_path / "t", "cos/cos") as writer:
        writer.record(rpc="Poll", peer="client/host-0", direction="received", payload=b"one")
        assert [entry.payload for entry in read_transcript(tmp_path / "t")] == [b"one"]


def test_a_party_that_is_killed_leaves_all_that_it_took_in(tmp_path):
    path = tmp_path / "t"
    last_words = (
        "import os, signal, sys; from coterie.privacy.transcript import TranscriptWriter\n"
        "writer = TranscriptWriter(sys.argv[1], 'cos/cos')\n"
        "for n in range(3):\n"
        "    writer.record(rpc='Poll', peer='client/host-0', direction='received', payload=bytes([n]) * 1000)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", last_words, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [entry.payload for entry in read_transcript(path)] == [bytes([n]) * 1000 for n in range(3)]


def test_only_the_owner_of_the_process_may_read_it(tmp_path):
    path = tmp_path / "t"
    path.touch(mode=0o644)
    path.chmod(0o644)
    written(path, [b"x"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(written(tmp_path / "new", []).stat().st_mode) == 0o600


def test_the_transcript_of_another_party_is_not_continued(tmp_path):
    path = written(tmp_path / "t", [b"x"])
    with pytest.raises(StoreError, match="cos/cos"):
        TranscriptWriter(path, "client/host-0")
    assert [entry.payload for entry in read_transcript(path)] == [b"x"]


def test_a_second_writer_is_refused_while_the_first_is_there(tmp_path):
    with TranscriptWriter(tmp_path / "t", "cos/cos"), pytest.raises(StoreError, match="another process"):
        TranscriptWriter(tmp_path / "t", "cos/cos")
    TranscriptWriter(tmp_path / "t", "cos/cos").close()


def test_another_file_is_neither_read_nor_overwritten(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"something else altogether")
    with pytest.raises(StoreError, match="not a transcript"):
        list(read_transcript(path))
    with pytest.raises(StoreError, match="not a transcript"):
        TranscriptWriter(path, "cos/cos")
    assert path.read_bytes() == b"something else altogether"
    assert transcript_party(path) is None
    assert transcript_party(written(tmp_path / "t2", [])) == "cos/cos"


def test_damage_before_the_end_is_reported(tmp_path):
    path = written(tmp_path / "t", [b"first entry", b"second entry"])
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"first")] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match="damaged at byte"):
        list(read_transcript(path))


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(StoreError, match="cannot read"):
        list(read_transcript(tmp_path / "absent"))
    with pytest.raises(StoreError, match="cannot open"):
        TranscriptWriter(tmp_path / "absent" / "t", "cos/cos")


def test_nothing_is_recorded_after_closing(tmp_path):
    writer = TranscriptWriter(tmp_path / "t", "cos/cos")
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="closed"):
        writer.record(rpc="Poll", peer="client/host-0", direction="received", payload=b"x")


@pytest.mark.parametrize(
    "wrong", [{"direction": "upwards"}, {"side": "inside"}, {"peer": "p" * 256}, {"rpc": "r" * 256}]
)
def test_a_wrong_call_is_a_programming_error_and_records_nothing(tmp_path, wrong):
    right = {"rpc": "Poll", "peer": "client/x", "direction": "sent", "side": "server", "payload": b""}
    with (
        TranscriptWriter(tmp_path / "t", "cos/cos") as writer,
        pytest.raises(ValueError, match=r"not one|longer"),
    ):
        writer.record(**(right | wrong))
    assert list(read_transcript(tmp_path / "t")) == []
    with TranscriptWriter(tmp_path / "t", "cos/cos") as writer, pytest.raises(ValueError, match="side"):
        writer.side("inside")


def test_threads_do_not_mix_their_entries(tmp_path):
    def record(letter: bytes) -> None:
        for length in range(200):
            writer.record(rpc="Poll", peer="client/x", direction="received", payload=letter * length)

    with TranscriptWriter(tmp_path / "t", "cos/cos") as writer:
        threads = [threading.Thread(target=record, args=(bytes([letter]),)) for letter in b"abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    payloads = [entry.payload for entry in read_transcript(tmp_path / "t")]
    assert len(payloads) == 600
    assert all(len(set(payload)) <= 1 for payload in payloads)


def test_the_file_is_not_inherited_by_child_processes(tmp_path):
    with TranscriptWriter(tmp_path / "t", "cos/cos") as writer:
        assert not os.get_inheritable(writer._file.fileno())


CALLS = [
    # party, peer, rpc, direction, side that is derived, class
    ("cos/cos", "data-owner/drama", "Exchange", "received", "server", ExchangeRequest),
    ("cos/cos", "data-owner/drama", "Exchange", "sent", "server", ExchangeResponse),
    ("data-owner/drama", "cos/cos", "Exchange", "received", "client", ExchangeResponse),
    ("data-owner/drama", "cos/cos", "Exchange", "sent", "client", ExchangeRequest),
    ("cos/cos", "client/host-0", "Recommend", "received", "server", RecommendRequest),
    ("client/host-0", "cos/cos", "Recommend", "received", "client", RecommendResponse),
    ("client/host-0", "operator/alice", "Recommend", "received", "server", UserRecommendRequest),
    ("operator/alice", "client/host-0", "Recommend", "received", "client", UserRecommendResponse),
    ("data-owner/drama", "cos/cos", "OwnerInfo", "received", "server", OwnerInfoRequest),
    ("data-owner/drama", "client/host-0", "OwnerInfo", "sent", "server", OwnerInfoResponse),
    ("client/host-0", "data-owner/drama", "OwnerInfo", "received", "client", OwnerInfoResponse),
    ("cos/cos", "thirdparty/directory", "Lookup", "received", "client", LookupResponse),
    ("thirdparty/directory", "cos/cos", "Lookup", "received", "server", LookupRequest),
    ("thirdparty/directory", "", "Enrol", "received", "server", EnrolRequest),
    ("client/host-0", "cos/cos", "Poll", "received", "client", PollResponse),
    ("cos/cos", "client/host-0", "Poll", "received", "server", PollRequest),
]


@pytest.mark.parametrize(("party", "peer", "rpc", "direction", "side", "cls"), CALLS)
def test_the_message_class_follows_from_who_serves(tmp_path, party, peer, rpc, direction, side, cls):
    with TranscriptWriter(tmp_path / "t", party) as writer:
        writer.record(rpc=rpc, peer=peer, direction=direction, payload=cls().SerializeToString())
    (entry,) = read_transcript(tmp_path / "t")
    assert entry.side == side
    assert message_class(entry) is cls
    assert decode(entry) == cls()


def test_a_message_is_decoded_with_its_fields(tmp_path):
    request = PollRequest(run_id="run-1", cursor=7, hold_ms=100)
    (entry,) = read_transcript(written(tmp_path / "t", [request.SerializeToString()]))
    assert decode(entry) == request


def test_calls_outside_the_contract_and_bytes_that_are_no_message_are_not_decoded():
    def entry(rpc: str, payload: bytes) -> TranscriptEntry:
        return TranscriptEntry(0, rpc, "client/host-0", "received", payload, "cos/cos", "server")

    assert message_class(entry("Check", b"")) is None
    with pytest.raises(StoreError, match="no RPC of the contract"):
        decode(entry("Check", b""))
    with pytest.raises(StoreError, match="PollRequest"):
        decode(entry("Poll", b"\xff\xff\xff"))


def test_the_role_is_what_stands_before_the_name():
    assert role_of("data-owner/drama") == "data-owner"
    assert role_of("cos") == "cos"


def test_what_found_no_room_is_written_when_there_is_and_no_call_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(transcript, "_MOST_WAITING", 4500)
    path = tmp_path / "transcript.bin"
    payloads = [bytes([n]) * 600 for n in range(12)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TranscriptWriter(path, "cos/cos") as writer:

        def record(some):
            for payload in some:
                writer.record(
                    rpc="Poll", peer="client/host-0", direction="received", payload=payload, side="server"
                )

        record(payloads[:2])
        # Room for half of the next one.
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 300, before[1]))
        try:
            record(payloads[2:9])
            # Each is kept, and more than so much is not waited for in silence.
            for payload in payloads[9:11]:
                with pytest.raises(StoreError, match=r"cannot write transcript .*File too large"):
                    record([payload])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        record(payloads[11:])
    assert [entry.payload for entry in read_transcript(path)] == payloads
