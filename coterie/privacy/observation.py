"""The kinds of datum that passed a party, read from the messages in its transcripts.

This needs no canaries, so it works on every recorded run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from google.protobuf.message import Message

from coterie.errors import StoreError
from coterie.privacy.fields import MISPLACED, UNCLASSIFIED, is_misplaced, kinds_in, reachable_kinds
from coterie.privacy.payloads import CARRIERS, Payloads
from coterie.privacy.transcript import TranscriptEntry, decode, message_class, read_transcript, role_of

__all__ = ["observed_kinds"]


def observed_kinds(transcripts: Mapping[str, Iterable[Path | str]]) -> dict[str, set[str]]:
    """Return the kinds of datum that each party received, or sent and so held.

    Parameters
    ----------
    transcripts : mapping of str to iterable of Path
        Transcript files by party.

    Returns
    -------
    dict of str to set of str
        Kinds by party.
    """
    return {party: _observed_by(party, tuple(paths)) for party, paths in transcripts.items()}


def _out_of_place(entry: TranscriptEntry, message: Message) -> Iterator[str]:
    """Yield the kinds of fields that do not belong into a message: unknown ones, and those of another role."""
    sender = entry.party if entry.direction == "sent" else entry.peer
    if role_of(sender) != "data-owner" and is_misplaced(message):
        yield MISPLACED
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    if known.ByteSize() != message.ByteSize():
        yield UNCLASSIFIED


def _observed_by(party: str, paths: tuple[Path | str, ...]) -> set[str]:
    seen: set[str] = set()
    payloads = Payloads()
    for path in paths:
        for entry in read_transcript(path):
            cls = message_class(entry)
            if cls is None:
                continue
            try:
                message = decode(entry)
            except StoreError:
                # Recorded before it was refused as malformed; its content cannot be classified.
                seen.add(UNCLASSIFIED)
                continue
            seen.update(_out_of_place(entry, message))
            if cls not in CARRIERS and reachable_kinds(cls.DESCRIPTOR) <= seen:
                # Its fields can show nothing new; looking at each would be most of the work.
                continue
            seen.update(kinds_in(message))
            if isinstance(message, CARRIERS):
                payloads.add(entry, message)
    seen.update(payloads.kinds())
    if role_of(party) == "data-owner" and "sealed_record" in seen:
        # The owner opens the records that are sealed for it.
        seen.add("interaction")
    if "sealed_reply" in seen:
        # A visit and its reply are sealed between user and owner, who so see the user's row and its step.
        seen |= {"user_factor", "user_gradient"}
    if role_of(party) == "thirdparty" and "sealed_expansion" in seen:
        # It opens the requests that are sealed to it.
        seen |= {"item_tag", "sealed_embedding", "latent_ciphertext"}
    if role_of(party) == "cos":
        # The party that forms a sum sees it without a message.
        seen.update(payloads.sums())
    return seen
