"""The file of combinations that a host has read."""

import numpy as np
import pytest

from coterie.errors import CertificateError
from coterie.parties.kept_latents import KeptLatents


def test_what_was_kept_last_is_read_and_nobody_else_may_read_it(tmp_path):
    kept = KeptLatents(tmp_path, "a-run")
    assert kept.load() is None
    for epoch in (1, 2):
        latents = np.random.default_rng(epoch).normal(size=(20, 3))
        kept.save(epoch, latents)
        found = KeptLatents(tmp_path, "a-run").load()
        assert found.epoch == epoch
        assert np.array_equal(found.latents, latents)
    assert KeptLatents(tmp_path, "another").load() is None
    (file,) = (tmp_path / "latents").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "latents").stat().st_mode & 0o777 == 0o700
    file.chmod(0o644)
    with pytest.raises(CertificateError, match="others"):
        kept.load()


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "nan", "vector"])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, damage):
    kept = KeptLatents(tmp_path, "a-run")
    kept.save(1, {"nan": np.full((2, 2), np.nan), "vector": np.zeros(4)}.get(damage, np.zeros((2, 2))))
    (file,) = (tmp_path / "latents").iterdir()
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b"none"}.get(damage, whole))
    with pytest.raises(CertificateError, match="is damaged") as refused:
        kept.load()
    assert "remove it" in refused.value.hint
