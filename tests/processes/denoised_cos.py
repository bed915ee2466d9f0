"""A real COS that wants the noise of single users: ``coterie serve cos``, which asks denoisers for other lists.

    python -P -m tests.processes.denoised_cos LIE --config FILE [--set KEY=VALUE]

Everything but the lie is the service's own code.
"""

import sys
from collections.abc import Callable, Mapping

from coterie.secure_sum import registry
from coterie.secure_sum.denoised import DenoisedServer
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Closed, Failed, Running, Step, Total


class AsksForOne(DenoisedServer):
    """A server that asks each denoiser for the noise of a single user."""

    def _asked_about(self, plan: SumPlan, closed: Closed, step: Step, place: int) -> list[int]:
        found = super()._asked_about(plan, closed, step, place)
        return found[:1] if step is Step.UNMASK else found


class AsksTwice(DenoisedServer):
    """A server that drops the first sum, and repeats it without the first user of each list."""

    binding = None

    def __init__(self) -> None:
        self._formed = False

    def _asked_about(self, plan: SumPlan, closed: Closed, step: Step, place: int) -> list[int]:
        found = super()._asked_about(plan, closed, step, place)
        return found[1:] if step is Step.UNMASK and self._formed else found

    def unmask(self, plan: SumPlan, closed: Closed, running: Running) -> Total:
        """Drop the first sum."""
        found = super().unmask(plan, closed, running)
        if not self._formed and plan.noise_floor:
            self._formed = True
            raise Failed("the server drops it")
        return found


LIES: Mapping[str, Callable[[], DenoisedServer]] = {"one": AsksForOne, "twice": AsksTwice}


def main() -> int:
    """Serve with the lie of the command line, and return the exit status."""
    lie, *serving = sys.argv[1:]
    registry.SUMS["denoised"] = lambda directory_key: LIES[lie]()

    from coterie.cli.main import invoke

    return invoke(["serve", "cos", *serving])


if __name__ == "__main__":
    sys.exit(main())
