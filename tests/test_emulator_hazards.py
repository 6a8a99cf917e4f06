"""The hazard engine by itself: protocols driven through its event interface, right ones and broken ones."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cute_matmul.emulator.hazards import RULES, HazardEngine
from cute_matmul.emulator.report import Report, Suppression

TILE = 1024
FULL, EMPTY = 0x400, 0x440
DATA = 0x800


class Script:
    """Writes events as a kernel would cause them; instructions are named by strings."""

    def __init__(self, warps=4, ctas=1, cluster=1, smem=64 * 1024):
        self.names = []
        self.hz = HazardEngine(
            ctas=ctas,
            warps_per_cta=warps,
            cluster_size=cluster,
            smem_bytes=smem,
            describe=lambda src: (self.names[src], self.names[src]),
            role=lambda agent: f"role{agent}",
        )
        self.warps = warps
        self.ctas = ctas
        self.phase = {}

    def src(self, name):
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def cta_of(self, agents):
        return np.asarray(agents) // self.warps

    def access(self, name, agents, addr, size=4, write=False, stride=4, lanes=32, **kw):
        agents = np.atleast_1d(agents)
        at = np.broadcast_to(np.asarray(addr), agents.shape)[:, None] + np.arange(lanes) * stride
        return self.hz.shared(agents, self.src(name), at, size, write=write, **kw)

    def load(self, name, agents, addr, **kw):
        return self.access(name, agents, addr, **kw)

    def store(self, name, agents, addr, **kw):
        return self.access(name, agents, addr, write=True, **kw)

    def gload(self, name, agents, addr, size=4, lanes=32, stride=4, **kw):
        agents = np.atleast_1d(agents)
        at = np.broadcast_to(np.asarray(addr), agents.shape)[:, None] + np.arange(lanes) * stride
        self.hz.global_(agents, self.src(name), at, size, **kw)

    def gstore(self, name, agents, addr, **kw):
        self.gload(name, agents, addr, write=True, **kw)

    def init(self, agent, bar, count=1, fence=True, name="init"):
        a = np.array([agent])
        self.hz.mbar_init(a, self.src(name), self.cta_of(a), np.array([bar]), count)
        if fence:
            self.hz.fence(a, self.src("init fence"), "mbarrier_init")
        self.phase[int(self.cta_of(a)[0]), bar] = 0

    def invalidate(self, agent, bar):
        a = np.array([agent])
        self.hz.mbar_inval(a, self.src("inval"), self.cta_of(a), np.array([bar]))

    def sync(self, agents=None):
        agents = np.arange(self.warps) if agents is None else np.asarray(agents)
        self.hz.bar_sync(agents[None, :])

    def expect(self, agent, bar, nbytes, cta=None, name="expect_tx"):
        a = np.array([agent])
        self.hz.mbar_arrive(a, self.src(name), self.cta_of(a) if cta is None else np.array([cta]), bar, 1, nbytes)

    def arrive(self, agent, bar, cta=None, name="arrive", **kw):
        a = np.array([agent])
        self.hz.mbar_arrive(a, self.src(name), self.cta_of(a) if cta is None else np.array([cta]), bar, **kw)

    def tma(self, agent, dst, bar, nbytes=TILE, cta=None, name="tma load", gaddr=None, gbytes=16):
        a = np.array([agent])
        c = self.cta_of(a) if cta is None else np.array([cta])
        self.hz.bulk_load(a, self.src(name), c, np.array([dst]), nbytes, c, np.array([bar]), gaddr, gbytes)

    def complete(self, bar, cta=0):
        phase = self.phase.setdefault((cta, bar), 0)
        self.hz.mbar_complete(np.array([cta]), np.array([bar]), np.array([phase]))
        self.phase[cta, bar] = phase + 1

    def wait(self, agents, bar, name="wait", phase=None):
        agents = np.atleast_1d(agents)
        cta = self.cta_of(agents)
        now = self.phase[int(cta[0]), bar] - 1 if phase is None else phase
        self.hz.mbar_wait(agents, self.src(name), cta, bar, now)

    def wgmma(self, group, ranges, name="wgmma", acc=(0, 1), a_regs=()):
        """One WGMMA in warp group `group` (agents 4 * group ...) that reads byte ranges (start, length)."""
        agents = np.arange(4) + 4 * group
        cells = np.concatenate([np.arange(s // 16, (s + n) // 16) for s, n in ranges])
        self.hz.wgmma(agents[None, :], self.src(name), cells[None, :], acc, a_regs)

    def mma_group(self, group, ranges, name="wgmma"):
        agents = np.arange(4) + 4 * group
        self.hz.wgmma_fence(agents)
        self.wgmma(group, ranges, name)
        self.hz.wgmma_commit(agents)

    def mma_wait(self, group, pending=0):
        self.hz.wgmma_wait(np.arange(4) + 4 * group, pending)

    def exit(self):
        self.hz.warp_exit(np.arange(self.warps * self.ctas), self.src("exit"))
        self.hz.cta_exit(np.arange(self.ctas))

    def finish(self):
        return self.hz.finish()


def kinds(script):
    return {h.kind for h in script.finish()}


# ---------------------------------------------------------------- a ring filled by TMA and read by WGMMA


def ring(
    *,
    stages=2,
    k_tiles=6,
    wait_full=True,
    wait_wgmma=True,
    pending=0,
    sync_after=True,
    refill_stage=0,
    distance=TILE,
    expected=TILE,
    mma_fence=True,
    init_fence=True,
    init_sync=True,
    last_wait=True,
    early_refill=False,
):
    """V2's protocol: one warp group loads ahead and computes."""
    s = Script()
    bars = [FULL + 8 * i for i in range(stages)]
    slots = [DATA + distance * i for i in range(stages)]
    for i, bar in enumerate(bars):
        s.init(0, bar, fence=init_fence, name=f"init {i}" if stages > 8 else "init")
    if init_sync:
        s.sync()
    for i in range(min(stages, k_tiles)):
        s.expect(0, bars[i], expected)
        s.tma(0, slots[i], bars[i])
    everybody = np.arange(4)
    for k in range(k_tiles):
        i = k % stages
        if s.hz.barriers.state["pending"][s.hz.barriers.slot(0, bars[i])] <= 0:
            s.complete(bars[i])
        if wait_full:
            s.wait(0, bars[i])
            s.sync()
        if mma_fence:
            s.hz.wgmma_fence(everybody)
        if early_refill:
            j, ahead = i, k + stages
            if ahead < k_tiles:
                s.expect(0, bars[j], expected)
                s.tma(0, slots[j], bars[j], name="refill")
        s.wgmma(0, [(slots[i], TILE)])
        s.hz.wgmma_commit(everybody)
        if wait_wgmma and (last_wait or k + 1 < k_tiles):
            s.mma_wait(0, pending)
        if sync_after:
            s.sync()
        j = (i + refill_stage) % stages
        if k + stages < k_tiles and not early_refill:
            s.expect(0, bars[j], expected)
            s.tma(0, slots[j], bars[j], name="refill")
    s.exit()
    return s


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("k_tiles", [1, 2, 7])
def test_clean_ring(stages, k_tiles):
    assert ring(stages=stages, k_tiles=k_tiles).finish() == []


