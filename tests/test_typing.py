"""The types of the public functions, as mypy sees them from outside of the package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "typing_cases.py"


def test_mypy_says_what_the_cases_say(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    expected = set()
    for number, line in enumerate(CASES.read_text().splitlines(), 1):
        if "  # error: " in line:
            expected.add((number, "error", line.partition("# error: ")[2]))
        elif line.lstrip().startswith("reveal_type("):
            expected.add((number, "note", line.partition("  # ")[2]))
    options = ("--strict", "--no-error-summary", "--hide-error-context", "--cache-dir", str(tmp_path))
    command = [sys.executable, "-m", "mypy", *options, "--config-file", "", str(CASES)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    said = set()
    for line in ran.stdout.splitlines():
        found = re.fullmatch(r".*typing_cases\.py:(\d+): (error|note): (.*)", line)
        if found is None:
            continue
        kind, text = found[2], found[3]
        revealed = re.fullmatch(r'Revealed type is "(.*)"', text)
        code = re.search(r"\[([\w-]+)\]$", text)
        if kind == "error":
            said.add((int(found[1]), kind, code[1] if code else text))
        elif revealed is not None:
            said.add((int(found[1]), kind, revealed[1].replace("typing_cases.", "").replace("builtins.", "")))
    assert said == expected, ran.stdout + ran.stderr
