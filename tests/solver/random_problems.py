"""Small random problems with consistent numbers, as a capture of a real model would give them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

from offmate.solver.problem import Block, Group, Option, Output, Problem, Rates, Shared, TensorSize, Value


def random_problem(
    rng: random.Random,
    *,
    n_blocks: int = 3,
    tensors: int = 2,
    update: Literal["planned", "external"] = "planned",
    tied: bool = False,
) -> Problem:
    """A chain of blocks with an embedding, a loss, an attention mask and budgets that hold everything.

    Parameters
    ----------
    rng: source of every number.
    n_blocks: L, at least 2.
    tensors: tensors per block group.
    update: who updates the parameters.
    tied: the embedding is read by the last block too.

    Returns: a problem that is feasible with everything on the device (external: all updates on the host).
    """
    n = n_blocks
    values = _values(rng, n)
    outputs = (Output("loss", 4, n - 1, 4), *_side_outputs(rng, n))
    groups = _groups(rng, n, tensors, update, tied)
    shared = (
        Shared("mask", _bytes(rng, 1, 8), 2 * n - 1),
        Shared("batch", _bytes(rng, 1, 4), rng.randrange(n)),
    )
    blocks = tuple(_block(rng, i, n, values, outputs, groups) for i in range(n))
    shared_bytes = sum(s.bytes for s in shared)
    rate = rng.choice([20_000.0, 100_000.0, 400_000.0])
    return Problem(
        blocks=blocks,
        groups=groups,
        values=values,
        shared=shared,
        outputs=outputs,
        rates=Rates(rate, rate * rng.choice([0.8, 1.0]), rate * rng.choice([1.2, 2.0]), rng.choice([0.0, 1e-4])),
        device_budget_bytes=1_000_000,
        host_budget_bytes=1_000_000,
        update=update,
        user_bytes=sum(o.grad_bytes for o in outputs) + rng.choice([0, 256]),
        start_s=rng.choice([0.0, 1e-3]),
        start_peak_bytes=shared_bytes + rng.choice([0, 512]),
        turn_around_steps=rng.choice([2, 3, 4]),
    )


def limited(problem: Problem, rng: random.Random) -> Problem:
    """The same on a machine whose host memory cannot serve both links and the CPU at once."""
    rates = problem.rates
    worker = rng.choice([0.5, 1.0, 2.0]) * rates.in_bytes_per_s
    most = rates.in_bytes_per_s + rates.out_bytes_per_s + worker
    return replace(
        problem,
        rates=replace(rates, host_memory_bytes_per_s=rng.uniform(0.3, 0.9) * most, worker_bytes_per_s=worker),
    )


def in_rows(problem: Problem) -> Problem:
    """The problem with every state that can be cut alike in two, three or four pieces of a row each."""

    def cut(tensor: TensorSize) -> TensorSize:
        return replace(tensor, rows=next(n for n in (4, 3, 2, 1) if tensor.state_bytes % n == 0))

    groups = (replace(group, tensors=tuple(map(cut, group.tensors))) for group in problem.groups)
    return replace(problem, groups=tuple(groups))


def gated(problem: Problem, rng: random.Random, micro_batches: int) -> Problem:
    """The problem with a gate and that many micro-batches per update, the seconds of additions made up."""
    groups = tuple(
        replace(g, cpu_add_s=g.cpu_update_s * rng.choice([0.0, 0.3]), device_add_s=g.device_update_s / 3)
        for g in problem.groups
    )
    return replace(
        problem,
        groups=groups,
        gate=True,
        gate_s=rng.choice([0.0, 1e-3]),
        micro_batches=micro_batches,
        turn_around_steps=rng.choice([3, 4, 6]),
    )


def _bytes(rng: random.Random, low: int, high: int) -> int:
    """A multiple of 64 bytes between 64 * low and 64 * high."""
    return 64 * rng.randint(low, high)


def _values(rng: random.Random, n: int) -> tuple[Value, ...]:
    chain = []
    size = _bytes(rng, 2, 12)
    for i in range(n - 1):
        reader = 2 * n - 1 - (i + 1)
        chain.append(Value(f"h{i}", size, i, (i + 1, reader), size, (reader,)))
    if n >= 3 and rng.random() < 0.4:  # as an encoder's output: read by several later blocks
        readers = range(1, n)
        backwards = tuple(sorted(2 * n - 1 - b for b in readers))
        chain.append(Value("memory", size, 0, tuple(readers) + backwards, size, backwards))
    if rng.random() < 0.3:  # as a mixture's expert indices: no gradient
        chain.append(Value("indices", 64, 0, (1,)))
    return tuple(chain)


def _side_outputs(rng: random.Random, n: int) -> tuple[Output, ...]:
    if rng.random() < 0.6:
        return ()
    size = _bytes(rng, 1, 6)
    return (Output("hidden", size, rng.randrange(n), rng.choice([0, size])),)


def _groups(rng: random.Random, n: int, tensors: int, update: str, tied: bool) -> tuple[Group, ...]:
    trained_late = (n - 1, n) if tied else ()
    embedding = _group(rng, "embedding", 1, (0, *trained_late), (n,) * tied + (2 * n - 1,), update)
    frozen = {i for i in range(n) if rng.random() < 0.2}
    rest = []
    for i in range(n):
        backward = 2 * n - 1 - i
        rest.append(_group(rng, f"block{i}", tensors, (i, backward), () if i in frozen else (backward,), update))
    return (embedding, *rest)


def _group(
    rng: random.Random, name: str, tensors: int, uses: tuple[int, ...], grads: tuple[int, ...], update: str
) -> Group:
    planned = bool(grads) and update == "planned"
    sizes = [_bytes(rng, 1, 16) for _ in range(tensors)]
    return Group(
        name,
        tuple(
            TensorSize(f"{name}.w{k}", size, size if grads else 0, 2 * size if planned else 0)
            for k, size in enumerate(sizes)
        ),
        uses,
        grads,
        cpu_update_s=sum(sizes) * rng.choice([1e-6, 4e-6]) if planned else 0.0,
        device_update_s=sum(sizes) * 1e-7 if planned else 0.0,
    )


def _block(
    rng: random.Random,
    i: int,
    n: int,
    values: tuple[Value, ...],
    outputs: tuple[Output, ...],
    groups: tuple[Group, ...],
) -> Block:
    backward = 2 * n - 1 - i
    made = sum(v.bytes for v in values if v.made == i) + sum(o.bytes for o in outputs if o.made == i)
    arrives = sum(v.grad_bytes for v in values if v.made == i) + sum(o.grad_bytes for o in outputs if o.made == i)
    leaves = sum(v.grad_bytes for v in values if v.grad_steps[:1] == (backward,))
    leaves += sum(g.grad_bytes for g in groups if g.grad_steps[:1] == (backward,))
    forward_s, most = rng.choice([1e-3, 4e-3, 9e-3]), _bytes(rng, 4, 40)
    few = 64 * rng.randint(0, most // 256)

    def option(name: str, saved: int, offloaded: int, again: float) -> Option:
        there = max(most, saved + offloaded) if again else saved + offloaded
        return Option(
            name,
            saved,
            offloaded,
            forward_s,
            2 * forward_s + again * forward_s,
            saved + offloaded + made + _bytes(rng, 0, 4),
            there + arrives + leaves + _bytes(rng, 0, 4),
        )

    options = [option("keep", most, 0, 0.0), option("recompute", few, 0, 1.0)]
    if rng.random() < 0.7:
        options.append(option("offload", few, most - few, 0.1))
    return Block(f"block{i}", tuple(options))
