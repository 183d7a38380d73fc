"""Says in the model's own terms why it does not export, and what to change."""

from __future__ import annotations

import re
import traceback

import torch
from torch import fx
from torch.nn.utils.rnn import PackedSequence

from ..errors import CaptureError
from ..runtime.torch_names.operators import OpOverload, schema_of
from .data_dependent import LineWanted, line_of, line_of_node

_ATTRIBUTE = re.compile(r"model attribute: (\S*?)(?:lifted_tensor|_tensor_constant)")  # whose tensor is not known

_SPARSE = (
    "a sparse tensor, which has no strides and cannot be planned. Make it dense (tensor.to_dense()), or multiply by it "
    "before the call and pass the product"
)
_VMAP = (
    "torch.vmap or a transform of torch.func, whose tensors have no memory of their own. Write the batch as a "
    "dimension of the tensors (torch.einsum, torch.bmm, broadcasting), or loop over it"
)
_PACKED = (
    "it runs a recurrent module on a packed sequence (pack_padded_sequence), whose batch size at each step depends on "
    "the lengths. Pass the padded sequences and select the valid steps with masks or torch.gather, or train this model "
    "with plain PyTorch"
)
_REASONS = (
    ("do not have strides", f"it reads {_SPARSE}"),
    ("functorch", f"it uses {_VMAP}"),
    (
        "Couldn't swap",
        "it converts a module (.to(), .float(), .half(), .cuda()) while it runs, which replaces parameters. A plan "
        "moves and updates only the parameters that the model already has. Convert the module before offmate.compile",
    ),
    (
        "fake tensor in the exported program constant's list",
        "it reads the `.data` of a parameter, or another tensor whose origin a trace does not see. Use the parameter "
        "itself (under torch.no_grad(), or detached), and write into parameters only outside of the forward",
    ),
    (
        "Unsupported input type",
        "torch.export does not accept an argument of this kind. Pass tensors, numbers (int(), float()), text, or "
        "lists, tuples and dicts of them",
    ),
)


def refusal(model: torch.nn.Module, error: Exception) -> CaptureError:
    """Return the error to raise for a model whose export failed with this error."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    start = f"{type(model).__name__} does not export{line_of(error)}: "
    if _runs_on_packed(error):
        return CaptureError(start + _PACKED)
    for part, words in _REASONS:
        if part in text:
            where = _ATTRIBUTE.search(text)
            module = where.group(1).rstrip(".") if where else ""
            inside = f", in {module}" if module else ""
            return CaptureError(f"{start}{words} ({type(error).__name__}: {first.partition('. ')[0]}{inside})")
    return CaptureError(
        f"{start}{type(error).__name__}: {first}. torch.export cannot follow a branch on a tensor's values, a shape "
        "that depends on data, or an object of an unknown class (a cache, for example). Run torch.export.export(model, "
        "args, kwargs, strict=False) to see its full message, and replace that construct; for a Hugging Face model, "
        "try attn_implementation='sdpa' or 'eager'"
    )


def _runs_on_packed(error: Exception) -> bool:
    """Return whether a recurrent module had a packed sequence when the error was raised."""
    frames = (frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        isinstance(value, PackedSequence)
        for names in frames
        if isinstance(names.get("self"), torch.nn.RNNBase)
        for value in names.values()
    )


def check_dense_tensors(graph: fx.Graph) -> None:
    """Raise CaptureError for the first node whose tensors are sparse, stand for others, or get a sparse gradient."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if "batch_dim" in getattr(node.target, "__name__", "") or "vmap" in getattr(node.target, "__name__", ""):
            raise LineWanted(f"the forward{line_of_node(node)} uses {_VMAP}")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            given = node.op == "placeholder"
            what = f"takes {node.name.removeprefix('b_').removeprefix('c_')}" if given else f"makes {node.name}"
            raise LineWanted(f"the forward {what}{line_of_node(node)}, {_SPARSE}")
        if _gives_sparse_gradient(node):
            raise LineWanted(
                f"{node.target}{line_of_node(node)} is called with sparse=True. The gradient of its weight is then a "
                "sparse tensor, which cannot be planned; call it with sparse=False"
            )


def _gives_sparse_gradient(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or "embedding" not in str(node.target):
        return False
    schema = schema_of(node.target)
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, node.args)) | node.kwargs
    weight = given.get("weight")
    trained = isinstance(weight, fx.Node) and getattr(weight.meta.get("val"), "requires_grad", False)
    return bool(given.get("sparse")) and trained and torch.is_grad_enabled()
