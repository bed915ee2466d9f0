"""Users of a host in arrays: the same users as in a list."""

import numpy as np
import pytest

from coterie.rounds.sides import HostUsers, User

LIST = [User(4, 0), User(1, 2), User(7, 0)]


def test_users_in_arrays_are_those_of_the_list():
    packed = HostUsers.of(LIST)
    assert packed == LIST
    assert list(packed) == LIST
    assert packed[1:] == LIST[1:]
    assert packed[-1] == LIST[-1]
    assert HostUsers.of(packed) is packed
    assert packed != LIST[:2]
    with pytest.raises(IndexError):
        packed[3]


def test_a_user_that_is_asked_for_has_whole_numbers_of_python():
    one = HostUsers(np.array([3], np.int32), np.array([1], np.int32))[0]
    assert [type(value) for value in (one.index, one.group)] == [int, int]
