"""Private names of torch, transformers and trl: each is there, and stands in the one file that may use it."""

from __future__ import annotations

import pytest

from .house.imports import ROOT, modules
from .house.private_names import NAMES, has, missing, private_segments
from .house.private_uses import private_uses


def test_the_installed_libraries_have_every_name() -> None:
    sentences = [sentence for file in NAMES for sentence in missing(file)]
    assert not sentences, "\n".join(sentences)


def test_a_name_that_went_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "runtime/torch_names/tensors.py"
    gone = {"torch.Tensor._no_such": "what nobody needs", "torch.nn.Module._no_such": "more", "torch._no.such": "more"}
    monkeypatch.setitem(NAMES, file, NAMES[file] | gone)
    sentences = missing(file)
    assert len(sentences) == 3
    assert sentences[0].startswith("torch ") and "torch.Tensor._no_such, by which" in sentences[0]
    assert file in sentences[0] and "what nobody needs" in sentences[0]
    assert has("torch.nn.Module._parameters") and not has("torch.nn.Module._no_such")


def test_private_names_stay_in_their_files() -> None:
    others = [path for path in modules().values() if str(path.relative_to(ROOT)) not in NAMES]
    uses = [f"{path.relative_to(ROOT)}, {use}" for path in others for use in private_uses(path.read_text())]
    assert not uses, f"these belong into one of {', '.join(NAMES)}:\n" + "\n".join(uses)


def test_the_list_says_what_its_files_use() -> None:
    for file in NAMES:
        source = (ROOT / file).read_text()
        unlisted = [use for use in private_uses(source) if use.rpartition(" ")[2] not in private_segments(file)]
        assert not unlisted, f"tests/house/private_names.py does not list what {file} uses: {unlisted}"
        unused = [name for name in NAMES[file] if name.removesuffix(".default").rpartition(".")[2] not in source]
        assert not unused, f"{file} no longer uses {unused}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._subclasses import fake_tensor", "_subclasses"),
        ("from torch.utils import _pytree as pytree", "_pytree"),
        ("import torch._dynamo", "_dynamo"),
        ("import transformers._no_such", "_no_such"),
        ("import torch\nx = torch._C.something()", "_C"),
        ("import torch\nx = torch.ops.aten._softmax.default", "_softmax"),
        ("def f(model):\n    return model._forward_hooks", "_forward_hooks"),
        ("def f(tensor):\n    return tensor._base", "_base"),
        ("class A:\n    def f(self):\n        return self._parameters", "_parameters"),
        ("class A:\n    def __init__(self):\n        self._version = 1", "_version"),
        ("class A(Trainer):\n    def _clip_grad_norm(self, model):\n        pass", "_clip_grad_norm"),
        ("def f(param):\n    return getattr(param, '_post_accumulate_grad_hooks')", "_post_accumulate_grad_hooks"),
        ("patch('torch._inductor.config')", "_inductor"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert [use.rpartition(" ")[2] for use in private_uses(source)] == [name]


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nx = sys._getframe()",
        "import torch\nx = torch.nn.Module.__call__",
        "from ..runtime.torch_names import trees as pytree",
        "from .own import _own",
        "class A:\n    def __init__(self):\n        self._own = 1\n    def f(self, other):\n        return other._own",
        "'''Tensors have a `_version`.'''",
    ],
)
def test_what_is_public_or_the_sources_own_is_not(source: str) -> None:
    assert private_uses(source) == []
