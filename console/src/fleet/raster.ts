// SPDX-License-Identifier: Apache-2.0
// Draws the map into a buffer of pixels. The cost depends on the pixels and not on a canvas call per
// device, so that 40,000 devices can be drawn again in each frame.
//
// A tile has two bars, filled from below: booked memory (wide) and booked compute (narrow), each by
// share in the colors of the grouping. Hardware partitions are drawn at their places, with gaps
// where the memory is not divided. Foreign memory is hatched, on top of the booked memory. Below
// `BARS_PX` a tile has one bar for the larger of both parts, below `SHADE_PX` a shade. Devices that the
// search excludes fade.

import { type Categories, OTHERS } from "./categories.ts";
import { eachBlock, type Layout } from "./layout.ts";
import { type Partition, partitionsOf } from "./partitions.ts";
import type { Search } from "./search.ts";
import { type State, stateOf } from "./state.ts";
import { FIELD, type Fleet, type FleetNode, ROW, type Share } from "./store.ts";

/** Tiles from this size on show memory and compute apart. */
export const BARS_PX = 9;
/** Tiles below this size have one color, the stronger the fuller the device is. */
export const SHADE_PX = 6;

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

type Placed = Partition & { readonly span: readonly [number, number] };

function isPlaced(partition: Partition): partition is Placed {
  return partition.span !== null;
}

function isSick(state: State): boolean {
  return state === "silent" || state === "unhealthy" || state === "cordoned";
}

/** What is drawn for a node: the same until the node, its colors or the silent agents change. */
type Look = {
  readonly states: readonly State[];
  /** Booked parts of memory and compute of each device. */
  readonly memory: Float32Array;
  readonly compute: Float32Array;
  /** Color of a device without a share that is known, and of each share. */
  readonly devices: Uint32Array;
  readonly shares: Uint32Array;
};

/** Draws maps; keeps what is the same in the next frame. */
export class Raster {
  readonly #partitions = new Map<string, readonly Placed[]>();
  #looks = new WeakMap<FleetNode, Look>();
  #reasons: readonly unknown[] = [];
  #fades = new Map<number, number>();
  #shades = new Map<number, number>();
  #ground = 0;
  #tile = 0;
  #pixels: Uint32Array = new Uint32Array(0);
  #width = 0;
  #height = 0;

