"""Problems of Llama-like models, from a shape and a machine's rates, for tests, scaling and published tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..options.pieces import Grid, in_pieces
from ..problem import Block, Group, Option, Output, Problem, Rates, Shared, TensorSize, Value, log_share

LOSS_BYTES = 4
# Number of temporaries, each as large as the largest saved value, that a backward needs at its start and at its end.
_FIRST, _LAST = 2, 3


@dataclass(frozen=True)
class Shape:
    """A decoder's shape and its batch.

    Parameters
    ----------
    hidden, intermediate, vocab: widths. kv_hidden: width of keys and of values, 0 for `hidden` (no grouped heads).
    gated: whether the MLP has a gate besides its two products. tied: whether input and output embedding share weights.
    attention_heads: heads whose score matrices are kept (plain attention); 0 for a fused kernel, which keeps none.
    """

    layers: int
    hidden: int
    intermediate: int
    vocab: int
    batch: int
    sequence: int
    kv_hidden: int = 0
    gated: bool = True
    tied: bool = False
    attention_heads: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True)
class Precision:
    """Bytes per element of parameters, gradients, optimizer states (all of them together) and activations."""

    param_bytes: int = 4
    grad_bytes: int = 4
    state_bytes: int = 8
    activation_bytes: int = 4


@dataclass(frozen=True)
class Speeds:
    """The rates of a machine: operations, bytes of device memory moved, and bytes of parameters updated per second."""

    flops_per_s: float
    memory_bytes_per_s: float
    cpu_update_bytes_per_s: float
    device_update_bytes_per_s: float
    rates: Rates


@dataclass(frozen=True)
class _Saved:
    """One value that a block's forward keeps for its backward, and the seconds to recompute it."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class _Part:
    """One block before its options: parameters by elements, seconds of its forward, values that it saves and makes.

    Parameters
    ----------
    made_bytes: the value for the next block, or the loss. grad_bytes: that value's gradient. output_bytes: the logits,
        which the user holds and the next block reads.
    """

    name: str
    params: dict[str, int]
    forward_s: float
    saved: tuple[_Saved, ...]
    made_bytes: int
    grad_bytes: int
    output_bytes: int = 0


def llama(
    shape: Shape,
    speeds: Speeds,
    device_budget_bytes: int,
    host_budget_bytes: int,
    *,
    precision: Precision = Precision(),
    whole_layers: bool = False,
    iteration_s: float | None = None,
    activation_bytes: int | None = None,
) -> Problem:
    """Return the problem of training a Llama-like decoder: embedding, layers, output embedding, loss.

    The logits are an output. A block needs about as much memory as one captured from a model does, and no less.

    Parameters
    ----------
    whole_layers: one block per layer instead of one for attention and one for the MLP; one for output embedding and
        loss.
    iteration_s: seconds of forward, backward and device updates if everything fits, to which the computes are scaled;
        None for the seconds that follow from the speeds.
    activation_bytes: bytes that all forwards save together, to which the saved values are scaled; None for those that
        follow from the shape.

    Returns: a problem with planned updates.
    """
    parts = _parts(shape, speeds, precision, whole_layers)
    if activation_bytes is not None:
        scale = activation_bytes / sum(s.bytes for part in parts for s in part.saved)
        parts = [replace(p, saved=tuple(replace(s, bytes=round(s.bytes * scale)) for s in p.saved)) for p in parts]
    if iteration_s is not None:
        params = sum(sum(part.params.values()) for part in parts) * precision.param_bytes
        scale = (iteration_s - params / speeds.device_update_bytes_per_s) / sum(3 * part.forward_s for part in parts)
        if scale <= 0:
            raise ValueError(f"iteration_s is {iteration_s}; the device updates alone take longer")
        parts = [_slower(part, scale) for part in parts]
    n = len(parts)
    batch_bytes = shape.tokens * 8
    outputs = [Output("logits", part.output_bytes, i) for i, part in enumerate(parts) if part.output_bytes]
    return Problem(
        blocks=_blocks(parts, precision, shape.tied),
        groups=_groups(parts, shape, speeds, precision),
        values=tuple(_value(part, i, n) for i, part in enumerate(parts[:-1])),
        shared=(Shared("batch", batch_bytes, 2 * n - 1),),
        outputs=(*outputs, Output("loss", LOSS_BYTES, n - 1, LOSS_BYTES)),
        rates=speeds.rates,
        device_budget_bytes=device_budget_bytes,
        host_budget_bytes=host_budget_bytes,
        user_bytes=LOSS_BYTES,
        start_peak_bytes=batch_bytes,
    )


