"""The whole run: what it leaves, and that nothing but time is lost when it is killed, stopped, or out of disk."""

import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl.trajectory import decode_shard
from tests import faulty_gcs, gcs
from tests.rl.test_learner_mesh import free_port
from tests.trace_jax import tiny
from trace_jax import cli
from trace_jax.config import ROOT, load_config
from trace_jax.diagnose import Diagnosis
from trace_jax.errors import InputError, Unfinished
from trace_jax.runtime import plan
from trace_jax.stores import open_store
from trace_jax.workdir import Workdir

# what depends on the clock, the process or the disk's layout, and is no figure
VOLATILE = ("/checkpoints/", "events/", ".lock", "error.log", "error-", "seconds.jsonl", "stall", "report.html", "config.json")


def command(config, workdir, *more) -> list[str]:
    return ["run", f"--config={config}", f"--workdir={workdir}", *more]


def start(config, workdir, *more: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "trace_jax", *command(config, workdir, *more)]
    return subprocess.Popen(words, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def shards(workdir: pathlib.Path) -> list[pathlib.Path]:
    return sorted(workdir.glob("rollouts/*/*/*.zst"))


def wait_for(process: subprocess.Popen, workdir: pathlib.Path, count: int) -> None:
    """Until a run has stored so many batches."""
    deadline = time.monotonic() + 300
    while len(shards(workdir)) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{len(shards(workdir))} of {count} shards"
        time.sleep(0.02)


def stop(process: subprocess.Popen, number: signal.Signals) -> tuple[int, str]:
    """The exit code, and the last line of stderr."""
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    return process.returncode, error.rstrip().rpartition("\n")[2]


def figures(workdir: pathlib.Path) -> dict[str, object]:
    """Every file of a run that must not depend on when it was interrupted."""
    found: dict[str, object] = {}
    for path in sorted(workdir.rglob("*")):
        name = path.relative_to(workdir).as_posix()
        if path.is_dir() or any(part in name for part in VOLATILE):
            continue
        data = path.read_bytes()
        if name.endswith("metrics.jsonl"):
            rows = map(json.loads, data.splitlines())
            data = [{k: v for k, v in row.items() if not k.startswith("seconds") and k != "compiles"} for row in rows]
        elif name.endswith("certificate.json"):
            data = json.loads(data) | {"when": ""}
        elif path.name == "spent.json":
            stages = json.loads(data)["stages"]
            data = {stage: (cost["rollouts"], cost["sampled_tokens"]) for stage, cost in stages.items()}
        found[name] = data
    return found


def differences(workdir: pathlib.Path, reference: pathlib.Path) -> list[str]:
    ours, theirs = figures(workdir), figures(reference)
    return [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]


@pytest.fixture(scope="module")
def config(tmp_path_factory, checkpoint) -> pathlib.Path:
    return tiny.write_config(tmp_path_factory.mktemp("run") / "config.py", checkpoint, most=3)


ONE = "structured_data_reasoning"


@pytest.fixture(scope="module")
def reference(config) -> pathlib.Path:
    """The workdir of a run that nothing disturbed."""
    workdir = config.parent / "reference"
    assert cli.main(command(config, workdir)) == 0
    return workdir


def test_a_run_leaves_all_that_others_rely_on(reference):
    with Workdir.open(reference, lock=False) as workdir:
        retained = [e["skill"] for e in workdir.read_json("diagnosis/selected_capabilities.json") if e["status"] == "DONE"]
        assert len(retained) == 3
        names = ["config.json", "report.html", "spent.json", "rollouts/base/train/00000.jsonl.zst", "rollouts/base/train/manifest.json"]
        names += ["diagnosis/candidates.json", *(f"diagnosis/runs/run_{i:02d}.json" for i in range(1, 11))]
        for c in retained:
            names += [f"environments/{c}/{f}" for f in ("environment.py", "package.json", "certificate.json", "calibration.json")]
            names += [f"adapters/{c}/{f}" for f in ("metrics.jsonl", "hf/adapter_config.json", "hf/adapter_model.safetensors")]
            names += [f"evaluation/adapter-{c}.json"]
        names += ["gate/metrics.jsonl", "gate/gate.safetensors", "gate/routing.json"]
        names += [f"evaluation/{policy}.json" for policy in ("base", "router", "composed", "do_nothing")]
        assert not [name for name in names if not workdir.exists(name)]
        assert all(workdir.list(folder) for folder in ("events", "gate/checkpoints", *(f"adapters/{c}/checkpoints" for c in retained)))
        for name in workdir.list("evaluation"):
            found = workdir.read_json(name)
            assert found["split"] == "heldout" and len(found["tasks"]) == 6
            low, high = found["overall"]["interval"]
            assert low <= found["overall"]["rate"] <= high and set(found["overall"]["pass_hat"]) == {"1"}
        adapters = [workdir.read_bytes(f"adapters/{c}/hf/adapter_model.safetensors") for c in retained]
        assert len(set(adapters)) == len(adapters)


def test_the_heldout_tasks_are_used_by_the_evaluation_alone(reference):
    for path in shards(reference):
        split = path.parent.name
        for t in decode_shard(path.read_bytes()):
            assert t.split == split and (t.seed >= 9_000_000) == (split == "heldout")
            assert t.environment == "desk" if split in ("train", "heldout") else t.environment.startswith("desk_")


def test_the_plan_is_what_is_rolled_out(reference, config):
    spent = json.loads((reference / "spent.json").read_text())["stages"]
    stages = plan(load_config(str(config)), len(list((reference / "adapters").iterdir())))
    for name in ("rollouts", "synthesize", "evaluate"):
        assert spent[name]["rollouts"] == stages[name]
    assert spent["train"]["rollouts"] + spent["compose"]["rollouts"] == pytest.approx(stages["train"] + stages["compose"], rel=0.15)


def test_steps_in_a_bucket_leave_the_files_of_a_local_run(reference, config, checkpoint, tmp_path, monkeypatch):
    with gcs.server() as url:
        for name, value in gcs.SETTINGS.items():
            monkeypatch.setenv(name, value.format(url))
        bucket = gcs.Bucket()
        address, model = f"{bucket.url}/runs/one", f"--config.model.path={bucket.upload(checkpoint, 'model')}"
        words = [f"--workdir={address}", f"--config={config}", model]
        assert cli.main(["rollout", "--policy=base", "--split=train", *words]) == 0
        assert cli.main(["diagnose", *words]) == 0 and cli.main(["report", f"--workdir={address}"]) == 0
        with Workdir.open(address, lock=False) as workdir:
            assert workdir.exists("report.html")
            for name in ("rollouts/base/train/00000.jsonl.zst", "diagnosis/runs/run_10.json"):
                assert workdir.read_bytes(name) == (reference / name).read_bytes()


@pytest.mark.slow
def test_a_run_in_a_bucket_finds_the_same_whatever_the_network_does(reference, config, checkpoint, tmp_path, monkeypatch):
    with faulty_gcs.proxy(tmp_path / "objects") as proxy:
        for name, value in gcs.SETTINGS.items():
            monkeypatch.setenv(name, value.format(proxy.url))
        bucket = gcs.Bucket()
        address, model = f"{bucket.url}/runs/one", f"--config.model.path={bucket.upload(checkpoint, 'model')}"
        proxy.rule = faulty_gcs.at_random(0.03, seed=1)
        process = start(config, address, model)
        store, deadline = open_store(address), time.monotonic() + 300
        while not store.list("gate") and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        proxy.emulator.kill()
        time.sleep(1)
        proxy.emulator.start()
        while (error := process.communicate()[1]) and process.returncode == 1 and time.monotonic() < deadline:
            assert "the same command goes on from there" in error  # a bucket keeps uploads under way, the emulator forgets them
            process = start(config, address, model)
        assert process.returncode == 0, error
        proxy.rule = lambda method, path: None
        for name in store.list(""):
            path = tmp_path / "run" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.read(name))
    assert sum(proxy.done.values()) > 10
    assert differences(tmp_path / "run", reference) == []


