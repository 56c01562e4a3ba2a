"""Every command of `tpu_scripts/pod`: what it calls, what a dry run prints, and what is said when a call fails."""

import pathlib
import shlex

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TPU = ("--slice=v5p-32", "--name=trace", "--zone=us-east5-a", "--poll=0")
GPU = ("--slice=h100x8", "--name=trace", "--zone=us-east5-a", "--poll=0")
GKE = ("--slice=v5p-32", "--kind=gke", "--name=trace", "--zone=us-east5-a", "--cluster=c", "--image=r.pkg.dev/p/r/trace-jax", "--poll=0")
FLEET = ("--slice=rollouts-h100x8", "--name=fleet", "--zone=us-east5-a", "--poll=0")
RUN = ("--", "run", "--config=quickstart", "--workdir=gs://b/it's here")
# command, flags, a part of each call in its order
CASES = {
    "create": (TPU, ["queued-resources create trace --node-id=trace", "queued-resources describe", "tpu-vm describe", "--command=true"]),
    "push": (TPU, ["scp", "on_host.sh unpack"]),
    "setup": ((*TPU, "--extras=tau2"), ["scp", "unpack", "on_host.sh setup tpu,tau2 3.12 -", "on_host.sh check tpu 4 4"]),
    "launch": ((*TPU, "--env=SECRET", *RUN), ["variables trace:", "on_host.sh launch trace-jax run --config=quickstart"]),
    "logs": ((*TPU, "--worker=2", "--lines=5", "--follow"), ["--worker=2 --command=bash on_host.sh logs 5 yes"]),
    "status": (TPU, ["queued-resources describe"] * 2 + ["tpu-vm describe", "on_host.sh status"]),
    "stop": (TPU, ["on_host.sh stop 120"]),
    "resume": (
        (*TPU, *RUN),
        # where it is, twice: whether it was taken away, and whether it is there; a look whether the run goes on
        ["describe"] * 4 + ["--command=true", "status", "scp", "unpack", "stop", "setup", "check", "scp", "launch", "status"],
    ),
    "delete": (TPU, ["queued-resources delete trace --force"]),
    "create gpu": (
        (*GPU, "--provisioning=spot"),
        ["instances create trace --machine-type=a3-highgpu-8g", "describe trace", "ssh trace --command=true"],
    ),
    "setup gpu": (GPU, ["compute scp", "unpack", "setup gpu 3.12 -", "check gpu 1 8"]),
    "launch gpu": ((*GPU, *RUN), ["variables trace:", "--command=bash on_host.sh launch trace-jax run"]),
    "status gpu": (GPU, ["instances describe"] * 2 + ["on_host.sh status"]),
    "delete gpu": (GPU, ["instances delete trace"]),
    "create fleet": (FLEET, ["instances create fleet-0 fleet-1", "describe fleet-0", "describe fleet-1", "ssh fleet-0", "ssh fleet-1"]),
    "logs fleet": ((*FLEET, "--worker=1"), ["compute ssh fleet-1 "]),
    "serve-rollouts fleet": (
        (*FLEET, "--model=/mnt/trace/model", "--tensor=2"),
        ["describe fleet-0", "describe fleet-1"] + ["scp"] * 2 + ["ssh fleet-0", "ssh fleet-1", "on_host.sh router http://10.0.0.7:30000"],
    ),
    "create gke": ((*GKE, "--provisioning=spot"), ["get-credentials c", "node-pools create trace --cluster=c --machine-type=ct5p"]),
    "setup gke": (GKE, ["apply --server-side", "docker build --build-arg EXTRAS=tpu", "docker push r.pkg.dev/p/r/trace-jax:"]),
    "launch gke": ((*GKE, "--env=SECRET", *RUN), ["delete secret trace-env", "create secret generic trace-env", "kubectl apply"]),
    "logs gke": (GKE, ["kubectl logs --selector=jobset.sigs.k8s.io/jobset-name=trace"]),
    "status gke": (GKE, ["get jobset trace", "get pods", "kubectl logs"]),
    "stop gke": (GKE, ["delete jobset trace"]),
    "resume gke": ((*GKE, *RUN), ["delete jobset trace", "delete secret", "kubectl apply"]),
    "delete gke": (GKE, ["delete jobset trace", "delete secret", "node-pools delete trace"]),
}


