"""Private names of torch that the guard needs, each with the versions it was seen in and why it is needed.

What differs between the versions that are supported (2.10 to 2.15; the test suite ran on 2.10.0, 2.12.1, 2.13.0 and
2.15.0), and where it is dealt with:

======  ==========================================================  ===================================================
up to   what                                                        where
======  ==========================================================  ===================================================
2.10    Dynamo reads a variable of the process in place of asking   ``_dynamo_as_of_2_12``
        each mode, and shows the frame of a function mode
2.10    no flag says that bodies of control flow are compiled       ``in_higher_order_compile``
2.12    an export that raises leaves a hook for buffers behind      ``remembered_state``, tests/conftest.py
2.10    Dynamo runs no function mode on its fake tensors            ``sites.is_of_numpy``, by the graph
2.10    no stack trace for ``addcmul_(value=)`` in strict export    the place and the name are not known
2.10    leaving the last transform of functorch raises              ``remembered_state``
2.10    ``InstanceNorm`` writes its statistics in eval mode too     a violation, as it is a write
2.14    ``y[0] = 3.0`` is a ``copy_``; since 2.15 a ``fill_``         nowhere: it is what torch runs
2.10    no columns in the stack traces of graphs                    ``source``, by the line
======  ==========================================================  ===================================================
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# The address of a tensor's StorageImpl, without making a Python storage (2.10, 2.13, 2.15).
storage_address: Any = getattr(torch._C, "_storage_address")  # noqa: B009  # it is in no stub

# Off switches as context managers (2.10, 2.13, 2.15): our own look at a tensor must reach no mode and no subclass.
no_torch_dispatch = torch._C._DisableTorchDispatch
no_torch_function = torch._C.DisableTorchFunction

# Raw pushes and pops of the two mode stacks (2.10, 2.13, 2.15).
subclasses_enabled = (
    torch._C._is_torch_function_enabled
)  # whether __torch_function__ of subclasses is (2.10, 2.13, 2.15)
push_function_mode = torch._C._push_on_torch_function_stack
pop_function_mode = torch._C._pop_torch_function_stack
function_stack_depth = torch._C._len_torch_function_stack
push_dispatch_mode = torch._C._push_on_torch_dispatch_stack
pop_dispatch_mode = torch._C._pop_torch_dispatch_stack
dispatch_stack_depth = torch._C._len_torch_dispatch_stack

_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_functorch_get_unwrapped = torch._C._functorch.get_unwrapped


def functorch_unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside every layer that vmap, grad and their like have put around it (2.10, 2.13, 2.15)."""
    while _is_functorch_wrapped(tensor):
        tensor = _functorch_get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def _dynamo_as_of_2_12() -> Iterator[None]:
    """Let Dynamo ask the modes whether it may compile a frame, and hide our function mode, as it does in 2.12.

    In 2.10 it looks at a variable of the process, which each mode sets as it is entered; and the frame of
    our function mode, which Dynamo traces through, is in the stack traces of its graphs.
    """
    if hasattr(_python_dispatch, "any_torch_dispatch_mode_on_stack"):
        yield
        return
    from torch.fx.experimental.symbolic_shapes import uninteresting_files

    uninteresting_files().add(os.path.join(os.path.dirname(__file__), "conversions.py"))  # one set for the process

    convert_frame: Any = importlib.import_module("torch._dynamo.convert_frame")
    inner: Any = convert_frame.should_skip_due_to_torch_dispatch_mode

    def should_skip() -> bool:
        modes = [mode for mode in dispatch_modes() if not mode.is_infra_mode()]
        return any(not mode.ignore_compile_internals() for mode in modes) if modes else bool(inner())

    convert_frame.should_skip_due_to_torch_dispatch_mode = should_skip
    try:
        yield
    finally:
        convert_frame.should_skip_due_to_torch_dispatch_mode = inner


