"""The command line: check models for writes after conversions, run scripts with their exports guarded."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import torch

from . import baseline
from .readings import DivergenceReport, Reading
from .report import FORMATS, JSON_VERSION, in_order, render, report
from .run import VARIABLE, CannotRun, run
from .targets import CannotCheck, check, one_line, tensor_of
from .violations import Violation

CLEAN, VIOLATIONS, FAILED, INTERRUPTED = 0, 1, 2, 130

_FAIL_ON = ("any", "observable", "never")  # which violations make the exit status 1: see _counts

_EXIT = "exit status: 0 when nothing was found, 1 for violations, 2 when a target could not be checked."

_CHECK_HELP = f"""\
a target is one of
  file.py:factory            a function without arguments that returns (module, args) or (module, args, kwargs)
  package.module:factory     the same in a module that can be imported from here
  file.py:Class              an nn.Module class that builds without arguments, with --input for each of its inputs
  file.pt2                   a program that torch.export.save wrote; its graph is read, nothing of it is run
The code of the first three is run. A .pt2 file is given to torch.export.load and to nothing else; but that may unpickle
what is in the file and load compiled code from it, so check only files that you trust.

examples:
  dispatch-guard check my_models.py:small
  dispatch-guard check my_models.py:small my_package.models:large --strict
  dispatch-guard check my_models.py:Net --input 1x3x224x224 --input i64:1x16
  dispatch-guard check exported.pt2
  dispatch-guard check my_models.py:small --format sarif --output dispatch-guard.sarif
  dispatch-guard check my_models.py:small --format github          # in a GitHub workflow
  dispatch-guard check my_models.py:small --write-baseline known.json
  dispatch-guard check my_models.py:small --allow known.json       # fails for what is new only

{_EXIT}
"""


_RUN_HELP = f"""\
{VARIABLE} in the environment says what is done about violations:
  raise     (default) the export raises a ToMutationError
  warn      a ToMutationWarning at the line of the write
  record    a report on stderr at the end; exit status 1 if there were any, and the script ended well otherwise

examples:
  dispatch-guard run export_model.py --size small
  {VARIABLE}=record dispatch-guard run -m my_package.export
  {VARIABLE}=record torchrun --nproc-per-node 2 -m dispatch_guard run export_model.py     # a report from each rank

exit status: that of the script; 2 when there is nothing to run.
"""


class Checked(NamedTuple):
    """A target, and what came out; ``problem`` is why it could not be checked."""

    target: str
    violations: list[Violation]
    conversions: int
    problem: str = ""
    proof: DivergenceReport | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; those of the process when left out.

    Returns:
        The exit status: 0, 1 for violations, 2 when a target could not be checked, 130 after Ctrl-C.

    Raises:
        SystemExit: for a bad command line (2) and for ``--help`` (0).
    """
    options = _parser().parse_args(argv)
    try:
        status: int = options.command(options)
    except KeyboardInterrupt:
        _tell("interrupted")
        return INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dispatch-guard",
        description="Find in-place writes to tensors that have been through to().",
        epilog="dispatch-guard COMMAND --help tells more, with examples.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_check(commands)
    _add_run(commands)
    return parser


