"""Tasks and rewards."""

from trace_lightning.tasks.arithmetic import Gcd, OneDigitProducts, TwoDigitAddition
from trace_lightning.tasks.base import FunctionReward, RewardFn, Task
from trace_lightning.tasks.gym import GymScore, ReasoningGym
from trace_lightning.tasks.jsonl import JsonlTask
from trace_lightning.tasks.progressions import ArithmeticProgressions, RightSteps
from trace_lightning.tasks.rewards import ExactMatch, IntegerMatch
from trace_lightning.tasks.split import split_by_question

__all__ = [
    "ArithmeticProgressions",
    "ExactMatch",
    "FunctionReward",
    "Gcd",
    "GymScore",
    "IntegerMatch",
    "JsonlTask",
    "OneDigitProducts",
    "ReasoningGym",
    "RewardFn",
    "RightSteps",
    "Task",
    "TwoDigitAddition",
    "split_by_question",
]
