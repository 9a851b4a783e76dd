"""What the user's source says at a place: which expression is converted or written, and what it is called.

Pure text: nothing here runs or knows torch.  Where the source is gone or the line is ambiguous, the answer is ``None``.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from .violations import Site

Owner = Literal["object", "caller"]
WriteKind = Literal["method", "augmented", "item", "out", "inplace", "call"]


@dataclass(frozen=True)
class Converted:
    """A conversion in the source: ``target = source.to(...)``, ``call`` being the text right of the ``=``."""

    name: str
    source: str
    target: str | None
    call: str
    site: Site


@dataclass(frozen=True)
class Written:
    """A write in the source, and the text of what it writes; ``instead`` is the same out of place, if that exists.

    ``base`` is what ``expression`` is a view of as far as its text tells: ``y`` for ``y[0].view(-1)``.
    """

    expression: str
    base: str
    kind: WriteKind
    instead: str | None
    site: Site
    name: str  # of what is called, "" where nothing is


_SYMBOLS: Final = {"add_": "+", "sub_": "-", "mul_": "*", "div_": "/"}
_AUGMENTED: Final[dict[type[ast.operator], str]] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
}
# Operators whose twin without the underscore does not do the same (it may have another dtype), or is no method.
_NO_TWIN: Final = frozenset(
    "set_ resize_ resize_as_ as_strided_ apply_ map_ map2_ detach_ requires_grad_ fill_ fill_diagonal_ share_memory_ "
    "resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_ eq_ ne_ lt_ le_ gt_ ge_ equal_ not_equal_ less_ "
    "less_equal_ greater_ greater_equal_ logical_and_ logical_or_ logical_xor_ logical_not_".split()
)
# Operators whose result does not depend on what was there: they may as well write new memory.
_OVERWRITES: Final = frozenset(
    "copy_ uniform_ normal_ random_ exponential_ cauchy_ geometric_ log_normal_ bernoulli_".split()
)
# Operators that put given values where others were.
STORING: Final = frozenset("copy_ index_copy_ index_put_ scatter_ masked_scatter_ put_ slice_scatter_".split())
_VIEW_METHODS: Final = frozenset(
    "view view_as reshape flatten unflatten squeeze unsqueeze transpose permute t narrow select chunk split unbind "
    "diagonal expand expand_as as_strided detach movedim swapaxes unfold".split()
)
_VIEW_ATTRIBUTES: Final = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


def conversion_at(site: Site, names: frozenset[str]) -> Converted | None:
    """The call of one of ``names`` (``to``, ``float``, ``as_tensor``) at ``site``."""
    found = [
        (node, parent)
        for node, parent in _nodes_at(site)
        if isinstance(node, ast.Call)
        and _called(node) in names
        and not (isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id))  # float("-inf")
        and (site.col is None or _is_at(node, site))
    ]
    if len(found) != 1:
        return None
    call, parent = found[0]
    assert isinstance(call, ast.Call)
    method = isinstance(call.func, ast.Attribute) and not _is_module(call.func.value)
    source = call.func.value if method and isinstance(call.func, ast.Attribute) else next(iter(call.args), None)
    if source is None:
        return None
    return Converted(_called(call) or "", _text(source), _target(call, parent), _text(call), _at(site, call))


def write_at(site: Site, operator: str) -> Written | None:
    """The write by ``operator`` (``add_``, ``index_put_``) at ``site``."""
    nodes = [
        (node, parent)
        for node, parent in _nodes_at(site)
        if site.col is None or _is_at(node, site) or _covers_exactly_one_line(node, site)
    ]
    for any_name in (False, True):  # y.absolute_() runs abs_, nn.init.zeros_(y) runs zero_
        found = [written for node in nodes if (written := _as_write(*node, operator, site, any_name)) is not None]
        if found:
            return found[0] if len(found) == 1 else _most_exact(found, site)
    return None


# Where a function is, by a file and how it is called in there: None where only the text can tell, a LookupError where
# the text would mislead.
Lookup = Callable[[str, str], tuple[str, int] | None]


def conversion_below(site: Site, names: frozenset[str], lookup: Lookup) -> Site | None:
    """The one call of ``names`` in the functions that the line at ``site`` calls, and that these call."""

    def is_it(node: ast.AST, parent: ast.AST | None) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _called(node) in names

    return None if conversion_at(site, names) else _one_below(site, is_it, lookup)


def write_below(site: Site, operator: str, lookup: Lookup) -> Site | None:
    """The one write by ``operator`` in the functions that the line at ``site`` calls, and that these call."""

    def is_it(node: ast.AST, parent: ast.AST | None) -> bool:
        return _as_write(node, parent, operator, site, False) is not None

    return None if any(is_it(*each) for each in _nodes_at(site)) else _one_below(site, is_it, lookup)


def _one_below(site: Site, is_it: Callable[[ast.AST, ast.AST | None], bool], lookup: Lookup) -> Site | None:
    found: list[Site] = []
    seen: set[tuple[str, int]] = set()
    around = _enclosing(site.filename, site.lineno)
    calls = [node for node, _ in _nodes_at(site) if isinstance(node, ast.Call)]
    todo = [(site.filename, name, around) for call in calls for name in _functions_in(call)]
    while todo and len(seen) < 64:
        filename, called, around = todo.pop()
        function = _definition(filename, called, around, lookup)
        if function is None or function in seen:
            continue
        seen.add(function)
        path = _enclosing(*function)
        body = next((node for node in reversed(path) if isinstance(node, ast.FunctionDef)), None)
        for node, parent in _walk(body) if body is not None else ():
            if is_it(node, parent):
                lineno: int = node.lineno  # type: ignore[attr-defined]
                line = linecache.getline(function[0], lineno).rstrip("\n")
                name = qualified_name(function[0], lineno, body.name if body is not None else "")
                found.append(Site(function[0], lineno, None, None, None, name, line))
            if isinstance(node, ast.Call):
                todo += [(function[0], name, path) for name in _functions_in(node)]
    return found[0] if len(found) == 1 else None


def _functions_in(call: ast.Call) -> list[str]:
    """What a call may run, as text: the function itself, and those it is given (``torch.cond(p, yes, no, (x,))``)."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [_text(node) for node in (call.func, *given) if isinstance(node, (ast.Name, ast.Attribute))]


