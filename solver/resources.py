"""Resources that take time, and the tiers that items leave to, each with a link in either direction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import Any, ClassVar

HOST = "host"
CAST_BYTES = 3  # of the host's memory that a cast reads and writes, per byte that it makes of float32 ones
HOSTS_WORK = ("update-cpu", "accumulate-cpu")  # kinds of actions that a worker can do, by their words


class Resource(str):
    """Something that does one job at a time. It is a string, its word in tables, so a new one needs no registration."""

    __slots__ = ()
    COMPUTE: ClassVar[Resource]
    IN: ClassVar[Resource]  # from the host to the device
    OUT: ClassVar[Resource]  # from the device to the host
    CPU: ClassVar[Resource]

    @property
    def value(self) -> str:
        """The word as a plain string."""
        return str(self)


Resource.COMPUTE, Resource.IN, Resource.OUT, Resource.CPU = map(Resource, ("compute", "copy in", "copy out", "cpu"))


@dataclass(frozen=True)
class Path:
    """The links between the device and another tier, in bytes per second and seconds per copy.

    Parameters
    ----------
    tier: the name of the other tier.
    in_bytes_per_s, out_bytes_per_s: rates of the link to the device and of the link from it while the other one is
        idle.
    both_bytes_per_s: total rate while both are busy.
    per_copy_s: seconds that each copy takes on either link in addition to those of its bytes.
    through_host: whether copies pass the host's memory, and so take the host's link, too: after the tier's own link on
        the way to the device, before it on the way from there.
    """

    tier: str
    in_bytes_per_s: float
    out_bytes_per_s: float
    both_bytes_per_s: float
    per_copy_s: float = 0.0
    through_host: bool = False

    @cached_property
    def into(self) -> Resource:
        """The link to the device."""
        return Resource.IN if self.tier == HOST else Resource(f"{Resource.IN} from {self.tier}")

    @cached_property
    def out(self) -> Resource:
        """The link from the device."""
        return Resource.OUT if self.tier == HOST else Resource(f"{Resource.OUT} to {self.tier}")

    @cached_property
    def links(self) -> tuple[Resource, Resource]:
        """Both links, the one to the device first."""
        return self.into, self.out

    def bytes_per_s(self, link: Resource) -> float:
        """Return the rate of a link while the other one is idle."""
        return self.in_bytes_per_s if link == self.into else self.out_bytes_per_s

    def load_bytes(self, amount_bytes: float, link: Resource, copies: float = 1.0) -> float:
        """Return the bytes that a link could move, alone and in one run, while it makes these copies.

        Parameters
        ----------
        amount_bytes: what the copies move; nothing takes no time. copies: their number, also as a fraction.
        """
        return amount_bytes + copies * self.per_copy_s * self.bytes_per_s(link) if amount_bytes else 0.0

    def share(self, link: Resource) -> float:
        """Return the fraction of the path's total rate that a link takes while the other one is idle."""
        return self.bytes_per_s(link) / self.both_bytes_per_s

    @property
    def together(self) -> float:
        """The fraction of its own rate that each link has while both are busy; above 1 if neither slows the other."""
        return self.both_bytes_per_s / (self.in_bytes_per_s + self.out_bytes_per_s)

    @property
    def alike_bytes_per_s(self) -> float:
        """The total rate while both links move as many bytes each: the slower one ends last, alone."""
        slower, faster = sorted((self.in_bytes_per_s, self.out_bytes_per_s))
        return 2 / (1 / slower + (1 / min(1.0, self.together) - 1) / faster)

    def seconds(self, in_s: float, out_s: float) -> float:
        """Return the least seconds of copies that would keep the links busy for so long each, one after the other."""
        slower = max(0.0, min(1.0, sum(map(self.share, self.links)) - 1))
        return max(in_s, out_s) + slower * min(in_s, out_s)

    def moving_alike(self, bytes_per_s: float) -> Path:
        """Return the path whose links together have this rate if they move as many bytes each (`alike_bytes_per_s`).

        A disk that reads fast, writes slowly and does both in turns gives each direction half of the time, and so half
        of its own rate. That is more bytes in all than it moves if it reads as many as it writes.
        """
        slower, faster = sorted((self.in_bytes_per_s, self.out_bytes_per_s))
        together = 1 / (1 + faster * max(0.0, 2 / bytes_per_s - 1 / slower))
        return replace(self, both_bytes_per_s=together * (slower + faster))

    def faster(self, factor: float) -> Path:
        """Return the path with links that carry `factor` times the bytes; a copy's own seconds stay."""
        return replace(self, **{name: factor * rate for name, rate in _rates_of(self).items()})


