"""Check an operator's request to start a run of DRIFT."""

from __future__ import annotations

from coterie.errors import ConfigError
from coterie.systems.description import Driver
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.registry import driver_of
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.operator_pb2 import StartRunRequest
from coterie_cos.plan_ranges import check_ranges

__all__ = ["check_plan"]


def check_plan(request: StartRunRequest) -> None:
    """Check the settings of a request to start a run of DRIFT, in either form.

    Raises
    ------
    Refusal
        INVALID_FIELD names the first field that is out of its range.
    """
    plan = request.plan
    least_dim = 2 if plan.item_bias else 1
    check_ranges(
        request,
        {
            "plan.dim": (least_dim <= plan.dim <= 1024, f"{least_dim} to 1024"),
            "plan.rate": (0 < plan.rate < 1e3, "above 0 and below 1000"),
            "plan.ridge": (0 <= plan.ridge < 1e3, "from 0 to below 1000"),
            "plan.theta": (1 <= plan.theta <= 1024, "1 to 1024"),
            "plan.epochs": (1 <= plan.epochs <= 10_000, "1 to 10000"),
        },
    )
    if driver_of(plan.system, plan.form) is Driver.WINDOWS:
        check_ranges(
            request, {"plan.rounds.step_timeout_ms": (plan.rounds.step_timeout_ms > 0, "at least 1")}
        )
    elif not plan.settings:
        return
    try:
        DriftSettings.from_plan(plan)
    except ConfigError as error:
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            error.message,
            field="plan.settings",
            expected=f"settings of DRIFT's {plan.form} form",
        ) from error
