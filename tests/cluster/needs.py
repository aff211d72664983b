# SPDX-License-Identifier: Apache-2.0
"""Gives tests the programs of a control plane, or skips them with the reason.

Where ``HAMI_REQUIRE_CLUSTER=1`` says that a control plane is required, they fail instead.
"""

import os

import pytest

from hami_sim.kubernetes import Programs, ProgramsMissing

REQUIRED = "HAMI_REQUIRE_CLUSTER"


def is_required() -> bool:
    """Report if tests that need a control plane may not be skipped."""
    return os.environ.get(REQUIRED) == "1"


def control_plane_or_skip() -> Programs:
    """Programs of etcd and Kubernetes; skips or fails without them."""
    try:
        return Programs.from_environment()
    except ProgramsMissing as error:
        reason = str(error)
    if is_required():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
