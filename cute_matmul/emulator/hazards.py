"""Races and protocol errors of a kernel, found from what happens before what, not from what one run did.

The interpreter reports every memory access and every synchronisation as it executes it. The engine keeps vector
clocks (`clocks`) and shadow memory (`shadow`) and asks of each access whether the accesses it must come after are
ordered before it by the program's own synchronisation. An asynchronous operation enters the shadow when it is
issued, not when it lands, so a missing wait is found however early the copy happened to land.

The rules, as the PTX ISA states them (sections "Memory Consistency Model", "Async proxy", "mbarrier", "wgmma"):

- A copy that completes on an mbarrier is covered for whoever observes that phase of the barrier complete; a copy
  in a bulk or cp.async group for the thread that waits for the group; and for those that synchronise with them.
- `wgmma.wait_group` covers what the whole warp group's WGMMAs of those groups read. The ISA leaves open whether one
  warp's wait speaks for the other three; here it does. It says nothing of another warp group.
- TMA, bulk copies and WGMMA's shared-memory operands use the async proxy. Bytes written by ordinary stores or by
  cp.async (which the ISA puts in the generic proxy) need `fence.proxy.async` between write and async access, by the
  writer or by anyone ordered after it. Bytes that were only *read* by ordinary loads may be overwritten by a copy
  once the reads are ordered before it: CUTLASS releases such stages without a proxy fence.
- Completed asynchronous operations carry an implicit proxy fence, so their results need none.
- `mbarrier.arrive` releases, a successful wait acquires; `bar`, `barrier.cluster` do both (a relaxed arrive does not).
- The lanes of a warp are one agent: conflicts inside a warp are not looked for.

What is not modelled: scopes narrower than an access needs, and `volatile` as anything but `relaxed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cute_matmul.emulator.accesses import Accessors, Conflicts, GlobalMemory, SharedMemory, array
from cute_matmul.emulator.barriers import Barriers
from cute_matmul.emulator.clocks import CLOCK, GLOBAL, INIT, SHARED, Clocks, Store, merge_foreign
from cute_matmul.emulator.findings import RULES, Findings, Hazard, Site
from cute_matmul.emulator.shadow import CELL
from cute_matmul.emulator.warpgroups import WarpGroups

__all__ = ["RULES", "Hazard", "HazardEngine", "Site"]

# Accesses of one sort that follow each other with no synchronisation between are checked together, up to so many.
QUEUE_LIMIT = 1 << 14


def _selected(
    n: int, addr: np.ndarray, mask: np.ndarray | None, end: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The addresses (m,) that count, the agent index of each, and their positions in (n, L) (None: all).

    `addr` and `mask` are (n, L) or broadcast to it. Addresses from `end` on, or negative, do not count: the interpreter
    reports those. The result is a copy.
    """
    lanes = addr.shape[1] if mask is None else max(addr.shape[1], mask.shape[1])
    flat = addr.reshape(-1) if addr.shape == (n, lanes) else np.broadcast_to(addr, (n, lanes)).reshape(-1)
    picked = None
    if mask is not None:
        picked = np.flatnonzero(mask if mask.shape == (n, lanes) else np.broadcast_to(mask, (n, lanes)))
        flat = flat[picked]
    flat = flat.astype(np.int64)
    if end is not None and len(flat) and (flat.max() >= end or flat.min() < 0):
        inside = np.flatnonzero((flat >= 0) & (flat < end))
        picked = inside if picked is None else picked[inside]
        flat = flat[inside]
    rows = np.repeat(np.arange(n), lanes) if picked is None else picked // lanes
    return flat, rows, picked


def _runs(addr: np.ndarray, size: int | np.ndarray) -> tuple[np.ndarray, np.ndarray, int | np.ndarray]:
    """(n, R) runs of bytes as flat (row, address, length), without the empty ones."""
    n, runs = addr.shape
    flat = addr.reshape(-1).astype(np.int64, copy=False)
    rows = np.repeat(np.arange(n), runs)
    if isinstance(size, int):
        return rows, flat, size
    sizes = np.broadcast_to(size, (n, runs)).reshape(-1).astype(np.int64, copy=False)
    used = sizes > 0
    return rows[used], flat[used], sizes[used]


