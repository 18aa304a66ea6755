"""Packed weights as tensors: they save, load, slice, move and requantise in place."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from numerics import assert_bit_equal, assert_sqnr
from trace_lightning.quantization.mxfp4 import MXFP4Tensor
from trace_lightning.quantization.nvfp4 import NVFP4Tensor
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor

CLASSES = pytest.mark.parametrize("cls", [NVFP4Tensor, MXFP4Tensor])
Packed = type[PackedFP4Tensor]


def make(cls: Packed, rows: int = 24, columns: int = 96, dtype: torch.dtype = torch.float32) -> PackedFP4Tensor:
    return cls.from_hp(torch.randn(rows, columns, dtype=dtype))


def assert_same(ours: PackedFP4Tensor, expected: PackedFP4Tensor) -> None:
    assert type(ours) is type(expected)
    assert (ours.shape, ours.dtype, ours.four_over_six) == (expected.shape, expected.dtype, expected.four_over_six)
    assert ours.packed_tensors().keys() == expected.packed_tensors().keys()
    for name, tensor in ours.packed_tensors().items():
        assert_bit_equal(tensor, expected.packed_tensors()[name])


def addresses(weight: PackedFP4Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in weight.packed_tensors().values()]


class TestStorage:
    @CLASSES
    def test_torch_save_with_weights_only(self, cls: Packed) -> None:
        state = {"weight": make(cls, columns=50, dtype=torch.bfloat16)}
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert_same(torch.load(file, weights_only=True)["weight"], state["weight"])

    @CLASSES
    def test_safetensors(self, cls: Packed, tmp_path: Path) -> None:
        weight = make(cls, columns=50)
        save_file(weight.packed_tensors(), tmp_path / "weight.safetensors")
        loaded = load_file(tmp_path / "weight.safetensors")
        assert_same(cls.from_packed(loaded, width=50, dtype=torch.float32), weight)

    @pytest.mark.parametrize(
        ("cls", "name"),
        [(NVFP4Tensor, "scale"), (NVFP4Tensor, "outer_scale"), (MXFP4Tensor, "scale"), (MXFP4Tensor, "qdata")],
    )
    def test_missing_field_is_named(self, cls: Packed, name: str) -> None:
        tensors = make(cls).packed_tensors()
        del tensors[name]
        with pytest.raises(ValueError, match=name):
            cls.from_packed(tensors, width=96, dtype=torch.float32)

    @CLASSES
    def test_bytes_per_element(self, cls: Packed) -> None:
        weight = make(cls, rows=64, columns=64)
        block_bytes = sum(t.nbytes for name, t in weight.packed_tensors().items() if name != "outer_scale")
        assert block_bytes * 8 / weight.numel() == weight.format.bits_per_element

    @CLASSES
    @pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(2, 3, 4), torch.ones(2, 16, dtype=torch.int32)])
    def test_from_hp_refuses_what_is_no_weight(self, cls: Packed, bad: Tensor) -> None:
        with pytest.raises(ValueError, match="2-D floating point"):
            cls.from_hp(bad)


class TestOperations:
    @CLASSES
    @pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 16), (5, 17), (7, 24), (16, 33)])
    def test_odd_sizes(self, cls: Packed, rows: int, columns: int) -> None:
        weight = torch.randn(rows, columns)
        packed = cls.from_hp(weight)
        assert packed.dequantize().shape == packed.shape == (rows, columns)
        assert_sqnr(packed.dequantize(), weight, min_db=13)

    @CLASSES
    def test_row_slices(self, cls: Packed) -> None:
        packed = make(cls)
        values = packed.dequantize()
        for rows in (slice(0, 24), slice(3, 9), slice(7, None), slice(None, 5)):
            assert_bit_equal(packed[rows].dequantize(), values[rows])
        assert packed[3:9].qdata.data_ptr() == packed.qdata[3:].data_ptr(), "a row slice is a view"

    @CLASSES
    def test_column_slices(self, cls: Packed) -> None:
        packed = make(cls, columns=80)
        values, block = packed.dequantize(), packed.format.block_size
        for columns in (slice(0, block), slice(block, 2 * block), slice(block, None), slice(0, 80)):
            assert_bit_equal(packed[:, columns].dequantize(), values[:, columns])
        for columns in (slice(1, block), slice(0, block - 2), slice(0, block, 2)):
            with pytest.raises(ValueError, match=f"multiples of {block}"):
                packed[:, columns]

    @CLASSES
    def test_to_dtype_and_device(self, cls: Packed) -> None:
        packed = make(cls)
        half = packed.to(torch.bfloat16)
        assert isinstance(half, cls)
        assert half.dtype == torch.bfloat16
        assert_bit_equal(half.dequantize(), packed.dequantize(torch.bfloat16))
        assert_bit_equal(half.qdata, packed.qdata)
        assert_same(packed.to("cpu"), packed)

    @CLASSES
    def test_copies_are_independent(self, cls: Packed) -> None:
        packed = make(cls)
        assert addresses(packed.detach()) == addresses(packed)
        before = packed.clone()
        for other in (packed.clone(), copy.deepcopy(packed)):
            assert_same(other, packed)
            assert not set(addresses(other)) & set(addresses(packed))
            other.copy_(torch.randn(24, 96))
            assert not torch.equal(other.qdata, packed.qdata)
            assert_same(packed, before)

    @CLASSES
    @pytest.mark.parametrize("batch", [(1,), (2,), (31,), (32,), (33,), (128,), (2, 1), (31, 7), (33, 7)])
    @pytest.mark.parametrize("with_bias", [False, True])
    def test_linear(self, cls: Packed, batch: tuple[int, ...], with_bias: bool) -> None:
        packed, x = make(cls, columns=50), torch.randn(*batch, 50)
        bias = torch.randn(24) if with_bias else None
        y = F.linear(x, packed, bias)
        assert y.shape == (*batch, 24)
        assert_bit_equal(y, F.linear(x, packed.dequantize(), bias))
        first = F.linear(x.flatten(0, -2)[:1], packed, bias)
        assert (y.flatten(0, -2)[:1] - first).abs().max() <= 1e-5, "a row depends on its batch"


class TestCopy:
    @CLASSES
    def test_requantises_in_place(self, cls: Packed) -> None:
        packed, weight = make(cls), 3 * torch.randn(24, 96)
        before = addresses(packed)
        assert packed.copy_(weight) is packed
        assert addresses(packed) == before
        assert_same(packed, cls.from_hp(weight))

    @CLASSES
    def test_from_packed_copies_the_bytes(self, cls: Packed) -> None:
        packed, other = make(cls), make(cls)
        packed.copy_(other)
        assert_same(packed, other)

    def test_keeps_its_own_settings(self) -> None:
        weight = torch.randn(24, 96)
        packed = NVFP4Tensor.from_hp(torch.randn(24, 96), four_over_six=True)
        packed.copy_(weight)
        assert_same(packed, NVFP4Tensor.from_hp(weight, four_over_six=True))

    @CLASSES
    def test_refuses_another_shape(self, cls: Packed) -> None:
        with pytest.raises(ValueError, match="shape"):
            make(cls).copy_(torch.randn(1, 96))

    @CLASSES
    def test_load_state_dict_of_masters(self, cls: Packed) -> None:
        linear, master = nn.Linear(96, 24), nn.Linear(96, 24)
        linear.weight = nn.Parameter(make(cls), requires_grad=False)  # type: ignore[arg-type]
        before = addresses(linear.weight)  # type: ignore[arg-type]
        linear.load_state_dict(master.state_dict())
        assert isinstance(linear.weight, cls)
        assert addresses(linear.weight) == before
        assert_same(linear.weight.detach(), cls.from_hp(master.weight.detach()))  # type: ignore[arg-type]
        x = torch.randn(3, 96)
        assert_bit_equal(linear(x), F.linear(x, linear.weight.dequantize(), master.bias))


def test_a_slice_refuses_to_be_written() -> None:
    """Its outer scale is the whole tensor's: requantising the slice would change the meaning of all other rows."""
    whole = NVFP4Tensor.from_hp(torch.randn(32, 64))
    before = whole.dequantize()
    with pytest.raises(ValueError, match="is a slice"):
        whole[:8].copy_(torch.randn(8, 64) * 100)
    assert torch.equal(whole.dequantize(), before)
