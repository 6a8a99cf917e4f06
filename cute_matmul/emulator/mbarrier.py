"""Barriers: mbarrier objects in shared memory, named barriers of a CTA, barriers of a cluster.

Facts are those of the PTX ISA, "Parallel Synchronization and Communication Instructions". An mbarrier's phase is
over when its pending arrivals and its transaction bytes are both zero; `phase` counts the phases that are over, so
a wait for parity P succeeds when the current phase, number `phase`, has the other parity.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cute_matmul.emulator.memory import OFFSET_MASK, SLOT_SHIFT, Stop

MAX_COUNT = (1 << 20) - 1  # largest arrival count and largest transaction count (PTX ISA, mbarrier)
LOW_MASK = (1 << SLOT_SHIFT) - 1


@dataclass
class MBarrier:
    """One mbarrier object. `expected` arrivals a phase, of which `pending` are still due, and `tx` bytes."""

    place: int
    expected: int
    pending: int
    tx: int = 0
    phase: int = 0
    waiters: list = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.pending == 0 and self.tx == 0


@dataclass
class NamedBarrier:
    """Arrivals at one of a CTA's sixteen barriers since it last completed. Counts are warps."""

    arrived: int = 0
    needed: int | None = None  # None: every warp of the CTA that has not exited
    waiting: list = field(default_factory=list)  # (fragment, node)
    predicates: list = field(default_factory=list)


@dataclass
class ClusterBarrier:
    """The one barrier of a cluster."""

    phase: int = 0
    arrived: set = field(default_factory=set)  # warps
    waiting: list = field(default_factory=list)  # (fragment, node)


class _Arrivals:
    """Arrivals of a group's warps at named barriers, one after the other: a full barrier completes before the next."""

    def __init__(self, engine, G, src: int, numbers: list[int]) -> None:
        self.engine, self.G, self.src, self.numbers = engine, G, src, numbers
        self.rows: list[int] = []
        self.full: dict[tuple[int, int], None] = {}

    def add(self, row: int, key: tuple[int, int], count: int | None) -> NamedBarrier:
        if key in self.full:
            self.finish()
        barrier = self.engine.named.setdefault(key, NamedBarrier())
        self.engine.check_count(self.G, self.src, barrier, count)
        barrier.arrived += 1
        self.rows.append(row)
        if barrier.arrived >= self.engine.warps_needed(key, barrier):
            self.full[key] = None
        return barrier

    def finish(self) -> None:
        if self.rows:
            rows = np.array(self.rows)
            for o in self.engine.observers:
                o.bar_arrive(self.G.agents[rows], self.src, np.array(self.numbers)[rows])
        self.engine.finish_named(self.full)
        self.rows, self.full = [], {}


