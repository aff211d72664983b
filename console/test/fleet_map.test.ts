// SPDX-License-Identifier: Apache-2.0
// Where devices lie on the map, and what is drawn there.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Categories, COLORS, OTHERS } from "../src/fleet/categories.ts";
import {
  cornerOf,
  eachBlock,
  type Layout,
  layOut,
  type Place,
  placeAt,
  step,
} from "../src/fleet/layout.ts";
import { partitionsOf } from "../src/fleet/partitions.ts";
import { type Camera, color, mix, type Palette, Raster } from "../src/fleet/raster.ts";
import { Search } from "../src/fleet/search.ts";
import { Fleet } from "../src/fleet/store.ts";
import {
  allocationOf,
  chanceOf,
  deviceOf,
  type NodeContent,
  nodeOf,
  pack,
  randomNode,
} from "./fleet_documents.ts";

function fleetOf(...nodes: NodeContent[]): Fleet {
  const fleet = new Fleet();
  fleet.load(pack(nodes));
  return fleet;
}

function places(layout: Layout): Place[] {
  return layout.blocks.flatMap((block, number) =>
    Array.from({ length: block.count }, (_, at) => ({ block: number, at })),
  );
}

const mixed = fleetOf(
  ...[8, 1, 4, 8, 0, 16, 24, 8, 3, 8].map((count, n) =>
    randomNode(chanceOf(n + 1), `n${n}`, count),
  ),
);

test("every device has a place of its own within the map, and is found there", () => {
  for (const aspect of [0.5, 1, 3]) {
    const layout = layOut(mixed.nodes, aspect);
    const corners = new Set<string>();
    for (const place of places(layout)) {
      const [x, y] = cornerOf(layout, place) ?? [Number.NaN, Number.NaN];
      assert.ok(x >= 0 && y >= 0 && x + 1 <= layout.width && y + 1 <= layout.height);
      assert.deepEqual(placeAt(layout, x + 0.5, y + 0.5), place);
      corners.add(`${x.toFixed(3)} ${y.toFixed(3)}`);
    }
    assert.equal(corners.size, mixed.totals().devices);
  }
});

test("a point beside all devices finds none", () => {
  const layout = layOut(mixed.nodes, 1);
  assert.equal(placeAt(layout, 0, 0), null);
  assert.equal(placeAt(layout, -5, 1), null);
  assert.equal(placeAt(layout, 1, layout.height + 5), null);
});

test("only blocks within the rectangle are visited", () => {
  const layout = layOut(
    fleetOf(...Array.from({ length: 400 }, (_, n) => randomNode(chanceOf(n + 1), `n${n}`, 8)))
      .nodes,
    1,
  );
  let visited = 0;
  eachBlock(layout, [10, 10, 20, 20], (block) => {
    visited += 1;
    assert.ok(block.x < 20 && block.x + block.columns > 10);
  });
  assert.ok(visited > 3 && visited < 30, `${visited}`);
});

test("arrow keys reach every device from the first one", () => {
  const layout = layOut(mixed.nodes, 1.5);
  const seen = new Set<string>();
  const open: Place[] = [{ block: 0, at: 0 }];
  for (let place = open.pop(); place !== undefined; place = open.pop()) {
    const key = `${place.block} ${place.at}`;
    if (seen.has(key)) continue;
    seen.add(key);
    open.push(step(layout, place, 1, 0), step(layout, place, -1, 0));
    open.push(step(layout, place, 0, 1), step(layout, place, 0, -1));
  }
  assert.equal(seen.size, mixed.totals().devices);
});

test("partitions have the place and size that their profile names", () => {
  assert.deepEqual(partitionsOf("1g.18gb@2 3g.71gb@4", "NVIDIA H200", 143_771), [
    { profile: "1g.18gb", span: [2 / 8, 3 / 8] },
    { profile: "3g.71gb", span: [4 / 8, 8 / 8] },
  ]);
  assert.deepEqual(partitionsOf("2g.12gb@2", "NVIDIA A30", 24_576), [
    { profile: "2g.12gb", span: [2 / 4, 4 / 4] },
  ]);
  assert.deepEqual(partitionsOf("7g.80gb@0", "NVIDIA H100 80GB HBM3", 81_559)[0]?.span, [0, 1]);
});

