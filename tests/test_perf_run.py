"""The whole runner on a simulated board: order, checks before timing, resume, budget, what a result says."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perf import device as device_module
from perf import (
    everything,
    host,
    measure,
    peers,
    profile,
    render,
    results,
    run,
    simulation,
    suites,
    tables,
    timeline,
)
from perf.device import Layout, sets_needed
from perf.suites import Shape

SHAPE = Shape(8192, 8192, 8192)
EFFORT = suites.Effort(burst_rounds=3, sustained_rounds=3, warm_s=0.5, idle_total_s=60, budget_s=1e6)


def suite_of(*shapes, memory_bound=False):
    return suites.Suite("ladder", shapes or (SHAPE,), ("ladder",), ("cublas",), EFFORT, EFFORT, memory_bound)


def empty_record(suite, contenders):
    return {
        "suite": suite.name,
        "shapes": [{"mnk": list(s.mnk), "name": s.name} for s in suite.shapes],
        "contenders": [
            {"name": c.name, "label": c.label, "kind": c.kind, "accumulate": c.accumulate} for c in contenders
        ],
        "machine": {"sm_count": 132},
        "conditions": {},
        "skipped": [],
        "failed": [],
        "checks": [],
        "ceilings": [],
        "measurements": [],
    }


def measured(suite=None, effort=EFFORT, device=None, contenders=None, names=("v1", "v6")):
    suite = suite or suite_of()
    device = device or simulation.SimulatedDevice()
    contenders = contenders or simulation.contenders(device, names, ["cublas"])
    record = empty_record(suite, contenders)
    measure.Run(device, suite, effort, contenders, Layout(), record, lambda: None).measure()
    return record


def rounds(record, phase):
    found = {}
    for m in record["measurements"]:
        if m["phase"] == phase:
            found.setdefault(m["round"], []).append(m["contender"])
    return found


def test_contenders_take_turns_and_change_places():
    record = measured()
    for phase in ("burst", "sustained"):
        by_round = rounds(record, phase)
        assert sorted(by_round) == [0, 1, 2]
        assert all(sorted(names) == ["cublas", "v1", "v6"] for names in by_round.values())
        assert len({tuple(names) for names in by_round.values()}) == 3


def test_bursts_start_at_rest_and_come_before_sustained_blocks():
    record = measured()
    phases = [m["phase"] for m in record["measurements"]]
    assert phases == sorted(phases)
    for m in record["measurements"]:
        if m["phase"] == "burst":
            assert len(m["samples_s"]) == EFFORT.burst_calls
            assert m["before"]["reached"] and m["before"]["clock_mhz"] == simulation.IDLE_MHZ


def test_blocks_last_and_record_the_board():
    for m in measured()["measurements"]:
        if m["phase"] == "sustained":
            assert m["seconds"] >= EFFORT.block_s
            assert m["board"]["energy_j"] == pytest.approx(m["board"]["power_w"] * m["wall_s"], rel=0.01)
    held = [m["board"]["held_by"] for m in measured()["measurements"] if m["contender"] == "cublas"]
    assert "power_cap" in held[-1]


def test_figures_are_those_of_the_model():
    record = measured()
    burst = tables.figures(record, "burst", SHAPE)
    assert burst["v1"].tflops == pytest.approx(560, rel=0.01)
    assert burst["v1"].ratio.value == pytest.approx(560 / 780, rel=0.01)
    sustained = tables.figures(record, "sustained", SHAPE)
    assert sustained["cublas"].tflops < 0.95 * burst["cublas"].tflops
    v6 = sustained["v6"]
    assert v6.energy.gross_pj == pytest.approx(v6.power_w / v6.tflops, rel=0.01)
    idle = record["conditions"]["idle"]["power_w"]
    assert v6.energy.gross_pj - v6.energy.net_pj == pytest.approx(idle / v6.tflops, rel=0.01)
    assert v6.peak == pytest.approx(v6.tflops * 1e12 / (132 * 4096 * v6.clock_mhz * 1e6))


def test_a_wrong_result_is_not_timed():
    device = simulation.SimulatedDevice()
    contenders = simulation.contenders(device, ["v1", "v2"], ["cublas"])
    contenders[1].wrong = True
    record = measured(device=device, contenders=contenders)
    assert {m["contender"] for m in record["measurements"]} == {"v1", "cublas"}
    assert record["failed"][0]["contender"] == "v2"
    assert "wrong result" in record["failed"][0]["reason"]


def test_every_contender_is_checked_before_anything_is_timed():
    device = simulation.SimulatedDevice()
    log = []
    device.check = lambda *_: log.append("check") or {"relative": 0.0}
    burst = measure.Run._burst
    contenders = simulation.contenders(device, ["v1"], ["cublas"])
    runner = measure.Run(
        device, suite_of(), EFFORT, contenders, Layout(), empty_record(suite_of(), contenders), lambda: None
    )
    runner._burst = lambda *a: log.append("burst") or burst(runner, *a)
    runner.measure()
    assert log.index("burst") == 2
    assert Counter(log)["check"] == 2


def test_one_that_breaks_does_not_stop_the_others():
    device = simulation.SimulatedDevice()
    contenders = simulation.contenders(device, ["v1", "v2"], ["cublas"])

    def broken(*_):
        raise TypeError("unexpected keyword")

    contenders[1].prepare = broken
    record = measured(device=device, contenders=contenders)
    assert {m["contender"] for m in record["measurements"]} == {"v1", "cublas"}
    assert record["failed"] == [
        {"contender": "v2", "shape": list(SHAPE.mnk), "reason": "TypeError: unexpected keyword"}
    ]


def test_who_cannot_take_part_is_skipped_with_a_reason():
    device = simulation.SimulatedDevice()
    contenders = simulation.contenders(device, ["v1"], ["cublas", "quack"])
    contenders[2].skip = "quack-kernels is not installed"
    record = measured(device=device, contenders=contenders)
    assert record["skipped"] == [
        {"contender": "quack", "shape": list(SHAPE.mnk), "reason": "quack-kernels is not installed"}
    ]


def test_short_calls_are_timed_in_graphs_that_use_every_operand_set():
    small = Shape(512, 512, 512)
    record = measured(suite=suite_of(small), effort=replace(EFFORT, sustained_rounds=0))
    sets = sets_needed(small, simulation.SimulatedDevice().l2_bytes)
    assert sets * small.input_bytes() >= 3 * simulation.SimulatedDevice().l2_bytes
    for m in record["measurements"]:
        assert m["method"] == "graph" and m["calls_per_sample"] % sets == 0  # each set equally often
    assert tables.figures(record, "burst", small)["v1"].seconds == pytest.approx(1e-6, rel=0.05)


def test_all_contenders_of_a_shape_are_timed_in_one_way():
    """Eager and in a graph, calls of equal length are not the same load."""
    middling = Shape(4096, 4096, 4096)  # V0 needs more than the limit for graphs, the others less
    record = measured(suite=suite_of(middling), effort=replace(EFFORT, sustained_rounds=0), names=("v0", "v6"))
    methods = {m["contender"]: m["method"] for m in record["measurements"]}
    assert methods == {"v0": "graph", "v6": "graph", "cublas": "graph"}
    seconds = tables.figures(record, "burst", middling)
    assert seconds["v0"].seconds > measure.GRAPH_BELOW_S > seconds["v6"].seconds


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(("suite", "limit"), [("ladder", 480), ("decode", 150)])
def test_suites_end_in_time(suite, limit, quick, tmp_path):
    arguments = ["--simulate", "--results", str(tmp_path), "--suite", suite, *(["--quick"] if quick else [])]
    assert run.main(arguments) == run.OK
    (path,) = tmp_path.glob("*.json")
    assert results.load(path)["seconds"] < (180 if suite == "ladder" and quick else limit)


def test_the_choice_between_candidates_does_not_go_by_their_order():
    """On a board that slows down while candidates are tried, the first one would win a single round."""
    true, calls = {"first": 1.00, "second": 0.97, "broken": 0.5}, []

    def seconds(launch):
        calls.append(launch)
        return true[launch.name] * (1.0 if len(calls) == 1 else 1.1)

    class Candidate:
        def __init__(self, name):
            self.name = name

        def __call__(self, a, b, out):
            if self.name == "broken":
                raise RuntimeError("no such tile\nand more")

    candidates = [(name, Candidate(name)) for name in true]
    operands = device_module.Operands(None, None, None)
    launch, details = peers.best_of(candidates, operands, seconds)
    assert launch.name == details["config"] == "second"
    assert details["candidates_us"]["broken"] == "RuntimeError: no such tile"
    with pytest.raises(measure.Skip, match="no candidate ran"):
        peers.best_of(candidates[2:], operands, seconds)


def test_memory_bound_suites_are_held_against_a_measured_ceiling():
    shape = Shape(16, 8192, 8192)
    record = measured(suite=suite_of(shape, memory_bound=True), effort=replace(EFFORT, sustained_rounds=0))
    assert record["ceilings"][0]["bytes"] == shape.input_bytes()
    record["suite"] = "decode"
    assert "89%" in tables.decode(record)


def test_rounds_beyond_three_stop_at_the_budget():
    effort = replace(EFFORT, burst_rounds=9, sustained_rounds=9, budget_s=60.0)
    record = measured(effort=effort)
    assert 3 <= len(rounds(record, "sustained")) < 9
    assert len(rounds(measured(effort=replace(effort, budget_s=0.0)), "burst")) == 3


def widest(record, phase):
    return max(f.ratio.half_width for f in tables.figures(record, phase, SHAPE).values() if f.ratio)


def test_rounds_go_on_until_every_ratio_is_known_well_enough():
    noisy, goal = {"seed": 0, "noise": 0.015}, 0.012
    plain = measured(device=simulation.SimulatedDevice(**noisy))
    assert len(rounds(plain, "burst")) == 3 and widest(plain, "burst") > goal
    record = measured(device=simulation.SimulatedDevice(**noisy), effort=replace(EFFORT, goal=goal))
    made = len(rounds(record, "burst"))
    assert 3 < made < 3 * suites.MOST_TIMES and widest(record, "burst") <= goal
    assert len(rounds(record, "sustained")) == 3 and widest(record, "sustained") <= goal
    assert all(sorted(names) == ["cublas", "v1", "v6"] for names in rounds(record, "burst").values())
    # One round fewer would not have been enough.
    record["measurements"] = [m for m in record["measurements"] if m["round"] < made - 1]
    assert widest(record, "burst") > goal


@pytest.mark.parametrize(
    ("change", "made"),
    [
        ({}, 3 * suites.MOST_TIMES),  # hopeless: not for ever
        ({"budget_s": 0.0}, 3),
        ({"idle_total_s": 0.0}, 3),  # more bursts would not begin at rest
    ],
    ids=["most", "budget", "rest"],
)
def test_where_rounds_beyond_those_wanted_end(change, made):
    device = simulation.SimulatedDevice(noise=0.5)
    record = measured(device=device, effort=replace(EFFORT, goal=0.012, sustained_rounds=0, **change))
    assert len(rounds(record, "burst")) == made


@pytest.mark.parametrize("cut", [4, 15, 30, 40])
def test_a_stopped_run_keeps_whole_rounds_and_goes_on(cut, tmp_path, capsys):
    arguments = ["--simulate", "--results", str(tmp_path), "--variants", "v1,v6", "--peers", "cublas"]
    device = simulation.SimulatedDevice(interrupt_after=cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "SimulatedDevice", lambda: device)
        assert run.main(arguments) == run.INTERRUPTED
    (path,) = tmp_path.glob("*.json")
    stopped = results.load(path)
    assert not stopped["complete"]
    kept = {(m["phase"], m["round"], m["contender"]): m["samples_s"] for m in stopped["measurements"]}

    assert run.main(arguments) == run.OK
    (path,) = tmp_path.glob("*.json")
    whole = results.load(path)
    assert whole["complete"] and len(whole["resumed"]) == 1
    assert f"going on with {path}" in capsys.readouterr().out
    seen = Counter((m["phase"], m["round"], m["contender"]) for m in whole["measurements"])
    assert set(seen.values()) == {1}
    assert len(seen) == 3 * 2 * suites.SUITES["ladder"].effort.burst_rounds
    measure.drop_cut_rounds(stopped)
    for m in stopped["measurements"]:
        again = next(w for w in whole["measurements"] if all(w[k] == m[k] for k in ("phase", "round", "contender")))
        assert again["samples_s"] == kept[(m["phase"], m["round"], m["contender"])]


def test_another_kind_of_run_does_not_go_on_with_a_stopped_one(tmp_path):
    base = ["--simulate", "--results", str(tmp_path), "--variants", "v1", "--peers", "cublas", "--quick"]
    device = simulation.SimulatedDevice(interrupt_after=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "SimulatedDevice", lambda: device)
        assert run.main(base) == run.INTERRUPTED
    assert run.main([*base, "--dtype", "bf16"]) == run.OK
    assert run.main([*base, "--variants", "v2"]) == run.OK
    assert run.main([*base, "--no-resume"]) == run.OK
    assert len(list(tmp_path.glob("*.json"))) == 4


def test_cut_rounds_are_dropped_whole():
    record = measured()
    last = record["measurements"].pop()
    dropped = measure.drop_cut_rounds(record)
    assert dropped == last["of"] - 1
    assert not any(m["phase"] == "sustained" and m["round"] == last["round"] for m in record["measurements"])


def test_a_result_says_everything_about_itself(tmp_path):
    arguments = ["--simulate", "--results", str(tmp_path), "--variants", "v1", "--peers", "cublas", "--quick"]
    assert run.main(arguments) == run.OK
    (path,) = tmp_path.glob("*-simulated-h200-ladder.json")
    record = json.loads(path.read_text())
    assert record["simulated"] and record["complete"] and record["quick"]
    assert {"commit", "clean", "machine", "versions", "conditions", "command", "started", "finished"} <= set(record)
    assert {"gpu", "driver", "sm_count", "l2_bytes"} <= set(record["machine"])
    assert record["conditions"]["idle"]["clock_mhz"] == simulation.IDLE_MHZ
    assert results.load(path) == record
    assert render.Pages(tmp_path, [(path, {**record, "partial": False})]).newest("ladder") is None, (
        "a simulated result is never taken for a measured one"
    )


def test_simulated_results_stay_out_of_the_projects_folder(capsys):
    assert run.main(["--simulate"]) == run.USAGE
    assert "--results" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["--dtype", "fp8"], "dtype must be float16"),
        (["--shape", "12x"], "shape must look like"),
        (["--shape", "0"], "positive"),
        (["--peers", "mkl"], "peers must be of cublas"),
        (["--variants", "v99"], "variant must be one of"),
        (["--config", "v2"], "config must look like"),
        (["--config", "v2=64"], "config must look like"),
        (["--suite", "host", "--config", "v5=128x128x64"], "--config is not taken by the suite host"),
        (["--suite", "compile", "--b-major", "n"], "--b-major is not taken by the suite compile"),
        (["--suite", "precision", "--peers", "all"], "--peers is not taken by the suite precision"),
        (["--variants", "v3", "--config", "v2=64x128x64"], "config must be of variants that are measured (v3), got v2"),
    ],
)
def test_bad_arguments_are_named(arguments, said, tmp_path, capsys):
    assert run.main(["--simulate", "--results", str(tmp_path), *arguments]) == run.USAGE
    assert said in capsys.readouterr().err


TWO = ["--config", "v3=128x128x64,stages=2", "--config", "v3=128x128x64,stages=3"]


def test_configurations_of_one_variant_are_compared_in_one_run(tmp_path):
    arguments = ["--simulate", "--quick", "--results", str(tmp_path), "--variants", "v3,v1", "--peers", "cublas", *TWO]
    assert run.main(arguments) == run.OK
    record = results.load(next(tmp_path.glob("*.json")))
    names = ["v3 128x128x64,stages=2", "v3 128x128x64,stages=3", "v1", "cublas"]
    assert [c["name"] for c in record["contenders"]] == names
    assert [c["asked"] for c in record["contenders"]] == ["128x128x64,stages=2", "128x128x64,stages=3", None, None]
    checked = {c["contender"]: c["details"]["config"] for c in record["checks"]}
    assert checked[names[1]] == "128x128x64,stages=3"
    assert set(tables.figures(record, "burst", suites.LADDER_SHAPE)) == set(names)


def test_real_contenders_of_one_variant_have_its_rung_and_their_configuration():
    asked = [("v3", "128x128x64,stages=2"), ("v3", "128x128x64,stages=3"), ("v1", "64x128x64")]
    found = peers.build(["v3", "v1", "v0"], [], asked, "NVIDIA H200")
    assert [(c.name, c.variant, c.config) for c in found] == [
        ("v3 128x128x64,stages=2", "v3", "128x128x64,stages=2"),
        ("v3 128x128x64,stages=3", "v3", "128x128x64,stages=3"),
        ("v1", "v1", "64x128x64"),
        ("v0", "v0", None),
    ]
    for contender, config in zip(found[:3], [c for _, c in asked], strict=True):
        assert str(contender.choose(suites.LADDER_SHAPE, Layout())[0]) == config


MADE_UP = simulation.SimulatedDevice


def stopped(monkeypatch, after):
    """The next simulated device, which is interrupted at that call of `elapsed` (None: never)."""
    device = MADE_UP(interrupt_after=after)
    monkeypatch.setattr(simulation, "SimulatedDevice", lambda: device)
    return device


@pytest.mark.parametrize("change", ["config", "board"])
def test_a_stopped_run_goes_on_only_with_what_it_was_begun_with(change, tmp_path, monkeypatch):
    arguments = ["--simulate", "--quick", "--results", str(tmp_path), "--variants", "v3", "--peers", "cublas"]
    stopped(monkeypatch, after=12)
    assert run.main([*arguments, "--config", "v3=128x128x64,stages=2"]) == run.INTERRUPTED
    device = stopped(monkeypatch, after=None)
    other = {**device.describe(), "board": "another"}
    if change == "board":
        monkeypatch.setattr(device, "describe", lambda: other, raising=False)
    stages = 3 if change == "config" else 2
    assert run.main([*arguments, "--config", f"v3=128x128x64,stages={stages}"]) == run.OK
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_the_time_of_a_run_counts_what_was_before_it_was_stopped(tmp_path, monkeypatch):
    arguments = ["--simulate", "--quick", "--results", str(tmp_path), "--variants", "v3", "--peers", "cublas"]
    stopped(monkeypatch, after=12)
    assert run.main(arguments) == run.INTERRUPTED
    (path,) = tmp_path.glob("*.json")
    before = results.load(path)["seconds"]
    stopped(monkeypatch, after=None)
    assert run.main(arguments) == run.OK
    assert before > 1 and results.load(path)["seconds"] > before + 1


def test_a_variant_tuned_anew_while_its_run_was_stopped_is_not_mixed(tmp_path, monkeypatch):
    arguments = ["--simulate", "--quick", "--results", str(tmp_path), "--variants", "v3", "--peers", "cublas"]
    stopped(monkeypatch, after=12)
    assert run.main(arguments) == run.INTERRUPTED
    stopped(monkeypatch, after=None)
    made = simulation.SimulatedContender.prepare

    def tuned(contender, *arguments):
        prepared = made(contender, *arguments)
        return replace(prepared, details={"config": "tuned meanwhile"}) if contender.name == "v3" else prepared

    monkeypatch.setattr(simulation.SimulatedContender, "prepare", tuned)
    assert run.main(arguments) == run.FAILED
    (path,) = tmp_path.glob("*.json")
    (failure,) = results.load(path)["failed"]
    assert failure["contender"] == "v3" and "before the run was stopped" in failure["reason"]


@pytest.mark.parametrize("how", ["terminate", "crash"])
def test_a_run_that_is_ended_otherwise_keeps_what_it_has(how, tmp_path, monkeypatch):
    device = simulation.SimulatedDevice()
    elapsed, calls = device.elapsed, []

    def end(steps):
        calls.append(1)
        if len(calls) == 12 and how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        if len(calls) == 12 and how == "crash":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return elapsed(steps)

    device.elapsed = end
    monkeypatch.setattr(simulation, "SimulatedDevice", lambda: device)
    arguments = ["--simulate", "--results", str(tmp_path), "--variants", "v1", "--peers", "cublas"]
    if how == "terminate":
        assert run.main(arguments) == run.INTERRUPTED
    else:
        with pytest.raises(RuntimeError, match="illegal memory"):
            run.main(arguments)
    (path,) = tmp_path.glob("*.json")
    assert len(results.load(path)["measurements"]) >= 2 and results.load(path)["seconds"] > 1


def test_names_of_results_do_not_collide(tmp_path):
    started = results.now()
    first = results.new_path(tmp_path, started, "NVIDIA H200", "ladder", "float16")
    assert first.name == f"{started:%Y-%m-%d}-h200-ladder.json"
    first.touch()
    assert results.new_path(tmp_path, started, "NVIDIA H200", "ladder", "float16").name.endswith("-ladder-2.json")
    assert results.new_path(tmp_path, started, "NVIDIA H200", "ladder", "bfloat16").name.endswith("-bfloat16.json")


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    results.write_atomically(path, "old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        results.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_suites_hold_the_shapes_of_the_case_file():
    cases = json.loads((Path(__file__).parent / "data" / "suite.json").read_text())
    for name in ("square", "model", "decode"):
        wanted = [(tuple(c["mnk"]), c.get("name", "")) for c in cases[name]]
        assert [(s.mnk, s.name) for s in suites.SUITES[name].shapes] == wanted


def test_host_calls_take_turns_with_an_empty_queue():
    log = []
    calls = {name: (lambda n=name: log.append(n)) for name in ("a", "b", "c")}
    taken = host.time_calls(calls, 250, lambda: log.append("sync"))
    assert {name: len(values) for name, values in taken.items()} == {"a": 250, "b": 250, "c": 250}
    called = [entry for entry in log if entry != "sync"]
    assert log[1::2] == ["sync"] * len(called)
    turns = [called[i] for i in range(0, len(called), host.TURN + 1)]
    assert len(turns) == 9 and all(set(turns[i : i + 3]) == {"a", "b", "c"} for i in (0, 3, 6))


def test_thinned_samples_keep_their_percentiles():
    values = [float(i) for i in range(10_000)][::-1]
    kept = host.thin(values)
    assert len(kept) == host.KEPT and kept[0] == 0 and kept[-1] == 9999
    assert kept[len(kept) // 2] == pytest.approx(5000, abs=5)


def test_everything_goes_on_after_a_step_that_fails(tmp_path, monkeypatch, capfd):
    simulated = ("perf/run.py", "--simulate", "--variants", "v1,v6", "--peers", "cublas")
    monkeypatch.setattr(
        everything,
        "STEPS",
        (
            everything.Step("ladder", simulated, 60),
            everything.Step("wrong", ("perf/run.py", "--suite", "decode", "--dtype", "fp8"), 60),
            everything.Step("long", ("perf/run.py", "--simulate", "--suite", "model"), 0),
            everything.Step("ladder-quick", (*simulated, "--quick"), 60),
        ),
    )
    assert everything.main(["--results", str(tmp_path)]) == 1
    last = capfd.readouterr().out.splitlines()[-5:]
    assert [line.split()[:2] for line in last] == [
        ["ladder", "done"],
        ["wrong", "exit"],
        ["long", "stopped"],
        ["ladder-quick", "done"],
        ["agreement", "done"],
    ]
    assert everything.main(["ladder", "nothing"]) == 2
    assert "steps must be of ladder, wrong, long, ladder-quick; got nothing" in capfd.readouterr().err


def test_every_step_of_everything_is_a_command_that_exists(capsys):
    """Their options are taken, and every suite has its step."""
    assert everything.main(["--list"]) == 0
    listed = capsys.readouterr().out
    parsers = {"perf/run.py": run.parser, "perf/profile.py": profile.parser, "perf/timeline.py": timeline.parser}
    for step in everything.STEPS:
        script, *rest = step.command
        parsers[script]().parse_args([*rest, "--results", "folder"])
        assert f"{step.name} " in listed
    named = {step.command[2] for step in everything.STEPS if step.command[0] == "perf/run.py"}
    assert named == {*suites.SUITES, "host", "compile", "precision"}
