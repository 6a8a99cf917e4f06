"""Asynchronous units of a running kernel: tensor and bulk copies, cp.async, WGMMA; and the synchronous matrix moves.

An operation is recorded when it is issued and takes effect when it lands; when that is, the schedule decides. What
the issuing thread may assume in between is the hazard checker's matter, not this module's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from cute_matmul.emulator import matrix, tensormap, translate
from cute_matmul.emulator.errors import EmulatorError
from cute_matmul.emulator.memory import OFFSET_MASK, SLOT_SHIFT, Stop
from cute_matmul.emulator.operands import OutOfBounds

PARAM, SHARED = 3, 1  # numbers of generic windows


@dataclass(eq=False)
class Copy:
    """One bulk or tensor copy in flight. `land` moves the bytes; `barriers` are signalled with `nbytes` each."""

    src: int
    agent: int
    land: object
    nbytes: int
    barriers: tuple[int, ...] = ()
    done: bool = False
    step: int = 0


@dataclass(eq=False)
class WarpCopies:
    """One cp.async instruction of some warps; each warp's part lands by itself."""

    src: int
    agents: np.ndarray
    warps: np.ndarray
    places: np.ndarray
    addresses: np.ndarray
    size: int
    read: np.ndarray
    mask: np.ndarray
    left: np.ndarray
    step: int = 0

    @property
    def agent(self) -> int:
        return int(self.agents[0])


@dataclass(eq=False)
class WarpGroupMma:
    """One wgmma.mma_async of some warp groups: descriptors and scale as issued, everything else read when it runs."""

    src: int
    spec: matrix.Wgmma
    groups: np.ndarray
    warps: np.ndarray
    slots: np.ndarray
    a: np.ndarray | None
    b: np.ndarray
    scale: np.ndarray | bool
    accumulators: np.ndarray
    fragments: np.ndarray | None
    left: np.ndarray
    step: int = 0


class BulkGroups:
    """cp.async.bulk groups of one thread."""

    __slots__ = ("groups", "open")

    def __init__(self) -> None:
        self.open: list[Copy] = []
        self.groups: list[list[Copy]] = []


