// SPDX-License-Identifier: Apache-2.0
// The canvas of the map: which part it shows, and painting it with the next frame after a change.

import type { Categories } from "../../fleet/categories.ts";
import {
  cornerOf,
  eachBlock,
  type Layout,
  NAME_HEIGHT,
  type Place,
  placeAt,
} from "../../fleet/layout.ts";
import { type Camera, type Palette, Raster } from "../../fleet/raster.ts";
import type { Search } from "../../fleet/search.ts";
import { FIELD, type Fleet, ROW } from "../../fleet/store.ts";
import { fit, moved, revealing, zoomed } from "./camera.ts";
import { type Colors, paletteOf } from "./palette.ts";

/** A device by its node and position there; unlike a place on the map it survives a new layout. */
export type Pointed = { node: string; at: number };

/** What is painted. */
export type Scene = {
  fleet: Fleet;
  layout: Layout;
  categories: Categories | null;
  search: Search;
  colors: Colors;
  chosen: Pointed | null;
};

export const ZOOM_STEP = 1.4;
const NAME_PX = 11;

export class Stage {
  readonly #raster = new Raster();
  #canvas: HTMLCanvasElement | null = null;
  #scene: Scene | null = null;
  #hovered: Pointed | null = null;
  #camera: Camera | null = null;
  #pending = 0;
  #image: ImageData | undefined;
  #colors: Colors | undefined;
  #palette: Palette | undefined;

  /** Paint on this canvas; null: none any more. */
  attach(canvas: HTMLCanvasElement | null): void {
    this.#canvas = canvas;
    if (canvas === null) cancelAnimationFrame(this.#pending);
    this.#pending = 0;
  }

  /** Paint this from the next frame on. */
  show(scene: Scene): void {
    const isNew = this.#scene?.layout !== scene.layout;
    this.#scene = scene;
    if (isNew && this.#camera) this.showAll();
    else this.#repaint();
  }

  /** Give the canvas this size in CSS pixels, and show the whole map. */
  resize(width: number, height: number): void {
    const canvas = this.#canvas;
    if (!canvas || !this.#scene || width === 0 || height === 0) return;
    canvas.width = Math.round(width * ratioOf());
    canvas.height = Math.round(height * ratioOf());
    this.#camera = fit(this.#scene.layout, canvas.width, canvas.height, ratioOf());
    // In this frame: a canvas of a new size is empty.
    this.#paint();
  }

  zoom(factor: number, px?: number, py?: number): void {
    this.#look((camera, layout) =>
      zoomed(camera, layout, factor, px ?? camera.width / 2, py ?? camera.height / 2, ratioOf()),
    );
  }

  showAll(): void {
    this.#look((camera, layout) => fit(layout, camera.width, camera.height, ratioOf()));
  }

  /** Move the visible part by pixels of the canvas. */
  move(dx: number, dy: number): void {
    this.#look((camera, layout) => moved(camera, layout, dx, dy));
  }

  /** Move the visible part by parts of its size. */
  page(dx: number, dy: number): void {
    this.#look((camera, layout) => moved(camera, layout, dx * camera.width, dy * camera.height));
  }

  /** Move the visible part so that the place is within it. */
  reveal(place: Place): void {
    this.#look((camera, layout) => {
      const corner = cornerOf(layout, place);
      return corner ? revealing(camera, layout, ...corner) : camera;
    });
  }

