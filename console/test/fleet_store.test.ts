// SPDX-License-Identifier: Apache-2.0
// The store against documents that the registry's encoder wrote, and against documents made here at random.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import type { FleetDocument } from "../src/fleet/document.ts";
import { Fleet, type Share, sharesOf } from "../src/fleet/store.ts";
import { chanceOf, pack, randomNode } from "./fleet_documents.ts";

type Recorded = {
  snapshot: FleetDocument;
  events: FleetDocument[];
  later: FleetDocument;
  shown: { nodes: Record<string, ShownNode>; silent: string[] };
};
type Row = Record<string, string | number>;
type ShownNode = {
  problem: string;
  devices: Row[];
  allocations: (Row & { shares: Row[] })[];
};

const recorded = JSON.parse(
  readFileSync(join(import.meta.dirname, "../../tests/golden/console/fleet.json"), "utf8"),
) as Recorded;

/** Everything that a fleet shows, independent of how it came about. */
function shown(fleet: Fleet): unknown {
  return {
    silent: [...fleet.silent].sort(),
    nodes: fleet.nodes.map((node) => ({
      name: node.name,
      problem: node.problem,
      devices: Array.from({ length: node.count }, (_, at) => {
        const { node: _node, ...rest } = fleet.device(node, at);
        return { ...rest, shares: sharesOf(node, at) };
      }),
      absent: node.shares.filter((share) => share.device < 0),
    })),
  };
}

function loaded(...documents: FleetDocument[]): Fleet {
  const fleet = new Fleet();
  documents.forEach((document, n) => {
    if (n === 0) fleet.load(document);
    else fleet.apply(document);
  });
  return fleet;
}

test("the recorded events lead to the recorded later snapshot", () => {
  const fleet = loaded(recorded.snapshot, ...recorded.events);
  assert.deepEqual(shown(fleet), shown(loaded(recorded.later)));
  assert.equal(fleet.id, recorded.later.id);
});

test("an event that is applied twice, or after one that contains it, changes nothing", () => {
  const twice = recorded.events.flatMap((event) => [event, event]);
  const fleet = loaded(recorded.snapshot, ...twice);
  assert.deepEqual(shown(fleet), shown(loaded(recorded.later)));
});

test("devices and shares have the values that the Python client decodes", () => {
  const fleet = loaded(recorded.later);
  assert.deepEqual(
    fleet.nodes.map((node) => node.name),
    Object.keys(recorded.shown.nodes).sort(),
  );
  let shares = 0;
  for (const [name, wanted] of Object.entries(recorded.shown.nodes)) {
    const node = fleet.node(name);
    assert.ok(node);
    assert.equal(node.problem, wanted.problem);
    assert.equal(node.count, wanted.devices.length);
    wanted.devices.forEach((device, at) => {
      const { node: _node, at: place, ...rest } = fleet.device(node, at);
      assert.equal(place, at);
      assert.deepEqual(rest, device);
    });
    for (const allocation of wanted.allocations) {
      for (const share of allocation.shares) {
        const { shares: _shares, ...owner } = allocation;
        const found: Share | undefined = node.shares.find(
          (one) => one.allocation.pod === owner.pod && one.memory_mib === share.memory_mib,
        );
        assert.ok(found);
        assert.deepEqual(found.allocation, owner);
        assert.deepEqual(
          [found.device, found.memory_mib, found.core_pct, found.slots, found.exclusive],
          [share.device, share.memory_mib, share.core_pct, share.slots, share.flags === 4],
        );
        shares += 1;
      }
    }
  }
  assert.ok(shares > 10, "the recorded history has shares");
});

test("random documents applied one by one equal a snapshot of the last content", () => {
  for (let seed = 1; seed <= 60; seed += 1) {
    const chance = chanceOf(seed);
    const content = new Map(
      Array.from({ length: 1 + chance(8) }, (_, n) => [`n${n}`, randomNode(chance, `n${n}`)]),
    );
    const fleet = loaded(pack([...content.values()], { silent: [] }));
    let silent: string[] = [];
    for (let round = 0; round < 12; round += 1) {
      const changed = Array.from({ length: chance(4) }, () => {
        const name = `n${chance(10)}`;
        return randomNode(chance, name);
      });
      for (const node of changed) content.set(node.name, node);
      const isSilent = chance(3) === 0;
      if (isSilent) silent = [...content.keys()].filter(() => chance(3) === 0).sort();
      const last = [...new Map(changed.map((node) => [node.name, node])).values()];
      fleet.apply(pack(last, { silent: isSilent ? silent : null }));
    }
    assert.deepEqual(
      shown(fleet),
      shown(loaded(pack([...content.values()], { silent }))),
      `seed ${seed}`,
    );
  }
});

test("shape grows only when the map needs another layout", () => {
  const chance = chanceOf(3);
  const [a, b] = [randomNode(chance, "a", 2), randomNode(chance, "b", 3)];
  const fleet = loaded(pack([a, b]));
  const before = fleet.shape;
  fleet.apply(pack([randomNode(chance, "a", 2)]));
  assert.equal(fleet.shape, before);
  fleet.apply(pack([randomNode(chance, "a", 3)]));
  assert.notEqual(fleet.shape, before);
  const later = fleet.shape;
  fleet.apply(pack([randomNode(chance, "c", 0)]));
  assert.notEqual(fleet.shape, later);
});

test("totals are sums over all devices", () => {
  const fleet = loaded(recorded.later);
  const devices = Object.values(recorded.shown.nodes).flatMap((node) => node.devices);
  const sum = (field: string) => devices.reduce((all, one) => all + Number(one[field]), 0);
  const totals = fleet.totals();
  assert.equal(totals.devices, devices.length);
  assert.equal(totals.used_mib, sum("used_mib"));
  assert.equal(totals.capacity_core_pct, sum("capacity_core_pct"));
  assert.equal(totals.foreign_mib, sum("foreign_mib"));
});

test("a document whose columns do not fit together is refused, and the fleet stays as it was", () => {
  const chance = chanceOf(5);
  const fleet = loaded(pack([randomNode(chance, "a", 2)]));
  const before = shown(fleet);
  const broken = structuredClone(pack([randomNode(chance, "a", 3)]));
  broken.devices.used_mib.pop();
  assert.throws(() => fleet.apply(broken), /devices\.used_mib has 2 values instead of 3/);
  assert.deepEqual(shown(fleet), before);
});