def words_of(pod, case: str) -> list[str]:
    """The command line of a case, without the flags that its command does not take."""
    command, flags = case.split()[0], CASES[case][0]
    known = pod(command, "--help").stdout
    end = flags.index("--") if "--" in flags else len(flags)
    return [command, *(flag for flag in flags[:end] if f"{flag.partition('=')[0]} " in known), *flags[end:]]


def shown(words: list[str]) -> str:
    return " ".join(words)


@pytest.mark.parametrize("case", CASES)
def test_command_calls_these_and_a_dry_run_prints_exactly_them(pod, case):
    words, parts = words_of(pod, case), CASES[case][1]
    ran = pod(*words, SECRET="hush")
    assert ran.returncode == 0, ran.stderr
    calls = pod.calls
    assert len(calls) == len(parts) and all(part in shown(call) for part, call in zip(parts, calls, strict=True)), calls
    assert "hush" not in str(calls) + ran.stdout + ran.stderr
    assert not list(pod.home.glob(".cache/**/variables*"))

    dry = pod(*words[:1], "--dry-run", *words[1:], SECRET="hush")
    assert dry.returncode == 0 and not pod.calls, dry.stderr
    assert "hush" not in dry.stdout
    printed = [shlex.split(line) for line in dry.stdout.splitlines() if line.startswith(("gcloud", "kubectl", "docker"))]
    if words[0] == "resume":  # what is done after a preemption too, and no look whether it runs already
        assert all(call in printed for call in calls)
    else:
        same = [[w.replace("ADDRESS-OF-fleet-0", "10.0.0.7").replace("ADDRESS-OF-fleet-1", "10.0.0.7") for w in line] for line in printed]
        assert same == calls


@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith("resume")])
def test_each_failing_call_is_named_with_its_exit_code_and_a_fix(pod, case):
    words = words_of(pod, case)
    pod(*words, SECRET="hush")
    for call in pod.calls:
        failed = pod(*words, SECRET="hush", STUB_FAIL=shown(call), STUB_SAYS="ERROR: PERMISSION_DENIED: no", STUB_CODE="3")
        assert failed.returncode == 1
        assert f"pod {words[0]}: this command failed with exit code 3:" in failed.stderr
        line = next(line for line in failed.stderr.splitlines() if line.startswith("    "))
        assert shlex.split(line) == call
        grant = (
            "gcloud auth configure-docker r.pkg.dev;"
            if call[0] == "docker"
            else "gcloud auth login, or have an owner of PROJECT grant you roles/"
        )
        assert f"fix: {grant}" in failed.stderr


@pytest.mark.parametrize(
    "said, code, fix",
    [
        ("You do not currently have an active account selected", 1, "gcloud auth login"),
        ("Cloud TPU API has not been used in project 7 before", 1, "gcloud services enable tpu.googleapis.com"),
        ("Quota 'TPUS_PER_TPU_FAMILY' exceeded", 1, "--provisioning=spot"),
        ("There is no more capacity in the zone", 1, "another --zone"),
        ("ALREADY_EXISTS: Resource", 1, "pod delete first"),
        ("NOT_FOUND: Resource", 1, "tpu_scripts/pod create"),
        ("INVALID_ARGUMENT: accelerator", 1, "accelerator-types list --zone=us-east5-a"),
        ("ssh: connect to host: Connection timed out", 255, "port 22"),
        ("", 255, "port 22"),
        ("bash: line 1: uv: command not found", 127, "install what the message names"),
        ("something else", 9, "the reason stands above"),
    ],
)
def test_fix_follows_from_what_the_command_said(pod, said, code, fix):
    failed = pod("delete", *TPU[:3], STUB_FAIL="delete", STUB_SAYS=said, STUB_CODE=str(code))
    assert failed.returncode == 1
    assert fix in failed.stderr.partition("fix: ")[2]


