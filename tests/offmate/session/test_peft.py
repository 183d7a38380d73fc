"""Adapters of peft: the frozen base streams in, and nothing of it goes back."""

from __future__ import annotations

import pytest
import torch
from offmate.solver.schedule import Kind

import offmate

from ..loops import CPU_BUDGET

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

BUDGET = 1 << 20


def base(layers: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adapted() -> torch.nn.Module:
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(base(), config).train()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (2, 16))
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_lora(tmp_path, cache_dir):
    runs = []
    for compiles in (True, False):
        model = adapted()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
        if compiles:
            offmate.compile(
                model, BUDGET, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET,
                config=offmate.Config(cache_dir=cache_dir),
            )  # fmt: skip
        runs.append((train(model, optimizer), model))
    (losses, ours), (expected, reference) = runs
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, ours.parameters(), reference.parameters()))
    assert ours.offmate.peak_bytes == ours.offmate.plan.predicted_peak_bytes <= BUDGET
    frozen = {f"p:{name}" for name, p in reference.named_parameters() if not p.requires_grad}
    actions = ours.offmate.plan.schedule.actions
    assert frozen & {a.name for a in actions if a.kind is Kind.PREFETCH}
    assert not frozen & {a.name for a in actions if a.kind is Kind.OFFLOAD}
    ours.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path).eval()
    ids = torch.arange(3, 19)[None]
    assert torch.equal(loaded(input_ids=ids).logits, reference.eval()(input_ids=ids).logits)


def lora() -> torch.nn.Module:
    return peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )


class Twins:
    """A model with two adapters, plain and compiled, and the numbers of each."""

    def __init__(self, cache_dir: str, planned: bool, budget: int = BUDGET, clip: float | None = None) -> None:
        self.clip = clip
        self.worlds = []
        for compiles in (False, True):
            model = peft.get_peft_model(base(layers=2), lora()).train()
            torch.manual_seed(5)
            model.add_adapter("b", lora())
            optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "lora" in n], lr=1e-2)
            if compiles:
                self.clips = planned and clip is not None
                offmate.compile(
                    model, budget, optimizer=optimizer if planned else None, max_grad_norm=clip if planned else None,
                    device="emulated", cpu_budget=CPU_BUDGET, config=offmate.Config(cache_dir=cache_dir),
                )  # fmt: skip
            self.worlds.append((model, optimizer, []))
        self.ours = self.worlds[1][0]

    def each(self, work) -> Twins:
        """Have both do something; what it returns is a number to compare."""
        for model, optimizer, numbers in self.worlds:
            torch.manual_seed(len(numbers))
            numbers.append(work(model, optimizer))
        return self

    def step(self, loss_of) -> Twins:
        def work(model, optimizer):
            loss = loss_of(model)
            loss.backward()
            if self.clip is not None and not (model is self.ours and self.clips):
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return self.each(work)

    def evaluate(self, loss_of) -> Twins:
        def work(model, _):
            model.eval()
            with torch.no_grad():
                loss = loss_of(model).item()
            model.train()
            return loss

        return self.each(work)

    def check(self) -> None:
        (plain, _, expected), (ours, _, numbers) = self.worlds
        assert numbers == expected
        mine, theirs = ours.state_dict(), plain.state_dict()
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert ours.offmate.peak_bytes <= ours.offmate.plan.budget_bytes


IDS = torch.arange(3, 35).view(2, 16)


def language(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, labels=IDS).loss


def likelihood(model: torch.nn.Module) -> torch.Tensor:
    words = torch.log_softmax(model(input_ids=IDS).logits[:, :-1].float(), -1)
    return words.gather(2, IDS[:, 1:, None]).sum((1, 2))


def preference(model: torch.nn.Module) -> torch.Tensor:
    """The loss of DPO, its reference the model without its adapter."""
    policy = likelihood(model)
    with torch.no_grad(), model.disable_adapter():
        reference = likelihood(model)
    better, worse = policy - reference
    return -torch.nn.functional.logsigmoid(0.1 * (better - worse))


@pytest.mark.parametrize("planned", [True, False])
def test_adapters_switched_merged_and_added_after_compile(planned, cache_dir):
    twins = Twins(cache_dir, planned).step(language).evaluate(language)
    switches = (
        lambda model, _: model.set_adapter("b"),
        lambda model, _: model.set_adapter("default"),
        lambda model, _: model.merge_adapter(),
        lambda model, _: model.unmerge_adapter(),
        lambda model, _: model.add_adapter("c", lora()),
        lambda model, _: model.delete_adapter("c"),
    )
    for switch in switches:
        twins.each(switch).evaluate(language)
        if not any(getattr(module, "merged", False) for module in twins.ours.modules()):
            twins.step(language)
    twins.check()


@pytest.mark.parametrize(("planned", "clip"), [(True, None), (True, 1.0), (False, 1.0)])
def test_preferences_against_the_model_without_its_adapter(planned, clip, cache_dir):
    ample = Twins(cache_dir, planned, clip=clip).step(preference).evaluate(preference).step(preference)
    ample.check()
    tight = Twins(cache_dir, planned, int(1.1 * ample.ours.offmate.plan.least_budget_bytes), clip)
    tight.step(preference).evaluate(preference).step(preference).check()
