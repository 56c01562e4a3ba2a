"""Sampled and prefilled tokens per second of the embedded engine, side by side with transformers' `generate` and a real SGLang server.

    python tests/benchmarks/engine_throughput.py [--shapes=quickstart,0.1b] [--batches=1,8,32,128] [--rounds=3] [--tries=3] [--sglang]
        [--what=rates,episodes,routed]

One run on the same cores, rounds that take turns, the best of some tries in a turn, medians over the rounds. A server that is not being
measured is stopped (SIGSTOP), since it spins while it waits. Prefill: prompts of 128 random tokens, none alike, and one token each. Decode:
what 64 tokens take beyond that, at temperature 1 over the whole vocabulary. Episodes: 32 of 8 turns, 32 tokens read and 32 sampled in each,
after a shared prompt of 448; transformers has no cache between turns. Routed: top-1 of a random gate over four rank-8 adapters, beside the
base.

`--sglang` needs the environment that CONTRIBUTING.md describes under "SGLang".
"""

import argparse
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # for tests/sglang_server

import contextlib
import dataclasses
import pathlib
import signal
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from model import CausalLM, Config, init_bank, init_gate, load_pretrained, save_pretrained
from rl.engines.jax import JaxEngine
from rl.engines.protocol import Policy, Request
from trace_jax.config import load_config

PROMPT, NEW = 128, 64
EPISODES, TURNS, READ, SAMPLED, SHARED = 32, 8, 32, 32, 448
CONTEXT = SHARED + TURNS * (READ + SAMPLED) + 16
GOALS = {"quickstart": 3.0, "0.1b": 2.0}  # decode against transformers at a batch of 32
LARGER = Config(
    32_000, 768, 2048, 12, 12, 4, head_dim=64, tie_word_embeddings=True, max_position_embeddings=2048
)  # 100 million parameters  # fmt: skip

Generate = Callable[[list[np.ndarray], int], object]


class Ours:
    """`JaxEngine`; sessions that are new every time, so that nothing is reused but within an episode."""

    def __init__(self, model: CausalLM, lanes: int, policy: Policy, context: int):
        self.engine = JaxEngine(model, lanes=lanes, context=context, rows=min(8, lanes), chunk=64)
        self.engine.load(policy)
        self.policy, self.calls = policy.name, 0

    def generate(self, prompts: list[np.ndarray], new: int) -> None:
        self.calls += 1
        self.engine.generate([self._request(f"{self.calls}:{i}", prompt, new) for i, prompt in enumerate(prompts)])

    def episodes(self, starts: list[np.ndarray], read: np.ndarray) -> None:
        contexts = {str(i): start for i, start in enumerate(starts)}
        for turn in range(TURNS):
            for session, tokens in contexts.items():
                contexts[session] = np.concatenate([tokens, read[turn, int(session)]])
                self.engine.submit(self._request(session, contexts[session], SAMPLED))
            left = set(contexts)
            while left:
                for completion in self.engine.poll():
                    contexts[completion.session] = np.concatenate([contexts[completion.session], completion.tokens])
                    left.discard(completion.session)
        for session in contexts:
            self.engine.release(session)

    def _request(self, session: str, tokens: np.ndarray, new: int) -> Request:
        return Request(session, self.policy, tokens, new, 1.0, (0, len(tokens), self.calls))


class Transformers:
    """`generate` in static batches."""

    def __init__(self, folder: pathlib.Path):
        self.net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(self, prompts: list[np.ndarray], new: int) -> np.ndarray:
        ids = torch.tensor(np.stack(prompts).astype(np.int64))
        settings = dict(max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0)
        with torch.inference_mode():
            return self.net.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **settings)[:, ids.shape[1] :].numpy()

    def episodes(self, starts: list[np.ndarray], read: np.ndarray) -> None:
        contexts = list(starts)
        for turn in range(TURNS):
            contexts = [np.concatenate([tokens, more]) for tokens, more in zip(contexts, read[turn], strict=True)]
            said = self.generate(contexts, SAMPLED)
            contexts = [np.concatenate([tokens, more]) for tokens, more in zip(contexts, said, strict=True)]


