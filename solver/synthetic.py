"""Problems of Llama-like models from their shape and a machine's rates: for tests, scaling and published tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .problem import Block, Group, Option, Output, Problem, Rates, Shared, TensorSize, Value

LOSS_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """A decoder's shape and its batch.

    Parameters
    ----------
    hidden, intermediate, vocab: widths. kv_hidden: width of keys and of values, `hidden` without grouped heads.
    gated: whether the MLP has a gate besides its two products. tied: whether input and output embedding are one.
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
    """What a machine does per second: operations, bytes of device memory moved, bytes of parameters updated."""

    flops_per_s: float
    memory_bytes_per_s: float
    cpu_update_bytes_per_s: float
    device_update_bytes_per_s: float
    rates: Rates


@dataclass(frozen=True)
class _Saved:
    """One value that a block's forward keeps for its backward, and the seconds to compute it again."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class _Part:
    """One block before its options: parameters by elements, seconds of its forward, what it saves."""

    name: str
    params: dict[str, int]
    forward_s: float
    saved: tuple[_Saved, ...]
    logits_bytes: int = 0


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
    """The problem of training a Llama-like decoder: embedding, layers, output embedding with its loss.

    Parameters
    ----------
    whole_layers: one block per layer instead of one for attention and one for the MLP.
    iteration_s: seconds of forward, backward and device updates when everything fits, to which the computes are
        scaled; as the speeds say if None.
    activation_bytes: what all forwards save together, to which it is scaled; as the shape says if None.

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
    interface = shape.tokens * shape.hidden * precision.activation_bytes
    values = tuple(
        Value(f"h{i}", interface, i, (i + 1, 2 * n - 2 - i), interface, (2 * n - 2 - i,)) for i in range(n - 1)
    )
    batch_bytes = shape.tokens * 8
    return Problem(
        blocks=_blocks(parts, interface, precision, shape.tied),
        groups=_groups(parts, shape, speeds, precision),
        values=values,
        shared=(Shared("batch", batch_bytes, 2 * n - 1),),
        outputs=(Output("loss", LOSS_BYTES, n - 1, LOSS_BYTES),),
        rates=speeds.rates,
        device_budget_bytes=device_budget_bytes,
        host_budget_bytes=host_budget_bytes,
        user_bytes=LOSS_BYTES,
        start_peak_bytes=batch_bytes,
    )


def _parts(shape: Shape, speeds: Speeds, precision: Precision, whole_layers: bool) -> list[_Part]:
    embedding = _Part("embedding", {"embedding": shape.vocab * shape.hidden}, _moved_s(shape, speeds, precision, 1), ())
    parts = [embedding]
    for i in range(shape.layers):
        attention, mlp = _attention(i, shape, speeds, precision), _mlp(i, shape, speeds, precision)
        if whole_layers:
            both = _Part(
                f"layer{i}",
                attention.params | mlp.params,
                attention.forward_s + mlp.forward_s,
                attention.saved + mlp.saved,
            )
            parts.append(both)
        else:
            parts += [attention, mlp]
    logits = shape.tokens * shape.vocab
    seconds = 2 * logits * shape.hidden / speeds.flops_per_s
    saved = (_Saved(logits * precision.activation_bytes, seconds),)
    head = {} if shape.tied else {"head": shape.vocab * shape.hidden}
    parts.append(_Part("head", head, seconds, saved, logits * precision.activation_bytes))
    return parts


def _moved_s(shape: Shape, speeds: Speeds, precision: Precision, widths: float) -> float:
    """Seconds of an operator that reads and writes `widths` hidden states."""
    moved = 2 * widths * shape.tokens * shape.hidden * precision.activation_bytes
    return moved / speeds.memory_bytes_per_s


def _product(shape: Shape, speeds: Speeds, precision: Precision, width: int, out: int) -> _Saved:
    """A matrix product from `width` to `out`, and its result."""
    return _Saved(shape.tokens * out * precision.activation_bytes, 2 * shape.tokens * width * out / speeds.flops_per_s)


