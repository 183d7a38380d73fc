"""A world: a model, its optimizer and random state of its own. Two are built alike, and one of them is compiled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import offmate

from .models import HABITS, KINDS, Batch, Kind

AMPLE_BYTES = HOST_BYTES = 1 << 28
_TIGHT = 1.4  # times the least budget of the largest batch, since what is changed may need more

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.02, fused=True),
    "AdamW plain": lambda params: torch.optim.AdamW(params, lr=0.02, foreach=False, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
}


@dataclass(frozen=True)
class Setup:
    """What a sequence starts from.

    Parameters
    ----------
    kind: of model. habit: of an MLP. optimizer: a name. planned: compiled with `optimizer=`.
    clip: max_grad_norm of a planned update. micro: accumulation_steps. tight: near the least budget.
    """

    kind: str
    habit: str
    optimizer: str
    planned: bool
    clip: float | None
    micro: int
    tight: bool

    @property
    def gated(self) -> bool:
        """Whether planned updates wait for all gradients."""
        return self.planned and (self.clip is not None or self.micro > 1)

    @property
    def ungated(self) -> bool:
        """Whether planned updates happen in the backward."""
        return self.planned and not self.gated


def draw(rng: random.Random) -> Setup:
    """A setup by its weights."""
    kind = rng.choices(list(KINDS), [k.weight for k in KINDS.values()])[0]
    planned = rng.random() < 0.75
    return Setup(
        kind=kind,
        habit=rng.choice(HABITS) if kind == "mlp with a habit" else "",
        optimizer=rng.choices(list(OPTIMIZERS), (2, 4, 1, 2))[0],
        planned=planned,
        clip=0.5 if planned and rng.random() < 0.35 else None,
        micro=rng.choice((2, 2, 3)) if planned and rng.random() < 0.25 else 1,
        tight=rng.random() < 0.5,
    )


class Oops(Exception):
    """What a user's own code raises."""


