# SPDX-License-Identifier: Apache-2.0
"""The queue tree: organizations, departments and queues with guarantee, limit and borrow weight.

Every rule is applied to each resource separately. For a queue ``n``: ``used(n)`` is the usage of
the pods below it, ``g(n)`` its guarantee (of an inner queue that states none: the sum of its
children's), ``l(n)`` its limit, ``w(n)`` its weight. ``taken(n)`` is ``used(n)`` of a leaf, and the
sum of ``occupied`` of its children otherwise; ``occupied(n)`` is ``taken(n)``, but at least
``g(n)`` where the queue does not lend. ``G`` is the sum of the guarantees at the top: the total to
share.

A pod that requests ``a`` in leaf ``q`` passes when, with ``a`` added:

1. ``occupied(n) <= l(n)`` for ``q`` and each queue above it that the pod makes occupy more; and
2. going up from ``q``: the first queue with ``taken(n) <= g(n)`` ends the search, the pod is within
   a guarantee. When there is none, it borrows at the top, and the sum of ``occupied`` over the top
   is at most ``G``; and
3. no queue on that way borrows with weight 0.

So requests within the guarantee of a leaf always pass rules 2 and 3, whatever others have borrowed.
Rule 4 concerns turns, and applies only to pods that are to be placed, not to placed ones: at each
queue ``n`` that borrows, no sibling ``c`` with a pod that waits for ``b`` may have
``(taken(c) + b - g(c)) / w(c)`` below ``(taken(n) - g(n)) / w(n)``. Lent capacity is shared in
proportion to the weights of the queues that request it, and a single borrower may use all of it.

Pods of class spot use no guarantee: rule 2 ends at no queue for them, and their use is not counted
where other pods are judged, which may evict them and do not wait for their turn. A limit bounds all
pods where one of class spot asks, and the others among themselves.

A resource for which no queue states a guarantee is only limited (rule 1). Pure arithmetic,
independent of pods.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from hami_common.errors import SettingsInvalid
from hami_core.quota.resourcequota import EVERY_VENDOR, KINDS, MOST, Amounts, Resource

ANY_NAMESPACE: Final = "*"
MOST_WEIGHT: Final = 1000
DEEPEST: Final = 8
LOWEST_PRIORITY: Final = 7
MOST_QUEUES: Final = 1000
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")


class QueueConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One queue of the operator's configuration."""

    name: str
    parent: str = ""
    """Empty: at the top."""
    guaranteed: dict[str, int] = {}
    """By resource: ``memory_mib``, ``core_pct``, ``devices``, or ``<vendor>/`` and one of them."""
    limit: dict[str, int] = {}
    borrow_weight: int = 1
    lend: bool = True
    """Let other queues use its guarantee while it does not."""
    namespaces: tuple[str, ...] = ()
    """Namespaces whose pods belong to it by default; ``*``: all that no queue names."""
    allowed_namespaces: tuple[str, ...] = ()
    """Further namespaces whose pods may name it; ``*``: all."""
    task_priority_floor: int = 0
    """Smallest number that its pods, and those of queues below it, may request as task priority: 0
    (the highest) to 7.
    """


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    queue: tuple[QueueConfig, ...] = ()


class Claim(Struct, frozen=True, kw_only=True):
    """A pod that could be placed and waits for its queue to borrow."""

    queue: str
    wanted: Mapping[Resource, int]
    is_spot: bool = False
    """The pod is of class spot: only others of this class wait for its turn."""


class Objection(Struct, frozen=True, kw_only=True):
    """Reason why a queue refuses a pod."""

    rule: str
    """``limit``, ``borrow``, ``weight`` or ``turn``."""
    queue: str
    """Queue whose rule refuses: the pod's queue, or one above it."""
    resource: Resource
    wanted: int
    used: int
    most: int
    """The limit; for a queue that would have to borrow, the guarantee."""
    other: str = ""
    """Queue that is next in turn."""


