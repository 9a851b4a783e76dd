"""``python -m dispatch_guard check``: targets, verdicts, formats, baselines, exit codes, streams."""

from __future__ import annotations

import json
import os
import pickle
import pty
import random
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dispatch_guard import ToMutationGuard
from dispatch_guard.baseline import dumps, known, loads
from dispatch_guard.cli import main

MODELS = str(Path(__file__).parents[1] / "benchmarks" / "models.py")

PROGRAMS = """
import os
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


class Harmless(nn.Module):
    def forward(self, x):
        mask = (x + 1).to("cpu")
        mask.mul_(2)
        return mask


class Copying(nn.Module):
    def forward(self, x):
        y = x.double()
        y.mul_(2)
        return y


def harmless():
    return Harmless(), (torch.zeros(3),)


def copying():
    return Copying(), (torch.zeros(3),)


class Accented(nn.Module):
    def forward(self, x):
        é = x.to("cpu")
        é.add_(5)
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


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)

    def forward(self, tokens, scale):
        return self.embedding(tokens) * scale.to(torch.bfloat16)


class NeedsArguments(nn.Module):
    def __init__(self, size):
        super().__init__()


class NoModule:
    pass


built = Bad()


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


def shells():
    os.system("echo the shell says hello")
    return good()


def accented():
    return Accented(), (torch.zeros(3),)


def branches():
    return Branches(), (torch.zeros(3),)


def exits():
    return Exits(), (torch.zeros(3),)


def interrupts():
    raise KeyboardInterrupt


def memory_runs_out():
    raise MemoryError


def device_memory_runs_out():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\\nMore about it.")


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
        ("programs_to_check.py", "not a target: write file.py:factory, package.module:factory or file.pt2"),
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
        ("programs_to_check.py:memory_runs_out", "the factory failed: MemoryError"),
        ("programs_to_check.py:device_memory_runs_out", "failed: OutOfMemoryError: CUDA out of memory. Tried to "),
        ("programs_to_check.py:Bad", "is an nn.Module without inputs: give them, as --input 1x3x224x224"),
        ("programs_to_check.py:built", "is an nn.Module without inputs"),
        ("programs_to_check.py:NoModule", "'NoModule' in programs_to_check.py is a class, but no nn.Module"),
        ("programs_to_check.py:NeedsArguments", "building it failed: TypeError: "),
        ("no_such_program.pt2", "no such file: no_such_program.pt2"),
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
    assert out.splitlines()[-4:] == [
        "target                      conversions  violations",
        "programs_to_check.py:fails  could not be checked",
        "programs_to_check.py:bad              1           1",
        "programs_to_check.py:good             0           0",
    ]


def test_a_bad_command_line_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ([], ["check"], ["check", "a:b", "--strict", "--eager"], ["look"], ["check", "a:b", "--format", "xml"])
    for line in lines:
        with pytest.raises(SystemExit) as caught:
            main(line)
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["check", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out and "exit status: " in out and "torch.export.load" in out


# ---- modules with inputs from the command line


def test_a_class_is_built_and_called_with_the_inputs_given(programs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{programs}:Bad", "--input", "2x3"]) == 1
    assert "y.add_(5)" in capsys.readouterr().out
    assert main(["check", f"{programs}:Embeds", "--input", "i64:1x4", "--input", "f16:"]) == 0
    assert capsys.readouterr().out == "1 conversions, 0 violations\n"
    assert main(["check", f"{programs}:built", "--input", "3"]) == 1
    assert main(["check", f"{programs}:wrong_shape", "--input", "float64:3", "--eager"]) == 2  # float32 weights
    assert "running it failed: RuntimeError" in capsys.readouterr().err


def test_a_factory_with_inputs_of_its_own_keeps_them(programs: str) -> None:
    assert main(["check", f"{programs}:good", f"{programs}:Bad", "--input", "i64:1"]) == 1


@pytest.mark.parametrize("text", ["1x-3", "1x3xx", "f33:1", "nn:1", "", "f32", "1x3x"])
def test_an_input_that_is_none_is_a_bad_command_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", "a:b", "--input", text])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("dispatch-guard check: error: argument --input: no ")


# ---- saved programs


class Alias(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to("cpu")
        y.add_(5)
        return x.sin()


def test_a_saved_program_is_judged_by_its_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(tmp_path / "alias.pt2")
    program = torch.export.export(Alias(), (torch.zeros(3),))
    torch.export.save(program, saved)
    assert main(["check", saved]) == 1
    out = capsys.readouterr().out
    assert "y.add_(5)" in out and out.splitlines()[-1] == "1 conversions, 1 violations"
    torch.export.save(program.run_decompositions(), saved)
    assert main(["check", saved]) == 2
    assert "this one has been through run_decompositions()" in capsys.readouterr().err


def test_an_archive_of_programs_with_names_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(tmp_path / "several.pt2")
    program = torch.export.export(Alias(), (torch.zeros(3),))
    torch.export.pt2_archive._package.package_pt2(saved, exported_programs={"encoder": program})
    assert main(["check", saved]) == 2
    assert "no program in it of the name that torch.export.save gives" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["text", "zip", "cut", "other", "empty"])
def test_a_corrupt_or_foreign_file_is_one_clear_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "program.pt2"
    if content == "text":
        saved.write_text("this is no archive")
    elif content == "zip":
        with zipfile.ZipFile(saved, "w") as archive:
            archive.writestr("hello.txt", "hello")
    elif content == "cut":
        torch.export.save(torch.export.export(Alias(), (torch.zeros(3),)), str(saved))
        saved.write_bytes(saved.read_bytes()[:-200])
    elif content == "other":
        torch.save({"weight": torch.zeros(3)}, str(saved))
    else:
        saved.write_bytes(b"")
    assert main(["check", str(saved)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith(f"dispatch_guard: {saved}: loading it failed: ")


# ---- formats


def test_json_of_all_targets_is_one_document(programs: str, capsys: pytest.CaptureFixture[str]) -> None:
    targets = [f"{programs}:{name}" for name in ("fails", "bad_twice", "good")]
    assert main(["check", *targets, "--format", "json"]) == 2
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["version"] == 2
    fails, bad, good = document["targets"]
    assert fails["target"] == targets[0] and fails["problem"].startswith("exporting it failed: ValueError")
    assert bad["problem"] is None and bad["conversions"] == 1
    assert [violation["count"] for violation in bad["violations"]] == [2]
    assert good == {"target": targets[2], "problem": None, "conversions": 0, "violations": []}


def test_sarif_tells_violations_and_what_could_not_be_checked(
    programs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{programs}:bad", f"{programs}:fails", "--format", "sarif"]) == 2
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert len(run["results"]) == 1
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is False
    assert "no such luck" in invocation["toolExecutionNotifications"][0]["message"]["text"]
    assert main(["check", f"{programs}:good", "--format", "sarif"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["results"] == [] and run["invocations"][0]["executionSuccessful"] is True


def test_github_gives_a_command_for_each_violation_and_failure(
    programs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{programs}:bad", f"{programs}:fails", "--format", "github"]) == 2
    violation, failure = capsys.readouterr().out.splitlines()
    assert violation.startswith(f"::error file={programs},line=")
    assert failure == f"::error title=dispatch_guard::{programs}:fails: exporting it failed: ValueError: no such luck"
    assert main(["check", f"{programs}:good", "--format", "github"]) == 0
    assert capsys.readouterr().out == ""


def test_the_results_in_a_file(programs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results.txt"
    assert main(["check", f"{programs}:bad", "--output", str(output)]) == 1
    assert "y.add_(5)" in output.read_text()
    assert capsys.readouterr().out == ""
    assert main(["check", f"{programs}:bad", "--output", str(tmp_path / "missing" / "results.txt")]) == 2
    assert capsys.readouterr().err.endswith("results.txt: No such file or directory\n")


# ---- which violations fail


def test_nothing_fails_on_request_but_what_could_not_be_checked(programs: str) -> None:
    assert main(["check", f"{programs}:bad", "--fail-on", "never"]) == 0
    assert main(["check", f"{programs}:fails", "--fail-on", "never"]) == 2


def test_known_violations_are_let_through_though_their_lines_have_moved(
    programs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = str(tmp_path / "known.json")
    assert main(["check", f"{programs}:bad", "--write-baseline", known]) == 0
    assert capsys.readouterr().err.endswith(f"wrote 1 known violations to {known}\n")
    assert json.loads(Path(known).read_text()) == {
        "version": 1,
        "violations": [{"file": programs, "line": "y.add_(5)", "op": "aten.add_.Tensor", "places": 1}],
    }
    moved = tmp_path / "elsewhere" / programs
    moved.write_text("# a line above\n" + PROGRAMS)
    assert main(["check", f"{moved}:bad", "--allow", known]) == 0
    assert capsys.readouterr().out == "1 conversions, 0 violations (1 allowed)\n"


def test_what_a_violation_is_known_by(tmp_path: Path) -> None:
    with ToMutationGuard(on_violation="record") as guard:
        torch.zeros(3).to("cpu").add_(5)
    (violation,) = guard.violations
    assert violation.site is not None
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").write_text("")
    inside = replace(violation.site, filename=str(package / "models.py"))
    without_source = replace(inside, line="", function="Model.forward")
    op = "aten.add_.Tensor"
    assert known(replace(violation, site=inside)).file == "package/inner/models.py"
    assert known(replace(violation, site=without_source)).line == "in Model.forward"
    assert known(replace(violation, site=None)) == ("test_cli.py", 'torch.zeros(3).to("cpu").add_(5)', op)
    nowhere = replace(violation, site=None, conversion=replace(violation.conversion, site=None))
    assert known(nowhere) == ("", "", op)
    let_through = replace(violation, allowed="a reason")
    assert loads(dumps([violation, violation, let_through])) == {known(violation): 1}


def test_a_line_written_once_more_is_not_known(
    programs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = str(tmp_path / "known.json")
    main(["check", f"{programs}:bad", "--write-baseline", known])
    again = tmp_path / "elsewhere" / programs
    again.write_text(PROGRAMS.replace("y.add_(5)", "y.add_(5)\n            y.add_(5)"))
    assert main(["check", f"{again}:bad", "--allow", known]) == 1
    assert capsys.readouterr().out.endswith("1 conversions, 2 violations\n")


def test_a_baseline_lets_nothing_else_through_and_tells_what_it_lists_in_vain(
    programs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tmp_path / "known.json"
    entry = {"file": programs, "line": "y.mul_(5)", "op": "aten.mul_.Tensor", "places": 1}
    known.write_text(json.dumps({"version": 1, "violations": [entry]}))
    assert main(["check", f"{programs}:bad", "--allow", str(known)]) == 1
    assert "1 of the violations in" in capsys.readouterr().err


def test_writing_a_baseline_anew_keeps_what_is_known(programs: str, tmp_path: Path) -> None:
    known = str(tmp_path / "known.json")
    main(["check", f"{programs}:bad", "--write-baseline", known])
    before = Path(known).read_text()
    assert main(["check", f"{programs}:bad", "--allow", known, "--write-baseline", known]) == 0
    assert Path(known).read_text() == before
    assert main(["check", f"{programs}:bad", f"{programs}:fails", "--write-baseline", known]) == 2
    assert Path(known).read_text() == before
    assert main(["check", f"{programs}:bad", "--write-baseline", str(tmp_path / "missing" / "known.json")]) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "violations": [{}]}'])
def test_a_file_that_is_no_baseline_is_one_clear_line(
    text: str, programs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tmp_path / "known.json"
    known.write_text(text)
    assert main(["check", f"{programs}:bad", "--allow", str(known)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"dispatch_guard: cannot read {known}: it is ") and len(err.splitlines()) == 1
    assert main(["check", f"{programs}:bad", "--allow", str(tmp_path / "missing.json")]) == 2


# ---- the proof by running


def test_the_proof_tells_what_differs_and_what_does_not(programs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{programs}:bad", "--prove"]) == 1
    assert "  proof: output differs by up to " in capsys.readouterr().out
    harmless = ["check", f"{programs}:harmless", "--prove"]
    assert main(harmless) == 1
    assert "  proof: none: the results are the same where Tensor.to copies\n" in capsys.readouterr().out
    assert main(["check", f"{programs}:copying", "--prove", "--strict"]) == 1
    assert "  proof: not runnable here: Tensor.double copied\n" in capsys.readouterr().out
    main([*harmless, "--format", "json"])
    ((violation,),) = (target["violations"] for target in json.loads(capsys.readouterr().out)["targets"])
    assert violation["proof"] == "none: the results are the same where Tensor.to copies"
    assert main(["check", f"{programs}:bad"]) == 1
    assert "  proof:" not in capsys.readouterr().out


@pytest.mark.parametrize("name, status", [("bad", 1), ("harmless", 0), ("copying", 1), ("good", 0)])
def test_only_what_can_be_observed_may_fail(programs: str, name: str, status: int) -> None:
    assert main(["check", f"{programs}:{name}", "--fail-on", "observable"]) == status


# ---- streams and signals


def test_an_interrupt_ends_with_one_line(programs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{programs}:interrupts", f"{programs}:good"]) == 130
    assert capsys.readouterr() == ("", "dispatch_guard: interrupted\n")


def test_ctrl_c_in_a_process(programs: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import sys, time\nprint('here', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "dispatch_guard", "check", "slow.py:model"]

    def heed() -> None:  # in case that this is run in the background of a shell, which has processes ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), preexec_fn=heed
    ) as run:
        assert run.stderr is not None
        assert run.stderr.readline() == "here\n"
        run.send_signal(signal.SIGINT)
        assert run.communicate(timeout=60) == ("", "dispatch_guard: interrupted\n")
        assert run.returncode == 130


def test_a_reader_that_goes_away_changes_no_verdict(programs: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "dispatch_guard", "check", f"{programs}:bad", f"{programs}:good"]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), check=False)
    os.close(writer)
    assert run.returncode == 1
    assert run.stderr == "the model says hello\n"


def test_what_other_programs_print_is_not_among_the_results(programs: str) -> None:
    command = [sys.executable, "-m", "dispatch_guard", "check", f"{programs}:shells"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert (run.returncode, run.stdout) == (0, "0 conversions, 0 violations\n")
    assert run.stderr == "the shell says hello\n"


def test_a_source_line_that_the_terminal_cannot_show(programs: str) -> None:
    command = [sys.executable, "-m", "dispatch_guard", "check", f"{programs}:accented"]
    settings = {**environment(), "PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    assert run.returncode == 1
    assert "\\xe9.add_(5)" in run.stdout


@pytest.mark.parametrize("no_colour", [False, True])
def test_colour_and_progress_on_a_terminal_only(no_colour: bool, programs: str) -> None:
    command = [sys.executable, "-m", "dispatch_guard", "check", f"{programs}:bad", f"{programs}:good"]
    ours, theirs = pty.openpty()
    settings = {**environment(), "TERM": "xterm", **({"NO_COLOR": "1"} if no_colour else {})}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=settings) as run:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
    os.close(ours)
    assert run.returncode == 1
    assert b"[1/2] programs_to_check.py:bad" in shown and b"[2/2] programs_to_check.py:good" in shown
    assert (b"\x1b[1;31min-place aten.add_.Tensor" in shown) is not no_colour
    assert (b"\x1b" in shown) is not no_colour


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux tells that the other end is closed
        return b""


def environment() -> dict[str, str]:
    """That of a process which finds this package, and writes no bytecode next to the tests' files."""
    root = str(Path(__file__).parents[1])
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    return {**plain, "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}


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
