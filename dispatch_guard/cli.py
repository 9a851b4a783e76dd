"""The command line: check models for writes after conversions."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .guard import ToMutationGuard
from .report import render

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
            found = _check(target, strict=options.strict, eager=options.eager, headed=len(options.targets) > 1)
            status = max(status, found)
        except CannotCheck as problem:
            status = 2
            print(f"dispatch_guard: {target}: {problem}", file=sys.stderr)
            if options.traceback and problem.__cause__ is not None:
                traceback.print_exception(problem.__cause__, file=sys.stderr)
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
    check.add_argument("--traceback", action="store_true", help="print the traceback of what failed")
    return parser


def _check(target: str, *, strict: bool, eager: bool, headed: bool) -> int:
    factory = _find_factory(target)
    try:
        made = factory()
    except Exception as error:
        raise CannotCheck(f"the factory failed: {_one_line(error)}") from error
    module, args, kwargs = _made_by(made)
    guard = ToMutationGuard(on_violation="record")
    try:
        # Chatter of the model and of torch is not the result.
        with contextlib.redirect_stdout(sys.stderr), guard:
            if eager:
                module(*args, **kwargs)
            else:
                torch.export.export(module, args, kwargs, strict=strict)
    except Exception as error:
        raise CannotCheck(f"{'running' if eager else 'exporting'} it failed: {_one_line(error)}") from error
    violations = [violation for violation in guard.violations if violation.allowed is None]
    if headed:
        print(f"{target}:")
    for message, count in Counter(map(render, violations)).items():
        print(message + (f"\n\n  ({count} times)" if count > 1 else "") + "\n")
    print(f"{guard.conversions} conversions, {len(violations)} violations")
    return 1 if violations else 0


def _find_factory(target: str) -> Callable[[], Any]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise CannotCheck("not a target: write file.py:factory or package.module:factory")
    try:
        module = _load_file(place) if place.endswith(".py") or os.sep in place else _load_module(place)
    except CannotCheck:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise CannotCheck(f"importing it failed: {_one_line(error)}") from error
    try:
        factory = module
        for part in name.split("."):
            factory = getattr(factory, part)
    except AttributeError:
        raise CannotCheck(f"there is no {name!r} in {place}") from None
    if not callable(factory):
        raise CannotCheck(f"{name!r} in {place} is not a function but {type(factory).__name__}")
    return factory  # type: ignore[no-any-return]


def _load_file(path: str) -> Any:
    if not os.path.isfile(path):
        raise CannotCheck(f"no such file: {path}")
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CannotCheck(f"not a Python file: {path}")
    directory = os.path.dirname(os.path.abspath(path))
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as `python file.py` does
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling and inspect look a class's module up there
    with contextlib.redirect_stdout(sys.stderr):
        spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> Any:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise CannotCheck(f"no module named {name!r}") from None
        raise


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
