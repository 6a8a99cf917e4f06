"""The hazard engine under many interleavings: what it says must not depend on which one happened.

A warp-specialised kernel (a producer warp, consumer warp groups, full and empty barriers) runs as coroutines that are
stepped in random order, copies landing at random times, against barriers stated here independently of the emulator.
"""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from cute_matmul.emulator.hazards import HazardEngine

TILE = 1024
SEEDS = range(20)


@dataclass
class Kernel:
    """What the kernel does; each field's default is the right thing."""

    stages: int = 3
    k_tiles: int = 8
    groups: int = 2
    in_flight: int = 0
    producer_waits: bool = True
    producer_phase: int = 1
    consumer_waits: bool = True
    consumer_flips: bool = True
    waits_before_release: bool = True
    empty_count: int | None = None
    tx_bytes: int = TILE
    copies: int = 1
    release_shift: int = 0
    distance: int = TILE
    tail: bool = True
    wait_in_group: bool = True


class Barrier:
    """An mbarrier as the PTX ISA describes it."""

    def __init__(self, count):
        self.count = self.pending = count
        self.tx = 0
        self.phase = 0

    def passes(self, parity):
        return self.phase & 1 != parity


class Machine:
    def __init__(self, kernel, seed):
        self.kernel = kernel
        self.random = random.Random(seed)
        self.warps = 4 * kernel.groups + 1
        self.names = ["init", "expect", "load", "full wait", "wgmma", "release", "empty wait", "tail wait"]
        self.hz = HazardEngine(
            ctas=1,
            warps_per_cta=self.warps,
            smem_bytes=64 * 1024,
            describe=lambda src: (self.names[src], self.names[src]),
        )
        self.bars = {}
        self.flying = []
        self.full = [0x400 + 8 * i for i in range(kernel.stages)]
        self.empty = [0x600 + 8 * i for i in range(kernel.stages)]
        self.data = [0x1000 + kernel.distance * i for i in range(kernel.stages)]

    def src(self, name):
        return self.names.index(name)

    def settle(self, bar):
        b = self.bars[bar]
        if b.pending == 0 and b.tx == 0:
            self.hz.mbar_complete(np.array([0]), np.array([bar]), np.array([b.phase]))
            b.phase += 1
            b.pending = b.count

    def arrive(self, agent, bar, name, expect=0):
        self.hz.mbar_arrive(np.array([agent]), self.src(name), np.array([0]), np.array([bar]), 1, expect)
        self.bars[bar].pending -= 1
        self.bars[bar].tx += expect
        self.settle(bar)

    def wait(self, agents, bar, parity, name):
        while not self.bars[bar].passes(parity):
            yield "blocked"
        agents = np.atleast_1d(agents)
        n = len(agents)
        seen = self.bars[bar].phase - 1
        self.hz.mbar_wait(agents, self.src(name), np.zeros(n, int), np.full(n, bar), np.full(n, seen))
        yield "ran"

    def producer(self):
        k, agent = self.kernel, 4 * self.kernel.groups
        for tile in range(k.k_tiles):
            stage, lap = tile % k.stages, tile // k.stages
            if k.producer_waits:
                yield from self.wait(agent, self.empty[stage], (lap + k.producer_phase) & 1, "empty wait")
            bar = self.full[stage]
            self.arrive(agent, bar, "expect", k.tx_bytes)
            yield "ran"
            part = TILE // k.copies
            for i in range(k.copies):
                where = np.array([self.data[stage] + i * part])
                at = (np.array([0]), where, part, np.array([0]), np.array([bar]))
                self.hz.bulk_load(np.array([agent]), self.src("load"), *at)
                self.flying.append((bar, part))
                yield "ran"
        if k.tail:
            for tile in range(max(0, k.k_tiles - k.stages), k.k_tiles):
                stage, lap = tile % k.stages, tile // k.stages
                yield from self.wait(agent, self.empty[stage], lap & 1, "tail wait")

    def consumer(self, group):
        k, agents = self.kernel, np.arange(4) + 4 * group
        waiter = agents if k.wait_in_group else agents[:1]
        for tile in range(k.k_tiles):
            stage, lap = tile % k.stages, tile // k.stages
            if k.consumer_waits:
                parity = lap & 1 if k.consumer_flips else 0
                yield from self.wait(waiter, self.full[stage], parity, "full wait")
            self.hz.wgmma_fence(agents)
            cells = np.arange(self.data[stage] // 16, (self.data[stage] + TILE) // 16)
            self.hz.wgmma(agents[None, :], self.src("wgmma"), cells[None, :], (0,))
            self.hz.wgmma_commit(agents)
            yield "ran"
            done = tile - k.in_flight
            if k.waits_before_release:
                self.hz.wgmma_wait(agents, k.in_flight)
            if done >= 0:
                self.arrive(4 * group, self.empty[(done + k.release_shift) % k.stages], "release")
            yield "ran"
        self.hz.wgmma_wait(agents, 0)
        for tile in range(k.k_tiles - k.in_flight, k.k_tiles):
            self.arrive(4 * group, self.empty[(tile + k.release_shift) % k.stages], "release")
            yield "ran"

    def run(self):
        """Run to the end; returns whether all finished."""
        k = self.kernel
        zero = np.array([0])
        for bars, count in ((self.full, 1), (self.empty, k.groups if k.empty_count is None else k.empty_count)):
            for bar in bars:
                self.bars[bar] = Barrier(count)
                self.hz.mbar_init(zero, self.src("init"), zero, np.array([bar]), count)
        self.hz.fence(zero, self.src("init"), "mbarrier_init")
        self.hz.bar_sync(np.arange(self.warps)[None, :])
        threads = [self.producer(), *(self.consumer(g) for g in range(k.groups))]
        stuck = set()
        while threads and (len(stuck) < len(threads) or self.flying):
            if self.flying and (self.random.random() < 0.3 or len(stuck) == len(threads)):
                bar, nbytes = self.flying.pop(self.random.randrange(len(self.flying)))
                self.bars[bar].tx -= nbytes
                self.settle(bar)
                stuck.clear()
                continue
            thread = self.random.choice([t for t in threads if id(t) not in stuck])
            step = next(thread, None)
            if step is None:
                threads.remove(thread)
            if step == "blocked":
                stuck.add(id(thread))
            else:
                stuck.clear()
        if not threads:
            self.hz.cta_exit(zero)
        return not threads

    def kinds(self):
        return {h.kind for h in self.hz.finish()}


CLEAN = [
    Kernel(),
    Kernel(groups=1, stages=1),
    Kernel(in_flight=1),
    Kernel(copies=4),
    Kernel(stages=4, k_tiles=3),
    Kernel(stages=2, k_tiles=9, in_flight=1, copies=2),
]


@pytest.mark.parametrize("kernel", CLEAN, ids=str)
def test_clean_kernels_have_no_hazards_in_any_order(kernel):
    for seed in SEEDS:
        machine = Machine(kernel, seed)
        assert machine.run(), f"seed {seed} does not finish"
        assert machine.hz.finish() == [], f"seed {seed}"


RAW, WAW, WAR = "read-before-copy-waited", "overwrite-before-copy-waited", "overwrite-while-wgmma-reads"
EARLY = "uninitialised-shared-memory"

# A race is named by the side that happens second, so a bug may have several names; one of them must always come.
BROKEN = {
    "producer does not wait": (Kernel(producer_waits=False), {"mbarrier-phase-unordered"}),
    "producer starts with phase 0": (Kernel(producer_phase=0), {"deadlock"}),
    "consumer does not wait": (Kernel(consumer_waits=False), {RAW, EARLY}),
    "one warp of four waits": (Kernel(wait_in_group=False), {RAW}),
    "release before wait_group": (Kernel(waits_before_release=False), {WAR}),
    "empty count too small": (Kernel(empty_count=1), {"mbarrier-phase-unordered"}),
    "empty count too large": (Kernel(empty_count=3), {"deadlock"}),
    "too few bytes expected": (Kernel(tx_bytes=TILE // 2, copies=2), {"mbarrier-tx-bytes"}),
    "too many bytes expected": (Kernel(tx_bytes=TILE * 2), {"mbarrier-tx-bytes"}),
    "stages overlap": (Kernel(distance=TILE // 2), {WAW, WAR}),
    "phase not flipped": (Kernel(consumer_flips=False), {"deadlock", RAW, "mbarrier-phase-unordered"}),
    "wrong stage released": (Kernel(release_shift=1, in_flight=1, tail=False), {"deadlock", WAR}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_caught_in_every_order(name):
    kernel, expected = BROKEN[name]
    for seed in SEEDS:
        machine = Machine(kernel, seed)
        finished = machine.run()
        found = machine.kinds() | (set() if finished else {"deadlock"})
        assert found & expected, f"seed {seed}: {found}"
