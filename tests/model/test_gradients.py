"""Gradients of adapters and gates: against PEFT, against finite differences, and what must not change them.

Every adapted matrix of every layer and expert is compared by itself, the length of the error to that of the gradient. Compiling is what
takes the time, so each type has two programs, and tests differ in what they give to them: `plain` trains one adapter on whole rows, `rich`
has what else training can have: recomputed layers, packed rows, several adapters and a gate.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx

from model import AdapterBank, CausalLM, Routing, load_pretrained, save_peft, slice_bank, token_logprobs
from model.peft_files import peft_targets
from tests.model import tiny

# as few layers as show that each gets its own gradient
CHANGES = {
    "qwen3": {"num_hidden_layers": 2},
    "qwen3_moe": {"num_hidden_layers": 2},
    "qwen3_5": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "qwen3_5_moe": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
LENGTH = 72  # more than a chunk of the gated delta rule and two of the log-probs


class Case(NamedTuple):
    """One type: the weights in transformers and here, and two adapters."""

    net: transformers.PreTrainedModel
    model: CausalLM
    bank: AdapterBank

    def check(self, got, expected, tolerance):
        assert_close(*(matrices(factors, self.model.config) for factors in (got, expected)), tolerance)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    @functools.cache
    def get(kind):
        folder = tmp_path_factory.mktemp(kind)
        net = tiny.checkpoint(folder, kind, **CHANGES[kind])
        model = load_pretrained(folder)
        return Case(net, model, tiny.bank(model.config, adapters=2))

    return get


# the hybrid with experts is the sum of the two before it, and takes minutes
@pytest.fixture(params=["qwen3", "qwen3_moe", "qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def case(request, cases):
    return cases(request.param)


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _loss_and_gradients(graphdef, state, bank, x, weights, segments, routing):
    def loss(factors, gate):
        model, how = nnx.merge(graphdef, state), routing and dataclasses.replace(routing, gate=gate)
        hidden = model.forward(x, None, segments, bank.replace_factors(factors), how).hidden
        logprobs, _ = token_logprobs(model, hidden[:, :-1], x[:, 1:], chunk=32)
        return -jnp.sum(weights[:, 1:] * logprobs)

    return jax.value_and_grad(loss, argnums=(0, 1))(bank.factors, routing and routing.gate)


def plain(case, k, x, weights):
    """The loss -sum(weights * log-prob of the tokens x[2, T]) and its gradients by the factors of adapter k, which is alone."""
    loss, (factors, _) = _loss_and_gradients(*nnx.split(case.model), slice_bank(case.bank, k), x, weights, None, None)
    return loss, factors


def rich(case, x, weights, segments=None, slots=None, gate=None):
    """The same of both adapters and of the gate, x[5, T]. Rows follow the gate if there is one, or take the slots[5], by default the first
    adapter's."""
    config = dataclasses.replace(case.model.config, remat=True)
    graphdef, state = nnx.split(CausalLM(config, parameters=case.model.parameters()))
    rows = jnp.eye(3)[np.ones(5, int) if slots is None else slots]
    routing = Routing(rows, tiny.gate(3, config) if gate is None else gate, jnp.full(5, gate is not None), "soft")
    segments = np.ones(x.shape, int) if segments is None else segments
    return _loss_and_gradients(graphdef, state, case.bank, x, weights, segments, routing)


def sample(rows, seed=0):
    """Tokens and their weights: advantages of both signs, a quarter of the tokens masked."""
    random = np.random.default_rng(seed)
    weights = random.standard_normal((rows, LENGTH)) * (random.random((rows, LENGTH)) < 0.75)
    return tiny.tokens(rows, LENGTH, seed=seed), weights.astype(np.float32)


def assert_close(got, expected, tolerance):
    """Of {module: (A, B)}, |got - expected| <= tolerance * |expected| in each matrix."""
    assert got.keys() == expected.keys()
    wrong = {}
    for name in expected:
        for half, x, y in zip("AB", got[name], expected[name], strict=True):
            error, size = float(np.linalg.norm(x - y)), float(np.linalg.norm(y))
            if not error <= tolerance * size:
                wrong[f"{name}.{half}"] = f"{error:.1e} of {size:.1e}"
    assert not wrong, f"{len(wrong)} of {2 * len(expected)} differ: {wrong}"


def matrices(factors, config):
    """{module: (A[in, R], B[R, out])} of a bank's first adapter."""
    a, b = ({name: np.asarray(x) for name, x in half.items()} for half in factors)

    def pick(half, name, layer, expert):
        return half[name][layer, 0] if expert is None else half[name][layer, 0, expert]

    return {module: (pick(a, *target), pick(b, *target)) for module, target in peft_targets(config).items()}


def peft_matrices(wrapped, config, read):
    """The same of `read(parameter)` of PEFT's parameters. One holds all experts of a layer, A[E * rank, in] and B[out, rank * E]; gate_proj
    and up_proj are one, with A one above the other and B block diagonal."""

    def factors(name):
        layer = wrapped.get_submodule(f"base_model.model.model.{name}")
        return (read(half["default"].weight).numpy() for half in (layer.lora_A, layer.lora_B))

    def of_expert(experts, expert, projection):
        fused = projection != "down_proj"
        a, b = factors(f"{experts}.base_layer" if fused else experts)
        a = a.reshape(config.num_experts, -1, a.shape[1])[expert]
        b = b.reshape(b.shape[0], -1, config.num_experts)[..., expert]
        if not fused:
            return a, b
        side = ["gate_proj", "up_proj"].index(projection)
        return np.split(a, 2)[side], np.split(np.split(b, 2)[side], 2, axis=1)[side]

    found = {}
    for module, (_, _, expert) in peft_targets(config).items():
        if expert is None:
            a, b = factors(module)
        else:
            experts, _, projection = module.rsplit(".", 2)
            a, b = of_expert(experts, expert, projection)
        found[module] = a.T, b.T
    return found


