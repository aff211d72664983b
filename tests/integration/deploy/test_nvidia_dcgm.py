# SPDX-License-Identifier: Apache-2.0
"""The component ``nvidia-dcgm``: the agent may create its socket where the exporter finds it."""

from pathlib import Path, PurePosixPath

from hami_common.runtime.settings import load
from hami_nodeagent.settings import Settings
from tests.integration.deploy.test_hami_components import render


def test_agent_serves_its_view_in_a_writable_directory_of_the_host(tmp_path: Path) -> None:
    objects = render(tmp_path, ("nvidia", "nvidia-dcgm"))
    spec = objects["DaemonSet", "hami-nodeagent-nvidia"]["spec"]["template"]["spec"]
    agent = next(one for one in spec["containers"] if one["name"] == "agent")
    environment = {one["name"]: one["value"] for one in agent["env"] if "value" in one}
    loaded = load(Settings, service="nodeagent", argv=["--set", "node_name=n"], environ=environment)
    directory = str(PurePosixPath(loaded.settings.pod_resources_view).parent)
    (mount,) = (one for one in agent["volumeMounts"] if one["mountPath"] == directory)
    (volume,) = (one for one in spec["volumes"] if one["name"] == mount["name"])
    assert not mount["readOnly"]
    assert volume["hostPath"]["path"] == directory
    assert directory == str(PurePosixPath(loaded.settings.pod_resources_socket).parent)
