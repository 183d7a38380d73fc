"""Kernels and gradients that eager mode chooses by what a trace does not see: values, grad modes, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from offmate import CaptureError

from .test_refused_by_name import Net, alike, made, train


@pytest.mark.parametrize("name", ["bilinear", "pinv"])
def test_casts_inside_a_kernel_are_refused_under_autocast(name: str):
    class Casting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = torch.nn.Bilinear(8, 8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if name == "bilinear":
                return self.mixed(x, x).square().mean()
            return torch.linalg.pinv(self.a.weight).square().mean() + super().forward(x)

    alike(Casting)
    with pytest.raises(CaptureError, match=f"{name} under torch.autocast"), torch.autocast("cpu", torch.bfloat16):
        train(Casting, True)


VALUES = {
    "singular values": torch.linalg.svdvals,
    "eigenvalues": lambda h: torch.linalg.eigvalsh(h @ h.T),
    "nuclear norm": lambda h: torch.linalg.matrix_norm(h, "nuc"),
    "spectral norm": lambda h: torch.linalg.matrix_norm(h, 2),
    "condition": torch.linalg.cond,
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_values_of_decompositions_are_eagers_with_and_without_gradients(name: str, gradients: bool):
    class Decomposing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # An input without gradient is decomposed for its values alone, in training, too.
            return VALUES[name](self.a(x)).sum() + VALUES[name](x @ x.T).sum() + super().forward(x)

    def run(compiles: bool) -> torch.Tensor:
        model, _ = made(Decomposing, compiles)
        with torch.set_grad_enabled(gradients):
            return model(torch.randn(37, 8)).detach()

    assert torch.equal(run(True), run(False))


PRODUCTS = {
    "all": lambda h: h.prod(),
    "rows": lambda h: h.prod(1).sum(),
    "transposed": lambda h: h.T.prod(1, keepdim=True).sum(),
    "in double": lambda h: h.prod(0, dtype=torch.float64).sum().float(),
}


@pytest.mark.parametrize("zeros", [0, 1, 3])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_of_products_are_eagers_with_and_without_zeros(name: str, lower: bool, zeros: int):
    class Multiplying(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factors = 1 + 0.1 * self.b(self.a(x))
            mask = torch.ones(3, 8)
            mask.view(-1)[:zeros] = 0
            return PRODUCTS[name](factors * mask)

    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        model, optimizer = made(Multiplying, True)
        plain, own = made(Multiplying, False)
        losses = [m(torch.full((3, 8), 0.3)) for m in (model, plain)]
    for loss, stepped in zip(losses, (optimizer, own)):
        loss.backward()
        stepped.step()
    assert torch.equal(losses[0], losses[1])
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


READS_A_VALUE = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11's reads a value, which is refused")


@pytest.mark.parametrize("name", [pytest.param("quantile", marks=READS_A_VALUE), "rank"])
def test_operators_that_the_trace_gives_their_own_storage(name: str):
    class Viewing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.a(x)
            if name == "quantile":
                return hidden.quantile(0.3, 1).sum() + super().forward(x)
            return torch.linalg.matrix_rank(hidden) * super().forward(x)

    alike(Viewing)


class ProductInside(torch.autograd.Function):
    """Its forward and its backward call what eager mode computes by values or without gradients."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return y.prod(1) * torch.linalg.svdvals(y).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            found = torch.autograd.grad(leaf.prod(1), leaf, grad)[0]
        return found * torch.linalg.matrix_norm(y, 2)


def test_custom_functions_call_what_eager_mode_calls():
    class Custom(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ProductInside.apply(self.a(x) + 1).square().mean() + super().forward(x)

    alike(Custom)


@pytest.mark.parametrize("reentrant", [False, True])
def test_values_in_a_checkpoint(reentrant: bool):
    def body(y: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(y).sum() * y * y.norm()

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(checkpoint(body, self.a(x), use_reentrant=reentrant))

    if not reentrant:
        alike(Checkpointed)
        return
    with pytest.raises(CaptureError, match=r"use_reentrant=True calls .*svdvals"):
        train(Checkpointed, True)


@pytest.mark.parametrize("rows", [0, 3])
def test_products_without_elements(rows: int):
    class Empty(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.a(x)
            return hidden[:rows, :0].prod(1).sum() + hidden[:0].prod(0).sum() + super().forward(x)

    alike(Empty)


WRITES = {
    "a slice": lambda own, x: own.state[:2].mul_(0.5),
    "an item": lambda own, x: own.state.__setitem__((0, slice(1, 3)), 0.5),
    "a row from the input": lambda own, x: own.state[1].copy_(x[0]),
    "a transposed view": lambda own, x: own.state.t().add_(0.1),
    "chunks": lambda own, x: [part.add_(1) for part in own.state.chunk(2)],
    "a view of a view": lambda own, x: own.state.view(-1)[3:].view(-1)[2:5].fill_(x.mean()),
    "out=": lambda own, x: torch.mul(x[0], 2, out=own.state[2]),
    "masked": lambda own, x: own.state[:1].masked_fill_(x[:1] > 0, 0.3),
}


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_buffers_are_written_through_views(name: str, planned: bool):
    class Writing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.ones(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                WRITES[name](self, x)
            return super().forward(x) * self.state.sum()

    found = []
    for compiles in (True, False):
        model, optimizer = made(Writing, compiles, planned)
        for _ in range(3):
            loss = model(torch.randn(3, 8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([loss.detach(), *(value.clone() for value in model.state_dict().values())])
    assert all(map(torch.equal, *found))


def test_a_write_into_a_view_of_the_batch_is_refused():
    class Writing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[0].zero_()
            return super().forward(x)

    with pytest.raises(CaptureError, match="writes into x"):
        train(Writing, True)


def regular(hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ hidden.T + torch.eye(len(hidden))


CHECKED = {
    "inverse": lambda h: torch.linalg.inv(regular(h)),
    "cholesky": lambda h: torch.linalg.cholesky(regular(h)),
    "solve": lambda h: torch.linalg.solve(regular(h), h),
    "factors": lambda h: torch.linalg.lu_factor(regular(h))[0],
    "power": lambda h: torch.linalg.matrix_power(regular(h), -2),
    "eigenvalues": lambda h: torch.linalg.eigvals(regular(h)).real,
    "without gradient": lambda h: torch.linalg.inv(regular(h).detach()) @ h,
}


@pytest.mark.parametrize("name", CHECKED)
def test_decompositions_that_check_their_matrix(name: str):
    class Decomposing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return CHECKED[name](self.a(x)).square().mean() + super().forward(x)

    alike(Decomposing)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_singular_matrix_raises_what_it_raises_in_eager_mode(gradients: bool):
    class Singular(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(regular(self.a(x)) * 0).sum() + super().forward(x)

    said = []
    for compiles in (True, False):
        model, _ = made(Singular, compiles)
        with pytest.raises(torch.linalg.LinAlgError) as raised, torch.set_grad_enabled(gradients):
            model(torch.randn(3, 8))
        said.append(str(raised.value).partition("\n")[0])
    assert said[0] == said[1] and "linalg.inv: The diagonal element 1 is zero" in said[0]
