"""NVIDIA's management library: energy, power, clocks and temperature of a GPU.

Called through ctypes: it comes with the driver, and nvidia-ml-py, which few installations have, wraps these
same calls.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK, _MEMORY_CLOCK = 1, 2  # nvmlClockType_t
_CHIP = 0  # nvmlTemperatureSensors_t


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """What a GPU says of itself now; None where it does not.

    joules:  a counter since the driver was loaded, updated every 20 to 100 ms.
    """

    joules: float | None
    watts: float | None
    power_limit_watts: float | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None


class Nvml:
    """The library, loaded. Raises OSError where there is none, or no driver behind it."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._calls = ctypes.CDLL(library)
        try:
            failed = self._calls.nvmlInit_v2()
        except AttributeError as error:
            raise OSError(f"{library} has no nvmlInit_v2") from error
        if failed:
            raise OSError(f"{library} found no driver (nvmlInit_v2 returned {failed})")

    def driver(self) -> str | None:
        version = ctypes.create_string_buffer(96)
        done = self._call("nvmlSystemGetDriverVersion", version, ctypes.c_uint(len(version)))
        return version.value.decode() if done else None

    def device(self, index: int) -> NvmlDevice:
        """The GPU that torch calls cuda:`index`; raises OSError if it is not found."""
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        if uuid is not None:
            name = str(uuid)
            return self.device_with_uuid(name if name.startswith("GPU-") else f"GPU-{name}")
        domain = getattr(properties, "pci_domain_id", 0)
        bus, slot = properties.pci_bus_id, properties.pci_device_id
        return self._device("nvmlDeviceGetHandleByPciBusId_v2", f"{domain:08x}:{bus:02x}:{slot:02x}.0")

    def device_with_uuid(self, uuid: str) -> NvmlDevice:
        return self._device("nvmlDeviceGetHandleByUUID", uuid)

    def _device(self, function: str, name: str) -> NvmlDevice:
        handle = ctypes.c_void_p()
        if not self._call(function, ctypes.c_char_p(name.encode()), ctypes.byref(handle)):
            raise OSError(f"the management library does not know the GPU {name}")
        return NvmlDevice(self, handle)

    def _call(self, function: str, *arguments: Any) -> bool:
        """Whether the library has the function, and it succeeded."""
        try:
            return getattr(self._calls, function)(*arguments) == 0
        except AttributeError:
            return False


class NvmlDevice:
    """One GPU."""

    def __init__(self, library: Nvml, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def state(self) -> GpuState:
        millijoules = self._number("nvmlDeviceGetTotalEnergyConsumption", kind=ctypes.c_ulonglong)
        milliwatts = self._number("nvmlDeviceGetPowerUsage")
        limit = self._number("nvmlDeviceGetEnforcedPowerLimit")
        return GpuState(
            joules=None if millijoules is None else millijoules * 1e-3,
            watts=None if milliwatts is None else milliwatts * 1e-3,
            power_limit_watts=None if limit is None else limit * 1e-3,
            sm_clock_mhz=self._number("nvmlDeviceGetClockInfo", ctypes.c_uint(_SM_CLOCK)),
            memory_clock_mhz=self._number("nvmlDeviceGetClockInfo", ctypes.c_uint(_MEMORY_CLOCK)),
            temperature_c=self._number("nvmlDeviceGetTemperature", ctypes.c_uint(_CHIP)),
        )

    def _number(self, function: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
        found = kind()
        done = self._library._call(function, self._handle, *arguments, ctypes.byref(found))
        return found.value if done else None