def test_program_that_is_not_installed(pod, tmp_path, path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in path.iterdir():
        if tool.name != "kubectl":
            (folder / tool.name).symlink_to(tool)
    failed = pod("stop", "--kind=gke", "--name=trace", PATH=str(folder))
    assert failed.returncode == 1
    assert "fix: install kubectl" in failed.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (["creat"], "no command 'creat'; there are create push setup"),
        (["create", *TPU, "--zoen=a"], "no flag --zoen; there are --slice --name"),
        (["logs", *TPU[:3], "--provisioning=spot"], "no flag --provisioning; there are --slice"),
        (["create", "--slice=v9-1"], "there are a100x8 h100x8"),
        (["create", *TPU, "--name"], "--name needs a value: --name=VALUE"),
        (["create", *TPU, "now"], "'now' is no flag"),
        (["create", "--slice=v5p-32", "--name=trace"], "--zone is missing: such as us-east5-a"),
        (["create", *TPU, "--name=Trace"], "--name=Trace: small letters"),
        (["create", *TPU, "--provisioning=cheap"], "there are on-demand, spot, reserved"),
        (["create", *TPU, "--patience=long"], "--patience=long is no whole number"),
        (["launch", *TPU[:3]], "what is to run?"),
        (["launch", *TPU[:3], "--env=NO_SUCH", *RUN], "--env: NO_SUCH is not set here"),
        (["launch", *TPU[:3], "--env=A=b", *RUN], "--env: names alone"),
        (["launch", *FLEET[:3], *RUN], "2 GPU machines serve rollouts"),
        (["stop", *TPU[:3], *RUN], "it takes no words behind --"),
        (["logs", *FLEET[:3], "--worker=2"], "--worker=2: there are 2 hosts"),
        (["push", *TPU[:3], "--revision=no-such"], "git knows none"),
        (["serve-rollouts", *TPU[:3], "--model=m"], "serves from GPU machines"),
    ],
)
def test_mistakes_are_refused_before_anything_is_called(pod, words, message):
    refused = pod(*words)
    assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    assert not pod.calls


def test_slice_file_of_ones_own_holds_any_setting_and_flags_win(pod, tmp_path):
    file = tmp_path / "mine.env"
    file.write_text(
        "# mine\nkind=tpu\nname=mine\nzone=a\nproject=p\naccelerator_type=v6e-8\nruntime_version=r\nprovisioning=spot\npatience=0\n"
    )
    assert pod("create", f"--slice={file}", "--zone=b").returncode == 0
    (call,) = pod.calls
    assert {"mine", "--spot", "--zone=b", "--project=p", "--accelerator-type=v6e-8"} <= set(call)
    file.write_text("nmae=mine\n")
    refused = pod("create", f"--slice={file}")
    assert refused.returncode == 2 and "line 1: no setting 'nmae'; there are slice name" in refused.stderr


def test_help_of_every_command_lists_the_flags_that_it_takes(pod):
    for command in pod("--help").stdout.split("\n\n")[1].splitlines():
        told = pod(command.split()[0], "--help")
        assert told.returncode == 0 and "--name" in told.stdout and "--dry_run" in told.stdout


def test_changed_files_are_not_left_behind_in_silence(pod, tmp_path):
    changed = pod.repository / "run.sh"
    before = changed.read_text()
    try:
        changed.write_text(before + "#\n")
        refused = pod("push", *TPU[:3])
        assert refused.returncode == 2 and "commit them" in refused.stderr
        assert pod("push", *TPU[:3], "--revision=HEAD").returncode == 0
        assert pod.revision in shown(pod.calls[-1])
    finally:
        changed.write_text(before)


def test_servers_get_the_flags_that_our_own_launcher_gives_them(pod):
    from model.config import read_config
    from rl.engines.sglang.launch import ServerSettings, server_command

    pod("serve-rollouts", *FLEET[:3], "--model=/m", "--tensor=2", "--context=4096", "--lanes=8", "--rank=16", "--adapters=3")
    sent = next(shlex.split(call[-3].removeprefix("--command=")) for call in pod.calls if "launch" in shown(call))
    settings = ServerSettings(context=4096, lanes=8, rank=16, adapters=3, tensor=2)
    config = read_config(ROOT / "trace_jax/quickstart/checkpoint")
    ours = server_command(["python"], "/m", config, settings, 30000)
    value = {flag: sent[sent.index(flag) + 1] for flag in sent if flag.startswith("--")}
    for flag in (word for word in ours if str(word).startswith("--") and word not in ("--host", "--port", "--lora-target-modules")):
        assert flag in value
        if not str(ours[ours.index(flag) + 1]).startswith("--"):
            assert value[flag] == str(ours[ours.index(flag) + 1])
    assert value["--host"] == "0.0.0.0" and value["--lora-target-modules"] == "all"


