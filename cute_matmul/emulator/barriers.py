"""mbarriers as the hazard checker sees them: visibility of their init, phases, bytes, and what they hand on."""

from __future__ import annotations

import numpy as np

from cute_matmul.emulator.accesses import Conflicts
from cute_matmul.emulator.clocks import CLOCK, INIT, Clocks, Store, distinct
from cute_matmul.emulator.findings import Findings
from cute_matmul.emulator.warpgroups import WarpGroups

STATE = np.dtype(
    [
        ("column", "i4"),
        ("live", "?"),
        ("count", "i8"),  # arrivals a phase takes
        ("pending", "i8"),  # arrivals the current phase still lacks
        ("phase", "i8"),  # phases completed since the barrier was first made; goes on through re-init
        ("base", "i8"),  # value of `phase` at the latest init
        ("init_column", "i4"),
        ("init_epoch", "i4"),
        ("init_source", "i4"),
        ("arrive_source", "i4"),
        ("expected", "i8"),  # bytes
        ("issued", "i8"),
        ("copied", "i8"),  # epoch of the latest copy that completes here, 0 for none
        ("copy_source", "i4"),
    ]
)
WAIT = np.dtype([("phase", "i8"), ("epoch", "i8"), ("group", "i8"), ("source", "i4")])


class Barriers:
    """State of all mbarriers of a launch; each has a slot, found by its CTA and offset in shared memory."""

    def __init__(
        self,
        clocks: Clocks,
        conflicts: Conflicts,
        findings: Findings,
        groups: WarpGroups,
        warps_per_cta: int,
        cluster_size: int,
    ) -> None:
        self.clocks = clocks
        self.conflicts = conflicts
        self.findings = findings
        self.groups = groups
        self.warps_per_cta = warps_per_cta
        self.cluster_size = cluster_size
        self.places: list[tuple[int, int]] = []
        self._slot_of: dict[tuple[int, int], int] = {}
        self._of_cta: dict[int, list[tuple[int, int]]] = {}
        self._columns = np.zeros(0, np.int64)
        self.state = np.zeros(16, STATE)
        # The latest wait of each of the CTA's warps at each barrier.
        self.waits = np.zeros((16, warps_per_cta), WAIT)
        self.arrivals = Store(clocks, 16)
        self.done = Store(clocks, 16)

    def slot(self, cta: int, bar: int) -> int:
        """Slot of a barrier, made (not yet initialised) when it is first named."""
        slot = self._slot_of.get((cta, bar))
        if slot is None:
            slot = self._slot_of[cta, bar] = len(self.places)
            self.places.append((cta, bar))
            self._of_cta.setdefault(cta, []).append((bar, slot))
            if slot == len(self.state):
                self.state = np.concatenate([self.state, np.zeros(slot, STATE)])
                self.waits = np.concatenate([self.waits, np.zeros((slot, self.warps_per_cta), WAIT)])
                self.arrivals.reserve(2 * slot)
                self.done.reserve(2 * slot)
            column = self.clocks.column("barrier", cta % self.cluster_size, bar)
            if column not in self._columns:
                self._columns = np.append(self._columns, column)
            self.state[slot]["column"] = column
            self.state[slot]["arrive_source"] = self.state[slot]["init_source"] = -1
        return slot

    def slots(self, cta: np.ndarray, bar: np.ndarray) -> np.ndarray:
        """Slots of several barriers, (n,)."""
        pairs = zip(cta.tolist(), bar.tolist(), strict=True)
        return np.array([self.slot(c, b) for c, b in pairs], np.int64)

    def use(
        self, agents: np.ndarray, src: int, cta: np.ndarray, bar: np.ndarray, asynchronous: bool = False
    ) -> np.ndarray:
        """Slots of barriers that agents use, after a check that each is initialised and visibly so."""
        slots = self.slots(cta, bar)
        state = self.state[slots]
        live = state["live"]
        if not live.all():
            i = int(np.argmin(live))
            self.findings.add("mbarrier-not-initialised", src, [agents[i]], bar=self.places[slots[i]])
        table = self.clocks.table
        visible = table[agents, INIT, state["init_column"]] >= state["init_epoch"]
        if not asynchronous:
            visible |= table[agents, CLOCK, state["init_column"]] >= state["init_epoch"]
        bad = live & ~visible
        if bad.any():
            i = int(np.argmax(bad))
            first = int(agents[i]) // self.clocks.warps * self.clocks.warps
            self.findings.add(
                "mbarrier-init-not-visible",
                src,
                [agents[i]],
                state["init_source"][i],
                other_agents=(first + int(state["init_column"][i]),),
                bar=self.places[slots[i]],
            )
        return slots

    def check_phase(self, agents: np.ndarray, src: int, slots: np.ndarray, unit: str = "") -> None:
        """An arrival or a copy must come after its agent has seen the previous phase complete."""
        state = self.state[slots]
        seen = self.clocks.table[agents, CLOCK, state["column"]]
        bad = (seen < state["phase"]) & (state["phase"] > state["base"])
        if bad.any():
            i = int(np.argmax(bad))
            self._unordered(agents[i], src, int(slots[i]), unit)

    def _unordered(self, agent: int, src: int, slot: int, unit: str = "") -> None:
        state = self.state[slot]
        self.findings.add(
            "mbarrier-phase-unordered",
            src,
            [agent],
            state["arrive_source"],
            unit=unit,
            bar=self.places[slot],
            phase=int(state["phase"]),
        )

    def init(self, agents: np.ndarray, src: int, cta: np.ndarray, bar: np.ndarray, count: np.ndarray) -> None:
        """mbarrier.init."""
        slots = self.slots(cta, bar)
        for i in np.flatnonzero(self.state["live"][slots]).tolist():
            self._reinitialised(int(agents[i]), src, int(slots[i]))
        state = self.state
        state["live"][slots] = True
        state["count"][slots] = state["pending"][slots] = count
        state["expected"][slots] = state["issued"][slots] = 0
        state["base"][slots] = state["phase"][slots]
        state["init_column"][slots] = agents % self.clocks.warps
        state["init_epoch"][slots] = self.clocks.epoch(agents)
        state["init_source"][slots] = src
        self.waits["epoch"][slots] = 0

    def invalidate(self, agents: np.ndarray, src: int, cta: np.ndarray, bar: np.ndarray) -> None:
        """mbarrier.inval."""
        slots = self.use(agents, src, cta, bar)
        for agent, slot in zip(agents.tolist(), slots.tolist(), strict=True):
            self._check_idle(agent, src, slot)
        self.state["live"][slots] = False

    def _check_idle(self, agent: int, src: int, slot: int) -> None:
        """A barrier may be invalidated when it is between phases and every use of it is known to be over."""
        state = self.state[slot]
        known = self.clocks.table[agent, CLOCK]
        warps = slice(0, self.clocks.warps)
        first = self.places[slot][0] % self.cluster_size * self.warps_per_cta
        arrivals = self.arrivals.rows[slot, CLOCK, warps] > known[warps]
        waits = self.waits["epoch"][slot] > known[first : first + self.warps_per_cta]
        copying = state["copied"] > known[state["column"]]
        if state["pending"] != state["count"] or arrivals.any() or waits.any() or copying:
            self._reinitialised(agent, src, slot)

    def _reinitialised(self, agent: int, src: int, slot: int) -> None:
        state = self.state[slot]
        self.findings.add(
            "mbarrier-reinitialised",
            src,
            [agent],
            state["init_source"],
            bar=self.places[slot],
            phase=int(state["phase"]),
        )

    def arrive(
        self,
        agents: np.ndarray,
        src: int,
        slots: np.ndarray,
        count: np.ndarray,
        expect_tx: np.ndarray,
        release: bool,
        arrive: bool,
        drop: bool,
    ) -> None:
        """Arrivals and expected bytes, at barriers checked by `use`."""
        self.check_phase(agents, src, slots)
        state = self.state
        np.add.at(state["expected"], slots, expect_tx)
        if not arrive:
            return
        np.subtract.at(state["pending"], slots, count)
        if drop:
            np.subtract.at(state["count"], slots, count)
        over = (state["pending"][slots] < 0) & state["live"][slots]
        if over.any():
            i = int(np.flatnonzero(over)[-1])
            self._unordered(agents[i], src, int(slots[i]))
        state["arrive_source"][slots] = src
        if release:
            self.arrivals.release(slots, agents)

    def cover(self, slots: np.ndarray, columns: np.ndarray, epochs: np.ndarray) -> None:
        """The current phase covers `columns` up to `epochs`, (n,)."""
        for pick in distinct(slots):
            rows = self.arrivals.rows
            have = rows[slots[pick], CLOCK, columns[pick]]
            rows[slots[pick], CLOCK, columns[pick]] = np.maximum(have, epochs[pick])

    def copy(self, agents: np.ndarray, src: int, slots: np.ndarray, nbytes: int) -> None:
        """Copies of `nbytes` each are issued that complete on these barriers."""
        state = self.state
        np.add.at(state["issued"], slots, nbytes)
        state["copied"][slots] = state["phase"][slots] + 1
        state["copy_source"][slots] = src
        clusters = (agents // self.clocks.warps).tolist()
        for cluster, column, agent in zip(clusters, state["column"][slots].tolist(), agents.tolist(), strict=True):
            self.conflicts.issuers[cluster, column] = (agent,)
        # A copy lands after it was issued: who sees its bytes also knows which phases its issuer had seen.
        for pick in distinct(slots):
            at = np.ix_(slots[pick], [CLOCK], self._columns)
            seen = self.clocks.table[np.ix_(agents[pick], [CLOCK], self._columns)]
            self.arrivals.rows[at] = np.maximum(self.arrivals.rows[at], seen)

    def complete(self, cta: np.ndarray, bar: np.ndarray) -> None:
        """The current phase of these barriers, each named once, completes."""
        slots = self.slots(cta, bar)
        state = self.state[slots]
        for i in np.flatnonzero(state["issued"] > state["expected"]).tolist():
            surplus = int(state["issued"][i] - state["expected"][i])
            self._bytes(int(slots[i]), f"a phase completes and {surplus} bytes of copies on it are not expected")
        self._check_waiters(cta, slots, state)
        self.state["phase"][slots] += 1
        self.state["pending"][slots] += state["count"]
        self.arrivals.rows[slots, CLOCK, state["column"]] = state["phase"] + 1
        self.arrivals.copy(slots, self.done)

    def _check_waiters(self, cta: np.ndarray, slots: np.ndarray, state: np.ndarray) -> None:
        """Whoever waited for the phase before must be known to have done so by those who arrived in this one.

        A WGMMA group that a warp joined after its wait speaks for the wait: it needs all four warps.
        """
        waits = self.waits[slots]
        last = (waits["epoch"] > 0) & (waits["phase"] == state["phase"][:, None] - 1)
        if not last.any():
            return
        own = (cta % self.cluster_size * self.warps_per_cta)[:, None] + np.arange(self.warps_per_cta)
        arrived = self.arrivals.rows[slots, CLOCK]
        rows = np.arange(len(slots))[:, None]
        late = last & (arrived[rows, own] < waits["epoch"])
        late &= arrived[rows, self.groups.columns[own]] <= waits["group"]
        if late.any():
            i, w = np.argwhere(late)[0]
            self.findings.add(
                "mbarrier-phase-overrun",
                waits["source"][i, w],
                [cta[i] * self.warps_per_cta + w],
                state["arrive_source"][i],
                bar=self.places[slots[i]],
                phase=int(state["phase"][i]),
            )

    def wait(self, agents: np.ndarray, src: int, slots: np.ndarray) -> None:
        """Each agent (named once) observes the latest completed phase of its barrier."""
        self.done.acquire(slots, agents)
        at = (slots, agents % self.warps_per_cta)
        self.waits["phase"][at] = self.state["phase"][slots] - 1
        self.waits["epoch"][at] = self.clocks.epoch(agents)
        self.waits["group"][at] = self.groups.committed[agents]
        self.waits["source"][at] = src

    def landed(self, cta: np.ndarray, bar: np.ndarray, nbytes: np.ndarray) -> None:
        """Bytes reach barriers other than by `copy`."""
        np.add.at(self.state["issued"], self.slots(cta, bar), nbytes)

    def leave(self, cta: int, known: np.ndarray) -> None:
        """A CTA exits knowing `known`: copies that complete at its barriers must be over."""
        for _, slot in self._of_cta.get(cta, ()):
            state = self.state[slot]
            column = int(state["column"])
            if state["copied"] > known[column]:
                self.findings.add(
                    "exit-with-copy-in-flight",
                    state["copy_source"],
                    self.conflicts.issuers.get((cta // self.cluster_size, column), ()),
                    unit="copy in flight",
                    bar=self.places[slot],
                    phase=int(state["copied"]) - 1,
                )
            self.balance(slot)

    def balance(self, slot: int) -> None:
        """At the end, a barrier has got the bytes it expected."""
        issued, expected = (int(self.state[slot][name]) for name in ("issued", "expected"))
        if issued != expected:
            self._bytes(slot, f"{expected} bytes were expected and copies brought {issued}")

    def _bytes(self, slot: int, detail: str) -> None:
        state = self.state[slot]
        self.findings.add(
            "mbarrier-tx-bytes",
            state["arrive_source"],
            (),
            state["copy_source"] if state["copied"] else -1,
            bar=self.places[slot],
            phase=int(state["phase"]),
            detail=detail,
        )

    def ring(self, bar: tuple[int, int]) -> tuple[int, int | None]:
        """Number of a barrier among its CTA's, and its place among those made and used like it."""

        def use(slot: int) -> tuple[bool, str]:
            state = self.state[slot]
            line = self.findings.describe(int(state["init_source"]))[0] if state["init_source"] >= 0 else ""
            return bool(state["copied"]), line

        mine = sorted(self._of_cta[bar[0]])
        kind = use(self._slot_of[bar])
        alike = [offset for offset, slot in mine if use(slot) == kind]
        number = [offset for offset, _ in mine].index(bar[1])
        return number, alike.index(bar[1]) if len(alike) > 1 else None