class _ProcessFlags:
    """torch keeps whether any dispatch mode is active in variables of the whole process (2.10, 2.13, 2.15).

    Each mode restores on leaving what it found on entering (torch/utils/_python_dispatch.py), so that modes which
    overlap, in two threads or in one, leave them wrong.  Guards do not: while one is on they are set, and the last to
    leave restores what the first found.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guards = 0
        self._names = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]
        self._found: dict[str, bool] = {}
        self._adapted = contextlib.ExitStack()

    def enter(self) -> None:
        with self._lock:
            if self._guards == 0:
                self._found = {name: getattr(_python_dispatch, name) for name in self._names}
                self._adapted = contextlib.ExitStack()
                self._adapted.enter_context(_dynamo_as_of_2_12())
            self._guards += 1

    def leave(self) -> None:
        with self._lock:
            self._guards -= 1
            if self._guards == 0:
                self._adapted.close()
            flags = dict.fromkeys(self._names, True) if self._guards else self._found
            vars(_python_dispatch).update(flags)
            # Dynamo's guards read a copy of this one (2.10, 2.13, 2.15).
            torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals(
                flags["_is_in_any_mode_without_ignore_compile_internals"]
            )


process_flags = _ProcessFlags()


def functorch_depth() -> int:
    """How many transforms (vmap, grad, ...) are at work on this thread (2.10, 2.13, 2.15)."""
    return torch._C._functorch.get_dynamic_layer_stack_depth()


def remembered_state() -> Callable[[], None]:
    """What an exception may leave changed on its way out of torch; returns what puts it right (2.10, 2.13, 2.15).

    A graph of Dynamo's enters and leaves transforms by plain calls, with no try and finally; torch cleans up after
    compiled functions in the same way (torch/_dynamo/eval_frame.py), but not after the graphs that strict export runs.
    Up to 2.12 an export that raises leaves its hook for assignments to buffers behind (torch/export/_trace.py).
    """
    depth, autograd = functorch_depth(), torch._C._autograd
    message = autograd._saved_tensors_hooks_get_disabled_error_message()
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    before = set(hooks)

    def restore() -> None:
        if functorch_depth() > depth:
            with contextlib.suppress(RuntimeError):  # 2.10 leaves them, and then looks for one below the last
                torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if message is None and autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            autograd._saved_tensors_hooks_enable()
        for name in [name for name in hooks if name not in before]:
            if getattr(hooks[name], "__name__", "") == "_map_assigned_buffer_to_proxy":
                del hooks[name]

    return restore


def top_dispatch_mode() -> TorchDispatchMode | None:
    depth = dispatch_stack_depth()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def dispatch_modes() -> list[TorchDispatchMode]:
    return [torch._C._get_dispatch_stack_at(i) for i in range(dispatch_stack_depth())]


def function_modes() -> list[TorchFunctionMode]:
    return [torch._C._get_function_stack_at(i) for i in range(function_stack_depth())]


# The modes at the PreDispatch key; asking the dispatcher whether it is included takes ten times as long.
_PRE_DISPATCH_MODES: list[Any] = vars(torch._ops._mode_stack_state_for_pre_dispatch)[
    "_ModeStackStateForPreDispatch__infra_modes"
]
_INFRA_KEYS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def is_tracing() -> bool:
    """Whether export, compile, make_fx or a fake-tensor mode is at work on this thread (2.10, 2.13, 2.15)."""
    if torch.compiler.is_compiling() or _PRE_DISPATCH_MODES[0] is not None or _PRE_DISPATCH_MODES[1] is not None:
        return True
    return dispatch_stack_depth() > 0 and any(torch._C._get_dispatch_mode(key) is not None for key in _INFRA_KEYS)


def in_higher_order_compile() -> bool:
    """Whether Dynamo is compiling the bodies of a control-flow operator (the flag: 2.12, 2.13, 2.15).

    torch.cond, while_loop and their like compile their bodies themselves outside of Dynamo, and set this flag meanwhile
    (torch/_higher_order_ops/utils.py, ``setup_compilation_env``).
    """
    from torch._higher_order_ops import utils

    if hasattr(utils, "_hop_compile_tls"):
        return bool(getattr(utils._hop_compile_tls, "in_hop_compile", False))
    return bool(torch._dynamo.config.allow_empty_graphs)  # set in the same place in 2.10, and off by default


def accept_uncompiled(count: int = 0) -> int:
    """Let ``torch.compile(fullgraph=True)`` run as plain Python; returns what to call this with to undo it (2.13-2.15).

    Dynamo leaves every frame as it is while a mode like ours is active, and a compiled function with ``fullgraph=True``
    then raises "found no compiled frames", unless this counter says that it is nested in another one.  torch does the
    same for the bodies of control-flow operators (torch/_higher_order_ops/utils.py, ``_hop_compile_and_call``).
    """
    set_count: Any = getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    return -1 if set_count is None else int(set_count(count))


def code_being_compiled() -> CodeType | None:
    """The code of the frame that Dynamo asks the modes about, within ``ignore_compile_internals`` (2.10 to 2.15)."""
    frame = sys._getframe(1)
    for _ in range(6):
        candidate = frame.f_locals.get("frame")
        if isinstance(getattr(candidate, "f_code", None), CodeType) and frame.f_code.co_name == "__call__":
            return candidate.f_code  # type: ignore[union-attr,no-any-return]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def compile_again(codes: Iterable[CodeType]) -> None:
    """Let Dynamo look again at code it has left alone because of a mode (2.10 to 2.15).

    It marks such code to be skipped for good (torch/_dynamo/types.py, ``ConvertFrameReturn``), as it does under any
    dispatch mode; what was compiled before stays.
    """
    eval_frame: Any = torch._C._dynamo.eval_frame
    default = eval_frame._FrameExecStrategy(eval_frame._FrameAction.DEFAULT, eval_frame._FrameAction.DEFAULT)
    for code in codes:
        eval_frame.set_code_exec_strategy(code, default)


def leave_to_python(function: Any) -> None:
    """Keep Dynamo from compiling ``function``, and what it calls, when it meets it running (2.10 to 2.15).

    torch wraps every ``__torch_dispatch__`` for that (torch/utils/_python_dispatch.py, ``_should_skip_dynamo``), at a
    cost for each operator; a mark on the code has none.
    """
    eval_frame: Any = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def hop_rule(hop: Any, mode: TorchDispatchMode) -> Any:
    """The rule by which ``mode`` handles the higher-order operator ``hop``, or ``None`` (2.10 to 2.15)."""
    return getattr(hop, "python_key_table", {}).get(type(mode))


def traced_results(hop: Any, args: tuple[Any, ...], result: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the traced bodies of a control-flow operator return, each with the operator's result that stands for it.

    Those of scan that are stacked, and all of map and associative_scan, are copies of what the body returned.
    (make_fx keeps the fake tensors of a trace, or aliases of them, in ``node.meta["val"]``: 2.10 to 2.15.)
    """
    returned = list(pytree.tree_leaves(result))
    bodies = {"cond": args[1:3], "while_loop": args[1:2], "scan": args[:1]}.get(hop.name(), ())
    if hop.name() == "scan":
        returned = returned[: len(args[1])]  # the carries
    for body in bodies:
        if isinstance(body, torch.fx.GraphModule):
            output = next(iter(reversed(body.graph.nodes)))
            for node, tensor in zip(pytree.tree_leaves(output.args), returned):
                value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
                if isinstance(value, torch.Tensor) and isinstance(tensor, torch.Tensor):
                    yield value, tensor


