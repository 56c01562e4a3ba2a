"""The sections of a config: every field with its type, default, purpose and range. `trace_jax.config` makes a run of them."""

import pathlib
from typing import Any

from trace_jax.config.fields import field, section
from trace_jax.errors import InputError
from trace_jax.stores import is_remote

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent  # the checkout, or the folder that the wheel was installed into


ANALYSTS = ("evidence", "llm", "both")
BASELINES = ("grpo_target", "single", "gepa", "swe_rl", "router", "uniform")


@section()
class ModelSection:
    """The base agent."""

    path: str = field(
        "trace_jax/quickstart/checkpoint",
        "Hugging Face folder of the base model, local or gs://; what ships with trace-jax by its relative path",
    )
    dtype: str = field("float32", "type of the frozen weights", ("float32", "bfloat16"))

    @property
    def folder(self) -> pathlib.Path | str:
        """The folder of the base model, or its address in a bucket. What ships with trace-jax comes first, so that a folder `envs` of the
        user's does not hide it.

        Raises:
          InputError: there is no model in it.
        """
        if is_remote(self.path):
            return self.path  # whoever reads it says whether it is there
        path = pathlib.Path(self.path).expanduser()
        found = next((folder for folder in (ROOT / path, PACKAGE / path, path.absolute()) if (folder / "config.json").is_file()), None)
        if found is None:
            raise InputError(f"config field 'model.path': no config.json in {path.absolute()}; give a Hugging Face model folder")
        return found

    @property
    def weights(self) -> pathlib.Path | str:
        """`folder`, for those who load it: the architectures in `configs/` are a config.json alone.

        Raises:
          InputError: there is no model in it, or no weights.
        """
        if not is_remote(self.path) and not any(self.folder.glob("*.safetensors*")):
            raise InputError(
                f"config field 'model.path': no weights in {self.folder}; download the model and set --config.model.path=FOLDER"
            )
        return self.folder


@section()
class MeshSection:
    """How the devices of all processes share the work; one device needs none of it."""

    data: int = field(0, "copies of the parameters, each with rows of its own; 0: one for each process", "[0, inf)", changes=True)
    fsdp: int = field(0, "devices over which parameters are split and rows too; 0: all that the others leave", "[0, inf)", changes=True)
    expert: int = field(1, "devices over which experts are split", "[1, inf)", changes=True)
    tensor: int = field(1, "devices over which heads and FFN widths are split", "[1, inf)", changes=True)
    topology: str | None = field(None, "accelerators that trace-jax preflight compiles for, such as v5p:2x2x4", changes=True)


@section()
class TargetSection:
    """The environment that the agent is to become good at."""

    package: str = field("desk", "built-in package, or the folder of one")
    train_tasks: int = field(40, "size of the fixed train split, which capabilities are mined from", "[1, inf)")
    heldout_tasks: int = field(400, "size of the held-out split, used by the evaluation alone", "[1, inf)")
    knobs: dict[str, Any] = field({}, "difficulty knobs, as JSON; the package's own defaults for those left out")


@section()
class BenchmarkSection:
    """A benchmark as the target, driven by its own program. target.package is not used then; the numbers of tasks in target are limits."""

    name: str = field("", "the benchmark; empty: target.package is the target", ("", "tau2", "swebench", "toolsandbox"))
    domains: tuple[str, ...] = field(
        ("airline", "retail"), "of tau2; the tasks of several are pooled", ("airline", "retail", "telecom", "mock")
    )
    data: str = field("", "of swebench: file or folder of the dataset")
    python: str = field(
        "", "program of the environment that has the benchmark, with a command before it if need be; empty: this one", changes=True
    )
    user: str = field(
        "base", "who simulates users: our own base model, or an endpoint (OPENAI_BASE_URL, OPENAI_API_KEY)", ("base", "endpoint")
    )
    user_model: str = field("", "the endpoint's model for benchmark.user=endpoint")
    user_temperature: float = field(0.0, "sampling temperature of simulated users", "[0, inf)")
    environment: str = field("bubblewrap", "of swebench: what holds the agent's commands", ("local", "bubblewrap", "docker"))
    max_steps: int = field(50, "of one episode: messages of tau2, turns of the others", "[1, inf)")
    timeout: float = field(600.0, "seconds in which the benchmark must go on after a turn, or give its verdict", "(0, inf)", changes=True)


