"""Barriers, asynchronous copies, schedules, deadlocks: hand-written PTX against what the PTX ISA promises."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from emulator_ptx import kernel_text, launch, run
from test_emulator_tensormap import make_map

from cute_matmul.emulator.api import run_launch
from cute_matmul.emulator.report import Suppression

SCHEDULES = ["round_robin", "random", "adversarial"]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

BAR = "\t.shared .align 8 .b8 bar[64];\n"
INIT = """
	mov.b32 %r1, bar;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra READY;
	mbarrier.init.shared.b64 [%r1], {count};
	fence.mbarrier_init.release.cluster;
READY:
	bar.sync 0;
"""


def store(pointer: int, value: str) -> str:
    return f"\tmad.wide.u32 %d20, %r0, 4, %d{pointer};\n\tst.global.b32 [%d20], {value};\n"


def wait(parity: str, label: str, barrier: str = "[%r1]") -> str:
    return f"{label}:\n\tmbarrier.try_wait.parity.shared.b64 %p7, {barrier}, {parity};\n\t@!%p7 bra {label};\n"


# --- mbarrier ----------------------------------------------------------------------------------------------


def test_parity_of_a_fresh_barrier():
    """The phase before the first counts as complete: parity 1 passes, parity 0 does not (test_wait does not block)."""
    out = np.zeros(32, np.uint32)
    body = INIT.format(count=1) + """
	mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 1;
	mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0;
	selp.b32 %r2, 1, 0, %p1;
	selp.b32 %r3, 2, 0, %p2;
	add.u32 %r4, %r2, %r3;
""" + store(0, "%r4")  # fmt: skip
    assert run(body, {"out": out}, smem=BAR).ok
    assert out.tolist() == [1] * 32


@every_schedule
def test_arrivals_complete_phases_in_turn(schedule):
    """64 threads arrive once a phase, three phases; the counter that thread 0 keeps is seen by all after each."""
    out = np.zeros(64, np.uint32)
    smem = BAR + "\t.shared .align 4 .b8 cell[4];\n"
    body = INIT.format(count=64) + """
	mov.b32 %r2, cell;
	mov.b32 %r3, 0;
	mov.b32 %r8, 0;
LOOP:
	@%p0 bra ARRIVE;
	add.u32 %r4, %r3, 10;
	st.shared.b32 [%r2], %r4;
ARRIVE:
	mbarrier.arrive.shared.b64 %d10, [%r1];
STATE:
	mbarrier.try_wait.shared.b64 %p3, [%r1], %d10;
	@!%p3 bra STATE;
	ld.shared.b32 %r5, [%r2];
	mad.lo.u32 %r8, %r8, 100, %r5;
	bar.sync 0;
	add.u32 %r3, %r3, 1;
	setp.lt.u32 %p4, %r3, 3;
	@%p4 bra LOOP;
""" + store(0, "%r8")  # fmt: skip
    report = run(body, {"out": out}, smem=smem, threads=64, options={"schedule": schedule})
    assert report.ok, str(report)
    assert set(out.tolist()) == {101112}


@every_schedule
@pytest.mark.parametrize("expect_first", [True, False])
def test_transaction_bytes_and_arrivals_both_complete_a_phase(schedule, expect_first):
    """A bulk copy may land before its bytes are expected: the phase ends when both counts are zero."""
    data = np.arange(256, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    smem = BAR + "\t.shared .align 128 .b8 tile[1024];\n"
    expect = "\tmbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;\n"
    copy = "\tcp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0], 1024, [%r1];\n"
    body = (
        INIT.format(count=1)
        + "\tmov.b32 %r2, tile;\n\t@%p0 bra WAITING;\n"
        + (expect + copy if expect_first else copy + expect)
        + "WAITING:\n"
        + wait("0", "W")
        + "\tmad.lo.u32 %r3, %r0, 32, %r2;\n\tld.shared.b32 %r4, [%r3];\n"
        + store(1, "%r4")
    )
    report = run(body, {"data": data, "out": out}, smem=smem, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out.tolist() == [8 * i for i in range(32)]
    assert report.bytes["bulk load"] == 1024


def test_wrong_byte_counts_deadlock_with_the_pending_bytes_in_the_table():
    data, out = np.arange(256, dtype=np.uint32), np.zeros(32, np.uint32)
    smem = BAR + "\t.shared .align 128 .b8 tile[1024];\n"
    body = (
        INIT.format(count=1)
        + "\tmov.b32 %r2, tile;\n\t@%p0 bra WAITING;\n"
        + "\tmbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1040;\n"
        + "\tcp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0], 1024, [%r1];\n"
        + "WAITING:\n"
        + wait("0", "W")
    )
    for schedule in SCHEDULES:
        report = run(body, {"data": data, "out": out}, smem=smem, options={"schedule": schedule})
        assert not report.ok and report.deadlock.reason == "deadlock"
        (row,) = report.deadlock.rows
        assert (row["waits_for"], row["warp"], row["cta"], row["phase"]) == ("mbarrier", 0, 0, 0)
        assert (row["pending_arrivals"], row["pending_bytes"]) == (0, 16)
        assert "try_wait" in row["instruction"] and row["line"].startswith("PTX line")
        assert "bytes due" in str(report)


def test_too_many_arrivals_and_uninitialised_barriers_are_reported():
    out = np.zeros(32, np.uint32)
    body = INIT.format(count=31) + "\tmbarrier.arrive.shared.b64 _, [%r1];\n"
    report = run(body, {"out": out}, smem=BAR)
    assert not report.ok and any(h.kind.startswith("mbarrier") for h in report.hazards)
    body = "\tmov.b32 %r1, bar;\n" + wait("0", "W")
    report = run(body, {"out": out}, smem=BAR)
    assert [h.kind for h in report.hazards] == ["mbarrier-not-initialised"]


def test_arrive_with_count_and_without_completing_lanes():
    """One thread arrives for four; expect_tx and complete_tx without a copy balance each other."""
    out = np.zeros(32, np.uint32)
    body = INIT.format(count=4) + """
	@%p0 bra WAITING;
	mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 64;
	mbarrier.arrive.shared::cta.b64 %d10, [%r1], 4;
	mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], 64;