def test_a_second_run_samples_nothing_and_finds_the_same(reference, config, monkeypatch, capsys):
    before, written = figures(reference), {path: path.stat().st_mtime_ns for path in shards(reference)}
    monkeypatch.setattr("trace_jax.runtime.batches.Rollout", lambda *_, **__: pytest.fail("sampled again"))
    assert cli.main(command(config, reference)) == 0
    assert figures(reference) == before
    assert {path: path.stat().st_mtime_ns for path in shards(reference)} == written
    assert "composed" in capsys.readouterr().out


def test_bad_input_is_said_before_anything_is_made(config, tmp_path, capsys):
    assert cli.main(command(config, tmp_path / "w", "--config.train.rnk=3")) == 2
    assert "did you mean 'train.rank'" in capsys.readouterr().err
    assert cli.main(command(tmp_path / "none.py", tmp_path / "w")) == 2
    assert "no such file" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()
    assert cli.main(command(config, tmp_path / "w", "--config.model.path=/nowhere")) == 2
    assert "config field 'model.path': no config.json in /nowhere" in capsys.readouterr().err


def test_a_diagnosis_that_retains_nothing_ends_the_run(config, tmp_path, monkeypatch):
    with tiny.open_tiny(tmp_path, config.parent, diagnosis__gap="1.0", diagnosis__coverage="1.0") as runtime:
        from trace_jax.run import run

        monkeypatch.setattr("trace_jax.run.roll_out_train_split", lambda _: None)
        monkeypatch.setattr("trace_jax.run.diagnose_workdir", lambda _: tiny.retain(runtime))
        with pytest.raises(InputError, match="no capability was retained: see .*/diagnosis; more .*; report: .*/report.html"):
            run(runtime)
        assert runtime.workdir.exists("report.html")
        for passed, said in ((0, "All trajectories failed: .*; take a base that"), (3, "All trajectories passed: .* harder")):
            figures = Diagnosis([], [], [], [], {str(i): i < passed for i in range(3)}, {}, [], 0, [], [], {}, [], [], [])
            runtime.workdir.write_json("diagnosis/figures.json", figures.to_json())
            with pytest.raises(InputError, match=said):
                run(runtime)