@dataclass(frozen=True)
class Tier:
    """A memory that items leave to and return from.

    Parameters
    ----------
    path: its name, and the links between it and the device.
    capacity_bytes: the most bytes that leave to it.
    holds_frozen: whether it holds frozen parameters all the time, beside what leaves to it: files that are read and
        never written.
    buffers_bytes: bytes of the host's memory that copies through the host take.
    for_states: whether nothing but optimizer states leaves to it, and what the next two name.
    for_parameters: whether trained parameters may leave to it: those that the device updates, and those that the host
        updates if their states are there.
    for_values: whether activations and interface values may leave to it, although it is for states.
    for_host_updates: whether it may hold optimizer states that the host updates. They come to the host's memory piece
        by piece, are updated there and written back, without the host's link.
    casts: whether it stands for the float32 copies among the states in RAM, which are cast for each copy of their
        parameter to the device. Nothing leaves to it.
    """

    path: Path
    capacity_bytes: int
    holds_frozen: bool = False
    buffers_bytes: int = 0
    for_states: bool = False
    for_parameters: bool = False
    for_values: bool = False
    for_host_updates: bool = False
    casts: bool = False

    @property
    def name(self) -> str:
        return self.path.tier


@dataclass(frozen=True)
class Worker:
    """A resource of the host besides its CPU, and the actions that it does instead of the CPU.

    Parameters
    ----------
    name: of the resource. does: the kinds of actions that run on it, by their printed words.
    """

    name: str
    does: tuple[str, ...]


