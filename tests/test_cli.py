"""``python -m dispatch_guard check``: verdicts, exit codes, streams."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dispatch_guard.cli import main

MODELS = str(Path(__file__).parents[1] / "benchmarks" / "models.py")

PROGRAMS = """
import torch
from torch import nn


class Bad(nn.Module):
    def forward(self, x, times=1):
        y = x.to("cpu")
        for _ in range(times):
            y.add_(5)
        print("the model says hello")
        return x.sin()


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("no such luck\\nsecond line")


class Makes:
    @staticmethod
    def bad():
        return bad()


def bad():
    return Bad(), (torch.zeros(3),)


def bad_twice():
    return Bad(), (torch.zeros(3),), {"times": 2}


def good():
    return nn.Linear(3, 3), (torch.zeros(3),)


def fails():
    return Fails(), (torch.zeros(3),)


def factory_fails():
    raise KeyError("nothing here")


def wrong_shape():
    return nn.Linear(3, 3)


def wrong_first():
    return 3, ()


def wrong_second():
    return nn.Linear(3, 3), torch.zeros(3)


def wrong_third():
    return nn.Linear(3, 3), (torch.zeros(3),), 3


not_a_function = 3
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "programs_to_check.py").write_text(PROGRAMS)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "models.py").write_text("from programs_to_check import *\n")
    return "programs_to_check.py"


@pytest.mark.parametrize("how", [[], ["--strict"], ["--eager"]])
def test_violations_are_printed_with_both_places(
    programs: str, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{programs}:bad", *how]) == 1
    out = capsys.readouterr().out
    assert 'y = x.to("cpu")' in out
    assert "y.add_(5)" in out
    assert out.splitlines()[-1] == "1 conversions, 1 violations"
    assert "hello" not in out


@pytest.mark.parametrize("how", [[], ["--strict"], ["--eager"]])
def test_a_clean_model_is_one_line(programs: str, how: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{programs}:good", *how]) == 0
    assert capsys.readouterr() == ("0 conversions, 0 violations\n", "")


def test_keyword_arguments_and_repeated_places(programs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{programs}:bad_twice"]) == 1
    out = capsys.readouterr().out
    assert out.count("y.add_(5)") == 1
    assert "(2 times)" in out
    assert out.splitlines()[-1] == "1 conversions, 2 violations"


@pytest.mark.parametrize("target", ["programs_to_check:bad", "package.models:bad", "./programs_to_check.py:Makes.bad"])
def test_targets_in_packages_files_and_classes(programs: str, target: str) -> None:
    assert main(["check", target]) == 1


@pytest.mark.parametrize(
    "target, words",
    [
        ("programs_to_check.py", "not a target: write file.py:factory or package.module:factory"),
        (":bad", "not a target"),
        ("programs_to_check.py:", "not a target"),
        ("no_such_file.py:bad", "no such file: no_such_file.py"),
        ("no_such_module:bad", "no module named 'no_such_module'"),
        ("package.no_such_module:bad", "no module named 'package.no_such_module'"),
        ("programs_to_check.py:missing", "there is no 'missing' in programs_to_check.py"),
        ("programs_to_check.py:not_a_function", "'not_a_function' in programs_to_check.py is not a function but int"),
        ("broken.py:bad", "importing it failed: ModuleNotFoundError: No module named 'no_such_package'"),
        ("programs_to_check.py:fails", "exporting it failed: ValueError: no such luck"),
        ("programs_to_check.py:factory_fails", "the factory failed: KeyError: 'nothing here'"),
        ("programs_to_check.py:wrong_shape", "must return (module, args) or (module, args, kwargs), not Linear"),
        ("programs_to_check.py:wrong_first", "must be an nn.Module, not int"),
        ("programs_to_check.py:wrong_second", "must be a tuple, not Tensor"),
        ("programs_to_check.py:wrong_third", "must be a dict, not int"),
    ],
)
def test_what_cannot_be_checked_is_one_clear_line(
    programs: str, target: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", target]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("dispatch_guard:")]
    assert len(lines) == 1 and words in lines[0] and lines[0].startswith(f"dispatch_guard: {target}: ")
    assert "Traceback" not in err


def test_the_traceback_on_request(programs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{programs}:factory_fails", "--traceback"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and 'raise KeyError("nothing here")' in err


def test_several_targets_give_the_worst_status_and_none_stops_the_others(
    programs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = [f"{programs}:{name}" for name in ("fails", "bad", "good")]
    assert main(["check", *targets]) == 2
    out = capsys.readouterr().out
    assert f"{programs}:bad:" in out and "1 conversions, 1 violations" in out and "0 conversions, 0 violations" in out


def test_a_bad_command_line_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ([], ["check"], ["check", "a:b", "--strict", "--eager"], ["look"]):
        with pytest.raises(SystemExit) as caught:
            main(line)
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["check", "--help"])
    assert caught.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_as_a_process() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dispatch_guard", *arguments], capture_output=True, text=True, check=False
        )

    clean = run("check", f"{MODELS}:llama")
    assert clean.returncode == 0, clean.stderr
    assert clean.stdout == "16 conversions, 0 violations\n"
    planted = run("check", f"{MODELS}:planted_norm")
    assert planted.returncode == 1
    assert "scaled = hidden_states.to(torch.float32)" in planted.stdout
    assert "scaled.mul_(" in planted.stdout
    assert "(model.model.layers.1.post_attention_layernorm)" in planted.stdout
    assert run("check", "nothing").returncode == 2
