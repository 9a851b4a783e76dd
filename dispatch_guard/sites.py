"""The user's place: from Python frames, from Dynamo's own interpreter, from a graph's stack traces.

Only this module knows how each tracer remembers where the user's code is.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import sysconfig
import weakref
from dataclasses import replace
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import fx, nn
from torch._ops import OpOverload

from . import _compat
from .source import calls_in, characters, conversion_below, qualified_name, write_below
from .violations import Site

Frames = tuple[tuple[str, int], ...]  # the user's, by file and line, innermost last

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_OURS: Final = os.path.dirname(__file__) + os.sep
_STANDARD: Final = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_GRAPH_CODE: Final = "<eval_with_key>"  # torch/fx/graph_module.py names generated code so (2.10 to 2.15)
# Code that no user wrote or typed in: of the import system, attrs and sympy.
_GENERATED: Final = ("<frozen ", "<attrs generated", "<lambdifygenerated", "<__array_function__")
_MODULE_CALL: Final = nn.Module._call_impl.__code__

# Code objects live as long as their modules, so this stays as small as the program.
_internal: dict[CodeType, bool] = {}


class Place:
    """Where something happened, remembered cheaply; :meth:`site` turns it to text."""

    __slots__ = (
        "_caller",
        "_code",
        "_lasti",
        "_modules",
        "_node_is_of_numpy",
        "_node_modules",
        "_positions",
        "_trace",
        "graph",
        "is_of_operator",
        "node_name",
        "notes",
    )

    def __init__(self, modules: list[weakref.ref[nn.Module]]) -> None:
        self._caller: Place | None = None  # the nearest place outside of installed libraries, if this is in one
        self._code: CodeType | None = None
        self._lasti = -1
        self._positions: tuple[int | None, ...] | None = None
        self._trace = ""
        self.node_name = ""  # of the graph node, where a graph was being run
        self.graph: Any = None  # a weak reference to the module that has the node, if it has one
        self._node_is_of_numpy = False  # as far as the node tells
        self.is_of_operator = False  # whether it is an operator's, as in an exported program, and none of Dynamo's
        self.notes: dict[str, Any] = {}  # what was noted on that node as Dynamo made it
        self._node_modules: Any = None
        self._modules = modules

    def site(self) -> Site | None:
        if self._code is None:
            return site_of_trace(self._trace)
        site = _site_of_code(self._code, self._positions or _positions(self._code, self._lasti))
        return site if self._caller is None else replace(site, caller=self._caller.site())

    def is_at(self, frame: FrameType) -> bool:
        return self._code is frame.f_code and self._lasti == frame.f_lasti

    def is_of_numpy(self, noted: bool | None) -> bool:
        """Whether a conversion's node stands for something that the user did with numpy; a note of Dynamo's decides."""
        return self._node_is_of_numpy if noted is None else noted

    def conversion_site(self, names: frozenset[str]) -> Site | None:
        """:meth:`site` of a conversion by one of ``names``."""
        site = self.site()
        below = conversion_below(site, names, self._lookup) if site and self._ends_in_forward(site) else None
        return below or site

    def write_site(self, operator: str) -> Site | None:
        """:meth:`site` of a write by ``operator``."""
        site = self.site()
        below = write_below(site, operator, self._lookup) if site and self._ends_in_forward(site) else None
        return below or site

    def _ends_in_forward(self, site: Site) -> bool:
        """Whether a graph's node may come from a function that ``forward`` calls at ``site``.

        Of a program that is exported with ``strict=False`` torch keeps the frames of ``forward`` only
        (torch/fx/proxy.py, ``_filter_traceback_frames``: 2.10 to 2.15).
        """
        functions = [match["function"] for match in _TRACE_FRAME.finditer(self._trace)]
        return bool(functions) and all(function == "forward" for function in functions)

    def _lookup(self, filename: str, called: str) -> tuple[str, int] | None:
        """Where the function is that is called so in a file, as far as its module is loaded."""
        names = called.split(".")
        if not all(name.isidentifier() for name in names):
            return None
        owner: Any = next((m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == filename), None)
        if names[0] == "self":
            owner, names = self._module_type(), names[1:]
            if owner is None and not self._is_of_enclosing_class():
                raise LookupError(called)  # it may be a subclass with a method of its own
        for name in names:
            owner = inspect.getattr_static(owner, name, None)
        code = getattr(inspect.unwrap(getattr(owner, "__func__", owner)), "__code__", None) if owner else None
        if not isinstance(code, CodeType) or _is_internal(code):
            return None
        return code.co_filename, code.co_firstlineno

    def _is_of_enclosing_class(self) -> bool:
        """Whether the innermost module is of the class that ``forward`` is written in, as far as a graph tells."""
        if not self._node_modules:
            return True
        kind = str(next(reversed(self._node_modules.values()))[1])
        site = self.site()
        return site is not None and site.function.split(".")[-2:-1] == kind.split(".")[-1:]

    def _module_type(self) -> Any:
        """The class of the innermost module, where a graph tells and it is loaded."""
        if not self._node_modules:
            return None
        kind = next(reversed(self._node_modules.values()))[1]
        if not isinstance(kind, str):
            return kind
        home = max((name for name in list(sys.modules) if kind.startswith(f"{name}.")), key=len, default=None)
        owner: Any = None if home is None else sys.modules[home]
        for name in kind[len(home or "") + 1 :].split("."):
            owner = getattr(owner, name, None)
        return owner

    def as_written(self, call: str) -> str:
        """The operator that the user has written, where Dynamo makes another one of it (``addcmul_`` a ``copy_``)."""
        rewritten = {name: own for (name, seen), own in _REWRITTEN.items() if seen == call}
        if not rewritten:
            return call
        called: list[str] = []
        if self._code is not None and self._positions is not None:  # Dynamo's own tracing
            called = calls_in("", self._code.co_filename, self._positions[0] or 0)
        elif self._trace:
            frames = [match for match in _TRACE_FRAME.finditer(self._trace) if _DYNAMO not in match["file"]]
            called = calls_in(*_text_of_frame(frames[-1], self._trace)) if frames else []
        names = [name for name in rewritten if name in called]
        if len(names) != 1 or (call.split(".")[1] in called and called[0] != names[0]):
            return call
        return rewritten[names[0]]

    @property
    def stack_trace(self) -> str:
        """The graph node's stack trace, where a graph was being run."""
        return self._trace


