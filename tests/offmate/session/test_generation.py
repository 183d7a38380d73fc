"""`generate()` of a compiled model runs on the device, inside the budget, and gives plain PyTorch's tokens."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

import offmate
from offmate.session import generation, generation_fit
from offmate.session.streaming import Held
from tests.accelerator.loops import without_allocator
from tests.offmate.loops import adamw

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **TOKENS, intermediate_size=128))


def tied() -> Any:
    config = transformers.Qwen3Config(**SIZES, intermediate_size=128, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.Qwen3ForCausalLM(config)


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, n_embd=64, n_layer=3, n_head=4))


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(llama(), config)


def compiled(model: Any, budget_bytes: int, device: str = "emulated") -> Any:
    config = offmate.Config(cache_dir=None)
    return offmate.compile(model, budget_bytes, optimizer=adamw(model), device=device, config=config).eval()


def asked(**more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"input_ids": torch.randint(3, 256, (2, 10)), "max_new_tokens": 12, "pad_token_id": 0, **more}


def working_bytes(model: Any, call: dict[str, Any]) -> int:
    return generation_fit._rehearsed(model, generation._asked(model, (), call))[0]


@pytest.fixture(params=[llama, tied, gpt2, adapted], ids=lambda make: make.__name__)
def plain(request: Any) -> Any:
    torch.manual_seed(0)
    return request.param().eval()


@pytest.mark.parametrize("way", [{}, {"num_beams": 2}, {"do_sample": True}], ids=["greedy", "beams", "drawn"])
def test_tokens_are_plain_pytorchs_and_the_budget_is_kept(plain: Any, way: dict[str, Any]) -> None:
    call = asked(**way)
    want = plain.generate(**call)
    weights = sum(param.nbytes for param in plain.parameters())
    for share in (0.75, 2.0):
        model = compiled(copy.deepcopy(plain), working_bytes(plain, call) + int(share * weights))
        torch.manual_seed(0)
        asked()
        assert torch.equal(model.generate(**call), want)
        ledger = model.offmate._session.device.ledger
        assert ledger.level_bytes == 0
        assert 0 < ledger.peak_bytes <= ledger.limit_bytes


def test_what_is_counted_beforehand_holds_what_operators_make(plain: Any) -> None:
    call = asked(input_ids=torch.randint(3, 256, (8, 64)))
    with Held() as held:
        plain.generate(**call)
    assert held.peak_bytes <= working_bytes(plain, call)


def test_training_goes_on_with_plain_numbers() -> None:
    def trained(compiles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = llama()
        optimizer = adamw(model)
        if compiles:
            config = offmate.Config(cache_dir=None)
            offmate.compile(model, "1MiB", optimizer=optimizer, device="emulated", config=config)
        seen = []
        for _ in range(3):
            model.train()
            model(input_ids=asked()["input_ids"], labels=asked()["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            seen.append(model.generate(**asked()))
        return [*seen, *model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.parametrize(
    ("budget", "more", "said"),
    [
        ("200KiB", {"max_new_tokens": 2000}, "but the budget is 200 KiB; ask for fewer tokens"),
        ("1MiB", {"return_dict_in_generate": True}, "keeps the cache"),
        ("1MiB", {"inputs_embeds": torch.zeros(2, 10, 64)}, "it is called with inputs_embeds"),
    ],
)
def test_what_cannot_be_on_the_device_runs_on_the_host_and_says_why(
    budget: str, more: dict[str, Any], said: str, caplog: Any
) -> None:
    torch.manual_seed(0)
    plain = llama().eval()
    model = compiled(copy.deepcopy(plain), budget)
    with caplog.at_level(logging.INFO, logger="offmate"):
        got, want = (net.generate(**asked(do_sample=False, **more)) for net in (model, plain))
    if isinstance(got, torch.Tensor):
        assert torch.equal(got, want)
    else:
        assert torch.equal(got.sequences, want.sequences)
    assert said in caplog.text


def test_between_forward_and_backward_it_runs_on_the_host(caplog: Any) -> None:
    model = compiled(llama(), 1 << 20).train()
    ids = asked()["input_ids"]
    loss = model(input_ids=ids, labels=ids).loss
    with caplog.at_level(logging.INFO, logger="offmate"):
        model.generate(**asked())
    loss.backward()
    assert "an iteration is under way" in caplog.text


def test_a_parameter_that_is_read_outside_of_its_module_stays() -> None:
    class Head(transformers.LlamaForCausalLM):
        """Reads the weight of its head itself."""

        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            hidden = self.model(input_ids, **{k: v for k, v in kwargs.items() if k != "logits_to_keep"})
            logits = torch.nn.functional.linear(hidden[0][:, -1:], self.lm_head.weight)
            return transformers.modeling_outputs.CausalLMOutputWithPast(
                logits=logits, past_key_values=hidden.past_key_values
            )

    torch.manual_seed(0)
    model = Head(transformers.LlamaConfig(**SIZES, **TOKENS, intermediate_size=128)).eval()
    _, elsewhere = generation_fit._rehearsed(model, generation._asked(model, (), asked()))
    assert elsewhere == {(model.lm_head, "weight")}
    budget = working_bytes(model, asked()) + 300_000
    fit = generation_fit.fit(model, budget, generation._asked(model, (), asked()), emulated=True)
    assert id(model.lm_head.weight) in fit.stays and fit.streamed_bytes


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    class Stops(transformers.StoppingCriteria):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    plain = llama().eval()
    model = compiled(copy.deepcopy(plain), working_bytes(plain, asked()) + 300_000)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**asked(stopping_criteria=transformers.StoppingCriteriaList([Stops()])))
    assert model.offmate._session.device.ledger.level_bytes == 0
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert torch.equal(model.generate(**asked(do_sample=False)), plain.generate(**asked(do_sample=False)))


def test_on_an_accelerator_with_streams(sim: Any) -> None:
    torch.manual_seed(0)
    plain = llama().eval()
    call = asked(do_sample=False)
    with without_allocator():
        model = compiled(copy.deepcopy(plain), working_bytes(plain, call) + 400_000, device="sim")
        got = model.generate(**call)
    assert got.device.type == "cpu"
    assert torch.equal(got, plain.generate(**call))
