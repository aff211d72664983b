// SPDX-License-Identifier: Apache-2.0
// Devices whose reports do not match the ledger, or that cannot be used.

import { useMemo, useState } from "preact/hooks";
import { Link, useSearchParams } from "wouter-preact";
import { useGet } from "../../api/use.ts";
import { reloadFleet, useFleet } from "../../fleet/live.ts";
import { Search } from "../../fleet/search.ts";
import { type State, stateOf } from "../../fleet/state.ts";
import type { Fleet } from "../../fleet/store.ts";
import { t } from "../../i18n.ts";
import { namespace } from "../../preferences.ts";
import { Card, Count, ErrorBox, Figure, Figures, Loading, Page } from "../../ui/index.ts";
import { DeviceTable } from "../fleet/devices.tsx";
import { TONES } from "../fleet/links.ts";
import { DevicePanel, useUuid } from "../fleet/panel.tsx";
import type { Pointed } from "../fleet/stage.ts";
import "../fleet/fleet.css";

/** States that need a look, most urgent first. */
const PROBLEMS = [
  "foreign",
  "silent",
  "unhealthy",
  "cordoned",
  "stranded",
] as const satisfies State[];

export function DevicesView() {
  const { fleet, revision, error } = useFleet();
  return (
    <Page title={t("devices.title")} intro={t("devices.intro")}>
      {error ? <ErrorBox error={error} onRetry={reloadFleet} /> : null}
      {revision > 0 ? <Problems fleet={fleet} revision={revision} /> : error ? null : <Loading />}
    </Page>
  );
}

function countsOf(fleet: Fleet): Map<State, number> {
  const counts = new Map<State, number>();
  for (const node of fleet.nodes) {
    for (let at = 0; at < node.count; at += 1) {
      const state = stateOf(fleet, node, at);
      counts.set(state, (counts.get(state) ?? 0) + 1);
    }
  }
  return counts;
}

function Problems({ fleet, revision }: { fleet: Fleet; revision: number }) {
  const [query, setQuery] = useSearchParams();
  const asked = query.get("state") ?? "";
  const text = query.get("q") ?? "";
  const [chosen, setChosen] = useState<Pointed | null>(null);
  const uuid = useUuid(fleet, chosen);
  const search = useMemo(() => new Search(text), [text]);
  const shown = useMemo(() => new Set(PROBLEMS.filter((one) => !asked || one === asked)), [asked]);
  const counts = useMemo(() => countsOf(fleet), [fleet, revision]);

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

  return (
    <>
      <Figures>
        <Idle />
        {PROBLEMS.map((state) => {
          const count = counts.get(state) ?? 0;
          return (
            <Figure
              key={state}
              label={t(`fleet.states.${state}`)}
              value={<Count value={count} />}
              note={t(`devices.notes.${state}`)}
              tone={count > 0 ? TONES[state] : "neutral"}
            />
          );
        })}
      </Figures>
      <form
        class="fleet-tools inline-form"
        role="search"
        onSubmit={(event) => event.preventDefault()}
      >
        <label>
          {t("fleet.search.label")}
          <input
            type="search"
            class="fleet-search"
            value={text}
            placeholder={t("devices.placeholder")}
            onInput={(event) => set("q", event.currentTarget.value)}
          />
        </label>
        <label>
          {t("devices.problem")}
          <select value={asked} onChange={(event) => set("state", event.currentTarget.value)}>
            <option value="">{t("devices.all")}</option>
            {PROBLEMS.map((state) => (
              <option key={state} value={state}>
                {t(`fleet.states.${state}`)}
              </option>
            ))}
          </select>
        </label>
      </form>
      <div class={chosen ? "fleet-columns" : undefined}>
        <Card>
          <DeviceTable
            fleet={fleet}
            revision={revision}
            label={t("devices.title")}
            search={search}
            states={shown}
            initialOrder={FOREIGN_FIRST}
            onOpen={setChosen}
          />
        </Card>
        {chosen ? (
          <aside class="fleet-side">
            <DevicePanel id="device" fleet={fleet} pointed={chosen} uuid={uuid} isChosen />
          </aside>
        ) : null}
      </div>
    </>
  );
}

/** The reverse of foreign use: booked, and nothing uses it. The view of idle shares has the list. */
function Idle() {
  const { data } = useGet("/v1/idle", {
    query: { minutes: IDLE_MINUTES, namespace: namespace.value },
    everyS: IDLE_EVERY_S,
  });
  const count = data?.items.length;
  return (
    <Figure
      label={t("devices.idle")}
      value={
        <Link href="/idle">
          <Count value={count} />
        </Link>
      }
      note={t("devices.idleFor", { count: IDLE_MINUTES })}
      tone={count ? "warn" : "neutral"}
    />
  );
}

const IDLE_MINUTES = 30;
const IDLE_EVERY_S = 30;
const FOREIGN_FIRST = { key: "foreign", isDescending: true };