class Units:
    """Mixin of the engine: asynchronous operations and matrix instructions."""

    def setup_units(self) -> None:
        self.in_flight: deque = deque()  # copies and cp.async, oldest first
        self.bulk_groups: dict[tuple[int, int], BulkGroups] = {}
        self.cp_open: dict[int, list[WarpCopies]] = {}
        self.cp_groups: dict[int, list[list[WarpCopies]]] = {}
        self.cp_arrivals: list[tuple[int, int, int, int, bool]] = []
        self.mma_queue: dict[int, deque[WarpGroupMma]] = {}  # by warp group
        self.mma_issued: dict[int, int] = {}
        self.mma_done: dict[int, int] = {}
        self.mma_commits: dict[int, list[int]] = {}  # by warp: operations issued when each group was committed
        self.descriptors: dict[int, tensormap.TensorMap] = {}

    # Global memory as tensormap wants it

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """uint8 view of global memory; raises OutOfBounds."""
        number = self.find_global(address, address + nbytes)
        if number < 0:
            raise OutOfBounds(address, nbytes, None)
        start = address - self.global_bases[number]
        return self.global_data[number][start : start + nbytes]

    def _descriptor(self, G, src: int, address: int) -> tensormap.TensorMap:
        found = self.descriptors.get(address)
        if found is not None:
            return found
        window, offset = address >> 56, address & translate.WINDOW_MASK
        if window == PARAM:
            data = self.param[offset : offset + 128].tobytes()
        elif window == 0:
            data = self.view(address, 128).tobytes()
        else:
            raise EmulatorError(f"a tensor map at generic address {address:#x}; accepted: parameters and global memory")
        try:
            found = tensormap.TensorMap.decode(data)
        except tensormap.TensorMapError as error:
            self.stop_at(G, src, f"tensor-map-{error.rule}", str(error))
        if window == PARAM:
            self.descriptors[address] = found
        return found

    def _threads(self, G, mask):
        """(rows, lanes) of the active threads."""
        if mask is None and G.mask is None:
            return np.nonzero(np.broadcast_to(G.active, (G.count, 32)))
        return np.nonzero(np.broadcast_to(G.active if mask is None else mask, (G.count, 32)))

    def _pick(self, array, rows, lanes) -> list[int]:
        shape = (int(rows.max()) + 1 if len(rows) else 1, 32)
        if array.shape[0] == 1 and array.shape[-1] == 1:
            return [int(array[0, 0])] * len(rows)
        full = np.broadcast_to(array, (max(array.shape[0], shape[0]), 32))
        return full[rows, lanes].tolist()

    def _targets(self, place: int, barrier: int, multicast: int | None, slot: int) -> list[tuple[int, int]]:
        """(destination, barrier) places of a copy into shared memory, one per destination CTA."""
        if multicast is None:
            return [(place, barrier)]
        base = slot // self.cluster_size * self.cluster_size
        out = []
        for rank in range(self.cluster_size):
            if multicast >> rank & 1:
                row = (base + rank) << SLOT_SHIFT
                out.append((row | (place & OFFSET_MASK), row | (barrier & OFFSET_MASK)))
        return out

    def _check_room(self, G, src: int, row: int, place: int, nbytes: int) -> None:
        offset = place & OFFSET_MASK
        if offset < translate.SHARED_START or offset + nbytes > self.smem_limit:
            self.report(
                "shared-out-of-bounds", src, G.agents[row], "shared", offset, offset + nbytes - 1,
                f"a copy of {nbytes} bytes at offset {offset} of {self.smem_limit} bytes of shared memory",
            )  # fmt: skip
            raise Stop

    def _launch(self, copy: Copy | WarpCopies) -> None:
        copy.step = self.steps
        self.in_flight.append(copy)
        self.changes += 1

    def _copy_error(self, G, src: int, row: int, error: Exception) -> None:
        if isinstance(error, tensormap.TensorMapError):
            kinds = {"alignment": "misaligned-access"}
            self.report(
                kinds.get(error.rule, f"tensor-map-{error.rule}"), src, G.agents[row], "shared", None, None, str(error)
            )
        else:
            self.report(
                "global-out-of-bounds", src, G.agents[row], "global", error.address, error.address + error.nbytes - 1,
                f"tensor copy: {self.nearest(error.address)}",
            )  # fmt: skip
        raise Stop

    def _check_rows(self, G, src: int, row: int, plan) -> None:
        """Global rows of a box must lie in allocations."""
        starts = plan.row_addresses
        if not len(starts) or not plan.row_bytes:
            return
        low, high = int(starts.min()), int(starts.max()) + plan.row_bytes
        if self.find_global(low, high) >= 0:
            return
        for address in starts.tolist():
            if self.find_global(address, address + plan.row_bytes) < 0:
                self._copy_error(G, src, row, OutOfBounds(address, plan.row_bytes, None))

    def tensor_load(self, G, src, place, descriptor, coordinates, barrier, multicast, mask) -> None:
        rows, lanes = self._threads(G, mask)
        if not len(rows):
            return
        where = self._pick(place, rows, lanes)
        bars = self._pick(barrier, rows, lanes)
        maps = self._pick(descriptor, rows, lanes)
        at = list(zip(*(self._pick(c, rows, lanes) for c in coordinates), strict=True))
        casts = self._pick(multicast, rows, lanes) if multicast is not None else [None] * len(rows)
        slots = G.slots
        shadow = []
        for i, row in enumerate(rows.tolist()):
            tm = self._descriptor(G, src, maps[i])
            nbytes = tm.box_bytes
            targets = self._targets(where[i], bars[i], casts[i], int(slots[row]))
            try:
                plan = tm.plan(at[i], where[i] & OFFSET_MASK)
            except tensormap.TensorMapError as error:
                self._copy_error(G, src, row, error)
            self._check_rows(G, src, row, plan)
            for target, _ in targets:
                self._check_room(G, src, row, target, tm.span_bytes)
            agent = int(G.agents[row])
            shadow += [(agent, target, bar, plan, nbytes) for target, bar in targets]
            self.count_bytes("TMA load", agent, nbytes * len(targets))

            def land(tm=tm, at=at[i], targets=targets):
                # The first destination reads global memory; the others get the same bytes.
                first = targets[0][0]
                offset = first & OFFSET_MASK
                source = self.smem[first >> SLOT_SHIFT, offset : offset + tm.span_bytes]
                tensormap.load(self, tm, at, offset, source)
                for other, _ in targets[1:]:
                    offset = other & OFFSET_MASK
                    self.smem[other >> SLOT_SHIFT, offset : offset + tm.span_bytes] = source

            self._launch(Copy(src, agent, land, nbytes, tuple(bar for _, bar in targets)))
        if self.observers:
            self._shadow_loads(src, shadow)

    def _shadow_loads(self, src: int, shadow: list[tuple]) -> None:
        """Tell the observers of loads: rows (agent, destination, barrier, plan, nbytes)."""
        by_size: dict[int, list] = {}
        for entry in shadow:
            by_size.setdefault(entry[4], []).append(entry)
        for nbytes, entries in by_size.items():
            agents = np.array([e[0] for e in entries])
            cta, offset = self._split(np.array([e[1] for e in entries], np.int64))
            bar_cta, bar = self._split(np.array([e[2] for e in entries], np.int64))
            most = max(len(e[3].row_addresses) for e in entries)
            starts = np.zeros((len(entries), most), np.int64)
            sizes = np.zeros((len(entries), most), np.int64)
            for i, entry in enumerate(entries):
                n = len(entry[3].row_addresses)
                starts[i, :n] = entry[3].row_addresses
                sizes[i, :n] = entry[3].row_bytes
            for o in self.observers:
                o.bulk_load(agents, src, cta, offset, nbytes, bar_cta, bar, starts, sizes)

    def tensor_store(self, G, src, descriptor, coordinates, place, reduction, mask) -> None:
        rows, lanes = self._threads(G, mask)
        if not len(rows):
            return
        where = self._pick(place, rows, lanes)
        maps = self._pick(descriptor, rows, lanes)
        at = list(zip(*(self._pick(c, rows, lanes) for c in coordinates), strict=True))
        entries = []
        issued: set[tuple] = set()
        for i, (row, lane) in enumerate(zip(rows.tolist(), lanes.tolist(), strict=True)):
            # The DSL lets a whole warp execute a store: the same bytes from the same place, so once is enough.
            key = (row, maps[i], at[i], where[i])
            if reduction is None and key in issued:
                continue
            issued.add(key)
            tm = self._descriptor(G, src, maps[i])
            offset = where[i] & OFFSET_MASK
            self._check_room(G, src, row, where[i], tm.span_bytes)
            try:
                plan = tm.plan(at[i], offset, store=True)
            except tensormap.TensorMapError as error:
                self._copy_error(G, src, row, error)
            self._check_rows(G, src, row, plan)
            self._check_box_gaps(G, src, row, plan)
            agent = int(G.agents[row])

            def land(tm=tm, at=at[i], slot=where[i] >> SLOT_SHIFT, offset=offset):
                data = self.smem[slot, offset : offset + tm.span_bytes]
                if reduction is None:
                    tensormap.store(self, tm, at, offset, data)
                else:
                    tensormap.reduce(self, tm, at, offset, data, reduction)

            copy = Copy(src, agent, land, tm.box_bytes)
            self._groups(G, row, lane).open.append(copy)
            self._launch(copy)
            self.count_bytes("TMA store", agent, len(plan.row_addresses) * plan.row_bytes)
            entries.append((agent, lane, offset, tm.box_bytes, *plan.runs))
        self._shadow_stores(src, entries, reduction is not None)

    def _shadow_stores(self, src: int, entries: list[tuple], reduces: bool) -> None:
        """Tell the observers of stores: (agent, lane, offset, nbytes, shared offsets, global addresses, sizes)."""
        agents, lanes = np.array([e[0] for e in entries]), np.array([e[1] for e in entries])
        offsets = np.array([e[2] for e in entries], np.int64)
        if self.hazards is not None:
            most = max(len(e[4]) for e in entries)
            shared, starts, sizes = (np.zeros((len(entries), most), np.int64) for _ in range(3))
            for i, entry in enumerate(entries):
                n = len(entry[4])
                shared[i, :n] = entry[2] + entry[4]
                starts[i, :n] = entry[5]
                sizes[i, :n] = entry[6]
            self.hazards.bulk_store(agents, src, lanes, shared, starts, sizes, reduce=reduces)
        if self.tracer is not None:
            nbytes = np.array([e[3] for e in entries])
            self.tracer.bulk_store(agents, src, lanes, offsets, nbytes, reduce=reduces)

    def _check_box_gaps(self, G, src: int, row: int, plan) -> None:
        """Rows of a stored box must not touch bytes of a storage that no argument covers."""
        if not len(plan.row_addresses):
            return
        low, high = int(plan.row_addresses.min()), int(plan.row_addresses.max()) + plan.row_bytes
        number = self.find_global(low, high)
        if number < 0 or self.global_gaps[number] is None:
            return
        gaps, base = self.global_gaps[number], self.global_bases[number]
        for address in plan.row_addresses.tolist():
            start = address - base
            hit = gaps[start : start + plan.row_bytes]
            if hit.any():
                offset = start + int(hit.argmax())
                text = f"written outside the tensor: {self.global_owner[number].describe(offset)}"
                self.report(
                    "global-out-of-bounds", src, G.agents[row], "global", offset, start + plan.row_bytes - 1, text
                )
                return

    # Bulk copies without a tensor map

    def bulk_load(self, G, src, place, address, nbytes, barrier, multicast, mask) -> None:
        rows, lanes = self._threads(G, mask)
        if not len(rows):
            return
        where, bars = self._pick(place, rows, lanes), self._pick(barrier, rows, lanes)
        sources, sizes = self._pick(address, rows, lanes), self._pick(nbytes, rows, lanes)
        casts = self._pick(multicast, rows, lanes) if multicast is not None else [None] * len(rows)
        shadow = []
        for i, row in enumerate(rows.tolist()):
            size, start = sizes[i], sources[i]
            self._check_bulk(G, src, row, where[i] & OFFSET_MASK, start, size)
            if self.find_global(start, start + size) < 0:
                self._copy_error(G, src, row, OutOfBounds(start, size, None))
            targets = self._targets(where[i], bars[i], casts[i], int(G.slots[row]))
            for target, _ in targets:
                self._check_room(G, src, row, target, size)
            agent = int(G.agents[row])
            self.count_bytes("bulk load", agent, size * len(targets))

            def land(start=start, size=size, targets=targets):
                data = self.view(start, size)
                for target, _ in targets:
                    offset = target & OFFSET_MASK
                    self.smem[target >> SLOT_SHIFT, offset : offset + size] = data

            self._launch(Copy(src, agent, land, size, tuple(bar for _, bar in targets)))
            run = _Run(np.array([start], np.int64), size)
            shadow += [(agent, target, bar, run, size) for target, bar in targets]
        if self.observers:
            self._shadow_loads(src, shadow)

    def _check_bulk(self, G, src: int, row: int, *values: int) -> None:
        for value in values:
            if value % 16:
                self.report(
                    "misaligned-access", src, G.agents[row], "", None, None,
                    f"bulk copies take addresses and sizes that are multiples of 16, got {value:#x}",
                )  # fmt: skip
                raise Stop

    def bulk_store(self, G, src, address, place, nbytes, reduction, kind, mask) -> None:
        rows, lanes = self._threads(G, mask)
        if not len(rows):
            return
        where, sizes = self._pick(place, rows, lanes), self._pick(nbytes, rows, lanes)
        targets = self._pick(address, rows, lanes)
        entries = []
        for i, (row, lane) in enumerate(zip(rows.tolist(), lanes.tolist(), strict=True)):
            size, start, offset = sizes[i], targets[i], where[i] & OFFSET_MASK
            self._check_bulk(G, src, row, offset, start, size)
            self._check_room(G, src, row, where[i], size)
            if self.find_global(start, start + size) < 0:
                self._copy_error(G, src, row, OutOfBounds(start, size, None))
            agent = int(G.agents[row])

            def land(start=start, size=size, slot=where[i] >> SLOT_SHIFT, offset=offset):
                data, target = self.smem[slot, offset : offset + size], self.view(start, size)
                target[:] = data if reduction is None else _reduce(target, data, reduction, kind)

            copy = Copy(src, agent, land, size)
            self._groups(G, row, lane).open.append(copy)
            self._launch(copy)
            self.count_bytes("bulk store", agent, size)
            one = np.array([0], np.int64)
            entries.append((agent, lane, offset, size, one, np.array([start], np.int64), np.array([size], np.int64)))
        self._shadow_stores(src, entries, reduction is not None)

    def bulk_peer(self, G, src, target, place, nbytes, barrier, reduction, kind, mask) -> None:
        rows, lanes = self._threads(G, mask)
        if not len(rows):
            return
        where, sizes = self._pick(place, rows, lanes), self._pick(nbytes, rows, lanes)
        targets, bars = self._pick(target, rows, lanes), self._pick(barrier, rows, lanes)
        for i, row in enumerate(rows.tolist()):
            size = sizes[i]
            self._check_bulk(G, src, row, where[i] & OFFSET_MASK, targets[i] & OFFSET_MASK, size)
            self._check_room(G, src, row, where[i], size)
            self._check_room(G, src, row, targets[i], size)
            agent = int(G.agents[row])

            def land(origin=where[i], to=targets[i], size=size):
                a, b = origin & OFFSET_MASK, to & OFFSET_MASK
                data = self.smem[origin >> SLOT_SHIFT, a : a + size]
                into = self.smem[to >> SLOT_SHIFT, b : b + size]
                into[:] = data if reduction is None else _reduce(into, data, reduction, kind)

            cta, dst = self._split(np.array([targets[i]], np.int64))
            bar_cta, bar = self._split(np.array([bars[i]], np.int64))
            for o in self.observers:
                o.bulk_copy_peer(
                    np.array([agent]), src, np.array([where[i] & OFFSET_MASK]), cta, dst, size, bar_cta, bar
                )
            self._launch(Copy(src, agent, land, size, (bars[i],)))
            self.count_bytes("copy to peer", agent, size)

    def store_async(self, G, src, place, values, size, barrier, mask) -> None:
        """st.async: each thread's bytes reach a CTA of the cluster and count on an mbarrier there."""
        rows, lanes = self._threads(G, mask)
        if not len(rows):
            return
        nbytes = size * len(values)
        where, bars = self._pick(place, rows, lanes), self._pick(barrier, rows, lanes)
        data = np.stack([np.broadcast_to(v, (G.count, 32))[rows, lanes] for v in values], axis=1)
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(len(rows), nbytes)
        for i, row in enumerate(rows.tolist()):
            if where[i] % nbytes:
                self.report(
                    "misaligned-access", src, G.agents[row], "shared", None, None, f"st.async of {nbytes} bytes"
                )
                raise Stop
            self._check_room(G, src, row, where[i], nbytes)
            agent = int(G.agents[row])

            def land(target=where[i], bits=raw[i]):
                offset = target & OFFSET_MASK
                self.smem[target >> SLOT_SHIFT, offset : offset + nbytes] = bits

            self._launch(Copy(src, agent, land, nbytes, (bars[i],)))
            self.count_bytes("st.async", agent, nbytes)
        cta, offset = self._split(np.array(where, np.int64))
        bar_cta, bar = self._split(np.array(bars, np.int64))
        for o in self.observers:
            o.bulk_load(G.agents[rows], src, cta, offset, nbytes, bar_cta, bar)

    def _groups(self, G, row: int, lane: int) -> BulkGroups:
        key = (int(G.warps[row]), lane)
        groups = self.bulk_groups.get(key)
        if groups is None:
            groups = self.bulk_groups[key] = BulkGroups()
        return groups

    def bulk_commit(self, G, src, mask) -> None:
        rows, lanes = self._bulk_threads(G, mask)
        for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
            groups = self._groups(G, row, lane)
            groups.groups.append(groups.open)
            groups.open = []
        if len(rows):
            for o in self.observers:
                o.bulk_commit(G.agents[rows], lanes)

    def _bulk_threads(self, G, mask):
        """(rows, lanes) of the active threads that have ever put a copy into a bulk group."""
        rows, lanes = self._threads(G, mask)
        warps = G.warps.tolist()
        have = [(warps[r], lane) in self.bulk_groups for r, lane in zip(rows.tolist(), lanes.tolist(), strict=True)]
        return rows[have], lanes[have]

    def bulk_wait(self, G, src, pending: int, read: bool, mask) -> None:
        rows, lanes = self._bulk_threads(G, mask)
        if not len(rows):
            return
        for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
            groups = self._groups(G, row, lane)
            done = groups.groups[: max(len(groups.groups) - pending, 0)]
            for group in done:
                for copy in group:
                    self.land(copy)
            if not read:
                del groups.groups[: len(done)]
        for o in self.observers:
            o.bulk_wait(G.agents[rows], lanes, pending, read=read)

    def land(self, copy) -> None:
        """Make an operation in flight take effect, if it has not yet."""
        if isinstance(copy, WarpCopies):
            self._land_warps(copy, copy.left.copy())
            return
        if copy.done:
            return
        copy.done = True
        copy.land()
        self.changes += 1
        if copy.barriers:
            barriers = []
            for place in copy.barriers:
                barrier = self.mbarriers.get(place)
                if barrier is None:
                    offset, text = place & OFFSET_MASK, "a copy completes where no mbarrier is"
                    self.report("mbarrier-not-initialised", copy.src, copy.agent, "shared", offset, offset + 7, text)
                    raise Stop
                barrier.tx -= copy.nbytes
                barriers.append(barrier)
            self.complete_phases(barriers)

    # cp.async

    def cp_async(self, G, src, place, address, size, nbytes, ignored, mask) -> None:
        found = self._lanes(G, address, mask)
        if found is None:
            return
        lanes, mask, low, high = found
        on = np.ones(lanes.shape, bool) if mask is None else mask
        places = np.broadcast_to(place, lanes.shape)
        read = np.broadcast_to(
            np.full((1, 1), size, np.int64) if nbytes is None else nbytes.astype(np.int64), lanes.shape
        )
        if ignored is not None:
            read = np.where(ignored, 0, read)
        offsets = places & OFFSET_MASK
        bad = on & ((offsets % size != 0) | ((lanes % size != 0) & (read > 0)))
        if bad.any():
            row = int(np.argwhere(bad)[0][0])
            self.report("misaligned-access", src, G.agents[row], "shared", None, None, f"cp.async of {size} bytes")
            raise Stop
        if ((offsets + size > self.smem_limit) & on).any():
            self.stop_at(G, src, "shared-out-of-bounds", f"cp.async to {int(offsets.max())} of {self.smem_limit}")
        touched = on & (read > 0)
        if touched.any():
            low, high = int(lanes[touched].min()), int(lanes[touched].max())
            self._global_places(G, src, np.where(touched, lanes, low), touched, low, high, size, False)
        for o in self.observers:
            o.cp_async(G.agents, src, offsets, size, mask, lanes, read)
        self.tally(G, "cp.async", mask, size)
        copies = WarpCopies(src, G.agents, G.warps, places, lanes, size, read, on.copy(), on.any(axis=1))
        for warp in G.warps[copies.left].tolist():
            self.cp_open.setdefault(warp, []).append(copies)
        self._launch(copies)

    def _land_warps(self, copies: WarpCopies, rows: np.ndarray) -> None:
        rows = rows & copies.left
        if not rows.any():
            return
        copies.left &= ~rows
        self.changes += 1
        on = copies.mask & rows[:, None]
        places, addresses, read = copies.places[on], copies.addresses[on], copies.read[on]
        slots, offsets = places >> SLOT_SHIFT, places & OFFSET_MASK
        data = np.zeros((len(places), copies.size), np.uint8)
        for i in np.unique(read):
            if not i:
                continue
            some = read == i
            number = self.find_global(int(addresses[some].min()), int(addresses[some].max()) + int(i))
            if number >= 0:
                index = (addresses[some] - self.global_bases[number])[:, None] + np.arange(int(i))
                data[some, : int(i)] = self.global_data[number][index]
            else:
                for j in np.flatnonzero(some):
                    data[j, : int(i)] = self.view(int(addresses[j]), int(i))
        self.smem[slots[:, None], offsets[:, None] + np.arange(copies.size)] = data

    def cp_async_commit(self, G, src, mask) -> None:
        for warp in self._warps(G, mask):
            self.cp_groups.setdefault(warp, []).append(self.cp_open.pop(warp, []))
        agents = G.agents if mask is None else G.agents[np.broadcast_to(mask, (G.count, 32)).any(axis=1)]
        for o in self.observers:
            o.cp_async_commit(agents)

    def _warps(self, G, mask) -> list[int]:
        if mask is None:
            return G.warps.tolist()
        return G.warps[np.broadcast_to(mask, (G.count, 32)).any(axis=1)].tolist()

    def cp_async_wait(self, G, src, pending: int, mask) -> None:
        due: dict[int, tuple[WarpCopies, np.ndarray]] = {}
        for warp in self._warps(G, mask):
            groups = self.cp_groups.get(warp, [])
            done = groups[: max(len(groups) - pending, 0)]
            for group in done:
                for copies in group:
                    entry = due.setdefault(id(copies), (copies, np.zeros(len(copies.warps), bool)))
                    entry[1][np.searchsorted(copies.warps, warp)] = True
            del groups[: len(done)]
        for copies, rows in due.values():
            self._land_warps(copies, rows)
        agents = G.agents if mask is None else G.agents[np.broadcast_to(mask, (G.count, 32)).any(axis=1)]
        for o in self.observers:
            o.cp_async_wait(agents, pending)

    def cp_async_mbar_arrive(self, G, src, place, noinc: bool, mask) -> None:
        """The arrival takes place when the executing threads' earlier cp.async have landed: they land now."""
        for warp in self._warps(G, mask):
            pieces = [*self.cp_open.get(warp, []), *(c for group in self.cp_groups.get(warp, []) for c in group)]
            for copies in pieces:
                self._land_warps(copies, copies.warps == warp)
        rows, places, _, _ = self._entries(G, place, mask)
        cta, bar = self._split(places)
        for o in self.observers:
            o.cp_async_mbarrier_arrive(G.agents[rows], src, cta, bar)
        if not noinc:
            # Without .noinc the instruction itself adds one pending arrival, which this arrival takes away again.
            for barrier in self._barriers(G, src, rows, places):
                self.complete_phases([barrier])
            return
        self.mbar_arrive(G, src, place, np.ones((1, 1), np.uint32), None, mask, "release")

    # WGMMA

    def wgmma_issue(self, G, src, a, b, scale) -> None:
        """Record one instruction of the group's warp groups; rows come in fours."""
        spec, accumulators, fragments, acc_ids, a_ids = self.program.wgmma[src]
        groups = G.count // 4
        try:
            # Copies: what generated code passes may be views of registers that change before the operation runs.
            b = matrix.uniform(np.broadcast_to(b, (G.count, 32)), groups, "B").copy()
            a = None if a is None else matrix.uniform(np.broadcast_to(a, (G.count, 32)), groups, "A").copy()
        except matrix.MatrixError as error:
            self.stop_at(G, src, "wgmma-descriptor", str(error))
        keep = True if scale is None else np.broadcast_to(scale, (G.count, 32)).reshape(groups, 128)
        if scale is not None:
            if (keep != keep[:, :1]).any():
                self.stop_at(G, src, "wgmma-descriptor", "scale-d differs among the threads of a warp group")
            keep = keep[:, 0].copy()
        warps = G.warps.reshape(groups, 4)
        if self.undefined_lanes:
            self._check_accumulators(G, src, acc_ids, keep)
        if self.hazards is not None or self.tracer is not None:
            cells = self._cells(G, src, spec, a, b)
            agents = G.agents.reshape(groups, 4)
            if self.hazards is not None:
                self.hazards.wgmma(agents, src, cells, acc_ids, a_ids)
            if self.tracer is not None:
                self.tracer.wgmma(agents, src, cells, acc_ids, a_ids, op=spec)
        which, slots = self.wg[warps[:, 0]], G.slots.reshape(groups, 4)[:, 0]
        op = WarpGroupMma(
            src, spec, which, warps, slots, a, b, keep, accumulators, fragments, np.ones(groups, bool), self.steps
        )  # fmt: skip
        for group in op.groups.tolist():
            queue = self.mma_queue.get(group)
            if queue is None:
                queue = self.mma_queue[group] = deque()
                self.mma_issued[group] = self.mma_done[group] = 0
            queue.append(op)
            self.mma_issued[group] += 1
        self.flops += spec.flops * groups
        self.changes += 1
        if self.schedule.mma_at_issue:
            self.run_mma(op, np.ones(groups, bool))

    def _check_accumulators(self, G, src: int, registers: tuple[int, ...], keep) -> None:
        """Accumulators that are added to must have been set; all are set afterwards."""
        keys = tuple((32, i) for i in registers if (32, i) in self.undefined_lanes)
        read = np.broadcast_to(np.repeat(np.atleast_1d(keep), G.count // np.size(keep))[:, None], (G.count, 32))
        self.check_undefined(G, src, keys, read)
        self.spread_undefined(G, keys, (), None)

    def _cells(self, G, src, spec, a, b) -> np.ndarray:
        key = (spec, None if a is None else a.tobytes(), b.tobytes())
        cells = self.cell_cache.get(key)
        if cells is None:
            pairs = list(zip([None] * len(b) if a is None else a.tolist(), b.tolist(), strict=True))
            try:
                granules = {pair: spec.read_granules(*pair) >> 4 for pair in dict.fromkeys(pairs)}
            except matrix.MatrixError as error:
                self._matrix_error(G, src, error)
            if len(granules) == 1:
                cells = np.broadcast_to(granules[pairs[0]], (len(b), len(granules[pairs[0]])))
            else:
                widest = max(map(len, granules.values()))
                # Fewer granules in one row than in another: repeat its last, which changes nothing.
                padded = {pair: np.pad(g, (0, widest - len(g)), mode="edge") for pair, g in granules.items()}
                cells = np.stack([padded[pair] for pair in pairs])
            if len(self.cell_cache) > 4096:
                self.cell_cache.clear()
            self.cell_cache[key] = cells
        return cells

    def _matrix_error(self, G, src: int, error: matrix.MatrixError) -> None:
        kinds = {
            "bounds": "shared-out-of-bounds",
            "alignment": "misaligned-access",
            "descriptor": "wgmma-descriptor",
            "uniform": "wgmma-descriptor",
        }
        if error.rule not in kinds:
            raise EmulatorError(
                f"kernel {self.program.kernel.name}: {self.program.instructions[src].text}: {error}"
            ) from error
        self.stop_at(G, src, kinds[error.rule], str(error))

    def run_mma(self, op: WarpGroupMma, rows: np.ndarray) -> None:
        """Execute the instruction for some of its warp groups (bool per group). Earlier ones must have run."""
        rows = rows & op.left
        if not rows.any():
            return
        op.left &= ~rows
        whole = bool(rows.all())
        warps = (op.warps if whole else op.warps[rows]).reshape(-1)
        index = self.warp_index(warps)
        d = (
            self.A32[op.accumulators[:, None], index]
            if not isinstance(index, slice)
            else self.A32[op.accumulators, index]
        )
        if op.fragments is not None:
            a = (
                self.A32[op.fragments[:, None], index]
                if not isinstance(index, slice)
                else self.A32[op.fragments, index]
            )
        else:
            a = op.a if whole else op.a[rows]
        keep = op.scale if whole or isinstance(op.scale, bool) else op.scale[rows]
        try:
            new = op.spec.execute(
                d, a, op.b if whole else op.b[rows], self.smem, op.slots if whole else op.slots[rows], keep,
                arithmetic=self.arithmetic,
            )  # fmt: skip
        except matrix.MatrixError as error:
            self._matrix_error_at(op.src, warps[0], error)
        if isinstance(index, slice):
            self.A32[op.accumulators, index] = new
        else:
            self.A32[op.accumulators[:, None], index] = new
        for group in (op.groups if whole else op.groups[rows]).tolist():
            queue = self.mma_queue[group]
            if queue[0] is not op:
                raise EmulatorError("internal: a wgmma ran out of order")
            queue.popleft()
            self.mma_done[group] += 1
        self.changes += 1

    def _matrix_error_at(self, src: int, warp: int, error: matrix.MatrixError) -> None:
        kinds = {"bounds": "shared-out-of-bounds", "alignment": "misaligned-access", "descriptor": "wgmma-descriptor"}
        if error.rule not in kinds:
            raise EmulatorError(
                f"kernel {self.program.kernel.name}: {self.program.instructions[src].text}: {error}"
            ) from error
        self.report(kinds[error.rule], src, self.agent_of(int(warp)), "shared", None, None, str(error))
        raise Stop

    def partial_wgmma(self, G, src) -> None:
        self.stop_at(G, src, "wgmma-not-whole-warp-group", "some lanes do not execute it")

    def wgmma_fence(self, G, src) -> None:
        for o in self.observers:
            o.wgmma_fence(G.agents)
        self.note_group_instruction(G, src)

    def wgmma_commit(self, G, src) -> None:
        for warp in G.warps.tolist():
            self.mma_commits.setdefault(warp, []).append(self.mma_issued.get(int(self.wg[warp]), 0))
        for o in self.observers:
            o.wgmma_commit(G.agents)

    def settle(self, G) -> None:
        """Run everything in flight of the group's warp groups."""
        due = {int(self.wg[w]): self.mma_issued.get(int(self.wg[w]), 0) for w in G.warps.tolist()}
        self._run_due({g: upto for g, upto in due.items() if upto > self.mma_done.get(g, 0)})

    def _run_due(self, due: dict[int, int]) -> None:
        """Run the instructions of warp groups up to a number of them."""
        while due:
            # Groups whose next instruction is the same one run together.
            op = self.mma_queue[next(iter(due))][0]
            rows = np.zeros(len(op.groups), bool)
            for i, group in enumerate(op.groups.tolist()):
                rows[i] = group in due and bool(self.mma_queue[group]) and self.mma_queue[group][0] is op
            self.run_mma(op, rows)
            due = {g: upto for g, upto in due.items() if self.mma_done[g] < upto}

    def _due(self, warps: list[int], pending: int) -> dict[int, int]:
        """Instructions that a wait by these warps waits for: warp group -> number of its instructions to be done."""
        due: dict[int, int] = {}
        for warp in warps:
            commits = self.mma_commits.get(warp)
            if commits and len(commits) > pending:
                group = int(self.wg[warp])
                upto = commits[-1 - pending]
                if upto > self.mma_done.get(group, 0):
                    due[group] = max(due.get(group, 0), upto)
        return due

    def run_mma_wait(self, G, node) -> None:
        """wgmma.wait_group. Under a schedule that puts execution off, warps block until nobody else can run."""
        src = node.start
        pending = self.program.instructions[src].operands[0].value
        due = self._due(G.warps.tolist(), pending)
        if due and self.schedule.mma_when_stuck:
            go = [row for row, fragment in enumerate(G.fragments) if int(self.wg[fragment.warp]) not in due]
            for fragment in G.fragments:
                if int(self.wg[fragment.warp]) in due:
                    fragment.blocked = ("wgmma", int(self.wg[fragment.warp]), None, src)
                    self.mma_waiters.append((fragment, node.index))
            if not go:
                return
            G = G if len(go) == G.count else G.pick(go)
        else:
            self._run_due(due)
        for o in self.observers:
            o.wgmma_wait(G.agents, pending)
        self.move(G, node.fall)

    def release_mma_waiters(self) -> None:
        """Execute what blocked warps wait for, after the copies issued since: those may overwrite the operands."""
        waiters, self.mma_waiters = self.mma_waiters, []
        due: dict[int, int] = {}
        for fragment, number in waiters:
            pending = self.program.instructions[self.program.nodes[number].start].operands[0].value
            for group, upto in self._due([fragment.warp], pending).items():
                due[group] = max(due.get(group, 0), upto)
        oldest = {group: self.mma_queue[group][0].step for group in due}
        if oldest:
            later = [c for c in self.in_flight if c.step > min(oldest.values())]
            chosen = {id(c) for c in later}
            self.in_flight = deque(c for c in self.in_flight if id(c) not in chosen)
            for copy in later:
                self.land(copy)
        self._run_due(due)
        for fragment, number in waiters:
            fragment.blocked = None
            self.wake(fragment, number)

    # Synchronous matrix instructions

    def mma(self, G, src, op, a, b, c):
        """A run of independent mma.sync of one shape: tuples of register tuples in, a list of (R, w, 32) out."""
        if G.mask is not None:
            self.stop_at(G, src, "mma-not-whole-warp", "some lanes do not execute it")
        full = (G.count, 32)
        if self.tracer is not None:
            for _ in a:
                self.tracer.mma(G.agents, src, op)
        self.flops += op.flops * len(a) * G.count

        def stack(operands):
            out = np.empty((len(operands[0]), len(operands), *full), np.uint32)
            for i, registers in enumerate(operands):
                for j, register in enumerate(registers):
                    out[j, i] = register
            return out.reshape(len(operands[0]), -1, 32)

        d = op.execute(stack(a), stack(b), stack(c), arithmetic=self.arithmetic)
        return d.reshape(d.shape[0], len(a), *full).swapaxes(0, 1)

    def _row_addresses(self, G, src, op, place) -> tuple[np.ndarray, np.ndarray]:
        place = np.broadcast_to(place, (G.count, 32))
        offsets = place & OFFSET_MASK
        if ((place >> SLOT_SHIFT) != G.slotcol).any():
            self.stop_at(G, src, "shared-out-of-bounds", "a matrix row in another CTA's shared memory")
        return offsets, op.rows(offsets).T

    def ldmatrix(self, G, src, op, place, mask):
        if mask is not None:
            self.stop_at(G, src, "ldmatrix-not-whole-warp", "some lanes do not execute it")
        offsets, rows = self._row_addresses(G, src, op, place)
        for o in self.observers:
            o.shared(G.agents, src, rows, 16, None, write=False)
        self.tally(G, "shared read", None, 16 * rows.shape[1] / 32)
        self._check_matrix_bounds(G, src, rows)
        try:
            return op.execute(offsets, self.smem, G.slots)
        except matrix.MatrixError as error:
            self._matrix_error(G, src, error)

    def _check_matrix_bounds(self, G, src, rows) -> None:
        if int(rows.min()) < translate.SHARED_START or int(rows.max()) + 16 > self.smem_limit:
            self.stop_at(
                G,
                src,
                "shared-out-of-bounds",
                f"matrix rows from {int(rows.min())} to {int(rows.max()) + 15} of {self.smem_limit}",
            )

    def stmatrix(self, G, src, op, place, values, mask) -> None:
        if mask is not None:
            self.stop_at(G, src, "stmatrix-not-whole-warp", "some lanes do not execute it")
        offsets, rows = self._row_addresses(G, src, op, place)
        for o in self.observers:
            o.shared(G.agents, src, rows, 16, None, write=True)
        self.tally(G, "shared write", None, 16 * rows.shape[1] / 32)
        self._check_matrix_bounds(G, src, rows)
        stacked = np.stack([np.broadcast_to(v, (G.count, 32)) for v in values])
        try:
            op.execute(offsets, stacked, self.smem, G.slots)
        except matrix.MatrixError as error:
            self._matrix_error(G, src, error)
        self.changes += 1

    movmatrix = staticmethod(matrix.movmatrix)


@dataclass
class _Run:
    """A plain copy's bytes, in the shape of a BoxPlan."""

    row_addresses: np.ndarray
    row_bytes: int


def _reduce(target: np.ndarray, data: np.ndarray, name: str, kind: str) -> np.ndarray:
    """cp.reduce.async.bulk: element by element, as bytes."""
    from cute_matmul.emulator.memory import atomic_result

    dtype = translate.numpy_dtype(kind)
    new = atomic_result(name, kind, np.ascontiguousarray(target).view(dtype), (np.ascontiguousarray(data).view(dtype),))
    return np.ascontiguousarray(new).view(np.uint8)
