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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from cute_matmul.emulator.clocks import CLOCK, GLOBAL, INIT, SHARED, Clocks, Store, distinct, merge_foreign
from cute_matmul.emulator.shadow import (
    CELL,
    GlobalShadow,
    SharedShadow,
    spread,
    spread_ragged,
    unit,
)

RULES = {
    "read-before-copy-waited": "bytes are read before the copy that fills them was waited for",
    "overwrite-before-copy-waited": "bytes are overwritten while an earlier copy into them may still land",
    "overwrite-while-wgmma-reads": "bytes are overwritten while a WGMMA group may still read them; "
    "a wgmma.wait_group of that warp group must come before",
    "overwrite-while-copy-reads": "bytes are overwritten while a copy may still read them; "
    "its issuer's wait_group must come before",
    "overwrite-while-read": "bytes are overwritten by a copy while another thread may still read them",
    "missing-proxy-fence": "bytes written by ordinary stores are accessed by the async proxy with no "
    "fence.proxy.async between",
    "data-race": "two threads access the same bytes, at least one writes, and nothing orders them",
    "uninitialised-shared-memory": "shared memory is read that nothing in this CTA has written",
    "accumulator-in-flight": "a register of a WGMMA in flight is accessed before wgmma.wait_group",
    "missing-wgmma-fence": "a WGMMA uses registers accessed by other instructions since the last wgmma.fence",
    "mbarrier-not-initialised": "an mbarrier is used where none was initialised",
    "mbarrier-init-not-visible": "an mbarrier is used before its initialisation is visible to the user: "
    "a barrier after mbarrier.init, and fence.mbarrier_init before that for copies and other CTAs",
    "mbarrier-reinitialised": "an mbarrier is initialised again while it is in use",
    "mbarrier-phase-unordered": "an arrival, or a copy's bytes, may count in another phase than meant: its "
    "thread has not seen the previous phase complete (too many arrivals, or a wait is missing)",
    "mbarrier-phase-overrun": "an mbarrier may complete a further phase before this waiter has looked: "
    "the parity it waits for then means another phase",
    "mbarrier-tx-bytes": "the bytes that copies bring to an mbarrier differ from the bytes it expects",
    "exit-with-copy-in-flight": "a CTA exits while a copy or WGMMA may still access its shared memory",
    "exit-before-remote-access": "a CTA exits while another CTA may still access its shared memory",
    "access-to-exited-cta": "shared memory of a CTA that has exited is accessed",
}
"""The rule that each kind of hazard breaks."""


@dataclass(frozen=True)
class Site:
    """One side of a hazard: an instruction, and who executed it."""

    line: str
    text: str
    cta: int | None = None
    warps: tuple[int, ...] = ()
    role: str = ""
    unit: str = ""

    def __str__(self) -> str:
        who = []
        if self.unit:
            who.append(self.unit)
        if self.warps:
            first, last = self.warps[0], self.warps[-1]
            who.append(f"warp {first}" if first == last else f"warps {first}-{last}")
        if self.role:
            who.append(self.role)
        if self.cta is not None:
            who.append(f"CTA {self.cta}")
        return f"{self.line}  {self.text}" + (f"  [{', '.join(who)}]" if who else "")


@dataclass(frozen=True)
class Hazard:
    """A rule that the kernel breaks, with both places.

    `first_byte` and `last_byte` are inclusive: offsets in the CTA's shared memory, or in the global allocation
    named by `object`. `barrier` numbers the CTA's mbarriers by address. `stage` is the place of the barrier in
    its ring, `phase` its phase, both counted from 0. `count` says how often it was seen.
    """

    kind: str
    rule: str
    here: Site
    there: Site | None = None
    space: str = ""
    object: str = ""
    first_byte: int | None = None
    last_byte: int | None = None
    barrier: int | None = None
    stage: int | None = None
    phase: int | None = None
    detail: str = ""
    count: int = 1

    def matches(self, kind: str, place: str = "") -> bool:
        """Whether this is hazard `kind` at `place`, a part of either side's source line or instruction."""
        sides = [self.here, *([self.there] if self.there else [])]
        return self.kind == kind and any(place in side.line or place in side.text for side in sides)

    def to_json(self) -> dict:
        """Plain dict of all fields."""
        return asdict(self)

    def __str__(self) -> str:
        head = self.kind + (f" (seen {self.count} times)" if self.count > 1 else "")
        where = []
        if self.first_byte is not None:
            name = f"{self.space} memory" + (f" {self.object}" if self.object else "")
            where.append(f"{name} bytes {self.first_byte:#x}..{self.last_byte:#x}")
        for label in ("barrier", "stage", "phase"):
            value = getattr(self, label)
            if value is not None:
                where.append(f"{label} {value}")
        lines = [f"{head}: {', '.join(where)}" if where else head, f"  rule: {self.rule}"]
        if self.detail:
            lines.append(f"  {self.detail}")
        lines.append(f"  here:  {self.here}")
        if self.there is not None:
            lines.append(f"  other: {self.there}")
        return "\n".join(lines)


@dataclass
class _Record:
    """A hazard as first met, before names are looked up."""

    kind: str
    src: int
    agents: tuple[int, ...]
    unit: str = ""
    other_src: int = -1
    other_agents: tuple[int, ...] = ()
    other_unit: str = ""
    space: str = ""
    object: str = ""
    first: int | None = None
    last: int | None = None
    bar: tuple[int, int] | None = None
    phase: int | None = None
    detail: str = ""
    rule: str = ""
    count: int = 0


@dataclass
class _Bars:
    """State of all mbarriers, one slot each."""

    rows: int = 0
    slot: dict[tuple[int, int], int] = field(default_factory=dict)
    cta: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    src: list[int] = field(default_factory=list)
    of_cta: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