@section()
class RolloutSection:
    """How episodes are sampled."""

    engine: str = field(
        "jax",
        "what samples base and adapters: the embedded engine, SGLang servers, or SGL-JAX in this process; gates are always the first's",
        ("jax", "sglang", "sgl_jax"),
    )
    lanes: int = field(64, "episodes decoded at once", "[1, inf)", changes=True)
    context: int = field(320, "tokens of one episode, all turns together", "[16, inf)")
    max_tokens: int = field(64, "tokens of one turn", "[1, inf)")
    temperature: float = field(1.0, "sampling temperature of diagnosis and training; the trainer divides its logits by it", "(0, inf)")
    workers: int = field(1, "processes that host the environments", "[1, inf)", changes=True)
    sandbox: str | None = field(
        None,
        "whether the kernel must hold these processes. none: it must where the code is an LLM's or a folder's, else as far as it can",
        ("require", "best_effort", "off"),
        changes=True,
    )
    max_turns: int | None = field(None, "turns of one episode; none: the package's own limit", "[1, inf)")
    in_flight: int | None = field(None, "episodes at once, of which the lanes decode; none: as many as lanes", "[1, inf)", changes=True)
    reproducible: bool = field(
        True, "the engine waits for the environments, so that an interrupted batch gives the same tokens again", changes=True
    )
    deadline: float | None = field(
        None, "seconds of one attempt at an episode, then it is a failure of the infrastructure", "(0, inf)", changes=True
    )
    retries: int = field(1, "how often an episode is played again that the engine failed", "[0, 10]", changes=True)


@section()
class ServersSection:
    """SGLang servers, for rollout.engine=sglang."""

    urls: tuple[str, ...] = field((), "addresses such as http://host:30000; empty: servers are started on this machine", changes=True)
    folder: str = field(
        "", "where servers read adapters, under one name here and there; empty: in the workdir, which must not be a bucket", changes=True
    )
    count: int = field(1, "servers to start", "[1, inf)", changes=True)
    python: str = field("", "program that has sglang, with a command before it if need be; empty: this one", changes=True)
    device: str = field("cuda", "what started servers run on", ("cuda", "cpu"), changes=True)
    tensor: int = field(1, "GPUs that share the weights of one server", "[1, inf)", changes=True)
    memory: float | None = field(None, "share of a GPU's memory for a server's weights and cache; none: SGLang's own choice", "(0, 1)")
    adapters: int = field(4, "adapters side by side in a batch, the base is one", "[2, inf)", changes=True)
    deterministic: bool = field(False, "tokens follow from seeds; few attention backends can", changes=True)
    options: str = field("", "more words of the command line of sglang.launch_server", changes=True)
    start: float = field(900.0, "seconds in which all servers must answer", "(0, inf)", changes=True)
    outage: float = field(300.0, "seconds without any server, at the start too, after which turns are failures", "(0, inf)", changes=True)
    request: float = field(600.0, "seconds of one turn with all its attempts, then the engine has failed it", "(0, inf)", changes=True)


