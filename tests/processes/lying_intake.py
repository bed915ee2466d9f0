"""A real intake that tells hosts another model than the coordinator's: ``coterie serve cos``, with one byte changed.

    python -P -m tests.processes.lying_intake --config FILE [--set KEY=VALUE]

Everything but the bytes of the model is the service's own code.
"""

import sys

from coterie_cos.kept_payloads import KeptPayloads

from coterie.wire.v1.orchestrator_pb2 import FetchKind


def main() -> int:
    """Serve as the lying intake, and return the exit status."""
    payload = KeptPayloads.payload

    async def another(self, name):
        found = await payload(self, name)
        if found is None or name.kind != FetchKind.FETCH_KIND_MODEL:
            return found
        return found[:-1] + bytes([found[-1] ^ 1])

    KeptPayloads.payload = another

    from coterie.cli.main import invoke

    return invoke(["serve", "cos", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
