"""The Prometheus metrics of a segment that both the backend and `shmcache-inspect metrics` tell: name, help text."""

from __future__ import annotations

COUNTERS = {
    "hits": "Keys found by lookup and get.",
    "misses": "Keys not found by lookup and get.",
    "stores": "Chunks that became complete.",
    "duplicates": "Puts that found their part there.",
    "evictions": "Chunks evicted to make room.",
    "eviction_failures": "Allocations that found nothing to evict.",
    "aborts": "Blocks given up before they were published.",
    "reaps": "Dead attachments cleared away.",
    "waits": "Waits for memory or for a publication.",
    "stale_puts": "Puts whose namespace was bumped since the allocation.",
    "holds_full": "Holds refused because their table was full.",
    "leases_ended": "Pins that ended by themselves.",
}
LOCK_COUNTERS = {
    "acquisitions": "Times the lock was taken.",
    "contended": "Times the lock was not free at once.",
    "recoveries": "Times a holder died inside and was rolled back.",
}
BYTES = "Bytes of the arena: capacity, ready, used, free, largest_free, evictable, pinned."
COUNTS = "How many there are now: chunks, complete, parts, blocks, holds, namespaces."
LONGEST_HOLD = "The longest hold of those that were timed."
