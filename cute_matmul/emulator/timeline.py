"""Timelines of executed kernels: who was busy when, on a logical clock.

`Tracer` watches an execution and keeps the clocks; `Timeline` holds the resulting events and draws them: terminal
Gantt, SVG, Perfetto (Chrome trace) JSON. `overlap` and `tensor_gaps` compute facts from events.

The logical clock. Every warp has a clock that grows by the issue cost of what it executes. An asynchronous unit
(the port to L2, the tensor unit) starts an operation when both the issuing warp's clock and the unit allow, is busy
for the operation's time, and its effect is visible a latency later. A warp that waits continues at the time of what
released it: the last arrival or landed byte of an mbarrier's phase, the last warp at a barrier, the end of a WGMMA
group. Costs are those of a `LatencyModel`. The order in which the emulator happened to execute things decides only
who gets a shared unit first. One CTA has one SM to itself.

`Tracer` has the event methods of the hazard engine, with the same arguments, so that an interpreter calls both at
the same places; what a timeline does not need is accepted and ignored.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from xml.sax.saxutils import escape

import numpy as np

from cute_matmul.emulator.latency import HOPPER, LatencyModel

LOAD, STORE, TENSOR, WAIT, SYNC = "load", "store", "tensor", "wait", "sync"


@dataclass(frozen=True)
class Event:
    """One interval on one CTA's timeline; times in cycles.

    kind: "load" (global to shared, from issue to landing), "store" (towards global), "tensor" (the tensor unit
    busy), "wait" (a warp held by an mbarrier, a WGMMA group or a copy), "sync" (held by an execution barrier).
    agent is the warp (over the whole grid) that issued or waited. stage is the ring slot, use how often it had been
    filled before, both None where there is no ring. what is a short label, source the kernel's line.
    """

    kind: str
    cta: int
    agent: int
    start: float
    end: float
    stage: int | None = None
    use: int | None = None
    what: str = ""
    role: str = ""
    source: str = ""
    count: int = 1
    nbytes: int = 0

    @property
    def duration(self) -> float:
        return self.end - self.start


# --- Recording ---------------------------------------------------------------------------------------------


@dataclass
class _Group:
    """Operations of one warp (or warp group, or lane) that are not committed yet, and the committed groups' ends."""

    open: list[tuple[float, float]] = field(default_factory=list)  # (sources free, complete) per operation
    committed: list[tuple[float, float]] = field(default_factory=list)

    def commit(self) -> None:
        ends = [end for _, end in self.open]
        self.committed.append((max((free for free, _ in self.open), default=0.0), max(ends, default=0.0)))
        self.open.clear()

    def wait(self, pending: int, source_only: bool = False) -> float:
        """The time at which all but the last `pending` groups are done."""
        done = self.committed[: max(len(self.committed) - pending, 0)]
        time = max((free if source_only else end for free, end in done), default=0.0)
        if not source_only:  # or a wait for their completion is still to come
            del self.committed[: len(done)]
        return time


