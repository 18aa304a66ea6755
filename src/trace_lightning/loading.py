"""Which prompts a rollout is made of, and in which order: `PromptLoader` cuts batches, a `PromptOrder` chooses.

The position is exact in mid-epoch and part of every checkpoint, so a resumed run sees the prompts that the unbroken run
would have seen (a plain DataLoader silently starts over). What decides is (seed, epoch, position) and plain counts,
never the state of a random generator. All ranks make the same choice for the global batch and take their share of it.

`peek` chooses the next batch early, for a rollout that is drawn while the one before it trains. A checkpoint then names
the prompts that were chosen and not yet handed out, and a resumed run begins with them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trace_lightning.rollout.balance import deal
from trace_lightning.tasks.mixture import SOURCE
from trace_lightning.types import Prompt, RolloutBatch

_PRIME = 1_000_003


def _generator(*numbers: int) -> torch.Generator:
    """Randomness that these numbers name."""
    seed = functools.reduce(lambda total, number: total * _PRIME + number, numbers)
    return torch.Generator().manual_seed(seed % 2**63)


class PromptOrder(ABC):
    """Chooses the prompts of each global batch. `begin` is called once, before all else."""

    def begin(self, prompts: Sequence[Prompt], seed: int) -> None:
        """Take over what there is to choose from."""
        self.prompts, self.seed = prompts, seed

    @abstractmethod
    def choose(self, epoch: int, position: int, count: int) -> list[int]:
        """Indices of `count` prompts for the batch at `position` of an epoch. Positions come in order."""

    def observe(self, successes: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Learn how the last rollout went: right answers and answers by source, over all ranks. Returns metrics."""
        return {}

    @property
    def sources(self) -> list[str]:
        """Sources whose success `observe` wants to hear of, the same on every rank."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Plain data with which `load_state_dict` goes on; empty where (epoch, position) say it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Inverse of `state_dict`."""


class Shuffle(PromptOrder):
    """Every prompt once per epoch, in another order each time."""

    def choose(self, epoch: int, position: int, count: int) -> list[int]:
        generator = _generator(self.seed, epoch)
        order = torch.randperm(len(self.prompts), generator=generator)
        return order[position * count : (position + 1) * count].tolist()


