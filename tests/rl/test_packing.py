import numpy as np
import pytest

from rl.packing import PackingError, first_fit_decreasing, pack, without_hint
from rl.trajectory import Trajectory


def trajectory(name, length, seed=0, mask=None, hint=None):
    random = np.random.default_rng(seed)
    mask = (random.random(length) < 0.5).astype(np.int8) if mask is None else np.asarray(mask, np.int8)
    return Trajectory(
        id=name,
        environment="e",
        task_id=name,
        reward=0.5,
        hint=hint,
        tokens=random.integers(1, 50, length),
        loss_mask=mask,
        logprobs=-random.random(length) * mask,
        turns=np.zeros(length),
        versions=random.integers(0, 9, length),
    )


def ragged(count=40, seed=1, longest=60):
    lengths = np.random.default_rng(seed).integers(2, longest, count)
    return [trajectory(f"t{i}", int(n), seed=i) for i, n in enumerate(lengths)]


def test_every_sampled_token_is_a_target_once_with_its_own_values():
    trajectories = ragged()
    batch = pack(trajectories, np.arange(40) / 7, lengths=(64, 128), micro_rows=4)
    assert batch.tokens.shape[1] == 64 and len(batch.tokens) % 4 == 0
    for index, t in enumerate(trajectories):
        at = (batch.trajectory == index) & (batch.mask > 0)
        where = np.flatnonzero(t.loss_mask[1:]) + 1
        np.testing.assert_array_equal(batch.targets[at], t.tokens[where])
        np.testing.assert_array_equal(batch.tokens[at], t.tokens[where - 1])
        np.testing.assert_array_equal(batch.logprobs[at], t.logprobs[where])
        np.testing.assert_array_equal(batch.versions[at], t.versions[where])
        np.testing.assert_array_equal(batch.positions[at], where - 1)
        np.testing.assert_allclose(batch.advantages[at], index / 7, rtol=1e-6)
    assert batch.action_tokens == sum(t.loss_mask[1:].sum() for t in trajectories)


def test_segments_are_contiguous_and_padding_is_empty():
    batch = pack(ragged(), np.ones(40), lengths=(64,))
    for row in range(len(batch.tokens)):
        segments = batch.segment_ids[row]
        used = segments[segments > 0]
        assert (np.diff(used) >= 0).all() and (segments[len(used) :] == 0).all()
        for segment in np.unique(used):
            assert len(np.unique(batch.trajectory[row][segments == segment])) == 1
            np.testing.assert_array_equal(batch.positions[row][segments == segment], np.arange((segments == segment).sum()))
    padding = batch.segment_ids == 0
    assert (batch.trajectory[padding] == -1).all() and not batch.mask[padding].any() and not batch.advantages[padding].any()


def test_a_trajectory_never_crosses_rows_and_rows_are_well_filled():
    lengths = np.random.default_rng(0).integers(1, 100, 500).tolist()
    rows = first_fit_decreasing(lengths, 128)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(sum(lengths[i] for i in row) <= 128 for row in rows)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 128) + 1
    assert rows == first_fit_decreasing(lengths, 128)


def test_each_trajectory_may_have_a_row_of_its_own_the_longest_first():
    found = ragged()
    batch, shared = (pack(found, np.arange(len(found)), lengths=(64,), micro_rows=8, packed=packed) for packed in (False, True))
    assert len(batch.tokens) == 40 and batch.segment_ids.max() == 1
    lengths = (batch.segment_ids > 0).sum(1)
    assert (np.diff(lengths) <= 0).all() and sorted(batch.trajectory.max(1)) == list(range(40))
    assert (batch.segment_ids[:, 0] == 1).all() and (np.diff(batch.segment_ids, axis=1) <= 0).all()  # padding comes last
    for name in ("tokens", "targets", "mask", "logprobs", "advantages", "positions"):
        for index in range(40):
            ours, theirs = (getattr(b, name)[b.trajectory == index] for b in (batch, shared))
            np.testing.assert_array_equal(ours, theirs)


def test_the_smallest_sufficient_row_length_is_taken():
    mask = np.ones(30)
    assert pack([trajectory("a", 30, mask=mask)], [1.0], lengths=(64, 29, 32)).tokens.shape == (1, 29)
    assert pack([trajectory("a", 30, mask=mask)], [1.0], lengths=(64, 28, 32)).tokens.shape == (1, 32)


def test_tokens_after_the_last_sampled_one_are_not_packed():
    batch = pack([trajectory("a", 20, mask=[0] * 5 + [1] * 3 + [0] * 12)], [1.0], lengths=(32,))
    assert (batch.segment_ids > 0).sum() == 7 and batch.mask.sum() == 3


def test_a_trajectory_longer_than_the_row_is_named():
    with pytest.raises(PackingError, match="'long' needs 99 positions, the longest row has 64"):
        pack([trajectory("short", 5), trajectory("long", 100, mask=np.ones(100))], [1.0, 1.0], lengths=(32, 64))


def test_a_trajectory_without_tokens_is_named():
    with pytest.raises(PackingError, match="'bare' has no tokens"):
        pack([Trajectory(id="bare", environment="e", task_id="bare", reward=1.0)], [1.0], lengths=(32,))


def test_a_hint_is_cut_out_by_its_span():
    hinted = trajectory("h", 12, mask=[0] * 8 + [1] * 4, hint={"text": "look twice", "token_span": [2, 6]})
    arrays = without_hint(hinted)
    np.testing.assert_array_equal(arrays["tokens"], np.delete(hinted.tokens, np.arange(2, 6)))
    batch = pack([hinted], [1.0], lengths=(16,))
    np.testing.assert_array_equal(batch.targets[batch.mask > 0], hinted.tokens[8:])
    np.testing.assert_array_equal(batch.positions[batch.mask > 0], np.arange(3, 7))


@pytest.mark.parametrize("span, complaint", [([2, 99], "not a span"), (None, "not a span"), ([7, 10], "covers sampled tokens")])
def test_a_hint_that_cannot_be_cut_out_is_an_error(span, complaint):
    hinted = trajectory("h", 12, mask=[0] * 8 + [1] * 4, hint={"text": "x", "token_span": span})
    with pytest.raises(PackingError, match=complaint):
        without_hint(hinted)


def test_micro_batches_cover_the_batch_in_order():
    batch = pack(ragged(), np.ones(40), lengths=(64,), micro_rows=3)
    parts = list(batch.micro_batches(3))
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in parts]), batch.tokens)
    with pytest.raises(ValueError, match="pack with micro_rows"):
        list(batch.micro_batches(len(batch.tokens) - 1))


def test_an_empty_batch_is_one_micro_batch_of_padding():
    batch = pack([], [], lengths=(16,), micro_rows=2)
    assert batch.tokens.shape == (2, 16) and batch.action_tokens == 0
