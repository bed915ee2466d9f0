"""Delegations of a whole host: one signature for all users of a registration, over the Merkle root of their ids.

A *roll* is the list of users for whom a connection registers, in their order.  Its first user signs the root of the
roll, the certificate of the connection, the run and the expiry; whoever checks it computes the root from the ids that
it received, so that no user can be added, left out or exchanged.

Assumed: Ed25519 (unforgeable), SHA-256 (collision resistant), and that the users of one party are one trust domain:
their keys lie in one process, so that one of them may speak for the others.  Which users those are is not theirs to
say: the directory's countersignature, or its log, names the party of each, and a roll holds for users of one party.
No key of one party speaks for a user of another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from coterie.crypto.explicit import encode
from coterie.crypto.identity import Delegation, Identity, check_signature
from coterie.crypto.merkle import RunningRoot, leaf_hash
from coterie.crypto.verification import Reason, VerificationError

__all__ = ["RollDelegation", "roll_of"]


def roll_of(participants: Iterable[bytes]) -> RunningRoot:
    """Return the tree over the ids of a roll, 32 bytes each, in order."""
    tree = RunningRoot()
    for participant in participants:
        tree.append(leaf_hash(participant))
    return tree


@dataclass(frozen=True)
class RollDelegation:
    """A user's statement that a connection may speak, in one run, for it and the other users of its host's roll.

    Parameters
    ----------
    certificate_fingerprint : bytes
        SHA-256 of the connection's certificate (DER), 32 bytes.
    run_id : str
    expiry : int
        First second at which it no longer holds, Unix seconds.
    root : bytes
        Root of the tree over the users' ids, 32 bytes.
    size : int
        Number of users.
    signature : bytes
        That of the first user, 64 bytes.
    """

    certificate_fingerprint: bytes
    run_id: str
    expiry: int
    root: bytes
    size: int
    signature: bytes

    @classmethod
    def sign(
        cls, first: Identity, certificate_fingerprint: bytes, run_id: str, expiry: int, roll: RunningRoot
    ) -> Self:
        """Sign a roll with the identity of its first user."""
        root, size = roll.root(), len(roll)
        signature = first.sign("roll-delegation", certificate_fingerprint, run_id, expiry, root, size)
        return cls(certificate_fingerprint, run_id, expiry, root, size, signature)

    def verify(
        self,
        first_public: bytes,
        certificate_fingerprint: bytes,
        run_id: str,
        now: int,
        roll: RunningRoot,
    ) -> None:
        """Check that this connection may speak in this run, now, for exactly the users of a roll.

        Parameters
        ----------
        first_public : bytes
            Signing key of the first user, from its verified bundle.
        certificate_fingerprint : bytes
            SHA-256 of the certificate that the connection really showed, 32 bytes.
        run_id : str
        now : int
            Unix seconds.
        roll : RunningRoot
            Over the users that came, of whom each is known to be of the connection's party.

        Raises
        ------
        VerificationError
            MALFORMED, BAD_SIGNATURE, WRONG_CERTIFICATE, WRONG_RUN or EXPIRED.
        """
        # The bounds of certificate, run and expiry are those of a single user's delegation.
        claim = Delegation(self.certificate_fingerprint, self.run_id, self.expiry, self.signature)
        claim.check_bounds(certificate_fingerprint, run_id, now)
        if (self.root, self.size) != (roll.root(), len(roll)):
            raise VerificationError(
                Reason.BAD_SIGNATURE,
                f"the delegation is for a roll of {self.size} users, and other users came, {len(roll)} of them",
            )
        fields = self.certificate_fingerprint, self.run_id, self.expiry, self.root, self.size
        signed = encode("roll-delegation", *fields)
        check_signature(first_public, self.signature, signed, "the delegation", Reason.BAD_SIGNATURE)
