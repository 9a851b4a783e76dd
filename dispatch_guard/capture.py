"""Keep the conversions that a user wrote in an exported program, and judge a program by its graph alone.

Two halves: :class:`_Reader` runs over a graph with memory instead of values and finds the conversions and the writes
after them; :func:`capture_conversions` turns what is safe into ``aten._to_copy`` and puts the metadata right.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher  # 2.10, 2.13, 2.15
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.fx.passes.shape_prop import _extract_tensor_metadata  # 2.10, 2.13, 2.15
from torch.utils import _pytree as pytree

from . import _compat
from .conversions import CONVERSIONS, OPERATORS, Side, Tag, meta_of
from .guard import ToMutationGuard, violation_of
from .mutations import DETACH, rebinds, write_plan, written_arguments
from .sites import Place, is_of_numpy, place_of_node
from .source import is_bound_once
from .storages import keys_of, same_geometry
from .violations import Conversion, Kind, Role, Site, ToMutationError, Violation

OnUnsafe = Literal["raise", "keep"]
Returned = Literal["capture", "keep"]

_TO_COPY: Final = torch.ops.aten._to_copy.default
# All that ``tensor.data = other`` leaves in a graph (torch/csrc/autograd/variable.cpp, VariableHooks::set_data).
_SET_DATA: Final = torch.ops.aten._has_compatible_shallow_copy_type.default
_STACK_FRAME: Final = re.compile(r'^  File ".*$', re.MULTILINE)  # of a node's stack_trace, innermost last
_KEY: Final = "dispatch_guard"  # our entry in node.meta["custom"], which torch.export saves and decompositions hand on


class CapturedProgram(ExportedProgram):
    """An exported program in which the conversions that its author wrote are ``aten._to_copy`` nodes.

    It is an ExportedProgram in every way, but that :meth:`run_decompositions` leaves ``aten._to_copy`` alone whatever
    the table says.  A program read back by ``torch.export.load`` is a plain one again, with its nodes and their notes
    (``node.meta["custom"]["dispatch_guard"]``) as they were; :func:`capture_conversions` of it makes it one of these.

    Attributes:
        captured: how many conversions are ``aten._to_copy`` nodes.
        kept: the :class:`Violation` records for whose sake conversions were left as they are (``on_unsafe="keep"``).
        returned: the :class:`Conversion` records whose result the program returns and that aliased their source when
            it was exported: captured, the output is a copy, and with ``returned="keep"`` it still is that alias.
    """

    captured: int = 0
    kept: tuple[Violation, ...] = ()
    returned: tuple[Conversion, ...] = ()

    def run_decompositions(
        self, decomp_table: Mapping[Any, Callable[..., Any]] | None = None, *args: Any, **kwargs: Any
    ) -> CapturedProgram:
        """As torch's, with ``aten._to_copy`` left out of ``decomp_table``."""
        table: Any = decomp_table
        if decomp_table is not None:
            table = {
                op: rule for op, rule in dict(decomp_table).items() if op not in (_TO_COPY, _TO_COPY.overloadpacket)
            }
        return _wrapped(super().run_decompositions(table, *args, **kwargs), self.kept, self.returned, self.captured)


CapturedProgram.__module__ = "dispatch_guard"


