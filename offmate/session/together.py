"""An update whose micro-batches run block by block: all forwards at the first call, all backwards at the last one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ProtocolError
from .announced import Arguments, Expected
from .autograd import Iteration
from .variants import Call, Variant

Tensors = list[torch.Tensor | None]


class Together:
    """The micro-batches of one update, which a plan's steps run in turn.

    State: `slot`, the micro-batch whose call or backward() is under way; the outputs that are still to be handed out,
    and the gradients that were handed in. Changed by one thread at a time.

    Parameters
    ----------
    variant: the plan, of all of them. calls: foreseen, in order.
    """

    def __init__(self, variant: Variant, calls: Sequence[Call]) -> None:
        self.variant = variant
        self.slot = -1
        self._tensors = [call.tensors for call in calls]
        self._expected = [Expected(_arguments(call), number) for number, call in enumerate(calls, 1)]
        self._outputs: list[dict[str, torch.Tensor]] = []
        self._gradients: list[dict[str, torch.Tensor]] = []
        self._iterations: list[Iteration] = []
        self._drawn: torch.Tensor | None = None  # the generator's state after all forwards, if they draw

    def called(self, call: Call) -> Tensors:
        """Note the next call, and return its tensors; raises ProtocolError if it was not foreseen like this."""
        own = self.variant.kind
        if call.kind._replace(together=own.together, early=own.early) != own:
            raise ProtocolError(
                f"the model or torch's settings (modes, attributes, hooks, autocast) have changed before the call for "
                f"micro-batch {self.slot + 2}, but its forward has run already, as they were at the first call. No "
                "update was made; zero_grad() drops it. Change them between updates, or compile with "
                'config=offmate.Config(accumulation_order="by batch")'
            )
        self._expected[self.slot + 1].check(_arguments(call))
        edited = [name for iteration in self._iterations[-1:] for name in iteration.edited_buffers()]
        if edited:
            raise ProtocolError(
                f"the buffer {edited[0]} was edited before the call for micro-batch {self.slot + 2}, whose forward has "
                "run already. No update was made; zero_grad() drops it. Edit buffers between updates, or compile with "
                'config=offmate.Config(accumulation_order="by batch")'
            )
        if self._drawn is not None and not torch.equal(self._drawn, torch.get_rng_state()):
            raise ProtocolError(
                f"random numbers were drawn between the calls for micro-batches {self.slot + 1} and {self.slot + 2}, "
                "whose forwards have drawn theirs already, so both would get other numbers than in plain PyTorch. Draw "
                "them before the first call or after the last one, or compile with "
                'config=offmate.Config(accumulation_order="by batch")'
            )
        self.slot += 1
        return self._tensors[self.slot]

    def outputs(self) -> dict[str, torch.Tensor]:
        """Return the outputs of the call under way; the first one runs all forwards."""
        if self.slot == 0:
            executor = self.variant.executor
            self._outputs = executor.forwards([tuple(tensors) for tensors in self._tensors])
            self._drawn = torch.get_rng_state() if executor.draws else None
        outputs, self._outputs[self.slot] = self._outputs[self.slot], {}
        return outputs

    @property
    def ran_ahead(self) -> bool:
        """Return whether forwards of later calls have drawn random numbers or written buffers already."""
        return self._drawn is not None or bool(self.variant.prepared.binding.written_buffers)

    @property
    def is_last(self) -> bool:
        """Return whether the call or backward() under way is that of the last micro-batch."""
        return self.slot == len(self._tensors) - 1

    def keep(self, gradients: dict[str, torch.Tensor], iteration: Iteration) -> None:
        """Keep the gradients of the outputs of the call under way, of which the caller may use the memory again."""
        self._gradients.append({name: gradient.clone() for name, gradient in gradients.items()})
        self._iterations.append(iteration)

    def changed_output(self) -> str | None:
        """Return an output that the user has changed after its own backward(), and that the real one reads."""
        changed = (name for iteration in self._iterations for name in iteration.changed_outputs())
        return next(changed, None)

    def run(self, gradients: dict[str, torch.Tensor], speculates: bool) -> None:
        """Run all backwards; the gradients are those of the last call's outputs.

        Parameters
        ----------
        speculates: whether updates that the schedule places before the gate may begin there.
        """
        given, self._gradients, self._iterations = [*self._gradients, gradients], [], []
        self.variant.executor.backwards(given, speculates=speculates)


def _arguments(call: Call) -> Arguments:
    args, kwargs = call.given
    return args, kwargs
