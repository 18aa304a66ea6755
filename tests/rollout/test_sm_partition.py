"""SMs cut in two: what the driver is asked for, what is said when it refuses, and on a GPU that the parts are apart."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import smid

from numerics import assert_bit_equal
from trace_kernels import get_format
from trace_kernels.round_values import round_values
from trace_lightning.rollout import sm_partition
from trace_lightning.rollout.sm_partition import default_sms, partition_of

GPU = torch.device("cuda", 0)
TOTAL = 132
HAS_BINDINGS = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


class Status(int):
    """What every function of the driver returns first."""

    def __repr__(self) -> str:
        return f"<CUresult: {int(self)}>"


class Driver(ModuleType):
    """`cuda.bindings.driver` with 132 SMs in groups of eight; keeps the sizes of the contexts that it made."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.contexts: list[int] = []

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return Status(0), index

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[Any, ...]:
        return Status(0), self.part(TOTAL)

    def cuDevSmResourceSplitByCount(self, groups: int, whole: Any, flags: int, sms: int) -> tuple[Any, ...]:
        given = -(-sms // 8) * 8
        if given > whole.sm.smCount:
            return Status(914), [], 0, None
        return Status(0), [self.part(given)], groups, self.part(whole.sm.smCount - given)

    def cuDevResourceGenerateDesc(self, parts: list[Any], count: int) -> tuple[Any, ...]:
        return Status(0), parts[0].sm.smCount

    def cuGreenCtxCreate(self, size: int, device: int, flags: int) -> tuple[Any, ...]:
        self.contexts.append(size)
        return Status(0), size

    def cuGreenCtxStreamCreate(self, context: int, flags: int, priority: int) -> tuple[Any, ...]:
        return Status(0), 1000 + context

    @staticmethod
    def part(sms: int) -> Any:
        return SimpleNamespace(sm=SimpleNamespace(smCount=sms))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake, bindings = Driver(), ModuleType("cuda.bindings")
    bindings.driver = fake  # type: ignore[attr-defined]
    for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": bindings}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    properties = SimpleNamespace(multi_processor_count=TOTAL)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    sm_partition._cut.cache_clear()
    yield fake
    sm_partition._cut.cache_clear()


@pytest.mark.parametrize(("sms", "rollout"), [(None, 32), (8, 8), (33, 40), (124, 128)])
def test_a_device_is_cut_once_into_what_was_asked_for_and_the_rest(
    driver: Driver, sms: int | None, rollout: int
) -> None:
    parts = partition_of(GPU, sms)
    assert parts is not None
    assert (parts.rollout_sms, parts.trainer_sms) == (rollout, TOTAL - rollout)
    assert (parts.rollout, parts.trainer) == ((1000 + rollout, 0), (1000 + TOTAL - rollout, 0))
    assert partition_of(GPU, sms) is parts
    assert driver.contexts == [rollout, TOTAL - rollout]


@pytest.mark.parametrize(("device", "sms"), [(torch.device("cpu"), None), (torch.device("cpu"), 32), (GPU, 0)])
def test_a_cpu_or_zero_asks_no_driver(driver: Driver, device: torch.device, sms: int | None) -> None:
    assert partition_of(device, sms) is None
    assert driver.contexts == []


@pytest.mark.parametrize(("total", "sms"), [(132, 32), (114, 24), (108, 24), (148, 32), (188, 40), (20, 8)])
def test_the_default_is_a_quarter_that_the_driver_does_not_round(total: int, sms: int) -> None:
    assert default_sms(total) == sms


def test_what_was_asked_for_and_cannot_be_had_is_refused(driver: Driver) -> None:
    with pytest.raises(ValueError, match=r"ahead_sms=140: the 132 SMs .*SplitByCount gives <CUresult: 914>.*or 0: "):
        partition_of(GPU, 140)


def test_a_missing_package_is_refused_or_said(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ValueError, match=r"ahead_sms=32.*pip install cuda-bindings.*or 0: "):
        partition_of(GPU, 32)
    assert not caplog.records
    assert partition_of(GPU, None) is None
    assert "share all SMs with training (slower): the package cuda-bindings is missing" in caplog.text


@triton.jit
def _where(out_ptr):
    """The SM that every program runs on."""
    tl.store(out_ptr + tl.program_id(0), smid())


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_BINDINGS, reason="needs the package cuda-bindings, which CUDA builds of torch bring")
def test_on_a_gpu_the_parts_are_disjoint_and_compute_alike() -> None:
    """Every SM is in one part; our rounding, and a matmul of small whole numbers, are the same on all of them."""
    device = torch.device("cuda", torch.cuda.current_device())
    parts = partition_of(device, None)
    assert parts is not None
    total = torch.cuda.get_device_properties(device).multi_processor_count
    assert parts.rollout_sms + parts.trainer_sms == total
    x = torch.randint(-8, 9, (1024, 1024), device=device).to(torch.bfloat16)
    seen, values = [], []
    for stream in (parts.rollout, parts.trainer, torch.cuda.Stream(device)):
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            ids = torch.empty(64 * total, dtype=torch.int32, device=device)
            _where[(len(ids),)](ids)
            values.append((round_values(x, get_format("nvfp4"), None, dtype=torch.float32), x @ x))
            stream.synchronize()
            seen.append(set(ids.tolist()))
    rollout, trainer, whole = seen
    assert not rollout & trainer
    assert (len(rollout), len(trainer)) == (parts.rollout_sms, parts.trainer_sms)
    assert rollout | trainer == whole
    for rounded, product in values[:2]:
        assert_bit_equal(rounded, values[2][0])
        assert_bit_equal(product, values[2][1])
