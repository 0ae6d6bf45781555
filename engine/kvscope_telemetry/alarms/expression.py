"""Alarm expressions over per-second figures, such as `free_blocks < 0.05 * num_blocks and running > 8`.

Owns the grammar (figures, numbers, comparisons, and, or, not, + - * /, min, max, abs, mean, sum, and nothing else), its
validation and its evaluation. An expression is parsed with Python's `ast` and never executed. Logic is three-valued: a
condition is 1, 0, or NaN (unknown) where it depends on a figure that is not known.
"""

from __future__ import annotations

import ast
import difflib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.alarms.alarm_figures import SECOND_FIGURES, FloatArray, SecondFigure
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

MAX_LENGTH: Final = 500
MAX_WINDOW_S: Final = 600
_MAX_DEPTH: Final = 40
_NUMBER_FUNCTIONS: Final = ("min", "max", "abs")
_WINDOW_FUNCTIONS: Final = ("mean", "sum")
_FUNCTIONS: Final = (*_NUMBER_FUNCTIONS, *_WINDOW_FUNCTIONS)
_ARITHMETIC: Final[dict[type[ast.operator], np.ufunc]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
}
_COMPARISONS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_GRAMMAR: Final = f"figures, numbers, comparisons, and, or, not, + - * / and {', '.join(_FUNCTIONS)}"


class Expression:
    """A parsed and validated condition over per-second figures. Raises BadInput for an invalid expression; the
    message names the wrong token and what is accepted.
    """

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())
        self._root = _parsed(self.text)
        _check_condition(self._root, self.text, 0)
        names = dict.fromkeys(node.id for node in _nodes(self._root) if isinstance(node, ast.Name))
        self.figures: tuple[SecondFigure, ...] = tuple(SECOND_FIGURES[name] for name in names if name not in _FUNCTIONS)
        if not self.figures:
            raise BadInput(f"{self.text!r} names no figure; accepted: {', '.join(SECOND_FIGURES)}")
        self._measured, self.rises = _measured_side(self._root)
        self._has_bounds = any(figure.read_low is not None for figure in self.figures)

    def evaluate(self, overview: SessionOverview, rows: slice, slack: float = 0.0) -> FloatArray:
        """Evaluate the condition for the seconds `rows` of the overview.

        With `slack`, thresholds are moved by that fraction of their absolute value (0.05: 5 %), so that the condition
        holds more easily, and within `not` less easily. If a latency percentile is known only as a histogram bucket,
        the condition is evaluated for both edges of the bucket and is unknown where the results differ.

        Returns:
            Shape (n,): 1 where the condition holds, 0 where it does not, NaN where this is unknown.
        """
        context = _EvaluationContext(overview, rows, slack)
        high = _condition(self._root, context)
        if not self._has_bounds:
            return high
        return np.where(high == _condition(self._root, replace(context, is_low=True)), high, np.nan)

    def value(self, overview: SessionOverview, rows: slice) -> FloatArray:
        """Return the value that the first comparison with a figure compares with its threshold, shape (n,); NaN where
        it is unknown. Where the upper edge of a histogram bucket is infinite, the lower edge is returned.
        """
        context = _EvaluationContext(overview, rows)
        value = _number(self._measured, context)
        return np.where(np.isinf(value), _number(self._measured, replace(context, is_low=True)), value)

    @property
    def unit(self) -> str:
        """Unit of `value`; empty if the value combines several figures or contains arithmetic."""
        names = {node.id for node in _nodes(self._measured) if isinstance(node, ast.Name)} - set(_FUNCTIONS)
        is_plain = not any(isinstance(node, ast.BinOp) for node in _nodes(self._measured))
        return SECOND_FIGURES[names.pop()].unit if is_plain and len(names) == 1 else ""


@lru_cache(maxsize=256)
def expression_of(text: str) -> Expression:
    """Return the parsed expression of `text`. Cached, because all windows evaluate the same rules. Raises BadInput."""
    return Expression(text)


# Grammar and validation


