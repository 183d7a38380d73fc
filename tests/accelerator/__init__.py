"""A simulated accelerator, so that a runtime for accelerators can be tested without one.

PyTorch tensors on the device type "sim": streams, events, caching allocator and pinned memory behave like CUDA's, and
the kernels are the CPU's.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

NAME = "sim"
_MODULE = "offmate_simulated_accelerator"
_SOURCES = sorted((Path(__file__).parent / "csrc").glob("*.cpp"))
# Compiled as one file each: most of what a compiler reads of them are headers of torch that they share.
_UNITS = (("autocast", "fallback", "operators", "views"), ("generator", "device", "device_memory", "streams"))


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
    for tool in (os.environ.get("CXX", "c++"), "ninja"):
        if shutil.which(tool, path=_search_path()) is None:
            return f"the simulated accelerator is built with {tool}, which is not installed"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated accelerator is built with Python's headers, which are not installed"
    return ""


@functools.cache
def _register() -> str:
    from . import device

    device.native = _build()
    device.native.register_device()
    atexit.register(device.native.settle)  # a kernel that is still under way at exit would abort the process
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device)
    torch.utils.generate_methods_for_privateuse1_backend()
    return NAME


def _search_path() -> str:
    """Where programs are looked for: ninja may lie in a virtual environment that has not been activated."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")))


@functools.cache
def _build() -> ModuleType:
    from torch.utils import cpp_extension

    os.environ["PATH"] = _search_path()
    # One folder for each torch, interpreter and state of the sources: checkouts do not disturb each other.
    texts = b"".join(path.read_bytes() for path in sorted(_SOURCES[0].parent.iterdir()))
    version = f"{torch.__version__}-{sys.implementation.cache_tag}-{hashlib.sha256(texts).hexdigest()[:12]}"
    folder = Path(cpp_extension.get_default_build_root()) / f"offmate-{NAME}-{version}".replace("+", "-")
    library = folder / f"{_MODULE}.so"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Where several processes share the suite one builds, with all cores, and the others wait.
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _imported(library) if library.exists() else _compiled(folder)


def _compiled(folder: Path) -> ModuleType:
    """The extension, compiled beside `folder` and moved there when it is whole: a build may be interrupted."""
    from torch.utils import cpp_extension

    scratch = tempfile.mkdtemp(dir=folder.parent, prefix=f"offmate-{NAME}-")
    try:
        module = cpp_extension.load(
            name=_MODULE,
            sources=_units(Path(scratch)),
            extra_cflags=["-O1", "-std=c++20"],
            build_directory=scratch,
        )
        with contextlib.suppress(OSError):  # another process was first
            Path(scratch).rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return module


def _units(scratch: Path) -> list[str]:
    """The files to compile, each a source or several in one."""
    together = {name for unit in _UNITS for name in unit}
    files = [source for source in _SOURCES if source.stem not in together]
    for unit in _UNITS:
        files.append(scratch / f"{unit[0]}_unit.cpp")
        sources = [source for source in _SOURCES if source.stem in unit]
        files[-1].write_text("".join(f'#include "{source}"\n' for source in sources))
    return [str(file) for file in files]


def _imported(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
