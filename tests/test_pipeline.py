"""The laws of StagePhases and PipelineState, in every interleaving, on plain ints; and both inside a kernel."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import dataflow
import pytest
import torch
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_fake_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_model import Barrier, Exploration, Step, explore

from cute_matmul import emulator, pipeline
from cute_matmul.pipeline import (
    CONSUMER_START,
    PRODUCER_ARRIVALS,
    PRODUCER_START,
    BarrierRing,
    PipelineState,
    StagePhases,
)

STAGES = range(1, 9)
ITERATIONS = range(41)

# V2's protocol


def v2_steps(num_stages: int, iterations: int, phases: StagePhases, copies: int = 1) -> list[Step]:
    """V2's CTA as one agent: prologue without waiting, then wait, flip, refill."""

    def fill(k_tile: int) -> Step:
        return Step("arrive", ("full", k_tile % num_stages), k_tile, expect=copies)

    steps = [fill(k_tile) for k_tile in range(min(num_stages, iterations))]
    for k_tile in range(iterations):
        stage = k_tile % num_stages
        steps.append(Step("wait", ("full", stage), k_tile, phases[stage], k_tile // num_stages))
        phases.flip(stage)
        if k_tile + num_stages < iterations:
            steps.append(fill(k_tile + num_stages))
    return steps


def v2_steps_of_every_length(num_stages: int, longest: int, copies: int) -> list[Step]:
    """The steps of all runs of up to `longest` iterations: one path per length, shared while it is the same.

    A run of n iterations differs from a longer one from its fill of k_tile n on, which it does not have.
    """
    main = v2_steps(num_stages, longest, StagePhases(num_stages), copies)
    fills = [place for place, step in enumerate(main) if step.kind == "arrive"]
    # Each fill gets an `either` before it, which leads to what remains of the run that ends there.
    moved = [place + sum(fill < place for fill in fills) for place in range(len(main))]
    steps = [step for place, step in enumerate(main) for step in ([None, step] if place in fills else [step])]
    steps.append(Step("end"))
    for n, place in enumerate(fills):
        own = v2_steps(num_stages, n, StagePhases(num_stages), copies)
        assert own[:place] == main[:place]
        steps[moved[place]] = Step("either", iteration=n, target=len(steps))
        steps += [*own[place:], Step("end")]
    return steps


def explore_v2(steps: list[Step], num_stages: int) -> Exploration:
    return explore({"cta": steps}, {("full", stage): PRODUCER_ARRIVALS for stage in range(num_stages)})


class MissedFlips(StagePhases):
    """Leaves out the flips of these numbers, counted over all stages."""

    def __init__(self, num_stages: int, missed: set[int]) -> None:
        super().__init__(num_stages)
        self.missed, self.count = missed, 0

    def flip(self, stage: int) -> None:
        if self.count not in self.missed:
            super().flip(stage)
        self.count += 1


@pytest.mark.parametrize("num_stages", STAGES)
def test_stage_phases_in_every_order_of_landing(num_stages):
    longest = ITERATIONS[-1]
    # Two copies a stage that land apart, where the states stay few.
    steps = v2_steps_of_every_length(num_stages, longest, copies=2 if num_stages < 5 else 1)
    assert [step.iteration for step in steps if step.kind == "either"] == list(ITERATIONS[:-1])
    seen = explore_v2(steps, num_stages)
    assert not seen.faults
    assert seen.passed == {("cta", i) for i in range(longest)}


@pytest.mark.parametrize("num_stages", (1, 2, 3, 4))
def test_stage_phases_each_length_by_itself(num_stages):
    for iterations in ITERATIONS:
        seen = explore_v2(v2_steps(num_stages, iterations, StagePhases(num_stages)), num_stages)
        assert not seen.faults
        assert seen.passed == {("cta", i) for i in range(iterations)}


@pytest.mark.parametrize("num_stages", STAGES)
def test_stage_phases_wrong_start_is_caught_at_the_first_wait(num_stages):
    for iterations in range(1, num_stages + 2):
        seen = explore_v2(v2_steps(num_stages, iterations, StagePhases(num_stages, PRODUCER_START)), num_stages)
        assert {fault.at for fault in seen.faults} == {("cta", 0)}
        # Too early where the bytes are not there yet, for ever where they are.
        assert {fault.what for fault in seen.faults} == {"stale phase accepted", "deadlock"}
        assert not seen.passed


@pytest.mark.parametrize("num_stages", STAGES)
def test_stage_phases_missed_flip_is_caught_when_the_stage_is_next_waited_on(num_stages):
    iterations = 2 * num_stages + 3
    every = range(iterations)
    for missed in every if num_stages < 6 else (0, 1, num_stages - 1, num_stages + 2, num_stages + 3):
        seen = explore_v2(v2_steps(num_stages, iterations, MissedFlips(num_stages, {missed})), num_stages)
        again = missed + num_stages
        if again < iterations:
            assert {fault.at for fault in seen.faults} == {("cta", again)}
            assert seen.passed == {("cta", i) for i in range(again)}
        else:
            assert not seen.faults


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 40))
def test_stage_phases_any_missed_flips(data, num_stages, iterations):
    missed = data.draw(st.sets(st.integers(0, iterations - 1), min_size=1))
    seen = explore_v2(v2_steps(num_stages, iterations, MissedFlips(num_stages, missed)), num_stages)
    again = min(missed) + num_stages
    assert {fault.at for fault in seen.faults} == ({("cta", again)} if again < iterations else set())


