"""Models of timm, torchvision and diffusers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from offmate.check.subject import Batch, Subject, WithLoss, own_loss
from offmate.errors import OffmateError

_SMALL = re.compile(r"test|atto|femto|pico|nano|tiny|micro|small|mini|xxs|xs|_s\b|lite|18|b0|_050|_0_5")
_MOST_PARAMETERS = 70_000_000
_TRIED = 6  # models of a family, of which the smallest is taken
_BATCH = 2


def timm_names() -> list[str]:
    """List timm's families, each of which is a module of its."""
    import_torchvision()
    import timm

    return sorted(timm.list_modules())


def timm_subjects(name: str) -> Iterator[Subject]:
    """Yield the smallest model of a family of timm."""
    import_torchvision()
    import timm

    yield _image_subject(name, timm.list_models(module=name), functools.partial(timm.create_model, num_classes=10))


def torchvision_names() -> list[str]:
    """List torchvision's families, each of which is a module of its."""
    return sorted({_family(name) for name in import_torchvision().models.list_models()})


def torchvision_subjects(name: str) -> Iterator[Subject]:
    """Yield the smallest model of a family of torchvision."""
    models = import_torchvision().models
    names = [model for model in models.list_models() if _family(model) == name]
    yield _image_subject(name, names, functools.partial(models.get_model, weights=None, weights_backbone=None))


def _family(name: str) -> str:
    maker = import_torchvision().models.get_model_builder(name)
    return maker.__module__.removeprefix("torchvision.models.")


def import_torchvision() -> Any:
    """Import torchvision, also a build of it whose compiled operators this torch cannot load.

    Models that do without these operators then still run; one that needs them fails in plain PyTorch.
    """
    while True:
        try:
            return importlib.import_module("torchvision")
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            library = _LIBRARIES.setdefault("torchvision", torch.library.Library("torchvision", "FRAGMENT"))
            library.define(f"{missing[1]}() -> ()")
            for module in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
                del sys.modules[module]


_LIBRARIES: dict[str, torch.library.Library] = {}


def _image_subject(family: str, names: list[str], make: Callable[..., torch.nn.Module]) -> Subject:
    """Make a subject of the smallest model that trains on small random images."""
    small = [name for name in names if _SMALL.search(name)] or names
    sized: list[tuple[int, str, dict[str, Any]]] = []
    said = "it has no model"
    for name in sorted(small, key=lambda name: (not name.startswith("test"), len(name)))[:_TRIED]:
        for settings in ({"img_size": 64}, {"image_size": 64}, {}):
            try:
                with torch.device("meta"):
                    count = sum(parameter.numel() for parameter in make(name, **settings).parameters())
            except Exception as error:
                said = f"{name}: {type(error).__name__}: {error}"
                continue
            sized.append((count, name, settings))
            break
    for count, name, settings in sorted(sized, key=lambda row: row[:2]):
        if count > _MOST_PARAMETERS:
            said = f"{name} has {count:,} parameters"
            break
        for size in (64, 96, 224, 256, 299):
            try:
                build = functools.partial(_with_loss, functools.partial(make, name, **settings))
                torch.manual_seed(0)
                loss = own_loss(build().train()(torch.randn(_BATCH, 3, size, size)), ())
            except Exception as error:
                said = f"{name}: {type(error).__name__}: {error}"
                continue
            if loss.requires_grad:
                return Subject(f"{family}: {name}", build, functools.partial(_images, size))
    raise OffmateError(f"no model of {family} could be built and run: {said}")


def _with_loss(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    return WithLoss(make())


def _images(size: int, step: int) -> Batch:
    return (torch.randn(_BATCH, 3, size, size),)


def diffusers_names() -> list[str]:
    """List the denoisers of diffusers that are checked."""
    return sorted(_DENOISERS)


def diffusers_subjects(name: str) -> Iterator[Subject]:
    """Yield a tiny denoiser."""
    settings, batch = _DENOISERS[name]
    yield Subject(name, functools.partial(_denoiser, name, settings), batch)


def _denoiser(name: str, settings: dict[str, Any]) -> torch.nn.Module:
    import_torchvision()
    import diffusers

    made: torch.nn.Module = getattr(diffusers, name)(**settings)
    return made


def _unet_batch(step: int) -> Batch:
    return {"sample": torch.randn(_BATCH, 3, 16, 16), "timestep": torch.tensor([3, 7])}


def _conditioned_batch(step: int) -> Batch:
    return {**_unet_batch(step), "encoder_hidden_states": torch.randn(_BATCH, 4, 16)}  # type: ignore[dict-item]


def _dit_batch(step: int) -> Batch:
    return {
        "hidden_states": torch.randn(_BATCH, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.randint(0, 10, (_BATCH,)),
    }


def _sd3_batch(step: int) -> Batch:
    return {
        "hidden_states": torch.randn(_BATCH, 4, 8, 8),
        "encoder_hidden_states": torch.randn(_BATCH, 6, 16),
        "pooled_projections": torch.randn(_BATCH, 32),
        "timestep": torch.tensor([3, 7]),
    }


def _flux_batch(step: int) -> Batch:
    return {
        "hidden_states": torch.randn(_BATCH, 16, 4),
        "encoder_hidden_states": torch.randn(_BATCH, 6, 32),
        "pooled_projections": torch.randn(_BATCH, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }


_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 16}
_DENOISERS: dict[str, tuple[dict[str, Any], Callable[[int], Batch]]] = {
    "UNet2DModel": (
        {
            **_BLOCKS,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
        },
        _unet_batch,
    ),
    "UNet2DConditionModel": (
        {
            **_BLOCKS,
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 8,
        },
        _conditioned_batch,
    ),
    "DiTTransformer2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 10,
            "norm_num_groups": 8,
        },
        _dit_batch,
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 32,
            "out_channels": 4,
            "pos_embed_max_size": 16,
        },
        _sd3_batch,
    ),
    "FluxTransformer2DModel": (
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        _flux_batch,
    ),
}
