"""Messages of users and owners in a visit, as bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.visit import Reply, Visit

rows = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20)


@given(st.integers(1, 2**63), st.integers(1, 2**31), st.booleans(), rows)
def test_a_visit_comes_back_as_it_was(number, epoch, complete, row):
    visit = Visit(number, epoch, complete, np.array(row, np.float32))
    found = Visit.from_bytes(visit.to_bytes(), len(row))
    assert (found.number, found.epoch, found.complete) == (number, epoch, complete)
    assert_array_equal(found.row, visit.row)


@given(st.integers(1, 2**63), st.integers(0, 2**31), st.integers(0, 2**31), st.floats(0, 1e9), rows)
def test_a_reply_comes_back_as_it_was(number, blocks, held, loss, step):
    reply = Reply(number, blocks, held, loss, np.array(step, np.float32))
    found = Reply.from_bytes(reply.to_bytes(), len(step))
    assert (found.number, found.blocks, found.held, found.loss) == (number, blocks, held, loss)
    assert_array_equal(found.step, reply.step)


@pytest.mark.parametrize("cut", [0, 5, 13, 20, 28, 30])
def test_a_visit_of_another_length_is_refused(cut):
    data = Visit(1, 1, True, np.ones(4, np.float32)).to_bytes() + b"xx"
    with pytest.raises(Refusal) as refused:
        Visit.from_bytes(data[:cut], 4)
    assert refused.value.reason == ErrorReason.ERROR_REASON_WRONG_SHAPE


@pytest.mark.parametrize(("number", "epoch", "complete"), [(0, 1, 1), (1, 0, 1), (1, 1, 2)])
def test_numbers_that_cannot_be_are_refused(number, epoch, complete):
    data = bytearray(Visit(1, 1, True, np.ones(2, np.float32)).to_bytes())
    data[:13] = number.to_bytes(8, "little") + epoch.to_bytes(4, "little") + bytes([complete])
    with pytest.raises(Refusal) as refused:
        Visit.from_bytes(bytes(data), 2)
    assert refused.value.reason == ErrorReason.ERROR_REASON_INVALID_FIELD


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_refused(value):
    bad = np.array([0, value], np.float32)
    with pytest.raises(Refusal) as refused:
        Visit.from_bytes(Visit(1, 1, True, bad).to_bytes(), 2)
    assert refused.value.reason == ErrorReason.ERROR_REASON_NOT_FINITE
    for loss, step in ((0.0, bad), (value, np.ones(2, np.float32))):
        with pytest.raises(Refusal) as refused:
            Reply.from_bytes(Reply(1, 1, 1, loss, step).to_bytes(), 2)
        assert refused.value.reason == ErrorReason.ERROR_REASON_NOT_FINITE
