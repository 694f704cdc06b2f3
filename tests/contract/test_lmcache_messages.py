"""What LMCache promises of its BatchedMessageSender (T-S), for both makers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contract_differences import expected
from contract_kits import Kit, Sink, eventually, in_threads

from shmcache.messages import BatchedMessageSender, OpType

Make = Callable[..., Any]


@pytest.fixture
def make(maker: Any) -> Iterator[Make]:
    """make(sink, batch, timeout) -> sender, closed at the end unless `closed` was set on it."""
    kit = maker.kit("", "")
    senders: list[Any] = []

    def sender(sink: Sink, batch: int = 50, timeout: float = 0.01) -> Any:
        extra = {"kv_msg_batch_size": batch, "kv_msg_batch_timeout": timeout}
        senders.append(maker.Sender(kit.metadata(), kit.config(extra_config=extra), "LocalCPUBackend", sink))
        return senders[-1]

    yield sender
    for one in senders:
        if not getattr(one, "is_closed", False):
            one.close()


def close(sender: Any) -> None:
    sender.close()
    sender.is_closed = True


def numbers(sink: Sink) -> list[int]:
    return [op.seq_num for op in sink.operations]


def test_T_S1_a_full_batch_goes_at_once(maker: Any, make: Make) -> None:
    """Two operations wait, the third sends all three in one message."""
    sink = Sink()
    sender = make(sink, 3, 3.0)
    time.sleep(0.05)  # LMCache's thread has to be waiting to be woken
    sender.add_kv_op(maker.OpType.ADMIT, 1)
    sender.add_kv_op(maker.OpType.ADMIT, 2)
    assert not sink.wait(1, 0.1)
    sender.add_kv_op(maker.OpType.EVICT, 1)
    assert sink.wait(3)
    (message,) = sink.messages
    assert isinstance(message, maker.Message) and len(message.operations) == 3
    assert (message.instance_id, message.worker_id, message.location) == ("test_instance", 0, "LocalCPUBackend")


def test_T_S2_a_partial_batch_goes_when_its_time_is_up(maker: Any, make: Make) -> None:
    sink = Sink()
    sender = make(sink, 100, 0.05)
    sender.add_kv_op(maker.OpType.ADMIT, 1)
    assert sink.wait(1) and len(sink.messages) == 1


def test_T_S3_flush_sends_the_rest_in_one_message(maker: Any, make: Make) -> None:
    sink = Sink()
    sender = make(sink, 100, 0.5)
    for i in range(5):
        sender.add_kv_op(maker.OpType.ADMIT, i)
    sender.flush()
    assert [len(m.operations) for m in sink.messages] == [5]


def test_T_S4_numbers_are_consecutive(maker: Any, make: Make) -> None:
    sink = Sink()
    sender = make(sink, 4)
    for i in range(15):
        sender.add_kv_op(maker.OpType.ADMIT, i)
    sender.flush()
    assert numbers(sink) == list(range(15))
    most = max(len(m.operations) for m in sink.messages)
    assert most <= expected(maker, "numbering of operations", ours=4, lmcache=15)


def test_T_S5_from_many_threads(maker: Any, make: Make) -> None:
    """1000 operations, each once, with growing numbers in each batch."""
    sink = Sink()
    sender = make(sink)

    def add(thread: int) -> None:
        for i in range(100):
            sender.add_kv_op(maker.OpType.ADMIT, thread * 100 + i)

    assert in_threads(*[lambda t=t: add(t) for t in range(10)]) == []
    sender.flush()
    assert sorted(numbers(sink)) == list(range(1000)) and sorted(op.key for op in sink.operations) == list(range(1000))
    for message in sink.messages:
        seq = [op.seq_num for op in message.operations]
        assert seq == sorted(seq)


def test_T_S6_order_is_kept(maker: Any, make: Make) -> None:
    sink = Sink()
    sender = make(sink, 2)
    story = [("ADMIT", 1), ("EVICT", 1), ("ADMIT", 1), ("ADMIT", 2), ("EVICT", 2)]
    for kind, key in story:
        sender.add_kv_op(maker.OpType[kind], key)
    sender.flush()
    assert sink.story() == story


def test_T_S7_nothing_is_lost(maker: Any, make: Make) -> None:
    sink = Sink()
    sender = make(sink)
    for i in range(10_000):
        sender.add_kv_op(maker.OpType.ADMIT, i)
    sender.flush()
    assert sink.story() == [("ADMIT", i) for i in range(10_000)]


def test_T_S8_close_sends_what_is_left(maker: Any, make: Make) -> None:
    sink = Sink()
    sender = make(sink, 100, 0.3)
    for i in range(3):
        sender.add_kv_op(maker.OpType.EVICT, i)
    close(sender)
    assert sink.story() == [("EVICT", i) for i in range(3)]


@pytest.fixture
def ours() -> Iterator[Make]:
    """ours(sink, batch, timeout) -> a sender of ours."""
    kit = Kit("private", "")
    senders: list[Any] = []

    def sender(sink: Sink, batch: int, timeout: float) -> Any:
        extra = {"kv_msg_batch_size": batch, "kv_msg_batch_timeout": timeout}
        senders.append(BatchedMessageSender(kit.metadata(), kit.config(extra_config=extra), "here", sink))
        return senders[-1]

    yield sender
    for one in senders:
        one.close()


@pytest.mark.parametrize(("batch", "timeout"), [(0, 0.01), (5, 0.0), (5, -1.0)])
def test_settings_that_cannot_be_are_errors(ours: Make, batch: int, timeout: float) -> None:
    with pytest.raises(ValueError, match="kv_msg_batch"):
        ours(Sink(), batch, timeout)


def test_what_waits_is_counted(ours: Make) -> None:
    sender = ours(Sink(fail=1), 100, 0.01)
    sender.add_kv_op(OpType.ADMIT, 1)
    assert sender.qsize() == 1
    assert eventually(lambda: sender.qsize() == 0)


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf")])
def test_flush_takes_any_number_of_seconds(ours: Make, timeout: float) -> None:
    sink = Sink()
    sender = ours(sink, 50, 0.01)
    sender.add_kv_op(OpType.ADMIT, 1)
    assert sender.flush(timeout) in ((True,) if timeout > 0 else (True, False))
    assert sink.wait(1)


def test_a_closed_sender_can_be_closed_again(ours: Make) -> None:
    sink = Sink()
    sender = ours(sink, 100, 0.01)
    sender.add_kv_op(OpType.ADMIT, 1)
    sender.close()
    sender.close()
    assert sink.story() == [("ADMIT", 1)]