def test_sgl_jax_needs_no_server(pod):
    told = pod("serve-rollouts", *TPU[:3], "--engine=sgl_jax")
    assert told.returncode == 0 and not pod.calls and "--config.rollout.engine=sgl_jax" in told.stderr


@pytest.fixture
def answers(pod, tmp_path):
    def give(*lines: str) -> None:
        (tmp_path / "answers").write_text("".join(f"{line}\n" for line in lines))
        pod.environment["STUB_ANSWERS"] = str(tmp_path / "answers")

    return give


def test_status_of_machines_that_are_waited_for_asks_no_host(pod, answers):
    answers("describe trace --format=table|the request", "queued-resources describe|WAITING_FOR_RESOURCES")
    told = pod("status", *TPU[:3])
    assert told.returncode == 0 and "trace is waiting" in told.stderr and "ssh" not in str(pod.calls)


def kinds(calls: list[list[str]]) -> list[str]:
    """What was done, without questions."""
    verbs = ("queued-resources create", "queued-resources delete", "instances start", "on_host.sh unpack", "on_host.sh launch")
    return [verb.split()[1] for call in calls for verb in verbs if verb in shown(call)]


def test_resume_makes_a_preempted_slice_anew_and_launches_the_same_command(pod, answers):
    running = "status|host-0  revision 0123456789ab  running  12 %  rollout  "
    answers(
        "on_host.sh status|not there|255",  # nobody answers before the first launch
        "on_host.sh " + running,
        "on_host.sh status|Connection timed out|255",
        "queued-resources describe|ACTIVE",
        "queued-resources describe|ACTIVE",
        "queued-resources describe|SUSPENDED",
        "queued-resources describe|SUSPENDED",
        "queued-resources describe|SUSPENDED",
        "queued-resources describe|WAITING_FOR_RESOURCES",
        "queued-resources describe|PROVISIONING",
    )
    ended = pod("resume", *TPU, *RUN)
    assert ended.returncode == 0, ended.stderr
    assert kinds(pod.calls) == ["unpack", "launch", "delete", "create", "unpack", "launch"]
    launches = [call for call in pod.calls if "launch" in shown(call)]
    assert launches[0] == launches[1]
    assert "launch 2 of at most 20" in ended.stderr and "trace was taken away" in ended.stderr


def test_resume_starts_a_stopped_gpu_machine(pod, answers):
    answers("instances describe|TERMINATED", "instances describe|TERMINATED", "instances describe|STAGING")
    ended = pod("resume", *GPU, *RUN)
    assert ended.returncode == 0, ended.stderr
    assert kinds(pod.calls) == ["start", "unpack", "launch"]


def test_resume_creates_what_is_not_there(pod, answers):
    answers("queued-resources describe|NOT_FOUND: none|1", "on_host.sh status|host  revision none  not launched  ")
    ended = pod("resume", *TPU, *RUN)
    assert ended.returncode == 0 and kinds(pod.calls) == ["create", "unpack", "launch"], ended.stderr


@pytest.mark.parametrize("code, launches", [("2", 3), ("143", 4)])
def test_resume_gives_up_on_what_cannot_go_on_and_after_its_tries(pod, answers, code, launches):
    before, after = "not launched  ", f"ended with {code}  no such field"
    answers(*[f"on_host.sh status|host  revision 0  {state}" for state in (before, after)] * 4)
    ended = pod("resume", *TPU, "--tries=4", *RUN)
    assert ended.returncode == 1 and "it does not go on" in ended.stderr
    assert kinds(pod.calls).count("launch") == launches
    assert "on_host.sh logs" in shown(pod.calls[-1])


def test_resume_of_a_launch_that_fails_ends_with_the_call_and_its_fix(pod, answers):
    answers(*["on_host.sh status|host  revision 0  not launched  "] * 3)
    ended = pod("resume", *TPU, *RUN, STUB_FAIL="on_host.sh check", STUB_SAYS="host: the devices are not as they should be")
    assert ended.returncode == 1 and ended.stderr.count("this command failed") == 3 and "fix: " in ended.stderr