def capture_conversions(
    ep: ExportedProgram, *, on_unsafe: OnUnsafe = "raise", returned: Returned = "capture"
) -> CapturedProgram:
    """A new program in which every conversion that a user wrote is an ``aten._to_copy`` node.

    ``torch.export`` (2.10 to 2.15) records ``x.to("cpu")`` as ``aten.to``, and ``run_decompositions()`` drops each one
    that changed nothing on the device and dtype of the export.  An ``aten._to_copy`` stays.  Making a conversion a copy
    is right when nobody can tell: when neither its source nor its result is written later.

    A conversion whose result leads nowhere is kept by an ``aten._assert_tensor_metadata``, such as torch puts before
    each conversion (in 2.10 to 2.15).

    The node carries what the user asked for and no more, as far as the graph tells (``x.to("cpu")``: the device;
    ``x.float()``: the dtype), and ``node.meta["custom"]["dispatch_guard"]`` the call, those arguments, whether it was
    an alias, and which tensor it follows (``x.type_as(y)``).  torch records ``x.to(y)`` as ``to(device, dtype)``.

    Args:
        ep: what ``torch.export.export`` returned, or ``torch.export.load``; it is not changed.
        on_unsafe: what to do about a conversion whose source or result is written later: ``"raise"``, or ``"keep"`` to
            leave it as it is and list the write in ``kept``.
        returned: a conversion that was an alias and whose result is returned makes an output that was its source a
            copy: ``"capture"`` does so and lists it in ``returned``, ``"keep"`` leaves it and lists it too.

    Returns:
        The new program.  It shares the parameters, buffers and constants of ``ep``.

    Raises:
        ToMutationError: for an unsafe conversion, with ``on_unsafe="raise"``.
        TypeError: when ``ep`` is not an ExportedProgram.
        ValueError: for a program that has been through ``run_decompositions()``, for a conversion in a place that is
            not understood, and for a bad value of an argument.

    Example:
        >>> import torch
        >>> from dispatch_guard import capture_conversions
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.to("cpu").sin()
        >>> ep = torch.export.export(Model(), (torch.zeros(2),))
        >>> [str(node.target) for node in ep.run_decompositions().graph.nodes if "_to_copy" in str(node.target)]
        []
        >>> captured = capture_conversions(ep)
        >>> [str(node.target) for node in captured.run_decompositions().graph.nodes if "_to_copy" in str(node.target)]
        ['aten._to_copy.default']
    """
    _check_choice("on_unsafe", on_unsafe, get_args(OnUnsafe))
    _check_choice("returned", returned, get_args(Returned))
    _check_program(ep, "capture_conversions")
    reader = _read(ep)
    if reader.violations and on_unsafe == "raise":
        raise ToMutationError(reader.violations[0])
    kept = {id(found) for found in reader.unsafe}
    aliases = [found for found in reader.returned() if id(found) not in kept]
    if returned == "keep":
        kept |= {id(found) for found in aliases}
    new = copy.deepcopy(ep.graph_module)
    twin = _twins(ep.graph_module, new)
    by_node = {found.node: found for found in reader.conversions}
    for found in reader.conversions:
        if id(found) not in kept and found.node.target is not _TO_COPY:
            _capture(twin[found.node], twin[_true_source(found, by_node)], found, found in aliases)
    _refresh(new, set())
    _keep_alive(new)
    for module in _graph_modules(new):
        module.recompile()
    # Containers of its own: passes such as move_to_device_pass put other tensors in.  _update (2.10 to 2.15) validates.
    state, constants = copy.copy(ep.state_dict), copy.copy(ep.constants)
    program = ep._update(new, copy.deepcopy(ep.graph_signature), state_dict=state, constants=constants)
    captured = sum(map(_is_captured, _all_nodes(new)))
    return _wrapped(program, tuple(reader.violations), tuple(found.tag.record() for found in aliases), captured)


def check_program(ep: ExportedProgram) -> list[Violation]:
    """The guard's verdict for an exported program, from its graph alone.

    It finds what guarding the export would have found: every write to the source or the result of a conversion, or to
    anything that shares storage with either, after the conversion, control-flow bodies included.  Places come from
    the graph, so there is no version counter; a graph of non-strict export remembers the lines of ``forward`` only, and
    where those call a function, the place in there is looked up in the source.  Writes that :func:`allow_mutation` let
    through are found as well.

    Args:
        ep: what ``torch.export.export`` returned, or ``torch.export.load``.

    Returns:
        The violations, in the order of the graph.

    Raises:
        TypeError: when ``ep`` is not an ExportedProgram.
        ValueError: for a program that has been through ``run_decompositions()``: that makes all writes pure and drops
            the conversions that changed nothing, so there is nothing left to judge.

    Example:
        >>> import torch
        >>> from dispatch_guard import check_program
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         y = x.to("cpu")
        ...         y.add_(5)
        ...         return x.sin()
        >>> [violation.op for violation in check_program(torch.export.export(Model(), (torch.zeros(2),)))]
        ['aten.add_.Tensor']
    """
    _check_program(ep, "check_program")
    return _read(ep).violations


def count_conversions(ep: ExportedProgram) -> int:
    """How many conversions the graph of ``ep`` holds."""
    return len(_read(ep).conversions)


def export(
    mod: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    on_unsafe: OnUnsafe = "raise",
    returned: Returned = "capture",
    **options: Any,
) -> CapturedProgram:
    """``torch.export.export`` under a guard, with every conversion captured.

    Args:
        mod: the module.
        args: its example inputs.
        kwargs: its example keyword inputs.
        on_unsafe: as for :func:`capture_conversions`; with ``"raise"`` writes under :func:`allow_mutation` are kept.
        returned: as for :func:`capture_conversions`.
        options: of ``torch.export.export``.

    Returns:
        What :func:`capture_conversions` returns.

    Raises:
        ToMutationError: at the first write to a converted tensor, with ``on_unsafe="raise"``.

    Example:
        >>> import torch
        >>> import dispatch_guard
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.float() + 1
        >>> dispatch_guard.export(Model(), (torch.zeros(2),)).captured
        1
    """
    _check_choice("on_unsafe", on_unsafe, get_args(OnUnsafe))
    _check_choice("returned", returned, get_args(Returned))
    with ToMutationGuard(on_violation="raise" if on_unsafe == "raise" else "record") as guard:
        ep = torch.export.export(mod, args, dict(kwargs) if kwargs else None, **options)
    return capture_conversions(ep, on_unsafe="keep" if guard.violations else on_unsafe, returned=returned)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _check_program(ep: object, what: str) -> None:
    if not isinstance(ep, ExportedProgram):
        raise TypeError(f"{what} takes a torch.export.ExportedProgram, not {type(ep).__name__}")
    if ep.dialect != "TRAINING" and not any(map(_is_captured, _all_nodes(ep.graph_module))):
        raise ValueError(
            f"{what} takes a program as torch.export.export makes it; this one has been through run_decompositions() "
            f"(its dialect is {ep.dialect}), which makes writes pure and drops conversions that changed nothing"
        )


