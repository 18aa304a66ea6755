"""How other tools store FP4 linears: two dialects over the same bytes, written and read.

Codes (two a byte, element 2i in the low nibble) and block scales (row-major) are the same everywhere, and are ours.
What differs is names, which way round the per-tensor scale is stored, and how the config says it:

                          compressed-tensors                        modelopt
    codes       uint8     weight_packed                             weight
    scales      E4M3      weight_scale  (E8M0, uint8, in MXFP4)     weight_scale
    per tensor  FP32 [1]  weight_global_scale, a *divisor*          FP32 [], weight_scale_2, a factor
    inputs      FP32 [1]  input_global_scale, a *divisor*           FP32 [], input_scale, a factor      W4A4 NVFP4 only
    config                config.json                               config.json and hf_quant_config.json

An `OuterScale` remembers the number as it was stored: 1 / (1 / x) is not always x, and a foreign checkpoint must leave
this library with the bytes it came with. Our own scales are powers of two, for which both ways round are exact.

What was left out: swizzled scales (no file has them), FP8 and integer schemes, zero points, and mixed schemes in one
file. They are refused by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trace_kernels import get_format
from trace_lightning.quantization.mxfp4 import MXFP4Tensor
from trace_lightning.quantization.nvfp4 import NVFP4Tensor
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor
from trace_lightning.version import __version__

TENSOR_CLASSES: dict[str, type[PackedFP4Tensor]] = {"nvfp4": NVFP4Tensor, "mxfp4": MXFP4Tensor}


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint says of its linears.

    Args:
        format: of the weights, `nvfp4` or `mxfp4`.
        activations: of their inputs, `none` or the same format.
        ignore: names of linears in high precision; patterns begin with `re:` or hold a `*`.
        kv_cache: `none`, `fp8` or `nvfp4`, as far as the dialect has a word for it.
    """

    format: str
    activations: str = "none"
    ignore: tuple[str, ...] = ()
    kv_cache: str = "none"


@dataclass(frozen=True)
class OuterScale:
    """A per-tensor FP32 scale, as stored: a factor of the values, or (`inverted`) their divisor."""

    stored: Tensor
    inverted: bool

    def factor(self) -> Tensor:
        """FP32 []: what codes times block scales are multiplied by."""
        return self.stored.reshape(()).reciprocal() if self.inverted else self.stored.reshape(())

    def divisor(self) -> Tensor:
        """FP32 []: what they are divided by."""
        return self.stored.reshape(()) if self.inverted else self.stored.reshape(()).reciprocal()


@dataclass(frozen=True)
class FP4Linear:
    """The weight of one linear as a file has it.

    Args:
        packed: codes and scales; its `outer_scale` [1, 1] is `outer.factor()`.
        outer: per-tensor scale of the weight; None for MXFP4.
        inputs: per-tensor scale of the inputs, where they are NVFP4.
    """

    packed: PackedFP4Tensor
    outer: OuterScale | None = None
    inputs: OuterScale | None = None


