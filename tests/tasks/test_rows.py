"""JSONL prompts: what is read, how it is split, and that a bad row is named by file, line and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trace_lightning.tasks import ExactMatch, IntegerMatch, JsonlTask

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_plain_text_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": i + 1, "level": i} for i in range(40)]
    task = JsonlTask(write(tmp_path / "a.jsonl", *rows))
    train, heldout = task.train_problems(), task.heldout_problems()
    assert (len(train), len(heldout)) == (38, 2)
    assert sorted(p.info["level"] for p in [*train, *heldout]) == list(range(40))
    assert all(p.prompt == f"{p.info['level']}+1=" and p.answer == p.info["level"] + 1 for p in train)
    (reward,) = task.rewards()
    assert isinstance(reward, ExactMatch)
    assert reward(str(train[0].answer), train[0]) == 1.0


def test_chat_rows_and_other_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": CHAT, "gold": "2"}, {"messages": CHAT[1:], "gold": "2"})
    reward = IntegerMatch()
    task = JsonlTask(path, prompt_key="messages", answer_key="gold", heldout_fraction=0, reward=reward)
    assert [p.prompt for p in sorted(task.train_problems(), key=lambda p: len(p.prompt))] == [CHAT[1:], CHAT]
    assert task.heldout_problems() == []
    assert task.rewards() == [reward]


def test_equal_prompts_are_on_one_side(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i % 10}", "answer": i} for i in range(40)]
    task = JsonlTask(write(tmp_path / "a.jsonl", *rows), heldout_fraction=0.3)
    train, heldout = ({p.prompt for p in side} for side in (task.train_problems(), task.heldout_problems()))
    assert heldout
    assert not train & heldout


def test_the_split_does_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": i} for i in range(30)]
    first = JsonlTask(write(tmp_path / "a.jsonl", *rows))
    second = JsonlTask(write(tmp_path / "b.jsonl", *reversed(rows)))
    assert first.heldout_problems() == second.heldout_problems()
    assert len(first.heldout_problems()) == 2


def test_heldout_file(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", {"prompt": "b", "answer": 1}, "", {"prompt": "a", "answer": 2})
    heldout = write(tmp_path / "b.jsonl", {"prompt": "c", "answer": 3})
    task = JsonlTask(train, heldout_path=heldout)
    assert [p.prompt for p in task.train_problems()] == ["b", "a"]
    assert [p.prompt for p in task.heldout_problems()] == ["c"]


def test_unicode_line_separators_stay_inside_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b", "answer": 1}\r\n'.encode())
    assert JsonlTask(str(path), heldout_fraction=0).train_problems()[0].prompt == "a\u2028b"


def test_no_answers_with_a_reward_of_ones_own(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a"})
    task = JsonlTask(path, answer_key=None, heldout_fraction=0, reward=[IntegerMatch()])
    assert task.train_problems()[0].answer is None
    with pytest.raises(ValueError, match="answer_key=null"):
        JsonlTask(path, answer_key=None)


GOOD = {"prompt": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"a\.jsonl: the file has no rows"),
        (["", "  "], r"a\.jsonl: the file has no rows"),
        ([GOOD, "{'prompt'"], r"a\.jsonl, line 2: not JSON"),
        ([GOOD, [1]], r"a\.jsonl, line 2: expected an object with keys, found list"),
        ([GOOD, "", {"answer": "b"}], r"a\.jsonl, line 3: no key 'prompt'; the row has 'answer'"),
        ([GOOD, {"prompt": "c"}], r"a\.jsonl, line 2: no key 'answer'"),
        ([GOOD, {}], r"a\.jsonl, line 2: no key 'prompt'; the row has none"),
        ([{"prompt": "", "answer": 1}], r"a\.jsonl, line 1: key 'prompt' is empty"),
        ([{"prompt": 7, "answer": 1}], r"a\.jsonl, line 1: key 'prompt' must be text or a list of chat messages"),
        ([{"prompt": [], "answer": 1}], r"a\.jsonl, line 1: key 'prompt' must be text or a list"),
        ([{"prompt": [*CHAT, {"role": "user"}], "answer": 1}], r"line 1: key 'prompt': message 2 needs"),
        ([{"prompt": ["hi"], "answer": 1}], r"line 1: key 'prompt': message 0 needs"),
        ([GOOD, {"prompt": CHAT, "answer": 1}], r"line 2: key 'prompt' is chat messages, but .* plain text"),
        ([{"prompt": CHAT, "answer": 1}, GOOD], r"line 2: key 'prompt' is plain text, but .* chat messages"),
        ([GOOD, GOOD], None),
        ([GOOD], r"a\.jsonl: its 1 row\(s\) are all held out"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], message: str | None) -> None:
    path = write(tmp_path / "a.jsonl", *rows)
    if message is None:  # two rows with one prompt cannot be split, so both are trained on
        assert len(JsonlTask(path).train_problems()) == 2
        return
    with pytest.raises(ValueError, match=message):
        JsonlTask(path)


def test_other_bad_input(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", GOOD)
    chat = write(tmp_path / "chat.jsonl", {"prompt": CHAT, "answer": 1})
    with pytest.raises(ValueError, match="no such file"):
        JsonlTask(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"chat\.jsonl: prompts are chat messages, those of .*a\.jsonl are plain text"):
        JsonlTask(good, heldout_path=chat)
    with pytest.raises(ValueError, match="heldout_fraction=1"):
        JsonlTask(good, heldout_fraction=1.0)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a", "answer": 1}\n{"prompt": "\xe9"}')
    with pytest.raises(ValueError, match=r"latin\.jsonl, line 2: not UTF-8"):
        JsonlTask(str(tmp_path / "latin.jsonl"))
