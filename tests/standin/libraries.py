"""The libraries that PyTorch's CUDA build is linked with, made here: the stand-in, and empty ones for the rest."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
# Functions of NVIDIA's libraries. Those without a version in torch's tables are looked for in every library.
_THEIRS = re.compile(
    r"(__cuda|cu[A-Z]|cuda|cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|nccl|nvrtc|nvshmem)"
)
_THEIR_LIBRARY = re.compile(r"lib(cu|nv|nccl)\w*\.so\.\d+")
_ALWAYS = "libcuda.so.1"  # the driver, which torch opens by its name


def build(torch_folder: Path, include: Path, into: Path) -> list[Path]:
    """Compile the stand-in, and a library for each one of NVIDIA's that torch needs.

    Parameters
    ----------
    torch_folder: the folder of torch's own libraries. include: the folder of the CUDA runtime's public headers.
    into: a folder, made if need be.

    Returns
    -------
    What has to be preloaded, in this order. A function that the stand-in lacks ends the process with its name.

    Raises
    ------
    subprocess.CalledProcessError: the compiler refuses the sources, which its own words on stderr explain.
    """
    into.mkdir(parents=True, exist_ok=True)
    standin = into / "libstandin.so"
    _compile(standin, sorted(SOURCES.glob("*.cpp")), "-std=c++17", "-Wall", f"-I{include}")
    has = set(re.findall(r" (\w+)$", _readelf("--dyn-syms", standin), re.MULTILINE))
    needed = _asked_for(sorted(torch_folder.glob("*.so")))
    return [standin, *(_rest(into / name, functions, has, standin) for name, functions in sorted(needed.items()))]


# The names of functions by the version that they are asked for in; "" for those in no version.
Functions = dict[str, set[str]]


def _asked_for(libraries: Iterable[Path]) -> dict[str, Functions]:
    """What torch's libraries ask NVIDIA's for, by the name of theirs; what is in no version is with the driver's."""
    needed: dict[str, Functions] = {_ALWAYS: {}}
    for library in libraries:
        for name in re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf("-d", library)):
            if _THEIR_LIBRARY.fullmatch(name):
                needed.setdefault(name, {})
        files = _files_of_versions(library)
        for line in _readelf("--dyn-syms", library).splitlines():
            fields = line.split()
            if len(fields) < 8 or fields[6] != "UND" or not _THEIRS.match(fields[7]):
                continue
            name, _, version = fields[7].partition("@")
            needed[files[version] if version else _ALWAYS].setdefault(version, set()).add(name)
    return needed


def _files_of_versions(library: Path) -> dict[str, str]:
    """The name of the library that defines it, by version."""
    files, file = {}, ""
    for kind, name in re.findall(r"(File|Name): (\S+)", _readelf("-V", library)):
        file = name if kind == "File" else file
        files[name] = file
    return files


def _readelf(what: str, library: Path) -> str:
    return subprocess.run(["readelf", "-W", what, library], check=True, capture_output=True, text=True).stdout


def _rest(library: Path, functions: Functions, has: set[str], standin: Path) -> Path:
    """Make a library of what the stand-in does not have: functions that only say that they are missing."""
    source, versions = library.with_suffix(".c"), library.with_suffix(".map")
    functions = {version: names - has for version, names in functions.items()}
    names = sorted(set().union(*functions.values()))
    lines = ["extern void standin_missing(const char *);"]
    lines += [f'void {name}(void) {{ standin_missing("{name}"); }}' for name in names]
    source.write_text("\n".join(lines) + "\n")
    named = {version: names for version, names in functions.items() if version}
    versions.write_text("".join(_version(version, names) for version, names in sorted(named.items())))
    versioned = [f"-Wl,--version-script={versions}"] if named else []
    _compile(library, [source], f"-Wl,-soname,{library.name}", *versioned, "-w", "-fno-builtin", standin)
    return library


def _version(version: str, names: set[str]) -> str:
    """The linker's words for a version, which has to be there even if the stand-in has all of its functions."""
    listed = "".join(f"{name}; " for name in sorted(names))
    return f"{version} {{ {'global: ' if names else ''}{listed}}};\n"


def _compile(target: Path, sources: list[Path], *flags: str | Path) -> None:
    compiler = "c++" if sources[0].suffix == ".cpp" else "cc"
    command = [compiler, "-shared", "-fPIC", "-O2", *sources, *flags, "-o", target]
    subprocess.run(command, check=True)
