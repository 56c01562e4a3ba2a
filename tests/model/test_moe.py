"""The sparse feed-forward part: equal to transformers, to loops in NumPy and to all experts on all tokens; nothing is dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3_5MoeTextConfig, Qwen3MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts, Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from model import moe
from model.moe import NAMES, sort_by_expert

torch.set_num_threads(1)
E, D, F = 6, 24, 16
IMPLEMENTATIONS = ("padded", "ragged")
TRITON, SLOW = (pytest.param(*case, marks=pytest.mark.slow) for case in (("triton",), (3, (2, 70), "triton")))
expert_ffn = jax.jit(moe.expert_ffn, static_argnames=("mesh", "implementation"))
route = jax.jit(moe.route, static_argnums=(2, 3))


def close(got, expected, tolerance=1e-5):
    """Equal up to `tolerance` of the largest value."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(float(jnp.abs(b).max()), 1e-6)), got, expected)


def normal(seed: int, *shape: int, size: float = 1.0) -> jax.Array:
    return jnp.asarray(size * np.random.default_rng(seed).standard_normal(shape, np.float32))


def experts_weights(groups: int = E, d: int = D, f: int = F) -> dict[str, jax.Array]:
    shapes = {"expert_gate": (groups, d, f), "expert_up": (groups, d, f), "expert_down": (groups, f, d)}
    return {name: normal(i, *shape, size=0.3) for i, (name, shape) in enumerate(shapes.items())}


def bank_factors(adapters: int, rank: int, w: dict[str, jax.Array], names=NAMES) -> tuple[dict, dict]:
    a = {n: normal(10 + i, adapters, w[n].shape[0], w[n].shape[1], rank, size=0.3) for i, n in enumerate(names)}
    b = {n: normal(20 + i, adapters, w[n].shape[0], rank, w[n].shape[2], size=0.3) for i, n in enumerate(names)}
    return a, b


def all_experts(x, experts, weights, w, factors=None, ranks=None):
    """Every expert on every token, one einsum each."""

    def product(name, x):
        y = jnp.einsum("...ei,eio->...eo", x, w[name], precision="highest")
        if factors and name in factors[0]:
            a, b = (f[name] for f in factors)
            inner = jnp.einsum("...ei,keir->...ekr", x, a, precision="highest")
            mask = jnp.broadcast_to(ranks, (*x.shape[:2], ranks.shape[-1])).reshape(*x.shape[:2], 1, a.shape[0], a.shape[-1])
            y += jnp.einsum("...ekr,kero->...eo", inner * mask, b, precision="highest")
        return y

    x = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], w["expert_gate"].shape[0], x.shape[-1]))
    y = product("expert_down", jax.nn.silu(product("expert_gate", x)) * product("expert_up", x))
    share = jnp.sum(jax.nn.one_hot(experts, y.shape[-2]) * weights[..., None], axis=-2)
    return jnp.einsum("...e,...eo->...o", share, y)


# --- transformers ---


def randomise(*modules: torch.nn.Module) -> None:
    torch.manual_seed(0)
    for p in (p for module in modules for p in module.parameters()):
        p.data.normal_(0, 0.4)


def ours(router: torch.nn.Module, bank: torch.nn.Module) -> tuple[jax.Array, dict[str, jax.Array]]:
    gate, up = (x.transpose(1, 2).detach().numpy() for x in bank.gate_up_proj.chunk(2, dim=1))
    down = bank.down_proj.transpose(1, 2).detach().numpy()
    w = {"expert_gate": gate, "expert_up": up, "expert_down": down}
    return jnp.asarray(router.weight.detach().numpy().T), {name: jnp.asarray(x) for name, x in w.items()}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("k", "normalise"), [(1, False), (1, True), (2, False), (2, True), (E, False), (E, True)])
def test_qwen3_moe_values_and_gradients_of_transformers(k, normalise, implementation):
    sizes = {"hidden_size": D, "moe_intermediate_size": F, "num_experts": E, "num_experts_per_tok": k, "norm_topk_prob": normalise}
    block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes))
    randomise(block)
    router, w = ours(block.gate, block.experts)
    x, c = torch.randn(2, 9, D, requires_grad=True), torch.randn(2, 9, D)
    expected = block(x)
    (expected * c).sum().backward()

    def forward(x):
        y = expert_ffn(x, *route(x, router, k, normalise), w, implementation=implementation)
        return jnp.sum(y * c.numpy()), y

    (_, got), gradient = jax.jit(jax.value_and_grad(forward, has_aux=True))(jnp.asarray(x.detach().numpy()))
    close(got, expected.detach().numpy())
    close(gradient, x.grad.numpy())


