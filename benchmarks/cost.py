"""What the guard costs, against a bare run and against a dispatch mode that only calls the operator.

    python -m benchmarks.cost

prints the table and the curves of growth, and writes both with quartiles to ``benchmarks/cost.json`` and as a figure to
``benchmarks/cost.svg``.  Each ratio is the median over pairs of runs in one process, the two of a pair in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
import timeit
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models
from dispatch_guard import ToMutationGuard

Context = Callable[[], AbstractContextManager[Any]]
HERE = Path(__file__).parent


class NoOpDispatch(TorchDispatchMode):
    """The floor: a mode whose handler only calls the operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class NoOpFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_op_pair() -> Any:
    """The floor of a guard that must see conversions too: both kinds of mode, doing nothing."""
    with NoOpDispatch(), NoOpFunction():
        yield


@dataclass
class Row:
    what: str
    against: str
    median: float
    low: float
    high: float
    most: float | None = None

    @property
    def verdict(self) -> str:
        if self.most is None:
            return ""
        return "pass" if self.median <= self.most else "over"

    def __str__(self) -> str:
        most = "" if self.most is None else f"{self.most:.2f}"
        return (
            f"{self.what:48} {self.against:20} {self.median:8.3f} [{self.low:.3f}, {self.high:.3f}] {most:>6} "
            f"{self.verdict}"
        )


def paired(run: Callable[[], object], ours: Context, theirs: Context, repeats: int) -> list[float]:
    def timed(context: Context) -> float:
        with context():
            start = time.perf_counter()
            run()
            return time.perf_counter() - start

    timed(ours), timed(theirs)
    ratios = []
    for number in range(repeats):
        if number % 2:
            first, second = timed(ours), timed(theirs)
        else:
            second, first = timed(theirs), timed(ours)
        ratios.append(first / second)
    return ratios


def row(what: str, against: str, ratios: list[float], most: float | None) -> Row:
    low, median, high = statistics.quantiles(ratios, n=4)
    found = Row(what, against, median, low, high, most)
    print(found, flush=True)
    return found


def small_modules() -> Callable[[], object]:
    layers = [layer for _ in range(60) for layer in (nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))]
    model, x = nn.Sequential(*layers), torch.randn(4, 16)

    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def conversions_only() -> None:
    x, y = torch.ones(4), torch.ones(4)
    for _ in range(200):
        x.to("cpu") * 2
        y.float()


def bert_base() -> Callable[[], object]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model, ids = BertModel(BertConfig()).eval(), torch.randint(0, 1000, (1, 128))

    def run() -> None:
        with torch.no_grad():
            model(ids)

    return run


def resnet_50() -> Callable[[], object]:
    from transformers import ResNetConfig, ResNetModel

    torch.manual_seed(0)
    model, pixels = ResNetModel(ResNetConfig()).eval(), torch.randn(1, 3, 224, 224)

    def run() -> None:
        with torch.no_grad():
            model(pixels)

    return run


def export_of(name: str, strict: bool) -> Callable[[], object]:
    module, args = getattr(models, name)()

    def run() -> None:
        torch._dynamo.reset()
        torch.export.export(module, args, strict=strict)

    return run


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Guarded(MLP):
    forward = ToMutationGuard()(MLP.forward)


def training_step(kind: type[MLP]) -> Callable[[], object]:
    model, x = kind(), torch.randn(32, 64)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def run() -> None:
        for _ in range(20):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def training_ratios(repeats: int) -> list[float]:
    plain, guarded = training_step(MLP), training_step(Guarded)
    ratios = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        guarded()
        middle = time.perf_counter()
        plain()
        ratios.append((middle - start) / (time.perf_counter() - middle))
    return ratios[2:]


class Plain:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class TracingOnly:
    @ToMutationGuard(when="tracing")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def decorator_microseconds(repeats: int) -> list[float]:
    """What a call of a decorated method takes in eager mode beyond one of an undecorated one."""
    plain, decorated, x = Plain(), TracingOnly(), torch.ones(3)
    number = 5_000

    def seconds(owner: Plain | TracingOnly) -> float:
        return timeit.timeit(lambda: owner.forward(x), number=number) / number

    return [1e6 * (seconds(decorated) - seconds(plain)) for _ in range(repeats)]


