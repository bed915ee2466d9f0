from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import from_wire, increasing_ids, to_wire
from coterie.wire.v1.common_pb2 import DType, Tensor

DTYPES = ("<f4", "<f8", "<u4", "u1")
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


def finite(dtype: str) -> st.SearchStrategy[np.ndarray]:
    numbers = None
    if dtype.endswith(("f4", "f8")):
        width = 8 * int(dtype[-1])
        numbers = st.floats(allow_nan=False, allow_infinity=False, width=width)
    return arrays.arrays(dtype, SHAPES, elements=numbers)


def refusal(tensor: Tensor, dtype: str, shape: tuple[int | None, ...]) -> Refusal:
    with pytest.raises(Refusal) as refused:
        from_wire(tensor, dtype, shape, field="rows")
    assert refused.value.field == "rows"
    assert refused.value.expected
    return refused.value


@given(st.data(), st.sampled_from(DTYPES))
def test_what_is_sent_arrives(data: st.DataObject, dtype: str) -> None:
    array = data.draw(finite(dtype))
    received = Tensor.FromString(to_wire(array).SerializeToString())
    found = from_wire(received, dtype, array.shape, field="x")
    assert found.dtype == np.dtype(dtype)
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()
    assert np.array_equal(from_wire(received, dtype, (None,) * array.ndim, field="x"), array)
    assert not found.flags.writeable


@given(st.data(), st.sampled_from(("f4", "f8", "u4")))
def test_the_bytes_are_little_endian_and_row_major_however_the_array_lies_in_memory(
    data: st.DataObject, kind: str
) -> None:
    array = data.draw(finite(f"<{kind}"))
    plain = to_wire(array)
    assert to_wire(array.astype(f">{kind}")) == plain
    assert to_wire(array.copy(order="F")) == plain
    assert plain.data == array.astype(f"<{kind}").tobytes("C")


@pytest.mark.parametrize("dtype", ["bool", "int64", "int32", "float16", "complex64", "U3", "O"])
def test_an_element_type_without_a_wire_form_is_a_programming_error(dtype: str) -> None:
    with pytest.raises(TypeError, match="no wire form"):
        to_wire(np.zeros(2, dtype))


@given(st.data(), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_another_element_type_is_refused(data: st.DataObject, sent: str, wanted: str) -> None:
    array = data.draw(finite(sent))
    if sent != wanted:
        refused = refusal(to_wire(array), wanted, array.shape)
        assert refused.name == "WRONG_SHAPE"
        assert np.dtype(sent).name in refused.message
        assert np.dtype(wanted).name in refused.expected


@given(SHAPES, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
def test_another_shape_is_refused_also_with_as_many_elements(
    sent: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    tensor = to_wire(np.zeros(sent, np.float32))
    if sent == wanted:
        assert from_wire(tensor, np.float32, wanted, field="x").shape == wanted
    else:
        refused = refusal(tensor, "<f4", wanted)
        assert refused.name == "WRONG_SHAPE"
        assert str(wanted) in refused.expected


@given(st.data())
def test_a_length_that_may_be_any_is_described_so_and_the_others_still_hold(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    tensor = to_wire(np.zeros((rows, columns), np.float64))
    assert from_wire(tensor, np.float64, (None, columns), field="x").shape == (rows, columns)
    refused = refusal(tensor, "<f8", (None, columns + 1))
    assert refused.expected == f"float64 ('any', {columns + 1})"


@given(st.integers(-16, 16).filter(bool))
def test_bytes_that_are_too_few_or_too_many_are_refused(more: int) -> None:
    tensor = to_wire(np.ones((2, 2), np.float32))
    tensor.data = tensor.data[:more] if more < 0 else tensor.data + bytes(more)
    assert refusal(tensor, "<f4", (2, 2)).name == "WRONG_SHAPE"
    assert refusal(tensor, "<f4", (None, None)).name == "WRONG_SHAPE"


@pytest.mark.parametrize(
    "shape", [(-1, -4), (-2, 2), (2**62, 2**62), (2**63 - 1, 2**63 - 1), (0, -1), (1, 2, 2), (4,), ()]
)
def test_lengths_that_cannot_be_are_refused_before_anything_is_made_of_them(shape: tuple[int, ...]) -> None:
    tensor = Tensor(dtype=DType.DTYPE_FLOAT32, shape=shape, data=bytes(16))
    assert refusal(tensor, "<f4", (None, None)).name == "WRONG_SHAPE"


@pytest.mark.parametrize("dtype", [0, 5, 99, -1])
def test_an_element_type_that_does_not_exist_is_refused(dtype: int) -> None:
    tensor = Tensor(dtype=dtype, shape=[2], data=bytes(8))  # type: ignore[arg-type]
    assert refusal(tensor, "<f4", (2,)).name == "WRONG_SHAPE"


def test_an_empty_message_is_no_array() -> None:
    assert "no type () in 0 bytes" in refusal(Tensor(), "<f4", (None,)).message


@given(st.data(), st.sampled_from(("<f4", "<f8")), st.sampled_from((np.nan, np.inf, -np.inf)))
def test_one_value_that_is_not_finite_is_enough(data: st.DataObject, dtype: str, bad: float) -> None:
    shape = data.draw(arrays.array_shapes(max_dims=3, max_side=4))
    array = np.zeros(shape, dtype)
    array.flat[data.draw(st.integers(0, array.size - 1))] = bad
    refused = refusal(to_wire(array), dtype, shape)
    assert refused.name == "NOT_FINITE"


IDS = st.lists(st.integers(0, 40), max_size=8)


@given(IDS, st.integers(0, 42))
def test_ids_are_taken_when_they_rise_and_stay_below_the_limit(ids: list[int], limit: int) -> None:
    tensor = to_wire(np.array(ids, np.uint32))
    unknown = ErrorReason.ERROR_REASON_UNKNOWN_ITEM
    if ids != sorted(set(ids)):
        expected = "INVALID_FIELD"
    elif ids and ids[-1] >= limit:
        expected = "UNKNOWN_ITEM"
    else:
        assert increasing_ids(tensor, limit, field="ids", unknown=unknown).tolist() == ids
        return
    with pytest.raises(Refusal) as refused:
        increasing_ids(tensor, limit, field="ids", unknown=unknown)
    assert (refused.value.name, refused.value.field) == (expected, "ids")
    assert str(limit) in refused.value.expected


def test_without_another_reason_an_unknown_id_is_an_invalid_field() -> None:
    with pytest.raises(Refusal) as refused:
        increasing_ids(to_wire(np.array([2**32 - 1], np.uint32)), 10, field="ids")
    assert refused.value.name == "INVALID_FIELD"


@pytest.mark.parametrize(
    "array", [np.zeros((2, 1), np.uint32), np.zeros(2, np.float32), np.zeros(2, np.uint8)]
)
def test_ids_are_a_list_of_unsigned_integers(array: np.ndarray) -> None:
    with pytest.raises(Refusal) as refused:
        increasing_ids(to_wire(array), 10, field="ids")
    assert refused.value.name == "WRONG_SHAPE"
