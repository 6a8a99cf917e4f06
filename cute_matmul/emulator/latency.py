"""A small latency model of one Hopper SM, in cycles: enough for a timeline, not a performance prediction.

One SM holds one CTA. It has one port to L2 that TMA, cp.async and plain loads share, one tensor unit (four tensor
cores, one per quarter of a warp group), and warps that issue in order. Nothing else is modelled: no cache misses to
DRAM, no bank conflicts, no clock or power limits, no contention between SMs beyond the port's measured share.

Where a constant says "measured" and nothing else, it is what `tests/gpu_probes/tensor_cores.py` found on an H200; the
numbers are in `tests/data/tensor_cores_latency.json`, and a test holds the constants to them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatencyModel:
    """Constants in cycles or bytes per cycle; replace any with `dataclasses.replace(HOPPER, ...)`."""

    # Cycles to microseconds, for traces only: what an H200 sustains in these kernels (1.4 to 1.55 GHz at 690 W).
    clock_mhz: float = 1500.0
    # A warp's instruction: between 1 (independent) and 4 (dependent, measured with fma). Chosen.
    issue: float = 2.0
    # Columns of D per cycle and SM, each 64 rows by 32 bytes of K: measured, n 64 to 256. The same as the data
    # sheet's 989.4 TFLOP/s of dense f16 over 132 SMs at 1830 MHz. tf32, fp8 and int8 have rates in proportion to
    # their size, so 32 bytes of K take the same time in all types.
    tensor_columns_per_cycle: float = 2.0
    # Below n = 64 an instruction takes this and a quarter of n: measured (18, 20 and 24 cycles for n 8, 16 and 32);
    # 16 cycles are what the 2 KB of A take at 128 bytes per cycle.
    tensor_floor: float = 16.0
    # mma.sync reaches 62% of wgmma's peak on Hopper (Luo et al., arXiv:2402.13499).
    mma_sync_share: float = 0.62
    # From the tensor unit's last cycle to the end of wgmma.wait_group: measured.
    tensor_drain: float = 52.0
    # One SM's share of L2 bandwidth when all load: 9.8 TB/s at 1500 MHz over 132 SMs, as bulk copies of a matmul's
    # tiles had it on an H200 (no file kept; where all SMs read the same lines, the file has 67). Alone it gets 110.
    port_bytes_per_cycle: float = 49.5
    # A plain load that hits L2: measured.
    l2_latency: float = 308.0
    # A bulk copy out of L2, from issue until its mbarrier's phase is complete, without the time on the port: measured.
    copy_latency: float = 280.0
    # From the bytes read from shared memory to a write's completion in global memory: taken equal to a load's latency.
    store_latency: float = 308.0
    # Shared memory: 128 bytes per cycle and SM (32 banks of 4 bytes); the latency of a load is measured.
    shared_bytes_per_cycle: float = 128.0
    shared_latency: float = 24.0
    # A try_wait on a phase that is complete, and what an arrive in the same CTA adds before it: measured.
    mbarrier_wait: float = 45.0
    mbarrier_arrive: float = 2.0
    # bar.sync: measured 19, 27 and 34 cycles for 4, 8 and 12 warps.
    barrier: float = 12.0
    barrier_per_warp: float = 1.9
    # An mbarrier.arrive with cluster scope at a peer, until the peer's wait sees it, and a cluster barrier: measured.
    remote_arrive: float = 378.0
    cluster_barrier: float = 345.0

    def wgmma(self, n: int) -> float:
        """Cycles of the tensor unit for one warp group's m64nNkK, K of 32 bytes."""
        return max(n / self.tensor_columns_per_cycle, self.tensor_floor + n / 4)

    def mma_sync(self, n: int, k_bytes: int) -> float:
        """Cycles of one tensor core (a quarter of the unit: 16 of the 64 rows) for one warp's m16nNkK."""
        return n * k_bytes / 32 / (self.tensor_columns_per_cycle * self.mma_sync_share)

    def port(self, nbytes: float) -> float:
        """Cycles for which `nbytes` occupy the SM's port to L2."""
        return nbytes / self.port_bytes_per_cycle

    def bar_sync(self, warps: int) -> float:
        """Cycles of an execution barrier of `warps` warps after the last has arrived."""
        return self.barrier + self.barrier_per_warp * warps


HOPPER = LatencyModel()