def dispatch_hop(hop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``hop(*args, **kwargs)`` from below ``__torch_function__`` on (HigherOrderOperator.__call__, 2.10 to 2.15)."""
    keys = torch._ops._compute_keyset(args, kwargs, hop.non_fallthrough_keys)
    return hop.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)


def functionalizing() -> bool:
    """Whether torch.func.functionalize is among the transforms at work (2.10 to 2.15).

    It makes writes pure before any dispatch mode sees them.
    """
    if not functorch_depth():
        return False
    functionalize = torch._C._functorch.TransformType.Functionalize
    return any(interpreter.key() == functionalize for interpreter in torch._C._functorch.get_interpreter_stack() or ())


def count_writes(tensor: torch.Tensor) -> int:
    """How often what functionalize() has put around a tensor's memory was written (2.10 to 2.15)."""
    while _is_functorch_wrapped(tensor):
        if torch._C._functorch.is_functionaltensor(tensor):
            return int(torch._functionalize_mutation_counter(tensor))
        tensor = _functorch_get_unwrapped(tensor)
    return 0


def operator_run_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator that a method or function which writes in place runs, or its name if that can't be told (2.10-2.15).

    ``aten.add_.Tensor`` for ``Tensor.add_`` of a tensor.
    """
    if isinstance(func, torch._ops.OpOverload):
        return func
    own = str(getattr(func, "__name__", func))
    name = f"{own[3:-2]}_" if own.startswith("__i") and own.endswith("__") else own
    name = {"truediv_": "div_", "floordiv_": "floor_divide_", "mod_": "remainder_"}.get(name, name)
    given = {key: value for key, value in kwargs.items() if key != "inplace"}
    if "out" not in kwargs and not name.endswith("_"):  # F.relu(x, inplace=True)
        name, args = f"{name}_", args[:1]
    try:
        overload = torch._C._jit_resolve_packet(f"aten::{name}", *args, **given)
    except RuntimeError:
        return f"Tensor.{own}"
    return getattr(getattr(torch.ops.aten, name), overload or "default")


_AUTOCAST_KEYS = [key for name, key in vars(torch._C.DispatchKey).items() if name.startswith("Autocast")]
_AUTOCAST = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, _AUTOCAST_KEYS))
_FALLTHROUGH = [torch._C.DispatchKey.BackendSelect, torch._C.DispatchKey.ADInplaceOrView, *_AUTOCAST_KEYS]


def dispatch_overload(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` from below ``__torch_function__`` on, as the dispatcher does it (2.10 to 2.15)."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        overload = torch._C._jit_resolve_packet(func._qualified_op_name, *args, **kwargs)
        func = getattr(func, overload or "default")
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    keys = functools.reduce(
        operator.or_, map(torch._C._dispatch_keys, tensors), torch._C._dispatch_tls_local_include_set()
    )
    keys = keys - torch._C._dispatch_tls_local_exclude_set()
    for key in _FALLTHROUGH:  # redispatch() must not be given those that it would have to skip
        if keys.has(key) and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            keys = keys.remove(key)
    return func.redispatch(keys, *args, **kwargs)


def can_dispatch_overload(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether :func:`dispatch_overload` can run this call: traced without tensors, only the dispatcher can."""
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return not is_tracing() or any(True for _ in tensors)


def defining_module(func: Any) -> str:
    """The module whose function torch.library.custom_op made the operator ``func`` of, or ``""`` (2.10, 2.13, 2.15)."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(func._schema.name)
    return getattr(getattr(definition, "_init_fn", None), "__module__", "")


def can_run_kernel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether below the mode at hand nothing but the kernel is left: no mode, no subclass, a tensor to choose it by."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
    return bool(tensors) and plain and not functorch_depth()


def autocast_state() -> Any:
    """The autocast keys that are turned off; a dispatch mode's handler finds all of them so (2.10 to 2.15)."""
    return torch._C._dispatch_tls_local_exclude_set() & _AUTOCAST


def run_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: Any) -> Any:
    """``func(*args, **kwargs)`` from below the modes on, so that they can be on while the kernel runs (2.10 to 2.15).

    ``autocast`` is what :func:`autocast_state` was as ``func`` was called.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    excluded = torch._C._dispatch_tls_local_exclude_set()
    keys = functools.reduce(operator.or_, map(torch._C._dispatch_keys, tensors))
    keys = (keys & torch._C._after_autograd_keyset) - excluded
    if autocast is not None:
        excluded = (excluded - _AUTOCAST) | autocast
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return func.redispatch(keys, *args, **kwargs)


@contextlib.contextmanager
def pushed_dispatch_mode(mode: TorchDispatchMode) -> Iterator[None]:
    push_dispatch_mode(mode)
    try:
        yield
    finally:
        pop_dispatch_mode(None)


@contextlib.contextmanager
def popped_dispatch_mode() -> Iterator[TorchDispatchMode]:
    mode = pop_dispatch_mode(None)
    try:
        yield mode
    finally:
        push_dispatch_mode(mode)


@contextlib.contextmanager
def pushed_function_mode(mode: TorchFunctionMode) -> Iterator[None]:
    push_function_mode(mode)
    try:
        yield
    finally:
        pop_function_mode()


@contextlib.contextmanager
def _on_top(mode: Any, modes: list[Any], push: Callable[[Any], None], pop: Callable[[], Any]) -> Iterator[bool]:
    position = next((index for index, other in enumerate(modes) if other is mode), None)
    above = [] if position is None else [pop() for _ in modes[position + 1 :]]
    if position is None:
        push(mode)
    try:
        yield position is not None
    finally:
        for other in reversed(above):
            push(other)


def dispatch_mode_on_top(mode: TorchDispatchMode) -> contextlib.AbstractContextManager[bool]:
    """``mode`` as the one that leaving a mode takes off; yields whether it was still on the stack.

    A mode's ``__exit__`` takes off whichever is on top, which is another one where two overlap.
    """
    return _on_top(mode, dispatch_modes(), push_dispatch_mode, lambda: pop_dispatch_mode(None))


def function_mode_on_top(mode: TorchFunctionMode) -> contextlib.AbstractContextManager[bool]:
    """The same for function modes."""
    return _on_top(mode, function_modes(), push_function_mode, pop_function_mode)


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """Work of our own, seen by no mode and no subclass (``_disable_current_modes``: 2.10, 2.13, 2.15)."""
    with _python_dispatch._disable_current_modes(), no_torch_function():
        yield


@contextlib.contextmanager
def lowest_function_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """``mode`` on the stack below all others."""
    others = function_modes()
    for _ in others:
        pop_function_mode()
    for other in (mode, *others):
        push_function_mode(other)
    try:
        yield
    finally:
        for _ in range(len(others) + 1):
            pop_function_mode()
        for other in others:
            push_function_mode(other)


def refused_swap(exc: BaseException) -> list[tuple[torch.Tensor, FrameType]]:
    """The tensors of a torch.utils.swap_tensors call that ended in ``exc``, with its frame (2.10, 2.13, 2.15).

    It reaches no mode, and it refuses tensors that have weak references, as all those in our ledger do.
    """
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code is not torch.utils.swap_tensors.__code__:
        return []
    return [(trace.tb_frame.f_locals[name], trace.tb_frame) for name in ("t1", "t2")]


@functools.cache
def without_override(func: Any) -> Any:
    """The body of a function of torch written in Python, without its look for ``__torch_function__`` (2.10 to 2.15)."""
    answers = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    body = FunctionType(func.__code__, {**func.__globals__, **answers}, func.__name__, func.__defaults__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def in_compiled_call() -> bool:
    """Whether a function made by torch.compile is running on this thread, though Dynamo left it as plain Python."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def dynamo_output(context: Any) -> Any:
    """The graph that Dynamo is making, from what it hands a comptime callback (_dynamo/comptime.py, 2.10 to 2.15).

    It is a new object whenever Dynamo starts over; its ``add_cleanup_hook`` runs a function when it is done or dropped.
    """
    return context._ComptimeContext__tx.output


