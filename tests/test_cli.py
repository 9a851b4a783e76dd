"""``python -m dispatch_guard check``: verdicts, exit codes, streams."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dispatch_guard.cli import main

MODELS = str(Path(__file__).parents[1] / "benchmarks" / "models.py")

PROGRAMS = """
import sys

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


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else x + 1


class Exits(nn.Module):
    def forward(self, x):
        sys.exit(0)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Bad() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


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


def stack():
    return Stack(), (torch.zeros(3),)


def chatty():
    print("the factory says hello")
    return good()


def branches():
    return Branches(), (torch.zeros(3),)


def exits():
    return Exits(), (torch.zeros(3),)


def factory_exits():
    sys.exit(0)


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
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "programs_to_check.py").write_text(PROGRAMS)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "exiting.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "typo.py").write_text("def bad(:\n")
    (tmp_path / "notes.txt").write_text("")
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text("from programs_to_check import *\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "inner" / "relative.py").write_text("from ..models import bad\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "random.py").write_text(PROGRAMS)
    before = set(sys.modules)
    yield "programs_to_check.py"
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


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


def test_a_class_used_in_many_layers_is_reported_once(programs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{programs}:stack"]) == 1
    out = capsys.readouterr().out
    assert out.count("y.add_(5)") == 1
    assert "(6 times, in 6 modules: layers.0, layers.1, layers.2, layers.3, ...)" in out
    assert out.splitlines()[-1] == "6 conversions, 6 violations"


@pytest.mark.parametrize(
    "target",
    [
        "programs_to_check:bad",
        "package.models:bad",
        "./programs_to_check.py:Makes.bad",
        "package/models.py:bad",
        "package/inner/relative.py:bad",
    ],
)
def test_targets_in_packages_files_and_classes(programs: str, target: str) -> None:
    assert main(["check", target]) == 1


def test_a_file_named_like_a_loaded_module_does_not_take_its_place(programs: str) -> None:
    assert main(["check", "elsewhere/random.py:bad"]) == 1
    assert sys.modules["random"] is random


def test_classes_of_a_file_are_found_by_pickle_and_by_its_next_target(programs: str, tmp_path: Path) -> None:
    assert main(["check", f"{programs}:good", f"{programs}:bad"]) == 1
    cls = sys.modules["programs_to_check"].Bad
    assert type(pickle.loads(pickle.dumps(cls()))) is cls
    assert sys.modules["programs_to_check"].__file__ == str(tmp_path / programs)
    assert "programs_to_check_" not in sys.modules


def test_a_file_that_failed_to_load_is_not_kept(programs: str) -> None:
    assert main(["check", "broken.py:bad"]) == 2
    assert "broken" not in sys.modules


def test_a_file_of_another_package_of_the_same_name_is_refused(
    programs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "elsewhere" / "package"
    other.mkdir()
    (other / "__init__.py").write_text("")
    (other / "models.py").write_text("from programs_to_check import *\n")
    assert main(["check", "package/models.py:bad"]) == 1
    assert main(["check", "elsewhere/package/models.py:bad"]) == 2
    assert "it is package.models by its place, but package.models is " in capsys.readouterr().err


def test_what_the_factory_prints_is_not_among_the_results(programs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{programs}:chatty"]) == 0
    assert capsys.readouterr() == ("0 conversions, 0 violations\n", "the factory says hello\n")


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
        ("typo.py:bad", "importing it failed: SyntaxError: invalid syntax (typo.py, line 1)"),
        ("exiting.py:bad", "importing it failed: SystemExit: 0"),
        ("./notes.txt:bad", "not a Python file"),
        ("programs_to_check.py:factory_exits", "the factory failed: SystemExit: 0"),
        ("programs_to_check.py:exits", "exporting it failed: SystemExit: 0"),
        ("programs_to_check.py:branches", "exporting it failed: "),
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
    assert len(err.splitlines()) == 1, err
    assert err.startswith(f"dispatch_guard: {target}: ") and words in err


@pytest.mark.parametrize(
    "how, words",
    [
        (["--strict"], "exporting it failed: Unsupported: Observed exception"),  # as without a guard
        (["--eager"], "running it failed: ValueError: no such luck"),
    ],
)
def test_what_fails_in_other_ways_of_running_is_one_line_too(
    programs: str, how: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{programs}:fails", *how]) == 2
    assert capsys.readouterr() == ("", f"dispatch_guard: {programs}:fails: {words}\n")


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
