// SPDX-License-Identifier: Apache-2.0
// Device hours and money: reserved against used and wasted, and what sharing saves.

import { useState } from "preact/hooks";
import type { Registry } from "../../../generated/api.ts";
import { useGet } from "../../api/use.ts";
import { formatDuration, formatNumber, formatPercent, formatTime } from "../../format.ts";
import { t } from "../../i18n.ts";
import { language, namespace } from "../../preferences.ts";
import {
  Answered,
  Card,
  type Column,
  Count,
  Empty,
  Figure,
  Figures,
  Page,
  Status,
  Table,
} from "../../ui/index.ts";
import { type Bar, StackedBars } from "./bars.tsx";
import { csvOf } from "./focus.ts";
import { formatDeviceTime, formatMoney, intervalOf, RANGES, type RangeName } from "./range.ts";

const BYS = ["namespace", "queue", "model", "node", "pod", "sku", "class"] as const;
type By = Registry.Consumption["by"];
const BARS_MOST = 20;

export function UsageView() {
  const [by, setBy] = useState<By>("namespace");
  const [range, setRange] = useState<RangeName>("24h");
  const [custom, setCustom] = useState({ from: "", to: "" });
  const [askedMs, setAskedMs] = useState(Date.now);
  const interval = intervalOf(range, custom, askedMs);
  const answer = useGet("/v1/consumption", {
    query: { ...interval, by, namespace: namespace.value },
    isEnabled: interval !== undefined,
  });
  return (
    <Page
      title={t("usage.title")}
      intro={t("usage.intro")}
      actions={
        <div class="inline-form">
          <label>
            {t("usage.by")}
            <select
              name="by"
              value={by}
              onChange={(event) => setBy(event.currentTarget.value as By)}
            >
              {BYS.map((one) => (
                <option key={one} value={one}>
                  {t(`usage.bys.${one}`)}
                </option>
              ))}
            </select>
          </label>
          <label>
            {t("usage.range")}
            <select
              name="range"
              value={range}
              onChange={(event) => {
                setRange(event.currentTarget.value as RangeName);
                setAskedMs(Date.now());
              }}
            >
              {RANGES.map((one) => (
                <option key={one} value={one}>
                  {t(`usage.ranges.${one}`)}
                </option>
              ))}
            </select>
          </label>
          {range === "custom"
            ? (["from", "to"] as const).map((one) => (
                <label key={one}>
                  {t(`usage.${one}`)}
                  <input
                    name={one}
                    type="datetime-local"
                    step="1"
                    value={custom[one]}
                    onInput={(event) => setCustom({ ...custom, [one]: event.currentTarget.value })}
                  />
                </label>
              ))
            : null}
          <button type="button" class="button" onClick={() => setAskedMs(Date.now())}>
            {t("usage.refresh")}
          </button>
        </div>
      }
    >
      {interval ? (
        <Answered answer={answer}>{(found) => <Consumption answer={found} />}</Answered>
      ) : (
        <Empty>{t("usage.choose")}</Empty>
      )}
    </Page>
  );
}

function Consumption({ answer }: { answer: Registry.Consumption }) {
  const { total, fleet, currency } = answer;
  const hours = (seconds: number) => formatDeviceTime(seconds, language.value);
  const money = (amount: number | null) => formatMoney(amount, currency, language.value);
  const part = (seconds: number) =>
    total.reserved_s
      ? t("usage.ofReserved", {
          part: formatPercent((100 * seconds) / total.reserved_s, language.value),
        })
      : "";
  return (
    <>
      <Notices answer={answer} />
      <Figures>
        <Figure
          label={t("usage.reserved")}
          value={hours(total.reserved_s)}
          note={fleet ? t("usage.ofCapacity", { hours: hours(fleet.capacity_s) }) : undefined}
        />
        <Figure label={t("usage.used")} value={hours(total.used_s)} note={part(total.used_s)} />
        <Figure
          label={t("usage.wasted")}
          value={hours(total.wasted_s)}
          note={part(total.wasted_s)}
        />
        <Figure
          label={t("usage.saved")}
          value={hours(total.saved_s)}
          note={t("usage.insteadOf", { hours: hours(total.whole_s) })}
        />
        {currency ? (
          <>
            <Figure label={t("usage.cost")} value={money(total.cost)} />
            <Figure label={t("usage.wastedCost")} value={money(total.wasted_cost)} />
          </>
        ) : null}
        {fleet ? <Figure label={t("usage.free")} value={hours(fleet.free_s)} /> : null}
      </Figures>
      <Card title={t("usage.bars")}>
        {answer.items.length ? (
          <StackedBars
            label={t("usage.bars")}
            bars={answer.items.slice(0, BARS_MOST).map((row) => barOf(row, answer.by))}
          />
        ) : (
          <Empty>{t("usage.empty")}</Empty>
        )}
      </Card>
      {answer.items.length ? (
        <Card
          title={t(`usage.bys.${answer.by}`)}
          actions={
            <button type="button" class="button" onClick={() => download(answer)}>
              {t("usage.download")}
            </button>
          }
        >
          <Table
            label={t("usage.title")}
            rows={answer.items}
            columns={columnsOf(answer)}
            rowKey={(row) => row.name}
          />
        </Card>
      ) : null}
      <p class="muted">{t("usage.definition")}</p>
      <p class="muted">{t("usage.absent")}</p>
    </>
  );
}

