"""The flow of data through a pass, read from the graph of its gradients: what depends on what, what leads around it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.autograd.graph import Node


class DataFlow:
    """The operations between the data and the output."""

    def __init__(self, ends: Sequence[Node]) -> None:
        self._ends = set(ends)
        self._order: dict[Node, int] = {}
        """Operations by number: each is numbered after everything it reads."""
        self._data: dict[Node, int] = {}
        """A bit for every input that an operation depends on."""
        self._cuts: dict[int, set[Node]] = {}
        pending: list[tuple[Node, bool]] = [(node, False) for node in ends]
        seen: set[Node] = set()
        inputs = 0
        while pending:
            node, ready = pending.pop()
            if ready:
                self._order[node] = len(self._order)
                data = 0
                for read in _reads(node):
                    data |= self._data[read]
                if not data:
                    data, inputs = 1 << inputs, inputs + 1
                self._data[node] = data
            elif node not in seen:
                seen.add(node)
                pending.append((node, True))
                pending += [(read, False) for read in _reads(node)]

    def reaches(self, node: Node) -> bool:
        """True if the output depends on this node."""
        return node in self._order

    def is_cut(self, node: Node) -> bool:
        """True if whatever of its data reaches the output does so through this node."""
        data = self._data[node]
        if data not in self._cuts:
            self._cuts[data] = self._cuts_of(data)
        return node in self._cuts[data]

    def _cuts_of(self, data: int) -> set[Node]:
        """Operations that everything from these inputs to the output passes through.

        In an order in which each comes after what it reads, those are the ones that no edge jumps over.
        """
        part = [node for node in self._order if self._data[node] & data]
        last = len(self._order)
        furthest = dict.fromkeys(part, 0)
        reach = 0
        for node in part:
            position = self._order[node]
            earlier = [read for read in _reads(node) if read in furthest]
            for read in earlier:
                furthest[read] = max(furthest[read], position)
            if not earlier:  # an input: whatever comes before it in this order does not see it
                reach = max(reach, position)
        cuts = set()
        for node in part:
            position = self._order[node]
            if reach <= position:
                cuts.add(node)
            reach = max(reach, last if node in self._ends else furthest[node])
        return cuts


def _reads(node: Node) -> list[Node]:
    """What an operation reads."""
    return [read for read, _ in node.next_functions if read is not None]
