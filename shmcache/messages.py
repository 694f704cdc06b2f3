"""What was admitted and evicted, sent in batches to whoever keeps track (LMCache's controller).

    the segment's event ring -> SegmentMessages -> BatchedMessageSender -> worker.put_msg(message)

The ring has what all processes of the host did, in order. One of them sends it, once for the segment
and not once for each rank; when that one dies another goes on, and sends the last events again, since
it cannot know which have arrived: the same operations in the same order lead to the same state.
"""

from __future__ import annotations

import enum
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._election import Election
from ._threads import Flag, start
from .errors import SegmentClosedError, ShmCacheError

if TYPE_CHECKING:
    from .cache import SharedCache

__all__ = ["BatchedKVOperationMsg", "BatchedMessageSender", "KVOpEvent", "OpType", "SegmentMessages"]

_log = logging.getLogger("shmcache")
_MOST_WAITING = 1 << 20  # operations; beyond, the oldest are dropped, which the sequence numbers show
_RETRY_FIRST, _RETRY_LAST = 0.05, 5.0  # seconds after a failure
_SENT_AGAIN = 4096  # events, by whoever takes over
_FLUSH_POLL = 0.001  # seconds
_ASK_EVERY = 0.5  # seconds between two tries to be the one that sends


class OpType(enum.Enum):
    ADMIT = "admit"
    EVICT = "evict"


@dataclass(slots=True)
class KVOpEvent:
    """One operation; `seq_num` grows by one."""

    op_type: Any
    key: Any  # chunk hash
    seq_num: int


@dataclass(slots=True)
class BatchedKVOperationMsg:
    """Operations in order, with what they share."""

    instance_id: str
    worker_id: int
    location: str
    operations: list[Any]


class BatchedMessageSender:
    """Collects operations and hands them on in batches, in order, from a thread of its own.

    A batch goes when it is full (`extra_config["kv_msg_batch_size"]`, 50) or its first operation is
    `kv_msg_batch_timeout` (0.01 s) old. A sink that raises is logged and tried again with the same
    batch.

    Parameters
    ----------
    lmcache_worker
        has `put_msg(message)`.
    make_op, make_message, op_types
        classes of the messages; by default ours, which look like LMCache's.
    """

    def __init__(
        self, metadata: Any, config: Any, location: str, lmcache_worker: Any, *,
        make_op: Callable[..., Any] = KVOpEvent, make_message: Callable[..., Any] = BatchedKVOperationMsg,
        op_types: Any = OpType,
    ) -> None:  # fmt: skip
        self.batch_size = int(config.get_extra_config_value("kv_msg_batch_size", 50))
        self.batch_timeout = float(config.get_extra_config_value("kv_msg_batch_timeout", 0.01))
        if self.batch_size < 1 or self.batch_timeout <= 0:
            raise ValueError(f"kv_msg_batch_size is {self.batch_size}, kv_msg_batch_timeout {self.batch_timeout}: "
                             "at least 1, and more than 0 seconds")  # fmt: skip
        self.op_types = op_types
        self._worker = lmcache_worker
        self._make_op = make_op
        self._message = functools.partial(
            make_message, instance_id=config.lmcache_instance_id, worker_id=metadata.worker_id, location=location
        )
        self._waiting: deque[Any] = deque()
        self._pid = os.getpid()
        self._next_seq = 0
        self._sending = 0
        self._flushers = 0
        self._running = True
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # only the thread waits for it: see _threads.py
        self._thread = threading.Thread(target=self._run, name="shmcache-messages", daemon=True)
        start(self._thread)

    def add_kv_op(self, op_type: Any, key: Any) -> None:
        """One more operation. Never blocks on the sink. In a forked child it is nobody's to hand on."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._waiting.append(self._make_op(op_type=op_type, key=key, seq_num=self._next_seq))
            self._next_seq += 1
            if len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
            if len(self._waiting) in (1, self.batch_size):
                self._changed.notify_all()

    def qsize(self) -> int:
        """Operations not handed on yet."""
        return len(self._waiting) + self._sending

    def flush(self, timeout: float = 5.0) -> bool:
        """Hand on what is waiting; False when the sink did not take it within `timeout` seconds.

        In a forked child there is nothing to hand on: the parent does.
        """
        if os.getpid() != self._pid:
            return True
        end = time.monotonic() + timeout
        with self._lock:
            self._flushers += 1
            self._changed.notify_all()
        try:
            while not self._idle():
                if time.monotonic() >= end:
                    return False
                time.sleep(_FLUSH_POLL)
            return True
        finally:
            with self._lock:
                self._flushers -= 1

    def _idle(self) -> bool:
        with self._lock:
            return not self._waiting and not self._sending

    def close(self, timeout: float = 5.0) -> None:
        """`flush`, then end the thread; what could not be handed on is logged and dropped."""
        if not self._running or os.getpid() != self._pid:
            return
        if not self.flush(timeout):
            _log.warning("%d messages were not sent: the sink did not take them within %g s", self.qsize(), timeout)
        with self._lock:
            self._running = False
            self._changed.notify_all()
        self._thread.join(1.0)

    def _batch(self) -> list[Any]:
        """The next batch, once it is due; empty: the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._running)
            self._changed.wait_for(
                lambda: len(self._waiting) >= self.batch_size or self._flushers or not self._running,
                self.batch_timeout,
            )
            n = min(len(self._waiting), self.batch_size) if self._running else 0
            batch = [self._waiting.popleft() for _ in range(n)]
            self._sending = len(batch)
            return batch

    def _run(self) -> None:
        while batch := self._batch():
            pause = _RETRY_FIRST
            while self._running:
                try:
                    self._worker.put_msg(self._message(operations=batch))
                    break
                except Exception:
                    if pause == _RETRY_FIRST:  # once for each batch
                        _log.warning("a message of %d operations is tried again", len(batch), exc_info=True)
                with self._changed:
                    self._changed.wait_for(lambda: not self._running, pause)
                pause = min(2 * pause, _RETRY_LAST)
            with self._lock:
                self._sending = 0


