"""Private values that every audit looks for: names of users, keys of items, identities, secrets, recommendations."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from safetensors.numpy import load_file

from coterie.crypto.identity import Prekey
from coterie.privacy.canaries import CanaryKit
from coterie.privacy.transcript import decode, read_transcript
from coterie.privacy.visibility import Audit
from coterie.studies.run_data import Feed
from coterie.wire.v1 import client_pb2
from coterie.wire.v1.client_pb2_grpc import UserAgentStub
from coterie.wire.v1.orchestrator_pb2 import Participant

from .running import Running
from .stores import rows

OPERATOR = "operator/operator"


@dataclasses.dataclass
class Held:
    """A finished run, and what can only be had while it goes on."""

    running: Running
    kit: CanaryKit
    report: dict[str, Any]
    pages: list[tuple[str, str]]
    recommended: dict[str, client_pb2.UserRecommendResponse]


def with_canaries(feed: Feed, kit: CanaryKit) -> Feed:
    """Give users and items of a data set names that can be recognised."""
    data = feed.dataset
    users = [kit.user_names(1, holders={f"client/host-{host}"})[0] for host in feed.host]
    named = dataclasses.replace(data, users=tuple(users), items=tuple(kit.item_keys(len(data.items))))
    return dataclasses.replace(feed, dataset=named)


def names_at(feed: Feed, host: str) -> list[str]:
    """Return the names of a host's users."""
    names = zip(feed.dataset.users, feed.host, strict=True)
    return [name for name, number in names if f"client/host-{number}" == host]


async def ask(running: Running, host: str, user: str) -> client_pb2.UserRecommendResponse:
    """Ask for recommendations in place of a user's own application."""
    channel = running.channel(host)
    try:
        request = client_pb2.UserRecommendRequest(user=user, k=10)
        return await channel.stub(UserAgentStub).Recommend(request)
    finally:
        await channel.close()


def plant_histories(held: Held) -> None:
    """Search for interactions and histories as they stand in the files that hosts are given."""
    for host in held.running.parties("client"):
        lines = (held.running.children[host].folder / "histories.csv").read_bytes().split(b"\r\n")[1:-1]
        for line in lines:
            held.kit.plant("interaction", b",".join(line.split(b",")[:3]), {host})
        for first in range(0, len(lines) - 2, 3):
            held.kit.plant("history", b"\r\n".join(lines[first : first + 3]), {host})


def plant_recommendations(held: Held) -> None:
    """Search for scores that follow each other in an answer."""
    for host, response in held.recommended.items():
        scores = np.asarray(response.scores, "<f4")
        assert len(scores) == 10
        # The COS of DRIFT answers with those of seen items in between.
        for pair in itertools.pairwise(scores):
            held.kit.plant("recommendation", np.array(pair).tobytes(), {host})


def plant_identities(held: Held) -> None:
    """Search for participants and for the signatures by which they let a connection speak for them."""
    kit, cos = held.kit, held.running.cos.state / "cos.db"
    for participant, party, message in rows(cos, "SELECT participant, party, message FROM participants"):
        kit.plant("participant_id", participant)
        if signature := Participant.FromString(message).delegation.signature:
            kit.plant("delegation", signature, {party})
    # Users of a host delegate together, in a message that the server does not keep.
    told = {
        (entry.peer, message.roll.signature)
        for entry in read_transcript(held.running.cos.state / "transcript.bin")
        if entry.rpc == "Register" and entry.direction == "received"
        if (message := decode(entry)).HasField("roll")
    }
    for party, signature in sorted(told):
        kit.plant("delegation", signature, {party})


def plant_secrets(held: Held) -> None:
    """Search for tokens and private keys of every party."""
    running, kit = held.running, held.kit
    folders = {party: child.folder for party, child in running.children.items()}
    for party, folder in (folders | {OPERATOR: running.folder / "operator"}).items():
        if (token := folder / "token").exists():
            kit.plant("enrolment_token", token.read_text().strip(), {party})
        for path in folder.rglob("*"):
            for secret in secrets_in(path):
                kit.plant("secret_key", secret, {party})


def secrets_in(path: Path) -> Iterator[bytes]:
    """Yield what must stay secret of a file."""
    if path.name in ("key.pem", "ca-key.pem"):
        lines = path.read_text().splitlines()
        # The line with the most of the key; the first is the same for all keys of a kind.
        yield lines[2].encode() if len(lines) > 3 else lines[1][-24:].encode()
        key = load_pem_private_key(path.read_bytes(), None)
        if isinstance(key, Ed25519PrivateKey):
            yield key.private_bytes_raw()
        else:
            yield key.private_numbers().private_value.to_bytes(32, "big")
    elif path.name in ("identities.key", "directory-signing.key", "log-signing.key"):
        # A line that names the content, keys of 32 bytes, and a digest of both.
        content = path.read_bytes().partition(b"\n")[2][:-32]
        yield from (content[first : first + 32] for first in range(0, len(content), 32))
    elif path.suffix == ".prekey":
        secret = path.read_bytes().partition(b"\n")[2][:32]
        public = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
        assert public == Prekey.load(path).public.public
        yield secret


def plant_factors_of_ratings(held: Held) -> None:
    """Search for users' own factors, the model, and supports of a system that factorises ratings."""
    for host in held.running.parties("client"):
        paths = list((held.running.children[host].state / "private").glob("*factors.npy"))
        assert paths
        for path in paths:
            held.kit.rows("private_state", np.load(path), {host})
    newest = max((held.running.cos.state / "models" / "test").glob("version-*.safetensors"))
    arrays = load_file(newest)
    held.kit.rows("item_factor", arrays["model.items"])
    held.kit.plant("item_support", arrays["supports"].astype("<u4").tobytes())


def audit_everybody(held: Held, audit: Audit) -> Audit:
    """Search everything that anybody held: transcripts, folders, metrics pages, what the operator was told."""
    for party, child in held.running.children.items():
        audit.audit_transcript(party, child.state / "transcript.bin")
        audit.audit_tree(party, child.folder)
    for party, page in held.pages:
        audit.audit_page(party, "metrics page", page.encode())
    for party, child in held.running.children.items():
        audit.audit_page(party, "log", child.log.read_bytes())
    audit.audit_tree(OPERATOR, held.running.folder / "operator")
    for event in held.running.events:
        audit.audit_bytes(OPERATOR, "WatchRun", event.SerializeToString())
    for response in held.recommended.values():
        audit.audit_bytes(OPERATOR, "Recommend", response.SerializeToString())
    return audit