class QueueTree:
    """A validated tree."""

    def __init__(self, queues: Iterable[QueueConfig] = (), *, vendors: Iterable[str] = ()) -> None:
        """Validate ``queues``; ``SettingsInvalid`` names the first error."""
        self._vendors = sorted(vendors)
        self.queues = {queue.name: queue for queue in _unique(queues)}
        """By name."""
        self.children: dict[str, list[str]] = {name: [] for name in ("", *self.queues)}
        self.guaranteed: dict[str, dict[Resource, int]] = {}
        self.limits: dict[str, dict[Resource, int]] = {}
        self._paths: dict[str, tuple[str, ...]] = {}
        self._queue_by_namespace: dict[str, str] = {}
        for name, queue in self.queues.items():
            if queue.parent and queue.parent not in self.queues:
                raise _wrong(
                    f"queue {name}: parent",
                    f"there is no queue {queue.parent!r}",
                    _near(queue.parent, [*self.queues], "define it"),
                )
            self.children[queue.parent].append(name)
        for name in self.queues:
            self._paths[name] = self._path_of(name)
        for name in sorted(self.queues, key=lambda name: -len(self._paths[name])):
            self._check(name)
        self.managed = frozenset(r for amounts in self.guaranteed.values() for r in amounts)
        """Resources that any queue guarantees."""
        self.resources = self.managed | {r for amounts in self.limits.values() for r in amounts}
        """Resources of any rule."""

    def __bool__(self) -> bool:
        return bool(self.queues)

    def is_leaf(self, name: str) -> bool:
        """Return whether pods may belong to the queue."""
        return not self.children[name]

    def path(self, name: str) -> tuple[str, ...]:
        """Return the queue and those above it, from below."""
        return self._paths[name]

    def task_priority_floor(self, name: str) -> int:
        """Return the highest floor of the queue and those above it; 0: any priority is allowed.

        0 as well for an empty name, of a pod that belongs to no queue.
        """
        path = self._paths.get(name, ())
        return max((self.queues[one].task_priority_floor for one in path), default=0)

    def total(self, resource: Resource) -> int:
        """Return the sum of the guarantees at the top."""
        return sum(self.guaranteed[name].get(resource, 0) for name in self.children[""])

    def queue_of(self, namespace: str, wish: str = "") -> str:
        """Return the queue of a pod that names ``wish``; empty when it belongs to none.

        A name of a queue that does not exist, or that the namespace may not use, is ignored.
        """
        return wish if self.admits(namespace, wish) else self._default(namespace)

    def admits(self, namespace: str, wish: str) -> bool:
        """Return whether pods of the namespace may name this queue."""
        queue = self.queues.get(wish)
        if queue is None or not self.is_leaf(wish):
            return False
        allowed = {*queue.namespaces, *queue.allowed_namespaces}
        return namespace in allowed or ANY_NAMESPACE in allowed

    def _default(self, namespace: str) -> str:
        by_namespace = self._queue_by_namespace
        return by_namespace.get(namespace) or by_namespace.get(ANY_NAMESPACE, "")

    # --- checks of the configuration -------------------------------------------------------------

    def _path_of(self, name: str) -> tuple[str, ...]:
        path = [name]
        while parent := self.queues[path[-1]].parent:
            if parent in path or len(path) == DEEPEST:
                problem = "is below itself" if parent in path else f"is more than {DEEPEST} deep"
                raise _wrong(f"queue {name}: parent", problem, "let each branch end at the top")
            path.append(parent)
        return tuple(path)

    def _check(self, name: str) -> None:
        """Check one queue, after all below it."""
        queue = self.queues[name]
        if not 0 <= queue.borrow_weight <= MOST_WEIGHT:
            raise _wrong(
                f"queue {name}: borrow_weight",
                f"{queue.borrow_weight} is outside 0..{MOST_WEIGHT}",
                "0 never borrows, 1 is usual",
            )
        if not 0 <= queue.task_priority_floor <= LOWEST_PRIORITY:
            raise _wrong(
                f"queue {name}: task_priority_floor",
                f"{queue.task_priority_floor} is outside 0..{LOWEST_PRIORITY}",
                "0 allows every task priority, 1 all but the highest",
            )
        guaranteed = self._amounts(name, "guaranteed", queue.guaranteed)
        limits = self._amounts(name, "limit", queue.limit)
        for resource, below in self._guaranteed_below(name).items():
            if below > guaranteed.setdefault(resource, below):
                raise _wrong(
                    f"queue {name}: guaranteed.{resource}",
                    f"{guaranteed[resource]} is less than {below}, the sum of its children's",
                    "raise it or lower theirs",
                )
        for resource, most in limits.items():
            if guaranteed.get(resource, 0) > most:
                raise _wrong(
                    f"queue {name}: limit.{resource}",
                    f"{most} is less than its guarantee {guaranteed[resource]}",
                    "raise the limit or lower the guarantee",
                )
            for child in self.children[name]:
                if self.limits[child].get(resource, 0) > most:
                    raise _wrong(
                        f"queue {child}: limit.{resource}",
                        f"{self.limits[child][resource]} is more than {most}, the limit of {name}",
                        "lower it, or leave it out",
                    )
        self.guaranteed[name], self.limits[name] = guaranteed, limits
        if (queue.namespaces or queue.allowed_namespaces) and self.children[name]:
            raise _wrong(
                f"queue {name}: namespaces",
                f"pods belong to the queues at the ends, and {self.children[name][0]} is below it",
                "give the namespaces to a queue without children",
            )
        for namespace in queue.namespaces:
            other = self._queue_by_namespace.setdefault(namespace, name)
            if other != name:
                raise _wrong(
                    f"queue {name}: namespaces",
                    f"{namespace!r} already belongs to queue {other}",
                    "write it under allowed_namespaces of one of them",
                )

    def _guaranteed_below(self, name: str) -> dict[Resource, int]:
        total: dict[Resource, int] = {}
        for child in self.children[name]:
            for resource, amount in self.guaranteed[child].items():
                total[resource] = total.get(resource, 0) + amount
        return total

    def _amounts(self, name: str, field: str, amounts: Mapping[str, int]) -> dict[Resource, int]:
        found: dict[Resource, int] = {}
        for word, amount in amounts.items():
            where = f"queue {name}: {field}.{word}"
            vendor, slash, kind = word.rpartition("/")
            known = next((known for known in KINDS if known == kind), None)
            if known is None or (slash and vendor not in self._vendors):
                words = [*KINDS, *(f"{v}/{k}" for v in self._vendors for k in KINDS)]
                raise _wrong(where, "is not a resource", _near(word, words, "see docs/quota.md"))
            if not 0 <= amount <= MOST:
                raise _wrong(where, f"{amount} is outside 0..{MOST}", "write a whole number")
            found[Resource(vendor if slash else EVERY_VENDOR, known)] = amount
        return found


