"""The logical clock, by hand on round numbers, and what is computed and drawn from its events."""

from __future__ import annotations

import inspect
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cute_matmul.emulator.hazards import HazardEngine
from cute_matmul.emulator.latency import HOPPER, LatencyModel
from cute_matmul.emulator.matrix import Mma, Wgmma
from cute_matmul.emulator.timeline import (
    LOAD,
    SYNC,
    TENSOR,
    WAIT,
    Event,
    Timeline,
    Tracer,
    overlap,
    stacked_svg,
    tensor_gaps,
    tensor_share,
    union,
)

MEASURED = Path(__file__).parent / "data" / "tensor_cores_latency.json"
OP = Wgmma.parse("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16", (1, 1, 0, 0))
WARPS = np.arange(4)
STAGE_BYTES = 32768
ROUND = LatencyModel(
    issue=1.0,
    tensor_columns_per_cycle=OP.n / 100,  # 100 cycles an instruction
    tensor_drain=10.0,
    port_bytes_per_cycle=STAGE_BYTES / 200,  # 200 cycles a stage
    l2_latency=400.0,
    copy_latency=500.0,
    store_latency=400.0,
    mbarrier_wait=0.0,
    mbarrier_arrive=0.0,
    barrier=0.0,
    barrier_per_warp=0.0,
    remote_arrive=50.0,
    cluster_barrier=50.0,
)


