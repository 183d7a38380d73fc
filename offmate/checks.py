"""Models that cannot be compiled as they are, each refused by name with the remedy."""

from __future__ import annotations

import torch

from .errors import OffmateError

_WRAPPERS = {
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel (DDP)",
    "FullyShardedDataParallel": "FullyShardedDataParallel (FSDP)",
}


def check_model(model: torch.nn.Module) -> None:
    """Raise OffmateError if the model is of a kind that cannot be planned, naming it and what to do."""
    if not isinstance(model, torch.nn.Module):
        raise OffmateError(f"offmate.compile takes a torch.nn.Module, not {type(model).__name__}")
    name = type(model).__name__
    if "_offmate_session" in model.__dict__:
        raise OffmateError(f"{name} has been compiled by offmate already; compile a model once")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise OffmateError("the model was compiled by torch.compile; give offmate the original, model._orig_mod")
    if name in _WRAPPERS or any(c.__name__ in _WRAPPERS for c in type(model).__mro__):
        raise OffmateError(f"the model is wrapped in {_WRAPPERS.get(name, name)}; give offmate the inner model.module")
    if any(c.__name__ == "FSDPModule" for c in type(model).__mro__):
        raise OffmateError(
            "the model was sharded by FSDP (fully_shard); offmate plans one unsharded model on one device"
        )
    spread = getattr(model, "hf_device_map", None)
    if spread and len(set(map(str, spread.values()))) > 1:
        raise OffmateError(
            f"the model is spread over {sorted(set(map(str, spread.values())))} by device_map; load it without "
            "device_map, offmate places its tensors itself"
        )
    _check_tensors(model)


def _check_tensors(model: torch.nn.Module) -> None:
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None):
        method = getattr(model, "quantization_method", "an unknown method")
        raise OffmateError(
            f"the model's weights are quantised ({method}), which cannot be streamed yet; load it without quantization"
        )
    for name, param in model.named_parameters():
        if param.device.type not in ("cpu", "meta"):
            raise OffmateError(
                f"{name} is on {param.device}; offmate starts from host memory: call model.cpu() first, and leave out "
                "model.to(device) after it"
            )
        if type(param) not in (torch.nn.Parameter, torch.Tensor):
            kind = type(param).__name__
            raise OffmateError(
                f"{name} is a {kind}, not a plain parameter; quantised and distributed weights cannot be streamed. "
                "Load plain weights (dtype float32, bfloat16 or float16)"
            )
        if param.layout is not torch.strided:
            raise OffmateError(
                f"{name} has layout {param.layout}; only strided parameters can be planned: convert it with to_dense()"
            )
        if param.dtype.is_complex:
            raise OffmateError(
                f"{name} is of {param.dtype}; complex parameters cannot be planned yet: hold it as a real tensor with "
                "a last dimension of 2 and use torch.view_as_complex in the forward"
            )