class Barriers:
    """Mixin of the engine: what generated code and the scheduler do with barriers."""

    # mbarrier

    def _entries(self, G, place: np.ndarray, mask: np.ndarray | None):
        """Active places by warp: rows, places, how many lanes, and the lane to take other operands from."""
        place = np.broadcast_to(place, (G.count, 32))
        active = G.active if mask is None else np.broadcast_to(mask, (G.count, 32))
        counts = active.sum(axis=1)
        lane = active.argmax(axis=1)
        first = place[np.arange(G.count), lane]
        if ((place == first[:, None]) | ~active).all():
            rows = np.flatnonzero(counts)
            return rows, first[rows], counts[rows], lane[rows]
        rows, lanes = np.nonzero(active)
        return rows, place[rows, lanes], np.ones(len(rows), np.int64), lanes

    def _barriers(self, G, src: int, rows: np.ndarray, places: np.ndarray) -> list[MBarrier]:
        out = []
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            barrier = self.mbarriers.get(place)
            if barrier is None:
                if self.hazards is None or not self.hazards_seen():
                    offset = place & LOW_MASK
                    self.report(
                        "mbarrier-not-initialised",
                        src,
                        G.agents[row],
                        "shared",
                        offset,
                        offset + 7,
                        "no mbarrier.init ran at this address",
                    )
                raise Stop
            out.append(barrier)
        return out

    def _split(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (places >> SLOT_SHIFT) + self.cta_base, places & LOW_MASK

    def mbar_init(self, G, src, place, count, mask) -> None:
        rows, places, _, lanes = self._entries(G, place, mask)
        counts = np.broadcast_to(count, (G.count, 32))[rows, lanes].astype(np.int64)
        cta, bar = self._split(places)
        if (bar & 7).any():
            self.stop_at(G, src, "misaligned-access", "an mbarrier must be 8-byte aligned")
        self._check_bar_bounds(G, src, bar)
        if (counts < 1).any() or (counts > MAX_COUNT).any():
            self.stop_at(G, src, "mbarrier-count", f"count {int(counts.min())}; accepted: 1 to {MAX_COUNT}")
        for o in self.observers:
            o.mbar_init(G.agents[rows], src, cta, bar, counts)
        for at, n in zip(places.tolist(), counts.tolist(), strict=True):
            old = self.mbarriers.get(at)
            self.mbarriers[at] = MBarrier(at, n, n, waiters=old.waiters if old else [])
        self.changes += 1

    def _check_bar_bounds(self, G, src, bar) -> None:
        if len(bar) and (int(bar.min()) < 1024 or int(bar.max()) + 8 > self.smem_limit):
            self.stop_at(G, src, "shared-out-of-bounds", f"mbarrier at {int(bar.max())} of {self.smem_limit}")

    def mbar_inval(self, G, src, place, mask) -> None:
        rows, places, _, _ = self._entries(G, place, mask)
        cta, bar = self._split(places)
        for o in self.observers:
            o.mbar_inval(G.agents[rows], src, cta, bar)
        self._barriers(G, src, rows, places)
        for at in places.tolist():
            self.mbarriers.pop(at, None)

    def mbar_arrive(self, G, src, place, count, tx, mask, order, drop=False):
        """Arrive, expect bytes, or both. Returns the state before: the number of the phase arrived in."""
        rows, places, lanes, lane = self._entries(G, place, mask)
        state = np.zeros((G.count, 32), np.uint64)
        if not len(rows):
            return state
        arrive = count is not None
        arrivals = np.broadcast_to(count, (G.count, 32))[rows, lane].astype(np.int64) * lanes if arrive else 0 * lanes
        expected = (
            np.broadcast_to(tx, (G.count, 32))[rows, lane].astype(np.int64) * lanes if tx is not None else 0 * lanes
        )
        self.changes += 1
        count_rows = len(rows)
        begin = 0
        while begin < count_rows:
            # Stop before a second arrival at a barrier that an earlier one of this batch completes.
            cta, bar = self._split(places)
            end = begin
            done: list[MBarrier] = []
            pending: dict[int, list[int]] = {}
            while end < count_rows:
                at = int(places[end])
                barrier = self.mbarriers.get(at)
                left = pending.setdefault(at, [barrier.pending, barrier.tx] if barrier else [1 << 40, 0])
                if left[0] == 0 and left[1] == 0 and any(b.place == at for b in done):
                    break
                left[0] -= int(arrivals[end])
                left[1] += int(expected[end])
                end += 1
                if barrier is not None and left[0] == 0 and left[1] == 0:
                    done.append(barrier)
            piece = slice(begin, end)
            for o in self.observers:
                o.mbar_arrive(
                    G.agents[rows[piece]], src, cta[piece], bar[piece], count=arrivals[piece],
                    expect_tx=expected[piece], release=order == "release", arrive=arrive, drop=drop,
                )  # fmt: skip
            barriers = self._barriers(G, src, rows[piece], places[piece])
            for i, barrier in enumerate(barriers, begin):
                row = int(rows[i])
                if lanes[i] == 1:
                    state[row, int(lane[i])] = barrier.phase
                else:
                    state[row] = barrier.phase
                barrier.tx += int(expected[i])
                barrier.pending -= int(arrivals[i])
                if drop:
                    barrier.expected -= int(arrivals[i])
                if barrier.pending < 0:
                    offset = barrier.place & LOW_MASK
                    self.report(
                        "mbarrier-arrivals", src, G.agents[row], "shared", offset, offset + 7,
                        f"phase {barrier.phase} gets {-barrier.pending} arrivals more than the {barrier.expected} that"
                        " the barrier was initialised with",
                    )  # fmt: skip
                    raise Stop
                if abs(barrier.tx) > MAX_COUNT:
                    self.stop_at(G, src, "mbarrier-tx-bytes", f"pending bytes {barrier.tx} beyond {MAX_COUNT}")
            self.complete_phases(barriers)
            begin = end
        return state

    def mbar_complete_tx(self, G, src, place, tx, mask) -> None:
        rows, places, lanes, lane = self._entries(G, place, mask)
        nbytes = np.broadcast_to(tx, (G.count, 32))[rows, lane].astype(np.int64) * lanes
        cta, bar = self._split(places)
        for o in self.observers:
            o.mbar_landed(cta, bar, nbytes)
        barriers = self._barriers(G, src, rows, places)
        for barrier, n in zip(barriers, nbytes.tolist(), strict=True):
            barrier.tx -= n
        self.complete_phases(barriers)

    def complete_phases(self, barriers: list[MBarrier]) -> None:
        """Begin the next phase of every barrier whose phase is over, tell the observers, wake who waits."""
        done = {b.place: b for b in barriers if b.complete}
        if not done:
            return
        self.changes += 1
        places = np.array(list(done), np.int64)
        phases = np.array([b.phase for b in done.values()], np.int64)
        cta, bar = self._split(places)
        for o in self.observers:
            o.mbar_complete(cta, bar, phases)
        for barrier in done.values():
            barrier.phase += 1
            barrier.pending = barrier.expected
            waiters, barrier.waiters = barrier.waiters, []
            for fragment, node in waiters:
                self.wake(fragment, node)

    def run_try_wait(self, G, node) -> None:
        """Execute mbarrier.{test,try}_wait for a group: who finds the phase over goes on, the others block."""
        ins = self.program.instructions[node.start]
        place, value, mask = self.function(node, G)(self, G, G.ix, G.mask)
        place = np.broadcast_to(place, (G.count, 32))
        value = np.broadcast_to(value, (G.count, 32))
        active = G.active if mask is None else np.broadcast_to(mask, (G.count, 32))
        lane = active.argmax(axis=1)
        every = np.arange(G.count)
        first, wanted = place[every, lane], value[every, lane].astype(np.int64)
        uniform = bool((((place == first[:, None]) & (value == wanted.astype(value.dtype)[:, None])) | ~active).all())
        parity = "parity" in ins.parts
        target = ins.operands[0].index
        ready_rows, ready_places, ready_phases = [], [], []
        go: list[int] = []
        immediate = self.schedule.fails_at_once
        for row, (fragment, at, want) in enumerate(zip(G.fragments, first.tolist(), wanted.tolist(), strict=True)):
            lanes = active[row]
            if not uniform:
                checks = {(int(p), int(v)) for p, v in zip(place[row][lanes], value[row][lanes], strict=True)}
            elif lanes[lane[row]]:
                checks = ((at, want),)
            else:
                checks = ()
            missing = None
            for p, v in checks:
                barrier = self.mbarriers.get(p)
                if barrier is None:
                    self._wait_uninitialised(G, node.start, row, p)
                over = (barrier.phase ^ v) & 1 if parity else barrier.phase > v
                if not over:
                    missing = barrier, v
                    break
            if missing is None:
                for p, _ in checks:
                    ready_rows.append(row)
                    ready_places.append(p)
                    ready_phases.append(self.mbarriers[p].phase - 1)
                self.A1[target, fragment.warp, lanes] = True
                fragment.blocked = None
                fragment.timed_out = False
                go.append(row)
            elif fragment.timed_out or immediate():
                fragment.timed_out = False
                fragment.blocked = None
                self.A1[target, fragment.warp, lanes] = False
                go.append(row)
            else:
                fragment.blocked = ("mbarrier", missing[0].place, missing[1], node.start)
                missing[0].waiters.append((fragment, node.index))
        if ready_rows:
            rows = np.array(ready_rows)
            cta, bar = self._split(np.array(ready_places, np.int64))
            for o in self.observers:
                o.mbar_wait(G.agents[rows], node.start, cta, bar, np.array(ready_phases, np.int64))
        if go:
            self.move(G if len(go) == G.count else G.pick(go), node.fall)

    def _wait_uninitialised(self, G, src, row, place) -> None:
        cta, bar = self._split(np.array([place], np.int64))
        before = self.hazards_seen()
        for o in self.observers:
            o.mbar_wait(G.agents[row : row + 1], src, cta, bar, np.array([-1]))
        if not before and not self.hazards_seen():
            self.report("mbarrier-not-initialised", src, G.agents[row], "shared", int(bar[0]), int(bar[0]) + 7, "")
        raise Stop

    # Named barriers

    def _warp_arrives(self, fragment, key) -> list | None:
        """Collect the fragments of a warp: its list when all its live lanes are there, else None."""
        live = self.live_lanes[fragment.warp]
        if fragment.mask is None or (fragment.mask & live).sum() == live.sum():
            return [fragment]
        gathered = self.partial.setdefault(key, [])
        gathered.append(fragment)
        mask = np.zeros(32, bool)
        for other in gathered:
            mask |= other.mask
        if (mask & live).sum() == live.sum():
            del self.partial[key]
            return gathered
        return None

    def run_barrier(self, G, node) -> None:
        """bar.sync and bar.red: arrive, and block until the barrier completes."""
        number, count, predicate = self.function(node, G)(self, G, G.ix, G.mask)
        src = node.start
        every, lane = np.arange(G.count), G.active.argmax(axis=1)
        numbers = np.broadcast_to(number, (G.count, 32))[every, lane].tolist()
        counts = np.broadcast_to(count, (G.count, 32))[every, lane].tolist() if count is not None else None
        ids = set(numbers)
        if any(not 0 <= n < 16 for n in ids):
            self.stop_at(G, src, "barrier-number", f"barrier {max(ids)}; a CTA has 0 to 15")
        if len(ids) == 1 and predicate is None and G.mask is None and self._whole_ctas(G, numbers[0], counts):
            rows = G.agents.reshape(-1, self.warps_per_cta)
            for o in self.observers:
                o.bar_sync(rows, numbers[0])
            self.changes += 1
            self.move(G, node.fall)
            return
        self.changes += 1
        slots = G.slots.tolist()
        arrivals = _Arrivals(self, G, src, numbers)
        for row, fragment in enumerate(G.fragments):
            key = (slots[row], numbers[row])
            fragment.blocked = ("barrier", key, None, src)
            fragments = self._warp_arrives(fragment, (fragment.warp, "bar", src))
            if fragments is None:
                continue
            barrier = arrivals.add(row, key, counts[row] if counts else None)
            if predicate is not None:
                lanes = self.live_lanes[fragment.warp]  # a CTA's last warp may have fewer than 32
                barrier.predicates.append(np.broadcast_to(predicate, (G.count, 32))[row][lanes])
            barrier.waiting += [(f, node.index) for f in fragments]
        arrivals.finish()

    def _whole_ctas(self, G, number: int, counts) -> bool:
        """Whether the group is whole CTAs of live warps and nothing else has arrived at the barrier."""
        per = self.warps_per_cta
        if G.count % per or self.named_busy(G, number):
            return False
        if counts is not None and any(c != 32 * per for c in counts):
            return False
        warps = G.warps.reshape(-1, per)
        return (
            bool((warps[:, 0] % per == 0).all() and (warps[:, -1] - warps[:, 0] == per - 1).all())
            and not self.exited_warps
        )

    def named_busy(self, G, number: int) -> bool:
        return bool(self.named) and any((slot, number) in self.named for slot in set(G.slots.tolist()))

    def check_count(self, G, src, barrier: NamedBarrier, count) -> None:
        """Note how many warps a barrier waits for; all that arrive must agree."""
        needed = None
        if count is not None:
            if count % 32 or count <= 0:
                self.stop_at(G, src, "barrier-count", f"thread count {count} is no positive multiple of 32")
            needed = count // 32
        if barrier.arrived and barrier.needed != needed:
            self.stop_at(G, src, "barrier-count", f"threads disagree on the count: {barrier.needed} and {needed} warps")
        barrier.needed = needed

    def bar_arrive(self, G, src, number, count, mask) -> None:
        active = G.active if mask is None else np.broadcast_to(mask, (G.count, 32))
        every, lane = np.arange(G.count), active.argmax(axis=1)
        numbers = np.broadcast_to(number, (G.count, 32))[every, lane].tolist()
        counts = np.broadcast_to(count, (G.count, 32))[every, lane].tolist()
        slots = G.slots.tolist()
        self.changes += 1
        arrivals = _Arrivals(self, G, src, numbers)
        for row in range(G.count):
            if active[row].any():
                arrivals.add(row, (slots[row], numbers[row]), counts[row])
        arrivals.finish()

    def warps_needed(self, key: tuple[int, int], barrier: NamedBarrier) -> int:
        """Warps that complete the barrier of key (slot, number)."""
        return barrier.needed if barrier.needed is not None else int(self.live_warps[key[0]])

    def finish_named(self, keys) -> None:
        """Complete those of the barriers that have all arrivals."""
        released, ids = [], []
        for key in keys:
            barrier = self.named.get(key)
            if barrier is None:
                continue
            if barrier.arrived < self.warps_needed(key, barrier) or not barrier.arrived:
                continue
            del self.named[key]
            self._reduce(barrier)
            warps = list(dict.fromkeys(f.warp for f, _ in barrier.waiting))
            released += [self.agent_of(w) for w in warps]
            ids += [key[1]] * len(warps)
            for fragment, node in barrier.waiting:
                fragment.blocked = None
                self.wake(fragment, self.program.nodes[node].fall)
        if released:
            for o in self.observers:
                o.bar_complete(np.array(released), np.array(ids))

    def _reduce(self, barrier: NamedBarrier) -> None:
        for fragment, node in barrier.waiting:
            ins = self.program.instructions[self.program.nodes[node].start]
            if "red" not in ins.parts:
                continue
            lanes = np.concatenate(barrier.predicates)
            target = ins.operands[0]
            if "popc" in ins.parts:
                self.A32[target.index, fragment.warp] = int(lanes.sum())
            else:
                self.A1[target.index, fragment.warp] = bool(lanes.all() if "and" in ins.parts else lanes.any())

    # Cluster barrier

    def cluster_arrive(self, G, src, release: bool, mask) -> None:
        rows = []
        touched = {}
        self.changes += 1
        clusters = (G.slots // self.cluster_size).tolist()
        for row, fragment in enumerate(G.fragments):
            live = self.live_lanes[fragment.warp]
            if fragment.mask is not None and (fragment.mask & live).sum() != live.sum():
                seen = self.cluster_lanes.setdefault(fragment.warp, np.zeros(32, bool))
                seen |= fragment.mask
                if (seen & live).sum() != live.sum():
                    continue
                del self.cluster_lanes[fragment.warp]
            barrier = self.cluster_barriers.setdefault(clusters[row], ClusterBarrier())
            if fragment.warp in barrier.arrived:
                self.stop_at(G, src, "cluster-barrier", "a warp arrives twice without barrier.cluster.wait between")
            barrier.arrived.add(fragment.warp)
            self.cluster_phase[fragment.warp] = barrier.phase
            rows.append(row)
            touched[clusters[row]] = barrier
        if rows:
            for o in self.observers:
                o.cluster_arrive(G.agents[np.array(rows)], src, release)
        self.finish_clusters(touched)

    def finish_clusters(self, touched: dict[int, ClusterBarrier]) -> None:
        per = self.cluster_size * self.warps_per_cta
        done = []
        for cluster, barrier in touched.items():
            live = [w for w in range(cluster * per, (cluster + 1) * per) if self.live_lanes[w].any()]
            if not barrier.arrived or any(w not in barrier.arrived for w in live):
                continue
            barrier.phase += 1
            barrier.arrived = set()
            done.append(cluster)
            waiting, barrier.waiting = barrier.waiting, []
            for fragment, node in waiting:
                self.wake(fragment, node)
        if done:
            base = self.cta_base // self.cluster_size
            for o in self.observers:
                o.cluster_complete(np.array(done) + base)

    def run_cluster_wait(self, G, node) -> None:
        go = []
        clusters = (G.slots // self.cluster_size).tolist()
        for row, fragment in enumerate(G.fragments):
            barrier = self.cluster_barriers.setdefault(clusters[row], ClusterBarrier())
            if fragment.warp not in self.cluster_phase:
                self.stop_at(G, node.start, "cluster-barrier", "barrier.cluster.wait without an arrive before it")
            if barrier.phase > self.cluster_phase[fragment.warp]:
                fragment.blocked = None
                go.append(row)
            else:
                fragment.blocked = ("cluster barrier", clusters[row], None, node.start)
                barrier.waiting.append((fragment, node.index))
        if go:
            ready = G if len(go) == G.count else G.pick(go)
            for o in self.observers:
                o.cluster_wait(ready.agents, node.start)
            self.changes += 1
            self.move(ready, node.fall)


__all__ = ["OFFSET_MASK", "Barriers", "ClusterBarrier", "MBarrier", "NamedBarrier"]
