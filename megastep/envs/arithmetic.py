"""arithmetic: compute an expression with a calculator.

    user        371 * 48 + 291 = ?
    assistant   <calc>371 * 48 + 291</calc>      a call: the next message is its value
    user        18099
    assistant   The answer is 18099.             ends the episode; reward 1 for the right number

A turn that is neither ends the episode with reward 0. The prompt shows one worked example. A small
pretrained model follows it now and then, and otherwise guesses: RL teaches it to call the tool and
to read the result.

Columns of a data set, unless rows are generated: `expression`.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from megastep.envs.tags import after_thinking, tagged
from megastep.errors import EnvError
from megastep.rollout.env import Env, Outcome

SYSTEM = "Use a calculator."
EXAMPLE = [
    {"role": "user", "content": "7 * 8 + 2 = ?"},
    {"role": "assistant", "content": "<calc>7 * 8 + 2</calc>"},
    {"role": "user", "content": "58"},
    {"role": "assistant", "content": "The answer is 58."},
]
MAX_CHARACTERS = 100  # of an expression
OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


class Arithmetic(Env):
    columns = {"expression": str}

    def __init__(self, row: dict[str, Any]):
        self.expression = row["expression"]
        self.calls = 0

    @classmethod
    def generate(cls, random: Random) -> dict[str, Any]:
        a = random.randint(101, 999)
        b = random.randint(11, 99)
        c = random.randint(101, 999)
        return {"expression": f"{a} * {b} {random.choice('+-')} {c}"}

    async def start(self):
        question = {"role": "user", "content": f"{self.expression} = ?"}
        return [{"role": "system", "content": SYSTEM}, *EXAMPLE, question]

    async def step(self, text: str, ids: np.ndarray) -> Outcome:
        turn = after_thinking(text)
        expression = tagged(turn, "calc")
        if expression is not None:
            self.calls += 1
            result = {"role": "user", "content": calculate(expression)}
            return Outcome([result], metrics=self._metrics(False))
        right = self._is_right(turn)
        return Outcome(reward=float(right), done=True, metrics=self._metrics(right))

    def _metrics(self, success: bool) -> dict[str, Any]:
        return {"success": success, "calls": self.calls}

    def _is_right(self, turn: str) -> bool:
        try:
            expected = evaluate(self.expression)
        except ValueError as error:
            raise EnvError(f"expression = {self.expression}: {error}") from None
        answer = re.fullmatch(r"The answer is (-?[\d.]*\d)\.?", turn.strip())
        return answer is not None and answer[1] == written(expected)


def calculate(expression: str) -> str:
    """What the calculator returns for the model's text."""
    try:
        return written(evaluate(expression))
    except ValueError as error:
        return f"error: {error}"


def evaluate(expression: str) -> float:
    """The value of numbers, + - * / and parentheses; raises ValueError for anything else."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        if not math.isfinite(value):
            raise OverflowError("too large")
        return value
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    except ArithmeticError as error:
        raise ValueError(str(error)) from None


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
            return OPERATORS[type(kind)](_value(left), _value(right))
        case ast.UnaryOp(kind, operand) if type(kind) in OPERATORS:
            return OPERATORS[type(kind)](_value(operand))
    raise ValueError("only numbers, + - * / and parentheses")


def written(value: float) -> str:
    """Without trailing zeros: 12, 0.5, 0.333333."""
    rounded = round(value, 6)
    return str(int(rounded)) if rounded == int(rounded) else str(rounded)
