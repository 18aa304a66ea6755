"""What one rank does in the tests of several processes, and what they are compared with in the test's own."""

from __future__ import annotations

import copy
import gc
import math
import os
import random
import resource
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tiny
from own_rewards import HangsOnce
from trace_lightning.callbacks import HFExport, Rollout, RunCheckpoint
from trace_lightning.cli import main
from trace_lightning.data import PromptDataModule
from trace_lightning.metrics import CompletionMetrics
from trace_lightning.metrics.divergence import DivergenceMetrics
from trace_lightning.metrics.positions import PositionMetrics
from trace_lightning.metrics.together import compute_together
from trace_lightning.models.lora import LoraConfig
from trace_lightning.models.sharding import Weights, shard_policy, whole
from trace_lightning.module import PolicyModule
from trace_lightning.quantization.weights import peaks as peaks_of
from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.hf_decoder import HFDecoder
from trace_lightning.strategy import FSDP2Strategy
from trace_lightning.tasks import TwoDigitAddition
from trace_lightning.types import SamplingParams

W4A4KV4 = {"weights": "nvfp4", "activations": "nvfp4", "kv_cache": "nvfp4"}
# Every code is audited, so that the audit is a sum over the same sequences however they are spread.
GUIDED = QuantRecipe(**W4A4KV4, guidance=GuidanceConfig(mode="parity", audit_sequences=1000))
GLOBAL_BATCH, STEPS = 8, 3


class FewSums(TwoDigitAddition):
    """No time is lost on prompts that a test never comes to."""

    def train_problems(self):
        return list(super().train_problems())[:64]


class UnevenSums(FewSums):
    """Every second prompt is many times as long as the others."""

    def train_problems(self):
        problems = super().train_problems()
        return [replace(p, prompt=str(p.prompt) * (1 + 4 * (i % 2))) for i, p in enumerate(problems)]


class Sgd(PolicyModule):
    """Plain SGD: the update is the gradient, so updates can be compared. Notes which layers each micro-batch finds."""

    def _micro_loss(self, *args):
        self.__dict__.setdefault("gathered", []).append(gathered_layers(self.policy))
        return super()._micro_loss(*args)

    def configure_optimizers(self):
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=self.learning_rate)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)}


class PartlyFrozen(Sgd):
    """The embedding and the first layer's MLP are not trained."""

    def configure_model(self):
        if self.policy is None:
            load, mesh = self._device_mesh, None
            self._device_mesh = mesh  # freeze before the policy is cut over ranks, as a user's subclass would
            super().configure_model()
            self._device_mesh = load
            self.policy.get_input_embeddings().weight.requires_grad_(False)
            self.policy.model.layers[0].mlp.requires_grad_(False)
            self.shard()


class Keep(Callback):
    """Keeps the completions and metrics of every step of this rank."""

    def __init__(self) -> None:
        self.drawn: dict[int, dict[int, list[list[int]]]] = {}
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        texts: dict[int, list[list[int]]] = {}
        for prompt, completion in batch.sequences():
            texts.setdefault(prompt.uid, []).append(completion.token_ids)
        self.drawn[batch.policy_version] = texts
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer, pl_module):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def world_size() -> int:
    if torch.distributed.is_initialized():  # Lightning removes the variable at the end of its first run
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


STRATEGIES = {"fsdp2_gathered": partial(FSDP2Strategy, keep_gathered=True)}


def make_trainer(kind: str, *callbacks: Callback, **settings: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        accelerator=os.environ.get("RANKS_ACCELERATOR", "cpu"),
        devices=world_size(),
        strategy=STRATEGIES.get(kind, lambda: kind)() if world_size() > 1 else "auto",
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **({"max_steps": STEPS} | quiet | settings),
    )


