"""Scoring: what hangs is cut off, what fails is counted and shown, and nothing becomes a zero that nobody gave."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import own_rewards
from trace_lightning.rollout.rewarding import Scorer
from trace_lightning.tasks import BatchFunctionReward, ExactMatch, FunctionReward, Overlong
from trace_lightning.types import Completion, Problem

LIMIT = 0.7


def completions(*texts: str) -> list[Completion]:
    return [
        Completion(
            token_ids=list(range(len(text))),
            logprobs=[0.0] * len(text),
            finish_reason="stop",
            policy_version=0,
            text=text,
        )
        for text in texts
    ]


def problems(count: int) -> list[Problem]:
    return [Problem(prompt="q", answer="x", info={"level": 10 * i}) for i in range(count)]


def score(rewards, *texts: str, **settings):
    """(total, by name, reasons, scorer) of one batch, and no worker left behind."""
    scorer = Scorer(rewards, **({"time_limit": LIMIT} | settings))
    try:
        total, by_name, reasons = scorer(completions(*texts), problems(len(texts)))
    finally:
        scorer.close()
    return total.tolist(), by_name, reasons, scorer


def failures(scorer: Scorer) -> dict[str, float]:
    return {name: count for name, count in scorer.metrics().items() if count}


def same(values, wanted) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values, wanted, strict=True))


def test_several_rewards_are_weighted() -> None:
    total, by_name, _, _ = score([FunctionReward(own_rewards.length), ExactMatch()], "x", "yy", weights=[0.5, 2.0])
    assert by_name == {"length": [1.0, 2.0], "exact_match": [1.0, 0.0]}
    assert total == [2.5, 1.0]


@pytest.mark.parametrize("function", [own_rewards.catastrophic, own_rewards.judge])
def test_a_call_that_hangs_is_cut_off_and_the_others_count(function) -> None:
    reward = FunctionReward(function)
    begin = time.monotonic()
    total, _, reasons, scorer = score([reward], "a", "hang", "b", "c")
    assert same(total, [1.0, math.nan, 1.0, 1.0])
    assert reasons[reward.name] == ["", f"timed out after {LIMIT} s", "", ""]
    assert failures(scorer) == {f"rewards/{reward.name}/timeouts": 1.0}
    assert time.monotonic() - begin < 10


def test_a_run_that_is_stopped_does_not_wait_for_a_call_that_hangs() -> None:
    """`check` is asked while calls are under way, and before each call in this process."""
    begin = time.monotonic()

    def check() -> None:
        if time.monotonic() - begin > 1.0:
            raise InterruptedError

    scorer = Scorer([FunctionReward(own_rewards.catastrophic)], num_workers=1, time_limit=60.0)
    with pytest.raises(InterruptedError):
        scorer(completions("hang"), problems(1), check)
    assert time.monotonic() - begin < 10
    assert scorer(completions("a"), problems(1))[0].tolist() == [1.0]  # by a new worker
    scorer.close()
    with pytest.raises(InterruptedError):
        Scorer([ExactMatch()])(completions("a"), problems(1), check)


def test_an_asynchronous_reward_that_blocks_its_loop_is_stopped_with_those_beside_it() -> None:
    scorer = Scorer([FunctionReward(own_rewards.blocking)], time_limit=LIMIT)
    begin = time.monotonic()
    total, _, reasons = scorer(completions("a", "hang", "b" * 1_000_000), problems(3))  # the last: no pipe holds it
    assert time.monotonic() - begin < 10
    assert math.isnan(total[1])
    assert reasons["blocking"][1] == f"timed out after {LIMIT} s"
    assert scorer(completions("a", "b"), problems(2))[0].tolist() == [1.0, 1.0]
    scorer.close()


def test_the_pool_works_after_a_call_was_cut_off_and_in_any_thread() -> None:
    scorer = Scorer([FunctionReward(own_rewards.catastrophic)], num_workers=1, time_limit=LIMIT)
    found: list[list[float]] = []

    def run(*texts: str) -> None:
        found.append(scorer(completions(*texts), problems(len(texts)))[0].tolist())

    for texts in (("hang", "a"), ("a", "b")):
        thread = threading.Thread(target=run, args=texts)
        thread.start()
        thread.join()
    scorer.close()
    assert same(found[0], [math.nan, 1.0])
    assert found[1] == [1.0, 1.0]


def test_asynchronous_calls_wait_together() -> None:
    begin = time.monotonic()
    total, *_ = score([FunctionReward(own_rewards.judge)], *"abcdefghijklmnop", time_limit=5.0)
    assert total == [1.0] * 16
    assert time.monotonic() - begin < 16 * 0.2  # one after the other


def test_a_worker_that_dies_costs_one_completion() -> None:
    total, _, reasons, scorer = score([FunctionReward(own_rewards.dying)], "a", "die", "b")
    assert same(total, [1.0, math.nan, 1.0])
    assert reasons["dying"][1] == "its worker process died of SIGKILL"
    assert failures(scorer) == {"rewards/dying/errors": 1.0}


def test_an_exception_is_counted_and_shown_once_with_its_traceback(caplog) -> None:
    total, _, reasons, scorer = score([FunctionReward(own_rewards.raising)], "raise", "a", "raise")
    assert same(total, [math.nan, 1.0, math.nan])
    assert reasons["raising"][0] == "raised KeyError: 'answer'"
    assert scorer.errors == {"raising": 2}
    assert caplog.text.count("own_rewards.py") == 1  # of the worker
    assert caplog.text.count("raised KeyError") == 1


def test_none_and_nan_are_not_scored_and_no_failure() -> None:
    total, _, _, scorer = score([FunctionReward(own_rewards.silent), ExactMatch()], "none", "nan", "x")
    assert same(total, [math.nan, math.nan, 2.0])
    assert not any(scorer.metrics().values())


def test_a_run_whose_calls_all_fail_stops() -> None:
    *_, scorer = score([FunctionReward(own_rewards.raising)], "raise", "raise")
    with pytest.raises(ValueError, match=r"all 2 reward calls.*raising raised KeyError"):
        scorer.stop_if_all_failed()


@pytest.mark.parametrize("workers", [None, 0], ids=["workers", "in process"])
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (FunctionReward(own_rewards.listed), r"reward 'listed', row \d: returned a list of 2; one number is expected"),
        (FunctionReward(own_rewards.infinite), r"reward 'infinite', row \d: returned inf"),
        (BatchFunctionReward(own_rewards.too_few), r"'too_few', rows 0 to 2: returned 2 values for 3 completions"),
    ],
    ids=["list", "inf", "length"],
)
def test_what_is_no_reward_names_function_and_row(reward, message, workers) -> None:
    with pytest.raises(ValueError, match=message):
        score([reward], "a", "b", "c", num_workers=workers)


def test_batches_get_all_completions_and_the_columns_of_the_problems() -> None:
    _, by_name, _, _ = score([own_rewards.Ranked(), BatchFunctionReward(own_rewards.trl_style)], "ccc", "a", "bb")
    assert by_name == {"ranked": [2.0, 0.0, 1.0], "trl_style": [4.0, 12.0, 23.0]}


def test_preparing_is_not_part_of_a_call_and_reasons_come_along() -> None:
    total, _, reasons, _ = score([own_rewards.Slow()], "a", "b")
    assert total == [1.0, 1.0]
    assert reasons == {"slow": ["saw a", "saw b"]}


def test_a_reward_that_cannot_be_loaded_stops_with_its_traceback() -> None:
    with pytest.raises(ValueError, match=r"cannot be loaded in a worker[\s\S]*no module named judge_of_mine"):
        score([own_rewards.Broken()], "a")


def test_what_cannot_be_sent_says_what_to_do() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot be sent to a worker process.*in_process=True"):
        score([FunctionReward(lambda completion, problem: float(lock.locked()))], "a")


def test_closures_and_lambdas_travel() -> None:
    factor = 3.0
    assert score([FunctionReward(lambda completion, problem: factor * len(completion))], "ab")[0] == [6.0]


def test_length_in_tokens_is_known() -> None:
    assert score([Overlong(max_tokens=10, buffer=4)], "123456", "12345678", "1234567890ab")[0] == [0.0, -0.5, -1.0]


def test_without_a_reward_that_needs_it_no_process_is_started() -> None:
    *_, scorer = score([ExactMatch()], "a")
    assert scorer.pool is None
    (pid,) = score([FunctionReward(own_rewards.process_id)], "a")[0]
    (own,) = score([FunctionReward(own_rewards.process_id)], "a", num_workers=0)[0]
    assert int(own) == pytest.approx(os.getpid(), rel=1e-6)  # FP32
    assert pid != own
    assert not multiprocessing.active_children()


def test_an_asynchronous_reward_needs_a_worker() -> None:
    with pytest.raises(ValueError, match=r"'judge' is asynchronous.*rollout\.reward_workers above 0"):
        Scorer([FunctionReward(own_rewards.judge)], num_workers=0)


def test_a_batch_has_a_time_limit_of_its_own() -> None:
    reward = BatchFunctionReward(own_rewards.trl_style, time_limit=77.0)
    assert Scorer([reward, FunctionReward(own_rewards.length)], time_limit=2.0).pool.limits == [77.0, 2.0]


@pytest.mark.parametrize("settings", [{"num_workers": -1}, {"time_limit": 0.0}], ids=str)
def test_out_of_range(settings) -> None:
    with pytest.raises(ValueError, match=r"rollout\.reward_\w+=[-0.1]+ must be"):
        Scorer([FunctionReward(own_rewards.length)], **settings)


_SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
import own_rewards
from trace_lightning.tasks.base import FunctionReward, Sample
from trace_lightning.tasks.pool import Call, RewardPool
from trace_lightning.types import Problem
def here(completion, problem):
    return 7.0
pool = RewardPool([FunctionReward(here), FunctionReward(own_rewards.catastrophic)], num_workers=1, time_limit=60)
sample = Sample(text="hang", problem=Problem(prompt=""))
print(pool.run([Call(0, [sample], 0)])[0][0].value, pool._workers[0].process.pid, flush=True)
pool.run([Call(1, [sample], 0)])
"""


def test_a_function_of_a_script_without_main_guard_works_and_workers_die_with_a_killed_parent(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(tests=str(Path(own_rewards.__file__).parent)))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    value, worker = process.stdout.readline().split()
    assert value == "7.0"
    time.sleep(0.3)  # it hangs in a regular expression by now
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{worker}").exists()
