"""Find layers of experts in a captured graph: rows sorted by expert, products of groups of rows, and rows put back.

Found by what the operations do, not by names. A layer begins where the experts of all *slots* (a token and one of its
choices) are sorted. From there every value is followed that lies in the sorted order, until rows are put back where
their tokens are. A rank that has a part of the tokens may run such a layer only on them: sorted among themselves they
meet the same matrices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paceline.graph.capture import Captured
from paceline.graph.labels import argument, node_order, tensor_inputs
from paceline.graph.placement import Split
from paceline.graph.reshape_rules import RESHAPES, carry, is_rearrangement, shape_of
from paceline.graph.rules import spec_of

aten = torch.ops.aten
PRODUCT = aten._grouped_mm.default
COUNTS = torch.ops.paceline.counts.default  # of `grouped_mm.counts`
_SORTS = (aten.sort.default, aten.sort.stable)
_ARGSORTS = (aten.argsort.default, aten.argsort.stable)
_CASTS = (aten.to.dtype, aten._to_copy.default, aten.to.device, aten.to.dtype_layout, aten.clone.default,
          aten.contiguous.default, aten.detach.default)  # fmt: skip
_DIVISIONS = (aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode)
# Factories whose first dimension has an element for each slot; `arange` has the numbers of the slots.
FACTORIES = (aten.arange.default, aten.arange.start, aten.empty.memory_format, aten.zeros.default,
             aten.empty_like.default, aten.zeros_like.default, aten.new_zeros.default,
             aten.new_empty.default)  # fmt: skip
LIKE = {aten.empty_like.default: aten.new_empty.default, aten.zeros_like.default: aten.new_zeros.default}
_PUTS = (aten.index_put.default, aten.index_put_.default, aten.scatter.src)
_ADDS = (aten.index_add.default, aten.index_add_.default, aten.scatter_add.default, aten.scatter_add_.default)


@dataclass(frozen=True, slots=True)
class Role:
    """What a value of a layer is.

    Attributes:
        kind: "rows" in the sorted order; "slots" or "tokens", numbers of them in that order; "inverse", where each slot
            is in it; "sorted", rows and slots of a sort, and "chunks", several of rows; "counts" or "ends" of each
            expert's rows, and "one_hot", a row for each slot that is added up to counts; "factory", made with a row for
            each slot; "restored", rows that are where their slots or tokens are again. Counts may be read from outside:
            there they are of all rows.
        dim: the dimension of the rows; that of the experts for counts and ends.
        per: slots of a token, for numbers of tokens.
    """

    kind: str
    dim: int = 0
    per: int = 1


@dataclass(slots=True, eq=False)
class Experts:
    """A layer of experts.

    Attributes:
        sort: the node that sorts the experts of all slots.
        slots: the number of slots.
        count: the number of experts.
        roles: the role of the value of each of the layer's nodes.
        aligned: inputs from outside whose first dimension are slots or tokens, with its size.
        products: the grouped products, in order.
    """

    sort: fx.Node
    slots: int
    count: int = 0
    roles: dict[fx.Node, Role] = field(default_factory=dict)
    aligned: dict[fx.Node, int] = field(default_factory=dict)
    products: list[fx.Node] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Return the size that those of all aligned values are multiples of."""
        return min(self.aligned.values())


def find_experts(captured: Captured) -> list[Experts]:
    """Return the layers of experts of a graph whose values don't leave the sorted order on the way."""
    if not any(node.target is PRODUCT for node in captured.graph.nodes):
        return []
    order = node_order(captured.graph)
    layers = []
    for node in captured.graph.nodes:
        if node.target in (*_SORTS, *_ARGSORTS) and _is_of_experts(node):
            layer = _Trace(Experts(node, shape_of(tensor_inputs(node)[0])[0]), order).run()
            if layer is not None:
                layers.append(layer)
    return layers


def _is_of_experts(node: fx.Node) -> bool:
    value = tensor_inputs(node)[0].meta["val"]
    return value.dim() == 1 and not value.is_floating_point() and not bool(argument(node, 2, "descending", False))


class _NotALayer(Exception):
    """A value leaves the sorted order in a way that no rule knows."""