def speculating(problem: Problem) -> Problem:
    """Return a problem with a gate in which the host may update before it; logs take seconds by their bytes."""
    groups = (
        replace(g, cpu_log_s=g.cpu_update_s * log_share(g.param_bytes, g.grad_bytes, g.state_bytes))
        for g in problem.groups
    )
    return replace(problem, groups=tuple(groups), speculates=True)


def _parts(shape: Shape, speeds: Speeds, precision: Precision, whole_layers: bool) -> list[_Part]:
    hidden_bytes = shape.tokens * shape.hidden * precision.activation_bytes
    table = {"embedding": shape.vocab * shape.hidden}
    parts = [_Part("embedding", table, _moved_s(shape, speeds, precision, 1), (), hidden_bytes, hidden_bytes)]
    for i in range(shape.layers):
        attention, mlp = _attention(i, shape, speeds, precision), _mlp(i, shape, speeds, precision)
        parts += [_joined(f"layer{i}", attention, mlp)] if whole_layers else [attention, mlp]
    logits = _product(shape, speeds, precision, shape.hidden, shape.vocab)
    head = {} if shape.tied else {"head": shape.vocab * shape.hidden}
    product = _Part("head", head, logits.seconds, (), 0, logits.bytes, logits.bytes)
    log_likely = _moved(shape, speeds, precision, shape.vocab)
    loss = _Part("loss", {}, log_likely.seconds, (log_likely,), LOSS_BYTES, LOSS_BYTES)
    return [*parts, _joined("head", product, loss)] if whole_layers else [*parts, product, loss]


def _joined(name: str, first: _Part, second: _Part) -> _Part:
    forward_s, saved = first.forward_s + second.forward_s, first.saved + second.saved
    made = second.made_bytes, second.grad_bytes, first.output_bytes
    return _Part(name, first.params | second.params, forward_s, saved, *made)


def _value(part: _Part, i: int, n: int) -> Value:
    backward = 2 * n - 2 - i
    return Value(f"h{i}", part.made_bytes, i, (i + 1, backward), part.grad_bytes, (backward,))


def _moved_s(shape: Shape, speeds: Speeds, precision: Precision, widths: float) -> float:
    """Return the seconds of an operator that reads and writes `widths` hidden states."""
    moved = 2 * widths * shape.tokens * shape.hidden * precision.activation_bytes
    return moved / speeds.memory_bytes_per_s


def _product(shape: Shape, speeds: Speeds, precision: Precision, width: int, out: int) -> _Saved:
    """Return a matrix product from `width` to `out`, as its result and its seconds."""
    return _Saved(shape.tokens * out * precision.activation_bytes, 2 * shape.tokens * width * out / speeds.flops_per_s)


def _moved(shape: Shape, speeds: Speeds, precision: Precision, width: float) -> _Saved:
    """Return an elementwise operator, as its result and its seconds."""
    size = round(shape.tokens * width * precision.activation_bytes)
    return _Saved(size, 2 * size / speeds.memory_bytes_per_s)


def _attention(i: int, shape: Shape, speeds: Speeds, precision: Precision) -> _Part:
    h, kv, how = shape.hidden, shape.kv_hidden or shape.hidden, (shape, speeds, precision)
    query, key, value, out = (_product(*how, h, width) for width in (h, kv, kv, h))
    scores_s = 4 * shape.tokens * shape.sequence * h / speeds.flops_per_s
    mixed = _Saved(shape.tokens * h * precision.activation_bytes, scores_s)
    scores = _moved(*how, shape.attention_heads * shape.sequence)
    saved: tuple[_Saved, ...] = (_moved(*how, h), _moved(*how, h), query, key, value, _moved(*how, h + kv), mixed)
    saved += (scores, scores) if scores.bytes else ()
    params = {f"{i}.q": h * h, f"{i}.k": h * kv, f"{i}.v": h * kv, f"{i}.o": h * h}
    return _Part(f"attention{i}", params, sum(s.seconds for s in saved) + out.seconds, saved, out.bytes, out.bytes)


