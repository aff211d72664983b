// SPDX-License-Identifier: Apache-2.0
// Live tail of the event stream with filter, pause and resume; and the subscription for an integration.

import { useEffect, useRef, useState } from "preact/hooks";
import type { ApiError } from "../../api/client.ts";
import { openStream, type Stream } from "../../api/stream.ts";
import { t, tValue } from "../../i18n.ts";
import { namespace } from "../../preferences.ts";
import {
  Card,
  type Column,
  Empty,
  ErrorBox,
  Page,
  PodLink,
  Status,
  Table,
  TimeAgo,
} from "../../ui/index.ts";
import {
  changeOf,
  commandsOf,
  kindOf,
  podOf,
  type StreamEvent,
  type Subscription,
  withNewest,
} from "./tail.ts";
import "./events.css";

const KINDS = [
  "allocation",
  "state",
  "device",
  "partition",
  "decision",
  "admission",
  "usage",
  "idle",
  "idleaction",
  "breach",
  "quarantine",
  "policy",
] as const;
const DRAW_MS = 200;

type Filter = { kind: string; node: string; since: string };

export function EventsView() {
  const [filter, setFilter] = useState<Filter>({ kind: "", node: "", since: "" });
  const [isPaused, setPaused] = useState(false);
  const [events, setEvents] = useState<StreamEvent[]>([]);
  const [subscription, setSubscription] = useState<Subscription>();
  const [gap, setGap] = useState("");
  const [error, setError] = useState<ApiError>();
  const [opened, setOpened] = useState("");
  const last = useRef("");
  const chosen = namespace.value;

  useEffect(() => {
    last.current = filter.since;
    setEvents([]);
    setGap("");
  }, [filter, chosen]);

  useEffect(() => {
    if (isPaused) return;
    setError(undefined);
    let fresh: StreamEvent[] = [];
    const draw = setInterval(() => {
      if (!fresh.length) return;
      const some = fresh;
      fresh = [];
      setEvents((before) => withNewest(before, some));
    }, DRAW_MS);
    const stream: Stream = openStream("/v1/events", {
      query: { kind: filter.kind, node: filter.node, namespace: chosen, since: last.current },
      onEvent: (event) => {
        if (event.event === "subscription") setSubscription(JSON.parse(event.data));
        else if (event.event === "gap") setGap(JSON.parse(event.data).reason);
        else {
          fresh.push(JSON.parse(event.data));
          last.current = event.id;
        }
      },
      onRefused: setError,
    });
    return () => {
      clearInterval(draw);
      stream.close();
      if (fresh.length) setEvents((before) => withNewest(before, fresh));
    };
  }, [filter, chosen, isPaused]);

  const newest = events[0]?.sequence ?? "";
  const shown = events.find((one) => one.sequence === opened);
  return (
    <Page
      title={t("events.title")}
      intro={t("events.intro")}
      actions={
        <>
          <FilterForm filter={filter} onFilter={setFilter} />
          <button
            type="button"
            class="button primary"
            aria-pressed={isPaused}
            onClick={() => setPaused(!isPaused)}
          >
            {t(isPaused ? "events.resume" : "events.pause")}
          </button>
        </>
      }
    >
      {error ? <ErrorBox error={error} /> : null}
      {gap ? (
        <p class="banner" role="status">
          <Status tone="warn">{t("events.gap", { reason: gap })}</Status>
        </p>
      ) : null}
      <p class="events-state" role="status">
        <Status tone={isPaused ? "neutral" : "ok"}>
          {isPaused ? t("events.paused", { sequence: newest || "–" }) : t("events.live")}
        </Status>
      </p>
      <Card title={t("events.newest")}>
        {events.length ? (
          <Table
            label={t("events.newest")}
            rows={events}
            columns={columns()}
            rowKey={(one) => one.sequence}
            onOpen={(one) => setOpened(one.sequence)}
          />
        ) : (
          <Empty>{t("events.empty")}</Empty>
        )}
      </Card>
      {shown ? (
        <Card title={t("events.payload", { sequence: shown.sequence })}>
          <pre class="code events-payload">{JSON.stringify(shown, null, 2)}</pre>
        </Card>
      ) : null}
      {subscription ? (
        <Integration
          subscription={subscription}
          kinds={filter.kind ? [filter.kind] : []}
          next={newest ? String(Number(newest) + 1) : ""}
        />
      ) : null}
    </Page>
  );
}

function FilterForm(props: { filter: Filter; onFilter: (filter: Filter) => void }) {
  return (
    <form
      class="inline-form"
      onSubmit={(event) => {
        event.preventDefault();
        const form = new FormData(event.currentTarget);
        const text = (name: string) => String(form.get(name) ?? "").trim();
        props.onFilter({ kind: text("kind"), node: text("node"), since: text("since") });
      }}
    >
      <label>
        {t("events.kind")}
        <select name="kind">
          <option value="">{t("events.allKinds")}</option>
          {KINDS.map((one) => (
            <option key={one} value={one}>
              {tValue("entries.kinds", one)}
            </option>
          ))}
        </select>
      </label>
      <label>
        {t("events.node")}
        <input name="node" class="short" autocomplete="off" />
      </label>
      <label>
        {t("events.since")}
        <input name="since" class="short" autocomplete="off" placeholder={t("events.now")} />
      </label>
      <button type="submit" class="button">
        {t("events.apply")}
      </button>
    </form>
  );
}

function columns(): Column<StreamEvent>[] {
  return [
    {
      key: "sequence",
      title: t("events.sequence"),
      align: "right",
      value: (one) => Number(one.sequence),
    },
    {
      key: "time",
      title: t("events.time"),
      value: (one) => Date.parse(one.time),
      cell: (one) => <TimeAgo ms={Date.parse(one.time)} />,
    },
    {
      key: "kind",
      title: t("events.kind"),
      value: (one) => tValue("entries.kinds", kindOf(one)),
    },
    {
      key: "change",
      title: t("events.change"),
      value: (one) => tValue("entries.changes", changeOf(one)),
    },
    {
      key: "pod",
      title: t("events.pod"),
      value: (one) => `${podOf(one).namespace}/${podOf(one).pod}`,
      cell: (one) => <PodLink {...podOf(one)} />,
    },
    { key: "subject", title: t("events.subject"), value: (one) => one.subject },
  ];
}

function Integration(props: {
  subscription: Subscription;
  kinds: readonly string[];
  next: string;
}) {
  const { subscription } = props;
  const commands = commandsOf(subscription, props.kinds, props.next);
  return (
    <Card title={t("events.integrate")}>
      <dl class="events-facts">
        <dt>{t("events.stream")}</dt>
        <dd class="code">{subscription.stream}</dd>
        <dt>{t("events.filters")}</dt>
        <dd>
          <ul>
            {subscription.filter_subjects.map((one) => (
              <li key={one} class="code">
                {one}
              </li>
            ))}
          </ul>
        </dd>
        <dt>{t("events.schemas")}</dt>
        <dd>
          <ul>
            {subscription.schemas.map((one) => (
              <li key={one} class="code">{`docs/schemas/${one}.json`}</li>
            ))}
          </ul>
        </dd>
        <dt>{t("events.consumer")}</dt>
        <dd class="code">{commands.nats}</dd>
        <dt>{t("events.command")}</dt>
        <dd class="code">{commands.hamictl}</dd>
      </dl>
    </Card>
  );
}