def make_data(**settings: Any) -> PromptDataModule:
    per_rank = {"batch_size": GLOBAL_BATCH // world_size(), "eval_batch_size": 4 // world_size()}
    return PromptDataModule(**({"task": FewSums(), "heldout_size": 9} | per_rank | settings))


def make_rollout(**settings: Any) -> Rollout:
    # In this process: the rewards of these tests count, draw, raise and kill where the drill needs it.
    in_process = {"num_generations": 4, "sampling": SamplingParams(max_new_tokens=5), "reward_workers": 0}
    return Rollout(**(in_process | settings))


def full_state(module: PolicyModule) -> dict[str, torch.Tensor]:
    return {name: whole(value).detach().clone() for name, value in module.policy.named_parameters()}


VARIANTS: dict[str, tuple[type[PolicyModule], dict[str, Any], dict[str, Any]]] = {
    "plain": (Sgd, {}, {}),
    # Another decoder, an untied head, frozen parameters, recomputed layers.
    "hard": (PartlyFrozen, {"gradient_checkpointing": True}, {"engine": LocalEngine(decoder="hf")}),
    "lora": (Sgd, {"lora": LoraConfig(rank=4)}, {}),
    # Forward passes without a backward pass, and optimizer steps after which the same rollout goes on.
    "several": (PartlyFrozen, {"gradient_checkpointing": True, "num_iterations": 2, "num_minibatches": 2}, {}),
}


def equality(folder: Path, variant: str, path: str, *kinds: str) -> None:
    """Three optimizer steps and a validation under each strategy; leaves parameters, completions and metrics."""
    for kind in kinds:
        pl.seed_everything(0)
        cls, of_module, of_rollout = VARIANTS[variant]
        keep = Keep()
        module = cls(path=path, recipe=GUIDED, learning_rate=1e-2, max_tokens_per_microbatch=64, **of_module)
        trainer = make_trainer(kind, make_rollout(**of_rollout), keep)
        data = make_data()
        trainer.fit(module, data)
        trainer.validate(module, data, verbose=False)
        found = {"state": full_state(module), "drawn": keep.drawn, "metrics": keep.metrics, "gathered": module.gathered}
        torch.save(found, folder / f"{kind}_{trainer.global_rank}.pt")


class Coin:
    """A reward that draws from Python's generator, of which each rank has its own."""

    def __init__(self) -> None:
        self.calls = 0
        self.act = lambda: None

    def __call__(self, completion: str, problem: Any) -> float:
        self.calls += 1
        self.act()
        return random.random() + len(completion)


class Acts(Callback):
    """Does something once, on one rank, at one point of the step that starts at `at` optimizer steps."""

    def __init__(self, point: str, victim: int, at: int = 1) -> None:
        self.point, self.victim, self.at = point, victim, at
        self.trainer: pl.Trainer | None = None
        self.signal = signal.SIGTERM if point.startswith("sigterm") else signal.SIGKILL

    def do(self, point: str) -> None:
        if point == self.point and self.trainer is not None and self.trainer.global_rank == self.victim:
            os.kill(os.getpid(), self.signal)

    def attach(self, rollout: Rollout, coin: Coin) -> None:
        def now() -> bool:
            return self.trainer is not None and self.trainer.global_step == self.at

        rollout.progress = lambda finished, total: now() and (self.do("rollout"), self.do("sigterm"))
        coin.act = lambda: now() and self.do("reward")

    def on_train_start(self, trainer, pl_module):
        self.trainer = trainer

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == self.at:
            self.do("update")
            self.do("sigterm in update")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.at + 1:
            self.do("after")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if trainer.global_step == self.at + 1 and self.point == "write":
            fsync = os.fsync
            os.fsync = lambda number: self.do("write") or fsync(number)


def drill(
    folder: Path, name: str, kind: str, point: str, victim: int, checkpoint: str | None, max_version_diff: int = 0
) -> None:
    """Three steps with a checkpoint after each; something may happen in the second, or a checkpoint be resumed."""
    pl.seed_everything(0)
    random.seed(100 + int(os.environ["RANK"]) if checkpoint is None else 7)
    coin, keep = Coin(), Keep()
    rollout, acts = make_rollout(rewards=[coin.__call__], max_version_diff=max_version_diff), Acts(point, victim)
    acts.attach(rollout, coin)
    module = PolicyModule(path="builtin:tiny-qwen3", recipe=GUIDED, learning_rate=1e-3, warmup_steps=3)
    callbacks = [acts, rollout, keep, RunCheckpoint(every_n_steps=1)]
    trainer = make_trainer(kind, *callbacks, enable_checkpointing=True, default_root_dir=folder / name)
    trainer.fit(module, make_data(), ckpt_path=checkpoint)
    found = {"state": full_state(module), "drawn": keep.drawn, "metrics": keep.metrics}
    torch.save(found, folder / f"{name}_{trainer.global_rank}.pt")


class OutOfPages(LocalEngine):
    """Fails in the second rollout of rank one."""

    calls = 0

    def generate(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 2 and torch.distributed.get_rank() == 1:
            raise MemoryError("no pages are left")
        return super().generate(*args, **kwargs)


class SmallDisk(Callback):
    """From the second step on, rank zero's disk takes no more than a few kilobytes per file."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2 and trainer.global_rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def on_rank_one(completion: str, problem: Any, other: float | None = None) -> float | None:
    """Rewards that differ on rank zero, and are all `other` on rank one; NaN raises."""
    if torch.distributed.get_rank() == 0:
        return float(len(completion))
    if other is not None and math.isnan(other):
        raise KeyError("no such answer")
    return other


def not_scored_there(completion: str, problem: Any) -> float | None:
    return on_rank_one(completion, problem, None)


def alike_there(completion: str, problem: Any) -> float | None:
    return on_rank_one(completion, problem, 1.0)


def raises_there(completion: str, problem: Any) -> float | None:
    return on_rank_one(completion, problem, math.nan)


def nan_there(completion: str, problem: Any) -> float:
    return float(len(completion)) if torch.distributed.get_rank() == 0 else math.nan


class Planned(PolicyModule):
    """Notes how many micro-batches of each plan have a sequence."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.plans: list[int] = []

    def _plan(self, batch, indices):
        plan = super()._plan(batch, indices)
        self.plans.append(sum(map(bool, plan)))
        return plan


HANGING = {"rewards": [HangsOnce()], "reward_workers": 1, "reward_time_limit": 1.0}
SCENARIOS: dict[str, dict[str, Any]] = {
    "not scored": {"rollout": {"rewards": [not_scored_there]}},
    "NaN": {"rollout": {"rewards": [nan_there]}},
    "alike": {"rollout": {"rewards": [alike_there]}},
    "raises": {"rollout": {"rewards": [raises_there]}},
    "engine": {"rollout": {"engine": OutOfPages()}, "keep": True},
    "engine ahead": {"rollout": {"engine": OutOfPages(), "max_version_diff": 1}, "keep": True},
    "hangs": {"rollout": HANGING},
    "hangs ahead": {"rollout": HANGING | {"max_version_diff": 1}},
    "disk": {"callbacks": [SmallDisk()], "keep": True},
    "settings": {"learning_rate": lambda rank: 1e-3 * (1 + rank)},
    "few": {"data": {"batch_size": 48}},
    "uneven": {
        "max_tokens_per_microbatch": 40,
        "num_iterations": 2,
        "data": {
            "batch_size": 1,
            "task": UnevenSums(),
            "shuffle_seed": 1,
        },  # one long and one short prompt at each step
    },
}


def scenario(folder: Path, kind: str, name: str) -> dict[str, Any]:
    """One run that may end with an error; what this rank saw of it."""
    pl.seed_everything(0)
    settings = SCENARIOS[name]
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ["RANK"])
    rate = settings.get("learning_rate", lambda rank: 1e-3)(rank)
    module = Planned(
        path="builtin:tiny-qwen3",
        recipe=GUIDED,
        learning_rate=rate,
        num_iterations=settings.get("num_iterations", 1),
        max_tokens_per_microbatch=settings.get("max_tokens_per_microbatch", 64),
    )
    os.environ["HANGS_ONCE"] = str(folder / f"{kind} {name} hung")
    keep, logged = settings.get("keep", False), Keep()
    callbacks = [logged, *settings.get("callbacks", []), *([RunCheckpoint(every_n_steps=1)] if keep else [])]
    trainer = make_trainer(
        kind,
        make_rollout(**settings.get("rollout", {})),
        *callbacks,
        enable_checkpointing=keep,
        default_root_dir=folder / kind / name,
    )
    error = None
    try:
        trainer.fit(module, make_data(**settings.get("data", {})))
    except (ValueError, RuntimeError) as caught:
        error = (type(caught).__name__, str(caught), getattr(caught, "is_mine_to_say", None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    seen = {"error": error, "step": trainer.global_step, "plans": module.plans, "metrics": logged.metrics}
    if module.policy is not None:
        seen |= {"sum": float(sum(value.double().abs().sum() for value in full_state(module).values()))}
    return seen


def scenarios(folder: Path, kind: str) -> None:
    """All of them, one after the other: after each, the ranks must still be in step."""
    seen = {name: scenario(folder, kind, name) for name in SCENARIOS}
    torch.save(seen, folder / f"{kind}_{torch.distributed.get_rank()}.pt")


def part(folder: Path, name: str, kind: str, steps: int, checkpoint: str | None) -> None:
    """Some steps, from a checkpoint or not, with AdamW, and a checkpoint at the end."""
    pl.seed_everything(0)
    keep = Keep()
    module = PolicyModule(path="builtin:tiny-qwen3", recipe=GUIDED, learning_rate=1e-3, warmup_steps=3)
    settings = {"enable_checkpointing": True, "default_root_dir": folder / name, "max_steps": steps}
    trainer = make_trainer(kind, make_rollout(), keep, RunCheckpoint(), HFExport(), **settings)
    trainer.fit(module, make_data(), ckpt_path=checkpoint)
    found = {"state": full_state(module), "drawn": keep.drawn, "metrics": keep.metrics}
    torch.save(found, folder / f"{name}_{trainer.global_rank}.pt")


def other_model(folder: Path, kind: str, path: str, checkpoint: str) -> None:
    """Resumes a checkpoint of another model."""
    trainer = make_trainer(kind, make_rollout())
    try:
        trainer.fit(PolicyModule(path=path, recipe=GUIDED), make_data(), ckpt_path=checkpoint)
    except ValueError as caught:
        torch.save((str(caught), getattr(caught, "is_mine_to_say", None)), folder / f"other_{trainer.global_rank}.pt")


def trace_fit(*arguments: str) -> None:
    """The command line."""
    sys.argv = ["trace-fit", *arguments]
    main()


def on_gpus(folder: Path, *arguments: str) -> None:
    """`equality` on one GPU per rank."""
    os.environ |= {"RANKS_ACCELERATOR": "cuda", "NCCL_NVLS_ENABLE": "0"}
    equality(folder, *arguments)


def snapshot(folder: Path, family: str, decoder: str) -> None:
    """The engine's snapshot of a sharded policy, and of the same policy in one piece; and what is there at one time."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    recipe = QuantRecipe(**W4A4KV4)
    policy = tiny.make_policy(family, recipe)
    engines = [LocalEngine(decoder=decoder, page_size=4) for _ in range(2)]
    for engine in engines:
        if engine is engines[1]:
            shard_policy(policy, init_device_mesh("cpu", (2,)))
        engine.setup(policy, tiny.TinyTokenizer(), recipe, dtype=torch.float32)
        engine.load_weights(Weights(policy), version=3)
    whole_, sharded = (decoder_tensors(engine.decoder) for engine in engines)
    assert whole_.keys() == sharded.keys()
    assert len(whole_) > 10
    for name, value in whole_.items():
        assert torch.equal(sharded[name], value), name
    layers = len(policy.model.layers)
    most = max(gathered_layers(policy) for _ in Weights(policy).parts())
    torch.save({"layers": layers, "most": most, "after": gathered_layers(policy)}, folder / f"snapshot_{rank}.pt")


def peaks(folder: Path) -> None:
    """The largest values of three weights: on rank zero, on rank one, and of a single row."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole_ = [torch.tensor([[-3.0], [1]]), torch.tensor([[1.0], [0], [0], [-7]]), torch.tensor([[5.0, 4]])]
    sharded = [torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])) for weight in whole_]
    torch.save(peaks_of(sharded), folder / f"peaks_{rank}.pt")


