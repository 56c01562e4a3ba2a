"""Stage 1 of the gate: a warm start on trajectories whose adapter is known. Stage 2, GRPO of the routed model, is `rl.learner` with a
bank.

Every response token of a successful trajectory is labelled with the slot that produced it, and the gates of all layers are fitted to the
labels by cross-entropy. Two weightings of the tokens:

- "plain": all response tokens alike, the published form. On most tokens (format, copied names) adapter and base agree, so the label says
  nothing about what the token needs, yet such tokens are most of the loss and betray the environment.
- "kl_weighted": a token weighs min(KL(own adapter || base), kl_clip), rescaled so that every capability has the same total (one adapter can
  have ten times the divergence of another), and every token, those of the prompt too, is pulled to the base slot with `base_weight`. So
  `base_weight` is in nats: an adapter is worth its slot where it moves the distribution by more.

Which hidden states? At inference a gate reads the stream of the *routed* model. Under the label's adapter the stream carries that
adapter's own traces from the second layer on; a gate fitted there learns to follow what was chosen below instead of what the token needs.
A fresh gate chooses the base everywhere, so the base's stream is its routed stream, and that is where fitting starts; as the gate
changes, the stream is computed again under its own top-1 choices (`refreshes`). `stream="label"` keeps the label's stream, for
comparison.

The gates read behind a stop-gradient and are linear, so between two refreshes this is a multinomial regression on fixed inputs, and a
step costs no forward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from model import AdapterBank, CausalLM, Gate, Routing, init_gate, slice_bank
from rl.packing import Batch, pack
from rl.trajectory import Trajectory

_TOKEN_MULTIPLE = 4096  # token counts are padded to it, so that runs of about one size share a compiled fit


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Settings of stage 1.

    Attributes:
      loss: weighting of the tokens, see above.
      steps, learning_rate: Adam on all tokens at once, cosine to 0.
      kl_clip, base_weight: of the "kl_weighted" loss, in nats.
      load_balance: weight of S * sum_s (share of tokens on s) * (mean probability of s), over response tokens (arXiv 2101.03961).
      base_bias: initial bias of the base slot.
      stream, refreshes: whose hidden states the gates are fitted on, see above.
    """

    loss: Literal["kl_weighted", "plain"] = "kl_weighted"
    steps: int = 120
    learning_rate: float = 1e-2
    kl_clip: float = 1.0
    base_weight: float = 0.02
    load_balance: float = 0.0
    base_bias: float = 5.0
    stream: Literal["routed", "label"] = "routed"
    refreshes: int = 2

    def __post_init__(self):
        if self.loss not in ("kl_weighted", "plain") or self.stream not in ("routed", "label"):
            raise ValueError(f"gate.loss {self.loss!r} or gate.stream {self.stream!r} is not a known choice")
        if self.steps < 1 or self.refreshes < 0 or self.steps <= self.refreshes:
            raise ValueError(f"gate.steps must exceed gate.refreshes, found {self.steps} and {self.refreshes}")
        if self.learning_rate <= 0 or self.kl_clip <= 0 or self.base_weight < 0 or self.load_balance < 0:
            raise ValueError("gate.learning_rate and kl_clip must be positive, base_weight and load_balance not negative")


@dataclasses.dataclass(frozen=True)
class GateData:
    """Labelled trajectories, measured once under adapters and base. Token arrays are [M], the tokens of all rows without padding.

    Attributes:
      batches: micro-batches, each of trajectories of one slot.
      response: 1 where the next token was sampled.
      slot: the slot that produced the trajectory.
      target: [M, S] distribution over slots.
      turn: an index per run of response tokens, -1 elsewhere.
      kl: KL(own adapter || base) of the next token's distribution, in nats.
      base_inputs, label_inputs: [L, M, D] normalised layer inputs under the base and under the own adapter.
    """

    batches: list[Batch]
    response: np.ndarray
    slot: np.ndarray
    target: np.ndarray
    turn: np.ndarray
    kl: np.ndarray
    base_inputs: np.ndarray
    label_inputs: np.ndarray


def label_weights(data: GateData, config: WarmStartConfig) -> tuple[np.ndarray, np.ndarray]:
    """[M] weights of the label's and of the base slot's cross-entropy; those of the labels sum to 1.

    Raises:
      ValueError: no response token has any weight, so there is nothing to learn from.
    """
    if config.loss == "plain":
        weight, base = data.response.astype(np.float64), np.zeros(len(data.response))
    else:
        weight = data.response * np.minimum(data.kl, config.kl_clip).astype(np.float64)
        totals = {slot: weight[data.slot == slot].sum() for slot in np.unique(data.slot)}
        mean = np.mean(list(totals.values()))
        for slot, total in totals.items():
            weight[data.slot == slot] *= mean / max(total, 1e-12)
        base = np.full(len(weight), config.base_weight)
    if not weight.sum() > 0:
        raise ValueError("the gate has nothing to learn from: no response tokens, or adapters that do nothing")
    return (weight / weight.sum()).astype(np.float32), (base / weight.sum()).astype(np.float32)