  draw(pixels: Uint32Array, camera: Camera, layout: Layout, fleet: Fleet, style: Style): void {
    this.#pixels = pixels;
    this.#width = camera.width;
    this.#height = camera.height;
    this.#renew(fleet, style);
    pixels.fill(this.#ground);
    const { x, y, scale } = camera;
    const bounds = [x, y, x + camera.width / scale, y + camera.height / scale] as const;
    const gap = scale >= 24 ? 2 : scale >= 4 ? 1 : 0;
    eachBlock(layout, bounds, (block) => {
      const node = fleet.node(block.node);
      if (node === undefined) return;
      const matches = style.search.isEmpty ? null : style.search.of(fleet, node);
      const look = this.#lookOf(fleet, node, style);
      for (let at = 0; at < node.count; at += 1) {
        const column = at % block.columns;
        const row = (at - column) / block.columns;
        const left = Math.round((block.x + column - x) * scale);
        const top = Math.round((block.y + row - y) * scale);
        const right = Math.max(left + 1, Math.round((block.x + column + 1 - x) * scale) - gap);
        const bottom = Math.max(top + 1, Math.round((block.y + row + 1 - y) * scale) - gap);
        const isFaded = matches !== null && matches[at] === 0;
        if (right - left < BARS_PX) {
          this.#small(node, at, look, style.palette, left, top, right, bottom, isFaded);
        } else {
          this.#large(fleet, node, at, look, style.palette, left, top, right, bottom, isFaded);
        }
      }
    });
  }

  /** Forget what depends on something that changed. */
  #renew(fleet: Fleet, { palette, categories }: Style): void {
    const reasons = [palette, categories, categories?.assigned, fleet.words, fleet.silent];
    if (reasons.every((reason, n) => reason === this.#reasons[n])) return;
    this.#reasons = reasons;
    this.#looks = new WeakMap();
    this.#fades = new Map();
    this.#shades = new Map();
    this.#ground = palette.ground;
    this.#tile = palette.tile;
  }

  #lookOf(fleet: Fleet, node: FleetNode, { palette, categories }: Style): Look {
    const known = this.#looks.get(node);
    if (known !== undefined) return known;
    const { count, shares } = node;
    const states = Array.from({ length: count }, (_, at) => stateOf(fleet, node, at));
    const colorOf = (at: number, share: Share | null): number => {
      if (categories === null) return palette.states[states[at] ?? "free"];
      const isHidden = share === null && categories.grouping !== "model";
      const place = isHidden
        ? OTHERS
        : categories.colorOf(categories.wordOf(fleet, node, at, share));
      return palette.categories[place] ?? palette.tile;
    };
    const part = (at: number, used: number, capacity: number): number =>
      (node.devices[at * ROW + used] ?? 0) / (node.devices[at * ROW + capacity] || 1);
    const look: Look = {
      states,
      memory: Float32Array.from(states, (_, at) => part(at, FIELD.used_mib, FIELD.capacity_mib)),
      compute: Float32Array.from(states, (_, at) =>
        part(at, FIELD.used_core_pct, FIELD.capacity_core_pct),
      ),
      devices: Uint32Array.from(states, (_, at) => colorOf(at, null)),
      shares: Uint32Array.from(shares, (share) => colorOf(share.device, share)),
    };
    this.#looks.set(node, look);
    return look;
  }

  #small(
    node: FleetNode,
    at: number,
    look: Look,
    palette: Palette,
    left: number,
    top: number,
    right: number,
    bottom: number,
    isFaded: boolean,
  ): void {
    const state = look.states[at] ?? "free";
    const isShade = right - left < SHADE_PX;
    const part = Math.min(1, Math.max(look.memory[at] ?? 0, look.compute[at] ?? 0));
    const first = node.starts[at] ?? 0;
    const isKnown = first < (node.starts[at + 1] ?? 0);
    const own = (isKnown ? look.shares[first] : look.devices[at]) ?? palette.tile;
    let ground = palette.tile;
    if (isSick(state)) ground = this.#shade(palette.states[state], 0.45);
    else if (isShade && part > 0) ground = this.#shade(own, part);
    this.#fill(left, top, right, bottom, isFaded ? this.#fade(ground) : ground);
    if (!isShade && part > 0) {
      const filled = Math.max(1, Math.round((bottom - top) * part));
      this.#fill(left, bottom - filled, right, bottom, isFaded ? this.#fade(own) : own);
    }
    if (state === "foreign") {
      const mark = palette.states.foreign;
      this.#fill(left, top, right, top + 1, isFaded ? this.#fade(mark) : mark);
    }
  }

