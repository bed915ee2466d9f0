"""Receipts say of each contribution how it was protected, for every secure sum that there is."""

import pytest
from coterie_client.agent import PROTECTIONS
from coterie_client.receipts import CONTRIBUTIONS

from coterie.secure_sum.registry import SUMS


@pytest.mark.parametrize("secure_sum", SUMS)
@pytest.mark.parametrize("what", CONTRIBUTIONS.values())
def test_a_receipt_says_how_each_contribution_was_protected(what, secure_sum):
    words = PROTECTIONS[f"{what} ({secure_sum})"]
    assert ("clear" in words) == (secure_sum in ("clear", "denoised"))
    assert ("noise" in words) == (secure_sum == "denoised")