@dataclass(slots=True)
class _Trace:
    """Follows one layer's values through the graph."""

    layer: Experts
    order: dict[fx.Node, int]

    def run(self) -> Experts | None:
        """Return the layer, or None where it is none."""
        layer = self.layer
        try:
            self._begin()
            self._follow()
            self._check_closed()
        except _NotALayer:
            return None
        sizes = layer.aligned.values()
        is_even = bool(sizes) and all(size % layer.tokens == 0 for size in sizes) and layer.slots % layer.tokens == 0
        return layer if layer.products and is_even else None

    def _begin(self) -> None:
        layer = self.layer
        (ids,) = tensor_inputs(layer.sort)
        layer.aligned[ids] = layer.slots
        if layer.sort.target in _ARGSORTS:
            layer.roles[layer.sort] = Role("slots")
            return
        layer.roles[layer.sort] = Role("sorted")
        for user in layer.sort.users:
            if user.target is operator.getitem:
                layer.roles[user] = Role("rows" if user.args[1] == 0 else "slots")

    def _follow(self) -> None:
        """Follow every value that depends on the sorted order until it is back in the order of the slots."""
        roles = self.layer.roles
        waiting: set[fx.Node] = set()
        for node in roles:
            waiting.update(node.users)
        followed: set[fx.Node] = set()
        while waiting:
            node = min(waiting, key=self.order.__getitem__)
            waiting.discard(node)
            followed.add(node)
            if node not in roles:  # else noted where its source was
                found = self._role(node)
                if found is None:
                    continue  # of the numbers of all rows
                roles[node] = found
            if roles[node].kind != "restored":
                waiting.update(user for user in node.users if user not in followed)

    def _role(self, node: fx.Node) -> Role | None:
        """Return the role of a node that reads a value of the layer; None where it is not of the layer."""
        if node.op != "call_function":
            raise _NotALayer
        inputs = tensor_inputs(node)
        if node.target in FACTORIES:  # like the numbers of slots
            self._note_factory(node)
            return self.layer.roles[node]
        for rule in (
            self._number,
            self._role_of_selected,
            self._put_back,
            self._counted,
            self._multiplied,
            self._by_row,
        ):
            found = rule(node, inputs)
            if found is not None:
                return found
        if all(self._kind(source) in ("", "counts") for source in inputs):
            return None
        raise _NotALayer

    def _kind(self, node: Any) -> str:
        found = self.layer.roles.get(node)
        return "" if found is None else found.kind

    def _number(self, node: fx.Node, inputs: list[fx.Node]) -> Role | None:
        """Follow numbers of slots: to those of their tokens, to where each slot is, or as they are."""
        kind = self._kind(inputs[0])
        if kind not in ("slots", "tokens", "inverse"):
            return None
        if node.target in _DIVISIONS and kind == "slots" and len(inputs) == 1:
            by = node.args[1]
            is_floor = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
            return Role("tokens", 0, by) if is_floor and isinstance(by, int) and self.layer.slots % by == 0 else None
        if node.target in _ARGSORTS and kind == "slots":
            return Role("inverse")
        now = self.layer.roles[inputs[0]]
        if node.target in _CASTS and not node.meta["val"].is_floating_point():
            return now
        if is_rearrangement(node) and len(inputs) == 1:  # as columns, to gather by
            carried = carry(node, Split(0, (self.layer.slots,)), 1)
            return now if isinstance(carried, Split) and carried.dim == 0 else None
        return None

    def _role_of_selected(self, node: fx.Node, inputs: list[fx.Node]) -> Role | None:
        """Follow rows that are taken by numbers: of slots or tokens into the sorted order, or back out of it."""
        if node.target is aten.index.Tensor:
            indices: Any = node.args[1]
            if len(inputs) != 2 or indices[0] is None:
                return None
            source, number = inputs
        elif node.target in (aten.index_select.default, aten.gather.default) and node.args[1] == 0:
            source, number = inputs
            if node.target is aten.gather.default and not _is_column(number):
                return None
        else:
            return None
        kind = self._kind(number)
        if self._kind(source) == "rows":
            is_back = kind == "inverse" and self.layer.roles[source].dim == 0
            return Role("restored") if is_back else None
        if source in self.layer.roles or shape_of(number)[0] != self.layer.slots:
            return None
        if kind in ("slots", "tokens"):
            return Role("rows") if self._is_aligned(source, number) else None
        # A row for each expert, as of a bias: its table is whole.
        return Role("rows") if kind == "rows" and node.target is not aten.gather.default else None

    def _is_aligned(self, source: fx.Node, number: fx.Node) -> bool:
        """Note a value from outside whose rows are picked by numbers; False if these are of other rows."""
        size = shape_of(source)[0]
        if size * self.layer.roles[number].per != self.layer.slots:
            return False
        self.layer.aligned[source] = size
        return True

    def _put_back(self, node: fx.Node, inputs: list[fx.Node]) -> Role | None:
        """Follow what is put where its slot or token is: rows, or the numbers of the sorted places."""
        if node.target in _ADDS:
            base, number, rows = inputs
            if node.args[1] != 0 or self._kind(rows) != "rows" or self._kind(number) not in ("slots", "tokens"):
                return None
            if node.target in (aten.scatter_add.default, aten.scatter_add_.default) and not _is_column(number):
                return None
        elif node.target in _PUTS and self._is_put_by_slot(node, inputs):
            base, number, rows = inputs
            if _counts_slots(rows, self.layer.slots):
                self._note_factory(base)
                self._note_factory(rows)
                return Role("inverse")
        else:
            return None
        return self._into(base, number, rows)

    def _is_put_by_slot(self, node: fx.Node, inputs: list[fx.Node]) -> bool:
        """True if a node puts each row in the place of its slot, or adds it in that of its token."""
        is_scatter = node.target is aten.scatter.src
        if len(inputs) != 3 or (is_scatter and node.args[1] != 0):
            return False
        adds = not is_scatter and bool(argument(node, 3, "accumulate", False))
        return self._kind(inputs[1]) in (("slots", "tokens") if adds else ("slots",))

    def _into(self, base: fx.Node, number: fx.Node, rows: fx.Node) -> Role | None:
        """Follow rows that are put into `base`, in the places of these numbers."""
        if self.layer.roles.get(rows) != Role("rows"):
            return None
        if base.target in FACTORIES and shape_of(base)[0] == self.layer.slots:
            self._note_factory(base)
        elif base in self.layer.roles or not self._is_aligned(base, number):
            return None
        return Role("restored")

    def _note_factory(self, node: fx.Node) -> None:
        """Note a factory, whose value must have a row for each of this rank's slots."""
        if (
            node.target not in FACTORIES
            or shape_of(node)[0] != self.layer.slots
            or self._kind(node) not in ("", "factory")
        ):
            raise _NotALayer
        self.layer.roles[node] = Role("factory")

    def _counted(self, node: fx.Node, inputs: list[fx.Node]) -> Role | None:
        """Follow the numbers of rows of each expert, to where they end."""
        kind = self._kind(inputs[0])
        if kind == "rows" and _counted_experts(node) is not None and self.layer.roles[inputs[0]].dim == 0:
            return Role("counts") if self._is_expert_of_rows(_root(inputs[0])) else None
        if kind in ("counts", "ends") and node.target in _CASTS:
            return Role(kind)
        return Role("ends") if kind == "counts" and node.target is aten.cumsum.default else None

    def _is_expert_of_rows(self, node: fx.Node) -> bool:
        """True if a value has the expert of each sorted row, not some other number."""
        sort = self.layer.sort
        if node.target is operator.getitem:
            return node.args == (sort, 0)
        inputs = tensor_inputs(node)
        if node.target not in (aten.index.Tensor, aten.index_select.default, aten.gather.default) or len(inputs) != 2:
            return False
        source, number = inputs
        return self._kind(number) == "slots" and _root(source) is _root(tensor_inputs(sort)[0])

    def _multiplied(self, node: fx.Node, inputs: list[fx.Node]) -> Role | None:
        """Follow rows through a product with the matrix of each group."""
        if node.target is not PRODUCT or len(inputs) != 3:
            return None
        rows, weight, ends = inputs
        if ends not in self.layer.roles:
            self._count_before(ends)
        shape = shape_of(weight)
        if self._kind(rows) != "rows" or weight in self.layer.roles or len(shape) != 3 or self._kind(ends) != "ends":
            return None
        if self.layer.count not in (0, shape[0]) or shape_of(ends) != shape[:1]:
            return None
        self.layer.count = shape[0]
        self.layer.products.append(node)
        return Role("rows")

    def _count_before(self, ends: fx.Node) -> None:
        """Note where the rows of each expert end, if it was counted before the rows were sorted."""
        chain = [ends]
        while chain[-1].target in (*_CASTS, aten.cumsum.default) and len(tensor_inputs(chain[-1])) == 1:
            chain.append(tensor_inputs(chain[-1])[0])
        counts = chain[-1]
        counted = _counted_experts(counts)
        (ids,) = tensor_inputs(self.layer.sort)
        has_sum = sum(node.target is aten.cumsum.default for node in chain) == 1
        if counted is None or not has_sum or _root(counted) is not _root(ids):
            return
        self.layer.aligned[counted] = shape_of(counted)[0]
        self.layer.roles[counts] = Role("counts")
        if counts.target is aten.sum.dim_IntList:
            self.layer.roles[tensor_inputs(counts)[0]] = Role("one_hot")
        for node in reversed(chain[:-1]):
            is_summed = node.target is aten.cumsum.default or self._kind(tensor_inputs(node)[0]) == "ends"
            self.layer.roles[node] = Role("ends" if is_summed else "counts")

    def _by_row(self, node: fx.Node, inputs: list[fx.Node]) -> Role | None:
        """Follow rows through what is done to each by itself."""
        dims = {source: self.layer.roles[source].dim for source in inputs if source in self.layer.roles}
        if any(self._kind(source) != "rows" for source in dims):
            return None
        if node.target in _CASTS:
            return Role("rows", dims[inputs[0]])
        if is_rearrangement(node) and len(inputs) == 1:
            carried = carry(node, Split(dims[inputs[0]], (self.layer.slots,)), 1)
            if isinstance(carried, Split) and shape_of(node)[carried.dim] == self.layer.slots:
                return Role("rows", carried.dim)
            if isinstance(carried, list) and all(isinstance(part, Split) for part in carried):
                return self._chunks(node, carried)
            return None
        spec = spec_of(node)
        if spec is None or len(spec.inputs) != len(inputs) or _draws(node):
            return None
        labels = {spec.inputs[number][dims[source]] for number, source in enumerate(inputs) if source in dims}
        (label, *more_labels) = labels
        if more_labels or label is None or label not in spec.output:
            return None
        for source, of_input in zip(inputs, spec.inputs, strict=True):
            if source not in dims and label in of_input:
                return None  # rows in another order
        return Role("rows", list(spec.output).index(label))

    def _chunks(self, node: fx.Node, carried: list[Any]) -> Role | None:
        """Note each of several results, as of a chunk into gate and values."""
        for user in node.users:
            if user.target is not operator.getitem:
                return None
            self.layer.roles[user] = Role("rows", carried[user.args[1]].dim)  # type: ignore[index]
        return Role("chunks", carried[0].dim)

    def _check_closed(self) -> None:
        """Raise _NotALayer if a value in the sorted order is read from outside."""
        roles = self.layer.roles
        for node, found in roles.items():
            if found.kind not in ("restored", "counts") and any(user not in roles for user in node.users):
                raise _NotALayer


