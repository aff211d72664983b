// SPDX-License-Identifier: Apache-2.0
// Shares that are reserved and did no work on their device for some time, and the pods that wait meanwhile.

import { useState } from "preact/hooks";
import type { Registry } from "../../../generated/api.ts";
import { useGet } from "../../api/use.ts";
import { t } from "../../i18n.ts";
import { language, namespace } from "../../preferences.ts";
import {
  Answered,
  Card,
  type Column,
  Count,
  Duration,
  Empty,
  Figure,
  Figures,
  Memory,
  now,
  Page,
  Percent,
  Status,
  Table,
} from "../../ui/index.ts";
import { formatDeviceTime, formatMoney } from "../usage/range.ts";

const MINUTES = [1, 5, 30, 60, 240, 1440] as const;
const EVERY_S = 30;

export function IdleView() {
  const [minutes, setMinutes] = useState(30);
  const answer = useGet("/v1/idle", {
    query: { minutes, namespace: namespace.value },
    everyS: EVERY_S,
  });
  const waiting = useGet("/v1/waiting", {
    query: { namespace: namespace.value },
    everyS: EVERY_S,
  });
  return (
    <Page
      title={t("idle.title")}
      intro={t("idle.intro")}
      actions={
        <div class="inline-form">
          <label>
            {t("idle.minIdle")}
            <select
              name="minutes"
              value={minutes}
              onChange={(event) => setMinutes(Number(event.currentTarget.value))}
            >
              {MINUTES.map((one) => (
                <option key={one} value={one}>
                  {t("idle.minutes", { count: one })}
                </option>
              ))}
            </select>
          </label>
        </div>
      }
    >
      <Answered answer={answer}>{(found) => <IdleShares answer={found} />}</Answered>
      <Card title={t("idle.waiting")}>
        <Answered answer={waiting}>{({ items }) => <Waiting pods={items} />}</Answered>
      </Card>
    </Page>
  );
}

function IdleShares({ answer }: { answer: Registry.IdleList }) {
  const { items, currency } = answer;
  const lost = items.reduce((sum, one) => sum + one.lost_s, 0);
  const cost = items.reduce((sum, one) => sum + (one.cost ?? 0), 0);
  return (
    <>
      {answer.cut ? (
        <p>
          <Status tone="warn">{t("idle.cut", { reason: answer.cut })}</Status>
        </p>
      ) : null}
      <Figures>
        <Figure
          label={t("idle.shares")}
          value={<Count value={items.length} />}
          tone={items.length ? "warn" : "ok"}
        />
        <Figure label={t("idle.lost")} value={formatDeviceTime(lost, language.value)} />
        {currency ? (
          <Figure label={t("idle.cost")} value={formatMoney(cost, currency, language.value)} />
        ) : null}
      </Figures>
      <Card title={t("idle.shares")}>
        {items.length ? (
          <Table
            label={t("idle.title")}
            rows={items}
            columns={columnsOf(answer)}
            rowKey={(one) => `${one.pod_uid} ${one.uuid}`}
          />
        ) : (
          <Empty>{t("idle.empty", { count: answer.minutes })}</Empty>
        )}
      </Card>
      {items.some((one) => one.measured_by === "driver") ? (
        <p class="muted">{t("idle.byDriver")}</p>
      ) : null}
    </>
  );
}

/** Pods that wait while shares are idle. */
function Waiting({ pods }: { pods: readonly Registry.Waiting[] }) {
  if (!pods.length) return <Empty>{t("idle.noneWaits")}</Empty>;
  const columns: Column<Registry.Waiting>[] = [
    { key: "namespace", title: t("idle.namespace"), value: (one) => one.namespace },
    { key: "pod", title: t("idle.pod"), value: (one) => one.pod },
    {
      key: "since",
      title: t("idle.waitsFor"),
      align: "right",
      value: (one) => now.value / 1000 - one.since_s,
      cell: (one) => <Duration seconds={Math.max(0, now.value / 1000 - one.since_s)} />,
    },
    { key: "reason", title: t("idle.reason"), value: (one) => one.text },
  ];
  return (
    <Table
      label={t("idle.waiting")}
      rows={pods}
      columns={columns}
      rowKey={(one) => `${one.namespace}/${one.pod}`}
    />
  );
}

function columnsOf(answer: Registry.IdleList): Column<Registry.IdleShare>[] {
  type Row = Registry.IdleShare;
  const locale = language.value;
  return [
    { key: "namespace", title: t("idle.namespace"), value: (one) => one.namespace },
    { key: "pod", title: t("idle.pod"), value: (one) => one.pod },
    { key: "queue", title: t("idle.queue"), value: (one) => one.queue || "–" },
    { key: "node", title: t("idle.node"), value: (one) => one.node },
    {
      key: "device",
      title: t("idle.device"),
      value: (one) => `${one.model} #${one.index}`,
      cell: (one) => <span title={one.uuid}>{`${one.model} #${one.index}`}</span>,
    },
    {
      key: "memory",
      title: t("idle.memory"),
      align: "right",
      value: (one) => one.memory_mib,
      cell: (one) => <Memory mib={one.memory_mib} />,
    },
    {
      key: "core",
      title: t("idle.core"),
      align: "right",
      value: (one) => one.core_pct,
      cell: (one) => <Percent pct={one.core_pct || null} />,
    },
    {
      key: "idle",
      title: t("idle.since"),
      align: "right",
      value: (one) => answer.to_s - one.since_s,
      cell: (one) => (
        <>
          {one.is_since_known ? "" : "> "}
          <Duration seconds={answer.to_s - one.since_s} />
        </>
      ),
    },
    {
      key: "lost",
      title: t("idle.lost"),
      align: "right",
      value: (one) => one.lost_s,
      cell: (one) => <span class="amount">{formatDeviceTime(one.lost_s, locale)}</span>,
    },
    ...(answer.currency
      ? [
          {
            key: "cost",
            title: t("idle.cost"),
            align: "right" as const,
            value: (one: Row) => one.cost,
            cell: (one: Row) => (
              <span class="amount">{formatMoney(one.cost, answer.currency, locale)}</span>
            ),
          },
        ]
      : []),
    {
      key: "action",
      title: t("idle.action"),
      value: (one) => one.action?.outcome ?? "",
      cell: (one) =>
        one.action ? (
          <span title={one.action.reason}>
            {t(`idle.policies.${one.action.policy}`)}
            {": "}
            {t(`idle.outcomes.${one.action.outcome}`)}
          </span>
        ) : (
          "–"
        ),
    },
    {
      key: "measuredBy",
      title: t("idle.measuredBy"),
      value: (one) => t(`idle.measuredBys.${one.measured_by}`),
    },
  ];
}