WAITING:
""" + wait("0", "W") + store(0, "1")  # fmt: skip
    report = run(body, {"out": out}, smem=BAR)
    assert report.deadlock is None
    assert out.tolist() == [1] * 32


# --- Named barriers ----------------------------------------------------------------------------------------


@every_schedule
def test_named_barriers_hand_over_between_warps(schedule):
    """Warp 0 produces (bar.arrive on 1, bar.sync on 2), warp 1 consumes: the counts are of both warps."""
    out = np.zeros(64, np.uint32)
    smem = "\t.shared .align 16 .b8 cell[128];\n"
    body = """
	mov.b32 %r1, cell;
	and.b32 %r2, %r0, 31;
	mad.lo.u32 %r3, %r2, 4, %r1;
	setp.ge.u32 %p0, %r0, 32;
	mov.b32 %r4, 0;
	mov.b32 %r6, 0;
	@%p0 bra CONSUMER;
PRODUCE:
	mad.lo.u32 %r5, %r4, 1000, %r2;
	st.shared.b32 [%r3], %r5;
	bar.arrive 1, 64;
	bar.sync 2, 64;
	add.u32 %r4, %r4, 1;
	setp.lt.u32 %p1, %r4, 3;
	@%p1 bra PRODUCE;
	bra DONE;
CONSUMER:
	bar.sync 1, 64;
	ld.shared.b32 %r5, [%r3];
	add.u32 %r6, %r6, %r5;
	bar.arrive 2, 64;
	add.u32 %r4, %r4, 1;
	setp.lt.u32 %p1, %r4, 3;
	@%p1 bra CONSUMER;
DONE:
""" + store(0, "%r6")
    report = run(body, {"out": out}, smem=smem, threads=64, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out.tolist() == [0] * 32 + [3000 + 3 * i for i in range(32)]


@every_schedule
@pytest.mark.parametrize(("count", "found"), [(32, {"data-race"}), (128, set())])
def test_a_barrier_of_one_warp_orders_nothing_between_warps(schedule: str, count: int, found: set):
    """Four warps each complete a barrier for 32 threads by themselves: the race of warp 0's store stays a race."""
    out = np.zeros(128, np.uint32)
    smem = "\t.shared .align 4 .b8 cell[4];\n"
    body = f"""
	mov.b32 %r1, cell;
	setp.eq.u32 %p0, %r0, 0;
	@%p0 st.shared.b32 [%r1], 1;
	bar.sync 1, {count};
	ld.shared.b32 %r2, [%r1];
""" + store(0, "%r2")
    report = run(body, {"out": out}, smem=smem, threads=128, options={"schedule": schedule})
    assert report.deadlock is None and {h.kind for h in report.hazards} - {"uninitialised-shared-memory"} == found


def test_barrier_reductions():
    out = np.zeros(96, np.uint32)
    body = """
	setp.lt.u32 %p1, %r0, 40;
	bar.red.popc.u32 %r2, 0, %p1;
	bar.red.or.pred %p2, 0, %p1;
	bar.red.and.pred %p3, 0, %p1;
	selp.b32 %r3, 1000, 0, %p2;
	selp.b32 %r4, 5000, 0, %p3;
	add.u32 %r5, %r2, %r3;
	add.u32 %r5, %r5, %r4;
""" + store(0, "%r5")
    assert run(body, {"out": out}, threads=96).ok
    assert out.tolist() == [1040] * 96


def test_a_missing_warp_at_a_barrier_is_a_deadlock_with_its_table():
    out = np.zeros(64, np.uint32)
    body = """
	setp.lt.u32 %p0, %r0, 32;
	@%p0 bra HERE;
	bar.sync 3, 64;
HERE:
	bar.sync 4, 64;
"""
    report = run(body, {"out": out}, threads=64)
    rows = {row["warp"]: row for row in report.deadlock.rows}
    assert (rows[0]["barrier"], rows[1]["barrier"]) == (4, 3)
    assert rows[0]["pending_arrivals"] == rows[1]["pending_arrivals"] == 32
    parsed = json.loads(report.to_json())
    assert parsed["ok"] is False and len(parsed["deadlock"]["rows"]) == 2 and report.exit_status == 1


def test_the_step_limit_stops_a_spinning_kernel_with_the_same_table():
    flag, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    body = "SPIN:\n\tld.volatile.global.b32 %r1, [%d0];\n\tsetp.eq.u32 %p1, %r1, 0;\n\t@%p1 bra SPIN;\n"
    report = run(body, {"flag": flag, "out": out}, options={"max_steps": 500})
    assert report.deadlock.reason == "step limit" and report.steps == 501
    assert report.deadlock.rows[0]["waits_for"] == "nothing (running)"


