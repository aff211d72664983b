# SPDX-License-Identifier: Apache-2.0
"""NVML is found in the root of a driver container's file system."""

from pathlib import Path

import pytest

from hami_nodeagent.drivers.errors import DriverMissing
from hami_nodeagent.drivers.nvidia.nvml import library_file


@pytest.mark.parametrize("place", ["usr/lib64", "usr/lib/aarch64-linux-gnu", "lib64"])
def test_library_is_found_below_the_root(tmp_path: Path, place: str) -> None:
    library = tmp_path / place / "libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    assert library_file(str(tmp_path)) == str(library)


def test_a_file_is_the_library_itself() -> None:
    assert library_file("/opt/libnvidia-ml.so.1") == "/opt/libnvidia-ml.so.1"


def test_root_without_the_library_is_a_missing_driver(tmp_path: Path) -> None:
    with pytest.raises(DriverMissing, match=r"contains no libnvidia-ml\.so\.1"):
        library_file(str(tmp_path))
