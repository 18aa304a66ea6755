"""Where one layer loses precision: errors of single roundings on unquantised inputs, and K's channels.

One forward pass, unquantised, over real tokens; at every site the values are also rounded and compared, and passed on
as they were, so no layer's error hides in another's:

    input error      ||DQ(Q(x)) - x|| / ||x||                   of the input of a linear
    weight error     ||(DQ(Q(W)) - W) x|| / ||W x||             of its output: errors of weights that meet no signal are
                                                               not counted, those that meet a large one are
    attention error  ||attend(q, DQ(k), DQ(v)) - attend(q, k, v)|| / ||attend(q, k, v)||       and for K, V alone
    K channel ratio  largest root mean square of a channel of K over the median of its head

What was left out: second-order sensitivities (Hessians); the solo errors of `study.py` say what a layer costs end to
end.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trace_kernels import BlockFormat
from trace_lightning.models.policy import final_hidden
from trace_lightning.quantization.qat import QATKV, QATGroup, QATLinear, QATState
from trace_lightning.quantization.rounding import NEAREST, Rounding
from trace_lightning.quantization.weights import quantized_weight, shared_outer

Name = tuple[int, str]  # (layer, what)


class Only(Rounding):
    """Rounds the sites named, and passes the others on as they are."""

    def __init__(self, sites: set[str], inner: Rounding = NEAREST) -> None:
        self.sites, self.inner = sites, inner

    def values(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Tensor:
        """Nearest rounding, or `x`."""
        return self.inner.values(layer, site, x, fmt, outer) if site in self.sites else x


class LocalErrors(Rounding):
    """Measures what is listed at the top of this file while a forward pass runs; passes everything on unrounded."""

    def __init__(self) -> None:
        self.squares: dict[Name, Tensor] = {}  # FP64 [2]: of the error, of the reference
        self.k_squares: dict[int, Tensor] = {}  # FP64 [heads, dim]
        self.tokens = 0

    def values(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Tensor:
        """Measured, and `x`."""
        self.add((layer, site), NEAREST.values(layer, site, x, fmt, outer), x)
        return x

    def add(self, name: Name, value: Tensor, reference: Tensor) -> None:
        """Add the squared norms of one comparison."""
        pair = torch.stack([(value.float() - reference.float()).square().sum(), reference.float().square().sum()])
        self.squares[name] = self.squares[name] + pair.double() if name in self.squares else pair.double()

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Called by the registered attention with [B, heads, T, D]; returns the exact output [B, T, heads, D]."""
        kv: QATKV = module.trace_kv  # type: ignore[assignment]
        window = kwargs.get("sliding_window")
        exact = _attend(module, query, key, value, kwargs, window)
        self._channels(kv.layer, key)
        if kv.fmt is not None:
            for name, sites in {"attention": {"k", "v"}, "k": {"k"}, "v": {"v"}}.items():
                rounded = kv(query, key, value, Only(sites))
                self.add((kv.layer, f"attention_{name}"), _attend(module, *rounded, kwargs, window), exact)
        return exact

    def _channels(self, layer: int, key: Tensor) -> None:
        squares = key.double().square().sum((0, 2))
        self.k_squares[layer] = self.k_squares[layer] + squares if layer in self.k_squares else squares

    def relative(self) -> dict[Name, float]:
        """Relative error of everything that was compared."""
        return {name: float((pair[0] / pair[1].clamp(min=1e-30)).sqrt()) for name, pair in self.squares.items()}

    def k_outliers(self, layer: int) -> dict[str, float]:
        """The K channel that stands out most: `head`, `channel`, and `ratio` to the median channel of its head."""
        rms = self.k_squares[layer].sqrt()
        ratio = rms / rms.median(-1, keepdim=True).values.clamp(min=1e-30)
        head, channel = divmod(int(ratio.argmax()), ratio.shape[1])
        return {"head": head, "channel": channel, "ratio": float(ratio.max())}


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any], window: int | None
) -> Tensor:
    length, mask = query.shape[2], None
    if window is not None and length > window:
        at = torch.arange(length, device=query.device)
        behind = at[:, None] - at
        mask = ((behind >= 0) & (behind < window))[None, None]
    dtype = torch.bfloat16 if torch.is_autocast_enabled(query.device.type) else query.dtype
    output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query.to(dtype), key.to(dtype), value.to(dtype), mask, scaling=kwargs.get("scaling")
    )
    return output


@torch.no_grad()
def weight_outlier(group: QATGroup) -> float:
    """Root mean square of a group's largest input column over that of the median one; up to 3.3 in SmolLM2-135M."""
    weights = torch.cat([member.weight for member in group.members]).float()
    rms = weights.square().mean(0).sqrt()
    return float(rms.max() / rms.median().clamp(min=1e-30))


@torch.no_grad()
def local_errors(policy: PreTrainedModel, sequences: list[Tensor]) -> LocalErrors:
    """Measure `policy`, a quantised trainer, on token ids [T] one sequence after the other; see the top of this file.

    Its weights are not quantised meanwhile: their error is that of the name (layer, "w:<site>").
    """
    qat: QATState = policy.trace_qat  # type: ignore[assignment]
    errors, hooks, formats = LocalErrors(), [], {id(group): group.weights for group in qat.groups}
    outers: dict[int, Tensor | None] = {}

    def observe(linear: QATLinear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        group, fmt = linear.group, formats[id(linear.group)]
        assert fmt is not None
        if id(group) not in outers:
            outers[id(group)] = shared_outer([member.weight for member in group.members], fmt)
        change = quantized_weight(linear.weight, fmt, outers[id(group)]) - linear.weight
        error = F.linear(inputs[0].to(change.dtype), change).float()
        plain = output.float() if linear.bias is None else output.float() - linear.bias.float()
        errors.add((group.layer, f"w:{group.site}"), plain + error, plain)

    try:
        for group in qat.groups:
            group.weights = None
            if formats[id(group)] is not None:
                hooks += [member.register_forward_hook(observe) for member in group.members]  # type: ignore[arg-type]
        for ids in sequences:
            with torch.autocast(policy.device.type, torch.bfloat16):
                final_hidden(policy, ids.to(policy.device)[None], errors)
            errors.tokens += len(ids)
    finally:
        for hook in hooks:
            hook.remove()
        for group in qat.groups:
            group.weights = formats[id(group)]
        for state in qat.states:
            state.rounding = NEAREST
    return errors


def grouped(errors: dict[Name, float]) -> dict[int, dict[str, float]]:
    """The same by layer."""
    layers: dict[int, dict[str, float]] = defaultdict(dict)
    for (layer, what), value in errors.items():
        layers[layer][what] = value
    return dict(layers)
