"""What the documentation claims of its pictures, computed from the events of the executed kernels."""

from __future__ import annotations

import pytest

from cute_matmul.emulator.timeline import TENSOR, Timeline, overlap, tensor_share
from cute_matmul.launch import emulate
from cute_matmul.problem import Problem


@pytest.fixture(scope="module")
def timelines() -> dict[str, Timeline]:
    """One CTA, eight k_tiles: the problem of the README's picture."""
    a, b = Problem(128, 128, 512).operands()
    return {name: emulate(a, b, variant=name, trace=True)[1].timeline for name in ("v1", "v2")}


def test_v1_loads_and_multiplies_in_turn(timelines):
    seen = overlap(timelines["v1"].events)
    assert seen.loads == 16  # A and B of eight k_tiles
    assert seen.overlapped_loads == 0


def test_v2_loads_while_it_multiplies(timelines):
    seen = overlap(timelines["v2"].events)
    assert seen.loads == 16
    assert seen.overlapped_loads > seen.loads / 2


def test_v2_keeps_the_tensor_cores_busier(timelines):
    v1, v2 = timelines["v1"], timelines["v2"]
    busy = {name: sum(e.duration for e in t.events if e.kind == TENSOR) for name, t in timelines.items()}
    assert busy["v1"] == pytest.approx(busy["v2"])  # the same work
    assert v2.end < v1.end
    assert tensor_share(v2.events) > 1.3 * tensor_share(v1.events)
