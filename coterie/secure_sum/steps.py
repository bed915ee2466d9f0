"""Tables between a sum's steps and the names that the gRPC contract gives them in tasks and submissions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from coterie.secure_sum.protocol import Step
from coterie.wire.v1.orchestrator_pb2 import RoundStep, SubmitKind

__all__ = ["DECLINED", "KIND_OF", "STEP_IN_TASK", "STEP_OF_KIND", "TASK_STEP"]

TASK_STEP: Mapping[Step, RoundStep.ValueType] = MappingProxyType(
    {
        Step.ADVERTISE: RoundStep.ROUND_STEP_ADVERTISE,
        Step.SHARE: RoundStep.ROUND_STEP_SHARE,
        Step.SUBMIT: RoundStep.ROUND_STEP_SUBMIT,
        Step.CONFIRM: RoundStep.ROUND_STEP_CONFIRM,
        Step.UNMASK: RoundStep.ROUND_STEP_UNMASK,
        Step.DECRYPT: RoundStep.ROUND_STEP_DECRYPT,
    }
)
"""Name of each step in a task."""

STEP_IN_TASK: Mapping[RoundStep.ValueType, Step] = MappingProxyType(
    {named: step for step, named in TASK_STEP.items()}
)
"""Step of each name in a task."""

KIND_OF: Mapping[Step, SubmitKind.ValueType] = MappingProxyType(
    {
        Step.ADVERTISE: SubmitKind.SUBMIT_KIND_ADVERT,
        Step.SHARE: SubmitKind.SUBMIT_KIND_SHARES,
        Step.SUBMIT: SubmitKind.SUBMIT_KIND_VECTOR,
        Step.CONFIRM: SubmitKind.SUBMIT_KIND_CONFIRMATION,
        Step.UNMASK: SubmitKind.SUBMIT_KIND_UNMASKING,
        Step.DECRYPT: SubmitKind.SUBMIT_KIND_DECRYPTION,
    }
)
"""Kind under which each step's message is submitted."""

DECLINED = SubmitKind.SUBMIT_KIND_DECLINED
"""Kind of the submission by which members say that they take no further part."""

STEP_OF_KIND: Mapping[SubmitKind.ValueType, Step] = MappingProxyType(
    {kind: step for step, kind in KIND_OF.items()}
)
"""Step of each kind of submission."""
