"""What the command line checks: from the text of a target to its violations."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .capture import check_program, count_conversions
from .guard import ToMutationGuard
from .readings import DivergenceReport, divergence
from .violations import ToMutationError, Violation

_DTYPES = {
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
}


class CannotCheck(Exception):
    """Why a target cannot be checked, in one line."""


class Seen(NamedTuple):
    """What was found in a target."""

    violations: list[Violation]
    conversions: int
    proof: DivergenceReport | None = None


def check(
    target: str,
    inputs: Sequence[torch.Tensor] = (),
    *,
    strict: bool = False,
    eager: bool = False,
    prove: bool = False,
    verbose: bool = False,
) -> Seen:
    """Check one target.

    Args:
        target: ``file.py:name``, ``package.module:name`` or ``file.pt2``.
        inputs: what to call a module with whose target comes without inputs.
        strict: export with ``strict=True``.
        eager: run the module once instead of exporting it.
        prove: run the module with its conversions read the other way too, if there are violations; not a saved program.
        verbose: let through what torch logs when an export fails.

    Returns:
        The violations, how many conversions there were, and the proof that was asked for.

    Raises:
        CannotCheck: when there is nothing to check, or when it fails.

    Example:
        >>> from dispatch_guard.targets import check
        >>> check("no_such_module:small")
        Traceback (most recent call last):
        dispatch_guard.targets.CannotCheck: no module named 'no_such_module'
    """
    quiet = contextlib.nullcontext() if verbose else _no_dump_on_failure()
    if target.endswith(".pt2"):
        return _check_saved(target, quiet)
    module, args, kwargs = _made_by(target, inputs)
    guard = ToMutationGuard(on_violation="record")
    with reporting("running it" if eager else "exporting it"), contextlib.nullcontext() if eager else quiet:
        try:
            with guard:
                if eager:
                    module(*args, **kwargs)
                else:
                    torch.export.export(module, args, kwargs, strict=strict)
        except ToMutationError as error:  # of a guard of the user's own
            if error.violation not in guard.violations:
                guard.violations.append(error.violation)
    proof = None
    if prove and guard.violations:
        with reporting("proving it by running it"):
            proof = divergence(module, args, kwargs)
    return Seen(guard.violations, guard.conversions, proof)


def _check_saved(path: str, quiet: contextlib.AbstractContextManager[None]) -> Seen:
    if not os.path.isfile(path):
        raise CannotCheck(f"no such file: {path}")
    with reporting("loading it"), quiet:
        try:
            program = torch.export.load(path)
        except KeyError as error:
            if error.args == ("model",):  # an archive of programs with names of their own
                raise CannotCheck("there is no program in it of the name that torch.export.save gives") from error
            raise
    with reporting("reading its graph"):
        return Seen(check_program(program), count_conversions(program))


def tensor_of(text: str) -> torch.Tensor:
    """An input from its description: zeros for integers and booleans, random numbers (always the same) for others.

    Args:
        text: the sizes, ``1x3x224x224``, after a dtype if it is not float32, ``i64:1x16``; without sizes a scalar.

    Returns:
        The tensor.

    Raises:
        ValueError: for another text.

    Example:
        >>> from dispatch_guard.targets import tensor_of
        >>> tensor_of("i64:1x3")
        tensor([[0, 0, 0]])
        >>> tensor_of("bf16:2x0").dtype
        torch.bfloat16
    """
    name, _, sizes = text.rpartition(":")
    dtype = _DTYPES.get(name) or getattr(torch, (name or "float32").removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name!r}: {', '.join(_DTYPES)}, bool, or a name of torch, such as float8_e4m3fn")
    try:
        shape = [int(size) for size in sizes.split("x")] if sizes else []
    except ValueError:
        shape = [-1]
    if any(size < 0 for size in shape) or not text:
        raise ValueError(f"no sizes: {sizes!r}; write 1x3x224x224, or i64:1x16")
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@contextlib.contextmanager
def reporting(what: str) -> Iterator[None]:
    """Whatever the user's code raises, ``sys.exit()`` included, is why the target cannot be checked.

    Args:
        what: what is being done, for the message.

    Raises:
        CannotCheck: in place of what was raised; Ctrl-C goes through.
    """
    try:
        yield
    except (CannotCheck, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise CannotCheck(f"{what} failed: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its message.

    Example:
        >>> from dispatch_guard.targets import one_line
        >>> one_line(ValueError("no such luck\\nand more")), one_line(MemoryError())
        ('ValueError: no such luck', 'MemoryError')
    """
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


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


# ---- finding what a target names

Made = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


def _made_by(target: str, inputs: Sequence[torch.Tensor]) -> Made:
    found, name, place = _find(target)
    if isinstance(found, type) and not issubclass(found, torch.nn.Module):
        raise CannotCheck(f"{name!r} in {place} is a class, but no nn.Module")
    if isinstance(found, torch.nn.Module):
        made: Any = found
    elif callable(found):
        with reporting("building it" if isinstance(found, type) else "the factory"):
            made = found()
    else:
        raise CannotCheck(f"{name!r} in {place} is not a function but {type(found).__name__}")
    if isinstance(made, torch.nn.Module) and inputs:
        return made, tuple(inputs), {}
    if isinstance(found, (type, torch.nn.Module)):
        raise CannotCheck(f"{name!r} in {place} is an nn.Module without inputs: give them, as --input 1x3x224x224")
    return _checked(made)


def _checked(made: Any) -> Made:
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


def _find(target: str) -> tuple[Any, str, str]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise CannotCheck("not a target: write file.py:factory, package.module:factory or file.pt2")
    with reporting("importing it"):
        module = _load_file(place) if place.endswith(".py") or os.sep in place else _load_module(place)
    try:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise CannotCheck(f"there is no {name!r} in {place}") from None
    return found, name, place


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
