"""Checks of memory accesses against the accesses that must come before them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cute_matmul.emulator.clocks import CLOCK, GLOBAL, ROWS, SHARED, Clocks
from cute_matmul.emulator.findings import Findings
from cute_matmul.emulator.shadow import (
    CELL,
    GlobalShadow,
    SharedShadow,
    spread,
    spread_ragged,
    unit,
)


def array(values, n: int) -> np.ndarray:
    """`values` (an int or n of them) as an int64 array (n,)."""
    result = np.asarray(values, np.int64)
    return result if result.shape == (n,) else np.broadcast_to(result, (n,))


@dataclass
class Accessors:
    """Who makes a batch of accesses, how they enter the shadow, and what the accessors know.

    Arrays are (n,), one entry per accessor: a warp, a warp group (then `crew` is (n, 4)), or a copy.
    """

    agents: np.ndarray
    src: np.ndarray
    columns: np.ndarray
    epochs: np.ndarray
    known: np.ndarray
    clock: np.ndarray
    proxy: np.ndarray | None = None
    crew: np.ndarray | None = None
    unit: str = ""
    bars: list[tuple[int, int]] = field(default_factory=list)
    phases: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        clocks: Clocks,
        agents: np.ndarray,
        src,
        columns: np.ndarray | None = None,
        epochs: np.ndarray | None = None,
        asynchronous: bool = False,
        **names,
    ) -> Accessors:
        """Accessors that know what their agents know; by default the agents themselves."""
        clock = agents * (ROWS * clocks.capacity)
        return cls(
            agents=agents,
            src=array(src, len(agents)),
            columns=agents % clocks.warps if columns is None else columns,
            epochs=clocks.epoch(agents) if epochs is None else epochs,
            known=clocks.table.reshape(-1),
            clock=clock + CLOCK * clocks.capacity,
            proxy=clock + SHARED * clocks.capacity if asynchronous else None,
            **names,
        )

    def names(self, row: int) -> list[int]:
        """Agents to name for one accessor."""
        return np.atleast_1d((self.agents if self.crew is None else self.crew)[row]).tolist()


@dataclass
class Others:
    """The accesses that a batch is checked against, one entry per element: (m,) arrays."""

    clusters: np.ndarray
    columns: np.ndarray
    epochs: np.ndarray
    sources: np.ndarray


def kind_of(relation: str, source: str, asynchronous: bool) -> str:
    """Kind of the hazard between an access and an earlier one by a column of kind `source`.

    Args:
        relation: raw, waw or war (this access after that one), or proxy.
        asynchronous: this access is by the async proxy.
    """
    if relation == "proxy":
        return "missing-proxy-fence"
    if source == "warp":
        return "overwrite-while-read" if relation == "war" and asynchronous else "data-race"
    if relation == "raw":
        return "read-before-copy-waited"
    if relation == "waw":
        return "overwrite-before-copy-waited"
    return "overwrite-while-wgmma-reads" if source == "wgmma" else "overwrite-while-copy-reads"


class Conflicts:
    """Turns elements that conflict into findings."""

    def __init__(self, clocks: Clocks, findings: Findings, cluster_size: int) -> None:
        self.clocks = clocks
        self.findings = findings
        self.cluster_size = cluster_size
        # Who issued the latest work of an asynchronous column, by (cluster, column).
        self.issuers: dict[tuple[int, int], tuple[int, ...]] = {}

    def describe(self, cluster: int, column: int, epoch: int) -> dict:
        """Whose accesses (column, epoch) of a cluster are, as the other side of a finding."""
        key = self.clocks.keys[column]
        first = cluster * self.clocks.warps
        agents = self.issuers.get((cluster, column), ())
        if key[0] == "warp":
            return {"other_agents": (first + column,)}
        if key[0] == "barrier":
            bar = (cluster * self.cluster_size + key[1], key[2])
            return {
                "other_agents": agents,
                "other_unit": "copy in flight",
                "bar": bar,
                "phase": epoch - 1,
            }
        if key[0] == "wgmma":
            return {"other_agents": agents, "other_unit": f"WGMMA group {epoch - 1}"}
        if key[0] == "cp.async":
            return {"other_agents": (first + key[1],), "other_unit": "cp.async in flight"}
        return {"other_agents": (first + key[1],), "other_unit": f"bulk group {epoch - 1}"}

    def add(
        self,
        relation: str,
        by: Accessors,
        rows: np.ndarray,
        others: Others,
        where: np.ndarray,
        first_bytes: np.ndarray,
        cell: int,
        space: str,
        object: str = "",
    ) -> None:
        """Findings for the elements `where` (indices), one per accessor and access they conflict with."""
        if not len(where):
            return
        columns, rows_ = others.columns[where].astype(np.int64), rows[where]
        keys = (others.sources[where].astype(np.int64) * (self.clocks.clusters + 1) + others.clusters[where]) << 16
        keys = (keys + columns) * len(by.agents) + rows_
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
            pick = where[order[start:end]]
            first = pick[0]
            row, column = int(rows[first]), int(others.columns[first])
            source = int(others.sources[first])
            kind = kind_of(relation, self.clocks.keys[column][0], by.proxy is not None)
            if self.findings.seen(kind, by.src[row], source):
                continue
            fields = self.describe(int(others.clusters[first]), column, int(others.epochs[pick].max()))
            if by.bars:
                fields.setdefault("bar", by.bars[row])
                fields.setdefault("phase", int(by.phases[row]))
            bytes_ = first_bytes[pick]
            self.findings.add(
                kind,
                by.src[row],
                by.names(row),
                source,
                unit=by.unit,
                space=space,
                object=object,
                first=int(bytes_.min()),
                last=int(bytes_.max()) + cell - 1,
                **fields,
            )


class SharedMemory:
    """Accesses to the shared memory of all CTAs that are alive."""

    def __init__(self, clocks: Clocks, conflicts: Conflicts, nbytes: int, ctas: int) -> None:
        self.clocks = clocks
        self.conflicts = conflicts
        self.shadow = SharedShadow(nbytes, ctas)

    def cells(self, ctas: np.ndarray, addr: np.ndarray, size: int | np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Shadow cells of (m,) runs of bytes in the memory of `ctas` (m,), and the run of each cell.

        The second is None where every run is one cell. Splits the shadow's cells if they are too coarse.
        """
        shadow = self.shadow
        step = unit(addr, size)
        if step < shadow.cell:
            shadow.refine(step)
        first = addr // shadow.cell + shadow.bases(ctas)
        if not isinstance(size, int):
            return spread_ragged(first, size // shadow.cell)
        per = size // shadow.cell
        return spread(first, per), np.repeat(np.arange(len(first)), per) if per > 1 else None

    def access(
        self,
        by: Accessors,
        cells: np.ndarray,
        rows: np.ndarray,
        *,
        write: bool,
        reads: bool = False,
        exempt: bool = False,
        untracked: bool = False,
        taint: bool = False,
    ) -> np.ndarray | None:
        """Check and enter an access: `cells` (m,), each by accessor `rows` (m,).

        Args:
            write: the bytes are written.
            reads: they are (also) read; an access that does not write always reads.
            exempt: does not race with others that are exempt (atomics and the like).
            untracked: a read that later writes need not be ordered after.
            taint: bytes that nobody wrote are no finding.

        Returns:
            (m,) which cells nobody has written, if the access reads and there are some; else None.
        """
        shadow = self.shadow
        was_column = shadow.column[cells]
        was_epoch = shadow.epoch[cells]
        bad = by.known[by.clock[rows] + was_column] < was_epoch
        if exempt:
            bad &= (shadow.source[cells] & 1) == 0
        if bad.any():
            self._conflict("waw" if write else "raw", by, cells, rows, bad)
        if by.proxy is not None:
            missing = self.clocks.generic[was_column] & (by.known[by.proxy[rows] + was_column] < was_epoch)
            if missing.any():
                missing &= ~bad
                self._conflict("proxy", by, cells, rows, missing)
        unwritten = None
        if reads or not write:
            unwritten = was_epoch == 0
            unwritten = unwritten if unwritten.any() else None
            if unwritten is not None and not taint:
                self._unwritten(by, cells, rows, unwritten)
        if write:
            self._check_readers(by, cells, rows)
            columns = by.columns[rows]
            shadow.column[cells] = columns
            shadow.epoch[cells] = by.epochs[rows]
            shadow.source[cells] = 2 * by.src[rows] + exempt
            if not exempt:
                # Two accessors of one batch have had no chance to synchronise.
                clash = shadow.column[cells] != columns
                if clash.any():
                    self._conflict("waw", by, cells, rows, clash)
        elif not untracked:
            readers = shadow.readers(by.columns)[rows]  # may widen the table
            at = cells * shadow.read_epoch.shape[1] + readers
            shadow.read_epoch.reshape(-1)[at] = by.epochs[rows]
            shadow.read_source.reshape(-1)[at] = 2 * by.src[rows]
        return unwritten

    def _check_readers(self, by: Accessors, cells: np.ndarray, rows: np.ndarray) -> None:
        shadow = self.shadow
        count = len(shadow.reader_columns)
        if not count:
            return
        read = shadow.read_epoch[cells]
        if not read.any():
            return
        bad = read[:, :count] > by.known[by.clock[rows][:, None] + shadow.reader_columns]
        if bad.any():
            element, reader = np.nonzero(bad)
            others = Others(
                by.agents[rows[element]] // self.clocks.warps,
                shadow.reader_columns[reader],
                read[element, reader],
                shadow.read_source[cells[element], reader] >> 1,
            )
            self._add("war", by, cells[element], rows[element], others, np.arange(len(element)))
        shadow.read_epoch[cells] = 0

    def _conflict(self, relation: str, by: Accessors, cells: np.ndarray, rows: np.ndarray, bad: np.ndarray) -> None:
        shadow = self.shadow
        others = Others(
            by.agents[rows] // self.clocks.warps,
            shadow.column[cells],
            shadow.epoch[cells],
            shadow.source[cells] >> 1,
        )
        self._add(relation, by, cells, rows, others, np.flatnonzero(bad))

    def _add(
        self,
        relation: str,
        by: Accessors,
        cells: np.ndarray,
        rows: np.ndarray,
        others: Others,
        where: np.ndarray,
    ) -> None:
        shadow = self.shadow
        bytes_ = cells % shadow.per_cta * shadow.cell
        self.conflicts.add(relation, by, rows, others, where, bytes_, shadow.cell, "shared")

    def _unwritten(self, by: Accessors, cells: np.ndarray, rows: np.ndarray, unwritten: np.ndarray) -> None:
        shadow = self.shadow
        where = np.flatnonzero(unwritten)
        for src in np.unique(by.src[rows[where]]):
            pick = where[by.src[rows[where]] == src]
            bytes_ = cells[pick] % shadow.per_cta * shadow.cell
            self.conflicts.findings.add(
                "uninitialised-shared-memory",
                src,
                by.names(rows[pick[0]]),
                space="shared",
                first=int(bytes_.min()),
                last=int(bytes_.max()) + shadow.cell - 1,
                unit=by.unit,
            )


class GlobalMemory:
    """Accesses to global memory, by allocation."""

    def __init__(self, clocks: Clocks, conflicts: Conflicts) -> None:
        self.clocks = clocks
        self.conflicts = conflicts
        self._shadows: list[GlobalShadow] = []
        self._bases = np.zeros(0, np.int64)

    def add(self, base: int, nbytes: int, name: str) -> None:
        """Make an allocation known; bytes outside all allocations are not checked."""
        self._shadows.append(GlobalShadow(base, nbytes, name))
        self._shadows.sort(key=lambda shadow: shadow.base)
        self._bases = np.array([shadow.base for shadow in self._shadows], np.int64)

    def _by_shadow(self, addr: np.ndarray) -> list[tuple[GlobalShadow, np.ndarray | slice]]:
        """The allocations that addresses fall into, each with the positions that do."""
        if not len(addr) or not len(self._bases):
            return []
        low, high = np.searchsorted(self._bases, (addr.min(), addr.max()), side="right") - 1
        if low == high:
            return [(self._shadows[low], slice(None))] if low >= 0 else []
        owner = np.searchsorted(self._bases, addr, side="right") - 1
        return [(self._shadows[i], np.flatnonzero(owner == i)) for i in np.unique(owner) if i >= 0]

    def access(
        self,
        by: Accessors,
        addr: np.ndarray,
        size: int | np.ndarray,
        rows: np.ndarray,
        *,
        write: bool,
        exempt: bool = False,
    ) -> None:
        """Check and enter an access: (m,) runs of `size` bytes at `addr`, each by accessor `rows` (m,)."""
        for shadow, pick in self._by_shadow(addr):
            part = (by, addr[pick], size if isinstance(size, int) else size[pick], rows[pick])
            if not write and not shadow.written:
                if exempt:
                    continue
                shadow.log.append(part)
                shadow.logged += len(part[1])
                if shadow.logged > shadow.LOG_LIMIT:
                    self._open(shadow, CELL)
                continue
            if not shadow.written:
                self._open(shadow, unit(part[1], part[2]))
            self._enter(shadow, *part, write=write, exempt=exempt)

    def _open(self, shadow: GlobalShadow, cell: int) -> None:
        shadow.refine(min(cell, shadow.cell))
        shadow.open()
        for part in shadow.log:
            self._enter(shadow, *part, write=False, exempt=False, replayed=True)
        shadow.log.clear()

    def _enter(
        self,
        shadow: GlobalShadow,
        by: Accessors,
        addr: np.ndarray,
        size: int | np.ndarray,
        rows: np.ndarray,
        *,
        write: bool,
        exempt: bool,
        replayed: bool = False,
    ) -> None:
        step = unit(addr, size)
        if step < shadow.cell:
            shadow.refine(step)
        first = shadow.first_cell(addr)
        if isinstance(size, int):
            per = size // shadow.cell
            cells, rows = spread(first, per), np.repeat(rows, per) if per > 1 else rows
        else:
            cells, run = spread_ragged(first, size // shadow.cell)
            rows = rows[run]
        inside = (cells >= 0) & (cells < len(shadow.epoch))
        if not inside.all():
            cells, rows = cells[inside], rows[inside]
        agents = by.agents[rows]
        cluster = agents // self.clocks.warps
        was = self._writers(shadow, cells)
        known = self._known(agents, cluster, was, CLOCK)
        bad = known < was.epochs
        if exempt:
            bad &= (shadow.source[cells] & 1) == 0
        bytes_ = cells * shadow.cell - shadow.offset
        place = (bytes_, shadow.cell, "global", shadow.name)
        if bad.any():
            self.conflicts.add("waw" if write else "raw", by, rows, was, np.flatnonzero(bad), *place)
        if by.proxy is not None:
            missing = self.clocks.generic[was.columns] & ~bad
            missing &= self._known(agents, cluster, was, GLOBAL) < was.epochs
            if missing.any():
                self.conflicts.add("proxy", by, rows, was, np.flatnonzero(missing), *place)
        if not write:
            if not exempt:
                self._enter_readers(shadow, by, cells, rows, replayed)
            return
        self._check_readers(shadow, by, cells, rows, bytes_)
        columns = by.columns[rows]
        shadow.cluster[cells] = cluster
        shadow.column[cells] = columns
        shadow.epoch[cells] = by.epochs[rows]
        shadow.source[cells] = 2 * by.src[rows] + exempt
        clash = (shadow.column[cells] != columns) | (shadow.cluster[cells] != cluster)
        if clash.any() and not exempt:
            now = self._writers(shadow, cells)
            self.conflicts.add("waw", by, rows, now, np.flatnonzero(clash), *place)

    @staticmethod
    def _writers(shadow: GlobalShadow, cells: np.ndarray) -> Others:
        return Others(shadow.cluster[cells], shadow.column[cells], shadow.epoch[cells], shadow.source[cells] >> 1)

    def _known(self, agents: np.ndarray, cluster: np.ndarray, of: Others, row: int) -> np.ndarray:
        """Up to which epoch `agents` (m,) know the columns `of` (m,), which may be of other clusters."""
        known = self.clocks.table[agents, row, of.columns]
        away = np.flatnonzero(cluster != of.clusters)
        if not len(away):
            return known
        known[away] = 0
        if self.clocks.foreign is not None:
            pairs = np.stack([agents[away], of.clusters[away]])
            for agent, other in np.unique(pairs, axis=1).T.tolist():
                seen = self.clocks.foreign_rows(agent, other)
                if seen is not None:
                    pick = away[(pairs[0] == agent) & (pairs[1] == other)]
                    pick = pick[of.columns[pick] < seen.shape[1]]
                    known[pick] = seen[row, of.columns[pick]]
        return known

    def _check_readers(
        self, shadow: GlobalShadow, by: Accessors, cells: np.ndarray, rows: np.ndarray, bytes_: np.ndarray
    ) -> None:
        if shadow.read_epoch is None:
            return
        element, slot = np.nonzero(shadow.read_epoch[cells])
        if not len(element):
            return
        picked = cells[element]
        readers = Others(
            shadow.read_cluster[picked, slot],
            shadow.read_column[picked, slot],
            shadow.read_epoch[picked, slot],
            shadow.read_source[picked, slot],
        )
        rows = rows[element]
        agents = by.agents[rows]
        bad = self._known(agents, agents // self.clocks.warps, readers, CLOCK) < readers.epochs
        if bad.any():
            place = (bytes_[element], shadow.cell, "global", shadow.name)
            self.conflicts.add("war", by, rows, readers, np.flatnonzero(bad), *place)
        shadow.read_epoch[cells] = 0

    def _enter_readers(
        self, shadow: GlobalShadow, by: Accessors, cells: np.ndarray, rows: np.ndarray, replayed: bool
    ) -> None:
        if shadow.read_epoch is None:
            shadow.open_readers()
        for row in np.unique(rows).tolist():
            mine = cells[rows == row]
            agent, column = int(by.agents[row]), int(by.columns[row])
            cluster = agent // self.clocks.warps
            have = shadow.read_epoch[mine]
            near = shadow.read_cluster[mine] == cluster
            same = near & (shadow.read_column[mine] == column) & (have > 0)
            free = have == 0
            if not replayed:  # a replayed read is older than the clock
                free |= near & (self.clocks.table[agent, CLOCK][shadow.read_column[mine]] >= have)
            # The reader's own slot, else a free or finished one, else the first.
            slot = np.argmax(2 * same + free, axis=1)
            shadow.read_cluster[mine, slot] = cluster
            shadow.read_column[mine, slot] = column
            shadow.read_epoch[mine, slot] = by.epochs[row]
            shadow.read_source[mine, slot] = by.src[row]
