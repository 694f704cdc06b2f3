"""A process is killed while the GPU writes into its block: no late write reaches the next owner."""

from __future__ import annotations

import random
import time

import gpu_workers

import shmcache

MIB = 1 << 20
SIZE = 256 * MIB  # about 10 ms on the bus, and all of the arena: the survivor gets the same block
ROUNDS = 3
WATCH = 2.0  # seconds, hundreds of times what the copies in flight take


def test_no_write_arrives_after_the_death(worker, scrap):
    cache = shmcache.open(scrap, capacity=SIZE, region_bytes=SIZE, pin=False, prefault="wait", hugepages=False)
    survivor = worker(gpu_workers.survive, scrap, SIZE, WATCH)
    assert survivor.listen() == "attached"
    dice = random.Random(1)
    for _ in range(ROUNDS):
        victim = worker(gpu_workers.copy_until_killed, scrap, SIZE)
        offset = victim.listen()
        time.sleep(dice.uniform(0.0, 0.05))  # the moment of death: anywhere in a copy
        victim.kill()
        survivor.tell("it is dead")
        taken, found, looks, spoiled = survivor.listen()
        assert taken == offset and found, "it is the block that was being written"
        assert looks > 1
        assert not spoiled, "bytes of the dead process's copy arrived in the survivor's block"
    survivor.tell("that is all")
    assert survivor.listen() == "sound"
    cache.close()
