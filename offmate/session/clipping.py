"""When to update before the gate: a rule that sees which steps clip, and nothing else."""

from __future__ import annotations

from collections import deque

from ..plans.break_even import BreakEven

WINDOW = 64  # steps over which the share is taken
_EVIDENCE = 25.0  # with which chance costs less than 1 % of the time, see `Clipping`
_MORE = 2.0  # by which the evidence grows that is asked for after every return


class Clipping:
    """Decides before every update whether the CPU updates before the gate.

    It keeps an account of the seconds that updates before the gate would have gained, whether they were made or not,
    which never falls below 0 nor rises above what it asks for. They begin when the account is full and, of the last 64
    steps, a smaller share than the break-even one has missed. They end when the account is empty, and from then on
    it asks for twice as much.

    With g, g (1 - a) and g (1 + b) the seconds of a step that waits, is kept and misses, the account is full with
    25 a b g, and what a switch takes: after 25 b steps that are kept, and empty after 25 a that miss. If steps miss
    independently, it is on the wrong side by chance for so little time that it loses at most 0.8 % against the better
    way, near the break-even share (docs/formulation.md). Since the evidence grows, a sequence that does not answer to
    the rule, such as one that alternates with a period near 64, costs a few times its own swing, and not a share of the
    time. One that does answer, in which each step is the worse one after what was decided, costs any rule
    a b / (a + b) of g per step, and this one up to 2 a b / (a + 2 b).

    State: `early`, what it has decided; the account in seconds, the multiple of what it asks for, and the last 64
    steps. Changed by one thread.

    Source: Borodin, Linial and Saks, An optimal on-line algorithm for metrical task systems, 1992 (two states).
    """

    def __init__(self) -> None:
        self.early = False
        self._steps: deque[bool] = deque(maxlen=WINDOW)
        self._account_s = 0.0
        self._times = 1.0

    @property
    def steps(self) -> tuple[int, int]:
        """Of the last steps, how many missed, and how many were seen."""
        return sum(self._steps), len(self._steps)

    def note(self, figures: BreakEven, missed: bool) -> bool:
        """Note a step; return whether the next one is to update otherwise than this one.

        Parameters
        ----------
        figures: of the plans for this step's batch. missed: whether gradients were clipped or the update was skipped,
            or whether updates before the gate would have been undone for another reason.
        """
        self._steps.append(missed)
        if not figures.share:
            return False
        gained_s, lost_s = figures.gained_s, figures.lost_s
        full_s = self._times * (_EVIDENCE * gained_s * lost_s / figures.gated_s + figures.switch_s)
        account_s = self._account_s + (-lost_s if missed else gained_s)
        self._account_s = min(full_s, max(0.0, account_s))
        misses, seen = self.steps
        if self.early:
            switches = account_s <= 0
            self._times *= _MORE if switches else 1.0
        else:
            switches = account_s >= full_s and misses < figures.share * seen
        self.early ^= switches
        return switches

    def wait(self) -> None:
        """End updates before the gate for another reason than the steps: for now, there is no room for them."""
        self.early, self._account_s = False, 0.0
        self._times *= _MORE
