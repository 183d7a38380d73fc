"""Models of timm, torchvision and diffusers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from offmate.check.subject import Batch, Subject, WithLoss, called, own_loss
from offmate.errors import OffmateError

_SMALL = re.compile(r"test|atto|femto|pico|nano|tiny|micro|small|mini|xxs|xs|_s\b|lite|18|b0|_050|_0_5")
_MOST_PARAMETERS = 140_000_000
_TRIED = 6  # models of a family, of which the smallest is taken
_BATCH = 2
_SIZES = (64, 96, 128, 224, 256, 299)
_FRAMES = 16  # of a video
_MOST_OBJECTS = 2  # in an image, to be detected


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
    settings = {"weights": None}
    if "weights_backbone" in inspect.signature(models.get_model_builder(names[0])).parameters:
        settings["weights_backbone"] = None
    kind, _, _ = name.rpartition(".")
    yield _image_subject(name, names, functools.partial(models.get_model, **settings), _BATCHES.get(kind, _images))


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


def _image_subject(
    family: str,
    names: list[str],
    make: Callable[..., torch.nn.Module],
    batch: Callable[[int, int], Batch] | None = None,
) -> Subject:
    """Make a subject of the smallest model that trains on small random images.

    Parameters
    ----------
    batch: makes the batch of a step from the images' size and the step; None makes images.
    """
    batch = batch or _images
    sized, said = _by_size(names, make)
    for count, name, settings in sized:
        if count > _MOST_PARAMETERS:
            said = f"{name} has {count:,} parameters"
            break
        build = functools.partial(_with_loss, functools.partial(make, name, **settings))
        for size in _SIZES:
            try:
                torch.manual_seed(0)
                loss = own_loss(called(build().train(), batch(size, 0)), ())
            except Exception as error:
                said = f"{name}: {type(error).__name__}: {error}"
                continue
            if loss.requires_grad:
                return Subject(f"{family}: {name}", build, functools.partial(batch, size))
    raise OffmateError(f"no model of {family} could be built and run: {said}")


def _by_size(
    names: list[str], make: Callable[..., torch.nn.Module]
) -> tuple[list[tuple[int, str, dict[str, Any]]], str]:
    """Return parameters, name and settings of a family's small models, the smallest first, and what failed last."""
    small = [name for name in names if _SMALL.search(name)] or names
    sized: list[tuple[int, str, dict[str, Any]]] = []
    said = "it has no model"
    for name in sorted(small, key=lambda name: (not name.startswith("test"), len(name)))[:_TRIED]:
        for settings in ({"img_size": 64}, {"image_size": 64}, {}):
            try:
                sized.append((_n_parameters(functools.partial(make, name, **settings)), name, settings))
            except Exception as error:
                said = f"{name}: {type(error).__name__}: {error}"
                continue
            break
    return sorted(sized, key=lambda row: row[:2]), said


def _n_parameters(make: Callable[[], torch.nn.Module]) -> int:
    try:
        with torch.device("meta"):
            model = make()
    except NotImplementedError:  # its initialisation reads numbers
        model = make()
    return sum(parameter.numel() for parameter in model.parameters())


def _with_loss(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    return WithLoss(make())


def _images(size: int, step: int) -> Batch:
    return (torch.randn(_BATCH, 3, size, size),)


def _videos(size: int, step: int) -> Batch:
    return (torch.randn(_BATCH, 3, _FRAMES, size, size),)


def _pairs(size: int, step: int) -> Batch:
    return (torch.randn(_BATCH, 3, size, size), torch.randn(_BATCH, 3, size, size))


def _objects(size: int, step: int) -> Batch:
    """Make images, and for each the boxes, classes, masks and key points of what is to be detected."""
    targets = []
    for _ in range(_BATCH):
        corners = torch.rand(_MOST_OBJECTS, 2) * size / 2
        targets.append(
            {
                "boxes": torch.cat((corners, corners + size / 4), dim=1),
                "labels": torch.ones(_MOST_OBJECTS, dtype=torch.int64),
                "masks": torch.ones(_MOST_OBJECTS, size, size, dtype=torch.uint8),
                "keypoints": torch.cat((corners[:, None] + torch.rand(1, 17, 2), torch.ones(_MOST_OBJECTS, 17, 1)), 2),
            }
        )
    return (list(torch.rand(_BATCH, 3, size, size)), targets)


_BATCHES = {"video": _videos, "optical_flow": _pairs, "detection": _objects}


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
