"""Room on a real volume: found by taking it, and given back."""

import errno
import os

import pytest

from coterie.store.room import has_room

from ..volumes import fill, small_volume


def test_a_volume_has_room_for_what_fits_and_keeps_nothing_of_it(tmp_path):
    folder = tmp_path / "small"
    with small_volume(folder, "1m"):
        assert has_room(folder)
        assert has_room(folder, 1 << 20)
        assert not has_room(folder, (1 << 20) + 1)
        assert list(folder.iterdir()) == []
        ballast = fill(folder)
        assert not has_room(folder, 1)
        assert [path.name for path in folder.iterdir()] == ["ballast"]
        ballast.unlink()
        assert has_room(folder)


def test_where_nothing_can_be_allocated_beforehand_it_is_written(tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    folder = tmp_path / "small"
    with small_volume(folder, "1m"):
        assert has_room(folder, 1 << 20)
        assert not has_room(folder, (1 << 20) + 1)
        assert list(folder.iterdir()) == []


def test_what_is_no_matter_of_room_is_said(tmp_path):
    with pytest.raises(FileNotFoundError):
        has_room(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