# What Dynamo makes of an operator with a scalar that it must not ask for: the name written and the operator seen, and
# the operator written (torch/_dynamo/variables/tensor.py and torch.py, torch/_dynamo/polyfills: 2.10 to 2.15).
_REWRITTEN: Final = {
    ("addcmul_", "aten.copy_.default"): "aten.addcmul_.default",
    ("addcdiv_", "aten.copy_.default"): "aten.addcdiv_.default",
    ("add_", "aten.copy_.default"): "aten.add_.Tensor",
    ("addcmul_", "aten.add_.Tensor"): "aten.addcmul_.default",
    ("addcdiv_", "aten.add_.Tensor"): "aten.addcdiv_.default",
    ("_foreach_lerp_", "aten._foreach_add_.List"): "aten._foreach_lerp_.Scalar",
    ("_foreach_lerp_", "aten._foreach_addcmul_.Scalar"): "aten._foreach_lerp_.Scalar",
}
_DYNAMO: Final = f"{os.sep}torch{os.sep}_dynamo{os.sep}"


def here(frame: FrameType | None = None) -> Place | None:
    """The nearest place in the user's code, looking outward from ``frame``."""
    frame = frame or sys._getframe(1)
    place: Place | None = None
    modules: list[weakref.ref[nn.Module]] = []
    while frame is not None:
        code = frame.f_code
        if code is _MODULE_CALL:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and not _is_wrapper(module):
                modules.append(weakref.ref(module))
        elif place is None:
            place = _place_in(frame, modules)
        elif place._caller is None and place._code is not None and _is_installed(place._code.co_filename):
            caller = _place_in(frame, [])
            if caller is not None and caller._code is not None and not _is_installed(caller._code.co_filename):
                place._caller = caller
        frame = frame.f_back
    return place


def _is_installed(filename: str) -> bool:
    return any(part in filename for part in _INSTALLED)


def _is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what torch.compile or torch.export put around the user's root module."""
    return isinstance(module, fx.GraphModule) or type(module).__module__.startswith(
        ("torch._dynamo", "torch._export", "torch.export", "torch._functorch", "torch.fx")
    )


