"""README.md is true: its example gives the output it shows, its claims about the API hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import dispatch_guard

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_first_example_gives_the_error_it_shows(tmp_path: Path) -> None:
    program = tmp_path / "model.py"
    program.write_text(blocks("python")[0])
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "model.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    shown = blocks("text")[0].strip()
    assert shown in ran.stderr.replace(str(tmp_path) + "/", "")


def test_every_public_name_is_told() -> None:
    told = README.read_text()
    for name in dispatch_guard.__all__:
        assert name in told
