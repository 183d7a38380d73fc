"""Tiny images with captions and classes, and a tiny model that draws images from captions, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import torch

SIDE = 32
NUMBER = 8


def classes(folder: Path) -> None:
    """Images of two classes for training and for validation, a folder for every class in `images`."""
    for part in ("train", "validation"):
        for name in ("dark", "light"):
            _draw(folder / "images" / part / name, brightness=64 if name == "dark" else 192)


def captions(folder: Path) -> None:
    """Images with captions in `images`, and a tiny pipeline in `model`."""
    _draw(folder / "images" / "train", brightness=128)
    rows = [{"file_name": f"{index}.png", "text": f"a picture {index}"} for index in range(NUMBER)]
    (folder / "images" / "train" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _pipeline(folder / "model")


def _draw(folder: Path, brightness: int) -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    generator = numpy.random.default_rng(brightness)
    for index in range(NUMBER):
        values = generator.integers(brightness - 48, brightness + 48, (SIDE, SIDE, 3)).astype(numpy.uint8)
        Image.fromarray(values).save(folder / f"{index}.png")


def _pipeline(folder: Path) -> None:
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    width = 32
    words = _caption_words(folder / "tokenizer")
    text = CLIPTextConfig(
        vocab_size=words, hidden_size=width, intermediate_size=width, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, bos_token_id=words - 2, eos_token_id=words - 1, pad_token_id=words - 1,
    )  # fmt: skip
    CLIPTextModel(text).save_pretrained(folder / "text_encoder")
    AutoencoderKL(
        block_out_channels=(width, 2 * width), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4,
    ).save_pretrained(folder / "vae")  # fmt: skip
    UNet2DConditionModel(
        block_out_channels=(width, 2 * width), layers_per_block=1, sample_size=SIDE // 2, cross_attention_dim=width,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).save_pretrained(folder / "unet")  # fmt: skip
    DDPMScheduler(num_train_timesteps=100).save_pretrained(folder / "scheduler")


def _caption_words(folder: Path) -> int:
    """Write the files of a tokenizer that knows letters only; return how many tokens it has."""
    letters = [chr(code) for code in range(33, 127)]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    kind = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 16}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return len(tokens)
