"""The protocols as models, searched exhaustively within bounds by SPIN; and that the models can fail.

Each .pml file says which functions its steps stand for. A model proves nothing about code that has
moved away from it, so a change of a protocol changes its model. Without spin on the machine these
tests are skipped: tools/run-tests installs Python packages only.

A step of a model is seen by all at once and in order; an aarch64 does not promise that. ORDER below says for each
kind of sharing what in the code makes up for it, or why nothing has to.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODELS = ["handshake", "lock_journal", "reap_quarantine", "waiting"]
SECONDS = 100  # each takes a few; a busy machine some more
MEMORY_MB = 1000

# What the models take for granted, and where the code says so: (what is shared how, file, line of code).
ORDER = [
    ("what the lock protects: its acquire and release", "core/lock.c", "pthread_mutex_unlock(&h->lock);"),
    # A dead owner's stores come before the kernel's compare-and-exchange of the futex word in the thread's exit, a full
    # barrier, and that before the next owner's acquire. What a death leaves is a prefix of them in program order,
    # which the compiler must keep, and need not have reached anybody before the exit.
    ("one thread's stores, up to its death", "core/journal.h", "FENCE() __atomic_signal_fence(__ATOMIC_SEQ_CST)"),
    ("seq is odd before any store of a transaction", "core/journal.c", "__atomic_thread_fence(__ATOMIC_RELEASE);"),
    ("and even after all of them", "core/journal.c", "__atomic_store_n(&h->seq, (h->seq | 1) + 1, __ATOMIC_RELEASE);"),
    ("a reader's loads come after its first look at it", "core/types.h", "__atomic_load_n(&h->seq, __ATOMIC_ACQUIRE)"),
    ("and before its second", "core/types.h", "__atomic_thread_fence(__ATOMIC_ACQUIRE);"),
    ("an event is complete before it is published", "core/journal.c",
     "__atomic_store_n(&h->event_published, h->event_head, __ATOMIC_RELEASE);"),
    ("and read after that", "core/snapshot.c", "__atomic_load_n(&h->event_published, __ATOMIC_ACQUIRE)"),
    ("an old event is marked before it is overwritten", "core/events.c", "__atomic_thread_fence(__ATOMIC_RELEASE);"),
    # A slot read without the lock may be half of one owner's and half of the next one's on any machine: in the
    # model (HALF_READ) its words are read one by one, and what the judgement rests on is compared again under the lock.
    ("a slot that is judged", "core/attach.c",
     "judged->state == SHMC_SLOT_REAPING && s->state != SHMC_SLOT_REAPING"),
    # Waiter flags and tickets are stored under the lock; the futex call compares its word behind a barrier of its own.
    ("a waiter's ticket", "api_memory.c", "*ticket = __atomic_load_n(&c->hdr->wake[which], __ATOMIC_RELAXED);"),
    ("a call against close: each sees the other", "api.c", "__atomic_fetch_add(&h->inflight, 1, __ATOMIC_SEQ_CST);"),
    ("close against a call", "api.c", "__atomic_exchange_n(&h->state, HANDLE_CLOSED, __ATOMIC_SEQ_CST)"),
    # Between processes that open or remove, the kernel's file locks are barriers; whoever only looks needs this pair.
    ("a segment is whole before it is READY", "core/format.c",
     "__atomic_store_n(&((struct header *)base)->state, state, __ATOMIC_RELEASE);"),
    ("and looked at after that", "core/format.c", "__atomic_load_n(&h->state, __ATOMIC_ACQUIRE);"),
    ("the fork detector's page before its address", "os/linux.c", "__atomic_store_n(&word, p, __ATOMIC_RELEASE);"),
]  # fmt: skip

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None, reason="spin, the model checker, is not installed (Debian: apt-get install spin)"
)

# Bounds under which nothing may be found.
HOLDS = [
    "lock_journal",
    "reap_quarantine",
    "reap_quarantine WRONG_JUDGEMENT DEATHS=0",
    "reap_quarantine HALF_READ DEATHS=1",
    "waiting DEATHS=0 NO_SLICE",
    "waiting LIVENESS",
    "waiting LIVENESS STOPS=1 SLICES=2",
    "waiting DEATHS=1 STOPS=1 SLICES=2",
    "handshake OPENERS=3 STOPS=1",
    "handshake UNLINKERS=2 FORCED=1 STOPS=1",
    "handshake EPHEMERAL STOPS=1",
    "handshake NAMESPACES STOPS=1",
]
HOLDS_LONGER = [
    "reap_quarantine DEATHS=3",
    "reap_quarantine HALF_READ",
    "reap_quarantine WRONG_JUDGEMENT DEATHS=1",
    "handshake NAMESPACES OPENERS=3 STOPS=1",
]

# No run is endless, whoever is favoured: with that and no invalid end state everybody ends.
ENDS = ["waiting DEATHS=1 STOPS=1 SLICES=2", "handshake STOPS=1", "handshake EPHEMERAL NAMESPACES"]
ENDS_LONGER = ["lock_journal DEATHS=1", "reap_quarantine DEATHS=1"]

ASSERTION, STUCK, FOR_EVER = "assertion violated", "invalid end state", "acceptance cycle"
FAULTS = {
    "lock_journal BUG_CLEAR_BEFORE_RESTORE": ASSERTION,
    "lock_journal BUG_COUNT_BEFORE_RECORD": ASSERTION,
    "lock_journal BUG_NO_JOURNAL": ASSERTION,
    "lock_journal BUG_NO_RECOVERY": ASSERTION,
    "lock_journal BUG_OLDEST_FIRST": ASSERTION,
    "lock_journal BUG_PLAIN_MUTEX": ASSERTION,
    "lock_journal BUG_PUBLISH_BEFORE_COMMIT": ASSERTION,
    "lock_journal BUG_SEQ_STAYS_EVEN": ASSERTION,
    "lock_journal BUG_STEAL": ASSERTION,
    "lock_journal BUG_STORE_BEFORE_COUNT": ASSERTION,
    "reap_quarantine BUG_GENERATION_ALONE DEATHS=1": ASSERTION,
    "reap_quarantine BUG_HALF_REAPED_IS_LEFT": ASSERTION,
    "reap_quarantine BUG_LEAVING_OF_ANY_TIME DEATHS=0": ASSERTION,
    "reap_quarantine BUG_NO_FENCE WRONG_JUDGEMENT": ASSERTION,
    "reap_quarantine BUG_NO_QUARANTINE": ASSERTION,
    "reap_quarantine BUG_NOTE_GOES_BACK DEATHS=0": ASSERTION,
    "reap_quarantine BUG_REAP_IN_RECOVERY": ASSERTION,
    "reap_quarantine BUG_SLOT_FIRST": ASSERTION,
    "reap_quarantine BUG_STATE_NOT_COMPARED HALF_READ DEATHS=1": ASSERTION,
    "waiting BUG_TICKET_OUTSIDE DEATHS=0 NO_SLICE": STUCK,
    "waiting BUG_WAKES_ONE DEATHS=0 NO_SLICE": STUCK,
    "waiting NO_SLICE": STUCK,  # a dead waker: why there are slices
    "waiting BUG_NO_LOCK_TIMEOUT DEATHS=0 STOPS=1 SLICES=2": STUCK,
    "waiting BUG_NO_REAP LIVENESS": FOR_EVER,
    "waiting LIVENESS STOPS=1": FOR_EVER,  # a stopped holder: why there are deadlines
    "handshake BUG_CONTROL_FILE_FIRST": ASSERTION,
    "handshake BUG_LAST_ONE_DOES_NOT_LOOK EPHEMERAL": ASSERTION,
    "handshake BUG_NAME_NOT_COMPARED": ASSERTION,
    "handshake BUG_NAMESPACE_FIRST NAMESPACES": ASSERTION,
    "handshake BUG_PRESENCE_AFTER_HANDSHAKE": ASSERTION,
    "handshake BUG_READY_TOO_EARLY": ASSERTION,
    "handshake BUG_REMOVAL_IS_NOT_NOTED": ASSERTION,
    "handshake BUG_STUB_IS_TAKEN_FOR_READY": ASSERTION,
    "handshake BUG_TAKEOVER_UNPROVEN NAMESPACES": ASSERTION,
    "handshake BUG_WAITS_FOR_EVER DEATHS=0 STOPS=1": STUCK,
}


def compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    pytest.skip("no C compiler for the verifier that spin writes")


def call(command: list[str], folder: Path) -> str:
    limit = str((MEMORY_MB + 500) << 10)  # KiB; its own limit comes first
    command = ["sh", "-c", 'ulimit -v "$0" && exec "$@"', limit, *command]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def slow(cases: list[str]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def search(folder: Path, case: str, optimise: str, *, cycles: bool = False) -> tuple[int, str]:
    """Number of errors, and all that the verifier said, of a model under some definitions."""
    model, *defines = case.split()
    live = "LIVENESS" in defines
    said = call(["spin", *(f"-D{d}" for d in defines), "-a", str(HERE / f"{model}.pml")], folder)
    assert "error" not in said.lower(), said
    kind, how = ("-DNFAIR=3", ["-a", "-f"]) if live else ("-DNP", ["-l"]) if cycles else ("-DSAFETY", [])
    call([compiler(), optimise, "-w", kind, "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}", "-o", "pan", "pan.c"], folder)
    said = call(["./pan", "-m100000", *how], folder)
    errors = re.search(r"errors: (\d+)", said)
    assert errors, said
    return int(errors[1]), said


HOW: dict[str, dict[str, Any]] = {
    "test_the_protocol_holds": {"optimise": "-O2"},
    "test_no_run_is_endless": {"optimise": "-O2", "cycles": True},
    "test_a_seeded_fault_is_found": {"optimise": "-O0"},
}


@pytest.fixture(scope="module")
def searches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Of each test of HOW that will run, by its name; as many at a time as there are CPUs, in their order."""
    pool = ThreadPoolExecutor(os.cpu_count())
    yield {
        item.name: pool.submit(
            search, tmp_path_factory.mktemp("model"), item.callspec.params["case"], **HOW[item.originalname]
        )
        for item in request.session.items
        if item.path == request.path and item.originalname in HOW
    }
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def searched(request: pytest.FixtureRequest, searches: dict[str, Future]) -> tuple[int, str]:
    return searches[request.node.name].result(SECONDS)


