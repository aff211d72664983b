# SPDX-License-Identifier: Apache-2.0
"""Reading a KubeSchedulerConfiguration."""

from pathlib import Path

import pytest

from hami_sim.kubescheduler import load

CONFIG = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
podMaxBackoffSeconds: 2
percentageOfNodesToScore: 100
profiles:
- schedulerName: hami-scheduler
extenders:
- urlPrefix: http://127.0.0.1:9398
  filterVerb: filter
  prioritizeVerb: prioritize
  bindVerb: bind
  weight: 5
  nodeCacheCapable: true
  httpTimeout: 1m30s
  managedResources:
  - name: nvidia.com/gpu
  - name: nvidia.com/gpumem
    ignoredByScheduler: true
"""


def test_the_production_file_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    settings = load(path)
    (extender,) = settings.extenders
    assert settings.profiles == ("hami-scheduler",)
    assert settings.max_backoff_s == 2.0
    assert extender.timeout_s == 90.0
    assert extender.weight == 5
    assert extender.node_cache_capable
    assert settings.ignored_resources == {"nvidia.com/gpumem"}


def test_another_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("kind: Pod\n")
    with pytest.raises(ValueError, match="not a KubeSchedulerConfiguration"):
        load(path)