def parse(document: Mapping[str, Any], *, vendors: Iterable[str]) -> QueueTree:
    """Parse the tree of a decoded file; ``SettingsInvalid`` names the field and the fix."""
    _known_keys(document, ["queue"], where="queues file")
    queues = document.get("queue", [])
    for number, queue in enumerate(queues if isinstance(queues, list) else []):
        if isinstance(queue, Mapping):
            names = [field.name for field in msgspec.structs.fields(QueueConfig)]
            _known_keys(queue, names, where=f"queue {queue.get('name', f'number {number + 1}')}")
    try:
        file = msgspec.convert(document, _File, strict=True)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at ")
        raise _wrong(where.strip("`$.") or "queues file", problem, "see docs/quota.md") from error
    if len(file.queue) > MOST_QUEUES:
        raise _wrong("queue", f"more than {MOST_QUEUES} queues", "merge some")
    return QueueTree(file.queue, vendors=vendors)


def _known_keys(table: Mapping[str, Any], names: list[str], *, where: str) -> None:
    for key in table:
        if key not in names:
            raise _wrong(f"{where}: {key}", "is not a known key", _near(str(key), names, ""))


def _near(word: str, words: list[str], otherwise: str) -> str:
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else otherwise or f"known: {', '.join(words)}"


def _unique(queues: Iterable[QueueConfig]) -> Iterable[QueueConfig]:
    seen: set[str] = set()
    for queue in queues:
        if _NAME.fullmatch(queue.name) is None:
            raise _wrong(
                f"queue {queue.name!r}: name",
                "is not a name that a label can have",
                "use at most 63 lower case letters, digits, '-' and '.'",
            )
        if queue.name in seen:
            raise _wrong(f"queue {queue.name}: name", "is there twice", "rename one")
        seen.add(queue.name)
        yield queue


