"""One GRPO update: packed batch in, better adapter (or gate) out.

The state's `params` are trained: an `AdapterBank` of one adapter that every token takes, or a `Gate` that routes tokens over a frozen
bank, top-1 forward and straight-through backward, which is how the routed model runs at inference. Backbone and frozen bank are arguments
of the jitted functions, never closures and never donated; parameters and optimizer state are donated.

Where a batch says which experts the engine took, they are taken again: two computations of one router choose differently for many tokens.

A batch is cut into micro-batches of one shape. Three functions are compiled once each, whatever the number of trajectories: the gradient
of a micro-batch, the sum of two gradients, the update. On the model's mesh a micro-batch is split by rows, parameters and optimizer state
as `model.sharding` says, and every process passes the same batch in.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from model import AdapterBank, CausalLM, Gate, Routing, token_logprobs
from model.lora import bank_shardings
from model.sharding import constrain, distribute, partition
from rl.loss import LossConfig, Metrics, mean_metrics, policy_loss
from rl.packing import Batch

Params = AdapterBank | Gate


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """Optimizer and memory settings.

    Attributes:
      learning_rate, warmup_steps, total_steps, schedule: linear warm-up, then constant or a cosine to 0 at `total_steps` updates.
      max_grad_norm: the gradient is clipped to this global norm.
      temperature: of the sampling law; the trainer's logits are divided by it.
      micro_rows: rows of a micro-batch; batches are packed to a multiple of it.
      logprob_chunk: positions whose logits exist at a time.
      base_kl_every: updates between two measurements of the divergence from the base, on the first micro-batch; 0 is never. With a
        divergence term in the loss it is measured on everything anyway.
    """

    learning_rate: float = 1e-5
    warmup_steps: int = 0
    total_steps: int | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    micro_rows: int = 8
    logprob_chunk: int = 512
    base_kl_every: int = 0

    def __post_init__(self):
        if self.learning_rate <= 0 or self.max_grad_norm <= 0 or self.temperature <= 0:
            raise ValueError("learner.learning_rate, max_grad_norm and temperature must be positive")
        if self.micro_rows < 1 or self.logprob_chunk < 1 or self.warmup_steps < 0 or self.base_kl_every < 0:
            raise ValueError("learner.micro_rows and logprob_chunk must be positive, warmup_steps and base_kl_every not negative")
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"learner.schedule must be 'constant' or 'cosine', found {self.schedule!r}")
        if self.schedule == "cosine" and (self.total_steps or 0) <= self.warmup_steps:
            raise ValueError(f"learner.total_steps must exceed warmup_steps for a cosine schedule, found {self.total_steps}")

    def rate(self) -> optax.Schedule:
        """The learning rate by update; the first update of a warm-up is not 0."""
        warm = self.learning_rate * (1 / (self.warmup_steps + 1))
        if self.schedule == "cosine":
            return optax.warmup_cosine_decay_schedule(warm, self.learning_rate, self.warmup_steps, self.total_steps)
        return optax.linear_schedule(warm, self.learning_rate, self.warmup_steps) if self.warmup_steps else lambda _: self.learning_rate

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW behind a clip of the global norm; only matrices decay."""

        def matrices(params):
            return jax.tree.map(lambda x: x.ndim > 2, params)

        adam = optax.adamw(self.rate(), self.beta1, self.beta2, self.epsilon, weight_decay=self.weight_decay, mask=matrices)
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), adam)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnerState:
    """All that an update depends on besides its batch. `step` counts updates; `rng` moves on with each."""

    params: Params
    opt_state: optax.OptState
    step: jax.Array
    rng: jax.Array