@every_schedule
def test_a_warp_that_spins_on_global_memory_does_not_starve_the_one_that_answers(schedule):
    flag, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    body = """
	setp.lt.u32 %p0, %r0, 32;
	@%p0 bra ANSWER;
SPIN:
	ld.acquire.gpu.global.b32 %r1, [%d0];
	setp.eq.u32 %p1, %r1, 0;
	@%p1 bra SPIN;
	setp.ne.u32 %p2, %r0, 32;
	@%p2 bra DONE;
	st.global.b32 [%d1], %r1;
	bra DONE;
ANSWER:
	setp.ne.u32 %p2, %r0, 0;
	@%p2 bra DONE;
	mov.b32 %r3, 77;
	st.release.gpu.global.b32 [%d0], %r3;
DONE:
"""
    report = run(body, {"flag": flag, "out": out}, threads=64, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out[0] == 77


# --- Clusters ----------------------------------------------------------------------------------------------


@every_schedule
def test_remote_arrivals_and_distributed_shared_memory(schedule):
    """Each CTA of a cluster of 4 writes into the next one's shared memory and arrives on its barrier."""
    out = np.zeros(8, np.uint32)
    smem = BAR + "\t.shared .align 4 .b8 cell[4];\n"
    body = (
        INIT.format(count=1)
        + """
	barrier.cluster.arrive;
	barrier.cluster.wait;
	mov.b32 %r2, cell;
	mov.u32 %r3, %cluster_ctarank;
	add.u32 %r4, %r3, 1;
	and.b32 %r4, %r4, 3;
	mapa.shared::cluster.u32 %r5, %r2, %r4;
	mapa.shared::cluster.u32 %r6, %r1, %r4;
	mov.u32 %r7, %ctaid.x;
	@%p0 bra WAITING;
	add.u32 %r8, %r7, 100;
	st.shared::cluster.b32 [%r5], %r8;
	mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
WAITING:
"""
        + wait("0", "W")
        + """
	@%p0 bra FINISH;
	ld.shared.b32 %r9, [%r2];
	mad.wide.u32 %d10, %r7, 4, %d0;
	st.global.b32 [%d10], %r9;
FINISH:
	barrier.cluster.arrive;
	barrier.cluster.wait;
"""
    )
    report = run(body, {"out": out}, smem=smem, grid=8, cluster=4, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out.tolist() == [103, 100, 101, 102, 107, 104, 105, 106]


@every_schedule
def test_multicast_bulk_copy_signals_each_destination(schedule):
    data, out = np.arange(64, dtype=np.uint32), np.zeros(4, np.uint32)
    smem = BAR + "\t.shared .align 128 .b8 tile[256];\n"
    body = (
        INIT.format(count=1)
        + """
	mov.b32 %r2, tile;
	mov.u32 %r3, %cluster_ctarank;
	@%p0 bra EXPECTED;
	mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;
EXPECTED:
	barrier.cluster.arrive;
	barrier.cluster.wait;
	setp.ne.u32 %p1, %r3, 0;
	or.pred %p2, %p0, %p1;
	@%p2 bra WAITING;
	mov.b16 %h1, 5;
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r2], [%d0], 256, [%r1], %h1;
WAITING:
	setp.eq.u32 %p3, %r3, 1;
	setp.eq.u32 %p4, %r3, 3;
	or.pred %p5, %p3, %p4;
	mov.b32 %r5, 1;
	@%p5 bra FINISH;
"""
        + wait("0", "W")
        + """
	ld.shared.b32 %r5, [%r2+252];
FINISH:
	@%p0 bra LEAVE;
	mad.wide.u32 %d10, %r3, 4, %d1;
	st.global.b32 [%d10], %r5;
LEAVE:
"""
    )
    report = run(body, {"data": data, "out": out}, smem=smem, grid=4, cluster=4, options={"schedule": schedule})
    kinds = {h.kind for h in report.hazards}
    assert report.deadlock is None and kinds <= {"mbarrier-tx-bytes"}, str(report)  # CTAs 1 and 3 never get theirs
    assert out.tolist() == [63, 1, 63, 1]
    assert report.bytes["bulk load"] == 512


@every_schedule
def test_async_stores_to_a_peer_count_their_bytes(schedule):
    out = np.zeros(64, np.uint32)
    smem = BAR + "\t.shared .align 16 .b8 tile[256];\n"
    body = (
        INIT.format(count=1)
        + """
	mov.b32 %r2, tile;
	mov.u32 %r3, %cluster_ctarank;
	xor.b32 %r4, %r3, 1;
	@%p0 bra EXPECTED;
	mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;
EXPECTED:
	barrier.cluster.arrive;
	barrier.cluster.wait;
	mapa.shared::cluster.u32 %r5, %r2, %r4;
	mapa.shared::cluster.u32 %r6, %r1, %r4;
	mad.lo.u32 %r7, %r0, 8, %r5;
	mad.lo.u32 %r8, %r3, 100, %r0;
	st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r7], {%r8, %r3}, [%r6];
"""
        + wait("0", "W")
        + """
	mad.lo.u32 %r9, %r0, 8, %r2;
	ld.shared.v2.b32 {%r10, %r11}, [%r9];
	mad.lo.u32 %r12, %r11, 1000, %r10;
	mad.lo.u32 %r13, %r3, 32, %r0;
	mad.wide.u32 %d10, %r13, 4, %d0;
	st.global.b32 [%d10], %r12;
	barrier.cluster.arrive;
	barrier.cluster.wait;
"""
    )
    report = run(body, {"out": out}, smem=smem, grid=2, cluster=2, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out.tolist() == [1100 + i for i in range(32)] + list(range(32))


# --- cp.async and bulk groups ------------------------------------------------------------------------------


@every_schedule
@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_with_zero_fill(size, schedule):
    """Lanes read fewer bytes than they copy: the rest is zero; a lane with ignore-src reads none."""
    data = np.arange(1, 32 * size + 1, dtype=np.uint16).astype(np.uint8)
    out = np.zeros(32 * size, np.uint8)
    smem = "\t.shared .align 16 .b8 tile[512];\n"
    cache = "cg" if size == 16 else "ca"
    body = f"""
	mov.b32 %r1, tile;
	mad.lo.u32 %r2, %r0, {size}, %r1;
	mad.wide.u32 %d10, %r0, {size}, %d0;
	mad.wide.u32 %d11, %r0, {size}, %d1;
	and.b32 %r3, %r0, 3;
	min.u32 %r3, %r3, {size};
	cp.async.{cache}.shared.global [%r2], [%d10], {size}, %r3;
	cp.async.commit_group;
	cp.async.wait_group 0;
	ld.shared.b8 %h1, [%r2];
	ld.shared.b8 %h2, [%r2+2];
	ld.shared.b8 %h3, [%r2+{size - 1}];
	st.global.b8 [%d11], %h1;
	st.global.b8 [%d11+2], %h2;
	st.global.b8 [%d11+{size - 1}], %h3;
"""
    report = run(body, {"data": data, "out": out}, smem=smem, options={"schedule": schedule})
    assert report.ok, str(report)
    for lane in range(32):
        read = lane % 4
        row, source = out[lane * size : (lane + 1) * size], data[lane * size : (lane + 1) * size]
        assert row[0] == (source[0] if read > 0 else 0)
        assert row[2] == (source[2] if read > 2 else 0)


def test_adversarial_copies_land_at_their_wait_and_no_earlier():
    """What a wait_group leaves pending is not there yet under the adversarial schedule, and is a hazard under all."""
    data, out = np.arange(1, 65, dtype=np.uint32), np.zeros(32, np.uint32)
    smem = "\t.shared .align 16 .b8 tile[256];\n"
    body = """
	mov.b32 %r1, tile;
	mad.lo.u32 %r2, %r0, 4, %r1;
	mad.wide.u32 %d10, %r0, 4, %d0;
	st.shared.b32 [%r2], 0;
	st.shared.b32 [%r2+128], 0;
	cp.async.ca.shared.global [%r2], [%d10], 4;
	cp.async.commit_group;
	cp.async.ca.shared.global [%r2+128], [%d10+128], 4;
	cp.async.commit_group;
	cp.async.wait_group 1;
	bra NEXT;
NEXT:
	ld.shared.b32 %r3, [%r2];
	ld.shared.b32 %r4, [%r2+128];
	add.u32 %r5, %r3, %r4;
""" + store(1, "%r5")
    late = run(body, {"data": data, "out": out}, smem=smem, options={"schedule": "adversarial"})
    assert out.tolist() == data[:32].tolist()
    soon = run(body, {"data": data, "out": out}, smem=smem)
    assert out.tolist() == (data[:32] + data[32:]).tolist()
    for report in (late, soon):
        assert [h.kind for h in report.hazards] == ["read-before-copy-waited", "exit-with-copy-in-flight"]


@every_schedule
def test_bulk_stores_and_reductions_complete_by_group(schedule):
    out, total = np.zeros(64, np.uint32), np.full(64, 5, np.uint32)
    smem = "\t.shared .align 128 .b8 tile[256];\n"
    body = """
	mov.b32 %r1, tile;
	mad.lo.u32 %r2, %r0, 8, %r1;
	mul.lo.u32 %r3, %r0, 2;
	add.u32 %r4, %r3, 1;
	st.shared.v2.b32 [%r2], {%r3, %r4};
	fence.proxy.async.shared::cta;
	bar.sync 0;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra DONE;
	cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 256;
	cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d1], [%r1], 256;
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group 0;
DONE:
"""
    report = run(body, {"out": out, "total": total}, smem=smem, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out.tolist() == list(range(64)) and total.tolist() == [5 + i for i in range(64)]


def test_stores_that_nobody_waited_for_still_land_but_are_a_hazard():
    out = np.zeros(4, np.uint32)
    smem = "\t.shared .align 128 .b8 tile[16];\n"
    body = """
	mov.b32 %r1, tile;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra DONE;
	st.shared.v4.b32 [%r1], {1, 2, 3, 4};
	fence.proxy.async.shared::cta;
	cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 16;
	cp.async.bulk.commit_group;
DONE:
"""
    report = run(body, {"out": out}, smem=smem)
    assert out.tolist() == [1, 2, 3, 4]
    assert [h.kind for h in report.hazards] == ["exit-with-copy-in-flight"]


# --- Schedules and reports ---------------------------------------------------------------------------------


def racy_counter() -> tuple[str, str]:
    """128 threads increment a shared counter without atomics, one step a node: the result depends on the schedule."""
    smem = "\t.shared .align 4 .b8 cell[4];\n"
    body = """
	mov.b32 %r1, cell;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra READY;
	st.shared.b32 [%r1], 0;
READY:
	bar.sync 0;
	ld.shared.b32 %r2, [%r1];
	bra NEXT;
NEXT:
	add.u32 %r2, %r2, 1;
	st.shared.b32 [%r1], %r2;
	bar.sync 0;
	ld.shared.b32 %r3, [%r1];
""" + store(0, "%r3")
    return body, smem


def test_the_same_seed_gives_the_same_run_and_other_seeds_other_runs():
    body, smem = racy_counter()
    results = []
    for seed in (0, 1, 2, 3, 4, 5, 0, 1, 2):
        out = np.zeros(128, np.uint32)
        report = run(body, {"out": out}, smem=smem, threads=128, options={"schedule": "random", "seed": seed})
        assert {h.kind for h in report.hazards} == {"data-race"}
        results.append((out.tolist(), report.steps))
    assert results[:3] == results[6:]
    assert len({steps for _, steps in results[:6]}) > 1 or len({tuple(r) for r, _ in results[:6]}) > 1


@every_schedule
def test_a_race_is_reported_under_every_schedule_and_can_be_suppressed_with_a_reason(schedule):
    body, smem = racy_counter()
    out = np.zeros(128, np.uint32)
    options = {"schedule": schedule}
    report = run(body, {"out": out}, smem=smem, threads=128, options=options)
    assert {h.kind for h in report.hazards} == {"data-race"} and not report.ok
    options["suppress"] = [Suppression("data-race", "shared", "a test of suppression")]
    report = run(body, {"out": out}, smem=smem, threads=128, options=options)
    assert report.ok and report.suppressed and "a test of suppression" in str(report)
    with pytest.raises(ValueError, match="reason"):
        Suppression("data-race", "shared", " ")
    report = run(body, {"out": out}, smem=smem, threads=128, options={"schedule": schedule, "check": False})
    assert report.ok and not report.checked


def test_unknown_options_are_refused():
    text = kernel_text("", 1)
    arrays = {"out": np.zeros(1, np.uint32)}
    with pytest.raises(ValueError, match="schedule 'fifo'"):
        run_launch(launch(text, arrays), schedule="fifo")
    with pytest.raises(ValueError, match="arithmetic"):
        run_launch(launch(text, arrays), arithmetic="exact")
    with pytest.raises(TypeError, match="seed"):
        run_launch(launch(text, arrays), seed="0")
    with pytest.raises(TypeError, match="suppress"):
        run_launch(launch(text, arrays), suppress=["data-race"])


def test_many_ctas_run_in_waves_and_see_their_own_ids():
    grid = 300
    out = np.zeros(grid, np.uint32)
    body = """
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra DONE;
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %nctaid.x;
	mad.lo.u32 %r3, %r1, 1000, %r2;
	mad.wide.u32 %d10, %r1, 4, %d0;
	st.global.b32 [%d10], %r3;
DONE:
"""
    report = run(body, {"out": out}, grid=grid)
    assert report.ok
    assert out.tolist() == [1000 * i + grid for i in range(grid)]
    assert report.counts["other"]["st.global"] == grid and report.warps["other"] == grid


def test_setmaxnreg_by_half_a_warp_group_is_reported():
    out = np.zeros(128, np.uint32)
    body = """
	setp.ge.u32 %p0, %r0, 64;
	@%p0 bra DONE;
	setmaxnreg.dec.sync.aligned.u32 40;
DONE:
"""
    report = run(body, {"out": out}, threads=128)
    assert [h.kind for h in report.hazards] == ["setmaxnreg-not-whole-warp-group"]


def test_trap_stops_with_its_place():
    report = run("\tsetp.eq.u32 %p0, %r0, 3;\n\t@%p0 trap;", {"out": np.zeros(1, np.uint32)})
    assert report.stopped and [h.kind for h in report.hazards] == ["trap"]


def test_partial_warp_groups_at_a_wgmma_are_reported():
    """Only three of the four warps reach the wgmma: the others wait for it, and the table says for which."""
    out = np.zeros(128, np.uint32)
    smem = "\t.shared .align 1024 .b8 tile[4096];\n"
    accumulators = ", ".join(f"%f{i}" for i in range(10, 14))
    body = f"""
	setp.ge.u32 %p0, %r0, 96;
	@%p0 bra DONE;
	mov.b64 %d10, 0x4000004000010040;
	setp.ne.u32 %p1, %r0, %r0;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{{accumulators}}}, %d10, %d10, %p1, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
DONE:
"""
    report = run(body, {"out": out}, smem=smem, threads=128)
    assert report.deadlock is not None
    assert "wgmma-not-whole-warp-group" in {h.kind for h in report.hazards}
    assert {row["barrier"] for row in report.deadlock.rows} == {"warps 3 of its warp group"}


WGMMA_TILE = "\t.shared .align 1024 .b8 tile[8192];\n"


WGMMA = """
	mov.b32 %r1, tile;
	mad.lo.u32 %r2, %r0, 64, %r1;
	mov.b32 %r3, 0;
	st.shared.v4.b32 [%r2], {{%r3, %r3, %r3, %r3}};
	st.shared.v4.b32 [%r2+16], {{%r3, %r3, %r3, %r3}};
	st.shared.v4.b32 [%r2+32], {{%r3, %r3, %r3, %r3}};
	st.shared.v4.b32 [%r2+48], {{%r3, %r3, %r3, %r3}};
	fence.proxy.async.shared::cta;
	bar.sync 0;
	mov.b64 %d10, 0x4000004000010040;
	setp.ne.u32 %p1, %r0, %r0;
	setp.lt.u32 %p2, %r0, 64;
	mov.f32 %f20, 0f3F800000;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f10, %f11, %f12, %f13}}, %d10, %d10, %p1, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	{between}
	wgmma.wait_group.sync.aligned 0;
	mad.wide.u32 %d11, %r0, 4, %d0;
	st.global.b32 [%d11], {result};
"""


@pytest.mark.parametrize(
    ("between", "result", "found"),
    [
        ("", "%f10", set()),
        ("mov.b32 %f20, %f10;", "%f20", set()),  # a rename
        ("@%p2 mov.b32 %f20, %f10;", "%f20", {"accumulator-in-flight"}),  # a guarded move reads
        ("add.f32 %f20, %f10, %f20;", "%f20", {"accumulator-in-flight"}),
        ("add.f32 %f10, %f20, %f20;", "%f10", {"accumulator-in-flight"}),
    ],
)
def test_accumulators_in_flight_may_be_renamed_and_nothing_else(between: str, result: str, found: set):
    out = np.zeros(128, np.float32)
    report = run(WGMMA.format(between=between, result=result), {"out": out}, smem=WGMMA_TILE, threads=128)
    assert {h.kind for h in report.hazards} == found, str(report)


def test_dynamic_shared_memory_starts_at_its_own_alignment():
    out = np.zeros(32, np.uint32)
    module = ".extern .shared .align 1024 .b8 dynamic[];\n"
    smem = "\t.shared .align 16 .b8 fixed[16];\n"
    body = "\tmov.b32 %r1, fixed;\n\tmov.b32 %r2, dynamic;\n\tsub.u32 %r3, %r2, %r1;\n" + store(0, "%r3")
    assert run(body, {"out": out}, smem=smem, module=module, smem_bytes=64).ok
    assert out.tolist() == [1024] * 32


@every_schedule
@pytest.mark.parametrize(("sem", "found"), [("release", set()), ("relaxed", {"data-race"})])
def test_a_relaxed_arrival_hands_nothing_on(schedule: str, sem: str, found: set):
    out = np.zeros(64, np.uint32)
    smem = BAR + "\t.shared .align 4 .b8 cell[4];\n"
    body = INIT.format(count=1) + f"""
	mov.b32 %r2, cell;
	setp.ge.u32 %p1, %r0, 32;
	@%p1 bra READER;
	@%p0 bra DONE;
	st.shared.b32 [%r2], 7;
	mbarrier.arrive.{sem}.cta.shared::cta.b64 _, [%r1];
	bra DONE;
READER:
""" + wait("0", "W") + "\tld.shared.b32 %r3, [%r2];\n" + store(0, "%r3") + "DONE:\n"  # fmt: skip
    report = run(body, {"out": out}, smem=smem, threads=64, options={"schedule": schedule})
    assert {h.kind for h in report.hazards} == found and report.deadlock is None, str(report)


@every_schedule
@pytest.mark.parametrize(("sem", "found"), [("", set()), (".relaxed", {"data-race"})])
def test_a_relaxed_cluster_arrival_hands_nothing_on(schedule: str, sem: str, found: set):
    out = np.zeros(2, np.uint32)
    smem = "\t.shared .align 4 .b8 cell[4];\n"
    body = f"""
	mov.b32 %r1, cell;
	mov.u32 %r2, %cluster_ctarank;
	xor.b32 %r3, %r2, 1;
	mapa.shared::cluster.u32 %r4, %r1, %r3;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra ARRIVE;
	st.shared.b32 [%r1], %r2;
ARRIVE:
	barrier.cluster.arrive{sem}.aligned;
	barrier.cluster.wait.acquire.aligned;
	@%p0 bra LEAVE;
	ld.shared::cluster.b32 %r5, [%r4];
	mad.wide.u32 %d10, %r2, 4, %d0;
	st.global.b32 [%d10], %r5;
LEAVE:
	barrier.cluster.arrive.aligned;
	barrier.cluster.wait.aligned;
"""
    report = run(body, {"out": out}, smem=smem, grid=2, cluster=2, options={"schedule": schedule})
    assert {h.kind for h in report.hazards} == found, str(report)


@pytest.mark.parametrize(
    ("fence", "found"), [("", set()), (".shared::cta", set()), (".global", {"missing-proxy-fence"})]
)
def test_a_proxy_fence_covers_the_space_it_names(fence: str, found: set):
    out = np.zeros(64, np.uint32)
    smem = "\t.shared .align 128 .b8 tile[256];\n"
    body = f"""
	mov.b32 %r1, tile;
	mad.lo.u32 %r2, %r0, 8, %r1;
	st.shared.v2.b32 [%r2], {{%r0, %r0}};
	fence.proxy.async{fence};
	bar.sync 0;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra DONE;
	cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 256;
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group 0;
DONE:
"""
    assert {h.kind for h in run(body, {"out": out}, smem=smem).hazards} == found


@every_schedule
def test_cp_async_wait_all_waits_for_what_was_not_committed(schedule: str):
    data, out = np.arange(1, 33, dtype=np.uint32), np.zeros(32, np.uint32)
    smem = "\t.shared .align 16 .b8 tile[128];\n"
    body = """
	mov.b32 %r1, tile;
	mad.lo.u32 %r2, %r0, 4, %r1;
	mad.wide.u32 %d10, %r0, 4, %d0;
	setp.lt.u32 %p1, %r0, 7;
	cp.async.ca.shared.global [%r2], [%d10], 4, %p1;
	cp.async.wait_all;
	ld.shared.b32 %r3, [%r2];
""" + store(1, "%r3")
    report = run(body, {"data": data, "out": out}, smem=smem, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out.tolist() == [0] * 7 + data[7:].tolist()  # lanes with the predicate ignore their source


DROPPED = (
    INIT.format(count=2)
    + """
	@%p0 bra FIRST;
	mbarrier.arrive_drop.shared.b64 %d10, [%r1];
	mbarrier.arrive.shared.b64 %d10, [%r1];
FIRST:
"""
    + wait("0", "W")
    + "\t@%p0 bra SECOND;\n\tmbarrier.arrive.shared.b64 %d10, [%r1];\nSECOND:\n"
    + wait("1", "V")
)


def test_arrive_drop_lowers_the_count_of_later_phases():
    out = np.zeros(32, np.uint32)
    report = run(DROPPED + store(0, "1"), {"out": out}, smem=BAR)
    assert report.ok, str(report)
    assert out.tolist() == [1] * 32


@every_schedule
def test_warps_that_have_exited_hold_up_no_barrier(schedule: str):
    """Warp 1 of both CTAs leaves at once: a cluster barrier does not wait for it."""
    out = np.zeros(2, np.uint32)
    body = """
	setp.ge.u32 %p0, %r0, 32;
	@%p0 bra LEAVE;
	barrier.cluster.arrive;
	barrier.cluster.wait;
	setp.ne.u32 %p1, %r0, 0;
	@%p1 bra LEAVE;
	mov.u32 %r1, %ctaid.x;
	mad.wide.u32 %d10, %r1, 4, %d0;
	st.global.b32 [%d10], 1;
LEAVE:
"""
    report = run(body, {"out": out}, threads=64, grid=2, cluster=2, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out.tolist() == [1, 1]


@pytest.mark.parametrize(("count", "found"), [(0, ["mbarrier-count"]), (2**20 - 1, []), (2**20, ["mbarrier-count"])])
def test_counts_that_mbarrier_init_takes(count: int, found: list):
    body = f"""
	mov.b32 %r1, bar;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra DONE;
	mbarrier.init.shared.b64 [%r1], {count};
DONE:
"""
    assert [h.kind for h in run(body, {"out": np.zeros(1, np.uint32)}, smem=BAR).hazards] == found


@pytest.mark.parametrize(("number", "found"), [(15, []), (16, ["barrier-number"])])
def test_named_barriers_are_0_to_15(number: int, found: list):
    for text in (f"\tbar.sync {number}, 32;\n", f"\tmov.b32 %r1, {number};\n\tbar.sync %r1, 32;\n"):
        assert [h.kind for h in run(text, {"out": np.zeros(1, np.uint32)}).hazards] == found


@every_schedule
def test_the_exit_of_the_last_missing_warp_completes_a_barrier(schedule: str):
    """Warp 1 spends some steps before it leaves, while warp 0 already waits for all warps that are still there."""
    out = np.zeros(64, np.uint32)
    body = """
	setp.lt.u32 %p0, %r0, 32;
	@%p0 bra BARRIER;
	mov.b32 %r1, 0;
LOOP:
	add.u32 %r1, %r1, 1;
	setp.lt.u32 %p1, %r1, 100;
	@%p1 bra LOOP;
	exit;
BARRIER:
	bar.sync 0;
""" + store(0, "1")
    report = run(body, {"out": out}, threads=64, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out.tolist() == [1] * 32 + [0] * 32


@every_schedule
@pytest.mark.parametrize(("noinc", "count"), [("", 1), (".noinc", 33)])
def test_cp_async_arrivals_count_with_noinc_only(schedule: str, noinc: str, count: int):
    """Warp 0 copies and lets its copies arrive, then thread 0 arrives; warp 1 reads what came."""
    data, out = np.arange(1, 33, dtype=np.uint32), np.zeros(64, np.uint32)
    smem = BAR + "\t.shared .align 16 .b8 tile[128];\n"
    body = (
        INIT.format(count=count)
        + f"""
	mov.b32 %r2, tile;
	and.b32 %r3, %r0, 31;
	mad.lo.u32 %r4, %r3, 4, %r2;
	setp.ge.u32 %p1, %r0, 32;
	@%p1 bra READER;
	mad.wide.u32 %d10, %r0, 4, %d0;
	cp.async.ca.shared.global [%r4], [%d10], 4;
	cp.async.mbarrier.arrive{noinc}.shared.b64 [%r1];
	@%p0 bra READER;
	mbarrier.arrive.shared.b64 %d11, [%r1];
READER:
"""
        + wait("0", "W")
        + "\tld.shared.b32 %r5, [%r4];\n"
        + store(1, "%r5")
    )
    report = run(body, {"data": data, "out": out}, smem=smem, threads=64, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out.tolist() == 2 * data.tolist()


def test_tensor_stores_of_one_warp_from_different_places_are_several():
    """Lanes 0 and 1 store tiles to the same box: two copies, of which either may win. Equal operands are one copy."""
    for step, found in ((0, set()), (128, {"overwrite-before-copy-waited"})):
        raw, out = np.zeros(256, np.uint8), np.zeros(64, np.uint8)
        start = -raw.ctypes.data % 64
        descriptor = raw[start : start + 128]
        place = np.zeros(128, np.uint8)
        target = place[-place.ctypes.data % 16 :][:64]
        tensor_map = make_map(
            dtype="uint8",
            itemsize=1,
            address=target.ctypes.data,
            extents=(16, 4),
            strides=(1, 16),
            box=(16, 4),
            swizzle=0,
        )
        descriptor[:] = np.frombuffer(tensor_map.encode(), np.uint8)
        smem = "\t.shared .align 128 .b8 tile[256];\n"
        body = f"""
	mov.b32 %r1, tile;
	mad.lo.u32 %r2, %r0, 8, %r1;
	st.shared.v2.b32 [%r2], {{%r0, %r0}};
	fence.proxy.async.shared::cta;
	bar.sync 0;
	setp.gt.u32 %p0, %r0, 1;
	@%p0 bra DONE;
	mad.lo.u32 %r3, %r0, {step}, %r1;
	mov.b32 %r4, 0;
	cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d0, {{%r4, %r4}}], [%r3];
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group 0;
DONE:
"""
        report = run(body, {"descriptor": descriptor, "target": target, "out": out}, smem=smem)
        assert {h.kind for h in report.hazards} == found, str(report)
        assert target.view(np.uint32).tolist() == [i // 2 + step // 8 * (step > 0) for i in range(16)] or found


def test_a_run_that_stopped_is_not_ok_however_much_is_suppressed():
    out = np.zeros(8, np.uint32)
    accepted = [Suppression("global-out-of-bounds", "st.global", "a test of suppression")]
    body = "\tmad.wide.u32 %d10, %r0, 4, %d0;\n\tst.global.b32 [%d10], %r0;"
    report = run(body, {"out": out}, options={"suppress": accepted})
    assert report.suppressed and not report.hazards
    assert report.stopped and not report.ok and report.exit_status == 1


def test_bytes_due_when_the_step_limit_ends_a_run_are_no_hazard():
    flag = np.zeros(1, np.uint32)
    body = (
        INIT.format(count=2)
        + """
	@%p0 bra SPIN;
	mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;
SPIN:
	ld.volatile.global.b32 %r2, [%d0];
	setp.eq.u32 %p1, %r2, 0;
	@%p1 bra SPIN;
"""
    )
    report = run(body, {"flag": flag}, smem=BAR, options={"max_steps": 500})
    assert report.deadlock.reason == "step limit" and report.hazards == []


@pytest.mark.parametrize("cooperative", [True, False])
def test_the_ctas_of_a_cooperative_launch_are_all_resident(cooperative: bool):
    """200 CTAs wait for each other: more than run at once, unless the launch asks for it."""
    count = np.zeros(1, np.uint32)
    body = """
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra DONE;
	red.release.gpu.global.add.u32 [%d0], 1;
SPIN:
	ld.acquire.gpu.global.b32 %r1, [%d0];
	setp.lt.u32 %p1, %r1, 200;
	@%p1 bra SPIN;
DONE:
"""
    once = dataclasses.replace(launch(kernel_text(body, 1), {"count": count}, grid=200), cooperative=cooperative)
    report = run_launch(once, max_steps=5000)
    assert report.ok == cooperative and count[0] == (200 if cooperative else 132)


@pytest.mark.parametrize(
    ("count", "found"),
    [(24, []), (256, []), (16, ["setmaxnreg-count"]), (28, ["setmaxnreg-count"]), (264, ["setmaxnreg-count"])],
)
def test_counts_that_setmaxnreg_takes(count: int, found: list):
    body = f"\tsetmaxnreg.inc.sync.aligned.u32 {count};"
    report = run(body, {"out": np.zeros(1, np.uint32)}, threads=128)
    assert [h.kind for h in report.hazards] == found


def late_wgmma(after_commit: str, result: str) -> str:
    """Two tiles of ones; groups 0 and 1 multiply the first and the second tile with the first: 16 in every element."""
    fill = "\n".join(f"\tst.shared.v4.b32 [%r2+{16 * i}], {{%r3, %r3, %r3, %r3}};" for i in range(8))
    mma = "\twgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{{d}}}, {a}, %d10, %p1, 1, 1, 0, 0;\n"
    mma += "\twgmma.commit_group.sync.aligned;\n"
    first = mma.format(d="%f10, %f11, %f12, %f13", a="%d10")
    second = mma.format(d="%f14, %f15, %f16, %f17", a="%d11")
    return (
        INIT.format(count=1)
        + "\tmov.b32 %r4, tile;\n\tmad.lo.u32 %r2, %r0, 128, %r4;\n\tmov.b32 %r3, 0x3C003C00;\n"
        + fill
        + """
	fence.proxy.async.shared::cta;
	bar.sync 0;
	shr.u32 %r5, %r4, 4;
	cvt.u64.u32 %d9, %r5;
	or.b64 %d10, %d9, 0x4000004000010000;
	add.u64 %d11, %d10, 512;
	setp.ne.u32 %p1, %r0, %r0;
	wgmma.fence.sync.aligned;
"""
        + first
        + second
        + after_commit
        + "\twgmma.wait_group.sync.aligned 0;\n"
        + store(0, result)
    )


LATE_SMEM = BAR + "\t.shared .align 1024 .b8 tile[16384];\n"


@pytest.mark.parametrize(("schedule", "expected"), [("round_robin", 16.0), ("adversarial", 0.0)])
def test_adversarial_wgmmas_read_at_their_wait_and_no_earlier(schedule: str, expected: float):
    """wait_group 1 leaves group 1 in flight: under the adversarial schedule it reads what is stored after that."""
    out = np.zeros(128, np.float32)
    zero = "\n".join(f"\tst.shared.v4.b32 [%r6+{16 * i}], {{%r7, %r7, %r7, %r7}};" for i in range(4))
    overwrite = (
        "\twgmma.wait_group.sync.aligned 1;\n\tmad.lo.u32 %r6, %r0, 64, %r4;\n\tadd.u32 %r6, %r6, 8192;\n"
        f"\tmov.b32 %r7, 0;\n{zero}\n\tbar.sync 0;\n"
    )
    body = late_wgmma(overwrite, "%f14")
    report = run(body, {"out": out}, smem=LATE_SMEM, threads=128, options={"schedule": schedule})
    assert {h.kind for h in report.hazards} == {"overwrite-while-wgmma-reads"}
    assert out.tolist() == [expected] * 128


@pytest.mark.parametrize(("schedule", "expected"), [("round_robin", 16.0), ("adversarial", 0.0)])
def test_adversarial_copies_issued_after_a_wgmma_land_before_it_reads(schedule: str, expected: float):
    out, data = np.zeros(128, np.float32), np.zeros(8192, np.uint8)
    refill = """
	@%p0 bra ISSUED;
	mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 8192;
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%d1], 8192, [%r1];
ISSUED:
"""
    body = late_wgmma(refill, "%f10") + wait("0", "W")
    report = run(body, {"out": out, "data": data}, smem=LATE_SMEM, threads=128, options={"schedule": schedule})
    assert {h.kind for h in report.hazards} == {"overwrite-while-wgmma-reads"}, str(report)
    assert out.tolist() == [expected] * 128


def test_the_adversarial_schedule_runs_the_last_warp_first():
    count, out = np.zeros(1, np.uint32), np.zeros(128, np.uint32)
    body = "\tatom.global.add.u32 %r1, [%d0], 1;\n" + store(1, "%r1")
    assert run(body, {"count": count, "out": out}, threads=128, options={"schedule": "adversarial"}).ok
    assert out.reshape(4, 32).min(axis=1).tolist() == [96, 64, 32, 0]
    orders = set()
    for seed in range(1, 9):
        count[:] = 0
        run(body, {"count": count, "out": out}, threads=128, options={"schedule": "adversarial", "seed": seed})
        orders.add(tuple(out.reshape(4, 32).min(axis=1).tolist()))
    assert len(orders) > 3


def test_a_try_wait_may_give_up_under_the_random_schedule_only():
    """One try_wait without a loop, on a phase that warp 0 completes in the end."""
    seen = {}
    for schedule in ("round_robin", "adversarial", "random"):
        for seed in range(40 if schedule == "random" else 1):
            out = np.zeros(64, np.uint32)
            body = INIT.format(count=1) + """
	setp.ge.u32 %p1, %r0, 32;
	@%p1 bra WAITER;
	@%p0 bra DONE;
	mbarrier.arrive.shared.b64 _, [%r1];
	bra DONE;
WAITER:
	mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
	selp.b32 %r2, 1, 2, %p2;
""" + store(0, "%r2") + "DONE:\n"  # fmt: skip
            report = run(body, {"out": out}, smem=BAR, threads=64, options={"schedule": schedule, "seed": seed})
            assert report.ok, str(report)
            seen.setdefault(schedule, set()).add(int(out[32]))
    assert seen == {"round_robin": {1}, "adversarial": {1}, "random": {1, 2}}


@pytest.mark.parametrize("form", ["shared::cluster", "generic"])
def test_getctarank_names_the_cta_of_an_address(form: str):
    out = np.zeros(4, np.uint32)
    body = """
	mov.b32 %r1, bar;
	mov.u32 %r2, %cluster_ctarank;
	mapa.shared::cluster.u32 %r3, %r1, 2;
	getctarank.shared::cluster.u32 %r4, %r3;
	getctarank.shared::cluster.u32 %r5, %r1;
"""
    if form == "generic":
        body = """
	mov.b32 %r1, bar;
	mov.u32 %r2, %cluster_ctarank;
	cvt.u64.u32 %d5, %r1;
	cvta.shared.u64 %d6, %d5;
	mapa.u64 %d7, %d6, 2;
	getctarank.u64 %r4, %d7;
	getctarank.u64 %r5, %d6;
"""
    body += """
	mad.lo.u32 %r4, %r4, 100, %r5;
	mad.wide.u32 %d10, %r2, 4, %d0;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra DONE;
	st.global.b32 [%d10], %r4;
DONE:
"""
    assert run(body, {"out": out}, smem=BAR, grid=4, cluster=4).ok
    assert out.tolist() == [200, 201, 202, 203]


def test_barrier_reductions_of_a_warp_that_is_not_full():
    out = np.zeros(40, np.uint32)
    body = """
	setp.lt.u32 %p1, %r0, 100;
	bar.red.and.pred %p2, 0, %p1;
	bar.red.popc.u32 %r1, 0, !%p1;
	selp.b32 %r2, 1000, 0, %p2;
	add.u32 %r2, %r2, %r1;
""" + store(0, "%r2")
    assert run(body, {"out": out}, threads=40).ok
    assert out.tolist() == [1000] * 40


def test_a_wait_for_fewer_groups_than_there_are_lands_nothing():
    data, out = np.arange(1, 33, dtype=np.uint32), np.zeros(32, np.uint32)
    smem = "\t.shared .align 16 .b8 tile[256];\n"
    body = """
	mov.b32 %r1, tile;
	mad.lo.u32 %r2, %r0, 4, %r1;
	mad.wide.u32 %d10, %r0, 4, %d0;
	st.shared.b32 [%r2], 0;
	cp.async.ca.shared.global [%r2], [%d10], 4;
	cp.async.commit_group;
	cp.async.ca.shared.global [%r2+128], [%d10], 4;
	cp.async.commit_group;
	cp.async.wait_group 3;
	bra NEXT;
NEXT:
	ld.shared.b32 %r3, [%r2];
""" + store(1, "%r3")
    report = run(body, {"data": data, "out": out}, smem=smem, options={"schedule": "adversarial"})
    assert "read-before-copy-waited" in {h.kind for h in report.hazards}
    assert out.tolist() == [0] * 32


def test_a_barrier_may_be_invalidated_after_arrive_drop():
    body = DROPPED + "\tbar.sync 0;\n\t@%p0 bra DONE;\n\tmbarrier.inval.shared.b64 [%r1];\nDONE:\n"
    report = run(body, {"out": np.zeros(1, np.uint32)}, smem=BAR)
    assert report.ok, str(report)


def test_isspacep_tells_the_own_ctas_memory_from_a_peers():
    out = np.zeros(2, np.uint32)
    body = """
	mov.b32 %r1, bar;
	cvt.u64.u32 %d5, %r1;
	cvta.shared.u64 %d6, %d5;
	mov.u32 %r2, %cluster_ctarank;
	xor.b32 %r3, %r2, 1;
	mapa.u64 %d7, %d6, %r3;
	isspacep.shared::cta %p1, %d7;
	isspacep.shared::cluster %p2, %d7;
	isspacep.shared::cta %p3, %d6;
	selp.b32 %r4, 1, 0, %p1;
	selp.b32 %r5, 10, 0, %p2;
	selp.b32 %r6, 100, 0, %p3;
	add.u32 %r4, %r4, %r5;
	add.u32 %r4, %r4, %r6;
	mad.wide.u32 %d10, %r2, 4, %d0;
	setp.ne.u32 %p0, %r0, 0;
	@%p0 bra DONE;
	st.global.b32 [%d10], %r4;
DONE:
"""
    assert run(body, {"out": out}, smem=BAR, grid=2, cluster=2).ok
    assert out.tolist() == [110, 110]


@every_schedule
def test_a_multicast_reaches_its_own_cluster(schedule: str):
    data, out = np.arange(64, dtype=np.uint32), np.zeros(4, np.uint32)
    smem = BAR + "\t.shared .align 128 .b8 tile[256];\n"
    body = (
        INIT.format(count=1)
        + """
	mov.b32 %r2, tile;
	mov.u32 %r3, %cluster_ctarank;
	mov.u32 %r4, %ctaid.x;
	@%p0 bra EXPECTED;
	mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;
EXPECTED:
	barrier.cluster.arrive;
	barrier.cluster.wait;
	setp.ne.u32 %p1, %r3, 0;
	or.pred %p2, %p0, %p1;
	@%p2 bra WAITING;
	mov.b16 %h1, 3;
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r2], [%d0], 256, [%r1], %h1;
WAITING:
"""
        + wait("0", "W")
        + """
	ld.shared.b32 %r5, [%r2+252];
	@%p0 bra LEAVE;
	mad.wide.u32 %d10, %r4, 4, %d1;
	st.global.b32 [%d10], %r5;
LEAVE:
	barrier.cluster.arrive;
	barrier.cluster.wait;
"""
    )
    report = run(body, {"data": data, "out": out}, smem=smem, grid=4, cluster=2, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out.tolist() == [63] * 4


@every_schedule
def test_polling_a_bounded_number_of_times_is_no_deadlock(schedule: str):
    out = np.zeros(32, np.uint32)
    body = INIT.format(count=1) + """
	mov.b32 %r2, 0;
POLL:
	mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0;
	@%p1 bra DONE;
	add.u32 %r2, %r2, 1;
	setp.lt.u32 %p2, %r2, 3;
	@%p2 bra POLL;
DONE:
""" + store(0, "%r2")  # fmt: skip
    report = run(body, {"out": out}, smem=BAR, options={"schedule": schedule})
    assert report.ok, str(report)
    assert out.tolist() == [3] * 32