class GateWarmStart:
    """Measures labelled trajectories and fits gates to them.

    Args:
      bank: the frozen adapters; slot k + 1 is adapter k.
      lengths, micro_rows: as in `rl.packing.pack`.
      temperature: at which the divergence between adapter and base is taken, that of sampling.
    """

    def __init__(
        self,
        model: CausalLM,
        bank: AdapterBank,
        *,
        lengths: Sequence[int],
        micro_rows: int = 8,
        temperature: float = 1.0,
        logprob_chunk: int = 512,
    ):
        self.model, self.bank, self.lengths, self.micro_rows = model, bank, tuple(lengths), micro_rows
        graph, self._frozen = nnx.split(model)
        self._measure = jax.jit(functools.partial(_measure, graph, temperature, logprob_chunk))
        self._inputs = jax.jit(functools.partial(_routed_inputs, graph))

    def measure(self, trajectories: Sequence[Trajectory], slots: Sequence[int], targets: np.ndarray | None = None) -> GateData:
        """Runs adapters and base over the trajectories.

        Args:
          slots: [n] the slot, 1..K, that produced each trajectory.
          targets: [n, S] distributions over slots where more than one solves the seed; by default all on the own slot.

        Raises:
          ValueError: a slot that the bank does not have, or arrays of other lengths.
        """
        count, slots = self.bank.size + 1, np.asarray(slots, int)
        if not len(slots) or slots.shape != (len(trajectories),) or slots.min() < 1 or slots.max() >= count:
            raise ValueError(f"slots must be within 1..{count - 1}, one for each of {len(trajectories)} trajectories")
        targets = np.eye(count, dtype=np.float32)[slots] if targets is None else np.asarray(targets, np.float32)
        if targets.shape != (len(slots), count):
            raise ValueError(f"targets have shape {targets.shape}, expected {(len(slots), count)}")
        row_length = pack(trajectories, np.zeros(len(trajectories)), lengths=self.lengths).tokens.shape[1]
        batches: list[Batch] = []
        columns: dict[str, list[np.ndarray]] = {f.name: [] for f in dataclasses.fields(GateData) if f.name != "batches"}
        for slot in np.unique(slots):
            members = np.flatnonzero(slots == slot)
            part = pack([trajectories[i] for i in members], np.zeros(len(members)), lengths=(row_length,), micro_rows=self.micro_rows)
            adapter = slice_bank(self.bank, int(slot) - 1)
            for batch in part.micro_batches(self.micro_rows):
                real = batch.segment_ids > 0
                kl, base, own = (np.asarray(x)[real] for x in self._measure(self._frozen, adapter, batch))
                batches.append(batch)
                columns["response"].append(batch.mask[real])
                columns["slot"].append(np.full(real.sum(), slot))
                columns["target"].append(targets[members[batch.trajectory[real]]])
                columns["turn"].append(_turns(batch)[real])
                columns["kl"].append(kl)
                columns["base_inputs"].append(base)
                columns["label_inputs"].append(own)
        turns = columns["turn"]
        for before, after in zip(turns, turns[1:], strict=False):
            after[after >= 0] += max(before.max(), -1) + 1
        joined = {name: np.concatenate(parts) for name, parts in columns.items()}
        joined |= {name: np.ascontiguousarray(np.moveaxis(joined[name], 1, 0)) for name in ("base_inputs", "label_inputs")}
        return GateData(batches, **joined)

    def routed_inputs(self, gate: Gate, data: GateData) -> np.ndarray:
        """[L, M, D] normalised layer inputs under the gate's own top-1 choices."""
        parts = [np.asarray(self._inputs(self._frozen, self.bank, gate, batch))[batch.segment_ids > 0] for batch in data.batches]
        return np.ascontiguousarray(np.moveaxis(np.concatenate(parts), 1, 0))

    def fit(self, data: GateData, config: WarmStartConfig, seed: int = 0) -> tuple[Gate, dict[str, list[float] | float]]:
        """A gate fitted to the data, and its metrics: `loss` at every step and `routing_metrics` on the data."""
        gate = init_gate(self.model.config, self.bank.size + 1, config.base_bias, jax.random.key(seed))
        state = (gate, optax.adam(config.learning_rate).init(gate))
        weight, base = label_weights(data, config)
        refreshes = config.refreshes if config.stream == "routed" else 0
        inputs = data.base_inputs if config.stream == "routed" else data.label_inputs
        losses: list[float] = []
        for stage in np.array_split(np.arange(config.steps), refreshes + 1):
            if losses:
                inputs = self.routed_inputs(state[0], data)
            arrays = (inputs, data.target, weight, base, data.response / max(data.response.sum(), 1.0))
            rates = config.learning_rate * (1 + np.cos(np.pi * stage / config.steps)) / 2
            state, loss = _fit(state, rates.astype(np.float32), config.load_balance, *_padded(arrays))
            losses += np.asarray(loss).tolist()
        gate = state[0]
        if config.stream == "routed":
            inputs = self.routed_inputs(gate, data)
        return gate, {"loss": losses} | routing_metrics(gate, data, inputs)