class Learner:
    """GRPO updates of an adapter, or with `bank` of a gate over that bank's adapters.

    One learner serves any number of states of the same shapes: what it compiled for one capability is used for the next.

    Attributes:
      compiles: how often each of its functions was traced; a number that grows during a run means that shapes vary.
    """

    def __init__(self, model: CausalLM, config: LearnerConfig, loss: LossConfig | None = None, *, bank: AdapterBank | None = None):
        self.config, self.loss = config, loss or LossConfig()
        self.compiles: Counter[str] = Counter()
        self._graph, self._frozen = nnx.split(model)
        self._model, self._mesh = model.config, model.mesh
        self.bank = bank if bank is None else self._lay_out(bank)
        self._optimizer = config.optimizer()
        self._start = jax.jit(self._initial, static_argnums=1)
        self._gradient = jax.jit(self._count(self._micro_gradient))
        self._add = jax.jit(self._count(_add), donate_argnums=0)
        self._apply = jax.jit(self._count(self._update), donate_argnums=0)
        self._score = jax.jit(self._count(self._logprobs))
        self._divergence = jax.jit(self._count(self._base_k3))
        self._whole = jax.jit(lambda x: x, out_shardings=self._mesh and NamedSharding(self._mesh, PartitionSpec()))

    def init(self, params: Params, seed: int = 0) -> LearnerState:
        """The state before the first update; `params` float32, copied, since a state is donated to its update.

        Raises:
          ValueError: `params` are not what this learner trains.
        """
        if self.bank is None and not (isinstance(params, AdapterBank) and params.size == 1):
            raise ValueError("a learner without a bank trains an AdapterBank of one adapter")
        if self.bank is not None and not (isinstance(params, Gate) and params.bias.shape[-1] == self.bank.size + 1):
            raise ValueError(f"a learner with a bank of {self.bank.size} trains a Gate of {self.bank.size + 1} slots")
        return self._start(jax.tree.map(lambda x: jnp.array(x, jnp.float32), self._lay_out(params)), seed)

    def step(self, state: LearnerState, batch: Batch) -> tuple[LearnerState, dict[str, float]]:
        """One update. `state` is used up; with no action token in the batch it is returned as it is.

        Args:
          batch: [N, T], N a multiple of `config.micro_rows`.

        Returns:
          The next state, and the metrics of `rl.loss` with `grad_norm`, `learning_rate`, `policy_lag` (updates since the tokens were
          sampled), `fill` (share of the rows that is no padding), `skipped` (1 if the gradient was not finite and nothing was changed),
          `seconds/transfer` (of the batch to the devices), `seconds/step` and `compiles`.
        """
        began = time.perf_counter()
        step = int(state.step)
        if not batch.action_tokens:
            return state, {"action_tokens": 0.0, "skipped": 1.0}
        micros = jax.block_until_ready(self._micro_batches(batch))
        transferred = time.perf_counter()
        gradient, sums = self._accumulated(state.params, micros, batch.action_tokens)
        extra: dict[str, Any] = {}
        if not self.loss.kl and self.config.base_kl_every and step % self.config.base_kl_every == 0:
            extra["base_k3"] = self._divergence(self._frozen, self.bank, state.params, micros[0])
        state, update = self._apply(state, gradient)
        sums, extra = jax.device_get((sums, extra | update))
        metrics = mean_metrics(sums) | {name: float(value) for name, value in extra.items()}
        metrics["policy_lag"] = step - float(batch.versions[batch.mask > 0].mean())
        metrics["fill"] = float((batch.segment_ids > 0).mean())
        metrics |= {"seconds/transfer": transferred - began, "seconds/step": time.perf_counter() - transferred}
        metrics["compiles"] = self.compiles.total()
        return state, metrics

    def gradient(self, params: Params, batch: Batch) -> tuple[Params, Metrics]:
        """The gradient of the batch's loss in the shape of `params`, and the summed metrics of `rl.loss`."""
        return self._accumulated(params, self._micro_batches(batch), batch.action_tokens)

    def logprobs(self, params: Params | None, batch: Batch) -> np.ndarray:
        """[N, T] log-probs of the batch's targets under `params`, or under the base alone; to compare with the engine's."""
        parts = (self._score(self._frozen, self.bank, params, micro) for micro in self._micro_batches(batch))
        return np.concatenate([np.asarray(logprobs) for logprobs, _ in parts])

    def gathered(self, params: Params) -> Params:
        """`params` whole in every process, for its engine and for files; all processes call it together."""
        if jax.process_count() == 1:
            return params
        # one array at a time: the largest may be whole on a device, all of them may not
        return jax.tree.map(lambda x: np.asarray(self._whole(x)), params)

    def lower(self, params: Params, length: int) -> dict[str, jax.stages.Lowered]:
        """The functions of a step, lowered for micro-batches of rows of `length` tokens; nothing runs.

        Model, bank and `params` may be shapes instead of arrays, and the mesh one of devices that are not there.
        """
        types = {"mask": jnp.float32, "logprobs": jnp.float32, "advantages": jnp.float32}
        fields = (field.name for field in dataclasses.fields(Batch) if field.name != "experts")
        rows = {name: jax.ShapeDtypeStruct((self.config.micro_rows, length), types.get(name, jnp.int32)) for name in fields}
        batch = self._on_mesh(Batch(**rows))
        params = self._lay_out(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params))
        state = jax.eval_shape(self._start, params, 0)
        state = state if self._mesh is None else distribute(state, self._state_shardings(state))
        return {
            "gradient": self._gradient.lower(self._frozen, self.bank, params, batch, jax.ShapeDtypeStruct((), jnp.float32)),
            "update": self._apply.lower(state, params),
        }

    # --- the mesh

    def _shardings(self, params: Params) -> Params:
        """The sharding of each array of `params`; a gate is whole everywhere."""
        if isinstance(params, Gate):
            return jax.tree.map(lambda _: NamedSharding(self._mesh, PartitionSpec()), params)
        return bank_shardings(params, self._model, self._mesh)

    def _state_shardings(self, state: LearnerState) -> LearnerState:
        """The optimizer's arrays lie as the parameters that they belong to; all else is whole everywhere."""
        whole = NamedSharding(self._mesh, PartitionSpec())
        params = self._shardings(state.params)
        opt_state = optax.tree_utils.tree_map_params(
            self._optimizer, lambda _, sharding: sharding, state.opt_state, params, transform_non_params=lambda _: whole
        )
        return LearnerState(params, opt_state, whole, whole)

    def _lay_out(self, params: Params) -> Params:
        return params if self._mesh is None else distribute(params, self._shardings(params))

    def _constrained(self, params: Params) -> Params:
        return params if self._mesh is None else jax.lax.with_sharding_constraint(params, self._shardings(params))

    def _constrained_state(self, state: LearnerState) -> LearnerState:
        return state if self._mesh is None else jax.lax.with_sharding_constraint(state, self._state_shardings(state))

    def _on_mesh(self, batch: Batch) -> Batch:
        if self._mesh is None:
            return batch
        return distribute(batch, jax.tree.map(lambda x: partition(x.shape, ("batch", *(None,) * (x.ndim - 1)), self._mesh), batch))

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        """The micro-batches on the devices. A few numbers a token: they are small beside the activations.

        Raises:
          ValueError: the expert ids are of another model, or rows hold several trajectories and the model expects one.
        """
        if not self._model.packed and batch.segment_ids.max(initial=0) > 1:
            raise ValueError("the batch has several trajectories in a row, the model's config says packed=False; pack with packed=False")
        sparse = self._model.count("sparse")
        if batch.experts is not None and batch.experts.shape[2:] != (sparse, self._model.num_experts_per_tok):
            raise ValueError(
                f"the batch has expert ids of {batch.experts.shape[2]} layers and {batch.experts.shape[3]} experts a token, "
                f"the model has {sparse} sparse layers and {self._model.num_experts_per_tok}"
            )
        put = jax.device_put if self._mesh is None else self._on_mesh
        return [put(micro) for micro in batch.micro_batches(self.config.micro_rows)]

    def _accumulated(self, params: Params, micros: list[Batch], action_tokens: float) -> tuple[Params, Metrics]:
        tokens, total = np.float32(action_tokens), None
        for micro in micros:
            part = self._gradient(self._frozen, self.bank, params, micro, tokens)
            total = part if total is None else self._add(total, part)
        return total

    # --- what is compiled

    def _initial(self, params: Params, seed: int) -> LearnerState:
        state = LearnerState(params, self._optimizer.init(params), jnp.zeros((), jnp.int32), jax.random.key(seed))
        return self._constrained_state(state)

    def _count(self, function: Callable) -> Callable:
        def traced(*args):
            self.compiles[function.__name__] += 1
            return function(*args)

        return traced

    def _logprobs(self, frozen: nnx.State, bank: AdapterBank | None, params: Params | None, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Log-probs and entropies [N, T]; `params` None is the base."""
        model = nnx.merge(self._graph, frozen)
        if params is None:
            adapters, routing = None, None
        elif bank is None:
            adapters, routing = params, None
        else:
            adapters, routing = bank, Routing(gate=params, mode="straight_through")
        experts = None if params is None else batch.experts
        hidden = model.forward(batch.tokens, batch.positions, batch.segment_ids, adapters, routing, experts=experts).hidden
        found = token_logprobs(model, hidden, batch.targets, self.config.temperature, self.config.logprob_chunk)
        logprobs, entropy = (constrain(x, (None, None), self._mesh) for x in found)  # a host asks for all of them
        return logprobs, entropy

    def _micro_gradient(self, frozen, bank, params: Params, batch: Batch, denominator: jax.Array) -> tuple[Params, Metrics]:
        base = self._logprobs(frozen, bank, None, batch)[0] if self.loss.kl else None

        def loss(params):
            logprobs, entropy = self._logprobs(frozen, bank, params, batch)
            return policy_loss(logprobs, batch, denominator, self.loss, entropy=entropy, base_logprobs=base)

        gradient, sums = jax.grad(loss, has_aux=True)(params)
        return self._constrained(gradient), sums

    def _base_k3(self, frozen, bank, params: Params, batch: Batch) -> jax.Array:
        gap = self._logprobs(frozen, bank, params, batch)[0] - self._logprobs(frozen, bank, None, batch)[0]
        return jnp.sum(batch.mask * (jnp.exp(-gap) - 1 + gap)) / jnp.maximum(jnp.sum(batch.mask), 1)

    def _update(self, state: LearnerState, gradient: Params) -> tuple[LearnerState, Metrics]:
        norm = optax.tree.norm(gradient)
        updates, opt_state = self._optimizer.update(gradient, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state)
        finite = jnp.isfinite(norm)
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (state.params, state.opt_state))
        metrics = {"grad_norm": norm, "learning_rate": jnp.asarray(self.config.rate()(state.step)), "skipped": 1.0 - finite}
        state = LearnerState(params, opt_state, state.step + 1, jax.random.split(state.rng, 1)[0])
        return self._constrained_state(state), metrics


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
