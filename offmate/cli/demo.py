"""The demo: fine-tunes a Llama-architecture model within a small budget and compares it with plain PyTorch."""

from __future__ import annotations

import contextlib
import gc
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import offmate

from ..machines.devices import accelerator, device_kind
from ..machines.reference import ReferenceMeter
from ..progress import shown_by, working
from ..sizes import format_bytes, format_least_bytes
from .summary import print_blocks

SEED = 0
BATCH = 4
TOKENS = 256
LEARNING_RATE = 3e-4
BUDGET_PERCENT = 15
LOSS_TOLERANCE = 1e-3  # if the host updates parameters that the device would have rounded differently
_MIB = 1 << 20

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class DemoRun:
    """The results of one training run.

    Parameters
    ----------
    losses: one per step.
    step_s: median seconds per step; the first step, which warms up, is left out if there are others.
    parameters: the final values by name, on the host.
    """

    losses: tuple[float, ...]
    step_s: float
    parameters: Batch


@dataclass(frozen=True)
class Comparison:
    """An offmate run compared with plain PyTorch on the same data.

    Parameters
    ----------
    ours, reference: the two runs.
    plan: the plan that ours followed.
    budget_bytes: the device budget.
    peak_bytes: the most bytes on the device during ours; on an accelerator, the most that the allocator reserved.
    reference_peak_bytes: the most bytes that plain PyTorch needs for one step.
    exact: whether host and device round identically, so that it cannot matter which of them updates a parameter.
    """

    ours: DemoRun
    reference: DemoRun
    plan: Any
    budget_bytes: int
    peak_bytes: int
    reference_peak_bytes: int
    exact: bool = True

    @property
    def identical(self) -> bool:
        """Whether every loss equals plain PyTorch's bit for bit."""
        return self.ours.losses == self.reference.losses

    @property
    def parameters_identical(self) -> bool:
        """Whether every final parameter equals plain PyTorch's bit for bit."""
        theirs = self.reference.parameters
        return self.ours.parameters.keys() == theirs.keys() and all(
            torch.equal(value, theirs[name]) for name, value in self.ours.parameters.items()
        )

    @property
    def loss_distance(self) -> float:
        """The largest relative difference between a loss and plain PyTorch's."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.ours.losses, self.reference.losses))

    @property
    def holds(self) -> bool:
        """Whether offmate kept its promise: the same numbers, within the budget."""
        same = self.identical and self.parameters_identical
        if not self.exact:
            same = same or self.loss_distance <= LOSS_TOLERANCE
        return same and self.peak_bytes <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data: bytes, seconds, losses."""
        return {
            "losses": self.ours.losses,
            "reference_losses": self.reference.losses,
            "identical": self.identical,
            "parameters_identical": self.parameters_identical,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "predicted_peak_bytes": self.plan.predicted_peak_bytes,
            "reference_peak_bytes": self.reference_peak_bytes,
            "least_budget_bytes": self.plan.least_budget_bytes,
            "host_bytes": self.plan.host_bytes,
            "step_s": self.ours.step_s,
            "predicted_step_s": self.plan.predicted_step_s,
            "reference_step_s": self.reference.step_s,
            "plan_s": self.plan.plan_s,
            "from_cache": self.plan.from_cache,
        }


