"""The user's place: from Python frames, from Dynamo's own interpreter, from a graph's stack traces.

Only this module knows how each tracer remembers where the user's code is.
"""

from __future__ import annotations

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

from .source import characters, qualified_name
from .violations import Site

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_OURS: Final = os.path.dirname(__file__) + os.sep
_STANDARD: Final = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_GRAPH_CODE: Final = "<eval_with_key>"  # torch/fx/graph_module.py names generated code so (2.6 to 2.14)
# Code that no user wrote or typed in: of the import system, attrs and sympy.
_GENERATED: Final = ("<frozen ", "<attrs generated", "<lambdifygenerated", "<__array_function__")
_MODULE_CALL: Final = nn.Module._call_impl.__code__

# Code objects live as long as their modules, so this stays as small as the program.
_internal: dict[CodeType, bool] = {}


class Place:
    """Where something happened, remembered cheaply; :meth:`site` turns it to text."""

    __slots__ = ("_caller", "_code", "_lasti", "_modules", "_node_modules", "_positions", "_trace", "node_name")

    def __init__(self, modules: list[weakref.ref[nn.Module]]) -> None:
        self._caller: Place | None = None  # the nearest place outside of installed libraries, if this is in one
        self._code: CodeType | None = None
        self._lasti = -1
        self._positions: tuple[int | None, ...] | None = None
        self._trace = ""
        self.node_name = ""  # of the graph node, where a graph was being run
        self._node_modules: Any = None
        self._modules = modules

    def site(self) -> Site | None:
        if self._code is None:
            return site_of_trace(self._trace)
        site = _site_of_code(self._code, self._positions or _positions(self._code, self._lasti))
        return site if self._caller is None else replace(site, caller=self._caller.site())

    def is_at(self, frame: FrameType) -> bool:
        return self._code is frame.f_code and self._lasti == frame.f_lasti

    @property
    def stack_trace(self) -> str:
        """The graph node's stack trace, where a graph was being run."""
        return self._trace


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
    """The line that Dynamo's interpreter is at (torch/_dynamo/symbolic_convert.py, 2.6 to 2.14)."""
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