@needs_spin
@pytest.mark.parametrize("case", [*HOLDS, *slow(HOLDS_LONGER)])
def test_the_protocol_holds(searched: tuple[int, str], case: str) -> None:
    finds_nothing(*searched)


@needs_spin
@pytest.mark.parametrize("case", [*ENDS, *slow(ENDS_LONGER)])
def test_no_run_is_endless(searched: tuple[int, str], case: str) -> None:
    finds_nothing(*searched)


def finds_nothing(errors: int, said: str) -> None:
    print(*re.findall(r"\d+ states, (?:stored|visited)", said))
    assert errors == 0, said
    assert "not completed" not in said and "too small" not in said, "a bound cut the search short:\n" + said


@needs_spin
def test_a_run_that_may_be_endless_is_found(tmp_path: Path) -> None:
    """Waiters that look around, slice after slice, without a deadline."""
    errors, said = search(tmp_path, "waiting DEATHS=0", "-O0", cycles=True)
    assert errors == 1 and "non-progress cycle" in said, said


@needs_spin
@pytest.mark.parametrize("case", FAULTS)
def test_a_seeded_fault_is_found(searched: tuple[int, str], case: str) -> None:
    errors, said = searched
    assert errors == 1 and FAULTS[case] in said, said


@pytest.mark.parametrize("model", MODELS)
def test_every_fault_that_a_model_knows_is_seeded(model: str) -> None:
    known = set(re.findall(r"ifn?def (BUG_\w+)", (HERE / f"{model}.pml").read_text()))
    seeded = {word for case in FAULTS for word in case.split() if case.startswith(model) and word.startswith("BUG_")}
    assert known == seeded


@pytest.mark.parametrize("model", MODELS)
def test_the_functions_that_a_model_stands_for_exist(model: str) -> None:
    header = (HERE / f"{model}.pml").read_text().split("*/")[0]
    found = 0
    for path, names in re.findall(r"([\w/]+\.(?:c|h|py)) ([^\n;]*)", header):
        (source,) = [p for top in ("native", "shmcache") for p in [ROOT / top / path] if p.exists()]
        text = source.read_text()
        for name in re.findall(r"\b[a-z]+_[a-z_]+\b|\b[A-Z]\w+\.\w+", re.split(r"[\w/]+\.(?:c|h|py)\b", names)[0]):
            found += 1
            assert name.split(".")[-1] in text, f"{path} has no {name}"
    assert found >= 5


@pytest.mark.parametrize(("what", "file", "code"), ORDER, ids=[what for what, _, _ in ORDER])
def test_the_order_that_the_models_assume_is_in_the_code(what: str, file: str, code: str) -> None:
    assert code in (ROOT / "native" / file).read_text(), f"{what}: say where it is now, and why that is enough"
