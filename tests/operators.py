"""The operator of runs that tests start: a key of its own, and plans that carry its signature."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.operator_key import public_text, sign_run
from coterie.rounds.plan_hash import plan_hash
from coterie.wire.v1.operator_pb2 import StartRunRequest

KEY = Ed25519PrivateKey.generate()
KEYS = [public_text(KEY)]
"""What parties have as `operator_keys`."""


def signed(request: StartRunRequest, key: Ed25519PrivateKey = KEY) -> StartRunRequest:
    """Sign a request's plan, and return the request."""
    request.plan_signature = sign_run(key, request.plan.run_id, plan_hash(request.plan))
    return request
