"""Pages: none leaks, none is shared that is written to, and every sequence sees its own prompt."""

from __future__ import annotations

import random

import pytest
import torch

from tiny import make_prompts
from trace_lightning.quantization.rounding import NearestRounding
from trace_lightning.rollout.kv_pool import PagedKV, PagePool
from trace_lightning.rollout.scheduler import Group, Scheduler, Sequence


def groups_of(*lengths: int, num_samples: int = 3) -> list[Group]:
    return [Group(prompt, i, num_samples, audited_samples=0) for i, prompt in enumerate(make_prompts(*lengths))]


class Simulation:
    """Drives a scheduler over a real cache whose values say which token they are: (group, position) as one number."""

    def __init__(self, scheduler: Scheduler, num_pages: int, page_size: int, seed: int = 0, window: int = 1) -> None:
        self.window = window
        self.scheduler, self.random, self.page_size = scheduler, random.Random(seed), page_size
        shape = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": 1, "head_dim": 1}
        self.kv = PagedKV([None], **shape, dtype=torch.float32, device=torch.device("cpu"))
        self.done: list[Sequence] = []
        self.most_running = self.prefilled = 0

    def write(self, pages: list[int], position: int, value: float) -> None:
        slot = torch.tensor([pages[position // self.page_size] * self.page_size + position % self.page_size])
        x = torch.full((1, 1, 1), value)
        self.kv.write(0, slot, x, x, NearestRounding())

    def check(self, sequence: Sequence) -> None:
        """Everything a sequence was fed is where its pages say."""
        length = max(sequence.position, sequence.prompt_length)
        slots = torch.tensor(
            [sequence.pages[t // self.page_size] * self.page_size + t % self.page_size for t in range(length)]
        )
        k, v = self.kv.read(0, slots.unsqueeze(0))
        expected = torch.arange(length) + 1000.0 * sequence.group.index
        assert torch.equal(k.flatten(), expected)
        assert torch.equal(v.flatten(), expected)

    def fill(self, groups: list[Group]) -> None:
        for group in groups:
            self.prefilled += 1
            for t in range(len(group.token_ids)):
                self.write(group.pages, t, self.value(group.index, t))

    @staticmethod
    def value(group: int, position: int) -> float:
        return 1000.0 * group + position

    def step(self) -> None:
        scheduler = self.scheduler
        self.fill(scheduler.admit())
        started, copies = scheduler.start()
        self.kv.copy_pages(copies)
        for sequence in started:
            self.check(sequence)
            self.draw(sequence)
        self.done += scheduler.retire()
        preempted = scheduler.grow(self.window)
        assert not any(sequence.pages for sequence in preempted)
        scheduler.requeue(preempted)
        for _ in range(self.window):
            for sequence in scheduler.running:
                if not sequence.finish_reason:
                    position = sequence.position
                    self.write(sequence.pages, position, self.value(sequence.group.index, position))
                    self.draw(sequence)
        self.most_running = max(self.most_running, len(scheduler.running))
        for sequence in scheduler.running:
            self.check(sequence)
        self.done += scheduler.retire()

    def draw(self, sequence: Sequence) -> None:
        sequence.token_ids.append(7)
        sequence.num_drawn += 1
        if len(sequence.token_ids) == self.scheduler.max_new_tokens or self.random.random() < 0.1:
            sequence.finish_reason = "stop"

    def run(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("max_num_seqs", "spare"), [(1, 1.0), (3, 1.0), (5, 2.5), (64, 40.0)])
@pytest.mark.parametrize("max_new_tokens", [1, 9])
def test_all_finish_and_no_page_leaks(
    page_size: int, max_num_seqs: int, spare: float, max_new_tokens: int, window: int
) -> None:
    lengths = (1, 15, 16, 17, 4, 8, 31, 2)
    num_pages = int(spare * (-(-(31 + max_new_tokens - 1) // page_size) + 1))
    pool = PagePool(num_pages, page_size)
    scheduler = Scheduler(groups_of(*lengths), pool, max_num_seqs=max_num_seqs, max_new_tokens=max_new_tokens)
    simulation = Simulation(scheduler, num_pages, page_size, window=window)
    simulation.run()
    finished = sorted((sequence.group.index, sequence.sample) for sequence in simulation.done)
    assert finished == [(group, sample) for group in range(len(lengths)) for sample in range(3)]
    assert pool.num_free == num_pages
    if spare > 10:
        assert simulation.prefilled == len(lengths), "each prompt is prefilled once"
        assert scheduler.num_preempted == 0
    assert simulation.most_running <= max_num_seqs


def test_samples_share_full_pages_and_own_the_rest() -> None:
    pool = PagePool(40, 4)
    scheduler = Scheduler(groups_of(10), pool, max_num_seqs=8, max_new_tokens=7)
    (group,) = scheduler.admit()
    prompt_pages = list(group.pages)
    assert len(prompt_pages) == 3
    sequences, copies = scheduler.start()
    assert [sequence.pages[:2] for sequence in sequences] == [prompt_pages[:2]] * 3
    own = [page for sequence in sequences for page in sequence.pages[2:]]
    assert len(set(own)) == len(own) == 3
    assert copies == [(prompt_pages[2], sequence.pages[2]) for sequence in sequences]
    assert pool.num_free == 40 - 2 - 3, "the prompt's own half page is back"
    for sequence in sequences:
        sequence.num_drawn = 1
    assert scheduler.grow(100) == []
    # Positions 8 to 15: the last drawn token is never fed, so its page is not taken.
    assert [len(sequence.pages) for sequence in sequences] == [4] * 3
    sequences[0].finish_reason = "stop"
    scheduler.retire()
    assert pool.num_free == 40 - 2 - 4, "shared pages stay"
    for sequence in sequences[1:]:
        sequence.finish_reason = "length"
    scheduler.retire()
    assert pool.num_free == 40


def test_whole_pages_are_not_copied() -> None:
    scheduler = Scheduler(groups_of(8), PagePool(40, 4), max_num_seqs=8, max_new_tokens=6)
    scheduler.admit()
    assert scheduler.start()[1] == []


def test_preempted_sequences_come_back_with_all_they_drew() -> None:
    """Pages for two sequences of which each grows to three quarters of the pool: the second has to wait."""
    pool = PagePool(8, 4)
    scheduler = Scheduler(groups_of(4, 4, num_samples=1), pool, max_num_seqs=2, max_new_tokens=20)
    simulation = Simulation(scheduler, 8, 4)
    simulation.random.random = lambda: 1.0  # type: ignore[method-assign]  # nobody ends early
    simulation.run()
    assert scheduler.num_preempted == 1
    assert [len(sequence.token_ids) for sequence in simulation.done] == [20, 20]
    assert simulation.prefilled == 3
    assert pool.num_free == 8


def test_released_page_may_be_source_and_target_of_one_copy() -> None:
    """The last sample of a group frees the half page it is copied from, and the next group may get it at once."""
    num_pages = 6
    scheduler = Scheduler(groups_of(3, 3, num_samples=1), PagePool(num_pages, 4), max_num_seqs=2, max_new_tokens=4)
    simulation = Simulation(scheduler, num_pages, 4)
    overlaps: list[set[int]] = []
    copy_pages = simulation.kv.copy_pages

    def watched(pairs: list[tuple[int, int]]) -> None:
        overlaps.append({source for source, _ in pairs} & {target for _, target in pairs})
        copy_pages(pairs)

    simulation.kv.copy_pages = watched  # type: ignore[method-assign]
    simulation.run()  # checks every prompt
    assert any(overlaps), "the case did not occur"


def test_prompts_without_a_seat_are_not_prefilled() -> None:
    scheduler = Scheduler(groups_of(4, 4, 4, num_samples=4), PagePool(1000, 4), max_num_seqs=6, max_new_tokens=4)
    assert len(scheduler.admit()) == 2  # 4 + 2 samples fill the seats
    assert len(scheduler.start()[0]) == 6
    assert scheduler.admit() == []


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 20), (4, 6), (16, 3)])
@pytest.mark.parametrize("max_new_tokens", [1, 3, 10])
def test_too_large_a_sequence_says_what_fits(page_size: int, num_pages: int, max_new_tokens: int) -> None:
    pool = PagePool(num_pages, page_size)
    with pytest.raises(ValueError, match=r"holds \d+ tokens.*kv_cache_tokens") as error:
        Scheduler(groups_of(200), pool, max_num_seqs=1, max_new_tokens=max_new_tokens)
    fits = int(str(error.value).split("holds ")[1].split()[0])
    assert fits == (num_pages - 1) * page_size
    scheduler = Scheduler(groups_of(fits - max_new_tokens), pool, max_num_seqs=1, max_new_tokens=max_new_tokens)
    Simulation(scheduler, num_pages, page_size).run()
    assert pool.num_free == num_pages


def test_double_release_is_noticed() -> None:
    pool = PagePool(4, 4)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)
