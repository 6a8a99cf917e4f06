"""A model of mbarriers and of the copies that complete them, for the laws of `pipeline.py`.

Protocols are lists of steps, so that every interleaving can be explored with memoisation. A wait also says
which phase it means; one that is let through by any other phase is stale, and that is the fault looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Barrier(NamedTuple):
    """An mbarrier of `count` arrivals (PTX ISA, mbarrier): a phase ends when no arrival and no byte is pending.

    Every copy brings one byte, so `pending` is also how many copies are on their way.
    """

    count: int
    completed: int = 0
    arrivals: int = 0
    pending: int = 0

    def arrive(self, expect: int = 0) -> Barrier:
        return self._after(self.arrivals + 1, self.pending + expect)

    def land(self) -> Barrier:
        return self._after(self.arrivals, self.pending - 1)

    def _after(self, arrivals: int, pending: int) -> Barrier:
        if arrivals == self.count and pending == 0:
            return Barrier(self.count, self.completed + 1)
        return Barrier(self.count, self.completed, arrivals, pending)

    def passes(self, parity: int) -> bool:
        """Whether a wait returns: the phase before the current one has this parity; a fresh barrier's has 1."""
        return parity != self.completed & 1


class Fault(NamedTuple):
    """The protocol went wrong at (agent, iteration)."""

    what: str
    at: tuple[str, int]


@dataclass(frozen=True)
class Step:
    """One indivisible action of an agent.

    wait: for `barrier`, asking for `parity` and meaning the phase of number `phase`; -1 is the one before the
    first. needs: (agent's number, step) that must be behind when the wait returns, whatever the barrier says.
    arrive: at `barrier`. expect: copies started with it, each of which lands by itself.
    either: go on here, or at step `target`. end: nothing more to do.
    """

    kind: str
    barrier: tuple[str, int] | None = None
    iteration: int = 0
    parity: int = 0
    phase: int = 0
    expect: int = 0
    needs: tuple[tuple[int, int], ...] = ()
    target: int = 0


@dataclass
class Exploration:
    """What was seen in all interleavings: faults, the waits that were passed, and how many states there are."""

    faults: set[Fault] = field(default_factory=set)
    passed: set[tuple[str, int]] = field(default_factory=set)
    states: int = 0


def explore(
    agents: dict[str, list[Step]],
    counts: dict[tuple[str, int], int],
    shorter: Sequence[tuple[int, ...]] = (),
) -> Exploration:
    """Every interleaving of the agents and of the landings of their copies.

    counts: arrivals per phase of each barrier. A state in which nothing can happen although an agent is not
    at its end is a deadlock; an interleaving stops at its first fault.

    shorter: where the agents of a run with fewer iterations end, if its steps are a beginning of these. Such a
    run reaches the states that the longer one reaches while its first agent has gone no further, so it is
    explored along with it: it must not be stuck in one of them where only the first agent could go on.
    """
    model = _Model(agents, counts)
    ends = {end[0]: end for end in shorter}
    last = tuple(len(steps) for steps in model.programs)
    stack, seen = [model.start], {model.start}
    while stack:
        state = stack.pop()
        movers = set()
        for mover, successor in model.successors(state):
            movers.add(mover)
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)
        if not movers:
            model.stuck(state, last)
        elif state[0] in ends and movers == {0}:
            model.stuck(state, ends[state[0]])
    model.result.states = len(seen)
    return model.result


class _Model:
    """States are flat tuples of ints: a step number per agent, then a number per barrier that names its state."""

    def __init__(self, agents: dict[str, list[Step]], counts: dict[tuple[str, int], int]) -> None:
        self.names = list(agents)
        self.programs = list(agents.values())
        self.place = {key: len(agents) + i for i, key in enumerate(counts)}
        self.barriers: list[Barrier] = []
        self.numbers: dict[Barrier, int] = {}
        self.start = (0,) * len(agents) + tuple(self._number(Barrier(count)) for count in counts.values())
        self.result = Exploration()

    def _number(self, barrier: Barrier) -> int:
        number = self.numbers.setdefault(barrier, len(self.barriers))
        if number == len(self.barriers):
            self.barriers.append(barrier)
        return number

    def successors(self, state: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...] | None]]:
        """(who moves, the state after it): an agent's number, or -1 for a landing; no state after a fault."""
        agents = len(self.programs)
        for place in range(agents, len(state)):
            barrier = self.barriers[state[place]]
            if barrier.pending:
                yield -1, (*state[:place], self._number(barrier.land()), *state[place + 1 :])
        for agent, steps in enumerate(self.programs):
            if state[agent] < len(steps):
                for successor in self._moves(state, agent, steps[state[agent]]):
                    yield agent, successor

    def _moves(self, state: tuple[int, ...], agent: int, step: Step) -> Iterator[tuple[int, ...] | None]:
        advanced = (*state[:agent], state[agent] + 1, *state[agent + 1 :])
        if step.kind == "either":
            yield advanced
            yield (*state[:agent], step.target, *state[agent + 1 :])
        elif step.kind == "arrive":
            place = self.place[step.barrier]
            after = self._number(self.barriers[state[place]].arrive(step.expect))
            yield (*advanced[:place], after, *advanced[place + 1 :])
        elif step.kind == "wait":
            barrier = self.barriers[state[self.place[step.barrier]]]
            at = (self.names[agent], step.iteration)
            if not barrier.passes(step.parity):
                return
            if barrier.completed != step.phase + 1:
                self.result.faults.add(Fault("stale phase accepted", at))
                yield None
            elif any(state[other] < needed for other, needed in step.needs):
                self.result.faults.add(Fault("stage taken before it was released", at))
                yield None
            else:
                self.result.passed.add(at)
                yield advanced

    def stuck(self, state: tuple[int, ...], ends: tuple[int, ...]) -> None:
        for name, steps, reached, end in zip(self.names, self.programs, state, ends, strict=False):
            if reached < end and steps[reached].kind != "end":
                self.result.faults.add(Fault("deadlock", (name, steps[reached].iteration)))