def _place_in(frame: FrameType, modules: list[weakref.ref[nn.Module]]) -> Place | None:
    code = frame.f_code
    if not _is_internal(code):
        if code.co_filename.startswith(_GRAPH_CODE):
            return place_of_node(_node_of_graph_frame(frame), modules, frame)
        place = Place(modules)
        place._code, place._lasti = code, frame.f_lasti
        if sys.version_info < (3, 11):
            place._positions = (frame.f_lineno, None, None, None)
        return place
    if code.co_name == "run_node" and code.co_filename.endswith("interpreter.py"):
        return place_of_node(frame.f_locals.get("n"), modules, frame)
    if code.co_filename.endswith("symbolic_convert.py"):
        return _place_of_dynamo(frame, modules)
    return None


def place_of_node(node: Any, modules: list[weakref.ref[nn.Module]], frame: FrameType | None = None) -> Place | None:
    node = _original(node, frame)
    trace = node.meta.get("stack_trace") if isinstance(node, fx.Node) else None
    if not trace:
        return None
    place = Place(modules)
    place._trace = trace
    place.node_name = node.name
    place._node_is_of_numpy = is_of_numpy(node)
    place.graph = None if node.graph.owning_module is None else weakref.ref(node.graph.owning_module)
    place.is_of_operator = isinstance(node.target, OpOverload)
    place.notes = _compat.notes_of(node)
    place._node_modules = node.meta.get("nn_module_stack")
    return place


def _node_of_graph_frame(frame: FrameType) -> fx.Node | None:
    owner = frame.f_locals.get("self")
    return _node_of_line(owner, frame.f_code.co_filename, frame.f_lineno) if isinstance(owner, fx.GraphModule) else None


def _node_of_line(owner: fx.GraphModule, filename: str, lineno: int) -> fx.Node | None:
    """The node of a line of generated code: ``to = l_x_.to('cpu');  l_x_ = None`` is node ``to``."""
    match = re.match(r"\s*(\w+)\b.*=", linecache.getline(filename, lineno))
    return None if match is None else next((node for node in owner.graph.nodes if node.name == match[1]), None)


def _original(node: Any, frame: FrameType | None) -> Any:
    """The node that ``node`` was traced from, when strict export traced the code of another graph."""
    trace = node.meta.get("stack_trace") if isinstance(node, fx.Node) else None
    innermost = _TRACE_FRAME.findall(trace or "")[-1:]
    if not innermost or not innermost[0][0].startswith(_GRAPH_CODE):
        return node
    return _node_being_traced(innermost[0][0], int(innermost[0][1]), frame) or node


def _node_being_traced(filename: str, lineno: int, frame: FrameType | None) -> fx.Node | None:
    """The node of a line of generated code that is being exported: its module is in a variable of export's frames."""
    while frame is not None:
        for owner in list(frame.f_locals.values()):
            if isinstance(owner, fx.GraphModule) and type(owner).forward.__code__.co_filename == filename:
                return _node_of_line(owner, filename, lineno)
        frame = frame.f_back
    return None


def _place_of_dynamo(frame: FrameType, modules: list[weakref.ref[nn.Module]]) -> Place | None:
    """The line that Dynamo's interpreter is at (torch/_dynamo/symbolic_convert.py, 2.10 to 2.15)."""
    translator = frame.f_locals.get("self")
    code = getattr(translator, "f_code", None)
    if frame.f_code.co_name != "step" or not isinstance(code, CodeType) or _is_internal(code):
        return None
    positions = getattr(getattr(translator, "current_instruction", None), "positions", None)
    if positions is not None and code.co_filename.startswith(_GRAPH_CODE):  # strict export of an exported program
        return place_of_node(_node_being_traced(code.co_filename, positions.lineno, frame), modules)
    place = Place(modules)
    place._code = code
    place._node_modules = getattr(translator, "nn_module_stack", None)
    if positions is not None and positions.lineno is not None:
        place._positions = (positions.lineno, positions.end_lineno, positions.col_offset, positions.end_col_offset)
    else:
        place._positions = (getattr(translator, "lineno", code.co_firstlineno), None, None, None)
    return place


