# SPDX-License-Identifier: Apache-2.0
"""Attacks the webhook: AdmissionReviews by grammar, as damaged JSON and as damaged bytes."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from hami_common.runtime.httpd import HttpApp
from tests.attack.fuzz import pods
from tests.attack.fuzz.inputs import damaged, encoded, mutated, pick
from tests.attack.fuzz.laws import DETAIL, Case, Told, chance_of, resident_mib
from tests.attack.fuzz.requests import ERROR, OK, post
from tests.support.admission import Wired, asking_pod, review

API_SERVER = {"subject": ((("commonName", "kube-apiserver"),),)}
"""Its reviews are not bounded in rate, so every case reaches the webhook's decisions."""
BODY_MOST = 4 << 20
USERS = (
    "jane",
    "system:serviceaccount:hami-system:hami-scheduler",
    "system:node:n0",
    "",
    "\x00",
    "a" * 5000,
)


class _Webhook:
    def __init__(self, wired: Wired) -> None:
        self._wired = wired
        self._app = HttpApp(
            {
                ("POST", "/mutate"): wired.admission.mutate,
                ("POST", "/validate"): wired.admission.validate,
            },
            registry=CollectorRegistry(),
            ready=lambda: True,
            body_limit=BODY_MOST,
        )

    async def take(self, case: Case) -> Told:
        status, body = await post(self._app, case.kind, case.body, certificate=API_SERVER)
        if status >= ERROR:
            return Told(problem=f"HTTP {status}: {body.decode()}", outcome=f"{case.kind} {status}")
        if status != OK:
            return Told(outcome=f"{case.kind} {status}")
        response = msgspec.json.decode(body)["response"]
        outcome = "denied" if not response["allowed"] else "allowed"
        return Told(outcome=f"{case.kind} {'changed' if 'patch' in response else outcome}")

    async def finish(self) -> str:
        """Admit a pod that requests a share."""
        status, body = await post(
            self._app, "/mutate", encoded(review(asking_pod())), certificate=API_SERVER
        )
        answer = msgspec.json.decode(body)
        if status == OK and answer["response"]["allowed"] and "patch" in answer["response"]:
            return ""
        return f"a good pod is not admitted afterwards{DETAIL}{body[:200]!r}"

    def processor_s(self) -> float:
        return time.process_time()

    def resident_mib(self) -> float:
        return resident_mib()


class Admission:
    """AdmissionReviews."""

    name = "admission"
    full = 100_000
    few = 1_500
    is_shrunk = True

    def make(self, seed: str, number: int) -> Case:
        """Make a review: two of four by grammar, one as JSON, one as bytes."""
        chance = chance_of(seed, self.name, number)
        path = pick(chance, ("/mutate", "/mutate", "/validate"))
        pod = pods.Tenant(chance).pod(f"p{number}")
        if number % 100 == 7:
            pod = pods.large(chance, pod)
        operation = pick(chance, ("CREATE", "CREATE", "CREATE", "UPDATE", "DELETE", "CONNECT"))
        more: dict[str, Any] = {}
        if chance.random() < 0.1:
            more["subResource"] = pick(
                chance, ("ephemeralcontainers", "status", "resize", "binding", "x")
            )
            operation = "UPDATE"
        if chance.random() < 0.2:
            more["userInfo"] = {"username": pick(chance, USERS)}
        old = pods.Tenant(chance).pod(f"p{number}") if operation == "UPDATE" else None
        document = review(pod, operation=operation, old=old, **more)
        document["request"]["uid"] = f"u{number}"
        if number % 4 == 2:
            document = mutated(document, chance, times=chance.randint(1, 4))
        body = encoded(document)
        if number % 4 == 3:
            body = damaged(body, chance)
        return Case(kind=path, body=body)

    @asynccontextmanager
    async def service(self) -> AsyncIterator[_Webhook]:
        """Assemble the webhook's handlers."""
        wired = Wired()
        try:
            yield _Webhook(wired)
        finally:
            wired.close()
