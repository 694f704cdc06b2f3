"""Every promise has its test, and every difference is one that a test asserts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from contract_differences import DIFFERENCES

TESTS = "\n".join(p.read_text() for p in sorted(Path(__file__).parent.glob("test_*.py")) if p != Path(__file__))

# T-L31 is obsolete, T-L18 and T-P3 stand in their later forms
PROMISES = {
    "L": [str(n) for n in range(1, 31)], "A": [str(n) for n in range(1, 8)], "M": [str(n) for n in range(1, 12)],
    "P": [str(n) for n in range(1, 6)], "S": [str(n) for n in range(1, 9)], "N": [""], "K": [""],
}  # fmt: skip


@pytest.mark.parametrize("promise", [f"T_{kind}{n}" for kind, numbers in PROMISES.items() for n in numbers])
def test_each_promise_has_a_test(promise: str) -> None:
    assert re.search(rf"def test_{promise}_\w+", TESTS)


def test_each_difference_is_asserted() -> None:
    asserted = set(re.findall(r'expected\(\s*\w+,\s*"([^"]+)"', TESTS))
    assert asserted == set(DIFFERENCES)
