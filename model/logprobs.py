"""Log-probs of the taken tokens without ever holding the logits of a whole sequence.

At 16k tokens and a vocabulary of 152k, float32 logits are 10 GB a sequence. They are made in chunks over time and made again in the
backward pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model.causal_lm import CausalLM
from model.matmul import dense
from model.sharding import constrain


def token_logprobs(
    model: CausalLM, hidden: jax.Array, targets: jax.Array, temperature: jax.Array | float = 1.0, chunk: int = 512
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target and entropy of its distribution under softmax(logits / temperature), both float32 [B, T].

    hidden[B, T, D] from `model.forward`, targets[B, T], temperature a scalar or [B]. The softmax is float32.
    """
    batch, length = targets.shape
    chunk = min(chunk, length)
    pad = -length % chunk
    # gathered here from the devices that share it; left to the compiler, every chunk gathers it again
    weight = constrain(model.unembedding(), (None, "logits"), model.mesh)
    inverse = 1.0 / jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (batch,))[:, None, None]

    @jax.checkpoint
    def piece(hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = dense(hidden, weight, True) * inverse
        logz = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        # a comparison, not a gather: its gradient is a product, where a gather's is a scatter
        taken = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0.0), axis=-1)
        entropy = logz[..., 0] - jnp.sum(jnp.exp(logits - logz) * logits, axis=-1)
        return taken - logz[..., 0], entropy

    if length == chunk:
        return piece(hidden, targets)
    split = (
        jnp.moveaxis(jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)).reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)
        for x in (hidden, targets)
    )
    _, pieces = jax.lax.scan(lambda _, xs: (None, piece(*xs)), None, tuple(split))
    logprobs, entropy = (jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length] for x in pieces)
    return logprobs, entropy
