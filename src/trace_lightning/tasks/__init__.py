"""Tasks and rewards."""

from trace_lightning.tasks.arithmetic import Gcd, OneDigitProducts, TwoDigitAddition
from trace_lightning.tasks.base import BatchFunctionReward, BatchReward, FunctionReward, RewardFn, Sample, Score, Task
from trace_lightning.tasks.calculator import Calculator, CalculatorProducts
from trace_lightning.tasks.code import CodeTests
from trace_lightning.tasks.environment import Environment, Step
from trace_lightning.tasks.guess import GuessGame, GuessNumber
from trace_lightning.tasks.gym import GymScore, ReasoningGym
from trace_lightning.tasks.maths import MathVerify
from trace_lightning.tasks.mixture import Mixture
from trace_lightning.tasks.penalties import CutOff, Overlong, Repetition
from trace_lightning.tasks.progressions import ArithmeticProgressions, RightSteps
from trace_lightning.tasks.rewards import ExactMatch, Format, IntegerMatch, LastTurn, RegexMatch, TurnRewards
from trace_lightning.tasks.rows import DatasetTask, JsonlTask, ParquetTask, RowsTask
from trace_lightning.tasks.sandbox import Limits
from trace_lightning.tasks.split import split_by_question

__all__ = [
    "ArithmeticProgressions",
    "BatchFunctionReward",
    "BatchReward",
    "Calculator",
    "CalculatorProducts",
    "CodeTests",
    "CutOff",
    "DatasetTask",
    "Environment",
    "ExactMatch",
    "Format",
    "FunctionReward",
    "Gcd",
    "GuessGame",
    "GuessNumber",
    "GymScore",
    "IntegerMatch",
    "JsonlTask",
    "LastTurn",
    "Limits",
    "MathVerify",
    "Mixture",
    "OneDigitProducts",
    "Overlong",
    "ParquetTask",
    "ReasoningGym",
    "RegexMatch",
    "Repetition",
    "RewardFn",
    "RightSteps",
    "RowsTask",
    "Sample",
    "Score",
    "Step",
    "Task",
    "TurnRewards",
    "TwoDigitAddition",
    "split_by_question",
]