def _wrapped(
    ep: ExportedProgram, kept: tuple[Violation, ...], returned: tuple[Conversion, ...], captured: int
) -> CapturedProgram:
    program = CapturedProgram.__new__(CapturedProgram)
    program.__dict__.update(ep.__dict__)
    program.captured, program.kept, program.returned = captured, kept, returned
    return program


# ---- graphs


def _graph_modules(root: fx.GraphModule) -> Iterator[fx.GraphModule]:
    return (module for module in root.modules() if isinstance(module, fx.GraphModule))


def _all_nodes(root: fx.GraphModule) -> Iterator[fx.Node]:
    return itertools.chain.from_iterable(module.graph.nodes for module in _graph_modules(root))


def _twins(old: fx.GraphModule, new: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """The nodes of a program by those that they are copies of."""
    return dict(zip(_all_nodes(old), _all_nodes(new), strict=True))


def _notes(node: fx.Node) -> dict[str, Any]:
    found: dict[str, Any] = (node.meta.get("custom") or {}).get(_KEY) or {}
    return found


def _is_captured(node: fx.Node) -> bool:
    # Nodes that a decomposition makes inherit the notes of the one they come from: only copies count.
    return node.target is _TO_COPY and bool(_notes(node))


def _named(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator's node by the names of its schema."""
    assert isinstance(node.target, OpOverload)
    given = {argument.name: value for argument, value in zip(node.target._schema.arguments, node.args)}
    return {**given, **node.kwargs}


def _values(tree: Any) -> Any:
    return fx.map_arg(tree, lambda node: node.meta.get("val"))


def _bodies(gm: fx.GraphModule, node: fx.Node) -> list[tuple[fx.GraphModule, list[Any]]]:
    """The bodies of a higher-order operator, each with what the node hands it for its placeholders.

    torch's own (cond, while_loop, scan, associative_scan, map, wrap_*, invoke_subgraph, ... in 2.10 to 2.15) take the
    bodies first and then the operands in the order of the placeholders; associative_scan calls its body with two
    elements.  A body with another number of placeholders is called in a way that is not known, and left out.
    """
    bodies: list[fx.GraphModule] = []
    rest: list[Any] = []
    for arg in node.args:
        module = _submodule(gm, arg)
        if module is None:
            rest.append(arg)
        else:
            bodies.append(module)
            rest = []
    operands = [leaf for leaf in pytree.tree_leaves(rest) if leaf is not None and not isinstance(leaf, str)]
    if str(node.target) == "associative_scan":
        operands = [*pytree.tree_leaves(rest[0]), *operands]
    return [(body, operands) for body in bodies if len(_placeholders(body)) == len(operands)]


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def _submodule(gm: fx.GraphModule, arg: Any) -> fx.GraphModule | None:
    if not isinstance(arg, fx.Node) or arg.op != "get_attr":
        return None
    module = operator.attrgetter(str(arg.target))(gm)
    return module if isinstance(module, fx.GraphModule) else None


_READ_STORAGE: Final = ("aten::as_strided", "aten::as_strided_copy")

# ---- reading a graph: which memory each node stands for, what was converted, what is written

Memory = frozenset[int]  # the storages that a tensor, or any of a list of tensors, may live in
Value = Memory | tuple["Value", ...]  # of a node with several results
_NOTHING: Final[Memory] = frozenset()


class _Found(NamedTuple):
    """A conversion in a graph."""

    node: fx.Node
    tag: Tag
    result: Memory
    asked: dict[str, Any]  # the arguments that the user gave, as keyword arguments of _to_copy
    follows: str | None  # the node whose dtype and device were asked for


class _Reader:
    """Runs over a program, with the memory that each node stands for in place of its value."""

    def __init__(self) -> None:
        self.conversions: list[_Found] = []
        self.violations: list[Violation] = []
        self.unsafe: list[_Found] = []
        self.outputs: Memory = _NOTHING
        self._tags: dict[int, list[tuple[_Found, Role]]] = {}  # what each storage has been through
        self._count = itertools.count()
        self._seen: set[fx.GraphModule] = set()
        self._handed: dict[fx.Node, fx.Node] = {}  # what an operator with bodies hands them for their placeholders

    def fresh(self) -> Memory:
        return frozenset([next(self._count)])

    def returned(self) -> list[_Found]:
        """The conversions that were aliases and whose result is an output of the program."""
        return [found for found in self.conversions if not found.tag.copied and found.result & self.outputs]

    def run(self, gm: fx.GraphModule, operands: list[Value]) -> list[Value]:
        env: dict[fx.Node, Value] = {}
        self._seen.add(gm)
        constants: dict[str, Memory] = {}
        inputs = iter(operands)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(inputs, None) or self.fresh()
            elif node.op == "get_attr":
                env[node] = constants.setdefault(str(node.target), self.fresh())
            elif node.op == "call_function":
                env[node] = self._call(gm, node, env)
            elif node.op == "output":
                return [_value_of(env, arg) for arg in pytree.tree_leaves(node.args)]
            else:
                raise ValueError(f"node {node.name} ({node.op}) has no place in an exported program")
        return []

    def _call(self, gm: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Value]) -> Value:
        if node.target is operator.getitem:
            value = _value_of(env, node.args[0])
            index = node.args[1]
            return value[index] if isinstance(value, tuple) and isinstance(index, int) else value
        if not isinstance(node.target, (OpOverload, HigherOrderOperator)):
            return _NOTHING  # arithmetic on sizes
        if not _is_assignment_to_buffer(node) and not self._is_put_back(node, env):
            for name, written in _written(node):
                if not _only_rebinds(node) or self._is_subject(written):
                    self._write(node, name, written, _flat(env[written]))
                if _only_rebinds(node):  # set_(other), .data = other: the object has that memory too, from now on
                    env[written] = frozenset().union(*(_flat(_value_of(env, arg)) for arg in node.args))
        if isinstance(node.target, HigherOrderOperator):
            return self._run_bodies(gm, node, env)
        call = _conversion_call(node)
        if call is None:
            return self._result(node, env)
        return self._convert(node, call, env)

    def _is_subject(self, node: fx.Node) -> bool:
        """Whether the tensor object that ``node`` stands for, and not only its memory, is a side of a conversion."""
        sides = (side for found in self.conversions for side in (found.node, found.node.args[0]))
        return self._object(node) in {self._object(side) for side in sides if isinstance(side, fx.Node)}

    def _object(self, node: fx.Node) -> fx.Node:
        """The node that first stood for a tensor object: an operator in place returns the one that it writes."""
        while True:
            outer = self._handed.get(node) or _written_and_returned(node) or _returned(node)
            if outer is None:
                return node
            node = outer

    def _is_put_back(self, node: fx.Node, env: dict[fx.Node, Value]) -> bool:
        """Whether it is of ``p.data = p.data.to(...)``: both are sides of one conversion."""
        if node.target is not _SET_DATA:
            return False
        one, other = (
            {id(tag[0]) for key in _flat(_value_of(env, arg)) for tag in self._tags.get(key, ())} for arg in node.args
        )
        return bool(one & other) and same_geometry(*_values(node.args))

    def _result(self, node: fx.Node, env: dict[fx.Node, Value]) -> Value:
        """The memory of an operator's results: that of the arguments they alias, or its own."""
        named = _named(node)
        results: list[Memory] = []
        for names in _aliases(node):
            shared = [_flat(_value_of(env, named.get(name))) for name in names]
            results.append(frozenset().union(*shared) if shared else self.fresh())
        return results[0] if len(results) == 1 else tuple(results)

    def _convert(self, node: fx.Node, call: str, env: dict[fx.Node, Value]) -> Memory:
        source = _flat(_value_of(env, node.args[0]))
        captured = node.target is _TO_COPY
        copied = not (_notes(node).get("alias") if captured else any(_aliases(node)))
        result = self.fresh() if copied or captured else source
        via = next((self._tags[key][-1][0].tag for key in sorted(source) if key in self._tags), None)
        found = _found(node, call, copied, result, via)
        self.conversions.append(found)
        sides: list[tuple[Role, Memory]] = [("source", source), ("result", result)]
        for role, memory in sides[1:] if result == source else sides:
            for key in memory:
                self._tags.setdefault(key, []).append((found, role))
        return result

    def _write(self, node: fx.Node, argument: str, written: fx.Node, memory: Memory) -> None:
        tags = [tag for key in sorted(memory) for tag in self._tags.get(key, ())]
        if tags:
            self.unsafe.extend(found for found, _ in tags)
            found, role = tags[-1]
            kind: Kind = "rebind" if node.target is _SET_DATA else "operator"
            call = "Tensor.data" if kind == "rebind" else str(node.target)
            operands = [meta_of(value) for value in _values(node.args) if isinstance(value, torch.Tensor)]
            self.violations.append(
                violation_of(
                    call,
                    argument,
                    meta_of(written.meta["val"]),
                    Side(found.tag, role),
                    _place(node),
                    operands if kind == "operator" else (),
                    kind=kind,
                )
            )

    def _run_bodies(self, gm: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Value]) -> Value:
        results: list[list[Value]] = []
        for module, operands in _bodies(gm, node):
            handed = zip(_placeholders(module), operands)
            self._handed.update((inner, outer) for inner, outer in handed if isinstance(outer, fx.Node))
            results.append(self.run(module, [_value_of(env, operand) for operand in operands]))
        merged = (
            frozenset().union(*map(_flat, values)) for values in itertools.zip_longest(*results, fillvalue=_NOTHING)
        )
        return tuple(memory | self.fresh() for memory in merged) or self.fresh()

    def check_all_seen(self, root: fx.GraphModule) -> None:
        for module in _graph_modules(root):
            node = next(filter(_matters, module.graph.nodes), None)
            if module not in self._seen and node is not None:
                raise ValueError(
                    f"{node.target} is in the body of an operator that is not known to call its body with its own "
                    f"operands, so it cannot be followed{_at(node)}"
                )


