// SPDX-License-Identifier: Apache-2.0
// Colors of the map, which is drawn into pixels and cannot use custom properties.

import { useEffect, useState } from "preact/hooks";
import { color, type Palette } from "../../fleet/raster.ts";
import type { State } from "../../fleet/state.ts";
import { theme } from "../../preferences.ts";

export type Colors = {
  ground: string;
  tile: string;
  gap: string;
  text: string;
  focus: string;
  states: Record<State, string>;
  /** The last one is that of the others. */
  categories: readonly string[];
};

const LIGHT: Colors = {
  ground: "#ffffff",
  tile: "#dfe4ea",
  gap: "#ffffff",
  text: "#1b1f24",
  focus: "#101820",
  states: {
    silent: "#6b7280",
    unhealthy: "#c62828",
    foreign: "#b5179e",
    cordoned: "#856a00",
    stranded: "#c05a00",
    booked: "#1f5f99",
    free: "#dfe4ea",
  },
  categories: [
    "#1f5f99",
    "#c2641c",
    "#1a7a52",
    "#8a3fa0",
    "#b8385a",
    "#6f6f12",
    "#0f7d92",
    "#8c4a24",
    "#5660d6",
    "#4d7c0f",
    "#808a95",
  ],
};

const DARK: Colors = {
  ground: "#14171a",
  tile: "#2b3138",
  gap: "#14171a",
  text: "#e3e7eb",
  focus: "#ffffff",
  states: {
    silent: "#8a929c",
    unhealthy: "#ff7a70",
    foreign: "#f27de0",
    cordoned: "#d9bd4a",
    stranded: "#f0a05a",
    booked: "#7db6ee",
    free: "#2b3138",
  },
  categories: [
    "#7db6ee",
    "#f0ab5a",
    "#62c99a",
    "#cf98e0",
    "#f08aa4",
    "#cfcf5a",
    "#53c8dc",
    "#d99a6c",
    "#a0a8ff",
    "#a3d65c",
    "#838d98",
  ],
};

export function paletteOf(colors: Colors): Palette {
  return {
    ground: color(colors.ground),
    tile: color(colors.tile),
    gap: color(colors.gap),
    states: Object.fromEntries(
      Object.entries(colors.states).map(([state, text]) => [state, color(text)]),
    ) as Record<State, number>,
    categories: colors.categories.map(color),
  };
}

/** Colors of the chosen theme. */
export function useColors(): Colors {
  const [isDark, setDark] = useState(() => matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const update = () => setDark(query.matches);
    query.addEventListener("change", update);
    return () => query.removeEventListener("change", update);
  }, []);
  const chosen = theme.value;
  return chosen === "dark" || (chosen === "auto" && isDark) ? DARK : LIGHT;
}
