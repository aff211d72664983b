// SPDX-License-Identifier: Apache-2.0
// The fleet: what every device has booked, who has it, and which need a look.

import { useEffect, useId, useMemo, useState } from "preact/hooks";
import { useLocation, useSearchParams } from "wouter-preact";
import { Categories, GROUPINGS, type Grouping } from "../../fleet/categories.ts";
import { reloadFleet, useFleet } from "../../fleet/live.ts";
import { Search, unknownState } from "../../fleet/search.ts";
import type { Fleet } from "../../fleet/store.ts";
import { formatNumber, formatPercent } from "../../format.ts";
import { t } from "../../i18n.ts";
import { language } from "../../preferences.ts";
import { Card, Count, ErrorBox, Figure, Figures, Loading, Memory, Page } from "../../ui/index.ts";
import { DeviceTable } from "./devices.tsx";
import "./fleet.css";
import { Legend } from "./legend.tsx";
import { devicePath } from "./links.ts";
import { FleetMap } from "./map.tsx";
import { useColors } from "./palette.ts";
import { DevicePanel, useUuid } from "./panel.tsx";
import type { Pointed } from "./stage.ts";

const COLORINGS = [...GROUPINGS, "state"] as const;
type Coloring = Grouping | "state";

function isColoring(text: string | null): text is Coloring {
  return COLORINGS.some((one) => one === text);
}

export function FleetView() {
  const { fleet, revision, error } = useFleet();
  if (revision === 0) {
    return (
      <Page title={t("fleet.title")}>
        {error ? <ErrorBox error={error} onRetry={reloadFleet} /> : <Loading />}
      </Page>
    );
  }
  return (
    <Page title={t("fleet.title")} intro={t("fleet.intro")}>
      {error ? <ErrorBox error={error} onRetry={reloadFleet} /> : null}
      <Sums fleet={fleet} revision={revision} />
      <Devices fleet={fleet} revision={revision} />
    </Page>
  );
}

function Sums({ fleet, revision }: { fleet: Fleet; revision: number }) {
  const totals = useMemo(() => fleet.totals(), [fleet, revision]);
  const part = (used: number, all: number) =>
    formatPercent(all > 0 ? (100 * used) / all : 0, language.value, 1);
  return (
    <Figures>
      <Figure
        label={t("fleet.sums.devices")}
        value={<Count value={totals.devices} />}
        note={t("fleet.sums.nodes", {
          count: totals.nodes,
          amount: formatNumber(totals.nodes, language.value),
        })}
      />
      <Figure
        label={t("fleet.sums.memory")}
        value={part(totals.used_mib, totals.capacity_mib)}
        note={<Memory mib={totals.used_mib} />}
      />
      <Figure
        label={t("fleet.sums.compute")}
        value={part(totals.used_core_pct, totals.capacity_core_pct)}
      />
      <Figure
        label={t("fleet.sums.foreign")}
        value={<Memory mib={totals.foreign_mib} />}
        note={t("fleet.sums.onDevices", { count: totals.foreign_devices })}
        tone={totals.foreign_devices > 0 ? "warn" : "neutral"}
      />
      <Figure
        label={t("fleet.sums.silent")}
        value={<Count value={fleet.silent.size} />}
        tone={fleet.silent.size > 0 ? "warn" : "neutral"}
      />
    </Figures>
  );
}

function Devices({ fleet, revision }: { fleet: Fleet; revision: number }) {
  const [query, setQuery] = useSearchParams();
  const asked = query.get("color");
  const coloring: Coloring = isColoring(asked) ? asked : "namespace";
  const text = query.get("q") ?? "";
  const [isTable, setTable] = useState(query.get("table") === "1");
  const [chosen, setChosen] = useState<Pointed | null>(null);
  const [hovered, setHovered] = useState<Pointed | null>(null);
  const [, navigate] = useLocation();
  const colors = useColors();
  const panel = useId();
  const search = useMemo(() => new Search(text), [text]);
  const categories = useMemo(
    () => (coloring === "state" ? null : new Categories(coloring)),
    [coloring],
  );
  const entries = useMemo(() => categories?.refresh(fleet) ?? [], [categories, fleet, revision]);
  const matches = useMemo(
    () => (search.isEmpty ? null : search.count(fleet)),
    [search, fleet, revision],
  );
  const uuid = useUuid(fleet, chosen);
  const unknown = unknownState(text);
  const isChosen = hovered === null || isSame(hovered, chosen);

  function set(name: string, value: string): void {
    setQuery(
      (before) => {
        const next = new URLSearchParams(before);
        if (value) next.set(name, value);
        else next.delete(name);
        return next;
      },
      { replace: true },
    );
  }

  useEffect(() => {
    // A device may disappear, with its node or when the node reports fewer.
    if (chosen && chosen.at >= (fleet.node(chosen.node)?.count ?? 0)) setChosen(null);
  });

  return (
    <>
      <div class="fleet-tools">
        <form class="inline-form" role="search" onSubmit={(event) => event.preventDefault()}>
          <label>
            {t("fleet.search.label")}
            <input
              type="search"
              class="fleet-search"
              value={text}
              placeholder={t("fleet.search.placeholder")}
              aria-invalid={unknown !== null}
              onInput={(event) => set("q", event.currentTarget.value)}
            />
          </label>
          <label>
            {t("fleet.coloring.label")}
            <select value={coloring} onChange={(event) => set("color", event.currentTarget.value)}>
              {COLORINGS.map((one) => (
                <option key={one} value={one}>
                  {t(`fleet.coloring.${one}`)}
                </option>
              ))}
            </select>
          </label>
          <button
            type="button"
            class="button"
            aria-expanded={isTable}
            onClick={() => setTable(!isTable)}
          >
            {t(isTable ? "fleet.table.hide" : "fleet.table.show")}
          </button>
        </form>
        <p role="status" class="muted" data-matches={matches ?? undefined}>
          {unknown !== null
            ? t("fleet.search.unknownState", { state: unknown })
            : matches === null
              ? ""
              : t("fleet.search.matches", {
                  count: matches,
                  amount: formatNumber(matches, language.value),
                })}
        </p>
      </div>
      <div class="fleet-columns">
        <FleetMap
          fleet={fleet}
          revision={revision}
          categories={categories}
          search={search}
          colors={colors}
          chosen={chosen}
          describedBy={panel}
          onChoose={setChosen}
          onHover={setHovered}
          onOpen={() => {
            if (chosen && uuid) navigate(devicePath(chosen.node, uuid));
          }}
        />
        <aside class="fleet-side">
          <DevicePanel
            id={panel}
            fleet={fleet}
            pointed={hovered ?? chosen}
            uuid={isChosen ? uuid : undefined}
            isChosen={isChosen}
          />
          <Legend entries={entries} colors={colors} coloring={coloring} />
        </aside>
      </div>
      {isTable ? (
        <Card class="fleet-table">
          <DeviceTable
            fleet={fleet}
            revision={revision}
            label={t("fleet.table.label")}
            search={search}
            onOpen={setChosen}
          />
        </Card>
      ) : null}
    </>
  );
}

function isSame(a: Pointed | null, b: Pointed | null): boolean {
  return a?.node === b?.node && a?.at === b?.at;
}