class SuccessCurriculum(PromptOrder):
    """Draws more from the sources of a `Mixture` whose problems are solved about half of the time.

    A source with success rate p is drawn in proportion to `floor + (1 - floor) 4 p (1 - p)`: the variance of a right or
    wrong answer, which is what a group of completions can teach (Foster and Foerster, "Learning to reason at the
    frontier of learnability", 2025). p counts right answers with weights that halve every `half_life` rollouts, and
    starts from 1/2. Within a source every prompt comes once before one comes again. An epoch has as many batches as
    with `Shuffle`.

    Args:
        floor: share of the weight that does not depend on success, so that what is mastered or out of reach is seen
            now and then.
        half_life: rollouts.
        correct_from: a reward counts as right from here on.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, floor: float = 0.1, half_life: float = 10.0, correct_from: float = 1.0) -> None:
        if not 0 < floor <= 1:
            raise ValueError(f"SuccessCurriculum: floor={floor} must be above 0, or sources could be lost; at most 1")
        if half_life <= 0:
            raise ValueError(f"SuccessCurriculum: half_life={half_life} must be above 0")
        self.floor, self.half_life, self.correct_from = floor, half_life, correct_from

    def begin(self, prompts: Sequence[Prompt], seed: int) -> None:
        """Sort the prompts by their source.

        Raises:
            ValueError: a prompt without a source, or a single source.
        """
        super().begin(prompts, seed)
        self.members: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            source = prompt.problem.info.get(SOURCE)
            if source is None:
                raise ValueError(
                    f"data.order=SuccessCurriculum weighs sources, but training prompt {index} has none: use the task "
                    f"Mixture, or put {SOURCE!r} into the info of each problem"
                )
            self.members.setdefault(str(source), []).append(index)
        if len(self.members) < 2:
            raise ValueError(f"data.order=SuccessCurriculum has a single source, {next(iter(self.members), 'none')!r}")
        self.counts = {source: [0.0, 0.0] for source in self.members}
        self.drawn = dict.fromkeys(self.members, 0)

    @property
    def sources(self) -> list[str]:
        return list(self.members)

    def rates(self) -> dict[str, float]:
        """Estimated success rate of each source."""
        return {source: (right + 1) / (total + 2) for source, (right, total) in self.counts.items()}

    def weights(self) -> dict[str, float]:
        """Share of each source among the prompts drawn next."""
        raw = {source: self.floor + (1 - self.floor) * 4 * p * (1 - p) for source, p in self.rates().items()}
        return {source: value / sum(raw.values()) for source, value in raw.items()}

    def choose(self, epoch: int, position: int, count: int) -> list[int]:
        generator = _generator(self.seed, epoch, position)
        shares = torch.tensor(list(self.weights().values()), dtype=torch.float64)
        slots = torch.multinomial(shares, count, replacement=True, generator=generator).tolist()
        return [self._next(self.sources[slot]) for slot in slots]

    def _next(self, source: str) -> int:
        members, drawn = self.members[source], self.drawn[source]
        self.drawn[source] += 1
        turn, place = divmod(drawn, len(members))
        generator = _generator(self.seed, self.sources.index(source), turn)
        return members[torch.randperm(len(members), generator=generator)[place]]

    def observe(self, successes: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        keep = 0.5 ** (1 / self.half_life)
        for source, (right, total) in successes.items():
            count = self.counts[source]
            self.counts[source] = [count[0] * keep + right, count[1] * keep + total]
        rates, weights = self.rates(), self.weights()
        values = {f"curriculum/{source}/success": rates[source] for source in self.members}
        return values | {f"curriculum/{source}/share": weights[source] for source in self.members}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": {source: list(count) for source, count in self.counts.items()}, "drawn": dict(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["counts"].keys() != self.counts.keys():
            raise ValueError(
                f"the checkpoint has the sources {', '.join(state['counts'])}, the task {', '.join(self.counts)}"
            )
        self.counts, self.drawn = {s: list(c) for s, c in state["counts"].items()}, dict(state["drawn"])


class PromptLoader:
    """Batches of prompts, in the order given or chosen by a `PromptOrder`, cut over ranks, resumable in mid-epoch.

    Args:
        prompts: all prompts.
        batch_size: prompts per batch and rank.
        order: chooses each batch; None takes prompts as they come, the last batch being what is left.
        seed: of the order.
        rank: of this process.
        world_size: number of processes.
        template: what every batch carries beside its prompts.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        *,
        order: PromptOrder | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        **template: Any,
    ) -> None:
        self.prompts, self.batch_size, self.order = prompts, batch_size, order
        self.rank, self.world_size, self.template = rank, world_size, template
        self.epoch = self.position = 0
        self._chosen: list[int] = []  # of the next global batch, where it was chosen early
        self._peeked: RolloutBatch | None = None
        if order is not None:
            order.begin(prompts, seed)

    def __len__(self) -> int:
        global_batch = self.batch_size * self.world_size
        if self.order is not None:
            return len(self.prompts) // global_batch  # every training step has its full batch
        return -(-len(self.prompts) // global_batch)

    def __iter__(self) -> Iterator[RolloutBatch]:
        # A consumer that counts stops after the last batch without asking for more, so an epoch is closed here.
        if self.order is None or self.position >= len(self):
            self.epoch, self.position = self.epoch + (self.position > 0), 0
        while self.position < len(self):
            batch = self._peeked or self._cut(self._chosen or self._choose(self.epoch, self.position))
            self._chosen, self._peeked = [], None
            self.position += 1
            yield batch

    def peek(self) -> RolloutBatch:
        """The batch that is handed out next, this very object; after an epoch's last one, the next epoch's first."""
        if self._peeked is None:
            ended = self.position >= len(self)
            place = (self.epoch + 1, 0) if ended else (self.epoch, self.position)
            self._chosen = self._chosen or self._choose(*place)
            self._peeked = self._cut(self._chosen)
        return self._peeked

    def _choose(self, epoch: int, position: int) -> list[int]:
        """Indices of the prompts of a global batch."""
        count = self.batch_size * self.world_size
        if self.order is None:
            return list(range(position * count, min((position + 1) * count, len(self.prompts))))
        return self.order.choose(epoch, position, count)

    def _cut(self, chosen: list[int]) -> RolloutBatch:
        """This rank's share of a global batch."""
        shares = deal([len(self.prompts[i].token_ids) for i in chosen], self.world_size)
        return RolloutBatch(prompts=[self.prompts[chosen[i]] for i in shares[self.rank]], **self.template)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and batches handed out, what they were cut from, the order's own state, and what `peek` has chosen."""
        order = {} if self.order is None else self.order.state_dict()
        size = {"num_prompts": len(self.prompts), "global_batch": self.batch_size * self.world_size}
        chosen = {"chosen": list(self._chosen)} if self._chosen else {}
        return {"epoch": self.epoch, "position": self.position, **size, "order": order, **chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader stood.

        Raises:
            ValueError: its prompts or its batches were others, so that its position means nothing here.
        """
        for name, value in self.state_dict().items():
            if name in ("num_prompts", "global_batch") and state.get(name, value) != value:
                raise ValueError(
                    f"the checkpoint was made with {name}={state[name]}, now it is {value}: its position in the "
                    "epoch means nothing here. Resume with the same data and the same data.batch_size x ranks"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._chosen, self._peeked = list(state.get("chosen", [])), None
        if self.order is not None:
            self.order.load_state_dict(state.get("order", {}))


class LoaderChain:
    """Loaders one after the other, as one: with several, Lightning would hide the metrics of its sanity check."""

    def __init__(self, loaders: Sequence[PromptLoader]) -> None:
        self.loaders = list(loaders)

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[RolloutBatch]:
        for loader in self.loaders:
            yield from loader
