"""The prefix tree against a model that keeps every stored context as a whole."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rl.engines.jax.blocks import BLOCK, PrefixTree, pool_size
from rl.engines.jax.steps import cache_lengths

contexts = st.lists(st.integers(0, 1), max_size=2).flatmap(
    # few different blocks, so that contexts share some, and ends of every length
    lambda blocks: st.integers(0, BLOCK).map(lambda end: [x for b in blocks for x in [b] * BLOCK] + [1] * end)
)


def nodes_of(tree):
    todo, found = list(tree._roots.values()), []
    while todo:
        node = todo.pop()
        todo += node.children.values()
        found += [node] if node.parent is not None else []
    return found


def whole(node):
    return [] if node is None else whole(node.parent) + list(node.tokens)


class Sessions(RuleBasedStateMachine):
    """Chains are reserved, computed and given up in any order; few blocks, so that some are evicted and some missing."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.tree, self.chains, self.stored = PrefixTree(5), [], set()

    @rule(target=held, scope=st.integers(0, 1), tokens=contexts)
    def reserve(self, scope, tokens):
        chain = self.tree.reserve(scope, tokens)
        assert [x for node in chain for x in node.tokens] == tokens[: len(chain) * BLOCK]
        assert len(chain) * BLOCK >= len(tokens) or self.tree.used == 5  # only for want of blocks
        self.chains.append(chain)
        return scope, tokens, chain

    @rule(entry=held)
    def compute(self, entry):
        scope, _, chain = entry
        for node in chain:
            node.ready = True
            self.stored.add((scope, tuple(whole(node))))

    @rule(entry=consumes(held))
    def release(self, entry):
        self.tree.release(entry[2])
        self.chains = [chain for chain in self.chains if chain is not entry[2]]

    @rule(entry=held)
    def find(self, entry):
        scope, tokens, chain = entry
        nodes, length = self.tree.find(scope, chain, tokens)
        assert all(node.ready for node in nodes) and length <= len(tokens)
        assert whole(nodes[-1] if nodes else None)[:length] == tokens[:length]
        # as long as anything that was stored and not evicted
        there = {(scope, tuple(whole(node))) for node in nodes_of(self.tree) if node.ready} & self.stored
        common = [
            next((i for i, (a, b) in enumerate(zip(x, tokens, strict=False)) if a != b), min(len(x), len(tokens)))
            for s, x in there
            if s == scope
        ]
        assert length == max(common, default=0)

    @invariant()
    def every_block_is_free_or_of_one_node_and_counted(self):
        nodes = nodes_of(self.tree)
        assert sorted([node.block for node in nodes] + self.tree._free) == list(range(5))
        for node in nodes:
            assert node.refs == sum(any(node is x for x in chain) for chain in self.chains)
            assert (node in self.tree._left) == (node.refs == 0) and (node.refs or node.ready)
        assert all(any(x is node for node in nodes) for chain in self.chains for x in chain)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def stored(tree, tokens, scope=0):
    """A chain that is computed and left."""
    chain = tree.reserve(scope, tokens)
    for node in chain:
        node.ready = True
    tree.release(chain)
    return chain


def test_what_was_left_first_is_evicted_first_and_ends_before_beginnings():
    tree = PrefixTree(4)
    one, other = [1] * 32, [2] * 32
    stored(tree, one)
    stored(tree, other)
    chain = tree.reserve(0, [3] * 16)
    assert tree.evicted == 1 and chain[0].block == 1  # the second block of the first context
    assert tree.find(0, [], one)[1] == 16 and tree.find(0, [], other)[1] == 16  # the best child; chains would find the whole
    held = tree.reserve(0, other)
    assert tree.find(0, held, other)[1] == 32
    assert len(tree.reserve(0, [4] * 48)) == 1 and tree.used == 4  # the first block of `one` made room; the rest is held


def test_a_maker_that_gives_up_leaves_its_work_to_others():
    tree, maker = PrefixTree(4), object()
    mine, other = tree.reserve(0, [1] * 40), tree.reserve(0, [1] * 32)
    for node in mine:
        node.maker = maker
    tree.release(mine, maker)
    assert [node.maker for node in other] == [None, None] and tree.used == 2
    tree.release(other)
    assert tree.used == 0


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_recurrent_contexts_are_found_up_to_a_state_only(asked):
    tree, states = PrefixTree(30, 2, recurrent=True), {}
    for token, length in asked:
        tokens = [token] * length
        chain = tree.reserve(0, tokens)
        nodes, found = tree.find(0, chain, tokens)
        fitting = [len(x) for x in states if list(x) == tokens[: len(x)]]
        assert found == max(fitting, default=0) and (not nodes or nodes[-1].state is not None)
        for node in chain:
            node.ready = True
        if chain[-1].state is None:
            tree.add_state(chain[-1])
        tree.release(chain)
        states = {tuple(whole(node)): node.state for node in nodes_of(tree) if node.state is not None}
        assert len(states) <= 2 and sorted([*states.values(), *tree._free_states]) == [0, 1]


def test_a_state_makes_room_for_another_and_an_evicted_block_gives_its_state_back():
    tree = PrefixTree(3, 1, recurrent=True)
    one = stored(tree, [1] * 16)
    assert tree.add_state(one[0]) == 0
    other = stored(tree, [2] * 16)
    assert tree.add_state(other[0]) == 0 and one[0].state is None
    tree.reserve(0, [3] * 48)
    assert tree.used == 3 and tree._free_states == [0]
    assert PrefixTree(3).add_state(one[0]) is None


@pytest.mark.parametrize("lanes, context, blocks, expected", [(64, 256, None, (256, 16)), (1, 40, None, (3, 2)), (4, 64, 0, (0, 0))])
def test_a_pool_holds_a_quarter_of_the_lanes_and_one_context_at_least(lanes, context, blocks, expected):
    assert pool_size(lanes, context, blocks) == expected


def test_long_contexts_have_shorter_lengths_and_the_quickstart_has_one():
    assert cache_lengths(320) == [320] and cache_lengths(4096) == [512, 1024, 2048, 4096] and cache_lengths(100, [50, 500]) == [50, 100]
