"""Keys and bundles of very many participants stay in their files, and are those that were written."""

from dataclasses import replace
from pathlib import Path

import pytest
from coterie_client.numbers_of_users import NumberOf

from coterie.crypto import identity
from coterie.crypto.identity import Identities, load_many, save_many
from coterie.errors import CertificateError
from coterie.net import enrolment
from coterie.net.bundle_file import BundleFile
from coterie.net.enrolment import identities, saved_bundles

COUNT = 1203


@pytest.fixture(scope="module")
def made():
    """Return identities and their bundles, which differ in length."""
    drawn = Identities().more(COUNT)
    bundles = [
        replace(
            one.bundle(n + 1, (n, 2_000_000_000)),
            countersignature=bytes(64),
            party=f"client/{'h' * (n % 150)}",
        )
        for n, one in enumerate(drawn)
    ]
    return drawn, bundles


def test_bundles_are_read_one_by_one_as_they_were_saved(made, tmp_path: Path, monkeypatch) -> None:
    _, bundles = made
    enrolment._save_bundles(tmp_path, bundles)
    file = BundleFile(tmp_path / "bundles.pb")
    assert len(file) == COUNT
    assert list(file) == bundles
    assert [file[n] for n in (0, 7, COUNT - 1, -2)] == [bundles[n] for n in (0, 7, COUNT - 1, -2)]
    assert file[5:9] == bundles[5:9]
    assert file == saved_bundles(tmp_path)
    monkeypatch.setattr(enrolment, "_IN_MEMORY", 10)
    kept = saved_bundles(tmp_path)
    assert isinstance(kept, BundleFile)
    # The file that takes its place is another one.
    before = (tmp_path / "bundles.pb").stat().st_ino
    enrolment._save_bundles(tmp_path, bundles)
    assert (tmp_path / "bundles.pb").stat().st_ino == before
    enrolment._save_bundles(tmp_path, bundles[:3])
    assert kept[COUNT - 1] == bundles[COUNT - 1]
    assert len(saved_bundles(tmp_path)) == 3


@pytest.mark.parametrize("damage", ["cut", "tag", "nothing"])
def test_a_damaged_file_of_bundles_is_named(made, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "bundles.pb"
    enrolment._save_bundles(tmp_path, made[1][:20])
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-5], "tag": b"\x12" + content[1:], "nothing": b"\x0a"}[damage])
    with pytest.raises(CertificateError, match=r"the key bundles .*bundles\.pb are damaged"):
        BundleFile(path)
    path.unlink()
    with pytest.raises(CertificateError, match="cannot read the key bundles"):
        BundleFile(path)


def test_keys_of_very_many_are_read_from_their_file(made, tmp_path: Path, monkeypatch) -> None:
    drawn, _ = made
    path = tmp_path / "identities.key"
    save_many(path, drawn)
    monkeypatch.setattr(identity, "_MADE", 10)
    held = load_many(path)
    assert not isinstance(held._secrets, bytes)
    assert len(held) == COUNT
    assert [one.participant_id for one in held] == [one.participant_id for one in drawn]
    assert held[-1].agree(drawn[0].agreement_public) == drawn[-1].agree(drawn[0].agreement_public)
    for shown in (repr(held), repr(held._secrets)):
        assert held._secrets[:8].hex() not in shown
        assert str(held._secrets[:8]) not in shown
    # Further users: the file is replaced, and what was read from the one before stays.
    more = identities(tmp_path, COUNT + 2)
    assert [one.participant_id for one in more[:COUNT]] == [one.participant_id for one in held]
    assert [one.participant_id for one in load_many(path)] == [one.participant_id for one in more]
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    with pytest.raises(CertificateError, match=r"identities\.key is damaged"):
        load_many(path)
    path.write_bytes(b"something else" * 8)
    with pytest.raises(CertificateError, match="does not hold identities"):
        load_many(path)
    path.chmod(0o644)
    with pytest.raises(CertificateError, match="mode 0644"):
        load_many(path)


def test_a_user_is_found_by_its_id(made) -> None:
    ids = [one.participant_id for one in made[0]]
    # Ids that begin alike are told apart.
    ids += [ids[0][:8] + bytes(24), ids[1][:8] + b"\1" * 24]
    numbers = NumberOf(ids)
    assert [numbers.get(one) for one in ids] == list(range(1, len(ids) + 1))
    assert numbers.get(ids[0][:8] + b"\2" * 24) is None
    assert numbers.get(bytes(32)) is None
    assert NumberOf([]).get(bytes(32)) is None
