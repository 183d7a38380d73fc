"""A mixed-integer linear program as plain data, and its builder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

Terms = dict[int, float]
"""A linear expression: coefficient by column; the key ONE holds the constant."""

ONE = -1
NEARLY = 1e-7  # tolerance of a row without columns
_BROKEN = 1e-2, 1e-6  # tolerances of a row at a point: absolute, and relative to the sum of its absolute terms


@dataclass(frozen=True)
class Row:
    """Sum of coefficient * column <= bound, or == bound if `equal`."""

    name: str
    columns: tuple[int, ...]
    coefficients: tuple[float, ...]
    bound: float
    equal: bool = False


@dataclass(frozen=True)
class LinearModel:
    """Minimise the sum of costs * columns over columns in [0, upper] under the rows.

    Parameters
    ----------
    names, upper, integer, costs: one entry per column; `upper` may be infinite.
    """

    names: tuple[str, ...]
    upper: tuple[float, ...]
    integer: tuple[bool, ...]
    costs: tuple[float, ...]
    rows: tuple[Row, ...]


def relaxed(model: LinearModel) -> LinearModel:
    """Return the model without its integrality constraints."""
    return replace(model, integer=(False,) * len(model.integer))


def fixed(model: LinearModel, values: Mapping[int, float]) -> tuple[LinearModel, tuple[int, ...]]:
    """Return the model with some columns held at `values`, and the remaining columns, by their index in `model`."""
    kept = tuple(c for c in range(len(model.upper)) if c not in values)
    place = {c: i for i, c in enumerate(kept)}
    rows = []
    for row in model.rows:
        terms = [(place[c], a) for c, a in zip(row.columns, row.coefficients) if c in place]
        moved = sum(a * values[c] for c, a in zip(row.columns, row.coefficients) if c in values)
        columns, coefficients = tuple(c for c, _ in terms), tuple(a for _, a in terms)
        rows.append(replace(row, columns=columns, coefficients=coefficients, bound=row.bound - moved))
    left = LinearModel(
        names=tuple(model.names[c] for c in kept),
        upper=tuple(model.upper[c] for c in kept),
        integer=tuple(model.integer[c] for c in kept),
        costs=tuple(model.costs[c] for c in kept),
        rows=tuple(row for row in rows if row.columns or _broken(row)),
    )
    return left, kept


def _broken(row: Row) -> bool:
    return row.bound < -NEARLY or (row.equal and row.bound > NEARLY)


def holds(model: LinearModel, values: Sequence[float]) -> bool:
    """Return whether a point satisfies every row, within tolerance; a point that is not finite does not."""
    if not all(map(isfinite, values)):
        return False
    fixed, relative = _BROKEN
    for row in model.rows:
        terms = [a * values[c] for c, a in zip(row.columns, row.coefficients)]
        above = sum(terms) - row.bound
        allowed = fixed + relative * (sum(map(abs, terms)) + abs(row.bound))
        if above > allowed or (row.equal and -above > allowed):
            return False
    return True


@dataclass
class Builder:
    """Collects columns and rows; `freeze` gives the model. The only mutable part of a program."""

    names: list[str] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def column(self, name: str, upper: float = 1.0, *, integer: bool = False) -> Terms:
        """Add a column and return it as an expression."""
        self.names.append(name)
        self.upper.append(upper)
        self.integer.append(integer)
        return {len(self.names) - 1: 1.0}

    def at_most_zero(self, name: str, terms: Mapping[int, float], *, equal: bool = False) -> None:
        """State terms <= 0 (or == 0); an inequality without columns adds no row if it holds."""
        kept = {c: a for c, a in terms.items() if c != ONE and a}
        bound = -terms.get(ONE, 0.0)
        if not kept and not equal and bound >= 0:
            return
        self.rows.append(Row(name, tuple(kept), tuple(kept.values()), bound, equal))

    def freeze(self, objective: Mapping[int, float]) -> LinearModel:
        """Return the model that minimises `objective`."""
        costs = tuple(objective.get(c, 0.0) for c in range(len(self.names)))
        return LinearModel(tuple(self.names), tuple(self.upper), tuple(self.integer), costs, tuple(self.rows))


def add(*parts: tuple[float, Mapping[int, float]]) -> Terms:
    """Return the sum of factor * expression."""
    total: Terms = {}
    for factor, terms in parts:
        accumulate(total, factor, terms)
    return total


def accumulate(total: Terms, factor: float, terms: Mapping[int, float]) -> None:
    """Add factor * terms to `total` in place."""
    if factor:
        for column, coefficient in terms.items():
            total[column] = total.get(column, 0.0) + factor * coefficient


def evaluate(terms: Mapping[int, float], values: tuple[float, ...]) -> float:
    """Return the expression's value at the columns' values."""
    return sum(a * (1.0 if c == ONE else values[c]) for c, a in terms.items())


@dataclass(frozen=True)
class Flow:
    """A fraction that moves over some steps of a span, stored as cumulative sums, so that rows stay sparse.

    Parameters
    ----------
    span: all steps of the span in their cyclic order.
    steps: those of them in which it may move.
    sums: by step, the expression of what has moved up to the end of that step; the same object as long as nothing
        moves. prior: the same up to the step's beginning.
    total: the total that moves.
    """

    span: tuple[int, ...]
    steps: tuple[int, ...]
    sums: dict[int, Terms]
    prior: dict[int, Terms]
    total: Terms

    def upto(self, step: int) -> Terms:
        """Return what has moved when `step` ends, a step of the span."""
        return self.sums[step]

    def before(self, step: int) -> Terms:
        """Return what has moved when `step` begins, a step of the span."""
        return self.prior[step]

    def later(self, steps: int) -> Flow:
        """Return the same flow, over the same columns, `steps` later."""
        return Flow(
            tuple(step + steps for step in self.span),
            tuple(step + steps for step in self.steps),
            {step + steps: terms for step, terms in self.sums.items()},
            {step + steps: terms for step, terms in self.prior.items()},
            self.total,
        )

    def plus(self, other: Flow) -> Flow:
        """Return the flow of what moves in either of two, over the span of both."""
        may = {*self.steps, *other.steps}
        sums: dict[int, Terms] = {}
        prior: dict[int, Terms] = {}
        last: Terms = {}
        for step in self.span:
            prior[step] = last
            if step in may:
                last = add((1.0, self.sums[step]), (1.0, other.sums[step]))
            sums[step] = last
        steps = tuple(step for step in self.span if step in may)
        return Flow(self.span, steps, sums, prior, add((1.0, self.total), (1.0, other.total)))

    def each(self) -> Iterable[tuple[int, Terms]]:
        """Yield, for each step in which it may move, the expression of what moves in it."""
        last: Terms = {}
        for step in self.steps:
            yield step, add((1.0, self.sums[step]), (-1.0, last))
            last = self.sums[step]


def flow(builder: Builder, name: str, span: tuple[int, ...], steps: tuple[int, ...], total: Terms) -> Flow:
    """Add a flow of `total` over `span`, moving in `steps` (ascending along the span, not empty)."""
    may = set(steps)
    sums: dict[int, Terms] = {}
    prior: dict[int, Terms] = {}
    last: Terms = {}
    for step in span:
        prior[step] = last
        if step in may:
            now = total if step == steps[-1] else builder.column(f"{name}[{step}]")
            if last:
                builder.at_most_zero(f"{name} rises[{step}]", add((1.0, last), (-1.0, now)))
            last = now
        sums[step] = last
    return Flow(span, steps, sums, prior, total)


def follows(builder: Builder, name: str, later: Flow, earlier: Flow) -> None:
    """State that whatever `later` has moved by the end of a step, `earlier` had moved before that step."""
    for step in later.steps:
        ready = earlier.before(step)
        if ready != later.total:
            builder.at_most_zero(f"{name}[{step}]", add((1.0, later.upto(step)), (-1.0, ready)))
