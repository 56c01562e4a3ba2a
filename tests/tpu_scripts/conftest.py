"""`tpu_scripts/pod` run for real, in a repository and on a PATH of its own, where gcloud, kubectl, docker and uv are stubs."""

import json
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TOOLS = (
    "bash sh git tar gzip sed grep cat tee mktemp mkdir rm mv cp chmod dirname tr sleep cut tail head hostname date setsid nohup seq wc "
    "timeout"
).split()
STUBS = ("gcloud", "kubectl", "docker", "uv", "nvidia-smi")
# what stands for trace-jax on a host: says what it got, and saves when it is told to end
RUN = """#!/usr/bin/env bash
trap 'echo saved; exit 143' TERM
echo "$@ with ${SECRET:-nothing}"
[[ $* != *--fail* ]] || exit 2
[[ $* == *--quick* ]] || while :; do sleep 0.05; done
"""
# what stands for a host's Python: the check of the devices, and SGLang servers, of which each ends once
PYTHON = """#!/usr/bin/env bash
case $* in
  "- "*) cat >/dev/null; echo "$@" >"$HOME/checked" ;;
  *sglang_router*) echo "$@" >"$HOME/router" ;;
  *)
    echo "$CUDA_VISIBLE_DEVICES $*" >>"$HOME/server-$4"
    (($(wc -l <"$HOME/server-$4") > 1)) || exit 1
    trap 'echo gone >>"$HOME/server-$4"; exit 143' TERM
    while :; do sleep 0.05; done
    ;;
esac
"""


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> pathlib.Path:
    """A repository with the scripts, all committed."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "tpu_scripts", folder / "tpu_scripts")
    for name in (".gitattributes", "REVISION"):
        shutil.copy(ROOT / name, folder)
    (folder / "run.sh").write_text(RUN)
    (folder / "python.sh").write_text(PYTHON)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message=all"]):
        subprocess.run([*git, *words], check=True)
    return folder


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> pathlib.Path:
    """The only folder on the PATH: so the real gcloud is never called."""
    folder = tmp_path_factory.mktemp("bin")
    for tool in TOOLS:
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    for stub in STUBS:
        shutil.copy(ROOT / "tests/tpu_scripts/stub.sh", folder / stub)
        (folder / stub).chmod(0o755)
    return folder


class Pod:
    """Runs the script; `calls` are the words of every stub called since.

    Attributes:
      environment: what may be added to.
    """

    def __init__(self, repository: pathlib.Path, path: pathlib.Path, home: pathlib.Path):
        self.repository, self.home, self._record = repository, home, home / "record"
        self.environment = {"PATH": str(path), "HOME": str(home), "STUB_RECORD": str(self._record), "TRACE_JAX_PAUSE": "0.1"}

    def __call__(self, *words: str, **environment: str) -> subprocess.CompletedProcess:
        return self.shell([str(self.repository / "tpu_scripts/pod"), *words], **environment)

    def shell(self, command: list[str], **environment: str) -> subprocess.CompletedProcess:
        self._record.write_text("")
        env = self.environment | environment
        return subprocess.run(command, env=env, cwd=self.repository, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._record.read_text().splitlines()]

    @property
    def revision(self) -> str:
        words = ["git", "-C", str(self.repository), "rev-parse", "HEAD"]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def pod(repository, path, tmp_path) -> Pod:
    return Pod(repository, path, tmp_path)