class SGLang:
    """A real server; it keeps its own prefix cache, which is emptied before each batch of episodes."""

    def __init__(self, server):
        self.server = server

    def pause(self, paused: bool) -> None:
        os.killpg(self.server.process.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def generate(self, prompts: list[np.ndarray], new: int) -> list[np.ndarray]:
        sampling = {"max_new_tokens": new, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
        body = {"input_ids": [prompt.tolist() for prompt in prompts], "sampling_params": sampling, "return_logprob": True}
        return [np.array(answer["output_ids"]) for answer in self.server.post("/generate", body, timeout=600)]

    def episodes(self, starts: list[np.ndarray], read: np.ndarray) -> None:
        self.server.post("/flush_cache")
        Transformers.episodes(self, starts, read)


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def rates(
    contenders: dict[str, Generate], batch: int, vocabulary: int, rounds: int, tries: int, turn: Callable[[str], None]
) -> dict[str, tuple]:
    """{who: (prefilled tokens/s, sampled tokens/s)}; the first round warms up and does not count."""
    random = np.random.default_rng(batch)

    def prompts() -> list[np.ndarray]:
        return list(random.integers(3, vocabulary, (batch, PROMPT), dtype=np.int32))

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, generate in contenders.items():
            turn(name)
            prefill = min(seconds(lambda: generate(prompts(), 1)) for _ in range(tries))  # noqa: B023
            whole = min(seconds(lambda: generate(prompts(), NEW)) for _ in range(tries))  # noqa: B023
            if number:
                found[name].append((batch * PROMPT / prefill, batch * (NEW - 1) / max(whole - prefill, 1e-9)))
    return {name: tuple(statistics.median(column) for column in zip(*rows, strict=True)) for name, rows in found.items()}


def random_bank(config: Config):
    bank = init_bank(config, 4, 8, 8.0, jax.random.key(1))
    b = {name: 0.02 * jax.random.normal(jax.random.key(i), x.shape) for i, (name, x) in enumerate(bank.b.items())}
    return dataclasses.replace(bank, b=b), init_gate(config, 5, 0.0, jax.random.key(2))


def measure(shape: str, batches: list[int], what: list[str], rounds: int, tries: int, with_server: bool) -> None:
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        folder = pathlib.Path(temporary) / "model"
        small = shape == "quickstart"
        model = load_pretrained(load_config("quickstart").model.weights) if small else CausalLM(LARGER, nnx.Rngs(0), jnp.float32)
        save_pretrained(model, folder)
        vocabulary = model.config.vocab_size
        theirs = Transformers(folder)
        server = None
        if with_server:
            from tests.sglang_server.server import serve

            options = {"--context-length": 1024, "--max-running-requests": max(batches), "--max-total-tokens": 64 * 1024}
            words = [str(word) for option in options.items() for word in option]
            server = SGLang(stack.enter_context(serve(folder, "--skip-tokenizer-init", *words)))
            stack.callback(server.pause, False)
        contenders = {"transformers": theirs} | ({"sglang": server} if server else {})

        def turn(name: str) -> None:
            if server is not None:
                server.pause(name != "sglang")
            time.sleep(0.5)  # the threads of the one before spin for a while

        print(f"\n{shape}: {sum(x.size for x in model.parameters().values()) / 1e6:.1f} M parameters")
        print("batch  who             prefill tokens/s  decode tokens/s  ours / theirs")
        for batch in batches if "rates" in what else ():
            ours = Ours(model, batch, Policy("base"), PROMPT + NEW + 8)
            who = {"ours": ours.generate} | {name: contender.generate for name, contender in contenders.items()}
            found = rates(who, batch, vocabulary, rounds, tries, turn)
            for name, (prefill, decode) in found.items():
                ratio = "" if name == "ours" else f"{found['ours'][0] / prefill:.2f} {found['ours'][1] / decode:.2f}"
                print(f"{batch:>5}  {name:<14}  {prefill:>16,.0f}  {decode:>15,.0f}  {ratio}", flush=True)
            if batch == 32:
                ratio = found["ours"][1] / found["transformers"][1]
                print(f"       goal: decode >= {GOALS[shape]} x transformers: {'met' if ratio >= GOALS[shape] else 'missed'}")
        if "episodes" in what:
            episodes(model, contenders, vocabulary, rounds, turn)
        if "routed" in what:
            routed(model, vocabulary, rounds, tries, lambda: turn("ours"))


def episodes(model: CausalLM, contenders: dict, vocabulary: int, rounds: int, turn: Callable[[str], None]) -> None:
    ours = Ours(model, EPISODES, Policy("base"), CONTEXT)
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        random = np.random.default_rng(number)
        shared = random.integers(3, vocabulary, SHARED, dtype=np.int32)
        read = random.integers(3, vocabulary, (TURNS, EPISODES, READ), dtype=np.int32)
        for name, contender in {"ours": ours, **contenders}.items():
            turn(name)
            before = ours.engine.metrics.get("prefilled", 0)
            took = seconds(lambda: contender.episodes([shared] * EPISODES, read))  # noqa: B023
            if name == "ours":
                prefilled = ours.engine.metrics["prefilled"] - before
            if number:
                times.setdefault(name, []).append(took)
    without = EPISODES * sum(SHARED + READ + turn * (READ + SAMPLED) for turn in range(TURNS))
    median = {name: statistics.median(found) for name, found in times.items()}
    print(f"episodes ({EPISODES} of {TURNS} turns): " + ", ".join(f"{name} {took:.2f} s" for name, took in median.items()))
    print("       ours / theirs: " + ", ".join(f"{median['ours'] / median[name]:.2f} of {name}" for name in median if name != "ours"))
    print(f"       prefilled {prefilled:,} tokens, without reuse {without:,}: {without / prefilled:.1f} x fewer (goal 4)")


def routed(model: CausalLM, vocabulary: int, rounds: int, tries: int, turn: Callable[[], None], batch: int = 32) -> None:
    turn()
    bank, gate = random_bank(model.config)
    policies = {"base": Policy("base"), "routed": Policy("routed", adapters=bank, gate=gate)}
    who = {name: Ours(model, batch, policy, PROMPT + NEW + 8).generate for name, policy in policies.items()}
    found = rates(who, batch, vocabulary, rounds, tries, lambda _: None)
    print(
        f"routed over four rank-8 adapters: {found['base'][1] / found['routed'][1]:.2f} x base's time a sampled token (goal 1.15)", end=", "
    )
    print(f"{found['base'][0] / found['routed'][0]:.2f} x a prefilled one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="quickstart,0.1b")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--what", default="rates,episodes,routed")
    parser.add_argument("--sglang", action="store_true")
    arguments = parser.parse_args()
    for shape in arguments.shapes.split(","):
        batches, what = [int(batch) for batch in arguments.batches.split(",")], arguments.what.split(",")
        measure(shape, batches, what, arguments.rounds, arguments.tries, arguments.sglang)


if __name__ == "__main__":
    main()
