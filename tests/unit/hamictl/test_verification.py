# SPDX-License-Identifier: Apache-2.0
"""The request and the probe of ``hamictl verify``."""

import subprocess
import sys

import msgspec
import pytest

from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.pods import limits
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import Vendor
from hamictl import verification
from hamictl.verification import Expected, Request, default_resources, judge, pod_of

CATALOG = Catalog.from_settings()
PLACEMENT = Placement(
    node="gpu-1",
    containers=(
        ContainerShares(
            name="probe",
            kind="app",
            shares=(Share(vendor="nvidia", uuid="GPU-1", memory_mib=512, core_pct=10),),
        ),
    ),
)
LIMITED = Expected(
    scheduler_name="hami-scheduler", verifier=None, memory_enforced="libvgpu", has_limiter=True
)
FILE = limits.encode(limits.limits_of(PLACEMENT.containers[0], allocation_id="a-1"))


@pytest.mark.parametrize("vendor", CATALOG.vendors, ids=lambda vendor: vendor.name)
def test_default_request_of_each_vendor_is_one_that_its_rules_accept(vendor: Vendor) -> None:
    resources = default_resources(vendor, memory_mib=1024, core_pct=10)
    request = Request(vendor=vendor.name, resources=resources, image="x", is_python=True)
    pod = msgspec.convert(pod_of(request, "p"), PodView, strict=False)
    parsed = CATALOG.parse_pod(pod)
    assert parsed is not None
    (container,) = parsed.containers
    (wanted,) = container.requests
    assert (wanted.vendor, wanted.count) == (vendor.name, 1)


def test_probe_of_the_agents_image_prints_what_it_finds() -> None:
    done = subprocess.run(
        [sys.executable, "-c", verification.PYTHON_PROBE],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert "limiter" not in done.stdout


def test_limits_and_limiter_in_force_pass() -> None:
    assert judge(f"{FILE}limiter\nvisible 512\n", PLACEMENT, LIMITED).endswith("NVML shows 512 MiB")
    assert judge(f"{FILE}limiter\n", PLACEMENT, LIMITED).endswith("limiter loaded")


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("", "no limits file"),
        (FILE.replace("memory_mib=512", "memory_mib=900") + "limiter\n", "the limits file has"),
        (FILE, "limiter is not loaded"),
        (f"{FILE}limiter\nvisible 24576\n", "NVML shows 24576 MiB"),
    ],
    ids=["no-file", "other-limits", "no-limiter", "whole-device-visible"],
)
def test_missing_enforcement_is_named(output: str, cause: str) -> None:
    with pytest.raises(verification.StepFailed, match=cause) as caught:
        judge(output, PLACEMENT, LIMITED)
    assert caught.value.fix


def test_vendor_without_a_limiter_is_not_expected_to_load_one() -> None:
    wanted = msgspec.structs.replace(LIMITED, has_limiter=False, memory_enforced="")
    assert "offers no enforcement" in judge(FILE, PLACEMENT, wanted)
