# SPDX-License-Identifier: Apache-2.0
"""Machines that can be broken on purpose, one per driver, for the driver contract."""

from abc import ABC, abstractmethod
from pathlib import Path

from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.protocol import Driver
from hami_sim.hardware import profile
from hami_sim.hardware.control import SimulatedControl
from hami_sim.hardware.fake_nvml import FakeNvml, Process
from hami_sim.hardware.profile import Profile
from tests.fakes.vendortools import VendorTools
from tests.support.fake_library import FakeLibrary

NODE = "node-a"


class Bench(ABC):
    """A machine with a driver for it. Devices are named by index."""

    tells_loss = True
    """A lost device is reported as lost; otherwise it only disappears from the list."""
    tells_processes = True
    tells_process_memory = True
    tells_process_load = True
    tells_load = True
    tells_used = True

    @property
    @abstractmethod
    def uuids(self) -> list[str]: ...

    @abstractmethod
    def memory_mib(self, index: int) -> int: ...

    @abstractmethod
    def driver(self, **settings: object) -> Driver: ...

    @abstractmethod
    def lose(self, index: int) -> None: ...

    @abstractmethod
    def restore(self, index: int) -> None: ...

    @abstractmethod
    def unplug(self, index: int) -> None: ...

    @abstractmethod
    def plug(self, index: int) -> None: ...

    @abstractmethod
    def fail_probes(self, index: int) -> None: ...

    @abstractmethod
    def unload_driver(self) -> None: ...

    @abstractmethod
    def load_driver(self) -> None: ...

    @abstractmethod
    def use(self, index: int, used_mib: int, core_pct: int, processes: list[Process]) -> None: ...


class ProfileBench(Bench):
    """A machine of ``profile`` whose devices report fault events."""

    def __init__(self, name: str) -> None:
        self.profile: Profile = profile.load(name)

    @property
    def uuids(self) -> list[str]:
        return [self.profile.uuid_of(NODE, index) for index in range(len(self.profile.devices))]

    def memory_mib(self, index: int) -> int:
        return self.profile.memory_mib_of(index)

    @abstractmethod
    def fault(self, index: int, code: int) -> None: ...


class SimulatedBench(ProfileBench):
    """The simulated driver and its control file."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self._name = name
        self.control = SimulatedControl(folder / "control.json")

    def driver(self, **settings: object) -> Driver:
        return build_driver(
            "simulated",
            {
                "profile": str(profile.path_of(self._name)),
                "node": NODE,
                "control": str(self.control.path),
                **settings,
            },
        )

    def fault(self, index: int, code: int) -> None:
        self.control.fault(index, code)

    def lose(self, index: int) -> None:
        self.control.lose(index)

    def restore(self, index: int) -> None:
        self.control.restore(index)

    def unplug(self, index: int) -> None:
        self.control.unplug(index)

    def plug(self, index: int) -> None:
        self.control.plug(index)

    def fail_probes(self, index: int) -> None:
        self.control.fail_probes(index, "hiccup")

    def unload_driver(self) -> None:
        self.control.unload_driver()

    def load_driver(self) -> None:
        self.control.load_driver()

    def use(self, index: int, used_mib: int, core_pct: int, processes: list[Process]) -> None:
        self.control.set_used_mib(index, used_mib)
        self.control.set_load(index, core_pct)
        self.control.set_processes(index, processes)


class FakeNvmlBench(ProfileBench):
    """The NVIDIA driver on the fake library, with a sysfs tree that has the same cards."""

    def __init__(self, name: str, folder: Path, library: Path) -> None:
        super().__init__(name)
        self.nvml = FakeNvml(folder / "nvml.state", self.profile, NODE)
        self.sysfs = folder / "sys"
        self._library = library
        for index, device in enumerate(self.profile.devices):
            place = self.sysfs / "bus/pci/devices" / self._address(index)
            place.mkdir(parents=True)
            numa = -1 if device.numa is None else device.numa
            (place / "numa_node").write_text(f"{numa}\n", encoding="ascii")
            self.bind(index)

    def _address(self, index: int) -> str:
        return self.profile.devices[index].bus_id.lower().removeprefix("0000")

    def bind(self, index: int) -> None:
        """Bind the card to the kernel driver."""
        (self.sysfs / "bus/pci/drivers/nvidia" / self._address(index)).mkdir(parents=True)

    def unbind(self, index: int) -> None:
        """Unbind the card from the kernel driver."""
        (self.sysfs / "bus/pci/drivers/nvidia" / self._address(index)).rmdir()

    def driver(self, **settings: object) -> Driver:
        return build_driver(
            "nvidia",
            {
                "library_path": str(self._library),
                "sysfs_root": str(self.sysfs),
                "reopen_min_s": 0.0,
                **settings,
            },
        )

    def fault(self, index: int, code: int) -> None:
        self.nvml.xid(index, code)

    def lose(self, index: int) -> None:
        self.nvml.lose(index)

    def restore(self, index: int) -> None:
        self.nvml.restore(index)

    def unplug(self, index: int) -> None:
        self.nvml.unplug(index)
        self.unbind(index)

    def plug(self, index: int) -> None:
        self.nvml.plug(index)
        self.bind(index)

    def fail_probes(self, index: int) -> None:
        self.nvml.fault("nvmlDeviceGetMemoryInfo", index, 999)

    def unload_driver(self) -> None:
        self.nvml.unload_driver()

    def load_driver(self) -> None:
        self.nvml.load_driver()

    def use(self, index: int, used_mib: int, core_pct: int, processes: list[Process]) -> None:
        self.nvml.set_used_mib(index, used_mib)
        self.nvml.set_load(index, core_pct)
        self.nvml.set_processes(index, processes)


class ToolBench(Bench):
    """A vendor's driver on fake tools; only the number of devices in a profile's name matters."""

    tells_process_load = False

    def __init__(
        self, vendor: str, name: str, folder: Path, tools: FakeLibrary | None = None
    ) -> None:
        self.vendor = vendor
        self.count = int(name.partition("x")[0])
        self.tools = tools or VendorTools(folder, vendor, self.count, node=NODE)
        make = self.tools.make
        self.tells_loss = make.tells_loss
        self.tells_processes = make.tells_processes
        self.tells_process_memory = make.tells_process_memory
        self.tells_load = make.tells_load
        self.tells_used = make.tells_used

    @property
    def uuids(self) -> list[str]:
        return [self.tools.uuid_of(index) for index in range(self.count)]

    def memory_mib(self, index: int) -> int:
        return self.tools.make.memory_mib

    def driver(self, **settings: object) -> Driver:
        return build_driver(
            self.vendor,
            {**self.tools.settings, "answer_age_s": 0.0, "confirm_s": 0.001, **settings},
        )

    def lose(self, index: int) -> None:
        self.tools.lose(index)

    def restore(self, index: int) -> None:
        self.tools.restore(index)

    def unplug(self, index: int) -> None:
        self.tools.unplug(index)

    def plug(self, index: int) -> None:
        self.tools.plug(index)

    def fail_probes(self, index: int) -> None:
        self.tools.fail(index)

    def unload_driver(self) -> None:
        self.tools.unload_driver()

    def load_driver(self) -> None:
        self.tools.heal()

    def use(self, index: int, used_mib: int, core_pct: int, processes: list[Process]) -> None:
        self.tools.use(index, used_mib, core_pct, processes)
