"""``coterie receipt``: what it prints of a host's answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli.main import app
from coterie.launch import local_run
from coterie.wire.v1 import client_pb2 as wire

NOON = 1_700_000_000_000
SENT = wire.Disclosure(
    recipient="cos",
    kind="model update (masked)",
    protection="masked: only the sum over the cohort",
    count=3,
    bytes=4096,
    first_ms=NOON,
    last_ms=NOON,
)
REFUSED = wire.Declined(
    recipient="cos",
    reason="a user has been in 2 rounds today; accepted are 2",
    count=7,
    first_ms=NOON,
    last_ms=NOON + 60_000,
)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> wire.DisclosureReceiptResponse:
    """The host's answer, empty to begin with."""
    answer = wire.DisclosureReceiptResponse()

    async def receipt(run: object, user: str) -> wire.DisclosureReceiptResponse:
        assert user == "u1"
        return answer

    monkeypatch.setattr(local_run, "receipt", receipt)
    monkeypatch.setattr(local_run, "newest_answering", lambda root: (object(), []))
    monkeypatch.setenv("COLUMNS", "160")
    return answer


def printed(*more: str) -> str:
    result = CliRunner().invoke(app, ["receipt", "--user", "u1", *more])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_what_was_refused_stands_below_what_has_left(host: wire.DisclosureReceiptResponse) -> None:
    host.disclosures.append(SENT)
    host.declined.append(REFUSED)
    text = " ".join(printed().split())
    assert "cos model update (masked) masked: only the sum over the cohort 3" in text
    assert "cos a user has been in 2 rounds today; accepted are 2 7 2023-11-14 22:13" in text
    assert text.index("model update") < text.index("refused, because")


def test_a_host_that_refused_nothing_has_no_table_of_refusals(host: wire.DisclosureReceiptResponse) -> None:
    host.disclosures.append(SENT)
    assert "refused" not in printed()


def test_programs_get_what_was_refused_in_the_envelope(host: wire.DisclosureReceiptResponse) -> None:
    host.declined.append(REFUSED)
    result = json.loads(printed("--json"))["result"]
    assert result["disclosures"] == []
    assert result["declined"] == [
        {
            "recipient": "cos",
            "reason": "a user has been in 2 rounds today; accepted are 2",
            "count": 7,
            "first_ms": NOON,
            "last_ms": NOON + 60_000,
        }
    ]