@section()
class AgentsSection:
    """The LLM behind analyst=llm and generator=llm. Address and key come from the environment alone: OPENAI_BASE_URL, OPENAI_API_KEY."""

    backend: str = field(
        "openai",
        "who answers: an OpenAI-compatible endpoint, a server of trace-jax serve, a coding agent's command, or recorded exchanges",
        ("openai", "served", "claude", "codex", "command", "replay"),
        changes=True,
    )
    model: str = field("", "its model; empty: OPENAI_MODEL, or the command's own choice", changes=True)
    url: str = field("", "address of the server of agents.backend=served; empty: port 8000 of this machine", changes=True)
    command: str = field("", "for agents.backend=command: reads the prompt from its input, writes the answer to its output", changes=True)
    recorded: str = field("", "for agents.backend=replay: the exchanges.jsonl of another run", changes=True)
    parameters: dict[str, Any] = field(
        {}, 'more parameters of a request, as JSON such as {"temperature": 0.7}; the provider\'s own for those left out', changes=True
    )
    prompts: str = field("", "folder of prompts/, or a path; empty: by the trajectories' environment", changes=True)
    prompt_tokens: int = field(32_000, "tokens of one prompt; longer conversations are compacted", "[2000, inf)", changes=True)
    answer_tokens: int = field(16_384, "tokens of one answer, thoughts included", "[64, inf)", changes=True)
    concurrency: int = field(8, "questions at once", "[1, 1000]", changes=True)
    attempts: int = field(6, "how often a question is sent before it counts as unanswered", "[1, 100]", changes=True)
    deadline: float = field(600.0, "seconds of one attempt", "(0, inf)", changes=True)
    max_tokens: int | None = field(None, "budget: tokens of all questions and answers of the workdir", "[1, inf)", changes=True)
    max_cost: float | None = field(None, "budget: US dollars of all answers of the workdir", "(0, inf)", changes=True)
    price_input: float | None = field(None, "US dollars for a million tokens of questions", "[0, inf)", changes=True)
    price_output: float | None = field(None, "US dollars for a million tokens of answers", "[0, inf)", changes=True)


@section()
class DiagnosisSection:
    """Step 1: which capabilities the base agent lacks."""

    trials: int = field(8, "rollouts of each train task", "[1, inf)")
    runs: int = field(10, "independent labelling runs", "[1, inf)")
    coverage: float = field(0.10, "rho: smallest share of failed trajectories that lack the capability", "[0, 1]")
    gap: float = field(0.20, "delta: smallest difference of the error rates of failed and passed trajectories", "[0, 1]")
    min_runs: int = field(8, "runs that must pass both thresholds", "[1, inf)")
    most: int | None = field(
        None, "capabilities retained at most, those of the largest gap; run --rounds finds the others. none: all", "[1, inf)", changes=True
    )
    blind: bool = field(False, "hide the outcome from the labeller")
    success: float = field(1.0, "smallest reward that counts as success", "(0, 1]")
    candidates: str = field("", "a candidates.json whose capabilities are labelled; empty: the analyst looks for some")
    batch: int = field(20, "trajectories that an LLM sees at once when it proposes capabilities", "[1, inf)")
    batches: int = field(4, "such batches, failed and passed ones mixed", "[1, inf)")


@section()
class SynthesisSection:
    """Step 2: one certified and calibrated environment per capability."""

    rounds: int = field(5, "packages that the LLM may hand in for a capability, the first included", "[1, 20]", changes=True)
    calibration_seeds: int = field(100, "seeds that the base agent is calibrated on", "[1, inf)")
    calibration_rollouts: int = field(16, "rollouts of each of these seeds", "[2, inf)")
    sequential: bool = field(True, "end a calibration as soon as its verdict is certain")
    probes: int = field(
        5, "settings of its knobs at which an environment is tried that is too easy or too hard, before it is given up", "[0, 20]"
    )
    mean_low: float = field(0.2, "smallest mean reward and success rate of the base agent", "[0, 1]")
    mean_high: float = field(0.6, "largest mean reward and success rate", "[0, 1]")
    min_std: float = field(0.05, "smallest standard deviation of the reward", "[0, 0.5]")
    max_all_success: float = field(0.2, "largest share of groups that always succeed", "[0, 1]")
    max_all_zero: float = field(0.2, "largest share of groups that never earn anything", "[0, 1]")
    max_constant: float = field(0.5, "largest share of groups of one reward only", "[0, 1]")
    hint_ratio: float = field(
        0.25,
        "smallest share of a group's rollouts that see a hint, where success is too rare at every setting; as many do, up to a half, as "
        "bring the group's success to mean_low. 0: none ever does",
        "[0, 0.5]",
    )
    certify_seeds: int = field(100, "seeds that a certificate is checked on", "[2, inf)")
    certify_minutes: float = field(30.0, "minutes that one certificate may take; a package that needs longer is refused", "(0, inf)")