class HazardEngine:
    """Happens-before checker of one kernel launch; the interpreter calls one method per event.

    Agents are warps: `agent = cta * warps_per_cta + warp`, CTAs of a cluster being numbered consecutively. Every
    method takes the agents (n,) that execute one instruction together; `src` is that instruction's id. Shared
    addresses are byte offsets in a CTA's shared-memory window, global ones are absolute. Calls must come in
    the order of execution.

    Args:
        ctas: CTAs in the grid.
        warps_per_cta: warps in a CTA.
        cluster_size: CTAs in a cluster.
        smem_bytes: size of the shared-memory window.
        describe: instruction id to (source line, instruction text).
        role: agent to the role it plays, asked only by `finish`.
        limit: most hazards that `finish` returns.

    Raises:
        ValueError: ctas is not a multiple of cluster_size.
    """

    def __init__(
        self,
        *,
        ctas: int,
        warps_per_cta: int,
        cluster_size: int = 1,
        smem_bytes: int = 0,
        describe: Callable[[int], tuple[str, str]] | None = None,
        role: Callable[[int], str] | None = None,
        limit: int = 100,
    ) -> None:
        if ctas % cluster_size:
            raise ValueError(f"ctas={ctas} is not a multiple of cluster_size={cluster_size}")
        self.warps_per_cta = warps_per_cta
        self.cluster_size = cluster_size
        self.warps = warps_per_cta * cluster_size
        self.limit = limit
        agents = ctas * warps_per_cta
        clusters = ctas // cluster_size
        self.clocks = Clocks(clusters, self.warps)
        self.findings = Findings(
            describe or (lambda src: (f"instruction {src}", "")), role or (lambda agent: ""), warps_per_cta
        )
        self.conflicts = Conflicts(self.clocks, self.findings, cluster_size)
        self.smem = SharedMemory(self.clocks, self.conflicts, smem_bytes, ctas)
        self.gmem = GlobalMemory(self.clocks, self.conflicts)
        self.groups = WarpGroups(self.clocks, self.conflicts, self.findings, agents, warps_per_cta)
        self.barriers = Barriers(self.clocks, self.conflicts, self.findings, self.groups, warps_per_cta, cluster_size)
        # Named barriers in use, by (CTA, number).
        self._named = Store(self.clocks, 16)
        self._named_slot: dict[tuple[int, int], int] = {}
        self._named_free = list(range(15, -1, -1))
        self._cluster_arrivals = Store(self.clocks, clusters)
        self._cluster_done = Store(self.clocks, clusters)

        # cp.async: the epoch that copies issued now belong to, and that of each committed group.
        self._async_columns = np.full(self.warps, -1, np.int64)
        self._async_next = np.ones(agents, np.int64)
        self._async_last = np.zeros(agents, np.int64)
        self._async_source = np.zeros(agents, np.int64)
        self._async_groups = np.zeros(agents, np.int64)
        self._async_log = np.zeros((agents, 0), np.int64)

        # Bulk groups by CTA and (agent, lane): read column, write column, epoch, epoch and instruction of the
        # last store.
        self._bulk: dict[int, dict[tuple[int, int], list[int]]] = {}
        # Latest access by other CTAs to a CTA's shared memory: {cta: {agent: (epoch, instruction)}}.
        self._remote: dict[int, dict[int, tuple[int, int]]] = {}
        self._exited: set[int] = set()
        # Flags in memory: what was released at an address; what an agent's last fence released; what a relaxed
        # read has seen and a fence has yet to acquire.
        self._published: dict[tuple, dict[int, np.ndarray]] = {}
        self._fenced: dict[int, dict[int, np.ndarray]] = {}
        self._to_acquire: dict[int, dict[int, np.ndarray]] = {}

        self._queue: list[tuple] = []
        self._queue_key: tuple = ()
        self._queued = 0

    def report(
        self,
        kind: str,
        rule: str,
        src: int,
        agent: int,
        *,
        space: str = "",
        first: int | None = None,
        last: int | None = None,
        detail: str = "",
        object: str = "",
    ) -> None:
        """Add a hazard that the interpreter itself sees (an address out of bounds, a missing warp, ...)."""
        self.findings.add(
            kind,
            src,
            [agent],
            rule=rule,
            space=space,
            first=first,
            last=last,
            detail=detail,
            object=object,
        )

    # ---- queue

    def _defer(self, key: tuple, entry: tuple, elements: int) -> None:
        """Queue an access until something synchronises; `key` is its sort, the queue holds one sort at a time.

        Nothing is lost: with no synchronisation between, whatever two warps do here is unordered.
        """
        if key != self._queue_key:
            self._flush()
            self._queue_key = key
        self._queue.append(entry)
        self._queued += elements
        if self._queued > QUEUE_LIMIT:
            self._flush()

    def _flush(self) -> None:
        """Check what is queued. Comes before every change of a clock."""
        queue, key = self._queue, self._queue_key
        if not queue:
            return
        self._queue, self._queue_key, self._queued = [], (), 0
        if key[0] == "wgmma":
            self._enter_wgmma(queue)
            return
        counts = [len(entry[0]) for entry in queue]
        agents = np.concatenate([entry[0] for entry in queue]) if len(queue) > 1 else queue[0][0]
        src = np.repeat([entry[1] for entry in queue], counts)
        starts = np.cumsum(counts) - counts
        addr, rows = queue[0][2:4]
        if len(queue) > 1:
            addr = np.concatenate([entry[2] for entry in queue])
            rows = np.concatenate([entry[3] + start for entry, start in zip(queue, starts, strict=True)])
        space, size, write = key
        if space == "cp.async":
            self._enter_cp_async(queue, agents, src, addr, rows, size)
            return
        by = Accessors.of(self.clocks, agents, src)
        if space == "global":
            self.gmem.access(by, addr, size, rows, write=write)
            return
        cells, run = self.smem.cells(agents[rows] // self.warps_per_cta, addr, size)
        self.smem.access(by, cells, rows if run is None else rows[run], write=write)

    # ---- ordinary accesses

    def shared(
        self,
        agents: np.ndarray,
        src: int,
        addr: np.ndarray,
        size: int,
        mask: np.ndarray | None = None,
        *,
        write: bool = False,
        atomic: bool = False,
        cta: np.ndarray | None = None,
        sem: str = "weak",
        scope: str = "cta",
        taint: bool = False,
    ) -> np.ndarray | None:
        """Ordinary access to shared memory: ld, st, atom, red, ldmatrix, stmatrix.

        Args:
            addr: (n, L) byte offsets; for ldmatrix the addresses of the 16-byte rows, for which size is 16.
            size: bytes per address.
            mask: (n, L), which addresses count; None for all.
            write: a store, or an atomic.
            atomic: an atom or red.
            cta: (n,) or (n, L) the CTA whose memory it is; None for the agent's own.
            sem: weak, volatile, relaxed, acquire, release or acq_rel.
            taint: do not report bytes that nobody wrote, the caller tracks them.

        Returns:
            With `taint`: (n, L) bool, the addresses with bytes that nobody wrote, or None if there are none.
        """
        flat, rows, picked = _selected(len(agents), addr, mask, self.smem.shadow.nbytes - size + 1)
        if not len(flat):
            return None
        strong = sem != "weak"
        if not (strong or atomic or taint) and cta is None:
            self._defer(("shared", size, write), (agents, src, flat, rows), len(flat))
            return None
        self._flush()
        n = len(agents)
        lanes = addr.shape[1] if mask is None else max(addr.shape[1], mask.shape[1])
        owner = agents[rows] // self.warps_per_cta
        if cta is not None:
            owner = np.broadcast_to(cta if cta.ndim == 2 else cta[:, None], (n, lanes)).reshape(-1)
            owner = owner if picked is None else owner[picked]
            self._touch_remote(agents[rows], src, owner)
        keys = [("shared", c, a) for c, a in zip(owner.tolist(), flat.tolist(), strict=True)] if strong else []
        if strong:
            self._acquire(agents[rows], sem, keys)
        cells, run = self.smem.cells(owner, flat, size)
        unwritten = self.smem.access(
            Accessors.of(self.clocks, agents, src),
            cells,
            rows if run is None else rows[run],
            write=write,
            reads=atomic,
            exempt=atomic or strong,
            untracked=strong,
            taint=taint,
        )
        if strong and write:
            self._release(agents[rows], sem, keys, atomic)
        if unwritten is None or not taint:
            return None
        result = np.zeros(n * lanes, bool)
        by_lane = unwritten.reshape(len(flat), -1).any(axis=1)
        result[slice(None) if picked is None else picked] = by_lane
        return result.reshape(n, lanes)

    def global_(
        self,
        agents: np.ndarray,
        src: int,
        addr: np.ndarray,
        size: int,
        mask: np.ndarray | None = None,
        *,
        write: bool = False,
        atomic: bool = False,
        sem: str = "weak",
        scope: str = "gpu",
    ) -> None:
        """Ordinary access to global memory; arguments as for `shared`, addresses absolute."""
        flat, rows, _ = _selected(len(agents), addr, mask)
        if not len(flat):
            return
        strong = sem != "weak"
        if not (strong or atomic):
            self._defer(("global", size, write), (agents, src, flat, rows), len(flat))
            return
        self._flush()
        keys = [("global", a) for a in flat.tolist()] if strong else []
        if strong:
            self._acquire(agents[rows], sem, keys)
        self.gmem.access(Accessors.of(self.clocks, agents, src), flat, size, rows, write=write, exempt=True)
        if strong and write:
            self._release(agents[rows], sem, keys, atomic)

    def add_allocation(self, base: int, nbytes: int, name: str = "") -> None:
        """Make a global allocation known. Accesses outside all allocations are not checked here."""
        self.gmem.add(base, nbytes, name)

    def _touch_remote(self, agents: np.ndarray, src: int, ctas: np.ndarray, remember: bool = True) -> None:
        """Accesses to other CTAs' memory: not after their exit, and (`remember`) known to be over before it."""
        away = ctas != agents // self.warps_per_cta
        if not away.any():
            return
        for agent, cta in sorted(set(zip(agents[away].tolist(), ctas[away].tolist(), strict=True))):
            if cta in self._exited:
                self.findings.add("access-to-exited-cta", src, [agent], detail=f"CTA {cta} has exited")
            if remember:
                epoch = int(self.clocks.table[agent, CLOCK, agent % self.warps])
                self._remote.setdefault(cta, {})[agent] = (epoch, src)

    # ---- flags and fences

    def _acquire(self, agents: np.ndarray, sem: str, keys: list[tuple]) -> None:
        if not self._published:
            return
        for agent, key in set(zip(agents.tolist(), keys, strict=True)):
            known = self._published.get(key)
            if known is None:
                continue
            if sem in ("acquire", "acq_rel"):
                self.clocks.absorb(agent, known)
            else:
                merge_foreign(self._to_acquire.setdefault(agent, {}), known)

    def _release(self, agents: np.ndarray, sem: str, keys: list[tuple], atomic: bool) -> None:
        released = sem in ("release", "acq_rel")
        for agent, key in set(zip(agents.tolist(), keys, strict=True)):
            known = self.clocks.published(agent) if released else self._fenced.get(agent)
            if not atomic:
                self._published.pop(key, None)
            if known:
                merge_foreign(self._published.setdefault(key, {}), known)
        if released:
            self.clocks.advance(np.unique(agents))

    def fence(self, agents: np.ndarray, src: int, kind: str, scope: str = "cta") -> None:
        """A fence instruction.

        Args:
            kind: "acq_rel" or "sc" (also for membar); "proxy.async", "proxy.async.shared", "proxy.async.global";
                "mbarrier_init".
            scope: of an acq_rel or sc fence: cta, cluster, gpu or sys.

        Raises:
            ValueError: another kind.
        """
        self._flush()
        table = self.clocks.table
        rows: tuple[int, ...]
        if kind == "mbarrier_init":
            own = agents % self.warps
            table[agents, INIT, own] = table[agents, CLOCK, own]
            rows = ()
        elif kind in ("acq_rel", "sc"):
            rows = (INIT,) if scope != "cta" else ()
            for agent in agents.tolist():
                pending = self._to_acquire.pop(agent, None)
                if pending:
                    self.clocks.absorb(agent, pending)
                self._fenced[agent] = self.clocks.published(agent)
        elif kind in ("proxy.async", "proxy.async.shared", "proxy.async.global"):
            spaces = {"proxy.async.shared": (SHARED,), "proxy.async.global": (GLOBAL,)}
            rows = (*spaces.get(kind, (SHARED, GLOBAL)), INIT)
        else:
            raise ValueError(f"kind={kind!r} is no fence known here")
        for row in rows:
            table[agents, row] = np.maximum(table[agents, row], table[agents, CLOCK])
        # What follows the fence is not covered by it.
        self.clocks.advance(agents)

    # ---- cp.async

    def _async_column(self, agents: np.ndarray) -> np.ndarray:
        own = agents % self.warps
        for w in np.unique(own[self._async_columns[own] < 0]).tolist():
            self._async_columns[w] = self.clocks.column("cp.async", w)
        return self._async_columns[own]

    def cp_async(
        self,
        agents: np.ndarray,
        src: int,
        dst: np.ndarray,
        size: int,
        mask: np.ndarray | None,
        src_addr: np.ndarray,
        src_bytes: np.ndarray | None = None,
    ) -> None:
        """Non-bulk copies global to shared: (n, L) destination offsets and source addresses.

        `src_bytes` (n, L) is how much of the source is read (the rest is filled with zeros); None for all.
        """
        n = len(agents)
        flat, rows, picked = _selected(n, dst, mask, self.smem.shadow.nbytes - size + 1)
        if not len(flat):
            return
        shape = (n, dst.shape[1] if mask is None else max(dst.shape[1], mask.shape[1]))
        every = slice(None) if picked is None else picked
        source = np.broadcast_to(src_addr, shape).reshape(-1)[every].astype(np.int64)
        amount = np.full(len(flat), size, np.int64)
        if src_bytes is not None:
            amount = np.broadcast_to(src_bytes, shape).reshape(-1)[every].astype(np.int64)
        self._defer(("cp.async", size, True), (agents, src, flat, rows, source, amount), len(flat))

    def _enter_cp_async(
        self,
        queue: list[tuple],
        agents: np.ndarray,
        src: np.ndarray,
        addr: np.ndarray,
        rows: np.ndarray,
        size: int,
    ) -> None:
        columns = self._async_column(agents)
        epochs = self._async_next[agents]
        self._async_last[agents] = epochs
        self._async_source[agents] = src
        by = Accessors.of(self.clocks, agents, src, columns, epochs)
        cells, run = self.smem.cells(agents[rows] // self.warps_per_cta, addr, size)
        self.smem.access(by, cells, rows if run is None else rows[run], write=True)
        source = np.concatenate([entry[4] for entry in queue])
        amount = np.concatenate([entry[5] for entry in queue])
        if (amount == size).all():
            self.gmem.access(by, source, size, rows, write=False)
            return
        used = amount > 0
        self.gmem.access(by, source[used], amount[used], rows[used], write=False)

    def cp_async_commit(self, agents: np.ndarray) -> None:
        """cp.async.commit_group."""
        self._flush()
        groups = self._async_groups[agents]
        have = self._async_log.shape[1]
        if groups.max(initial=0) >= have:
            self._async_log = np.pad(self._async_log, ((0, 0), (0, max(16, have))))
        self._async_log[agents, groups] = self._async_next[agents]
        self._async_groups[agents] += 1
        self._async_next[agents] += 1

    def cp_async_wait(self, agents: np.ndarray, pending: int) -> None:
        """cp.async.wait_group; for wait_all call commit first, then this with 0."""
        self._flush()
        done = self._async_groups[agents] - pending
        some = (done > 0) & (self._async_last[agents] > 0)
        if some.any():
            which = agents[some]
            self.clocks.learn(which, self._async_column(which), self._async_log[which, done[some] - 1])

    def cp_async_mbarrier_arrive(self, agents: np.ndarray, src: int, cta: np.ndarray, bar: np.ndarray) -> None:
        """cp.async.mbarrier.arrive: the barrier's current phase now covers the thread's copies so far."""
        self._flush()
        n = len(agents)
        slots = self.barriers.use(agents, src, array(cta, n), array(bar, n))
        self.barriers.cover(slots, self._async_column(agents), self._async_next[agents])
        self._async_next[agents] += 1

    # ---- bulk copies

    def bulk_load(
        self,
        agents: np.ndarray,
        src: int,
        cta: np.ndarray,
        offset: np.ndarray,
        nbytes: int,
        bar_cta: np.ndarray,
        bar: np.ndarray,
        gaddr: np.ndarray | None = None,
        gbytes: int | np.ndarray = 0,
    ) -> None:
        """Copies global to shared that complete on an mbarrier (TMA tiles, plain bulk copies).

        One row per copy and destination; a multicast is one row per destination CTA, each with its own barrier.

        Args:
            cta: (n,) destination CTAs.
            offset: (n,) where in their shared memory.
            nbytes: bytes written there, counted by the barrier (clipped tiles are filled).
            bar_cta: (n,) CTA of the barrier on which each completes.
            bar: (n,) offset of that barrier.
            gaddr: (n, R) addresses of the R runs of bytes read from global memory, or None.
            gbytes: length of each run, one for all or (n, R); runs of 0 bytes are skipped.
        """
        by = self._bulk_write(agents, src, cta, offset, nbytes, bar_cta, bar)
        if gaddr is not None:
            rows, addr, size = _runs(gaddr, gbytes)
            self.gmem.access(by, addr, size, rows, write=False)

    def _bulk_write(
        self,
        agents: np.ndarray,
        src: int,
        cta: np.ndarray,
        offset: np.ndarray,
        nbytes: int,
        bar_cta: np.ndarray,
        bar: np.ndarray,
    ) -> Accessors:
        """The shared-memory side of copies that complete on mbarriers."""
        self._flush()
        n = len(agents)
        cta, offset, bar_cta, bar = (array(x, n) for x in (cta, offset, bar_cta, bar))
        self._touch_remote(agents, src, cta, remember=False)
        barriers = self.barriers
        slots = barriers.use(agents, src, bar_cta, bar, asynchronous=True)
        barriers.check_phase(agents, src, slots, "copy")
        by = self._completing_on(agents, src, slots)
        cells, run = self.smem.cells(cta, offset, nbytes)
        self.smem.access(by, cells, np.arange(n) if run is None else run, write=True)
        barriers.copy(agents, src, slots, nbytes)
        return by

    def _completing_on(self, agents: np.ndarray, src: int, slots: np.ndarray) -> Accessors:
        """Copies that complete on the current phase of barriers."""
        state = self.barriers.state[slots]
        return Accessors.of(
            self.clocks,
            agents,
            src,
            columns=state["column"].astype(np.int64),
            epochs=state["phase"] + 1,
            asynchronous=True,
            unit="copy",
            bars=[self.barriers.places[slot] for slot in slots.tolist()],
            phases=state["phase"],
        )

    def bulk_copy_peer(
        self,
        agents: np.ndarray,
        src: int,
        offset: np.ndarray,
        cta: np.ndarray,
        dst: np.ndarray,
        nbytes: int,
        bar_cta: np.ndarray,
        bar: np.ndarray,
    ) -> None:
        """Bulk copies from the agents' own shared memory to a peer's, completing on an mbarrier there."""
        self._flush()
        n = len(agents)
        slots = self.barriers.slots(array(bar_cta, n), array(bar, n))
        self._async_read(self._completing_on(agents, src, slots), array(offset, n)[:, None], nbytes)
        self._bulk_write(agents, src, cta, dst, nbytes, bar_cta, bar)

    def _async_read(self, by: Accessors, addr: np.ndarray, nbytes: int | np.ndarray) -> None:
        """Copies read runs (n, R) of their agents' own shared memory."""
        rows, flat, size = _runs(addr, nbytes)
        if len(flat):
            cells, run = self.smem.cells(by.agents[rows] // self.warps_per_cta, flat, size)
            self.smem.access(by, cells, rows if run is None else rows[run], write=False)

    def _bulk_state(self, agents: np.ndarray, lane: np.ndarray | int) -> list[list[int]]:
        """State of each issuing thread's bulk groups; made on first use."""
        states = []
        for agent, thread in zip(agents.tolist(), array(lane, len(agents)).tolist(), strict=True):
            own = self._bulk.setdefault(agent // self.warps_per_cta, {})
            state = own.get((agent, thread))
            if state is None:
                w = agent % self.warps
                columns = [self.clocks.column(kind, w, thread) for kind in ("bulk.read", "bulk.write")]
                state = own[agent, thread] = [*columns, 1, 0, 0]
            states.append(state)
        return states

    def bulk_store(
        self,
        agents: np.ndarray,
        src: int,
        lane: np.ndarray | int,
        saddr: np.ndarray,
        gaddr: np.ndarray,
        nbytes: int | np.ndarray,
        *,
        reduce: bool = False,
    ) -> None:
        """Copies shared to global in the issuing thread's current bulk group (TMA stores, plain and reducing).

        The DSL has whole warps issue a TMA store; the same store by further lanes of a warp counts as one.

        Args:
            lane: (n,) lanes of the issuing threads.
            saddr: (n, R) offsets of the R runs of bytes moved, only bytes inside the tensor.
            gaddr: (n, R) where they go.
            nbytes: length of each run, one for all or (n, R); runs of 0 bytes are skipped.
            reduce: cp.reduce, which adds to global memory atomically.
        """
        self._flush()
        lane = array(lane, len(agents))
        sizes = np.broadcast_to(nbytes, gaddr.shape)
        same = agents[1:] == agents[:-1]
        for runs in (saddr, gaddr, sizes):
            same &= (runs[1:] == runs[:-1]).all(axis=1)
        if same.any() and not reduce:
            keep = np.concatenate(([True], ~same))
            agents, lane, saddr, gaddr, nbytes = agents[keep], lane[keep], saddr[keep], gaddr[keep], sizes[keep]
        states = self._bulk_state(agents, lane)
        read, done, epoch = (np.array([state[i] for state in states], np.int64) for i in range(3))
        for state in states:
            state[3], state[4] = state[2], src
        by = Accessors.of(self.clocks, agents, src, read, epoch, True, unit="bulk copy")
        self._async_read(by, saddr, nbytes)
        rows, addr, size = _runs(gaddr, nbytes)
        by = Accessors.of(self.clocks, agents, src, done, epoch, True, unit="bulk copy")
        self.gmem.access(by, addr, size, rows, write=True, exempt=reduce)

    def bulk_commit(self, agents: np.ndarray, lane: np.ndarray | int) -> None:
        """cp.async.bulk.commit_group by these threads."""
        for state in self._bulk_state(agents, lane):
            state[2] += 1

    def bulk_wait(self, agents: np.ndarray, lane: np.ndarray | int, pending: int, *, read: bool) -> None:
        """cp.async.bulk.wait_group, with `read` its .read form, which covers only the reads of shared memory."""
        self._flush()
        states = self._bulk_state(agents, lane)
        reads, done, epoch = (np.array([state[i] for state in states], np.int64) for i in range(3))
        complete = np.maximum(epoch - 1 - pending, 0)
        self.clocks.learn(agents, reads, complete)
        if not read:
            self.clocks.learn(agents, done, complete)

    # ---- WGMMA

    def wgmma(
        self,
        agents: np.ndarray,
        src: int,
        cells: np.ndarray,
        acc: Sequence[int] = (),
        a_regs: Sequence[int] = (),
    ) -> None:
        """wgmma.mma_async of whole warp groups.

        Args:
            agents: (n, 4) the warps of each group.
            cells: (n, k) the 16-byte granules (offset >> 4) of the CTA's shared memory that the operands are read from.
            acc: ids of the accumulator registers.
            a_regs: ids of the registers that hold A; empty if A comes from shared memory.
        """
        columns, group = self.groups.issue(agents, src, acc, a_regs)
        self._defer(("wgmma",), (agents, src, cells, columns, group), cells.size)

    def _enter_wgmma(self, queue: list[tuple]) -> None:
        crew = np.concatenate([entry[0] for entry in queue])
        n = len(crew)
        counts = [len(entry[0]) for entry in queue]
        cells = np.concatenate([entry[2].reshape(-1) for entry in queue]).astype(np.int64, copy=False)
        rows = np.repeat(np.arange(n), np.repeat([entry[2].shape[1] for entry in queue], counts))
        # A group's operands are there when they are for each of its warps.
        known = self.clocks.table[crew, : SHARED + 1].min(axis=1)
        start = np.arange(n) * known[0].size
        by = Accessors(
            agents=crew[:, 0],
            src=np.repeat([entry[1] for entry in queue], counts),
            columns=np.concatenate([entry[3] for entry in queue]),
            epochs=np.concatenate([entry[4] for entry in queue]),
            known=known.reshape(-1),
            clock=start + CLOCK * self.clocks.capacity,
            proxy=start + SHARED * self.clocks.capacity,
            crew=crew,
            unit="WGMMA",
        )
        cells, run = self.smem.cells(by.agents[rows] // self.warps_per_cta, cells * CELL, CELL)
        self.smem.access(by, cells, rows if run is None else rows[run], write=False)

    def wgmma_fence(self, agents: np.ndarray) -> None:
        """wgmma.fence."""
        self.groups.fence(agents)

    def wgmma_commit(self, agents: np.ndarray) -> None:
        """wgmma.commit_group."""
        self.groups.committed[agents] += 1

    def wgmma_wait(self, agents: np.ndarray, pending: int) -> None:
        """wgmma.wait_group."""
        self._flush()
        self.groups.wait(agents, pending)

    def registers(self, agents: np.ndarray, src: int, reads: Sequence[int] = (), writes: Sequence[int] = ()) -> None:
        """An instruction other than WGMMA names registers that some WGMMA uses (not a plain move between such)."""
        self.groups.touch(agents, src, (*reads, *writes))

    def fresh_registers(self, agents: np.ndarray, src: int, registers: Sequence[int]) -> None:
        """A plain move sets registers that some WGMMA uses to a constant."""
        self.groups.fresh(agents, src, registers)

    def move_registers(self, agents: np.ndarray, dst: Sequence[int], src: Sequence[int]) -> None:
        """A plain move renames a register: its state goes with it."""
        self.groups.move(agents, dst, src)

    # ---- mbarriers

    def mbar_init(
        self, agents: np.ndarray, src: int, cta: np.ndarray, bar: np.ndarray, count: int | np.ndarray = 1
    ) -> None:
        """mbarrier.init of barriers at offset `bar` (n,) of the agents' own CTA."""
        self._flush()
        n = len(agents)
        self.barriers.init(agents, src, array(cta, n), array(bar, n), array(count, n))

    def mbar_inval(self, agents: np.ndarray, src: int, cta: np.ndarray, bar: np.ndarray) -> None:
        """mbarrier.inval."""
        self._flush()
        n = len(agents)
        self.barriers.invalidate(agents, src, array(cta, n), array(bar, n))

    def mbar_arrive(
        self,
        agents: np.ndarray,
        src: int,
        cta: np.ndarray,
        bar: np.ndarray,
        count: int | np.ndarray = 1,
        expect_tx: int | np.ndarray = 0,
        *,
        release: bool = True,
        arrive: bool = True,
        drop: bool = False,
    ) -> None:
        """mbarrier.arrive, .arrive.expect_tx, or (arrive=False) .expect_tx alone; `cta` may be a peer. drop: later
        phases take so many arrivals fewer.

        `count` is the number of arrivals that the agent makes with this instruction, over all its lanes.
        """
        self._flush()
        n = len(agents)
        cta = array(cta, n)
        self._touch_remote(agents, src, cta)
        slots = self.barriers.use(agents, src, cta, array(bar, n))
        self.barriers.arrive(agents, src, slots, array(count, n), array(expect_tx, n), release, arrive, drop)

    def mbar_complete(self, cta: np.ndarray, bar: np.ndarray, phase: np.ndarray) -> None:
        """The current phase of these barriers, each named once, has completed; called after the arrivals."""
        self._flush()
        n = len(cta)
        self.barriers.complete(array(cta, n), array(bar, n))

    def mbar_wait(self, agents: np.ndarray, src: int, cta: np.ndarray, bar: np.ndarray, phase: np.ndarray) -> None:
        """A test_wait or try_wait that succeeded on the latest completed phase, or (phase -1) at once."""
        self._flush()
        n = len(agents)
        slots = self.barriers.use(agents, src, array(cta, n), array(bar, n))
        seen = array(phase, n) >= 0
        if seen.any():
            self.barriers.wait(agents[seen], src, slots[seen])

    def mbar_landed(self, cta: np.ndarray, bar: np.ndarray, nbytes: int | np.ndarray) -> None:
        """Bytes reached a barrier other than by a copy known here (mbarrier.complete_tx, st.async)."""
        n = len(cta)
        self.barriers.landed(array(cta, n), array(bar, n), array(nbytes, n))

    # ---- execution barriers

    def _named_slots(self, agents: np.ndarray, barrier_id: int | np.ndarray) -> np.ndarray:
        ctas = (agents // self.warps_per_cta).tolist()
        slots = []
        for key in zip(ctas, array(barrier_id, len(agents)).tolist(), strict=True):
            slot = self._named_slot.get(key)
            if slot is None:
                if not self._named_free:
                    have = len(self._named.rows)
                    self._named.reserve(2 * have)
                    self._named_free.extend(range(2 * have - 1, have - 1, -1))
                slot = self._named_slot[key] = self._named_free.pop()
            slots.append(slot)
        return np.array(slots, np.int64)

    def bar_arrive(self, agents: np.ndarray, src: int, barrier_id: int | np.ndarray) -> None:
        """Arrival at a named barrier, by bar.arrive or bar.sync."""
        self._flush()
        self._named.release(self._named_slots(agents, barrier_id), agents)

    def bar_complete(self, agents: np.ndarray, barrier_id: int | np.ndarray) -> None:
        """A named barrier completes and lets these agents (all that wait at it) go."""
        self._flush()
        slots = self._named_slots(agents, barrier_id)
        self._named.acquire(slots, agents)
        self._named.clear(slots)
        ctas = (agents // self.warps_per_cta).tolist()
        for key in set(zip(ctas, array(barrier_id, len(agents)).tolist(), strict=True)):
            self._named_free.append(self._named_slot.pop(key))

    def bar_sync(self, agents: np.ndarray, barrier_id: int = 0) -> None:
        """Whole barriers in one step: the k agents of each row of (n, k) all arrive and leave."""
        self._flush()
        self.clocks.join_rows(agents)

    def cluster_arrive(self, agents: np.ndarray, src: int, release: bool = True) -> None:
        """barrier.cluster.arrive; release=False for .relaxed, which still publishes fenced barrier inits."""
        self._flush()
        slots = agents // self.warps
        self._cluster_arrivals.release(slots, agents, slice(None) if release else slice(INIT, INIT + 1))

    def cluster_complete(self, clusters: np.ndarray) -> None:
        """All threads of these clusters have arrived."""
        self._cluster_arrivals.copy(clusters, self._cluster_done)
        self._cluster_arrivals.clear(clusters)

    def cluster_wait(self, agents: np.ndarray, src: int, acquire: bool = True) -> None:
        """barrier.cluster.wait returns (it acquires unless it says otherwise)."""
        self._flush()
        if acquire:
            self._cluster_done.acquire(agents // self.warps, agents)

    # ---- ends

    def warp_exit(self, agents: np.ndarray, src: int) -> None:
        """These warps are done; what they leave behind is looked at when their whole CTA is."""
        self._flush()

    def cta_exit(self, ctas: np.ndarray) -> None:
        """All warps of these CTAs are done: look for work in flight and for peers not done with them."""
        self._flush()
        for cta in np.asarray(ctas).tolist():
            self._leave(cta)

    def _leave(self, cta: int) -> None:
        own = np.arange(cta * self.warps_per_cta, (cta + 1) * self.warps_per_cta)
        known = self.clocks.table[own, CLOCK].max(axis=0)
        self.barriers.leave(cta, known)
        self.groups.leave(own, known)
        for agent in own[self._async_last[own] > 0].tolist():
            if self._async_last[agent] > known[self._async_columns[agent % self.warps]]:
                source = self._async_source[agent]
                self.findings.add("exit-with-copy-in-flight", source, [agent], unit="cp.async in flight")
        for (agent, _), (read, _, _, last, source) in self._bulk.pop(cta, {}).items():
            if last > known[read]:
                unit = f"bulk group {last - 1}"
                self.findings.add("exit-with-copy-in-flight", source, [agent], unit=unit)
        for agent, (epoch, src) in self._remote.pop(cta, {}).items():
            if epoch > known[agent % self.warps]:
                detail = f"CTA {cta} may have exited"
                self.findings.add("exit-before-remote-access", src, [agent], detail=detail)
        self._exited.add(cta)
        self.smem.shadow.release(cta)

    def any_found(self) -> bool:
        """Whether any hazard has been met so far."""
        self._flush()
        return bool(self.findings)

    def finish(self, stopped: bool = False) -> list[Hazard]:
        """All hazards, the first met first.

        Args:
            stopped: the run was cut short, so work still due at the barriers of living CTAs means nothing.
        """
        self._flush()
        if not stopped:
            for slot, (cta, _) in enumerate(self.barriers.places):
                if cta not in self._exited:
                    self.barriers.balance(slot)
        return self.findings.named(self.barriers.ring)[: self.limit]
