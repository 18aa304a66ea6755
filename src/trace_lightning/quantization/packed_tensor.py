"""Packed FP4 weights as tensor subclasses in torchao's style: what `NVFP4Tensor` and `MXFP4Tensor` share.

    qdata        uint8 [N, Kp / 2]        two codes a byte, element 2i in the low nibble
    scale        uint8 [N, Kp / block]    E4M3 or E8M0 bytes, row-major (not swizzled: row slices stay views)
    outer_scale  FP32  [1, 1]             one per tensor; a fused group (q/k/v, gate/up) is one tensor

`tensor.copy_(high_precision)` requantises *into the existing storages*, so addresses captured by a CUDA graph stay
valid over a weight sync, and `load_state_dict` of BF16 masters does the same. `F.linear` dequantises: this is the
reference path and says nothing about speed. Gradients, `cat` and arithmetic are left out: a snapshot is read, not
trained.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

from trace_kernels import BlockFormat, Quantized, unpack_codes
from trace_kernels.block_dequantize import dequantize_packed
from trace_kernels.block_quantize import quantize_rows, requantize_

aten = torch.ops.aten


class PackedFP4Tensor(TorchAOBaseTensor):
    """A 2-D weight held as packed codes and scales. Make one with `from_hp`."""

    tensor_data_names: ClassVar[list[str]] = ["qdata", "scale"]
    tensor_attribute_names: ClassVar[list[str]] = ["width", "orig_dtype", "four_over_six", "sliced"]
    optional_tensor_data_names: ClassVar[list[str]] = ["outer_scale"]

    qdata: Tensor
    scale: Tensor
    outer_scale: Tensor | None
    width: int
    orig_dtype: torch.dtype
    four_over_six: bool
    sliced: bool  # a part of another tensor, whose outer scale it shares

    def __new__(
        cls,
        qdata: Tensor,
        scale: Tensor,
        width: int,
        orig_dtype: torch.dtype,
        four_over_six: bool = False,
        sliced: bool = False,
        outer_scale: Tensor | None = None,
    ) -> Self:
        shape = (*qdata.shape[:-1], width)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=orig_dtype, device=qdata.device)

    def __init__(
        self,
        qdata: Tensor,
        scale: Tensor,
        width: int,
        orig_dtype: torch.dtype,
        four_over_six: bool = False,
        sliced: bool = False,
        outer_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.qdata, self.scale, self.outer_scale = qdata, scale, outer_scale
        self.width, self.orig_dtype, self.four_over_six, self.sliced = width, orig_dtype, four_over_six, sliced

    @classmethod
    def block_format(cls, four_over_six: bool) -> BlockFormat:
        """The number format of this class."""
        raise NotImplementedError

    @property
    def format(self) -> BlockFormat:
        return self.block_format(self.four_over_six)

    @classmethod
    def from_hp(cls, weight: Tensor, *, outer_scale: Tensor | None = None, four_over_six: bool = False) -> Self:
        """Quantise a high-precision weight [N, K]. K is padded with zeros to whole blocks.

        Args:
            weight: FP32, BF16 or FP16.
            outer_scale: FP32 [1, 1]; defaults to the one that fits this weight's amax.
            four_over_six: see `NVFP4`.

        Raises:
            ValueError: if `weight` is not a 2-D floating point tensor.
        """
        if weight.ndim != 2 or not weight.is_floating_point():
            raise ValueError(f"expected a 2-D floating point weight, got {weight.dtype} {tuple(weight.shape)}")
        fmt, weight = cls.block_format(four_over_six), weight.detach()
        if outer_scale is None:
            outer_scale = fmt.outer_from_amax(weight.abs().amax().float().reshape(1, 1))
        rows = quantize_rows(weight, fmt, outer_scale)
        return cls(rows.qdata, rows.scale, weight.shape[1], weight.dtype, four_over_six, False, rows.outer)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        shape, device = tuple(self.shape), self.qdata.device
        return f"{type(self).__name__}(shape={shape}, dtype={self.orig_dtype}, device={device})"

    def quantized(self) -> Quantized:
        """Codes and scales, unpacked: one code per byte."""
        return Quantized(unpack_codes(self.qdata), self.scale, self.outer_scale, self.width)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """High-precision values [N, K] in `dtype` (default: the dtype it was made from)."""
        return self.format.dequantize(self.quantized(), dtype or self.orig_dtype)

    def values(self, dtype: torch.dtype) -> Tensor:
        """`dequantize` by one kernel on a GPU; for weights of our own packing, whose scales are normal codes."""
        return dequantize_packed(
            self.qdata, self.scale, self.outer_scale, width=self.width, fmt=self.format.name, dtype=dtype
        )

    def packed_tensors(self) -> dict[str, Tensor]:
        """The plain tensors to store in safetensors, by field name; `from_packed` takes them back."""
        names = [*self.tensor_data_names, *self.optional_tensor_data_names]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @classmethod
    def from_packed(
        cls, tensors: dict[str, Tensor], *, width: int, dtype: torch.dtype, four_over_six: bool = False
    ) -> Self:
        """Rebuild from `packed_tensors`.

        Raises:
            ValueError: if a field is missing; uninitialised scales would load as garbage weights.
        """
        needed = ["qdata", "scale", *(["outer_scale"] if cls.block_format(four_over_six).has_outer else [])]
        missing = [name for name in needed if name not in tensors]
        if missing:
            raise ValueError(f"{cls.__name__} needs {needed}, but {missing} is missing: the checkpoint is incomplete")
        outer = tensors.get("outer_scale")
        return cls(tensors["qdata"], tensors["scale"], width, dtype, four_over_six, False, outer)


def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else (kwargs or {}).get("bias")
    return torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias)


def _to(func: Any, types: Any, args: Any, kwargs: Any) -> PackedFP4Tensor:
    self, device, dtype = args[0], kwargs.get("device"), kwargs.get("dtype") or args[0].orig_dtype
    outer = None if self.outer_scale is None else self.outer_scale.to(device)
    moved = (self.qdata.to(device), self.scale.to(device))
    return type(self)(*moved, self.width, dtype, self.four_over_six, self.sliced, outer)  # type: ignore[no-any-return]


def _slice(func: Any, types: Any, args: Any, kwargs: Any) -> PackedFP4Tensor:
    self, dim, start, stop, step = (*args, 1)[:5] if len(args) < 5 else args
    cls, block = type(self), self.format.block_size
    start, stop = start or 0, min(self.shape[dim], self.shape[dim] if stop is None else stop)
    if step != 1 or (dim == 1 and (start % block or (stop % block and stop != self.width))):
        raise ValueError(f"{cls.__name__} slices columns only at multiples of {block}, with step 1")
    if dim == 0:
        return cls(self.qdata[start:stop], self.scale[start:stop], *_rest(self, self.width))  # type: ignore[no-any-return]
    columns, first = -(-stop // block), start // block
    qdata = self.qdata[:, first * block // 2 : columns * block // 2]
    return cls(qdata, self.scale[:, first:columns], *_rest(self, stop - start))  # type: ignore[no-any-return]


def _copy(func: Any, types: Any, args: Any, kwargs: Any) -> PackedFP4Tensor:
    self, source = args[0], args[1]
    cls = type(self)
    if self.shape != source.shape:
        raise ValueError(f"cannot copy a weight of shape {tuple(source.shape)} into {tuple(self.shape)}")
    if self.sliced:
        raise ValueError(
            f"this {cls.__name__} is a slice and shares its outer scale with the rest: copy into the whole tensor"
        )
    if not isinstance(source, cls):
        packed = (self.qdata, self.scale, self.outer_scale)
        requantize_([source.to(self.qdata.device)], *packed, None, self.format.name, self.four_over_six)
        return self  # type: ignore[no-any-return]
    for name, tensor in source.packed_tensors().items():
        getattr(self, name).copy_(tensor)
    return self  # type: ignore[no-any-return]


def register_ops(cls: type[PackedFP4Tensor]) -> None:
    """Give a concrete class its `F.linear`, `to`, slicing and requantising `copy_` (dispatch tables are per class)."""
    cls.implements_torch_function([torch.nn.functional.linear])(_linear)
    cls.implements([aten._to_copy.default])(_to)
    cls.implements([aten.slice.Tensor])(_slice)
    cls.implements([aten.copy_.default])(_copy)


def _rest(self: PackedFP4Tensor, width: int) -> tuple[int, torch.dtype, bool, bool, Tensor | None]:
    return width, self.orig_dtype, self.four_over_six, True, self.outer_scale