@_compat.no_modes()
def _read(ep: ExportedProgram) -> _Reader:
    reader = _Reader()
    shared: dict[int, Memory] = {}
    operands: list[Value] = []
    for spec in ep.graph_signature.input_specs:
        held = ep.state_dict.get(spec.target or "", ep.constants.get(spec.target or ""))
        keys = keys_of(held) if isinstance(held, torch.Tensor) else []
        for key in keys:
            shared.setdefault(key, reader.fresh())  # tied parameters share theirs
        operands.append(frozenset().union(*(shared[key] for key in keys)) if keys else reader.fresh())
    with _fake_mode(ep.graph_module):
        outputs = reader.run(ep.graph_module, operands)
    reader.check_all_seen(ep.graph_module)
    reader.outputs = frozenset().union(*map(_flat, outputs))
    return reader


def _flat(value: Value) -> Memory:
    return value if isinstance(value, frozenset) else frozenset().union(*map(_flat, value))


def _value_of(env: dict[fx.Node, Value], arg: Any) -> Value:
    if isinstance(arg, fx.Node):
        return env[arg]
    if isinstance(arg, (list, tuple)):
        return frozenset().union(*(_flat(_value_of(env, item)) for item in arg))
    return _NOTHING


def _matters(node: fx.Node) -> bool:
    operator_node = isinstance(node.target, (OpOverload, HigherOrderOperator))
    return operator_node and (_conversion_call(node) is not None or bool(_written(node)))