class Dialect(ABC):
    """One way of naming things. Stateless; `DIALECTS` has an instance of each."""

    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    codes: ClassVar[str]  # last part of the name that the packed codes have
    outer: ClassVar[str]
    inputs: ClassVar[str]
    inverted: ClassVar[bool]

    @abstractmethod
    def config(self, scheme: Scheme) -> dict[str, Any]:
        """The section `quantization_config` of config.json."""

    @abstractmethod
    def parse(self, section: Mapping[str, Any]) -> Scheme:
        """Inverse of `config`, of any writer's section.

        Raises:
            ValueError: a scheme that is not FP4, or more than one.
        """

    def files(self, scheme: Scheme) -> dict[str, dict[str, Any]]:
        """JSON files that the dialect wants beside config.json, by name."""
        return {}

    @abstractmethod
    def kv_scales(self, attention: str, k: Tensor, v: Tensor, kv_cache: str) -> dict[str, Tensor]:
        """Tensors for the FP32 outer scales [heads, 1] of one layer's K and V; empty where the dialect has no word."""

    def _number(self, scale: OuterScale) -> Tensor:
        return scale.divisor() if self.inverted else scale.factor()

    def _store(self, scale: OuterScale) -> Tensor:
        return scale.stored if scale.inverted == self.inverted else self._number(scale)

    def tensors(self, name: str, linear: FP4Linear) -> dict[str, Tensor]:
        """What to store for the linear `name`."""
        packed = linear.packed
        scale = packed.scale if isinstance(packed, MXFP4Tensor) else packed.scale.view(torch.float8_e4m3fn)
        found = {f"{name}.{self.codes}": packed.qdata, f"{name}.weight_scale": scale}
        for key, outer in ((self.outer, linear.outer), (self.inputs, linear.inputs)):
            if outer is not None:
                found[f"{name}.{key}"] = self._store(outer)
        return found

    def names(self, name: str) -> list[str]:
        """Everything that can be stored for the linear `name`."""
        return [f"{name}.{key}" for key in (self.codes, "weight_scale", self.outer, self.inputs)]

    def quantized(self, names: Iterable[str]) -> list[str]:
        """The linears of a file that have block scales or a per-tensor scale."""
        keys = {"weight_scale", self.outer, self.codes} - {"weight"}  # a plain weight has that name too
        ends = tuple(f".{key}" for key in keys)
        return sorted({name.rpartition(".")[0] for name in names if name.endswith(ends)})

    def read(self, name: str, stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> FP4Linear:
        """Put one linear together again.

        Args:
            name: of the linear.
            stored: tensors by name.
            scheme: of the checkpoint.
            shape: [out_features, in_features] that the model has.

        Raises:
            ValueError: naming the tensor that is missing, or has another shape or dtype.
        """
        fmt = get_format(scheme.format)
        assert fmt is not None
        rows, width = shape
        blocks = -(-width // fmt.block_size)
        qdata = _take(stored, f"{name}.{self.codes}", torch.uint8, (rows, blocks * fmt.block_size // 2))
        byte = torch.float8_e4m3fn if fmt.has_outer else torch.uint8
        scale = _take(stored, f"{name}.weight_scale", byte, (rows, blocks)).view(torch.uint8)
        outer = OuterScale(_take(stored, f"{name}.{self.outer}"), self.inverted) if fmt.has_outer else None
        inputs = None
        if fmt.has_outer and scheme.activations != "none":
            inputs = OuterScale(_take(stored, f"{name}.{self.inputs}"), self.inverted)
        cls, factor = TENSOR_CLASSES[scheme.format], None if outer is None else outer.factor().reshape(1, 1)
        return FP4Linear(cls(qdata, scale, width, torch.float32, outer_scale=factor), outer, inputs)


def _take(
    stored: Mapping[str, Tensor], key: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] | None = None
) -> Tensor:
    if key not in stored:
        raise ValueError(f"the checkpoint is incomplete: the tensor {key} is missing")
    tensor = stored[key]
    fits = tensor.numel() == 1 if shape is None else tuple(tensor.shape) == shape
    if tensor.dtype != dtype or not fits:
        wanted = "one element" if shape is None else str(shape)
        raise ValueError(
            f"the tensor {key} is {tensor.dtype} {tuple(tensor.shape)}, but {dtype} of {wanted} is expected here"
        )
    if shape is None and not (tensor.isfinite().all() and (tensor > 0).all()):
        raise ValueError(f"the scale {key} is {tensor.item()}; it must be positive and finite")
    return tensor


class CompressedTensors(Dialect):
    """The format of vLLM's llm-compressor, which transformers reads as well: `(nv|mx)fp4-pack-quantized`."""

    name = "compressed-tensors"
    formats = ("nvfp4", "mxfp4")
    codes, outer, inputs, inverted = "weight_packed", "weight_global_scale", "input_global_scale", True

    def _store(self, scale: OuterScale) -> Tensor:
        return super()._store(scale).reshape(1)

    def config(self, scheme: Scheme) -> dict[str, Any]:
        packed = f"{scheme.format}-pack-quantized"
        common: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}
        if scheme.format == "nvfp4":
            # Without the dtype, that package's own forward leaves the block scales of inputs unrounded.
            common |= {"group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        else:
            common |= {"group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}
        inputs = None
        if scheme.activations != "none":
            inputs = common | {"dynamic": "local" if scheme.format == "nvfp4" else True}
        group = {"targets": ["Linear"], "weights": common | {"dynamic": False}, "input_activations": inputs}
        kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": packed,
            "config_groups": {"group_0": group | {"output_activations": None, "format": packed}},
            "ignore": list(scheme.ignore),
            "kv_cache_scheme": kv if scheme.kv_cache == "fp8" else None,
            "global_compression_ratio": None,
        }

    def parse(self, section: Mapping[str, Any]) -> Scheme:
        groups = section.get("config_groups") or {}
        if len(groups) != 1:
            raise ValueError(f"compressed-tensors with {len(groups)} config groups: only one scheme can be read")
        (group,) = groups.values()
        packed = group.get("format") or section.get("format")
        formats = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
        if packed not in formats:
            raise ValueError(f"compressed-tensors format {packed!r}: {' and '.join(formats)} can be read")
        inputs = group.get("input_activations")
        if inputs is not None and inputs.get("num_bits") != 4:
            raise ValueError(f"compressed-tensors inputs of {inputs.get('num_bits')} bits: 4 bits or none can be read")
        kv = section.get("kv_cache_scheme")
        return Scheme(
            format=formats[packed],
            activations="none" if inputs is None else formats[packed],
            ignore=tuple(section.get("ignore") or ()),
            kv_cache="fp8" if kv and kv.get("num_bits") == 8 else "none",
        )

    def kv_scales(self, attention: str, k: Tensor, v: Tensor, kv_cache: str) -> dict[str, Tensor]:
        if kv_cache != "fp8":
            return {}
        return {f"{attention}.k_scale": k.amax().reshape(1), f"{attention}.v_scale": v.amax().reshape(1)}


class ModelOpt(Dialect):
    """NVIDIA's format, which vLLM, SGLang and TensorRT-LLM read: `NVFP4` (W4A4) and `W4A16_NVFP4`."""

    name = "modelopt"
    formats = ("nvfp4",)
    codes, outer, inputs, inverted = "weight", "weight_scale_2", "input_scale", False

    _ALGORITHMS: ClassVar[dict[str, str]] = {"NVFP4": "nvfp4", "W4A16_NVFP4": "none"}  # -> activations
    # vLLM and SGLang recognise the layout by this name.
    _PRODUCER: ClassVar[dict[str, str]] = {"name": "modelopt", "version": f"trace-lightning {__version__}"}
    _KV: ClassVar[dict[str, str | None]] = {"none": None, "fp8": "FP8", "nvfp4": "NVFP4"}

    def _store(self, scale: OuterScale) -> Tensor:
        return super()._store(scale).reshape(())

    def _algorithm(self, scheme: Scheme) -> str:
        return "W4A16_NVFP4" if scheme.activations == "none" else "NVFP4"

    def config(self, scheme: Scheme) -> dict[str, Any]:
        bits: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
        group: dict[str, Any] = {"targets": ["Linear"], "weights": bits}
        if scheme.activations != "none":
            group["input_activations"] = bits
        kv = {"fp8": {"num_bits": 8, "type": "float", "dynamic": False}, "nvfp4": "NVFP4"}.get(scheme.kv_cache)
        section = {
            "quant_method": "modelopt",
            "quant_algo": self._algorithm(scheme),
            "config_groups": {"group_0": group},
            "ignore": list(scheme.ignore),
            "producer": self._PRODUCER,
        }
        return section if kv is None else section | {"kv_cache_scheme": kv}

    def files(self, scheme: Scheme) -> dict[str, dict[str, Any]]:
        details = {
            "quant_algo": self._algorithm(scheme),
            "kv_cache_quant_algo": self._KV.get(scheme.kv_cache),
            "group_size": 16,
            "exclude_modules": list(scheme.ignore),
        }
        return {"hf_quant_config.json": {"producer": self._PRODUCER, "quantization": details}}

    def parse(self, section: Mapping[str, Any]) -> Scheme:
        details = section.get("quantization") or section  # hf_quant_config.json, or config.json
        algorithm = str(details.get("quant_algo", "")).upper()
        if algorithm not in self._ALGORITHMS:
            raise ValueError(f"modelopt quant_algo {algorithm!r}: {' and '.join(self._ALGORITHMS)} can be read")
        if details.get("group_size", 16) != 16:
            raise ValueError(f"modelopt group_size {details['group_size']}: NVFP4 has blocks of 16")
        kv = details.get("kv_cache_quant_algo") or details.get("kv_cache_scheme")
        kv = "FP8" if isinstance(kv, dict) else str(kv).upper()
        known = {word: name for name, word in self._KV.items()}
        ignore = details.get("exclude_modules") or details.get("ignore") or ()
        return Scheme("nvfp4", self._ALGORITHMS[algorithm], tuple(ignore), known.get(kv, "none"))

    def kv_scales(self, attention: str, k: Tensor, v: Tensor, kv_cache: str) -> dict[str, Tensor]:
        if self._KV.get(kv_cache) is None:
            return {}
        return {
            f"{attention}.k_proj.k_scale": k.amax().reshape(()),
            f"{attention}.v_proj.v_scale": v.amax().reshape(()),
        }


DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (CompressedTensors(), ModelOpt())}
