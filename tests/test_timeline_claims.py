"""What the rungs' pages say of their pictures, computed from the events that the pictures are drawn from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from cute_matmul.emulator.timeline import LOAD, STORE, TENSOR, WAIT, Event, Timeline, overlap, tensor_gaps, tensor_share
from docs import refresh

TWO_STAGES = refresh.Panel("v5", (128, 256, 768), "128x256x64,stages=2")


def panel(figure: str, variant: str) -> Timeline:
    """One variant's timeline of a figure, as it is drawn."""
    (found,) = [p for p in refresh.FIGURES[figure].panels if p.variant == variant]
    return refresh.executed(found)[1]


def kinds(timeline: Timeline, kind: str, what: str | None = None) -> list[Event]:
    return [e for e in timeline.events if e.cta == 0 and e.kind == kind and what in (None, e.what)]


def groups(timeline: Timeline) -> dict[str, list[tuple[tuple[int, int], float, float]]]:
    """For each consumer its WGMMA groups in order: (the fill of a stage that it multiplies, first start, last end)."""
    found: dict[str, dict[tuple[int, int], tuple[float, float]]] = {}
    for event in kinds(timeline, TENSOR):
        fills = found.setdefault(event.role, {})
        start, end = fills.get((event.stage, event.use), (event.start, event.end))
        fills[event.stage, event.use] = (min(start, event.start), max(end, event.end))
    return {
        role: sorted(((fill, start, end) for fill, (start, end) in fills.items()), key=lambda g: g[1])
        for role, fills in found.items()
    }


def landed(timeline: Timeline) -> dict[tuple[int, int], float]:
    """When the last byte of each fill of a stage was there."""
    times: dict[tuple[int, int], float] = {}
    for load in kinds(timeline, LOAD):
        key = load.stage, load.use
        times[key] = max(times.get(key, 0.0), load.end)
    return times


def idle_between_groups(timeline: Timeline) -> dict[str, float]:
    """For each consumer, the tensor unit's idle time between its groups as a share of its loop's length.

    The idle time is the part of the gap, from a group's retirement to the same consumer's next group, in which the
    unit works for nobody else either, and in which the next group's bytes have landed: nothing but the consumer's
    own doing keeps the unit waiting.
    """
    gaps, bytes_there = tensor_gaps(timeline.events), landed(timeline)
    shares = {}
    for role, found in groups(timeline).items():
        idle = 0.0
        for (_, _, retired), (fill, started, _) in itertools.pairwise(found):
            begins = max(retired, bytes_there[fill])
            idle += sum(max(0.0, min(end, started) - max(start, begins)) for start, end in gaps)
        shares[role] = idle / (found[-1][2] - found[0][1])
    return shares


def idle_share(timeline: Timeline) -> float:
    """The tensor unit's idle share between the CTA's first and last tensor work, for whatever reason."""
    work = kinds(timeline, TENSOR)
    return sum(end - start for start, end in tensor_gaps(timeline.events)) / (work[-1].end - work[0].start)


def total(events: Iterable[Event]) -> float:
    return sum(event.duration for event in events)


def test_idle_time_between_groups_is_there_in_v3_and_v4_and_gone_in_v5():
    v3 = idle_between_groups(panel("v3", "v3"))
    v4 = idle_between_groups(panel("v5", "v4"))
    v5 = idle_between_groups(panel("v5", "v5"))
    assert (len(v3), len(v4), len(v5)) == (1, 2, 2)
    assert min(v3.values()) > 0.15
    assert min(v4.values()) > 0.08
    assert max(v5.values()) < 0.005
    assert len(tensor_gaps(panel("v5", "v4").events)) == len(groups(panel("v5", "v4"))["consumer 0"]) - 1


def test_with_the_default_tile_v4_covers_most_of_it():
    v3, v4 = panel("v4", "v3"), panel("v4", "v4")
    assert len(tensor_gaps(v3.events)) == len(groups(v3)["consumer"]) - 1 == 11
    assert 0.2 < idle_share(v3) < 0.3
    assert 0 < idle_share(v4) < 0.05
    # One pause in three shows, where the unrolled loop begins again; the others lie under an instruction of 128 cycles.
    assert [round(end - start) for start, end in tensor_gaps(v4.events)] == [121] * 3
    assert idle_share(panel("v5", "v4")) > 2 * idle_share(v4)  # 256x128: shorter instructions cover less


def test_v0_and_v1_take_turns_and_v1_idles_more():
    v0, v1 = panel("v0-v1", "v0"), panel("v0-v1", "v1")
    assert overlap(v0.events).overlapped_loads == overlap(v1.events).overlapped_loads == 0
    assert total(kinds(v1, TENSOR)) < total(kinds(v0, TENSOR)) and v1.end < v0.end
    assert tensor_share(v1.events) < tensor_share(v0.events)
    loading = [total(kinds(t, LOAD)) for t in (v0, v1)]
    assert loading[0] == pytest.approx(loading[1], rel=0.01)


