"""`offmate plan MODEL`: whether a model fits, how fast it is and what happens to each block, without weights or GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .arguments import Help, add_machine, count, count_or_auto, micro_batches, output_file, positive, size, sweep
from .drives import planned_storage
from .training import Training, check_packages, parse_adapter

if TYPE_CHECKING:
    from ..machines.hardware import Hardware
    from ..plans.plan import Plan

_BATCH = 4
_ORDERS = ("auto", "by-batch", "by-block")
_DOES_NOT_FIT = 1
_EXAMPLES = """examples:
  offmate plan llama3-8b --lora 16 --card rtx3060 --ram 32GiB
  offmate plan mistral-7b --gpu-budget 22GiB --card rtx4090 --what-if
  offmate plan llama3-8b --dtype bf16-master --max-grad-norm 1 --accumulation 8
  offmate plan llama2-7b --dtype bf16-master --accumulation auto --ram 128GiB
  offmate plan ./my-model --gpu-budget 10GiB --json plan.json
  offmate show plan.json --html plan.html
  offmate plan llama3-8b --sweep 6GiB:24GiB:2GiB --card rtx3090
exit status: 0 it fits, 1 it does not fit or failed, 2 the arguments cannot work
"""


def add_parser(verbs: Any) -> None:
    """Add the command `plan` to the command line's subparsers; its `run` is `run`."""
    parser = verbs.add_parser(
        "plan",
        help="plan a model's training step for a GPU, without the weights and without the GPU",
        description="Plan one training step of a language model within a GPU memory budget: whether it fits, the step "
        "time, the memory and what limits the step; or, if it does not fit, what does. Nothing is trained, and no "
        "weights are needed.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("model", metavar="MODEL", help="a built-in shape (llama2-7b, gpt2, ...), a folder, or a Hub id")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--gpu-budget",
        type=size,
        metavar="SIZE",
        help="GPU memory, such as 11GiB (default: that of the GPU, less 1/16)",
    )
    budget.add_argument(
        "--sweep", type=sweep, metavar="LOW:HIGH:STEP", help="plan for several budgets and show the curve"
    )
    add_machine(parser)
    parser.add_argument(
        "--batch",
        type=count_or_auto,
        default=_BATCH,
        metavar="N|auto",
        help="sequences per micro-batch; auto: as many as train most tokens/s (default: %(default)s)",
    )
    parser.add_argument(
        "--seq-len", type=count, default=512, metavar="N", help="tokens per sequence (default: %(default)s)"
    )
    _add_training(parser)
    parser.add_argument("--what-if", action="store_true", help="also say what more memory or a faster link would gain")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the plan (or the curve) to FILE")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what training will do."""
    parser.add_argument(
        "--lora",
        metavar="RANK",
        help="train a low-rank adapter on all linear layers, with the model frozen: 16, or as in `offmate finetune` "
        "r=16,alpha=32,targets=q_proj+v_proj",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        choices=("adamw", "adam", "sgd", "adafactor", "none"),
        help="none: your own code updates (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="bf16",
        choices=("bf16", "bf16-master", "fp32", "fp16"),
        help="dtype of parameters, gradients and states; bf16-master: bf16 with float32 copies that the optimizer "
        "updates, and float32 states (default: %(default)s)",
    )
    parser.add_argument(
        "--autocast",
        nargs="?",
        const="bf16",
        choices=("bf16", "fp16"),
        help="plan a forward under torch.autocast to this dtype (%(const)s if none is named), with --dtype fp32",
    )
    parser.add_argument(
        "--max-grad-norm",
        type=positive,
        metavar="NORM",
        help="clip gradients to this norm, as Trainer does by default with 1.0; updates then wait for all gradients",
    )
    parser.add_argument(
        "--grad-scaler",
        action="store_true",
        help="scale losses with a GradScaler, as Trainer does with fp16=True; updates then wait for all gradients",
    )
    parser.add_argument(
        "--accumulation",
        type=micro_batches,
        default=1,
        metavar="N|auto",
        help="micro-batches of --batch sequences per step; auto: the fewest after which one more adds less than 1 %% "
        "of tokens/s, up to 64, and the table of those that were tried (default: %(default)s)",
    )
    parser.add_argument(
        "--order",
        choices=_ORDERS,
        default=_ORDERS[0],
        help="how the micro-batches of a step run: one after the other (by-batch), each block for all of them in turn "
        "(by-block), or what is faster (default: %(default)s)",
    )
    parser.add_argument(
        "--micro-batches-per-pass",
        type=count,
        metavar="K",
        help="how many micro-batches each block runs for in turn before the next block; the last pass of a step runs "
        "what is left (default: all with --order by-block, the fastest number with auto)",
    )
    parser.add_argument(
        "--speculate",
        action="store_true",
        help="let the CPU update before it is known whether gradients are clipped or a step is skipped, and undo what "
        "turns out to be wrong; the predicted step is one that clips nothing, and a row says at which share of "
        "clipped steps both ways are equally fast",
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan as the arguments say and print it.

    Returns: the exit status. Raises: OffmateError for everything that cannot work, except a budget that is too small.
    """
    check_packages(lora=arguments.lora is not None)
    from ..machines.hardware import load

    _check(arguments)
    machine = load(arguments.hardware)
    arguments.storage = planned_storage(arguments.storage, machine, arguments.storage_parameters)
    training = Training(
        arguments.model,
        arguments.dtype,
        arguments.optimizer,
        _BATCH if arguments.batch == "auto" else arguments.batch,
        arguments.seq_len,
        parse_adapter(arguments.lora),
        arguments.autocast,
        arguments.max_grad_norm,
        arguments.grad_scaler,
        1 if arguments.accumulation == "auto" else arguments.accumulation,
        arguments.speculate,
    )
    if arguments.sweep:
        return _sweep(arguments, training, machine)
    return _plan(arguments, training, machine)


def _check(arguments: argparse.Namespace) -> None:
    """Raise ArgumentValueError for options that do not go together."""
    from ..errors import ArgumentValueError

    if arguments.lora is not None and arguments.dtype == "bf16-master":
        raise ArgumentValueError(
            "--dtype bf16-master keeps float32 copies of what is trained, and an adapter of --lora is float32 already; "
            "leave --dtype out"
        )
    if arguments.autocast and arguments.dtype != "fp32":
        raise ArgumentValueError(
            f"--autocast casts float32 weights, and --dtype is {arguments.dtype}; for mixed precision say --dtype fp32 "
            "--autocast, for weights in lower precision leave --autocast out"
        )
    if arguments.grad_scaler and arguments.dtype == "fp16" and arguments.lora is None:
        raise ArgumentValueError(
            "--grad-scaler cannot unscale gradients of float16 weights, which PyTorch refuses; say --dtype fp32 "
            "--autocast fp16 --grad-scaler, or leave --grad-scaler out"
        )

    several = arguments.accumulation != 1
    waits = arguments.max_grad_norm is not None or arguments.grad_scaler or several
    if arguments.speculate and not waits:
        raise ArgumentValueError(
            "--speculate is for updates that wait, but these wait for nothing; add --max-grad-norm, --grad-scaler or "
            "--accumulation, or leave it out"
        )
    per_pass, order = arguments.micro_batches_per_pass, arguments.order
    if per_pass is not None and not several:
        raise ArgumentValueError(
            f"--micro-batches-per-pass {per_pass} is for several micro-batches per step; add --accumulation, or leave "
            "it out"
        )
    if per_pass is not None and order == ("by-block" if per_pass == 1 else "by-batch"):
        raise ArgumentValueError(
            f"--micro-batches-per-pass {per_pass} is {'by-batch' if per_pass == 1 else 'by-block'}, and --order is "
            f"{order}; leave --order out"
        )
    for option in ("batch", "accumulation") if arguments.sweep else ():
        if getattr(arguments, option) == "auto":
            raise ArgumentValueError(
                f"--{option} auto has another answer for each budget, so it cannot be planned with --sweep; name a "
                "number, or one --gpu-budget"
            )
    given = {
        "--max-grad-norm": arguments.max_grad_norm is not None,
        "--grad-scaler": arguments.grad_scaler,
        "--accumulation": several,
        "--dtype bf16-master": arguments.dtype == "bf16-master",
    }
    needs = [option for option, is_given in given.items() if is_given]
    if arguments.optimizer == "none" and needs:
        raise ArgumentValueError(
            f"{' and '.join(needs)} cannot be planned with --optimizer none, since your own code then updates; name an "
            "optimizer, or leave the option out"
        )


def _plan(arguments: argparse.Namespace, training: Training, machine: Hardware) -> int:
    from ..errors import InfeasibleBudget
    from .advice import print_refusal
    from .screen import console
    from .summary import print_plan

    screen = console(arguments.quiet)
    budget_bytes = arguments.gpu_budget or machine.default_budget_bytes
    try:
        plan, headline = _make(arguments, training, machine, budget_bytes)
    except InfeasibleBudget as error:
        if not arguments.quiet:
            training = replace(training, batch=1) if arguments.batch == "auto" else training
            print_refusal(screen, error, training, arguments, machine, budget_bytes)
        return _DOES_NOT_FIT
    if arguments.json is not None:
        plan.save(arguments.json)
    print_plan(screen, plan, offers=arguments.what_if, headline=headline, drives=bool(arguments.storage))
    return 0


def _make(arguments: argparse.Namespace, training: Training, machine: Hardware, budget_bytes: int) -> tuple[Plan, str]:
    """Return the plan, and a line that names the model, batch and machine."""
    from ..progress import working
    from ..sizes import format_bytes

    with working("loading PyTorch"):
        import offmate

        from ..planning.orders import in_faster_order
        from ..plans.break_even import break_even
        from ..plans.orders import way
        from .shapes import autocast
    with working("building the model"):
        model, batch = training.built()
    with autocast(training.autocast):
        optimizer, auto = training.optimizer_of(model), arguments.accumulation == "auto"
        sized: dict[str, Any] = {"batch_size": "auto"} if arguments.batch == "auto" else {}

        def planned(config: offmate.Config, **chosen: Any) -> Plan:
            return offmate.plan(
                model,
                budget_bytes,
                example_inputs=batch,
                optimizer=optimizer,
                cpu_budget=arguments.cpu_budget,
                hardware=arguments.hardware,
                storage=arguments.storage,
                config=config,
                **training.arguments() | sized | chosen,
            )

        order = arguments.order.replace("-", " ")
        config = offmate.Config(
            accumulation_order=order,
            micro_batches_per_pass=arguments.micro_batches_per_pass,
            speculate=training.speculate,
        )
        if auto or sized:
            plan = planned(config, **{"accumulation_steps": "auto"} if auto else {})
            training = replace(training, accumulation=plan.accumulation_steps, batch=plan.batch_size or training.batch)
            sized |= {"batch_size": plan.batch_size} if sized else {}
        if not auto and (not sized or training.accumulation > 1):
            plan, _ = in_faster_order(planned, config, training.accumulation)
        if training.speculate and not arguments.sweep:
            waits, _ = in_faster_order(planned, replace(config, speculate=False), training.accumulation)
            compared = break_even(waits.schedule, plan.schedule)
            if not compared.share:  # the plan that waits is taken, and described
                training, plan = replace(training, speculate=False), waits
            plan = replace(plan, break_even=compared)
    beyond = machine.device_memory_bytes < budget_bytes
    warning = f", which has only {format_bytes(machine.device_memory_bytes)}" if beyond else ""
    slow = machine.rate_words(training.matrix_dtype)
    about = training.about(plan.about)
    if plan.schedule.per_step > 1:
        words = way(plan.micro_batches_per_pass, plan.accumulation_steps)
        about = replace(about, batch=f"{about.batch}, {words}")
    said = f"{replace(about, made='').words()}{warning}\n"
    return replace(plan, about=about), f"{said}{slow}\n" if slow else said


def _sweep(arguments: argparse.Namespace, training: Training, machine: Hardware) -> int:
    from ..plans.sweep import sweep as solve_each
    from ..progress import planning_progress
    from .screen import console
    from .summary import curve

    plan, headline = _make(arguments, training, machine, max(*arguments.sweep, machine.device_memory_bytes))
    points = []
    with planning_progress() as say:
        for point in solve_each(plan, arguments.sweep):
            points.append(point)
            say("solving for each budget", len(points) / len(arguments.sweep))
    if arguments.json is not None:
        rows = [asdict(point) for point in points]
        arguments.json.write_text(json.dumps({"endless_s": plan.endless_s, "points": rows}, indent=2) + "\n")
    if not arguments.quiet:
        screen = console()
        screen.print(headline, markup=False)
        screen.print(curve(points, plan.endless_s, screen.width))
    return 0 if any(point.fits for point in points) else _DOES_NOT_FIT