def _parsed(text: str) -> ast.expr:
    if not text:
        raise BadInput("an expression is needed, such as ttft_p99_ms > 500")
    if len(text) > MAX_LENGTH:
        raise BadInput(f"an expression of {len(text)} characters is not accepted: must be at most {MAX_LENGTH}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # ast warns of a number directly followed by a word, such as `1if`
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        word = _token_at(text, error.offset or len(text) + 1)
        is_open = "never closed" in error.msg
        where = (
            f"{word!r} is not closed" if is_open else f"{word!r} cannot be read here" if word else "it ends too early"
        )
        raise BadInput(f"{where}; accepted: {_GRAMMAR}") from None
    except (ValueError, RecursionError, MemoryError):
        raise BadInput(f"{text[:40]!r} cannot be read; accepted: {_GRAMMAR}") from None


def _token_at(text: str, offset: int) -> str:
    for token in re.finditer(r"[\w.]+|[^\w\s]+", text):
        if token.end() >= offset:
            return token.group()
    return ""


def _check_condition(node: ast.expr, text: str, depth: int) -> None:
    _check_depth(depth)
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _check_condition(value, text, depth + 1)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _check_condition(operand, text, depth + 1)
        case ast.Compare(left=left, ops=ops, comparators=others):
            for op in ops:
                if not isinstance(op, _COMPARISONS):
                    word = "is" if isinstance(op, ast.Is | ast.IsNot) else "in"
                    raise BadInput(f"{word!r} is not accepted; accepted: <, <=, >, >=, ==, !=")
            for number in (left, *others):
                _check_number(number, text, depth + 1)
        case _:
            _check_number(node, text, depth)
            raise BadInput(f"{_source(node, text)!r} is a number; a comparison is needed, such as {_example(node)}")


def _check_number(node: ast.expr, text: str, depth: int) -> None:
    _check_depth(depth)
    match node:
        case ast.Constant(value=value):
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
                raise BadInput(f"{_source(node, text)!r} is not accepted; accepted: {_GRAMMAR}")
        case ast.Name(id=name):
            if name in _FUNCTIONS:
                raise BadInput(f"{name!r} needs brackets, such as {_call_example(name)}")
            if name not in SECOND_FIGURES:
                raise BadInput(f"{name!r} is not a figure{_suggestion(name)}; accepted: {', '.join(SECOND_FIGURES)}")
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            _check_number(operand, text, depth + 1)
        case ast.BinOp(left=left, op=op, right=right):
            if type(op) not in _ARITHMETIC:
                raise BadInput(f"{_sign(op)!r} is not accepted; accepted: + - * /")
            _check_number(left, text, depth + 1)
            _check_number(right, text, depth + 1)
        case ast.Call():
            _check_call(node, text, depth)
        case ast.BoolOp() | ast.Compare() | ast.UnaryOp(op=ast.Not()):
            raise BadInput(f"{_source(node, text)!r} is a condition; a number is needed there")
        case _:
            raise BadInput(f"{_source(node, text)!r} is not accepted; accepted: {_GRAMMAR}")


def _check_call(node: ast.Call, text: str, depth: int) -> None:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name not in _FUNCTIONS:
        raise BadInput(f"{_source(node.func, text)!r} is not a function; accepted: {', '.join(_FUNCTIONS)}")
    num_arguments = len(node.args)
    has_right_count = (
        num_arguments == 1 if name == "abs" else num_arguments == 2 if name in _WINDOW_FUNCTIONS else num_arguments >= 2
    )
    if node.keywords or not has_right_count:
        raise BadInput(f"{_source(node, text)!r} is not accepted; accepted: {_call_example(name)}")
    for number in node.args:
        _check_number(number, text, depth + 1)
    if name in _WINDOW_FUNCTIONS and not 1 <= _literal(node.args[1]) <= MAX_WINDOW_S:
        argument = _source(node.args[1], text)
        raise BadInput(f"{argument!r} is not accepted in {name}(); accepted: 1 to {MAX_WINDOW_S} seconds, as a number")


def _literal(node: ast.expr) -> float:
    return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else 0.0


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise BadInput(f"brackets and signs nest too deeply: at most {_MAX_DEPTH} levels are accepted")


def _source(node: ast.expr, text: str) -> str:
    source = ast.get_source_segment(text, node) or text
    return source if len(source) <= 40 else f"{source[:39]}…"


def _sign(op: ast.operator) -> str:
    signs: dict[type[ast.operator], str] = {ast.Mod: "%", ast.Pow: "**", ast.FloorDiv: "//", ast.MatMult: "@"}
    return signs.get(type(op), {"BitAnd": "&", "BitOr": "|", "BitXor": "^"}.get(type(op).__name__, "<<, >>"))


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, SECOND_FIGURES, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _example(node: ast.expr) -> str:
    return f"{node.id} > 100" if isinstance(node, ast.Name) else "running > 8"


def _call_example(name: str) -> str:
    return {"abs": "abs(a)", "mean": "mean(a, 10)", "sum": "sum(a, 10)"}.get(name, f"{name}(a, b)")


def _nodes(root: ast.expr) -> Iterator[ast.AST]:
    return ast.walk(root)


def _measured_side(root: ast.expr) -> tuple[ast.expr, bool]:
    """Return the side of the first comparison that contains a figure, and whether larger values of that side
    are worse.
    """
    comparisons = [node for node in _nodes(root) if isinstance(node, ast.Compare)]
    first = min(comparisons, key=lambda node: (not _has_figure(node), node.lineno, node.col_offset))
    rises = isinstance(first.ops[0], ast.Gt | ast.GtE | ast.Eq | ast.NotEq)
    return (first.left, rises) if _has_figure(first.left) else (first.comparators[0], not rises)


def _has_figure(root: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id in SECOND_FIGURES for node in _nodes(root))


# Evaluation


@dataclass(frozen=True, slots=True)
class _EvaluationContext:
    overview: SessionOverview
    rows: slice
    slack: float = 0.0
    is_low: bool = False
    """Whether to use the lower edge of the histogram bucket for latencies that are known only as a bucket."""

    @property
    def stopped(self) -> npt.NDArray[np.bool_]:
        """Whether the engine was paused or suspended for a part of each second, shape (n,)."""
        begins = self.overview.time_ns[self.rows]
        running: npt.NDArray[np.int64] = self.overview.stops.running_between(begins, begins + SECOND_NS)
        return running < SECOND_NS


def _condition(node: ast.expr, context: _EvaluationContext) -> FloatArray:
    match node:
        case ast.BoolOp(op=op, values=values):
            parts = np.stack([_condition(value, context) for value in values])
            decides = 0.0 if isinstance(op, ast.And) else 1.0
            unknown = np.where(np.isnan(parts).any(axis=0), np.nan, 1.0 - decides)
            return np.where((parts == decides).any(axis=0), decides, unknown)
        case ast.UnaryOp(operand=operand):
            return 1.0 - _condition(operand, replace(context, slack=-context.slack))
        case ast.Compare(left=left, ops=ops, comparators=others):
            numbers = [_number(each, context) for each in (left, *others)]
            pairs = zip(ops, numbers, numbers[1:], strict=False)
            parts = np.stack([_compared(op, one, other, context.slack) for op, one, other in pairs])
            result: FloatArray = np.where(np.isnan(parts).any(axis=0), np.nan, parts.min(axis=0))
            return result
    raise AssertionError(f"{ast.dump(node)} was checked to be a condition")


def _compared(op: ast.cmpop, one: FloatArray, other: FloatArray, slack: float) -> FloatArray:
    with np.errstate(invalid="ignore"):
        margin = slack * np.where(np.isfinite(other), np.abs(other), 0.0)
        match op:
            case ast.Gt():
                is_true = one > other - margin
            case ast.GtE():
                is_true = one >= other - margin
            case ast.Lt():
                is_true = one < other + margin
            case ast.LtE():
                is_true = one <= other + margin
            case ast.Eq():
                is_true = one == other
            case _:
                is_true = one != other
    return np.where(np.isnan(one) | np.isnan(other), np.nan, is_true)


def _number(node: ast.expr, context: _EvaluationContext) -> FloatArray:
    match node:
        case ast.Constant():
            return np.full(context.rows.stop - context.rows.start, _literal(node))
        case ast.Name(id=name):
            return _figure(SECOND_FIGURES[name], context)
        case ast.UnaryOp(op=op, operand=operand):
            number = _number(operand, context)
            return -number if isinstance(op, ast.USub) else number
        case ast.BinOp(left=left, op=op, right=right):
            with np.errstate(all="ignore"):
                result: FloatArray = _ARITHMETIC[type(op)](_number(left, context), _number(right, context))
            is_by_zero = isinstance(op, ast.Div) & (_number(right, context) == 0)
            return np.where(is_by_zero, np.nan, result)
        case ast.Call(func=ast.Name(id=name), args=args):
            if name in _WINDOW_FUNCTIONS:
                return _over_time(name, args[0], _literal(args[1]), context)
            numbers = np.stack([_number(each, context) for each in args])
            if name == "abs":
                numbers = np.abs(numbers)
            reduced: FloatArray = numbers.min(axis=0) if name == "min" else numbers.max(axis=0)
            return reduced
    raise AssertionError(f"{ast.dump(node)} was checked to be a number")


def _figure(figure: SecondFigure, context: _EvaluationContext) -> FloatArray:
    read = figure.read_low if context.is_low and figure.read_low is not None else figure.read
    values = read(context.overview, context.rows)
    has_stops = len(context.overview.stops) > 0  # rare, and `stopped` takes longer than all the rest
    return np.where(context.stopped, np.nan, values) if has_stops and not figure.is_known_while_stopped else values


def _over_time(name: str, node: ast.expr, seconds: float, context: _EvaluationContext) -> FloatArray:
    """Return the mean or sum of `node` over the last `seconds` seconds, shape (n,).

    Only seconds of the same engine start in which the value is known count. A mean is NaN until the engine start is
    `seconds` old. Both are NaN in a second in which the engine was paused and the value is unknown.
    """
    times, epochs = context.overview.time_ns, context.overview.epoch[: context.rows.stop]
    starts = np.concatenate(([0], np.flatnonzero(epochs[1:] != epochs[:-1]) + 1))
    begins_ns = times[context.rows] - round(seconds * 1e9) + SECOND_NS
    first = int(np.searchsorted(times, begins_ns[0])) if begins_ns.size else context.rows.start
    values = _number(node, replace(context, rows=slice(first, context.rows.stop)))
    results = np.full(context.rows.stop - context.rows.start, np.nan)
    for index, begin_ns in enumerate(begins_ns.tolist()):
        row = context.rows.start + index
        start = int(starts[np.searchsorted(starts, row, "right") - 1])
        since = max(int(np.searchsorted(times, begin_ns)), start)
        inside = values[since - first : row - first + 1]
        known = inside[~np.isnan(inside)]
        is_whole = name == "sum" or times[start] <= begin_ns
        if known.size and is_whole:
            results[index] = known.mean() if name == "mean" else known.sum()
    if not len(context.overview.stops):
        return results
    is_now_unknown = np.isnan(values[context.rows.start - first :])
    return np.where(context.stopped & is_now_unknown, np.nan, results)
