# SPDX-License-Identifier: Apache-2.0
"""Errors between the agent and a vendor's driver; errors of libraries are translated to these.

::

    HamiError
    └── DriverError             carries the operation and the vendor's own code and text
        ├── HardwareAbsent      the driver works and has no device
        ├── DriverMissing       not installed or not loaded: retry later
        │   └── LibraryUnusable  the vendor's library is missing or unsupported
        ├── DriverMismatch      library and kernel module differ: the agent must be restarted
        ├── DriverDenied        no permission: report to the operator, a retry does not help
        ├── DeviceGone          the device fell off the bus or needs a reset
        ├── DeviceHung          no answer within the deadline; the call may still be running
        ├── DeviceBusy          another process uses the device: retry later
        ├── NotSupported        the device does not support the operation: use the fallback
        ├── PartitionRefused    no capacity for the partition, or its size is unknown there
        ├── PartitionBusy       processes use the partition: it stays
        ├── AnswerUnknown       the answer has an unknown format: keep the last known state
        └── DriverTransient     any other error: retry a limited number of times
"""

from hami_common.errors import HamiError


class DriverError(HamiError):
    """Base of this tree."""

    def __init__(self, *, doing: str, detail: str, code: int = 0) -> None:
        """Record the operation and the vendor's text and number (0 if there is none)."""
        super().__init__(doing, detail, code)
        self.doing = doing
        self.detail = detail
        self.code = code

    def __str__(self) -> str:
        number = f" (code {self.code})" if self.code else ""
        return f"{self.doing}: {self.detail}{number}"


class HardwareAbsent(DriverError):
    """The driver works and has no device. All known devices are lost."""


class DriverMissing(DriverError):
    """The driver is not installed or not loaded. The caller reports this and retries later."""


class LibraryUnusable(DriverMissing):
    """The vendor's library is not installed, cannot be loaded, or is too old."""


class DriverMismatch(DriverError):
    """The driver was replaced under the library.

    If this process has loaded the library, only a new process loads the new one. The vendor's tool
    is a new process at each run, so a retry is the only remedy.
    """

    is_loaded_here = True


class ToolMismatch(DriverMismatch):
    """A vendor's tool and its driver do not match; a restart of the agent does not help."""

    is_loaded_here = False


class DriverDenied(DriverError):
    """The agent lacks a permission."""


class DeviceGone(DriverError):
    """The device is lost for this opening of the driver."""


class DeviceHung(DriverError):
    """The deadline passed. Until the call returns, further calls for the device fail at once."""


class DeviceBusy(DriverError):
    """Another process uses the device."""


class NotSupported(DriverError):
    """The part or the driver version cannot do it."""


class PartitionRefused(DriverError):
    """The hardware has no capacity for the partition, or its size is unknown there."""


class PartitionBusy(DriverError):
    """Processes use the partition; it is not removed under them."""


class AnswerUnknown(DriverError):
    """The tool's output has an unknown format, or is truncated.

    The error does not affect the state of any device.
    """


class DriverTransient(DriverError):
    """An error without a specific meaning."""