test("partitions without a known place are counted", () => {
  assert.deepEqual(partitionsOf("2 vir04 vir02", "Ascend910B", 65_536), [
    { profile: "vir04", span: null },
    { profile: "vir04", span: null },
    { profile: "vir02", span: null },
  ]);
  assert.deepEqual(partitionsOf("", "NVIDIA H200", 143_771), []);
});

test("the namespaces with the most memory have colors of their own, and keep them", () => {
  const owned = (name: string, mib: number) =>
    allocationOf({ namespace: name, pod: name }, { memory_mib: mib });
  const nodes = Array.from({ length: 14 }, (_, n) =>
    nodeOf(`n${n}`, [deviceOf()], [owned(`team-${n}`, 1000 + n)]),
  );
  const fleet = fleetOf(...nodes);
  const categories = new Categories("namespace");
  const entries = categories.refresh(fleet);
  assert.equal(entries[0]?.word, "team-13");
  assert.equal(new Set(entries.map((one) => one.color)).size, COLORS + 1);
  assert.equal(categories.colorOf("team-0"), OTHERS);
  const before = categories.colorOf("team-13");
  fleet.apply(pack([nodeOf("n0", [deviceOf()], [owned("team-0", 90_000)])]));
  assert.equal(categories.refresh(fleet)[0]?.word, "team-0");
  assert.equal(categories.colorOf("team-13"), before);
  assert.equal(categories.colorOf("team-0"), OTHERS);
});

const palette: Palette = {
  ground: color("#000000"),
  tile: color("#101010"),
  gap: color("#202020"),
  states: {
    silent: color("#300000"),
    unhealthy: color("#ff0000"),
    foreign: color("#ff00ff"),
    cordoned: color("#0000ff"),
    stranded: color("#00ffff"),
    booked: color("#00ff00"),
    free: color("#001000"),
  },
  categories: Array.from({ length: COLORS + 1 }, (_, n) => color(`#80${(16 + n).toString(16)}40`)),
};

/** Pixels of a map of one device that fills it, by rows of text positions. */
function drawn(fleet: Fleet, size: number, search = "", categories: Categories | null = null) {
  const layout = layOut(fleet.nodes, 1);
  const [x, y] = cornerOf(layout, { block: 0, at: 0 }) ?? [0, 0];
  const camera: Camera = { x, y, scale: size, width: size, height: size };
  const pixels = new Uint32Array(size * size);
  categories?.refresh(fleet);
  new Raster().draw(pixels, camera, layout, fleet, {
    palette,
    categories,
    search: new Search(search),
  });
  return (column: number, row: number) => pixels[row * size + column];
}

test("bars are as high as the booked parts of memory and compute", () => {
  const device = deviceOf({ used_mib: 143_771 / 2, used_core_pct: 25, used_slots: 1 });
  const pod = allocationOf({}, { memory_mib: 143_771 / 2, core_pct: 25 });
  const at = drawn(fleetOf(nodeOf("n", [device], [pod])), 100);
  const { booked, free, foreign } = palette.states;
  assert.equal(at(10, 90), booked);
  assert.equal(at(10, 55), booked);
  assert.equal(at(10, 45), palette.tile);
  assert.equal(at(90, 90), booked);
  assert.equal(at(90, 70), palette.tile);
  assert.notEqual(free, foreign);
});

test("ten containers with ten percent each fill the compute bar", () => {
  const pods = Array.from({ length: 10 }, (_, n) =>
    allocationOf({ pod: `p${n}` }, { memory_mib: 14_377, core_pct: 10 }),
  );
  const device = deviceOf({ used_mib: 143_770, used_core_pct: 100, used_slots: 10 });
  const at = drawn(fleetOf(nodeOf("n", [device], pods)), 100);
  assert.equal(at(90, 1), palette.states.booked);
  assert.equal(at(90, 95), palette.states.booked);
});

