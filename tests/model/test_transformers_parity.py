"""The network against transformers in float32, for every setting that the configurations of the four types have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from model import init_cache, load_pretrained
from tests.model import tiny


@pytest.fixture(scope="module", autouse=True)
def exact_reference():
    """Of transformers' two forms of the gated delta rule the recurrent one; the chunks lose a digit (see `test_gated_delta`), which eight
    layers make a hundred."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
            patch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)
        yield


ALL = [(kind, name) for kind, variations in tiny.VARIATIONS.items() for name in variations]
FIRST = {next(iter(variations)) for variations in tiny.VARIATIONS.values()}


@pytest.fixture(scope="module", params=ALL, ids=lambda pair: ": ".join(pair))
def pair(request, tmp_path_factory):
    folder, (kind, name) = tmp_path_factory.mktemp("checkpoint"), request.param
    net = tiny.checkpoint(folder, kind, **tiny.VARIATIONS[kind][name])
    return net, load_pretrained(folder), name in FIRST


def close(ours, reference):
    np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-4 * max(1.0, np.abs(reference).max()))
    log = (np.asarray(jax.nn.log_softmax(jnp.asarray(x))) for x in (ours, reference))
    np.testing.assert_allclose(*log, rtol=0, atol=1e-4)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_logits(pair, padding):
    net, model, first = pair
    x, real = tiny.tokens(3, 20), np.ones((3, 20), np.int64)
    for row, count in enumerate((0, 5, 11) if padding != "none" else ()):
        real[row, :count] = 0
    if padding == "right":
        real = real[:, ::-1].copy()
    positions = np.maximum(np.cumsum(real, 1) - 1, 0)
    reference = tiny.torch_logits(net, x, attention_mask=real, position_ids=positions)
    found = [tiny.logits(model, jnp.asarray(x), jnp.asarray(positions), jnp.asarray(real))]
    if first:  # the positions and segments that are the default have nothing to do with settings
        found.append(tiny.logits(model, jnp.asarray(x), segment_ids=None if padding == "none" else jnp.asarray(real)))
    for ours in found:
        close(np.asarray(ours)[real == 1], reference[real == 1])


def test_greedy_decoding_with_a_cache_gives_the_same_tokens(pair):
    """One by one from the first, so that there is one step to compile; chunks through the cache are in `test_forward`."""
    net, model, _ = pair
    prompt, steps = tiny.tokens(2, 7), 32
    with torch.no_grad():
        reference = net.generate(torch.tensor(prompt), max_new_tokens=steps, do_sample=False, pad_token_id=0).numpy()[:, 7:]
    graphdef, state = nnx.split(model)

    @jax.jit
    def generate(state, prompt):
        model = nnx.merge(graphdef, state)

        def step(carry, position):
            token, cache = carry
            out = model.forward(token[:, None], jnp.full((2, 1), position), cache=cache)
            best = jnp.argmax(model.unembed(out.hidden[:, 0]), -1)
            given = prompt[:, jnp.minimum(position + 1, 6)]
            return (jnp.where(position < 6, given, best), out.cache), best

        start = prompt[:, 0], init_cache(model.config, 2, 7 + steps)
        return jax.lax.scan(step, start, jnp.arange(6 + steps))[1].T[:, 6:]

    np.testing.assert_array_equal(generate(state, jnp.asarray(prompt)), reference)
