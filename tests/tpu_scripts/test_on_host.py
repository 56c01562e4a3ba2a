"""What runs on the hosts, for real: two folders are the homes of two hosts, and what is sent by ssh and scp happens in them."""

import os
import signal
import time

import pytest

POD = ("--slice=v5p-32", "--name=trace", "--zone=us-east5-a", "--poll=0")
RUN = ("--", "run", "--workdir=gs://b/it's here")


@pytest.fixture
def hosts(pod, tmp_path):
    homes = [tmp_path / "hosts" / str(index) for index in range(2)]
    for home in homes:
        home.mkdir(parents=True)
    pod.environment["STUB_HOSTS"] = str(tmp_path / "hosts")
    yield homes
    pod("stop", *POD[:3])


def until(happens) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_is_set_up_launched_watched_and_stopped_on_all_hosts(pod, hosts):
    refused = pod("launch", *POD[:3], *RUN)
    assert refused.returncode == 1 and "fix: tpu_scripts/pod setup\n" in refused.stderr

    assert (done := pod("setup", *POD[:3], "--extras=tau2")).returncode == 0, done.stderr
    installs = [call for call in pod.calls if call[:3] == ["uv", "pip", "install"]]
    assert [call[-1] for call in installs] == [f"{home}/trace-jax[tpu,tau2]" for home in hosts]
    assert all((home / "checked").read_text() == "- tpu 4 4\n" for home in hosts)
    assert "not launched" in pod("status", *POD[:3]).stdout

    assert (done := pod("launch", *POD[:3], "--env=SECRET", *RUN, SECRET="a 'b' $c")).returncode == 0, done.stderr
    assert "a 'b'" not in str(pod.calls)
    until(lambda: pod("logs", *POD[:3]).stdout.count("run --workdir=gs://b/it's here --coordinator=auto with a 'b' $c") == 2)
    log = pod("logs", *POD[:3]).stdout
    assert log.count(f"revision {pod.revision}") == 2
    assert all((home / "variables").stat().st_mode & 0o077 == 0 for home in hosts)
    told = pod("status", *POD[:3]).stdout
    assert told.count(f"revision {pod.revision[:12]}  running  run --workdir") == 2
    again = pod("launch", *POD[:3], *RUN)
    assert again.returncode == 1 and "a run is going on: tpu_scripts/pod stop first" in again.stderr

    boot = hosts[0] / "trace-jax-run/boot"  # after the machine was started anew another process may have the number
    before = boot.read_text()
    boot.write_text("another\n")
    assert "ended with 137" in pod("status", *POD[:3], "--worker=0").stdout
    boot.write_text(before)

    # systemd tells all processes of a machine that goes down at once
    leader = (hosts[1] / "trace-jax-run/pid").read_text().strip()
    os.killpg(os.getpgid(int(leader)), signal.SIGTERM)
    until((hosts[1] / "trace-jax-run/code").exists)
    assert pod("stop", *POD[:3]).stdout.count("ended with 143  saved") == 2

    done = pod("resume", *POD, "--", "run", "--quick")
    assert done.returncode == 0 and "the run has ended with 0" in done.stderr


def test_a_run_that_ends_at_once_fails_the_launch_with_the_end_of_its_log(pod, hosts):
    pod("setup", *POD[:3])
    failed = pod("launch", *POD[:3], "--", "run", "--fail")
    assert failed.returncode == 1
    assert "run --fail --coordinator=auto with nothing" in failed.stderr and "it ended at once, with exit code 2" in failed.stderr


def test_code_that_came_only_in_part_is_not_used(pod, hosts):
    assert pod("push", *POD[:3]).returncode == 0
    assert (hosts[0] / "trace-jax/REVISION").read_text().strip() == pod.revision
    (hosts[0] / "trace-jax.tar.gz").write_bytes(b"torn")
    failed = pod.shell(["bash", str(hosts[0] / "on_host.sh"), "unpack", pod.revision], HOME=str(hosts[0]))
    assert failed.returncode != 0 and (hosts[0] / "trace-jax/run.sh").exists()


def test_servers_share_the_gpus_are_started_anew_and_end_with_the_fleet(pod, hosts):
    fleet = ("--slice=rollouts-h100x8", "--name=fleet", "--zone=us-east5-a")
    assert (done := pod("setup", *fleet)).returncode == 0, done.stderr
    done = pod("serve-rollouts", *fleet, "--model=/m", "--tensor=4", "--env=SGLANG_API_KEY", SGLANG_API_KEY="hush")
    assert done.returncode == 0, done.stderr
    urls = "http://10.0.0.7:30000,http://10.0.0.7:30001"
    assert f"--config.rollout.engine=sglang --config.servers.urls={urls},{urls}" in done.stderr
    for home in hosts:
        for port, devices in ((30000, "0,1,2,3"), (30001, "4,5,6,7")):
            server = home / f"server-{port}"
            until(lambda server=server: server.exists() and len(server.read_text().splitlines()) == 2)
            assert all(
                line.startswith(f"{devices} -m sglang.launch_server --port {port} --model-path /m")
                for line in server.read_text().splitlines()
            )
            assert "hush" not in server.read_text() and f"--config {home}/trace-jax-run/key.yaml" in server.read_text()
        assert (home / "trace-jax-run/key.yaml").read_text() == 'api-key: "hush"\n'
    until(lambda: (hosts[0] / "router").exists() and urls.split(",")[1] in (hosts[0] / "router").read_text())
    assert not (hosts[1] / "router").exists()
    assert pod("stop", *fleet).stdout.count("  ended with 0  ") == 2
    for home in hosts:
        until(lambda home=home: all((home / f"server-{port}").read_text().endswith("gone\n") for port in (30000, 30001)))
