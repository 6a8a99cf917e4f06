"""A small latency model of one Hopper SM, in cycles: enough for a timeline, not a performance prediction.

One SM holds one CTA. It has one port to L2 that TMA, cp.async and plain loads share, one tensor unit (four tensor
cores, one per quarter of a warp group), and warps that issue in order. Nothing else is modelled: no cache misses to
DRAM, no bank conflicts, no clock or power limits, no contention between SMs beyond the port's measured share.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatencyModel:
    """Constants in cycles or bytes per cycle; replace any with `dataclasses.replace(HOPPER, ...)`."""

    # Cycles to microseconds, for traces only: what an H200 sustains in these kernels (1.4 to 1.55 GHz at 690 W).
    clock_mhz: float = 1500.0
    # A warp's instruction: between 1 (independent) and 4 (dependent ALU result). Chosen, not measured.
    issue: float = 2.0
    # Columns of D per cycle and SM, each 64 rows by 32 bytes of K. Dense f16: 989.4 TFLOP/s over 132 SMs at 1830 MHz
    # (H100 SXM data sheet) is 4096 FLOP per cycle, a column of m64nNk16 is 2048; m64n128k16 takes 64 cycles. The
    # rates of tf32, fp8 and int8 are in proportion to their size, so 32 bytes of K take the same time in all types.
    tensor_columns_per_cycle: float = 2.0
    # mma.sync reaches 62% of the peak on Hopper (Luo et al., arXiv:2402.13499, comparison with wgmma).
    mma_sync_share: float = 0.62
    # From the last tensor cycle to a register that a thread may read. Chosen: the order of an mma.sync's latency.
    tensor_drain: float = 32.0
    # One SM's share of L2 bandwidth: 9.8 TB/s at 1500 MHz over 132 SMs, measured on an H200 with bulk copies.
    port_bytes_per_cycle: float = 49.5
    # L2 hit seen by a load: 281 cycles on GH200 (AI_kernels latency microbenchmarks).
    l2_latency: float = 281.0
    # What a tensor copy needs beyond a load: descriptor, address generation, complete_tx. Chosen, the order of
    # the 170 cycles that published measurements of TMA against plain loads report.
    tma_overhead: float = 170.0
    # From the bytes in shared memory to a write's completion in global memory: taken equal to a load's latency.
    store_latency: float = 281.0
    # Shared memory: 128 bytes per cycle and SM (32 banks of 4 bytes).
    shared_bytes_per_cycle: float = 128.0
    shared_latency: float = 29.0
    # Barriers: the round trip through shared memory (mbarrier) and through the barrier unit (bar.sync). Chosen.
    mbarrier_wait: float = 20.0
    mbarrier_arrive: float = 20.0
    barrier: float = 20.0
    # A remote arrive or a cluster barrier crosses the SM-to-SM network: 180 cycles (Luo et al., arXiv:2402.13499).
    remote: float = 180.0

    def wgmma(self, n: int) -> float:
        """Cycles of the tensor unit for one warp group's m64nNkK, K of 32 bytes."""
        return n / self.tensor_columns_per_cycle

    def mma_sync(self, n: int, k_bytes: int) -> float:
        """Cycles of one tensor core (a quarter of the unit: 16 of the 64 rows) for one warp's m16nNkK."""
        return n * k_bytes / 32 / (self.tensor_columns_per_cycle * self.mma_sync_share)

    def port(self, nbytes: float) -> float:
        """Cycles for which `nbytes` occupy the SM's port to L2."""
        return nbytes / self.port_bytes_per_cycle

    @property
    def tma_latency(self) -> float:
        """From the start of a tensor copy to its last byte in place, without the time on the port."""
        return self.l2_latency + self.tma_overhead


HOPPER = LatencyModel()