def test_a_run_without_a_usable_environment_or_a_solved_seed_leaves_its_report(config, tmp_path, monkeypatch):
    with tiny.open_tiny(tmp_path, config.parent) as runtime:
        from trace_jax import run

        for step in ("roll_out_train_split", "diagnose_workdir", "train_adapter"):
            monkeypatch.setattr(run, step, lambda *_: None)
        entry = {"skill": ONE, "description": "", "passes_consistency": True, "status": "PENDING", "mean_cov": 0.5, "mean_delta": 0.5}
        entry |= {"n_runs_passed": 10, "n_runs_total": 10}
        runtime.workdir.write_json("diagnosis/selected_capabilities.json", [entry])
        refused = {ONE: {"usable": False, "reasons": ["knobs: none", "faults: boom"]}}
        monkeypatch.setattr(run, "synthesize_all", lambda _: refused)
        with pytest.raises(InputError, match="knobs: none; faults: boom; report: .*/report.html"):
            run.run(runtime)
        assert runtime.workdir.exists("report.html")
        refused[ONE] |= {"status": "needs_attention"}
        with pytest.raises(Unfinished, match="knobs: none; faults: boom; .*; report: .*/report.html"):
            run.run(runtime)
        refused[ONE] = {"usable": True, "reasons": []}
        monkeypatch.setattr(runtime, "usable", lambda: [ONE])

        def nothing(*_):
            raise run.NothingToCompose("no adapter solved a seed")

        monkeypatch.setattr(run, "compose", nothing)
        with pytest.raises(InputError, match="no adapter solved a seed; report: .*/report.html"):
            run.run(runtime)


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    """A disk of its own for one workdir, and a function that sets its size; a plain folder where that is not allowed."""
    folder = tmp_path_factory.mktemp("disk")

    def mount(*options: str) -> bool:
        return subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode == 0

    mounted = mount("-t", "tmpfs", "-o", "size=600k", "none")
    yield folder / "run", (lambda size: mount("-o", f"remount,size={size}")) if mounted else None
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def disturbed(config, reference, small_disk):
    """The workdir of a run that met a full disk, SIGKILL, SIGTERM and Ctrl-C, and how each of its processes ended."""
    workdir, resize = small_disk
    total, random_ = len(shards(reference)), random.Random(0)
    ends: dict[str, object] = {}
    if resize:
        process = start(config, workdir)
        _, error = process.communicate(timeout=300)
        ends["full"] = (process.returncode, error.rstrip().rpartition("\n")[2])
        ends["whole"] = [path.name for path in shards(workdir) if list(decode_shard(path.read_bytes())) == []]
        ends["kept"] = len(shards(workdir))
        assert resize("100m")
    done = len(shards(workdir))
    for place, number in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGINT), 1):
        process = start(config, workdir)
        wait_for(process, workdir, done + math.ceil((total - done) * place / 4))
        if number == signal.SIGTERM:
            ends["locked"] = cli.main(["diagnose", f"--workdir={workdir}"])
        time.sleep(random_.random() / 2)
        ends[number.name] = stop(process, number)
    process = start(config, workdir)
    ends["error"] = process.communicate(timeout=300)[1]
    ends["end"] = process.returncode
    return workdir, ends


def test_whatever_happens_to_a_run_it_ends_with_the_same_figures(disturbed, reference):
    workdir, ends = disturbed
    assert ends["end"] == 0
    assert differences(workdir, reference) == []


