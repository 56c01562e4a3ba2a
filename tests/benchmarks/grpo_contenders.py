"""The three contenders of grpo_step.py, each a process of its own: one LoRA GRPO update on rollouts that are given.

    PYTHON tests/benchmarks/grpo_contenders.py ours|tunix|trl FOLDER MICRO_BATCH time|check

FOLDER holds `model` and `adapter` (Hugging Face and PEFT), `workload.npz` and `settings.json`. `check` writes the loss, its gradient in
PEFT's layout and the log-probs of the sampled tokens of the first groups to FOLDER/check-NAME.safetensors. `time` says when the model is
loaded and then answers each line on stdin, `step`, `matmul M K N` or `report`, with one JSON line.

What runs is each library's own code:

ours    `group_advantages`, `pack` and `Learner.step`.
tunix   `tunix.rl.trainer.Trainer.train` on `TrainExample`s, wired to `grpo_loss_fn` as `GRPOLearner` and `RLCluster.update_actor` do (a
        `GRPOLearner` itself needs a sampler and a tokenizer), qwix LoRA on `tunix.models.qwen3`. Rows are padded to the longest prompt and
        the longest completion. `pack_sequences` is not used: its segment ids reach Tunix's TPU attention kernel only, elsewhere packed
        sequences would see each other.
trl     `GRPOTrainer.train` with PEFT, timed by a callback from `on_step_begin` to `on_step_end`. The rollouts come through `rollout_func`,
        and what `_generate_and_score_completions` (private) makes of them the first time is given again in each step. Padded likewise; TRL
        has no packing for GRPO.

No gradient checkpointing, no pass for old log-probs (one update a batch), no KL, clip 0.2 / 0.28, token mean over the batch, AdamW behind a
clip of the gradient's norm to 1. Tunix takes the token mean over a micro-batch and then the mean of those, so that only the comparison,
which is one micro-batch, has exactly the loss of the others. TRL's and Tunix's advantages are given, ours are computed in the timed step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import time

import numpy as np

LEARNING_RATE, BETA1, BETA2, EPSILON, MAX_NORM = 1e-5, 0.9, 0.95, 1e-8, 1.0
PAD, END = 0, 1  # token ids that no rollout has
_MODULES = {"q": "attn", "k": "attn", "v": "attn", "o": "attn", "gate": "mlp", "up": "mlp", "down": "mlp"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """n trajectories, the members of a group in a row.

    tokens, mask, logprobs: a list of [T_i] each, mask 1 where the policy sampled; prompts: [n] tokens before the first sampled one;
    rewards, advantages: [n]; group: members of a group.
    """

    tokens: list[np.ndarray]
    mask: list[np.ndarray]
    logprobs: list[np.ndarray]
    prompts: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray
    group: int

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Workload:
        lists = {f.name: getattr(self, f.name)[:count] for f in dataclasses.fields(self) if f.name != "group"}
        return Workload(**lists, group=self.group)

    def save(self, path: pathlib.Path) -> None:
        flat = {name: np.concatenate(getattr(self, name)) for name in ("tokens", "mask", "logprobs")}
        lengths = np.array([len(x) for x in self.tokens])
        np.savez(path, lengths=lengths, prompts=self.prompts, rewards=self.rewards, advantages=self.advantages, group=self.group, **flat)

    @staticmethod
    def load(path: pathlib.Path) -> Workload:
        with np.load(path) as data:
            split = np.cumsum(data["lengths"])[:-1]
            lists = (np.split(data[name], split) for name in ("tokens", "mask", "logprobs"))
            return Workload(*lists, data["prompts"], data["rewards"], data["advantages"], int(data["group"]))

    def padded(self) -> dict[str, np.ndarray]:
        """prompt_ids [n, P], padded on the left, completion_ids and their mask [n, C] on the right; P and C as long as the longest."""
        wide = self.prompts.max(), max(len(t) - p for t, p in zip(self.tokens, self.prompts, strict=True))
        prompts, completions, mask = (np.full((len(self), w), PAD, np.int32) for w in (wide[0], wide[1], wide[1]))
        for i, (tokens, sampled, p) in enumerate(zip(self.tokens, self.mask, self.prompts, strict=True)):
            prompts[i, wide[0] - p :] = tokens[:p]
            completions[i, : len(tokens) - p] = tokens[p:]
            mask[i, : len(tokens) - p] = sampled[p:]
        return {"prompt_ids": prompts, "completion_ids": completions, "mask": mask}


class Clock:
    """The other end of the driver's pipe. `begin` serves requests until a step is asked for; `end` answers with what it took."""

    def __init__(self, positions: int, matmul):
        self.positions, self.matmul = positions, matmul
        self.channel = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print where they like
        self.imported = _memory("VmRSS")
        self.start = (0.0, 0.0)

    def ready(self) -> None:
        self._send({"loaded": _memory("VmRSS"), "imported": self.imported, "positions": self.positions})

    def begin(self) -> None:
        for line in sys.stdin:
            request, *sizes = line.split()
            if request == "step":
                self.start = time.perf_counter(), time.process_time()
                return
            self._send({"peak": _memory("VmHWM")} if request == "report" else {"flops": self._rate(*map(int, sizes))})
        raise SystemExit(0)

    def end(self) -> None:
        self._send({"seconds": time.perf_counter() - self.start[0], "cpu": time.process_time() - self.start[1]})

    def _rate(self, m: int, k: int, n: int) -> float:
        run = self.matmul(m, k, n)
        run()
        repeats, start = max(3, int(2e10 / (2 * m * k * n))), time.perf_counter()
        for _ in range(repeats):
            run()
        return 2.0 * m * k * n * repeats / (time.perf_counter() - start)

    def _send(self, answer: dict) -> None:
        print(json.dumps(answer), file=self.channel, flush=True)


