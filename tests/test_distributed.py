"""Collectives, sharded tensors and wrapped modules, with gloo on loopback."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dispatch_guard import ToMutationError, ToMutationGuard

Tensor = torch.Tensor


def start(rank: int, world_size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        start(0, 1, f"{directory}/store")
        yield
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def ones() -> Tensor:
    return torch.ones(4)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": lambda t: dist.all_reduce(t),
    "all_reduce async": lambda t: dist.all_reduce(t, async_op=True).wait(),
    "all_reduce_coalesced": lambda t: dist.all_reduce_coalesced([ones(), t]),
    "broadcast": lambda t: dist.broadcast(t, 0),
    "reduce": lambda t: dist.reduce(t, 0),
    "all_gather": lambda t: dist.all_gather([t], ones()),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(t, ones()),
    "gather": lambda t: dist.gather(ones(), [t], dst=0),
    "scatter": lambda t: dist.scatter(t, [ones()], src=0),
    "all_to_all_single": lambda t: dist.all_to_all_single(t, ones()),
    "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(t, ones()),
}
READS: dict[str, Callable[[Tensor], object]] = {
    "all_gather": lambda t: dist.all_gather([ones()], t),
    "gather": lambda t: dist.gather(t, [ones()], dst=0),
    "scatter": lambda t: dist.scatter(ones(), [t], src=0),
    "all_to_all_single": lambda t: dist.all_to_all_single(ones(), t),
    "functional all_reduce": lambda t: functional.all_reduce(t, "sum", dist.group.WORLD).sum(),
}


@pytest.mark.parametrize("collective", WRITES)
def test_a_collective_that_writes_a_converted_tensor_raises(collective: str) -> None:
    for convert in (lambda t: t.to("cpu"), lambda t: t.double()):
        with pytest.raises(ToMutationError) as caught, ToMutationGuard():
            source = ones()
            convert(source)
            WRITES[collective](source)
        assert caught.value.violation.op.startswith("c10d.")
    with ToMutationGuard() as guard:
        WRITES[collective](ones())
    assert guard.violations == []


@pytest.mark.parametrize("collective", READS)
def test_a_collective_that_reads_one_does_not(collective: str) -> None:
    with ToMutationGuard() as guard:
        READS[collective](ones().to("cpu"))
    assert guard.violations == []


def test_dtensors(mesh: DeviceMesh) -> None:
    def sharded() -> DTensor:
        return distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])

    for write in (
        lambda source, result: result.add_(1),
        lambda source, result: source.add_(1),
        lambda source, result: result.to_local().add_(1),
    ):
        for dtype in (torch.float32, torch.float64):
            with pytest.raises(ToMutationError), ToMutationGuard():
                source = sharded()
                write(source, source.to(dtype))
    with ToMutationGuard() as guard:
        (sharded().to(torch.float64) + 1).add_(1)
    assert guard.violations == []


def train(module: nn.Module) -> Tensor:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    x = torch.ones(2, 4).to("cpu")
    for _ in range(2):
        module(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return x


def test_modules_under_ddp() -> None:
    with ToMutationGuard() as guard:
        train(DistributedDataParallel(nn.Linear(4, 4)))
    assert guard.violations == [] and guard.conversions == 1
    with pytest.raises(ToMutationError), ToMutationGuard():
        train(DistributedDataParallel(nn.Linear(4, 4))).add_(1)
    module = DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(ToMutationError), ToMutationGuard():
        module.module.weight.to("cpu")
        train(module)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)])
def test_modules_under_fsdp2(mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    def wrapped() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(module[0], mesh=mesh, mp_policy=policy)
        return fully_shard(module, mesh=mesh, mp_policy=policy)

    with ToMutationGuard() as guard:
        train(wrapped())
    assert guard.violations == []
    module = wrapped()
    with pytest.raises(ToMutationError), ToMutationGuard():
        module[0].weight.to(torch.float64)  # type: ignore[index]
        train(module)


def _rank(rank: int, directory: str) -> None:
    start(rank, 2, f"{directory}/pair")
    with ToMutationGuard(on_violation="record") as guard:
        x = torch.full((4,), float(rank))
        y = x.to("cpu")
        dist.all_reduce(y)
        gathered = [torch.zeros(4), torch.zeros(4)]
        dist.all_gather(gathered, torch.ones(4))
    ok = [violation.op for violation in guard.violations] == ["c10d.allreduce_.default"] and y.tolist() == [1.0] * 4
    Path(directory, f"{rank}").write_text("ok" if ok else str(guard.violations))
    dist.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["ok", "ok"]