def _add_check(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="export models under a recording guard and report the violations",
        description="Export each model under a recording guard and report every write after a conversion.",
        epilog=_CHECK_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_check)
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="file.py:name, package.module:name or file.pt2")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        type=_input,
        dest="inputs",
        metavar="[DTYPE:]SIZES",
        help="an input of a module that comes without, once for each: 1x3x224x224 (float32), i64:1x16; dtypes are f16, "
        "bf16, f32, f64, i32, i64, bool and torch's own names; floating-point inputs are random, others zeros",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--strict", action="store_true", help="export with strict=True")
    how.add_argument("--eager", action="store_true", help="run the module once instead of exporting it")
    parser.add_argument("--format", choices=FORMATS, default="text", help="of the results (default: text)")
    parser.add_argument("--output", metavar="FILE", help="write the results there instead of to stdout")
    parser.add_argument(
        "--prove",
        action="store_true",
        help="run a module that has violations with its conversions read the other way too, and tell what differs",
    )
    parser.add_argument(
        "--fail-on",
        choices=_FAIL_ON,
        default="any",
        help="which violations make the exit status 1 (default: any); "
        "observable: all but those that --prove finds harmless",
    )
    parser.add_argument("--allow", metavar="FILE", help="a baseline: the violations in it are known, and let through")
    parser.add_argument("--write-baseline", metavar="FILE", help="write all violations there as known, and exit with 0")
    parser.add_argument(
        "--traceback", action="store_true", help="print the traceback, and torch's logs, of what failed"
    )


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="run a script with every export that it makes guarded",
        description="Run a script, or with -m a module, as python does, and guard every export that it makes.",
        usage="dispatch-guard run [-h] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        epilog=_RUN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_run)
    parser.add_argument("-m", action="store_true", dest="is_module", help="run a module, as python -m does")
    parser.add_argument("name", metavar="SCRIPT", help="the script, or the name of the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="what the script is given")


def _input(text: str) -> torch.Tensor:
    try:
        return tensor_of(text)
    except (ValueError, RuntimeError) as error:  # RuntimeError: more memory than there is
        raise argparse.ArgumentTypeError(one_line(error).partition(": ")[2]) from None


# ---- dispatch-guard check


def _check(options: argparse.Namespace) -> int:
    try:
        known = _read_baseline(options.allow)
        results = _Results(options.output)
    except CannotCheck as problem:
        _tell(str(problem))
        return FAILED
    many = len(options.targets) > 1
    everything: list[Checked] = []
    found: list[Violation] = []  # those that the baseline knows are in it once more when it is written anew
    with results:
        for number, target in enumerate(options.targets, 1):
            if many and sys.stderr.isatty():
                print(f"[{number}/{len(options.targets)}] {target}", file=sys.stderr)
            checked = _check_one(target, options)
            found += checked.violations
            checked = checked._replace(violations=baseline.allow(checked.violations, known, f"in {options.allow}"))
            everything.append(checked)
            if options.format == "text" and not checked.problem:
                results.write(f"{target}:\n" if many else "")
                results.write(_coloured(_findings(checked), results.colour) + "\n" + ("\n" if many else ""))
        if options.format != "text":
            results.write(_OF_ALL[options.format](everything))
        elif many:
            results.write(_table(everything) + "\n")
    if options.allow:
        _tell_stale(options.allow, known, everything)
    if options.write_baseline:
        return _write_baseline(options.write_baseline, found, any(checked.problem for checked in everything))
    return max(_status(checked, options.fail_on) for checked in everything)


def _check_one(target: str, options: argparse.Namespace) -> Checked:
    try:
        with _printing_to_stderr():
            seen = check(
                target,
                options.inputs,
                strict=options.strict,
                eager=options.eager,
                prove=options.prove or options.fail_on == "observable",
                verbose=options.traceback,
            )
    except CannotCheck as problem:
        _tell(f"{target}: {problem}")
        if options.traceback and problem.__cause__ is not None:
            traceback.print_exception(problem.__cause__, file=sys.stderr)
        return Checked(target, [], 0, str(problem))
    return Checked(target, seen.violations, seen.conversions, proof=seen.proof)


@contextlib.contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Stdout is for the results: what the user's code prints, or a program that it starts, goes to stderr."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _tell(text: str) -> None:
    print(f"dispatch_guard: {text}", file=sys.stderr)


def _status(checked: Checked, fail_on: str) -> int:
    if checked.problem:
        return FAILED
    failing = any(_counts(violation, fail_on, checked.proof) for violation in checked.violations)
    return VIOLATIONS if failing else CLEAN


def _counts(violation: Violation, fail_on: str, proof: DivergenceReport | None) -> bool:
    """Whether a violation makes the exit status 1."""
    if violation.allowed is not None or fail_on == "never":
        return False
    readings = _readings(violation, proof)
    harmless = bool(readings) and all(reading.runnable and not reading.diverges for reading in readings)
    return fail_on == "any" or not harmless


def _readings(violation: Violation, proof: DivergenceReport | None) -> list[Reading]:
    """What came of the runs of a violation's conversion."""
    site = violation.conversion.site
    if proof is None or site is None:
        return []
    places = ((reading, reading.conversion.site) for reading in proof.readings)
    return [r for r, place in places if place and (place.filename, place.lineno) == (site.filename, site.lineno)]


def _proof(violation: Violation, proof: DivergenceReport | None) -> str:
    """The verdict of the runs as a line; ``""`` where there were none."""
    if proof is None:
        return ""
    readings = _readings(violation, proof)
    if not readings:
        return "not run: no such conversion was seen in eager mode"
    differences = [str(reading.difference) for reading in readings if reading.diverges]
    if differences:
        return f"{differences[0]} where {violation.conversion.call} copies"
    if not all(reading.runnable for reading in readings):
        return f"not runnable here: {violation.conversion.call} copied"
    return f"none: the results are the same where {violation.conversion.call} copies"


class _Results:
    """Where the results go: stdout, or a file.

    A reader that goes away (``| head``) changes nothing about the verdict: the rest is checked, and not written.
    """

    def __init__(self, path: str | None) -> None:
        try:
            self._file: TextIO = open(path, "w", encoding="utf-8") if path else sys.stdout  # noqa: SIM115
        except OSError as error:
            raise CannotCheck(f"cannot write {path}: {error.strerror}") from error
        self._gone = False
        self.colour = _is_colourful(self._file)

    def __enter__(self) -> _Results:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._file is not sys.stdout:
            self._file.close()

    def write(self, text: str) -> None:
        if self._gone:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except BrokenPipeError:
            self._gone = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())  # Python flushes it once more at exit
        except UnicodeEncodeError:  # a terminal in the C locale, and a source line that it cannot show
            self._file.write(text.encode("ascii", "backslashreplace").decode())


def _is_colourful(file: TextIO) -> bool:
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


_COLOURS = [
    (re.compile(r"^in-place .*"), "\x1b[1;31m"),  # bold red
    (re.compile(r"^ +\^+"), "\x1b[31m"),  # red
    (re.compile(r"^  (help|to allow this write): "), "\x1b[36m"),  # cyan
]


