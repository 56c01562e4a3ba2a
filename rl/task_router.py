"""The task-level router that the token gate is compared with: one adapter per episode, chosen from the prompt.

A linear classifier (multinomial logistic regression) on the base model's last hidden state at the last token of the prompt; the label is
the capability of the environment that the seed belongs to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from model import CausalLM
from rl.trajectory import Trajectory

_STEPS = 300  # of L-BFGS


@dataclasses.dataclass(frozen=True)
class TaskRouter:
    """kernel[D, K], bias[K] on features standardised by mean[D] and deviation[D]; class k is adapter k, slot k + 1."""

    kernel: np.ndarray
    bias: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray

    def predict(self, features: np.ndarray) -> np.ndarray:
        """features[n, D] -> slots[n] in 1..K."""
        scores = (np.asarray(features) - self.mean) / self.deviation @ self.kernel + self.bias
        return scores.argmax(axis=-1) + 1

    def to_json(self) -> dict[str, list]:
        return {field.name: getattr(self, field.name).tolist() for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, list]) -> TaskRouter:
        return cls(**{field.name: np.asarray(data[field.name], np.float32) for field in dataclasses.fields(cls)})


def fit(features: np.ndarray, slots: np.ndarray, count: int, *, l2: float = 1e-3) -> TaskRouter:
    """The router fitted to features[n, D] and slots[n] in 1..count by L-BFGS on the cross-entropy plus l2 / 2 * |kernel|^2.

    Raises:
      ValueError: a slot outside 1..count.
    """
    features, slots = np.asarray(features, np.float32), np.asarray(slots, int)
    if len(features) != len(slots) or not len(slots) or slots.min() < 1 or slots.max() > count:
        raise ValueError(f"{len(features)} features with {len(slots)} slots; slots must be within 1..{count}")
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-6
    x, y = jnp.asarray((features - mean) / deviation), jnp.asarray(slots - 1)

    def loss(params):
        kernel, bias = params
        return optax.softmax_cross_entropy_with_integer_labels(x @ kernel + bias, y).mean() + l2 / 2 * jnp.sum(kernel**2)

    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    @jax.jit
    def run(params):
        def update(carry, _):
            params, state = carry
            value, gradient = value_and_grad(params, state=state)
            updates, state = optimizer.update(gradient, state, params, value=value, grad=gradient, value_fn=loss)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(update, (params, optimizer.init(params)), None, _STEPS)[0][0]

    kernel, bias = run((jnp.zeros((x.shape[1], count)), jnp.zeros(count)))
    return TaskRouter(np.asarray(kernel), np.asarray(bias), mean, deviation)


def prompt_of(trajectory: Trajectory) -> np.ndarray:
    """The tokens before the first sampled one.

    Raises:
      ValueError: a trajectory without tokens, or that begins with a sampled one.
    """
    if trajectory.tokens is None or not trajectory.loss_mask.any() or trajectory.loss_mask[0]:
        raise ValueError(f"trajectory {trajectory.id!r} has no prompt tokens")
    return trajectory.tokens[: int(trajectory.loss_mask.argmax())]


def prompt_features(model: CausalLM, prompts: Sequence[np.ndarray], *, rows: int = 32, multiple: int = 64) -> np.ndarray:
    """[n, D]: the base's last hidden state at the last token of each prompt, computed `rows` at a time at one padded length."""
    length = -(-max(map(len, prompts)) // multiple) * multiple
    padded = -(-len(prompts) // rows) * rows
    tokens, ends = np.zeros((padded, length), np.int32), np.zeros(padded, np.int32)
    segments = np.zeros((padded, length), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], segments[row, : len(prompt)], ends[row] = prompt, 1, len(prompt) - 1
    graph, frozen = nnx.split(model)

    @jax.jit
    def last(frozen, tokens, segments, ends):
        hidden = nnx.merge(graph, frozen).forward(tokens, segment_ids=segments).hidden
        return hidden[jnp.arange(len(ends)), ends]

    parts = [last(frozen, tokens[i : i + rows], segments[i : i + rows], ends[i : i + rows]) for i in range(0, padded, rows)]
    return np.concatenate([np.asarray(part, np.float32) for part in parts])[: len(prompts)]
