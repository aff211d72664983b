// SPDX-License-Identifier: Apache-2.0
// Draws the map into a buffer of pixels. The cost depends on the pixels and not on a canvas call per
// device, so that 40,000 devices can be drawn again in each frame.
//
// A tile has two bars, filled from below: booked memory (wide) and booked compute (narrow), each by
// share in the colors of the grouping. Hardware partitions are drawn at their places, with gaps
// where the memory is not divided. Foreign memory is hatched, on top of the booked memory. Below
// `BARS_PX` a tile has one bar for the larger of both parts. Devices that the search excludes fade.

import { type Categories, OTHERS } from "./categories.ts";
import { eachBlock, type Layout } from "./layout.ts";
import { type Partition, partitionsOf } from "./partitions.ts";
import type { Search } from "./search.ts";
import { type State, stateOf } from "./state.ts";
import { FIELD, type Fleet, type FleetNode, ROW, type Share } from "./store.ts";

/** Tiles from this size on show memory and compute apart. */
export const BARS_PX = 9;

/** Part of the map that is drawn: the tile at its upper left corner, and its size in pixels. */
export interface Camera {
  readonly x: number;
  readonly y: number;
  /** Pixels per tile. */
  readonly scale: number;
  readonly width: number;
  readonly height: number;
}

/** Colors as `0xAABBGGRR`, the order of bytes in image data. */
export interface Palette {
  readonly ground: number;
  readonly tile: number;
  readonly gap: number;
  readonly states: Readonly<Record<State, number>>;
  /** One per category and, last, that of the others. */
  readonly categories: readonly number[];
}

export interface Style {
  readonly palette: Palette;
  /** null: color devices by their state. */
  readonly categories: Categories | null;
  readonly search: Search;
}