  /** Mark the device under the pointer; false: it is marked already. */
  hover(pointed: Pointed | null): boolean {
    if (pointed?.node === this.#hovered?.node && pointed?.at === this.#hovered?.at) return false;
    this.#hovered = pointed;
    this.#repaint();
    return true;
  }

  /** The device under a pixel of the canvas. */
  pointedAt(px: number, py: number): Pointed | null {
    const [camera, layout] = [this.#camera, this.#scene?.layout];
    if (!camera || !layout) return null;
    const place = placeAt(layout, camera.x + px / camera.scale, camera.y + py / camera.scale);
    return place && pointedOf(layout, place);
  }

  #look(next: (camera: Camera, layout: Layout) => Camera): void {
    if (!this.#camera || !this.#scene) return;
    this.#camera = next(this.#camera, this.#scene.layout);
    this.#repaint();
  }

  #repaint(): void {
    if (this.#pending === 0) this.#pending = requestAnimationFrame(() => this.#paint());
  }

  /** Tiles as pixels, then names and marks on top. */
  #paint(): void {
    this.#pending = 0;
    const [canvas, scene, camera] = [this.#canvas, this.#scene, this.#camera];
    // Opaque: the browser may skip blending.
    const context = canvas?.getContext("2d", { alpha: false });
    if (!canvas || !scene || !camera || !context) return;
    if (this.#image?.width !== camera.width || this.#image.height !== camera.height) {
      this.#image = context.createImageData(camera.width, camera.height);
    }
    if (this.#colors !== scene.colors) this.#palette = undefined;
    this.#colors = scene.colors;
    this.#palette ??= paletteOf(scene.colors);
    const { fleet, layout, categories, search } = scene;
    const pixels = new Uint32Array(this.#image.data.buffer);
    const style = { palette: this.#palette, categories, search };
    this.#raster.draw(pixels, camera, layout, fleet, style);
    context.putImageData(this.#image, 0, 0);
    names(context, camera, scene);
    if (this.#hovered) ring(context, camera, scene, this.#hovered, 1);
    if (scene.chosen) ring(context, camera, scene, scene.chosen, 2);
    canvas.dataset.painted = String(fleet.revision);
  }
}

/** Pixels of the canvas per CSS pixel; at most two, because every one costs time in each frame. */
export function ratioOf(): number {
  return Math.min(2, globalThis.devicePixelRatio || 1);
}

export function pixelOf(event: MouseEvent): [number, number] {
  return [event.offsetX * ratioOf(), event.offsetY * ratioOf()];
}

export function pointedOf(layout: Layout, place: Place): Pointed | null {
  const block = layout.blocks[place.block];
  return block ? { node: block.node, at: place.at } : null;
}

export function placeOf(layout: Layout, pointed: Pointed): Place | null {
  const block = layout.numbers.get(pointed.node);
  if (block === undefined || pointed.at >= (layout.blocks[block]?.count ?? 0)) return null;
  return { block, at: pointed.at };
}

export function firstPlace(layout: Layout): Place | null {
  const block = layout.blocks.findIndex((one) => one.count > 0);
  return block < 0 ? null : { block, at: 0 };
}

export function lastPlace(layout: Layout): Place | null {
  const block = layout.blocks.findLastIndex((one) => one.count > 0);
  return block < 0 ? null : { block, at: (layout.blocks[block]?.count ?? 1) - 1 };
}

/** Names of nodes, and in large tiles the index of the device and what is booked of memory and compute. */
function names(context: CanvasRenderingContext2D, camera: Camera, scene: Scene): void {
  const { layout, fleet, colors } = scene;
  const ratio = ratioOf();
  const { x, y, scale, width, height } = camera;
  const font = NAME_PX * ratio;
  if (scale * (NAME_HEIGHT + 0.2) < font) return;
  const isNumbered = scale >= 36 * ratio;
  const isLarge = scale >= 72 * ratio;
  context.font = `${font}px system-ui, sans-serif`;
  context.textBaseline = "bottom";
  context.lineWidth = 3 * ratio;
  context.lineJoin = "round";
  context.strokeStyle = colors.ground;
  context.fillStyle = colors.text;
  const character = context.measureText("abcdefgh0123").width / 12;
  // Names reach above their blocks.
  const bounds = [x, y - 1, x + width / scale, y + 1 + height / scale] as const;
  eachBlock(layout, bounds, (block) => {
    const [left, top] = [(block.x - x) * scale, (block.y - y) * scale];
    const most = Math.max(2, Math.floor((block.columns * scale) / character));
    const name = block.node.length > most ? `${block.node.slice(0, most - 1)}…` : block.node;
    context.fillText(name, left, top - ratio);
    const node = fleet.node(block.node);
    if (!isNumbered || !node) return;
    for (let at = 0; at < node.count; at += 1) {
      const value = (field: number): number => node.devices[at * ROW + field] ?? 0;
      const px = left + (at % block.columns) * scale + 4 * ratio;
      const py = top + Math.floor(at / block.columns) * scale + 15 * ratio;
      const part = Math.round((100 * value(FIELD.used_mib)) / (value(FIELD.capacity_mib) || 1));
      const lines = [`#${value(FIELD.index)}`];
      if (isLarge) lines.push(`${part} %`, `${value(FIELD.used_core_pct)} %`);
      lines.forEach((line, n) => {
        context.strokeText(line, px, py + n * font * 1.2);
        context.fillText(line, px, py + n * font * 1.2);
      });
    }
  });
}

function ring(
  context: CanvasRenderingContext2D,
  camera: Camera,
  { layout, colors }: Scene,
  pointed: Pointed,
  thick: number,
): void {
  const place = placeOf(layout, pointed);
  const corner = place && cornerOf(layout, place);
  if (!corner) return;
  const ratio = ratioOf();
  // A tile of few pixels gets a ring that is large enough to be seen.
  const size = Math.max(camera.scale, 9 * ratio);
  const middle = (value: number, origin: number) => (value + 0.5 - origin) * camera.scale;
  const left = middle(corner[0], camera.x) - size / 2 - thick * ratio;
  const top = middle(corner[1], camera.y) - size / 2 - thick * ratio;
  const outer = size + 2 * thick * ratio;
  context.strokeStyle = colors.ground;
  context.lineWidth = (thick + 2) * ratio;
  context.strokeRect(left, top, outer, outer);
  context.strokeStyle = colors.focus;
  context.lineWidth = thick * ratio;
  context.strokeRect(left, top, outer, outer);
}
