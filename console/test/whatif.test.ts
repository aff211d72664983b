// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import { changeOf, nameOf, seriesOf } from "../src/views/timemachine/results.ts";
import { entriesOf, LineError, podsOf } from "../src/views/whatif/manifest.ts";

test("lines are names and values, as in a manifest", () => {
  const text = '\n nvidia.com/gpu: 1\nhami.io/gpu-scheduler-policy: "binpack"\nnote: a: b\n';
  assert.deepEqual(entriesOf(text), {
    "nvidia.com/gpu": "1",
    "hami.io/gpu-scheduler-policy": "binpack",
    note: "a: b",
  });
});

test("a line without a value is named", () => {
  for (const line of ["nvidia.com/gpu", "nvidia.com/gpu:", ": 1"]) {
    assert.throws(
      () => entriesOf(`a: 1\n${line}`),
      (error) => error instanceof LineError && error.line === line,
    );
  }
});

test("pods are numbered from one and share their request", () => {
  const pods = podsOf({
    count: 2,
    namespace: "team",
    limits: { gpu: "1" },
    annotations: { a: "b" },
  });
  assert.deepEqual(
    pods.map((pod) => pod.metadata),
    [
      { name: "pod-1", namespace: "team", annotations: { a: "b" } },
      { name: "pod-2", namespace: "team", annotations: { a: "b" } },
    ],
  );
  assert.deepEqual(pods[1]?.spec, {
    containers: [{ name: "main", resources: { limits: { gpu: "1" } } }],
  });
});

test("a result is named by its policy, the record by nothing", () => {
  const weights = { slot: 1, core: 1, memory: 1 };
  const policy = { node_policy: "spread", device_policy: ["numa", "spread"], weights } as const;
  assert.equal(
    nameOf({ policy: { ...policy, device_policy: [...policy.device_policy] } }),
    "spread / numa, spread",
  );
  assert.equal(nameOf({ policy: null }), "");
});

test("differences are rounded to a tenth, and lines keep the order of results", () => {
  assert.equal(changeOf(3, 2.1), 0.9);
  assert.equal(changeOf(1.04, 2), -1);
  assert.deepEqual(
    seriesOf(
      [],
      () => "",
      (one) => one.waiting,
    ),
    [],
  );
});
