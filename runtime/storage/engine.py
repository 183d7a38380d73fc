"""The engine: tensors' bytes from files into the host's memory and back, on the threads of each disk."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from ...errors import ArgumentValueError, StorageError
from ..events import Event
from .checksums import xxh3
from .chunks import cut
from .disk_queue import DEADLINE_S, N_THREADS, REQUEST_BYTES, DiskUse, Limits
from .disk_rates import MeanRates
from .disks import Disks
from .dispatcher import Dispatcher
from .earlier import Earlier
from .files import Files, SystemFiles
from .folders import Folder, StoragePath
from .homes import open_homes
from .host_bytes import ALIGNMENT_BYTES, check_bytes
from .layout import Layout, bytes_by_path, second_bytes_by_path
from .read_only import ReadOnlyFile
from .stored import Stored
from .throttle import Throttle
from .transfers import Part

log = logging.getLogger("offmate")


class Engine:
    """Reads and writes bytes of tensors.

    Transfers begin when the events that they wait for have happened; of those, the requests of the one submitted first
    go first. Every chunk is verified by its checksum when it is read, unless it was written through a mapping since.

    State: `_files_open`, changed by the thread that calls it; `_stored` by name, to which one thread at a time adds,
    under `_storing`.

    Parameters
    ----------
    paths: folders that tensors are stored in, each on a disk of its own. throttles: by path, rates that it is held to,
        with which it counts as a disk of its own.
    files: the calls to the system. n_threads: requests at once on each disk. request_bytes: the largest request, a
        multiple of 4,096. deadline_s: seconds without any progress on a disk after which its transfers fail.
    changed: condition notified of every transfer that ends, and of the events on the host that transfers wait for;
        lanes whose jobs wait for transfers share it.
    poll_s: interval in seconds at which events on a device, which notify nobody, are polled; None if there are none.

    Raises: LibraryError if xxhash is not installed. StorageError for a folder that is missing, cannot be written to, or
    is in use by another process. ArgumentValueError if two paths are on one disk.
    """

    def __init__(
        self,
        paths: Sequence[StoragePath] = (),
        *,
        throttles: Sequence[Throttle | None] = (),
        files: Files | None = None,
        n_threads: int = N_THREADS,
        request_bytes: int = REQUEST_BYTES,
        deadline_s: float = DEADLINE_S,
        changed: threading.Condition | None = None,
        poll_s: float | None = None,
    ) -> None:
        if n_threads < 1 or not deadline_s > 0:
            raise ArgumentValueError(f"n_threads={n_threads} and deadline_s={deadline_s} must both be positive")
        if request_bytes < 1 or request_bytes % ALIGNMENT_BYTES:
            raise ArgumentValueError(f"request_bytes={request_bytes} is not a positive multiple of {ALIGNMENT_BYTES}")
        xxh3()
        limits = Limits(n_threads, request_bytes, deadline_s)
        self._disks = Disks(SystemFiles() if files is None else files, limits)
        self._dispatcher = Dispatcher(self._disks, threading.Condition() if changed is None else changed, poll_s)
        self._files_open: list[ReadOnlyFile] = []
        self._folders: list[Folder] = []
        # A thread that is still in a call when the interpreter shuts down aborts the process.
        held = self._dispatcher, self._files_open, self._folders
        self._unasked = weakref.finalize(self, _close_unasked, *held)
        self._stored: dict[str, Stored] = {}
        self._storing = threading.Lock()
        try:
            self._homes = open_homes(
                self._disks, [Path(path.folder).absolute() for path in paths], throttles, self._folders
            )
        except BaseException:
            self.close()
            raise
        self._layout = Layout(self._homes, self._dispatcher.is_open)

    def open(self, path: str | os.PathLike[str], throttle: Throttle | None = None) -> ReadOnlyFile:
        """Open a safetensors file for reads.

        Parameters
        ----------
        throttle: rates that reads are held to; files with the same one count as being on one disk of their own.

        Raises: StorageError if it cannot be opened, or is not in the safetensors format.
        """
        disks, dispatcher = self._disks, self._dispatcher  # the file must not keep the engine alive
        file = ReadOnlyFile(
            disks.files,
            Path(path),
            disks.limits.request_bytes,
            lambda found: disks.queue(found, throttle),
            lambda parts: dispatcher.submit(parts, (), urgent=True).event.synchronize(),
        )
        self._files_open.append(file)
        if not file.direct:
            disks.warn_of_cache(Path(path), throttle)
        return file

    def store(
        self, name: str, n_bytes: int, proportions: Sequence[float] | None = None, cuts: Sequence[int] = ()
    ) -> Stored:
        """Reserve space for a tensor's bytes, in one file on each path.

        Parameters
        ----------
        proportions: by path, of the bytes that it gets; None for equal ones. They hold over all tensors that are
            stored, so that tensors of few chunks lie on different paths.
        cuts: offsets in bytes at which pieces begin that are transferred one by one. Pieces whose offsets are multiples
            of 4,096 share no chunk, so that no transfer of one touches another.

        Raises: StorageError if a path has too little space. ArgumentValueError for a name that is stored already, a
        size that is not positive, proportions and cuts that do not fit, and for an engine without paths.
        """
        if n_bytes < 1 or not self._homes:
            raise ArgumentValueError(
                f"{name} has {n_bytes} bytes for {len(self._homes)} paths; both must be at least 1"
            )
        chunks = cut(name, n_bytes, self._disks.limits.request_bytes, cuts)
        with self._storing:
            if name in self._stored:
                raise ArgumentValueError(f"{name} is stored already; each tensor needs a name of its own")
            stored = self._layout.stored(name, chunks, proportions)
            self._stored[name] = stored
        return stored

    def move(self, proportions: Sequence[float], sets: int = 0) -> int:
        """Let chunks of all that is stored move to other paths when they are written next.

        Parameters
        ----------
        proportions: by path, of the bytes that it is to get. Every path keeps a chunk, so that its rate goes on being
            measured. No path gets more than it has space for.
        sets: how many times more all that is stored will lie on the paths, since checkpoints keep it.

        Returns: the bytes that move.
        """
        with self._storing:
            return self._layout.move(tuple(self._stored.values()), proportions, sets)

    @property
    def bytes_by_path(self) -> list[int]:
        """Return how many of the stored bytes lie on each path, or move there when they are written next."""
        return bytes_by_path(tuple(self._stored.values()), len(self._homes))

    @property
    def second_bytes_by_path(self) -> list[int]:
        """Return how many bytes the second places of what is stored have on each path."""
        return second_bytes_by_path(tuple(self._stored.values()), len(self._homes))

    def release(self, stored: Stored) -> None:
        """Let the space of a stored tensor be given back once no transfer uses it and nobody holds it.

        It may be called on any thread. The name is free again at once.
        """
        self._stored.pop(stored.name, None)

    def write(
        self,
        stored: Stored,
        source: torch.Tensor,
        after: Sequence[Event] = (),
        start: int | None = None,
        keeping: Earlier | None = None,
    ) -> Event:
        """Write bytes from the host's memory.

        Parameters
        ----------
        source: a contiguous tensor of torch.uint8, which nobody changes until the event has happened. after: events
            before it. start: offset in bytes where its first byte goes; None writes all of what is stored.
        keeping: what is written over stays on the disk, and is noted here, until it is dropped or put back.

        Returns: the event of all bytes being written. Transfers of the same bytes that are submitted later wait for it.
        Raises: ArgumentTypeError, ArgumentValueError for a source that does not fit. What fails later raises from the
        event.
        """
        return self._transfer(stored, source, after, start, writes=True, keeping=keeping)

    def read(
        self, source: ReadOnlyFile | Stored, target: torch.Tensor, after: Sequence[Event] = (), start: int | None = None
    ) -> Event:
        """Read bytes into the host's memory.

        Parameters
        ----------
        target: a contiguous tensor of torch.uint8, which nobody else uses until the event has happened.
        after: events before it. start: offset in bytes of the first one; None reads all of the source.

        Returns: the event of all bytes being there, each of them verified, but for chunks that were written through a
        mapping since a transfer wrote them.
        Raises: ArgumentTypeError, ArgumentValueError for a target that does not fit, StorageError for bytes that were
        never written. What fails later raises from the event.
        """
        if isinstance(source, Stored):
            return self._transfer(source, target, after, start, writes=False)
        check_bytes(target)
        first = _first_byte(str(source.path), source.size_bytes, target.numel(), start)
        return self._dispatcher.submit(source.parts(target, first), after).event

    def seal(self, stored: Stored) -> Event:
        """Start to read what no checksum verifies.

        Returns: the event after which all of the tensor has checksums.
        Raises: StorageError if not all of it has been written.
        """
        return stored.seal(lambda parts, earlier: self._dispatcher.submit(parts, earlier).event)

    def why_no_links(self) -> dict[Path, str]:
        """Return the folders whose file system has no hard links, each with the reason that the system gives."""
        found = {home.folder.folder: home.folder.why_no_links() for home in self._homes}
        return {folder: why for folder, why in found.items() if why is not None}

    def _transfer(
        self,
        stored: Stored,
        tensor: torch.Tensor,
        after: Sequence[Event],
        start: int | None,
        writes: bool,
        keeping: Earlier | None = None,
    ) -> Event:
        check_bytes(tensor)
        first = _first_byte(stored.name, stored.n_bytes, tensor.numel(), start)

        def submit(parts: list[Part], earlier: tuple[Event, ...]) -> Event:
            return self._dispatcher.submit(parts, (*after, *earlier)).event

        return stored.transfer(tensor, first, writes, submit, keeping)

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of RAM through which memory that is not aligned is transferred."""
        return sum(queue.staging_bytes for queue in self._disks.all())

    @property
    def fills(self) -> bool:
        """Return whether space that was reserved was also written, since a path's file system cannot reserve it."""
        return any(home.folder.fills for home in self._homes)

    def use(self) -> tuple[DiskUse, ...]:
        """Return what each disk has done until now."""
        return tuple(queue.use() for queue in self._disks.all())

    def iteration_done(self) -> list[tuple[float, MeanRates]]:
        """Note that an iteration has ended, so that means over the last ones forget older ones.

        Returns: by path, the seconds since the last call in which its disk was at work, and the means.
        """
        return [home.queue.iteration_done() for home in self._homes]

    @property
    def means(self) -> list[MeanRates]:
        """Return what the disk of each path did in the last iterations."""
        return [home.queue.means for home in self._homes]

    @property
    def folders(self) -> list[Path]:
        """Return the folder of each path."""
        return [home.folder.folder for home in self._homes]

    def close(self) -> None:
        """End the threads and remove what was stored.

        Transfers that have not begun fail, and requests under way are waited for, but not on a disk that hangs.

        Raises: StorageError if a file cannot be removed.
        """
        if self._unasked.detach() is not None:
            _close(self._dispatcher, self._files_open, self._folders)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _first_byte(name: str, size_bytes: int, n_bytes: int, start: int | None) -> int:
    """Return the offset at which a transfer begins. Raises: ArgumentValueError if its bytes are not all there."""
    if start is None and n_bytes != size_bytes:
        raise ArgumentValueError(
            f"{name} has {size_bytes} bytes and the tensor {n_bytes}; give a tensor of that size, or start="
        )
    first = start or 0
    if first < 0 or first + n_bytes > size_bytes:
        raise ArgumentValueError(f"bytes {first} to {first + n_bytes} are not within {name}, which has {size_bytes}")
    return first


def _close_unasked(dispatcher: Dispatcher, files: list[ReadOnlyFile], folders: list[Folder]) -> None:
    """Close what nobody needs any more, or the process leaves at its end; nobody could catch an error."""
    try:
        _close(dispatcher, files, folders)
    except StorageError as error:
        log.warning("%s", error)


def _close(dispatcher: Dispatcher, files: list[ReadOnlyFile], folders: list[Folder]) -> None:
    if not dispatcher.works_here():
        return
    if not dispatcher.close():
        for folder in folders:
            log.warning("a disk hangs, so that files stay in %s; the next run there removes them", folder.folder)
        return  # a call that hangs may still use a handle, and removing files may hang as well
    while files:
        files.pop().close()
    failures = [error for folder in folders if (error := dispatcher.within_deadline(folder.close)) is not None]
    if failures:
        raise failures[0]