def gathered_layers(policy: Any) -> int:
    """Layers of which any parameter is there in full."""
    return sum(any(not isinstance(p, DTensor) for p in layer.parameters()) for layer in policy.model.layers)


def decoder_tensors(decoder: Any) -> dict[str, torch.Tensor]:
    """Everything that a decoder holds of the weights: codes, scales, dequantised values, K/V outer scales."""
    if isinstance(decoder, HFDecoder):
        found = dict(decoder.model.named_parameters())
    else:
        found = dict(decoder._small) | {"head": decoder.head}
        for index, layer in enumerate(decoder.layers):
            for part, linear in enumerate(layer.linears):
                packed = linear.packed
                parts = {"weight": linear.weight, "bias": linear.bias, "codes": packed.qdata, "scale": packed.scale}
                parts["outer"] = packed.outer_scale
                found |= {f"{index}.{part}.{name}": value for name, value in parts.items() if value is not None}
    for layer in range(len(decoder.kv_formats)):
        found |= {f"kv {layer} {i}": scale for i, scale in enumerate(decoder.kv_outer(layer)) if scale is not None}
    return {name: value.detach().clone() for name, value in found.items()}


class CountTensors(Callback):
    """Tensors that are alive after each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        gc.collect()
        self.counts.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()))


def ten_steps(folder: Path, *kinds: str) -> None:
    """Whether anything adds up."""
    for kind in kinds:
        pl.seed_everything(0)
        count = CountTensors()
        module = PolicyModule(path="builtin:tiny-qwen3", recipe=GUIDED, learning_rate=1e-5)
        trainer = make_trainer(kind, make_rollout(), count, max_steps=10)
        trainer.fit(module, make_data(batch_size=1))
        torch.save(count.counts, folder / f"{kind}_{trainer.global_rank}.pt")


def metrics_together(folder: Path) -> None:
    """Metrics of unlike states, some of them empty on rank zero: one by one as torchmetrics does it, and together."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    metrics = [CompletionMetrics(), DivergenceMetrics(), PositionMetrics(), CompletionMetrics()]
    logprobs = -torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(rank))
    metrics[0].update(torch.tensor([3, 4 + rank]), torch.tensor([True, False]))
    for metric in metrics[1:3]:
        metric.update(*logprobs, torch.ones(3, 40, dtype=torch.bool))
    if rank:
        metrics[3].update(torch.tensor([9]), torch.tensor([True]))
    gathers, gather = [], torch.distributed.all_gather
    expected = [metric.compute() for metric in copy.deepcopy(metrics)]
    torch.distributed.all_gather = lambda *arguments: (gathers.append(1), gather(*arguments))
    found = compute_together(metrics)
    again = compute_together(metrics)
    torch.save((expected, found, again, len(gathers)), folder / f"metrics_{rank}.pt")