_NOTES = "dispatch_guard"  # our key in node.meta; torch hands on those that it knows (_COPY_META_FIELDS in fx/proxy.py)


def notes_of(node: Any) -> dict[str, Any]:
    """What :func:`note_node` has written on a node."""
    return node.meta.get(_NOTES) or {}


def note_node(output: Any, node: Any, name: str, value: object) -> None:
    """Note something of a node that Dynamo has made: on the node, and with every guard on this thread.

    What was noted first stays.  The bodies of control flow run as Dynamo has made them.  Strict export runs a copy of
    its graph that keeps the nodes' names and stack traces and nothing that we could write on them
    (torch/_dynamo/functional_export.py, 2.10 to 2.15).
    """
    node.meta.setdefault(_NOTES, {}).setdefault(name, value)
    for mode in dispatch_modes():
        remember: Any = getattr(mode, "_remember_node", None)
        if remember is not None:
            remember(output, (node.meta.get("stack_trace", ""), node.name), name, value)


def note_body(output: Any, node: Any, name: str, value: object) -> None:
    """:func:`note_node` of what is in the body that ``node`` stands for (``nn_modules`` of Dynamo's: 2.10 to 2.15)."""
    body = output.nn_modules.get(node.target) if node.op == "get_attr" else None
    if isinstance(body, torch.fx.GraphModule):
        for inner in body.graph.nodes:
            inner.meta.setdefault(_NOTES, {}).setdefault(name, value)
            note_body(output, inner, name, value)


