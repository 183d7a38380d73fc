"""The parameters and buffers of a compiled model: the same objects, of classes that notice reads and edits."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..errors import ProtocolError
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.autograd import without_torch_function
from ..runtime.torch_names.tensors import VERSION, ParameterByClass, as_class


def _shows_no_values() -> frozenset[Any]:
    """Return the functions of a parameter that reveal nothing about its values, so that no wait is needed."""
    properties = (
        "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "grad_fn", "ndim", "nbytes",
        "itemsize", VERSION, "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_nested",
    )  # fmt: skip
    methods = (
        "size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
        "storage_offset", "is_contiguous", "get_device", "requires_grad_", "register_hook", "__len__",
    )  # fmt: skip
    found: set[Any] = {getattr(torch.Tensor, name) for name in methods}
    for name in properties:
        descriptor = getattr(torch.Tensor, name)
        found |= {descriptor.__get__, getattr(descriptor, "__set__", None)}
    return frozenset(found)


_SHOWS_NO_VALUES = _shows_no_values()
_TENSOR: Any = torch.Tensor
_DATA = _TENSOR.data.__get__
_MAKES_PARAMETERS = torch.nn.Parameter.__new__.__code__


def _reads(func: Any, cls: type, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors of this class whose values a function may see or change."""
    if func in _SHOWS_NO_VALUES:
        return []
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]


class _Copied(ParameterByClass):
    """A parameter whose copies and pickles are plain, and from which `torch.nn.Parameter` makes a plain one."""

    def detach(self: Any) -> torch.Tensor:
        """Return the values without a gradient, with the same version counter."""
        values: torch.Tensor = _TENSOR.detach(self)
        if sys._getframe(1).f_code is not _MAKES_PARAMETERS:
            return values
        # torch expects an object of the same class here, and then marks it as a parameter.
        return as_class(values, type(self))

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> torch.nn.Parameter:
        copy = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class WatchedParameter(_Copied, torch.nn.Parameter):
    """A parameter that no plan updates: edits through `.data` are noticed, as are those in place."""

    _of_a_compiled_model = True

    @property
    def data(self) -> torch.Tensor:
        """The values; unlike `data` of other tensors, they share the version counter."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _TENSOR.data.__set__(self, value)


class PlannedParameter(_Copied, torch.nn.Parameter):
    """A parameter that the plan updates: its values are made current before they are read or written.

    Reading a gradient that the plan has consumed raises.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for read in _reads(func, cls, args, kwargs):
            read.__dict__["_offmate"].read("a parameter is used")
        with without_torch_function():
            # Unlike `data`, `detach` shares the version counter: edits through it are noticed.
            return args[0].detach() if func == _DATA else func(*args, **(kwargs or {}))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which the parameter is used; its memory is on the host, or does not exist yet."""
        own: torch.device = _TENSOR.device.__get__(self)
        return self.__dict__["_offmate"].device.torch_device if own.type == "cpu" else own

    @property
    def grad(self) -> torch.Tensor | None:
        session = self.__dict__["_offmate"]
        if session.turns.is_consumed(session.updater.names[self]):
            clipping = (
                "max_grad_norm= clips in optimizer.step(), so remove clip_grad_norm_ (model.offmate.grad_norm is the "
                "norm of the last step)"
                if session.request.clips
                else "to clip by global norm, pass max_grad_norm= to offmate.compile"
            )
            begun = "" if session.turns.gate else " and begun to update with it"
            raise ProtocolError(
                f"the planned optimizer has taken this gradient in backward(){begun}: {clipping}. If a "
                "torch.amp.GradScaler asks for it, pass that scaler as grad_scaler= to offmate.compile. To read or "
                "change .grad, compile without optimizer="
            )
        return _TENSOR.grad.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            self.__dict__["_offmate"].updates.assign(self, value)
            return
        self.__dict__["_offmate"].updates.clear(self)


def give_classes(session: Any) -> None:
    """Give every parameter of a session's model its present class, planned or watched."""
    planned = session.updater.names if session.updater is not None else {}
    with without_torch_function():
        for _, param in session.watch.parameters:
            if param in planned:
                param.__dict__["_offmate"] = session
                param.__class__ = PlannedParameter
            else:
                param.__class__ = WatchedParameter


class WrittenBuffer(torch.Tensor):
    """A buffer that forwards write on a device: its values are copied back before they are read or written."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for read in _reads(func, cls, args, kwargs):
            read.__dict__["_offmate"].bring_buffers()
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = memo[id(self)] = self.detach().clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def give_buffer_classes(model: torch.nn.Module, residence: Any, names: frozenset[str]) -> bool:
    """Make a model notice reads of buffers that are newer on the device; on a CPU they are the host's own.

    Parameters
    ----------
    residence: copies them back to the host. names: names of the buffers.

    Returns: whether any buffer's class has changed.
    """
    if residence.device.torch_device.type == "cpu" or not names:
        return False
    changed = False
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in names and type(buffer) is torch.Tensor:
            buffer.__dict__["_offmate"] = residence
            buffer.__class__ = WrittenBuffer
            changed = True
    return changed
