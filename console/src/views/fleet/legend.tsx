// SPDX-License-Identifier: Apache-2.0

import { type Entry, type Grouping, OTHERS } from "../../fleet/categories.ts";
import { STATES } from "../../fleet/state.ts";
import { t } from "../../i18n.ts";
import { Card, Memory } from "../../ui/index.ts";
import type { Colors } from "./palette.ts";

/** What colors, bars and marks of the map mean. */
export function Legend(props: {
  entries: readonly Entry[];
  colors: Colors;
  coloring: Grouping | "state";
}) {
  const { colors, coloring } = props;
  const named = props.entries.filter((entry) => entry.color !== OTHERS);
  const others = props.entries.filter((entry) => entry.color === OTHERS);
  const rest_mib = others.reduce((sum, entry) => sum + entry.used_mib, 0);
  return (
    <Card title={t("fleet.legend.title")} class="fleet-legend">
      <p class="muted">{t("fleet.legend.bars")}</p>
      {coloring === "state" ? null : (
        <ul>
          {named.map((entry) => (
            <li key={entry.word}>
              <Swatch color={colors.categories[entry.color] ?? colors.tile} />
              <span>{entry.word || t("fleet.legend.unnamed")}</span>
              <Memory mib={entry.used_mib} />
            </li>
          ))}
          {others.length > 0 ? (
            <li>
              <Swatch color={colors.categories[OTHERS] ?? colors.tile} />
              <span>{t("fleet.legend.others", { count: others.length })}</span>
              <Memory mib={rest_mib} />
            </li>
          ) : null}
        </ul>
      )}
      <ul>
        {STATES.map((state) =>
          state === "booked" && coloring !== "state" ? null : (
            <li key={state}>
              <Swatch color={colors.states[state]} mark={state} />
              <span>{t(`fleet.states.${state}`)}</span>
            </li>
          ),
        )}
      </ul>
    </Card>
  );
}

/** Marks as the map draws them: `STATES` that have one. */
const MARKS: Readonly<Record<string, string>> = {
  unhealthy: "M1 1 13 13M13 1 1 13",
  cordoned: "M1 1 13 13",
  foreign: "M1 5 5 1M1 9 9 1M1 13 13 1M5 13 13 5M9 13 13 9",
};

function Swatch({ color, mark }: { color: string; mark?: string }) {
  const isFilled = mark === undefined || mark === "booked" || mark === "free";
  return (
    <svg class="fleet-swatch" viewBox="0 0 14 14" aria-hidden="true">
      <rect
        x="1"
        y="1"
        width="12"
        height="12"
        fill={isFilled ? color : "none"}
        stroke={color}
        stroke-width="2"
      />
      {mark !== undefined && MARKS[mark] ? (
        <path d={MARKS[mark]} stroke={color} stroke-width="1.5" />
      ) : null}
    </svg>
  );
}