def demo_model() -> Any:
    """Build a seeded byte-level `LlamaForCausalLM`: 23.9 M float32 parameters, grouped heads, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config).train()


def demo_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Build the optimizer that both runs use."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def demo_batches(n_batches: int) -> list[Batch]:
    """Draw seeded windows of Python's help text, as bytes: `input_ids` and `labels` of shape (BATCH, TOKENS)."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(SEED)
    batches = []
    for _ in range(n_batches):
        starts = torch.randint(len(tokens) - TOKENS, (BATCH, 1), generator=generator)
        input_ids = tokens[starts + torch.arange(TOKENS)]
        batches.append({"input_ids": input_ids, "labels": input_ids.clone()})
    return batches


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Run one iteration of the usual loop and return the loss."""
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def reference_peak_bytes(device: str) -> int:
    """Measure the most bytes that plain PyTorch has on the device during one step, optimizer states included.

    On an accelerator, these are the bytes that the allocator reserves, because a budget counts those.
    """
    kind = device_kind(device)
    where = accelerator(kind)
    model = demo_model().to(where or "cpu")
    optimizer = demo_optimizer(model)
    batch = _to(demo_batches(1)[0], where)
    # The first step creates the optimizer's states; every later one starts with them.
    train_step(model, optimizer, batch)
    if where is not None:
        _let_go(where)
        train_step(model, optimizer, batch)
        return torch.accelerator.max_memory_reserved(where)
    with ReferenceMeter(model, optimizer) as meter:
        train_step(model, optimizer, batch)
    return meter.peak_bytes


def _let_go(where: torch.device) -> None:
    """Release the allocator's unused memory, lift an earlier cap, and restart the peak count."""
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(where)
    module: Any = torch.get_device_module(where)
    module.set_per_process_memory_fraction(1.0, where)


def run_demo(budget_bytes: int | None, n_steps: int, device: str, console: Console) -> Comparison:
    """Plan, train within the budget, train with plain PyTorch on the same data, and print the results.

    Parameters
    ----------
    budget_bytes: the device budget; None takes BUDGET_PERCENT of what plain PyTorch needs, in whole MiB.
    n_steps: training steps of each run, at least 1.
    device: "emulated", "cuda" or "cuda:1".
    console: where to print.

    Raises: OffmateError if the device does not exist or no plan keeps the budget.
    """
    device = device_kind(device)
    batches = demo_batches(n_steps)
    console.print("Measuring how much memory plain PyTorch needs ...")
    with working("training one step"):
        reference_bytes = reference_peak_bytes(device)
    if budget_bytes is None:
        budget_bytes = reference_bytes * BUDGET_PERCENT // 100 // _MIB * _MIB
    console.print(_headline(n_steps, device, budget_bytes, reference_bytes))

    plan, ours, peak_bytes = _run_offmate(budget_bytes, batches, device, console)
    reference = _run_reference(batches, device, console)
    exact = accelerator(device) is None
    comparison = Comparison(ours, reference, plan, budget_bytes, peak_bytes, reference_bytes, exact)
    console.print(comparison_table(comparison))
    console.print(_verdict(comparison))
    return comparison


def comparison_table(comparison: Comparison) -> Table:
    """Tabulate memory, time and losses of both runs, with the plan's predictions."""
    ours, reference, plan = comparison.ours, comparison.reference, comparison.plan
    table = Table(
        title="offmate and plain PyTorch on the same data", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False
    )
    table.add_column("")
    for header in ("plain PyTorch", "offmate", "predicted"):
        table.add_column(header, justify="right", overflow="fold")
    share = 100 * comparison.peak_bytes / comparison.reference_peak_bytes
    table.add_row(
        "GPU memory, peak",
        format_bytes(comparison.reference_peak_bytes),
        f"{format_bytes(comparison.peak_bytes)} ({share:.1f} %)",
        format_bytes(plan.predicted_peak_bytes),
    )
    table.add_row(
        "seconds per step",
        f"{reference.step_s:.2f}",
        f"{ours.step_s:.2f} ({ours.step_s / reference.step_s:.2f} ×)",
        f"{plan.predicted_step_s:.2f}",
    )
    table.add_row("first loss", f"{reference.losses[0]:.6f}", f"{ours.losses[0]:.6f}", "")
    table.add_row("last loss", f"{reference.losses[-1]:.6f}", f"{ours.losses[-1]:.6f}", "")
    return table


def _run_offmate(budget_bytes: int, batches: list[Batch], device: str, console: Console) -> tuple[Any, DemoRun, int]:
    """Return the plan, the run that followed it, and the run's peak in bytes."""
    where = accelerator(device)
    if where is not None:
        _let_go(where)
    model = demo_model()
    optimizer = demo_optimizer(model)
    plan = offmate.plan(model, budget_bytes, optimizer=optimizer, device=device, example_inputs=batches[0])
    print_blocks(console, plan, every_block=True)
    console.print(_plan_line(plan))
    model = offmate.compile(model, budget_bytes, optimizer=optimizer, device=device, plan=plan)
    run = _train("offmate", model, optimizer, batches, console, finish=model.offmate.sync)
    return plan, run, model.offmate.peak_bytes if where is None else torch.accelerator.max_memory_reserved(where)