@pytest.mark.parametrize("k", [1, 3])
def test_qwen3_5_moe_values_of_transformers(k):
    config = Qwen3_5MoeTextConfig(hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=k)
    gate, bank = Qwen3_5MoeTopKRouter(config), Qwen3_5MoeExperts(config)
    randomise(gate, bank)
    router, w = ours(gate, bank)
    x = torch.randn(14, D)
    with torch.no_grad():
        _, weights, ids = gate(x)
        expected = bank(x, ids, weights).numpy()
    experts, got = route(jnp.asarray(x.numpy()), router, k, True)
    np.testing.assert_array_equal(experts, ids.numpy())
    close(got, weights.numpy())
    close(expert_ffn(jnp.asarray(x.numpy())[None], experts[None], got[None], w)[0], expected)


# --- the router ---


def test_router_is_frozen_float32_and_takes_the_first_of_equals():
    x, router = normal(0, 5, D).astype(jnp.bfloat16), normal(1, D, E).astype(jnp.bfloat16)
    experts, weights = route(x, router, 2, True)
    wide = route(x.astype(jnp.float32), router.astype(jnp.float32), 2, True)
    assert weights.dtype == jnp.float32
    assert experts.dtype == jnp.int32
    jax.tree.map(np.testing.assert_array_equal, (experts, weights), wide)
    gradients = jax.grad(lambda x, r: jnp.sum(route(x, r, 2, True)[1] ** 2), (0, 1))(x.astype(jnp.float32), router.astype(jnp.float32))
    assert jnp.abs(gradients[0]).max() > 0 == jnp.abs(gradients[1]).max()
    np.testing.assert_array_equal(route(jnp.zeros((1, D)), router, 3, False)[0], [[0, 1, 2]])


def test_replayed_experts_are_weighted_by_the_router():
    x, router = normal(0, 7, D), normal(1, D, E)
    experts, weights = route(x, router, 3, True)
    again, same = route(x, router, 3, True, experts[:, ::-1])
    np.testing.assert_array_equal(again, experts[:, ::-1])
    close(same, weights[:, ::-1])
    np.testing.assert_array_equal(route(x, router, 3, True, experts.at[2:].set(-1)[:, ::-1])[0][2:], experts[2:])


# --- where rows go ---


@pytest.mark.parametrize("per_token", [True, False])
def test_pieces_give_the_values_and_gradients_of_the_whole(per_token, monkeypatch):
    w = experts_weights()
    factors = bank_factors(2, 4, w)
    x, router, c = normal(0, 3, 8, D), normal(1, D, E), normal(2, 3, 8, D)
    ranks = jnp.abs(normal(3, *((3, 8) if per_token else (3, 1)), 8))

    def loss(x, factors, ranks):
        y = moe.expert_ffn(x, *moe.route(x, router, 2, True), w, factors, ranks)
        return jnp.sum(y * c), y

    def run():
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, factors, ranks)

    whole = run()
    monkeypatch.setattr(moe, "_most_rows", lambda platform: 16)  # 48 rows in four pieces
    jax.clear_caches()
    assert "scan" in str(jax.make_jaxpr(loss)(x, factors, ranks))
    close(run(), whole)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "gmm", TRITON])
def test_no_load_drops_a_token(implementation):
    w, random = experts_weights(), np.random.default_rng(0)
    loads = {
        "all on one expert": np.full((1, 40, 1), 4),
        "the same two experts": np.broadcast_to([5, 0], (2, 20, 2)),
        "twice the same expert": np.full((1, 3, 2), 1),
        "one token": np.array([[[3]]]),
        "uneven": np.minimum(random.geometric(0.6, (1, 300, 1)) - 1, E - 1),
    }
    for load, experts in loads.items():
        x, weights = normal(3, *experts.shape[:2], D), jnp.asarray(random.random(experts.shape, np.float32))
        got = expert_ffn(x, jnp.asarray(experts), weights, w, implementation=implementation)
        np.testing.assert_allclose(got, all_experts(x, experts, weights, w), atol=2e-5, err_msg=load)


def test_rows_are_sorted_by_expert_and_come_back():
    experts = jnp.array([[2, 0], [9, 2], [1, -1]])
    order = sort_by_expert(experts, 3, 8)
    np.testing.assert_array_equal(order.sizes, [1, 1, 2])
    np.testing.assert_array_equal(order.choice, [1, 4, 0, 3, 6, 6, 6, 6])
    np.testing.assert_array_equal(order.token, [0, 2, 0, 1, 3, 3, 3, 3])
    np.testing.assert_array_equal(order.row, [[2, 0], [8, 3], [1, 8]])


def test_unknown_implementations_and_missing_ranks_are_named():
    w, x = experts_weights(), normal(0, 1, 2, D)
    choice = jnp.zeros((1, 2, 1), jnp.int32), jnp.ones((1, 2, 1))
    with pytest.raises(ValueError, match="'fast' must be one of 'auto'"):
        expert_ffn(x, *choice, w, implementation="fast")
    with pytest.raises(ValueError, match="need ranks"):
        expert_ffn(x, *choice, w, bank_factors(1, 2, w))