/** What the answer lacks. */
function Notices({ answer }: { answer: Registry.Consumption }) {
  const texts: string[] = [];
  if (answer.complete_since_s > answer.from_s) {
    texts.push(
      t("usage.completeSince", {
        time: formatTime(answer.complete_since_s * 1000, language.value),
      }),
    );
  }
  if (answer.unknown) texts.push(t("usage.unknown", { count: answer.unknown }));
  if (answer.cut) texts.push(t("usage.cut", { reason: answer.cut }));
  if (answer.unpriced.length) {
    texts.push(t("usage.unpriced", { models: answer.unpriced.join(", ") }));
  }
  return (
    <>
      {texts.map((text) => (
        <p key={text}>
          <Status tone="warn">{text}</Status>
        </p>
      ))}
      {answer.currency ? null : (
        <p>
          <Status tone="info">{t("usage.noPrices")}</Status>
        </p>
      )}
    </>
  );
}

function nameOf(row: Registry.ConsumptionRow, by: By): string {
  return row.name || (by === "queue" ? t("usage.noQueue") : "–");
}

function barOf(row: Registry.ConsumptionRow, by: By): Bar {
  const parts = (["used", "wasted", "unmeasured"] as const).map((name) => {
    const value = row[`${name}_s`];
    return {
      name,
      label: t(`usage.${name}`),
      value,
      text: formatDeviceTime(value, language.value),
    };
  });
  return {
    name: row.name,
    label: nameOf(row, by),
    parts,
    text: formatDeviceTime(row.reserved_s, language.value),
  };
}

function columnsOf(answer: Registry.Consumption): Column<Registry.ConsumptionRow>[] {
  type Row = Registry.ConsumptionRow;
  const locale = language.value;
  const amount = (
    key: string,
    title: string,
    value: (row: Row) => number | null,
    format: (value: number | null) => string,
  ): Column<Row> => ({
    key,
    title,
    align: "right",
    value,
    cell: (row) => <span class="amount">{format(value(row))}</span>,
  });
  const hours = (key: "reserved" | "used" | "wasted" | "unmeasured" | "idle" | "saved") =>
    amount(
      key,
      t(`usage.${key}`),
      (row) => row[`${key}_s`],
      (value) => formatDeviceTime(value, locale),
    );
  const money = (value: number | null) => formatMoney(value, answer.currency, locale);
  return [
    { key: "name", title: t(`usage.bys.${answer.by}`), value: (row) => nameOf(row, answer.by) },
    {
      key: "allocations",
      title: t("usage.allocations"),
      align: "right",
      value: (row) => row.allocations,
      cell: (row) => <Count value={row.allocations} />,
    },
    hours("reserved"),
    hours("used"),
    hours("wasted"),
    hours("unmeasured"),
    hours("idle"),
    hours("saved"),
    amount(
      "throttled",
      t("usage.throttled"),
      (row) => row.throttled_s,
      (value) => formatDuration(value, locale),
    ),
    amount(
      "refusals",
      t("usage.refusals"),
      (row) => row.refusals,
      (value) => formatNumber(value, locale),
    ),
    ...(answer.currency
      ? [
          amount("cost", t("usage.cost"), (row) => row.cost, money),
          amount("wastedCost", t("usage.wastedCost"), (row) => row.wasted_cost, money),
        ]
      : []),
  ];
}

function download(answer: Registry.Consumption): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csvOf(answer)], { type: "text/csv" }));
  link.download = `usage-${answer.by}-${new Date(answer.to_s * 1000).toISOString().slice(0, 10)}.csv`;
  link.click();
  // The browser has taken the content over once the click is handled.
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