/** Color from `#rrggbb`. */
export function color(text: string): number {
  const [r = 0, g = 0, b = 0] = [1, 3, 5].map((at) => Number.parseInt(text.slice(at, at + 2), 16));
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/** `part` of the first color with the rest of the second. */
export function mix(first: number, second: number, part: number): number {
  let mixed = 255 << 24;
  for (const shift of [0, 8, 16]) {
    const a = (first >>> shift) & 255;
    const b = (second >>> shift) & 255;
    mixed |= Math.round(a * part + b * (1 - part)) << shift;
  }
  return mixed >>> 0;
}

/** Draws maps; keeps what is the same for many devices. */
export class Raster {
  readonly #partitions = new Map<string, readonly Partition[]>();
  #fades = new Map<number, number>();
  #ground = -1;
  #pixels = new Uint32Array(0);
  #width = 0;
  #height = 0;

  draw(pixels: Uint32Array, camera: Camera, layout: Layout, fleet: Fleet, style: Style): void {
    this.#pixels = pixels;
    this.#width = camera.width;
    this.#height = camera.height;
    if (this.#ground !== style.palette.ground) {
      this.#ground = style.palette.ground;
      this.#fades = new Map();
    }
    pixels.fill(this.#ground);
    const { x, y, scale } = camera;
    const bounds = [x, y, x + camera.width / scale, y + camera.height / scale] as const;
    const gap = scale >= 24 ? 2 : scale >= 3 ? 1 : 0;
    eachBlock(layout, bounds, (block) => {
      const node = fleet.node(block.node);
      if (node === undefined) return;
      const matches = style.search.isEmpty ? null : style.search.of(fleet, node);
      for (let at = 0; at < node.count; at += 1) {
        const column = at % block.columns;
        const row = (at - column) / block.columns;
        const left = Math.round((block.x + column - x) * scale);
        const top = Math.round((block.y + row - y) * scale);
        const right = Math.max(left + 1, Math.round((block.x + column + 1 - x) * scale) - gap);
        const bottom = Math.max(top + 1, Math.round((block.y + row + 1 - y) * scale) - gap);
        const isFaded = matches !== null && matches[at] === 0;
        this.#tile(fleet, node, at, style, left, top, right, bottom, isFaded);
      }
    });
  }

  #tile(
    fleet: Fleet,
    node: FleetNode,
    at: number,
    style: Style,
    left: number,
    top: number,
    right: number,
    bottom: number,
    isFaded: boolean,
  ): void {
    const { palette, categories } = style;
    const ink = (value: number): number => (isFaded ? this.#fade(value) : value);
    const row = at * ROW;
    const state = stateOf(fleet, node, at);
    const inState = palette.states[state];
    const field = (place: number): number => node.devices[row + place] ?? 0;
    const byMemory = 1 / (field(FIELD.capacity_mib) || 1);
    const byCompute = 1 / (field(FIELD.capacity_core_pct) || 1);
    const memory = field(FIELD.used_mib) * byMemory;
    const compute = field(FIELD.used_core_pct) * byCompute;
    const height = bottom - top;
    const isSick = state === "silent" || state === "unhealthy" || state === "cordoned";

    const shareColor = (share: Share | null): number => {
      if (categories === null) return inState;
      if (share === null && categories.grouping !== "model") {
        return palette.categories[OTHERS] as number;
      }
      const word = categories.wordOf(fleet, node, at, share);
      return palette.categories[categories.colorOf(word)] as number;
    };

    if (right - left < BARS_PX) {
      this.#fill(left, top, right, bottom, ink(isSick ? mix(inState, palette.tile, 0.55) : palette.tile));
      const part = Math.min(1, Math.max(memory, compute));
      if (part > 0) {
        const owner = node.shares[node.starts[at] ?? 0];
        const own = owner !== undefined && owner.device === at ? owner : null;
        const filled = Math.max(1, Math.round(height * part));
        this.#fill(left, bottom - filled, right, bottom, ink(shareColor(own)));
      }
      if (state === "foreign") this.#fill(left, top, right, top + 1, ink(inState));
      return;
    }

    this.#fill(left, top, right, bottom, ink(palette.tile));
    const width = right - left;
    const line = width >= 20 ? 2 : 1;
    const split = left + Math.round(width * 0.64);
    const partitions = this.#partitionsOf(fleet, node, at);
    const first = node.starts[at] ?? 0;
    const end = node.starts[at + 1] ?? 0;

    // Memory: partitions at their places, or shares on top of each other.
    const placed = partitions.filter((one) => one.span !== null);
    if (placed.length > 0) {
      placed.forEach((one, n) => {
        const [from, to] = one.span as readonly [number, number];
        const share = node.shares[first + Math.min(n, end - first - 1)] ?? null;
        const low = bottom - Math.round(height * from);
        const high = bottom - Math.round(height * to);
        this.#fill(left, high + 1, split, low, ink(shareColor(end > first ? share : null)));
      });
    } else {
      let booked = 0;
      let floor = bottom;
      for (let s = first; s < end; s += 1) {
        const share = node.shares[s] as Share;
        booked += share.memory_mib * byMemory;
        const high = Math.max(top, bottom - Math.round(height * booked));
        this.#fill(left, high, split, floor, ink(shareColor(share)));
        if (end - first > 1 && floor - high > 2) this.#fill(left, high, split, high + 1, ink(palette.gap));
        floor = high;
      }
      // Booked by allocations that the viewer may not see.
      if (memory - booked > 0.005) {
        const high = Math.max(top, bottom - Math.round(height * memory));
        this.#fill(left, high, split, floor, ink(shareColor(null)));
      }
    }
    const foreign = field(FIELD.foreign_mib) * byMemory;
    if (foreign > 0) {
      const low = Math.max(top + 2, bottom - Math.round(height * Math.min(1, memory)));
      const high = Math.max(top, Math.min(low - 2, low - Math.round(height * foreign)));
      this.#hatch(left, high, split, low, ink(palette.states.foreign), ink(palette.tile));
    }

    // Compute.
    let reserved = 0;
    let floor = bottom;
    for (let s = first; s < end; s += 1) {
      const share = node.shares[s] as Share;
      reserved += share.core_pct * byCompute;
      const high = Math.max(top, bottom - Math.round(height * reserved));
      this.#fill(split + line, high, right, floor, ink(shareColor(share)));
      floor = high;
    }
    if (compute - reserved > 0.005) {
      const high = Math.max(top, bottom - Math.round(height * compute));
      this.#fill(split + line, high, right, floor, ink(shareColor(null)));
    }
    this.#fill(split, top, split + line, bottom, ink(palette.gap));

    if (isSick || state === "foreign" || state === "stranded") {
      const edge = ink(inState);
      this.#fill(left, top, right, top + line, edge);
      this.#fill(left, bottom - line, right, bottom, edge);
      this.#fill(left, top, left + line, bottom, edge);
      this.#fill(right - line, top, right, bottom, edge);
      // A shape as well, for those who cannot tell the colors apart.
      if (state === "unhealthy") this.#cross(left, top, right, bottom, edge, true);
      if (state === "cordoned") this.#cross(left, top, right, bottom, edge, false);
    }
  }

  #partitionsOf(fleet: Fleet, node: FleetNode, at: number): readonly Partition[] {
    const word = node.devices[at * ROW + FIELD.partitions] ?? 0;
    if (word === 0) return [];
    const model = fleet.words.text(node.devices[at * ROW + FIELD.model] ?? 0);
    const memory_mib = node.devices[at * ROW + FIELD.memory_mib] ?? 0;
    const key = `${fleet.words.text(word)}/${model}/${memory_mib}`;
    let found = this.#partitions.get(key);
    if (found === undefined) {
      found = partitionsOf(fleet.words.text(word), model, memory_mib);
      this.#partitions.set(key, found);
    }
    return found;
  }

  #fade(value: number): number {
    let faded = this.#fades.get(value);
    if (faded === undefined) {
      faded = mix(value, this.#ground, 0.18);
      this.#fades.set(value, faded);
    }
    return faded;
  }

  #fill(left: number, top: number, right: number, bottom: number, value: number): void {
    const x0 = Math.max(0, left);
    const x1 = Math.min(this.#width, right);
    const y1 = Math.min(this.#height, bottom);
    if (x0 >= x1) return;
    const pixels = this.#pixels;
    for (let y = Math.max(0, top); y < y1; y += 1) {
      const base = y * this.#width;
      // A call of fill costs more than a few writes.
      if (x1 - x0 > 24) pixels.fill(value, base + x0, base + x1);
      else for (let x = base + x0; x < base + x1; x += 1) pixels[x] = value;
    }
  }

  #hatch(l: number, t: number, r: number, b: number, first: number, second: number): void {
    const x1 = Math.min(this.#width, r);
    const y1 = Math.min(this.#height, b);
    for (let y = Math.max(0, t); y < y1; y += 1) {
      for (let x = Math.max(0, l); x < x1; x += 1) {
        this.#pixels[y * this.#width + x] = ((x + y) & 3) < 2 ? first : second;
      }
    }
  }

  /** One diagonal, or both. */
  #cross(l: number, t: number, r: number, b: number, value: number, isBoth: boolean): void {
    const size = Math.max(r - l, b - t);
    for (let n = 0; n < size; n += 1) {
      const x = l + Math.floor((n * (r - l)) / size);
      const y = t + Math.floor((n * (b - t)) / size);
      this.#fill(x, y, x + 1, y + 1, value);
      if (isBoth) this.#fill(r - 1 - (x - l), y, r - (x - l), y + 1, value);
    }
  }
}
