"""Tiny problems whose best plan is worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from offmate.solver import backends
from offmate.solver.backends import BackendError
from offmate.solver.problem import Block, Group, Option, Problem, ProblemError, Rates, TensorSize, Value
from offmate.solver.solution import Status
from offmate.solver.solve import least_budget, least_host, least_host_within_device, solve

from ..random_problems import random_problem

CLOSE = 3e-4  # relative: the tie-breaking weight on traffic


def option(
    name: str = "keep", saved: int = 0, offloaded: int = 0, forward_s=1.0, backward_s=2.0, peak: int = 0
) -> Option:
    return Option(name, saved, offloaded, forward_s, backward_s, peak, peak)


def problem_of(
    n: int = 1, groups=(), values=(), options=None, budget: int = 10**6, host: int = 10**6, **more
) -> Problem:
    defaults = {
        "shared": (),
        "outputs": (),
        "rates": Rates(100.0, 100.0, 200.0),
        "turn_around_steps": 2,
    }
    blocks = tuple(Block(f"b{i}", tuple(options or [option()])) for i in range(n))
    return Problem(
        blocks=blocks,
        groups=tuple(groups),
        values=tuple(values),
        device_budget_bytes=budget,
        host_budget_bytes=host,
        **(defaults | more),
    )


def trained(name: str, uses, grads, param: int, grad: int = 0, state: int = 0, cpu_s=0.0, device_s=0.0) -> Group:
    return Group(name, (TensorSize(name, param, grad, state),), tuple(uses), tuple(grads), cpu_s, device_s)


BACKENDS = pytest.mark.parametrize("backend", ["highs", "cbc"])


@BACKENDS
def test_when_everything_fits_only_compute_takes_time(backend: str) -> None:
    group = trained("w", (0, 3), (3,), 100, 100, 200, cpu_s=50.0)
    solution = solve(problem_of(2, [group]), backend=backend)
    assert solution.status is Status.OPTIMAL
    assert solution.objective_s == pytest.approx(6.0, rel=CLOSE)
    assert solution.lower_bound_s == pytest.approx(6.0, rel=CLOSE)
    flow = solution.groups["w"]
    assert (flow.cpu_part, flow.grad_out, flow.out, flow.state_out) == (0.0, {}, {}, {})
    assert flow.gaps == () or flow.gaps[0].dropped == pytest.approx(0.0)
    assert solution.memory_bytes == (300, 300, 300, 300, 300, 300)


@BACKENDS
def test_states_that_do_not_fit_are_updated_on_the_host(backend: str) -> None:
    # one block, T = 4: F0 B0 and two turn-around steps. States never fit. The gradient leaves serially in B0 (1 s), the
    # host updates it in step 2 (5 s), the parameters come in in step 3 (1 s).
    group = trained("w", (0, 1), (1,), 100, 100, 1000, cpu_s=5.0)
    solution = solve(problem_of(1, [group], budget=100), gap=0.0, backend=backend)
    assert solution.objective_s == pytest.approx(1 + (2 + 1) + 5 + 1, rel=CLOSE)
    flow = solution.groups["w"]
    assert flow.cpu_part == pytest.approx(1.0)
    assert flow.grad_out == {1: pytest.approx(1.0)}
    assert flow.cpu_update == {2: pytest.approx(1.0)}
    assert flow.cpu_back == {3: pytest.approx(1.0)}
    assert solution.step_s == pytest.approx((1, 3, 5, 1), rel=CLOSE)
    assert solution.host_bytes == 1200


@BACKENDS
def test_a_device_update_takes_the_devices_seconds(backend: str) -> None:
    group = trained("w", (0, 1), (1,), 100, 100, 100, cpu_s=50.0, device_s=0.5)
    solution = solve(problem_of(1, [group]), backend=backend)
    assert solution.objective_s == pytest.approx(3.5, rel=CLOSE)


def test_the_host_updates_a_fraction_if_the_rest_fits() -> None:
    # states of 1000: 750 fit besides 100 of parameters and no gradient after B0: x = 0.25
    group = trained("w", (0, 1), (1,), 100, 0, 1000, cpu_s=4.0)
    solution = solve(problem_of(1, [group], budget=850), gap=0.0)
    flow = solution.groups["w"]
    assert flow.cpu_part == pytest.approx(0.25, abs=1e-4)
    # the update takes a second, the quarter's parameters a quarter of one, each in a step of its own
    assert solution.objective_s == pytest.approx(3 + 1 + 0.25, rel=CLOSE)


@BACKENDS
def test_a_tied_weight_is_whole_at_every_use_and_updated_after_its_last_gradient(backend: str) -> None:
    # three blocks: read in F0, F2, B2; gradients in B2 and B0. Only 5 spare bytes in F1: it leaves between F0 and F2.
    tied = trained("w", (0, 2, 3), (3, 5), 100, 100, 1000, cpu_s=1.0)
    solution = solve(problem_of(3, [tied], budget=10**6), backend=backend)
    assert solution.memory_bytes == (1100, 1100, 1100, 1100, 1200, 1200, 1100, 1100)
    tight = solve(problem_of(3, [tied], budget=200), gap=0.0, backend=backend)
    flow = tight.groups["w"]
    # B0, which does not read it, holds the gradient of 100, and 1100 (1 - x) of what the device updates: x = 10/11
    part = 10 / 11
    assert flow.cpu_part == pytest.approx(part)
    assert set(flow.grad_out) <= {5, 6}
    # compute 9; then out (serial or in step 6), update, and in, each of that part
    assert tight.objective_s == pytest.approx(9 + 3 * part, rel=CLOSE)
    assert [(g.after, g.before) for g in flow.gaps] in ([], [(3, 5)])


@BACKENDS
def test_a_frozen_group_comes_and_goes_at_no_cost_of_its_own(backend: str) -> None:
    # four blocks; a frozen group read by F0 and B0, one by F1 and B1; both at once do not fit where peaks are
    groups = [trained("u", (0, 7), (), 100), trained("v", (3, 4), (), 100)]
    solution = solve(problem_of(4, groups, budget=150), gap=0.0, backend=backend)
    assert solution.objective_s == pytest.approx(12.0, rel=CLOSE)
    assert all(sum(g.back.values()) == pytest.approx(g.dropped) for f in solution.groups.values() for g in f.gaps)
    assert max(solution.memory_bytes) <= 150
    assert solution.host_bytes <= 200
    for budget in (150, 200):  # what stays on the device is in RAM as well
        assert solve(problem_of(4, groups, budget=budget, host=200), backend=backend).status is Status.OPTIMAL
        assert solve(problem_of(4, groups, budget=budget, host=199), backend=backend).status is Status.INFEASIBLE


@BACKENDS
def test_an_external_update_sends_all_gradients_and_fetches_all_parameters(backend: str) -> None:
    # F0 B0 | 2 | 3: the gradient leaves in B0 or step 2, the parameters come in in step 3: 1 s each
    group = trained("w", (0, 1), (1,), 100, 100)
    problem = problem_of(1, [group], update="external")
    solution = solve(problem, gap=0.0, backend=backend)
    flow = solution.groups["w"]
    assert flow.cpu_part == 1.0
    assert sum(flow.grad_out.values()) == pytest.approx(1.0)
    assert set(flow.grad_out) <= {1, 2}
    assert flow.cpu_back == {3: pytest.approx(1.0)}
    assert (flow.cpu_update, flow.state_out, flow.out) == ({}, {}, {})
    assert solution.objective_s == pytest.approx(3 + 1 + 1, rel=CLOSE)
    assert solution.host_bytes == 200


def test_the_host_budget_binds() -> None:
    # a quarter of the states must leave the device, one way or the other, and the host has the parameter
    group = trained("w", (0, 1), (1,), 100, 0, 1000, cpu_s=4.0)
    assert solve(problem_of(1, [group], budget=850, host=349)).status is Status.INFEASIBLE
    solution = solve(problem_of(1, [group], budget=850, host=351))
    assert solution.status is Status.OPTIMAL
    assert solution.host_bytes <= 351


@BACKENDS
def test_options_trade_memory_for_time(backend: str) -> None:
    # three blocks that keep 100 each, all at once while the user's code runs, or nothing for one more second
    ways = [option("keep", 100, peak=50), option("recompute", 0, backward_s=3.0, peak=50)]
    for budget, extra_s in ((300, 0), (200, 1), (100, 2), (50, 3)):
        solution = solve(problem_of(3, options=ways, budget=budget), gap=0.0, backend=backend)
        assert solution.objective_s == pytest.approx(9 + extra_s, rel=CLOSE), budget
        assert max(solution.memory_bytes) <= budget
    assert solve(problem_of(3, options=ways, budget=49), backend=backend).status is Status.INFEASIBLE


@BACKENDS
def test_an_offload_costs_nothing_where_memory_holds_it_a_step_longer(backend: str) -> None:
    # three blocks; what an option offloads costs nothing in later steps, and 1 s each way in its own
    ways = [option("offload", 0, 100), option("recompute", 0, backward_s=9.0)]
    ample = solve(problem_of(3, options=ways), gap=0.0, backend=backend)
    assert ample.options == (0, 0, 1)
    assert ample.objective_s == pytest.approx(9 + 7, rel=CLOSE)
    assert ample.host_bytes == 200
    last = ample.activations[1]  # of a block between whose forward and backward there are two steps
    assert (last.out, last.back) == ({2: pytest.approx(1.0)}, {3: pytest.approx(1.0)})
    full = [replace(way, forward_peak_bytes=100, backward_peak_bytes=100) for way in ways]
    tight = solve(problem_of(3, options=full, budget=100), gap=0.0, backend=backend)
    assert [flow.out for flow in tight.activations] == [{0: pytest.approx(1.0)}, {1: pytest.approx(1.0)}, {}]
    assert [flow.back for flow in tight.activations] == [{5: pytest.approx(1.0)}, {4: pytest.approx(1.0)}, {}]
    assert tight.objective_s == pytest.approx(9 + 7 + 4, rel=CLOSE)


@BACKENDS
def test_what_a_block_offloads_may_take_several_steps(backend: str) -> None:
    # eight blocks; the first one's 300 B leave over the next forwards, 1 s each, and come in during two backwards, 2 s
    first, *rest = problem_of(8).blocks
    blocks = (replace(first, options=(option("offload", 0, 300),)), *rest)
    ample = solve(replace(problem_of(8, budget=300), blocks=blocks), gap=0.0, backend=backend)
    assert ample.objective_s == pytest.approx(24.0, rel=CLOSE)
    assert ample.activations[0].out == {step: pytest.approx(1 / 3) for step in (1, 2, 3)}
    assert max(ample.memory_bytes) == 300
    # a device that is full from the second block on: all of it leaves before that starts
    full = (blocks[0], *(replace(block, options=(option(peak=300),)) for block in rest))
    tight = solve(replace(problem_of(8, budget=300), blocks=full), gap=0.0, backend=backend)
    assert tight.objective_s == pytest.approx(24.0 + 3 + 3, rel=CLOSE)


@BACKENDS
def test_an_interface_value_leaves_between_its_uses(backend: str) -> None:
    # five blocks; h0 is read by F1 and B1 (step 8): gone in steps 2..6 of 1..8
    value = Value("h", 100, 0, (1, 8), 0, ())
    ways = [option(peak=50)]
    solution = solve(problem_of(5, values=[value], options=ways, budget=150), backend=backend)
    assert solution.offloaded_values == frozenset()
    middle = [replace(b, options=(option(peak=100 if i == 3 else 50),)) for i, b in enumerate(problem_of(5).blocks)]
    problem = replace(problem_of(5, values=[value], budget=150), blocks=tuple(middle))
    solution = solve(problem, gap=0.0, backend=backend)
    assert solution.offloaded_values == {"h"}
    assert solution.memory_bytes == (50, 150, 50, 100, 50, 50, 100, 150, 150, 50, 0, 0)
    assert solution.objective_s == pytest.approx(15.0, rel=CLOSE)


def test_shared_cores_add_up() -> None:
    group = trained("w", (0, 1), (1,), 100, 100, 1000, cpu_s=5.0)
    rates = Rates(100.0, 100.0, 100.0, shared_cores=True)
    solution = solve(problem_of(1, [group], budget=100, rates=rates), gap=0.0)
    assert solution.objective_s == pytest.approx(3 + 1 + 5 + 1, rel=CLOSE)


def test_start_and_user_memory_bind() -> None:
    ways = [option(saved=100, peak=100)]
    assert solve(problem_of(1, options=ways, budget=199, user_bytes=100)).status is Status.INFEASIBLE
    assert solve(problem_of(1, options=ways, budget=200, user_bytes=100)).status is Status.OPTIMAL
    assert solve(problem_of(1, options=ways, budget=200, start_peak_bytes=201)).status is Status.INFEASIBLE


@BACKENDS
def test_the_least_budget_by_hand(backend: str) -> None:
    # one group of 100 (p) with its gradient in B0's peak of 150: 250 in step 1, and least in the block called b0
    group = trained("w", (0, 1), (1,), 100, 100, 1000, cpu_s=5.0)
    problem = problem_of(1, [group], options=[Option("keep", 0, 0, 1.0, 2.0, 30, 150)])
    least = least_budget(problem, backend=backend)
    assert (least.step, least.block, least.resource) == (1, "b0", "device")
    assert 250 <= least.bytes <= 512
    assert solve(replace(problem, device_budget_bytes=least.bytes), backend=backend).status is Status.OPTIMAL
    assert solve(replace(problem, device_budget_bytes=249), backend=backend).status is Status.INFEASIBLE


@BACKENDS
def test_the_host_is_named_when_no_device_budget_would_do(backend: str) -> None:
    problem = problem_of(1, [trained("w", (0, 1), (1,), 3000, 3000)], update="external", host=5999)
    least = least_budget(problem, backend=backend)
    assert (least.block, least.resource, least.step) == ("host", "host", None)
    assert least.bytes == least_host(problem, backend=backend) == 6144
    assert solve(problem, backend=backend).status is Status.INFEASIBLE
    assert solve(replace(problem, host_budget_bytes=least.bytes), backend=backend).status is Status.OPTIMAL


@BACKENDS
def test_the_least_host_within_a_device_budget(backend: str) -> None:
    # 50 are the gradient, and what the host does not hold of the state stays: updates are made there
    group = trained("w", (0, 1), (1,), 100, 50, 1000)
    problem = problem_of(1, [group], options=[Option("keep", 0, 0, 1.0, 2.0, 0, 0)])
    device = [least_budget(replace(problem, host_budget_bytes=host), backend=backend).bytes for host in (100, 10_000)]
    assert least_host_within_device(replace(problem, device_budget_bytes=device[0]), backend=backend) == 256
    assert least_host_within_device(replace(problem, device_budget_bytes=49), backend=backend) is None
    tight = replace(problem, device_budget_bytes=device[1])
    least = least_host_within_device(tight, backend=backend)
    assert least is not None and 256 < least <= 10_000
    assert solve(replace(tight, host_budget_bytes=least), backend=backend).status is Status.OPTIMAL
    assert solve(replace(tight, host_budget_bytes=least * 9 // 10), backend=backend).status is Status.INFEASIBLE


def test_the_least_budget_is_found_once_for_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(random.Random(4711))
    found = least_budget(problem)
    monkeypatch.setattr("offmate.solver.solve.search", None)
    assert least_budget(replace(problem, device_budget_bytes=found.bytes)) == found
    with pytest.raises(TypeError):  # another problem
        least_budget(replace(problem, host_budget_bytes=problem.host_budget_bytes // 2))


def test_a_last_block_that_can_only_offload_is_refused() -> None:
    with pytest.raises(ProblemError, match="b1"):
        solve(problem_of(2, options=[option("offload", 0, 100)]))


def test_unknown_backends_are_named() -> None:
    with pytest.raises(BackendError, match="cbc, highs"):
        backends.get("simplex")


@pytest.mark.parametrize("seed", range(12))
def test_backends_agree_and_least_budgets_are_feasible(seed: int) -> None:
    rng = random.Random(seed)
    update = "planned" if seed % 3 else "external"
    problem = random_problem(rng, n_blocks=2 + seed % 3, tied=seed % 2 == 0, update=update)  # type: ignore[arg-type]
    least = least_budget(problem)
    assert least.bytes == pytest.approx(least_budget(problem, backend="cbc").bytes, rel=1e-3, abs=256)
    for factor in (1.0, 1.4):
        tight = replace(problem, device_budget_bytes=int(least.bytes * factor))
        one, two = (solve(tight, gap=1e-6, backend=name) for name in ("highs", "cbc"))
        assert one.status is two.status is Status.OPTIMAL
        assert one.objective_s == pytest.approx(two.objective_s, rel=CLOSE)
        assert max(one.memory_bytes) <= tight.device_budget_bytes
        assert one.lower_bound_s <= one.objective_s
    below = replace(problem, device_budget_bytes=int(least.bytes * 0.999) - 256)
    assert solve(below).status is Status.INFEASIBLE


def test_the_same_problem_has_the_same_answer() -> None:
    problem = random_problem(random.Random(7), n_blocks=4)
    problem = replace(problem, device_budget_bytes=int(1.3 * least_budget(problem).bytes))
    one, two = solve(problem), solve(problem)
    assert replace(one, solve_s=0.0) == replace(two, solve_s=0.0)