def _walk(root: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """All nodes below ``root``, each with its parent."""
    for parent in ast.walk(root):
        for node in ast.iter_child_nodes(parent):
            yield node, parent


def _definition(filename: str, called: str, around: list[ast.AST], lookup: Lookup) -> tuple[str, int] | None:
    """Where the function is that ``called`` names (``self.step``, ``helper``), in the program or else in its text."""
    try:
        known = lookup(filename, called)
    except LookupError:
        return None
    if known is not None:
        return known
    owner, _, name = called.rpartition(".")
    if owner not in ("", "self", "cls"):
        return None
    scopes: list[ast.AST] = [node for node in around if isinstance(node, (ast.Module, ast.FunctionDef))]
    if owner:
        known_classes = [
            node for scope in scopes for node in getattr(scope, "body", ()) if isinstance(node, ast.ClassDef)
        ]
        scopes = [node for node in around if isinstance(node, ast.ClassDef)]
        for scope in scopes:  # it grows: bases, and theirs
            bases = {_text(base) for base in scope.bases} if isinstance(scope, ast.ClassDef) else set()
            scopes += [node for node in known_classes if node.name in bases and node not in scopes]
        scopes.reverse()
    for scope in reversed(scopes):
        for node in getattr(scope, "body", ()):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return filename, node.lineno
    return None


def call_at(site: Site) -> Site:
    """``site`` with the columns of its one outermost call, where only its line is known."""
    if site.col is not None:
        return site
    calls = [node for node, _ in _nodes_at(site) if isinstance(node, ast.Call)]
    inner = {id(child) for call in calls for child in ast.walk(call) if child is not call}
    outermost = [call for call in calls if id(call) not in inner]
    return _at(site, outermost[0]) if len(outermost) == 1 else site


def calls_in(text: str, filename: str, lineno: int) -> list[str]:
    """The names that are called in ``text``, or without one, at a line of a file; outer ones before inner ones.

    Example:
        >>> calls_in("y.copy_(x.sin()).add_(1)", "", 1)
        ['add_', 'copy_', 'sin']
    """
    site = Site(filename, lineno, None, None, None, "", "")
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval"))) if text else [node for node, _ in _nodes_at(site)]
    except SyntaxError:
        nodes = [node for node, _ in _nodes_at(site)]
    return [name for node in nodes if isinstance(node, ast.Call) and (name := _called(node))]


def copying(text: str, dtype: str) -> str | None:
    """The conversion ``text`` written so that it always copies, ``dtype`` being what it converts to.

    Example:
        >>> copying('x.to("cpu")', "torch.float32"), copying("x.float()", "torch.float32")
        ('x.to("cpu", copy=True)', 'x.to(torch.float32, copy=True)')
    """
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    name, names = call.func.attr, {keyword.arg for keyword in call.keywords}
    flags = [arg for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, bool)]
    if names & {"copy", None} or len(flags) > 1 or any(isinstance(arg, ast.Starred) for arg in call.args):
        return None
    called = _text(call.func)
    if name == "to" or ".aten.to" in called:
        return _with_copy(call)
    if name in ("as_tensor", "asarray"):
        call.func.attr = "asarray"  # as_tensor has no copy=
        return _with_copy(call) if len(call.args) == 1 else None
    if names or _is_module(call.func.value):
        return None
    arguments = [_text(arg) for arg in call.args]
    if name == "type_as" or (name == "type" and len(arguments) == 1 and arguments[0].startswith("torch.")):
        to = arguments[0]
    elif not arguments and name in ("cpu", "cuda", "xpu", "hpu", "mtia"):
        to = f'"{name}"'
    elif not arguments and name not in ("type", "to_dense"):
        to = dtype
    else:
        return None
    return f"{receiver(_text(call.func.value))}.to({to}, copy=True)"