def _written(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """The arguments that an operator's node writes, by name: its values stand for the nodes."""
    if node.target is _SET_DATA:
        return [("self", node.args[0])] if isinstance(node.args[0], fx.Node) else []
    if node.target is DETACH:
        return []
    by_value = {id(source.meta.get("val")): source for source in node.all_input_nodes}
    found = written_arguments(node.target, _values(node.args), _values(node.kwargs))
    return [(name, by_value[id(tensor)]) for name, tensor in found if id(tensor) in by_value]


def _only_rebinds(node: fx.Node) -> bool:
    return node.target is _SET_DATA or rebinds(node.target)


def _written_and_returned(node: fx.Node) -> fx.Node | None:
    """What an operator in place writes and returns."""
    if not isinstance(node.target, OpOverload) or write_plan(node.target) is None:
        return None
    returns = node.target._schema.returns
    written = _written(node)
    in_place = len(written) == 1 and len(returns) == 1 and returns[0].alias_info is not None
    return written[0][1] if in_place else None


def _returned(node: fx.Node) -> fx.Node | None:
    """The argument that an operator made of others gives back as it is: ``contiguous``, ``atleast_1d``, ``real``."""
    if not isinstance(node.target, OpOverload) or not _is_composite(node.target) or write_plan(node.target) is not None:
        return None
    result = _run(node)
    return next((source for source in node.all_input_nodes if source.meta.get("val") is result), None)


def _is_assignment_to_buffer(node: fx.Node) -> bool:
    """Whether ``node`` is the copy at the end by which non-strict export records ``self.buffer = value``.

    It takes over the metadata of ``value`` (torch/export/_trace.py, 2.10 to 2.15); the user wrote no such operator.
    """
    if node.target is not torch.ops.aten.copy_.default or len(node.args) != 2:
        return False
    target, value = node.args
    return (
        isinstance(target, fx.Node)
        and isinstance(value, fx.Node)
        and target.op == "placeholder"
        and not node.users
        and node.meta.get("torch_fn") is not None
        and node.meta.get("torch_fn") == value.meta.get("torch_fn")
    )


# Operators with a kernel of their own whose results alias their argument though their schema says they don't
# (aten/src/ATen/native/TensorShape.cpp; found by running every operator on the samples of torch's op_db, 2.13).
_UNTOLD_VIEWS: Final = ("aten::unsafe_split", "aten::unsafe_split_with_sizes")


def _aliases(node: fx.Node) -> list[list[str]]:
    """For each result of an operator, the arguments that it shares memory with.

    A schema tells for an operator with a kernel of its own.  One that is made of others (reshape, contiguous, dropout,
    to, ...) may do either: it is run on the fake values of its arguments, by its C++ kernel as in eager (torch's Python
    decomposition of dropout copies where that one aliases: 2.10 to 2.15).
    """
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema
    told = [[a.name for a in schema.arguments if _alias_set(a) & _alias_set(r)] for r in schema.returns]
    if not _is_composite(node.target) or write_plan(node.target) is not None:
        return told
    return _aliases_as_run(node) or told


def _alias_set(argument: Any) -> set[str]:
    """The names by which a schema ties an argument or a result to others: those of a list of views are wildcards."""
    info = argument.alias_info
    return set() if info is None else (info.before_set | info.after_set) or {"*"}


def _is_composite(op: OpOverload) -> bool:
    return op._schema.name in _UNTOLD_VIEWS or torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )


def _aliases_as_run(node: fx.Node) -> list[list[str]] | None:
    named = {name: _values(value) for name, value in _named(node).items()}
    result = _run(node)
    if result is None:
        return None
    keys = {name: _keys(value) for name, value in named.items()}
    assert isinstance(node.target, OpOverload)
    results = result if len(node.target._schema.returns) > 1 else [result]
    return [[name for name, own in keys.items() if own & _keys(value)] for value in results]


def _keys(value: Any) -> set[int]:
    return {key for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) for key in keys_of(leaf)}


def _run(node: fx.Node) -> Any:
    """What an operator's node gives for the fake values of its arguments; ``None`` where they can't tell."""
    assert isinstance(node.target, OpOverload)
    try:
        return node.target(*_values(node.args), **_values(node.kwargs))
    except Exception:  # whatever a kernel for fake tensors raises: the schema has to do
        return None


@contextlib.contextmanager
def _fake_mode(gm: fx.GraphModule) -> Iterator[None]:
    """The fake mode of a program's values, leaving no trace in its shape environment."""
    values = (leaf for node in _all_nodes(gm) for leaf in pytree.tree_leaves(node.meta.get("val")))
    mode: FakeTensorMode | None = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if mode is not None:
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
                stack.enter_context(mode.shape_env.suppress_guards())
            stack.enter_context(mode)
        yield


# ---- conversions in a graph

_FUNCTIONS: Final = {name: function for function, name in CONVERSIONS.items()}
_FUNCTION_KINDS: Final = {  # what torch_fn calls the type of a function, and the namespace that we show for it
    "method_descriptor": "Tensor",
    "builtin_function_or_method": "torch",
    "OpOverloadPacket": "aten",
    "OpOverload": "aten",
}


def _conversion_call(node: fx.Node) -> str | None:
    """The spelling of the conversion that a node records; ``None`` when it is none, or none that a user wrote."""
    if node.target is _TO_COPY:
        return _notes(node).get("call")
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    packet, overload = node.target._schema.name.removeprefix("aten::"), node.target._overloadname
    if packet not in OPERATORS or _named(node).get("copy"):
        return None
    if is_of_numpy(node):
        return None
    # torch_fn is the outermost function of torch that was called: F.multi_head_attention_forward is no user's to().
    kind, _, name = (node.meta.get("torch_fn") or ("", ""))[1].partition(".")
    if not name:
        return f"aten.{packet}.{overload}"
    call = f"{_FUNCTION_KINDS.get(kind, kind)}.{name}"
    return call if call in _FUNCTIONS else None


def _found(node: fx.Node, call: str, copied: bool, result: Memory, via: Tag | None) -> _Found:
    source, value = _values(node.args[0]), node.meta["val"]
    other = _named(node).get("other")
    if node.target is _TO_COPY:
        asked, follows = dict(node.kwargs), _notes(node).get("follows")
    else:
        asked, follows = _asked(node, call), other.name if isinstance(other, fx.Node) else None
    args, kwargs = ((source,), asked) if other is None else ((source, _values(other)), {})
    return _Found(
        node, Tag(_FUNCTIONS[call], args, kwargs, source, value, copied, _place(node), via), result, asked, follows
    )