# The producer and consumer protocol, from V3 on


def ring_agents(
    num_stages: int, iterations: int, *, consumers: int = 1, copies: int = 1, make=PipelineState
) -> dict[str, list[Step]]:
    """One producer, and consumers that each release every stage; two steps an iteration each."""
    state, steps = make(num_stages, "producer"), []
    for i in range(iterations):
        # The stage may be refilled once every consumer has released what it held.
        needs = tuple((1 + c, 2 * (i - num_stages) + 2) for c in range(consumers)) if i >= num_stages else ()
        steps.append(Step("wait", ("empty", state.index), i, state.phase, i // num_stages - 1, needs=needs))
        steps.append(Step("arrive", ("full", state.index), i, expect=copies))
        state.advance()
    agents = {"producer": steps}
    for consumer in range(consumers):
        state, steps = make(num_stages, "consumer"), []
        for i in range(iterations):
            steps.append(Step("wait", ("full", state.index), i, state.phase, i // num_stages))
            steps.append(Step("arrive", ("empty", state.index), i))
            state.advance()
        agents[f"consumer{consumer}"] = steps
    return agents


def explore_ring(num_stages: int, iterations: int, *, consumers: int = 1, copies: int = 1, make=PipelineState):
    agents = ring_agents(num_stages, iterations, consumers=consumers, copies=copies, make=make)
    counts = {("full", stage): PRODUCER_ARRIVALS for stage in range(num_stages)}
    counts |= {("empty", stage): consumers for stage in range(num_stages)}
    shorter = [(2 * n,) * len(agents) for n in range(iterations)]
    return agents, explore(agents, counts, shorter)


def waits(agents: dict[str, list[Step]]) -> set[tuple[str, int]]:
    return {(name, step.iteration) for name, steps in agents.items() for step in steps if step.kind == "wait"}


@pytest.mark.parametrize(
    ("num_stages", "consumers", "copies"),
    [*((stages, 1, 1) for stages in STAGES), (1, 2, 2), (2, 2, 2), (3, 2, 1), (4, 1, 2)],
)
def test_pipeline_state_in_every_interleaving(num_stages, consumers, copies):
    """40 iterations, and with them every smaller number: `explore` says why."""
    iterations = ITERATIONS[-1] if consumers == 1 else 4 * num_stages + 1
    agents, seen = explore_ring(num_stages, iterations, consumers=consumers, copies=copies)
    assert not seen.faults
    assert seen.passed == waits(agents)


@pytest.mark.parametrize("num_stages", (1, 2, 3, 5))
def test_shorter_runs_explored_apart_agree(num_stages):
    for iterations in range(2 * num_stages + 2):
        agents, seen = explore_ring(num_stages, iterations)
        assert not seen.faults and seen.passed == waits(agents)


class WrongStart(PipelineState):
    wrong_role = ""

    def __init__(self, num_stages: int, role: str) -> None:
        super().__init__(num_stages, role)
        if role == self.wrong_role:
            self.phase ^= 1


@pytest.mark.parametrize("role", ["producer", "consumer"])
@pytest.mark.parametrize("num_stages", STAGES)
def test_pipeline_state_wrong_start_is_caught_at_the_first_wait(num_stages, role, monkeypatch):
    monkeypatch.setattr(WrongStart, "wrong_role", role)
    _, seen = explore_ring(num_stages, num_stages + 2, make=WrongStart)
    agent = {"producer": "producer", "consumer": "consumer0"}[role]
    # An exploration goes on past the fault in the interleavings that have not met it; none passes that wait.
    assert (agent, 0) in {fault.at for fault in seen.faults}
    assert not {at for at in seen.passed if at[0] == agent}


def missed_wrap(role: str, number: int):
    """A PipelineState that does not flip its phase when it wraps for the `number`-th time."""

    class MissedWrap(PipelineState):
        wraps = 0

        def advance(self) -> None:
            super().advance()
            if self.role == role and self.index == 0:
                self.wraps += 1
                self.phase ^= self.wraps == number

    return MissedWrap


@pytest.mark.parametrize("role", ["producer", "consumer"])
@pytest.mark.parametrize("num_stages", range(1, 6))
def test_pipeline_state_missed_flip_is_caught_when_the_stage_is_next_waited_on(num_stages, role):
    agent = {"producer": "producer", "consumer": "consumer0"}[role]
    for number in (1, 2):
        again = number * num_stages
        _, seen = explore_ring(num_stages, again, make=missed_wrap(role, number))
        assert not seen.faults
        _, seen = explore_ring(num_stages, again + 2, make=missed_wrap(role, number))
        assert (agent, again) in {fault.at for fault in seen.faults}
        assert {i for name, i in seen.passed if name == agent} == set(range(again))


@pytest.mark.parametrize("num_stages", range(2, 6))
def test_release_after_advance_is_caught(num_stages):
    agents = ring_agents(num_stages, 3 * num_stages)
    for step_number, step in enumerate(agents["consumer0"]):
        if step.kind == "arrive":
            early = ("empty", (step.barrier[1] + 1) % num_stages)
            agents["consumer0"][step_number] = Step("arrive", early, step.iteration)
    counts = {(kind, stage): 1 for stage in range(num_stages) for kind in ("full", "empty")}
    assert explore(agents, counts).faults


@pytest.mark.parametrize("num_stages", range(1, 6))
def test_release_before_the_reads_are_over_is_caught(num_stages):
    """The model itself: a consumer that releases a stage and reads on lets the producer in too early."""
    agents = ring_agents(num_stages, 2 * num_stages + 1)
    for number, step in enumerate(agents["producer"]):
        if step.needs:
            ((consumer, reached),) = step.needs
            agents["producer"][number] = replace(step, needs=((consumer, reached + 1),))
    counts = {(kind, stage): 1 for stage in range(num_stages) for kind in ("full", "empty")}
    assert "stage taken before it was released" in {fault.what for fault in explore(agents, counts).faults}


# BarrierRing's own methods, on model barriers


class Blocked(Exception):
    """A wait that does not return yet."""


class Machine:
    """What BarrierRing needs of the hardware: shared memory for barriers and the operations on them."""

    def __init__(self) -> None:
        self.barriers: list[Barrier | None] = []
        self.fences = 0

    def allocate_array(self, element, count: int) -> int:
        assert element.width == 64
        first = len(self.barriers)
        self.barriers += [None] * count
        return first

    def mbarrier_init(self, pointer: int, count: int) -> None:
        assert self.fences == 0 and self.barriers[pointer] is None
        self.barriers[pointer] = Barrier(count)

    def mbarrier_init_fence(self) -> None:
        self.fences += 1

    def mbarrier_wait(self, pointer: int, parity: int) -> None:
        if not self.barriers[pointer].passes(parity):
            raise Blocked

    def elect_one(self):
        return nullcontext()

    def mbarrier_arrive_and_expect_tx(self, pointer: int, nbytes: int) -> None:
        self.barriers[pointer] = self.barriers[pointer].arrive(nbytes)

    def mbarrier_arrive(self, pointer: int) -> None:
        self.barriers[pointer] = self.barriers[pointer].arrive()


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return install(monkeypatch)


def install(monkeypatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(pipeline, "cute", SimpleNamespace(arch=machine))
    monkeypatch.setattr(pipeline.hopper, "traced", lambda name: nullcontext())
    return machine


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("consumer_arrivals", [0, 1, 2, 128])
def test_barrier_ring_counts(machine, num_stages, consumer_arrivals):
    ring = BarrierRing(machine, num_stages, tx_bytes=32768, consumer_arrivals=consumer_arrivals)
    ring.init()
    assert machine.barriers[ring.full : ring.full + num_stages] == [Barrier(PRODUCER_ARRIVALS)] * num_stages
    if consumer_arrivals:
        assert machine.barriers[ring.empty : ring.empty + num_stages] == [Barrier(consumer_arrivals)] * num_stages
    else:
        assert ring.empty is None
    assert len(machine.barriers) == num_stages * (2 if consumer_arrivals else 1)
    assert machine.fences == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 40), st.integers(1, 3), st.integers(0, 2**32))
def test_barrier_ring_moves_every_tile_once(num_stages, iterations, consumers, seed):
    """Random schedules of BarrierRing and PipelineState with data in the stages: each consumer reads each tile."""
    patch = pytest.MonkeyPatch()
    try:
        machine = install(patch)
        choose = random.Random(seed)
        ring = BarrierRing(machine, num_stages, tx_bytes=2, consumer_arrivals=consumers)
        ring.init()
        stages = [[None, None] for _ in range(num_stages)]  # the A and the B tile
        flying, readers = [], [set() for _ in range(num_stages)]

        def land(stage: int, half: int, k_tile: int) -> None:
            assert not readers[stage], "overwritten while it is read"
            stages[stage][half] = k_tile
            machine.barriers[ring.full + stage] = machine.barriers[ring.full + stage].land()

        def produce():
            state = PipelineState(num_stages, "producer")
            for k_tile in range(iterations):
                while True:
                    try:
                        ring.producer_acquire(state)
                        break
                    except Blocked:
                        yield False
                flying.extend((state.index, half, k_tile) for half in (0, 1))
                state.advance()
                yield True

        def consume(number: int):
            state = PipelineState(num_stages, "consumer")
            for k_tile in range(iterations):
                while True:
                    try:
                        ring.consumer_wait(state)
                        break
                    except Blocked:
                        yield False
                readers[state.index].add(number)
                assert stages[state.index] == [k_tile, k_tile]
                yield True
                readers[state.index].remove(number)
                ring.consumer_release(state)
                state.advance()
                yield True

        running = [produce(), *(consume(number) for number in range(consumers))]
        blocked: set[int] = set()
        while running:
            candidates = [i for i in range(len(running)) if i not in blocked]
            assert candidates or flying, "deadlock"
            pick = choose.randrange(len(candidates) + len(flying))
            if pick < len(candidates):
                try:
                    if next(running[candidates[pick]]):
                        blocked.clear()
                    else:
                        blocked.add(candidates[pick])
                except StopIteration:
                    del running[candidates[pick]]
                    blocked.clear()
            else:
                land(*flying.pop(pick - len(candidates)))
                blocked.clear()
        assert not flying
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StagePhases(0), "num_stages must be a positive integer, got 0"),
        (lambda: StagePhases(2.0), "num_stages must be a positive integer, got 2.0"),
        (lambda: StagePhases(2, 2), "init must be a parity, 0 or 1, got 2"),
        (lambda: PipelineState(-1, "producer"), "num_stages must be a positive integer, got -1"),
        (lambda: PipelineState(2, "reader"), "role must be 'producer' or 'consumer', got 'reader'"),
        (lambda: BarrierRing(Machine(), 2, 0), "tx_bytes must be positive, got 0"),
        (lambda: BarrierRing(Machine(), 2, 1, -1), "consumer_arrivals must not be negative, got -1"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


def test_starting_phases_are_what_a_fresh_barrier_answers():
    fresh = Barrier(1)
    assert not fresh.passes(CONSUMER_START) and fresh.passes(PRODUCER_START)
    assert StagePhases(3)[2] == PipelineState(3, "consumer").phase == CONSUMER_START
    assert PipelineState(3, "producer").phase == PRODUCER_START


def test_copy_goes_its_own_way():
    state = PipelineState(3, "consumer")
    for _ in range(4):
        state.advance()
    lagging = state.copy()
    for _ in range(3):
        state.advance()
    assert (lagging.index, lagging.phase, lagging.role) == (1, 1, "consumer")
    assert (state.index, state.phase) == (1, 0)


# Inside a kernel


@cute.kernel
def states_kernel(out: cute.Tensor, count: cutlass.Int32, num_stages: cutlass.Constexpr):
    state = PipelineState.in_kernel(num_stages, "producer")
    for i in cutlass.range(count, unroll=1):
        out[i] = state.index * 2 + state.phase
        if i % 3 != 2:
            state.advance()


@cute.kernel
def phases_kernel(out: cute.Tensor, count: cutlass.Int32, num_stages: cutlass.Constexpr):
    phases = StagePhases.in_kernel(num_stages)
    for i in cutlass.range(count, unroll=1):
        out[i] = phases[i % num_stages]
        if i % 3 != 2:
            phases.flip(i % num_stages)


@cute.jit
def states_host(out: cute.Tensor, count: cutlass.Int32, num_stages: cutlass.Constexpr):
    states_kernel(out, count, num_stages).launch(grid=(1, 1, 1), block=(1, 1, 1))


@cute.jit
def phases_host(out: cute.Tensor, count: cutlass.Int32, num_stages: cutlass.Constexpr):
    phases_kernel(out, count, num_stages).launch(grid=(1, 1, 1), block=(1, 1, 1))


def ptx_of(host, num_stages: int, folder) -> str:
    out = make_fake_tensor(cutlass.Int32, (cute.sym_int(),), (1,))
    options = (cute.KeepPTX(True), cute.GPUArch("sm_90a"), DumpDir(str(folder)))
    return cute.compile[options](host, out, cutlass.Int32(4), num_stages).__ptx__


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_pipeline_state_is_carried_through_a_dynamic_loop(num_stages, tmp_path):
    ptx = ptx_of(states_host, num_stages, tmp_path)
    loop = dataflow.loop_with(ptx, "st.global")
    (store,) = loop.find("st.global")
    # Index and phase, both in registers.
    assert len(loop.carried_sources(store.operands[1])) >= 2
    assert ".local" not in ptx


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stage_phases_are_carried_through_a_dynamic_loop(num_stages, tmp_path):
    """As local memory, indexed at run time: what V2's docstring says of it."""
    loop = dataflow.loop_with(ptx_of(phases_host, num_stages, tmp_path), "st.global")
    (load,), (flip,) = loop.find("ld.local"), loop.find("st.local")
    assert loop.carried_sources(load.operands[1]) and loop.carried_sources(flip.operands[0])
    assert load.writes <= loop.sources(flip.reads)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 17])
def test_a_kernel_counts_as_plain_python_does(num_stages, count):
    """Both states through a dynamic loop and a dynamic branch, executed."""
    out = torch.full((32,), -1, dtype=torch.int32)
    assert emulator.run(states_host, out, cutlass.Int32(count), num_stages).ok
    state, expected = PipelineState(num_stages, "producer"), []
    for i in range(count):
        expected.append(state.index * 2 + state.phase)
        if i % 3 != 2:
            state.advance()
    assert out.tolist() == expected + [-1] * (32 - count)

    out.fill_(-1)
    assert emulator.run(phases_host, out, cutlass.Int32(count), num_stages).ok
    phases, expected = StagePhases(num_stages), []
    for i in range(count):
        expected.append(phases[i % num_stages])
        if i % 3 != 2:
            phases.flip(i % num_stages)
    assert out.tolist() == expected + [-1] * (32 - count)