def test_a_stopped_run_says_so_and_has_the_exit_code_of_its_signal(disturbed):
    _, ends = disturbed
    assert ends["SIGKILL"][0] == -signal.SIGKILL
    assert ends["SIGTERM"] == (143, "trace-jax: terminated; what was done is saved, the same command goes on from there")
    assert ends["SIGINT"] == (130, "trace-jax: interrupted; what was done is saved, the same command goes on from there")


def test_a_workdir_in_use_is_refused(disturbed):
    assert disturbed[1]["locked"] == 2


def test_a_full_disk_is_one_line_and_costs_nothing_that_was_written(disturbed):
    _, ends = disturbed
    if "full" not in ends:
        pytest.skip("mounting a small disk is not allowed here")
    code, line = ends["full"]
    assert code == 1 and line.startswith("trace-jax: the disk is full (") and "the same command goes on from there" in line
    assert ends["whole"] == [] and ends["kept"] >= 3


def test_the_progress_and_what_holds_the_workers_are_all_that_is_on_stderr(disturbed):
    lines = disturbed[1]["error"].splitlines()
    sandbox = [line for line in lines if line.startswith("sandbox best_effort: ")]
    assert len(sandbox) == 1 and len(lines) > 1 and all("%  " in line for line in lines if line not in sandbox), lines


def start_two(config, workdir) -> list[subprocess.Popen]:
    port = free_port()
    return [start(config, workdir, f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={index}") for index in range(2)]


def same_as_alone(workdir: pathlib.Path, reference: pathlib.Path) -> None:
    """What a run of several processes has in common with one: every token, every verdict, and adapters to the last bits."""
    with Workdir.open(workdir, lock=False) as ours, Workdir.open(reference, lock=False) as theirs:
        manifests = [name for name in theirs.list("rollouts") if name.endswith("manifest.json")]
        assert manifests == [name for name in ours.list("rollouts") if name.endswith("manifest.json")]
        for folder in (name.split("/")[1:3] for name in manifests):
            for a, b in zip(ours.read_shards(*folder), theirs.read_shards(*folder), strict=True):
                assert (a.id, a.tokens.tolist(), a.reward) == (b.id, b.tokens.tolist(), b.reward)
        for name in theirs.list("evaluation") + theirs.list("diagnosis"):
            assert ours.read_bytes(name) == theirs.read_bytes(name), name
        for name in (name for name in theirs.list("") if name.endswith("metrics.jsonl")):
            for a, b in zip(ours.read_jsonl(name), theirs.read_jsonl(name), strict=True):
                assert all(a[key] == pytest.approx(b[key], rel=1e-3) for key in ("reward", "loss", "grad_norm") if key in b), name
        for name in (name for name in theirs.list("") if name.endswith(("hf/adapter_model.safetensors", "gate.safetensors"))):
            a, b = (load_file(w.local(name)) for w in (ours, theirs))
            assert all(np.allclose(a[key], b[key], atol=1e-5) for key in b), name


def test_two_processes_that_are_preempted_and_go_on_make_the_run_of_one(config, reference, tmp_path):
    workdir = tmp_path / "run"
    running = start_two(config, workdir)
    wait_for(running[0], workdir, len(shards(reference)) // 2)
    for process in running:
        process.send_signal(signal.SIGTERM)
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [143, 143], errors
    running = start_two(config, workdir)
    ends = [process.communicate(timeout=400)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    assert ends[1] == ""  # one speaks
    same_as_alone(workdir, reference)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_is_lost_ends_the_others_and_the_command_goes_on_from_there(config, reference, tmp_path, lost):
    workdir, total, random_ = tmp_path / "run", 2 * len(shards(reference)), random.Random(lost)
    for place in range(3):
        running = start_two(config, workdir)
        wait_for(running[0], workdir, max(1, total * (place + 1) // 5))
        time.sleep(random_.random() * 2)
        running[lost].kill()
        for process in running:
            process.communicate(timeout=120)  # the others notice
        assert all(process.returncode for process in running)
    assert [process.wait(timeout=400) for process in start_two(config, workdir)] == [0, 0]
    same_as_alone(workdir, reference)


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(config, reference, tmp_path):
    workdir, total, random_ = tmp_path / "run", len(shards(reference)), random.Random(1)
    for place in range(10):
        process = start(config, workdir)
        wait_for(process, workdir, max(1, total * place // 10))
        time.sleep(random_.random() * 2)
        process.kill()
        process.communicate()
    assert start(config, workdir).wait(timeout=600) == 0
    assert differences(workdir, reference) == []
