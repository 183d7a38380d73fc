"""Sequences that found something, made small: each is a test from then on. `--seed` prints them as they stand here."""

from __future__ import annotations

from .sequence import Sequence
from .table import Act
from .worlds import Setup

FOUND: dict[str, Sequence] = {
    "dropout rate changed": Sequence(
        seed=7,
        setup=Setup(kind="conv", habit="", optimizer="AdamW fused", planned=True, clip=0.5, micro=1, tight=True),
        acts=(
            Act(name="step", seed=265695473, inner=()),
            Act(name="dropout rate", seed=1703729684, inner=()),
            Act(name="step", seed=776213899, inner=()),
        ),
    ),
    "a hook that looks sees a fake tensor": Sequence(
        seed=1,
        setup=Setup(kind="mlp", habit="", optimizer="AdamW plain", planned=False, clip=None, micro=1, tight=True),
        acts=(Act(name="hook that looks", seed=901749037, inner=()), Act(name="step", seed=1912923437, inner=())),
    ),
    "evaluation in inference mode": Sequence(
        seed=0,
        setup=Setup(kind="attention", habit="", optimizer="AdamW fused", planned=False, clip=None, micro=1, tight=True),
        acts=(Act(name="evaluation in inference mode", seed=432508404, inner=()), Act(name="step", seed=1, inner=())),
    ),
    "AdamW as everybody writes it": Sequence(
        seed=26,
        setup=Setup(kind="routed", habit="", optimizer="AdamW", planned=True, clip=None, micro=2, tight=True),
        acts=(Act(name="three steps", seed=1845109735, inner=()),),
    ),
    "hook of a parameter": Sequence(
        seed=6,
        setup=Setup(kind="routed", habit="", optimizer="AdamW fused", planned=False, clip=None, micro=1, tight=True),
        acts=(
            Act(name="hook of a parameter", seed=1171229348, inner=()),
            Act(name="three steps", seed=1140404236, inner=()),
        ),
    ),
    "buffer edited before backward": Sequence(
        seed=300161,
        setup=Setup(kind="conv", habit="", optimizer="AdamW fused", planned=False, clip=None, micro=1, tight=True),
        acts=(
            Act(
                name="accumulated step",
                seed=794675707,
                inner=(("after forward", Act(name="buffer edited", seed=1284745402, inner=())),),
            ),
        ),
    ),
    "states cleared": Sequence(
        seed=42,
        setup=Setup(kind="routed", habit="", optimizer="AdamW fused", planned=True, clip=0.5, micro=1, tight=False),
        acts=(
            Act(name="step", seed=1801823908, inner=()),
            Act(name="states cleared", seed=1445662585, inner=()),
            Act(name="checkpoint", seed=1625792787, inner=()),
        ),
    ),
    "float attribute changed": Sequence(
        seed=11,
        setup=Setup(kind="conv", habit="", optimizer="SGD", planned=True, clip=None, micro=1, tight=False),
        acts=(
            Act(name="float attribute", seed=799609893, inner=()),
            Act(name="step", seed=179874663, inner=()),
            Act(name="float attribute", seed=271291275, inner=()),
            Act(name="step", seed=1, inner=()),
        ),
    ),
    "regulariser on a parameter": Sequence(
        seed=4,
        setup=Setup(kind="mlp", habit="", optimizer="AdamW fused", planned=True, clip=0.5, micro=2, tight=False),
        acts=(Act(name="step with regulariser", seed=1547240115, inner=()),),
    ),
    "states read": Sequence(
        seed=31,
        setup=Setup(kind="mlp", habit="", optimizer="AdamW fused", planned=True, clip=None, micro=2, tight=False),
        acts=(Act(name="three steps", seed=142230572, inner=()), Act(name="state read", seed=399910392, inner=())),
    ),
    "hook of the backward": Sequence(
        seed=40,
        setup=Setup(kind="conv", habit="", optimizer="AdamW", planned=False, clip=None, micro=1, tight=True),
        acts=(
            Act(name="hook of the backward", seed=1442816606, inner=()),
            Act(name="accumulated step", seed=1251514142, inner=()),
        ),
    ),
    "state zeroed": Sequence(
        seed=62,
        setup=Setup(kind="adapters", habit="", optimizer="SGD", planned=True, clip=0.5, micro=1, tight=False),
        acts=(
            Act(name="three steps", seed=803488489, inner=()),
            Act(name="state zeroed", seed=737409258, inner=()),
            Act(name="checkpoint", seed=81231909, inner=()),
        ),
    ),
    "regulariser on a tied weight": Sequence(
        seed=600147,
        setup=Setup(kind="tied", habit="", optimizer="AdamW", planned=False, clip=None, micro=1, tight=False),
        acts=(Act(name="step with regulariser", seed=1770501126, inner=()),),
    ),
}
