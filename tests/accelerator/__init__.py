"""A simulated accelerator, so that a runtime for accelerators can be tested without one.

PyTorch tensors on the device type "sim": streams, events, caching allocator and pinned memory behave like CUDA's, and
the kernels are the CPU's.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

NAME = "sim"
_SOURCES = sorted((Path(__file__).parent / "csrc").glob("*.cpp"))


def load() -> str | None:
    """Register the device with torch, built first if it has not been built yet.

    Where the process has computed gradients before, the device cannot compute any: see `prepare`.

    Returns
    -------
    The name of the device type, or None where nothing can be built; `why_not()` has the reason then.

    Raises
    ------
    RuntimeError: the compiler is there and does not accept the sources.
    """
    return None if why_not() else _register()


def prepare() -> None:
    """Build the device, and reserve autograd's thread for it, without making it torch's accelerator yet."""
    if not why_not():
        _build()


@functools.cache
def why_not() -> str:
    """What the simulated accelerator needs to be built and is not here; empty if nothing is missing."""
    compiler = os.environ.get("CXX", "c++")
    for tool in (compiler, "ninja"):
        if shutil.which(tool) is None:
            return f"the simulated accelerator is built with {tool}, which is not installed"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated accelerator is built with Python's headers, which are not installed"
    return ""


@functools.cache
def _register() -> str:
    from . import device

    device.native = _build()
    device.native.register_device()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device)
    torch.utils.generate_methods_for_privateuse1_backend()
    return NAME


@functools.cache
def _build() -> ModuleType:
    from torch.utils import cpp_extension

    # One folder for each torch, interpreter and state of the sources: checkouts do not disturb each other.
    texts = b"".join(path.read_bytes() for path in sorted(_SOURCES[0].parent.iterdir()))
    version = f"{torch.__version__}-{sys.implementation.cache_tag}-{hashlib.sha256(texts).hexdigest()[:12]}"
    folder = Path(cpp_extension.get_default_build_root()) / f"offmate-{NAME}-{version}".replace("+", "-")
    folder.mkdir(parents=True, exist_ok=True)
    return cpp_extension.load(
        name="offmate_simulated_accelerator",
        sources=[str(source) for source in _SOURCES],
        extra_cflags=["-O1", "-std=c++20"],
        build_directory=str(folder),
    )
