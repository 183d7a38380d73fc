"""Copies of items between the device and the tiers that they leave to."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...errors import StorageError
from ...solver.items import Item
from ...solver.resources import Path
from ..events import Event, UnderWay
from ..layouts import steps_of
from ..storage.file_bytes import BytesInFile
from .cast import CastBytes
from .contents import Buffer
from .world import World


def bring(
    world: World, item: Item, sources: dict[str, torch.Tensor], path: Path | None = None, *, stays: bool = False
) -> Buffer:
    """Start copies to new device memory, after the copies that still write to their sources.

    Parameters
    ----------
    path: the path over which they come, None for the item's own. stays: whether the sources are needed again.
    """
    written, path = world.contents.written, path or world.schedule.path_of(item)
    after: tuple[Event, ...] = (written[item],) if item in written else ()
    tensors = {key: world.device.empty_like(source) for key, source in sources.items()}
    copies = tuple(_start_in(world, tensors[key], source, after, path) for key, source in sources.items())
    arrived = UnderWay(f"the copy of {item.words} to the device", copies) if copies else None
    if not stays:
        world.shared_host.freed(item, arrived)
    return Buffer(tensors, arrived)


def _start_in(world: World, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...], path: Path) -> Event:
    stored = world.host.store.bytes_of(source) if world.host.store is not None else None
    if stored is None or world.store_path is None:  # what no plan keeps in files comes through the system's cache
        return world.device.copy_in(target, source, after, path.into)
    return world.device.read_in(target, stored, world.store_path.into, after)


def bring_from_file(world: World, item: Item, like: torch.Tensor, source: BytesInFile) -> Buffer:
    """Start to read a tensor from a file to new device memory.

    Parameters
    ----------
    like: a tensor of the same values, shape, strides and dtype, which is not read.
    """
    target = world.device.empty_like(like)
    read = world.device.read_in(target, source, world.schedule.path_of(item).into)
    return Buffer({"": target}, UnderWay(f"the copy of {item.words} from {source.path} to the device", (read,)))


def bring_cast(world: World, item: Item) -> Buffer:
    """Start to bring a parameter to new device memory from its float32 copy, or from its files if that is not newer."""
    home = world.host.params[item.name]
    after: tuple[Event, ...] = (world.contents.written[item],) if item in world.contents.written else ()
    target, source = world.device.empty_like(home), CastBytes.of(world.host, item.name)
    arrived = world.device.read_in(target, source, world.schedule.path_of(item).into, after)
    return Buffer({"": target}, UnderWay(f"the copy of {item.words} to the device", (arrived,)))


def send(world: World, item: Item, buffer: Buffer, targets: dict[str, torch.Tensor]) -> None:
    """Start copies of an item's tensors to its tier, after the copies that fill them.

    Parameters
    ----------
    targets: memory on the tier for each of the buffer's tensors.
    """
    after = () if buffer.arrived is None else (buffer.arrived,)
    leaving = start_out(world, item, ((targets[key], tensor) for key, tensor in buffer.tensors.items()), after)
    if leaving is not None:
        buffer.leaving = leaving
        # Until the copy has ended, the device's values are the current ones (see contents.py).
        world.contents.newer.add(item)


def start_out(
    world: World, item: Item, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], after: tuple[Event, ...] = ()
) -> UnderWay | None:
    """Start copies from the device to an item's tier, each given by target and source; None if there are none."""
    path, after = world.schedule.path_of(item), (*after, *world.shared_host.free_after(item))
    copies = tuple(_start_out(world, target, source, after, path) for target, source in pairs)
    if not copies:
        return None
    under_way = world.contents.written[item] = UnderWay(f"the copy of {item.words} to the {path.tier}", copies)
    return under_way


def _start_out(world: World, target: torch.Tensor, source: torch.Tensor, after: tuple[Event, ...], path: Path) -> Event:
    stored = world.host.store.bytes_of(target) if world.host.store is not None else None
    if stored is None:
        return world.device.copy_out(target, source, after, path.out)
    assert world.store_path is not None, "a plan that keeps nothing in files has everything in RAM"
    if (source.dtype, source.shape, steps_of(source.shape, source.stride())) != (
        target.dtype, target.shape, steps_of(target.shape, target.stride()),
    ):  # fmt: skip
        raise StorageError(
            f"the optimizer has replaced a tensor of {target.dtype} {tuple(target.shape)}, strides {target.stride()}, "
            f"by one of {source.dtype} {tuple(source.shape)}, strides {source.stride()}, in a state that lies in "
            "files; compile without storage= for this optimizer"
        )
    return world.device.write_out(stored, source, after, world.store_path.out)[1]


class Homes:
    """The memory that items leave to on their tiers, kept from one iteration to the next.

    State: the memory by item, the part of it that is in use, and the tiers' ledgers.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._of: dict[Item, dict[str, torch.Tensor]] = {}
        self._used: dict[Item, dict[str, torch.Tensor]] = {}

    def of(self, item: Item) -> dict[str, torch.Tensor]:
        """Return the memory that an item's storages have left to, by part; empty if they have not."""
        return self._used.get(item, {})

    def for_storages(self, item: Item, wholes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return memory for an item's storages, at its place if it shares memory with others.

        Otherwise there is room for the largest batches, so that no other memory is taken for the next ones.

        Parameters
        ----------
        wholes: storages as flat tensors of bytes.
        """
        if self._world.shared_host.has_place(item):
            self._used[item] = self._world.shared_host.take(item, wholes)
            return self._used[item]
        most = self._world.shapes.own.storage_bytes(item)
        rooms = {key: torch.empty(max(whole.numel(), most.get(key, 0)), dtype=torch.uint8, device="meta")
                 for key, whole in wholes.items()}  # fmt: skip
        self._used[item] = {
            key: self.fitting(item, key, rooms[key])[: whole.numel()] for key, whole in wholes.items()
        }  # fmt: skip
        return self._used[item]

    def fitting(self, item: Item, key: str, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a part of an item, that of the last iteration if it has the same shape.

        Raises: LimitExceeded if the item's tier would hold more than its capacity. StorageError if it is in files whose
        disk is too full.
        """
        homes, tier = self._of.setdefault(item, {}), self._world.tier_of(item)
        if key not in homes or homes[key].shape != like.shape:
            ledger, old = self._world.tiers.get(tier), homes.pop(key, None)
            if ledger is not None:
                ledger.freed(old.nbytes if old is not None else 0)
            del old  # its memory is given back before more is taken
            made = self._empty(item, key, tier, like)
            if ledger is not None:
                ledger.made(like.nbytes)
            homes[key] = made
        return homes[key]

    def _empty(self, item: Item, key: str, tier: str, like: torch.Tensor) -> torch.Tensor:
        store = self._world.host.store
        if store is not None and self._in_files(tier):
            return store.empty(f"{item} {key}", like)
        return self._world.device.empty_on(tier, like)

    def _in_files(self, tier: str) -> bool:
        path = self._world.store_path
        return path is not None and tier == path.tier

    def clear(self, *, files: bool = False) -> None:
        """Free the memory, in files only if asked; no copy may be under way, and none of its values still needed."""
        known = {**self._of, **self._used}
        for item in [one for one in known if files or not self._in_files(self._world.tier_of(one))]:
            ledger, homes = self._world.tiers.get(self._world.tier_of(item)), self._of.pop(item, {})
            self._used.pop(item, None)
            if ledger is not None:
                ledger.freed(sum(home.nbytes for home in homes.values()))