  #large(
    fleet: Fleet,
    node: FleetNode,
    at: number,
    look: Look,
    palette: Palette,
    left: number,
    top: number,
    right: number,
    bottom: number,
    isFaded: boolean,
  ): void {
    const ink = (value: number): number => (isFaded ? this.#fade(value) : value);
    const state = look.states[at] ?? "free";
    const memory = look.memory[at] ?? 0;
    const compute = look.compute[at] ?? 0;
    const own = ink(look.devices[at] ?? palette.tile);
    const gap = ink(palette.gap);
    const row = at * ROW;
    const byMemory = 1 / (node.devices[row + FIELD.capacity_mib] || 1);
    const byCompute = 1 / (node.devices[row + FIELD.capacity_core_pct] || 1);
    const height = bottom - top;
    const width = right - left;
    const line = width >= 20 ? 2 : 1;
    const split = left + Math.round(width * 0.64);
    const first = node.starts[at] ?? 0;
    const end = node.starts[at + 1] ?? 0;
    this.#fill(left, top, right, bottom, ink(palette.tile));

    // Memory: partitions at their places, or shares on top of each other.
    const partitions = this.#partitionsOf(fleet, node, at);
    if (partitions.length > 0) {
      partitions.forEach(({ span: [from, to] }, n) => {
        const share = first + Math.min(n, end - first - 1);
        const low = bottom - Math.round(height * from);
        const high = bottom - Math.round(height * to);
        const value = end > first ? ink(look.shares[share] ?? 0) : own;
        this.#fill(left, high + 1, split, low, value);
      });
    } else {
      let booked = 0;
      let floor = bottom;
      for (let s = first; s < end; s += 1) {
        booked += (node.shares[s]?.memory_mib ?? 0) * byMemory;
        const high = Math.max(top, bottom - Math.round(height * booked));
        this.#fill(left, high, split, floor, ink(look.shares[s] ?? 0));
        if (end - first > 1 && floor - high > 2) this.#fill(left, high, split, high + 1, gap);
        floor = high;
      }
      // Booked by allocations that the viewer may not see.
      if (memory - booked > 0.005) {
        const high = Math.max(top, bottom - Math.round(height * memory));
        this.#fill(left, high, split, floor, own);
      }
    }
    const foreign = (node.devices[row + FIELD.foreign_mib] ?? 0) * byMemory;
    if (foreign > 0) {
      const low = Math.max(top + 2, bottom - Math.round(height * Math.min(1, memory)));
      const high = Math.max(top, Math.min(low - 2, low - Math.round(height * foreign)));
      this.#hatch(left, high, split, low, ink(palette.states.foreign), ink(palette.tile));
    }

    let reserved = 0;
    let floor = bottom;
    for (let s = first; s < end; s += 1) {
      reserved += (node.shares[s]?.core_pct ?? 0) * byCompute;
      const high = Math.max(top, bottom - Math.round(height * reserved));
      this.#fill(split + line, high, right, floor, ink(look.shares[s] ?? 0));
      floor = high;
    }
    if (compute - reserved > 0.005) {
      const high = Math.max(top, bottom - Math.round(height * compute));
      this.#fill(split + line, high, right, floor, own);
    }
    this.#fill(split, top, split + line, bottom, gap);

    if (isSick(state) || state === "foreign" || state === "stranded") {
      const edge = ink(palette.states[state]);
      this.#fill(left, top, right, top + line, edge);
      this.#fill(left, bottom - line, right, bottom, edge);
      this.#fill(left, top, left + line, bottom, edge);
      this.#fill(right - line, top, right, bottom, edge);
      // A shape as well, for those who cannot tell the colors apart.
      if (state === "unhealthy") this.#cross(left, top, right, bottom, edge, true);
      if (state === "cordoned") this.#cross(left, top, right, bottom, edge, false);
    }
  }

  /** Partitions with a known place. */
  #partitionsOf(fleet: Fleet, node: FleetNode, at: number): readonly Placed[] {
    const word = node.devices[at * ROW + FIELD.partitions] ?? 0;
    if (word === 0) return [];
    const model = fleet.words.text(node.devices[at * ROW + FIELD.model] ?? 0);
    const memory_mib = node.devices[at * ROW + FIELD.memory_mib] ?? 0;
    const key = `${fleet.words.text(word)}/${model}/${memory_mib}`;
    let found = this.#partitions.get(key);
    if (found === undefined) {
      found = partitionsOf(fleet.words.text(word), model, memory_mib).filter(isPlaced);
      this.#partitions.set(key, found);
    }
    return found;
  }

  /** The color mixed with that of an empty tile, in 16 steps that are computed once. */
  #shade(value: number, part: number): number {
    const step = Math.ceil(part * 16);
    const key = value * 17 + step;
    let shade = this.#shades.get(key);
    if (shade === undefined) {
      shade = mix(value, this.#tile, 0.2 + (0.8 * step) / 16);
      this.#shades.set(key, shade);
    }
    return shade;
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