class World:
    """A model with its optimizer, plain or compiled.

    State: `model` and `optimizer`, which actions work on; `random_state`, of torch and of Python, while others draw;
    `deterministic`, the flag of torch as this world has it; `held`, what actions keep for later ones; `seen`, what the
    action under way has observed; `told`, the same action in words; `pauses`, what is still to be done inside it.
    """

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup = setup
        torch.manual_seed(seed)
        self.model: Any = KINDS[setup.kind].build()
        if setup.habit:
            self.model.habit = setup.habit
        self.model.train()
        # Adapters that are switched off have parameters all the same.
        params = [p for n, p in self.model.named_parameters() if p.requires_grad or "lora_" in n]
        self.optimizer: Any = OPTIMIZERS[setup.optimizer](params)
        self.random_state = torch.get_rng_state(), random.Random(seed).getstate()
        self.deterministic = False
        self.compiled = False
        self.held: dict[str, Any] = {}
        self.seen: list[tuple[str, Any]] = []
        self.told: list[str] = []
        self.pauses: dict[str, Any] = {}

    @property
    def kind(self) -> Kind:
        """Of its model."""
        return KINDS[self.setup.kind]

    def compile(self, budget_bytes: int, cache_dir: str) -> None:
        """Have offmate run the model from now on."""
        setup = self.setup
        offmate.compile(
            self.model,
            budget_bytes,
            optimizer=self.optimizer if setup.planned else None,
            max_grad_norm=setup.clip,
            accumulation_steps=setup.micro,
            device="emulated",
            cpu_budget=HOST_BYTES,
            config=config(cache_dir),
        )
        self.compiled = True

    @property
    def peak_bytes(self) -> int:
        """The most that has been on the device."""
        return self.model.offmate.peak_bytes if self.compiled else 0

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The body draws this world's random numbers, and leaves the process as it was."""
        before = torch.get_rng_state(), random.getstate(), torch.are_deterministic_algorithms_enabled()
        torch.set_rng_state(self.random_state[0])
        random.setstate(self.random_state[1])
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            yield
        finally:
            self.random_state = torch.get_rng_state(), random.getstate()
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            torch.use_deterministic_algorithms(before[2])

    # -- what actions use ---------------------------------------------------------------------------------------------

    def tell(self, words: str) -> None:
        """Say in Python-like words what is done."""
        self.told.append(words)

    def see(self, label: str, value: Any) -> None:
        """Observe a value; tensors as they are now. Capture calls hooks once more, with tensors that have no values."""
        if isinstance(value, FakeTensor):
            return
        self.seen.append((label, value.detach().clone() if isinstance(value, torch.Tensor) else value))

    def batch(self, rng: random.Random, labels: bool = True) -> Batch:
        """A batch, of the largest size half of the time."""
        size, seed = rng.choice((0, 0, 1, 2)), rng.randrange(2**31)
        made = self.kind.batch(size, torch.Generator().manual_seed(seed))
        if "routed" in self.kind.has:
            made |= self.held.get("arguments", {})
        return made if labels else {k: v for k, v in made.items() if k != self.kind.label}

    def look(self, outputs: Any) -> None:
        """Observe a model's outputs."""
        for name in ("loss", "scores", "logits"):
            if name in outputs and outputs[name] is not None:
                self.see(name, outputs[name])

    def modules(self) -> dict[str, nn.Module]:
        """Submodules by name, without the root and containers of others' making."""
        return {n: m for n, m in self.model.named_modules() if n}

    def leaves(self) -> dict[str, nn.Module]:
        """Submodules without children."""
        return {n: m for n, m in self.modules().items() if not list(m.children())}

    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters that require a gradient."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def pick(self, rng: random.Random, found: dict[str, Any]) -> tuple[str, Any]:
        """One of them."""
        name = rng.choice(sorted(found))
        return name, found[name]

    def see_gradients(self) -> None:
        """Observe gradients, where the user's code updates."""
        if not self.setup.planned:
            for name, parameter in self.model.named_parameters():
                self.see(f"gradient of {name}", parameter.grad)

    def check(self) -> None:
        """Observe everything that training changes."""
        for name, value in self.model.state_dict().items():
            self.see(f"state of {name}", value)
        state = self.optimizer.state_dict()
        for index, values in sorted(state["state"].items()):
            for key, value in sorted(values.items()):
                self.see(f"optimizer's {key} of {index}", value)
        for group in state["param_groups"]:
            self.see("optimizer's group", json.dumps({k: str(v) for k, v in sorted(group.items()) if k != "params"}))
        self.see_gradients()


def config(cache_dir: str) -> offmate.Config:
    """Settings with which a plan is found at once."""
    return offmate.Config(cache_dir=cache_dir, options_per_block=3, solver_gap=0.5, solver_time_limit_s=10)


def twins(setup: Setup, seed: int, cache_dir: str) -> tuple[World, World, int]:
    """The plain world, the compiled one, and its budget."""
    plain, ours = World(setup, seed), World(setup, seed)
    budget = _tight_bytes(setup, cache_dir) if setup.tight else AMPLE_BYTES
    with ours.alone():
        ours.compile(budget, cache_dir)
    return plain, ours, budget


def _tight_bytes(setup: Setup, cache_dir: str) -> int:
    """A budget not far from the least one, which is found once per setup."""
    key = hashlib.sha256(repr(sorted(asdict(setup).items())).encode()).hexdigest()[:16]
    path = Path(cache_dir, f"least-{key}.txt")
    if not path.exists():
        world = World(setup, 0)
        example = world.kind.batch(0, torch.Generator().manual_seed(0))
        plan = offmate.plan(
            world.model,
            AMPLE_BYTES,
            example_inputs=example,
            optimizer=world.optimizer if setup.planned else None,
            max_grad_norm=setup.clip,
            accumulation_steps=setup.micro,
            device="emulated",
            cpu_budget=HOST_BYTES,
            config=config(cache_dir),
        )
        # Whole at once, since another process may look for it.
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(str(int(_TIGHT * plan.least_budget_bytes)))
        part.replace(path)
    return int(path.read_text())
