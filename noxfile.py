"""The tests against each torch that is supported: ``nox``, or ``nox -s "tests(torch='2.13.0')"``."""

from __future__ import annotations

import nox


@nox.session
@nox.parametrize("torch", ["2.10.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"])
def tests(session: nox.Session, torch: str) -> None:
    """Run the tests."""
    session.install(f"torch=={torch}", "-e", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and types."""
    session.install("torch==2.13.0", "ruff", "mypy", "-e", ".[test]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", "--strict")
