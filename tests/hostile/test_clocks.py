"""Only clocks that never step decide anything: a wall clock that jumps changes no wait, lease or order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Where the wall clock may be read: what is shown to people, never compared.
WALL = {"native/os/linux.c": "os_realtime_ns", "native/core/format.c": "created_ns", "shmcache/inspect": "time.time()"}

SHIFTED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
/* A wall clock that stands at another time each time the file is there or not. */
static time_t shift(void) { return access(getenv("STEP"), F_OK) ? 0 : atoi(getenv("BY")); }
int clock_gettime(clockid_t id, struct timespec *t)
{
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real(id, t);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec += shift();
    return rc;
}
time_t time(time_t *out)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}
int gettimeofday(struct timeval *t, void *zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""

WAITS = """
import os, sys, threading, time
sys.path.insert(0, {procs!r})
from hostile import hold_lock, await_holder, join, small, store
import shmcache
name, step = {name!r}, os.environ["STEP"]

def stepped(what, expected):
    with open(step, "w"):
        pass
    before = time.time()
    os.unlink(step)
    assert abs(time.time() - before) > 3000, "the clock is not stepped: the test tests nothing"
    threading.Timer(0.2, lambda: open(step, "w").close()).start()
    start = time.monotonic()
    what()
    took = time.monotonic() - start
    os.unlink(step)
    assert expected <= took < expected + 5, took

cache = small(name, 1 << 20, lock_timeout=1.0)
held = [cache.allocate(1 << 18) for _ in range(4)]
def full():
    assert cache.allocate(1 << 18, timeout=1.0) is None
stepped(full, 1.0)
for obj in held[:2]:
    obj.release()
r = cache.reserve("r", 1000)
def pending():
    other = cache.reserve("r", 1000)
    assert other.state == "PENDING" and other.wait(1.0) is None
stepped(pending, 1.0)
r.release()
pid = os.fork()
if pid == 0:
    with join(name) as mine:
        hold_lock(mine, 60 * 10**9)
    os._exit(0)
await_holder(cache, pid)
def locked():
    try:
        cache.contains("k")
    except shmcache.LockTimeoutError:
        return
    raise SystemExit("the lock was had")
stepped(locked, 1.0)
os.kill(pid, 9)
os.waitpid(pid, 0)

# order and leases
store(cache, "old"), store(cache, "new")
lookup = cache.lookup(["old"], pin=True, lease=3600.0, touch=False)
open(step, "w").close()
store(cache, "newest")
assert cache.default.keys() == ["old", "new", "newest"]
held += [cache.allocate(1 << 17, timeout=0.2)]
assert cache.stats().bytes.pinned > 0, "a lease ended by a step of the wall clock"
lookup.release()
os.unlink(step)
assert cache.verify() == []
cache.unlink()
cache.close()
"""


def lines_with(pattern: str) -> list[tuple[str, str]]:
    files = [*(ROOT / "shmcache").rglob("*.py"), *(ROOT / "native").rglob("*.[ch]")]
    return [
        (str(f.relative_to(ROOT)), line.strip())
        for f in files
        for line in f.read_text().splitlines()
        if re.search(pattern, line)
    ]


def test_the_wall_clock_is_read_for_people_only():
    """B55: every place that reads it is one of those that only show it."""
    pattern = r"time\.time\(|time_ns\(\)|datetime|CLOCK_REALTIME|gettimeofday|os_realtime_ns|[^.\w]time\(NULL"
    strangers = [
        (file, line)
        for file, line in lines_with(pattern)
        if not any(file.startswith(where) and (what in line or "REALTIME" in line) for where, what in WALL.items())
        and not (file == "native/os/linux.h" and "os_realtime_ns(void)" in line)
    ]
    assert not strangers, strangers


def test_timed_waits_of_the_core_say_which_clock():
    """B55: libc's timed waits without a clock's name use the one that steps."""
    timed = lines_with(r"pthread_\w*timed|sem_timedwait|pthread_\w*clocklock|FUTEX_WAIT|FUTEX_CLOCK_REALTIME")
    bad = [x for x in timed if "CLOCK_REALTIME" in x[1] or ("timed" in x[1] and "clocklock" not in x[1])]
    assert timed and not bad, bad
    locks = [line for _, line in timed if "clocklock(" in line]
    assert locks and all("CLOCK_MONOTONIC" in line for line in locks), locks


@pytest.mark.parametrize("by", [-3600, 3600])
def test_waits_leases_and_order_do_not_see_the_wall_clock_step(name, tmp_path, by):
    """B55: an hour back and forth, in the middle of each kind of wait."""
    cc = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if cc is None:
        pytest.skip("no C compiler for the clock that steps")
    (tmp_path / "clock.c").write_text(SHIFTED)
    library = tmp_path / "clock.so"
    subprocess.run([cc, "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True, timeout=60)
    env = {**os.environ, "LD_PRELOAD": str(library), "STEP": str(tmp_path / "step"), "BY": str(by)}
    code = WAITS.format(procs=str(ROOT / "tests" / "procs"), name=name)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