def is_dynamo_graph(module: Any) -> bool:
    """Whether ``module`` is the graph of a function that Dynamo has traced, and no body in it (2.10 to 2.15)."""
    return "dynamo_compile_id" in getattr(module, "meta", ())


def is_run_by_dynamo(frame: FrameType) -> bool:
    """Whether Dynamo runs a node on fake tensors in ``frame`` (2.10 to 2.15)."""
    return frame.f_code.co_name == "run_node" and frame.f_globals.get("__name__") == "torch._dynamo.utils"


def note_node_of(frame: FrameType, name: str, value: object) -> None:
    """:func:`note_node` of the node that Dynamo runs in ``frame``, with guards as its name is final (2.10 to 2.15)."""
    output, node = frame.f_locals["tracer"], frame.f_locals["node"]
    node.meta.setdefault(_NOTES, {}).setdefault(name, value)
    output.add_cleanup_hook(lambda: note_node(output, node, name, value))


def stands_for_numpy(frame: FrameType) -> bool:
    """Whether what Dynamo runs in ``frame`` (see above) is how it writes something that the user does with numpy.

    It traces an ndarray as a tensor: ``torch.from_numpy(a)`` and ``torch.as_tensor(a)`` become ``as_tensor`` of that,
    ``x.numpy(force=True)`` becomes ``x.detach().cpu()`` (torch/_dynamo/variables/torch.py and tensor.py, 2.10 to 2.15).
    """
    outer: FrameType | None = frame
    while outer is not None:
        name, values = outer.f_code.co_name, outer.f_locals
        if outer.f_code.co_filename.endswith("symbolic_convert.py"):
            return False  # the user's instruction
        if name == "method_numpy":
            return True
        if name == "call_function" and isinstance(values.get("args"), (list, tuple)):
            given = [*values["args"], *(values.get("kwargs") or {}).values()]
            if any(type(variable).__name__ == "NumpyNdarrayVariable" for variable in given):
                return True
        outer = outer.f_back
    return False


