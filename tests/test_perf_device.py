"""CudaDevice's own code, run over a stand-in for torch.cuda that keeps everything on the CPU."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perf import ceiling, device, measure, peers, power, suites, tables
from perf.device import Layout, Mismatch
from perf.suites import Shape


class Event:
    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class Graph:
    """Records nothing: a replay is what the capture ran, again."""

    steps = None

    def replay(self):
        self.steps()


class StandIn:
    """torch, with "cuda" meaning the CPU."""

    def __init__(self):
        properties = SimpleNamespace(
            name="NVIDIA H200",
            major=9,
            minor=0,
            multi_processor_count=132,
            L2_cache_size=1 << 16,
            total_memory=1 << 34,
            uuid="0000",
        )
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            get_device_properties=lambda index: properties,
            synchronize=lambda: None,
            empty_cache=lambda: None,
            Event=Event,
            CUDAGraph=Graph,
        )

    def __getattr__(self, name):
        value = getattr(torch, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def on_cpu(*arguments, **keywords):
            if keywords.get("device") == "cuda":
                keywords["device"] = "cpu"
            return value(*arguments, **keywords)

        return on_cpu if name in ("randn", "full", "empty", "randint", "Generator") else value


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    stand_in = StandIn()
    made = object.__new__(device.CudaDevice)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", stand_in)
        made.__init__()

    def capture(step):
        step()
        graph = Graph()
        graph.steps = step
        return graph.replay

    made.capture = capture
    return made


LAYOUTS = [Layout(a_major=a, b_major=b) for a in "km" for b in "kn"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_operands_have_their_major_orders(cuda, layout):
    sets = cuda.operands(Shape(24, 40, 16), layout, 3)
    for o in sets:
        assert o.a.shape == (24, 16) and o.b.shape == (16, 40) and o.out.shape == (24, 40)
        assert o.a.dtype == o.b.dtype == o.out.dtype == torch.float16
        assert o.a.stride(1 if layout.a_major == "k" else 0) == 1
        assert o.b.stride(0 if layout.b_major == "k" else 1) == 1
        assert o.out.isnan().all()
    assert not torch.equal(sets[0].a, sets[1].a)


def test_a_right_result_passes_and_a_wrong_or_missing_one_does_not(cuda):
    (o,) = cuda.operands(Shape(64, 48, 256), Layout(), 1)

    def right(a, b, out):
        out.copy_(a.float() @ b.float())

    def one_short(a, b, out):
        right(a, b, out)
        out[3, 5] = float("nan")

    def last_k_tile_missing(a, b, out):
        right(a[:, :-64], b[:-64], out)

    assert cuda.check(right, o, "fp32")["relative"] < 1e-3
    for accumulate in ("fp32", "fp16"):
        for wrong in (one_short, last_k_tile_missing, lambda a, b, out: None):
            with pytest.raises(Mismatch, match="wrong result"):
                cuda.check(wrong, o, accumulate)


def test_fp16_sums_have_a_bound_of_their_own(cuda):
    (o,) = cuda.operands(Shape(64, 48, 2048), Layout(), 1)

    def fp16_sums(a, b, out):
        out.zero_()
        for k in range(0, a.shape[1], 16):
            out += (a[:, k : k + 16].float() @ b[k : k + 16].float()).half()

    assert cuda.check(fp16_sums, o, "fp16")["relative"] > 1e-3
    with pytest.raises(Mismatch):
        cuda.check(fp16_sums, o, "fp32")


def test_the_steps_times_add_up(cuda):
    seconds = cuda.elapsed([lambda: time.sleep(0.01), lambda: time.sleep(0.03)])
    assert seconds == [pytest.approx(0.01, abs=0.008), pytest.approx(0.03, abs=0.01)]


def test_without_nvml_a_run_says_so_and_goes_on(cuda):
    assert "nvidia-ml-py" in cuda.sensors.reason_absent
    assert "nvidia-ml-py" in cuda.describe()["sensors"]
    effort = suites.Effort(2, 2, burst_calls=3, block_s=0.02, lead_s=0.01, warm_s=0.01)
    shape = Shape(512, 512, 512)
    suite = suites.Suite("ladder", (shape,), (), ("cublas",), effort, effort)
    record = {"shapes": [{"mnk": list(shape.mnk), "name": ""}], "contenders": [], "conditions": {}}
    record |= {"machine": cuda.describe(), "skipped": [], "failed": [], "checks": [], "ceilings": []}
    record |= {"measurements": []}
    contender = peers.Cublas()
    record["contenders"].append({"name": "cublas", "label": "", "kind": "peer", "accumulate": "fp32"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "GRAPH_BELOW_S", 1.0)
        patch.setattr(power.Waits, "allowed_s", 0.0)
        patch.setattr(power, "Waits", functools.partial(power.Waits, least_s=0.0))
        measure.Run(cuda, suite, effort, [contender], Layout(), record, lambda: None).measure()
    assert len(record["measurements"]) == 4
    for phase in ("burst", "sustained"):
        figures = tables.figures(record, phase, shape)["cublas"]
        assert figures.tflops > 0 and figures.clock_mhz is None and figures.peak is None and figures.energy is None
    assert "cublas" in tables.ladder(record)


def test_without_triton_the_ceiling_says_what_measured_it(cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "perf.triton_kernels", None)
    found = ceiling.measure(cuda, 1 << 20, 2)
    assert found["method"].startswith("torch.sum") and found["bytes_per_s"] > 0
    assert found["read_bytes"] >= 1 << 20


class FakeNvml:
    """The part of pynvml that is used; some queries may be missing on a board."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, without=()):
        self.without, self.energy = without, 1_000_000

    def __getattr__(self, name):
        def answer(*_):
            if name in self.without:
                raise self.NVMLError("not supported")
            if name == "nvmlDeviceGetTotalEnergyConsumption":
                self.energy += 7000
                return self.energy
            return {
                "nvmlDeviceGetCount": 1,
                "nvmlDeviceGetClockInfo": 1980,
                "nvmlDeviceGetPowerUsage": 691_000,
                "nvmlDeviceGetTemperature": 55,
                "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
                "nvmlDeviceGetEnforcedPowerLimit": 700_000,
                "nvmlDeviceGetMaxClockInfo": 1980,
                "nvmlSystemGetDriverVersion": "580.1",
            }.get(name)

        return answer


