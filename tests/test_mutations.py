"""Seeded bugs: what the emulator must say of each, and that it says nothing of the kernels they were made from.

Each mutant changes a few words of a clean kernel. Its expected outcome follows from the PTX ISA's rules and the
kernel's protocol, not from what the emulator happens to report.
"""

from __future__ import annotations

import pytest
from mutants import DEADLOCK, SCHEDULES, WRONG, Edit, Mutant, Runner, Setting, shortcomings

# Ragged in M and N, and more k_tiles than the ring has stages; the last k_tile is ragged too.
SETTINGS = {
    "v0": Setting("64x32x16", (56, 24, 56)),
    "v1": Setting("64x32x16", (56, 24, 56)),
    "v2": Setting("64x32x16,stages=2", (56, 24, 88)),
    "v3": Setting("64x32x16,stages=2", (56, 24, 88)),
    "v4": Setting("128x32x16,stages=2", (120, 24, 88)),
    "v5": Setting("128x32x16,stages=2", (120, 24, 88)),
    # With two warp groups of V6's four: the same protocol in half the time.
    "v6": Setting("128x256x16,stages=2", (120, 248, 56), edits=(Edit("CONSUMERS = 4", "CONSUMERS = 2"),)),
}

THREE_ROWS = Setting("128x32x16,stages=2,raster=2", (376, 56, 24))  # 3 by 2 tiles: the second group has one row

ELECTED_EXPECT = """\
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, tx_bytes(config))
"""
ALL_EXPECT = ELECTED_EXPECT.replace("with cute.arch.elect_one()", "if True")
COPY_A = "            cute.copy(a_tma, tAgA[None, k_tile], tAsA[None, 0], tma_bar_ptr=full)\n"
COPY_B = COPY_A.replace("a_tma", "b_tma").replace("tAgA", "tBgB").replace("tAsA", "tBsB")
INIT_SYNC = "        cute.arch.mbarrier_init_fence()\n    cute.arch.sync_threads()\n"
END_SYNC = (
    "        # Nobody may still be reading the tiles when the next ones arrive.\n        cute.arch.sync_threads()\n"
)
# A read that nothing orders after its copy, and what else the lost order leads to a round of the ring later.
WAIT_GROUP = "        warpgroup.wait_group(0)\n"
PLAIN = "cute.make_tensor(cute.recast_ptr({}.iterator, cute.make_swizzle(0, 4, 3)), {}.layout)"
PLAIN_LAYOUT = "cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, b_layout.outer)"

STALE = "read-before-copy-waited"
AFTER_STALE = (
    STALE,
    "overwrite-before-copy-waited",
    "overwrite-while-read",
    "overwrite-while-wgmma-reads",
    "uninitialised-shared-memory",
    "mbarrier-phase-unordered",
    "mbarrier-phase-overrun",
    "mbarrier-arrivals",
    "mbarrier-tx-bytes",
    "exit-with-copy-in-flight",
    "wgmma-not-whole-warp-group",
    DEADLOCK,
)

