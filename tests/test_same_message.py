"""The whole message, word for word, is the same however a program is run.

The expected texts are in message_texts.txt, in which line numbers count from the line of the program's class.
To write them anew from eager runs, and then read them: ``python tests/test_same_message.py``.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from pathlib import Path
from typing import Any

import message_programs
import pytest
import torch
from message_programs import PROGRAMS
from torch import nn
from ways import ALL, TORCH

from dispatch_guard import ToMutationError, ToMutationGuard

TEXTS = Path(__file__).with_name("message_texts.txt")
WAYS = [
    "eager",
    "inference",
    "export",
    "export_strict",
    "draft_export",
    "make_fx_fake",
    "make_fx_symbolic_pre_dispatch",
]
WAYS += ["compile_eager", "compile_aot_eager_fullgraph", "compile_inductor"]
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions have no columns before Python 3.11")


def message(name: str, run: object) -> str:
    """What the guard says, without paths and with lines from that of the class."""
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        run()  # type: ignore[operator]
    first = min(inspect.getsourcelines(cls)[1] for cls in (PROGRAMS[name], *CHILDREN.get(name, ())))
    path = re.escape(str(message_programs.__file__))
    return re.sub(path + r":(\d+)", lambda match: f"{name}:{int(match[1]) - first}", str(caught.value))


CHILDREN: dict[str, tuple[type[nn.Module], ...]] = {"Deep": (message_programs.Block,)}


def expected() -> dict[str, str]:
    parts = re.split(r"^=== (\w+)\n", TEXTS.read_text(), flags=re.MULTILINE)[1:]
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2])}


def without_operator(text: str) -> str:
    """``text`` but for the operator's name where torch has several.

    Batch norm is another operator in a graph than in eager mode; ``y[0] = 3.0`` is a fill_ since 2.15.
    """
    text = text.replace("in-place aten.fill_.Scalar on", "in-place aten.copy_.default on") if TORCH >= (2, 15) else text
    return re.sub(r"aten\.\w*batch_norm\w*\.\w+", "batch_norm", text)


def example() -> tuple[torch.Tensor]:
    return (torch.ones(4),)


def loaded(name: str, strict: bool) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(torch.export.export(PROGRAMS[name](), example(), strict=strict), file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_every_way_of_running(name: str, way: str) -> None:
    if (name, way) == ("Statistics", "inference"):
        pytest.skip("a buffer that was made outside of inference mode can't be written inside")
    torch._dynamo.reset()
    text = message(name, lambda: ALL[way](PROGRAMS[name](), example()))
    assert without_operator(text) == without_operator(expected()[name])


@pytest.mark.parametrize("exported_strictly", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_of_a_program_that_was_exported_and_loaded(name: str, exported_strictly: bool) -> None:
    program = loaded(name, exported_strictly)
    for run in (
        lambda: program.run_decompositions(),
        lambda: torch.export.export(program.module(), example(), strict=False),
        lambda: torch.export.export(program.module(), example(), strict=True),
        lambda: program.module()(*example()),
    ):
        assert without_operator(message(name, run)) == without_operator(expected()[name])


@pytest.mark.parametrize("strict", [False, True])
def test_of_a_decorated_method(strict: bool) -> None:
    for name in ("Result", "Source", "Item", "Twice"):
        program = type(name, (PROGRAMS[name],), {"forward": ToMutationGuard()(PROGRAMS[name].forward)})
        torch._dynamo.reset()
        text = message(name, lambda program=program: torch.export.export(program(), example(), strict=strict))
        assert without_operator(text) == without_operator(expected()[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_its_shape(name: str) -> None:
    lines = expected()[name].splitlines()
    assert len(lines[0]) < 120 and lines[0].startswith("in-place aten.")
    assert len(lines) < 40
    assert all(len(line) <= 120 for line in lines)
    assert not any("site-packages" in line or "torch/" in line for line in lines)


@pytest.mark.parametrize("filename", ["<doctest model[0]>", "<a tool's own>", "<ipython-input-1>", "/no/such.py"])
def test_code_whose_source_is_gone_is_a_place_too(filename: str) -> None:
    scope: dict[str, Any] = {}
    exec(compile("def write(x):\n    y = x.float()\n    y.add_(1)", filename, "exec"), scope)
    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        scope["write"](torch.ones(2))
    site = caught.value.violation.site
    assert site is not None and (site.filename, site.lineno, site.function) == (filename, 3, "write")
    assert str(caught.value).count("the source is not available") == 2


def test_a_view_of_the_source_is_a_write_to_the_source() -> None:
    def write(y: torch.Tensor) -> torch.Tensor:
        z = y.float()
        y[1:].view(-1).neg_()
        return z

    with pytest.raises(ToMutationError) as caught, ToMutationGuard():
        write(torch.ones(3))
    assert caught.value.violation.role == "source"


if __name__ == "__main__":
    made = {name: message(name, lambda program=program: program()(*example())) for name, program in PROGRAMS.items()}
    TEXTS.write_text("\n\n".join(f"=== {name}\n{text}" for name, text in made.items()) + "\n")