def test_nvml_is_read_in_watts_joules_and_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    sensors = power.Nvml()
    reading = sensors.read()
    assert (reading.clock_mhz, reading.power_w, reading.temperature_c) == (1980, 691.0, 55)
    assert reading.as_dict()["held_by"] == ["power_cap"]
    assert sensors.read().energy_j - reading.energy_j == pytest.approx(7.0)
    assert sensors.limits() == {
        "driver": "580.1",
        "power_limit_w": 700.0,
        "max_clock_mhz": 1980,
        "memory_clock_mhz": 1980,
    }
    with sensors.recorded() as readings:
        time.sleep(0.1)
    assert len(readings) >= 3
    assert [r.time for r in readings] == sorted(r.time for r in readings)


def test_what_a_board_does_not_tell_is_none(monkeypatch):
    missing = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetTemperature")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(missing))
    reading = power.Nvml().read()
    assert reading.energy_j is None and reading.temperature_c is None and reading.clock_mhz == 1980
    board = power.summary([reading], reading.time - 1, reading.time + 1)
    assert board["energy_j"] is None and board["clock_mhz"] == 1980


def test_no_hopper_gpu_is_an_error_that_says_what_was_found(monkeypatch):
    stand_in = StandIn()
    stand_in.cuda.is_available = lambda: False
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", stand_in)
        with pytest.raises(device.NoGpu, match="no CUDA GPU"):
            device.CudaDevice()
        stand_in.cuda.is_available = lambda: True
        stand_in.cuda.get_device_properties(0).major = 8
        with pytest.raises(device.NoGpu, match="these kernels need"):
            device.CudaDevice()