def is_of_numpy(node: fx.Node) -> bool:
    """Whether a conversion's node stands for something that the user did with numpy, as far as a graph tells.

    Dynamo traces an ndarray as a tensor (torch/_dynamo/variables/tensor.py, ``NumpyNdarrayVariable``: 2.10 to 2.15):
    of ``torch.from_numpy`` it makes ``torch.as_tensor``, of ``x.numpy(force=True)`` ``x.detach().cpu()``.
    """
    name = _function_of(node)
    if not name:
        return False
    source: Any = next(iter(node.args or node.kwargs.values()), None)
    if _is_ndarray(node):
        return True
    if name in ("as_tensor", "asarray") and isinstance(source, fx.Node):
        call = node.meta.get("torch_fn")
        made_here = source.op == "call_function" and call is not None and source.meta.get("torch_fn") == call
        if made_here or _is_ndarray(source):
            return True
    called = _called_at(node)
    return name == "as_tensor" and "from_numpy" in called and "as_tensor" not in called


# The bodies of control flow are traced from the code that fx writes for Dynamo's graph (2.10 to 2.15).
_NUMPY_IN_A_BODY: Final = "= torch__dynamo_utils_wrapped_"


def _is_ndarray(node: Any) -> bool:
    """Whether a node's value is an ndarray to the user."""
    if not isinstance(node, fx.Node):
        return False
    functions = node.meta.get("source_fn_stack") or [("", None)]
    if str(functions[-1][0]).startswith("wrapped_") and type(functions[-1][1]).__module__ != "builtins":
        return type(functions[-1][1]).__module__ == "torch._dynamo.utils"
    if _NUMPY_IN_A_BODY in (node.meta.get("stack_trace") or "").rstrip().rpartition("\n")[2]:
        return True
    name = _function_of(node)
    views = name == "view_as" and node.args[0] is node.args[1]
    moved = name == "cpu" and _function_of(node.args[0]) == "detach"
    return (views or moved) and "numpy" in (called := _called_at(node)) and name not in called


def _function_of(node: Any) -> str:
    """The function or method of torch that a node stands for, by its name; in a graph of operators the one called."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_method":
        return str(node.target)
    if isinstance(node.target, OpOverload):
        return str((node.meta.get("torch_fn") or ("", ""))[1].partition(".")[2])
    return str(getattr(node.target, "__name__", ""))


def _called_at(node: fx.Node) -> list[str]:
    frames = [match for match in _TRACE_FRAME.finditer(node.meta.get("stack_trace") or "") if _is_users(match["file"])]
    return calls_in(*_text_of_frame(frames[-1], node.meta["stack_trace"])) if frames else []


def _is_internal(code: CodeType) -> bool:
    known = _internal.get(code)
    if known is None:
        name = code.co_filename
        standard = name.startswith(_STANDARD) and not _is_installed(name)
        known = _internal[code] = name.startswith((_TORCH, _OURS, *_GENERATED)) or standard
    return known


def _positions(code: CodeType, lasti: int) -> tuple[int | None, ...]:
    for index, positions in enumerate(code.co_positions()):
        if index == lasti // 2:
            return positions
    return (code.co_firstlineno, None, None, None)


def _site_of_code(code: CodeType, positions: tuple[int | None, ...]) -> Site:
    lineno, end_lineno, col, end_col = positions
    lineno = lineno or code.co_firstlineno
    line = linecache.getline(code.co_filename, lineno).rstrip("\n")
    return Site(
        filename=code.co_filename,
        lineno=lineno,
        end_lineno=end_lineno,
        col=None if col is None else characters(code.co_filename, lineno, col),
        end_col=None if end_col is None else characters(code.co_filename, end_lineno or lineno, end_col),
        function=_function_name(code, lineno),
        line=line,
    )


def _function_name(code: CodeType, lineno: int) -> str:
    name: str | None = getattr(code, "co_qualname", None)  # Python 3.11
    return qualified_name(code.co_filename, lineno, code.co_name) if name is None else name.replace("<locals>.", "")


_TRACE_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def site_of_trace(trace: str) -> Site | None:
    """The innermost place in the user's code of a graph node's ``stack_trace``."""
    frames = [match for match in _TRACE_FRAME.finditer(trace) if _is_users(match["file"])]
    if not frames:
        return None
    site = _site_of_frame(frames[-1], trace)
    if not _is_installed(site.filename):
        return site
    callers = [frame for frame in frames if not _is_installed(frame["file"])]
    return replace(site, caller=_site_of_frame(callers[-1], trace)) if callers else site


def _text_of_frame(frame: re.Match[str], trace: str) -> tuple[str, str, int]:
    """What a trace underlines below a frame (``""`` where nothing), and its file and line."""
    following = trace[frame.end() :].lstrip("\n").splitlines()
    code, carets = (*following[:2], "", "")[:2]
    marked = re.search(r"[~^]+", carets) if re.fullmatch(r"[ ~^]+", carets) else None
    return code[marked.start() : marked.end()] if marked else "", frame["file"], int(frame["line"])


# ---- frames: where a graph's nodes come from, compared with where something was as the graph was made


def frames_here() -> Frames:
    """All of the user's places on the stack; where a graph is being run, those of its node."""
    frame: FrameType | None = sys._getframe(1)
    frames: list[tuple[str, int]] = []
    while frame is not None:
        place = _place_in(frame, [])
        if place is not None and place._trace:
            frames += reversed(frames_of_trace(place._trace))
        elif place is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(frames))


