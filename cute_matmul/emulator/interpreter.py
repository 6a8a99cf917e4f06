"""The engine: runs one kernel launch, warp by warp, on NumPy arrays.

Warps of all resident CTAs that stand at the same node run it together as a `Group`. Where a branch divides a warp,
each side becomes a `Fragment` with its lanes; they meet again at the branch's join, as the convergence barriers of
the hardware make them do, and both sides can run meanwhile. CTAs run in waves of at most `WAVE` CTAs.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, deque

import numpy as np

from cute_matmul.emulator import arithmetic, ops, printf, schedule, translate
from cute_matmul.emulator.errors import EmulatorError
from cute_matmul.emulator.mbarrier import LOW_MASK, Barriers
from cute_matmul.emulator.memory import SLOT_SHIFT, AddressSpaces, Stop
from cute_matmul.emulator.units import Units

WAVE = 132  # CTAs resident together: one per SM of an H200
MAX_STEPS = 1_000_000
FULL = np.ones((1, 32), bool)


class Join:
    """Where the sides of a divergent branch meet: `outstanding` fragments are still on their way."""

    __slots__ = ("mask", "node", "outstanding", "parent")

    def __init__(self, node: int, outstanding: int, parent: Join | None) -> None:
        self.node, self.outstanding, self.parent = node, outstanding, parent
        self.mask = np.zeros(32, bool)


class Fragment:
    """Lanes of a warp that run together. `mask` is None for a whole warp of 32 threads."""

    __slots__ = ("blocked", "mask", "parent", "timed_out", "warp")

    def __init__(self, warp: int, mask: np.ndarray | None, parent: Join | None) -> None:
        self.warp, self.mask, self.parent = warp, mask, parent
        self.blocked: tuple | None = None
        self.timed_out = False


def _warp_of(fragment: Fragment) -> int:
    return fragment.warp


class Group:
    """Fragments that execute a node together, in order of warps; what generated code asks of them."""

    __slots__ = (
        "agents",
        "clustercol",
        "count",
        "engine",
        "fragments",
        "ix",
        "mask",
        "slotcol",
        "slots",
        "warpcol",
        "warps",
    )

    def __init__(self, engine: Engine, fragments: list[Fragment]) -> None:
        self.engine, self.fragments = engine, fragments
        self.count = len(fragments)
        self.warps = warps = np.array([f.warp for f in fragments], np.int64)
        self.ix = engine.warp_index(warps)
        self.mask = None
        if any(f.mask is not None for f in fragments):
            self.mask = np.array([FULL[0] if f.mask is None else f.mask for f in fragments])
        self.slots = warps // engine.warps_per_cta
        self.slotcol = self.slots[:, None]
        self.clustercol = self.slotcol // engine.cluster_size * engine.cluster_size
        self.warpcol = warps[:, None]
        self.agents = warps + engine.cta_base * engine.warps_per_cta

    @property
    def active(self) -> np.ndarray:
        """bool (count, 32)."""
        return np.broadcast_to(FULL, (self.count, 32)) if self.mask is None else self.mask

    def pick(self, rows) -> Group:
        return Group(self.engine, [self.fragments[row] for row in rows])


class Engine(AddressSpaces, Barriers, Units):
    """One launch. `run()` executes it; afterwards the counters, `deadlock` and the observers hold the results."""

    def __init__(self, launch, program: translate.Program, *, schedule_name: str, seed: int, hazards, tracer,
                 max_steps: int | None, arithmetic_model=arithmetic.FAST) -> None:  # fmt: skip
        self.launch, self.program = launch, program
        self.schedule = schedule.make(schedule_name, seed)
        self.hazards, self.tracer = hazards, tracer
        self.observers = tuple(o for o in (hazards, tracer) if o is not None)
        self.max_steps = MAX_STEPS if max_steps is None else max_steps
        self.arithmetic = arithmetic_model
        block, grid, cluster = launch.block, launch.grid, launch.cluster
        self.threads = block[0] * block[1] * block[2]
        self.warps_per_cta = -(-self.threads // 32)
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.ctas = grid[0] * grid[1] * grid[2]
        self.groups_per_cta = -(-self.warps_per_cta // 4)
        self.cta_base = 0
        self.steps = 0
        self.changes = 0
        self.flops = 0
        self.own_hazards: list[tuple] = []
        self.deadlock: dict | None = None
        self.stopped = False
        self.cell_cache: dict = {}
        total = self.ctas * self.warps_per_cta
        self.node_counts = np.zeros((len(program.nodes), total), np.int32)
        self.bytes: dict[str, np.ndarray] = {}
        self.register_changes: dict[int, list[int]] = {}
        self.fences: Counter = Counter()
        self.setup_memory(launch, program)
        for base, end, name in zip(self.global_bases, self.global_ends, self.global_names, strict=True):
            if hazards is not None:
                hazards.add_allocation(base, end - base, name)

    # What happened

    def report(
        self, kind: str, src: int, agent: int, space: str, first: int | None, last: int | None, detail: str
    ) -> None:
        """A hazard that the engine itself sees."""
        if self.hazards is not None:
            text = rule(kind)
            self.hazards.report(kind, text, src, int(agent), space=space, first=first, last=last, detail=detail)
        self.own_hazards.append((kind, src, int(agent), space, first, last, detail))

    def stop_at(self, G, src: int, kind: str, detail: str) -> None:
        self.report(kind, src, G.agents[0], "", None, None, detail)
        raise Stop

    def stop(self, G, kind: str, detail: str) -> None:
        self.stop_at(G, self.current, kind, detail)

    def hazards_seen(self) -> bool:
        """Whether any hazard has been recorded."""
        return bool(self.own_hazards) or (self.hazards is not None and self.hazards.any_found())

    def tally(self, G, unit: str, mask, nbytes: float) -> None:
        """Count bytes moved by loads and stores: `nbytes` per active lane."""
        lanes = 32 if mask is None and G.mask is None else G.active.sum(axis=1) if mask is None else mask.sum(axis=1)
        moved = self.bytes.get(unit)
        if moved is None:
            moved = self.bytes[unit] = np.zeros(self.ctas * self.warps_per_cta, np.int64)
        total = np.asarray(lanes * nbytes).astype(np.int64)
        moved[G.agents] += total
        if self.tracer is not None and unit != "cp.async":
            space, verb = unit.split()
            self.tracer.memory(G.agents, space, total, write=verb == "write")

    def count_bytes(self, unit: str, agent: int, nbytes: int) -> None:
        moved = self.bytes.get(unit)
        if moved is None:
            moved = self.bytes[unit] = np.zeros(self.ctas * self.warps_per_cta, np.int64)
        moved[agent] += nbytes

    def agent_of(self, warp: int) -> int:
        return warp + self.cta_base * self.warps_per_cta

    def warp_index(self, warps: np.ndarray):
        """`warps` as a slice where they are evenly spaced, for cheap views of the register file."""
        n = len(warps)
        if n == 1:
            return slice(int(warps[0]), int(warps[0]) + 1)
        step = int(warps[1] - warps[0])
        if n == 2 or (int(warps[-1] - warps[0]) == step * (n - 1) and bool((np.diff(warps) == step).all())):
            return slice(int(warps[0]), int(warps[-1]) + 1, step)
        return warps

    # Waves

    def run(self) -> None:
        """Execute the launch. Sets `deadlock` or `stopped` where it did not come to its end."""
        per_wave = max(WAVE // self.cluster_size, 1) * self.cluster_size
        if self.launch.cooperative:
            # All CTAs of a cooperative launch are resident: they may wait for each other.
            per_wave = self.ctas
        with np.errstate(all="ignore"):
            try:
                for base in range(0, self.ctas, per_wave):
                    self.cta_base = base
                    self._wave(min(per_wave, self.ctas - base))
                    if self.deadlock is not None:
                        return
            except Stop:
                self.stopped = True

    def _wave(self, slots: int) -> None:
        per = self.warps_per_cta
        warps = slots * per
        self.slots = slots
        self.setup_wave(slots, warps, self.program)
        self.setup_units()
        self.mbarriers: dict = {}
        self.named: dict = {}
        self.partial: dict = {}
        self.cluster_barriers: dict = {}
        self.cluster_phase: dict[int, int] = {}
        self.cluster_lanes: dict[int, np.ndarray] = {}
        self.specials: dict[str, np.ndarray] = {}
        self.held: dict[int, list[Fragment]] = {}
        self.mma_waiters: list[tuple[Fragment, int]] = []
        self.ready: dict[int, list] = {}
        self.live_lanes = np.ones((warps, 32), bool)
        self.live_warps = np.full(slots, per)
        self.exited_warps = 0
        self.timeouts: set = set()
        self.current = 0
        lanes = self.threads - 32 * (per - 1)
        if lanes < 32:
            self.live_lanes[per - 1 :: per, lanes:] = False
        within = np.arange(warps)
        self.wg = within // per * self.groups_per_cta + within % per // 4
        fragments = []
        for warp in range(warps):
            whole = bool(self.live_lanes[warp].all())
            fragments.append(Fragment(warp, None if whole else self.live_lanes[warp].copy(), None))
        if self.tracer is not None:
            self.tracer.start(np.arange(warps) + self.cta_base * per)
        self.move(Group(self, fragments), 0)
        self._loop()
        if self.deadlock is None:
            while self.in_flight:
                self.land(self.in_flight.popleft())
            self._check_warp_groups()

    def _loop(self) -> None:
        pick, after = self.schedule.pick, self.schedule.after
        while True:
            if not self.ready:
                if not self._unblock():
                    return
                continue
            self.steps += 1
            if self.steps > self.max_steps:
                self.deadlock = self._deadlock("step limit")
                return
            node, chosen = pick(self)
            group = self._take(node, chosen)
            if group is not None:
                try:
                    self.step(group, self.program.nodes[node])
                except (Stop, EmulatorError):
                    raise
                except Exception as error:
                    ins = self.program.instructions[self.current]
                    raise EmulatorError(
                        f"kernel {self.program.kernel.name}: {type(error).__name__} in the instructions from PTX line"
                        f" {ins.line} ({ins.place}): {error}"
                    ) from error
            after(self)

    def waiting_at(self, node: int) -> list[Fragment]:
        """Fragments ready at a node."""
        out = []
        for item in self.ready[node]:
            if isinstance(item, Group):
                out += item.fragments
            else:
                out.append(item)
        return out

    def _take(self, node: int, chosen) -> Group | None:
        items = self.ready.pop(node)
        gather = self.program.nodes[node].gather
        if chosen is None and not gather and len(items) == 1 and isinstance(items[0], Group):
            return items[0]
        fragments: list[Fragment] = []
        for item in items:
            if isinstance(item, Group):
                fragments += item.fragments
            else:
                fragments.append(item)
        if chosen is not None:
            rest = [f for f in fragments if not chosen(f)]
            fragments = [f for f in fragments if chosen(f)]
            if rest:
                self.ready[node] = rest
        if gather:
            fragments = self._gather(node, fragments)
        if not fragments:
            return None
        fragments.sort(key=_warp_of)
        return Group(self, fragments)

    def _gather(self, node: int, fragments: list[Fragment]) -> list[Fragment]:
        """The whole warp groups among the fragments at a wgmma; the others wait for their partners."""
        fragments = fragments + self.held.pop(node, [])
        groups: dict[int, list[Fragment]] = {}
        wg = self.wg
        for fragment in fragments:
            groups.setdefault(int(wg[fragment.warp]), []).append(fragment)
        out, held = [], []
        for members in groups.values():
            if len(members) == 4 and all(f.mask is None for f in members):
                for fragment in members:
                    fragment.blocked = None
                out += members
            else:
                for fragment in members:
                    fragment.blocked = ("warp group", int(wg[fragment.warp]), None, self.program.nodes[node].start)
                held += members
        if held:
            self.held[node] = held
        return out

    # Steps

    def function(self, node, G):
        return self.program.function(node, G.mask is not None)

    def step(self, G: Group, node) -> None:
        """Run one node for a group."""
        self.current = node.start
        self.node_counts[node.index][G.agents] += 1
        if self.tracer is not None:
            self.tracer.issue(G.agents, node.end - node.start)
        kind = node.kind
        if kind == "segment":
            taken = self.program.function(node, G.mask is not None)(self, G, G.ix, G.mask)
            if node.target < 0:
                self.move(G, node.fall)
            else:
                self._branch(G, node, taken)
        elif kind == "try":
            self.run_try_wait(G, node)
        elif kind == "bar":
            self.run_barrier(G, node)
        elif kind == "mma":
            self.run_mma_wait(G, node)
        else:
            self.run_cluster_wait(G, node)

    def _branch(self, G: Group, node, condition: np.ndarray) -> None:
        mask = G.mask
        if mask is None:
            if condition.shape[0] == 1 and condition.shape[1] == 1:
                self.move(G, node.target if condition[0, 0] else node.fall)
                return
            condition = np.broadcast_to(condition, (G.count, 32))
            some, every = condition.any(axis=1), condition.all(axis=1)
        else:
            condition = condition & mask
            some, every = condition.any(axis=1), (condition | ~mask).all(axis=1)
        if every.all():
            self.move(G, node.target)
            return
        if not some.any():
            self.move(G, node.fall)
            return
        jump = np.flatnonzero(every)
        if len(jump):
            self.move(G.pick(jump.tolist()), node.target)
        stay = np.flatnonzero(~some)
        if len(stay):
            self.move(G.pick(stay.tolist()), node.fall)
        divided = np.flatnonzero(some & ~every)
        if not len(divided):
            return
        jumping, staying = [], []
        exit_node = len(self.program.nodes)
        for row in divided.tolist():
            fragment = G.fragments[row]
            own = FULL[0] if fragment.mask is None else fragment.mask
            if node.join == exit_node:
                parent = fragment.parent
                if parent is not None:
                    parent.outstanding += 1
            else:
                parent = Join(node.join, 2, fragment.parent)
            lanes = condition[row]
            jumping.append(Fragment(fragment.warp, lanes.copy(), parent))
            staying.append(Fragment(fragment.warp, own & ~lanes, parent))
        self.move(Group(self, jumping), node.target)
        self.move(Group(self, staying), node.fall)

    def move(self, G: Group, node: int) -> None:
        """Let a group go on at a node: meet the other sides there, or exit."""
        if node >= len(self.program.nodes):
            self._exit(G)
            return
        for fragment in G.fragments:
            if fragment.parent is not None and fragment.parent.node == node:
                break
        else:
            self.ready.setdefault(node, []).append(G)
            return
        for fragment in G.fragments:
            self.wake(fragment, node)

    def wake(self, fragment: Fragment, node: int) -> None:
        """Make one fragment ready at a node."""
        if node >= len(self.program.nodes):
            self._exit(Group(self, [fragment]))
            return
        while fragment.parent is not None and fragment.parent.node == node:
            join = fragment.parent
            join.mask |= FULL[0] if fragment.mask is None else fragment.mask
            join.outstanding -= 1
            if join.outstanding:
                return
            fragment = self._joined(fragment.warp, join)
        self.ready.setdefault(node, []).append(fragment)

    @staticmethod
    def _joined(warp: int, join: Join) -> Fragment:
        return Fragment(warp, None if join.mask.all() else join.mask, join.parent)

    def _exit(self, G: Group) -> None:
        gone, slots = [], {}
        for fragment in G.fragments:
            lanes = FULL[0] if fragment.mask is None else fragment.mask
            self.live_lanes[fragment.warp] &= ~lanes
            join = fragment.parent
            while join is not None:
                join.outstanding -= 1
                if join.outstanding:
                    break
                if join.mask.any():
                    self.wake(self._joined(fragment.warp, join), join.node)
                    break
                join = join.parent
            if not self.live_lanes[fragment.warp].any():
                gone.append(fragment.warp)
                slots[fragment.warp // self.warps_per_cta] = None
        if not gone:
            return
        self.exited_warps += len(gone)
        self.changes += 1
        for warp in gone:
            self.live_warps[warp // self.warps_per_cta] -= 1
        agents = np.array(gone) + self.cta_base * self.warps_per_cta
        for o in self.observers:
            o.warp_exit(agents, self.current)
        if self.named:
            self.finish_named([key for key in list(self.named) if key[0] in slots])
        if self.cluster_barriers:
            clusters = {slot // self.cluster_size for slot in slots}
            self.finish_clusters({c: b for c, b in self.cluster_barriers.items() if c in clusters})
        done = [slot for slot in slots if not self.live_warps[slot]]
        if done:
            ctas = np.array(done) + self.cta_base
            for o in self.observers:
                if hasattr(o, "cta_exit"):
                    o.cta_exit(ctas)

    def _unblock(self) -> bool:
        """Nobody is ready: let something land, or time out. False when all is done or there is a deadlock."""
        if self.mma_waiters:
            self.release_mma_waiters()
            return True
        if self._land_needed():
            return True
        blocked = self._blocked()
        if not blocked and not self.live_lanes.any():
            return False
        waits = [(b, f, n) for b in self.mbarriers.values() for f, n in b.waiters]
        # NOTE: with the registers, since a loop that counts its polls comes to an end.
        registers = hashlib.blake2b()
        warps = sorted({f.warp for _, f, _ in waits})
        for file in (self.A1, self.A16, self.A32, self.A64):
            registers.update(file[:, warps].tobytes())
        state = (self.changes, frozenset((f.warp, n, b.place) for b, f, n in waits), registers.digest())
        if waits and state not in self.timeouts:
            self.timeouts.add(state)
            for barrier, fragment, node in waits:
                fragment.timed_out = True
                barrier.waiters.remove((fragment, node))
                self.ready.setdefault(node, []).append(fragment)
            return True
        self.deadlock = self._deadlock("deadlock")
        return False

    def _land_needed(self) -> bool:
        """Land, for every cluster, the oldest operation that some waiter's barrier needs; if there is none, the oldest
        of all. False if nothing is in flight."""
        if not self.in_flight:
            return False
        wanted = {b.place for b in self.mbarriers.values() if b.waiters}
        per = self.warps_per_cta * self.cluster_size
        landing, served = [], set()
        for operation in self.in_flight:
            places = getattr(operation, "barriers", ())
            if any(place in wanted for place in places):
                cluster = operation.agent // per
                if cluster not in served:
                    served.add(cluster)
                    landing.append(operation)
        if not landing:
            landing = [self.in_flight[0]]
        chosen = {id(operation) for operation in landing}
        self.in_flight = deque(operation for operation in self.in_flight if id(operation) not in chosen)
        for operation in landing:
            self.land(operation)
        return True

    def run_mma_head(self, op) -> None:
        """Run an instruction for all warp groups in which it is next."""
        rows = np.array([bool(self.mma_queue[g]) and self.mma_queue[g][0] is op for g in op.groups.tolist()])
        self.run_mma(op, rows)

    # Deadlock

    def _blocked(self) -> list[Fragment]:
        out = [f for b in self.mbarriers.values() for f, _ in b.waiters]
        out += [f for b in self.named.values() for f, _ in b.waiting]
        out += [f for fragments in self.partial.values() for f in fragments]
        out += [f for b in self.cluster_barriers.values() for f, _ in b.waiting]
        out += [f for fragments in self.held.values() for f in fragments]
        out += [f for f, _ in self.mma_waiters]
        return out

    def _deadlock(self, reason: str) -> dict:
        rows = []
        for fragment in sorted(self._blocked(), key=_warp_of):
            what, key, value, src = fragment.blocked
            ins = self.program.instructions[src]
            row = {
                "cta": fragment.warp // self.warps_per_cta + self.cta_base,
                "warp": fragment.warp % self.warps_per_cta,
                "lanes": 32 if fragment.mask is None else int(fragment.mask.sum()),
                "line": ins.place,
                "instruction": ins.text,
                "waits_for": what,
            }
            if what == "mbarrier":
                barrier = self.mbarriers.get(key)
                row["barrier"] = f"{key & LOW_MASK:#x}"
                if key >> SLOT_SHIFT != fragment.warp // self.warps_per_cta:
                    row["barrier"] += f" of CTA {(key >> SLOT_SHIFT) + self.cta_base}"
                row["parity"] = int(value) & 1
                if barrier is not None:
                    row["phase"] = barrier.phase
                    row["pending_arrivals"] = barrier.pending
                    row["pending_bytes"] = barrier.tx
            elif what == "barrier":
                barrier = self.named.get(key)
                row["barrier"] = key[1]
                if barrier is not None:
                    row["pending_arrivals"] = 32 * (self.warps_needed(key, barrier) - barrier.arrived)
            elif what == "cluster barrier":
                row["barrier"] = f"cluster {key + self.cta_base // self.cluster_size}"
                barrier = self.cluster_barriers[key]
                per = self.cluster_size * self.warps_per_cta
                live = [w for w in range(key * per, (key + 1) * per) if self.live_lanes[w].any()]
                row["pending_arrivals"] = 32 * sum(w not in barrier.arrived for w in live)
            elif what == "warp group":
                start = fragment.warp % self.warps_per_cta // 4 * 4
                here = {f.warp for fs in self.held.values() for f in fs}
                base = fragment.warp // self.warps_per_cta * self.warps_per_cta
                missing = [w for w in range(start, start + 4) if base + w not in here]
                row["barrier"] = f"warps {', '.join(map(str, missing))} of its warp group"
            rows.append(row)
        running = sorted({f.warp for node in self.ready for f in self.waiting_at(node)})
        for node in sorted(self.ready):
            ins = self.program.instructions[self.program.nodes[node].start]
            for fragment in self.waiting_at(node):
                rows.append(
                    {
                        "cta": fragment.warp // self.warps_per_cta + self.cta_base,
                        "warp": fragment.warp % self.warps_per_cta,
                        "lanes": 32 if fragment.mask is None else int(fragment.mask.sum()),
                        "line": ins.place,
                        "instruction": ins.text,
                        "waits_for": "nothing (running)",
                    }
                )
        self._report_held()
        return {"reason": reason, "rows": rows, "running": len(running), "steps": self.steps}

    def _report_held(self) -> None:
        """Warps that wait at a wgmma for partners that will not come."""
        for node, fragments in self.held.items():
            src = self.program.nodes[node].start
            for group in sorted({int(self.wg[f.warp]) for f in fragments}):
                here = [f for f in fragments if self.wg[f.warp] == group]
                partial = [f for f in here if f.mask is not None]
                text = (
                    "some lanes do not execute it"
                    if partial
                    else f"{4 - len({f.warp for f in here})} of 4 warps do not execute it"
                )
                self.report("wgmma-not-whole-warp-group", src, self.agent_of(here[0].warp), "", None, None, text)
                break

    # Instructions about whole warp groups

    def setmaxnreg(self, G, src: int, direction: str, count: int) -> None:
        if count % 8 or not 24 <= count <= 256:
            self.stop_at(G, src, "setmaxnreg-count", f"{count}; accepted: multiples of 8 from 24 to 256")
        for warp in G.warps.tolist():
            self.register_changes.setdefault(warp + self.cta_base * self.warps_per_cta, []).append(src)

    def note_group_instruction(self, G, src: int) -> None:
        for warp in G.warps.tolist():
            self.fences[warp + self.cta_base * self.warps_per_cta, src] += 1

    def _check_warp_groups(self) -> None:
        """setmaxnreg and wgmma.fence must have been executed by all four warps of a warp group alike."""
        per = self.warps_per_cta
        for cta in range(self.cta_base, self.cta_base + self.slots):
            for start in range(0, per, 4):
                agents = [cta * per + w for w in range(start, min(start + 4, per))]
                changes = [self.register_changes.get(a, []) for a in agents]
                if any(c != changes[0] for c in changes) or (len(agents) < 4 and changes[0]):
                    longest = max(range(len(agents)), key=lambda i: len(changes[i]))
                    self.report(
                        "setmaxnreg-not-whole-warp-group", changes[longest][0], agents[longest], "", None, None,
                        f"executed {[len(c) for c in changes]} times by the warps of the group",
                    )  # fmt: skip
        by_src: dict[int, Counter] = {}
        for (agent, src), n in self.fences.items():
            by_src.setdefault(src, Counter())[agent] = n
        for src, counts in by_src.items():
            for agent, n in counts.items():
                first = agent - agent % per % 4
                others = [counts.get(a, 0) for a in range(first, first + 4)]
                if any(o != n for o in others):
                    self.report(
                        "wgmma-not-whole-warp-group",
                        src,
                        agent,
                        "",
                        None,
                        None,
                        f"executed {others} times by the warps of the group",
                    )
                    break
        self.fences.clear()

    # Small services of generated code

    def printf(self, G, text: np.ndarray, arguments: np.ndarray, mask) -> None:
        """vprintf of every active lane, to standard output."""
        text = np.broadcast_to(text, (G.count, 32))
        arguments = np.broadcast_to(arguments, (G.count, 32))
        active = G.active if mask is None else np.broadcast_to(mask, (G.count, 32))
        for row, lane in np.argwhere(active).tolist():
            at = int(arguments[row, lane])
            if at >> 56 != translate.LOCAL_WINDOW >> 56:
                raise EmulatorError(f"printf arguments at {at:#x}, outside local memory")
            buffer = self.local[int(G.warps[row]), lane, at & translate.WINDOW_MASK :]
            sys.stdout.write(
                printf.render(
                    self._string(int(text[row, lane])),
                    lambda offset, size, buffer=buffer: buffer[offset : offset + size].tobytes(),
                    self._string,
                )
            )

    def _string(self, address: int) -> str:
        """A zero-terminated string in global memory."""
        number = self.find_global(address, address + 1)
        if number < 0:
            raise EmulatorError(f"printf string at {address:#x}, in no variable")
        data = self.global_data[number][address - self.global_bases[number] :].tobytes()
        return data.split(b"\0")[0].decode("utf-8", "replace")

    def trap(self, G, src: int, mask) -> None:
        active = G.active if mask is None else np.broadcast_to(mask, (G.count, 32))
        if not active.any():
            return
        row = int(active.any(axis=1).argmax())
        self.report("trap", src, G.agents[row], "", None, None, "the kernel executed trap")
        raise Stop

    def fence(self, G, src: int, kind: str, scope: str, mask) -> None:
        if mask is not None and not np.any(mask):
            return
        agents = G.agents if mask is None else G.agents[np.broadcast_to(mask, (G.count, 32)).any(axis=1)]
        for o in self.observers:
            o.fence(agents, src, kind, scope)
        if kind == "proxy.tensormap::generic":
            self.descriptors.clear()

    def check_members(self, G, src: int, members: np.ndarray, mask) -> None:
        """Every live lane that a member mask names must execute the instruction."""
        named = np.broadcast_to(ops.members(members), (G.count, 32))
        active = G.active if mask is None else np.broadcast_to(mask, (G.count, 32))
        missing = named & self.live_lanes[G.warps] & ~active & active.any(axis=1, keepdims=True)
        if missing.any():
            row = int(missing.any(axis=1).argmax())
            lanes = np.flatnonzero(missing[row]).tolist()
            self.report(
                "sync-lanes-missing",
                src,
                G.agents[row],
                "",
                None,
                None,
                f"lanes {lanes} are named in the member mask and elsewhere",
            )

    def clock(self, G, name: str) -> np.ndarray:
        """A clock in cycles: the tracer's where there is one, else scheduler steps. All lanes of a group see one."""
        now = int(self.tracer.clock[G.agents].max()) if self.tracer is not None else self.steps * 32
        value = now >> 32 if name in ("clock_hi", "globaltimer_hi") else now
        return np.full((G.count, 1), value, np.uint64)

    def special(self, name: str) -> np.ndarray:
        """A special register for every warp: (warps, 1) or (warps, 32) uint64."""
        value = self.specials.get(name)
        if value is None:
            value = self.specials[name] = self._special(name)
        return value

    def _special(self, name: str) -> np.ndarray:
        per = self.warps_per_cta
        warps = self.slots * per
        column = np.arange(warps, dtype=np.int64)[:, None]
        block, grid, cluster = self.launch.block, self.launch.grid, self.launch.cluster
        axis = {"x": 0, "y": 1, "z": 2}.get(name.rsplit(".", 1)[-1], 0)
        base = name.split(".")[0]
        thread = column % per * 32 + np.arange(32)
        cta = column // per + self.cta_base
        rank, cluster_id = cta % self.cluster_size, cta // self.cluster_size
        clusters = tuple(g // c for g, c in zip(grid, cluster, strict=True))

        def unravel(linear, shape):
            return (linear % shape[0], linear // shape[0] % shape[1], linear // (shape[0] * shape[1]))[axis]

        one = np.ones((warps, 1), np.int64)
        local, outer = unravel(rank, cluster), unravel(cluster_id, clusters)
        lane = np.broadcast_to(np.arange(32), (warps, 32))
        values = {
            "tid": lambda: unravel(thread, block),
            "ntid": lambda: one * block[axis],
            "ctaid": lambda: outer * cluster[axis] + local,
            "nctaid": lambda: one * grid[axis],
            "laneid": lambda: lane,
            "warpid": lambda: column % per,
            "nwarpid": lambda: one * per,
            "smid": lambda: column // per,
            "nsmid": lambda: one * WAVE,
            "gridid": lambda: one * 0,
            "clusterid": lambda: outer,
            "nclusterid": lambda: one * clusters[axis],
            "cluster_ctaid": lambda: local,
            "cluster_nctaid": lambda: one * cluster[axis],
            "cluster_ctarank": lambda: rank,
            "cluster_nctarank": lambda: one * self.cluster_size,
            "is_explicit_cluster": lambda: one * (self.cluster_size > 1),
            "lanemask_eq": lambda: 1 << lane,
            "lanemask_lt": lambda: (1 << lane) - 1,
            "lanemask_le": lambda: (2 << lane) - 1,
            "lanemask_gt": lambda: 0xFFFFFFFF & ~((2 << lane) - 1),
            "lanemask_ge": lambda: 0xFFFFFFFF & ~((1 << lane) - 1),
            "dynamic_smem_size": lambda: one * self.launch.smem_bytes,
            "total_smem_size": lambda: one * (self.smem_limit - translate.SHARED_START),
            "aggr_smem_size": lambda: one * self.smem_limit,
        }
        if base in values:
            return np.asarray(values[base]()).astype(np.uint64)
        if base.startswith("envreg"):
            return (one * 0).astype(np.uint64)
        raise EmulatorError(f"kernel {self.program.kernel.name}: special register %{name} is not implemented")


RULES = {
    "global-out-of-bounds": "global memory is accessed outside the tensors",
    "shared-out-of-bounds": "shared memory is accessed outside what the CTA has",
    "local-out-of-bounds": "local memory is accessed outside what the thread has",
    "misaligned-access": "an address is not aligned to the size of its access",
    "mbarrier-not-initialised": "an mbarrier is used where none was initialised",
    "mbarrier-arrivals": "an mbarrier gets more arrivals in a phase than it was initialised for",
    "mbarrier-count": "mbarrier.init takes a count from 1 to 2**20 - 1",
    "mbarrier-tx-bytes": "the transaction count of an mbarrier leaves its range",
    "wgmma-not-whole-warp-group": "wgmma instructions are executed by all four warps of a warp group",
    "wgmma-descriptor": "matrix descriptors and scale-d are the same in all threads of a warp group",
    "setmaxnreg-not-whole-warp-group": "setmaxnreg is executed by all warps of a warp group",
    "setmaxnreg-count": "setmaxnreg takes multiples of 8 from 24 to 256",
    "barrier-count": "all threads give the same count of threads, a multiple of 32, at a named barrier",
    "barrier-number": "a CTA has barriers 0 to 15",
    "cluster-barrier": "each thread arrives once at the cluster barrier, then waits once",
    "sync-lanes-missing": "all lanes that a member mask names execute the instruction together",
    "mma-not-whole-warp": "matrix instructions are executed by whole warps",
    "ldmatrix-not-whole-warp": "matrix instructions are executed by whole warps",
    "stmatrix-not-whole-warp": "matrix instructions are executed by whole warps",
    "uninitialised-register": "a register that nothing has set reaches memory, an address, a branch or an MMA",
    "trap": "the kernel gave up",
}
"""The rules whose breaking the engine itself sees, by kind of hazard."""


def rule(kind: str) -> str:
    """The rule that a kind of hazard breaks. Kinds `tensor-map-*` are the rules of `tensormap.RULES`."""
    if kind.startswith("tensor-map-"):
        return f"a tensor copy keeps to what TMA accepts: {kind.removeprefix('tensor-map-')}"
    return RULES[kind]