def routing_metrics(gate: Gate, data: GateData, inputs: np.ndarray) -> dict[str, float]:
    """How the gate routes the data's tokens, means over layers; `inputs` [L, M, D] from `GateWarmStart.routed_inputs`.

    accuracy: response tokens on their own slot; accuracy_weighted: the same, weighted by the clipped divergence, where the slot matters;
    entropy of the gate's distribution; share/<slot>: of response tokens; turn_agreement: response tokens on the slot that most tokens of
    their turn take.
    """
    logits = np.einsum("lmd,lds->lms", inputs, np.asarray(gate.kernel)) + np.asarray(gate.bias)[:, None]
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    response = data.response > 0
    chosen = logits.argmax(-1)[:, response]
    right, weight = chosen == data.slot[response], np.minimum(data.kl[response], 1.0)
    counts = np.zeros((len(logits), data.turn.max() + 1, logits.shape[-1]))
    for layer, slots in enumerate(chosen):
        np.add.at(counts[layer], (data.turn[response], slots), 1)
    metrics = {
        "accuracy": float(right.mean()),
        "accuracy_weighted": float((right * weight).sum() / max(weight.sum() * len(right), 1e-12)),
        "entropy": float(-(probs * np.log(np.maximum(probs, 1e-30))).sum(-1).mean()),
        "turn_agreement": float(counts.max(-1).sum() / max(counts.sum(), 1)),
    }
    return metrics | {f"share/{slot}": float((chosen == slot).mean()) for slot in range(logits.shape[-1])}


def _measure(graph: nnx.GraphDef, temperature: float, chunk: int, frozen: nnx.State, adapter: AdapterBank, batch: Batch):
    """KL(adapter || base) [N, T] and the normalised layer inputs [N, T, L, D] under base and adapter; logits exist a chunk at a time."""
    model = nnx.merge(graph, frozen)
    base, own = (model.forward(batch.tokens, batch.positions, batch.segment_ids, bank, collect=("inputs",)) for bank in (None, adapter))
    length = batch.tokens.shape[1]
    pieces = []
    for start in range(0, length, chunk):
        window = slice(start, min(start + chunk, length))
        p, q = (jax.nn.log_softmax(model.unembed(out.hidden[:, window]) / temperature) for out in (own, base))
        pieces.append(jnp.sum(jnp.exp(p) * (p - q), axis=-1))
    return jnp.maximum(jnp.concatenate(pieces, axis=1), 0.0), base.inputs, own.inputs


def _routed_inputs(graph: nnx.GraphDef, frozen: nnx.State, bank: AdapterBank, gate: Gate, batch: Batch) -> jax.Array:
    model = nnx.merge(graph, frozen)
    out = model.forward(batch.tokens, batch.positions, batch.segment_ids, bank, Routing(gate=gate, mode="top1"), collect=("inputs",))
    return out.inputs


@jax.jit
def _fit(state: tuple[Gate, optax.OptState], rates, balance, inputs, target, weight, base, response):
    """One Adam update of (gate, optimizer state) for each of `rates`, on all tokens; returns them and the losses."""

    def loss(gate: Gate) -> jax.Array:
        logits = jnp.einsum("lmd,lds->lms", inputs, gate.kernel) + gate.bias[:, None]
        logp = jax.nn.log_softmax(logits)
        chosen = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1])
        shares, means = (jnp.einsum("m,lms->ls", response, x) for x in (chosen, jnp.exp(logp)))
        value = -jnp.sum(weight[:, None] * target * logp) - jnp.sum(base * logp[..., 0])
        return (value + balance * logits.shape[-1] * jnp.sum(shares * means)) / len(inputs)

    def update(state, rate):
        gate, opt_state = state
        value, gradient = jax.value_and_grad(loss)(gate)
        updates, opt_state = optax.adam(rate).update(gradient, opt_state, gate)
        return (optax.apply_updates(gate, updates), opt_state), value

    return jax.lax.scan(update, state, rates)


def _padded(arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Inputs [L, M, D] and arrays [M, ...] with M padded by tokens of weight 0."""
    pad = -arrays[0].shape[1] % _TOKEN_MULTIPLE
    widths = [[(0, pad if axis == (1 if index == 0 else 0) else 0) for axis in range(x.ndim)] for index, x in enumerate(arrays)]
    return tuple(np.pad(x, w) for x, w in zip(arrays, widths, strict=True))


def _turns(batch: Batch) -> np.ndarray:
    """[N, T]: an index per run of response tokens of one trajectory, -1 elsewhere."""
    on = batch.mask > 0
    before = np.pad(on[:, :-1], ((0, 0), (1, 0))) & (np.pad(batch.segment_ids[:, :-1], ((0, 0), (1, 0))) == batch.segment_ids)
    index = np.cumsum((on & ~before).reshape(-1)).reshape(on.shape) - 1
    return np.where(on, index, -1)
