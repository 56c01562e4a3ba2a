import numpy as np
import pytest
import torch

from rl.task_router import TaskRouter, fit, prompt_features, prompt_of
from tests.rl import tiny


def clusters(count=120, width=8, classes=4, seed=0):
    random = np.random.default_rng(seed)
    centres = random.normal(size=(classes, width)) * 3
    slots = random.integers(1, classes + 1, count)
    return (centres[slots - 1] + random.normal(size=(count, width))).astype(np.float32), slots


def test_separable_capabilities_are_told_apart_on_new_seeds():
    features, slots = clusters()
    router = fit(features[:80], slots[:80], 4)
    assert (router.predict(features[80:]) == slots[80:]).mean() > 0.95


def test_the_fit_is_the_optimum_of_the_regularised_loss():
    features, slots = clusters(seed=1)
    router = fit(features, slots, 4, l2=0.1)
    x = torch.tensor((features - router.mean) / router.deviation)
    kernel, bias = (torch.tensor(p, requires_grad=True) for p in (router.kernel, router.bias))
    loss = torch.nn.functional.cross_entropy(x @ kernel + bias, torch.tensor(slots - 1)) + 0.05 * (kernel**2).sum()
    loss.backward()
    assert kernel.grad.abs().max() < 1e-4 and bias.grad.abs().max() < 1e-4


def test_a_router_survives_json():
    features, slots = clusters()
    router = fit(features, slots, 4)
    np.testing.assert_array_equal(TaskRouter.from_json(router.to_json()).predict(features), router.predict(features))


def test_slots_outside_the_bank_are_refused():
    with pytest.raises(ValueError, match="within 1..3"):
        fit(np.zeros((2, 3)), np.array([1, 4]), 3)


def test_a_prompt_is_what_stands_before_the_first_sampled_token():
    t = tiny.trajectories(1)[0]
    first = int(np.flatnonzero(t.loss_mask)[0])
    np.testing.assert_array_equal(prompt_of(t), t.tokens[:first])


def test_features_are_the_last_hidden_state_whatever_the_padding():
    prompts = [t.tokens for t in tiny.trajectories(5)]
    features = prompt_features(tiny.model(), prompts, rows=4, multiple=32)
    assert features.shape == (5, 32)
    for prompt, feature in zip(prompts[:2], features[:2], strict=True):
        np.testing.assert_allclose(tiny.model().forward(prompt[None]).hidden[0, -1], feature, atol=1e-4)
