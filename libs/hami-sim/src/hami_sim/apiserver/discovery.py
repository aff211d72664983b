# SPDX-License-Identifier: Apache-2.0
"""Discovery documents: what groups, versions and resources there are.

Unaggregated and aggregated (``apidiscovery.k8s.io/v2``) forms, /version, and an OpenAPI v3 index
that states only what kubectl looks up there: which kinds accept `fieldValidation`.
"""

from __future__ import annotations

from typing import Final

from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.resources import Resource, ResourceTable

VERSION: Final[Obj] = {
    "major": "1",
    "minor": "34",
    "emulationMajor": "1",
    "emulationMinor": "34",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "33",
    "gitVersion": "v1.34.0+hami-sim",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2025-08-27T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "linux/amd64",
}
AGGREGATED: Final = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


def _group(name: str, versions: list[str]) -> Obj:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _api_resources(row: Resource) -> list[Obj]:
    entry: Obj = {
        "name": row.plural,
        "singularName": row.singular,
        "namespaced": row.namespaced,
        "kind": row.kind,
        "verbs": list(row.verbs),
    }
    if row.short_names:
        entry["shortNames"] = list(row.short_names)
    if row.categories:
        entry["categories"] = list(row.categories)
    subs = []
    for sub in row.subresources:
        item: Obj = {
            "name": f"{row.plural}/{sub.name}",
            "singularName": "",
            "namespaced": row.namespaced,
            "kind": sub.kind,
            "verbs": list(sub.verbs),
        }
        if sub.group and sub.group != row.group:
            item["group"], item["version"] = sub.group, sub.version
        subs.append(item)
    return [entry, *subs]


def _aggregated(row: Resource) -> Obj:
    def kind(group: str, version: str, name: str) -> Obj:
        return {"group": group, "version": version, "kind": name}

    entry: Obj = {
        "resource": row.plural,
        "responseKind": kind(row.group, row.version, row.kind),
        "scope": "Namespaced" if row.namespaced else "Cluster",
        "singularResource": row.singular,
        "verbs": list(row.verbs),
    }
    if row.short_names:
        entry["shortNames"] = list(row.short_names)
    if row.categories:
        entry["categories"] = list(row.categories)
    if row.subresources:
        entry["subresources"] = [
            {
                "subresource": sub.name,
                "responseKind": kind(sub.group or row.group, sub.version, sub.kind),
                "verbs": list(sub.verbs),
            }
            for sub in row.subresources
        ]
    return entry


class Discovery:
    """Documents by path, made from the resource table."""

    def __init__(self, table: ResourceTable, address: str) -> None:
        self._table = table
        self._address = address

    def _group_versions(self) -> list[tuple[str, str]]:
        named = [(group, version) for group, vs in self._table.groups().items() for version in vs]
        return [("", "v1"), *named]

    def aggregated(self, path: str) -> Obj | None:
        """Answer /api or /apis in the aggregated form."""
        if path not in ("/api", "/apis"):
            return None
        wanted = [pair for pair in self._group_versions() if bool(pair[0]) == (path == "/apis")]
        items: dict[str, Obj] = {}
        for group, version in wanted:
            item = items.setdefault(
                group, {"metadata": {"name": group} if group else {}, "versions": []}
            )
            item["versions"].append(
                {
                    "version": version,
                    "resources": [_aggregated(row) for row in self._table.in_group(group, version)],
                    "freshness": "Current",
                }
            )
        return {
            "kind": "APIGroupDiscoveryList",
            "apiVersion": "apidiscovery.k8s.io/v2",
            "metadata": {},
            "items": list(items.values()),
        }

    def document(self, path: str) -> Obj | None:
        """Answer a discovery path, or None where there is no such document."""
        parts = path.strip("/").split("/")
        match parts:
            case ["version"]:
                return VERSION
            case ["api"]:
                return {
                    "kind": "APIVersions",
                    "versions": ["v1"],
                    "serverAddressByClientCIDRs": [
                        {"clientCIDR": "0.0.0.0/0", "serverAddress": self._address}
                    ],
                }
            case ["apis"]:
                return {
                    "kind": "APIGroupList",
                    "apiVersion": "v1",
                    "groups": [_group(name, vs) for name, vs in self._table.groups().items()],
                }
            case ["apis", group] if group in self._table.groups():
                return {
                    "kind": "APIGroup",
                    "apiVersion": "v1",
                    **_group(group, self._table.groups()[group]),
                }
            case ["api", version] if self._table.in_group("", version):
                return self._resource_list("", version)
            case ["apis", group, version] if self._table.in_group(group, version):
                return self._resource_list(group, version)
            case ["openapi", "v3"]:
                return {"paths": dict(self._openapi_index())}
            case ["openapi", "v3", "api", version]:
                return self._openapi("", version)
            case ["openapi", "v3", "apis", group, version]:
                return self._openapi(group, version)
            case _:
                return None

    def _resource_list(self, group: str, version: str) -> Obj:
        rows = self._table.in_group(group, version)
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": f"{group}/{version}" if group else version,
            "resources": [entry for row in rows for entry in _api_resources(row)],
        }

    def _openapi_index(self) -> list[tuple[str, Obj]]:
        found = []
        for group, version in self._group_versions():
            path = f"apis/{group}/{version}" if group else f"api/{version}"
            found.append((path, {"serverRelativeURL": f"/openapi/v3/{path}"}))
        return found

    def _openapi(self, group: str, version: str) -> Obj | None:
        rows = self._table.in_group(group, version)
        if not rows:
            return None
        base = f"/apis/{group}/{version}" if group else f"/api/{version}"
        paths: Obj = {}
        for row in rows:
            scope = "/namespaces/{namespace}" if row.namespaced else ""
            kind = {"group": group, "version": version, "kind": row.kind}
            parameters = [
                {"name": name, "in": "query", "schema": {"type": "string"}}
                for name in ("dryRun", "fieldManager", "fieldValidation")
            ]
            paths[f"{base}{scope}/{row.plural}/{{name}}"] = {
                "patch": {
                    "x-kubernetes-action": "patch",
                    "x-kubernetes-group-version-kind": kind,
                    "parameters": parameters,
                    "responses": {"200": {"description": "OK"}},
                }
            }
        return {
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
            "paths": paths,
            "components": {"schemas": {}},
        }
