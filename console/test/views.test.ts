// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import type { Registry } from "../generated/api.ts";
import { strandedBy, totalsOf } from "../src/views/capacity/sums.ts";
import { linkOf, search, type View } from "../src/views/view.ts";

test("the link of a view ends before its first parameter", () => {
  assert.equal(linkOf({ path: "/workloads/:namespace?/:pod?" }), "/workloads");
  assert.equal(linkOf({ path: "/capacity" }), "/capacity");
});

function model(name: string, slotsMib: number): Registry.ModelCapacity {
  return {
    vendor: "nvidia",
    model: name,
    devices: 2,
    devices_offering: 1,
    capacity_mib: 100,
    free_mib: 60,
    foreign_mib: 0,
    burst_mib: 0,
    largest_mib: 50,
    largest_core_pct: 100,
    largest_on: "gpu-a",
    fits: [],
    stranded: [
      { cause: "slots", devices: 1, memory_mib: slotsMib },
      { cause: "silent", devices: 1, memory_mib: 5 },
    ],
    stranded_by: [{ namespace: "team-a", memory_mib: slotsMib }],
  };
}

test("capacity sums devices and stranded memory over models", () => {
  const totals = totalsOf([model("A", 10), model("B", 20)]);
  assert.deepEqual(totals, {
    devices: 4,
    offering: 2,
    capacityMib: 200,
    freeMib: 120,
    strandedMib: 40,
  });
});

test("causes are summed over models, the largest first", () => {
  const causes = strandedBy([model("A", 1), model("B", 2)], (one) =>
    one.stranded.map(({ cause, memory_mib }) => ({ name: cause, memoryMib: memory_mib })),
  );
  assert.deepEqual(causes, [
    { name: "silent", models: ["A", "B"], memoryMib: 10 },
    { name: "slots", models: ["A", "B"], memoryMib: 3 },
  ]);
});

test("the search finds views by title, then their objects", () => {
  const view = (name: string, more: Partial<View> = {}): View => ({
    name,
    path: `/${name}/:id?`,
    titleKey: "capacity.title",
    icon: "",
    component: () => null,
    needs: "GET /v1/nodes",
    group: "operate",
    order: 1,
    ...more,
  });
  const node = { label: "gpu-fleet-1", kind: "Node", link: "/nodes/gpu-fleet-1" };
  const views = [
    view("capacity"),
    view("nodes", { find: (text) => (node.label.includes(text) ? [node] : []) }),
    view("fleet"),
    view("fleet-detail", { isUnlisted: true }),
  ];
  const find = (text: string) => search(views, text, (one) => one.name, "View");
  assert.deepEqual(find("  "), []);
  assert.deepEqual(find(" Fleet "), [{ label: "fleet", kind: "View", link: "/fleet" }, node]);
});
