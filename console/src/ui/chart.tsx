// SPDX-License-Identifier: Apache-2.0

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { language, theme } from "../preferences.ts";

export type Series = {
  label: string;
  /** One per time; null: no measurement. */
  values: readonly (number | null)[];
};

const HEIGHT_PX = 180;
const COLORS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];

/** A time series chart; the pointer shows values in the legend. */
export function Chart(props: {
  /** Names the chart and says its unit. */
  label: string;
  /** Seconds since 1970, ascending. */
  times: readonly number[];
  series: readonly Series[];
  /** The value as text, with unit. */
  format: (value: number) => string;
  /** Largest value of the axis; absent: by the data. */
  most?: number;
  heightPx?: number;
}) {
  const frame = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot>();
  const { times, series, format, most, heightPx = HEIGHT_PX } = props;
  const names = series.map((one) => one.label).join("\n");
  const latest = useRef(format);
  latest.current = format;
  const data = [times, ...series.map((one) => one.values)] as uPlot.AlignedData;
  const newest = useRef(data);
  newest.current = data;

  useEffect(() => {
    const element = frame.current;
    if (!element) return;
    function draw(): void {
      if (!element) return;
      plot.current?.destroy();
      const color = (name: string) => colorOf(element, name);
      const axis = {
        stroke: color("--muted"),
        grid: { stroke: color("--grid"), width: 1 },
        ticks: { stroke: color("--grid"), width: 1 },
      };
      plot.current = new uPlot(
        {
          width: element.clientWidth || 400,
          height: heightPx,
          scales: {
            y: { range: (_, least, top) => [Math.min(0, least), most ?? (top || 1) * 1.05] },
          },
          axes: [
            axis,
            { ...axis, size: 72, values: (_, ticks) => ticks.map((one) => latest.current(one)) },
          ],
          series: [
            { value: (_, value) => (value ? timeOf(value) : "–") },
            ...names.split("\n").map((label, index) => ({
              label,
              stroke: color(COLORS[index % COLORS.length] ?? "--accent"),
              width: 1.5,
              points: { show: false },
              value: (_: uPlot, value: number | null) =>
                value === null ? "–" : latest.current(value),
            })),
          ],
        },
        newest.current,
        element,
      );
    }
    draw();
    const resized = new ResizeObserver(() => {
      plot.current?.setSize({ width: element.clientWidth, height: heightPx });
    });
    resized.observe(element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    const unsubscribe = theme.subscribe(() => queueMicrotask(draw));
    return () => {
      unsubscribe();
      dark.removeEventListener("change", draw);
      resized.disconnect();
      plot.current?.destroy();
      plot.current = undefined;
    };
  }, [names, most, heightPx]);

  // biome-ignore lint/correctness/useExhaustiveDependencies: `data` is made of these.
  useEffect(() => {
    plot.current?.setData(data);
  }, [times, series]);

  const last = series.map((one) => {
    const value = one.values.findLast((found) => found !== null);
    return `${one.label}: ${value === null || value === undefined ? "–" : format(value)}`;
  });
  return (
    <div ref={frame} class="chart" role="img" aria-label={`${props.label}. ${last.join(", ")}`} />
  );
}

function timeOf(seconds: number): string {
  return new Intl.DateTimeFormat(language.value, {
    month: "short",
    day: "numeric",
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
  }).format(seconds * 1000);
}

/** The color of a custom property, as the canvas needs it. */
export function colorOf(element: HTMLElement, name: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  element.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