@pytest.mark.parametrize(
    "change, kind",
    [
        ({"wait_full": False}, "read-before-copy-waited"),
        ({"wait_wgmma": False}, "overwrite-while-wgmma-reads"),
        ({"pending": 1}, "overwrite-while-wgmma-reads"),
        ({"refill_stage": 1}, "overwrite-before-copy-waited"),
        ({"distance": TILE // 2}, "overwrite-before-copy-waited"),
        ({"expected": TILE // 2}, "mbarrier-tx-bytes"),
        ({"expected": 2 * TILE}, "mbarrier-tx-bytes"),
        ({"mma_fence": False}, "missing-wgmma-fence"),
        ({"init_fence": False}, "mbarrier-init-not-visible"),
        ({"last_wait": False}, "exit-with-copy-in-flight"),
        ({"early_refill": True}, "read-before-copy-waited"),
    ],
)
def test_broken_ring(change, kind):
    assert kind in kinds(ring(**change))


def test_hazard_names_both_sides_stage_and_phase():
    hazards = [h for h in ring(wait_wgmma=False).finish() if h.kind == "overwrite-while-wgmma-reads"]
    first = hazards[0]
    assert (first.here.line, first.there.line) == ("refill", "wgmma")
    assert first.here.warps == (0,) and first.there.warps == (0, 1, 2, 3)
    assert first.here.role == "role0"
    assert (first.barrier, first.stage, first.phase) == (0, 0, 1)
    assert (first.first_byte, first.last_byte) == (DATA, DATA + TILE - 1)
    assert first.count > 1
    text = str(first)
    for part in ("overwrite-while-wgmma-reads", "stage 0", "phase 1", "0x800..0xbff", "WGMMA group 0", "refill"):
        assert part in text
    assert json.loads(json.dumps(first.to_json()))["stage"] == 0
    assert first.matches("overwrite-while-wgmma-reads", "refill")
    assert not first.matches("overwrite-while-wgmma-reads", "elsewhere")
    assert not first.matches("data-race", "refill")


# ---------------------------------------------------------------- warp-specialised: full and empty barriers


def specialised(
    *,
    stages=2,
    k_tiles=6,
    groups=2,
    producer_wait=True,
    consumer_wait=True,
    wait_before_release=True,
    own_release=True,
    release_ahead=0,
    empty_count=None,
    tail=True,
):
    """A producer warp, consumer warp groups, a full and an empty barrier per stage; events in one legal order."""
    producer = 4 * groups
    s = Script(warps=4 * groups + 1)
    full = [FULL + 8 * i for i in range(stages)]
    empty = [EMPTY + 8 * i for i in range(stages)]
    count = groups if empty_count is None else empty_count
    for i in range(stages):
        s.init(0, full[i], name="init full")
        s.init(0, empty[i], count, name="init empty")
    s.sync()
    data = [DATA + TILE * i for i in range(stages)]
    pending = dict.fromkeys(empty, count)

    def release(group, stage):
        s.arrive(4 * group, empty[stage], name="release")
        pending[empty[stage]] -= 1
        if pending[empty[stage]] == 0:
            s.complete(empty[stage])
            pending[empty[stage]] = count

    for k in range(k_tiles):
        i = k % stages
        if producer_wait:
            s.wait(producer, empty[i], "acquire", phase=-1 if k < stages else None)
        s.expect(producer, full[i], TILE)
        s.tma(producer, data[i], full[i])
        s.complete(full[i])
        for group in range(groups):
            agents = np.arange(4) + 4 * group
            if consumer_wait:
                s.wait(agents, full[i], "consumer wait")
            s.mma_group(group, [(data[i], TILE)])
            if wait_before_release:
                s.mma_wait(group)
            elif k:
                s.mma_wait(group, 1)
            if own_release or group == 0:
                release(group, (i + release_ahead) % stages)
                if not own_release:
                    release(group, (i + release_ahead) % stages)
    for group in range(groups):
        s.mma_wait(group)
    if tail:
        for i in range(min(stages, k_tiles)):
            s.wait(producer, empty[i], "tail")
    s.exit()
    return s


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stages, k_tiles", [(1, 4), (2, 6), (3, 2)])
def test_clean_warp_specialised(groups, stages, k_tiles):
    assert specialised(groups=groups, stages=stages, k_tiles=k_tiles).finish() == []


@pytest.mark.parametrize(
    "change, kind",
    [
        ({"producer_wait": False}, "overwrite-while-wgmma-reads"),
        ({"consumer_wait": False}, "read-before-copy-waited"),
        ({"wait_before_release": False}, "overwrite-while-wgmma-reads"),
        ({"empty_count": 1}, "mbarrier-phase-unordered"),
        ({"own_release": False}, "overwrite-while-wgmma-reads"),
    ],
)
def test_broken_warp_specialised(change, kind):
    assert kind in kinds(specialised(**change))


def test_release_one_stage_early():
    s = specialised(stages=2, k_tiles=6, release_ahead=1, groups=1, tail=False, producer_wait=False)
    assert kinds(s) & {"overwrite-while-wgmma-reads", "mbarrier-phase-unordered"}


def test_wait_group_speaks_for_the_warp_group_only():
    """Warp 0's wait covers what warps 1-3 of its group read, and nothing of the other group."""
    for group, clean in ((0, True), (1, False)):
        s = Script(warps=8)
        s.init(0, FULL)
        s.sync()
        s.expect(0, FULL, TILE)
        s.tma(0, DATA, FULL)
        s.complete(FULL)
        s.wait(np.arange(8), FULL)
        s.mma_group(group, [(DATA, TILE)])
        s.hz.wgmma_wait(np.array([0, 4]) if clean else np.arange(4), 0)
        s.expect(0, FULL, TILE)
        s.tma(0, DATA, FULL, name="refill")
        s.complete(FULL)
        found = {h.kind for h in s.finish()} - {"mbarrier-phase-overrun"}
        assert found == (set() if clean else {"overwrite-while-wgmma-reads"})


def test_waiter_may_miss_a_phase():
    """Warp 1 waits for phase 0, and nothing keeps phase 1 from completing before it has looked."""
    s = Script(warps=2)
    s.init(0, FULL)
    s.sync()
    s.arrive(0, FULL, name="arrive 0")
    s.complete(FULL)
    s.wait([0, 1], FULL)
    s.arrive(0, FULL, name="arrive 1")
    s.complete(FULL)
    assert kinds(s) == {"mbarrier-phase-overrun"}


def test_arrivals_beyond_the_count():
    """All in one instruction, so that only the barrier's own count can tell."""
    s = Script(warps=4)
    s.init(0, FULL, count=2)
    s.sync()
    four = np.arange(4)
    s.hz.mbar_arrive(four, s.src("arrive"), np.zeros(4, int), np.full(4, FULL))
    s.complete(FULL)
    s.complete(FULL)
    assert "mbarrier-phase-unordered" in kinds(s)


# ---------------------------------------------------------------- mbarrier life


def test_barrier_never_initialised():
    s = Script()
    s.arrive(0, FULL)
    assert kinds(s) == {"mbarrier-not-initialised"}


def test_init_without_sync_is_not_visible_to_others():
    s = Script()
    s.init(0, FULL, count=2)
    s.arrive(0, FULL)
    assert kinds(s) == set()
    s.arrive(1, FULL)
    assert kinds(s) == {"mbarrier-init-not-visible"}


def test_init_fence_after_the_sync_does_not_help_a_copy():
    s = Script()
    s.init(0, FULL, fence=False)
    s.sync()
    s.expect(1, FULL, TILE)
    s.tma(1, DATA, FULL)
    assert kinds(s) >= {"mbarrier-init-not-visible"}


def test_proxy_fence_publishes_an_init():
    s = Script()
    s.init(0, FULL, fence=False)
    s.hz.fence(np.array([0]), s.src("fence"), "proxy.async")
    s.sync()
    s.expect(1, FULL, TILE)
    s.tma(1, DATA, FULL)
    s.complete(FULL)
    assert kinds(s) == set()


def test_reinit_needs_inval_and_inval_an_idle_barrier():
    for idle, invalidated in ((True, True), (True, False), (False, True), (False, False)):
        s = Script()
        s.init(0, FULL, count=1)
        s.sync()
        s.arrive(1, FULL)
        s.complete(FULL)
        s.wait(2, FULL)
        if idle:
            s.sync()
        if invalidated:
            s.invalidate(0, FULL)
        s.init(0, FULL, name="init again")
        s.sync()
        s.arrive(3, FULL)
        s.complete(FULL)
        assert kinds(s) == (set() if idle and invalidated else {"mbarrier-reinitialised"})


# ---------------------------------------------------------------- TMA store epilogue


def epilogue(*, fence="proxy.async.shared", sync=True, wait="read", reuse=True, exit_wait=True, commit=True):
    s = Script()
    s.hz.add_allocation(1 << 20, 1 << 16, "mC")
    everybody = np.arange(4)
    one = np.array([0])
    for tile in range(2 if reuse else 1):
        s.store("st.shared", everybody, DATA + 512 * everybody, size=16, stride=16)
        if fence:
            s.hz.fence(everybody, s.src("fence"), fence)
        if sync:
            s.sync()
        runs = DATA + 16 * np.arange(128)[None, :]
        s.hz.bulk_store(one, s.src("tma store"), 0, runs, (1 << 20) + 4096 * tile + runs, 16)
        if commit:
            s.hz.bulk_commit(one, 0)
        if wait and (tile == 0 or exit_wait):
            s.hz.bulk_wait(one, 0, 0, read=wait == "read")
        s.sync()
    s.exit()
    return s


@pytest.mark.parametrize("fence", ["proxy.async.shared", "proxy.async"])
@pytest.mark.parametrize("wait", ["read", "all"])
def test_clean_store_epilogue(fence, wait):
    assert epilogue(fence=fence, wait=wait).finish() == []


@pytest.mark.parametrize(
    "change, found",
    [
        ({"fence": None}, {"missing-proxy-fence"}),
        ({"fence": "proxy.async.global"}, {"missing-proxy-fence"}),
        ({"fence": "acq_rel"}, {"missing-proxy-fence"}),
        ({"sync": False}, {"data-race"}),
        ({"wait": None}, {"overwrite-while-copy-reads", "exit-with-copy-in-flight"}),
        ({"exit_wait": False}, {"exit-with-copy-in-flight"}),
        ({"commit": False}, {"overwrite-while-copy-reads", "exit-with-copy-in-flight"}),
    ],
)
def test_broken_store_epilogue(change, found):
    assert kinds(epilogue(**change)) == found


def test_fence_may_stand_on_the_issuer_after_the_sync():
    s = Script()
    s.hz.add_allocation(1 << 20, 1 << 16)
    s.store("st", np.arange(4), DATA + 512 * np.arange(4), size=16, stride=16)
    s.sync()
    s.hz.fence(np.array([0]), 0, "proxy.async.shared")
    runs = DATA + 16 * np.arange(128)[None, :]
    s.hz.bulk_store(np.array([0]), s.src("tma store"), 0, runs, (1 << 20) + runs, 16)
    assert kinds(s) == set()


def test_write_after_the_fence_is_not_covered():
    s = Script()
    s.hz.add_allocation(1 << 20, 1 << 16)
    s.hz.fence(np.array([0]), s.src("fence"), "proxy.async")
    s.store("st", 0, DATA, size=16, stride=16)
    runs = DATA + 16 * np.arange(32)[None, :]
    s.hz.bulk_store(np.array([0]), s.src("tma store"), 0, runs, (1 << 20) + runs, 16)
    assert kinds(s) == {"missing-proxy-fence"}


def test_results_of_a_read_wait_are_not_readable_in_global_memory():
    """.read says that shared memory may be reused, not that the global bytes have arrived."""
    for read, found in ((True, {"read-before-copy-waited"}), (False, set())):
        s = Script()
        s.hz.add_allocation(1 << 20, 1 << 16, "mC")
        s.store("st", 0, DATA, size=16, stride=16)
        s.hz.fence(np.array([0]), s.src("fence"), "proxy.async")
        runs = 16 * np.arange(32)[None, :]
        s.hz.bulk_store(np.array([0]), s.src("tma store"), 0, DATA + runs, (1 << 20) + runs, 16)
        s.hz.bulk_commit(np.array([0]), 0)
        s.hz.bulk_wait(np.array([0]), 0, 0, read=read)
        s.gload("ld.global", 0, 1 << 20)
        assert kinds(s) == found


def test_bulk_groups_belong_to_the_thread():
    s = Script()
    s.hz.add_allocation(1 << 20, 1 << 16)
    one = np.array([0])
    s.store("st", 0, DATA, size=16, stride=16)
    s.hz.fence(one, s.src("fence"), "proxy.async")
    runs = 16 * np.arange(32)[None, :]
    s.hz.bulk_store(one, s.src("tma store"), 3, DATA + runs, (1 << 20) + runs, 16)
    s.hz.bulk_commit(one, 3)
    s.hz.bulk_wait(one, 0, 0, read=True)  # lane 0 has no groups
    s.store("st again", 0, DATA, size=16, stride=16)
    assert kinds(s) == {"overwrite-while-copy-reads"}


# ---------------------------------------------------------------- WGMMA operands and registers


def test_wgmma_operands_from_stores_need_the_proxy_fence():
    for fence, found in ((True, set()), (False, {"missing-proxy-fence"})):
        s = Script()
        s.store("st", np.arange(4), DATA + 512 * np.arange(4), size=16, stride=16)
        if fence:
            s.hz.fence(np.arange(4), 0, "proxy.async.shared")
        s.sync()
        s.mma_group(0, [(DATA, 2048)])
        s.mma_wait(0)
        assert kinds(s) == found


def test_every_warp_of_the_group_must_have_waited():
    s = Script()
    s.init(0, FULL)
    s.sync()
    s.expect(0, FULL, TILE)
    s.tma(0, DATA, FULL)
    s.complete(FULL)
    s.wait([0, 1, 2], FULL)
    s.mma_group(0, [(DATA, TILE)])
    assert "read-before-copy-waited" in kinds(s)


def test_registers_in_flight():
    s = Script()
    s.store("st", np.arange(4), DATA + 512 * np.arange(4), size=16, stride=16)
    s.hz.fence(np.arange(4), s.src("fence"), "proxy.async")
    s.sync()
    everybody = np.arange(4)
    s.hz.registers(everybody, s.src("zero"), writes=(10, 11))
    s.hz.wgmma_fence(everybody)
    s.wgmma(0, [(DATA, TILE)], acc=(10, 11))
    s.wgmma(0, [(DATA, TILE)], acc=(10, 11))  # same shape: ordered among themselves
    s.hz.wgmma_commit(everybody)
    s.hz.move_registers(everybody, (20, 21), (10, 11))
    s.hz.wgmma_wait(everybody, 1)
    assert kinds(s) == set()
    s.hz.registers(everybody, s.src("use renamed"), reads=(20,))
    (hazard,) = s.finish()
    assert (hazard.kind, hazard.here.line, hazard.there.line) == ("accumulator-in-flight", "use renamed", "wgmma")


def test_registers_after_the_wait_and_before_the_next_fence():
    for fence in (True, False):
        s = Script()
        s.store("st", np.arange(4), DATA + 512 * np.arange(4), size=16, stride=16)
        s.hz.fence(np.arange(4), s.src("fence"), "proxy.async")
        s.sync()
        everybody = np.arange(4)
        s.mma_group(0, [(DATA, TILE)])
        s.mma_wait(0)
        s.hz.registers(everybody, s.src("scale"), reads=(0,), writes=(0,))
        if fence:
            s.hz.wgmma_fence(everybody)
        s.wgmma(0, [(DATA, TILE)], name="wgmma 2")
        s.hz.wgmma_commit(everybody)
        s.mma_wait(0)
        found = s.finish()
        assert [h.kind for h in found] == ([] if fence else ["missing-wgmma-fence"])
        if not fence:
            assert (found[0].here.line, found[0].there.line) == ("wgmma 2", "scale")


def test_constants_may_be_moved_in_after_the_fence():
    """As the DSL's persistent kernels do; a computed value may not."""
    for constant in (True, False):
        s = Script()
        s.store("st", np.arange(4), DATA + 512 * np.arange(4), size=16, stride=16)
        s.hz.fence(np.arange(4), s.src("fence"), "proxy.async")
        s.sync()
        everybody = np.arange(4)
        s.hz.registers(everybody, s.src("epilogue of the tile before"), reads=(0,))
        s.hz.wgmma_fence(everybody)
        if constant:
            s.hz.fresh_registers(everybody, s.src("mov 0"), (9,))
        else:
            s.hz.registers(everybody, s.src("add"), writes=(9,))
        s.hz.move_registers(everybody, (0,), (9,))
        s.wgmma(0, [(DATA, TILE)], acc=(0,))
        assert kinds(s) == (set() if constant else {"missing-wgmma-fence"})
        s.hz.fresh_registers(everybody, s.src("mov 0 again"), (0,))
        assert "accumulator-in-flight" in kinds(s)


def test_a_registers_may_not_be_rewritten_in_flight():
    s = Script()
    s.store("st", np.arange(4), DATA + 512 * np.arange(4), size=16, stride=16)
    s.hz.fence(np.arange(4), s.src("fence"), "proxy.async")
    s.sync()
    s.hz.wgmma_fence(np.arange(4))
    s.wgmma(0, [(DATA, TILE)], a_regs=(5, 6))
    s.hz.wgmma_commit(np.arange(4))
    s.hz.registers(np.arange(4), s.src("ldmatrix into A"), writes=(5,))
    assert kinds(s) == {"accumulator-in-flight"}


# ---------------------------------------------------------------- cp.async and ldmatrix (V0's protocol)


def cp_async_kernel(*, wait=True, sync=True, second_sync=True, pending=0, k_tiles=4, wgmma=False, fence=True):
    s = Script()
    s.hz.add_allocation(1 << 20, 1 << 16, "mA")
    everybody = np.arange(4)
    lanes = np.arange(32) * 16
    dst = DATA + 512 * everybody[:, None] + lanes
    for k in range(k_tiles):
        s.hz.cp_async(everybody, s.src("cp.async"), dst, 16, None, (1 << 20) + 2048 * k + dst - DATA)
        s.hz.cp_async_commit(everybody)
        if wait:
            s.hz.cp_async_wait(everybody, pending)
        if fence:
            s.hz.fence(everybody, s.src("fence"), "proxy.async.shared")
        if sync:
            s.sync()
        if wgmma:
            s.mma_group(0, [(DATA, 2048)])
            s.mma_wait(0)
        else:
            s.load("ldmatrix", everybody, DATA + 512 * (3 - everybody), size=16, stride=16)
        if second_sync:
            s.sync()
    s.exit()
    return s


@pytest.mark.parametrize("wgmma", [False, True])
def test_clean_cp_async(wgmma):
    assert cp_async_kernel(wgmma=wgmma).finish() == []


@pytest.mark.parametrize(
    "change, kind",
    [
        ({"wait": False}, "read-before-copy-waited"),
        ({"pending": 1}, "read-before-copy-waited"),
        ({"sync": False}, "read-before-copy-waited"),
        ({"second_sync": False}, "data-race"),
        ({"wgmma": True, "fence": False}, "missing-proxy-fence"),
        ({"wait": False, "k_tiles": 1}, "exit-with-copy-in-flight"),
    ],
)
def test_broken_cp_async(change, kind):
    found = kinds(cp_async_kernel(**change))
    if kind == "data-race":  # cp.async over bytes that other warps may still load
        found = {"data-race" if k == "overwrite-while-read" else k for k in found}
    assert kind in found


def test_cp_async_tracked_by_a_barrier():
    for tracked in (True, False):
        s = Script(warps=2)
        s.hz.add_allocation(1 << 20, 1 << 16)
        s.init(0, FULL)
        s.sync()
        one = np.array([0])
        dst = DATA + 16 * np.arange(32)[None, :]
        s.hz.cp_async(one, s.src("cp.async"), dst, 16, None, (1 << 20) + dst)
        if tracked:
            s.hz.cp_async_mbarrier_arrive(one, s.src("arrive on"), np.array([0]), np.array([FULL]))
        s.arrive(0, FULL)
        s.complete(FULL)
        s.wait(1, FULL)
        s.load("ld", 1, DATA, size=16, stride=16)
        assert kinds(s) == (set() if tracked else {"read-before-copy-waited"})


# ---------------------------------------------------------------- shared memory between threads


def test_race_and_barrier():
    for sync, found in ((True, set()), (False, {"data-race"})):
        s = Script()
        s.store("st", 0, DATA)
        if sync:
            s.sync()
        s.load("ld", 1, DATA)
        assert kinds(s) == found


def test_two_warps_in_one_instruction():
    s = Script()
    s.store("st", [0, 1], DATA)
    assert kinds(s) == {"data-race"}


def test_named_barrier_between_producer_and_consumer():
    """Warp 0 writes and goes on (bar.arrive); warps 1 and 2 sync; warp 3 takes no part."""
    s = Script()
    s.store("st", 0, DATA)
    s.hz.bar_arrive(np.array([0]), s.src("bar.arrive"), 3)
    s.hz.bar_arrive(np.array([1, 2]), s.src("bar.sync"), 3)
    s.hz.bar_complete(np.array([1, 2]), 3)
    s.load("ld", [1, 2], DATA)
    assert kinds(s) == set()
    s.load("ld by 3", 3, DATA)
    (hazard,) = s.finish()
    assert (hazard.kind, hazard.here.warps, hazard.there.warps) == ("data-race", (3,), (0,))
    s.store("st 2", 0, DATA)
    assert [(h.here.line, h.there.line) for h in s.finish()][1:] == [("st 2", "ld"), ("st 2", "ld by 3")]


def test_named_barriers_forget_between_uses():
    s = Script()
    for agents in ([0, 1], [2, 3]):
        s.hz.bar_arrive(np.array(agents), s.src("bar.sync"), 1)
        if agents[0] == 0:
            s.store("late", 0, DATA)
        s.hz.bar_complete(np.array(agents), 1)
    s.load("ld", 2, DATA)
    assert kinds(s) == {"data-race"}


def test_named_barriers_of_many_ctas_at_once():
    s = Script(warps=2, ctas=40)
    first, second = np.arange(40) * 2, np.arange(40) * 2 + 1
    s.store("st", first, DATA)
    for _ in range(2):
        s.hz.bar_arrive(first, s.src("bar.sync"), 5)
        s.hz.bar_arrive(second, s.src("bar.sync"), 5)
        s.hz.bar_complete(np.concatenate([first, second]), 5)
    s.load("ld", second, DATA)
    assert kinds(s) == set()
    s.store("st 2", first[:3], DATA)
    s.hz.bar_arrive(np.array([2]), s.src("bar.sync"), 5)
    s.hz.bar_arrive(np.array([3]), s.src("bar.sync"), 5)
    s.hz.bar_complete(np.array([2, 3]), 5)
    s.load("ld 2", 3, DATA)
    assert {h.here.line for h in s.finish()} == {"st 2"}  # the reads of "ld" by the second warps
    s.load("ld 3", 5, DATA)
    assert {h.here.line for h in s.finish()} == {"st 2", "ld 3"}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_bytes_side_by_side_do_not_conflict(size):
    s = Script()
    s.store("st a", 0, DATA, size=size, stride=2 * size)
    s.store("st b", 1, DATA + size, size=size, stride=2 * size)
    assert kinds(s) == set()
    s.store("st c", 1, DATA + 2 * size, size=size, lanes=1)
    (hazard,) = s.finish()
    assert (hazard.first_byte, hazard.last_byte) == (DATA + 2 * size, DATA + 3 * size - 1)


def test_splitting_cells_keeps_what_was_known():
    s = Script()
    s.store("st 16", 0, DATA, size=16, stride=16)
    s.load("ld 16", 1, DATA + 64, size=16, stride=16, lanes=1, mask=None)
    assert kinds(s) == {"data-race"}
    s.sync()
    s.load("ld byte", 2, DATA + 5, size=1, stride=1, lanes=1)
    assert len(s.finish()) == 1
    s.store("st byte", 1, DATA + 5, size=1, stride=1, lanes=1)
    s.store("next byte", 3, DATA + 6, size=1, stride=1, lanes=1)
    assert [(h.here.line, h.there.line) for h in s.finish()[1:]] == [("st byte", "ld byte")]


def test_masked_lanes_do_not_count():
    s = Script()
    mask = np.zeros((1, 32), bool)
    mask[0, :4] = True
    s.store("st", 0, DATA, mask=mask)
    s.store("st 1", 1, DATA + 16, mask=mask)
    assert kinds(s) == set()
    s.load("ld", 2, DATA - 4, lanes=1, stride=4, taint=True)
    assert kinds(s) == set()


def test_addresses_and_masks_may_be_broadcast():
    s = Script()
    mask = np.zeros((1, 32), bool)
    mask[0, 5] = True
    two = np.array([0, 1])
    s.hz.shared(two, s.src("st"), np.array([[DATA], [DATA + 4]]), 4, mask, write=True)
    assert kinds(s) == set()
    s.hz.shared(two, s.src("st 2"), np.array([[DATA + 4], [DATA + 8]]), 4, None, write=True)
    (hazard,) = s.finish()
    assert (hazard.kind, hazard.here.warps, hazard.there.warps) == ("data-race", (0,), (1,))


def test_addresses_beyond_the_window_are_left_to_the_interpreter():
    s = Script(smem=4096)
    s.store("st", 0, 4096 - 64)
    s.hz.cp_async(np.array([0]), s.src("cp"), np.array([[4094, -4]]), 4, None, np.array([[0, 0]]))
    s.load("ld", 0, 4096 - 64, lanes=16)
    assert kinds(s) == set()


def test_uninitialised_shared_memory():
    s = Script()
    s.store("st", 0, DATA, lanes=16)
    fresh = s.load("ld", 0, DATA, taint=True)
    assert fresh.tolist() == [[False] * 16 + [True] * 16]
    assert kinds(s) == set()
    s.load("ld 2", 0, DATA)
    (hazard,) = s.finish()
    assert (hazard.kind, hazard.first_byte) == ("uninitialised-shared-memory", DATA + 64)


def test_shared_memory_is_fresh_for_the_next_cta():
    s = Script(warps=1, ctas=2)
    s.store("st", 0, DATA)
    s.hz.cta_exit(np.array([0]))
    s.load("ld", 1, DATA)
    assert kinds(s) == {"uninitialised-shared-memory"}


def test_atomics_do_not_race_with_each_other():
    s = Script()
    s.store("st", 0, DATA)
    s.sync()
    s.store("red", [0, 1, 2], DATA, atomic=True, sem="relaxed")
    assert kinds(s) == set()
    s.load("ld", 3, DATA)
    assert kinds(s) == {"data-race"}


# ---------------------------------------------------------------- clusters


def cluster(*, first_sync=True, relaxed=True, init_fence=True, release_to_peer=True, tail=True, k_tiles=4):
    """Two CTAs, each loads half of a tile and multicasts it to both; consumers release to both producers."""
    s = Script(warps=5, ctas=2, cluster=2)
    producers, consumers = [4, 9], [np.arange(4), 5 + np.arange(4)]
    for cta in (0, 1):
        s.init(5 * cta, FULL, 1, fence=init_fence)
        s.init(5 * cta, EMPTY, 2, fence=init_fence)
        s.sync(5 * cta + np.arange(5))
    everybody = np.arange(10)
    if first_sync:
        s.hz.cluster_arrive(everybody, s.src("cluster arrive"), not relaxed)
        s.hz.cluster_complete(np.array([0]))
        s.hz.cluster_wait(everybody, s.src("cluster wait"))
    for k in range(k_tiles):
        for cta in (0, 1):
            s.wait(producers[cta], EMPTY, "acquire", phase=-1 if k == 0 else None)
        for cta in (0, 1):
            s.expect(producers[cta], FULL, 2 * TILE)
            for peer in (0, 1):
                s.tma(producers[cta], DATA + TILE * cta, FULL, cta=peer, name="multicast")
        for cta in (0, 1):
            s.complete(FULL, cta)
            s.wait(consumers[cta], FULL, "consumer wait")
            agents = consumers[cta]
            s.hz.wgmma_fence(agents)
            cells = np.arange(DATA // 16, (DATA + 2 * TILE) // 16)
            s.hz.wgmma(agents[None, :], s.src("wgmma"), cells[None, :])
            s.hz.wgmma_commit(agents)
            s.hz.wgmma_wait(agents, 0)
        for cta in (0, 1):
            for peer in (0, 1):
                to = peer if release_to_peer else cta
                s.arrive(5 * cta, EMPTY, cta=to, name="release")
        for cta in (0, 1):
            s.complete(EMPTY, cta)
    if tail:
        for cta in (0, 1):
            s.wait(producers[cta], EMPTY, "tail")
    s.exit()
    return s


def test_clean_cluster():
    assert cluster().finish() == []
    assert cluster(relaxed=False).finish() == []


@pytest.mark.parametrize(
    "change, kind",
    [
        ({"first_sync": False}, "mbarrier-init-not-visible"),
        ({"init_fence": False}, "mbarrier-init-not-visible"),
        ({"release_to_peer": False}, "overwrite-while-wgmma-reads"),
        ({"tail": False}, "exit-before-remote-access"),
    ],
)
def test_broken_cluster(change, kind):
    assert kind in kinds(cluster(**change))


def test_remote_load_needs_the_peer_to_stay():
    for stay in (True, False):
        s = Script(warps=1, ctas=2, cluster=2)
        s.store("st", 1, DATA)
        both = np.arange(2)
        s.hz.cluster_arrive(both, 0)
        s.hz.cluster_complete(np.array([0]))
        s.hz.cluster_wait(both, 0)
        s.load("ld.cluster", 0, DATA, cta=np.array([1]))
        if stay:
            s.hz.cluster_arrive(both, 0)
            s.hz.cluster_complete(np.array([0]))
            s.hz.cluster_wait(both, 0)
        s.exit()
        assert kinds(s) == (set() if stay else {"exit-before-remote-access"})


def test_access_after_exit():
    s = Script(warps=1, ctas=2, cluster=2)
    s.hz.cta_exit(np.array([1]))
    s.arrive(0, FULL, cta=1)
    assert "access-to-exited-cta" in kinds(s)


# ---------------------------------------------------------------- global memory


def two_ctas():
    s = Script(warps=2, ctas=2)
    s.hz.add_allocation(1 << 20, 1 << 16, "mC")
    s.hz.add_allocation(1 << 21, 64, "flags")
    return s


def test_overlapping_outputs_race():
    s = two_ctas()
    s.gstore("st", 0, 1 << 20)
    s.gstore("st", 2, (1 << 20) + 128)
    assert kinds(s) == set()
    s.gstore("st 2", 3, (1 << 20) + 124)
    (hazard,) = s.finish()
    assert (hazard.kind, hazard.object, hazard.here.cta, hazard.there.cta) == ("data-race", "mC", 1, 0)
    assert (hazard.first_byte, hazard.last_byte) == (124, 127)


def test_two_ctas_in_one_instruction_race():
    s = two_ctas()
    s.gstore("st", [0, 2], 1 << 20)
    assert kinds(s) == {"data-race"}


@pytest.mark.parametrize("read_first", [False, True])
def test_read_and_write_by_two_ctas(read_first):
    s = two_ctas()
    events = [lambda: s.gload("ld", 0, 1 << 20), lambda: s.gstore("st", 2, 1 << 20)]
    for event in events if read_first else reversed(events):
        event()
    assert kinds(s) == {"data-race"}


def test_read_in_place_by_the_same_thread():
    s = two_ctas()
    s.gload("ld", [0, 2], (1 << 20) + np.array([0, 128]))
    s.gstore("st", [0, 2], (1 << 20) + np.array([0, 128]))
    s.gload("ld", [0, 2], (1 << 20) + np.array([0, 128]))
    assert kinds(s) == set()


FLAG_PROTOCOLS = {
    "release/acquire": (["release"], ["acquire"], set()),
    "relaxed": (["relaxed"], ["relaxed"], {"data-race"}),
    "release/relaxed": (["release"], ["relaxed"], {"data-race"}),
    "relaxed/acquire": (["relaxed"], ["acquire"], {"data-race"}),
    "fences": (["fence", "relaxed"], ["relaxed", "fence"], set()),
    "fence only before": (["fence", "relaxed"], ["relaxed"], {"data-race"}),
    "fence on the wrong side": (["relaxed", "fence"], ["fence", "relaxed"], {"data-race"}),
    "atomic": (["atom acq_rel"], ["atom acq_rel"], set()),
}


@pytest.mark.parametrize("name", FLAG_PROTOCOLS)
def test_flags_in_global_memory(name):
    """CTA 0 writes data, then a flag; CTA 1 reads the flag, then the data, after a sync of its own warps."""
    writer, reader, found = FLAG_PROTOCOLS[name]
    s = two_ctas()

    def flag(agent, steps, write):
        for step in steps:
            if step == "fence":
                s.hz.fence(np.array([agent]), s.src("fence"), "acq_rel", "gpu")
            else:
                atom = step.startswith("atom")
                sem = step.removeprefix("atom ")
                s.gload(f"flag {step}", agent, 1 << 21, lanes=1, sem=sem, write=write or atom, atomic=atom)

    s.gstore("data", 1, 1 << 20)
    s.sync([0, 1])
    flag(0, writer, True)
    flag(2, reader, False)
    s.sync([2, 3])
    s.gload("use", 3, 1 << 20)
    assert kinds(s) == found


def test_flags_hand_on_what_was_acquired():
    """Three CTAs in a chain: the third reads what the first wrote."""
    s = Script(warps=1, ctas=3)
    s.hz.add_allocation(1 << 20, 1 << 12)
    s.gstore("data", 0, 1 << 20)
    s.gstore("flag", 0, (1 << 20) + 1024, lanes=1, sem="release")
    s.gload("flag", 1, (1 << 20) + 1024, lanes=1, sem="acquire")
    s.gstore("flag", 1, (1 << 20) + 1032, lanes=1, sem="release")
    s.gload("flag", 2, (1 << 20) + 1032, lanes=1, sem="acquire")
    s.gload("use", 2, 1 << 20)
    assert kinds(s) == set()


def test_generic_global_write_then_tma_load_needs_the_proxy_fence():
    for fence, found in ((None, {"missing-proxy-fence"}), ("proxy.async.global", set()), ("proxy.async", set())):
        s = two_ctas()
        s.init(0, FULL)
        s.gstore("st", 0, 1 << 20)
        if fence:
            s.hz.fence(np.array([0]), s.src("fence"), fence)
        s.expect(0, FULL, 128)
        s.tma(0, DATA, FULL, nbytes=128, gaddr=(1 << 20) + 16 * np.arange(8)[None, :])
        s.complete(FULL)
        s.wait(0, FULL)
        s.exit()
        assert kinds(s) == found


def test_overwriting_the_source_of_a_tma_load():
    for wait in (True, False):
        s = two_ctas()
        s.init(0, FULL)
        s.expect(0, FULL, 128)
        s.tma(0, DATA, FULL, nbytes=128, gaddr=(1 << 20) + 16 * np.arange(8)[None, :])
        s.complete(FULL)
        if wait:
            s.wait(0, FULL)
        s.gstore("st", 0, 1 << 20)
        s.wait(0, FULL)
        s.exit()
        assert kinds(s) == (set() if wait else {"overwrite-while-copy-reads"})


def test_a_store_issued_by_a_whole_warp_is_one_store():
    """The DSL's epilogues do this; two different stores over the same bytes are another matter."""
    for shift, found in ((0, set()), (16, {"overwrite-before-copy-waited"})):
        s = two_ctas()
        s.store("st", 0, DATA, size=16, stride=16)
        s.hz.fence(np.array([0]), s.src("fence"), "proxy.async")
        lanes = np.arange(32)
        runs = np.broadcast_to(16 * np.arange(16), (32, 16)) + (lanes == 31)[:, None] * shift
        warp = np.zeros(32, int)
        s.hz.bulk_store(warp, s.src("tma store"), lanes, DATA + runs, (1 << 20) + runs, 16)
        s.hz.bulk_commit(warp, lanes)
        for lane in range(32):
            s.hz.bulk_wait(np.array([0]), lane, 0, read=True)
        s.store("st again", 0, DATA, size=16, stride=16)
        s.exit()
        assert kinds(s) == found


def test_reducing_stores_do_not_race():
    s = two_ctas()
    for agent in (0, 2):
        s.store("st", agent, DATA, size=16, stride=16)
        s.hz.fence(np.array([agent]), s.src("fence"), "proxy.async")
        runs = 16 * np.arange(32)[None, :]
        s.hz.bulk_store(np.array([agent]), s.src("red"), 0, DATA + runs, (1 << 20) + runs, 16, reduce=True)
        s.hz.bulk_commit(np.array([agent]), 0)
        s.hz.bulk_wait(np.array([agent]), 0, 0, read=True)
    s.exit()
    assert kinds(s) == set()


# ---------------------------------------------------------------- against a statement of happens-before by search


class Oracle:
    """Happens-before as reachability in a graph of events, and races as unordered conflicting pairs."""

    def __init__(self, warps):
        self.warps = warps

    def races(self, events):
        after = []  # after[i] = set of events ordered before event i
        last = [set() for _ in range(self.warps)]
        accesses = []
        for event in events:
            if event[0] == "bar":
                merged = set().union(*(last[w] for w in event[1]))
                for w in event[1]:
                    last[w] = set(merged)
            else:
                _, warp, address, size, write = event
                index = len(accesses)
                after.append(set(last[warp]))
                accesses.append((warp, address, size, write))
                last[warp] = last[warp] | {index}
        found = set()
        for i, (_, a, n, write) in enumerate(accesses):
            for j in range(i):
                _, b, m, other_write = accesses[j]
                if (write or other_write) and a < b + m and b < a + n and j not in after[i]:
                    found.add((j, i))
        return found


WARPS = 3
ACCESS = st.tuples(
    st.just("access"),
    st.integers(0, WARPS - 1),
    st.integers(0, 24),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
).map(lambda e: (*e[:2], e[2] // e[3] * e[3], *e[3:]))
BARRIER = st.tuples(st.just("bar"), st.sampled_from([(0, 1), (1, 2), (0, 2), (0, 1, 2)]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(ACCESS, ACCESS, BARRIER), max_size=25), st.sampled_from(["shared", "global"]))
@example([("access", 0, 0, 1, True), ("access", 1, 0, 1, True), ("access", 0, 0, 1, True)], "shared")
def test_agrees_with_reachability(events, space):
    s = Script(warps=WARPS, smem=4096)
    s.hz.add_allocation(1 << 20, 4096)
    if space == "shared":
        s.store("first", 0, DATA, size=16, stride=16, lanes=8)
        s.sync()
    for number, event in enumerate(events):
        if event[0] == "bar":
            s.sync(event[1])
        else:
            _, warp, address, size, write = event
            run = s.access if space == "shared" else s.gload
            base = DATA if space == "shared" else 1 << 20
            run(f"event {number}", warp, base + address, size=size, write=write, lanes=1)
    expected = Oracle(WARPS).races(events)
    found = s.finish()
    assert {h.kind for h in found} == ({"data-race"} if expected else set())
    # Between two synchronisations a warp's accesses are looked at together, so of several races on one byte any may be
    # named, but never a pair that is ordered.
    numbers = [n for n, e in enumerate(events) if e[0] == "access"]
    pairs = [{f"event {numbers[j]}", f"event {numbers[i]}"} for j, i in expected]
    assert all({h.there.line, h.here.line} in pairs for h in found)


# ---------------------------------------------------------------- reporting


def test_every_kind_has_a_rule_and_reports_are_merged_by_line():
    s = Script()
    for _ in range(3):
        s.hz.report("misaligned-access", "an address is not a multiple of its size", s.src("ld.v4"), 1, first=2, last=5)
    s.store("st", 0, DATA)
    s.load("ld", 1, DATA)
    s.load("ld", 2, DATA)
    first, second = s.finish()
    assert (first.kind, first.count, first.here.warps) == ("misaligned-access", 3, (1,))
    assert (second.kind, second.count) == ("data-race", 2)
    assert all(rule and kind == kind.lower() for kind, rule in RULES.items())


def test_limit():
    s = Script()
    s.hz.limit = 5
    for i in range(9):
        s.hz.report("x", "y", s.src(f"line {i}"), 0)
    assert len(s.finish()) == 5


def test_columns_grow_beyond_the_first_capacity():
    s = Script(warps=2)
    bars = [FULL + 8 * i for i in range(60)]
    for bar in bars:
        s.init(0, bar)
    s.sync()
    for bar in bars:
        s.expect(0, bar, 16)
        s.tma(0, DATA + 16 * bar, bar, nbytes=16)
        s.complete(bar)
        s.wait(1, bar)
        s.load("ld", 1, DATA + 16 * bar, size=16, lanes=1)
    s.sync()
    s.exit()
    assert kinds(s) == set()


def test_more_readers_than_slots_at_first():
    s = Script(warps=8)
    s.store("st", 0, DATA, lanes=8)
    s.sync()
    for warp in range(8):
        s.load(f"ld {warp}", warp, DATA, lanes=1)
    s.store("next word", 0, DATA + 4, lanes=1)
    assert kinds(s) == set()
    s.store("st 2", 7, DATA, lanes=1)
    assert {h.there.line for h in s.finish()} == {f"ld {w}" for w in range(7)}


def test_stopped_run_does_not_ask_for_bytes_still_due():
    s = Script()
    s.init(0, FULL)
    s.expect(0, FULL, TILE)
    assert s.hz.finish(stopped=True) == []
    assert [h.kind for h in s.finish()] == ["mbarrier-tx-bytes"]


def test_unknown_fence_and_grid():
    s = Script()
    with pytest.raises(ValueError, match=r"kind='membar\.x'"):
        s.hz.fence(np.array([0]), 0, "membar.x")
    with pytest.raises(ValueError, match="ctas=3"):
        HazardEngine(ctas=3, warps_per_cta=1, cluster_size=2)


@pytest.mark.parametrize(
    ("scope", "found"), [("cta", {"mbarrier-init-not-visible"}), ("cluster", set()), ("gpu", set())]
)
def test_a_fence_publishes_an_init_from_cluster_scope_on(scope: str, found: set):
    s = Script()
    s.init(0, FULL, fence=False)
    s.hz.fence(np.array([0]), s.src("fence"), "acq_rel", scope)
    s.sync()
    s.expect(1, FULL, TILE)
    s.tma(1, DATA, FULL)
    s.complete(FULL)
    assert kinds(s) == found


@pytest.mark.parametrize(("overwritten", "found"), [(False, set()), (True, {"data-race"})])
def test_a_later_relaxed_write_of_a_flag_hands_nothing_on(overwritten: bool, found: set):
    s = two_ctas()
    s.gstore("data", 0, 1 << 20)
    s.gstore("flag", 0, 1 << 21, lanes=1, sem="release")
    if overwritten:
        s.gstore("flag again", 0, 1 << 21, lanes=1, sem="relaxed")
    s.gload("flag", 2, 1 << 21, lanes=1, sem="acquire")
    s.gload("use", 2, 1 << 20)
    assert kinds(s) == found


@pytest.mark.parametrize(("seen", "found"), [(True, set()), (False, {"mbarrier-phase-unordered"})])
def test_a_copy_needs_to_have_seen_the_phase_before_its_own(seen: bool, found: set):
    """Warp 0 expects the bytes, warp 1 issues the copy: into phase 1, or into phase 0 that it knows nothing of."""
    s = Script(warps=2)
    s.init(0, FULL)
    s.sync()
    s.expect(0, FULL, TILE)
    s.tma(0, DATA, FULL)
    s.complete(FULL)
    s.wait([0, 1] if seen else [0], FULL)
    s.expect(0, FULL, TILE)
    s.tma(1, DATA + TILE, FULL, name="copy by another")
    assert kinds(s) - {"mbarrier-tx-bytes"} == found


def test_readers_of_several_clusters_are_remembered_apart():
    """Warp 0 of both CTAs reads; warp 1 of the second, ordered after its own warp 0 only, overwrites."""
    s = two_ctas()
    s.gstore("elsewhere", 1, (1 << 20) + 4096)
    s.gload("ld by CTA 0", 0, 1 << 20)
    s.gload("ld by CTA 1", 2, 1 << 20)
    s.sync([2, 3])
    s.gstore("st", 3, 1 << 20)
    assert [(h.kind, h.there.line) for h in s.finish()] == [("data-race", "ld by CTA 0")]


def test_named_barriers_forget_what_came_from_other_clusters():
    """CTA 1 acquires CTA 0's flag and syncs; CTA 2's barrier, which takes the same place, knows nothing of it."""
    s = Script(warps=2, ctas=3)
    s.hz.add_allocation(1 << 20, 1 << 12)
    s.gstore("data", 0, 1 << 20)
    s.gstore("flag", 0, (1 << 20) + 1024, lanes=1, sem="release")
    s.gload("flag", 2, (1 << 20) + 1024, lanes=1, sem="acquire")
    for first in (2, 4):
        pair = np.array([first, first + 1])
        s.hz.bar_arrive(pair, s.src("bar.sync"), 1)
        s.hz.bar_complete(pair, 1)
    s.gload("use", 3, 1 << 20)
    assert kinds(s) == set()
    s.gload("use by a stranger", 5, 1 << 20)
    assert [(h.kind, h.here.line) for h in s.finish()] == [("data-race", "use by a stranger")]


@pytest.mark.parametrize(("waited", "found"), [(True, set()), (False, {"mbarrier-reinitialised"})])
def test_a_barrier_whose_copy_nobody_waited_for_is_in_use(waited: bool, found: set):
    s = Script()
    s.init(0, FULL)
    s.sync()
    s.expect(0, FULL, TILE)
    s.tma(0, DATA, FULL)
    s.complete(FULL)
    if waited:
        s.wait(0, FULL)
    s.invalidate(0, FULL)
    assert kinds(s) == found


@pytest.mark.parametrize("expected", [TILE // 2, 2 * TILE])
def test_bytes_of_a_phase_that_never_completes_must_agree_too(expected: int):
    s = Script()
    s.init(0, FULL, count=2)
    s.sync()
    s.expect(0, FULL, expected)
    s.tma(0, DATA, FULL)
    s.exit()
    assert kinds(s) == {"mbarrier-tx-bytes", "exit-with-copy-in-flight"}


def test_a_suppression_may_name_either_side():
    s = Script()
    s.store("writer.py:1", 0, DATA)
    s.load("reader.py:2", 1, DATA)
    (hazard,) = s.finish()
    assert hazard.matches("data-race", "reader.py:2") and hazard.matches("data-race", "writer.py:1")
    assert not hazard.matches("data-race", "other.py:1")
    report = Report()
    report.suppress([hazard], [Suppression("data-race", "writer.py:1", "a test")])
    assert report.ok and len(report.suppressed) == 1


def test_waits_of_before_a_new_init_are_over():
    """The peer arrives at the barrier made anew: all it knows of CTA 0 is that init (a relaxed cluster arrival)."""
    s = Script(warps=1, ctas=2, cluster=2)
    s.init(0, FULL)
    s.arrive(0, FULL)
    s.complete(FULL)
    s.wait(0, FULL)
    s.invalidate(0, FULL)
    s.init(0, FULL, name="init again")
    s.hz.cluster_arrive(np.arange(2), s.src("cluster arrive"), False)
    s.hz.cluster_complete(np.array([0]))
    s.hz.cluster_wait(np.arange(2), s.src("cluster wait"))
    s.arrive(1, FULL, cta=0)
    s.complete(FULL)
    assert kinds(s) == set()


@pytest.mark.parametrize("space", ["shared", "global"])
def test_an_atomic_races_with_a_plain_access_of_either_side(space: str):
    for first, second in ((False, True), (True, False)):
        s = two_ctas()
        s.store("fill", 0, DATA)
        s.sync([0, 1])
        for agent, atomic in ((0, first), (1, second)):
            how = {"atomic": True, "sem": "relaxed"} if atomic else {}
            if space == "shared":
                s.store("red" if atomic else "st", agent, DATA, **how)
            else:
                s.gstore("red" if atomic else "st", agent, 1 << 20, **how)
        assert kinds(s) == {"data-race"}, (first, second)