def _with_copy(call: ast.Call) -> str:
    return _text(ast.Call(call.func, call.args, [*call.keywords, ast.keyword("copy", ast.Constant(True))]))


def receiver(expression: str) -> str:
    """``expression`` as it can stand before a dot or beside an operator."""
    try:
        body = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return expression
    simple = isinstance(body, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
    return expression if simple else f"({expression})"


def _most_exact(found: list[Written], site: Site) -> Written | None:
    exact = [
        written
        for written in found
        if (written.site.lineno, written.site.col, written.site.end_col) == (site.lineno, site.col, site.end_col)
    ]
    return exact[0] if site.col is not None and len(exact) == 1 else None


def _as_write(node: ast.AST, parent: ast.AST | None, operator: str, site: Site, any_name: bool) -> Written | None:
    if isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Subscript):
        target, symbol = _text(node.target), _AUGMENTED.get(type(node.op))
        instead = f"{target} = {target} {symbol} {receiver(_text(node.value))}" if symbol else None
        return _written(node.target, "augmented", instead, _at(site, node))
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for place in targets:
            if isinstance(place, ast.Subscript):
                return _written(place.value, "item", None, _at(site, node))
            if isinstance(place, ast.Attribute) and place.attr == "data" and operator == "data":
                return _written(place.value, "call", None, _at(site, node))
        return None
    if not isinstance(node, ast.Call):
        return None
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if "out" in keywords:
        out, rest = keywords["out"], _arguments(node, without="out")
        named = isinstance(out, (ast.Name, ast.Attribute)) and rest is not None and isinstance(parent, ast.Expr)
        instead = f"{_text(out)} = {_text(node.func)}({', '.join(rest or ())})" if named else None
        return _written(out, "out", instead, _at(site, node))
    name = _called(node)
    writes = name == operator or (any_name and name is not None and re.fullmatch(r".*[^_]_", name) is not None)
    if writes and isinstance(node.func, ast.Attribute) and not _is_module(node.func.value):
        return _written(node.func.value, "method", _twin(node, parent), _at(site, node), name or "")
    inplace = keywords.get("inplace")
    if isinstance(inplace, ast.Constant) and inplace.value is True and node.args:
        return _written(node.args[0], "inplace", None, _at(site, node))
    if writes and node.args:  # torch.relu_(y), nn.init.zeros_(y)
        return _written(node.args[0], "call", None, _at(site, node), name or "")
    return None


def _written(expression: ast.expr, kind: WriteKind, instead: str | None, site: Site, name: str = "") -> Written:
    base = _base(expression) or expression
    return Written(_text(expression), _text(base), kind, instead, site, name)


def _arguments(call: ast.Call, without: str = "") -> list[str] | None:
    """The text of a call's arguments; ``None`` where some are unpacked (``*args``)."""
    if any(isinstance(arg, ast.Starred) for arg in call.args) or any(k.arg is None for k in call.keywords):
        return None
    return [*map(_text, call.args), *(f"{k.arg}={_text(k.value)}" for k in call.keywords if k.arg != without)]