def _asked(node: fx.Node, call: str) -> dict[str, Any]:
    """The arguments that the user gave, as keyword arguments of ``_to_copy``: without what torch fills in."""
    source, result = _values(node.args[0]), node.meta["val"]
    named = _named(node)
    asked = {
        name: named[name]
        for name in ("dtype", "layout", "device", "non_blocking", "memory_format")
        if named.get(name) not in (None, False)
    }
    if named.get("other") is not None:
        asked.update(dtype=result.dtype, device=result.device)
    elif isinstance(node.target, OpOverload) and node.target._schema.name.startswith("aten::_cast_"):
        asked["dtype"] = result.dtype
    # From the source (THPVariable_to in tools/autograd/templates/python_variable_methods.cpp; as_tensor's defaults).
    filled: list[str] = []
    if call.startswith("torch."):
        filled = ["dtype", "layout", "device"]
    elif call.startswith("Tensor.") and node.target is torch.ops.aten.to.dtype_layout:
        filled = ["dtype", "layout"] + ["device"] * ("memory_format" in asked)
    return {name: value for name, value in asked.items() if name not in filled or value != getattr(source, name)}


# ---- places


def _place(node: fx.Node) -> Place | None:
    return place_of_node(node, [])


def _at(node: fx.Node) -> str:
    place = _place(node)
    site = place.site() if place else None
    return f" ({site.filename}:{site.lineno})" if site else ""


# ---- capturing


def _capture(node: fx.Node, source: fx.Node, found: _Found, returned: bool) -> None:
    """Turn a conversion's node into a ``_to_copy`` of ``source``; its name, and with it the signature, stays."""
    notes: dict[str, Any] = {"call": found.tag.record().call, "alias": not found.tag.copied}
    notes["asked"] = {name: str(value).removeprefix("torch.") for name, value in found.asked.items()}
    if found.follows:
        notes["follows"] = found.follows
    if returned:
        notes["returned"] = "an alias of its source in the exported program, here a copy"
    kwargs = dict(found.asked)
    if "dtype" not in kwargs:
        # Without a dtype or a memory format, fake tensors take a _to_copy to the device they are on for their argument
        # itself, strides and all (torch/_decomp/decompositions.py, 2.10 to 2.15).
        kwargs.setdefault("memory_format", torch.preserve_format)
    node.target, node.args, node.kwargs = _TO_COPY, (source,), kwargs
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _KEY: notes}


def _true_source(found: _Found, by_node: dict[Any, _Found]) -> Any:
    """What the user converted: tracing takes a tensor and the result of a conversion that changed nothing for one.

    After ``a = x.to("cpu")`` the graph has ``a`` wherever the user wrote ``x``.  For conversions the source text tells
    them apart, where both are in one call of a function in which ``x`` is one variable with one value: ``x.double()``
    is of what the earlier one converted, ``a.double()`` of its result.  Anything else stays as it was traced.
    """
    conversion, traced = found.tag.record(), found.node.args[0]
    name = conversion.expression
    if conversion.site is None or not is_bound_once(name, conversion.site):
        return traced
    source = traced
    while (earlier := by_node.get(source)) is not None and not earlier.tag.copied:
        record = earlier.tag.record()
        if not _is_before(record.site, conversion.site) or not _in_one_call(earlier.node, found.node):
            break
        if name == record.target:
            return source
        if name == record.expression:
            return _true_source(earlier, by_node)
        source = earlier.node.args[0]
    return traced


