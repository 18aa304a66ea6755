"""The tensors of an FP4 checkpoint, one linear after the other.

    masters         each fused group is quantised as the rollout does it, under one outer scale: the same bytes
    FP4 checkpoint  codes and scales travel as they are; nothing is quantised twice

A linear whose width is no multiple of the block cannot be stored by either dialect. Its weight is rounded all the same,
written as the values (exact in BF16: six significant bits and a power of two) and listed as not quantised, so that the
policy stays the one that was trained.

What was left out: experts stacked in one tensor. They stay in high precision in the rollout, and under other names in
the files that serving tools read; such models are exported in Hugging Face format only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trace_kernels import get_format
from trace_kernels.block_quantize import PackedRows, quantize_rows
from trace_lightning.export.kv import attention_names
from trace_lightning.export.source import Source
from trace_lightning.models.checkpoint import weight_names
from trace_lightning.models.layout import find_decoder_layers, read_layout
from trace_lightning.quantization.dialects import TENSOR_CLASSES, Dialect, FP4Linear, OuterScale, Scheme
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor
from trace_lightning.recipe import FormatName

_CHUNK = 1 << 20  # elements that are quantised at a time: the temporaries are ten times as large


def quantize_group(weights: list[Tensor], fmt_name: str, four_over_six: bool) -> list[PackedFP4Tensor]:
    """The linears of one fused group under one outer scale: the bytes of the rollout's snapshot.

    Args:
        weights: masters [N_i, K].
        fmt_name: `nvfp4` or `mxfp4`.
        four_over_six: see `NVFP4`.

    Raises:
        ValueError: a weight that is not finite.
    """
    fmt, width = get_format(fmt_name, four_over_six=four_over_six), weights[0].shape[1]
    assert fmt is not None
    ends = torch.stack([end for weight in weights for end in weight.aminmax()])  # without a copy of magnitudes
    amax = ends.abs().amax().float()
    if not amax.isfinite():
        raise ValueError("a weight is not finite: this policy has diverged")
    outer = fmt.outer_from_amax(amax.reshape(1, 1))
    groups, found = -(-width // fmt.block_size), []
    for weight in weights:
        qdata = weight.new_empty(len(weight), groups * fmt.block_size // 2, dtype=torch.uint8)
        scale = weight.new_empty(len(weight), groups, dtype=torch.uint8)
        step = max(1, _CHUNK // width)
        for begin in range(0, len(weight), step):
            part = slice(begin, begin + step)
            rows = PackedRows(qdata=qdata[part], scale=scale[part], outer=outer, parity=None)
            quantize_rows(weight[part].float(), fmt, outer, out=rows)
        cls = TENSOR_CLASSES[fmt_name]
        found.append(cls(qdata, scale, width, torch.float32, four_over_six, outer_scale=outer))
    return found


@dataclass(frozen=True)
class FP4Export:
    """What goes into an FP4 checkpoint.

    Args:
        source: the policy.
        dialect: how it is written.
        scheme: formats and the linears in high precision.
        groups: linears by fused group, or one by one where they are in FP4 already.
        dtype: of everything else; None keeps the dtype that is stored.
        input_scales: FP32 [] outer scales of inputs by linear, for W4A4 NVFP4.
        kv_scales: see `ExportRecord`.
        calibration: what the input scales come from, in words.
    """

    source: Source
    dialect: Dialect
    scheme: Scheme
    groups: tuple[tuple[str, ...], ...]
    dtype: torch.dtype | None
    input_scales: Mapping[str, float] = field(default_factory=dict)
    kv_scales: list[dict[str, list[float]]] = field(default_factory=list)
    calibration: str = ""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything to store, in the model's order."""
        group_of = {name: group for group in self.groups for name in group}
        weights, shapes = self.source.weights, weight_names(self.source.model)
        ready: dict[str, dict[str, Tensor]] = {}
        for name in shapes:
            linear = name.removesuffix(".weight")
            if name.endswith(".weight") and linear in group_of:
                if linear not in ready:
                    ready |= self._group(group_of[linear])
                yield from ready.pop(linear).items()
            else:
                yield name, weights[name] if self.dtype is None else weights[name].to(self.dtype)
        yield from self._kv_tensors()
        yield from self._foreign_tensors(shapes)

    def _group(self, names: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
        recipe, fp4 = self.source.record.recipe, self.source.fp4
        if fp4 is not None:
            linears = {name: self._with_inputs(name, fp4.linear(name)) for name in names}
            return {name: self.dialect.tensors(name, linear) for name, linear in linears.items()}
        masters = [self.source.weights[f"{name}.weight"] for name in names]
        try:
            packed = quantize_group(masters, self.scheme.format, recipe.four_over_six)
        except ValueError as error:
            raise ValueError(f"{self.source.where}, {', '.join(names)}: {error}") from error
        if names[0] in self.scheme.ignore:
            dtype = self.dtype or torch.bfloat16
            return {n: {f"{n}.weight": p.dequantize(dtype)} for n, p in zip(names, packed, strict=True)}
        found = {}
        for name, weight in zip(names, packed, strict=True):
            outer = None if weight.outer_scale is None else OuterScale(weight.outer_scale.clone(), inverted=False)
            found[name] = self.dialect.tensors(name, self._with_inputs(name, FP4Linear(weight, outer)))
        return found

    def _with_inputs(self, name: str, linear: FP4Linear) -> FP4Linear:
        if self.scheme.activations != "nvfp4":
            return dataclasses.replace(linear, inputs=None)
        if linear.inputs is not None:
            return linear
        scale = torch.tensor(self.input_scales[name], dtype=torch.float32)
        return dataclasses.replace(linear, inputs=OuterScale(scale, inverted=False))

    def _kv_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for attention, scales in zip(attention_names(self.source.model), self.kv_scales, strict=False):
            if scales:
                k, v = (torch.tensor(scales[site], dtype=torch.float32) for site in "kv")
                yield from self.dialect.kv_scales(attention, k, v, self.scheme.kv_cache).items()

    def _foreign_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """What another program stored beside the weights, calibrated K/V scales for one: it stays, in its dialect."""
        fp4 = self.source.fp4
        if fp4 is None or fp4.dialect is not self.dialect or self.kv_scales:
            return
        known = shapes.keys() | {name for linear in fp4.quantized for name in self.dialect.names(linear)}
        for name in fp4.stored:
            if name not in known:
                yield name, fp4.stored[name]


def plan_fp4(
    source: Source, dialect: Dialect, fmt: FormatName, activations: str, dtype: torch.dtype | None
) -> FP4Export:
    """Decide which linears are quantised, without reading a weight; scales of inputs, K and V are still missing.

    Raises:
        ValueError: a format that the dialect has not, a source that is in another FP4 format, stacked experts, or
            nothing to quantise.
    """
    if fmt not in dialect.formats:
        raise ValueError(f"the dialect {dialect.name} stores {', '.join(dialect.formats)}, not {fmt}")
    if activations not in ("none", fmt):
        raise ValueError(f"inputs in {activations} beside weights in {fmt}: no dialect stores that; use none or {fmt}")
    fp4 = source.fp4
    if fp4 is not None and fp4.scheme.format != fmt:
        raise ValueError(
            f"{source.where} is in {fp4.scheme.format}; in {fmt} it would be rounded twice. Export the checkpoint of "
            "its run instead"
        )
    _check_experts(source)
    recipe = dataclasses.replace(source.record.recipe, weights=fmt)
    layout = read_layout(source.model, recipe)
    if fp4 is not None:
        groups: tuple[tuple[str, ...], ...] = tuple((name,) for name in sorted(fp4.quantized))
        quantized, kv_cache = set(fp4.quantized), fp4.scheme.kv_cache
    else:
        groups = tuple(group.names for group in layout.groups)
        block = 16 if fmt == "nvfp4" else 32
        whole = [group for group in layout.groups if group.linears[0].in_features % block == 0]
        quantized = {name for group in whole for name in group.names}
        kv_cache = recipe.kv_cache if recipe.kv_rotation == "none" else "none"  # no other tool rotates
    if not quantized:
        raise ValueError(f"{source.where} has no linear that the recipe quantises and {dialect.name} can store")
    linears = [name for name, module in source.model.named_modules() if isinstance(module, nn.Linear)]
    ignore = tuple(name for name in linears if name not in quantized)
    return FP4Export(source, dialect, Scheme(fmt, activations, ignore, kv_cache), groups, dtype)


def _check_experts(source: Source) -> None:
    prefix, layers = find_decoder_layers(source.model)
    stacked = next((f"{prefix}.{name}" for name, p in layers.named_parameters() if p.ndim > 2), None)
    if stacked is not None:
        raise ValueError(
            f"{source.where}: {stacked} stacks the weights of several experts, which the rollout keeps in high "
            "precision and no FP4 export writes. Use --format hf"
        )
