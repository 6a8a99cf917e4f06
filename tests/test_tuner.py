"""The tuner on made-up times: what it picks, that it goes on where it was stopped, what is remembered."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from cute_matmul import registry, tuner
from cute_matmul.config import TileConfig

SPACE = tuple(TileConfig((m, 128, k), s) for m in (64, 128) for k in (16, 32, 64) for s in (2, 3, 4))
TARGET = tuner.Target("NVIDIA H200", "v2", (8192, 8192, 8192))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_MATMUL_CACHE", str(tmp_path))
    return tmp_path


class MadeUp:
    """Seconds per call that depend on the configuration, with noise; stops at the nth."""

    def __init__(self, best, stop_after=None, wrong=False):
        self.best, self.stop_after, self.wrong = best, stop_after, wrong
        self.asked, self.random = [], random.Random(1)

    def seconds(self, config, stage):
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(str(config))
        distance = SPACE.index(self.best) - SPACE.index(config)
        return 1e-3 * (1 + 0.01 * abs(distance)) * (1 + self.random.gauss(0, 0.001))

    def check(self, config):
        if self.wrong:
            raise RuntimeError(f"v2 with config {config} gives a wrong result")


@pytest.mark.parametrize("best", [SPACE[0], SPACE[7], SPACE[-1]])
def test_the_fastest_is_found_and_remembered(best):
    tuner.tune(TARGET, SPACE, MadeUp(best))
    assert tuner.best_config("v2", TARGET.mnk, gpu=TARGET.gpu) == best


@pytest.mark.parametrize("default", [SPACE[8], SPACE[-1]])
def test_the_default_is_displaced_by_what_is_clearly_faster(default):
    tuner.tune(TARGET, SPACE, MadeUp(SPACE[7]), default=default)
    assert tuner.best_config("v2", TARGET.mnk, gpu=TARGET.gpu) == SPACE[7]


def test_the_default_stands_where_the_difference_is_within_the_noise():
    class Noisy(MadeUp):
        def seconds(self, config, stage):
            return super().seconds(self.best, stage) * (1 + self.random.gauss(0, 0.02))

    for seed in range(10):
        timer = Noisy(SPACE[3])
        timer.random.seed(seed)
        times = tuner.tune(TARGET, SPACE, timer, default=SPACE[11])
        assert len(times[str(SPACE[11])]) == tuner.STAGES[-1].rounds
        assert tuner.best_config("v2", TARGET.mnk, gpu=TARGET.gpu) == SPACE[11]


def test_all_are_timed_in_turn_and_the_better_ones_more():
    timer = MadeUp(SPACE[4])
    tuner.tune(TARGET, SPACE, timer)
    first = timer.asked[: len(SPACE)]
    assert sorted(first) == sorted(map(str, SPACE))
    second = timer.asked[len(SPACE) : 2 * len(SPACE)]
    assert sorted(second) == sorted(first) and second != first
    times = Counter(timer.asked)
    assert times[str(SPACE[4])] == sum(stage.rounds for stage in tuner.STAGES)
    assert times[str(SPACE[-1])] == tuner.STAGES[0].rounds


@pytest.mark.parametrize("stop", [0, 5, len(SPACE), len(SPACE) + 3, 2 * len(SPACE) + 7])
def test_a_stopped_run_goes_on_without_timing_whole_rounds_again(stop):
    with pytest.raises(KeyboardInterrupt):
        tuner.tune(TARGET, SPACE, MadeUp(SPACE[9], stop_after=stop))
    whole = MadeUp(SPACE[9])
    tuner.tune(TARGET, SPACE, whole)
    kept = stop // len(SPACE) if stop < 2 * len(SPACE) else 2
    assert Counter(whole.asked)[str(SPACE[0])] == tuner.STAGES[0].rounds - kept
    assert tuner.best_config("v2", TARGET.mnk, gpu=TARGET.gpu) == SPACE[9]
    assert json.loads(tuner.memory_path().read_text())["unfinished"] == {}


def test_what_was_timed_of_another_space_is_not_used():
    with pytest.raises(KeyboardInterrupt):
        tuner.tune(TARGET, SPACE, MadeUp(SPACE[9], stop_after=2 * len(SPACE)))
    other = MadeUp(SPACE[1])
    tuner.tune(TARGET, SPACE[:5], other)
    assert set(other.asked[:5]) == set(map(str, SPACE[:5]))


def test_what_is_only_faster_at_a_clock_it_shares_does_not_displace_the_default():
    """As under a power limit: in short turns all run at one clock, in a block of its own each at what it can keep."""
    power_hungry, default = SPACE[3], SPACE[8]

    class PowerLimited(MadeUp):
        def seconds(self, config, stage):
            seconds = super().seconds(config, stage)
            alone = stage.lead_s >= 0.2 and stage.seconds >= 0.2
            return seconds * 1.10 if alone and config == power_hungry else seconds

    tuner.tune(TARGET, SPACE, PowerLimited(power_hungry), default=default)
    assert tuner.best_config("v2", TARGET.mnk, gpu=TARGET.gpu) != power_hungry


def test_a_winner_that_is_wrong_is_not_remembered():
    with pytest.raises(RuntimeError, match="wrong result"):
        tuner.tune(TARGET, SPACE, MadeUp(SPACE[0], wrong=True))
    assert tuner.best_config("v2", TARGET.mnk, gpu=TARGET.gpu) is None


def test_a_neighbour_stands_in_unless_it_is_far_or_the_shape_must_be_exact():
    tuner.tune(TARGET, SPACE, MadeUp(SPACE[3]))
    assert tuner.best_config("v2", (8192, 6144, 8192), gpu=TARGET.gpu) == SPACE[3]
    assert tuner.best_config("v2", (8192, 6144, 8192), gpu=TARGET.gpu, exact=True) is None
    assert tuner.best_config("v2", (512, 8192, 8192), gpu=TARGET.gpu) is None
    assert tuner.best_config("v2", (0, 8192, 8192), gpu=TARGET.gpu) is None


def test_nothing_is_shared_across_gpus_types_and_major_orders():
    tuner.tune(TARGET, SPACE, MadeUp(SPACE[3]))
    assert tuner.best_config("v2", TARGET.mnk, gpu="NVIDIA H100") is None
    assert tuner.best_config("v2", TARGET.mnk, "bfloat16", gpu=TARGET.gpu) is None
    assert tuner.best_config("v2", TARGET.mnk, a_major="m", gpu=TARGET.gpu) is None
    assert tuner.best_config("v1", TARGET.mnk, gpu=TARGET.gpu) is None
    assert tuner.best_config("v2", TARGET.mnk, b_major="n", gpu=TARGET.gpu) is None


def test_a_configuration_that_left_the_space_is_forgotten():
    tuner.tune(TARGET, SPACE, MadeUp(SPACE[3]))
    state = json.loads(tuner.memory_path().read_text())
    state["best"][TARGET.key]["config"] = "96x96x48"
    tuner.memory_path().write_text(json.dumps(state))
    assert tuner.best_config("v2", TARGET.mnk, gpu=TARGET.gpu) is None


def test_a_file_that_cannot_be_read_is_said_not_overwritten():
    tuner.memory_path().write_text("{")
    with pytest.raises(tuner.Unavailable, match="remove it"):
        tuner.best_config("v2", TARGET.mnk, gpu=TARGET.gpu)
    assert tuner.memory_path().read_text() == "{"


def test_with_the_cache_off_nothing_is_remembered_and_tuning_says_so(monkeypatch):
    monkeypatch.setenv("CUTE_MATMUL_CACHE", "0")
    assert tuner.best_config("v2", TARGET.mnk, gpu=TARGET.gpu) is None
    with pytest.raises(tuner.Unavailable, match="turned off"):
        tuner.tune(TARGET, SPACE, MadeUp(SPACE[0]))


def test_kernels_are_compiled_in_other_processes_into_the_cache(folder):
    jobs = [tuner.Job("v1", str(c)) for c in registry.get("v1").load().SPACE[:1]] + [tuner.Job("v1", "8x8x8")]
    seen = []
    found = tuner.compile_jobs(jobs, workers=2, done=seen.append)
    assert found[jobs[0]] is None
    assert "config" in found[jobs[1]]
    assert set(seen) == set(jobs)
    assert len(list(folder.glob("v1-*"))) == 1


def test_without_a_gpu_the_command_says_so(capsys):
    from cute_matmul.harness import no_hopper_gpu

    if no_hopper_gpu() is None:
        pytest.skip("there is a GPU here")
    assert tuner.main(["v2"]) == 1
    assert "GPU" in capsys.readouterr().err


def test_bad_arguments_are_named(capsys, monkeypatch):
    monkeypatch.setattr(tuner, "_gpu_name", lambda: "NVIDIA H200")
    for arguments, said in ((["v9"], "variant must be one of"), (["--shape", "1x2"], "shape must look like")):
        assert tuner.main(arguments) == 2
        assert said in capsys.readouterr().err


def test_what_is_remembered_is_listed(capsys):
    tuner.tune(TARGET, SPACE, MadeUp(SPACE[3]))
    assert tuner.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "8192x8192x8192" in out and str(SPACE[3]) in out
    assert tuner.main(["--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[TARGET.key]["config"] == str(SPACE[3])