def _mlp(i: int, shape: Shape, speeds: Speeds, precision: Precision) -> _Part:
    h, wide, how = shape.hidden, shape.intermediate, (shape, speeds, precision)
    up, down = _product(*how, h, wide), _product(*how, wide, h)
    inner = (up, _moved(*how, wide)) + ((up, _moved(*how, wide)) if shape.gated else ())
    saved = (_moved(*how, h), _moved(*how, h), *inner)
    names = ("gate", "up", "down") if shape.gated else ("up", "down")
    params = {f"{i}.{name}": h * wide for name in names}
    return _Part(f"mlp{i}", params, sum(s.seconds for s in saved) + down.seconds, saved, down.bytes, down.bytes)


def _slower(part: _Part, scale: float) -> _Part:
    saved = tuple(replace(s, seconds=s.seconds * scale) for s in part.saved)
    return replace(part, forward_s=part.forward_s * scale, saved=saved)


def _blocks(parts: list[_Part], precision: Precision, tied: bool) -> tuple[Block, ...]:
    blocks = []
    for i, part in enumerate(parts):
        # The head makes a tied embedding's gradient, the embedding adds to it.
        made_here = parts[0].params if tied and part.output_bytes else part.params
        grads = sum(made_here.values()) * precision.grad_bytes + (parts[i - 1].grad_bytes if i else 0)
        total = sum(s.bytes for s in part.saved)
        largest = max((s.bytes for s in part.saved), default=0)
        forward = total + part.made_bytes + part.output_bytes + largest
        # A backward holds most at its start, with all saved values, or at its end, with all gradients.
        backward = part.grad_bytes + max(total + _FIRST * largest, grads + _LAST * largest)
        blocks.append(Block(part.name, _options(part, forward, backward, i < len(parts) - 1)))
    return tuple(blocks)


def _options(part: _Part, forward_bytes: int, backward_bytes: int, may_offload: bool) -> tuple[Option, ...]:
    """List a block's options: keep all; recompute more and more, cheapest per byte first; offload the rest or half.

    Parameters
    ----------
    forward_bytes, backward_bytes: the peaks. may_offload: False if the block's backward follows its forward at once.
    """
    order = sorted(range(len(part.saved)), key=lambda k: part.saved[k].seconds / max(part.saved[k].bytes, 1))
    total = sum(s.bytes for s in part.saved)
    cuts = sorted({0, len(order) // 2, 3 * len(order) // 4, len(order)})
    peaks = (forward_bytes, backward_bytes)
    options = []
    for cut in cuts:
        again = [part.saved[k] for k in order[:cut]]
        seconds = sum(s.seconds for s in again)
        rest = total - sum(s.bytes for s in again)
        back_s = 2 * part.forward_s + seconds
        options.append(
            Option(f"recompute {cut} of {len(order)}" if cut else "keep", rest, 0, part.forward_s, back_s, *peaks)
        )
        if rest and may_offload:
            half = rest // 2
            options.append(Option(f"offload half, recompute {cut}", rest - half, half, part.forward_s, back_s, *peaks))
            options.append(Option(f"offload, recompute {cut}", 0, rest, part.forward_s, back_s, *peaks))
    return tuple(options)


def _groups(parts: list[_Part], shape: Shape, speeds: Speeds, precision: Precision) -> tuple[Group, ...]:
    last = 2 * len(parts) - 1
    head = next(i for i, part in enumerate(parts) if part.output_bytes)
    groups = []
    for i, part in enumerate(parts):
        if not part.params:
            continue
        tied = shape.tied and i == 0
        uses: tuple[int, ...] = (0, head, last - head, last) if tied else (i, last - i)
        if i == 0 and not tied:
            uses = (0,)  # the embedding's backward does not read it
        tensors = tuple(
            TensorSize(name, *(n * b for b in (precision.param_bytes, precision.grad_bytes, precision.state_bytes)))
            for name, n in part.params.items()
        )
        size = sum(t.param_bytes for t in tensors)
        groups.append(
            Group(
                part.name,
                tensors,
                uses,
                (last - head, last) if tied else (last - i,),
                size / speeds.cpu_update_bytes_per_s,
                size / speeds.device_update_bytes_per_s,
            )
        )
    # Every matrix is cut as if its rows were as wide as the hidden states.
    return in_pieces(groups, {name: Grid(n // shape.hidden) for part in parts for name, n in part.params.items()})