def _twin(call: ast.Call, parent: ast.AST | None) -> str | None:
    """What to write in place of ``y.add_(5)``: of the statement, and in another expression of the call."""
    assert isinstance(call.func, ast.Attribute)
    target, value = _text(call.func.value), _twin_value(call, call.func.value, call.func.attr)
    if value is None:
        return None
    if isinstance(call.func.value, ast.Call):  # x.float().add_(5), which has no name
        return None if isinstance(parent, ast.Expr) else value
    if not isinstance(call.func.value, (ast.Name, ast.Attribute)):
        return None
    if isinstance(parent, ast.Expr):
        return f"{target} = {value}"
    if isinstance(parent, ast.Return):
        return f"return {value}"
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        name = _text(parent.targets[0])
        return f"{target} = {value}" if name == target else f"{name} = {target} = {value}"
    return None


def _twin_value(call: ast.Call, written: ast.expr, name: str) -> str | None:
    target, arguments = _text(written), _arguments(call)
    if arguments is None:
        return None
    if name in _SYMBOLS and len(arguments) == 1 and not call.keywords:
        return f"{target} {_SYMBOLS[name]} {receiver(arguments[0])}"
    if name == "zero_":
        return f"torch.zeros_like({target})"
    if name == "fill_" and len(arguments) == 1:
        value = call.args[0] if call.args else call.keywords[0].value
        return f"torch.full_like({target}, {_text(value)})" if _is_number(value) else None
    if name in _OVERWRITES:
        return f"torch.empty_like({target}).{name}({', '.join(arguments)})"
    if name in _NO_TWIN or not name.endswith("_"):
        return None
    return f"{target}.{name[:-1]}({', '.join(arguments)})"


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("float", "int")
    return called or (isinstance(node, ast.Constant) and isinstance(node.value, (int, float)))


def qualified_name(filename: str, lineno: int, function: str) -> str:
    """``Model.forward`` for the function ``forward`` around a line; ``function`` itself where that can't be told."""
    names: list[str] = []
    for node in _enclosing(filename, lineno):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
    if function.startswith("<") and names and function != "<module>":
        return ".".join([*names, function])
    return ".".join(names) if names and names[-1] == function else function


def is_bound_once(name: str, site: Site) -> bool:
    """Whether ``name`` is a variable that stands for one object as long as a call of the function at ``site`` runs.

    It is a parameter that is never assigned, or is assigned in one place.
    """
    functions = [
        node
        for node in _enclosing(site.filename, site.lineno)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    if not name.isidentifier() or not functions:
        return False
    bindings = 0
    for node in ast.walk(functions[-1]):
        if isinstance(node, ast.Name):
            bindings += node.id == name and not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.arg):
            bindings += node.arg == name
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            targets = ast.walk(node.target)
            bindings += 2 * any(isinstance(target, ast.Name) and target.id == name for target in targets)
        elif isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return False
    return bindings == 1


def owner_of(expression: str, site: Site) -> Owner | None:
    """Who has the tensor that ``expression`` stands for beside the function at ``site``, as far as its text tells.

    An object has what is an attribute (``self.past``, ``cache.keys[0]``), the caller what came as an argument or is no
    variable of the function's own, nobody else what was made in there.
    """
    try:
        node: ast.expr | None = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return None
    functions = [
        enclosing
        for enclosing in _enclosing(site.filename, site.lineno)
        if isinstance(enclosing, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    ]
    for _ in range(8):  # names that stand for other names
        node = _base(node)
        if isinstance(node, ast.Attribute):
            return "object"
        if not isinstance(node, ast.Name) or not functions:
            return None
        values = _bindings(functions[-1], node.id, site.lineno)
        if values is None:
            return "caller"
        if len(values) != 1:
            return None
        node = values[0]
        if node is None:
            return "caller"
    return None


def _base(node: ast.expr | None) -> ast.expr | None:
    """What ``node`` is a view of: ``y`` for ``y[0].view(-1)``."""
    while True:
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in _VIEW_ATTRIBUTES):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEW_METHODS:
            node = node.func.value
        else:
            return node


def _bindings(function: ast.AST, name: str, before: int) -> list[ast.expr | None] | None:
    """The values that ``name`` gets in a function before a line, ``None`` for the caller's.

    ``None`` in place of the list where it is no variable of the function's own.
    """
    nodes = list(ast.walk(function))
    simple = {
        id(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign) and len(node.targets) == 1
    }
    arguments = [None for node in nodes if isinstance(node, ast.arg) and node.arg == name]
    stores = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    stores = [node for node in stores if not isinstance(node.ctx, ast.Load)]
    if not arguments and not stores:
        return None
    return [*arguments, *(simple.get(id(node), ast.Constant(None)) for node in stores if node.lineno < before)]


