# SPDX-License-Identifier: Apache-2.0
"""Connects to the Kubernetes API with the operator's kubeconfig."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from hami_common.errors import Denied, HamiError, NotFound, Unavailable
from hami_common.ports import KubeApi
from hami_common.runtime import kubeio
from hamictl.errors import Absent, InputRefused, Refused, Unreachable

T = TypeVar("T")
START_S = 5.0


def with_kube(kubeconfig: str, work: Callable[[KubeApi], Awaitable[T]]) -> T:
    """Run ``work`` with the Kubernetes API; its errors become errors of the command."""

    async def run() -> T:
        path = kubeconfig or await _default()
        async with kubeio.connect(path, user_agent="hamictl", start_timeout_s=START_S) as kube:
            return await work(kube)

    try:
        return anyio.run(run)
    except NotFound as error:
        raise Absent(str(error)) from error
    except Denied as error:
        raise Refused(str(error)) from error
    except Unavailable as error:
        raise Unreachable(str(error)) from error
    except HamiError as error:
        raise InputRefused(str(error)) from error


async def _default() -> str:
    """Return kubectl's default kubeconfig; empty if there is none."""
    path = await anyio.Path.home() / ".kube" / "config"
    return str(path) if await path.is_file() else ""
