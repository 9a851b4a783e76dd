"""``dispatch-guard run``: an unmodified script, with every export that it makes guarded."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import cast, get_args

import torch

from .exports import guarding_exports
from .guard import OnViolation, ToMutationGuard
from .report import report
from .violations import Violation

VARIABLE = "TO_MUTATION_GUARD"


class CannotRun(Exception):
    """Why there is nothing to run, in one line."""


def run(name: str, arguments: Sequence[str], *, is_module: bool = False) -> int:
    """Run a script, or a module, as ``python`` would, and guard the exports that it makes.

    What is done about violations is said by the environment variable ``TO_MUTATION_GUARD``: ``raise`` (the default)
    from the export, ``warn``, or ``record``, which prints a report to stderr at the end.

    Args:
        name: the path of the script, or the name of the module.
        arguments: what the script finds in ``sys.argv[1:]``.
        is_module: whether ``name`` is that of a module, as after ``python -m``.

    Returns:
        The exit status of the script; with ``record``, 1 for one that ended well but with violations.

    Raises:
        CannotRun: when there is no such script or module, or the variable has another value.
    """
    on_violation = os.environ.get(VARIABLE) or "raise"
    if on_violation not in get_args(OnViolation):
        raise CannotRun(f"{VARIABLE} must be one of {', '.join(get_args(OnViolation))}, not {on_violation!r}")
    start = _module(name) if is_module else _script(name)
    sys.argv = [name, *arguments]
    seen = _Seen()
    with guarding_exports(seen.add, on_violation=cast(OnViolation, on_violation)):
        status = _status_of(start)
    if on_violation == "record":
        sys.stderr.write(seen.text())  # in one piece: other ranks write there, too
        status = status or int(seen.has_violations())
    return status


class _Seen:
    """What all exports of the process have shown."""

    def __init__(self) -> None:
        self.exports = 0
        self.conversions = 0
        self.violations: list[Violation] = []
        self.rank = os.environ.get("RANK", "")  # of torchrun

    def add(self, guard: ToMutationGuard) -> None:
        self.exports += 1
        self.conversions += guard.conversions
        self.violations += guard.violations
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank = str(torch.distributed.get_rank())

    def has_violations(self) -> bool:
        return any(violation.allowed is None for violation in self.violations)

    def text(self) -> str:
        rank = f"rank {self.rank}: " if self.rank else ""
        exports = f"dispatch_guard: {rank}{self.exports} exports\n"
        return exports + (report(self.violations, self.conversions) + "\n" if self.exports else "")


def _script(path: str) -> Callable[[], object]:
    if not os.path.exists(path):
        raise CannotRun(f"no such file: {path}")
    path = os.path.abspath(path)  # the script may change the directory
    if os.path.isfile(path):  # runpy does it for the others
        _first_on_path(os.path.dirname(path))
    return lambda: runpy.run_path(path, run_name="__main__")


def _module(name: str) -> Callable[[], object]:
    _first_on_path(os.getcwd())
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the package that it is in
        found = None
    if found is None:
        raise CannotRun(f"no module named {name!r}")
    return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)


def _first_on_path(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # of python -P, since 3.11
        sys.path[0] = directory


def _status_of(start: Callable[[], object]) -> int:
    """The exit status that Python would end with."""
    try:
        start()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = _of_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback below what runs the script."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        trace = trace.tb_next
    return trace
