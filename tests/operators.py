"""The operator of runs that tests start: a key of its own, and plans that carry its signature."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.operator_key import save_operator_keys, sign_run
from coterie.rounds.plan_hash import signed_hash
from coterie.wire.v1.operator_pb2 import StartRunRequest

KEY = Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key().public_bytes_raw()


def keys_file(folder: Path) -> Path:
    """Write the operator's public key for a party, and return the file."""
    path = folder / "operator.pub"
    save_operator_keys(path, [PUBLIC])
    return path


def signed(request: StartRunRequest, key: Ed25519PrivateKey = KEY) -> StartRunRequest:
    """Sign a request's plan, and return the request."""
    request.plan_signature = sign_run(key, request.plan.run_id, signed_hash(request.plan))
    return request