def _array(values, n: int) -> np.ndarray:
    """`values` (an int or n of them) as an int64 array (n,)."""
    array = np.asarray(values, np.int64)
    return array if array.shape == (n,) else np.broadcast_to(array, (n,))


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
        self.limit = limit
        self.describe = describe or (lambda src: (f"instruction {src}", ""))
        self.role = role or (lambda agent: "")
        warps = warps_per_cta * cluster_size
        self.warps = warps
        self.clocks = Clocks(ctas // cluster_size, warps)
        self.smem = SharedShadow(smem_bytes, ctas)
        self._records: dict[tuple[str, int, int], _Record] = {}
        self._allocations: list[GlobalShadow] = []
        self._bases = np.zeros(0, np.int64)

        agents = ctas * warps_per_cta
        groups = -(-warps_per_cta // 4)
        self._wg_columns = np.array(
            [self.clocks.column("wgmma", w // warps_per_cta * groups + w % warps_per_cta // 4) for w in range(warps)],
            np.int64,
        )
        self._wg_committed = np.zeros(agents, np.int64)
        self._wg_issued = np.zeros(agents, np.int64)
        self._wg_source = np.zeros(agents, np.int64)
        self._wg_fenced = np.zeros(agents, bool)
        self._register_ids: dict[int, int] = {}
        self._register_sets: dict[tuple[int, ...], np.ndarray] = {}
        self._pending = np.zeros((agents, 0), np.int32)
        self._touched = np.zeros((agents, 0), bool)
        self._touched_source = np.zeros((agents, 0), np.int32)
        self._touched_any = np.zeros(agents, bool)

        self._named = Store(self.clocks, ctas * 16)
        clusters = ctas // cluster_size
        self._cluster_arrivals = Store(self.clocks, clusters)
        self._cluster_done = Store(self.clocks, clusters)

        self._bars = _Bars()
        self._bar_arrivals = Store(self.clocks, 0)
        self._bar_done = Store(self.clocks, 0)
        self._bar_grow(16)
        self._bar_columns = np.zeros(0, np.int64)

        self._async_columns = np.full(warps, -1, np.int64)
        self._async_next = np.ones(agents, np.int64)
        self._async_groups = np.zeros(agents, np.int64)
        self._async_log = np.zeros((agents, 0), np.int64)
        self._async_last = np.zeros(agents, np.int64)
        self._async_source = np.zeros(agents, np.int64)

        self._bulk: dict[tuple[int, int], list[int]] = {}
        self._remote: dict[int, dict[int, tuple[int, int]]] = {}
        self._exited: set[int] = set()
        self._published: dict[tuple, dict[int, np.ndarray]] = {}
        self._fenced: dict[int, dict[int, np.ndarray]] = {}
        self._to_acquire: dict[int, dict[int, np.ndarray]] = {}
        self._issuers: dict[tuple[int, int], tuple[int, ...]] = {}

    # ------------------------------------------------------------------ names and records

    def _cta(self, agents: np.ndarray) -> np.ndarray:
        return agents // self.warps_per_cta

    def _record(self, kind: str, src: int, agents: Iterable[int], other_src: int = -1, **fields) -> _Record:
        key = (kind, src, other_src)
        record = self._records.get(key)
        if record is None:
            record = _Record(kind, src, tuple(int(a) for a in agents), other_src=other_src, **fields)
            self._records[key] = record
        record.count += 1
        return record

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
        self._record(
            kind,
            int(src),
            (agent,),
            rule=rule,
            space=space,
            first=first,
            last=last,
            detail=detail,
            object=object,
        )

    def _unit(self, cluster: int, column: int, epoch: int) -> dict:
        """Who the accesses (column, epoch) of a cluster are by: fields of the other side of a record."""
        key = self.clocks.keys[column]
        agents = self._issuers.get((cluster, column), ())
        first = cluster * self.warps
        if key[0] == "warp":
            return {"other_agents": (first + column,)}
        if key[0] == "barrier":
            cta = cluster * self.cluster_size + key[1]
            return {
                "other_agents": agents,
                "other_unit": "copy in flight",
                "bar": (cta, key[2]),
                "phase": epoch - 1,
            }
        if key[0] == "wgmma":
            return {"other_agents": agents, "other_unit": f"WGMMA group {epoch - 1}"}
        if key[0] == "cp.async":
            return {"other_agents": (first + key[1],), "other_unit": "cp.async in flight"}
        return {"other_agents": (first + key[1],), "other_unit": f"bulk group {epoch - 1}"}

    def _conflict(
        self,
        *,
        relation: str,
        bad: np.ndarray,
        src: int,
        agents: np.ndarray,
        rows: np.ndarray,
        clusters: np.ndarray,
        columns: np.ndarray,
        epochs: np.ndarray,
        sources: np.ndarray,
        first_bytes: np.ndarray,
        cell: int,
        space: str,
        object: str,
        asynchronous: bool,
        here: dict,
    ) -> None:
        """Record the elements `bad` of an access, grouped by the instruction they conflict with."""
        where = np.flatnonzero(bad)
        keys = np.stack([sources[where], clusters[where], columns[where], rows[where]])
        for key in np.unique(keys, axis=1).T:
            pick = where[(keys == key[:, None]).all(axis=0)]
            e = pick[0]
            column, epoch, row = int(columns[e]), int(epochs[pick].max()), int(rows[e])
            kind = self._kind(relation, self.clocks.keys[column][0], asynchronous)
            fields = self._unit(int(clusters[e]), column, epoch)
            if "bar" in here:
                fields.setdefault("bar", here["bar"][row])
                fields.setdefault("phase", int(here["phase"][row]))
            who = agents[row]
            self._record(
                kind,
                src,
                np.atleast_1d(who).tolist(),
                int(key[0]),
                unit=here.get("unit", ""),
                space=space,
                object=object,
                first=int(first_bytes[pick].min()),
                last=int(first_bytes[pick].max()) + cell - 1,
                **fields,
            )

    @staticmethod
    def _kind(relation: str, unit: str, asynchronous: bool) -> str:
        if relation == "proxy":
            return "missing-proxy-fence"
        if unit == "warp":
            return "overwrite-while-read" if relation == "war" and asynchronous else "data-race"
        if relation == "raw":
            return "read-before-copy-waited"
        if relation == "waw":
            return "overwrite-before-copy-waited"
        return "overwrite-while-wgmma-reads" if unit == "wgmma" else "overwrite-while-copy-reads"

    # ------------------------------------------------------------------ shared memory

    def _access_shared(
        self,
        agents: np.ndarray,
        src: int,
        cells: np.ndarray,
        rows: np.ndarray,
        *,
        write: bool,
        columns: np.ndarray,
        epochs: np.ndarray,
        clock: np.ndarray,
        proxied: np.ndarray | None = None,
        atomic: bool = False,
        strong: bool = False,
        initialised: bool = True,
        here: dict | None = None,
    ) -> np.ndarray | None:
        """Check and enter an access to shared memory.

        `cells` (m,) are shadow cells and `rows` (m,) says of each which of the n accessors touches it; `columns`,
        `epochs` (n,) are how the access enters the shadow and `clock`, `proxied` (n, columns) what the accessors
        know (`proxied`: the access is by the async proxy). Returns which elements were never written, or None.
        """
        smem = self.smem
        width = clock.shape[1]
        was_column = smem.column[cells]
        was_epoch = smem.epoch[cells]
        at = rows * width + was_column
        bad = clock.reshape(-1)[at] < was_epoch
        mark = bad.any()
        missing = None
        if proxied is not None:
            missing = self.clocks.generic[was_column] & (proxied.reshape(-1)[at] < was_epoch) & ~bad
        exempt = atomic or strong
        if exempt:
            bad &= (smem.source[cells] & 1) == 0
            mark = bad.any()
        context = {
            "src": src,
            "agents": agents,
            "rows": rows,
            "cell": smem.cell,
            "space": "shared",
            "object": "",
            "asynchronous": proxied is not None,
            "here": here or {},
        }
        if mark:
            self._shared_conflict("waw" if write else "raw", bad, cells, context, clock)
        if missing is not None and missing.any():
            self._shared_conflict("proxy", missing, cells, context, clock)
        unwritten = None
        if not write or atomic:
            unwritten = was_epoch == 0
            unwritten = unwritten if unwritten.any() else None
            if unwritten is not None and initialised:
                self._unwritten(unwritten, cells, context)
        if write:
            self._check_readers(cells, rows, clock, context)
            smem.column[cells] = columns[rows]
            smem.epoch[cells] = epochs[rows]
            smem.source[cells] = 2 * src + exempt
            clash = smem.column[cells] != columns[rows]
            if clash.any() and not exempt:
                self._shared_conflict("waw", clash, cells, context, clock)
        elif not strong:
            readers = smem.readers(columns)
            slots = smem.read_epoch.shape[1]
            at = cells * slots + readers[rows]
            smem.read_epoch.reshape(-1)[at] = epochs[rows]
            smem.read_source.reshape(-1)[at] = 2 * src
        return unwritten

    def _check_readers(self, cells: np.ndarray, rows: np.ndarray, clock: np.ndarray, context: dict) -> None:
        smem = self.smem
        count = len(smem.reader_columns)
        if not count:
            return
        read = smem.read_epoch[cells]
        if not read.any():
            return
        known = clock[:, smem.reader_columns]
        bad = read[:, :count] > known[rows]
        if bad.any():
            element, reader = np.nonzero(bad)
            picked = cells[element]
            self._report_shared(
                "war",
                np.ones(len(element), bool),
                picked,
                {**context, "rows": rows[element]},
                smem.reader_columns[reader],
                smem.read_epoch[picked, reader],
                smem.read_source[picked, reader],
            )
        smem.read_epoch[cells] = 0

    def _shared_conflict(
        self, relation: str, bad: np.ndarray, cells: np.ndarray, context: dict, clock: np.ndarray
    ) -> None:
        smem = self.smem
        self._report_shared(relation, bad, cells, context, smem.column[cells], smem.epoch[cells], smem.source[cells])

    def _report_shared(
        self,
        relation: str,
        bad: np.ndarray,
        cells: np.ndarray,
        context: dict,
        columns: np.ndarray,
        epochs: np.ndarray,
        sources: np.ndarray,
    ) -> None:
        agents = context["agents"]
        cluster = agents.reshape(len(agents), -1)[:, 0] // self.warps
        self._conflict(
            relation=relation,
            bad=bad,
            clusters=cluster[context["rows"]],
            columns=columns,
            epochs=epochs,
            sources=sources >> 1,
            first_bytes=cells % self.smem.per_cta * self.smem.cell,
            **context,
        )

    def _unwritten(self, unwritten: np.ndarray, cells: np.ndarray, context: dict) -> None:
        bytes_ = cells[unwritten] % self.smem.per_cta * self.smem.cell
        row = int(context["rows"][np.flatnonzero(unwritten)[0]])
        self._record(
            "uninitialised-shared-memory",
            context["src"],
            np.atleast_1d(context["agents"][row]).tolist(),
            space="shared",
            first=int(bytes_.min()),
            last=int(bytes_.max()) + self.smem.cell - 1,
            unit=context["here"].get("unit", ""),
        )

    def _alive(self, agents: np.ndarray, src: int, ctas: np.ndarray, remember: bool = True) -> None:
        """Record accesses to CTAs that have exited, and remember remote ones for the owner's exit."""
        own = self._cta(agents)
        remote = ctas != own
        if not remote.any():
            return
        for agent, cta in {(int(a), int(c)) for a, c in zip(agents[remote], ctas[remote], strict=True)}:
            if cta in self._exited:
                self._record("access-to-exited-cta", src, (agent,), detail=f"CTA {cta} has exited")
            if remember:
                epoch = int(self.clocks.epoch(np.array([agent]))[0])
                self._remote.setdefault(cta, {})[agent] = (epoch, src)

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
            (n, L) bool, the addresses with bytes that nobody wrote, or None if there are none.
        """
        n, lanes = addr.shape
        if mask is None or mask.all():
            rows = np.repeat(np.arange(n), lanes)
            flat = addr.reshape(-1).astype(np.int64, copy=False)
            picked = None
        else:
            picked = np.flatnonzero(mask)
            rows = picked // lanes
            flat = addr.reshape(-1)[picked].astype(np.int64, copy=False)
        if not len(flat):
            return None
        step = unit(flat, size)
        smem = self.smem
        if step < smem.cell:
            smem.refine(step)
        if cta is None:
            base = smem.bases(self._cta(agents))[rows]
        else:
            ctas = np.broadcast_to(cta if cta.ndim == 2 else cta[:, None], (n, lanes)).reshape(-1)
            ctas = ctas if picked is None else ctas[picked]
            self._alive(agents[rows], src, ctas)
            base = smem.bases(ctas)
        cells = spread(flat // smem.cell + base, size // smem.cell)
        per = size // smem.cell
        wide = np.repeat(rows, per) if per > 1 else rows
        table = self.clocks.table
        strong = sem != "weak"
        key = ("shared",)
        if strong:
            self._acquire(agents, sem, key, flat, rows)
        unwritten = self._access_shared(
            agents,
            src,
            cells,
            wide,
            write=write,
            columns=agents % self.warps,
            epochs=self.clocks.epoch(agents),
            clock=table[agents, CLOCK],
            atomic=atomic,
            strong=strong,
            initialised=not taint,
        )
        if strong and write:
            self._release(agents, sem, key, flat, rows, atomic)
        if unwritten is None:
            return None
        result = np.zeros(n * lanes, bool)
        by_lane = unwritten.reshape(-1, per).any(axis=1)
        result[np.arange(n * lanes) if picked is None else picked] = by_lane
        return result.reshape(n, lanes)

    # ------------------------------------------------------------------ global memory

    def add_allocation(self, base: int, nbytes: int, name: str = "") -> None:
        """Make a global allocation known. Accesses outside all allocations are not checked here."""
        self._allocations.append(GlobalShadow(base, nbytes, name))
        self._allocations.sort(key=lambda a: a.base)
        self._bases = np.array([a.base for a in self._allocations], np.int64)

    def _by_allocation(self, addr: np.ndarray) -> list[tuple[GlobalShadow, np.ndarray | slice]]:
        """The allocations that addresses fall into, each with the positions that do."""
        if not len(addr) or not len(self._bases):
            return []
        low, high = np.searchsorted(self._bases, (addr.min(), addr.max()), side="right") - 1
        if low == high:
            return [(self._allocations[low], slice(None))] if low >= 0 else []
        owner = np.searchsorted(self._bases, addr, side="right") - 1
        return [(self._allocations[i], np.flatnonzero(owner == i)) for i in np.unique(owner) if i >= 0]

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
        n, lanes = addr.shape
        if mask is None or mask.all():
            rows = np.repeat(np.arange(n), lanes)
            flat = addr.reshape(-1).astype(np.int64, copy=False)
        else:
            picked = np.flatnonzero(mask)
            rows = picked // lanes
            flat = addr.reshape(-1)[picked].astype(np.int64, copy=False)
        strong = sem != "weak"
        key = ("global",)
        if strong:
            self._acquire(agents, sem, key, flat, rows)
        self._access_global(
            agents,
            src,
            flat,
            size,
            rows,
            write=write,
            columns=agents % self.warps,
            epochs=self.clocks.epoch(agents),
            asynchronous=False,
            exempt=atomic or strong,
        )
        if strong and write:
            self._release(agents, sem, key, flat, rows, atomic)

    def _access_global(
        self,
        agents: np.ndarray,
        src: int,
        addr: np.ndarray,
        size: int | np.ndarray,
        rows: np.ndarray,
        *,
        write: bool,
        columns: np.ndarray,
        epochs: np.ndarray,
        asynchronous: bool,
        exempt: bool = False,
    ) -> None:
        """Check and enter an access to global memory: (m,) addresses of `size` bytes by accessor `rows` (m,)."""
        for shadow, pick in self._by_allocation(addr):
            part = (
                src,
                agents,
                addr[pick],
                size if isinstance(size, int) else size[pick],
                rows[pick],
                columns,
                epochs,
            )
            if not write and not shadow.written:
                if exempt:
                    continue
                shadow.log.append(part)
                shadow.logged += len(part[2])
                if shadow.logged > shadow.LOG_LIMIT:
                    self._open(shadow, CELL)
                continue
            if not shadow.written:
                self._open(shadow, unit(part[2], part[3]))
            self._enter_global(shadow, *part, write=write, asynchronous=asynchronous, exempt=exempt)

    def _open(self, shadow: GlobalShadow, cell: int) -> None:
        shadow.refine(min(cell, shadow.cell))
        shadow.open()
        for part in shadow.log:
            self._enter_global(shadow, *part, write=False, asynchronous=False, exempt=False, replayed=True)
        shadow.log.clear()

    def _enter_global(
        self,
        shadow: GlobalShadow,
        src: int,
        agents: np.ndarray,
        addr: np.ndarray,
        size: int | np.ndarray,
        rows: np.ndarray,
        columns: np.ndarray,
        epochs: np.ndarray,
        *,
        write: bool,
        asynchronous: bool,
        exempt: bool,
        replayed: bool = False,
    ) -> None:
        step = unit(addr, size)
        if step < shadow.cell:
            shadow.refine(step)
        first = shadow.first_cell(addr)
        if isinstance(size, int):
            per = size // shadow.cell
            cells = spread(first, per)
            rows = np.repeat(rows, per) if per > 1 else rows
        else:
            cells, run = spread_ragged(first, size // shadow.cell)
            rows = rows[run]
        inside = (cells >= 0) & (cells < len(shadow.epoch))
        if not inside.all():
            cells, rows = cells[inside], rows[inside]
        clusters = agents // self.warps
        cluster = clusters[rows]
        was_cluster = shadow.cluster[cells]
        was_column = shadow.column[cells]
        was_epoch = shadow.epoch[cells]
        was_source = shadow.source[cells]
        known, proxied = self._known(agents, rows, cluster, was_cluster, was_column, asynchronous)
        bad = known < was_epoch
        if exempt:
            bad &= (was_source & 1) == 0
        context = {
            "src": src,
            "agents": agents,
            "cell": shadow.cell,
            "space": "global",
            "object": shadow.name,
            "asynchronous": asynchronous,
            "here": {},
        }
        bytes_ = cells * shadow.cell - shadow.offset
        writer = {"clusters": was_cluster, "columns": was_column, "epochs": was_epoch}
        if bad.any():
            self._conflict(
                relation="waw" if write else "raw",
                bad=bad,
                rows=rows,
                sources=was_source >> 1,
                first_bytes=bytes_,
                **writer,
                **context,
            )
        if asynchronous:
            missing = self.clocks.generic[was_column] & (proxied < was_epoch) & ~bad
            if missing.any():
                self._conflict(
                    relation="proxy",
                    bad=missing,
                    rows=rows,
                    sources=was_source >> 1,
                    first_bytes=bytes_,
                    **writer,
                    **context,
                )
        if write:
            self._check_global_readers(shadow, cells, rows, agents, cluster, context, bytes_, exempt)
            shadow.cluster[cells] = cluster
            shadow.column[cells] = columns[rows]
            shadow.epoch[cells] = epochs[rows]
            shadow.source[cells] = 2 * src + exempt
            clash = (shadow.column[cells] != columns[rows]) | (shadow.cluster[cells] != cluster)
            if clash.any() and not exempt:
                self._conflict(
                    relation="waw",
                    bad=clash,
                    rows=rows,
                    clusters=shadow.cluster[cells],
                    columns=shadow.column[cells],
                    epochs=shadow.epoch[cells],
                    sources=shadow.source[cells] >> 1,
                    first_bytes=bytes_,
                    **context,
                )
        elif not exempt:
            self._enter_readers(shadow, cells, rows, agents, columns, epochs, src, replayed)

    def _known(
        self,
        agents: np.ndarray,
        rows: np.ndarray,
        cluster: np.ndarray,
        of_cluster: np.ndarray,
        of_column: np.ndarray,
        asynchronous: bool,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Up to which epoch each element's accessor knows (cluster, column), plain and through the proxy."""
        table = self.clocks.table
        accessor = agents[rows]
        known = table[accessor, CLOCK, of_column]
        proxied = table[accessor, GLOBAL, of_column] if asynchronous else None
        away = np.flatnonzero(cluster != of_cluster)
        if len(away):
            known[away] = 0
            if proxied is not None:
                proxied[away] = 0
            if self.clocks.foreign is not None:
                pairs = np.stack([accessor[away], of_cluster[away]])
                for agent, other in np.unique(pairs, axis=1).T.tolist():
                    seen = self.clocks.foreign_rows(agent, other)
                    if seen is None:
                        continue
                    pick = away[(pairs[0] == agent) & (pairs[1] == other)]
                    column = of_column[pick]
                    inside = column < seen.shape[1]
                    pick, column = pick[inside], column[inside]
                    known[pick] = seen[CLOCK, column]
                    if proxied is not None:
                        proxied[pick] = seen[GLOBAL, column]
        return known, proxied

    def _check_global_readers(
        self,
        shadow: GlobalShadow,
        cells: np.ndarray,
        rows: np.ndarray,
        agents: np.ndarray,
        cluster: np.ndarray,
        context: dict,
        bytes_: np.ndarray,
        exempt: bool,
    ) -> None:
        if shadow.read_epoch is None:
            return
        epochs = shadow.read_epoch[cells]
        element, slot = np.nonzero(epochs)
        if not len(element):
            return
        picked = cells[element]
        reader_cluster = shadow.read_cluster[picked, slot]
        reader_column = shadow.read_column[picked, slot]
        read = epochs[element, slot]
        known, _ = self._known(agents, rows[element], cluster[element], reader_cluster, reader_column, False)
        bad = known < read
        if bad.any():
            self._conflict(
                relation="war",
                bad=bad,
                rows=rows[element],
                clusters=reader_cluster,
                columns=reader_column,
                epochs=read,
                sources=shadow.read_source[picked, slot] >> 1,
                first_bytes=bytes_[element],
                **context,
            )
        if not exempt:
            shadow.read_epoch[cells] = 0

    def _enter_readers(
        self,
        shadow: GlobalShadow,
        cells: np.ndarray,
        rows: np.ndarray,
        agents: np.ndarray,
        columns: np.ndarray,
        epochs: np.ndarray,
        src: int,
        replayed: bool,
    ) -> None:
        if shadow.read_epoch is None:
            shadow.open_readers()
        table = self.clocks.table
        for row in np.unique(rows).tolist():
            mine = cells[rows == row]
            agent, column, epoch = int(agents[row]), int(columns[row]), int(epochs[row])
            cluster = agent // self.warps
            have = shadow.read_epoch[mine]
            same = (shadow.read_column[mine] == column) & (shadow.read_cluster[mine] == cluster) & (have > 0)
            over = shadow.read_cluster[mine] == cluster
            over &= table[agent, CLOCK][shadow.read_column[mine]] >= have
            if replayed:  # the clock is younger than this read
                over[:] = False
            # The reader's own slot, else a free or finished one, else the oldest.
            rank = np.where(same, 3, np.where((have == 0) | over, 2, 1))
            slot = np.argmax(rank, axis=1)
            shadow.read_cluster[mine, slot] = cluster
            shadow.read_column[mine, slot] = column
            shadow.read_epoch[mine, slot] = epoch
            shadow.read_source[mine, slot] = 2 * src

    # ------------------------------------------------------------------ flags: release and acquire through memory

    def _acquire(self, agents: np.ndarray, sem: str, space: tuple, addr: np.ndarray, rows: np.ndarray) -> None:
        if not self._published:
            return
        for row, address in {(int(r), int(a)) for r, a in zip(rows, addr, strict=True)}:
            known = self._published.get(self._flag(space, agents[row], address))
            if known is None:
                continue
            agent = int(agents[row])
            if sem in ("acquire", "acq_rel"):
                self.clocks.absorb(agent, known)
            else:
                self._to_acquire.setdefault(agent, {})
                merge_foreign(self._to_acquire[agent], known)

    def _release(
        self,
        agents: np.ndarray,
        sem: str,
        space: tuple,
        addr: np.ndarray,
        rows: np.ndarray,
        atomic: bool,
    ) -> None:
        released = sem in ("release", "acq_rel")
        for row, address in {(int(r), int(a)) for r, a in zip(rows, addr, strict=True)}:
            agent = int(agents[row])
            key = self._flag(space, agent, address)
            known = self.clocks.published(agent) if released else self._fenced.get(agent)
            if not atomic:
                self._published.pop(key, None)
            if known:
                merge_foreign(self._published.setdefault(key, {}), known)
        if released:
            self.clocks.advance(agents)

    def _flag(self, space: tuple, agent: int, address: int) -> tuple:
        return (*space, address) if space == ("global",) else (*space, int(agent) // self.warps_per_cta, address)

    def fence(self, agents: np.ndarray, src: int, kind: str, scope: str = "cta") -> None:
        """A fence instruction.

        Args:
            kind: "acq_rel" or "sc" (also for membar); "proxy.async", "proxy.async.shared", "proxy.async.global";
                "mbarrier_init".
            scope: of an acq_rel or sc fence: cta, cluster, gpu or sys.
        """
        table = self.clocks.table
        if kind == "mbarrier_init":
            own = agents % self.warps
            table[agents, INIT, own] = table[agents, CLOCK, own]
            self.clocks.advance(agents)
            return
        if kind.startswith("proxy.async"):
            targets = {"proxy.async.shared": (SHARED,), "proxy.async.global": (GLOBAL,)}.get(kind, (SHARED, GLOBAL))
            for target in targets:
                table[agents, target] = np.maximum(table[agents, target], table[agents, CLOCK])
            table[agents, INIT] = np.maximum(table[agents, INIT], table[agents, CLOCK])
            # Accesses after the fence are not covered by it.
            self.clocks.advance(agents)
            return
        if kind not in ("acq_rel", "sc"):
            raise ValueError(f"kind={kind!r} is no fence known here")
        if scope != "cta":
            table[agents, INIT] = np.maximum(table[agents, INIT], table[agents, CLOCK])
        for agent in agents.tolist():
            pending = self._to_acquire.pop(agent, None)
            if pending:
                self.clocks.absorb(agent, pending)
            self._fenced[agent] = self.clocks.published(agent)
        self.clocks.advance(agents)

    # ------------------------------------------------------------------ cp.async

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
        n, lanes = dst.shape
        on = np.ones((n, lanes), bool) if mask is None else mask
        picked = np.flatnonzero(on)
        if not len(picked):
            return
        rows = picked // lanes
        columns = self._async_column(agents)
        epochs = self._async_next[agents]
        self._async_last[agents] = epochs
        self._async_source[agents] = src
        flat = dst.reshape(-1)[picked].astype(np.int64, copy=False)
        smem = self.smem
        step = unit(flat, size)
        if step < smem.cell:
            smem.refine(step)
        per = size // smem.cell
        cells = spread(flat // smem.cell + smem.bases(self._cta(agents))[rows], per)
        wide = np.repeat(rows, per) if per > 1 else rows
        self._access_shared(
            agents,
            src,
            cells,
            wide,
            write=True,
            columns=columns,
            epochs=epochs,
            clock=self.clocks.table[agents, CLOCK],
        )
        source = src_addr.reshape(-1)[picked].astype(np.int64, copy=False)
        amount: int | np.ndarray = size
        if src_bytes is not None:
            amount = src_bytes.reshape(-1)[picked].astype(np.int64, copy=False)
            used = amount > 0
            source, amount, rows = source[used], amount[used], rows[used]
        self._access_global(
            agents,
            src,
            source,
            amount,
            rows,
            write=False,
            columns=columns,
            epochs=epochs,
            asynchronous=False,
        )

    def cp_async_commit(self, agents: np.ndarray) -> None:
        """cp.async.commit_group."""
        groups = self._async_groups[agents]
        if groups.max(initial=0) >= self._async_log.shape[1]:
            self._async_log = np.pad(self._async_log, ((0, 0), (0, max(16, self._async_log.shape[1]))))
        self._async_log[agents, groups] = self._async_next[agents]
        self._async_groups[agents] += 1
        self._async_next[agents] += 1

    def cp_async_wait(self, agents: np.ndarray, pending: int) -> None:
        """cp.async.wait_group; for wait_all call commit first, then this with 0."""
        done = self._async_groups[agents] - pending
        some = (done > 0) & (self._async_last[agents] > 0)
        if some.any():
            which = agents[some]
            self.clocks.learn(which, self._async_column(which), self._async_log[which, done[some] - 1])

    def cp_async_mbarrier_arrive(self, agents: np.ndarray, src: int, cta: np.ndarray, bar: np.ndarray) -> None:
        """cp.async.mbarrier.arrive: the barrier's current phase now covers the thread's copies so far."""
        slots = self._slots(agents, src, cta, bar)
        columns = self._async_column(agents)
        for pick in distinct(slots):
            rows = self._bar_arrivals.rows
            have = rows[slots[pick], CLOCK, columns[pick]]
            rows[slots[pick], CLOCK, columns[pick]] = np.maximum(have, self._async_next[agents[pick]])
        self._async_next[agents] += 1

    # ------------------------------------------------------------------ bulk copies

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
            bar_cta, bar: (n,) the barrier on which each completes.
            gaddr: (n, R) addresses of the R runs of bytes read from global memory, or None.
            gbytes: length of each run, one for all or (n, R); runs of 0 bytes are skipped.
        """
        self._bulk_write(agents, src, cta, offset, nbytes, bar_cta, bar)
        if gaddr is None:
            return
        slots = self._slots(agents, src, bar_cta, bar, quiet=True)
        rows, addr, size = self._runs(gaddr, gbytes)
        self._access_global(
            agents,
            src,
            addr,
            size,
            rows,
            write=False,
            columns=self._bar_column[slots],
            epochs=self._bar_phase[slots] + 1,
            asynchronous=True,
        )

    @staticmethod
    def _runs(gaddr: np.ndarray, gbytes: int | np.ndarray) -> tuple[np.ndarray, np.ndarray, int | np.ndarray]:
        """(n, R) runs as flat (row, address, length), without the empty ones."""
        n, runs = gaddr.shape
        flat = gaddr.reshape(-1).astype(np.int64, copy=False)
        rows = np.repeat(np.arange(n), runs)
        if isinstance(gbytes, int):
            return rows, flat, gbytes
        size = np.broadcast_to(gbytes, (n, runs)).reshape(-1).astype(np.int64, copy=False)
        used = size > 0
        return rows[used], flat[used], size[used]

    def _bulk_write(
        self,
        agents: np.ndarray,
        src: int,
        cta: np.ndarray,
        offset: np.ndarray,
        nbytes: int,
        bar_cta: np.ndarray,
        bar: np.ndarray,
    ) -> None:
        n = len(agents)
        cta, offset, bar_cta, bar = (_array(x, n) for x in (cta, offset, bar_cta, bar))
        self._alive(agents, src, cta, remember=False)
        slots = self._slots(agents, src, bar_cta, bar, asynchronous=True)
        self._check_phase(agents, src, slots, "copy")
        smem = self.smem
        step = unit(offset, nbytes)
        if step < smem.cell:
            smem.refine(step)
        per = nbytes // smem.cell
        cells = spread(offset // smem.cell + smem.bases(cta), per)
        rows = np.repeat(np.arange(n), per)
        table = self.clocks.table
        phase = self._bar_phase[slots]
        columns = self._bar_column[slots]
        self._access_shared(
            agents,
            src,
            cells,
            rows,
            write=True,
            columns=columns,
            epochs=phase + 1,
            clock=table[agents, CLOCK],
            proxied=table[agents, SHARED],
            here={"bar": list(zip(bar_cta.tolist(), bar.tolist(), strict=True)), "phase": phase},
        )
        np.add.at(self._bar_issued, slots, nbytes)
        self._bar_copied[slots] = phase + 1
        self._bar_copy_source[slots] = src
        for agent, column in zip(agents.tolist(), columns.tolist(), strict=True):
            self._issuers[agent // self.warps, column] = (agent,)
        # A copy lands after it was issued: who sees its bytes also knows which phases its issuer had seen.
        for pick in distinct(slots):
            known = np.ix_(slots[pick], [CLOCK], self._bar_columns)
            here = table[np.ix_(agents[pick], [CLOCK], self._bar_columns)]
            self._bar_arrivals.rows[known] = np.maximum(self._bar_arrivals.rows[known], here)

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
        n = len(agents)
        offset = _array(offset, n)
        slots = self._slots(agents, src, _array(bar_cta, n), _array(bar, n), asynchronous=True, quiet=True)
        columns, epochs = self._bar_column[slots], self._bar_phase[slots] + 1
        self._async_read(agents, src, offset[:, None], nbytes, columns, epochs, "bulk copy")
        self._bulk_write(agents, src, cta, dst, nbytes, bar_cta, bar)

    def _async_read(
        self,
        agents: np.ndarray,
        src: int,
        addr: np.ndarray,
        nbytes: int | np.ndarray,
        columns: np.ndarray,
        epochs: np.ndarray,
        name: str,
    ) -> None:
        rows, flat, size = self._runs(addr, nbytes)
        if not len(flat):
            return
        smem = self.smem
        step = unit(flat, size)
        if step < smem.cell:
            smem.refine(step)
        first = flat // smem.cell + smem.bases(self._cta(agents))[rows]
        if isinstance(size, int):
            cells, rows = spread(first, size // smem.cell), np.repeat(rows, size // smem.cell)
        else:
            cells, run = spread_ragged(first, size // smem.cell)
            rows = rows[run]
        table = self.clocks.table
        self._access_shared(
            agents,
            src,
            cells,
            rows,
            write=False,
            columns=columns,
            epochs=epochs,
            clock=table[agents, CLOCK],
            proxied=table[agents, SHARED],
            here={"unit": name},
        )

    def _bulk_groups(self, agents: np.ndarray, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read column, completion column and current group epoch of each issuing thread."""
        read, done, epoch = [], [], []
        for agent, thread in zip(agents.tolist(), lane.tolist(), strict=True):
            state = self._bulk.get((agent, thread))
            if state is None:
                w = agent % self.warps
                columns = [self.clocks.column(kind, w, thread) for kind in ("bulk.read", "bulk.write")]
                state = self._bulk[agent, thread] = [*columns, 1, 0, 0]
            read.append(state[0])
            done.append(state[1])
            epoch.append(state[2])
        return np.array(read, np.int64), np.array(done, np.int64), np.array(epoch, np.int64)

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

        Args:
            lane: (n,) lanes of the issuing threads.
            saddr, gaddr: (n, R) offsets and addresses of the R runs of bytes moved; only bytes inside the tensor.
            nbytes: length of each run, one for all or (n, R); runs of 0 bytes are skipped.
            reduce: cp.reduce, which adds to global memory atomically.
        """
        lane = _array(lane, len(agents))
        read, done, epoch = self._bulk_groups(agents, lane)
        for agent, thread in zip(agents.tolist(), lane.tolist(), strict=True):
            state = self._bulk[agent, thread]
            state[3], state[4] = state[2], src
        self._async_read(agents, src, saddr, nbytes, read, epoch, "TMA store")
        rows, addr, size = self._runs(gaddr, nbytes)
        self._access_global(
            agents,
            src,
            addr,
            size,
            rows,
            write=True,
            columns=done,
            epochs=epoch,
            asynchronous=True,
            exempt=reduce,
        )

    def bulk_commit(self, agents: np.ndarray, lane: np.ndarray | int) -> None:
        """cp.async.bulk.commit_group by these threads."""
        lane = _array(lane, len(agents))
        self._bulk_groups(agents, lane)
        for agent, thread in zip(agents.tolist(), lane.tolist(), strict=True):
            self._bulk[agent, thread][2] += 1

    def bulk_wait(self, agents: np.ndarray, lane: np.ndarray | int, pending: int, *, read: bool) -> None:
        """cp.async.bulk.wait_group, with `read` its .read form, which covers only the reads of shared memory."""
        lane = _array(lane, len(agents))
        reads, done, epoch = self._bulk_groups(agents, lane)
        complete = np.maximum(epoch - 1 - pending, 0)
        self.clocks.learn(agents, reads, complete)
        if not read:
            self.clocks.learn(agents, done, complete)

    # ------------------------------------------------------------------ WGMMA

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
        n, count = cells.shape
        lead = agents[:, 0]
        group = self._wg_committed[agents].max(axis=1) + 1
        columns = self._wg_columns[lead % self.warps]
        smem = self.smem
        base = smem.bases(self._cta(lead))
        factor = CELL // smem.cell
        flat = (cells.astype(np.int64, copy=False) * factor + base[:, None]).reshape(-1)
        rows = np.repeat(np.arange(n), count * factor)
        known = self.clocks.table[agents, : SHARED + 1].min(axis=1)
        self._access_shared(
            agents,
            src,
            spread(flat, factor),
            rows,
            write=False,
            columns=columns,
            epochs=group,
            clock=np.ascontiguousarray(known[:, CLOCK]),
            proxied=np.ascontiguousarray(known[:, SHARED]),
            here={"unit": "WGMMA"},
        )
        for warps, column in zip(agents.tolist(), columns.tolist(), strict=True):
            self._issuers[warps[0] // self.warps, column] = tuple(warps)
        flat_agents = agents.reshape(-1)
        self._wg_issued[flat_agents] = np.repeat(group, agents.shape[1])
        self._wg_source[flat_agents] = src
        self._use_registers(flat_agents, src, tuple(acc), tuple(a_regs), np.repeat(group, agents.shape[1]))

    def _ids(self, registers: Sequence[int]) -> np.ndarray:
        """Columns of the register tables; made on first use."""
        key = tuple(registers)
        ids = self._register_sets.get(key)
        if ids is None:
            for register in key:
                self._register_ids.setdefault(register, len(self._register_ids))
            grow = len(self._register_ids) - self._pending.shape[1]
            if grow > 0:
                grow = max(grow, self._pending.shape[1])
                for name in ("_pending", "_touched", "_touched_source"):
                    setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, grow))))
            ids = np.array([self._register_ids[r] for r in key], np.int64)
            self._register_sets[key] = ids
        return ids

    def _use_registers(
        self, agents: np.ndarray, src: int, acc: tuple[int, ...], a_regs: tuple[int, ...], group: np.ndarray
    ) -> None:
        ids = self._ids(acc + a_regs)
        unfenced = ~self._wg_fenced[agents]
        if unfenced.any():
            self._record("missing-wgmma-fence", src, (agents[unfenced][0],))
        if self._touched_any[agents].any() and len(ids):
            touched = self._touched[agents[:, None], ids]
            if touched.any():
                row, register = np.argwhere(touched)[0]
                other = int(self._touched_source[agents[row], ids[register]])
                self._record("missing-wgmma-fence", src, (agents[row],), other, other_agents=(int(agents[row]),))
        if len(ids):
            self._pending[agents[:, None], ids] = group[:, None]

    def wgmma_fence(self, agents: np.ndarray) -> None:
        """wgmma.fence."""
        self._wg_fenced[agents] = True
        some = agents[self._touched_any[agents]]
        if len(some):
            self._touched[some] = False
            self._touched_any[some] = False

    def wgmma_commit(self, agents: np.ndarray) -> None:
        """wgmma.commit_group."""
        self._wg_committed[agents] += 1

    def wgmma_wait(self, agents: np.ndarray, pending: int) -> None:
        """wgmma.wait_group."""
        done = np.maximum(self._wg_committed[agents] - pending, 0)
        self.clocks.learn(agents, self._wg_columns[agents % self.warps], done)
        if self._pending.shape[1]:
            kept = self._pending[agents]
            self._pending[agents] = np.where(kept <= done[:, None], 0, kept)

    def registers(self, agents: np.ndarray, src: int, reads: Sequence[int] = (), writes: Sequence[int] = ()) -> None:
        """An instruction other than WGMMA names registers that some WGMMA uses (not a plain move between such)."""
        ids = self._ids(tuple(reads) + tuple(writes))
        pending = self._pending[agents[:, None], ids]
        if pending.any():
            row, register = np.argwhere(pending)[0]
            agent = int(agents[row])
            self._record(
                "accumulator-in-flight",
                src,
                (agent,),
                int(self._wg_source[agent]),
                other_agents=self._issuers.get((agent // self.warps, int(self._wg_columns[agent % self.warps])), ()),
                other_unit=f"WGMMA group {int(pending[row, register]) - 1}",
                space="register",
            )
        self._touched[agents[:, None], ids] = True
        self._touched_source[agents[:, None], ids] = src
        self._touched_any[agents] = True

    def move_registers(self, agents: np.ndarray, dst: Sequence[int], src: Sequence[int]) -> None:
        """A plain move renames a register: its state goes with it."""
        to, of = self._ids(dst), self._ids(src)
        rows = agents[:, None]
        for table in (self._pending, self._touched, self._touched_source):
            table[rows, to] = table[rows, of]

    # ------------------------------------------------------------------ mbarriers

    def _bar_grow(self, slots: int) -> None:
        have = self._bars.rows
        if have == 0:
            per = self.warps_per_cta
            self._bar_phase = np.zeros(0, np.int64)
            self._bar_base = np.zeros(0, np.int64)
            self._bar_count = np.zeros(0, np.int64)
            self._bar_pending = np.zeros(0, np.int64)
            self._bar_column = np.zeros(0, np.int64)
            self._bar_issued = np.zeros(0, np.int64)
            self._bar_expected = np.zeros(0, np.int64)
            self._bar_copied = np.zeros(0, np.int64)
            self._bar_copy_source = np.zeros(0, np.int64)
            self._bar_arrive_source = np.full(0, -1, np.int64)
            self._bar_init_column = np.zeros(0, np.int64)
            self._bar_init_epoch = np.zeros(0, np.int64)
            self._bar_live = np.zeros(0, bool)
            self._wait_phase = np.full((0, per), -2, np.int64)
            self._wait_epoch = np.zeros((0, per), np.int64)
            self._wait_group = np.zeros((0, per), np.int64)
            self._wait_source = np.zeros((0, per), np.int64)
        grow = slots - have
        for name in (
            "_bar_phase",
            "_bar_base",
            "_bar_count",
            "_bar_pending",
            "_bar_column",
            "_bar_issued",
            "_bar_expected",
            "_bar_copied",
            "_bar_copy_source",
            "_bar_arrive_source",
            "_bar_init_column",
            "_bar_init_epoch",
            "_bar_live",
        ):
            setattr(self, name, np.pad(getattr(self, name), (0, grow)))
        self._wait_phase = np.pad(self._wait_phase, ((0, grow), (0, 0)), constant_values=-2)
        for name in ("_wait_epoch", "_wait_group", "_wait_source"):
            setattr(self, name, np.pad(getattr(self, name), ((0, grow), (0, 0))))
        self._bar_arrivals.reserve(slots)
        self._bar_done.reserve(slots)
        self._bars.rows = slots

    def _slot(self, cta: int, bar: int) -> int:
        """Slot of a barrier; made (not live) on first mention."""
        slot = self._bars.slot.get((cta, bar))
        if slot is None:
            slot = len(self._bars.slot)
            self._bars.slot[cta, bar] = slot
            self._bars.cta.append(cta)
            self._bars.offset.append(bar)
            self._bars.src.append(-1)
            self._bars.of_cta.setdefault(cta, []).append((bar, slot))
            if slot >= self._bars.rows:
                self._bar_grow(2 * self._bars.rows)
            column = self.clocks.column("barrier", cta % self.cluster_size, bar)
            if column not in self._bar_columns:
                self._bar_columns = np.append(self._bar_columns, column)
            self._bar_column[slot] = column
        return slot

    def _slots(
        self,
        agents: np.ndarray,
        src: int,
        cta: np.ndarray,
        bar: np.ndarray,
        *,
        asynchronous: bool = False,
        quiet: bool = False,
    ) -> np.ndarray:
        """Slots of barriers about to be used, after checking that their initialisation is visible."""
        n = len(agents)
        cta, bar = _array(cta, n), _array(bar, n)
        slots = np.array([self._slot(c, b) for c, b in zip(cta.tolist(), bar.tolist(), strict=True)], np.int64)
        if quiet:
            return slots
        live = self._bar_live[slots]
        if not live.all():
            i = int(np.argmin(live))
            self._record("mbarrier-not-initialised", src, (agents[i],), bar=(int(cta[i]), int(bar[i])), space="shared")
        table = self.clocks.table
        column, epoch = self._bar_init_column[slots], self._bar_init_epoch[slots]
        published = table[agents, INIT, column] >= epoch
        plain = published | (table[agents, CLOCK, column] >= epoch)
        bad = live & ~(published if asynchronous else plain)
        if bad.any():
            i = int(np.argmax(bad))
            self._record(
                "mbarrier-init-not-visible",
                src,
                (agents[i],),
                self._bars.src[slots[i]],
                other_agents=(int(agents[i]) // self.warps * self.warps + int(self._bar_init_column[slots[i]]),),
                bar=(int(cta[i]), int(bar[i])),
            )
        return slots

    def _check_phase(self, agents: np.ndarray, src: int, slots: np.ndarray, unit: str) -> None:
        seen = self.clocks.table[agents, CLOCK, self._bar_column[slots]]
        bad = (seen < self._bar_phase[slots]) & (self._bar_phase[slots] > self._bar_base[slots])
        if bad.any():
            i = int(np.argmax(bad))
            self._unordered(int(agents[i]), src, int(slots[i]), unit)

    def _unordered(self, agent: int, src: int, slot: int, unit: str) -> None:
        self._record(
            "mbarrier-phase-unordered",
            src,
            (agent,),
            int(self._bar_arrive_source[slot]),
            unit=unit,
            bar=(self._bars.cta[slot], self._bars.offset[slot]),
            phase=int(self._bar_phase[slot]),
        )

    def mbar_init(
        self, agents: np.ndarray, src: int, cta: np.ndarray, bar: np.ndarray, count: int | np.ndarray = 1
    ) -> None:
        """mbarrier.init of barriers at offset `bar` (n,) of the agents' own CTA."""
        n = len(agents)
        slots = self._slots(agents, src, cta, bar, quiet=True)
        used = self._bar_live[slots]
        for i in np.flatnonzero(used).tolist():
            self._check_idle(int(agents[i]), src, int(slots[i]))
        self._bar_live[slots] = True
        for name in ("_bar_issued", "_bar_expected"):
            getattr(self, name)[slots] = 0
        # Phases count on through a re-initialisation, so that epochs of the barrier's column stay unique.
        self._bar_base[slots] = self._bar_phase[slots]
        self._bar_count[slots] = _array(count, n)
        self._bar_pending[slots] = _array(count, n)
        self._bar_init_column[slots] = agents % self.warps
        self._bar_init_epoch[slots] = self.clocks.epoch(agents)
        self._wait_phase[slots] = -2
        for i in range(n):
            self._bars.src[slots[i]] = src

    def _check_idle(self, agent: int, src: int, slot: int) -> None:
        """Record a re-initialisation that is not ordered after every use of the barrier."""
        known = self.clocks.table[agent, CLOCK]
        warps = slice(0, self.warps)
        first = self._bars.cta[slot] % self.cluster_size * self.warps_per_cta
        own = slice(first, first + self.warps_per_cta)
        arrivals = self._bar_arrivals.rows[slot, CLOCK, warps] > known[warps]
        waits = self._wait_epoch[slot] > known[own]
        copying = self._bar_copied[slot] > known[self._bar_column[slot]]
        if self._bar_pending[slot] != self._bar_count[slot] or arrivals.any() or waits.any() or copying:
            self._record(
                "mbarrier-reinitialised",
                src,
                (agent,),
                self._bars.src[slot],
                bar=(self._bars.cta[slot], self._bars.offset[slot]),
                phase=int(self._bar_phase[slot]),
            )

    def mbar_inval(self, agents: np.ndarray, src: int, cta: np.ndarray, bar: np.ndarray) -> None:
        """mbarrier.inval."""
        slots = self._slots(agents, src, cta, bar)
        for agent, slot in zip(agents.tolist(), slots.tolist(), strict=True):
            self._check_idle(agent, src, slot)
        self._bar_live[slots] = False

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
    ) -> None:
        """mbarrier.arrive, .arrive.expect_tx, or (arrive=False) .expect_tx alone; `cta` may be a peer."""
        n = len(agents)
        cta, bar = _array(cta, n), _array(bar, n)
        self._alive(agents, src, cta)
        slots = self._slots(agents, src, cta, bar)
        self._check_phase(agents, src, slots, "")
        np.add.at(self._bar_expected, slots, _array(expect_tx, n))
        if arrive:
            np.subtract.at(self._bar_pending, slots, _array(count, n))
            over = (self._bar_pending[slots] < 0) & self._bar_live[slots]
            if over.any():
                i = int(np.flatnonzero(over)[-1])
                self._unordered(int(agents[i]), src, int(slots[i]), "")
            self._bar_arrive_source[slots] = src
            if release:
                self._bar_arrivals.release(slots, agents)

    def mbar_complete(self, cta: np.ndarray, bar: np.ndarray, phase: np.ndarray) -> None:
        """The current phase of these barriers has completed."""
        n = len(cta)
        cta, bar = _array(cta, n), _array(bar, n)
        slots = np.array([self._slot(c, b) for c, b in zip(cta.tolist(), bar.tolist(), strict=True)], np.int64)
        short = self._bar_issued[slots] > self._bar_expected[slots]
        for i in np.flatnonzero(short).tolist():
            slot = int(slots[i])
            issued, expected = int(self._bar_issued[slot]), int(self._bar_expected[slot])
            self._record(
                "mbarrier-tx-bytes",
                int(self._bar_arrive_source[slot]),
                (),
                int(self._bar_copy_source[slot]),
                bar=(int(cta[i]), int(bar[i])),
                phase=int(self._bar_phase[slot]),
                detail=f"the phase completes while {issued - expected} bytes of copies issued on it are not expected",
            )
        arrived = self._bar_arrivals.rows
        warps = np.arange(self.warps_per_cta)
        own = (cta % self.cluster_size * self.warps_per_cta)[:, None] + warps
        waited = self._wait_phase[slots]
        # A wait on a phase that passed at once (-1) has nothing to lose: the phase has not begun.
        last = (waited == self._bar_phase[slots][:, None] - 1) & (waited >= 0)
        if last.any():
            rows = slots[:, None]
            seen = arrived[rows, CLOCK, own] >= self._wait_epoch[slots]
            group = arrived[rows, CLOCK, self._wg_columns[own]] > self._wait_group[slots]
            late = last & ~seen & ~group
            if late.any():
                i, w = np.argwhere(late)[0]
                slot = int(slots[i])
                self._record(
                    "mbarrier-phase-overrun",
                    int(self._wait_source[slot, w]),
                    (int(cta[i]) * self.warps_per_cta + int(w),),
                    int(self._bar_arrive_source[slot]),
                    bar=(int(cta[i]), int(bar[i])),
                    phase=int(self._bar_phase[slot]),
                )
        self._bar_phase[slots] += 1
        arrived[slots, CLOCK, self._bar_column[slots]] = self._bar_phase[slots]
        self._bar_arrivals.copy(slots, self._bar_done)
        self._bar_pending[slots] += self._bar_count[slots]

    def mbar_wait(self, agents: np.ndarray, src: int, cta: np.ndarray, bar: np.ndarray, phase: np.ndarray) -> None:
        """A test_wait or try_wait that succeeded on the completed phase `phase` (n,), or at once with -1."""
        n = len(agents)
        slots = self._slots(agents, src, cta, bar)
        seen = _array(phase, n) >= 0
        if not seen.all():
            agents, slots = agents[seen], slots[seen]
            if not len(agents):
                return
        self._bar_done.acquire(slots, agents)
        w = agents % self.warps_per_cta
        self._wait_phase[slots, w] = self._bar_phase[slots] - 1
        self._wait_epoch[slots, w] = self.clocks.epoch(agents)
        self._wait_group[slots, w] = self._wg_committed[agents]
        self._wait_source[slots, w] = src

    def mbar_landed(self, cta: np.ndarray, bar: np.ndarray, nbytes: int | np.ndarray) -> None:
        """Bytes reached a barrier other than by a copy known here (mbarrier.complete_tx, st.async)."""
        n = len(cta)
        slots = np.array(
            [self._slot(c, b) for c, b in zip(np.asarray(cta).tolist(), np.asarray(bar).tolist(), strict=True)],
            np.int64,
        )
        np.add.at(self._bar_issued, slots, _array(nbytes, n))

    # ------------------------------------------------------------------ execution barriers

    def bar_arrive(self, agents: np.ndarray, src: int, barrier_id: int | np.ndarray) -> None:
        """Arrival at a named barrier, by bar.arrive or bar.sync."""
        self._named.release(self._cta(agents) * 16 + _array(barrier_id, len(agents)), agents)

    def bar_complete(self, agents: np.ndarray, barrier_id: int | np.ndarray) -> None:
        """A named barrier completes and lets these agents (all that wait at it) go."""
        slots = self._cta(agents) * 16 + _array(barrier_id, len(agents))
        self._named.acquire(slots, agents)
        self._named.clear(slots)

    def bar_sync(self, agents: np.ndarray, barrier_id: int = 0) -> None:
        """Whole barriers in one step: the k agents of each row of (n, k) all arrive and leave."""
        self.clocks.join_rows(agents)

    def cluster_arrive(self, agents: np.ndarray, src: int, release: bool = True) -> None:
        """barrier.cluster.arrive; release=False for .relaxed, which still publishes fenced barrier inits."""
        slots = agents // self.warps
        self._cluster_arrivals.release(slots, agents, slice(None) if release else slice(INIT, INIT + 1))

    def cluster_complete(self, clusters: np.ndarray) -> None:
        """All threads of these clusters have arrived."""
        self._cluster_arrivals.copy(clusters, self._cluster_done)
        self._cluster_arrivals.clear(clusters)

    def cluster_wait(self, agents: np.ndarray, src: int, acquire: bool = True) -> None:
        """barrier.cluster.wait returns (it acquires unless it says otherwise)."""
        if acquire:
            self._cluster_done.acquire(agents // self.warps, agents)

    # ------------------------------------------------------------------ ends

    def warp_exit(self, agents: np.ndarray, src: int) -> None:
        """These warps are done; nothing is checked before their CTA is."""

    def cta_exit(self, ctas: np.ndarray) -> None:
        """All warps of these CTAs are done: look for work in flight and for peers not done with them."""
        for cta in np.asarray(ctas).tolist():
            self._leave(int(cta))

    def _leave(self, cta: int) -> None:
        own = np.arange(cta * self.warps_per_cta, (cta + 1) * self.warps_per_cta)
        known = self.clocks.table[own, CLOCK].max(axis=0)
        exit_ = tuple(own.tolist())
        mine = self._bars.of_cta.get(cta, [])
        for offset, slot in mine:
            column = self._bar_column[slot]
            if self._bar_copied[slot] > known[column]:
                self._record(
                    "exit-with-copy-in-flight",
                    int(self._bar_copy_source[slot]),
                    self._issuers.get((cta // self.cluster_size, int(column)), ()),
                    unit="copy in flight",
                    bar=(cta, offset),
                    phase=int(self._bar_copied[slot]) - 1,
                )
        for agent in exit_:
            if self._async_last[agent]:
                column = self._async_column(np.array([agent]))[0]
                if self._async_last[agent] > known[column]:
                    self._record(
                        "exit-with-copy-in-flight",
                        int(self._async_source[agent]),
                        (agent,),
                        unit="cp.async in flight",
                    )
            column = self._wg_columns[agent % self.warps]
            if self._wg_issued[agent] > known[column]:
                self._record(
                    "exit-with-copy-in-flight",
                    int(self._wg_source[agent]),
                    (agent,),
                    unit=f"WGMMA group {int(self._wg_issued[agent]) - 1}",
                )
        for agent in exit_:
            for lane in range(32):
                state = self._bulk.pop((agent, lane), None)
                if state is not None and state[3] > known[state[0]]:
                    self._record("exit-with-copy-in-flight", state[4], (agent,), unit=f"bulk group {state[3] - 1}")
        for agent, (epoch, src) in self._remote.pop(cta, {}).items():
            if epoch > known[agent % self.warps]:
                self._record("exit-before-remote-access", src, (agent,), detail=f"CTA {cta} may have exited")
        self._exited.add(cta)
        self.smem.release(cta)
        for offset, slot in mine:
            self._balance(cta, offset, slot)

    def _balance(self, cta: int, offset: int, slot: int) -> None:
        issued, expected = int(self._bar_issued[slot]), int(self._bar_expected[slot])
        if issued != expected:
            self._record(
                "mbarrier-tx-bytes",
                int(self._bar_arrive_source[slot]),
                (),
                int(self._bar_copy_source[slot]),
                bar=(cta, offset),
                phase=int(self._bar_phase[slot]),
                detail=f"{expected} bytes were expected and copies brought {issued}",
            )

    def finish(self, stopped: bool = False) -> list[Hazard]:
        """All hazards, the first met first.

        Args:
            stopped: the run was cut short, so work still due at the barriers of living CTAs means nothing.
        """
        for (cta, offset), slot in self._bars.slot.items():
            if cta not in self._exited and not stopped:
                self._balance(cta, offset, slot)
        merged: dict[tuple, Hazard] = {}
        for record in self._records.values():
            hazard = self._name(record)
            key = (hazard.kind, hazard.here.line, hazard.there.line if hazard.there else "")
            have = merged.get(key)
            if have is not None:
                hazard = replace(have, count=have.count + hazard.count)
            merged[key] = hazard
        return list(merged.values())[: self.limit]

    def _site(self, src: int, agents: tuple[int, ...], unit: str) -> Site:
        line, text = self.describe(src) if src >= 0 else ("", "")
        if not agents:
            return Site(line, text, unit=unit)
        warps = tuple(sorted(a % self.warps_per_cta for a in agents))
        return Site(line, text, agents[0] // self.warps_per_cta, warps, self.role(agents[0]), unit)

    def _name(self, record: _Record) -> Hazard:
        barrier = stage = None
        if record.bar is not None:
            barrier, stage = self._ring(record.bar)
        return Hazard(
            record.kind,
            record.rule or RULES[record.kind],
            self._site(record.src, record.agents, record.unit),
            self._site(record.other_src, record.other_agents, record.other_unit) if record.other_src >= 0 else None,
            record.space,
            record.object,
            record.first,
            record.last,
            barrier,
            stage,
            record.phase,
            record.detail,
            record.count,
        )

    def _ring(self, bar: tuple[int, int]) -> tuple[int, int | None]:
        """Number of a barrier among its CTA's, and its place among those made and used like it."""
        cta, offset = bar
        mine = sorted(self._bars.of_cta[cta])
        offsets = [o for o, _ in mine]

        def use(slot: int) -> tuple:
            src = self._bars.src[slot]
            return bool(self._bar_copied[slot]), self.describe(src)[0] if src >= 0 else ""

        kind = use(self._bars.slot[bar])
        ring = [o for o, slot in mine if use(slot) == kind]
        return offsets.index(offset), ring.index(offset) if len(ring) > 1 else None
