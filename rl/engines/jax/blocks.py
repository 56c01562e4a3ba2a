"""Which tokens lie in which block of the pool: a prefix tree on the host, for contexts that are shared or that wait for a lane.

A node is a block of up to 16 tokens that follow its parent's; what a block holds depends on all tokens before it and on the weights, so
every policy version has a root of its own. Whole blocks are found by their tokens. The last block of a context may hold fewer; it has no
children, and is copied out as far as it agrees with what is asked for.

A chain of nodes is reserved before its numbers exist: one session computes them (the maker), others that need them wait. Nodes of live
sessions are referenced and stay; the others are evicted when blocks run out, those first that were left first. Nothing depends on time.

A recurrent state holds all its tokens or is of no use. So where layers are recurrent, a context is found only up to a node that has a
state, of which there are few.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Sequence

import numpy as np

BLOCK = 16  # tokens


def pool_size(lanes: int, context: int, blocks: int | None = None) -> tuple[int, int]:
    """(blocks, states) of a pool: by default for a quarter of the lanes' tokens, one context at least; a state for each context in it."""
    if blocks is None:
        blocks = -(-max(lanes * context // 4, context) // BLOCK)
    return blocks, -(-blocks * BLOCK // context)


@dataclasses.dataclass(eq=False)
class Node:
    """One block of a context.

    Attributes:
      block: its place in the pool.
      ready: the pool has its numbers, and those of all before it.
      maker: the session that computes them.
      refs: chains that hold it; each holds all nodes before it too.
      state: place of the recurrent state after its last token.
      experts: int16 [len(tokens), L', k], see `rl.engines.protocol.Completion`.
    """

    parent: Node | None
    tokens: tuple[int, ...]
    block: int
    ready: bool = False
    maker: object | None = None
    refs: int = 0
    state: int | None = None
    experts: np.ndarray | None = None
    children: dict[tuple[int, ...], Node] = dataclasses.field(default_factory=dict)


class PrefixTree:
    """The bookkeeping of a pool of `blocks` blocks and `states` recurrent states.

    Args:
      recurrent: a context is found only up to where a state stands.

    Attributes:
      evicted: blocks taken from contexts that nobody held.
    """

    def __init__(self, blocks: int, states: int = 0, recurrent: bool = False):
        self.blocks, self.states, self.recurrent, self.evicted = blocks, states, recurrent, 0
        self.clear()

    def clear(self) -> None:
        """Forgets everything; no chain may be held."""
        self._roots: dict[Hashable, Node] = {}
        self._free = list(range(self.blocks))[::-1]
        self._free_states = list(range(self.states))[::-1]
        # Ready nodes without references, in the order in which they were left. A chain is left from its end, so no node stands before one
        # that follows it: the first has no children.
        self._left: collections.OrderedDict[Node, None] = collections.OrderedDict()
        self._with_state: collections.OrderedDict[Node, None] = collections.OrderedDict()  # the one used last comes last

    @property
    def used(self) -> int:
        return self.blocks - len(self._free)

    def reserve(self, scope: Hashable, tokens: Sequence[int]) -> list[Node]:
        """The nodes of `tokens` under the weights `scope`, each referenced once more; those that there were no blocks for are missing."""
        if scope not in self._roots:
            self._roots = {name: root for name, root in self._roots.items() if root.children} | {scope: Node(None, (), -1, ready=True)}
        node, chain = self._roots[scope], []
        for start in range(0, len(tokens), BLOCK):
            part = tuple(tokens[start : start + BLOCK])
            child = node.children.get(part)
            if child is None:
                if not self._free and not self._evict():
                    break
                child = node.children[part] = Node(node, part, self._free.pop())
            child.refs += 1
            self._left.pop(child, None)
            chain.append(child)
            node = child
        return chain

    def release(self, chain: Sequence[Node], maker: object | None = None) -> None:
        """Gives up a reserved chain; what `maker` was to compute of it is left to others."""
        for node in reversed(chain):
            node.refs -= 1
            if maker is not None and node.maker is maker:
                node.maker = None
            if not node.refs:
                if node.ready:
                    self._left[node] = None
                else:
                    self._remove(node)

    def find(self, scope: Hashable, chain: Sequence[Node], tokens: Sequence[int]) -> tuple[list[Node], int]:
        """The longest beginning of `tokens`, whose chain was reserved, that the pool has: its nodes, and how many tokens it is."""
        if scope not in self._roots:
            return [], 0
        path = [self._roots[scope], *itertools.takewhile(lambda node: node.ready, chain)]
        length = sum(len(node.tokens) for node in path)
        while True:
            child, agreed = self._best_child(path[-1], tokens[length : length + BLOCK])
            if child is not None:
                path.append(child)
                length += agreed
            if child is not None or not self.recurrent or path[-1].state is not None or len(path) == 1:
                break
            length -= len(path.pop().tokens)
        if path[-1] in self._with_state:
            self._with_state.move_to_end(path[-1])
        return path[1:], length

    def _best_child(self, node: Node, tokens: Sequence[int]) -> tuple[Node | None, int]:
        """The child that begins with most of `tokens`, and with how many; of recurrent layers the whole child, up to its state."""
        best, most = None, 0
        for child in node.children.values() if tokens else ():
            agreed = _agreed(child.tokens, tokens)
            usable = child.ready and (not self.recurrent or (child.state is not None and agreed == len(child.tokens)))
            if usable and agreed > most:
                best, most = child, agreed
        return best, most

    def add_state(self, node: Node) -> int | None:
        """The place for the state after a node's last token, at the cost of the one unused for longest; None if there is none at all."""
        if not self._free_states and self._with_state:
            old, _ = self._with_state.popitem(last=False)
            self._drop_state(old)
        if not self._free_states:
            return None
        node.state = self._free_states.pop()
        self._with_state[node] = None
        return node.state

    def _evict(self) -> bool:
        if not self._left:
            return False
        node, _ = self._left.popitem(last=False)
        self._remove(node)
        self.evicted += 1
        return True

    def _remove(self, node: Node) -> None:
        del node.parent.children[node.tokens]
        self._free.append(node.block)
        if node.state is not None:
            del self._with_state[node]
            self._drop_state(node)

    def _drop_state(self, node: Node) -> None:
        self._free_states.append(node.state)
        node.state = None


def _agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
