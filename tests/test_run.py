"""``dispatch-guard run``: scripts and modules as python runs them, with their exports guarded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
import sys
from pathlib import Path

import torch
from torch import nn
from torch.export import export

import neighbour


class Bad(nn.Module):
    def forward(self, x):
        y = x.to("cpu")
        y.add_(5)
        return x.sin()


if __name__ == "__main__":
    print(__name__, Path(__file__).name, sys.argv[1:], neighbour.name)
    export(Bad(), (torch.zeros(3),))
    print("exported")
    if "exit" in sys.argv:
        sys.exit(7)
    if "fail" in sys.argv:
        raise ValueError("no such luck")
    if "exit with words" in sys.argv:
        sys.exit("words")
"""

RANKS = """
import os
import sys

import torch
import torch.distributed as dist
from script import Bad

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
if rank == 1:
    torch.export.export(Bad(), (torch.zeros(3),))
else:
    torch.export.export(torch.nn.Linear(3, 3), (torch.zeros(3),))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    directory = tmp_path / "scripts"
    directory.mkdir()
    (directory / "script.py").write_text(SCRIPT)
    (directory / "neighbour.py").write_text("name = 'neighbour'\n")
    (directory / "ranks.py").write_text(RANKS)
    (directory / "plain.py").write_text("import sys\nprint(sys.argv[1:])\n")
    (directory / "typo.py").write_text("def (\n")
    return directory


def run(directory: Path, *arguments: str, mode: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default::UserWarning:script"}
    environment.pop("TO_MUTATION_GUARD", None)
    if mode is not None:
        environment["TO_MUTATION_GUARD"] = mode
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=100
    )


GUARDED = ("-m", "dispatch_guard", "run")


def test_the_export_of_an_unmodified_script_raises(scripts: Path) -> None:
    ran = run(scripts.parent, *GUARDED, "scripts/script.py", "--size", "3", "--", "-h")
    assert ran.returncode == 1
    assert ran.stdout == "__main__ script.py ['--size', '3', '--', '-h'] neighbour\n"
    assert "dispatch_guard.ToMutationError: in-place aten.add_.Tensor on the result of Tensor.to" in ran.stderr
    traceback = ran.stderr.splitlines()
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[1] == f'  File "{scripts}/script.py", line 21, in <module>'  # as python script.py begins it


def test_recording_reports_at_the_end_and_fails(scripts: Path) -> None:
    ran = run(scripts, *GUARDED, "script.py", mode="record")
    assert ran.returncode == 1
    assert ran.stdout == "__main__ script.py [] neighbour\nexported\n"
    assert ran.stderr.startswith("dispatch_guard: 1 exports\nin-place aten.add_.Tensor on the result of Tensor.to\n")
    assert ran.stderr.endswith("1 conversions, 1 violations\n")


def test_a_module(scripts: Path) -> None:
    ran = run(scripts, *GUARDED, "-m", "script", "-m", "x", mode="record")
    assert ran.returncode == 1
    assert ran.stdout == "__main__ script.py ['-m', 'x'] neighbour\nexported\n"


def test_a_warning(scripts: Path) -> None:
    ran = run(scripts, *GUARDED, "script.py", mode="warn")
    assert ran.returncode == 0
    assert ran.stdout.endswith("exported\n")
    assert f"{scripts}/script.py:15: ToMutationWarning: in-place aten.add_.Tensor" in ran.stderr


@pytest.mark.parametrize(
    "argument, status, ending",
    [
        ("exit", 7, "1 conversions, 1 violations\n"),
        ("exit with words", 1, "1 conversions, 1 violations\n"),
        ("fail", 1, "1 conversions, 1 violations\n"),
    ],
)
def test_the_exit_status_of_the_script_is_kept(scripts: Path, argument: str, status: int, ending: str) -> None:
    ran = run(scripts, *GUARDED, "script.py", argument, mode="record")
    assert ran.returncode == status
    assert ran.stderr.endswith(ending)
    assert {"exit": "", "exit with words": "words\n", "fail": "ValueError: no such luck\n"}[argument] in ran.stderr


def test_a_script_without_exports(scripts: Path) -> None:
    ran = run(scripts, *GUARDED, "plain.py", "--help", mode="record")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "['--help']\n", "dispatch_guard: 0 exports\n")


@pytest.mark.parametrize(
    "arguments, mode, words",
    [
        (["missing.py"], None, "no such file: missing.py"),
        (["-m", "missing"], None, "no module named 'missing'"),
        (["-m", "missing.inner"], None, "no module named 'missing.inner'"),
        (["plain.py"], "shout", "TO_MUTATION_GUARD must be one of raise, warn, record, not 'shout'"),
    ],
)
def test_nothing_to_run_is_one_clear_line(scripts: Path, arguments: list[str], mode: str | None, words: str) -> None:
    ran = run(scripts, *GUARDED, *arguments, mode=mode)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"dispatch_guard: {words}\n")


def test_a_syntax_error_is_told_as_python_tells_it(scripts: Path) -> None:
    ran = run(scripts, *GUARDED, "typo.py")
    assert ran.returncode == 1
    assert ran.stderr.startswith(f'  File "{scripts}/typo.py", line 1\n')


def test_each_rank_reports_by_its_number(scripts: Path) -> None:
    command = [sys.executable, *GUARDED, "ranks.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TO_MUTATION_GUARD": "record", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*command, rank], cwd=scripts, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 1]
    assert "dispatch_guard: rank 0: 1 exports\n0 conversions, 0 violations\n" in errors[0]
    assert "dispatch_guard: rank 1: 1 exports\nin-place aten.add_.Tensor" in errors[1]


def test_the_rank_that_torchrun_gives(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert run(scripts, *GUARDED, "plain.py", mode="record").stderr == "dispatch_guard: rank 3: 0 exports\n"
