"""A federation changes its authority while it trains: both are trusted for a while, and no round is lost."""

import pytest
from cryptography import x509

from coterie.crypto.authority import Authority, issuer_of
from coterie.errors import CertificateError
from coterie.net.credentials import TlsFiles

SECONDS = 1 / (24 * 3600)
VALID_S = 15
THIRD_PARTY = "thirdparty/directory"


def signed_by(files, authority):
    """Whether a certificate is of an authority."""
    try:
        issuer_of(x509.load_pem_x509_certificate(files.chain.read_bytes()), authority)
    except CertificateError:
        return False
    return True


async def trust(running, pem, taken):
    """Let everybody trust these authorities, and wait until every party has taken them up."""
    for child in running.children.values():
        TlsFiles(child.state / "tls").authority.write_bytes(pem)
    TlsFiles(running.folder / "operator" / "tls").authority.write_bytes(pem)
    for party in running.children:
        if party != THIRD_PARTY:
            await running.comes_true(
                lambda party=party: (
                    sum(line["event"] == "took up other authorities" for line in running.log(party)) == taken
                ),
                f"{party} trusts other authorities",
            )


@pytest.mark.long
async def test_an_authority_takes_the_place_of_another_while_a_run_goes_on(small, federation, tmp_path):
    settings = small(
        system="fedncf",
        secure_sum="masked",
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": 24, "items": 60, "interactions": 600}},
        rounds={"cohort": 24, "group": 24, "passes": 5000, "evaluate_every": 2500},
        federation={"hosts": 3},
    )
    keys = {"thirdparty": {"certificate_days": VALID_S * SECONDS}}
    async with federation(settings, keys=keys) as running:
        await running.start()
        await running.a_round("the first round", reason="")
        third_party = running.children[THIRD_PARTY]
        old, new = (third_party.state / "ca.pem").read_bytes(), Authority.create("Second authority", 3650)

        # A certificate of an authority that nobody trusts is refused, and the message names who signed it.
        with pytest.raises(CertificateError, match=r"CN=Coterie authority signed it.* CN=Second authority"):
            issuer_of(
                x509.load_pem_x509_certificate(TlsFiles(running.cos.state / "tls").chain.read_bytes()),
                new.certificate_pem,
            )

        await trust(running, old + new.certificate_pem, 1)
        await running.a_round("a round under both", reason="")
        third_party.kill()
        (third_party.state / "ca.pem").unlink()
        (third_party.state / "ca-key.pem").unlink()
        new.save(third_party.state)
        third_party.start()
        everybody = {party: TlsFiles(child.state / "tls") for party, child in running.children.items()}
        everybody["operator"] = TlsFiles(running.folder / "operator" / "tls")
        for party, files in everybody.items():
            await running.comes_true(
                lambda files=files: signed_by(files, new.certificate_pem), f"{party} has a new certificate"
            )
        # The old authority is trusted no longer; the operator still knows it, for the log.
        await trust(running, new.certificate_pem, 2)
        await running.a_round("a round under the new one", reason="")
        changed = max(event.round.round for event in running.events)
        running.kill_and_restart("client/host-1")
        await running.becomes("SERVING", "client/host-1")
        await running.a_round("a round with a host that came back", reason="")
        await running.stop_run("the authority was changed")
        await running.ended()
        report = await running.report()

    # A host that is killed takes the round with it in which that happens; the change of the authority takes none.
    lost = [one["round"] for one in report["rounds"][:-1] if one["reason"]]
    assert len(lost) <= 1
    assert all(number > changed for number in lost)
    assert not [event.party for event in running.events if event.party.change == "lost"]