@functools.cache
def dynamo_error_type(error_type: type[Exception]) -> type[Exception]:
    """``error_type`` as an exception that Dynamo lets through as it is (2.10, 2.13, 2.15).

    Dynamo wraps what a comptime callback raises, unless it is a TorchRuntimeError already.
    """
    from torch._dynamo.exc import TorchRuntimeError

    def init(self: Any, *args: Any) -> None:
        error_type.__init__(self, *args)
        self.msg = str(self)
        self.real_stack = torch._guards.TracingContext.extract_stack()

    return type(
        error_type.__name__, (error_type, TorchRuntimeError), {"__init__": init, "__module__": error_type.__module__}
    )


@contextlib.contextmanager
def every_export(around: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """Run each export of the process within ``around()`` (2.10, 2.13, 2.15).

    torch.export.export looks this function up in its module at each call, so that it is reached by whoever has imported
    ``export`` before; draft_export has a name of its own for it.  torch.onnx.export calls these two.
    """
    from torch.export import _draft_export, _trace

    inner: Any = _trace._export

    @functools.wraps(inner)
    def export(*args: Any, **kwargs: Any) -> Any:
        with around():
            return inner(*args, **kwargs)

    holders: tuple[Any, ...] = (_trace, _draft_export)
    before = [holder._export for holder in holders]
    for holder in holders:
        holder._export = export
    try:
        yield
    finally:
        for holder, function in zip(holders, before, strict=True):
            holder._export = function