def bytes_per_dead_conversion(repeats: int) -> list[float]:
    def kept(number: int) -> float:
        with ToMutationGuard():
            torch.zeros(1).to("cpu")
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(number):
                torch.zeros(1).to("cpu")
            kept = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
        return kept

    return [(kept(20_000) - kept(2_000)) / 18_000 for _ in range(repeats)]


_PEAK = """
import resource, torch
from contextlib import nullcontext
from benchmarks.cost import bert_base
from dispatch_guard import ToMutationGuard
torch.set_num_threads(1)
run = bert_base()
with {context}():
    run()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_ratios(repeats: int) -> list[float]:
    def peak(context: str) -> int:
        ran = subprocess.run([sys.executable, "-c", _PEAK.format(context=context)], check=True, capture_output=True)
        return int(ran.stdout)

    return [peak("ToMutationGuard") / peak("nullcontext") for _ in range(repeats)]


def tags(number: int) -> Context:
    """A guard with so many live tags."""

    @contextlib.contextmanager
    def context() -> Any:
        with ToMutationGuard() as guard:
            kept = [torch.zeros(1) for _ in range(number)]
            for tensor in kept:
                tensor.to("cpu")
            yield guard

    return context


def import_ratios(repeats: int) -> list[float]:
    def seconds(name: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {name}"], check=True)
        return time.perf_counter() - start

    ours = "torch; from dispatch_guard import ToMutationGuard"
    return [seconds(ours) / seconds("torch") for _ in range(repeats)]


def measure(quick: bool) -> list[Row]:
    few, many = (3, 9) if quick else (7, 41)
    guard: Context = ToMutationGuard
    rows = []
    for name in ("llama", "bert", "t5", "vit", "whisper"):
        for strict in (False, True):
            run, what = export_of(name, strict), f"export {name}, {'strict' if strict else 'non-strict'}"
            rows.append(row(what, "bare", paired(run, guard, nullcontext, few), 1.05))
            rows.append(row(what, "no-op dispatch mode", paired(run, guard, NoOpDispatch, few), 1.03))
    small = small_modules()
    rows.append(row("eager, 180 small modules", "no-op dispatch mode", paired(small, guard, NoOpDispatch, many), 1.15))
    rows.append(row("eager, 180 small modules", "no-op mode pair", paired(small, guard, no_op_pair, many), None))
    run = conversions_only
    rows.append(row("eager, conversions only", "no-op dispatch mode", paired(run, guard, NoOpDispatch, many), 2.0))
    rows.append(row("eager, BERT-base at 128 tokens", "bare", paired(bert_base(), guard, nullcontext, many // 2), 1.03))
    rows.append(row("eager, ResNet-50 at 224 px", "bare", paired(resnet_50(), guard, nullcontext, many // 2), 1.03))
    rows.append(row("training step, decorated forward, small MLP", "bare", training_ratios(many), 1.25))
    rows.append(row("eager, 20,000 live tags", "20 live tags", paired(small, tags(20_000), tags(20), many // 2), 1.1))
    rows.append(row("tracing decorator in eager, per call", "bare, microseconds", decorator_microseconds(many), 1.0))
    rows.append(row("bytes kept per dead conversion", "-", bytes_per_dead_conversion(3), 0.0))
    rows.append(row("peak memory, eager BERT-base", "bare", peak_ratios(few), 1.005))
    rows.append(row("import dispatch_guard", "import torch", import_ratios(few), 1.01))
    return rows + peers(small, many)


def peers(run: Callable[[], object], repeats: int) -> list[Row]:
    """Where the guard stands among the modes that torch ships."""
    from torch._subclasses.schema_check_mode import SchemaCheckMode
    from torch.utils._debug_mode import DebugMode
    from torch.utils.flop_counter import FlopCounterMode

    others: dict[str, Context] = {
        "ToMutationGuard": ToMutationGuard,
        "FlopCounterMode": lambda: FlopCounterMode(display=False),
        "DebugMode": DebugMode,
        "SchemaCheckMode": SchemaCheckMode,
        "allow_mutation_on_saved_tensors": torch.autograd.graph.allow_mutation_on_saved_tensors,
    }
    return [
        row(f"180 small modules under {name}", "bare", paired(run, context, nullcontext, repeats // 4 or 3), None)
        for name, context in others.items()
    ]


# ---- growth

Curve = list[tuple[int, float]]


def operators(number: int) -> Callable[[], object]:
    x = torch.ones(4)

    def run() -> None:
        for _ in range(number):
            x.add(1)

    return run


def conversions(number: int) -> Callable[[], object]:
    def run() -> None:
        for _ in range(number):
            torch.empty(4).to("cpu")

    return run


def view_depth(depth: int) -> Callable[[], object]:
    view = torch.ones(4).to("cpu")
    for _ in range(depth):
        view = view.view(4)

    def run() -> None:
        for _ in range(100):
            view.add(1)

    return run


def width(size: int) -> Callable[[], object]:
    model, x = nn.Sequential(*(nn.Linear(size, size) for _ in range(20))), torch.randn(16, size)

    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def growth(repeats: int) -> dict[str, Curve]:
    """The guard against a no-op dispatch mode, as a program grows in one way."""
    guard: Context = ToMutationGuard
    small = small_modules()

    def curve(make: Callable[[int], Callable[[], object]], sizes: tuple[int, ...]) -> Curve:
        return [(n, statistics.median(paired(make(n), guard, NoOpDispatch, repeats))) for n in sizes]

    curves = {
        "operators": curve(operators, (100, 1_000, 10_000)),
        "conversions": curve(conversions, (100, 1_000, 10_000)),
        "live tags": [
            (n, statistics.median(paired(small, tags(n), NoOpDispatch, repeats))) for n in (20, 200, 2_000, 20_000)
        ],
        "view depth": curve(view_depth, (1, 10, 100)),
        "model size": curve(width, (16, 64, 256, 1_024)),
    }
    for name, points in curves.items():
        print(f"{name:12}", "  ".join(f"{size:,}: {ratio:.2f}" for size, ratio in points), flush=True)
    return curves


def draw(rows: list[Row], curves: dict[str, Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = [r for r in rows if "bytes" not in r.what and "microseconds" not in r.against]  # ratios only
    height = 0.25 * len(rows)
    figure, (axes, growing) = pyplot.subplots(2, figsize=(9, height + 4), height_ratios=[height, 3])
    names = [f"{r.what} / {r.against}" for r in rows]
    errors = [[r.median - r.low for r in rows], [r.high - r.median for r in rows]]
    axes.barh(names, [r.median for r in rows], xerr=errors, color="#4c72b0")
    for position, r in enumerate(rows):
        if r.most is not None:
            axes.plot([r.most] * 2, [position - 0.4, position + 0.4], color="#c44e52")
    axes.set_xscale("log")
    axes.set_xlabel("ratio (median and quartiles); red: the target")
    axes.invert_yaxis()
    for name, points in curves.items():
        growing.plot(*zip(*points), marker="o", label=name)
    growing.set_xscale("log")
    growing.set_ylabel("over a no-op dispatch mode")
    growing.set_xlabel("number")
    growing.set_ylim(bottom=0.9)
    growing.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the guard costs.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'what':48} {'against':20} {'median':>8} [quartiles]     target")
    rows = measure(options.quick)
    print("\nthe guard over a no-op dispatch mode, as a program grows")
    curves = growth(5 if options.quick else 15)
    found = {"rows": [asdict(r) | {"verdict": r.verdict} for r in rows], "curves": curves}
    (HERE / "cost.json").write_text(json.dumps(found, indent=1) + "\n")
    with contextlib.suppress(ImportError):
        draw(rows, curves, HERE / "cost.svg")


if __name__ == "__main__":
    main()
