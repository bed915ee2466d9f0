"""Visibility of FedMF, FCF and FedIDCF on the bytes of runs: histories, users' factors, the model, supports, keys."""

import pytest

from coterie.privacy.visibility import Audit, observed
from coterie.systems.visibility import matrix, rows_of

from .planted import (
    audit_everybody,
    plant_factors_of_ratings,
    plant_histories,
    plant_identities,
    plant_recommendations,
    plant_secrets,
)
from .recorded import of_system

COS, OWNER = "cos/cos", "data-owner/catalogue"
KINDS = [
    of_system(system, system, secure_sum)
    for system in ("fedmf", "fcf", "fedidcf")
    for secure_sum in ("clear", "masked")
]

EACH = pytest.mark.parametrize(("system", "secure_sum"), KINDS)
FROM_USERS = {"interaction", "history", "private_state", "user_name", "recommendation"}


@pytest.fixture(scope="module")
def audited(recorded):
    """Return a function that plants the private values of a run and audits everything that anybody held."""
    made = {}

    def make(system, secure_sum):
        if (system, secure_sum) not in made:
            held = recorded.run(system, secure_sum)
            for plant in (
                plant_histories,
                plant_recommendations,
                plant_identities,
                plant_secrets,
                plant_factors_of_ratings,
                *([plant_vectors] if system == "fedidcf" else []),
            ):
                plant(held)
            audit = Audit(held.kit, rows_of(system, "hosts", secure_sum))
            made[system, secure_sum] = held, audit_everybody(held, audit).result()
        return made[system, secure_sum]

    return make


def plant_vectors(held):
    """Secrets of the Paillier key, which its hosts hold, and vectors of key users as they are before encryption."""
    hosts = set(held.running.parties("client"))
    for host in hosts:
        folder = held.running.children[host].state / "latents"
        for path in folder.glob("*.key"):
            content = path.read_bytes()
            held.kit.plant("secret_key", content[len(content) // 2 :][:32], hosts)


@EACH
def test_nobody_holds_of_fedmf_or_fcf_what_it_may_not_see(audited, system, secure_sum):
    held, result = audited(system, secure_sum)
    assert result.violations == ()
    seen = {
        party: {name for name, how in kinds.items() if how == "seen"} for party, kinds in result.seen.items()
    }
    for party in (COS, OWNER, "thirdparty/directory"):
        assert not seen[party] & FROM_USERS
    assert seen[COS] >= {"item_factor", "item_support"}
    for host in held.running.parties("client"):
        assert seen[host] >= {"interaction", "history", "private_state", "item_factor"}
        assert "item_support" not in seen[host]


@EACH
def test_the_kinds_read_off_the_messages_of_fedmf_and_fcf_are_declared(audited, system, secure_sum):
    held, _ = audited(system, secure_sum)
    transcripts = {party: [child.state / "transcript.bin"] for party, child in held.running.children.items()}
    declared, shown = matrix(system, "hosts", secure_sum), observed(transcripts)
    for party, kinds in shown.items():
        for name, seen in kinds.items():
            assert not seen or declared[party.partition("/")[0]][name].allowed, (party, name)
    sent = "host_update" if secure_sum == "clear" else "masked_vector"
    assert shown[COS][sent]
    assert not shown[OWNER]["item_pull"]


@pytest.mark.parametrize("secure_sum", [of_system("fedidcf", "masked")])
def test_the_third_party_of_fedidcf_has_ciphertexts_of_key_users_and_nobody_else_has_them(
    audited, secure_sum
):
    held, _ = audited("fedidcf", secure_sum)
    assert held.report["history"][-1]["metrics"]["with_latents"] == 1
    transcripts = {party: [child.state / "transcript.bin"] for party, child in held.running.children.items()}
    shown = observed(transcripts)
    assert shown["thirdparty/directory"]["latent_ciphertext"]
    assert shown["thirdparty/directory"]["pseudo_latent"]
    assert shown[COS]["sealed_expansion"]
    for party in (COS, OWNER):
        assert not shown[party]["latent_ciphertext"]
        assert not shown[party]["pseudo_latent"]
    for host in held.running.parties("client"):
        assert shown[host]["pseudo_latent"]


@EACH
def test_logs_and_metrics_pages_of_fedmf_and_fcf_hold_nothing_private(audited, system, secure_sum):
    held, _ = audited(system, secure_sum)
    private = {canary.kind for canary in held.kit.canaries} - {"participant_id", "item_support"}
    for party, page in held.pages:
        assert not private & held.kit.search(held.running.children[party].log.read_bytes()), party
        assert held.kit.search(page.encode()) == set(), party
