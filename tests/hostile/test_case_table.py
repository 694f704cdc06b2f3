"""Every public fault report that we know of has a test that exists, or a reason why it cannot have one here."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "cases.md").read_text()
ROWS = re.findall(r"^- (B\d+) \([^ ]+#\d+\): (.+)$", TABLE, re.MULTILINE)
OF_NO_REPORT = {12, 14, 15, 18, 20, 24, 31, 32, 36, 42, 48, 56, 57, 64, 73, 80, 82, 87, 96, 103, 107, 111, 6}
FIRST, LAST = 2, 119
NAMED = re.compile(r"\bB\d+\b")


@cache
def functions(file: Path) -> dict[str, str]:
    """Its tests and their docstrings."""
    found = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) or "" for node in found}


@cache
def promises() -> set[str]:
    texts = [path.read_text() for path in (TESTS / "crash").glob("unit_*.c")]
    return {found for text in texts for found in re.findall(r'^    \{"([^"]+)", \w+\},$', text, re.MULTILINE)}


@pytest.mark.parametrize(("case", "answer"), ROWS, ids=[case for case, _ in ROWS])
def test_the_tests_of_a_report_exist(case: str, answer: str) -> None:
    tests = re.findall(r"`([^`]+)`", answer)
    assert bool(tests) != answer.startswith("no test: "), "a test, or a reason why there is none"
    for test in tests:
        file, _, name = test.partition("::")
        if test.startswith("C: "):
            assert test.removeprefix("C: ") in promises(), test
        else:
            assert (TESTS / file).is_file() and name in functions(TESTS / file), test


def test_every_report_is_in_the_table_once() -> None:
    assert [int(case[1:]) for case, _ in ROWS] == sorted(set(range(FIRST, LAST + 1)) - OF_NO_REPORT)
    assert re.findall(r"^## (K\d+) ", TABLE, re.MULTILINE) == [f"K{n}" for n in range(1, 19)]


def test_a_test_that_names_a_report_is_in_its_row() -> None:
    rows = dict(ROWS)
    missing = [
        f"{case}: {file.name}::{name}"
        for file in Path(__file__).parent.glob("test_*.py")
        for name, text in functions(file).items()
        for case in NAMED.findall(text)
        if f"{file.name}::{name}`" not in rows.get(case, "")
    ]
    assert not missing, missing
