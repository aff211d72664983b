# SPDX-License-Identifier: Apache-2.0
"""The components for Prometheus and Grafana render, and name what the base has."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hami_sim.kubernetes.programs import KUBECTL
from tests.cluster.needs import control_plane_or_skip

KUSTOMIZE = Path(__file__).parents[3] / "deploy" / "kustomize"
COMPONENTS = ("nvidia", "prometheus", "prometheus-operator", "grafana")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("overlay")

    def reached(path: Path) -> str:
        return os.path.relpath(path, directory)

    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [reached(KUSTOMIZE / "base")],
        "components": [reached(KUSTOMIZE / "components" / name) for name in COMPONENTS],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    kubectl = control_plane_or_skip().path(KUBECTL)
    done = subprocess.run(
        [kubectl, "kustomize", str(directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in documents if one["kind"] == kind}


def test_scraped_ports_exist_in_the_pods(
    documents: list[dict[str, Any]],
) -> None:
    ports: dict[str, dict[str, int]] = {}
    for kind in ("Deployment", "DaemonSet"):
        for one in of_kind(documents, kind).values():
            template = one["spec"]["template"]
            app = template["metadata"]["labels"]["app.kubernetes.io/name"]
            ports[app] = {
                port["name"]: port["containerPort"]
                for container in template["spec"]["containers"]
                for port in container.get("ports", [])
            }
    monitors = of_kind(documents, "PodMonitor")
    assert len(monitors) == 4
    for monitor in monitors.values():
        app = monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in ports[app]
        assert endpoint["honorLabels"], "namespace and pod are those of the share"
    services = of_kind(documents, "Service")
    for name, number in (("hami-scheduler-monitor", 9395), ("hami-device-plugin-monitor", 9394)):
        (port,) = services[name]["spec"]["ports"]
        app = services[name]["spec"]["selector"]["app.kubernetes.io/name"]
        assert port["port"] == ports[app][port["targetPort"]] == number


def test_rules_are_the_same_in_both_formats(documents: list[dict[str, Any]]) -> None:
    text = of_kind(documents, "ConfigMap")["hami-prometheus-rules"]["data"]["hami.yaml"]
    rule = of_kind(documents, "PrometheusRule")["hami"]
    assert yaml.safe_load(text)["groups"] == rule["spec"]["groups"]


def test_dashboards_are_found_by_grafanas_sidecar(documents: list[dict[str, Any]]) -> None:
    dashboards = of_kind(documents, "ConfigMap")["hami-dashboards"]
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert len(dashboards["data"]) == 4
