// SPDX-License-Identifier: Apache-2.0

import "./bars.css";

export type Part = { name: string; label: string; value: number; text: string };
export type Bar = { name: string; label: string; parts: readonly Part[]; text: string };

/** Bars of parts that add up, all with one scale; each names its amounts for screen readers. */
export function StackedBars(props: { label: string; bars: readonly Bar[] }) {
  const sums = props.bars.map((bar) => bar.parts.reduce((sum, part) => sum + part.value, 0));
  const most = Math.max(...sums, Number.MIN_VALUE);
  const legend = props.bars[0]?.parts ?? [];
  return (
    <div class="stacked">
      <ul class="stacked-legend">
        {legend.map((part) => (
          <li key={part.name}>
            <span class="stacked-mark" data-part={part.name} aria-hidden="true" />
            {part.label}
          </li>
        ))}
      </ul>
      <ul aria-label={props.label}>
        {props.bars.map((bar) => (
          <li key={bar.name} class="stacked-row">
            <span class="stacked-label">{bar.label}</span>
            <div
              class="stacked-bar"
              role="img"
              aria-label={`${bar.label}: ${bar.parts.map((one) => `${one.label} ${one.text}`).join(", ")}`}
            >
              {bar.parts.map((part) => (
                <div
                  key={part.name}
                  class="stacked-part"
                  data-part={part.name}
                  title={`${part.label}: ${part.text}`}
                  style={{ width: `${(100 * part.value) / most}%` }}
                />
              ))}
            </div>
            <span class="amount">{bar.text}</span>
          </li>
        ))}
      </ul>
    </div>
  );
}