def _moved(shape: Shape, speeds: Speeds, precision: Precision, width: float) -> _Saved:
    """The result of an elementwise operator."""
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
    return _Part(f"attention{i}", params, sum(s.seconds for s in saved) + out.seconds, saved)


def _mlp(i: int, shape: Shape, speeds: Speeds, precision: Precision) -> _Part:
    h, wide, how = shape.hidden, shape.intermediate, (shape, speeds, precision)
    up, down = _product(*how, h, wide), _product(*how, wide, h)
    inner = (up, _moved(*how, wide)) + ((up, _moved(*how, wide)) if shape.gated else ())
    saved = (_moved(*how, h), _moved(*how, h), *inner)
    names = ("gate", "up", "down") if shape.gated else ("up", "down")
    params = {f"{i}.{name}": h * wide for name in names}
    return _Part(f"mlp{i}", params, sum(s.seconds for s in saved) + down.seconds, saved)


def _slower(part: _Part, scale: float) -> _Part:
    saved = tuple(replace(s, seconds=s.seconds * scale) for s in part.saved)
    return replace(part, forward_s=part.forward_s * scale, saved=saved)


def _blocks(parts: list[_Part], interface: int, precision: Precision, tied: bool) -> tuple[Block, ...]:
    blocks = []
    for i, part in enumerate(parts):
        made = interface if i < len(parts) - 1 else LOSS_BYTES
        # The head makes a tied embedding's gradient, the embedding adds to it.
        made_here = parts[0].params if tied and i == len(parts) - 1 else part.params
        grads = sum(made_here.values()) * precision.grad_bytes
        workspace = max((s.bytes for s in part.saved), default=0) + part.logits_bytes
        arrives = made + (interface if i else 0) + grads + workspace
        blocks.append(Block(part.name, _options(part, made + workspace, arrives)))
    return tuple(blocks)


def _options(part: _Part, forward_bytes: int, backward_bytes: int) -> tuple[Option, ...]:
    """Keep everything; recompute ever more, cheapest per byte first; offload what is left where recomputing is dear."""
    order = sorted(range(len(part.saved)), key=lambda k: part.saved[k].seconds / max(part.saved[k].bytes, 1))
    total = sum(s.bytes for s in part.saved)
    cuts = sorted({0, len(order) // 2, 3 * len(order) // 4, len(order)})
    options = []
    for cut in cuts:
        again = [part.saved[k] for k in order[:cut]]
        seconds = sum(s.seconds for s in again)
        rest = total - sum(s.bytes for s in again)
        back_s = 2 * part.forward_s + seconds
        peaks = (total + forward_bytes, total + backward_bytes)
        options.append(
            Option(f"recompute {cut} of {len(order)}" if cut else "keep", rest, 0, part.forward_s, back_s, *peaks)
        )
        if rest and not part.logits_bytes:
            half = rest // 2
            options.append(Option(f"offload half, recompute {cut}", rest - half, half, part.forward_s, back_s, *peaks))
            options.append(Option(f"offload, recompute {cut}", 0, rest, part.forward_s, back_s, *peaks))
    return tuple(options)


def _groups(parts: list[_Part], shape: Shape, speeds: Speeds, precision: Precision) -> tuple[Group, ...]:
    last = 2 * len(parts) - 1
    groups = []
    for i, part in enumerate(parts):
        if not part.params:
            continue
        tied = shape.tied and i == 0
        uses: tuple[int, ...] = (0, len(parts) - 1, last - len(parts) + 1, last) if tied else (i, last - i)
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
                (last - len(parts) + 1, last) if tied else (last - i,),
                size / speeds.cpu_update_bytes_per_s,
                size / speeds.device_update_bytes_per_s,
            )
        )
    return tuple(groups)
