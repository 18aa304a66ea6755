"""`LocalEngine`: the library's own rollout engine, on the device of the policy.

    load_weights   masters -> packed FP4 snapshot, in place; K/V outer scales renewed; the version moves last
    generate       admit and prefill groups | start samples | decode | retire finished ones (generation.py)

What is kept from call to call, the cache and the graphs, is workspace.py; where completions end is stopping.py.
Everything numerical is the trainer's own definition: the quantisers, the K/V scales, the log-softmax at the sampling
temperature. On a GPU every step runs Triton kernels, and a decode step is one replay of a CUDA graph (graphs.py); on a
CPU the same forward pass runs the kernels' torch references.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Collection, Hashable, Iterable
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trace_kernels import get_format, is_registered
from trace_lightning.models.fused import FUSED_FAMILIES
from trace_lightning.models.layout import read_layout
from trace_lightning.models.sharding import Weights
from trace_lightning.quantization.guidance import Key
from trace_lightning.quantization.record_budget import check_budget
from trace_lightning.quantization.record_layout import SiteShape
from trace_lightning.quantization.record_views import StepRecorder
from trace_lightning.quantization.recorder import GuidanceRecorder
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.base import Generation, Progress, RolloutEngine
from trace_lightning.rollout.conversation import Conversations
from trace_lightning.rollout.decode_state import DecodeState
from trace_lightning.rollout.decoder import Decoder
from trace_lightning.rollout.fused_decoder import FusedDecoder
from trace_lightning.rollout.generation import GenerationRun
from trace_lightning.rollout.graphs import GraphCache
from trace_lightning.rollout.hf_decoder import HFDecoder
from trace_lightning.rollout.recording import RolloutRecording
from trace_lightning.rollout.scheduler import Group, Scheduler
from trace_lightning.rollout.stopping import Stopping
from trace_lightning.rollout.verify import check_decoder
from trace_lightning.rollout.workspace import Workspace
from trace_lightning.types import Completion, Prompt, SamplingParams

log = logging.getLogger(__name__)


class LocalEngine(RolloutEngine):
    """FP4 (or FP8, or unquantised) rollouts with a paged KV cache and continuous batching; takes turns.

    Args:
        max_num_seqs: sequences that decode side by side.
        page_size: tokens per KV page; the GPU's kernels want a power of two from 16 to 256.
        kv_cache_tokens: size of the cache; default: what one `generate` needs, bounded by `memory_fraction`.
        memory_fraction: on a GPU, the share of free memory the cache may take; memory that torch holds unused is free.
        prefill_tokens: prompt tokens per prefill pass.
        decoder: `auto` takes the fused decoder for the families it knows and transformers' modules otherwise.
        verify: compare the decoder with the policy's own forward once, when weights are first loaded.
        cuda_graphs: on a GPU, replay decode steps from graphs.
        decode_window: on a GPU, decode steps between two looks at which sequences have ended.
        keep_snapshot: keep the quantised weights, the cache and the graphs between rollouts; off, their memory is the
            trainer's until the next sync, which then builds them anew. Nothing is left to draw from without one, so
            every rollout, each validation batch included, begins with a sync, whatever `Rollout.should_sync` says.
    """

    def __init__(
        self,
        max_num_seqs: int = 512,
        page_size: int = 64,
        kv_cache_tokens: int | None = None,
        memory_fraction: float = 0.4,
        prefill_tokens: int = 8192,
        decoder: Literal["auto", "fused", "hf"] = "auto",
        verify: bool = True,
        cuda_graphs: bool = True,
        decode_window: int = 8,
        keep_snapshot: bool = True,
    ) -> None:
        for name, value in {
            "max_num_seqs": max_num_seqs,
            "page_size": page_size,
            "prefill_tokens": prefill_tokens,
            "decode_window": decode_window,
        }.items():
            if value < 1:
                raise ValueError(f"engine.{name}={value} must be at least 1")
        if kv_cache_tokens is not None and kv_cache_tokens < 1:
            raise ValueError(
                f"engine.kv_cache_tokens={kv_cache_tokens} must be at least 1, or null for what a call needs"
            )
        if decoder not in ("auto", "fused", "hf"):
            raise ValueError(f"engine.decoder={decoder!r}: choose one of auto, fused, hf")
        if not 0 < memory_fraction <= 1:
            raise ValueError(f"engine.memory_fraction={memory_fraction} must be in (0, 1]")
        self.max_num_seqs, self.page_size, self.prefill_tokens = max_num_seqs, page_size, prefill_tokens
        self.decoder_kind, self.verify = decoder, verify
        self.cuda_graphs, self.decode_window, self.keep_snapshot = cuda_graphs, decode_window, keep_snapshot
        self._version = -1
        self._decoder: Decoder | None = None
        self._workspace = Workspace(
            max_num_seqs=max_num_seqs,
            page_size=page_size,
            kv_cache_tokens=kv_cache_tokens,
            memory_fraction=memory_fraction,
        )
        self._sync_key: Hashable = None
        self._expected_rows = 0  # of a rollout's guidance record, from the one before

    takes_turns = True

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def decoder(self) -> Decoder:
        """The snapshot; for tests and the benchmark."""
        assert self._decoder is not None, "call setup first"
        return self._decoder

    def check(self, structure: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: QuantRecipe) -> None:
        trial = copy.copy(self)
        trial._workspace = self._workspace.anew()
        trial.setup(structure, tokenizer, recipe, dtype=torch.float32)

    def setup(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: QuantRecipe, *, dtype: torch.dtype
    ) -> None:
        own = [name for name in (recipe.weights, recipe.activations) if is_registered(name)]
        if is_registered(recipe.kv_cache):
            raise ValueError(f"recipe.kv_cache={recipe.kv_cache}: pages have codes of our own formats only")
        known = policy.config.model_type in FUSED_FAMILIES and not own
        if self.decoder_kind == "fused" and not known:
            raise ValueError(
                f"engine.decoder=fused knows {', '.join(FUSED_FAMILIES)}, not {policy.config.model_type}: use auto"
                if not own
                else f"engine.decoder=fused knows our formats alone, not {own[0]}: use auto"
            )
        self._fused = self.decoder_kind == "fused" or (self.decoder_kind == "auto" and known)
        if not self._fused and policy.device.type != "meta":
            log.info("rollouts of %s run through transformers' modules (slower)", policy.config.model_type)
        self.recipe, self.dtype, self._policy = recipe, dtype, policy
        self.device = next(policy.parameters()).device
        self.tokenizer, self._stopping = tokenizer, Stopping(policy, tokenizer)
        self._verified, self._timed, self._choices = not self.verify, False, ""
        self._said_slow = False
        self.release()
        self._workspace.setup(self.device, dtype, self._stopping.vocab_size)
        self._build()
        self._wide_sites = self._fp4_sites(policy)
        self._sites, self._guidance = self._guided_sites(policy), self.recipe.guidance

    def _build(self) -> None:
        self._decoder = (FusedDecoder if self._fused else HFDecoder)(self._policy, self.recipe, self.dtype)

    def release(self) -> None:
        """Give back all memory: weights, cache and graphs. The next `load_weights` makes them anew."""
        self._workspace.release()
        self._decoder, self._version = None, -1

    def _guided_sites(self, policy: PreTrainedModel) -> dict[Key, SiteShape]:
        """The (layer, site) pairs that guidance covers and that this model has, with what is rounded there."""
        recipe, num_layers = self.recipe, len(self.decoder.kv_formats)
        plain = read_layout(policy, recipe).plain_sites
        keys = recipe.guided_keys(self._wide_sites, plain, num_layers)
        sites = {key: self._wide_sites[key] for key in keys}
        if recipe.guidance.sites is not None:
            self._warn_of_loose(sites, plain)
        if recipe.guided_sites and not sites:
            raise ValueError(
                f"guidance covers {', '.join(recipe.guided_sites)} of layers {recipe.guided_layers(num_layers)}, but "
                f"{type(policy).__name__} quantises nothing there. Widen guidance.layers or guidance.sites, or set "
                "guidance.mode=none."
            )
        return sites

    def _warn_of_loose(self, sites: Collection[Key], plain: Collection[Key]) -> None:
        """Named sites can leave out what excluded linears feed: nothing holds the trainer to its codes then."""
        guidance = dataclasses.replace(self.recipe.guidance, sites=None)
        default = dataclasses.replace(self.recipe, guidance=guidance)
        missing = set(default.guided_keys(self._wide_sites, plain, len(self.decoder.kv_formats))) - set(sites)
        loose = sorted({site for _, site in missing} - set(default.guided_sites))
        if loose:
            _warn_once(", ".join(loose))

    def _fp4_sites(self, policy: PreTrainedModel) -> dict[Key, SiteShape]:
        """All (layer, site) pairs of this model that are rounded to FP4."""
        found: dict[Key, SiteShape] = {}
        activations = get_format(self.recipe.activations, four_over_six=self.recipe.four_over_six)
        for group in read_layout(policy, self.recipe).groups:
            if activations is not None:
                found[group.layer, group.site] = SiteShape(activations, group.linears[0].in_features)
        for layer, fmt in enumerate(self.decoder.kv_formats):
            if fmt is not None:
                shape = SiteShape(fmt, self.decoder.head_dim, self.decoder.num_kv_heads)
                found |= {(layer, "k"): shape, (layer, "v"): shape}
        return {key: shape for key, shape in found.items() if shape.fmt.guidable}

    def widen_guidance(self) -> bool:
        wide, bits = self._wide_sites, self._guidance.bits
        if not self._sites or (wide.keys() == self._sites.keys() and bits == self._guidance):
            return False
        self._sites, self._guidance = {key: wide[key] for key in sorted(wide)}, bits
        self._workspace.forget_steps()
        return True

    @property
    def guidance_keys(self) -> set[Key]:
        """The (layer, site) pairs that are recorded when asked."""
        return set(self._sites)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        if not isinstance(weights, Weights):
            weights = [(name, tensor.detach()) for name, tensor in weights]
        if self._decoder is not None and self._decoder.is_stale:
            self.release()
        if self._decoder is None:
            self._build()
            self._timed = False
        if not self._verified:
            self.decoder.load_weights(weights, quantize=False)
            check_decoder(self.decoder, self._policy, self.dtype)
            self._verified = True
        self._copy_weights(weights)
        if not self._timed:
            choices = self.decoder.find_crossover()
            if choices != self._choices:  # a snapshot that is built anew chooses the same again
                log.info("matmuls read packed weights for few rows and BF16 copies for more: %s", choices)
            self._choices, self._timed = choices, True
        self._version = version

    def _copy_weights(self, weights: Weights | list[tuple[str, Tensor]]) -> None:
        """Masters to snapshot, and K/V outer scales to the cache: over a thousand launches, so graphs on a GPU."""
        memory = self._workspace

        def copy() -> None:
            self.decoder.load_weights(weights)
            memory.renew_outer(self.decoder)

        if not (self.cuda_graphs and self._fused and self.device.type == "cuda"):
            copy()
            return
        if isinstance(weights, Weights) and weights.temporary:
            memory.staged_sync.load_weights(self.decoder, weights)
            memory.renew_outer(self.decoder)
            return
        masters = tuple((name, tensor.data_ptr(), tensor.dtype) for name, tensor in weights)
        key = (masters, None if memory.kv is None else memory.kv.layers[0][0].data.data_ptr())
        if key != self._sync_key:
            memory.sync_graph.clear()  # the masters or the cache have moved
            self._sync_key = key
        memory.sync_graph.run(key, copy)

    @torch.no_grad()
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams,
        *,
        num_samples: int = 1,
        record_guidance: bool = False,
        progress: Progress | None = None,
        conversations: Conversations | None = None,
    ) -> Generation:
        prompts = list(prompts)
        if not prompts or num_samples < 1:
            raise ValueError(f"nothing to generate: {len(prompts)} prompts, {num_samples} samples each")
        if self._version < 0:
            raise ValueError("the engine has no weights yet: call load_weights first")
        for prompt in prompts:
            if not prompt.token_ids:
                raise ValueError(f"prompt {prompt.uid} is empty: there is nothing to condition on")
        # What rows and pages have to hold, and the context: all turns of a conversation.
        whole = params
        if conversations is not None:
            whole = dataclasses.replace(params, max_new_tokens=conversations.limits.max_total_tokens)
        limit, stop_ids = self._stopping.context_limit(prompts, whole), self._stopping.ids(params)
        memory = self._workspace
        pool = memory.reserve_cache(self.decoder, prompts, whole, num_samples)
        state = memory.reserve_state(prompts, whole, num_samples)
        assert memory.kv is not None
        state.reset(seed=params.seed, stop_ids=stop_ids)
        graphs = self._graphs_for(state, params)
        most_tokens = sum(len(p.token_ids) for p in prompts) + len(prompts) * num_samples * whole.max_new_tokens
        recording = self._recording(state, graphs, most_tokens) if record_guidance else None
        run = GenerationRun(
            decoder=self.decoder,
            kv=memory.kv,
            state=state,
            scheduler=Scheduler(
                self._groups(prompts, num_samples, audited=recording is not None),
                pool,
                max_num_seqs=self.max_num_seqs,
                max_new_tokens=whole.max_new_tokens,
            ),
            params=params,
            policy_version=self._version,
            prefill_tokens=self.prefill_tokens,
            context_limit=limit,
            recording=recording,
            graphs=graphs,
            window=1 if graphs is None else self.decode_window,
            prefixes=memory.reserve_prefixes(prompts, num_samples, state.shape.rows) if self._fused else None,
            conversations=conversations,
        )
        generation = run.run(progress)
        if generation.guidance is not None:
            self._expected_rows = generation.guidance.num_rows * 5 // 4
        for completion in generation.completions:
            completion.text = self._text(completion)
        if not self.keep_snapshot:
            self.release()
        return generation

    def _text(self, completion: Completion) -> str:
        if completion.turns:
            return "".join(turn.text for turn in completion.turns)
        return str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))

    def _recording(self, state: DecodeState, graphs: GraphCache | None, most_tokens: int) -> RolloutRecording | None:
        """Who records this call, if anything is guided."""
        if not self._sites:
            return None
        memory, config = self._workspace, self._guidance
        assert memory.kv is not None
        store = torch.device("cpu") if config.store == "host" else self.device
        recorder = GuidanceRecorder(config, self._sites, store, self._expected_rows)
        check_budget(config, recorder.row_bytes, most_tokens, store)
        if graphs is not None and recorder.rows_when_fed and memory.steps is None:
            memory.steps = StepRecorder(
                recorder.sites, config, rows=state.shape.rows, window=self.decode_window, device=self.device
            )
        return RolloutRecording(recorder, memory.kv, None if graphs is None else memory.steps)

    def _groups(self, prompts: list[Prompt], num_samples: int, *, audited: bool) -> list[Group]:
        """One group per prompt; audited are one sample of each prompt first, then a second of each, and so on."""
        total = self.recipe.guidance.audit_sequences if audited else 0
        shares = [len(range(i, total, len(prompts))) for i in range(len(prompts))]
        return [Group(prompt, i, num_samples, shares[i]) for i, prompt in enumerate(prompts)]

    def _graphs_for(self, state: DecodeState, params: SamplingParams) -> GraphCache | None:
        """The graphs, where a decode step can be captured at all."""
        self._workspace.bound_graphs(params)
        static = self.decoder.prepare(state.capacity(self.page_size))
        if not self.cuda_graphs or self.device.type != "cuda":
            return None
        if not static and not self._said_slow:
            self._said_slow = True
            family = self._policy.config.model_type
            why = "its rotary angles change with the length" if self._fused else "transformers' modules look at data"
            log.info("decode steps of %s run without CUDA graphs (slower): %s", family, why)
        return self._workspace.graphs if static else None


@functools.cache  # checks set engines up before the one that draws
def _warn_once(loose: str) -> None:
    log.warning(
        "guidance.sites leaves out %s, fed by linears that recipe.exclude keeps in BF16: nothing holds the trainer to "
        "the rollout there. Name them as well, or set guidance.sites to null.",
        loose,
    )
