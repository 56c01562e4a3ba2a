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
changes, the stream is computed again under its own top-1 choices (`refreshes`). A gate that grows starts from its own stream.

The gates read behind a stop-gradient and are linear, so between two refreshes this is a multinomial regression on fixed inputs, and a
step costs no forward pass. The inputs are what is large: of Qwen3-30B-A3B a token has 48 x 2048 of them. They stay on the devices, on a
mesh each where its row is computed, and once all tokens do not fit in `feature_bytes` a sample of them is fitted, each token with the
weight of those that it stands for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model import AdapterBank, CausalLM, Gate, Routing, grow, init_gate, open_slots, slice_bank
from model.lora import bank_shardings
from model.sharding import distribute, mesh_axes
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
      refreshes: how often the stream is computed again under the gate, see above.
    """

    loss: Literal["kl_weighted", "plain"] = "kl_weighted"
    steps: int = 120
    learning_rate: float = 1e-2
    kl_clip: float = 1.0
    base_weight: float = 0.02
    load_balance: float = 0.0
    base_bias: float = 5.0
    refreshes: int = 2

    def __post_init__(self):
        if self.loss not in ("kl_weighted", "plain"):
            raise ValueError(f"gate.loss must be 'kl_weighted' or 'plain', found {self.loss!r}")
        if self.steps < 1 or self.refreshes < 0 or self.steps <= self.refreshes:
            raise ValueError(f"gate.steps must exceed gate.refreshes, found {self.steps} and {self.refreshes}")
        if self.learning_rate <= 0 or self.kl_clip <= 0 or self.base_weight < 0 or self.load_balance < 0:
            raise ValueError("gate.learning_rate and kl_clip must be positive, base_weight and load_balance not negative")


@dataclasses.dataclass(frozen=True)
class GateData:
    """Labelled trajectories, measured once under adapters and base. Token arrays are [M]: the tokens that are fitted, in the order of the
    rows, without padding.

    Attributes:
      batches: micro-batches, each of trajectories of one slot.
      micro, position: where a token is: the index of its micro-batch [N, T], and that within it, row by row.
      count: how many tokens it stands for; 1 where all are kept.
      response: 1 where the next token was sampled.
      slot: the slot that produced the trajectory.
      target: [M, S] distribution over slots.
      turn: an index per run of response tokens, -1 elsewhere.
      kl: KL(own adapter || base) of the next token's distribution, in nats.
    """

    batches: list[Batch]
    micro: np.ndarray
    position: np.ndarray
    count: np.ndarray
    response: np.ndarray
    slot: np.ndarray
    target: np.ndarray
    turn: np.ndarray
    kl: np.ndarray


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the inputs of M tokens lie in an array [L, shards * capacity, D] that is filled a micro-batch at a time.

    Attributes:
      place: [M], where each token is.
      capacity: tokens of a shard, padding included.
      source: [micro-batches, shards, window] int32: the tokens, as positions in the shard's part of the micro-batch, that go to the window
        of the shard; -1 keeps what is there.
      start: [micro-batches, shards] int32, where in the shard the window begins.
    """

    place: np.ndarray
    capacity: int
    source: np.ndarray
    start: np.ndarray