def _in_one_call(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes come from one call of a function, as far as their metadata tells."""
    modules = [list(node.meta.get("nn_module_stack") or ()) for node in (one, other)]
    callers = [_STACK_FRAME.findall(node.meta.get("stack_trace") or "")[:-1] for node in (one, other)]
    return modules[0] == modules[1] and callers[0] == callers[1]


def _is_before(one: Site | None, other: Site | None) -> bool:
    """Whether one place comes before another in the same function."""
    if one is None or other is None or (one.filename, one.function) != (other.filename, other.function):
        return False
    return (one.lineno, one.col or 0) < (other.lineno, other.col or 0)


@_compat.no_modes()
def _refresh(gm: fx.GraphModule, stale: set[fx.Node]) -> None:
    """Bring ``val`` up to date: a copy of memory with gaps or overlaps has strides of its own, an alias has not."""
    with _fake_mode(gm), enable_python_dispatcher():
        _refresh_graph(gm, stale)


def _refresh_graph(gm: fx.GraphModule, stale: set[fx.Node]) -> None:
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        reads_stale = any(source in stale for source in node.all_input_nodes)
        if isinstance(node.target, HigherOrderOperator):
            _refresh_bodies(gm, node, stale)
        elif reads_stale and node.target is operator.getitem:
            _update_value(node, _values(node.args[0])[node.args[1]], stale)
        elif _reads_around(node, reads_stale):
            raise ValueError(
                f"{node.target} reads memory beside what was converted, which a copy has not{_at(node)}; "
                "convert what it returns instead"
            )
        elif isinstance(node.target, OpOverload) and (_is_captured(node) or reads_stale) and _can_run(node):
            args, kwargs = _detached(_values(node.args)), _detached(_values(node.kwargs))
            try:
                value = node.target(*args, **kwargs)
            except Exception as error:
                raise ValueError(
                    f"{node.target} cannot take the copy of a converted tensor, whose strides differ from those of "
                    f"the alias it had{_at(node)}: {error}"
                ) from error
            _update_value(node, value, stale)


def _refresh_bodies(gm: fx.GraphModule, node: fx.Node, stale: set[fx.Node]) -> None:
    values = node.meta.get("val")
    for module, operands in _bodies(gm, node):
        inner: set[fx.Node] = set()
        for placeholder, operand in zip(_placeholders(module), operands):
            if (
                isinstance(operand, fx.Node)
                and operand in stale
                and _similar(placeholder.meta["val"], _values(operand))
            ):
                _update_value(placeholder, _values(operand), inner)
        _refresh_graph(module, inner)
        results = pytree.tree_leaves(next(iter(reversed(module.graph.nodes))).args)
        if isinstance(values, (tuple, list)) and len(values) == len(results):
            changed = [result in inner and _similar(old, _values(result)) for old, result in zip(values, results)]
            new = [_values(result) if is_new else old for old, result, is_new in zip(values, results, changed)]
            values = type(values)(new)
    _update_value(node, values, stale)


def _similar(old: Any, new: Any) -> bool:
    """Whether two tensors differ in their strides at most; a loop's body sees a slice of its operand."""
    tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    return tensors and old.dtype == new.dtype and str(tuple(old.shape)) == str(tuple(new.shape))


def _update_value(node: fx.Node, value: Any, stale: set[fx.Node]) -> None:
    changed = _layout_of(node.meta.get("val")) != _layout_of(value)
    if changed:
        stale.add(node)
    if changed or _is_captured(node):  # a copy's value must not be that of its source
        node.meta["val"] = value
        if "tensor_meta" in node.meta:
            node.meta["tensor_meta"] = pytree.tree_map_only(torch.Tensor, _extract_tensor_metadata, value)


def _layout_of(value: Any) -> list[str]:
    """All that a copy may change, as text: symbols print as what they are."""
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [f"{tuple(leaf.shape)} {_memory_of(leaf)} {leaf.dtype} {leaf.device}" for leaf in leaves]


def _memory_of(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    return f"{tuple(tensor.stride())} {tensor.storage_offset()}"


def _reads_around(node: fx.Node, reads_stale: bool) -> bool:
    """Whether ``node`` looks at memory beside a copy: strides and offsets count from the start of a storage."""
    if not isinstance(node.target, OpOverload) or node.target._schema.name not in _READ_STORAGE:
        return False
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and source.args and not _is_captured(source):
        source = source.args[0]
    if not isinstance(source, fx.Node) or not _is_captured(source):
        return False
    result, copy = node.meta["val"], source.meta["val"]
    reach = result.storage_offset() + sum((size - 1) * step for size, step in zip(result.shape, result.stride()))
    return reads_stale or not guard_or_false(reach < copy.numel())


def _detached(tree: Any) -> Any:
    """Tensors of their own, so that an operator in place does not change the metadata of another node's value."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def _can_run(node: fx.Node) -> bool:
    """Whether the values of a node's arguments tell that of its result.

    The body of associative_scan has tensors that vmap left behind for values, and an operator whose result's size only
    data tell would make another symbol for it.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(_values([node.args, node.kwargs])) if isinstance(leaf, torch.Tensor)]
    return all(isinstance(tensor, FakeTensor) for tensor in tensors) and not node.meta.get("unbacked_bindings")


def _keep_alive(gm: fx.GraphModule) -> None:
    """Give captured conversions that lead nowhere a user that no pass drops: what torch asserts about their sources."""
    for module in _graph_modules(gm):
        live: set[fx.Node] = set()
        for node in reversed(list(module.graph.nodes)):
            used = any(user in live for user in node.users)
            if _is_captured(node) and not used:
                _assert_metadata(module.graph, node)
            elif not used and not _has_effect(node):
                continue
            live.add(node)


def _has_effect(node: fx.Node) -> bool:
    """Whether ``node`` stays though nobody uses it; a write may turn out to be to memory that nobody reads."""
    write = isinstance(node.target, OpOverload) and write_plan(node.target) is not None
    return node.op == "output" or (node.is_impure(impure_random=False) and not write)


def _assert_metadata(graph: fx.Graph, node: fx.Node) -> None:
    value = node.meta["val"]
    metadata = {"dtype": value.dtype, "device": value.device, "layout": value.layout}
    with graph.inserting_after(node):
        check = graph.call_function(torch.ops.aten._assert_tensor_metadata.default, (node,), metadata)
    meta = {key: value for key, value in node.meta.items() if key not in ("tensor_meta", "custom")}
    check.meta = {**meta, "val": None}