test("partitions are drawn at their places, with the rest of the device free", () => {
  const device = deviceOf({ partitions: "1g.18gb@2 3g.71gb@4", used_slots: 2, used_mib: 90_000 });
  const pod = allocationOf({}, { memory_mib: 16_384 }, { memory_mib: 72_704 });
  const at = drawn(fleetOf(nodeOf("n", [device], [pod])), 100);
  assert.equal(at(10, 95), palette.tile, "slices 0 and 1 are free");
  assert.equal(at(10, 70), palette.states.booked, "slice 2");
  assert.equal(at(10, 56), palette.tile, "slice 3 is free");
  assert.equal(at(10, 30), palette.states.booked, "slices 4 to 7");
});

test("foreign memory is hatched above the booked memory", () => {
  const device = deviceOf({ used_mib: 0, foreign_mib: 143_771 / 2, used_slots: 0 });
  const at = drawn(fleetOf(nodeOf("n", [device])), 100);
  const seen = new Set(Array.from({ length: 8 }, (_, n) => at(20 + n, 80)));
  assert.deepEqual(seen, new Set([palette.states.foreign, palette.tile]));
});

test("shares have the colors of their namespaces", () => {
  const device = deviceOf({ used_mib: 100_000, used_slots: 2 });
  const pods = [
    allocationOf({ namespace: "big", pod: "a" }, { memory_mib: 80_000 }),
    allocationOf({ namespace: "small", pod: "b" }, { memory_mib: 20_000 }),
  ];
  const fleet = fleetOf(nodeOf("n", [device], pods));
  const at = drawn(fleet, 100, "", new Categories("namespace"));
  assert.equal(at(10, 90), palette.categories[0]);
  assert.equal(at(10, 38), palette.categories[1]);
});

test("memory of namespaces that the viewer may not see has the color of the others", () => {
  const device = deviceOf({ used_mib: 143_771, used_slots: 1 });
  const at = drawn(fleetOf(nodeOf("n", [device])), 100, "", new Categories("namespace"));
  assert.equal(at(10, 50), palette.categories[OTHERS]);
});

test("devices that the search excludes fade", () => {
  const fleet = fleetOf(nodeOf("n", [deviceOf({ flags: 2 })]));
  assert.equal(drawn(fleet, 100, "is:unhealthy")(0, 0), palette.states.unhealthy);
  const faded = mix(palette.states.unhealthy, palette.ground, 0.18);
  assert.equal(drawn(fleet, 100, "is:free")(0, 0), faded);
});

test("a tile of a few pixels shows that its device is unhealthy, and how full it is", () => {
  const full = deviceOf({ used_mib: 143_771, used_slots: 1 });
  const pod = allocationOf({}, { memory_mib: 143_771 });
  assert.equal(drawn(fleetOf(nodeOf("n", [full], [pod])), 3)(0, 0), palette.states.booked);
  const sick = fleetOf(nodeOf("n", [deviceOf({ flags: 2 })]));
  assert.notEqual(drawn(sick, 3)(0, 0), palette.tile);
});

test("drawing outside the map or partly outside writes only the ground", () => {
  const fleet = fleetOf(nodeOf("n", [deviceOf({ used_mib: 143_771, used_slots: 1 })]));
  const layout = layOut(fleet.nodes, 1);
  const pixels = new Uint32Array(50 * 50);
  const style = { palette, categories: null, search: new Search("") };
  const far = { x: 500, y: 500, scale: 20, width: 50, height: 50 };
  new Raster().draw(pixels, far, layout, fleet, style);
  assert.deepEqual(new Set(pixels), new Set([palette.ground]));
  new Raster().draw(pixels, { ...far, x: 0.9, y: 1.4 }, layout, fleet, style);
  assert.ok(new Set(pixels).size > 1);
});
