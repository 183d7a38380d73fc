"""Architectures of transformers as subjects: tiny sizes, random batches, and what is said if there is none."""

from __future__ import annotations

import pytest
import torch
import transformers

from offmate.check.compare import Outcome, check
from offmate.check.hugging_face import MOST_PARAMETERS, subject_of
from offmate.check.tiny import shrunk
from offmate.errors import OffmateError


@pytest.mark.parametrize(
    "name", ["llama", "deepseek_v3", "t5", "vit", "wav2vec2", "qwen2_vl", "jamba", "bert", "mamba2", "clip"]
)
def test_a_tiny_model_trains_on_a_random_batch(name: str) -> None:
    subject = subject_of(name, transformers.AutoConfig.for_model(name))
    model, batch = subject.built(), subject.batches(1)[0]

    loss = subject.loss(model(**batch), batch)
    loss.backward()

    assert any(parameter.grad is not None for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) < MOST_PARAMETERS
    assert torch.equal(loss, subject.loss(subject.built()(**batch), batch)) or model.training


def test_the_configuration_itself_is_left_as_it_is() -> None:
    config = transformers.LlamaConfig()
    before = config.to_dict()

    small = shrunk(config)

    assert config.to_dict() == before
    assert (small.hidden_size, small.num_hidden_layers, small.vocab_size) == (32, 2, 96)


def test_fewer_layers_keep_one_of_each_kind() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=12)
    assert set(shrunk(config).layer_types) == set(config.layer_types)


def test_heads_fit_again() -> None:
    small = shrunk(transformers.DeepseekV3Config())
    assert small.num_key_value_heads == small.num_attention_heads
    assert small.qk_head_dim == small.qk_nope_head_dim + small.qk_rope_head_dim


def test_an_architecture_that_cannot_be_built_says_why() -> None:
    config = transformers.LlamaConfig(hidden_act="no such function")
    with pytest.raises(
        OffmateError, match=r"model 'llama' cannot be built and run in plain PyTorch: .*no such function"
    ):
        subject_of("llama", config)


@pytest.mark.parametrize("name", ["gpt2", "granitemoe_swa", "doge"])
def test_an_architecture_is_checked(name: str) -> None:
    # The second one attends by the plain formula, whose last bits depend on the layout that a cache gives to keys; so
    # does the third one, since its mask needs a gradient.
    verdict = check(subject_of(name, transformers.AutoConfig.for_model(name)), steps=2)
    assert (verdict.outcome, verdict.words) == (Outcome.EQUAL, "")
