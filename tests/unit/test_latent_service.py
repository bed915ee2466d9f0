"""The service of meta-latents where the library that combines vectors is missing."""

import asyncio
from typing import Any

import pytest
from coterie_thirdparty import latents

from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import latents_pb2 as wire


def test_without_the_library_a_set_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "find_spec", lambda name: None)
    nothing: Any = None
    service = latents.MetaLatents(nothing, nothing, nothing, nothing, nothing)
    with pytest.raises(Refusal, match="gmpy2 is not installed there") as caught:
        asyncio.run(service._open_set("client/host-0", wire.OpenLatentsRequest()))
    assert caught.value.reason == ErrorReason.ERROR_REASON_WRONG_STATE
    assert "paillier" in caught.value.expected


def test_with_it_the_request_itself_is_judged() -> None:
    nothing: Any = None
    service = latents.MetaLatents(nothing, nothing, nothing, nothing, nothing)
    with pytest.raises(Refusal) as caught:
        asyncio.run(service._open_set("client/host-0", wire.OpenLatentsRequest()))
    assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
