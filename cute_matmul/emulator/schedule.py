"""Who runs next, and when asynchronous operations land: the three schedules.

round_robin: every group of warps that can run does so in turn, the earliest place in the program first, so that
    warps stay together; copies land before the next step; a WGMMA executes when it is issued.
random: a seeded choice among groups, single warps and landings at every step; a WGMMA executes at some point
    before its wait; a try_wait may give up early.
adversarial: warps have an order of priority (the last warp first with seed 0, else shuffled by the seed) and each
    runs as far as it can before the next moves, so that the others lag as far behind as synchronisation lets them;
    a copy lands when nobody can move without it; a WGMMA executes, and reads shared memory, when its wait is all
    that is left to do, after the copies issued in the meantime.

CTAs of different clusters take their steps together: nothing but global memory lets them tell.
"""

from __future__ import annotations

import random

NAMES = ("round_robin", "random", "adversarial")
PATIENCE = 64  # steps after which the group that has waited longest goes, whatever the policy prefers


class RoundRobin:
    """Earliest node first, with a turn for whoever waited longest every `PATIENCE` steps."""

    mma_at_issue = True
    mma_when_stuck = False

    def __init__(self, seed: int) -> None:
        self.since: dict[int, int] = {}
        self.step = 0

    @staticmethod
    def fails_at_once() -> bool:
        """Whether a try_wait on an unfinished phase returns false without waiting."""
        return False

    def pick(self, engine) -> tuple[int, object]:
        """The node to run and which of its fragments: a function of a fragment, or None for all."""
        self.step += 1
        ready = engine.ready
        since = self.since
        if self.step % PATIENCE == 0:
            for node in list(since):
                if node not in ready:
                    del since[node]
            for node in ready:
                since.setdefault(node, self.step)
            node = min(ready, key=lambda n: (since[n], n))
        else:
            node = min(ready)
        since.pop(node, None)
        return node, None

    def after(self, engine) -> None:
        """Called after each step."""
        while engine.in_flight:
            engine.land(engine.in_flight.popleft())


class Random:
    """Seeded choices."""

    mma_at_issue = False
    mma_when_stuck = False

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def fails_at_once(self) -> bool:
        return self.random.random() < 0.1

    def pick(self, engine):
        choose = self.random
        node = choose.choice(sorted(engine.ready))
        if choose.random() < 0.4:
            return node, None
        per = engine.warps_per_cta * engine.cluster_size
        kinds = sorted({fragment.warp % per for fragment in engine.waiting_at(node)})
        chosen = choose.choice(kinds)
        return node, lambda fragment: fragment.warp % per == chosen

    def after(self, engine) -> None:
        choose = self.random
        while engine.in_flight and choose.random() < 0.5:
            at = choose.randrange(len(engine.in_flight))
            engine.in_flight.rotate(-at)
            operation = engine.in_flight.popleft()
            engine.in_flight.rotate(at)
            engine.land(operation)
        if engine.mma_queue and choose.random() < 0.3:
            queued = [group for group, queue in engine.mma_queue.items() if queue]
            if queued:
                op = engine.mma_queue[choose.choice(queued)][0]
                engine.run_mma_head(op)


class Adversarial:
    """Fixed priorities; landings only when nothing else can happen."""

    mma_at_issue = False
    mma_when_stuck = True
    QUANTUM = 2000

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.order: dict[int, int] = {}
        self.last = -1
        self.run = 0

    @staticmethod
    def fails_at_once() -> bool:
        return False

    def pick(self, engine):
        per = engine.warps_per_cta * engine.cluster_size
        if not self.order:
            order = list(range(per))[::-1]
            if self.seed:
                random.Random(self.seed).shuffle(order)
            self.order = {warp: place for place, warp in enumerate(order)}
        order = self.order
        best = min((order[fragment.warp % per], node) for node in engine.ready for fragment in engine.waiting_at(node))
        chosen = next(warp for warp, place in order.items() if place == best[0])
        self.run = self.run + 1 if chosen == self.last else 0
        self.last = chosen
        if self.run > self.QUANTUM:
            # A warp that only spins would keep the others from ever answering it.
            order[chosen] = max(order.values()) + 1
            self.run = 0
        return best[1], lambda fragment: fragment.warp % per == chosen

    def after(self, engine) -> None:
        """Nothing lands."""


_KINDS = {"round_robin": RoundRobin, "random": Random, "adversarial": Adversarial}


def make(name: str, seed: int):
    """A schedule by name. Raises ValueError for another name."""
    if name not in _KINDS:
        raise ValueError(f"schedule {name!r}; accepted: {', '.join(NAMES)}")
    return _KINDS[name](seed)
