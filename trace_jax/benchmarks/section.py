"""The part of a config that makes a benchmark the target."""

from trace_jax.fields import field, section


@section()
class BenchmarkSection:
    """A benchmark as the target, driven by its own program. target.package is not used then; the numbers of tasks in target are limits."""

    name: str = field("", "the benchmark; empty: target.package is the target", ("", "tau2", "swebench", "toolsandbox"))
    domains: tuple[str, ...] = field(
        ("airline", "retail"), "of tau2; the tasks of several are pooled", ("airline", "retail", "telecom", "mock")
    )
    data: str = field("", "of swebench: file or folder of the dataset")
    python: str = field("", "program of the environment that has the benchmark, with a command before it if need be; empty: this one")
    user: str = field(
        "base", "who simulates users: our own base model, or an endpoint (OPENAI_BASE_URL, OPENAI_API_KEY)", ("base", "endpoint")
    )
    user_model: str = field("", "the endpoint's model for benchmark.user=endpoint")
    user_temperature: float = field(0.0, "sampling temperature of simulated users", "[0, inf)")
    environment: str = field("bubblewrap", "of swebench: what holds the agent's commands", ("local", "bubblewrap", "docker"))
    max_steps: int = field(50, "of one episode: messages of tau2, turns of the others", "[1, inf)")
    timeout: float = field(600.0, "seconds in which the benchmark must go on after a turn, or give its verdict", "(0, inf)", changes=True)
