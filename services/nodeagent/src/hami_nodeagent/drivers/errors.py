# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between the agent and a vendor's driver; library errors become these.

::

    HamiError
    └── DriverError             carries what was being done and the vendor's own code and text
        ├── HardwareAbsent      the driver works and has no device
        ├── DriverMissing       not installed or not loaded: wait for it, it may come
        │   └── LibraryUnusable  the vendor's library is not there, or not one that we can use
        ├── DriverMismatch      library and kernel module differ: the agent must be restarted
        ├── DriverDenied        no permission: tell the operator, retrying does not help
        ├── DeviceGone          the device fell off the bus or needs a reset
        ├── DeviceHung          no answer within the deadline; the call may still be running
        ├── DeviceBusy          somebody else holds it: ask again later
        ├── NotSupported        this part cannot do that: use the fallback
        ├── PartitionRefused    no room for the partition, or its size is not known there
        ├── PartitionBusy       processes use the partition: it stays
        ├── AnswerUnknown       the answer has no form that we know: what was known before stands
        └── DriverTransient     anything else: try again, a limited number of times
"""

from hami_common.errors import HamiError


class DriverError(HamiError):
    """Base of this tree."""

    def __init__(self, *, doing: str, detail: str, code: int = 0) -> None:
        """Say what was being done, the vendor's text and number (0 when it has none)."""
        super().__init__(doing, detail, code)
        self.doing = doing
        self.detail = detail
        self.code = code

    def __str__(self) -> str:
        number = f" (code {self.code})" if self.code else ""
        return f"{self.doing}: {self.detail}{number}"


class HardwareAbsent(DriverError):
    """The driver answered that there is no device. Devices known before are lost."""


class DriverMissing(DriverError):
    """The driver is not there. The catcher says so in its report and asks again later."""


class LibraryUnusable(DriverMissing):
    """There is no library of the vendor, it cannot be loaded, or it is too old for us."""


class DriverMismatch(DriverError):
    """The driver was exchanged under the library.

    Where this process has loaded the library, only a new process loads the new one; the vendor's
    tool is a new process each time, and waiting is all that can be done.
    """

    is_loaded_here = True


class ToolMismatch(DriverMismatch):
    """A vendor's tool and its driver do not fit; a restart of the agent would change nothing."""

    is_loaded_here = False


class DriverDenied(DriverError):
    """The agent lacks a permission."""


class DeviceGone(DriverError):
    """The device is lost for this opening of the driver."""


class DeviceHung(DriverError):
    """The deadline passed. Until the call returns, further calls for the device fail at once."""


class DeviceBusy(DriverError):
    """Somebody else holds the device."""


class NotSupported(DriverError):
    """The part or the driver version cannot do it."""


class PartitionRefused(DriverError):
    """The hardware has no room for the partition, or does not know its size."""


class PartitionBusy(DriverError):
    """Processes use the partition; it is not removed under them."""


class AnswerUnknown(DriverError):
    """The tool answered in a form that we do not know, or its answer is cut off.

    It says nothing about any device.
    """


class DriverTransient(DriverError):
    """An error without a meaning of its own to us."""
