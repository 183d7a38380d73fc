"""Run a traced model's blocks operator by operator, without a plan, and compare with eager: quick enough for many."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn

from offmate.capture.blocks import TracedBlock
from offmate.capture.model import Traced, trace_model
from offmate.config import Config
from offmate.profile.operators import profile_prelude
from offmate.programs.prelude import lower_prelude

Numbers = dict[str, torch.Tensor]


def traced(model: nn.Module, *args: Any) -> Traced:
    """The model's blocks for one training batch."""
    return trace_model(model, args, {}, Config(cache_dir=None), True, lambda phase, share: None)


def check_replay(model: nn.Module, *args: Any, seed: int = 7) -> Traced:
    """Assert that the blocks give eager's outputs, gradients, buffers and random state bit for bit.

    Parameters
    ----------
    model: returns one tensor, whose sum is the loss.
    """
    found = traced(model, *args)
    twin = copy.deepcopy(model)
    torch.manual_seed(seed)
    expected = _eager(twin, args)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    got = _replayed(found, model, args)
    assert torch.equal(torch.get_rng_state(), state), "the random state differs"
    assert expected.keys() == got.keys(), expected.keys() ^ got.keys()
    for name, value in expected.items():
        assert torch.equal(value, got[name]), f"{name} differs by up to {(value - got[name]).abs().max():.1e}"
    return found


def _eager(model: nn.Module, args: tuple[Any, ...]) -> Numbers:
    output = model(*args)
    output.backward(torch.ones_like(output))
    grads = {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    buffers = {f"buffer {n}": b for n, b in model.named_buffers()}
    return {"output": output.detach(), **buffers, **grads}


def _replayed(found: Traced, model: nn.Module, args: tuple[Any, ...]) -> Numbers:
    captured = found.captured
    values: dict[fx.Node, Any] = {}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {**captured.params, **captured.buffers}
    given = dict(zip(captured.inputs, args))
    nodes = {n.name: n for n in captured.graph.nodes}
    for name, node in nodes.items():
        if node.op == "placeholder":
            known = given.get(name, captured.constants.get(name))
            values[node] = tensors[names[name]].detach().clone() if name in names else known
    prelude = lower_prelude(captured, found.chain, found.blocks)
    values |= profile_prelude(prelude, {n.name: v for n, v in values.items()}, torch.device("cpu"))[0]
    kept = [_forward(block, values) for block in found.blocks]
    grads: dict[fx.Node, torch.Tensor] = {nodes[n]: torch.ones_like(values[nodes[n]]) for n in found.differentiated}
    for block, env in reversed(list(zip(found.blocks, kept))):
        _backward(block, env, grads)
    output = captured.outputs[0]
    assert isinstance(output, str)
    named = {f"grad of {names[n.name]}": g for n, g in grads.items() if n.name in captured.params}
    left = {f"buffer {names[n.name]}": values[n] for n in values if n.name in captured.buffers}
    return {"output": values[nodes[output]], **left, **named}


def _forward(block: TracedBlock, values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    joint = block.joint
    env: dict[fx.Node, Any] = {n: n.meta["constant"] for n in joint.graph.nodes if n.op == "get_attr"}
    for external, leaves in zip(block.spec.externals, joint.leaves):
        env |= dict.fromkeys(leaves, values[external.node])
    _run(joint.forward, env)
    for index, value in joint.writes.items():
        values[block.spec.externals[index].node].copy_(env[value])
    values |= {node: env[result] for node, result in zip(block.spec.results, joint.results)}
    return env


def _backward(block: TracedBlock, env: dict[fx.Node, Any], grads: dict[fx.Node, torch.Tensor]) -> None:
    joint, spec = block.joint, block.spec
    env |= {t: grads[spec.results[i]] for t, (i, _) in zip(joint.tangents, spec.tangents)}
    env |= {a: grads[e.node] for a, e in zip(joint.accumulators, spec.externals) if a is not None}
    _run(joint.backward, env)
    grads |= {e.node: env[g] for e, g in zip(spec.externals, joint.grads) if g is not None}


def _run(nodes: tuple[fx.Node, ...], env: dict[fx.Node, Any]) -> None:
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
