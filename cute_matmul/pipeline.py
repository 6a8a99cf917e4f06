"""Which parity to wait for, and the barriers waited on: shared from V2 on.

An mbarrier has a phase bit that flips each time its expected arrivals (and bytes) are complete. A wait names
the parity of the phase it wants finished: `wait(parity)` returns once the phase of that parity is over, so a
fresh barrier passes a wait for parity 1 at once and blocks a wait for parity 0 (PTX ISA, mbarrier.test_wait).
Hence consumers start at phase 0 and producers at phase 1.

Two ways to remember the parity, with the same law: release, then advance; advance last; one place flips.
Both hold DSL values inside a kernel and plain ints outside, so their laws are tested without a compiler.
"""

from __future__ import annotations

import copy
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import cutlass_dsl as dsl

from . import hopper

CONSUMER_START = 0
"""A consumer's first wait blocks until the stage has been filled once."""

PRODUCER_START = 1
"""A producer's first wait passes: every stage begins empty."""

PRODUCER_ARRIVALS = 1
"""Arrivals per phase of a full barrier: the one thread that announces the bytes it is about to copy."""


class StagePhases:
    """One phase bit per stage: V2's form, and the most direct one.

    `phases[stage]` is the parity to wait for next; `flip(stage)` is called once each time the stage has been
    consumed. The stage may be a run-time value; the array is then indexed at run time, which a compiler cannot
    keep in registers. Use `StagePhases.in_kernel` inside a kernel.
    """

    def __init__(self, num_stages: int, init: int = CONSUMER_START) -> None:
        _check_stages(num_stages, init)
        self.num_stages = num_stages
        self._phases: Any = [init] * num_stages

    @classmethod
    def in_kernel(cls, num_stages: int, init: int = CONSUMER_START) -> StagePhases:
        """The same state as a register tensor of a kernel being traced."""
        phases = cls(num_stages, init)
        phases._phases = cute.make_rmem_tensor(num_stages, cutlass.Int32)
        phases._phases.fill(init)
        return phases

    def __getitem__(self, stage: Any) -> Any:
        return self._phases[stage]

    def flip(self, stage: Any) -> None:
        """The stage has been consumed: wait for the other parity next time."""
        self._phases[stage] = self._phases[stage] ^ 1

    def __extract_mlir_values__(self) -> list:
        return dsl.extract_mlir_values(self._phases)

    def __new_from_mlir_values__(self, values: list) -> StagePhases:
        new = StagePhases(self.num_stages)
        new._phases = dsl.new_from_mlir_values(self._phases, values)
        return new


class PipelineState:
    """A stage index and one phase bit that flips on wrap-around: V3's form and every later one's.

    All stages before `index` are in one phase and all from it on in the other, so one bit says it all.
    `role` is "producer" or "consumer". Carried through the DSL's dynamic loops as two 32-bit values.
    """

    def __init__(self, num_stages: int, role: str) -> None:
        if role not in ("producer", "consumer"):
            raise ValueError(f"role must be 'producer' or 'consumer', got {role!r}")
        init = PRODUCER_START if role == "producer" else CONSUMER_START
        _check_stages(num_stages, init)
        self.num_stages = num_stages
        self.role = role
        self.index: Any = 0
        self.phase: Any = init

    @classmethod
    def in_kernel(cls, num_stages: int, role: str) -> PipelineState:
        """The same state as values of a kernel being traced."""
        state = cls(num_stages, role)
        state.index, state.phase = cutlass.Int32(state.index), cutlass.Int32(state.phase)
        return state

    def advance(self) -> None:
        """Move to the next stage. Call it last, after the stage has been released or filled."""
        wraps = self.index + 1 == self.num_stages
        self.index = hopper.select(wraps, 0, self.index + 1)
        self.phase = self.phase ^ hopper.select(wraps, 1, 0)

    def copy(self) -> PipelineState:
        """A second state at the same place (a release that lags behind the wait)."""
        new = PipelineState(self.num_stages, self.role)
        new.index, new.phase = self.index, self.phase
        return new

    def __extract_mlir_values__(self) -> list:
        return dsl.extract_mlir_values(self.index) + dsl.extract_mlir_values(self.phase)

    def __new_from_mlir_values__(self, values: list) -> PipelineState:
        new = PipelineState(self.num_stages, self.role)
        new.index = dsl.new_from_mlir_values(self.index, values[:1])
        new.phase = dsl.new_from_mlir_values(self.phase, values[1:])
        return new


def _check_stages(num_stages: int, init: int) -> None:
    if not isinstance(num_stages, int) or num_stages < 1:
        raise ValueError(f"num_stages must be a positive integer, got {num_stages!r}")
    if init not in (0, 1):
        raise ValueError(f"init must be a parity, 0 or 1, got {init!r}")


class BarrierRing:
    """full[num_stages] and, with consumers that release, empty[num_stages], in shared memory.

    full[s]: PRODUCER_ARRIVALS arrival (expect_tx) and tx_bytes bytes a phase: the stage holds data.
    empty[s]: consumer_arrivals arrivals a phase: nobody reads the stage any more. From V3 on.
    """

    def __init__(self, smem: Any, num_stages: int, tx_bytes: int, consumer_arrivals: int = 0) -> None:
        if tx_bytes < 1:
            raise ValueError(f"tx_bytes must be positive, got {tx_bytes!r}")
        if consumer_arrivals < 0:
            raise ValueError(f"consumer_arrivals must not be negative, got {consumer_arrivals!r}")
        self.num_stages = num_stages
        self.tx_bytes = tx_bytes
        self.consumer_arrivals = consumer_arrivals
        self.full = smem.allocate_array(cutlass.Int64, num_stages)
        self.empty = smem.allocate_array(cutlass.Int64, num_stages) if consumer_arrivals else None

    def init(self) -> None:
        """Initialise every barrier. Called by one thread; the fence makes it visible to the copy engine.

        The CTA still has to meet at a barrier before anyone else touches them.
        """
        for stage in range(self.num_stages):
            cute.arch.mbarrier_init(self.full + stage, PRODUCER_ARRIVALS)
            if self.consumer_arrivals:
                cute.arch.mbarrier_init(self.empty + stage, self.consumer_arrivals)
        cute.arch.mbarrier_init_fence()

    def __extract_mlir_values__(self) -> list:
        return [v for ptr in (self.full, self.empty) if ptr is not None for v in dsl.extract_mlir_values(ptr)]

    def __new_from_mlir_values__(self, values: list) -> BarrierRing:
        new = copy.copy(self)
        new.full = dsl.new_from_mlir_values(self.full, values[:1])
        if self.empty is not None:
            new.empty = dsl.new_from_mlir_values(self.empty, values[1:])
        return new

    def producer_acquire(self, state: PipelineState) -> None:
        """One whole warp: wait until the stage is empty, then announce its bytes. The copies come next."""
        with hopper.traced("wait"):
            cute.arch.mbarrier_wait(self.empty + state.index, state.phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + state.index, self.tx_bytes)

    def consumer_wait(self, state: PipelineState) -> None:
        """Wait until the stage's bytes have landed. Called by every thread that reads them."""
        with hopper.traced("wait"):
            cute.arch.mbarrier_wait(self.full + state.index, state.phase)

    def consumer_release(self, state: PipelineState) -> None:
        """This thread reads the stage no more."""
        cute.arch.mbarrier_arrive(self.empty + state.index)
