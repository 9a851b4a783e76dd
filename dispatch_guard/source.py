"""What the user's source says at a place: which expression is converted or written, and what it is called.

Pure text: nothing here runs or knows torch.  Where the source is gone or the line is ambiguous, the answer is ``None``.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from .violations import Site

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
    """A write in the source, and the text of what it writes; ``instead`` is the same out of place, if that exists."""

    expression: str
    kind: WriteKind
    instead: str | None
    site: Site


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
# Operators whose twin without the underscore does not do the same, or is no method.
_NO_TWIN: Final = frozenset(
    "set_ resize_ resize_as_ uniform_ normal_ random_ exponential_ cauchy_ geometric_ log_normal_ bernoulli_ "
    "as_strided_ index_copy_ apply_ map_ detach_ requires_grad_".split()
)


def conversion_at(site: Site, names: frozenset[str]) -> Converted | None:
    """The call of one of ``names`` (``to``, ``float``, ``as_tensor``) at ``site``."""
    found = [
        (node, parent)
        for node, parent in _nodes_at(site)
        if isinstance(node, ast.Call) and _called(node) in names and (site.col is None or _is_at(node, site))
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
    found: list[Written] = []
    for node, _ in _nodes_at(site):
        if site.col is not None and not _is_at(node, site) and not _covers_exactly_one_line(node, site):
            continue
        written = _as_write(node, operator, site)
        if written is not None:
            found.append(written)
    return found[0] if len(found) == 1 else _most_exact(found, site)


def call_at(site: Site) -> Site:
    """``site`` with the columns of its one outermost call, where only its line is known."""
    if site.col is not None:
        return site
    calls = [node for node, _ in _nodes_at(site) if isinstance(node, ast.Call)]
    inner = {id(child) for call in calls for child in ast.walk(call) if child is not call}
    outermost = [call for call in calls if id(call) not in inner]
    return _at(site, outermost[0]) if len(outermost) == 1 else site


def receiver(expression: str) -> str:
    """``expression`` as it can stand before a dot."""
    try:
        body = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return expression
    simple = isinstance(body, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return expression if simple else f"({expression})"


def _most_exact(found: list[Written], site: Site) -> Written | None:
    exact = [
        written
        for written in found
        if (written.site.lineno, written.site.col, written.site.end_col) == (site.lineno, site.col, site.end_col)
    ]
    return exact[0] if site.col is not None and len(exact) == 1 else None


def _as_write(node: ast.AST, operator: str, site: Site) -> Written | None:
    if isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Subscript):
        target, symbol = _text(node.target), _AUGMENTED.get(type(node.op))
        instead = f"{target} = {target} {symbol} {_text(node.value)}" if symbol else None
        return Written(target, "augmented", instead, _at(site, node))
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for place in targets:
            if isinstance(place, ast.Subscript):
                return Written(_text(place.value), "item", None, _at(site, node))
            if isinstance(place, ast.Attribute) and place.attr == "data" and operator == "data":
                return Written(_text(place.value), "call", None, _at(site, node))
        return None
    if not isinstance(node, ast.Call):
        return None
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if "out" in keywords:
        rest = ", ".join(
            [*map(_text, node.args), *(f"{k}={_text(v)}" for k, v in keywords.items() if k != "out" and k)]
        )
        target = _text(keywords["out"])
        return Written(target, "out", f"{target} = {_text(node.func)}({rest})", _at(site, node))
    name = _called(node)
    if name == operator and isinstance(node.func, ast.Attribute) and not _is_module(node.func.value):
        return Written(_text(node.func.value), "method", _twin(node), _at(site, node))
    inplace = keywords.get("inplace")
    if isinstance(inplace, ast.Constant) and inplace.value is True and node.args:
        return Written(_text(node.args[0]), "inplace", None, _at(site, node))
    if name == operator and node.args:  # torch.relu_(y), nn.init.zeros_(y)
        return Written(_text(node.args[0]), "call", None, _at(site, node))
    return None


def _twin(call: ast.Call) -> str | None:
    """``y = y + 5`` for ``y.add_(5)``."""
    assert isinstance(call.func, ast.Attribute)
    target, name = _text(call.func.value), call.func.attr
    target_is_name = isinstance(call.func.value, (ast.Name, ast.Attribute))
    if name in _NO_TWIN or not name.endswith("_") or not target_is_name:
        return None
    arguments = [*map(_text, call.args), *(f"{k.arg}={_text(k.value)}" for k in call.keywords if k.arg)]
    if name in _SYMBOLS and len(arguments) == 1 and not call.keywords:
        operand = arguments[0] if isinstance(call.args[0], (ast.Name, ast.Constant, ast.Attribute, ast.Call)) else None
        return f"{target} = {target} {_SYMBOLS[name]} {operand or f'({arguments[0]})'}"
    if name == "zero_":
        return f"{target} = torch.zeros_like({target})"
    if name == "fill_" and len(arguments) == 1:
        return f"{target} = torch.full_like({target}, {arguments[0]})"
    if name == "copy_" and len(arguments) == 1:
        return f"{target} = {arguments[0]}.expand_as({target}).to({target}, copy=True)"
    return f"{target} = {target}.{name[:-1]}({', '.join(arguments)})"


def qualified_name(filename: str, lineno: int, function: str) -> str:
    """``Model.forward`` for the function ``forward`` around a line; ``function`` itself where that can't be told."""
    names: list[str] = []
    for node in _enclosing(filename, lineno):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
    if function.startswith("<") and names and function != "<module>":
        return ".".join([*names, function])
    return ".".join(names) if names and names[-1] == function else function


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


def _columns(node: ast.AST, filename: str) -> tuple[int, int, int, int]:
    """First and last line of ``node``, and its columns in characters."""
    lineno, end_lineno = node.lineno, node.end_lineno  # type: ignore[attr-defined]
    col, end_col = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
    return lineno, end_lineno, characters(filename, lineno, col), characters(filename, end_lineno, end_col)


def characters(filename: str, lineno: int, column: int) -> int:
    """A column in characters from one in UTF-8 bytes."""
    return len(linecache.getline(filename, lineno).encode()[:column].decode(errors="replace"))


def _is_at(node: ast.AST, site: Site) -> bool:
    if not hasattr(node, "lineno"):
        return False
    return _columns(node, site.filename) == (site.lineno, site.end_lineno, site.col, site.end_col)


def _covers_exactly_one_line(node: ast.AST, site: Site) -> bool:
    """Whether ``node`` is the statement whose part (the target of ``y[0] = v``) the site tells."""
    if not isinstance(node, (ast.Assign, ast.AugAssign)) or site.col is None:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(_is_at(target, site) for target in targets)


def _at(site: Site, node: ast.AST) -> Site:
    lineno, end_lineno, col, end_col = _columns(node, site.filename)
    line = linecache.getline(site.filename, lineno).rstrip("\n")
    return replace(site, lineno=lineno, end_lineno=end_lineno, col=col, end_col=end_col, line=line)
