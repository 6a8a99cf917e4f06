"""Vector clocks of the hazard checker: who has seen whose work, for warps and for asynchronous units.

A *column* is a source of memory accesses inside one cluster: a warp, the copies that complete on one
mbarrier, the WGMMA groups of one warp group, the bulk groups of one thread. Its *epoch* counts 1, 2, ... in the
order in which the source's work completes. A clock row says, for each column, up to which epoch its owner may
rely on. Every cluster has the same columns, so one table serves all clusters of a launch.

Each agent (a warp) owns four rows:

=========  =============================================================================================
CLOCK      accesses that happen before the agent's next instruction
SHARED     generic-proxy accesses to shared memory that a proxy fence has handed to the async proxy
GLOBAL     the same for global memory
INIT       mbarrier initialisations made visible to the async proxy and to the cluster
=========  =============================================================================================

Epoch 0 means "never"; an agent's own epoch starts at 1 and grows at each of its releases, so that what it does
after a release is not covered by it.
"""

from __future__ import annotations

import numpy as np

CLOCK, SHARED, GLOBAL, INIT = range(4)
ROWS = 4

GENERIC_KINDS = frozenset({"warp", "cp.async"})


class Clocks:
    """Clock rows of all agents of a launch.

    Args:
        clusters: number of clusters in the grid.
        warps: warps per cluster. Agent `a` is warp `a % warps` of cluster `a // warps`.
    """

    def __init__(self, clusters: int, warps: int) -> None:
        self.clusters = clusters
        self.warps = warps
        self.keys: list[tuple] = [("warp", w) for w in range(warps)]
        self._index: dict[tuple, int] = {key: i for i, key in enumerate(self.keys)}
        self.capacity = warps + 24
        self.generic = np.zeros(self.capacity, bool)
        self.generic[:warps] = True
        self.table = np.zeros((clusters * warps, ROWS, self.capacity), np.int32)
        agents = np.arange(clusters * warps)
        self.table[agents, CLOCK, agents % warps] = 1
        self._stores: list[Store] = []
        # agent -> {other cluster: rows}; None until something synchronises across clusters.
        self.foreign: dict[int, dict[int, np.ndarray]] | None = None

    def column(self, *key) -> int:
        """The column of source `key`, e.g. `("barrier", cta_rank, offset)`; made on first use."""
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.keys)
            self.keys.append(key)
            if index >= self.capacity:
                self._grow()
            self.generic[index] = key[0] in GENERIC_KINDS
        return index

    def _grow(self) -> None:
        extra = self.capacity
        self.capacity += extra
        self.table = np.pad(self.table, ((0, 0), (0, 0), (0, extra)))
        self.generic = np.pad(self.generic, (0, extra))
        for store in self._stores:
            store.rows = np.pad(store.rows, ((0, 0), (0, 0), (0, extra)))
        if self.foreign is not None:
            maps = [*self.foreign.values(), *(m for s in self._stores for m in s.foreign.values())]
            for rows_by_cluster in maps:
                for cluster, rows in rows_by_cluster.items():
                    if rows.shape[1] < self.capacity:
                        rows_by_cluster[cluster] = np.pad(rows, ((0, 0), (0, self.capacity - rows.shape[1])))

    def epoch(self, agents: np.ndarray) -> np.ndarray:
        """The current epoch of each agent's own accesses."""
        return self.table[agents, CLOCK, agents % self.warps]

    def advance(self, agents: np.ndarray) -> None:
        """Start a new epoch: what follows is not covered by the release just made."""
        self.table[agents, CLOCK, agents % self.warps] += 1

    def learn(self, agents: np.ndarray, columns: np.ndarray | int, epochs: np.ndarray) -> None:
        """Each agent has seen source `columns` complete up to `epochs`."""
        self.table[agents, CLOCK, columns] = np.maximum(self.table[agents, CLOCK, columns], epochs)

    def join_rows(self, rows: np.ndarray) -> None:
        """All agents of one row of `rows` (n, k) learn what any of them knows, and start new epochs."""
        merged = self.table[rows].max(axis=1, keepdims=True)
        self.table[rows] = merged
        if self.foreign is not None:
            for row in rows.tolist():
                known: dict[int, np.ndarray] = {}
                for agent in row:
                    merge_foreign(known, self.foreign.get(agent))
                for agent in row:
                    self.foreign[agent] = dict(known)
        flat = rows.reshape(-1)
        self.advance(flat)

    def foreign_rows(self, agent: int, cluster: int) -> np.ndarray | None:
        """What `agent` knows of another cluster: (ROWS, capacity), or None for nothing."""
        if self.foreign is None:
            return None
        return self.foreign.get(agent, {}).get(cluster)

    def published(self, agent: int) -> dict[int, np.ndarray]:
        """All an agent knows, by cluster, as a release at gpu scope hands it on."""
        known = dict(self.foreign.get(agent, {})) if self.foreign is not None else {}
        known[agent // self.warps] = self.table[agent].copy()
        return known

    def absorb(self, agent: int, known: dict[int, np.ndarray]) -> None:
        """An acquire at gpu scope: `agent` learns `known`, rows by cluster."""
        own = agent // self.warps
        rest = {cluster: rows for cluster, rows in known.items() if cluster != own}
        if own in known:
            rows = known[own]
            np.maximum(self.table[agent, :, : rows.shape[1]], rows, out=self.table[agent, :, : rows.shape[1]])
        if rest:
            if self.foreign is None:
                self.foreign = {}
            merge_foreign(self.foreign.setdefault(agent, {}), rest)


def merge_foreign(into: dict[int, np.ndarray], other: dict[int, np.ndarray] | None) -> None:
    """`into |= other`, both maps from cluster to clock rows; rows are never changed in place."""
    for cluster, rows in (other or {}).items():
        mine = into.get(cluster)
        if mine is None:
            into[cluster] = rows
        elif mine is not rows:
            width = max(mine.shape[1], rows.shape[1])
            merged = np.zeros((ROWS, width), np.int32)
            merged[:, : mine.shape[1]] = mine
            np.maximum(merged[:, : rows.shape[1]], rows, out=merged[:, : rows.shape[1]])
            into[cluster] = merged


class Store:
    """Clock rows kept by synchronisation objects (barriers): `slots` of them, growing on demand."""

    def __init__(self, clocks: Clocks, slots: int) -> None:
        self.clocks = clocks
        self.rows = np.zeros((slots, ROWS, clocks.capacity), np.int32)
        self.foreign: dict[int, dict[int, np.ndarray]] = {}
        clocks._stores.append(self)

    def reserve(self, slots: int) -> None:
        """Make room for at least `slots` slots."""
        have = len(self.rows)
        if slots > have:
            self.rows = np.pad(self.rows, ((0, max(slots, 2 * have) - have), (0, 0), (0, 0)))

    def release(self, slots: np.ndarray, agents: np.ndarray, rows: slice = slice(None)) -> None:
        """Fold the agents' clocks into the slots; a slot may be named several times. Starts new epochs."""
        table = self.clocks.table
        for pick in distinct(slots):
            here = self.rows[slots[pick], rows]
            self.rows[slots[pick], rows] = np.maximum(here, table[agents[pick], rows])
        if self.clocks.foreign is not None and rows == slice(None):
            for slot, agent in zip(slots.tolist(), agents.tolist(), strict=True):
                merge_foreign(self.foreign.setdefault(slot, {}), self.clocks.foreign.get(agent))
        self.clocks.advance(agents)

    def acquire(self, slots: np.ndarray, agents: np.ndarray) -> None:
        """Each agent (named once) learns what its slot holds."""
        clocks = self.clocks
        clocks.table[agents] = np.maximum(clocks.table[agents], self.rows[slots])
        if clocks.foreign is not None:
            for slot, agent in zip(slots.tolist(), agents.tolist(), strict=True):
                if slot in self.foreign:
                    merge_foreign(clocks.foreign.setdefault(agent, {}), self.foreign[slot])

    def clear(self, slots: np.ndarray) -> None:
        """Forget what the slots hold."""
        self.rows[slots] = 0
        for slot in np.unique(slots).tolist():
            self.foreign.pop(slot, None)

    def copy(self, slots: np.ndarray, into: Store) -> None:
        """`into` holds, for these slots, exactly what this store holds now."""
        into.rows[slots] = self.rows[slots]
        for slot in slots.tolist():
            if slot in self.foreign:
                into.foreign[slot] = dict(self.foreign[slot])
            else:
                into.foreign.pop(slot, None)


def distinct(values: np.ndarray) -> list[np.ndarray | slice]:
    """Split positions of `values` into groups in each of which every value is there once."""
    if len(values) < 2:
        return [slice(None)]
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    if len(starts) == len(values):
        return [slice(None)]
    lengths = np.diff(np.append(starts, len(values)))
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values)) - np.repeat(starts, lengths)
    return [np.flatnonzero(rank == r) for r in range(int(lengths.max()))]
