"""The recipe: which numbers are rounded, to what, by whom, and how much of it the trainer is told.

It is written once, in a config, and read by every side: the engine that draws, the trainer's forward, the export and
the estimate. What can be wrong about it without looking at a model is refused when it is made.

    attn_in, o_in, mlp_in, down_in   inputs of linears: q k v, o, gate up, down      format: `activations`
    k, v                             what the cache holds                            format: `kv_cache`

These sites, per decoder layer, are what guidance records, what metrics are named by and what the probe compares.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, get_args

FormatName = Literal["none", "nvfp4", "mxfp4", "fp8"]
GuidanceMode = Literal["none", "full", "parity", "syndrome"]
GuidanceScales = Literal["whole", "parity"]
GuidanceStore = Literal["device", "host"]
SITES = ("attn_in", "o_in", "mlp_in", "down_in", "k", "v")
_FED = {"attn_in": ("k", "v"), "mlp_in": ("down_in",)}  # site of linears -> sites that they feed
FP4 = ("nvfp4", "mxfp4")


@dataclass(frozen=True, kw_only=True)
class GuidanceConfig:
    """What the rollout records of its rounding so that the trainer can follow it (TRACE, arXiv 2610.07767).

    Args:
        mode: `none`; `parity`, one bit per element; `syndrome`, a third of a bit: parity checks of those bits, from
            which the trainer finds them again (`trace_kernels.syndromes`); `full`, whole codes. A syndrome holds while
            trainer and rollout have the same weights; its fallback are the bits. The search takes 4 to 11 % of
            training (1.7B on an H200, by the kernels' times), so it is for records that do not fit.
        scales: block scales recorded `whole` (one byte) or by their `parity` (one bit).
        layers: `all`, `last_half` (the paper's default, for MoE models) or `last:n`. A dense model needs all.
        sites: which of attn_in, o_in, mlp_in, down_in, k, v. Default: attn_in, o_in, mlp_in when activations are FP4;
            k, v when only the KV cache is. That is enough while trainer and rollout hold the same weights; where the
            linears that feed k, v or down_in are excluded from FP4, those are guided as well.
        fallback: record bits of every FP4 site from the next rollout on, once the trainer finds that more than 1 %
            of the audited codes differ (several optimizer steps per rollout do that to the default sites).
        store: where the record waits for the trainer: `device` or `host`.
        budget_gb: GB that the record of one rollout may take; null: what is free there. A rollout that could need more
            is refused before it begins.
        audit_sequences: sequences per rollout whose full codes are kept as well, so that the mismatch of codes is
            measured and not assumed. 0 turns the measurement off, and with it the warning and `fallback`.
    """

    mode: GuidanceMode = "none"
    scales: GuidanceScales = "whole"
    layers: str = "all"
    sites: list[str] | None = None
    fallback: bool = True
    store: GuidanceStore = "device"
    budget_gb: float | None = None
    audit_sequences: int = 4

    @property
    def bits(self) -> GuidanceConfig:
        """With one bit per element in place of syndromes: what holds under other weights as well."""
        return dataclasses.replace(self, mode="parity") if self.mode == "syndrome" else self

    def __post_init__(self) -> None:
        choices = {"mode": GuidanceMode, "scales": GuidanceScales, "store": GuidanceStore}
        for name, words in choices.items():
            if getattr(self, name) not in get_args(words):
                raise ValueError(f"guidance.{name}={getattr(self, name)!r}: choose one of {', '.join(get_args(words))}")
        if not re.fullmatch(r"all|last_half|last:[1-9]\d*", self.layers):
            raise ValueError(f"guidance.layers={self.layers!r}: expected all, last_half or last:n with n >= 1")
        for site in self.sites or ():
            if site not in SITES:
                raise ValueError(f"guidance.sites names {site!r}; the sites are {', '.join(SITES)}")
        if self.budget_gb is not None and self.budget_gb <= 0:
            raise ValueError(f"guidance.budget_gb={self.budget_gb} must be above 0, or null for what is free")
        if self.audit_sequences < 0:
            raise ValueError("guidance.audit_sequences must be >= 0")
        if self.mode == "syndrome" and not self.audit_sequences:
            raise ValueError(
                "guidance.mode=syndrome is a search that can fail, which guidance.audit_sequences=0 would hide: set it "
                "above 0, or guidance.mode=parity"
            )


@dataclass(frozen=True, kw_only=True)
class QuantRecipe:
    """The single description of the rollout's number formats; engine, trainer and export read it.

    Args:
        weights: format of the linear weights in the rollout: `none | nvfp4 | mxfp4 | fp8`.
        activations: format of the inputs of those linears.
        kv_cache: format of K and V.
        trainer: `qat`, the trainer's forward uses the same quantisers; `qat_weights`, it rounds weights and K/V but not
            the inputs of linears (QUADS, arXiv 2607.15810, whose K/V are BF16: kv_cache=none); `bf16`, it rounds
            nothing (the naive baseline).
        guidance: what the rollout records to steer the trainer's rounding.
        exclude: regular expressions; a linear whose name matches stays in high precision. Embeddings, `lm_head` and
            routers always do.
        bf16_layers: decoder layers kept in high precision, e.g. `[first:1, last:2]`.
        kv_rotation: `hadamard` rotates Q and K (blocks of 16) before K is quantised.
        four_over_six: NVFP4 blocks try a maximum of 4 as well as 6 and keep the lower error (arXiv 2512.02010).
        residual_share: share of channels whose rounding error the rollout quantises and adds again at the inputs of
            linears (QUADS takes .5); 0 is off. See `trace_kernels.compensation`.
    """

    weights: FormatName = "none"
    activations: FormatName = "none"
    kv_cache: FormatName = "none"
    trainer: Literal["bf16", "qat", "qat_weights"] = "qat"
    guidance: GuidanceConfig = field(default_factory=GuidanceConfig)
    exclude: list[str] = field(default_factory=list)
    bf16_layers: list[str] = field(default_factory=list)
    kv_rotation: Literal["none", "hadamard"] = "none"
    four_over_six: bool = False
    residual_share: float = 0.0

    def __post_init__(self) -> None:
        for entry in self.bf16_layers:
            if not re.fullmatch(r"(first|last):\d+", entry):
                raise ValueError(f"recipe.bf16_layers has {entry!r}; write first:n or last:n")
        for pattern in self.exclude:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"recipe.exclude has {pattern!r}, not a regular expression: {error}") from error
        self._check_residual()
        self._check_guidance()

    def _check_residual(self) -> None:
        if not 0 <= self.residual_share <= 1:
            raise ValueError(f"recipe.residual_share={self.residual_share}: a share of channels, so in [0, 1]")
        if not self.residual_share:
            return
        if self.activations not in FP4:
            raise ValueError(
                f"recipe.residual_share={self.residual_share} returns the rounding error of FP4 activations, but "
                f"recipe.activations={self.activations}. Set recipe.activations=nvfp4, or recipe.residual_share=0."
            )
        if self.guidance.mode != "none":
            raise ValueError(
                f"recipe.residual_share={self.residual_share} adds a second code per element, which guidance does not "
                "record. Set recipe.guidance.mode=none, or recipe.residual_share=0."
            )

    def _check_guidance(self) -> None:
        guidance = self.guidance
        if guidance.mode == "none":
            return
        if self.trainer != "qat":
            raise ValueError(
                f"recipe.guidance.mode={guidance.mode} steers the trainer's rounding, but recipe.trainer={self.trainer}"
                f" does not round{'' if self.trainer == 'bf16' else ' activations'}. Set recipe.trainer=qat, or "
                "recipe.guidance.mode=none."
            )
        if not self.guided_sites:
            raise ValueError(
                f"recipe.guidance.mode={guidance.mode}, but neither activations ({self.activations}) nor the KV cache "
                f"({self.kv_cache}) are FP4, so nothing can be guided. Set recipe.guidance.mode=none."
            )
        for site in self.guided_sites:
            if self.site_format(site) not in FP4:
                part = "kv_cache" if site in ("k", "v") else "activations"
                raise ValueError(
                    f"recipe.guidance.sites names {site!r}, but recipe.{part}={self.site_format(site)} is not FP4. "
                    f"Quantise it (recipe.{part}=nvfp4) or leave the site out."
                )
        if guidance.scales == "parity" and self.four_over_six:
            raise ValueError("recipe.four_over_six chooses between two scales, so it needs guidance.scales=whole")

    def site_format(self, site: str) -> FormatName:
        """The number format at one of `SITES`."""
        return self.kv_cache if site in ("k", "v") else self.activations

    @property
    def trained(self) -> QuantRecipe:
        """The formats that the trainer's own forward rounds to: all, all but those of activations, or none."""
        if self.trainer == "bf16":
            return QuantRecipe()
        if self.trainer == "qat":
            return self
        return dataclasses.replace(self, activations="none", residual_share=0.0)

    @property
    def guided_sites(self) -> tuple[str, ...]:
        """Sites that guidance covers, in the order of `SITES`; empty without guidance."""
        if self.guidance.mode == "none":
            return ()
        if self.guidance.sites is not None:
            return tuple(site for site in SITES if site in self.guidance.sites)
        if self.activations in FP4:
            return ("attn_in", "o_in", "mlp_in")
        return ("k", "v") if self.kv_cache in FP4 else ()

    def guided_keys(
        self, fp4: Collection[tuple[int, str]], plain: Collection[tuple[int, str]], num_layers: int
    ) -> list[tuple[int, str]]:
        """The (layer, site) pairs of a model that guidance covers, in order.

        Args:
            fp4: pairs that are rounded to FP4.
            plain: pairs whose linears, or some of them, stay in high precision. Guided inputs and equal weights
                determine what quantised linears feed; what these feed is covered as well, unless `guidance.sites`
                names the sites.
            num_layers: of the model.
        """
        named, layers = self.guidance.sites is not None, self.guided_layers(num_layers)
        loose = set() if named else {(layer, fed) for layer, site in plain for fed in _FED.get(site, ())}
        return [key for key in sorted(fp4) if key[0] in layers and (key[1] in self.guided_sites or key in loose)]

    def guided_layers(self, num_layers: int) -> range:
        """Layer indices that guidance covers."""
        if self.guidance.mode == "none":
            return range(0)
        if self.guidance.layers == "all":
            return range(num_layers)
        kept = num_layers - num_layers // 2 if self.guidance.layers == "last_half" else int(self.guidance.layers[5:])
        return range(max(0, num_layers - kept), num_layers)

    def quantized_layers(self, num_layers: int) -> range:
        """Layer indices that are quantised at all: those not named by `bf16_layers`."""
        kept = dict.fromkeys(("first", "last"), 0)
        for entry in self.bf16_layers:
            side, count = entry.split(":")
            kept[side] = int(count)
        return range(min(kept["first"], num_layers), max(kept["first"], num_layers - kept["last"]))

    @property
    def label(self) -> str:
        """Short name such as `W4A4KV4/nvfp4+parity`, for tables and logs."""
        bits = {"none": "16", "fp8": "8", "nvfp4": "4", "mxfp4": "4"}
        used = sorted({f for f in (self.weights, self.activations, self.kv_cache) if f != "none"})
        text = f"W{bits[self.weights]}A{bits[self.activations]}KV{bits[self.kv_cache]}"
        text += f"/{'+'.join(used)}" if used else ""
        text += f"+residual{self.residual_share:g}" if self.residual_share else ""
        return text + (f"+{self.guidance.mode}" if self.guidance.mode != "none" else "")
