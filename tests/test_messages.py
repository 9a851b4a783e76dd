"""The message: both places, what happened, help that is true; the same in every tracer."""

from __future__ import annotations

import io
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reported_cases
import torch
import torch.nn.functional as F
from torch import nn
from ways import ALL

from dispatch_guard import ToMutationError, ToMutationGuard, Violation
from dispatch_guard.report import headline, render

Tensor = torch.Tensor
columns = pytest.mark.skipif(sys.version_info < (3, 11), reason="columns need Python 3.11")


class Alias(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        y.add_(5)
        return x.sin()


class Source(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        z = y.to("cpu")
        y.sin_()
        return z


class Copy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.double()
        wide.mul_(x.sum())
        return wide


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone().to(
            torch.float32,
            non_blocking=True,
        )
        y[0] = 3
        return y


class Augmented(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        z = x.clone(); é = z.float(); é += 1  # fmt: skip  # noqa: E702
        return z


class Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        z = (x + 1).float()
        return self.act(z)


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.as_tensor(x.clone())
        return F.relu(z, inplace=True)


class Out(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x.type_as(x) * 1
        same = total.cpu()
        torch.add(x, 1, out=same)
        return same


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone().float()
        y.view(-1)[1:].zero_()
        return y


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a = x.clone()
        b = a.to("cpu")
        c = b.float()
        c.add_(1)
        return a


class Rebound(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        mask = mask.to(x.dtype)
        mask.masked_fill_(x > 0, 1.0)
        return mask


class Statistic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.norm.running_mean.to("cpu")  # type: ignore[union-attr]
        return mean, self.norm(x[None].expand(2, 3))


class Inside(nn.Module):
    """Puts a module at ``layers.1``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), module])

    def forward(self, x: Tensor) -> Any:
        return self.layers[1](x)


def caught(call: Callable[[], object]) -> Violation:
    with pytest.raises(ToMutationError) as error, ToMutationGuard():
        call()
    assert str(error.value) == render(error.value.violation)
    return error.value.violation


def message(call: Callable[[], object]) -> str:
    """The message, without what depends on the tracer: symbolic sizes, and which operator a batch norm is by then."""
    text = render(caught(call)).replace(__file__, "model.py")
    text = re.sub(r"aten\.\w*batch_norm\w*\.default", "aten.batch_norm.default", text)
    return re.sub(r"of shape \(.*\)", "of shape (...)", text)


ALIASED = """\
in-place aten.add_.Tensor on the result of Tensor.to

  model.py:{0}, in Alias.forward (layers.1)
      y = x.to("cpu")
          ^^^^^^^^^^^ converted here; x was already float32 on cpu, so y is x itself (an alias)
  model.py:{1}, in Alias.forward (layers.1)
      y.add_(5)
      ^^^^^^^^^ written in place here

  Here the write also changes x. On a device or dtype where to() must copy, it would not: the
  exported program can keep only one of the two.

  help: write out of place: y = y + 5
  help: or take a copy of your own at the conversion: x.to("cpu", copy=True)
  help: or move the write before the conversion, if it is meant to change both
  to allow this write: with dispatch_guard.allow_mutation("why it is safe")"""

COPIED = """\
in-place aten.mul_.Tensor on the result of Tensor.double

  model.py:{0}, in Copy.forward (layers.1)
      wide = x.double()
             ^^^^^^^^^^ converted here; x was float32 on cpu, so wide is a copy (float64 on cpu)
  model.py:{1}, in Copy.forward (layers.1)
      wide.mul_(x.sum())
      ^^^^^^^^^^^^^^^^^^ written in place here

  Here the write leaves x as it is. On a device or dtype where double() has nothing to do, it would
  change it: the exported program can keep only one of the two.

  help: write out of place: wide = wide * x.sum()
  help: or take a copy of your own at the conversion: x.to(torch.float64, copy=True)
  help: or move the write before the conversion, if it is meant to change both
  to allow this write: with dispatch_guard.allow_mutation("why it is safe")"""


def line_of(model: type[nn.Module], text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"class {model.__name__}("))
    return next(i for i, line in enumerate(lines[start:], start + 1) if text in line)


@columns
def test_whole_messages() -> None:
    expected = ALIASED.format(line_of(Alias, 'x.to("cpu")'), line_of(Alias, "y.add_(5)"))
    assert message(lambda: Inside(Alias())(torch.zeros(3))) == expected
    expected = COPIED.format(line_of(Copy, "x.double()"), line_of(Copy, "wide.mul_"))
    assert message(lambda: Inside(Copy())(torch.zeros(3))) == expected


PROGRAMS = [Alias, Source, Copy, Item, Augmented, Activation, Functional, Out, View, Chain, Rebound, Statistic]


@columns
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_message_is_the_same_in_every_tracer(program: type[nn.Module]) -> None:
    def model() -> nn.Module:
        return Inside(program()).train()

    x = torch.ones(3)
    texts: dict[str, list[str]] = {}
    for way, run in ALL.items():
        if way == "inference" and program is Statistic:
            continue  # a buffer made outside of inference mode can't be written inside
        texts.setdefault(message(lambda run=run: run(model(), (x,))), []).append(way)  # type: ignore[misc]

    exported = torch.export.export(model(), (x,))
    texts.setdefault(message(exported.run_decompositions), []).append("run_decompositions")
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    texts.setdefault(message(lambda: torch.export.export(loaded, (x,))), []).append("re-export")
    assert len(texts) == 1, texts
    (text,) = texts
    assert len(text.splitlines()) < 40
    assert len(text.splitlines()[0]) < 120
    assert "torch/" not in text
    assert text.count("^^") >= 2


@columns
def test_a_decorated_method_under_strict_export_has_the_same_message() -> None:
    class Decorated(Alias):
        forward = ToMutationGuard()(Alias.forward)

    texts = set()
    for way in ("eager", "export", "export_strict", "compile_eager_fullgraph"):
        with pytest.raises(ToMutationError) as error:
            ALL[way](Inside(Decorated()), (torch.zeros(3),))
        texts.add(str(error.value))
    assert len(texts) == 1


def test_which_side_is_told_from_the_source_where_both_are_one_tensor() -> None:
    assert caught(lambda: Alias()(torch.zeros(3))).role == "result"
    assert caught(lambda: Source()(torch.zeros(3))).role == "source"
    assert caught(lambda: Rebound()(torch.zeros(3))).role == "result"


def test_what_lies_between() -> None:
    text = message(lambda: Chain()(torch.zeros(3)))
    assert 'b = a.to("cpu")' in text and "a first converted here" in text and "c = b.float()" in text
    assert "through a view of the result of shape (2)" in render(caught(lambda: View()(torch.zeros(3))))


def test_a_place_in_a_library_shows_who_called_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "some_library.py").write_text("def write(x):\n    y = x.to('cpu')\n    y.add_(1)\n    return y\n")
    monkeypatch.syspath_prepend(str(package))
    import some_library  # type: ignore[import-not-found]

    violation = caught(lambda: some_library.write(torch.zeros(3)))
    assert violation.site is not None and violation.site.filename.endswith("some_library.py")
    assert violation.site.caller is not None and violation.site.caller.filename == __file__
    assert "called from" in render(violation)


def test_sources_that_are_gone_or_never_were() -> None:
    code = textwrap.dedent(
        """
        def write(x):
            y = x.to("cpu")
            y.add_(1)
        """
    )
    for filename in ("<stdin>", "<string>", "/no/such/file.py", "<ipython-input-3-abc>"):
        scope: dict[str, Any] = {}
        exec(compile(code, filename, "exec"), scope)
        violation = caught(lambda scope=scope: scope["write"](torch.zeros(3)))  # type: ignore[misc]
        assert violation.site is not None and violation.site.filename == filename and violation.site.lineno == 4
        assert "(the source is not available)" in render(violation)


def test_hostile_shapes_do_not_make_long_messages() -> None:
    def write(x: Tensor) -> None:
        y = x.to("cpu"); z = [y.add_(1) for _ in range(1)]; assert z, "a long line " "is clipped " "but what is underlined stays, " "whatever else there is"  # noqa: E501, E702  # fmt: skip

    text = message(lambda: write(torch.zeros(3)))
    assert all(len(line) < 220 for line in text.splitlines())
    assert "y.add_(1)" in text


def test_the_first_line_stands_alone() -> None:
    violation = caught(lambda: Alias()(torch.zeros(3)))
    assert headline(violation) == "in-place aten.add_.Tensor on the result of Tensor.to"
    assert str(ToMutationError(violation)).splitlines()[0] == headline(violation)


# ---- help lines are true: the program as it says, which the guard passes and which computes what was meant


class AliasFixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu")
        y = y + 5
        return x.sin() + y * 0


class AliasCopied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to("cpu", copy=True)
        y.add_(5)
        return x.sin() + y * 0


class SourceFixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        z = y.to("cpu")
        y = y.sin()
        return z


class SourceMoved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y.sin_()
        return y.to("cpu")


class CopyCopied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64, copy=True)
        wide.mul_(x.sum())
        return wide


class ItemFixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone().to(torch.float32, non_blocking=True)
        y = y.clone()
        y[0] = 3
        return y


class ActivationFixed(Activation):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=False)


class FunctionalFixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.as_tensor(x.clone())
        return F.relu(z, inplace=False)


class FunctionalCopied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.asarray(x.clone(), copy=True)
        return F.relu(z, inplace=True)


class OutFixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x.type_as(x) * 1
        same = total.cpu()
        same = torch.add(x, 1)
        return same


class OutCopied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x.type_as(x) * 1
        same = total.to("cpu", copy=True)
        torch.add(x, 1, out=same)
        return same


class StatisticFixed(Statistic):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.norm.running_mean.to("cpu", copy=True)  # type: ignore[union-attr]
        return mean, self.norm(x[None].expand(2, 3))


@pytest.mark.parametrize(
    "program, help, fixed, meant",
    [
        (Alias, "write out of place: y = y + 5", AliasFixed, lambda x: x.sin()),
        (Alias, 'x.to("cpu", copy=True)', AliasCopied, lambda x: x.sin()),
        (Source, "write out of place: y = y.sin()", SourceFixed, lambda x: x),
        (Source, "move the write before the conversion", SourceMoved, lambda x: x.sin()),
        (Copy, "x.to(torch.float64, copy=True)", CopyCopied, lambda x: x.double() * x.sum()),
        (Item, "y = y.clone() before this line", ItemFixed, lambda x: torch.cat([torch.tensor([3.0]), x[1:]])),
        (Activation, "set inplace=False on the module act", ActivationFixed, lambda x: (x + 1).relu()),
        (Activation, "(x + 1).to(torch.float32, copy=True)", ActivationFixed, lambda x: (x + 1).relu()),
        (Functional, "pass inplace=False and use what is returned", FunctionalFixed, lambda x: x.relu()),
        (Functional, "torch.asarray(x.clone(), copy=True)", FunctionalCopied, lambda x: x.relu()),
        (Out, "write out of place: same = torch.add(x, 1)", OutFixed, lambda x: x + 1),
        (Out, 'total.to("cpu", copy=True)', OutCopied, lambda x: x + 1),
        (Statistic, 'self.norm.running_mean.to("cpu", copy=True)', StatisticFixed, None),
    ],
)
def test_help_is_true(program: Any, help: str, fixed: Any, meant: Any) -> None:
    x = torch.tensor([-1.0, 0.5, 2.0])
    assert any(help in line for line in caught(lambda: program()(x.clone())).help), help
    for way in ("eager", "export", "export_strict"):
        with ToMutationGuard() as guard:
            result = ALL[way](fixed(), (x.clone(),))
        assert guard.violations == []
        if way != "eager":
            result = result.module()(x.clone())
        if meant is not None:
            torch.testing.assert_close(result, meant(x))


def test_an_optimizer_step_says_so() -> None:
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

    def train() -> None:
        _kept = linear.weight.to("cpu")
        linear(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    assert any("optimizer's step" in line for line in caught(train).help)


@pytest.mark.parametrize("case", reported_cases.RAISES, ids=[case[0] for case in reported_cases.RAISES])
def test_reported_programs_get_a_way_out(case: Any) -> None:
    violation = caught(lambda: case[2]()(*case[3]()))
    assert len(violation.help) >= 2
    assert violation.expression


class Body(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def body(t: Tensor) -> Tensor:
            z = t.clone()
            y = z.to("cpu")
            y.add_(5)
            return z.sin()

        return torch.cond(x.sum() > 0, body, torch.cos, (x,))


class Hook(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def hook(g: Tensor) -> Tensor:
            y = g.cos().to("cpu")
            return y.add_(5)

        out = x.clone().requires_grad_() * 2
        out.register_hook(hook)
        out.sum().backward()
        return out


@columns
def test_the_message_is_the_same_in_the_bodies_of_control_flow() -> None:
    texts: dict[str, list[str]] = {}
    for way in ("eager", "no_grad", "export", "export_strict", "make_fx_symbolic"):
        torch._dynamo.reset()
        texts.setdefault(message(lambda way=way: ALL[way](Inside(Body()), (torch.ones(3),))), []).append(way)  # type: ignore[misc]
    assert len(texts) == 1, texts
    (text,) = texts
    assert "z was already float32 on cpu, so y is z itself" in text and "help: write out of place: y = y + 5" in text


@columns
def test_the_message_from_a_backward_hook() -> None:
    text = message(lambda: Inside(Hook())(torch.ones(3)))
    assert 'y = g.cos().to("cpu")' in text and "return y.add_(5)" in text
    assert f"model.py:{line_of(Hook, 'y.add_(5)')}, in Hook.forward.hook" in text
