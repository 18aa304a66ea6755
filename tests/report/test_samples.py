from __future__ import annotations

import json

from made_up_runs import completion_line, write_run
from trace_lightning.report.samples import HEAD, PER_ROLLOUT, TAIL, SampleReader, Spread, compact


def read(path) -> SampleReader:
    reader = SampleReader(path)
    reader.update()
    return reader


def test_spread_is_even_and_bounded() -> None:
    spread: Spread[int] = Spread(8)
    for i in range(1000):
        if spread.takes_next():
            spread.keep(i)
    gaps = {b - a for a, b in zip(spread.kept, spread.kept[1:], strict=False)}
    assert spread.kept[0] == 0
    assert 4 <= len(spread.kept) <= 8
    assert len(gaps) == 1


def test_a_bounded_choice_with_first_last_best_and_worst(tmp_path) -> None:
    path = write_run(tmp_path, steps=200, completions=8000, tokens=3) / "completions.jsonl"
    samples = read(path).samples()
    assert len(samples) < 350
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    train = [sample for sample in samples if sample["split"] == "train"]
    assert {0, 199} <= {sample["step"] for sample in train}
    for step in {sample["step"] for sample in train}:
        rewards = [line["reward"] for line in lines if (line["step"], line["split"]) == (step, "train")]
        shown = [sample["reward"] for sample in train if sample["step"] == step]
        assert {min(rewards), max(rewards)} <= set(shown)
        assert len(shown) <= PER_ROLLOUT + 2
    for sample in samples:
        assert sample["reward"] == lines[sample["id"] - 1]["reward"]


def test_reading_on_is_reading_at_once(tmp_path) -> None:
    whole = write_run(tmp_path, steps=50, completions=900, tokens=2) / "completions.jsonl"
    growing = tmp_path / "growing.jsonl"
    growing.touch()
    reader = SampleReader(growing)
    data = whole.read_bytes()
    for end in range(0, len(data) + 50_001, 50_000):  # cuts lines wherever they are
        growing.write_bytes(data[:end])
        reader.update()
    assert reader.samples() == read(whole).samples()
    assert not reader.notes()
    growing.write_bytes(data[: data.index(b"\n") + 1])  # another, shorter file
    reader.update()
    assert [sample["id"] for sample in reader.samples()] == [1]


def test_broken_and_half_written_lines(tmp_path) -> None:
    path = write_run(tmp_path, steps=1, completions=4, tokens=2) / "completions.jsonl"
    good = path.read_bytes()
    torn = good.splitlines()[0]
    path.write_bytes(b"[]\n\xff\n\n" + torn[:60] + good + torn[:90])
    reader = read(path)
    samples = reader.samples()
    assert [sample["id"] for sample in samples] == [5, 6, 7]
    assert reader.notes() == [
        "4 broken lines of completions.jsonl left out",
        "the last line of completions.jsonl is half written and was left out",
    ]


def test_lines_of_older_runs_and_without_a_score(tmp_path) -> None:
    old = {"step": 3, "split": "train", "prompt": "1+1=", "completion": "2", "reward": None}
    path = tmp_path / "completions.jsonl"
    path.write_text(json.dumps(old) + "\n")
    (sample,) = read(path).samples()
    assert sample["turns"] == [{"source": "policy", "tokens": [["2", None]]}]
    assert sample["prompt"] == [{"role": "prompt", "text": "1+1="}]
    assert sample["reward"] is None


def test_turns_keep_their_tokens_rewards_and_sources() -> None:
    line = {
        "step": 0,
        "split": "train",
        "prompt": [{"role": "user", "content": "2*21?"}],
        "completion": "calc(2*21) = 42\nIt is 42.",
        "reward": 1.0,
        "turns": [
            {"source": "policy", "text": "calc(2*21)", "reward": None, "tokens": [["calc", -0.5], ["(2*21)", -0.25]]},
            {"source": "environment", "text": " = 42\n", "reward": None},
            {"source": "policy", "text": "It is 42.", "reward": 1.0, "tokens": [["It is ", -0.1], ["42.", -1.23456]]},
        ],
    }
    turns = compact(line, 1)["turns"]
    assert [turn["source"] for turn in turns] == ["policy", "environment", "policy"]
    assert turns[1]["tokens"] == [[" = 42\n", None]]
    assert turns[2] == {"source": "policy", "tokens": [["It is ", -0.1], ["42.", -1.235]], "reward": 1.0}
    assert "reward" not in turns[0]


def test_long_trajectories_lose_their_middle(tmp_path) -> None:
    import random

    line = completion_line(0, "train", 4000, random.Random(0), turns=True)
    first, _, last = compact(line, 1)["turns"]
    pieces = [piece for turn in (first, last) for piece in turn["tokens"] if piece[1] is not None]
    assert len(pieces) == HEAD + TAIL
    assert first["tokens"][-1] == [f" [... {2000 - HEAD:,} tokens ...] ", None]
    assert last["tokens"][-1] == [line["turns"][2]["tokens"][-1][0], round(line["turns"][2]["tokens"][-1][1], 3)]