@section()
class TrainSection:
    """Step 3: one LoRA adapter per capability, by GRPO."""

    rank: int = field(16, "LoRA rank", "[1, inf)")
    alpha: float = field(16.0, "LoRA alpha; the adapter is scaled by alpha / rank", "(0, inf)")
    learning_rate: float = field(1e-5, "peak learning rate of AdamW", "(0, inf)")
    iterations: int = field(40, "largest number of updates", "[1, inf)")
    groups: int = field(16, "seeds of one iteration", "[1, inf)")
    group_size: int = field(16, "rollouts of one seed", "[2, inf)")
    clip_low: float = field(0.2, "the ratio is clipped below 1 - clip_low", "[0, 1]")
    clip_high: float = field(0.28, "the ratio is clipped above 1 + clip_high", "[0, inf)")
    dual_clip: float = field(3.0, "cap of the ratio where the advantage is negative", "(1, inf)")
    importance_cap: float = field(2.0, "cap of the importance weight from the sampling law to the trainer's", "[1, inf)")
    outlier_low: float = field(1e-4, "tokens of a smaller importance weight carry no loss", "[0, 1]")
    outlier_high: float = field(1e2, "tokens of a larger importance weight carry no loss", "[1, inf)")
    max_grad_norm: float = field(1.0, "the gradient's norm is clipped to this", "(0, inf)")
    adam_b1: float = field(0.9, "decay of Adam's first moment", "[0, 1)")
    adam_b2: float = field(0.999, "decay of Adam's second moment", "[0, 1)")
    weight_decay: float = field(0.0, "decoupled weight decay", "[0, inf)")
    warmup_steps: int = field(0, "updates of linear warm-up", "[0, inf)")
    advantage_std: bool = field(True, "divide a group's advantages by their standard deviation")
    ratio: str = field("token", "ratio of each token, or of the sequence (GSPO)", ("token", "sequence"))
    kl: float = field(0.0, "weight of the k2 divergence from the base", "[0, inf)")
    schedule: str = field(
        "constant", "of the learning rate after the warm-up; a cosine ends at 0 after train.iterations", ("constant", "cosine")
    )
    icepop: tuple[float, ...] = field(
        (), "two bounds of the importance weight outside of which tokens are masked, such as 0.5,5; empty: none", "[0, inf)"
    )
    stop_reward: float | None = field(None, "stop when the mean reward of the last three iterations reaches this", "(0, 1]")
    validate_every: int = field(
        5, "iterations between two validations on unseen seeds; the best is the adapter. 0: the last is", "[0, inf)"
    )
    validation_seeds: int = field(32, "seeds that an adapter, or the gate over all environments, is validated on", "[1, inf)")
    selection_seeds: int = field(64, "unseen seeds of each capability environment, which judge the adapters and the gate", "[1, inf)")
    pack_length: int = field(512, "tokens of a packed row; at least rollout.context", "[16, inf)")
    buckets: int = field(
        1, "row lengths to compile for: pack_length, its half, its quarter, ...; a batch takes the shortest that does", "[1, 8]"
    )
    packing: bool = field(
        True, "trajectories share rows. no: each has its own, which on a GPU lets cuDNN attend; good where they are nearly as long as a row"
    )
    micro_rows: int | None = field(
        None, "packed rows of one gradient step; memory grows with it, the loss does not depend on it. none: what fits", "[1, inf)"
    )
    remat: bool | None = field(
        None, "compute activations again in the backward pass instead of keeping them. none: where they do not fit", changes=True
    )
    router_replay: bool = field(False, "of a sparse model: rollouts store each token's experts, and updates take the same ones")
    max_lag: int | None = field(
        None, "updates that rollouts may be behind the adapter; none: 1 where the engine has devices of its own, else 0", "[0, 8]"
    )
    agreement: float = field(
        0.02,
        "largest mean difference of the log-probs of engine and learner, tried before the first update; 0 tries nothing",
        "[0, inf)",
        changes=True,
    )
    min_group: int = field(2, "a group that infrastructure failures left smaller is dropped", "[2, inf)")
    keep_checkpoints: int = field(2, "newest checkpoints kept per adapter, beside the best", "[1, inf)", changes=True)

    def validations(self, iterations: int) -> int:
        """How often so many iterations are validated: at every multiple of `validate_every`, and the last."""
        return -(-iterations // self.validate_every) if self.validate_every else 0

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """The row lengths to compile for, the longest first."""
        return tuple(self.pack_length >> n for n in range(self.buckets))


@section()
class GateSection:
    """Step 4: the token-level gate over the base and the adapters."""

    label_loss: str = field("kl_weighted", "warm-start loss: weighted by the divergence from the base, or plain", ("kl_weighted", "plain"))
    warm_steps: int = field(120, "updates of the warm start", "[1, inf)")
    learning_rate: float = field(1e-2, "peak learning rate of the warm start", "(0, inf)")
    base_weight: float = field(0.02, "weight of the base slot's cross-entropy on every token", "[0, inf)")
    kl_clip: float = field(1.0, "cap of a token's weight", "(0, inf)")
    successes: int = field(120, "seeds of its own environment on which each adapter is tried; what it solves are the labels", "[1, inf)")
    table_seeds: int = field(32, "seeds of each capability environment on which every slot is tried", "[1, inf)")
    grpo_iterations: int = field(12, "updates of the routed model itself, across the capability environments", "[0, inf)")
    grpo_learning_rate: float = field(1e-2, "learning rate of these", "(0, inf)")
    load_balance: float = field(0.001, "weight of the load-balance loss", "[0, inf)")
    base_bias: float = field(5.0, "initial bias of the base slot", "(-inf, inf)")


@section()
class EvaluationSection:
    """Success on the target's held-out split."""

    tasks: int = field(400, "held-out tasks", "[1, inf)")
    trials: int = field(1, "rollouts of each", "[1, inf)")
    temperature: float = field(0.7, "sampling temperature, fixed beforehand", "[0, inf)")
    policies: tuple[str, ...] = field(
        ("base", "adapters", "uniform", "constant", "router", "plain_gate", "composed"),
        "what is evaluated side by side",
        ("base", "adapters", "uniform", "constant", "router", "plain_gate", "composed"),
        changes=True,
    )


@section()
class BaselineSection:
    """What the composed agent is compared with, beyond `evaluation.policies`."""

    grpo_target: bool = field(False, "end trace-jax run with GRPO on the target's train tasks", changes=True)
    policies: tuple[str, ...] = field(
        BASELINES, "what trace-jax compare sets beside base and composed, as far as it applies to the target", BASELINES, changes=True
    )
    rollouts: int | None = field(
        None, "training rollouts of each baseline; none: as many as the four steps spent", "[1, inf)", changes=True
    )
    single_budget: bool = field(
        False, "train the best single adapter on until it has had as many rollouts; no: as step 3 left it", changes=True
    )
    gepa_rollouts: int | None = field(None, "rollouts of a prompt evolution; none: as many as the others'", "[1, inf)", changes=True)
    gepa_minibatch: int = field(8, "train tasks that a new prompt is made from, and tried on first", "[1, inf)", changes=True)
    gepa_validation: int = field(20, "other train tasks, at most half of them, on which prompts are ranked", "[1, inf)", changes=True)
    gepa_tokens: int | None = field(None, "longest evolved instructions; none: a quarter of rollout.context", "[1, inf)", changes=True)
    capabilities: bool = field(
        True, "trace-jax compare also composes, and evolves prompts, with the first 1, 2, ... capabilities", changes=True
    )


@section()
class ReportSection:
    """report.html."""

    trajectories: int = field(12, "trajectories shown with each token coloured by its slot", "[0, inf)", changes=True)
