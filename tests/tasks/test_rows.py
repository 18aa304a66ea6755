"""Prompts from files (JSONL, Parquet, saved data sets): what is read, how it is split, and how bad rows are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trace_lightning.tasks import DatasetTask, ExactMatch, IntegerMatch, JsonlTask, ParquetTask

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
        ([GOOD, {"prompt": "c", "answer": None}], r"a\.jsonl, line 2: key 'answer' is null; set answer_key=null"),
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


def test_a_template_makes_the_prompt_of_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "1+1?", "unit": "m", "prompt": "mine", "answer": 2})
    task = JsonlTask(path, heldout_fraction=0, template="{{Q}} {question} in {unit}:")
    (problem,) = task.train_problems()
    assert problem.prompt == "{Q} 1+1? in m:"
    assert problem.info == {"question": "1+1?", "unit": "m", "prompt": "mine"}
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: no key 'query'; the row has 'question', 'unit'"):
        JsonlTask(path, heldout_fraction=0, template="{query}")


@pytest.mark.parametrize("template", ["no columns", "{question", "{0}", "{a.b}"])
def test_bad_templates(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match=r"JsonlTask: template="):
        JsonlTask(write(tmp_path / "a.jsonl", GOOD), template=template)


def test_plain_prompts_become_chats_with_a_system_message(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD)
    (problem,) = JsonlTask(path, heldout_fraction=0, chat=True, system="Be brief.").train_problems()
    assert problem.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match=r"line 1: system='Be brief\.' needs chat messages; set chat=true"):
        JsonlTask(path, heldout_fraction=0, system="Be brief.")


def test_a_held_out_file_that_leaks_is_said(tmp_path: Path, caplog) -> None:
    train = write(tmp_path / "a.jsonl", GOOD, {"prompt": "b", "answer": 1})
    heldout = write(tmp_path / "b.jsonl", GOOD, {"prompt": "c", "answer": 1})
    JsonlTask(train, heldout_path=heldout)
    assert "1 of the 2 held-out prompts" in caplog.text


ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(40)]


@pytest.fixture(params=["parquet", "folder of parquet", "dataset", "split"])
def stored(request, tmp_path: Path):
    """(task class, path) of the same rows in each container."""
    if "parquet" in request.param:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parts = {"a": ROWS} if request.param == "parquet" else {"a": ROWS[:25], "b": ROWS[25:]}
        for name, rows in parts.items():
            parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        return ParquetTask, str(tmp_path if len(parts) == 2 else tmp_path / "a.parquet")
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    if request.param == "split":
        made = datasets.DatasetDict({"train": made, "test": made.select([0])})
    made.save_to_disk(tmp_path / "saved")
    return DatasetTask, str(tmp_path / "saved") + (":train" if request.param == "split" else "")


def test_every_container_gives_the_same_problems(stored, tmp_path: Path) -> None:
    kind, path = stored
    wanted = JsonlTask(write(tmp_path / "same.jsonl", *ROWS))
    task = kind(path)
    assert task.train_problems() == wanted.train_problems()
    assert task.heldout_problems() == wanted.heldout_problems()


def test_an_unknown_column_is_named_with_file_row_and_columns(stored) -> None:
    kind, path = stored
    with pytest.raises(ValueError, match=r"row 0: no key 'question'; the row has 'prompt', 'answer', 'level'"):
        kind(path, prompt_key="question")


def test_bad_containers(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    (tmp_path / "no.parquet").write_text("text")
    for kind, path, message in [
        (ParquetTask, "none.parquet", "no such file"),
        (ParquetTask, "no.parquet", "not a Parquet file"),
        (DatasetTask, "none", "no such folder"),
        (DatasetTask, ".", "not a folder that `save_to_disk` wrote"),
    ]:
        with pytest.raises(ValueError, match=message):
            kind(str(tmp_path / path))
    made = datasets.Dataset.from_list(ROWS[:2])
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "two")
    for path, message in [
        ("two", "the splits train, test"),
        ("two:dev", "the splits train, test"),
        ("one:x", "no splits"),
    ]:
        with pytest.raises(ValueError, match=message):
            DatasetTask(str(tmp_path / path))
    made.select([]).save_to_disk(tmp_path / "empty")
    with pytest.raises(ValueError, match="has no rows"):
        DatasetTask(str(tmp_path / "empty"))


@pytest.mark.parametrize(("kind", "package"), [(ParquetTask, "pyarrow"), (DatasetTask, "datasets")])
def test_a_missing_package_names_the_extra(kind, package, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"trace-lightning\[data\]"):
        kind(str(tmp_path))
