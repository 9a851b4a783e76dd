"""Known violations in a file: what is in there is let through, what is new is not.

A violation is known by the text of its place: the file, the operator and the line of source.  It stays known when
lines are added above it, and is new again once its line is edited.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from .violations import Violation

VERSION = 1


class Known(NamedTuple):
    """What a violation is known by.

    ``file`` is the path from the top of the package that the file is in, or else the name of the file; ``line`` is the
    source text, or ``in function`` where the source is gone.
    """

    file: str
    line: str
    op: str


def known(violation: Violation) -> Known:
    """What ``violation`` is known by.

    Args:
        violation: the violation; one without a place goes by that of its conversion.

    Returns:
        File, line and operator.
    """
    site = violation.site or violation.conversion.site
    if site is None:
        return Known("", "", violation.call)
    return Known(_within_package(site.filename), site.line.strip() or f"in {site.function}", violation.call)


def _within_package(filename: str) -> str:
    directory, name = os.path.split(filename)
    while os.path.isfile(os.path.join(directory, "__init__.py")):
        directory, package = os.path.split(directory)
        name = f"{package}/{name}"
    return name


def places(violations: Iterable[Violation]) -> Counter[Known]:
    """At how many places (the same line may be written twice) each known thing is; allowed ones are left out."""
    distinct = {}
    for violation in violations:
        if violation.allowed is None:
            site = violation.site or violation.conversion.site
            distinct[(known(violation), site and (site.filename, site.lineno))] = known(violation)
    return Counter(distinct.values())


def dumps(violations: Iterable[Violation]) -> str:
    """The text of a baseline in which all of ``violations`` are known, the same however they are ordered.

    Args:
        violations: what was found; allowed ones are left out.

    Returns:
        JSON.

    Example:
        >>> from dispatch_guard.baseline import dumps, loads
        >>> loads(dumps([]))
        Counter()
    """
    entries = [{**entry._asdict(), "places": count} for entry, count in sorted(places(violations).items())]
    return json.dumps({"version": VERSION, "violations": entries}, indent=2, ensure_ascii=False) + "\n"


def loads(text: str) -> Counter[Known]:
    """Read what :func:`dumps` wrote.

    Args:
        text: JSON.

    Returns:
        What is known, and at how many places.

    Raises:
        ValueError: when it is something else.
    """
    try:
        data = json.loads(text)
        if data["version"] != VERSION:
            raise ValueError(f"it is of version {data['version']}, not {VERSION}")
        entries = [(Known(*(str(entry[name]) for name in Known._fields)), entry) for entry in data["violations"]]
        return Counter({name: int(entry.get("places", 1)) for name, entry in entries})
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"it is no baseline ({type(error).__name__}: {error})") from error


def allow(violations: Iterable[Violation], baseline: Counter[Known], reason: str) -> list[Violation]:
    """``violations`` with those that are known marked as allowed.

    When a line is at more places than the baseline knows, none of them is allowed: there is no telling which is new.

    Args:
        violations: what was found in one target.
        baseline: what is known.
        reason: the reason to give.

    Returns:
        The violations, in the same order.
    """
    violations = list(violations)
    found = places(violations)
    return [
        replace(violation, allowed=reason)
        if violation.allowed is None and found[known(violation)] <= baseline[known(violation)]
        else violation
        for violation in violations
    ]
