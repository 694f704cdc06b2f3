"""Every store to shared memory in the C core goes through the journal, or says beside it why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
FILES = sorted([*NATIVE.glob("core/*.c"), *NATIVE.glob("core/*.h"), *NATIVE.glob("*.c"), *NATIVE.glob("*.h")])
JOURNAL = {"journal.c", "journal.h"}  # the journal's own stores, in the order that journal.h argues for
TABLES = ["attach.c", "chunks.c", "events.c", "extents.c", "holds.c", "index.c", "namespaces.c", "policy.c"]

ASSIGN = re.compile(r"->[\w.\[\]]+\s*(?:[-+|&^]?=(?!=)|\+\+|--)")
HEADER = re.compile(r"(?:hdr|h->core\.hdr|c->hdr)->[\w.\[\]]+\s*(?:[-+|&^]?=(?!=)|\+\+|--)")
COPY = re.compile(r"\b(?:memcpy|memset|store_words)\(\s*(?:\([^)]*\)\s*)?(?:[a-z]->|c->hdr)")
PRIVATE = re.compile(r"(?:report|c)->(?:slots|holds|blocks|wake|frees|items|words|bad|tx_op)\b\s*(?:\+\+|\|?=)")
DECLARES = re.compile(r"^\s*(?:const |uint|struct |bool |enum )")


def lines(path: Path) -> list[tuple[int, str, str]]:
    """(number, line, code without its comment)"""
    return [(n, line, line.split("/*")[0]) for n, line in enumerate(path.read_text().splitlines(), 1)]


def test_plain_stores_carry_their_reason() -> None:
    silent = [
        f"{path.name}:{n}: {line.strip()}"
        for path in FILES
        if path.name not in JOURNAL
        for n, line, code in lines(path)
        if "PUT(" in code and "unlogged" not in line
    ]
    assert not silent, "\n".join(silent)


@pytest.mark.parametrize("file", TABLES)
def test_tables_are_changed_through_the_journal(file: str) -> None:
    raw = [
        f"{file}:{n}: {line.strip()}"
        for n, line, code in lines(NATIVE / "core" / file)
        if (ASSIGN.search(code) or COPY.search(code))
        and not DECLARES.match(code)
        and not PRIVATE.search(code)
        and "unlogged" not in line
    ]
    assert not raw, "\n".join(raw)


def test_the_api_changes_no_header_field_silently() -> None:
    raw = [
        f"{path.name}:{n}: {line.strip()}"
        for path in NATIVE.glob("*.c")
        for n, line, code in lines(path)
        if HEADER.search(code) and not DECLARES.match(code) and "unlogged" not in line
    ]
    assert not raw, "\n".join(raw)


@pytest.mark.parametrize("code", ["    k->held = 3;", "    chunk_at(c, i)->held++;", "    hdr->used |= 1;"])
def test_the_lint_sees_a_raw_store(code: str) -> None:
    assert ASSIGN.search(code) and not PRIVATE.search(code)
    assert COPY.search("memcpy(k->key, key, 3);") and COPY.search("store_words(k->key, padded, 64);")
