# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API, with the login of the operator's kubeconfig."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import click

from hami_common.errors import Denied, HamiError, NotFound, Unavailable
from hami_common.ports import KubeApi
from hami_common.runtime import kubeio
from hamictl.errors import Absent, InputRefused, Refused, Unreachable

T = TypeVar("T")
START_S = 5.0

option = click.option(
    "--kubeconfig",
    envvar="KUBECONFIG",
    default="",
    show_envvar=True,
    help="Login of the Kubernetes API; empty: ~/.kube/config, or the pod's account.",
)


def with_kube(kubeconfig: str, work: Callable[[KubeApi], Awaitable[T]]) -> T:
    """What ``work`` makes of the Kubernetes API; its errors as those of commands."""

    async def run() -> T:
        path = kubeconfig or await _usual()
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


async def _usual() -> str:
    """The kubeconfig that kubectl uses where none is named; empty: none is there."""
    path = await anyio.Path.home() / ".kube" / "config"
    return str(path) if await path.is_file() else ""
