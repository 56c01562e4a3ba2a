"""The commands for pods, of all documents, run against stubs of gcloud, kubectl and docker, in a repository of their own."""

import re

from tests.docs.blocks import ROOT, Session
from tests.docs.plans import PLANS, POD
from tests.docs.test_commands import commands, decisions
from tests.tpu_scripts.conftest import path, pod, repository  # noqa: F401  these are fixtures


def test_every_command_for_pods_is_one_that_the_scripts_take(pod):  # noqa: F811
    secrets = {"HF_TOKEN": "a", "SGLANG_API_KEY": "b", "OPENAI_API_KEY": "c"}
    session = Session(pod.repository, stubs=("ssh-keygen", "ssh-add"), environment=pod.environment | secrets)
    for document in PLANS:
        for block, decision in zip(commands(document), decisions(document), strict=True):
            if decision == POD:
                session.run(block, timeout=60)
    assert {"gcloud", "kubectl", "docker", "ssh-add"} <= {words[0] for words in pod.calls}


def test_the_list_of_commands_of_the_readme_is_that_of_the_script(pod):  # noqa: F811
    table = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "tpu_scripts/README.md").read_text().partition("```")[0], re.MULTILINE)
    assert table == [line.split()[0] for line in pod().stdout.split("\n\n")[1].splitlines()]
