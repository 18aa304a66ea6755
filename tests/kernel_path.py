"""The trainer's path of a GPU on a machine without one: its kernels in Triton's interpreter."""

from __future__ import annotations

import pytest

from trace_kernels.hadamard import _Rotate
from trace_kernels.rms_norm import _RMSNorm
from trace_kernels.rotary import _Rotary
from trace_kernels.swiglu import _SwiGLU


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fused modules and the rotation call their kernels on CPU tensors as well."""
    for name, function in (("rms_norm", _RMSNorm), ("rotary", _Rotary), ("swiglu", _SwiGLU)):
        monkeypatch.setattr(f"trace_lightning.models.fused.{name}", function.apply)
    monkeypatch.setattr("trace_lightning.quantization.qat.rotate", _Rotate.apply)
