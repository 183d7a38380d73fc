"""The files in which a compiled model keeps optimizer states, on the storage paths that the user named."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import StorageError
from ..lowering.state_files import StateFiles
from ..planning.storage import figures_of, proportions, together
from ..runtime.devices.device import Device
from ..runtime.replay.binding import HostState
from ..runtime.storage.engine import Engine
from ..runtime.storage.folders import StoragePath
from ..runtime.storage.mapped import MappedStore
from ..sizes import format_bytes
from ..solver.schedule import Schedule


class StateStorage:
    """The store of optimizer states.

    State: `_engine` and `host.store`, from construction until `close`; the folders are locked all that time.

    Parameters
    ----------
    paths: on which the states lie; none for no store. host: gets the store. device: transfers to and from it.

    Raises: StorageError, ArgumentValueError for paths that cannot be stored in together.
    """

    def __init__(self, paths: Sequence[StoragePath], host: HostState, device: Device) -> None:
        self._host = host
        self._engine: Engine | None = None
        self.files: StateFiles | None = None
        if not paths:
            return
        figures = [figures_of(path) for path in paths]
        self._engine = engine = Engine(paths, changed=device.changed)
        host.store = MappedStore(engine, proportions(figures))
        self.files = together(figures, engine.staging_bytes + 2 * device.file_buffers_bytes)

    def check_room(self, schedule: Schedule) -> None:
        """Look whether the states of a schedule have room in the files. Raises: StorageError if not."""
        if self.files is None:
            return
        sizes = schedule.item_bytes
        names = schedule.states_in_files
        needed = sum(sizes[item] for name in names for item in schedule.states.get(name, ()))
        if needed > self.files.capacity_bytes:
            raise StorageError(
                f"optimizer states need {format_bytes(needed)} on the storage paths, and there is room for "
                f"{format_bytes(self.files.capacity_bytes)}; free space there, or name another disk as well"
            )

    def close(self) -> None:
        """Remove the files. Tensors in them keep their values as long as somebody holds them."""
        if self._engine is not None:
            self._engine.close()