@dataclass(frozen=True)
class Rates:
    """A machine's resources besides its compute: the host's links and CPU, further tiers, and further workers.

    Parameters
    ----------
    in_bytes_per_s, out_bytes_per_s, both_bytes_per_s, per_copy_s: of the path to the host; see `Path`.
    manage_s: H, CPU seconds per step for managing everything else.
    shared_cores: whether compute, copies and CPU updates share the same cores (the emulated device); the sum of their
        seconds then bounds a step.
    tiers: memories besides the host's. workers: resources besides the CPU.
    host_memory_bytes_per_s: bytes that the host's memory reads and writes per second, shared by copies to and from the
        device and by workers; what would exceed it slows down in proportion. 0 for more than all of them need.
    worker_bytes_per_s: bytes that a worker reads and writes per second of its work while nothing else runs.
    """

    in_bytes_per_s: float
    out_bytes_per_s: float
    both_bytes_per_s: float
    manage_s: float = 0.0
    shared_cores: bool = False
    tiers: tuple[Tier, ...] = ()
    workers: tuple[Worker, ...] = ()
    host_memory_bytes_per_s: float = 0.0
    worker_bytes_per_s: float = 0.0
    per_copy_s: float = 0.0

    @cached_property
    def host_memory_shares(self) -> Mapping[Resource, float]:
        """The part of the host memory's rate that a resource takes at full speed; empty if that rate has no limit."""
        if not self.host_memory_bytes_per_s:
            return {}
        needs = {link: self.bytes_per_s(link) for path in self.paths.values() for link in path.links
                 if path.tier == HOST or path.through_host}  # fmt: skip
        needs |= {tier.path.into: CAST_BYTES * needs[tier.path.into] for tier in self.tiers if tier.casts}
        needs |= {worker: self.worker_bytes_per_s for worker in self.working if worker != Resource.COMPUTE}
        return {resource: need / self.host_memory_bytes_per_s for resource, need in needs.items()}

    @property
    def with_endless_host_memory(self) -> Rates:
        """The machine with a host memory that slows nothing down."""
        return replace(self, host_memory_bytes_per_s=0.0)

    @cached_property
    def paths(self) -> Mapping[str, Path]:
        """The path to each tier, by the tier's name, the host's first."""
        return {path.tier: path for path in (self.host, *(tier.path for tier in self.tiers))}

    @cached_property
    def host(self) -> Path:
        """The path to the host."""
        return Path(HOST, self.in_bytes_per_s, self.out_bytes_per_s, self.both_bytes_per_s, self.per_copy_s)

    def beyond(self, link: Resource) -> Resource | None:
        """Return the host's link that copies over a tier's link take as well; None if there is no such link."""
        path = self._path_of[link]
        if not path.through_host:
            return None
        return self.host.into if link == path.into else self.host.out

    @cached_property
    def links(self) -> tuple[Resource, ...]:
        """The links of all paths."""
        return tuple(link for path in self.paths.values() for link in path.links)

    @cached_property
    def workers_of(self) -> Mapping[str, Resource]:
        """The workers that replace the CPU, by the word of the kind of action that they do."""
        return {kind: Resource(worker.name) for worker in self.workers for kind in worker.does}

    @cached_property
    def _path_of(self) -> Mapping[Resource, Path]:
        return {link: path for path in self.paths.values() for link in path.links}

    def bytes_per_s(self, link: Resource) -> float:
        """Return the rate of a link while the other one of its path is idle; raises KeyError if it is no link."""
        return self._path_of[link].bytes_per_s(link)

    def load_bytes(self, amount_bytes: float, link: Resource, copies: float = 1.0) -> float:
        """Return the bytes that a link could move while it makes these copies; see `Path.load_bytes`."""
        return self._path_of[link].load_bytes(amount_bytes, link, copies)

    def copy_s(self, amount_bytes: float, link: Resource, copies: float = 1.0) -> float:
        """Return the seconds of copies of so many bytes in total over a link while the other one of its path is idle.

        Parameters
        ----------
        copies: their number, also as a fraction; a copy of no bytes takes no time.
        """
        return self.load_bytes(amount_bytes, link, copies) / self.bytes_per_s(link)

    def worker(self, kind: str) -> Resource:
        """Return the resource that carries out the host's actions of a kind, given by its word."""
        return self.workers_of.get(kind, Resource.CPU)

    @cached_property
    def working(self) -> tuple[Resource, ...]:
        """The resources that do no copies: compute, the CPU and further workers."""
        return Resource.COMPUTE, Resource.CPU, *(Resource(worker.name) for worker in self.workers)

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """Everything that takes time."""
        compute, *workers = self.working
        return compute, *self.host.links, *workers, *(link for link in self.links if link not in self.host.links)

    def faster(self, factor: float) -> Rates:
        """Return the machine with links to the host that carry `factor` times the bytes."""
        return replace(self, **_rates_of(self.host.faster(factor)))

    def to_dict(self) -> dict[str, Any]:
        """Convert the rates to JSON's own types, without further tiers, workers and limits that do not exist."""
        absent: dict[str, Any] = {"tiers": (), "workers": (), "host_memory_bytes_per_s": 0, "worker_bytes_per_s": 0,
                                  "per_copy_s": 0}  # fmt: skip
        data = {name: value for name, value in asdict(self).items() if name not in absent or value != absent[name]}
        tiers = [asdict(tier) for tier in self.tiers]
        for tier in tiers:
            may_be_absent = ((tier["path"], "per_copy_s"), (tier["path"], "through_host"),
                             (tier, "holds_frozen"), (tier, "buffers_bytes"), (tier, "for_states"),
                             (tier, "for_parameters"), (tier, "for_values"), (tier, "for_host_updates"),
                             (tier, "casts"))  # fmt: skip
            for row, name in may_be_absent:
                if not row[name]:
                    del row[name]
        more = {"tiers": tiers,
                "workers": [{"name": worker.name, "does": list(worker.does)} for worker in self.workers]}  # fmt: skip
        return data | {name: rows for name, rows in more.items() if rows}

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield what contradicts itself: the row, and what is wrong with it."""
        for path in (self.host, *(tier.path for tier in self.tiers)):
            row = "rates" if path.tier == HOST else f"tier {path.tier}"
            for name, rate in _rates_of(path).items():
                if not _is_number(rate) or not 0 < rate < inf:
                    yield row, f"{name} is {rate!r}, must be above 0 and finite"
            if not _is_number(path.per_copy_s) or not 0 <= path.per_copy_s < inf:
                yield row, f"per_copy_s is {path.per_copy_s!r}, must be finite and not negative"
        if not _is_number(self.manage_s) or not 0 <= self.manage_s < inf:
            yield "rates", f"manage_s is {self.manage_s!r}, must be finite and not negative"
        for name in ("host_memory_bytes_per_s", "worker_bytes_per_s"):
            rate = getattr(self, name)
            if not _is_number(rate) or not 0 <= rate < inf:
                yield "rates", f"{name} is {rate!r}, must be finite and not negative"
            elif name == "host_memory_bytes_per_s" and 0 < rate < 1:
                yield "rates", f"{name} is {rate!r}, must be 1 or more, or 0 for no limit"
        names = [HOST, *(tier.name for tier in self.tiers)]
        if len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
            yield "tiers", f"need distinct names, found {', '.join(map(repr, names))}"
        for tier in self.tiers:
            for name in ("capacity_bytes", "buffers_bytes"):
                size = getattr(tier, name)
                if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                    yield f"tier {tier.name}", f"{name} is {size!r}, must be a whole number from 0 on"
        yield from self._faults_of_workers()

    def _faults_of_workers(self) -> Iterator[tuple[str, str]]:
        taken = {Resource.COMPUTE, Resource.CPU, *self.links}
        claimed: set[str] = set()
        for worker in self.workers:
            if not isinstance(worker.name, str) or not worker.name or worker.name in taken:
                yield f"worker {worker.name!r}", "needs a name of its own, which no other worker or resource has"
            taken.add(Resource(worker.name))
            for kind in worker.does:
                if kind not in HOSTS_WORK or kind in claimed:
                    yield f"worker {worker.name!r}", f"does {kind!r}; each of {', '.join(HOSTS_WORK)} is for one worker"
                claimed.add(kind)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rates_of(path: Path) -> dict[str, Any]:
    return {one.name: getattr(path, one.name) for one in fields(path) if one.name.endswith("bytes_per_s")}