class SegmentMessages(BatchedMessageSender):
    """A `BatchedMessageSender` of what happens in a segment to chunks of some namespaces.

    Parameters
    ----------
    cache
        whose events.
    is_ours
        says of a namespace, by name, whether its events are to be sent.
    chunks
        gives the hashes of all complete chunks: announced by who comes first, since a warm segment has
        some, and when events were overwritten before they were sent.
    topic
        processes with the same topic elect one that sends.
    """

    def __init__(
        self, metadata: Any, config: Any, location: str, lmcache_worker: Any, cache: SharedCache,
        is_ours: Callable[[str], bool], chunks: Callable[[], Iterable[Any]], topic: str, **classes: Any,
    ) -> None:  # fmt: skip
        self._cache = cache
        self._is_ours = is_ours
        self._chunks = chunks
        mapping = cache._attached().mapping
        self._election = Election(mapping, topic) if hasattr(mapping, "inode") else None
        self._elected = self._election is None or self._election.won()
        self._next = cache.events().next  # what came before is known, or is another's to send
        known = list(chunks()) if self._elected else []
        super().__init__(metadata, config, location, lmcache_worker, **classes)  # a thread: after all that may fail
        self._announce(known)
        self._ask_at = 0.0
        self._polling = threading.Lock()
        self._ended = Flag()
        self._poller = threading.Thread(target=self._follow, name="shmcache-events", daemon=True)
        start(self._poller)

    def _follow(self) -> None:
        pause = self.batch_timeout
        while not self._ended.wait(pause):
            try:
                self._poll()
                pause = self.batch_timeout
            except SegmentClosedError:
                break
            except Exception as e:  # this thread ends with the backend, and with nothing else
                if pause == self.batch_timeout:
                    _log.warning("messages of %s wait: %r", self._cache.name, e)
                pause = _RETRY_LAST

    def _announce(self, chunks: Iterable[Any]) -> None:
        for chunk in chunks:
            self.add_kv_op(self.op_types.ADMIT, chunk)

    def _poll(self, timeout: float = -1) -> None:
        """Hand on what has happened since, when it is ours to do so; not while another thread does, after `timeout`."""
        if not self._polling.acquire(timeout=timeout):
            return
        try:
            takes_over = not self._elected
            if takes_over and not self._win():
                return
            events = self._cache.events(self._next)
            if events.lost and not takes_over:
                _log.warning("%d events of %s were overwritten before they were sent: all its keys are announced again",
                             events.lost, self._cache.name)  # fmt: skip
                self._announce(self._chunks())
            self._next = events.next
            for e in events:
                if e.complete and self._is_ours(e.namespace):
                    kind = self.op_types.ADMIT if e.kind == "admit" else self.op_types.EVICT
                    self.add_kv_op(kind, e.key)
        finally:
            self._polling.release()

    def _win(self) -> bool:
        now = time.monotonic()
        if now < self._ask_at:
            return False
        self._ask_at = now + _ASK_EVERY
        assert self._election is not None  # else it is elected
        self._elected = self._election.won()
        if self._elected:  # also what happened before this process was there: who was to send it may have not
            self._next = max(0, self._cache.events(self._next).next - _SENT_AGAIN)
        return self._elected

    def flush(self, timeout: float = 5.0) -> bool:
        """Also what has just happened; where the segment fails, which is logged, what was known before."""
        if not self._ended.is_set() and not self._cache.closed and os.getpid() == self._pid:
            try:
                self._poll(min(max(0.0, timeout), threading.TIMEOUT_MAX))
            except (ShmCacheError, OSError) as e:
                _log.warning("messages of %s: what has just happened is not known: %s", self._cache.name, e)
        return super().flush(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """See `BatchedMessageSender.close`; another process goes on."""
        if os.getpid() != self._pid:
            return
        super().close(timeout)
        self._ended.set()
        self._poller.join(1.0)
        if self._election is not None:
            self._election.close()