def _run_reference(batches: list[Batch], device: str, console: Console) -> DemoRun:
    where = accelerator(device)
    if where is not None:
        _let_go(where)
    model = demo_model().to(where or "cpu")
    on_device = [_to(batch, where) for batch in batches]
    return _train("plain PyTorch", model, demo_optimizer(model), on_device, console)


def _train(
    title: str,
    model: Any,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    console: Console,
    finish: Callable[[], object] = lambda: None,
) -> DemoRun:
    """Train on every batch once; `finish` waits for pending updates before the parameters are read."""
    losses, seconds = [], []
    with _progress(title, len(batches), console) as report:
        for batch in batches:
            start_s = time.perf_counter()
            losses.append(train_step(model, optimizer, batch))
            seconds.append(time.perf_counter() - start_s)
            report(losses[-1])
        finish()
    parameters = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    return DemoRun(tuple(losses), statistics.median(seconds[1:] or seconds), parameters)


@contextlib.contextmanager
def _progress(title: str, n_steps: int, console: Console) -> Iterator[Callable[[float], None]]:
    """Yield a function to call with the loss after each step: it moves a bar on a terminal, else prints ~10 lines."""
    if not console.is_terminal:
        yield _line_printer(title, n_steps, console)
        return
    silent = shown_by(lambda phase, share: None)
    columns = (
        TextColumn("{task.description:<13}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with silent, Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=n_steps, loss="-")
        yield lambda loss: progress.update(task, advance=1, loss=f"{loss:.4f}")


def _line_printer(title: str, n_steps: int, console: Console) -> Callable[[float], None]:
    every = -(-n_steps // 10)
    done = 0

    def report(loss: float) -> None:
        nonlocal done
        done += 1
        if done % every == 0 or done == n_steps:
            console.print(f"{title}: step {done}/{n_steps}, loss {loss:.4f}")

    return report


def _headline(n_steps: int, device: str, budget_bytes: int, reference_bytes: int) -> str:
    return (
        f"Llama architecture, 23.9 M parameters, AdamW, {BATCH} × {TOKENS} bytes of English, {n_steps} steps on the "
        f"{device} device.\nPlain PyTorch needs {format_bytes(reference_bytes)}; the budget is "
        f"{format_bytes(budget_bytes)} ({100 * budget_bytes / reference_bytes:.1f} %). Planning ..."
    )


def _plan_line(plan: Any) -> str:
    source, aged = ("read from the cache", " (timed when it was made)") if plan.from_cache else ("made", "")
    return (
        f"Plan {source} in {plan.plan_s:.1f} s. Predicted: {format_bytes(plan.predicted_peak_bytes)} of GPU memory at "
        f"most, {format_bytes(plan.host_bytes)} of RAM, {plan.predicted_step_s:.2f} s per step{aged}. The "
        f"least budget that works is {format_least_bytes(plan.least_budget_bytes)}."
    )


def _verdict(comparison: Comparison) -> str:
    losses = "identical bit for bit" if comparison.identical else "[red]DIFFERENT[/red]"
    parameters = "identical bit for bit" if comparison.parameters_identical else "[red]DIFFERENT[/red]"
    if not comparison.exact and not comparison.identical and comparison.loss_distance <= LOSS_TOLERANCE:
        losses = f"within {comparison.loss_distance:.0e} of plain PyTorch's"
    if not comparison.exact and not comparison.parameters_identical:
        parameters = "some were updated on the CPU, whose kernels round differently"
    kept = "kept" if comparison.peak_bytes <= comparison.budget_bytes else "[red]EXCEEDED[/red]"
    return f"Losses: {losses}. Final parameters: {parameters}. Budget: {kept}."


def _to(batch: Batch, where: torch.device | None) -> Batch:
    return {name: tensor.to(where or "cpu") for name, tensor in batch.items()}