def _memory(field: str) -> int:
    """Bytes of VmRSS or VmHWM of this process. getrusage's maximum would include the driver's, which an exec hands down."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def _jax_matmul(m: int, k: int, n: int):
    import jax

    x, w = (jax.random.normal(jax.random.key(0), shape) for shape in ((m, k), (k, n)))
    product = jax.jit(lambda x, w: x @ w)
    return lambda: product(x, w).block_until_ready()


# --- ours


def ours(folder: pathlib.Path, workload: Workload, settings: dict, micro: int, check: bool) -> None:
    from model import load_peft, load_pretrained, save_peft
    from rl.advantages import group_advantages
    from rl.learner import Learner, LearnerConfig
    from rl.packing import pack
    from rl.trajectory import Trajectory

    def trajectory(i: int) -> Trajectory:
        mask = workload.mask[i]
        arrays = {"tokens": workload.tokens[i], "loss_mask": mask, "logprobs": workload.logprobs[i]}
        arrays |= {name: np.zeros(len(mask), np.int32) for name in ("turns", "versions")}
        group = str(i // workload.group)
        return Trajectory(id=str(i), environment="e", task_id=group, group=group, reward=float(workload.rewards[i]), **arrays)

    trajectories = [trajectory(i) for i in range(len(workload))]

    def batch():
        advantages = group_advantages(trajectories).values
        return pack(trajectories, advantages, lengths=(settings["row"],), micro_rows=micro)

    clock = Clock(batch().tokens.size, _jax_matmul)
    model = load_pretrained(folder / "model")
    config = LearnerConfig(LEARNING_RATE, beta1=BETA1, beta2=BETA2, epsilon=EPSILON, max_grad_norm=MAX_NORM, micro_rows=micro)
    learner = Learner(model, config)
    state = learner.init(load_peft(folder / "adapter", model.config))
    if check:
        packed = batch()
        gradient, metrics = learner.gradient(state.params, packed)
        logprobs = learner.logprobs(state.params, packed)
        sampled = [logprobs[(packed.trajectory == i) & (packed.mask > 0)] for i in range(len(workload))]
        save_peft(gradient, model.config, folder / "check-ours")
        from safetensors.numpy import load_file

        _write_check(folder, "ours", metrics["loss"], np.concatenate(sampled), load_file(folder / "check-ours/adapter_model.safetensors"))
        return
    clock.ready()
    while True:
        clock.begin()
        state, _ = learner.step(state, batch())
        clock.end()


# --- Tunix


def tunix(folder: pathlib.Path, workload: Workload, settings: dict, micro: int, check: bool) -> None:
    import jax
    import jax.numpy as jnp
    import optax
    import qwix
    from flax import nnx
    from safetensors.numpy import load_file
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3 import params
    from tunix.rl import common, function_registry
    from tunix.rl.grpo.dapo_learner import DAPOConfig
    from tunix.rl.grpo.grpo_learner import TrainExample
    from tunix.rl.trainer import Trainer
    from tunix.sft.peft_trainer import TrainingConfig

    rows = workload.padded()
    clock = Clock(rows["prompt_ids"].size + rows["completion_ids"].size, _jax_matmul)
    given = json.loads((folder / "model/config.json").read_text())
    names = {"num_layers": "num_hidden_layers", "embed_dim": "hidden_size", "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps"}
    names |= {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "use_tied_embedding": "tie_word_embeddings"}
    names |= {name: name for name in ("vocab_size", "head_dim", "rope_theta")}
    config = qwen3.ModelConfig(**{theirs: given[name] for theirs, name in names.items()})
    model = params.create_model_from_safe_tensors(str(folder / "model"), config, dtype=jnp.float32)
    path = "|".join(f".*{name}_proj" for name in _MODULES)
    lora = qwix.LoraProvider(module_path=path, rank=settings["rank"], alpha=settings["alpha"])
    model = qwix.apply_lora_to_model(model, lora, rngs=nnx.Rngs(0), **model.get_model_input())

    def key(path: tuple) -> str:
        """PEFT's name of a parameter such as ("layers", 0, "attn", "q_proj", "w_lora_a")."""
        _, layer, part, projection, factor = path
        return (
            f"base_model.model.model.layers.{layer}.{'self_attn' if part == 'attn' else part}.{projection}.lora_{factor[-1].upper()}.weight"
        )

    adapter = load_file(folder / "adapter/adapter_model.safetensors")
    factors = nnx.state(model, nnx.LoRAParam)
    flat = {path: jnp.asarray(adapter[key(path)].T.reshape(x.get_value().shape)) for path, x in nnx.to_flat_state(factors)}
    nnx.update(model, nnx.from_flat_state([(path, x.replace(flat[path])) for path, x in nnx.to_flat_state(factors)]))

    # the DAPO variant of their GRPO: token mean, clip 0.2 / 0.28, no KL
    algorithm = DAPOConfig(num_generations=workload.group, overlong_buffer=None)
    algorithm.temperature = 1.0  # GRPOLearner takes it from the sampler's settings
    policy_loss = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)

    def loss(model, train_example, algo_config):
        return policy_loss(model, train_example, algo_config=algorithm, pad_id=PAD, eos_id=END)

    def examples():
        for start in range(0, len(workload), micro):
            part = slice(start, start + micro)
            prompts, completions, mask = (jnp.asarray(rows[name][part]) for name in ("prompt_ids", "completion_ids", "mask"))
            advantages = jnp.asarray(workload.advantages[part])
            yield TrainExample(prompts, prompts != PAD, completions, mask, advantages, ref_per_token_logps=None, old_per_token_logps=None)

    if check:
        (example,) = examples()
        differentiate = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam), has_aux=True)
        (value, _), gradient = nnx.jit(lambda model: differentiate(model, example, None))(model)
        graph, state = nnx.split(model)
        logprobs = common.compute_per_token_logps(graph, state, example.prompt_ids, example.completion_ids, pad_id=PAD, eos_id=END)
        named = {key(path): np.asarray(x.get_value()) for path, x in nnx.to_flat_state(gradient)}
        named = {name: np.ascontiguousarray(x.reshape(adapter[name].shape[::-1]).T) for name, x in named.items()}
        _write_check(folder, "tunix", value, np.asarray(logprobs)[rows["mask"] > 0], named)
        return
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE, BETA1, BETA2, EPSILON, weight_decay=0.0))
    count = len(workload) // micro
    training = TrainingConfig(eval_every_n_steps=10**9, gradient_accumulation_steps=count if count > 1 else None)
    trainer = Trainer(model, optimizer, training, custom_checkpoint_metadata_fn=dict)
    trainer.is_managed_externally = True  # as RLCluster sets it: `train` is called once a batch
    trainer.with_loss_fn(loss, has_aux=True).with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": algorithm})
    trainer.with_rl_metrics_to_log({"kl": np.mean, "pg_clipfrac": np.mean})
    clock.ready()
    while True:
        clock.begin()
        trainer.train(examples())
        jax.block_until_ready(nnx.state(trainer.model, nnx.LoRAParam))
        clock.end()