def ring(model: LatencyModel, stages: int, k_tiles: int, k_blocks: int = 4) -> Tracer:
    """Drive a tracer the way V1 (one stage) and V2 (several) run: wait, compute, wait for the tensor unit, refill."""
    tracer = Tracer(1, 4, kernel="ring", model=model, describe=lambda src: (f"ring.py:{src}", ""))
    tracer.start(WARPS)
    bars = [65536 + 8 * stage for stage in range(stages)]
    filled = [0] * stages

    def load(stage):
        tracer.mbar_arrive([0], 1, [0], [bars[stage]], expect_tx=STAGE_BYTES)
        tracer.bulk_load([0], 2, [0], [stage * STAGE_BYTES], STAGE_BYTES, [0], [bars[stage]])
        tracer.mbar_complete([0], [bars[stage]], [filled[stage]])
        filled[stage] += 1

    if stages > 1:
        for stage in range(min(stages, k_tiles)):
            load(stage)
    used = [0] * stages
    for k_tile in range(k_tiles):
        stage = k_tile % stages
        if stages == 1:
            load(0)
        tracer.mbar_wait([0], 3, [0], [bars[stage]], [used[stage]])
        used[stage] += 1
        tracer.bar_sync(WARPS[None], 0)
        for _ in range(k_blocks):
            tracer.wgmma(WARPS[None], 4, np.array([[stage * STAGE_BYTES // 16]]), op=OP)
        tracer.wgmma_commit(WARPS)
        tracer.wgmma_wait(WARPS, 0, src=5)
        if stages > 1 and k_tile + stages < k_tiles:
            load(stage)
        tracer.bar_sync(WARPS[None], 0)
    tracer.warp_exit(WARPS, 6)
    return tracer


def times(timeline: Timeline, kind: str) -> list[tuple[float, float]]:
    return [(event.start, event.end) for event in timeline.events if event.kind == kind]


def test_one_stage_runs_in_series():
    timeline = ring(ROUND, 1, 3).timeline()
    # Load: 200 on the port, 500 latency. Compute: 4 instructions of 100, 10 to drain. Nothing overlaps.
    assert times(timeline, LOAD) == [(0, 700), (1110, 1810), (2220, 2920)]
    assert times(timeline, TENSOR) == [(700, 1100), (1810, 2210), (2920, 3320)]
    seen = overlap(timeline.events)
    assert (seen.load_cycles, seen.overlapped_cycles, seen.loads, seen.overlapped_loads) == (2100, 0, 3, 0)
    assert tensor_gaps(timeline.events) == [(1100, 1810), (2210, 2920)]
    assert tensor_share(timeline.events) == pytest.approx(1200 / 3330)


def test_two_stages_overlap():
    timeline = ring(ROUND, 2, 4).timeline()
    # Both stages load at once, sharing the port; the refill of stage 0 runs while stage 1 is computed.
    assert times(timeline, LOAD) == [(0, 700), (0, 900), (1110, 1810), (1520, 2220)]
    assert times(timeline, TENSOR) == [(700, 1100), (1110, 1510), (1810, 2210), (2220, 2620)]
    seen = overlap(timeline.events)
    assert (seen.loads, seen.overlapped_loads) == (4, 3)
    assert seen.load_cycles == 900 + (2220 - 1110)
    assert seen.overlapped_cycles == (900 - 700) + (1510 - 1110) + (2210 - 1810)
    assert 0 < seen.fraction < 1


def test_events_carry_stage_fill_line_and_wait():
    timeline = ring(ROUND, 2, 4).timeline(role=lambda agent: "load+mma")
    loads = [event for event in timeline.events if event.kind == LOAD]
    assert [(event.stage, event.use) for event in loads] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert {event.nbytes for event in loads} == {STAGE_BYTES} and {event.source for event in loads} == {"ring.py:2"}
    tensor = [event for event in timeline.events if event.kind == TENSOR]
    assert [(event.stage, event.use, event.count) for event in tensor] == [(0, 0, 4), (1, 0, 4), (0, 1, 4), (1, 1, 4)]
    waits = [event for event in timeline.events if event.kind == WAIT and event.what == "full"]
    assert [(event.agent, event.stage, event.start, event.end) for event in waits][:1] == [(0, 0, 0, 700)]
    assert {event.role for event in timeline.events} == {"load+mma"}
    # The three other warps are held by the block's barrier while warp 0 waits.
    held = [event for event in timeline.events if event.kind == SYNC and event.end == 700]
    assert [(event.agent, event.start) for event in held] == [(1, 0), (2, 0), (3, 0)]


def test_two_warp_groups_share_the_tensor_unit():
    tracer = Tracer(1, 8, model=ROUND)
    tracer.start(np.arange(8))
    both = np.arange(8).reshape(2, 4)
    tracer.issue(np.arange(4, 8), 30)
    tracer.wgmma(both, 0, np.zeros((2, 1), int), op=OP)
    tracer.wgmma_commit(np.arange(8))
    tracer.wgmma_wait(np.arange(8), 0)
    timeline = tracer.timeline(role=lambda agent: f"wg{agent // 4}")
    assert [(event.role, event.start, event.end) for event in timeline.events if event.kind == TENSOR] == [
        ("wg0", 0, 100),
        ("wg1", 100, 200),
    ]
    assert tracer.clock.tolist() == [110] * 4 + [210] * 4
    assert [label for label, kind, _ in timeline.rows() if kind == TENSOR] == ["tensor wg0", "tensor wg1"]


def test_wgmma_wait_leaves_pending_groups():
    tracer = Tracer(1, 4, model=ROUND)
    tracer.start(WARPS)
    for _ in range(3):
        tracer.wgmma(WARPS[None], 0, np.zeros((1, 1), int), op=OP)
        tracer.wgmma_commit(WARPS)
    tracer.wgmma_wait(WARPS, 1)
    assert tracer.clock.tolist() == [210.0] * 4
    tracer.wgmma_wait(WARPS, 0)
    assert tracer.clock.tolist() == [310.0] * 4


def test_remote_arrival_and_multicast_take_their_time():
    tracer = Tracer(2, 1, cluster_size=2, model=ROUND)
    tracer.start(np.arange(2))
    tracer.issue(np.array([1]), 7)
    tracer.mbar_arrive([1], 0, [0], [128])
    tracer.mbar_complete([0], [128], [0])
    tracer.mbar_wait([0], 0, [0], [128], [0])
    assert tracer.clock[0] == 57, "the peer's 7 cycles and 50 across the network"
    # One multicast copy: one row per destination, each landing on its own barrier.
    tracer.bulk_load([0, 0], 0, [0, 1], [0, 0], STAGE_BYTES, [0, 1], [64, 64])
    tracer.mbar_complete([0, 1], [64, 64], [0, 0])
    tracer.mbar_wait([0, 1], 0, [0, 1], [64, 64], [0, 0])
    assert tracer.clock.tolist() == [757, 757]
    assert [(event.cta, event.agent) for event in tracer.timeline().events if event.kind == LOAD] == [(0, 0), (1, 0)]


def test_a_barrier_that_passes_at_once_costs_no_wait():
    tracer = Tracer(1, 1, model=ROUND)
    tracer.start(np.arange(1))
    tracer.mbar_wait([0], 0, [0], [8], [-1])
    assert tracer.clock[0] == 0 and tracer.timeline().events == ()


def test_stores_waits_and_plain_memory():
    tracer = Tracer(1, 1, model=ROUND)
    tracer.start(np.arange(1))
    tracer.bulk_store([0], 0, [0], [0], STAGE_BYTES)
    tracer.bulk_commit([0], [0])
    tracer.bulk_wait([0], [0], 0, read=True)
    assert tracer.clock[0] == 200, "until the port has taken the source"
    tracer.bulk_store([0], 0, [0], [0], STAGE_BYTES)
    tracer.bulk_commit([0], [0])
    tracer.bulk_wait([0], [0], 0)
    assert tracer.clock[0] == 200 + 200 + 400
    tracer.memory(np.array([0]), "global", STAGE_BYTES)
    tracer.issue(np.array([0]), 1)
    assert tracer.clock[0] == 800 + 200 + 400 + 1, "a plain load holds the warp's next segment"
    tracer.cp_async([0], 0, np.zeros((1, 32)), 16)
    tracer.cp_async_commit([0])
    tracer.cp_async_wait([0], 0)
    assert tracer.clock[0] == pytest.approx(1401 + 512 / ROUND.port_bytes_per_cycle + 400)


def test_barriers_are_named_by_who_waits_for_them():
    tracer = Tracer(1, 2, model=ROUND)
    tracer.start(np.arange(2))
    tracer.bulk_load([0], 0, [0], [0], STAGE_BYTES, [0], [64])
    tracer.mbar_complete([0], [64], [0])
    tracer.mbar_wait([1], 0, [0], [64], [0])
    for barrier, waiter in ((72, 0), (80, 1)):
        tracer.mbar_arrive([1], 0, [0], [barrier])
        tracer.issue(np.array([1]), 9)
        tracer.mbar_arrive([1], 0, [0], [barrier])
        tracer.mbar_complete([0], [barrier], [0])
        tracer.clock[0] = tracer.clock[1] = 0
        tracer.mbar_wait([waiter], 0, [0], [barrier], [0])
    waits = [(event.agent, event.what, event.stage) for event in tracer.timeline().events if event.kind == WAIT]
    assert sorted(waits) == [(0, "empty", 0), (1, "full", 0), (1, "mbarrier", 0)]


def test_cluster_barrier_holds_everyone():
    tracer = Tracer(2, 1, cluster_size=2, model=ROUND)
    tracer.start(np.arange(2))
    tracer.issue(np.array([1]), 20)
    tracer.cluster_arrive(np.arange(2), 0)
    tracer.cluster_complete([0])
    tracer.cluster_wait(np.arange(2), 0)
    assert tracer.clock.tolist() == [70, 70]


def test_a_second_wave_starts_when_the_first_has_ended():
    tracer = Tracer(2, 1, model=ROUND)
    tracer.start(np.array([0]))
    tracer.issue(np.array([0]), 40)
    tracer.warp_exit(np.array([0]), 0)
    tracer.start(np.array([1]))
    assert tracer.clock.tolist() == [40, 40]


def test_hazard_events_that_take_no_time_are_accepted():
    tracer = Tracer(1, 1, model=ROUND)
    tracer.shared([0], 0, [[0]], 4, None, write=True)
    tracer.fence([0], 0, "proxy.async")
    tracer.registers([0], 0, reads=(1,), writes=())
    assert tracer.clock[0] == 0


def test_tracer_takes_every_event_of_the_hazard_engine():
    def accepted(method) -> set[str]:
        return set(inspect.signature(method).parameters)

    not_events = {"finish", "any_found", "bulk_store"}  # questions, and a store told in other terms
    for name, method in inspect.getmembers(HazardEngine, inspect.isfunction):
        if name.startswith("_") or name in not_events:
            continue
        own = inspect.signature(getattr(Tracer, name)).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
        assert open_ended or accepted(method) <= set(own), name


def test_record_limits_events_to_some_ctas():
    tracer = Tracer(2, 1, model=ROUND, record=[1])
    tracer.start(np.arange(2))
    tracer.bulk_load([0, 1], 0, [0, 1], [0, 0], STAGE_BYTES, [0, 1], [64, 64])
    assert tracer.timeline().ctas == (1,)


def test_hopper_constants_give_known_rates():
    per_cycle = OP.flops / HOPPER.wgmma(OP.n)
    assert per_cycle * 132 * 1830e6 == pytest.approx(989.4e12, rel=1e-3), "H100 SXM data sheet, dense f16"
    fp8 = Wgmma.parse("wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3", (1, 1))
    assert fp8.flops / HOPPER.wgmma(fp8.n) == 2 * per_cycle
    mma = Mma.parse("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
    four_cores = 4 * mma.flops / HOPPER.mma_sync(mma.n, mma.k_bytes)
    assert four_cores == pytest.approx(HOPPER.mma_sync_share * per_cycle)


def test_hopper_constants_follow_the_measurements():
    measured = {name: entry["median"] for name, entry in json.loads(MEASURED.read_text()).items()}
    clock = measured["clock"]  # cycles between two readings with nothing between
    for n in (8, 16, 32, 64, 96, 128, 192, 256):
        one, many = measured[f"wgmma_n{n}_x1"], measured[f"wgmma_n{n}_x32"]
        assert (many - one) / 31 == pytest.approx(HOPPER.wgmma(n), abs=0.5)
        if n >= 64:
            assert one - clock == HOPPER.wgmma(n) + HOPPER.tensor_drain
    assert measured["ld_global_l2_x16"] / 16 == pytest.approx(HOPPER.l2_latency, rel=0.02)
    assert measured["ld_shared_x16"] / 16 == pytest.approx(HOPPER.shared_latency, rel=0.05)
    wait = measured["mbarrier_wait_when_complete"] - clock
    assert wait == HOPPER.mbarrier_wait
    assert measured["mbarrier_arrive_and_wait"] - clock == HOPPER.mbarrier_arrive + wait
    assert measured["bulk_copy_128"] - clock - wait == pytest.approx(HOPPER.copy_latency, rel=0.02)
    for warps in (4, 8, 12):
        assert measured[f"bar_sync_{32 * warps}_x16"] / 16 == pytest.approx(HOPPER.bar_sync(warps), rel=0.05)
    one_way = measured["remote_arrive_round_trip_x8"] / 16
    assert one_way - wait == pytest.approx(HOPPER.remote_arrive, rel=0.02)
    assert measured["cluster_barrier_x16"] / 16 == pytest.approx(HOPPER.cluster_barrier, rel=0.02)
    alone = 7 * 32768 / (measured["bulk_copy_8x32768"] - measured["bulk_copy_32768"])
    assert alone > 2 * HOPPER.port_bytes_per_cycle, "one SM alone loads faster than its share when all load"


def test_union_joins_touching_intervals():
    assert union([(5, 6), (0, 2), (2, 3), (1, 1.5), (7, 7)]) == [(0, 3), (5, 6)]


# --- Drawings ----------------------------------------------------------------------------------------------


def test_gantt_shows_rows_and_facts():
    timeline = ring(ROUND, 2, 4).timeline()
    text = timeline.gantt(width=80)
    lines = text.splitlines()
    labels = ["load stage 0", "load stage 1", "tensor", "waits: full stage", "waits: tensor"]
    assert [line.split("|")[0].strip() for line in lines[:5]] == labels
    assert {len(line) for line in lines[:5]} == {80}
    assert "cycles" in text and "3 of 4 loads" in text
    tensor_row = lines[2].split("|")[1]
    assert tensor_row[0] == " " and "█" in tensor_row, "idle while the first stage loads, busy later"
    assert Timeline(()).gantt() == "CTA 0: no events"


def bars(svg: str, kind: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    return [
        (float(node.get("x")), float(node.get("x")) + float(node.get("width")))
        for node in root.iter(f"{space}rect")
        if node.get("class") == kind and node.find(f"{space}title") is not None
    ]


def test_stacked_svg_has_one_axis_and_no_references():
    v1, v2 = ring(ROUND, 1, 4).timeline(), ring(ROUND, 2, 4).timeline()
    svg = stacked_svg([("V1 <serial>", v1), ("V2", v2)])
    assert len(bars(svg, "load")) == 8 and len(bars(svg, "tensor")) == 8
    # The same cycle is at the same x in both panels: every first load starts at the axis' zero.
    assert bars(svg, "load")[0][0] == bars(svg, "load")[4][0]
    scale = {round((hi - lo) / cycles, 6) for (lo, hi), cycles in zip(bars(svg, "tensor"), [400.0] * 8, strict=True)}
    assert max(scale) - min(scale) < 1e-4
    assert bars(stacked_svg([("V2", v2)], kinds=("load",)), "tensor") == []
    assert "prefers-color-scheme: dark" in svg and "V1 &lt;serial&gt;" in svg
    assert not re.search(r"(href|url\(|@import|<script)", svg)
    with pytest.raises(ValueError, match="panels"):
        stacked_svg([])


def test_svg_crops_and_takes_odd_labels():
    event = Event(LOAD, 0, 0, 0.0, 100.0, stage=0, use=3, what="a & b <c>", source='x"y.py:1')
    svg = Timeline((event,)).svg(title="t")
    ElementTree.fromstring(svg)
    cropped = stacked_svg([("t", Timeline((event, replace(event, start=500.0, end=600.0))))], until=200.0)
    assert len(bars(cropped, "load")) == 1


def test_chrome_trace_is_loadable_and_in_microseconds(tmp_path):
    timeline = ring(replace(ROUND, clock_mhz=100.0), 2, 4).timeline(role=lambda agent: "load+mma")
    path = tmp_path / "trace.json"
    timeline.save_chrome_trace(str(path))
    trace = json.loads(path.read_text())["traceEvents"]
    spans = [entry for entry in trace if entry["ph"] == "X"]
    names = {entry["args"]["name"] for entry in trace if entry["ph"] == "M" and entry["name"] == "thread_name"}
    assert names == {"load stage 0", "load stage 1", "tensor", "load+mma waits: full stage", "load+mma waits: tensor"}
    first = min((entry for entry in spans if entry["cat"] == TENSOR), key=lambda entry: entry["ts"])
    assert (first["ts"], first["dur"]) == (7.0, 4.0) and first["name"] == "wgmma[0] #0"
    assert first["args"]["source"] == "ring.py:4"


def test_copies_of_one_fill_are_one_bar():
    tracer = Tracer(1, 1, model=ROUND)
    tracer.start(np.arange(1))
    tracer.bulk_load([0, 0], 0, [0, 0], [0, 16384], STAGE_BYTES // 2, [0, 0], [64, 64])
    timeline = tracer.timeline()
    assert overlap(timeline.events).loads == 2
    ((label, kind, events),) = timeline.rows()
    assert (label, kind) == ("load stage 0", LOAD)
    assert [(event.start, event.end, event.count, event.nbytes) for event in events] == [(0, 700, 2, STAGE_BYTES)]


def test_a_read_wait_does_not_stand_for_completion():
    tracer = Tracer(1, 1, model=ROUND)
    tracer.start(np.arange(1))
    tracer.bulk_store([0], 0, [0], [0], STAGE_BYTES)
    tracer.bulk_commit([0], [0])
    tracer.bulk_wait([0], [0], 0, read=True)
    assert tracer.clock[0] == 200
    tracer.bulk_wait([0], [0], 0)
    assert tracer.clock[0] == 200 + 400
