// SPDX-License-Identifier: Apache-2.0
// Which part of the map is visible. Sizes in pixels of the canvas, positions in tiles.

import type { Layout } from "../../fleet/layout.ts";
import type { Camera } from "../../fleet/raster.ts";

/** Largest size of a tile. */
const MOST_PX = 160;
/** Size up to which a small fleet is enlarged to fill the map. */
const FIT_MOST_PX = 96;

/** The whole map, centered; `ratio`: pixels of the canvas per CSS pixel. */
export function fit(layout: Layout, width: number, height: number, ratio: number): Camera {
  const scale = Math.min(width / layout.width, height / layout.height, FIT_MOST_PX * ratio);
  return bounded({ x: 0, y: 0, scale, width, height }, layout);
}

/** Scaled by `factor`, with the tile under the point (`px`, `py`) kept in place. */
export function zoomed(
  camera: Camera,
  layout: Layout,
  factor: number,
  px: number,
  py: number,
  ratio: number,
): Camera {
  const least = fit(layout, camera.width, camera.height, ratio).scale;
  const scale = Math.min(Math.max(camera.scale * factor, least), MOST_PX * ratio);
  const x = camera.x + px / camera.scale - px / scale;
  const y = camera.y + py / camera.scale - py / scale;
  return bounded({ ...camera, x, y, scale }, layout);
}

/** Moved by pixels, so far as the map reaches. */
export function moved(camera: Camera, layout: Layout, dx: number, dy: number): Camera {
  const x = camera.x + dx / camera.scale;
  const y = camera.y + dy / camera.scale;
  return bounded({ ...camera, x, y }, layout);
}

/** Moved as little as needed to show the tile with this corner. */
export function revealing(camera: Camera, layout: Layout, x: number, y: number): Camera {
  const margin = Math.min(2, camera.width / camera.scale / 4);
  const [w, h] = [camera.width / camera.scale, camera.height / camera.scale];
  return bounded(
    {
      ...camera,
      x: Math.min(Math.max(camera.x, x + 1 + margin - w), x - margin),
      y: Math.min(Math.max(camera.y, y + 1 + margin - h), y - margin),
    },
    layout,
  );
}

function bounded(camera: Camera, layout: Layout): Camera {
  const axis = (at: number, seen: number, size: number): number =>
    seen >= size ? (size - seen) / 2 : Math.min(Math.max(at, 0), size - seen);
  return {
    ...camera,
    x: axis(camera.x, camera.width / camera.scale, layout.width),
    y: axis(camera.y, camera.height / camera.scale, layout.height),
  };
}