def _called(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


def _is_module(node: ast.expr) -> bool:
    """Whether ``node`` reads as a module: ``torch``, ``F``, ``torch.nn.init``."""
    while isinstance(node, ast.Attribute):
        if node.attr in ("Tensor", "functional", "init"):
            return True
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "nn", "functional", "init", "Tensor")


def _target(call: ast.Call, parent: ast.AST | None) -> str | None:
    if isinstance(parent, ast.Assign) and parent.value is call and len(parent.targets) == 1:
        target: ast.expr = parent.targets[0]
        return _text(target) if isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)) else None
    if isinstance(parent, (ast.AnnAssign, ast.NamedExpr)) and parent.value is call:
        return _text(parent.target)
    return None


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if '"' in text else text.replace("'", '"')  # as most people quote


# ---- trees and positions


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _tree(filename: str) -> ast.Module | None:
    return _parse("".join(linecache.getlines(filename)))


def _nodes_at(site: Site) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """The nodes that cover the site's line, each with its parent."""
    tree = _tree(site.filename)
    if tree is None:
        return
    todo: list[tuple[ast.AST, ast.AST | None]] = [(tree, None)]
    while todo:
        node, parent = todo.pop()
        for child in ast.iter_child_nodes(node):
            if (
                getattr(child, "lineno", site.lineno)
                <= site.lineno
                <= (getattr(child, "end_lineno", None) or site.lineno)
            ):
                todo.append((child, node))
        if hasattr(node, "lineno"):
            yield node, parent


def _enclosing(filename: str, lineno: int) -> list[ast.AST]:
    """The nodes around a line, outermost first."""
    node: ast.AST | None = _tree(filename)
    path: list[ast.AST] = []
    while node is not None:
        path.append(node)
        node = next(
            (
                child
                for child in ast.iter_child_nodes(node)
                if hasattr(child, "lineno") and _first_line(child) <= lineno <= (child.end_lineno or lineno)  # type: ignore[attr-defined]
            ),
            None,
        )
    return path


def _first_line(node: ast.AST) -> int:
    lines: list[int] = [item.lineno for item in (node, *getattr(node, "decorator_list", []))]
    return min(lines)


def _columns(node: ast.AST, filename: str) -> list[tuple[int, int, int, int]]:
    """First and last line of ``node``, and its columns in characters, as an instruction may tell them.

    A method on a line of its own starts at its name (Python/compile.c, update_start_location_to_match_attr).
    """
    end_lineno, end_col = node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
    starts = [(node.lineno, node.col_offset)]  # type: ignore[attr-defined]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.end_lineno != node.lineno:
        assert node.func.end_lineno is not None and node.func.end_col_offset is not None
        starts.insert(0, (node.func.end_lineno, node.func.end_col_offset - len(node.func.attr.encode())))
    end = characters(filename, end_lineno, end_col)
    return [(lineno, end_lineno, characters(filename, lineno, col), end) for lineno, col in starts]


def characters(filename: str, lineno: int, column: int) -> int:
    """A column in characters from one in UTF-8 bytes."""
    return len(linecache.getline(filename, lineno).encode()[:column].decode(errors="replace"))


def _is_at(node: ast.AST, site: Site) -> bool:
    if not hasattr(node, "lineno"):
        return False
    return (site.lineno, site.end_lineno, site.col, site.end_col) in _columns(node, site.filename)


def _covers_exactly_one_line(node: ast.AST, site: Site) -> bool:
    """Whether ``node`` is the statement whose part (the target of ``y[0] = v``) the site tells."""
    if not isinstance(node, (ast.Assign, ast.AugAssign)) or site.col is None:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(_is_at(target, site) for target in targets)


def _at(site: Site, node: ast.AST) -> Site:
    spans = _columns(node, site.filename)
    exact = (site.lineno, site.end_lineno, site.col, site.end_col)
    lineno, end_lineno, col, end_col = next((span for span in spans if span == exact), spans[0])
    lines = tuple(linecache.getlines(site.filename)[lineno - 1 : end_lineno])
    lines = tuple(line.rstrip("\n") for line in lines)
    return replace(site, lineno=lineno, end_lineno=end_lineno, col=col, end_col=end_col, line=lines[0], lines=lines)