def _wrong(field: str, problem: str, fix: str) -> SettingsInvalid:
    return SettingsInvalid(field=field, problem=problem, fix=fix)


class QueueUse:
    """Usage of the queues of a tree, kept up to date."""

    def __init__(self, tree: QueueTree) -> None:
        """Start without usage."""
        self.tree = tree
        self._used: dict[tuple[str, Resource], int] = {}
        self._taken: dict[tuple[str, Resource], int] = {}
        for name in sorted(tree.queues, key=lambda name: -len(tree.path(name))):
            for resource in tree.resources:
                below = (self.occupied(child, resource) for child in tree.children[name])
                self._taken[name, resource] = sum(below)

    def used(self, queue: str, resource: Resource) -> int:
        """Return the usage of the pods below the queue."""
        return self._used.get((queue, resource), 0)

    def taken(self, queue: str, resource: Resource) -> int:
        """Return ``taken`` as the module docstring defines it."""
        return self._taken.get((queue, resource), 0)

    def occupied(self, queue: str, resource: Resource) -> int:
        """Return ``occupied`` as the module docstring defines it."""
        return self._occupied(queue, resource, self.taken(queue, resource))

    def _occupied(self, queue: str, resource: Resource, taken: int) -> int:
        if self.tree.queues[queue].lend:
            return taken
        return max(taken, self.tree.guaranteed.get(queue, {}).get(resource, 0))

    def add(self, queue: str, amounts: Amounts, sign: int = 1) -> None:
        """Add the amounts to the usage of the leaf ``queue`` (or, with -1, subtract them)."""
        for resource, amount in amounts.items():
            grows = sign * amount
            for name in self.tree.path(queue):
                at = name, resource
                self._used[at] = self._used.get(at, 0) + sign * amount
                before = self._taken.get(at, 0)
                self._taken[at] = before + grows
                grows = self._occupied(name, resource, before + grows) - self._occupied(
                    name, resource, before
                )

    def guarantor(self, queue: str, wanted: Amounts) -> str:
        """Return the outermost queue within whose guarantee the leaf may use ``wanted`` more.

        Empty when the leaf would borrow, or when no queue guarantees any of these resources.
        """
        path, outermost = self.tree.path(queue), -1
        for resource, amount in wanted.items():
            if amount <= 0 or resource not in self.tree.managed:
                continue
            grows = amount
            for at, name in enumerate(path):
                taken = self.taken(name, resource) + grows
                if taken <= self.tree.guaranteed[name].get(resource, 0):
                    outermost = max(outermost, at)
                    break
                if not self.tree.queues[name].borrow_weight:
                    return ""
                grows = self._occupied(name, resource, taken) - self.occupied(name, resource)
            else:
                return ""
        return path[outermost] if outermost >= 0 else ""

    def surplus(self, queue: str, *, beside: str) -> dict[tuple[str, Resource], int] | None:
        """Return what the leaf, and each queue between it and ``beside``, uses above its guarantee.

        These are the queues below the nearest one that is above both; all, if ``beside`` is empty.
        ``None``: the leaf is ``beside``, or below it.
        """
        path, above = self.tree.path(queue), self.tree.path(beside)[1:] if beside else ()
        if beside in path:
            return None
        own = [name for name in path if name not in above]
        return {
            (name, resource): max(
                0, self.taken(name, resource) - self.tree.guaranteed[name].get(resource, 0)
            )
            for name in own
            for resource in self.tree.managed
        }

    def object_to(
        self,
        queue: str,
        wanted: Amounts,
        claims: Iterable[Claim] = (),
        *,
        borrows: bool = False,
    ) -> Objection | None:
        """Return why the leaf ``queue`` may not use the additional amounts.

        ``None`` when it may. ``borrows``: the pod uses no guarantee.
        """
        claims = tuple(claims)
        for resource, amount in wanted.items():
            if amount > 0 and resource in self.tree.resources:
                objection = self._object_to(queue, resource, amount, claims, borrows=borrows)
                if objection is not None:
                    return objection
        return None

    def _object_to(
        self,
        queue: str,
        resource: Resource,
        amount: int,
        claims: tuple[Claim, ...],
        *,
        borrows: bool,
    ) -> Objection | None:
        tree = self.tree
        grows = amount
        after: list[tuple[str, int]] = []
        for name in tree.path(queue):
            taken = self.taken(name, resource) + grows
            before, occupied = self.occupied(name, resource), self._occupied(name, resource, taken)
            most = tree.limits[name].get(resource)
            if most is not None and occupied > max(most, before):
                return self._objection("limit", name, resource, amount, most)
            after.append((name, taken))
            grows = occupied - before
        if resource not in tree.managed:
            return None
        for name, taken in after:
            guaranteed = tree.guaranteed[name].get(resource, 0)
            if taken <= guaranteed and not borrows:
                return None
            if not tree.queues[name].borrow_weight:
                return self._objection("weight", name, resource, amount, guaranteed)
            first = self._whose_turn(name, resource, taken - guaranteed, claims)
            if first:
                objection = self._objection("turn", name, resource, amount, guaranteed)
                return msgspec.structs.replace(objection, other=first)
        top = sum(self.occupied(name, resource) for name in tree.children[""])
        if top + grows > tree.total(resource):
            guaranteed = tree.guaranteed[queue].get(resource, 0)
            return self._objection("borrow", queue, resource, amount, guaranteed)
        return None

    def _objection(
        self, rule: str, name: str, resource: Resource, wanted: int, most: int
    ) -> Objection:
        return Objection(
            rule=rule,
            queue=name,
            resource=resource,
            wanted=wanted,
            used=self.used(name, resource),
            most=most,
        )

    def _whose_turn(
        self, name: str, resource: Resource, borrowed: int, claims: tuple[Claim, ...]
    ) -> str:
        """Return a sibling that would borrow less for its weight, empty when none does."""
        tree = self.tree
        weight = tree.queues[name].borrow_weight
        for claim in claims:
            wanted = claim.wanted.get(resource, 0)
            if not wanted or claim.queue not in tree.queues:
                continue
            path = tree.path(claim.queue)
            sibling = next((c for c in path if c in tree.children[tree.queues[name].parent]), "")
            if sibling in ("", name) or not self._is_possible(claim.queue, resource, wanted):
                continue
            guaranteed = tree.guaranteed[sibling].get(resource, 0)
            would = self.taken(sibling, resource) + wanted - guaranteed
            if 0 < would * weight < borrowed * tree.queues[sibling].borrow_weight:
                return claim.queue
        return ""

    def _is_possible(self, queue: str, resource: Resource, wanted: int) -> bool:
        """Return whether the claim could pass if all others used nothing."""
        tree = self.tree
        if self.used(queue, resource) + wanted > tree.total(resource):
            return False
        return all(
            self.used(name, resource) + wanted <= tree.limits[name].get(resource, MOST)
            for name in tree.path(queue)
        )
