// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import { holdersOf } from "../src/views/timemachine/holders.ts";
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

test("shares name pod, node and device, also behind nodes without any", () => {
  const column = (values: number[]) => values;
  const device = column([0, 0, 0, 0]);
  const document = {
    id: "",
    time_s: 0,
    namespace: "",
    words: ["", "T4", "A100", "team", "running", "bound"],
    nodes: {
      name: ["a", "b", "c"],
      problem: [0, 0, 0],
      devices: [1, 2, 1],
      allocations: [0, 2, 1],
    },
    devices: {
      vendor: device,
      index: [7, 0, 1, 3],
      model: [1, 1, 2, 2],
      mode: device,
      memory_mib: device,
      capacity_mib: device,
      used_mib: device,
      capacity_core_pct: device,
      used_core_pct: device,
      slots: device,
      used_slots: device,
      flags: device,
      reason: device,
      partitions: device,
      foreign_mib: device,
      burst_mib: device,
      offer_mib: device,
      offer_core_pct: device,
      stranded_by: device,
    },
    allocations: {
      namespace: [3, 3, 3],
      pod: ["p", "q", "r"],
      state: [4, 5, 4],
      queue: device,
      priority_class: device,
      held_for: device,
      origin: device,
      reserved_s: device,
      shares: [2, 0, 1],
    },
    shares: {
      device: [0, 1, -1],
      memory_mib: [10, 20, 30],
      core_pct: [1, 2, 3],
      slots: [1, 1, 1],
      flags: [0, 0, 0],
    },
    silent: [],
  };
  assert.deepEqual(
    holdersOf(document).map((one) => [one.node, one.pod, one.state, one.device, one.memoryMib]),
    [
      ["b", "p", "running", { index: 0, model: "T4" }, 10],
      ["b", "p", "running", { index: 1, model: "A100" }, 20],
      ["c", "r", "running", undefined, 30],
    ],
  );
});