# --- TRL


def trl(folder: pathlib.Path, workload: Workload, settings: dict, micro: int, check: bool) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    import datasets
    import peft
    import tokenizers
    import torch
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    def matmul(m: int, k: int, n: int):
        x, w = torch.randn(m, k), torch.randn(k, n)
        return lambda: x @ w

    rows = workload.padded()
    clock = Clock(rows["prompt_ids"].size + rows["completion_ids"].size, matmul)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    words = {f"t{i}": i for i in range(base.config.vocab_size)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=f"t{END}"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"t{PAD}", eos_token=f"t{END}", padding_side="left")

    def rollouts(prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        cut = list(zip(workload.tokens, workload.mask, workload.prompts, strict=True))
        return {
            "prompt_ids": [tokens[:p].tolist() for tokens, _, p in cut],
            "completion_ids": [tokens[p:].tolist() for tokens, _, p in cut],
            "env_mask": [mask[p:].tolist() for _, mask, p in cut],
            "logprobs": None,
        }

    def advantage(prompts: list, completions: list, **_) -> list[float]:
        # the mean of a group's advantages is 0, so TRL's own, not scaled by the deviation, are the same
        return workload.advantages.tolist()

    class Trainer(GRPOTrainer):
        scored = None

        def _generate_and_score_completions(self, inputs):
            self.scored = self.scored or super()._generate_and_score_completions(inputs)
            return dict(self.scored)

        def compute_loss(self, *args, **kwargs):
            self.loss = super().compute_loss(*args, **kwargs)
            return self.loss

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            clock.begin()

        def on_step_end(self, *args, **kwargs):
            clock.end()

    class Check(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args, model, **kwargs):
            gradient = {name.replace(".default", ""): x.grad.numpy() for name, x in model.named_parameters() if x.requires_grad}
            prompts, completions = (torch.tensor(rows[name], dtype=torch.long) for name in ("prompt_ids", "completion_ids"))
            tokens = torch.cat([prompts, completions], 1)
            with torch.no_grad():
                logprobs = trainer._get_per_token_logps_and_entropies(model, tokens, (tokens != PAD).long(), completions.shape[1])[0]
            _write_check(folder, "trl", trainer.loss.detach().numpy(), logprobs.numpy()[rows["mask"] > 0], gradient)

    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False, max_steps=1 if check else 10**6,
        per_device_train_batch_size=micro, gradient_accumulation_steps=len(workload) // micro, num_generations=workload.group,
        max_completion_length=settings["row"], beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo", scale_rewards="none",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", adam_beta1=BETA1, adam_beta2=BETA2, adam_epsilon=EPSILON,
        weight_decay=0.0, max_grad_norm=0.0 if check else MAX_NORM, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    dataset = datasets.Dataset.from_list([{"prompt": f"t{END}"}] * (len(workload) // workload.group))
    callbacks = [Check()] if check else [Steps()]
    trainer = Trainer(model, advantage, config, dataset, processing_class=tokenizer, rollout_func=rollouts, callbacks=callbacks)
    if not check:
        clock.ready()
    trainer.train()


def _write_check(folder: pathlib.Path, name: str, loss, logprobs: np.ndarray, gradient: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    arrays = {"loss": np.float32(loss).reshape(1), "logprobs": np.asarray(logprobs, np.float32)}
    save_file(arrays | {key: np.ascontiguousarray(x) for key, x in gradient.items()}, folder / f"check-{name}.safetensors")


def main() -> None:
    name, folder, micro, mode = sys.argv[1:]
    os.environ["JAX_PLATFORMS"] = "cpu"
    folder = pathlib.Path(folder)
    settings = json.loads((folder / "settings.json").read_text())
    workload = Workload.load(folder / "workload.npz")
    if mode == "check":
        workload = workload.first(settings["check"])
    {"ours": ours, "tunix": tunix, "trl": trl}[name](folder, workload, settings, int(micro), mode == "check")


if __name__ == "__main__":
    main()