def test_gradients_equal_those_of_peft(case, tmp_path):
    config, (x, weights) = case.model.config, sample(2)
    loss, ours = plain(case, 1, x, weights)
    one = slice_bank(case.bank, 1)
    save_peft(one, config, tmp_path)
    wrapped = peft.PeftModel.from_pretrained(case.net, tmp_path, is_trainable=True).eval()
    jax.tree.map(np.testing.assert_array_equal, peft_matrices(wrapped, config, torch.Tensor.detach), matrices(one.factors, config))
    logprobs = torch.log_softmax(wrapped(torch.tensor(x)).logits[:, :-1], -1)
    taken = logprobs.gather(-1, torch.tensor(x)[:, 1:, None])[..., 0]
    expected = -torch.sum(torch.tensor(weights)[:, 1:] * taken)
    expected.backward()
    reference = peft_matrices(wrapped, config, lambda p: p.grad)
    assert all(x.any() for pair in reference.values() for x in pair), "a matrix that no token trains shows nothing"
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    assert_close(matrices(ours, config), reference, 1e-4)


def test_recomputed_layers_have_the_same_gradients(case):
    x, weights = sample(5)
    weights[2:] = 0
    _, (got, _) = rich(case, x, weights)
    case.check(got, plain(case, 0, x[:2], weights[:2])[1], 1e-5)


def test_a_packed_row_has_the_gradients_of_its_parts(case):
    first, second = 37, 29
    x, weights = sample(2, seed=1)
    weights[0, first:] = weights[1, second:] = weights[:, 0] = 0  # what follows a part's end has no say
    _, expected = plain(case, 0, x, weights)
    row, row_weights = (np.pad(np.concatenate([y[0, :first], y[1, :second]]), (0, LENGTH - first - second)) for y in (x, weights))
    segments = np.repeat([1, 2, 0], [first, second, LENGTH - first - second])
    others, _ = sample(4, seed=2)
    _, (got, _) = rich(
        case,
        np.concatenate([row[None], others]),
        np.pad(row_weights[None], ((0, 4), (0, 0))),
        np.concatenate([segments[None], np.ones_like(others)]),
    )
    case.check(got, expected, 1e-5)


def test_rows_train_only_the_adapter_that_they_take(case):
    x, weights = sample(5, seed=3)
    slots = np.array([1, 2, 0, 2, 1])
    _, (got, gate) = rich(case, x, weights, slots=slots)
    for k in range(2):
        rows = slots == k + 1
        case.check(slice_bank(case.bank.replace_factors(got), k).factors, plain(case, k, x[rows], weights[rows])[1], 1e-5)
    assert not any(np.any(g) for g in jax.tree.leaves(gate))


@pytest.mark.parametrize("moving", ["every layer", "the last layer"])
def test_finite_differences_confirm_the_gradient_of_a_soft_gate(cases, moving):
    """A gate's input is behind a stop-gradient, of which finite differences know nothing. The two agree where no gate's logits depend on
    another gate: in the last layer, and in every layer if all kernels but the first layer's are zero."""
    case, (x, weights), random = cases("qwen3_5"), sample(5, seed=4), np.random.default_rng(5)
    gate = tiny.gate(3, case.model.config)
    if moving == "every layer":
        gate = dataclasses.replace(gate, kernel=gate.kernel.at[1:].set(0))
    direction = jax.tree.map(lambda x: random.standard_normal(x.shape, np.float32), gate)
    if moving == "the last layer":
        direction = jax.tree.map(lambda x: jnp.zeros_like(x).at[-1].set(x[-1]), direction)

    def run(step):
        return rich(case, x, weights, gate=jax.tree.map(lambda x, d: x + step * d, gate, direction))

    _, (_, gradient) = run(0.0)
    slope = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose((run(5e-3)[0] - run(-5e-3)[0]) / 1e-2, slope, 2e-2)


@pytest.mark.parametrize("kind, layers", [("qwen3_moe", 8), pytest.param("qwen3_5", 8, marks=pytest.mark.slow)])
def test_recomputation_keeps_the_input_of_each_layer_and_no_weights(kind, layers):
    types = tiny.CONFIGS[kind].layer_types
    config = dataclasses.replace(tiny.CONFIGS[kind], remat=True, num_hidden_layers=layers, layer_types=types and types * 2)
    graphdef, state = nnx.split(CausalLM(config, nnx.Rngs(0)))
    bank, x = tiny.bank(config, adapters=1), tiny.tokens(2, 32)

    def loss(factors, state):
        return jnp.sum(nnx.merge(graphdef, state).forward(x, adapters=bank.replace_factors(factors)).hidden)

    gradient = jax.make_jaxpr(jax.grad(loss))(bank.factors, state)
    forward = next(e for e in gradient.eqns if e.primitive.name == "scan")
    kept = [x.aval.shape for x in forward.outvars[forward.params["num_carry"] :]]
    repeats = forward.params["length"]
    assert kept == [(repeats, 2, 32, config.hidden_size)] * (layers // repeats)
