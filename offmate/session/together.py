"""An update whose micro-batches run block by block, in one pass or several.

All forwards of a pass run at its first call, and all its backwards at its last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ProtocolError
from ..runtime.replay.computes import Incoming
from .announced import Arguments, Expected
from .autograd import Iteration
from .variants import Call, Variant

Tensors = list[torch.Tensor | None]


class Together:
    """The micro-batches of one update, of which a plan's steps run those of a pass in turn.

    State: `number`, the micro-batch whose call or backward() is under way, from 0; of its pass, the outputs that are
    still to be handed out, the gradients that were handed in, None for a micro-batch that is left out, and the forward
    of the micro-batch before. Changed by one thread at a time.

    Parameters
    ----------
    variants: of each micro-batch, which all use one executor. calls: foreseen, in order. per_pass: micro-batches of a
        pass. one_by_one: as in `Turns`.
    """

    def __init__(self, variants: Sequence[Variant], calls: Sequence[Call], per_pass: int, one_by_one: str) -> None:
        self._variants, self._per_pass, self._one_by_one = variants, per_pass, one_by_one
        self._executor = variants[0].executor
        self.number = -1
        self._tensors = [call.tensors for call in calls]
        self._expected = [Expected(_arguments(call), number, one_by_one) for number, call in enumerate(calls, 1)]
        self._outputs: dict[int, dict[str, torch.Tensor]] = {}
        self._gradients: list[Incoming] = []
        self._iterations: list[Iteration] = []
        self._before: Iteration | None = None
        self._drawn: torch.Tensor | None = None  # the generator's state after a pass's forwards, if they draw

    def called(self, call: Call) -> Tensors:
        """Note the next call, and return its tensors; raises ProtocolError if it was not foreseen like this."""
        if not self._has_its_settings(call):
            raise ProtocolError(
                f"the model or torch's settings (modes, attributes, hooks, autocast) have changed before the call for "
                f"micro-batch {self.number + 2}, but {self._goes_on}, as they were at the first call. No "
                f"update was made; zero_grad() drops it. Change them between updates, or {self._one_by_one}"
            )
        self._check_arguments(_arguments(call))
        edited = self._before.edited_buffers() if self._before is not None else []
        if edited:
            self.check_begins_pass(edited[0])
        drew = self._drawn is not None and not torch.equal(self._drawn, self._executor.generator.state())
        if drew and not self.begins_pass:
            raise ProtocolError(
                f"random numbers were drawn between the calls for micro-batches {self.number + 1} and "
                f"{self.number + 2}, whose forwards have drawn theirs already, so both would get other numbers than in "
                f"plain PyTorch. Draw them before the first call or after the last one, or {self._one_by_one}"
            )
        self.number += 1
        return self._tensors[self.number]

    @property
    def variant(self) -> Variant:
        """The variant of the micro-batch whose call or backward() is under way; at first that of the first one."""
        return self._variants[max(self.number, 0)]

    def _has_its_settings(self, call: Call) -> bool:
        """Return whether a call has the properties of the next one that was foreseen, its arguments apart."""
        own = self._variants[min(self.number + 1, len(self._variants) - 1)].kind
        alike = call.kind._replace(together=own.together, early=own.early)
        return alike._replace(arguments=own.arguments, leaves=own.leaves, strides=own.strides) == own

    def expects(self, call: Call) -> bool:
        """Return whether this is the next call, as it was foreseen."""
        following = self._expected[self.number + 1 : self.number + 2]
        return self._has_its_settings(call) and any(one.differs(_arguments(call)) is None for one in following)

    def check_begins_pass(self, buffer: str) -> None:
        """Raise ProtocolError if a buffer was edited whose values the forward of the next call has read already."""
        if not self.begins_pass:
            raise ProtocolError(
                f"the buffer {buffer} was edited before the call for micro-batch {self.number + 2}, whose forward has "
                "run already. No update was made; zero_grad() drops it. Edit buffers between updates, or "
                f"{self._one_by_one}"
            )

    @property
    def begins_pass(self) -> bool:
        """Return whether the next call is the first one of a pass."""
        return (self.number + 1) % self._per_pass == 0

    def _check_arguments(self, arguments: Arguments) -> None:
        """Raise if a call is not the one that was foreseen; it may be that of a later batch."""
        expected, *later = self._expected[self.number + 1 :]
        if expected.differs(arguments) is not None and any(one.differs(arguments) is None for one in later):
            raise ProtocolError(
                f"the model was not called with the batch of micro-batch {self.number + 2}, but with a later one of "
                f"this update, and {self._goes_on}. No update was made; zero_grad() drops it. Call the model with each "
                f"batch; to leave one out, leave out its backward(). Or {self._one_by_one}"
            )
        expected.check(arguments)

    @property
    def _goes_on(self) -> str:
        return "the plan goes on" if self.begins_pass else "its forward has run already"

    def outputs(self) -> dict[str, torch.Tensor]:
        """Return the outputs of the call under way; the first one of a pass runs all forwards of it."""
        number, slot = divmod(self.number, self._per_pass)
        if slot == 0:
            own = slice(self.number, self.number + self._per_pass)
            shapes = [variant.shape for variant in self._variants[own]]
            outputs = self._executor.forwards([tuple(tensors) for tensors in self._tensors[own]], number, shapes)
            self._outputs = dict(enumerate(outputs, self.number))
            self._drawn = self._executor.generator.state() if self._executor.drawn_from else None
        return self._outputs.pop(self.number)

    def drop(self) -> str:
        """Place the generator where plain PyTorch has it, before the forwards whose calls are still to come.

        Returns: what stays ahead of plain PyTorch's; empty for nothing.
        """
        if not self.is_ahead:
            return ""
        ahead = ["buffers"] if self.variant.prepared.binding.written_buffers else []
        generator = self._executor.generator
        if self._drawn is not None and torch.equal(self._drawn, generator.state()):
            generator.place(self._executor.drawn_from[(self.number + 1) % self._per_pass])
        elif self._drawn is not None:  # the loop has drawn since, and its numbers are others already
            ahead.insert(0, "random numbers")
        return " and ".join(ahead)

    @property
    def is_ahead(self) -> bool:
        """Return whether forwards have run whose calls are still to come."""
        return bool(self._outputs)

    @property
    def is_last(self) -> bool:
        """Return whether the call or backward() under way is that of the last micro-batch of its pass."""
        return self.begins_pass or self.ends_update

    @property
    def ends_update(self) -> bool:
        """Return whether the call or backward() under way is that of the last micro-batch of the update."""
        return self.number == len(self._tensors) - 1

    def keep(self, gradients: dict[str, torch.Tensor], iteration: Iteration) -> None:
        """Keep the gradients of the outputs of the call under way, of which the caller may use the memory again."""
        self._gradients.append({name: gradient.clone() for name, gradient in gradients.items()})
        self._iterations.append(iteration)
        self._before = iteration

    def leave_out(self, iteration: Iteration) -> None:
        """Note that backward() of the call under way does not come, and is not that of its pass's last micro-batch."""
        self._gradients.append(None)
        self._before = iteration

    def check_outputs(self) -> None:
        """Raise ProtocolError if an output was changed after its own backward(), and the real one reads it."""
        changed = next((name for one in self._iterations for name in one.changed_outputs()), None)
        if changed is not None:
            raise ProtocolError(
                f"the output {changed!r} was changed in place after its backward(). With model.offmate.batches(), "
                "backwards of several micro-batches run after the last one, and may read it. This update was dropped. "
                f"Change outputs after optimizer.step(), or {self._one_by_one}"
            )

    def run(self, gradients: Incoming, speculates: bool) -> None:
        """Run all backwards of the pass; the gradients are those of its last call's outputs.

        Parameters
        ----------
        gradients: None if the last call's backward() is left out. speculates: whether updates that the schedule places
            before the gate may begin there.
        """
        given, self._gradients, self._iterations, self._before = [*self._gradients, gradients], [], [], None
        self._executor.backwards(given, self.number // self._per_pass, speculates)


def _arguments(call: Call) -> Arguments:
    args, kwargs = call.given
    return args, kwargs
