# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API as raw JSON documents: client, list-and-watch, event recorder.

Logging in (kubeconfig, service account, exec plugins) is kubernetes_asyncio's; its object models
are not used, because they cost a hundred times the decoding of the few fields we read (design D6).
"""

from hami_common.runtime.kubeio.client import KubeClient, connect, connect_as
from hami_common.runtime.kubeio.recorder import EventRecorder, ObjectRef

__all__ = ["EventRecorder", "KubeClient", "ObjectRef", "connect", "connect_as"]