def thin(strata: np.ndarray, limit: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are kept where not all can be: their indices, in order, and how many tokens each stands for.

    Every stratum [M] keeps the same number, or all that it has, by simple random sampling; so sums weighted by the second array are
    unbiased (Horvitz and Thompson 1952), and a rare stratum is not lost in a large one. At least one token of each is kept.
    """
    if len(strata) <= limit:
        return np.arange(len(strata)), np.ones(len(strata))
    random, room = np.random.default_rng(seed), limit
    _, stratum, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    kept, count = np.zeros(len(strata), bool), np.zeros(len(strata))
    for done, index in enumerate(np.argsort(sizes, kind="stable")):
        take = min(sizes[index], max(room // (len(sizes) - done), 1))
        drawn = random.choice(np.flatnonzero(stratum == index), take, replace=False)
        kept[drawn], count[drawn], room = True, sizes[index] / take, room - take
    return np.flatnonzero(kept), count[kept]


def lay_out(data: GateData, shards: int, room: int) -> Layout:
    """Each shard holds, in order, the tokens of its rows of every micro-batch; padded to a multiple, but for that not beyond `room`."""
    part = data.batches[0].tokens.size // shards
    shard, local = np.divmod(data.position, part)
    counts = np.zeros((len(data.batches), shards), int)
    np.add.at(counts, (data.micro, shard), 1)
    used, window = counts.sum(axis=0).max(), counts.max()
    multiple = max(_TOKEN_MULTIPLE // shards, 1)
    capacity = max(used, min(-(-used // multiple) * multiple, room))
    before = np.cumsum(counts, axis=0) - counts
    start = np.minimum(before, capacity - window)
    first = np.cumsum(counts).reshape(counts.shape) - counts
    within = np.arange(len(local)) + (before - first)[data.micro, shard]
    source = np.full((*counts.shape, window), -1, np.int32)
    source[data.micro, shard, within - start[data.micro, shard]] = local
    return Layout(shard * capacity + within, int(capacity), source, start.astype(np.int32))


def label_weights(data: GateData, config: WarmStartConfig) -> tuple[np.ndarray, np.ndarray]:
    """[M] weights of the label's and of the base slot's cross-entropy; those of the labels sum to 1.

    Where tokens were left out, the totals by which they are normalised are estimates from the kept ones.

    Raises:
      ValueError: no response token has any weight, so there is nothing to learn from.
    """
    if config.loss == "plain":
        weight, base = data.count * data.response, np.zeros(len(data.response))
    else:
        weight = data.count * data.response * np.minimum(data.kl, config.kl_clip)
        totals = {slot: weight[data.slot == slot].sum() for slot in np.unique(data.slot)}
        mean = np.mean(list(totals.values()))
        for slot, total in totals.items():
            weight[data.slot == slot] *= mean / max(total, 1e-12)
        base = data.count * config.base_weight
    if not weight.sum() > 0:
        raise ValueError("the gate has nothing to learn from: no response tokens, or adapters that do nothing")
    return (weight / weight.sum()).astype(np.float32), (base / weight.sum()).astype(np.float32)


def routing_metrics(data: GateData, logits: np.ndarray) -> dict[str, float]:
    """How a gate routes the data's tokens, means over layers; `logits` [L, M, S] from `GateWarmStart.gate_logits`.

    accuracy: response tokens on their own slot; accuracy_weighted: the same, weighted by the clipped divergence, where the slot matters;
    entropy of the gate's distribution; share/<slot>: of response tokens; turn_agreement: response tokens on the slot that most tokens of
    their turn take, which is too high where few tokens of a turn were kept.
    """
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    entropy = -(probs * np.log(np.maximum(probs, 1e-30))).sum(-1)
    response = data.response > 0
    chosen, count = logits.argmax(-1)[:, response], data.count[response]
    right, weight = chosen == data.slot[response], count * np.minimum(data.kl[response], 1.0)
    turns = np.zeros((len(logits), data.turn.max() + 1, logits.shape[-1]))
    for layer, slots in enumerate(chosen):
        np.add.at(turns[layer], (data.turn[response], slots), count)

    def mean(values: np.ndarray, weight: np.ndarray) -> float:
        return float((values * weight).sum() / max(weight.sum() * len(values), 1e-12))

    metrics = {
        "accuracy": mean(right, count),
        "accuracy_weighted": mean(right, weight),
        "entropy": mean(entropy, data.count),
        "turn_agreement": float(turns.max(-1).sum() / max(turns.sum(), 1)),
    }
    return metrics | {f"share/{slot}": mean(chosen == slot, count) for slot in range(logits.shape[-1])}


class GateWarmStart:
    """Measures labelled trajectories and fits gates to them; on the model's mesh a micro-batch is split by rows.

    Args:
      bank: the frozen adapters; slot k + 1 is adapter k.
      lengths, micro_rows: as in `rl.packing.pack`.
      temperature: at which the divergence between adapter and base is taken, that of sampling.
      feature_bytes: what the gates' inputs may take on a device that holds a share of the rows; beyond it as many tokens of each slot, of
        prompts and of responses, are fitted as fit in.
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
        feature_bytes: int = 2 << 30,
    ):
        self.model, self.lengths, self.micro_rows = model, tuple(lengths), micro_rows
        graph, self._frozen = nnx.split(model)
        self._mesh = mesh = model.mesh
        self._axes = mesh_axes((micro_rows,), ("batch",), mesh)[0] if mesh else ()
        self._shards = math.prod(mesh.shape[axis] for axis in self._axes) if mesh else 1
        self._room = feature_bytes // (4 * model.config.num_hidden_layers * model.config.hidden_size)
        self.bank = bank if mesh is None else distribute(bank, bank_shardings(bank, model.config, mesh))
        whole = self._sharding()
        self._measure = jax.jit(functools.partial(_measure, graph, temperature, logprob_chunk), out_shardings=whole)
        self._write = jax.jit(functools.partial(_write_inputs, graph, mesh, self._axes), donate_argnums=0)
        self._logits = jax.jit(_gate_logits, out_shardings=whole)
        self._fit = jax.jit(_fit, out_shardings=whole)

    def measure(self, trajectories: Sequence[Trajectory], slots: Sequence[int], targets: np.ndarray | None = None) -> GateData:
        """Runs adapters and base over the trajectories, and says which tokens are fitted.

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
        settings = {"lengths": (row_length,), "micro_rows": self.micro_rows, "packed": self.model.config.packed}
        batches: list[Batch] = []
        parts: list[dict[str, np.ndarray]] = []
        turns = 0
        for slot in np.unique(slots):
            members = np.flatnonzero(slots == slot)
            rows = pack([trajectories[i] for i in members], np.zeros(len(members)), **settings)
            adapter = slice_bank(self.bank, int(slot) - 1)
            for batch in rows.micro_batches(self.micro_rows):
                real = batch.segment_ids > 0
                turn = _turns(batch)[real]
                part = {
                    "micro": np.full(real.sum(), len(batches)),
                    "position": np.flatnonzero(real),
                    "response": batch.mask[real],
                    "slot": np.full(real.sum(), slot),
                    "target": targets[members[batch.trajectory[real]]],
                    "turn": np.where(turn >= 0, turn + turns, -1),
                    "kl": np.asarray(self._measure(self._frozen, adapter, self._put(batch, self._axes)))[real],
                }
                turns = max(turns, part["turn"].max(initial=-1) + 1)
                batches.append(batch)
                parts.append(part)
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        kept, stands_for = thin(2 * columns["slot"] + (columns["response"] > 0), self._shards * self._room)
        return GateData(batches, count=stands_for, **{name: column[kept] for name, column in columns.items()})

    def inputs(self, gate: Gate | None, data: GateData) -> jax.Array:
        """Normalised layer inputs under the gate's own top-1 choices, or under the base; on the model's devices.

        Returns:
          float32 [L, M', D], so that a fit needs no copy; token m of the data is at `layout(data).place[m]`, the rest is 0.
        """
        layout, config = self.layout(data), self.model.config
        shape = (config.num_hidden_layers, self._shards * layout.capacity, config.hidden_size)
        found = jnp.zeros(shape, jnp.float32, device=self._sharding(None, self._axes))
        gate = self._put(gate)
        for rows in zip(data.batches, layout.source, layout.start, strict=True):
            found = self._write(found, self._frozen, self.bank, gate, *self._put(rows, self._axes))
        return found

    def layout(self, data: GateData) -> Layout:
        """Where `inputs` puts the tokens; without a mesh one after the other."""
        return lay_out(data, self._shards, self._room)

    def gate_logits(self, gate: Gate, data: GateData) -> np.ndarray:
        """[L, M, S] logits of the gates under their own top-1 choices."""
        logits = np.asarray(self._logits(self._put(gate), self.inputs(gate, data)))
        return logits[:, self.layout(data).place]

    def fit(
        self, data: GateData, config: WarmStartConfig, seed: int = 0, old: Gate | None = None
    ) -> tuple[Gate, dict[str, list[float] | float]]:
        """A gate fitted to the data, and its metrics: `loss` at every step and `routing_metrics` on the data.

        Args:
          old: a trained gate over the first slots, which stays as it is: only slots behind these are fitted. A token stays on its old slot
            or goes to a new one.
        """
        slots, key = self.bank.size + 1, jax.random.key(seed)
        if old is None:
            gate, free = init_gate(self.model.config, slots, config.base_bias, key), None
        else:
            first = old.bias.shape[-1]
            gate, free = open_slots(grow(old, slots - first), first, config.base_bias, key), np.float32(np.arange(slots) >= first)
        state = self._put((gate, optax.adam(config.learning_rate).init(gate)))
        weight, base = label_weights(data, config)
        response = data.count * data.response
        arrays = self._placed(data, (data.target, weight, base, response / max(response.sum(), 1.0)))
        losses: list[float] = []
        for stage in np.array_split(np.arange(config.steps), config.refreshes + 1):
            rates = config.learning_rate * (1 + np.cos(np.pi * stage / config.steps)) / 2
            # nothing else holds the inputs, so those of the next stage do not lie beside them
            inputs = (self.inputs(None if old is None and not losses else state[0], data), *arrays)
            state, loss = self._fit(state, rates.astype(np.float32), config.load_balance, self._put(free), *inputs)
            del inputs
            losses += np.asarray(loss).tolist()
        return state[0], {"loss": losses} | routing_metrics(data, self.gate_logits(state[0], data))

    # --- the mesh

    def _sharding(self, *axes: tuple[str, ...] | None) -> NamedSharding | None:
        return None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec(*axes))

    def _put(self, tree: Any, *axes: tuple[str, ...] | None) -> Any:
        """Arrays that every process holds whole, on the mesh if there is one: split as said, or whole."""
        return tree if self._mesh is None else distribute(tree, jax.tree.map(lambda _: self._sharding(*axes), tree))

    def _placed(self, data: GateData, arrays: Sequence[np.ndarray]) -> tuple[jax.Array | np.ndarray, ...]:
        """Arrays [M, ...] as float32 [M', ...], in the layout of the inputs."""
        layout, placed = self.layout(data), []
        for x in arrays:
            placed.append(np.zeros((self._shards * layout.capacity, *x.shape[1:]), np.float32))
            placed[-1][layout.place] = x
        return self._put(tuple(placed), self._axes)


def _measure(graph: nnx.GraphDef, temperature: float, chunk: int, frozen: nnx.State, adapter: AdapterBank, batch: Batch) -> jax.Array:
    """KL(adapter || base) [N, T]; logits exist a chunk at a time."""
    model = nnx.merge(graph, frozen)
    own, base = (model.forward(batch.tokens, batch.positions, batch.segment_ids, bank).hidden for bank in (adapter, None))
    rows, length = batch.tokens.shape
    chunk = min(chunk, length)

    def split(hidden: jax.Array) -> jax.Array:
        padded = jnp.pad(hidden, ((0, 0), (0, -length % chunk), (0, 0)))
        return jnp.moveaxis(padded.reshape(rows, -1, chunk, hidden.shape[-1]), 1, 0)

    def divergence(hidden: tuple[jax.Array, jax.Array]) -> jax.Array:
        p, q = (jax.nn.log_softmax(model.unembed(x) / temperature) for x in hidden)
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    pieces = jax.lax.map(divergence, (split(own), split(base)))  # one after the other; unrolled, all would be in memory at once
    return jnp.maximum(jnp.moveaxis(pieces, 0, 1).reshape(rows, -1)[:, :length], 0.0)


def _write_inputs(
    graph: nnx.GraphDef,
    mesh: Mesh | None,
    axes: tuple[str, ...],
    found: jax.Array,
    frozen: nnx.State,
    bank: AdapterBank,
    gate: Gate | None,
    batch: Batch,
    source: jax.Array,
    start: jax.Array,
) -> jax.Array:
    """`found` [L, M', D] with the inputs of one micro-batch's tokens; source [shards, window] and start [shards] as in `Layout`."""
    model = nnx.merge(graph, frozen)
    how = (None, None) if gate is None else (bank, Routing(gate=gate, mode="top1"))
    inputs = model.forward(batch.tokens, batch.positions, batch.segment_ids, *how, collect=("inputs",)).inputs

    def write(found: jax.Array, inputs: jax.Array, source: jax.Array, start: jax.Array) -> jax.Array:
        source, start = source[0], start[0]
        tokens = jnp.moveaxis(inputs.reshape(-1, *inputs.shape[2:]), 1, 0)
        old = jax.lax.dynamic_slice_in_dim(found, start, len(source), axis=1)
        new = jnp.where((source >= 0)[:, None], jnp.take(tokens, source, axis=1, mode="clip"), old)
        return jax.lax.dynamic_update_slice_in_dim(found, new, start, axis=1)

    if mesh is None:
        return write(found, inputs, source, start)
    rows, tokens = PartitionSpec(axes), PartitionSpec(None, axes)
    local = jax.shard_map(write, mesh=mesh, in_specs=(tokens, rows, rows, rows), out_specs=tokens, check_vma=False)
    return local(found, inputs, source, start)


def _gate_logits(gate: Gate, inputs: jax.Array) -> jax.Array:
    """[L, M', S] of inputs [L, M', D]."""
    return jnp.einsum("lmd,lds->lms", inputs, gate.kernel) + gate.bias[:, None]


def _fit(state: tuple[Gate, optax.OptState], rates, balance, free, inputs, target, weight, base, response):
    """One Adam update of (gate, optimizer state) for each of `rates`, on all tokens; returns them and the losses. Slots of `free` [S] 0
    stay as they are, None fits all."""

    def loss(gate: Gate) -> jax.Array:
        logits = _gate_logits(gate, inputs)
        logp = jax.nn.log_softmax(logits)
        chosen = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1])
        shares, means = (jnp.einsum("m,lms->ls", response, x) for x in (chosen, jnp.exp(logp)))
        value = -jnp.sum(weight[:, None] * target * logp) - jnp.sum(base * logp[..., 0])
        return (value + balance * logits.shape[-1] * jnp.sum(shares * means)) / len(inputs)

    def update(state, rate):
        gate, opt_state = state
        value, gradient = jax.value_and_grad(loss)(gate)
        if free is not None:
            gradient = jax.tree.map(lambda x: x * free, gradient)
        updates, opt_state = optax.adam(rate).update(gradient, opt_state, gate)
        return (optax.apply_updates(gate, updates), opt_state), value

    return jax.lax.scan(update, state, rates)


def _turns(batch: Batch) -> np.ndarray:
    """[N, T]: an index per run of response tokens of one trajectory, -1 elsewhere."""
    on = batch.mask > 0
    before = np.pad(on[:, :-1], ((0, 0), (1, 0))) & (np.pad(batch.segment_ids[:, :-1], ((0, 0), (1, 0))) == batch.segment_ids)
    index = np.cumsum((on & ~before).reshape(-1)).reshape(on.shape) - 1
    return np.where(on, index, -1)