def _coloured(text: str, colour: bool) -> str:
    if not colour:
        return text
    lines = text.splitlines()
    for pattern, code in _COLOURS:
        lines = [pattern.sub(lambda found, code=code: f"{code}{found[0]}\x1b[0m", line) for line in lines]  # type: ignore[misc]
    return "\n".join(lines)


# ---- dispatch-guard run


def _run(options: argparse.Namespace) -> int:
    try:
        return run(options.name, options.arguments, is_module=options.is_module)
    except CannotRun as problem:
        _tell(str(problem))
        return FAILED


# ---- results as text


def _unallowed(checked: Checked) -> list[Violation]:
    return [violation for violation in checked.violations if violation.allowed is None]


def _findings(checked: Checked) -> str:
    """The violations, those of the same two places and operator once, and the counts."""
    violations = _unallowed(checked)
    places: dict[tuple[object, ...], list[Violation]] = {}
    for violation in violations:
        places.setdefault((violation.site, violation.conversion.site, violation.call), []).append(violation)
    texts = []
    for same in places.values():
        proof = _proof(same[0], checked.proof)
        texts.append(render(same[0]) + (f"\n  proof: {proof}" if proof else "") + _times(same) + "\n")
    allowed = len(checked.violations) - len(violations)
    counts = f"{checked.conversions} conversions, {len(violations)} violations" + (
        f" ({allowed} allowed)" if allowed else ""
    )
    return "\n".join([*texts, counts])


def _times(same: list[Violation]) -> str:
    if len(same) == 1:
        return ""
    modules = list(dict.fromkeys(violation.module for violation in same if violation.module))
    if len(modules) < 2:
        return f"\n\n  ({len(same)} times)"
    shown = ", ".join(modules[:4]) + (", ..." if len(modules) > 4 else "")
    return f"\n\n  ({len(same)} times, in {len(modules)} modules: {shown})"


def _table(everything: list[Checked]) -> str:
    width = max(len("target"), *(len(checked.target) for checked in everything))
    lines = [f"{'target':{width}}  conversions  violations"]
    for checked in everything:
        counts = f"{checked.conversions:11}  {len(_unallowed(checked)):10}"
        lines.append(f"{checked.target:{width}}  " + ("could not be checked" if checked.problem else counts))
    return "\n".join(lines)


# ---- results in the formats for programs: one text for all targets


def _json(everything: list[Checked]) -> str:
    targets = []
    for checked in everything:
        found = json.loads(report(checked.violations, checked.conversions, "json"))
        del found["version"]
        if checked.proof is not None:
            for entry, violation in zip(found["violations"], in_order(checked.violations)):
                entry["proof"] = _proof(violation, checked.proof)
        targets.append({"target": checked.target, "problem": checked.problem or None, **found})
    return json.dumps({"version": JSON_VERSION, "targets": targets}, indent=2) + "\n"


def _together(everything: list[Checked], format: str) -> str:
    violations = [violation for checked in everything for violation in checked.violations]
    return report(violations, sum(checked.conversions for checked in everything), format)


def _sarif(everything: list[Checked]) -> str:
    found = json.loads(_together(everything, "sarif"))
    notes = [
        {"level": "error", "message": {"text": f"{checked.target}: {checked.problem}"}}
        for checked in everything
        if checked.problem
    ]
    invocation = {"executionSuccessful": not notes, "toolExecutionNotifications": notes}
    found["runs"][0]["invocations"] = [invocation]
    return json.dumps(found, indent=2) + "\n"


def _github(everything: list[Checked]) -> str:
    failed = [
        f"::error title=dispatch_guard::{c.target}: {c.problem}".replace("%", "%25") for c in everything if c.problem
    ]
    return "".join(line + "\n" for line in [_together(everything, "github"), *failed] if line)


_OF_ALL = {"json": _json, "sarif": _sarif, "github": _github}


# ---- baselines


def _read_baseline(path: str | None) -> Counter[baseline.Known]:
    if path is None:
        return Counter()
    try:
        with open(path, encoding="utf-8") as file:
            return baseline.loads(file.read())
    except OSError as error:
        raise CannotCheck(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CannotCheck(f"cannot read {path}: {error}") from error


def _tell_stale(path: str, known: Counter[baseline.Known], everything: list[Checked]) -> None:
    """Say what the baseline lists without need; only when all was checked can that be known."""
    if any(checked.problem for checked in everything):
        return
    found = {baseline.known(violation) for checked in everything for violation in checked.violations}
    stale = len(set(known) - found)
    if stale:
        _tell(f"{stale} of the violations in {path} were not found; write it anew with --write-baseline {path}")


def _write_baseline(path: str, found: list[Violation], failed: bool) -> int:
    if failed:
        _tell(f"{path} is not written, as not all targets could be checked")
        return FAILED
    text = baseline.dumps(found)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        _tell(f"cannot write {path}: {error.strerror}")
        return FAILED
    _tell(f"wrote {len(baseline.loads(text))} known violations to {path}")
    return CLEAN