# --- adapters ---


def numpy_loop(x, experts, weights, w, factors, ranks):
    x, experts, weights, ranks = (np.asarray(z, np.float64) for z in (x, experts, weights, ranks))
    y = np.zeros_like(x)
    for i in np.ndindex(x.shape[:2]):
        mask = ranks[tuple(min(j, n - 1) for j, n in zip(i, ranks.shape, strict=False))]

        def product(name, v, e, mask=mask):
            out = v @ np.asarray(w[name], np.float64)[e]
            if name in factors[0]:
                a, b = (np.asarray(f[name], np.float64)[:, e] for f in factors)
                for k, m in enumerate(np.split(mask, len(a))):
                    out = out + ((v @ a[k]) * m) @ b[k]
            return out

        for e, share in zip(experts[i].astype(int), weights[i], strict=True):
            gate = product("expert_gate", x[i], e)
            y[i] += share * product("expert_down", gate / (1 + np.exp(-gate)) * product("expert_up", x[i], e), e)
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("adapters", "mask", "names"),
    [(1, (1, 1), NAMES), (3, (2, 11), NAMES), (3, (2, 1), NAMES), (2, (1, 11), NAMES[1:]), (2, (2, 11), NAMES[:1])],
)
def test_adapters_are_those_of_a_loop(adapters, mask, names, implementation):
    w, x = experts_weights(), normal(3, 2, 11, D)
    factors, ranks = bank_factors(adapters, 4, w, names), jnp.abs(normal(4, *mask, adapters * 4))
    experts, weights = route(x, normal(5, D, E), 2, True)
    got = expert_ffn(x, experts, weights, w, factors, ranks, implementation=implementation)
    close(got, numpy_loop(x, experts, weights, w, factors, ranks))


@pytest.mark.parametrize(
    ("adapters", "mask", "implementation"),
    [(1, (1, 1), "padded"), (1, (1, 1), "ragged"), *((3, (2, 70), name) for name in ("padded", "ragged", "gmm")), SLOW],
)
def test_gradients_are_those_of_all_experts_on_all_tokens(adapters, mask, implementation):
    w, x, c = experts_weights(), normal(3, 2, 70, D), normal(6, 2, 70, D)
    factors, ranks = bank_factors(adapters, 4, w), jnp.abs(normal(4, *mask, adapters * 4))
    experts, weights = route(x, normal(5, D, E), 2, True)

    def gradients(f):
        return jax.jit(jax.grad(lambda *z: jnp.sum(f(z[0], experts, *z[1:]) * c), range(5)))(x, weights, w, factors, ranks)

    close(gradients(lambda *z: expert_ffn(*z, implementation=implementation)), gradients(all_experts))


def test_frozen_experts_cost_no_gradient():
    """No product of the compiled adapter step makes the gradient of an expert, also not inside of a loop over layers."""
    w, x = experts_weights(d=48), normal(3, 1, 64, 48)
    factors, ranks = bank_factors(1, 4, w, NAMES[:1]), jnp.ones((1, 1, 4))
    experts, weights = route(x, normal(5, 48, E), 2, True)
    stack = jax.tree.map(lambda z: jnp.stack([z, z]), (w, factors))

    def loss(w, factors):
        layer = jax.checkpoint(lambda x, z: (x + expert_ffn(x, experts, weights, *z, ranks, implementation="padded"), None))
        return jnp.sum(jax.lax.scan(layer, x, (w, factors))[0] ** 2)

    def products(argument):
        text = jax.jit(jax.grad(loss, argument)).lower(*stack).compile().as_text()
        return sum((f"f32[48,{F}]" in line or f"f32[{F},48]" in line) and " dot(" in line for line in text.splitlines())

    assert products(1) == 0 < products(0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_is_near_float32(implementation):
    w, x = experts_weights(), normal(3, 1, 64, D)
    factors, ranks = bank_factors(2, 4, w), jnp.ones((1, 64, 8))
    experts, weights = route(x, normal(5, D, E), 2, True)

    def run(x, w):
        def loss(x, factors):
            y = expert_ffn(x, experts, weights, w, factors, ranks, implementation=implementation)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, factors)

    (_, y), gradients = run(*jax.tree.map(lambda z: z.astype(jnp.bfloat16), (x, w)))
    (_, expected), wide = run(x, w)
    assert y.dtype == gradients[0].dtype == jnp.bfloat16
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradients[1]))
    close(*jax.tree.map(lambda z: z.astype(jnp.float32), ((y, gradients), (expected, wide))), tolerance=4e-2)