class Tracer:
    """Keeps the clocks of one launch and records events.

    ctas and warps_per_cta size the grid; an agent is `cta * warps_per_cta + warp`. describe(src) gives (line, text)
    of an instruction. Events are recorded for the CTAs in `record` (all by default); clocks run for all.
    """

    MERGE = 4.0  # cycles: plain loads, stores and mma.sync closer than this are one event

    def __init__(
        self,
        ctas: int,
        warps_per_cta: int,
        cluster_size: int = 1,
        kernel: str = "",
        model: LatencyModel = HOPPER,
        describe: Callable[[int], tuple[str, str]] | None = None,
        record: Iterable[int] | None = None,
    ):
        self.model = model
        self.kernel = kernel
        self.warps_per_cta = warps_per_cta
        self.cluster_size = cluster_size
        self.clock = np.zeros(ctas * warps_per_cta)
        self._describe = describe
        self._record = None if record is None else frozenset(record)
        self._wave_end = 0.0
        self._wave_start = 0.0
        self._landing = np.zeros(ctas * warps_per_cta)  # of plain loads; the warp stalls at its next segment
        self._port = np.zeros(ctas)  # when each SM's port to L2 is free
        self._tensor = np.zeros((ctas, 4))  # when each quarter of the tensor unit is free
        self._barriers: dict[tuple[int, int], float] = defaultdict(float)  # latest contribution to the open phase
        self._phases: dict[tuple[int, int, int], float] = {}
        self._phase_count: dict[tuple[int, int], int] = defaultdict(int)
        self._named: dict[tuple[int, int], tuple[float, int]] = {}  # (cta, barrier) -> latest arrival, warps
        self._cluster: dict[int, float] = defaultdict(float)
        self._cluster_done: dict[int, float] = {}
        self._wgmma: dict[tuple[int, int], _Group] = defaultdict(_Group)
        self._wgmma_open: dict[tuple[int, int], list[dict]] = defaultdict(list)
        self._copies: dict[int, _Group] = defaultdict(_Group)
        self._bulk: dict[tuple[int, int], _Group] = defaultdict(_Group)
        self._load_barriers: dict[int, set[int]] = defaultdict(set)
        self._waiters: dict[tuple[int, int], set[int]] = defaultdict(set)  # (cta, barrier) -> agents
        self._loaders: set[int] = set()
        self._regions: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)  # start -> (end, barrier)
        self._events: list[dict] = []
        self._running: dict[tuple, dict] = {}

    # Clocks ------------------------------------------------------------------------------------------------

    def start(self, agents: np.ndarray) -> None:
        """A wave of CTAs begins, when the wave before has ended."""
        self._wave_start = self._wave_end
        self.clock[agents] = self._wave_start
        self._landing[agents] = self._wave_start
        ctas = np.unique(np.asarray(agents) // self.warps_per_cta)
        self._port[ctas] = self._wave_start
        self._tensor[ctas] = self._wave_start

    def issue(self, agents: np.ndarray, count: int) -> None:
        """`agents` executed `count` instructions each; waits for the plain loads of the segment before."""
        self.clock[agents] = np.maximum(self.clock[agents], self._landing[agents]) + count * self.model.issue

    def _cta(self, agents: np.ndarray) -> np.ndarray:
        return np.asarray(agents) // self.warps_per_cta

    def _advance(
        self, agent: int, to: float, kind: str, what: str, src: int | None, barrier: int | None = None
    ) -> None:
        """Move a warp's clock to `to`, recording the time it was held."""
        now = float(self.clock[agent])
        if to > now:
            self.clock[agent] = to
            self._add(kind, agent // self.warps_per_cta, agent, now, to, what=what, src=src, barrier=barrier)

    def _add(self, kind: str, cta: int, agent: int, start: float, end: float, **detail) -> None:
        if self._record is None or cta in self._record:
            self._events.append(dict(kind=kind, cta=cta, agent=agent, start=start, end=end, **detail))

    def _extend(self, key: tuple, kind: str, cta: int, agent: int, start: float, end: float, **detail) -> None:
        """Record an interval, joined to the row's last one when it follows within `MERGE` cycles."""
        running = self._running.get(key)
        if running is not None and running["start"] <= start <= running["end"] + self.MERGE:
            running["end"] = max(running["end"], end)
            running["count"] += 1
            running["nbytes"] += detail.get("nbytes", 0)
            return
        if self._record is None or cta in self._record:
            event = dict(kind=kind, cta=cta, agent=agent, start=start, end=end, count=1, **{"nbytes": 0, **detail})
            self._events.append(event)
            self._running[key] = event

    # Plain memory and mma.sync -----------------------------------------------------------------------------

    def memory(
        self, agents: np.ndarray, space: str, nbytes: float | np.ndarray, write: bool = False, src: int | None = None
    ) -> None:
        """Plain loads and stores, ldmatrix and stmatrix: nbytes per warp in "shared", "global" or "local"."""
        agents = np.asarray(agents)
        nbytes = np.broadcast_to(np.asarray(nbytes, dtype=np.float64), agents.shape)
        model = self.model
        if space != "global":
            self.clock[agents] += nbytes / model.shared_bytes_per_cycle
            if not write:
                self._landing[agents] = np.maximum(self._landing[agents], self.clock[agents] + model.shared_latency)
            return
        for agent, size in zip(agents.tolist(), nbytes.tolist(), strict=True):
            cta = agent // self.warps_per_cta
            start = max(float(self.clock[agent]), float(self._port[cta]))
            self._port[cta] = start + model.port(size)
            end = float(self._port[cta]) + (model.store_latency if write else model.l2_latency)
            if not write:
                self._landing[agent] = max(float(self._landing[agent]), end)
            kind = STORE if write else LOAD
            self._extend(
                (kind, cta, agent // 4), kind, cta, agent, start, end,
                what="st.global" if write else "ld.global", src=src, nbytes=int(size),
            )  # fmt: skip

    def mma(self, agents: np.ndarray, src: int, op) -> None:
        """mma.sync `op` (with `.n` and `.k_bytes`) by each warp, on its quarter of the tensor unit."""
        cycles = self.model.mma_sync(op.n, op.k_bytes)
        for agent in np.asarray(agents).tolist():
            cta, quarter = agent // self.warps_per_cta, agent % 4
            start = max(float(self.clock[agent]), float(self._tensor[cta, quarter]))
            end = start + cycles
            self._tensor[cta, quarter] = end
            self._landing[agent] = max(float(self._landing[agent]), end + self.model.tensor_drain)
            self.clock[agent] = start
            self._extend((TENSOR, cta, quarter), TENSOR, cta, agent, start, end, what="mma.sync", src=src)

    # WGMMA -------------------------------------------------------------------------------------------------

    def _warp_group(self, agent: int) -> tuple[int, int]:
        return agent // self.warps_per_cta, agent % self.warps_per_cta // 4

    def wgmma(self, agents: np.ndarray, src: int, cells: np.ndarray, acc=(), a_regs=(), reads_acc=None, *, op) -> None:
        """One instruction `op` (with `.n`) by each row of four warps; cells say which stage it reads."""
        cycles = self.model.wgmma(op.n)
        for four, granules in zip(np.asarray(agents).tolist(), np.asarray(cells), strict=True):
            group = self._warp_group(four[0])
            cta = group[0]
            start = max(float(self.clock[four].max()), float(self._tensor[cta].max()))
            end = start + cycles
            self._tensor[cta] = end
            self._wgmma[group].open.append((end, end + self.model.tensor_drain))
            barrier = self._stage_barrier(cta, int(granules[0]) * 16)
            runs = self._wgmma_open[group]
            if runs and runs[-1]["barrier"] == barrier and start - runs[-1]["end"] <= self.MERGE:
                runs[-1]["end"] = end
                runs[-1]["count"] += 1
            else:
                use = self._phase_count[cta, barrier] - 1 if barrier is not None else None
                run = {"start": start, "end": end, "agent": four[0], "src": src, "count": 1}
                runs.append({**run, "barrier": barrier, "use": use, "what": "wgmma"})

    def _stage_barrier(self, cta: int, address: int) -> int | None:
        """The barrier of the last load that filled shared `address`."""
        regions = self._regions[cta]
        starts = sorted(regions)
        at = bisect.bisect_right(starts, address) - 1
        if at < 0:
            return None
        end, barrier = regions[starts[at]]
        return barrier if address < end else None

    def wgmma_commit(self, agents: np.ndarray) -> None:
        """End the current group of the warp groups of `agents`."""
        for group in dict.fromkeys(self._warp_group(agent) for agent in np.asarray(agents).ravel().tolist()):
            # Each warp of the group may report the commit: only the first has anything to close.
            if self._wgmma[group].open:
                self._wgmma[group].commit()
            for run in self._wgmma_open.pop(group, ()):
                self._add(TENSOR, group[0], **run)

    def wgmma_wait(self, agents: np.ndarray, pending: int, src: int | None = None) -> None:
        """Warps continue when all but `pending` groups of their warp group are complete."""
        until = {}
        for agent in np.asarray(agents).ravel().tolist():
            group = self._warp_group(agent)
            if group not in until:
                done = self._wgmma[group].committed
                last = len(done) - 1 - pending  # groups of one warp group end in the order they were committed
                until[group] = done[last][1] if last >= 0 else 0.0
            self._advance(agent, until[group], WAIT, "wgmma.wait", src)

    # Copies ------------------------------------------------------------------------------------------------

    def bulk_load(
        self, agents, src, cta, offset, nbytes, bar_cta, bar, gaddr=None, gbytes=None, what: str = "TMA load"
    ) -> None:
        """Copies from global to shared memory, one row per destination CTA."""
        rows = np.broadcast_arrays(
            *(np.asarray(x, dtype=np.int64) for x in (agents, cta, offset, nbytes, bar_cta, bar))
        )
        for agent, to, start_byte, size, bar_at, barrier in zip(*(row.ravel().tolist() for row in rows), strict=True):
            issued = float(self.clock[agent])
            start = max(issued, float(self._port[to]))
            self._port[to] = start + self.model.port(size)
            landed = float(self._port[to]) + self.model.copy_latency
            key = (bar_at, barrier)
            self._barriers[key] = max(self._barriers[key], landed)
            self._load_barriers[bar_at].add(barrier)
            self._loaders.add(agent)
            self._regions[to][start_byte] = (start_byte + size, barrier)
            self._add(
                LOAD, to, agent, issued, landed,
                what=what, src=src, barrier=barrier, use=self._phase_count[key], nbytes=size,
            )  # fmt: skip

    def bulk_copy_peer(self, agents, src, offset, cta, dst, nbytes, bar_cta, bar) -> None:
        """Copies from shared memory to a peer's shared memory."""
        self.bulk_load(agents, src, cta, dst, nbytes, bar_cta, bar, what="copy to peer")

    def bulk_store(
        self, agents, src, lane, offset, nbytes=None, cells=None, gaddr=None, gbytes=None, reduce=False
    ) -> None:
        """Copies from shared to global memory, one row per copy."""
        size_of = nbytes if nbytes is not None else 16 * np.asarray(cells).shape[-1]
        rows = np.broadcast_arrays(*(np.asarray(x, dtype=np.int64) for x in (agents, lane, size_of)))
        for agent, thread, size in zip(*(row.ravel().tolist() for row in rows), strict=True):
            cta = agent // self.warps_per_cta
            issued = float(self.clock[agent])
            start = max(issued, float(self._port[cta]))
            self._port[cta] = start + self.model.port(size)
            read = float(self._port[cta])
            complete = read + self.model.store_latency
            self._bulk[agent, thread].open.append((read, complete))
            self._add(
                STORE, cta, agent, issued, complete, what="TMA reduce" if reduce else "TMA store", src=src, nbytes=size
            )

    def bulk_commit(self, agents, lane) -> None:
        for agent, thread in self._pairs(agents, lane):
            self._bulk[agent, thread].commit()

    def bulk_wait(self, agents, lane, pending: int, read: bool = False, src: int | None = None) -> None:
        for agent, thread in self._pairs(agents, lane):
            self._advance(agent, self._bulk[agent, thread].wait(pending, read), WAIT, "bulk.wait", src)

    @staticmethod
    def _pairs(agents, lane) -> list[tuple[int, int]]:
        agents, lane = np.broadcast_arrays(np.asarray(agents), np.asarray(lane))
        return list(zip(agents.ravel().tolist(), lane.ravel().tolist(), strict=True))

    def cp_async(self, agents, src, dst, size, mask=None, src_addr=None, src_bytes=None) -> None:
        """cp.async of `size` bytes per active lane."""
        agents = np.asarray(agents)
        lanes = np.full(len(agents), np.asarray(dst).shape[-1]) if mask is None else np.asarray(mask).sum(axis=-1)
        for agent, active in zip(agents.tolist(), lanes.tolist(), strict=True):
            cta = agent // self.warps_per_cta
            start = max(float(self.clock[agent]), float(self._port[cta]))
            self._port[cta] = start + self.model.port(active * size)
            landed = float(self._port[cta]) + self.model.l2_latency
            self._copies[agent].open.append((landed, landed))
            self._extend(
                ("cp.async", cta, agent // 4), LOAD, cta, agent, start, landed,
                what="cp.async", src=src, nbytes=int(active * size),
            )  # fmt: skip

    def cp_async_commit(self, agents) -> None:
        for agent in np.asarray(agents).tolist():
            self._copies[agent].commit()

    def cp_async_wait(self, agents, pending: int, src: int | None = None) -> None:
        for agent in np.asarray(agents).tolist():
            self._advance(agent, self._copies[agent].wait(pending), WAIT, "cp.async.wait", src)

    def cp_async_mbarrier_arrive(self, agents, src, cta, bar) -> None:
        rows = np.broadcast_arrays(np.asarray(agents), np.asarray(cta), np.asarray(bar))
        for agent, at, barrier in zip(*(row.ravel().tolist() for row in rows), strict=True):
            ends = [end for _, end in self._copies[agent].open + self._copies[agent].committed]
            key = (at, barrier)
            self._barriers[key] = max([self._barriers[key], *ends])
            self._load_barriers[at].add(barrier)

    # mbarrier ----------------------------------------------------------------------------------------------

    def mbar_init(self, agents, src, cta, bar, count=1) -> None:
        for key in self._pairs(cta, bar):
            self._barriers.pop(key, None)
            self._phase_count[key] = 0
            for phase in [phase for at, barrier, phase in self._phases if (at, barrier) == key]:
                del self._phases[(*key, phase)]

    def mbar_inval(self, agents, src, cta, bar) -> None:
        """Nothing to do: a re-init resets the barrier."""

    def mbar_arrive(
        self, agents, src, cta, bar, count=1, expect_tx=0, release: bool = True, arrive: bool = True, drop: bool = False
    ) -> None:
        rows = np.broadcast_arrays(np.asarray(agents), np.asarray(cta), np.asarray(bar))
        for agent, at, barrier in zip(*(row.ravel().tolist() for row in rows), strict=True):
            own = agent // self.warps_per_cta == at
            arrived = float(self.clock[agent]) + (self.model.mbarrier_arrive if own else self.model.remote_arrive)
            self._barriers[at, barrier] = max(self._barriers[at, barrier], arrived)

    def mbar_complete(self, cta, bar, phase) -> None:
        rows = np.broadcast_arrays(np.asarray(cta), np.asarray(bar), np.asarray(phase))
        for at, barrier, number in zip(*(row.ravel().tolist() for row in rows), strict=True):
            self._phases[at, barrier, number] = self._barriers.pop((at, barrier), 0.0)
            self._phase_count[at, barrier] = number + 1

    def mbar_landed(self, cta, bar, nbytes) -> None:
        """Nothing to do: landing times are known when a copy is issued."""

    def mbar_wait(self, agents, src, cta, bar, phase) -> None:
        rows = np.broadcast_arrays(np.asarray(agents), np.asarray(cta), np.asarray(bar), np.asarray(phase))
        for agent, at, barrier, number in zip(*(row.ravel().tolist() for row in rows), strict=True):
            self._waiters[at, barrier].add(agent)
            done = self._phases.get((at, barrier, number), 0.0)
            if done > self.clock[agent]:
                self._advance(agent, done, WAIT, "mbarrier", src, barrier)
            self.clock[agent] += self.model.mbarrier_wait

    # Execution barriers ------------------------------------------------------------------------------------

    def bar_arrive(self, agents, src, barrier_id) -> None:
        agents = np.asarray(agents)
        for agent, number in zip(agents.tolist(), np.broadcast_to(barrier_id, agents.shape).tolist(), strict=True):
            key = (agent // self.warps_per_cta, number)
            latest, warps = self._named.get(key, (0.0, 0))
            self._named[key] = (max(latest, float(self.clock[agent])), warps + 1)

    def bar_complete(self, agents, barrier_id) -> None:
        agents = np.asarray(agents)
        times: dict[tuple[int, int], tuple[float, int]] = {}
        for agent, number in zip(agents.tolist(), np.broadcast_to(barrier_id, agents.shape).tolist(), strict=True):
            key = (agent // self.warps_per_cta, number)
            if key not in times:
                times[key] = self._named.pop(key, (0.0, 0))
            latest, warps = times[key]
            self._advance(agent, latest, SYNC, f"bar {number}", None)
            self.clock[agent] += self.model.bar_sync(warps)

    def bar_sync(self, agents, barrier_id=0) -> None:
        for row, number in zip(
            np.asarray(agents), np.broadcast_to(barrier_id, len(np.asarray(agents))).tolist(), strict=True
        ):
            self.bar_arrive(row, None, number)
            self.bar_complete(row, number)

    def cluster_arrive(self, agents, src, release: bool = True) -> None:
        for agent in np.asarray(agents).tolist():
            cluster = agent // self.warps_per_cta // self.cluster_size
            self._cluster[cluster] = max(self._cluster[cluster], float(self.clock[agent]))

    def cluster_complete(self, clusters) -> None:
        for cluster in np.asarray(clusters).ravel().tolist():
            self._cluster_done[cluster] = self._cluster.pop(cluster, 0.0) + self.model.cluster_barrier

    def cluster_wait(self, agents, src, acquire: bool = True) -> None:
        for agent in np.asarray(agents).tolist():
            cluster = agent // self.warps_per_cta // self.cluster_size
            self._advance(agent, self._cluster_done.get(cluster, 0.0), SYNC, "cluster", src)

    def warp_exit(self, agents, src) -> None:
        self._wave_end = max(self._wave_end, float(self.clock[np.asarray(agents)].max()))

    def _ignore(self, *args, **kwargs) -> None:
        """An event that takes no time of its own here."""

    add_allocation = shared = global_ = fence = registers = move_registers = fresh_registers = _ignore
    wgmma_fence = cta_exit = report = _ignore

    # Result ------------------------------------------------------------------------------------------------

    def timeline(self, role: Callable[[int], str] | None = None) -> Timeline:
        """The events so far, with roles from `role(agent)` and stages from the order of barriers in memory."""
        for group in list(self._wgmma_open):
            self.wgmma_commit(np.array([group[0] * self.warps_per_cta + 4 * group[1]]))
        # Loads complete on "full" barriers; what else their issuers wait for is "empty"; the rest is not a ring's.
        named: dict[tuple[int, str], set[int]] = defaultdict(set)
        for cta, barriers in self._load_barriers.items():
            named[cta, "full"] = barriers
        for (cta, barrier), agents in self._waiters.items():
            if barrier not in self._load_barriers.get(cta, ()):
                named[cta, "empty" if agents & self._loaders else "mbarrier"].add(barrier)
        stages = {
            (cta, barrier): (name, i) for (cta, name), found in named.items() for i, barrier in enumerate(sorted(found))
        }
        sources: dict[int | None, str] = {None: ""}
        events = []
        for entry in self._events:
            entry = dict(entry)
            src = entry.pop("src", None)
            if src not in sources:
                sources[src] = self._describe(src)[0] if self._describe else f"#{src}"
            name, stage = stages.get((entry["cta"], entry.pop("barrier", None)), (None, None))
            if entry["kind"] == WAIT and name:
                entry["what"] = name
            entry["role"] = role(entry["agent"]) if role else ""
            events.append(Event(stage=stage, source=sources[src], **entry))
        events.sort(key=lambda event: (event.cta, event.start, event.end))
        return Timeline(tuple(events), self.kernel, self.model)


# --- Facts -------------------------------------------------------------------------------------------------


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted disjoint intervals that cover the same points."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _common(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """Total length of the intersection of two lists of sorted disjoint intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def _busy(events: Iterable[Event], kind: str, cta: int) -> list[tuple[float, float]]:
    return union((event.start, event.end) for event in events if event.kind == kind and event.cta == cta)


@dataclass(frozen=True)
class Overlap:
    """How much of one CTA's loading happened while its tensor unit was busy.

    load_cycles: time with at least one load in flight. overlapped_cycles: of that, with the tensor unit busy.
    loads and overlapped_loads count copies, the latter those with the tensor unit busy at some time of their flight.
    """

    load_cycles: float
    overlapped_cycles: float
    loads: int
    overlapped_loads: int

    @property
    def fraction(self) -> float:
        """Share of the loading time, 0 to 1; 0 without loads."""
        return self.overlapped_cycles / self.load_cycles if self.load_cycles else 0.0


def overlap(events: Iterable[Event], cta: int = 0) -> Overlap:
    """Overlap of loads and tensor work of one CTA."""
    events = list(events)
    tensor = _busy(events, TENSOR, cta)
    loads = [event for event in events if event.kind == LOAD and event.cta == cta]
    loading = _busy(events, LOAD, cta)
    during = sum(_common([(load.start, load.end)], tensor) > 0 for load in loads)
    return Overlap(_length(loading), _common(loading, tensor), len(loads), during)


def tensor_gaps(events: Iterable[Event], cta: int = 0) -> list[tuple[float, float]]:
    """Intervals between one CTA's first and last tensor work in which its tensor unit is idle."""
    busy = _busy(events, TENSOR, cta)
    return [(before[1], after[0]) for before, after in itertools.pairwise(busy)]


def tensor_share(events: Iterable[Event], cta: int = 0) -> float:
    """Busy share of the tensor unit between the CTA's first and last event, 0 to 1."""
    events = [event for event in events if event.cta == cta]
    if not events:
        return 0.0
    span = max(event.end for event in events) - min(event.start for event in events)
    return _length(_busy(events, TENSOR, cta)) / span if span else 0.0


# --- Drawing -----------------------------------------------------------------------------------------------

_SHADES = " ░▒▓█"
_AWAITED = {"full": "full stage", "empty": "empty stage", "wgmma.wait": "tensor", "bulk.wait": "store"}


@dataclass(frozen=True)
class Timeline:
    """Events of one launch (sorted by CTA and start), the kernel's name, and the model that timed them."""

    events: tuple[Event, ...]
    kernel: str = ""
    model: LatencyModel = HOPPER

    @property
    def ctas(self) -> tuple[int, ...]:
        return tuple(sorted({event.cta for event in self.events}))

    @property
    def end(self) -> float:
        """Cycles until the last event ends; 0 without events."""
        return max((event.end for event in self.events), default=0.0)

    def rows(self, cta: int = 0) -> list[tuple[str, str, list[Event]]]:
        """(label, kind, events) of one CTA: loads by stage, tensor work, stores, waits by role and what for.

        Copies that fill a stage together (A and B) are one event here; waits below 1% of the time are left out.
        """
        table: dict[tuple[int, str, str], list[Event]] = defaultdict(list)
        rank = {LOAD: 0, TENSOR: 1, STORE: 2, WAIT: 3, SYNC: 3}
        groups = {event.agent // 4 for event in self.events if event.cta == cta and event.kind == TENSOR}
        held: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for event in self.events:
            if event.cta == cta and event.kind in (WAIT, SYNC):
                held[event.role][event.agent] += event.duration
        # The warp that waits most speaks for its role: the others of the role wait for the same things.
        speaker = {role: max(sorted(times), key=times.__getitem__) for role, times in held.items()}
        for event in self.events:
            if event.cta != cta:
                continue
            if event.kind == LOAD:
                label = event.what if event.stage is None else f"load stage {event.stage}"
            elif event.kind == TENSOR:
                label = "tensor" if len(groups) < 2 else f"tensor {event.role}"
            elif event.kind == STORE:
                label = "store"
            else:
                label = f"{event.role} waits: {_AWAITED.get(event.what, event.what)}".lstrip()
                if event.agent != speaker[event.role]:
                    continue
            table[rank[event.kind], label, WAIT if event.kind == SYNC else event.kind].append(event)
        span = self.end - min((event.start for event in self.events), default=0.0)
        rows = []
        for order, label, kind in sorted(table):
            events = table[order, label, kind]
            if kind == LOAD:
                events = _fills(events)
            if kind != WAIT or sum(event.duration for event in events) >= 0.01 * span:
                rows.append((label, kind, events))
        return rows

    def summary(self, cta: int = 0) -> str:
        """One line of facts about a CTA."""
        seen = overlap(self.events, cta)
        return (
            f"CTA {cta}: {self.end:.0f} cycles, tensor unit busy {tensor_share(self.events, cta):.0%}, "
            f"{seen.fraction:.0%} of the loading time overlaps tensor work "
            f"({seen.overlapped_loads} of {seen.loads} loads)"
        )

    def gantt(self, width: int = 100, cta: int = 0) -> str:
        """Terminal chart of one CTA: a row per stage, unit and role; shades say how much of a column is busy."""
        rows = self.rows(cta)
        if not rows:
            return f"CTA {cta}: no events"
        start = min(event.start for _, _, events in rows for event in events)
        end = max(event.end for _, _, events in rows for event in events)
        label_width = max(len(label) for label, _, _ in rows)
        columns = max(width - label_width - 3, 10)
        edges = np.linspace(start, end, columns + 1)
        lines = []
        for label, _, events in rows:
            covered = np.zeros(columns)
            for lo, hi in union((event.start, event.end) for event in events):
                covered += np.clip(np.minimum(edges[1:], hi) - np.maximum(edges[:-1], lo), 0, None)
            share = covered / np.diff(edges) if end > start else covered
            shades = np.where(share <= 0, 0, np.clip(np.ceil(share * (len(_SHADES) - 1)), 1, 4)).astype(int)
            lines.append(f"{label:>{label_width}} |{''.join(_SHADES[i] for i in shades)}|")
        ruler = f"{start:.0f}".ljust(columns // 2) + f"{end:.0f} cycles".rjust(columns - columns // 2)
        return "\n".join([*lines, " " * (label_width + 2) + ruler, self.summary(cta)])

    def svg(self, cta: int = 0, title: str | None = None, width: int = 960) -> str:
        """One CTA as an SVG document; see `stacked_svg`."""
        return stacked_svg([(self.kernel if title is None else title, self)], cta=cta, width=width)

    def chrome_trace(self) -> dict:
        """Chrome trace events for Perfetto: a process per CTA, a thread per row; microseconds at `model.clock_mhz`."""
        trace: list[dict] = []
        for cta in self.ctas:
            name = {"name": "process_name", "ph": "M", "pid": cta, "args": {"name": f"{self.kernel} CTA {cta}".strip()}}
            trace.append(name)
            for row, (label, _, events) in enumerate(self.rows(cta)):
                trace.append({"name": "thread_name", "ph": "M", "pid": cta, "tid": row, "args": {"name": label}})
                trace.append(
                    {"name": "thread_sort_index", "ph": "M", "pid": cta, "tid": row, "args": {"sort_index": row}}
                )
                for event in events:
                    detail = {key: value for key, value in asdict(event).items() if value not in (None, "")}
                    trace.append(
                        {
                            "name": _caption(event),
                            "cat": event.kind,
                            "ph": "X",
                            "pid": cta,
                            "tid": row,
                            "ts": event.start / self.model.clock_mhz,
                            "dur": event.duration / self.model.clock_mhz,
                            "args": detail,
                        }
                    )
        return {"traceEvents": trace, "displayTimeUnit": "ns", "otherData": {"clock_mhz": self.model.clock_mhz}}

    def save_chrome_trace(self, path: str) -> None:
        """Write `chrome_trace` as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.chrome_trace(), file)

    def shifted(self, by: float) -> Timeline:
        """The same timeline with `by` cycles added to every time."""
        moved = tuple(replace(event, start=event.start + by, end=event.end + by) for event in self.events)
        return Timeline(moved, self.kernel, self.model)


def _fills(loads: Sequence[Event]) -> list[Event]:
    """Copies for the same fill of the same stage, joined into one event each."""
    joined: dict[tuple, Event] = {}
    for number, event in enumerate(loads):
        key = (event.stage, event.use) if event.stage is not None else (None, number)
        if key in joined:
            first = joined[key]
            event = replace(
                first,
                start=min(first.start, event.start),
                end=max(first.end, event.end),
                count=first.count + event.count,
                nbytes=first.nbytes + event.nbytes,
            )
        joined[key] = event
    return list(joined.values())


def _caption(event: Event) -> str:
    where = "" if event.stage is None else f"[{event.stage}]"
    use = "" if event.use is None else f" #{event.use}"
    return f"{event.what or event.kind}{where}{use}"


_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 14px; }
  .tick, .note { fill: #59636e; font-size: 11px; }
  .inside { fill: #ffffff; font-size: 11px; text-anchor: middle; }
  .grid { stroke: #d1d9e0; stroke-width: 1; }
  .lane { fill: #f6f8fa; }
  .load { fill: #0969da; } .tensor { fill: #1a7f37; } .store { fill: #8250df; } .wait { fill: #bf8700; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .tick, .note { fill: #9198a1; }
    .inside { fill: #0d1117; }
    .grid { stroke: #3d444d; }
    .lane { fill: #151b23; }
    .load { fill: #4493f8; } .tensor { fill: #3fb950; } .store { fill: #ab7df8; } .wait { fill: #d29922; }
  }
"""
_LANE, _LANE_GAP, _PANEL_GAP, _HEADER = 20, 4, 22, 24


def _tick_step(span: float, ticks: int) -> float:
    """A round step that gives at most about `ticks` steps over `span`."""
    rough = span / max(ticks, 1)
    scale = 10.0 ** np.floor(np.log10(rough)) if rough > 0 else 1.0
    return float(next((m * scale for m in (1, 2, 5) if m * scale >= rough), 10 * scale))


def stacked_svg(
    panels: Sequence[tuple[str, Timeline]],
    cta: int = 0,
    width: int = 960,
    until: float | None = None,
    kinds: Sequence[str] = (LOAD, TENSOR, STORE, WAIT),
) -> str:
    """Timelines under one another on one time axis, as an SVG document without external references.

    panels: (title, timeline), drawn from top to bottom, each from the start of its own CTA `cta`. until crops the
    axis, in cycles; kinds selects rows. Colours follow the reader's light or dark scheme; every bar has a tooltip
    with its facts.
    """
    if not panels:
        raise ValueError("panels: expected at least one (title, timeline), got none")
    drawn = []
    for title, timeline in panels:
        rows = [row for row in timeline.rows(cta) if row[1] in kinds]
        origin = min((event.start for _, _, events in rows for event in events), default=0.0)
        drawn.append((title, timeline, [(label, kind, events) for label, kind, events in rows], origin))
    span = max((e.end - origin for _, _, rows, origin in drawn for _, _, events in rows for e in events), default=1.0)
    span = min(span, until) if until else span
    gutter = 24 + 7 * max((len(label) for _, _, rows, _ in drawn for label, _, _ in rows), default=8)
    plot = width - gutter - 16
    x = lambda time: gutter + plot * time / span  # noqa: E731

    body: list[str] = []
    top = 8.0
    axis_top = top
    for title, timeline, rows, origin in drawn:
        body.append(f'<text class="title" x="8" y="{top + 15:.0f}">{escape(title)}</text>')
        body.append(
            f'<text class="note" x="{width - 16}" y="{top + 15:.0f}" text-anchor="end">'
            f"{escape(timeline.summary(cta))}</text>"
        )
        top += _HEADER
        for label, kind, events in rows:
            body.append(f'<rect class="lane" x="{gutter}" y="{top:.0f}" width="{plot}" height="{_LANE}"/>')
            body.append(f'<text x="{gutter - 8}" y="{top + 14:.0f}" text-anchor="end">{escape(label)}</text>')
            for event in events:
                lo, hi = event.start - origin, min(event.end - origin, span)
                if hi <= lo:
                    continue
                caption = _caption(event)
                shown = f"{caption}: {lo:.0f} to {event.end - origin:.0f} cycles"
                if event.source:
                    shown += f", {event.source}"
                bar = x(hi) - x(lo)
                body.append(
                    f'<rect class="{kind}" x="{x(lo):.2f}" y="{top + 2:.0f}" width="{max(bar, 0.5):.2f}" '
                    f'height="{_LANE - 4}" rx="2"><title>{escape(shown)}</title></rect>'
                )
                text = "" if event.use is None else f"{event.use}"
                if text and bar > 8 * len(text) + 6:
                    body.append(f'<text class="inside" x="{(x(lo) + x(hi)) / 2:.2f}" y="{top + 14:.0f}">{text}</text>')
            top += _LANE + _LANE_GAP
        top += _PANEL_GAP - _LANE_GAP
    bottom = top - _PANEL_GAP + 4
    step = _tick_step(span, 8)
    ticks = []
    for i in range(int(span / step) + 1):
        ticks.append(
            f'<line class="grid" x1="{x(i * step):.2f}" y1="{axis_top + _HEADER:.0f}" '
            f'x2="{x(i * step):.2f}" y2="{bottom:.0f}"/>'
        )
        body.append(
            f'<text class="tick" x="{x(i * step):.2f}" y="{bottom + 14:.0f}" text-anchor="middle">{i * step:.0f}</text>'
        )
    body.append(f'<text class="tick" x="8" y="{bottom + 14:.0f}">cycles</text>')
    legend_x = float(gutter)
    legend_y = bottom + 34
    meanings = {LOAD: "load in flight", TENSOR: "tensor cores busy", STORE: "store", WAIT: "warp waits"}
    present = {kind for _, _, rows, _ in drawn for _, kind, _ in rows}
    for kind, meaning in meanings.items():
        if kind not in present:
            continue
        body.append(f'<rect class="{kind}" x="{legend_x:.0f}" y="{legend_y - 10:.0f}" width="12" height="12" rx="2"/>')
        body.append(f'<text x="{legend_x + 18:.0f}" y="{legend_y:.0f}">{meaning}</text>')
        legend_x += 40 + 7 * len(meaning)
    body.append(f'<text class="note" x="{legend_x:.0f}" y="{legend_y:.0f}">numbers count a stage\'s fills</text>')
    height = legend_y + 14
    description = "Timelines of " + ", ".join(title for title, _ in panels)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
            f'viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(description)}">',
            f"<style>{_STYLE}</style>",
            *ticks,
            *body,
            "</svg>",
            "",
        ]
    )