def test_v2_overlaps_and_still_stops_between_tiles():
    v1, v2 = panel("v2", "v1"), panel("v2", "v2")
    assert v2.end < 2 / 3 * v1.end
    assert overlap(v2.events).overlapped_loads == overlap(v2.events).loads - 2  # all but the first A and B
    (found,) = groups_of_one_warp_group(v2)
    there = landed(v2)
    assert len(tensor_gaps(v2.events)) == len(found) - 1
    for (_, _, retired), (fill, started, _) in itertools.pairwise(found):
        assert started - retired > 1.5 * (there[fill] - retired)
    four = panel("v3", "v2")
    (found,) = groups_of_one_warp_group(four)
    assert all(landed(four)[fill] < retired for (_, _, retired), (fill, _, _) in itertools.pairwise(found))
    means = []
    for timeline in (v2, four):
        gaps = [end - start for start, end in tensor_gaps(timeline.events)]
        means.append(sum(gaps) / len(gaps))
    assert means[1] > 0.9 * means[0]


def groups_of_one_warp_group(timeline: Timeline) -> list[list[tuple[tuple[int, int], float, float]]]:
    """Its groups, whatever the role is called of the warp that stands for the warp group."""
    return list(groups(timeline).values())


def test_v3_drains_though_nothing_is_late():
    v2, v3 = panel("v3", "v2"), panel("v3", "v3")
    (found,) = groups_of_one_warp_group(v3)
    there = landed(v3)
    for (_, _, retired), (fill, started, _) in itertools.pairwise(found):
        assert there[fill] < retired < started
    # The consumer waits for data once; before every next group it has waited for the last one to retire.
    assert {(e.stage, e.use) for e in kinds(v3, WAIT, "full") if e.duration > 20} == {(0, None)}
    held = [e for e in kinds(v3, WAIT, "wgmma.wait") if e.agent == 0]
    assert len(held) == len(found)
    for (_, _, retired), wait, following in zip(found, held, found[1:], strict=False):
        assert retired < wait.end < following[1]
    gaps = [end - start for start, end in tensor_gaps(v3.events)]
    assert 100 < sorted(gaps)[len(gaps) // 2] < 200
    assert 0.4 < sum(gaps) / sum(end - start for start, end in tensor_gaps(v2.events)) < 0.6
    assert 0.2 < idle_share(v3) < 0.3
    assert v3.end < v2.end
    # Stages land faster than V3 uses them, and would not land as fast as the products alone could.
    landings = sorted(set(there.values()))
    period = (found[-1][2] - found[0][2]) / (len(found) - 1)
    assert [round(after - before) for before, after in itertools.pairwise(landings)] == [662] * (len(landings) - 1)
    assert {round(retired - started) for _, started, retired in found} == {512} and 512 < 662 < period


def test_v5_waits_for_data_where_v4_waited_for_products():
    v4, v5 = panel("v5", "v4"), panel("v5", "v5")
    assert tensor_gaps(v5.events) == []
    first = {name: kinds(t, TENSOR)[0].start for name, t in (("v4", v4), ("v5", v5))}

    def held(timeline: Timeline, name: str, what: str) -> float:
        return total(e for e in kinds(timeline, WAIT, what) if e.agent == 0 and e.start > first[name])

    assert held(v4, "v4", "full") == 0 < held(v5, "v5", "full")
    assert held(v5, "v5", "wgmma.wait") < held(v4, "v4", "wgmma.wait") / 2


def test_v5_with_two_stages_has_nothing_to_load_ahead_into():
    two = refresh.executed(TWO_STAGES)[1]
    assert idle_share(two) > 0.25
    (first, second) = groups(two).values()
    there = landed(two)
    late = sum(there[fill] > retired for (_, _, retired), (fill, _, _) in itertools.pairwise(first))
    assert late >= len(first) - 3 and len(second) == len(first)  # the ring's first two stages were loaded in time
    assert idle_share(panel("v6", "v5")) == 0  # three stages


def test_v6_has_no_gap_and_a_longer_end():
    v5, v6 = panel("v6", "v5"), panel("v6", "v6")
    assert len(groups(v6)) == 4 and tensor_gaps(v6.events) == []
    end = {name: t.end - kinds(t, TENSOR)[-1].end for name, t in (("v5", v5), ("v6", v6))}
    assert end["v6"] > end["v5"]
    last_product = max(e.end for e in kinds(v6, TENSOR))
    assert max(e.end for e in kinds(v6, LOAD)) < last_product < min(e.start for e in kinds(v6, STORE))


def test_v6_hands_its_output_over_in_quarters():
    v6 = panel("v6-epilogue", "v6")
    stores = kinds(v6, STORE)
    assert len(stores) == 4 and {e.agent for e in stores} == {16}
    reads = kinds(v6, WAIT, "bulk.wait")
    assert len(reads) == 4 and {e.agent for e in reads} == {16}
    for agent in range(16):
        free = [e for e in kinds(v6, WAIT, "mbarrier") if e.agent == agent]
        assert [e.stage for e in free] == [0, 1, 2]
        assert all(read.end <= e.end for read, e in zip(reads, free, strict=False))
        # Released by the read of one quarter, it writes the next before that is stored.
        assert all(e.end < store.start for e, store in zip(free, stores[1:], strict=True))