V0 = (
    Mutant(
        "phase-not-flipped",
        "v0",
        (Edit("        phase ^= 1\n", ""),),
        "every wait but the first is for a phase that is over; it passes too early, or blocks if the next is over too",
        hazards=(f"{STALE}|{DEADLOCK}",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "phase-starts-at-1",
        "v0",
        (Edit("phase = cutlass.Int32(0)", "phase = cutlass.Int32(1)"),),
        "a fresh barrier passes a wait for parity 1, unless phase 0 is over already: then it blocks",
        hazards=(f"{STALE}|{DEADLOCK}",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "wait-dropped",
        "v0",
        (Edit("        cute.arch.mbarrier_wait(full, phase)\n", ""),),
        "nothing orders ldmatrix after the copies",
        hazards=(STALE,),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "sync-dropped",
        "v0",
        (Edit(END_SYNC, ""),),
        "warp 0 may load the next tiles over those that warps 1 to 3 still read, and finish a phase they still await",
        hazards=("overwrite-while-read", "mbarrier-phase-overrun"),
        also=(DEADLOCK,),
    ),
    Mutant(
        "tx-bytes-too-few",
        "v0",
        (Edit("expect_tx(full, tx_bytes(config))", "expect_tx(full, 2 * tx_bytes(config) // 3)"),),
        "only A's bytes are awaited: where A lands first, B is read before it has landed; else nobody goes on",
        hazards=(f"mbarrier-tx-bytes|{STALE}|{DEADLOCK}",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "tx-bytes-too-many",
        "v0",
        (Edit("expect_tx(full, tx_bytes(config))", "expect_tx(full, tx_bytes(config) + 16)"),),
        "16 bytes never land",
        hazards=("mbarrier-tx-bytes",),
        shows=DEADLOCK,
    ),
    Mutant(
        "expect-tx-missing",
        "v0",
        (Edit(ELECTED_EXPECT, ""),),
        "the barrier's one arrival never comes",
        hazards=("mbarrier-tx-bytes",),
        shows=DEADLOCK,
    ),
    Mutant(
        "arrive-without-bytes",
        "v0",
        (Edit("mbarrier_arrive_and_expect_tx(full, tx_bytes(config))", "mbarrier_arrive(full)"),),
        "the arrival alone completes the phase, before a byte has landed",
        hazards=(STALE,),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "expect-tx-after-arrival",
        "v0",
        (
            Edit("mbarrier_arrive_and_expect_tx(full, tx_bytes(config))", "mbarrier_arrive(full)"),
            Edit(
                COPY_B,
                f"{COPY_B}            with cute.arch.elect_one():\n"
                "                cute.arch.mbarrier_expect_tx(full, tx_bytes(config))\n",
            ),
        ),
        "the arrival completes the phase before the bytes are announced; they count in the next one",
        hazards=(STALE,),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "all-lanes-arrive",
        "v0",
        (Edit(ELECTED_EXPECT, ALL_EXPECT),),
        "32 arrivals and 32 times the bytes at a barrier for one",
        hazards=("mbarrier-arrivals",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "barrier-for-two",
        "v0",
        (Edit("mbarrier_init(full, 1)", "mbarrier_init(full, 2)"),),
        "the second arrival never comes",
        shows=DEADLOCK,
    ),
    Mutant(
        "init-fence-dropped",
        "v0",
        (Edit(INIT_SYNC, "    cute.arch.sync_threads()\n"),),
        "the copy engine is another proxy: bar.sync does not show it the initialised barrier",
        hazards=("mbarrier-init-not-visible",),
    ),
    Mutant(
        "init-sync-dropped",
        "v0",
        (Edit(INIT_SYNC, "        cute.arch.mbarrier_init_fence()\n"),),
        "warps 1 to 3 may wait on a barrier that thread 0 has not initialised yet",
        hazards=("mbarrier-init-not-visible|mbarrier-not-initialised",),
    ),
    Mutant(
        "load-past-k",
        "v0",
        (Edit("k_tile], t", "k_tile + 1], t", count=2),),
        "the first k_tile is never multiplied; the one past the end is zeros",
        shows=WRONG,
    ),
    Mutant(
        "b-lands-on-a",
        "v0",
        (Edit("tBgB[None, k_tile], tBsB[None, 0]", "tBgB[None, k_tile], tAsA[None, 0]"),),
        "two copies race for the same bytes; B's buffer stays uninitialised",
        hazards=("overwrite-before-copy-waited", "uninitialised-shared-memory"),
        shows=WRONG,
    ),
    Mutant(
        "ldmatrix-without-swizzle",
        "v0",
        (Edit("thr_a.partition_S(sA)[", f"thr_a.partition_S({PLAIN.replace('{}', 'sA')})["),),
        "TMA swizzles A over 32 bytes, ldmatrix reads it plain",
        shows=WRONG,
    ),
    Mutant(
        "rows-beyond-the-output",
        "v0",
        (Edit("if cute.elem_less((at_m, at_n + shift), shape):", "if True:", file="epilogue"),),
        "the tile's last rows are stored below the output",
        hazards=("global-out-of-bounds",),
        setting=Setting("64x64x16", (56, 64, 24)),
    ),
    Mutant(
        "mask-of-the-lane-s-own-columns",
        "v0",
        (Edit("(at_m, at_n + shift)", "(at_m, at_n)", file="epilogue"),),
        "lanes of a quad store columns of other blocks than their own: those past the edge are the next row's",
        hazards=("global-out-of-bounds",),
        also=("data-race",),
        shows=WRONG,
        setting=Setting("64x64x16", (64, 40, 24)),
    ),
    Mutant(
        "mask-dropped",
        "v0",
        (Edit("if cute.elem_less(where[i], shape):", "if True:", file="epilogue"),),
        "columns past the edge are the next row's first ones, which another warp stores, and rows past it nobody's",
        hazards=("data-race", "global-out-of-bounds"),
        setting=Setting("64x32x16", (56, 24, 24), out_buffer=((72, 25), (0, 0))),
    ),
    Mutant(
        "vectors-at-an-odd-stride",
        "v0",
        (Edit(" | mC.stride[0]", "", file="epilogue"),),
        "66 elements are no number of vectors: every row but the first starts inside one",
        hazards=("misaligned-access",),
        setting=Setting("64x64x16", (64, 64, 24), out_buffer=((64, 66), (0, 0))),
    ),
    Mutant(
        "vectors-at-an-odd-address",
        "v0",
        (Edit(" | address)", ")", file="epilogue"),),
        "the output starts inside a vector",
        hazards=("misaligned-access",),
        setting=Setting("64x64x16", (64, 64, 24), out_buffer=((64, 72), (0, 2))),
    ),
    Mutant(
        "vectors-across-the-edge",
        "v0",
        (Edit("mC.shape[1] | ", "", file="epilogue"),),
        "the last vector of a row begins inside the output and ends outside",
        hazards=("global-out-of-bounds",),
        setting=Setting("64x64x16", (64, 60, 24), out_buffer=((64, 64), (0, 0))),
    ),
    Mutant(
        "pairs-at-an-odd-stride",
        "v0",
        (Edit("elif starts_at_multiples(mC, PAIR):", "elif mC.shape[1] % 2 == 0:", file="epilogue"),),
        "every other row starts inside a pair",
        hazards=("misaligned-access",),
        setting=Setting("64x64x16", (64, 64, 24), out_buffer=((64, 65), (0, 0))),
    ),
    Mutant(
        "exchange-of-one-distance",
        "v0",
        (Edit("for distance in (1, 2):", "for distance in (1,):", file="epilogue"),),
        "lanes keep what belongs to the other pair of the quad",
        shows=WRONG,
        setting=Setting("64x64x16", (64, 64, 24)),
    ),
    Mutant(
        "every-lane-stores-the-first-block",
        "v0",
        (Edit("lane * (to_n - PAIR)", "lane * (0 - PAIR)", file="epilogue"),),
        "a quad's lanes store their rows of four blocks over one another, and three blocks are never stored",
        shows=WRONG,
        setting=Setting("64x64x16", (64, 64, 24)),
    ),
)

V1 = (
    Mutant(
        "wgmma-fence-missing",
        "v1",
        (Edit("        warpgroup.fence()\n", ""),),
        "the accumulators were zeroed by plain instructions that no wgmma.fence orders before WGMMA",
        hazards=("missing-wgmma-fence",),
    ),
    Mutant(
        "wait-group-missing",
        "v1",
        (Edit(WAIT_GROUP, ""),),
        "the next copy lands on what WGMMA reads, the epilogue reads what it still writes",
        hazards=("overwrite-while-wgmma-reads", "accumulator-in-flight"),
        also=("mbarrier-phase-overrun", "exit-with-copy-in-flight"),
        shows=WRONG,
    ),
    Mutant(
        "wait-group-1",
        "v1",
        (Edit(WAIT_GROUP, WAIT_GROUP.replace("0", "1")),),
        "the group just committed may stay in flight",
        hazards=("overwrite-while-wgmma-reads", "accumulator-in-flight"),
        also=("mbarrier-phase-overrun", "exit-with-copy-in-flight"),
        shows=WRONG,
    ),
    Mutant(
        "commit-missing",
        "v1",
        (Edit("        warpgroup.commit_group()\n", ""),),
        "wait_group waits for committed groups only, and there is none",
        hazards=("overwrite-while-wgmma-reads", "accumulator-in-flight"),
        also=("mbarrier-phase-overrun", "exit-with-copy-in-flight"),
        shows=WRONG,
    ),
    Mutant(
        "wait-dropped",
        "v1",
        (Edit("        cute.arch.mbarrier_wait(full, phase)\n", ""),),
        "nothing orders WGMMA after the copies",
        hazards=(STALE,),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "half-a-warp-group",
        "v1",
        (Edit("            cute.gemm(", "            if warp_idx < 2:\n                cute.gemm("),),
        "WGMMA is one instruction of four warps, and two of them never come",
        hazards=("wgmma-not-whole-warp-group",),
        also=(DEADLOCK,),
    ),
    Mutant(
        "accumulate-from-the-start",
        "v1",
        (Edit("    acc.fill(0.0)\n", "    acc.fill(1.0)\n"),),
        "every sum begins at one",
        shows=WRONG,
    ),
    Mutant(
        "k-block-skipped",
        "v1",
        (
            Edit(
                "cutlass.range_constexpr(cute.size(tCrA, mode=[2]))",
                "cutlass.range_constexpr(1, cute.size(tCrA, mode=[2]))",
            ),
        ),
        "the first 16 columns of every k_tile are not multiplied",
        shows=WRONG,
        setting=Setting("64x32x32", (56, 24, 88)),
    ),
)

V2_EXPECT = """\
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, ring.tx_bytes)
"""
V2_WAIT = """\
        if tidx == 0:
            cute.arch.mbarrier_wait(ring.full + stage, phases[stage])
"""
V2_PRELOAD = """\
        preload = k_tile + num_stages
        if warp_idx == 0 and preload < k_tiles:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, ring.tx_bytes)
            cute.copy(a_tma, tAgA[None, preload], tAsA[None, stage], tma_bar_ptr=ring.full + stage)
            cute.copy(b_tma, tBgB[None, preload], tBsB[None, stage], tma_bar_ptr=ring.full + stage)
"""
V2_COMMIT = "        warpgroup.commit_group()\n"

V2 = (
    Mutant(
        "phase-not-flipped",
        "v2",
        (Edit("        phases.flip(stage)\n", ""),),
        "the second wait for a stage is for a phase that is over",
        hazards=(f"{STALE}|{DEADLOCK}",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "phase-flipped-twice",
        "v2",
        (Edit("        phases.flip(stage)\n", "        phases.flip(stage)\n        phases.flip(stage)\n"),),
        "twice is not at all",
        hazards=(f"{STALE}|{DEADLOCK}",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "phase-starts-at-1",
        "v2",
        (Edit("in_kernel(num_stages)", "in_kernel(num_stages, 1)"),),
        "the first wait for a stage passes at once, unless its copy has landed already: then it blocks",
        hazards=(f"{STALE}|{DEADLOCK}",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "wait-dropped",
        "v2",
        (Edit(V2_WAIT, ""),),
        "nothing orders WGMMA after the copies",
        hazards=(STALE,),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "sync-after-wait-dropped",
        "v2",
        (Edit(f"{V2_WAIT}        cute.arch.sync_threads()\n", V2_WAIT),),
        "thread 0 alone has seen the bytes land; warps 1 to 3 may multiply before",
        hazards=(STALE,),
        also=AFTER_STALE,
    ),
    Mutant(
        "another-thread-waits",
        "v2",
        (Edit(f"{V2_WAIT}        cute.arch.sync_threads()\n", V2_WAIT.replace("tidx == 0", "tidx == 32")),),
        "warp 1 alone has seen the bytes land; warp 0, which refills the stage, never looks",
        hazards=(STALE,),
        also=AFTER_STALE,
    ),
    Mutant(
        "tx-bytes-of-a-only",
        "v2",
        (Edit("tx_bytes(config))", "2 * tx_bytes(config) // 3)"),),
        "B's bytes are not awaited",
        hazards=(f"mbarrier-tx-bytes|{STALE}|{DEADLOCK}",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "tx-bytes-of-two-stages",
        "v2",
        (Edit("tx_bytes(config))", "2 * tx_bytes(config))"),),
        "half of the bytes never land",
        hazards=("mbarrier-tx-bytes",),
        shows=DEADLOCK,
    ),
    Mutant(
        "preload-one-too-many",
        "v2",
        (Edit("preload < k_tiles", "preload <= k_tiles"),),
        "a k_tile past the end is loaded, zeros, into a stage that nobody waits for any more",
        hazards=("exit-with-copy-in-flight",),
    ),
    Mutant(
        "preload-one-too-few",
        "v2",
        (Edit("preload < k_tiles", "preload < k_tiles - 1"),),
        "the last k_tile is awaited, but never loaded",
        shows=DEADLOCK,
    ),
    Mutant(
        "preload-past-k",
        "v2",
        (Edit("preload], t", "preload + 1], t", count=2),),
        "one k_tile is skipped, one past the end is zeros",
        shows=WRONG,
    ),
    Mutant(
        "prologue-without-minimum",
        "v2",
        (Edit("cutlass.min(num_stages, k_tiles)", "num_stages"),),
        "with fewer k_tiles than stages, stages are filled that nobody waits for",
        hazards=("exit-with-copy-in-flight",),
        setting=Setting("64x32x16,stages=2", (56, 24, 16)),
    ),
    Mutant(
        "prologue-one-stage-short",
        "v2",
        (Edit("cutlass.min(num_stages, k_tiles)", "cutlass.min(num_stages - 1, k_tiles)"),),
        "the last stage is awaited, but never filled",
        shows=DEADLOCK,
    ),
    Mutant(
        "b-on-the-first-barrier",
        "v2",
        (
            Edit(
                "cute.copy(b_tma, tBgB[None, stage], tBsB[None, stage], tma_bar_ptr=ring.full + stage)",
                "cute.copy(b_tma, tBgB[None, stage], tBsB[None, stage], tma_bar_ptr=ring.full)",
            ),
        ),
        "stage 1's barrier waits for bytes that count at stage 0's",
        hazards=(f"mbarrier-tx-bytes|{DEADLOCK}|{STALE}",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "stages-aliased",
        "v2",
        (
            Edit("tAsA[None, stage]", "tAsA[None, stage // 2]", count=2),
            Edit("k_block, stage], tCrB", "k_block, stage // 2], tCrB"),
        ),
        "both stages of A are one buffer: the second copy lands on the first before anyone has read it",
        hazards=("overwrite-before-copy-waited",),
        also=("overwrite-while-wgmma-reads", STALE),
        shows=WRONG,
    ),
    Mutant(
        "preload-into-the-next-stage",
        "v2",
        (
            Edit(
                V2_PRELOAD,
                V2_PRELOAD.replace("+ stage)", "+ (stage + 1) % num_stages)")
                .replace("+ stage,", "+ (stage + 1) % num_stages,")
                .replace("None, stage]", "None, (stage + 1) % num_stages]"),
            ),
        ),
        "one stage too early: the next stage is refilled before it was multiplied",
        hazards=("mbarrier-phase-unordered", "overwrite-before-copy-waited|mbarrier-arrivals"),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "preload-before-wait-group",
        "v2",
        (Edit(V2_PRELOAD, ""), Edit(V2_COMMIT, V2_COMMIT + V2_PRELOAD)),
        "the copy may land before the WGMMAs, which are only issued so far, have read the stage",
        hazards=("overwrite-while-wgmma-reads",),
        shows=WRONG,
    ),
    Mutant(
        "wait-group-1",
        "v2",
        (Edit(WAIT_GROUP, WAIT_GROUP.replace("0", "1")),),
        "the group that reads the stage may still be in flight when the stage is refilled",
        hazards=("overwrite-while-wgmma-reads", "accumulator-in-flight"),
        also=("exit-with-copy-in-flight",),
        shows=WRONG,
    ),
    Mutant(
        "wgmma-fence-missing",
        "v2",
        (Edit("        warpgroup.fence()\n", ""),),
        "the accumulators were zeroed by plain instructions that no wgmma.fence orders before WGMMA",
        hazards=("missing-wgmma-fence",),
    ),
    Mutant(
        "swizzle-mismatch",
        "v2",
        (Edit("hopper.tma_load(mB, b_layout,", f"hopper.tma_load(mB, {PLAIN_LAYOUT},"),),
        "TMA writes B plain, WGMMA's descriptor says that it is swizzled over 32 bytes",
        shows=WRONG,
    ),
    Mutant(
        "init-by-another-warp",
        "v2",
        (
            Edit(
                "    if tidx == 0:\n        ring.init()\n    cute.arch.sync_threads()\n",
                "    if tidx == 32:\n        ring.init()\n",
            ),
        ),
        "warp 1 initialises barriers that warp 0 uses without having met it",
        hazards=("mbarrier-init-not-visible|mbarrier-not-initialised",),
        also=AFTER_STALE,
    ),
    Mutant(
        "init-fence-dropped",
        "v2",
        (Edit("        cute.arch.mbarrier_init_fence()\n", "", file="pipeline"),),
        "the copy engine is another proxy: bar.sync does not show it the initialised barriers",
        hazards=("mbarrier-init-not-visible",),
    ),
)

TRACED = '        with hopper.traced("wait"):\n'
V3_ACQUIRE = f"{TRACED}            cute.arch.mbarrier_wait(ring.empty + state.index, state.phase)\n"
V3_WAIT = f"{TRACED}            cute.arch.mbarrier_wait(ring.full + state.index, state.phase)\n"
V3_RELEASE = "        cute.arch.mbarrier_arrive(ring.empty + state.index)\n"
V3_TAIL = f"""\
        # Still one group at a time: the stage may go back only once WGMMA has read it.
{WAIT_GROUP}{V3_RELEASE}        state.advance()
    return acc
"""
# A stage that is refilled while it is read, as either side sees it, and the copies' own order that goes with it.
REFILLED = "overwrite-while-wgmma-reads|read-before-copy-waited|overwrite-before-copy-waited|mbarrier-arrivals"

V3 = (
    Mutant(
        "producer-with-the-consumer-s-parity",
        "v3",
        (Edit("PRODUCER_START = 1", "PRODUCER_START = 0", file="pipeline"),),
        "the producer waits for a release of a stage that was never filled",
        shows=DEADLOCK,
    ),
    Mutant(
        "consumer-with-the-producer-s-parity",
        "v3",
        (Edit('in_kernel(ring.num_stages, "consumer")', 'in_kernel(ring.num_stages, "producer")'),),
        "the first wait passes before a byte has landed, unless the copy was faster: then it blocks",
        hazards=(f"{STALE}|{DEADLOCK}",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "acquire-dropped",
        "v3",
        (Edit(V3_ACQUIRE, ""),),
        "the producer refills stages that are still unread",
        hazards=("mbarrier-phase-unordered", REFILLED),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "consumer-wait-dropped",
        "v3",
        (Edit(V3_WAIT, ""),),
        "nothing orders WGMMA after the copies",
        hazards=(STALE,),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "release-missing",
        "v3",
        (Edit(V3_RELEASE, ""),),
        "no stage is ever given back",
        shows=DEADLOCK,
    ),
    Mutant(
        "release-before-wait-group",
        "v3",
        (Edit(V3_TAIL, V3_TAIL.replace(WAIT_GROUP, "").replace(V3_RELEASE, V3_RELEASE + WAIT_GROUP)),),
        "the producer may refill the stage before the WGMMAs, which are only issued so far, have read it",
        hazards=("overwrite-while-wgmma-reads",),
        shows=WRONG,
    ),
    Mutant(
        "one-warp-releases",
        "v3",
        (Edit(V3_RELEASE, f"        if cute.arch.warp_idx() == 0:\n    {V3_RELEASE}"),),
        "32 of 128 arrivals",
        shows=DEADLOCK,
    ),
    Mutant(
        "half-the-arrivals",
        "v3",
        (Edit("consumer_arrivals=WARP_GROUP)", "consumer_arrivals=WARP_GROUP // 2)"),),
        "one round's 128 arrivals complete two phases: the parities of producer and barrier part",
        hazards=("mbarrier-phase-unordered|mbarrier-phase-overrun",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "one-arrival-too-many-awaited",
        "v3",
        (Edit("consumer_arrivals=WARP_GROUP)", "consumer_arrivals=WARP_GROUP + 1)"),),
        "the 129th arrival of a round is the first of the next",
        shows=DEADLOCK,
    ),
    Mutant(
        "advance-before-release",
        "v3",
        (Edit(f"{V3_RELEASE}        state.advance()\n", f"        state.advance()\n{V3_RELEASE}"),),
        "each release is for the next stage: it may complete a second phase before the producer has awaited the first",
        hazards=(f"mbarrier-phase-overrun|{DEADLOCK}",),
        also=AFTER_STALE,
    ),
    Mutant(
        "phase-not-flipped-on-wrap",
        "v3",
        (Edit("hopper.select(wraps, 1, 0)", "0", file="pipeline"),),
        "from the second round on the producer, and then the consumers, await phases that are over",
        hazards=("mbarrier-phase-unordered", REFILLED),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "phase-flipped-one-stage-early",
        "v3",
        (Edit("select(wraps, 1, 0)", "select(self.index + 1 == self.num_stages, 1, 0)", file="pipeline"),),
        "the consumer does not wait for the last stage's first fill, and its release lets the producer go on",
        hazards=("uninitialised-shared-memory",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "consumer-one-k-tile-too-many",
        "v3",
        (Edit("for _ in cutlass.range(k_tiles,", "for _ in cutlass.range(k_tiles + 1,"),),
        "a k_tile that nobody loads is awaited",
        shows=DEADLOCK,
    ),
    Mutant(
        "producer-one-k-tile-too-many",
        "v3",
        (Edit("for k_tile in cutlass.range(k_tiles,", "for k_tile in cutlass.range(k_tiles + 1,"),),
        "a k_tile past the end is loaded that nobody waits for",
        hazards=("exit-with-copy-in-flight",),
    ),
    Mutant(
        "full-barrier-for-two",
        "v3",
        (Edit("PRODUCER_ARRIVALS = 1", "PRODUCER_ARRIVALS = 2", file="pipeline"),),
        "the producer arrives once",
        shows=DEADLOCK,
    ),
    Mutant(
        "full-and-empty-aliased",
        "v3",
        (
            Edit(
                "self.empty = smem.allocate_array(cutlass.Int64, num_stages) if",
                "self.empty = self.full if",
                file="pipeline",
            ),
        ),
        "one object is initialised twice, for 128 arrivals, of which the producer's one is the first",
        hazards=("mbarrier-reinitialised",),
        also=AFTER_STALE,
        shows=DEADLOCK,
    ),
)

V4_RELEASE = "        ring.consumer_release(state)\n"

V4 = (
    Mutant(
        "one-group-s-arrivals",
        "v4",
        (Edit("consumer_arrivals=CONSUMERS * WARP_GROUP)", "consumer_arrivals=WARP_GROUP)"),),
        "the first 128 of 256 arrivals free the stage, and the others count in the next phase",
        hazards=("mbarrier-phase-unordered|mbarrier-phase-overrun",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "one-group-releases-for-both",
        "v4",
        (
            Edit("consumer_arrivals=CONSUMERS * WARP_GROUP)", "consumer_arrivals=WARP_GROUP)"),
            Edit(V4_RELEASE, f"        if warp_group_idx == 0:\n    {V4_RELEASE}"),
        ),
        "the stage is refilled when warp group 0 has read it, whatever warp group 1 still reads",
        hazards=("overwrite-while-wgmma-reads",),
        also=("mbarrier-phase-overrun", STALE, DEADLOCK),
    ),
    Mutant(
        "one-group-never-releases",
        "v4",
        (Edit(V4_RELEASE, f"        if warp_group_idx == 0:\n    {V4_RELEASE}"),),
        "128 of 256 arrivals",
        shows=DEADLOCK,
    ),
    Mutant(
        "second-group-releases-early",
        "v4",
        (
            Edit(
                f"{WAIT_GROUP}{V4_RELEASE}",
                f"        if warp_group_idx == 1:\n    {V4_RELEASE}{WAIT_GROUP}"
                f"        if warp_group_idx == 0:\n    {V4_RELEASE}",
            ),
        ),
        "warp group 1 gives the stage back while its WGMMAs read it; warp group 0's wait covers its own only",
        hazards=("overwrite-while-wgmma-reads",),
    ),
    Mutant(
        "both-groups-same-rows",
        "v4",
        (Edit("warp_group_idx * WARP_GROUP)", "0)"),),
        "both warp groups multiply the tile's upper rows",
        shows=WRONG,
    ),
    Mutant(
        "expect-tx-by-all-lanes",
        "v4",
        (
            Edit(
                "        with cute.arch.elect_one():\n            cute.arch.mbarrier_arrive_and_expect_tx(",
                "        if True:\n            cute.arch.mbarrier_arrive_and_expect_tx(",
                file="pipeline",
            ),
        ),
        "32 arrivals and 32 times the bytes at a barrier for one",
        hazards=("mbarrier-arrivals",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "expect-tx-dropped",
        "v4",
        (
            Edit(
                "mbarrier_arrive_and_expect_tx(self.full + state.index, self.tx_bytes)",
                "mbarrier_arrive(self.full + state.index)",
                file="pipeline",
            ),
        ),
        "the producer's arrival alone completes the phase, before a byte has landed",
        hazards=(STALE,),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "acquire-waits-for-full",
        "v4",
        (
            Edit(
                "mbarrier_wait(self.empty + state.index, state.phase)",
                "mbarrier_wait(self.full + state.index, state.phase)",
                file="pipeline",
            ),
        ),
        "the producer waits for its own copy to land, not for the stage to be read",
        hazards=(f"overwrite-while-wgmma-reads|mbarrier-phase-overrun|{DEADLOCK}",),
        also=AFTER_STALE,
    ),
    Mutant(
        "raster-remainder-as-a-full-group",
        "v4",
        (Edit("m_tiles // raster_group", "(m_tiles + raster_group - 1) // raster_group", file="scheduler"),),
        "in the last group, of one row of tiles, every other tile is below the matrix and half of the row is left out",
        shows=WRONG,
        setting=THREE_ROWS,
    ),
    Mutant(
        "raster-tail-rows-off-by-one",
        "v4",
        (Edit("tail_rows = m_tiles % raster_group", "tail_rows = m_tiles % raster_group + 1", file="scheduler"),),
        "the last group is taken for one row taller than it is",
        shows=WRONG,
        setting=THREE_ROWS,
    ),
    Mutant(
        "raster-tile-visited-twice",
        "v4",
        (
            Edit(
                "within // self.raster_group, within % self.raster_group",
                "within // self.raster_group, 0",
                file="scheduler",
            ),
        ),
        "two CTAs store one tile and none another",
        hazards=("data-race",),
        shows=WRONG,
        setting=THREE_ROWS,
    ),
    Mutant(
        "raster-groups-overlap",
        "v4",
        (Edit("first_row = group * self.raster_group", "first_row = group", file="scheduler"),),
        "the second group begins within the first: rows of tiles are computed twice, others never",
        hazards=("data-race",),
        shows=WRONG,
        setting=THREE_ROWS,
    ),
)

# What stands before the loop of V5 and V6: the first k_tile has been multiplied, its group is in flight.
LAG = "    state.advance()\n    for _ in cutlass.range("

V5 = (
    Mutant(
        "released-one-early",
        "v5",
        (Edit(LAG, f"    ring.consumer_release(release)\n    release.advance()\n{LAG}"),),
        "without the lag, the stage given back is the one whose group is still in flight",
        hazards=("overwrite-while-wgmma-reads",),
        shows=WRONG,
    ),
    Mutant(
        "first-stage-never-released",
        "v5",
        (Edit("consumer_release(release)", "consumer_release(state)"),),
        "the first k_tile's stage is never given back, and the others too early",
        shows=DEADLOCK,
    ),
    Mutant(
        "wait-group-2",
        "v5",
        (Edit("        warpgroup.wait_group(1)\n", "        warpgroup.wait_group(2)\n"),),
        "two groups stay in flight, and the older one reads the stage that is given back",
        hazards=("overwrite-while-wgmma-reads",),
        shows=WRONG,
    ),
    Mutant(
        "wait-group-missing",
        "v5",
        (Edit("        warpgroup.wait_group(1)\n", ""),),
        "nothing says that the group which read the stage has retired",
        hazards=("overwrite-while-wgmma-reads",),
        shows=WRONG,
    ),
    Mutant(
        "released-before-the-wait",
        "v5",
        (
            Edit(
                "        warpgroup.wait_group(1)\n        ring.consumer_release(release)\n",
                "        ring.consumer_release(release)\n        warpgroup.wait_group(1)\n",
            ),
        ),
        "the producer may refill the stage before its group, which may still be in flight, has read it",
        hazards=("overwrite-while-wgmma-reads",),
        shows=WRONG,
    ),
    Mutant(
        "last-wait-missing",
        "v5",
        (Edit("    warpgroup.wait_group(0)\n    return acc\n", "    return acc\n"),),
        "the epilogue reads accumulators that the last group still writes",
        hazards=("accumulator-in-flight",),
        also=("exit-with-copy-in-flight",),
        shows=WRONG,
    ),
    Mutant(
        "last-wait-too-lax",
        "v5",
        (Edit("    warpgroup.wait_group(0)\n    return acc\n", "    warpgroup.wait_group(1)\n    return acc\n"),),
        "the epilogue reads accumulators that the last group still writes",
        hazards=("accumulator-in-flight",),
        also=("exit-with-copy-in-flight",),
        shows=WRONG,
    ),
    Mutant(
        "release-not-advanced",
        "v5",
        (Edit("        release.advance()\n", ""),),
        "stage 0 is given back over and over, stage 1 never",
        shows=DEADLOCK,
    ),
    Mutant(
        "one-k-tile-too-many",
        "v5",
        (Edit("cutlass.range(k_tiles - 1,", "cutlass.range(k_tiles,"),),
        "the first k_tile is multiplied before the loop: one more is awaited than is loaded",
        shows=DEADLOCK,
    ),
    Mutant(
        "fence-missing",
        "v5",
        (Edit("    warpgroup.fence()\n", ""),),
        "no wgmma.fence before the first WGMMA, which adds to accumulators set by plain instructions",
        hazards=("missing-wgmma-fence",),
    ),
)

V6_FENCE = '        cute.arch.fence_proxy("async.shared", space="cta")\n'
V6_FULL_ARRIVE = "        cute.arch.mbarrier_arrive(epi_full + quarter)\n"
V6_FULL_WAIT = f"{TRACED}            cute.arch.mbarrier_wait(epi_full + quarter, 0)\n"
V6_EMPTY_WAIT = """\
        if cutlass.const_expr(quarter > 0):
            with hopper.traced("wait"):
                cute.arch.mbarrier_wait(epi_empty + (quarter - 1), 0)
"""
V6_COMMIT = "            cute.arch.cp_async_bulk_commit_group()\n"
V6_READ_WAIT = "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
V6_EMPTY_ARRIVE = """\
            if cutlass.const_expr(quarter < QUARTERS - 1):
                cute.arch.mbarrier_arrive(epi_empty + quarter)
"""
V6_ELECT = "        with cute.arch.elect_one():\n            cute.copy(c_tma"
# The store reads a quarter that nothing orders after the consumers' writes, as whichever of the two comes last.
UNWRITTEN = "missing-proxy-fence|data-race|uninitialised-shared-memory|overwrite-while-copy-reads"

V6 = (
    Mutant(
        "proxy-fence-dropped",
        "v6",
        (Edit(V6_FENCE, ""),),
        "the bulk copy reads through the async proxy what was written through the generic one",
        hazards=("missing-proxy-fence",),
    ),
    Mutant(
        "proxy-fence-for-global-memory",
        "v6",
        (Edit(V6_FENCE, '        cute.arch.fence_proxy("async.global")\n'),),
        "the bytes lie in shared memory, of which this fence says nothing",
        hazards=("missing-proxy-fence",),
    ),
    Mutant(
        "proxy-fence-after-the-arrival",
        "v6",
        (Edit(V6_FENCE + V6_FULL_ARRIVE, V6_FULL_ARRIVE + V6_FENCE),),
        "the fence orders nothing for a copy that the arrival has let go",
        hazards=("missing-proxy-fence",),
    ),
    Mutant(
        "epi-empty-wait-dropped",
        "v6",
        (Edit(V6_EMPTY_WAIT, ""),),
        "a quarter is written over the one that the bulk copy still reads",
        hazards=("overwrite-while-copy-reads|data-race",),
        also=("missing-proxy-fence", "data-race"),
        shows=WRONG,
    ),
    Mutant(
        "read-wait-dropped",
        "v6",
        (Edit(V6_READ_WAIT, ""),),
        "the buffer is given back before the bulk copy has read it",
        hazards=("overwrite-while-copy-reads",),
        also=("exit-with-copy-in-flight",),
        shows=WRONG,
    ),
    Mutant(
        "bulk-commit-dropped",
        "v6",
        (Edit(V6_COMMIT, ""),),
        "the copy is in no group, so the wait has nothing to wait for",
        hazards=("overwrite-while-copy-reads",),
        also=("exit-with-copy-in-flight",),
        shows=WRONG,
    ),
    Mutant(
        "read-wait-one-group-lax",
        "v6",
        (Edit("wait_group(0, read=True)", "wait_group(1, read=True)"),),
        "the group just committed may still read the buffer",
        hazards=("overwrite-while-copy-reads", "exit-with-copy-in-flight"),
        shows=WRONG,
    ),
    Mutant(
        "last-store-not-awaited",
        "v6",
        (
            Edit(
                V6_READ_WAIT + V6_EMPTY_ARRIVE,
                "            if cutlass.const_expr(quarter < QUARTERS - 1):\n"
                "                cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
                "                cute.arch.mbarrier_arrive(epi_empty + quarter)\n",
            ),
        ),
        "the CTA may end while the last quarter's copy still reads its shared memory",
        hazards=("exit-with-copy-in-flight",),
    ),
    Mutant(
        "epi-empty-arrival-dropped",
        "v6",
        (Edit(V6_EMPTY_ARRIVE, ""),),
        "the consumers wait for the buffer for ever",
        shows=DEADLOCK,
    ),
    Mutant(
        "epi-full-arrival-dropped",
        "v6",
        (Edit(V6_FULL_ARRIVE, ""),),
        "the producer waits for the first quarter for ever",
        shows=DEADLOCK,
    ),
    Mutant(
        "epi-full-wait-dropped",
        "v6",
        (Edit(V6_FULL_WAIT, ""),),
        "a quarter is stored before it was written",
        hazards=(UNWRITTEN,),
        also=UNWRITTEN.split("|"),
        shows=WRONG,
    ),
    Mutant(
        "epi-full-wait-for-the-other-parity",
        "v6",
        (Edit(V6_FULL_WAIT, V6_FULL_WAIT.replace("0)", "1)")),),
        "a fresh barrier passes a wait for parity 1",
        hazards=(f"{UNWRITTEN}|{DEADLOCK}",),
        also=UNWRITTEN.split("|"),
        shows=WRONG,
    ),
    Mutant(
        "epi-full-for-one-group",
        "v6",
        (
            Edit(
                "mbarrier_init(epi_full + quarter, CONSUMERS * WARP_GROUP)",
                "mbarrier_init(epi_full + quarter, WARP_GROUP)",
            ),
        ),
        "a quarter of the threads have written when the copy starts; the other arrivals complete further phases",
        hazards=("mbarrier-phase-unordered", f"{UNWRITTEN}|{DEADLOCK}"),
        also=(
            *UNWRITTEN.split("|"),
            "mbarrier-phase-unordered",
            "mbarrier-phase-overrun",
            "mbarrier-arrivals",
            DEADLOCK,
        ),
        shows=WRONG,
    ),
    Mutant(
        "epi-empty-for-a-warp",
        "v6",
        (Edit("mbarrier_init(epi_empty + quarter, 1)", "mbarrier_init(epi_empty + quarter, 32)"),),
        "only the elected lane arrives",
        shows=DEADLOCK,
    ),
    Mutant(
        "store-by-all-lanes",
        "v6",
        (Edit(V6_ELECT, V6_ELECT.replace("with cute.arch.elect_one()", "if True")),),
        "32 lanes arrive at epi_empty, which is for one: 31 of its phases more, of which the consumers see the last",
        hazards=("mbarrier-arrivals",),
        also=("mbarrier-phase-unordered", "mbarrier-phase-overrun", DEADLOCK),
        shows=WRONG,
    ),
    Mutant(
        "every-quarter-to-the-first-columns",
        "v6",
        (Edit("first + quarter]", "first]"),),
        "three quarters of the columns are never written, and four copies race for the others",
        also=("data-race", "overwrite-before-copy-waited"),
        shows=WRONG,
    ),
    Mutant(
        "epilogue-swizzle-mismatch",
        "v6",
        (
            Edit(
                "partition_C(sC)",
                "partition_C(cute.make_tensor(cute.recast_ptr(sC.iterator, cute.make_swizzle(0, 4, 3)), sC.layout))",
            ),
        ),
        "the quarters are written plain and stored as if swizzled over 128 bytes",
        shows=WRONG,
    ),
    Mutant(
        "released-one-early",
        "v6",
        (Edit(LAG, f"    ring.consumer_release(release)\n    release.advance()\n{LAG}"),),
        "without the lag, the stage given back is the one whose group is still in flight",
        hazards=("overwrite-while-wgmma-reads",),
        shows=WRONG,
    ),
    Mutant(
        "last-wait-missing",
        "v6",
        (Edit("    warpgroup.wait_group(0)\n    return acc\n", "    return acc\n"),),
        "the epilogue reads accumulators that the last group still writes",
        hazards=("accumulator-in-flight",),
        also=("exit-with-copy-in-flight",),
        shows=WRONG,
    ),
)

C_SYNC = "    cute.arch.cluster_arrive()\n    cute.arch.cluster_wait()\n"
C_INIT = "        cute.arch.mbarrier_init_fence()\n"
C_EXIT = f"    # Nobody leaves while a peer may still arrive here.\n{C_SYNC}"
C_ARRIVALS = "mbarrier_init(empty + stage, CLUSTER * READERS)"
C_RELEASE = """\
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                for peer in cutlass.range_constexpr(CLUSTER):
                    cute.arch.mbarrier_arrive(empty + stage, peer)
"""
C_READ = "            for column in cutlass.range("
# A peer's stage that is refilled while it is read, as either side sees it.
REFILLED_PEER = "overwrite-while-read|read-before-copy-waited|overwrite-before-copy-waited"

CLUSTER_SUM = (
    Mutant(
        "remote-release-dropped",
        "ClusterSum",
        (Edit(C_RELEASE, C_RELEASE.replace("range_constexpr(CLUSTER)", "range(rank, rank + 1)")),),
        "each CTA waits for the other's readers",
        shows=DEADLOCK,
    ),
    Mutant(
        "own-readers-only",
        "ClusterSum",
        (
            Edit(C_ARRIVALS, C_ARRIVALS.replace("CLUSTER * ", "")),
            Edit(C_RELEASE, C_RELEASE.replace("range_constexpr(CLUSTER)", "range(rank, rank + 1)")),
        ),
        "the multicast overwrites the peer's stage, whether the peer has read it or not",
        hazards=(REFILLED_PEER,),
        also=AFTER_STALE,
    ),
    Mutant(
        "released-twice-at-home",
        "ClusterSum",
        (Edit("mbarrier_arrive(empty + stage, peer)", "mbarrier_arrive(empty + stage, rank)"),),
        "the arrival meant for the peer counts at home: a stage is free without the peer",
        hazards=(REFILLED_PEER,),
        also=AFTER_STALE,
    ),
    Mutant(
        "one-reading-warp-releases",
        "ClusterSum",
        (
            Edit(C_ARRIVALS, C_ARRIVALS.replace("READERS", "1")),
            Edit(
                C_RELEASE,
                C_RELEASE.replace(
                    "for peer in cutlass.range_constexpr(CLUSTER)", "for peer in cutlass.range(CLUSTER * (1 - warp))"
                ),
            ),
        ),
        "warp 1 may still read what warp 0 gives back",
        hazards=(REFILLED_PEER,),
        also=AFTER_STALE,
    ),
    Mutant(
        "release-before-reading",
        "ClusterSum",
        (Edit(C_RELEASE, ""), Edit(C_READ, C_RELEASE + C_READ)),
        "the stage is given back, to both CTAs, before it is read",
        hazards=("overwrite-while-read|read-before-copy-waited",),
        also=AFTER_STALE,
    ),
    Mutant(
        "init-fence-dropped",
        "ClusterSum",
        (Edit(C_INIT + C_SYNC, C_SYNC),),
        "a peer's copy and arrival may meet a barrier that it does not see initialised",
        hazards=("mbarrier-init-not-visible",),
    ),
    Mutant(
        "init-without-the-cluster",
        "ClusterSum",
        (Edit(f"{C_INIT}{C_SYNC}", f"{C_INIT}    cute.arch.sync_threads()\n"),),
        "the peer may not have initialised its barriers yet",
        hazards=("mbarrier-init-not-visible|mbarrier-not-initialised",),
        also=AFTER_STALE,
    ),
    Mutant(
        "cluster-wait-dropped",
        "ClusterSum",
        (Edit(f"{C_INIT}{C_SYNC}", f"{C_INIT}    cute.arch.cluster_arrive()\n"),),
        "the barriers are used without having met the peer, and the next arrival comes before the wait for this one",
        hazards=("mbarrier-init-not-visible|mbarrier-not-initialised|cluster-barrier",),
        also=(
            "mbarrier-init-not-visible",
            "mbarrier-not-initialised",
            "cluster-barrier",
            "exit-before-remote-access",
            "access-to-exited-cta",
            DEADLOCK,
        ),
    ),
    Mutant(
        "exit-without-the-cluster",
        "ClusterSum",
        (Edit(C_EXIT, ""),),
        "a CTA may be gone when its peer gives a stage back to it",
        hazards=("exit-before-remote-access",),
        also=("access-to-exited-cta",),
    ),
    Mutant(
        "multicast-to-one",
        "ClusterSum",
        (Edit("Int16(0b11)", "Int16(0b01)"),),
        "CTA 1 waits for bytes that nobody sends",
        hazards=("mbarrier-tx-bytes",),
        shows=DEADLOCK,
    ),
    Mutant(
        "half-the-bytes",
        "ClusterSum",
        (Edit("(full + stage, TILE_BYTES)", "(full + stage, TILE_BYTES // 2)"),),
        "one CTA's half completes the phase",
        hazards=(f"mbarrier-tx-bytes|{STALE}|{DEADLOCK}",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "acquire-with-the-reader-s-parity",
        "ClusterSum",
        (Edit("phase ^ 1)", "phase)"),),
        "the producer waits for a release of a stage that was never filled",
        shows=DEADLOCK,
    ),
)

D_BARRIER = "        cute.arch.barrier(barrier_id=1 + group, number_of_threads=GROUP_THREADS)\n"
D_FENCE = '        cute.arch.fence_proxy("async.shared", space="cta")\n'
D_READ_WAIT = "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
D_WAIT = "        cute.arch.mbarrier_wait(full + group, phase)\n"
D_LAST_WAIT = "    if leads:\n        cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
D_STEP = "cute.arch.grid_dim()[0] * GROUPS,"

DOUBLED = (
    Mutant(
        "proxy-fence-dropped",
        "Doubled",
        (Edit(D_FENCE, ""),),
        "the store reads through the async proxy what was written through the generic one",
        hazards=("missing-proxy-fence",),
    ),
    Mutant(
        "only-the-leader-fences",
        "Doubled",
        (Edit(D_FENCE, f"        if leads:\n    {D_FENCE}"),),
        "no fence lies between the other warp's writes and the store",
        hazards=("missing-proxy-fence",),
    ),
    Mutant(
        "barrier-before-the-store-dropped",
        "Doubled",
        (Edit(D_FENCE + D_BARRIER, D_FENCE),),
        "the leader stores before the other warp has written, and loads before it has read, or seen the last load land",
        hazards=(UNWRITTEN,),
        also=(*UNWRITTEN.split("|"), "overwrite-while-read", "mbarrier-phase-overrun"),
    ),
    Mutant(
        "read-wait-dropped",
        "Doubled",
        (Edit(D_READ_WAIT + D_BARRIER, D_BARRIER),),
        "the staging buffer is written while the last store reads it",
        hazards=("overwrite-while-copy-reads",),
        shows=WRONG,
    ),
    Mutant(
        "another-warp-waits",
        "Doubled",
        (Edit(D_READ_WAIT + D_BARRIER, f"        if not leads:\n{D_READ_WAIT}{D_BARRIER}"),),
        "bulk groups belong to the thread that committed them; this one has none",
        hazards=("overwrite-while-copy-reads",),
        shows=WRONG,
    ),
    Mutant(
        "barrier-after-the-read-wait-dropped",
        "Doubled",
        (Edit(D_READ_WAIT + D_BARRIER, D_READ_WAIT),),
        "the leader alone knows that the buffer has been read",
        hazards=("overwrite-while-copy-reads|data-race",),
        also=("overwrite-while-copy-reads", "data-race"),
    ),
    Mutant(
        "bulk-commit-dropped",
        "Doubled",
        (Edit("            cute.arch.cp_async_bulk_commit_group()\n", ""),),
        "the stores are in no group, so the wait has nothing to wait for",
        hazards=("overwrite-while-copy-reads", "exit-with-copy-in-flight"),
        shows=WRONG,
    ),
    Mutant(
        "last-wait-dropped",
        "Doubled",
        (Edit(D_LAST_WAIT, ""),),
        "the CTA may end while the last store reads its shared memory",
        hazards=("exit-with-copy-in-flight",),
    ),
    Mutant(
        "one-staging-buffer",
        "Doubled",
        (
            Edit("staging[at // COLUMNS, at % COLUMNS, group]", "staging[at // COLUMNS, at % COLUMNS, 0]"),
            Edit("s_out[None, group]", "s_out[None, 0]"),
        ),
        "two warp groups write one buffer, and nothing orders them",
        hazards=("data-race|overwrite-while-copy-reads",),
        also=UNWRITTEN.split("|"),
        shows=WRONG,
    ),
    Mutant(
        "barrier-of-one-warp",
        "Doubled",
        (Edit(D_FENCE + D_BARRIER, D_FENCE + D_BARRIER.replace("GROUP_THREADS", "32")),),
        "each warp is a barrier's worth by itself, and waits for nobody",
        hazards=("barrier-count|" + UNWRITTEN,),
        also=(*UNWRITTEN.split("|"), "overwrite-while-read", "mbarrier-phase-overrun"),
    ),
    Mutant(
        "barrier-of-both-groups",
        "Doubled",
        (Edit(D_FENCE + D_BARRIER, D_FENCE + D_BARRIER.replace("GROUP_THREADS", "2 * GROUP_THREADS")),),
        "each group waits at its own barrier for threads that never come there",
        shows=DEADLOCK,
    ),
    Mutant(
        "leader-alone-awaits-the-copy",
        "Doubled",
        (Edit(D_WAIT, f"        if leads:\n    {D_WAIT}"),),
        "the other warp reads the tile whether it has landed or not",
        hazards=(STALE,),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "phase-not-flipped",
        "Doubled",
        (Edit("        phase ^= 1\n", ""),),
        "the second wait is for a phase that is over",
        hazards=(f"{STALE}|{DEADLOCK}",),
        also=AFTER_STALE,
        shows=WRONG,
    ),
    Mutant(
        "barrier-initialised-for-every-tile",
        "Doubled",
        (
            Edit(
                "        if leads:\n            with cute.arch.elect_one():\n",
                "        if leads:\n            with cute.arch.elect_one():\n"
                "                cute.arch.mbarrier_init(full + group, 1)\n",
            ),
            Edit("        phase ^= 1\n", ""),
        ),
        "mbarrier.init on a valid object, without mbarrier.inval, while the other warp may still wait at it",
        hazards=("mbarrier-reinitialised",),
        also=(*AFTER_STALE, "mbarrier-init-not-visible", "mbarrier-not-initialised"),
    ),
    Mutant(
        "tile-visited-twice",
        "Doubled",
        (Edit(D_STEP, "cute.arch.grid_dim()[0] * GROUPS - 1,"),),
        "two CTAs store one tile, with nothing between them; that both store the same is luck",
        hazards=("data-race|overwrite-before-copy-waited",),
    ),
    Mutant(
        "tile-never-visited",
        "Doubled",
        (Edit(D_STEP, "cute.arch.grid_dim()[0] * GROUPS + 1,"),),
        "every fifth tile is left out",
        shows=WRONG,
    ),
    Mutant(
        "setmaxnreg-by-one-warp",
        "Doubled",
        (
            Edit(
                "    phase = cutlass.Int32(0)\n",
                "    phase = cutlass.Int32(0)\n    if leads:\n        cute.arch.setmaxregister_decrease(40)\n",
            ),
        ),
        "setmaxnreg is one instruction of a warp group's four warps",
        hazards=("setmaxnreg-not-whole-warp-group",),
    ),
)

R_COMMIT = "        cute.arch.cp_async_commit_group()\n        # A thread's wait"
R_WAIT = "        cute.arch.cp_async_wait_group(STAGES - 1)\n"
R_SYNC = "        cute.arch.sync_threads()\n"
R_LAST = f"        # The next copies land where this tile lies.\n{R_SYNC}"

REVERSED = (
    Mutant(
        "wait-group-too-lax",
        "Reversed",
        (Edit(R_WAIT, R_WAIT.replace("STAGES - 1", "STAGES")),),
        "the group that brings this tile may still be in flight",
        hazards=(STALE,),
        also=("exit-with-copy-in-flight", "overwrite-before-copy-waited"),
        shows=WRONG,
    ),
    Mutant(
        "wait-group-missing",
        "Reversed",
        (Edit(R_WAIT, ""),),
        "nobody waits for any copy",
        hazards=(STALE,),
        also=("exit-with-copy-in-flight", "overwrite-before-copy-waited"),
        shows=WRONG,
    ),
    Mutant(
        "commit-missing",
        "Reversed",
        (Edit(R_COMMIT, "        # A thread's wait"),),
        "copies that are in no group are not waited for",
        hazards=(STALE,),
        also=("exit-with-copy-in-flight", "overwrite-before-copy-waited"),
        shows=WRONG,
    ),
    Mutant(
        "sync-after-wait-dropped",
        "Reversed",
        (Edit(R_WAIT + R_SYNC, R_WAIT),),
        "a thread's wait says nothing of the copies of others, which it reads",
        hazards=(STALE,),
        also=("uninitialised-shared-memory", "overwrite-while-read", "data-race"),
    ),
    Mutant(
        "last-sync-dropped",
        "Reversed",
        (Edit(R_LAST, ""),),
        "a warp that is ahead copies the next tile over the one that the other still reads",
        hazards=("overwrite-while-read|data-race",),
        also=(STALE,),
    ),
    Mutant(
        "sync-of-a-warp-only",
        "Reversed",
        (Edit(R_LAST, R_LAST.replace("sync_threads", "sync_warp")),),
        "a warp that is ahead copies the next tile over the one that the other still reads",
        hazards=("overwrite-while-read|data-race",),
        also=(STALE,),
    ),
    Mutant(
        "stages-aliased",
        "Reversed",
        (Edit("ring[None, piece, tile % STAGES]", "ring[None, piece, 0]"),),
        "both stages are one: a copy lands on one that is still in flight, and half of the ring stays uninitialised",
        hazards=("overwrite-before-copy-waited", "uninitialised-shared-memory"),
        also=("overwrite-while-read", STALE),
        shows=WRONG,
    ),
    Mutant(
        "copy-past-the-end",
        "Reversed",
        (Edit("tile + STAGES - 1 < tiles", "tile + STAGES - 1 <= tiles"),),
        "the last copy reads beyond the source",
        hazards=("global-out-of-bounds",),
    ),
)

# Changes that leave the protocol whole, by the PTX ISA and what docs/emulator.md reads into it: not to be flagged.
EQUIVALENT = (
    Mutant(
        "expect-tx-after-the-copies",
        "v0",
        (Edit(f"{ELECTED_EXPECT}{COPY_A}{COPY_B}", f"{COPY_A}{COPY_B}{ELECTED_EXPECT}"),),
        "the arrival comes with the bytes' announcement, and no phase completes without it",
    ),
    Mutant(
        "sync-dropped",
        "v1",
        (Edit(f"{WAIT_GROUP}        cute.arch.sync_threads()\n", WAIT_GROUP),),
        "warp 0's wait_group covers the reads of its whole warp group, whose warps have all awaited the phase by then",
    ),
    Mutant(
        "every-thread-waits",
        "v2",
        (Edit(V2_WAIT, V2_WAIT.replace("tidx == 0", "tidx >= 0")),),
        "each thread may see for itself what thread 0 saw for all",
    ),
    Mutant(
        "last-sync-dropped",
        "v2",
        (
            Edit(
                "        # The tutorial's. No hazard needs it: warp 0 refills, and has itself waited for the readers "
                "(docs/v2.md).\n"
                "        cute.arch.sync_threads()\n",
                "",
            ),
        ),
        "warp 0 has waited for the group that read the stage, and nobody else writes it",
    ),
    Mutant(
        "init-sync-dropped",
        "v2",
        (Edit("        ring.init()\n    cute.arch.sync_threads()\n", "        ring.init()\n"),),
        "no warp but thread 0's uses the barriers",
    ),
    Mutant(
        "named-barrier-for-the-sync",
        "v2",
        (
            Edit(
                f"{V2_WAIT}        cute.arch.sync_threads()\n",
                f"{V2_WAIT}        cute.arch.barrier(barrier_id=3, number_of_threads=128)\n",
            ),
        ),
        "a named barrier for all threads is a sync of all threads",
    ),
    Mutant(
        "elected-release",
        "v3",
        (
            Edit("consumer_arrivals=WARP_GROUP)", "consumer_arrivals=4)"),
            Edit(V3_RELEASE, f"        with cute.arch.elect_one():\n    {V3_RELEASE}"),
        ),
        "wait_group is the whole warp's, so one lane may arrive for it",
    ),
    Mutant(
        "one-warp-releases-for-the-group",
        "v3",
        (
            Edit("consumer_arrivals=WARP_GROUP)", "consumer_arrivals=32)"),
            Edit(V3_RELEASE, f"        if cute.arch.warp_idx() == 0:\n    {V3_RELEASE}"),
        ),
        "a wait_group in one warp covers the reads of its warp group",
    ),
    Mutant(
        "two-fences",
        "v5",
        (Edit("    warpgroup.fence()\n", "    warpgroup.fence()\n    warpgroup.fence()\n"),),
        "a fence more orders nothing less",
    ),
    Mutant(
        "read-wait-for-all",
        "v6",
        (Edit("wait_group(0, read=True)", "wait_group(0)"),),
        "to wait for the whole copy is to wait for its reads too",
    ),
    Mutant(
        "relaxed-cluster-arrival",
        "ClusterSum",
        (Edit(f"{C_INIT}{C_SYNC}", f"{C_INIT}{C_SYNC.replace('arrive', 'arrive_relaxed')}"),),
        "fence.mbarrier_init.release.cluster before barrier.cluster.arrive.relaxed is the PTX ISA's own example",
    ),
)

MUTANTS = V0 + V1 + V2 + V3 + V4 + V5 + V6 + CLUSTER_SUM + DOUBLED + REVERSED


REPEATED = {
    "v0-phase-starts-at-1",
    "v0-expect-tx-missing",
    "v1-wait-group-1",
    "v1-wait-dropped",
    "v1-accumulate-from-the-start",
    "v2-phase-not-flipped",
    "v2-tx-bytes-of-two-stages",
    "v2-wgmma-fence-missing",
    "v2-init-fence-dropped",
    "v2-another-thread-waits",
    "v2-prologue-one-stage-short",
    "v3-consumer-wait-dropped",
    "v3-one-arrival-too-many-awaited",
    "v3-consumer-one-k-tile-too-many",
    "v3-full-barrier-for-two",
    "v4-expect-tx-dropped",
    "v4-expect-tx-by-all-lanes",
    "v4-one-group-never-releases",
    "v4-both-groups-same-rows",
    "v4-raster-groups-overlap",
    "v4-raster-tail-rows-off-by-one",
    "v5-last-wait-too-lax",
    "v5-wait-group-missing",
    "v5-fence-missing",
    "v5-one-k-tile-too-many",
    "v5-release-not-advanced",
    "v6-read-wait-one-group-lax",
    "v6-epi-full-wait-for-the-other-parity",
    "v6-epi-empty-for-a-warp",
    "v6-epi-full-arrival-dropped",
    "v6-last-wait-missing",
    "v6-every-quarter-to-the-first-columns",
}
"""Mutants much like one of another kernel. They run with --all-configs."""

CLEAN = {
    "v0": Setting("64x32x16", (104, 24, 56)),
    "v1": Setting("64x32x16", (104, 24, 56)),
    "v2": Setting("64x32x16,stages=3", (104, 24, 104)),
    "v3": Setting("64x32x16,stages=3", (104, 24, 104)),
    "v4": Setting("128x32x16,stages=2,raster=2", (248, 24, 72)),
    "v5": Setting("128x32x16,stages=2,raster=2", (248, 24, 72)),
    "v6": Setting("256x256x16,stages=2", (248, 248, 56)),
    "ClusterSum": None,
    "Doubled": None,
    "Reversed": None,
}
"""More k_tiles than the ring has stages and some more; edges ragged in M, N and K; several CTAs where that is cheap."""

CLEAN_SEEDS = 20

EVIDENCE_SEEDS = 20
"""Random schedules tried for a wrong result, where three schedules give the right one."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_seeded_bug_is_named(mutant, tmp_path, all_configs):
    if str(mutant) in REPEATED and not all_configs:
        pytest.skip("much like one of another kernel; --all-configs runs it")
    runner = Runner(tmp_path, mutant.kernel, mutant.setting or SETTINGS.get(mutant.kernel), mutant.edits)
    outcomes = {schedule: runner.run(schedule) for schedule in SCHEDULES}
    for seed in range(1, EVIDENCE_SEEDS if mutant.shows == WRONG else 0):
        if any(outcome.wrong for outcome in outcomes.values()):
            break
        outcomes[f"random {seed}"] = runner.run("random", seed)
    found = shortcomings(mutant, outcomes)
    assert not found, "\n".join([mutant.why, *found, *(str(outcome.report) for outcome in outcomes.values())])


@pytest.mark.parametrize("kernel", CLEAN)
def test_a_clean_kernel_is_not_flagged(kernel, tmp_path):
    runner = Runner(tmp_path, kernel, CLEAN[kernel])
    for schedule, seed in [("round_robin", 0), ("adversarial", 0), *(("random", seed) for seed in range(CLEAN_SEEDS))]:
        outcome = runner.run(schedule, seed)
        assert outcome.report.ok and not outcome.wrong, f"{schedule}, seed {seed}: {outcome.report}"


@pytest.mark.parametrize("change", EQUIVALENT, ids=str)
def test_a_change_that_breaks_nothing_is_not_flagged(change, tmp_path):
    runner = Runner(tmp_path, change.kernel, SETTINGS.get(change.kernel), change.edits)
    for schedule in SCHEDULES:
        outcome = runner.run(schedule)
        assert outcome.report.ok and not outcome.wrong, f"{change.why}\n{outcome.report}"


def test_the_mutants_are_many_and_named_once():
    names = [str(mutant) for mutant in (*MUTANTS, *EQUIVALENT)]
    assert len(set(names)) == len(names)
    assert set(names) >= REPEATED
    by_default = [mutant for mutant in MUTANTS if str(mutant) not in REPEATED]
    assert len(by_default) >= 40
    assert sum(mutant.kernel in ("v0", "v1", "v2", "ClusterSum", "Doubled", "Reversed") for mutant in by_default) >= 25
    for mutant in MUTANTS:
        assert mutant.hazards or mutant.shows, f"{mutant} has no expected outcome"
