"""Random batches for Hugging Face models, found by the names of the arguments that their forwards take."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import OffmateError
from .subject import Batch, own_loss

BATCH = 2
_TOKENS = 16
_FRAMES = 64
_SAMPLES = 4000
_GRID = 4  # patches per side of an image that comes as patches
_MOST_TRIES = 60

Maker = Callable[[Any], Iterator[torch.Tensor]]


def batch_maker(model: Any) -> Callable[[int], Batch]:
    """Find out which random batch a model trains on, by trying.

    Parameters
    ----------
    model: a transformers model with memory; it runs a few times.

    Returns: what makes the batch of a step. Raises: OffmateError with what the model said, if no batch works.
    """
    said = ""
    for batch in itertools.islice(_candidates(model), _MOST_TRIES):
        try:
            if own_loss(model(**batch), batch).requires_grad:
                return lambda step: {name: _another(value, model, name) for name, value in batch.items()}
            said = said or "its outputs have no gradient"
        except Exception as error:
            # The first batch is the likeliest, so what the model says of it helps most.
            said = said or (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    raise OffmateError(
        f"no random batch was found for {type(model).__name__}: {said or 'its arguments are not known'}. Write a "
        "Python file with model() and batch(), and check that"
    )


def _another(value: Any, model: Any, name: str) -> Any:
    """Draw a value of the same kind as the one of the batch that was found."""
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool or name in _FIXED:
        return value
    if value.dtype.is_floating_point:
        return torch.randn_like(value)
    most = int(value.max()) + 1
    return torch.randint(min(3, most - 1), most, value.shape) if most > 1 else value


def _candidates(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches to try, those of a training step first."""
    arguments = inspect.signature(model.forward).parameters
    needed = [
        name
        for name, argument in arguments.items()
        if argument.default is inspect.Parameter.empty and argument.kind.name not in ("VAR_POSITIONAL", "VAR_KEYWORD")
    ]
    main = model.main_input_name if model.main_input_name in arguments else next(iter(arguments), "")
    wanted = dict.fromkeys([main, *needed])
    extras: list[tuple[str, ...]] = [()]
    for more in ("pixel_values", "input_features", "input_values", "bbox", "decoder_input_ids"):
        if more in arguments and more not in wanted:
            extras += [(*others, more) for others in list(extras)]
    labelled = [("labels",), ()] if "labels" in arguments else [()]
    found = []
    for label, extra in itertools.product(labelled, extras):
        names = [*wanted, *extra, *label]
        if all(name in _MAKERS for name in names):
            makers = [list(enumerate(_MAKERS[name](model))) for name in names]
            for values in itertools.product(*makers):
                found.append((sum(place for place, _ in values), dict(zip(names, [value for _, value in values]))))
    # Those of which every part is the likeliest one come first.
    yield from (batch for _, batch in sorted(found, key=lambda pair: pair[0]))


def _ids(model: Any) -> Iterator[torch.Tensor]:
    text = model.config.get_text_config()
    words = getattr(text, "vocab_size", None) or 16
    words = words if isinstance(words, int) else min(words)
    yield torch.randint(min(3, words - 1), words, (BATCH, _TOKENS))
    yield torch.randint(min(3, words - 1), words, (1, 2 * _TOKENS))


def _images(model: Any) -> Iterator[torch.Tensor]:
    config = _part(model.config, "vision_config", "vision_encoder_config", "backbone_config", "image_encoder")
    channels = _first(config, "num_channels", "in_channels", "in_chans", "image_channels", default=3)
    sizes = [_first(config, "image_size", "img_size", "input_size", default=32), 64, 224]
    for size in dict.fromkeys(max(size) if isinstance(size, list | tuple) else size for size in sizes):
        yield torch.randn(BATCH, channels, size, size)
    side = _first(config, "patch_size", default=8)
    side = side if isinstance(side, int) else side[0]
    frames = _first(config, "temporal_patch_size", "num_frames", default=2)
    yield torch.randn(BATCH * _GRID * _GRID, channels * frames * side * side)
    yield torch.randn(BATCH, frames, channels, 32, 32)
    yield torch.randn(BATCH, _GRID * _GRID, channels * side * side)


def _features(model: Any) -> Iterator[torch.Tensor]:
    config = _part(model.config, "audio_config", "encoder_config", "speech_config", "audio_encoder_config")
    bins = _first(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim", default=80)
    frames = 2 * _first(config, "max_source_positions", default=_FRAMES // 2)
    yield torch.randn(BATCH, bins, frames)
    yield torch.randn(BATCH, frames, bins)
    yield torch.randn(BATCH, bins, 1000)
    yield torch.randn(BATCH, 1, bins, frames)


def _waves(model: Any) -> Iterator[torch.Tensor]:
    yield torch.randn(BATCH, _SAMPLES)
    yield torch.randn(BATCH, 1, _SAMPLES)
    yield from _features(model)


def _states(model: Any) -> Iterator[torch.Tensor]:
    config = model.config
    width = _first(config, "hidden_size", "d_model", "embed_dim", "hidden_dim", default=32)
    yield torch.randn(BATCH, _TOKENS, width)
    side = _first(config, "patch_size", default=8)
    side = side if isinstance(side, int) else side[0]
    channels = _first(config, "num_channels", "in_channels", "in_chans", default=3)
    frames = _first(config, "temporal_patch_size", default=2)
    yield torch.randn(BATCH * _GRID * _GRID, channels * frames * side * side)
    yield torch.randn(BATCH * _GRID * _GRID, channels * side * side)
    yield torch.randn(BATCH * _GRID * _GRID, width)


def _labels(model: Any) -> Iterator[torch.Tensor]:
    kind = type(model).__name__
    if "ForImageClassification" in kind or "ForSequenceClassification" in kind or "ForAudioClassification" in kind:
        yield torch.randint(model.config.num_labels, (BATCH,))
    else:
        yield from _ids(model)


def _grid(model: Any) -> Iterator[torch.Tensor]:
    yield torch.tensor([[1, _GRID, _GRID]] * BATCH)


def _mask(model: Any) -> Iterator[torch.Tensor]:
    yield torch.ones(BATCH, _FRAMES, dtype=torch.long)
    yield torch.ones(BATCH, _TOKENS, dtype=torch.long)


def _boxes(model: Any) -> Iterator[torch.Tensor]:
    yield torch.tensor([0, 0, 50, 50]).expand(BATCH, _TOKENS, 4).contiguous()


_MAKERS: dict[str, Maker] = {
    "input_ids": _ids,
    "decoder_input_ids": _ids,
    "tokens": _ids,
    "pixel_values": _images,
    "pixel_values_videos": _images,
    "images": _images,
    "input_features": _features,
    "audio_mel": _features,
    "input_values": _waves,
    "hidden_states": _states,
    "inputs_embeds": _states,
    "query_embeds": _states,
    "encoder_hidden_states": _states,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "bbox": _boxes,
    "labels": _labels,
    "attention_mask": _mask,
    "input_features_mask": _mask,
    "audio_mel_mask": _mask,
}
_FIXED = frozenset({"grid_thw", "image_grid_thw", "bbox", "attention_mask", "input_features_mask", "audio_mel_mask"})


def _part(config: Any, *names: str) -> Any:
    return next((part for name in names if (part := getattr(config, name, None)) is not None), config)


def _first(config: Any, *names: str, default: Any) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None and not isinstance(value, str):
            return value
    return default
