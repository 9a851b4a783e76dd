"""Reports of many violations, the log, and what they cost when off."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import urllib.parse
from typing import Any

import pytest
import torch

from dispatch_guard import ToMutationError, ToMutationGuard, allow_mutation


def recorded() -> ToMutationGuard:
    x, z = torch.zeros(3), torch.zeros(3)
    with ToMutationGuard(on_violation="record") as guard:
        y = x.to("cpu")
        for _ in range(3):
            y.add_(1)
        w = z.double()
        z[0] = 5
        with allow_mutation("on purpose, 100%"):
            w.mul_(2)
    return guard


def test_text_folds_orders_and_counts() -> None:
    text = recorded().report()
    assert text.count("y.add_(1)") == 1
    assert "(3 times)" in text
    assert "w.mul_(2)" not in text
    assert text.index("y.add_(1)") < text.index("z[0] = 5")
    assert text.splitlines()[-1] == "2 conversions, 4 violations"
    with ToMutationGuard(on_violation="record") as guard:
        torch.zeros(3).to("cpu")
    assert guard.report() == "1 conversions, 0 violations"


def test_json_has_the_form_that_the_readme_tells() -> None:
    report = json.loads(recorded().report("json"))
    assert report["version"] == 2 and report["conversions"] == 2
    first, second, allowed = report["violations"]
    assert first["count"] == 3 and first["op"] == "aten.add_.Tensor" and first["role"] == "result"
    assert first["site"]["line"].strip() == "y.add_(1)" and first["site"]["filename"] == __file__
    assert first["conversion"]["call"] == "Tensor.to" and first["conversion"]["copied"] is False
    assert first["conversion"]["source"] == {"dtype": "torch.float32", "device": "cpu", "shape": [3]}
    assert second["role"] == "source" and second["conversion"]["copied"] is True
    assert allowed["allowed"] == "on purpose, 100%"


def test_json_tells_what_kind_of_write_it_was() -> None:
    x, z, u = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    with pytest.raises(ToMutationError), ToMutationGuard(on_violation="record") as guard:
        x.to("cpu").apply_(lambda value: value + 1)
        z.float()
        z.data = torch.ones(3)
        y = u.to("cpu")
        thread = threading.Thread(target=lambda: y.add_(1))
        thread.start()
        thread.join()
        raise ToMutationError(guard.violations[0])  # a record goes through an error and back
    kinds = {(found["kind"], found["op"], found["call"]) for found in json.loads(guard.report("json"))["violations"]}
    assert kinds == {
        ("operator", None, "Tensor.apply_"),
        ("rebind", None, "Tensor.data"),
        ("unseen", None, "unseen write"),
    }
    for violation in guard.violations:
        assert pickle.loads(pickle.dumps(violation)) == violation
        assert str(ToMutationError(violation)).startswith(f"in-place {violation.call} on the ")


def test_sarif_has_the_required_properties() -> None:
    sarif = json.loads(recorded().report("sarif"))
    assert sarif["version"] == "2.1.0" and sarif["$schema"].endswith("sarif-2.1.0.json")
    (run,) = sarif["runs"]
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert len(run["results"]) == 2
    for result in run["results"]:
        assert result["ruleId"] in rules and result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"] and result["occurrenceCount"] >= 1
        for location in result["locations"] + result["relatedLocations"]:
            physical = location["physicalLocation"]
            uri = urllib.parse.urlparse(physical["artifactLocation"]["uri"])
            assert uri.scheme == "file" and uri.path == __file__
            region = physical["region"]
            assert 1 <= region["startLine"] <= region["endLine"]
            if sys.version_info >= (3, 11):
                assert 1 <= region["startColumn"] < region["endColumn"]


def test_github_lines_are_escaped() -> None:
    first, second = recorded().report("github").splitlines()
    properties, _, data = first.removeprefix("::error ").partition("::")
    fields: dict[str, Any] = dict(field.split("=", 1) for field in properties.split(","))
    file = __file__.removeprefix(os.getcwd() + os.sep)  # GitHub looks for it in the repository
    assert fields["file"] == file.replace(":", "%3A").replace(",", "%2C")
    assert set(fields) == {"file", "line", "endLine", "title"}
    assert fields["title"] == "in-place aten.add_.Tensor on the result of Tensor.to (3 times)"
    assert "%0A" in data and "\n" not in data
    assert second.startswith("::error file=")


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format must be one of 'text', 'json', 'sarif', 'github', not 'xml'"):
        recorded().report("xml")  # type: ignore[arg-type]


def test_the_log_tells_each_conversion_and_each_write(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="dispatch_guard"), ToMutationGuard(on_violation="record"):
        x = torch.zeros(3)
        y = x.to("cpu")
        y.add_(1)
        torch.zeros(3).mul_(2)
    messages = [record.message for record in caplog.records if record.name == "dispatch_guard"]
    assert len(messages) == 3
    assert messages[0].startswith("Tensor.to tagged")
    assert messages[1] == "aten.add_.Tensor checked: self is tagged"
    assert messages[2] == "aten.mul_.Tensor checked: self is not tagged"


def test_importing_says_nothing_and_loads_no_dynamo() -> None:
    code = "import sys, dispatch_guard; assert 'torch._dynamo' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
