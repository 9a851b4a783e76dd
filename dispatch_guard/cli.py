"""The command line: check models for writes after conversions."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from .guard import ToMutationGuard
from .report import render
from .violations import Violation

_EPILOG = """\
A factory takes no arguments and returns (module, args) or (module, args, kwargs).

examples:
  python -m dispatch_guard check my_models.py:small
  python -m dispatch_guard check my_package.models:small --strict

exit status: 0 when nothing was found, 1 for violations, 2 when a target could not be checked.
"""


class CannotCheck(Exception):
    """Why a target cannot be checked, in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; those of the process when left out.

    Returns:
        The exit status: 0, 1 for violations, 2 when a target could not be checked.

    Raises:
        SystemExit: for a bad command line (2) and for ``--help`` (0).
    """
    options = _parser().parse_args(argv)
    status = 0
    for target in options.targets:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for the results; the user's code may print
                guard = _run(target, options)
        except CannotCheck as problem:
            status = 2
            print(f"dispatch_guard: {target}: {problem}", file=sys.stderr)
            if options.traceback and problem.__cause__ is not None:
                traceback.print_exception(problem.__cause__, file=sys.stderr)
            continue
        if len(options.targets) > 1:
            print(f"{target}:")
        found = _print_findings(guard)
        status = max(status, 1 if found else 0)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dispatch-guard",
        description="Find in-place writes to tensors that have been through to().",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="export models under a recording guard and report the violations",
        description="Export each model under a recording guard and report every write after a conversion.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("targets", nargs="+", metavar="TARGET", help="file.py:factory or package.module:factory")
    how = check.add_mutually_exclusive_group()
    how.add_argument("--strict", action="store_true", help="export with strict=True")
    how.add_argument("--eager", action="store_true", help="run the module once instead of exporting it")
    check.add_argument("--traceback", action="store_true", help="print the traceback, and torch's logs, of what failed")
    return parser


@contextlib.contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Whatever the user's code raises, ``sys.exit()`` included, is why the target cannot be checked."""
    try:
        yield
    except CannotCheck:
        raise
    except (Exception, SystemExit) as error:
        raise CannotCheck(f"{what} failed: {_one_line(error)}") from error


def _run(target: str, options: argparse.Namespace) -> ToMutationGuard:
    factory = _find_factory(target)
    with _reporting("the factory"):
        made = factory()
    module, args, kwargs = _made_by(made)
    guard = ToMutationGuard(on_violation="record")
    if options.eager:
        with _reporting("running it"), guard:
            module(*args, **kwargs)
    else:
        quiet = contextlib.nullcontext() if options.traceback else _no_dump_on_failure()
        with _reporting("exporting it"), quiet, guard:
            torch.export.export(module, args, kwargs, strict=options.strict)
    return guard


@contextlib.contextmanager
def _no_dump_on_failure() -> Iterator[None]:
    """Torch logs, and writes to stderr, whole graphs when an export fails; leave the reason alone on its line."""
    held = io.StringIO()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(held):
            yield
    finally:
        logging.disable(before)
    sys.stderr.write(held.getvalue())  # warnings, say


def _print_findings(guard: ToMutationGuard) -> int:
    """Print the violations, those of the same two places and operator once, and the counts; return how many."""
    violations = [violation for violation in guard.violations if violation.allowed is None]
    places: dict[tuple[object, ...], list[Violation]] = {}
    for violation in violations:
        places.setdefault((violation.site, violation.conversion.site, violation.op), []).append(violation)
    for same in places.values():
        print(render(same[0]) + _times(same) + "\n")
    print(f"{guard.conversions} conversions, {len(violations)} violations")
    return len(violations)


def _times(same: list[Violation]) -> str:
    if len(same) == 1:
        return ""
    modules = list(dict.fromkeys(violation.module for violation in same if violation.module))
    if len(modules) < 2:
        return f"\n\n  ({len(same)} times)"
    shown = ", ".join(modules[:4]) + (", ..." if len(modules) > 4 else "")
    return f"\n\n  ({len(same)} times, in {len(modules)} modules: {shown})"


def _find_factory(target: str) -> Callable[[], Any]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise CannotCheck("not a target: write file.py:factory or package.module:factory")
    with _reporting("importing it"):
        module = _load_file(place) if place.endswith(".py") or os.sep in place else _load_module(place)
    try:
        factory: Any = module
        for part in name.split("."):
            factory = getattr(factory, part)
    except AttributeError:
        raise CannotCheck(f"there is no {name!r} in {place}") from None
    if not callable(factory):
        raise CannotCheck(f"{name!r} in {place} is not a function but {type(factory).__name__}")
    return factory  # type: ignore[no-any-return]


def _load_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise CannotCheck(f"no such file: {path}")
    path = os.path.abspath(path)
    directory, file = os.path.split(path)
    name, extension = os.path.splitext(file)
    if extension != ".py":
        raise CannotCheck("not a Python file")
    root = directory
    while os.path.isfile(os.path.join(root, "__init__.py")):
        root, package = os.path.split(root)
        name = f"{package}.{name}"
    _put_on_path(root)  # as `python file.py` does
    if root == directory:
        return _load_script(name, path)
    module = importlib.import_module(name)  # relative imports work only in a module that knows its package
    if module.__file__ is None or not os.path.samefile(module.__file__, path):
        raise CannotCheck(f"it is {name} by its place, but {name} is {module.__file__} here")
    return module


def _load_script(name: str, path: str) -> ModuleType:
    """The file as a module that pickle and inspect find by its name; loaded once however many targets it has."""
    while name in sys.modules:
        if getattr(sys.modules[name], "__file__", None) == path:
            return sys.modules[name]
        name += "_"  # the user's random.py must not take the place of Python's
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # there is always a loader for .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    _put_on_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise CannotCheck(f"no module named {name!r}") from None
        raise


def _put_on_path(directory: str) -> None:
    if directory not in sys.path:
        sys.path.insert(0, directory)


def _made_by(made: Any) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise CannotCheck(f"the factory must return (module, args) or (module, args, kwargs), not {_shape(made)}")
    module, args, *rest = made
    kwargs = rest[0] if rest else {}
    if not isinstance(module, torch.nn.Module):
        raise CannotCheck(f"the first thing that the factory returns must be an nn.Module, not {type(module).__name__}")
    if not isinstance(args, (tuple, list)):
        raise CannotCheck(f"the second thing that the factory returns must be a tuple, not {type(args).__name__}")
    if not isinstance(kwargs, dict):
        raise CannotCheck(f"the third thing that the factory returns must be a dict, not {type(kwargs).__name__}")
    return module, tuple(args), kwargs


def _shape(made: Any) -> str:
    return f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
