"""The gate: holds updates back until every gradient is complete, and clips gradients by their global norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..torch_names.operators import grouped_by_kind
from .binding import HostState
from .gradients import Gradient, Gradients
from .norms import Norms


@dataclass(frozen=True)
class Clip:
    """Clipping by the global norm of all gradients, as `torch.nn.utils.clip_grad_norm_` does it.

    Parameters
    ----------
    max_norm: gradients are scaled down if their norm is larger; infinity only measures it.
    names: all parameters, in the order in which their norms are added up.
    """

    max_norm: float
    names: tuple[str, ...]


def total_norm(norms: list[torch.Tensor]) -> torch.Tensor:
    """Return the global norm as `torch.nn.utils.get_total_norm` does for gradients that are all on one device.

    Parameters
    ----------
    norms: of the gradients, in the order of the parameters and of the gradients' dtypes. Those that were taken on the
        host enter the sum at the same position, so that the order of its terms is the same.
    """
    if not norms:
        return torch.tensor(0.0)
    where = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
    terms = dict(enumerate(norms))
    for dtype in {norm.dtype for norm in norms if norm.device != where}:
        own = [i for i, norm in enumerate(norms) if norm.device != where and norm.dtype == dtype]
        # In one copy, since the thread waits for every copy from pageable memory.
        terms |= zip(own, torch.stack([norms[i] for i in own]).to(where).unbind())
    order = _in_order_of_terms([norm.dtype for norm in norms], where)
    return torch.linalg.vector_norm(torch.stack([terms[i] for i in order]))


def _in_order_of_terms(dtypes: list[torch.dtype], where: torch.device) -> list[int]:
    """Return the order in which PyTorch adds norms: by dtype, in the order of its own hash table."""
    if len(set(dtypes)) == 1:
        return list(range(len(dtypes)))
    stand_ins: list[torch.Tensor | None] = [torch.empty(0, dtype=dtype, device=where) for dtype in dtypes]
    groups = grouped_by_kind([stand_ins], with_indices=True)
    return [index for _, indices in groups.values() for index in indices]


class Gate:
    """A gate that is closed from an iteration's first backward to its optimizer step, or always open without one.

    State: `HostState.gate_is_open`, `HostState.norm` and `HostState.unscaling`; `_scales`, by place, the factor that
    has yet to be applied to the gradients in `_unclipped`: those that had left for the host when the gate opened, and
    those in a lower precision than their parameters.

    Parameters
    ----------
    exists: whether the schedule has a gate. clip: the clipping; None for none. norms: those taken before it opens.
    """

    def __init__(self, exists: bool, clip: Clip | None, host: HostState, gradients: Gradients, norms: Norms) -> None:
        self._exists, self._clip, self._host, self._gradients, self._norms = exists, clip, host, gradients, norms
        self._scales: dict[torch.device, torch.Tensor] = {}
        self._unclipped: frozenset[str] = frozenset()

    @property
    def is_open(self) -> bool:
        """Return whether updates may begin."""
        return self._host.gate_is_open

    @property
    def leaves_gradients(self) -> bool:
        """Return whether the gate, when it opened, has left all gradients as they are."""
        return not self._scales

    def close(self) -> None:
        """Close the gate, if there is one, when a backward begins."""
        self._host.gate_is_open = not self._exists

    def open(self) -> None:
        """Take the norm of all gradients, now complete, scale those on the device, and let updates begin."""
        self._host.gate_is_open = True
        self._scales, self._unclipped = {}, frozenset()
        if self._clip is None:
            return
        gradients = self._measured(self._clip)
        norm = self._host.norm
        assert norm is not None
        scale = torch.clamp(self._clip.max_norm / (norm + 1e-6), max=1.0)
        if bool(scale == 1.0):  # scaling would change nothing
            return
        # Those in a lower precision are scaled in their parameters' own, when these are updated.
        is_low = self._host.is_low
        later = {name for name, gradient in gradients.items() if gradient.on_host or is_low(name, gradient.tensor)}
        for name, gradient in gradients.items():
            if name not in later:
                gradient.tensor.mul_(scale.to(gradient.tensor.device))
        self._scales = {place: scale.to(place) for place in {scale.device, torch.device("cpu")}}
        self._unclipped = frozenset(later)

    def measure(self) -> None:
        """Take the norm of all gradients, for which no update has waited, from those taken as they became complete."""
        if self._clip is not None:
            self._host.norm = total_norm(self._norms.taken(self._clip.names))
            self._norms.clear()

    def unscale(self) -> None:
        """Unscale the complete gradients that have not been unscaled yet, wherever they lie, and take their norm."""
        unscaling = self._host.unscaling
        assert unscaling is not None
        for event in unscaling.arrived:
            event.synchronize()
        for name in self._gradients.names:
            if name not in unscaling.done:
                unscaling.take({name: self._gradients.whole(name).tensor})
        if self._clip is not None:
            self._measured(self._clip)
            unscaling.norm = self._host.norm

    def _measured(self, clip: Clip) -> dict[str, Gradient]:
        """Take the norm of all gradients, unless it is known since they were unscaled, and return them."""
        gradients = {name: self._gradients.whole(name) for name in clip.names if self._gradients.exists(name)}
        if self._host.unscaling is None or self._host.unscaling.norm is None:
            norms = self._norms.of({name: gradient.tensor for name, gradient in gradients.items()})
            self._host.norm = total_norm(norms)
            self._norms.clear()
        return gradients

    def scale_of(self, name: str, place: torch.device) -> torch.Tensor | None:
        """Return the factor still to be applied to the host's copy of this parameter's gradient, None for none.

        Parameters
        ----------
        place: the device on which it is wanted, the host's or the one to which that copy has returned.
        """
        if name not in self._unclipped:
            return None
        if place not in self._scales:
            self._scales[place] = next(iter(self._scales.values())).to(place)
        return self._scales[place]
