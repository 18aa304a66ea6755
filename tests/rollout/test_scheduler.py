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

    def __init__(self, scheduler: Scheduler, num_pages: int, page_size: int, seed: int = 0) -> None:
        self.scheduler, self.random, self.page_size = scheduler, random.Random(seed), page_size
        shape = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": 1, "head_dim": 1}
        self.kv = PagedKV([None], **shape, dtype=torch.float32, device=torch.device("cpu"))
        self.done: list[Sequence] = []
        self.most_running = self.prefilled = 0

    def write(self, pages: list[int], position: int, value: float) -> None:
        slot = torch.tensor([pages[position // self.page_size] * self.page_size + position % self.page_size])
        x = torch.full((1, 1, 1), value)
        self.kv.write(0, slot, x, x, NearestRounding())

    def check_prompt(self, sequence: Sequence) -> None:
        length = len(sequence.group.prompt.token_ids)
        slots = torch.tensor(
            [sequence.pages[t // self.page_size] * self.page_size + t % self.page_size for t in range(length)]
        )
        k, v = self.kv.read(0, slots.unsqueeze(0))
        expected = torch.arange(length) + 1000.0 * sequence.group.index
        assert torch.equal(k.flatten(), expected)
        assert torch.equal(v.flatten(), expected)

    def step(self) -> None:
        scheduler = self.scheduler
        while admitted := scheduler.admit(max_tokens=20):
            for group in admitted:
                self.prefilled += 1
                for t in range(len(group.prompt.token_ids)):
                    self.write(group.pages, t, 1000.0 * group.index + t)
        started, copies = scheduler.start()
        self.kv.copy_pages(copies)
        for sequence in started:
            self.check_prompt(sequence)
            self.draw(sequence)
        self.done += scheduler.retire()
        for sequence in scheduler.running:
            self.write(sequence.pages, sequence.position, -1.0)
            self.draw(sequence)
        self.most_running = max(self.most_running, len(scheduler.running))
        for sequence in scheduler.running:
            self.check_prompt(sequence)
        self.done += scheduler.retire()

    def draw(self, sequence: Sequence) -> None:
        sequence.token_ids.append(7)
        if len(sequence.token_ids) == self.scheduler.max_new_tokens or self.random.random() < 0.1:
            sequence.finish_reason = "stop"

    def run(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("max_num_seqs", "spare"), [(1, 1.0), (3, 1.0), (5, 2.5), (64, 40.0)])
@pytest.mark.parametrize("max_new_tokens", [1, 9])
def test_all_finish_and_no_page_leaks(page_size: int, max_num_seqs: int, spare: float, max_new_tokens: int) -> None:
    lengths = (1, 15, 16, 17, 4, 8, 31, 2)
    num_pages = int(spare * (-(-(31 + max_new_tokens - 1) // page_size) + 1))
    pool = PagePool(num_pages, page_size)
    scheduler = Scheduler(groups_of(*lengths), pool, max_num_seqs=max_num_seqs, max_new_tokens=max_new_tokens)
    simulation = Simulation(scheduler, num_pages, page_size)
    simulation.run()
    finished = sorted((sequence.group.index, sequence.sample) for sequence in simulation.done)
    assert finished == [(group, sample) for group in range(len(lengths)) for sample in range(3)]
    assert pool.num_free == num_pages
    assert simulation.prefilled == len(lengths), "each prompt is prefilled once"
    assert simulation.most_running <= max_num_seqs


def test_samples_share_full_pages_and_own_the_rest() -> None:
    pool = PagePool(40, 4)
    scheduler = Scheduler(groups_of(10), pool, max_num_seqs=8, max_new_tokens=7)
    (group,) = scheduler.admit(100)
    prompt_pages = list(group.pages)
    assert len(prompt_pages) == 3
    sequences, copies = scheduler.start()
    assert [sequence.pages[:2] for sequence in sequences] == [prompt_pages[:2]] * 3
    own = [page for sequence in sequences for page in sequence.pages[2:]]
    assert len(set(own)) == len(own) == 3 * 2  # positions 8 to 15: the last drawn token is never fed
    assert copies == [(prompt_pages[2], sequence.pages[2]) for sequence in sequences]
    assert pool.num_free == 40 - 2 - 6, "the prompt's own half page is back"
    sequences[0].finish_reason = "stop"
    scheduler.retire()
    assert pool.num_free == 40 - 2 - 4, "shared pages stay"
    for sequence in sequences[1:]:
        sequence.finish_reason = "length"
    scheduler.retire()
    assert pool.num_free == 40


def test_whole_pages_are_not_copied() -> None:
    scheduler = Scheduler(groups_of(8), PagePool(40, 4), max_num_seqs=8, max_new_tokens=6)
    scheduler.admit(100)
    assert scheduler.start()[1] == []


def test_released_page_may_be_source_and_target_of_one_copy() -> None:
    """The last sample of a group frees the half page it is copied from, and the next group may get it at once."""
    num_pages = 2 * (1 + 2)
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


def test_prefill_goes_by_token_budget() -> None:
    scheduler = Scheduler(groups_of(10, 10, 10, 50, 1), PagePool(1000, 4), max_num_seqs=100, max_new_tokens=4)
    batches = []
    while admitted := scheduler.admit(25):
        batches.append([len(group.prompt.token_ids) for group in admitted])
    assert batches == [[10, 10], [10], [50], [1]]


def test_prompts_without_a_seat_are_not_prefilled() -> None:
    scheduler = Scheduler(groups_of(4, 4, 4, num_samples=4), PagePool(1000, 4), max_num_seqs=6, max_new_tokens=4)
    assert len(scheduler.admit(1000)) == 2  # 4 + 2 samples fill the seats
    assert len(scheduler.start()[0]) == 6
    assert scheduler.admit(1000) == []


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