def frames_of_trace(trace: str) -> Frames:
    """The user's places in a graph node's ``stack_trace``."""
    return tuple(
        (match["file"], int(match["line"])) for match in _TRACE_FRAME.finditer(trace) if _is_users(match["file"])
    )


def is_among(some: Frames, all_of_them: Frames) -> bool:
    """Whether ``some`` are in ``all_of_them``, in that order: torch keeps only frames of ``forward`` in some graphs.

    Example:
        >>> from dispatch_guard.sites import is_among
        >>> is_among((("a", 1), ("c", 3)), (("a", 1), ("b", 2), ("c", 3))), is_among((), (("a", 1),))
        (True, False)
    """
    remaining = iter(all_of_them)
    return bool(some) and all(frame in remaining for frame in some)


def _is_users(filename: str) -> bool:
    standard = filename.startswith(_STANDARD) and not _is_installed(filename)
    return not standard and not filename.startswith((_TORCH, _OURS, _GRAPH_CODE))


def _site_of_frame(innermost: re.Match[str], trace: str) -> Site:
    filename, lineno = innermost["file"], int(innermost["line"])
    line = linecache.getline(filename, lineno).rstrip("\n")
    if not line:
        following = trace[innermost.end() :].lstrip("\n").splitlines()
        line = following[0] if following and not following[0].lstrip().startswith("File ") else ""
    function = qualified_name(filename, lineno, innermost["function"])
    return Site(filename, lineno, None, None, None, function, line)


def module_path(place: Place | None) -> str:
    """The path of the innermost module from the root one."""
    if place is None:
        return ""
    if place._node_modules:
        path = next(reversed(place._node_modules.values()))[0]
        return _clean(str(path))
    chain: list[nn.Module] = [module for reference in reversed(place._modules) if (module := reference()) is not None]
    return ".".join(name for parent, child in pairwise(chain) if (name := _name_in(parent, child)))


def inplace_module(place: Place | None) -> str | None:
    """The path of the innermost module, where it is one of torch's that has been told to work in place."""
    if place is not None and place._node_modules:
        kind = next(reversed(place._node_modules.values()))[1]
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        return module_path(place) if name.startswith("torch.nn.modules.activation.") else None
    module = place._modules[0]() if place is not None and place._modules else None
    if module is None or not getattr(module, "inplace", False) or not type(module).__module__.startswith("torch.nn"):
        return None
    return module_path(place)


def _clean(path: str) -> str:
    """``L['self'].layers[0].norm`` and its like as ``layers.0.norm``."""
    path = re.sub(r"^L\['(self|mod|fn)'\]\.?|^L__self___?", "", path)
    path = re.sub(r"\._modules\['([^']+)'\]|\[['\"]?([^'\"\]]+)['\"]?\]", r".\1\2", path)
    path = path.lstrip(".")
    return re.sub(r"^(_export_root|_orig_mod)(\.|$)", "", path)  # torch.export's and torch.compile's own wrappers


def _name_in(parent: nn.Module, child: nn.Module) -> str:
    # Non-strict export runs proxies of the modules that share their __dict__ (torch.fx.experimental.proxy_tensor).
    name: str
    for name, module in parent.named_modules():
        if module is child or module.__dict__ is child.__dict__ or module._modules is child._modules:
            return name
    return ""
