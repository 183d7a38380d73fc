"""The LSTM layer as eager's forward runs it: its kernel computes differently if no gradient is recorded."""

from __future__ import annotations

from typing import Any

import torch

from ..torch_names.operators import schema_of

_KERNEL = torch.ops.aten.mkldnn_rnn_layer.default
_LIBRARY = torch.library.Library("offmate", "FRAGMENT")
_LIBRARY.define(str(schema_of(_KERNEL)).replace("aten::mkldnn_rnn_layer", "recorded_rnn_layer"))


def _recorded(*arguments: Any) -> Any:
    with torch.enable_grad():
        return _KERNEL(*arguments)


_LIBRARY.impl("recorded_rnn_layer", _recorded, "CompositeExplicitAutograd")
torch.library.register_fake("offmate::recorded_rnn_layer", _KERNEL, lib=_LIBRARY)

recorded_rnn_layer = torch.ops.offmate.recorded_rnn_layer.default
"""`mkldnn_rnn_layer`, with the values that its backward reads in any grad mode."""

_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_LIBRARY.define(str(schema_of(_BACKWARD)).replace("aten::mkldnn_rnn_layer_backward", "rnn_layer_backward"))
_LIBRARY.impl("rnn_layer_backward", _BACKWARD, "CompositeExplicitAutograd")


@torch.library.register_fake("offmate::rnn_layer_backward", lib=_LIBRARY)
def _(*arguments):
    return tuple(torch.empty_like(result) for result in _BACKWARD(*arguments))


rnn_layer_backward = torch.ops.offmate.rnn_layer_backward.default
"""`mkldnn_rnn_layer_backward`, whose fake kernel gives both biases one storage and whose kernel gives them two."""
