"""Which rows are said to share a prompt's pages: those whose page tables begin with the same ones, and no others."""

from __future__ import annotations

import torch

from tiny import make_prompts
from trace_lightning.rollout.kv_pool import PagePool
from trace_lightning.rollout.prefixes import PrefixTable
from trace_lightning.rollout.scheduler import Group, Scheduler

PAGE = 4


def scheduler_of(*lengths: int, num_samples: int, num_pages: int = 60) -> Scheduler:
    groups = [Group(prompt, i, num_samples, audited_samples=0) for i, prompt in enumerate(make_prompts(*lengths))]
    return Scheduler(groups, PagePool(num_pages, PAGE), max_num_seqs=8, max_new_tokens=8)


def lines(table: PrefixTable) -> list[list[int]]:
    return [[row for row in line if row >= 0] for line in table.group_rows.tolist() if max(line) >= 0]


def test_samples_of_a_group_share_its_full_pages() -> None:
    scheduler = scheduler_of(9, 3, 8, num_samples=2)
    scheduler.admit()
    running, _ = scheduler.start()
    table = PrefixTable(8, 2, PAGE, torch.device("cpu"))
    table.update(running)
    assert lines(table) == [[0, 1], [4, 5]], "a prompt shorter than a page shares nothing"
    assert table.prefix_lens.tolist() == [8, 8, 0, 0, 8, 8, 0, 0]


def test_samples_of_a_prompt_that_was_prefilled_twice_are_told_apart() -> None:
    """The group gave its pages back with a sample still to start: that one reads the pages of the second prefill."""
    scheduler = scheduler_of(8, num_samples=2)
    scheduler.max_num_seqs = 1
    scheduler.admit()
    first, _ = scheduler.start()
    scheduler._reclaim()
    scheduler.max_num_seqs = 2
    scheduler.admit()
    second, _ = scheduler.start()
    assert first[0].pages != second[0].pages
    table = PrefixTable(2, 2, PAGE, torch.device("cpu"))
    table.update(first + second)
    assert lines(table) == [[0], [1]]