def _counted_experts(counts: fx.Node) -> fx.Node | None:
    """Return the numbers of experts that a node counts; None for another node."""
    inputs = tensor_inputs(counts) if counts.op == "call_function" else []
    if counts.target is COUNTS and len(inputs) == 1:
        return inputs[0]
    if counts.target is aten.histc.default:
        bins, first, last = (argument(counts, place, name, 0) for place, name in enumerate(("bins", "min", "max"), 1))
        # One bin for each number: the last one's is closed.
        return inputs[0] if first == 0 and last in (bins - 1, bins) else None
    is_first = counts.target is aten.sum.dim_IntList and counts.args[1] == [0]
    if is_first and inputs[0].target is aten.one_hot.default and len(shape_of(inputs[0])) == 2:
        return tensor_inputs(inputs[0])[0]
    return None


def _root(node: fx.Node) -> fx.Node:
    """Return the value before it was cast and reshaped."""
    while node.target in _CASTS or node.target in RESHAPES:
        node = tensor_inputs(node)[0]
    return node


def _is_column(numbers: fx.Node) -> bool:
    """True if all numbers of a row are the same: a column that was expanded."""
    source: Any = numbers.args[0] if numbers.args else None
    return numbers.target is aten.expand.default and shape_of(source)[1:] == (1,) * (len(shape_of(numbers)) - 1)


def _counts_slots(node: fx.Node, slots: int) -> bool:
    """True if a node is 0, 1, .. for all slots."""
    if node.target is aten.arange.default:
        return bool(node.args[0] == slots)
    return node.target is aten.arange.start and node.args[:2] == (0, slots)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_counted_for_others(node: fx.Node, layer: Experts) -> bool:
    """True if a node has the number of each expert's rows, and something outside of the layer reads it."""
    return layer.roles[node].kind == "counts" and any(user not in layer.roles for user in node.users)


def inside(layer: Experts, order: Callable[[fx.Node], int]) -> Iterator[fx.Node]:
    """Yield the nodes from a layer's first product to its last, in order."""
    after: set[fx.Node] = set()
    for node in sorted(layer.roles, key=order):
        if node in layer.products or any(source in after for source in node.all_input_nodes):
            after.add(node)
    before: set[fx.Node] = set()
    for node in sorted(layer.roles, key=order, reverse=True):
        if node in layer.products or any(user in before for user in node.users):
            before.add(node)
    yield from (node for node in sorted(after & before, key=order) if layer.roles[node].kind in ("rows", "chunks"))
