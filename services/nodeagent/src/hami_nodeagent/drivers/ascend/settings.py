# SPDX-License-Identifier: Apache-2.0
"""Settings of the Ascend driver; apart from the driver, so that detection does not load it."""

from hami_nodeagent.drivers.reader import ToolSettings


class AscendToolSettings(ToolSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tool settings, and the way in which chips are shared."""

    soft_shares: bool = False
    """Chips are shared by several containers (``huawei.com/vnpu-mode: hami-core``) instead of being
    divided; the driver's device-share is switched on through DCMI."""
