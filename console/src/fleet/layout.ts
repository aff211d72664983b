// SPDX-License-Identifier: Apache-2.0
// Places of all devices on the map. The unit of length is one tile. Nodes are placed in order on
// shelves of equal width; each has a line for its name and its devices below in up to two rows (four
// from 17 devices on).

import type { FleetNode } from "./store.ts";

export interface Block {
  readonly node: FleetNode["name"];
  readonly count: number;
  readonly columns: number;
  readonly x: number;
  /** Of the first row of tiles; the name is above. */
  readonly y: number;
}

interface Shelf {
  readonly y: number;
  readonly height: number;
  /** First block, and the one after the last. */
  readonly first: number;
  readonly end: number;
}

/** A device on the map. */
export interface Place {
  readonly block: number;
  readonly at: number;
}

export const NAME_HEIGHT = 0.5;
const GAP = 0.4;
const MARGIN = 0.4;

export interface Layout {
  readonly width: number;
  readonly height: number;
  readonly blocks: readonly Block[];
  readonly shelves: readonly Shelf[];
  readonly numbers: ReadonlyMap<string, number>;
}

/** Widths that are tried, as parts of that of a map without rests at the ends of shelves. */
const WIDTHS = [0.7, 0.85, 1, 1.1, 1.25, 1.5, 2];

/** Place the nodes so that tiles are largest on a map with this ratio of width and height. */
export function layOut(nodes: readonly FleetNode[], aspect: number): Layout {
  const shown = nodes.filter((node) => node.count > 0 || node.problem !== "");
  const sizes = shown.map((node) => {
    const rows = node.count > 16 ? 4 : node.count > 1 ? 2 : 1;
    return { rows, columns: Math.max(1, Math.ceil(node.count / rows)) };
  });
  const area = sizes.reduce((sum, one) => sum + (one.columns + GAP) * outer(one.rows), 0);
  const scaleOf = (one: Layout) => Math.min(aspect / one.width, 1 / one.height);
  return WIDTHS.map((part) => placed(shown, sizes, part * Math.sqrt(area * aspect))).reduce(
    (best, one) => (scaleOf(one) > scaleOf(best) ? one : best),
  );
}

type Size = { rows: number; columns: number };

/** Shelves that are `most` wide, or as wide as the widest node. */
function placed(shown: readonly FleetNode[], sizes: readonly Size[], most: number): Layout {
  const blocks: Block[] = [];
  const shelves: Shelf[] = [];
  let y = MARGIN;
  let width = 0;
  for (let first = 0; first < shown.length; ) {
    let x = MARGIN;
    let end = first;
    let rows = 1;
    while (end < shown.length) {
      const { columns, rows: own } = sizes[end] as Size;
      if (end > first && x + columns > MARGIN + most) break;
      const node = shown[end] as FleetNode;
      blocks.push({ node: node.name, count: node.count, columns, x, y: y + NAME_HEIGHT });
      rows = Math.max(rows, own);
      x += columns + GAP;
      end += 1;
    }
    width = Math.max(width, x - GAP);
    shelves.push({ y, height: outer(rows), first, end });
    y += outer(rows);
    first = end;
  }
  return {
    width: width + MARGIN,
    height: y - GAP + MARGIN,
    blocks,
    shelves,
    numbers: new Map(blocks.map((block, number) => [block.node, number])),
  };
}

function outer(rows: number): number {
  return NAME_HEIGHT + rows + GAP;
}

/** Position of the first shelf that ends below `y`. */
function shelfAt(layout: Layout, y: number): number {
  let low = 0;
  let high = layout.shelves.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    const shelf = layout.shelves[middle] as Shelf;
    if (shelf.y + shelf.height <= y) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Call `visit` for each block that touches the rectangle. */
export function eachBlock(
  layout: Layout,
  [x0, y0, x1, y1]: readonly [number, number, number, number],
  visit: (block: Block) => void,
): void {
  for (let s = shelfAt(layout, y0); s < layout.shelves.length; s += 1) {
    const shelf = layout.shelves[s] as Shelf;
    if (shelf.y >= y1) return;
    for (let b = shelf.first; b < shelf.end; b += 1) {
      const block = layout.blocks[b] as Block;
      if (block.x >= x1) break;
      if (block.x + block.columns > x0) visit(block);
    }
  }
}

/** The device at a point, or null. */
export function placeAt(layout: Layout, x: number, y: number): Place | null {
  const shelf = layout.shelves[shelfAt(layout, y)];
  if (shelf === undefined) return null;
  for (let b = shelf.first; b < shelf.end; b += 1) {
    const block = layout.blocks[b] as Block;
    if (x < block.x || x >= block.x + block.columns) continue;
    const row = Math.floor(y - block.y);
    const at = row * block.columns + Math.floor(x - block.x);
    return row >= 0 && at < block.count ? { block: b, at } : null;
  }
  return null;
}

/** Upper left corner of a device. */
export function cornerOf(layout: Layout, place: Place): readonly [number, number] | null {
  const block = layout.blocks[place.block];
  if (block === undefined || place.at >= block.count) return null;
  return [block.x + (place.at % block.columns), block.y + Math.floor(place.at / block.columns)];
}

/** The nearest device in a direction; the same place when there is none. */
export function step(layout: Layout, from: Place, dx: -1 | 0 | 1, dy: -1 | 0 | 1): Place {
  const corner = cornerOf(layout, from);
  if (corner === null) return from;
  let [x, y] = [corner[0] + 0.5, corner[1] + 0.5];
  while (x >= 0 && y >= 0 && x <= layout.width && y <= layout.height) {
    x += dx / 2;
    y += dy / 2;
    const found = placeAt(layout, x, y);
    if (found !== null && (found.block !== from.block || found.at !== from.at)) return found;
  }
  if (dx === 0) return from;
  // The end of a shelf: continue on the next one, as text does.
  for (let block = from.block + dx; ; block += dx) {
    const next = layout.blocks[block];
    if (next === undefined) return from;
    if (next.count > 0) return { block, at: dx > 0 ? 0 : next.count - 1 };
  }
}
