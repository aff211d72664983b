# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/roles.md from the table of routes and roles; ``--check`` only compares.

The tables: roles with their rights, and the rights that each route requires
(``hami_common.roles``).
"""

import sys

from hami_common.roles import ROLES, ROUTES, Grant, Right, Rule, granted
from tools.generated import DOCS, write_parts


def tables() -> dict[str, str]:
    """Return each table by the name of its place in the page."""
    return {"roles": _roles(), "grants": _grants(), "routes": _routes()}


def _roles() -> str:
    rows = ["| ClusterRole | for | part of |", "| --- | --- | --- |"]
    for role in ROLES:
        parent = f"`{role.aggregates_to}`" if role.aggregates_to else "no other role"
        rows.append(f"| `{role.name}` | {role.text} | {parent} |")
    return "\n".join(rows)


def _grants() -> str:
    short = [role.name.removeprefix("hami-") for role in ROLES]
    rows = [f"| right | {' | '.join(short)} |", f"| --- |{' --- |' * len(short)}"]
    by_role = {role.name: set(granted(role)) for role in ROLES}
    for right in sorted({right for rights in by_role.values() for right in rights}):
        marks = ["yes" if right in by_role[role.name] else "no" for role in ROLES]
        rows.append(f"| `{right.text}` | {' | '.join(marks)} |")
    for grant in _others():
        marks = ["yes" if grant in role.grants else "no" for role in ROLES]
        rows.append(f"| {_words(grant)} | {' | '.join(marks)} |")
    return "\n".join(rows)


def _others() -> list[Grant]:
    """Return the grants of Kubernetes' own resources that no route requires."""
    found: list[Grant] = []
    for role in ROLES:
        mine = {(right.group, right.resource, right.subresource) for right in granted(role)}
        for grant in role.grants:
            names = {tuple(f"{resource}/".split("/")[:2]) for resource in grant.resources}
            is_of_routes = all((grant.groups[0], *name) in mine for name in names)
            if grant not in found and not is_of_routes:
                found.append(grant)
    return found


def _words(grant: Grant) -> str:
    group = f".{grant.groups[0]}" if grant.groups[0] else ""
    return f"{', '.join(grant.verbs)} of {', '.join(f'`{one}{group}`' for one in grant.resources)}"


def _routes() -> str:
    rows = ["| route | of one namespace | of all namespaces |", "| --- | --- | --- |"]
    for (method, path), rule in sorted(ROUTES.items(), key=lambda item: item[0][::-1]):
        rows.append(f"| {method} `{path}` | {_of_one(rule)} | {_of_all(path, rule)} |")
    return "\n".join(rows)


def _of_one(rule: Rule) -> str:
    if all(right.is_clusterwide for right in rule.rights):
        return "–"
    return _joined(rule.rights, names_scope=True)


def _of_all(path: str, rule: Rule) -> str:
    if "{namespace}" in path or rule.is_namespace_in_body:
        return "–"
    needed = _joined((*rule.rights, *rule.if_clusterwide), names_scope=False) or "any valid token"
    if not rule.if_changing:
        return needed
    flags = " or ".join(f"`{name}`" for name in rule.changes)
    return f"{needed}; with {flags} also {_joined(rule.if_changing, names_scope=False)}"


def _joined(rights: tuple[Right, ...], *, names_scope: bool) -> str:
    scope = " in all namespaces"
    return ", ".join(
        f"`{right.text}`{scope if names_scope and right.is_clusterwide else ''}" for right in rights
    )


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    return write_parts(DOCS / "roles.md", tables())


if __name__ == "__main__":
    sys.exit(main())
