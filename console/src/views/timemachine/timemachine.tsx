// SPDX-License-Identifier: Apache-2.0
// Pods that arrived in a period, placed again under two policies, beside the record.

import { useState } from "preact/hooks";
import type { Registry, Scheduler } from "../../../generated/api.ts";
import { useAsk } from "../../api/ask.ts";
import { useGet } from "../../api/use.ts";
import { formatNumber, formatPercent, formatTime } from "../../format.ts";
import { t, tValue } from "../../i18n.ts";
import { language, namespace } from "../../preferences.ts";
import {
  Answered,
  Card,
  Chart,
  type Column,
  Count,
  Duration,
  Empty,
  ErrorBox,
  Figure,
  Figures,
  Loading,
  Memory,
  Page,
  Percent,
  Status,
  Table,
} from "../../ui/index.ts";
import { formatMoney } from "../usage/range.ts";
import { type Holder, holdersOf } from "./holders.ts";
import { changeOf, nameOf, seriesOf } from "./results.ts";
import "../whatif/whatif.css";

const HOURS = [1, 6, 24, 72, 168] as const;
const NODE_POLICIES = ["binpack", "spread"] as const;
const DEVICE_POLICIES = ["spread", "binpack", "numa", "mutex", "topology-aware"] as const;

export function TimeMachineView() {
  const comparison = useAsk("/v1/whatif/policy");
  const config = useGet("/v1/config");
  return (
    <Page title={t("timemachine.title")} intro={t("timemachine.intro")}>
      <Card title={t("timemachine.question")}>
        <div class="question">
          <form
            class="inline-form"
            onSubmit={(event) => {
              event.preventDefault();
              const form = new FormData(event.currentTarget);
              comparison.ask({
                hours: Number(form.get("hours")),
                policies: [choiceOf(form, "a"), choiceOf(form, "b")],
                ...(config.data ? { prices: config.data.prices } : {}),
              });
            }}
          >
            <label>
              {t("timemachine.period")}
              <select name="hours" defaultValue="24">
                {HOURS.map((hours) => (
                  <option key={hours} value={hours} selected={hours === 24}>
                    {tValue("timemachine.periods", `h${hours}`)}
                  </option>
                ))}
              </select>
            </label>
            <PolicyFields name="a" legend={t("timemachine.first")} node="binpack" />
            <PolicyFields name="b" legend={t("timemachine.second")} node="spread" />
            <button type="submit" class="button primary" disabled={comparison.isLoading}>
              {t("timemachine.compare")}
            </button>
          </form>
        </div>
      </Card>
      {comparison.isLoading ? <Loading /> : null}
      {comparison.error ? <ErrorBox error={comparison.error} onRetry={comparison.reload} /> : null}
      {comparison.data ? <Comparison answer={comparison.data} /> : null}
      <FleetThen />
    </Page>
  );
}

function FleetThen() {
  const [at, setAt] = useState("");
  const answer = useGet("/v1/fleet", {
    query: { at, namespace: namespace.value },
    isEnabled: at !== "",
  });
  return (
    <Card title={t("timemachine.then.title")}>
      <div class="question">
        <p class="muted">{t("timemachine.then.intro")}</p>
        <form
          class="inline-form"
          onSubmit={(event) => {
            event.preventDefault();
            const local = String(new FormData(event.currentTarget).get("at"));
            setAt(new Date(local).toISOString());
          }}
        >
          <label>
            {t("timemachine.then.time")}
            <input name="at" type="datetime-local" step="1" required />
          </label>
          <button type="submit" class="button primary">
            {t("timemachine.then.show")}
          </button>
        </form>
        {at ? (
          <Answered answer={answer}>{(document) => <Holders document={document} />}</Answered>
        ) : null}
      </div>
    </Card>
  );
}

function Holders({ document }: { document: Registry.FleetDocument }) {
  const holders = holdersOf(document);
  const { devices } = document;
  const sum = (column: readonly number[]) => column.reduce((total, one) => total + one, 0);
  return (
    <div aria-live="polite">
      <Figures>
        <Figure
          label={t("timemachine.then.at")}
          value={formatTime(1000 * document.time_s, language.value)}
        />
        <Figure
          label={t("timemachine.used")}
          value={<Count value={devices.used_slots.filter((slots) => slots > 0).length} />}
          note={t("timemachine.then.of", { count: devices.used_slots.length })}
        />
        <Figure
          label={t("timemachine.then.booked")}
          value={<Memory mib={sum(devices.used_mib)} />}
        />
      </Figures>
      {holders.length ? (
        <Table
          label={t("timemachine.then.holders")}
          rows={holders}
          columns={holderColumns()}
          rowKey={(one) => `${one.node} ${one.namespace}/${one.pod} ${one.position}`}
        />
      ) : (
        <Empty>{t("timemachine.then.nobody")}</Empty>
      )}
    </div>
  );
}

function holderColumns(): Column<Holder>[] {
  return [
    {
      key: "pod",
      title: t("timemachine.then.pod"),
      value: (one) => `${one.namespace}/${one.pod}`,
    },
    { key: "state", title: t("timemachine.then.state"), value: (one) => one.state },
    { key: "node", title: t("timemachine.then.node"), value: (one) => one.node },
    {
      key: "device",
      title: t("timemachine.then.device"),
      value: (one) => (one.device ? `${one.device.index} (${one.device.model})` : "–"),
    },
    {
      key: "memory",
      title: t("timemachine.then.memory"),
      align: "right",
      value: (one) => one.memoryMib,
      cell: (one) => <Memory mib={one.memoryMib} />,
    },
    {
      key: "core",
      title: t("timemachine.then.core"),
      align: "right",
      value: (one) => one.corePct,
      cell: (one) => <Percent pct={one.corePct} />,
    },
  ];
}

function choiceOf(form: FormData, name: string): Scheduler.PolicyChoice {
  const node = String(form.get(`node-${name}`));
  const device = String(form.get(`device-${name}`));
  return {
    node_policy: NODE_POLICIES.find((one) => one === node) ?? null,
    device_policy: DEVICE_POLICIES.filter((one) => one === device),
  };
}

function PolicyFields(props: {
  name: string;
  legend: string;
  node: (typeof NODE_POLICIES)[number];
}) {
  return (
    <fieldset>
      <legend>{props.legend}</legend>
      <label>
        {t("timemachine.nodes")}
        <select name={`node-${props.name}`}>
          {NODE_POLICIES.map((one) => (
            <option key={one} selected={one === props.node}>
              {one}
            </option>
          ))}
        </select>
      </label>
      <label>
        {t("timemachine.devices")}
        <select name={`device-${props.name}`}>
          {DEVICE_POLICIES.map((one) => (
            <option key={one} selected={one === props.node}>
              {one}
            </option>
          ))}
        </select>
      </label>
    </fieldset>
  );
}

function Comparison({ answer }: { answer: Scheduler.PolicyComparison }) {
  const [first, second] = answer.results;
  if (!answer.arrivals || !first || !second) {
    return <Empty>{t("timemachine.noArrivals")}</Empty>;
  }
  const all = [answer.recorded, ...answer.results];
  const label = (result: Scheduler.PolicyResult) => nameOf(result) || t("timemachine.recorded");
  const percent = (value: number) => formatPercent(100 * value, language.value);
  const free = changeOf(first.devices_free_mean, second.devices_free_mean);
  return (
    <div aria-live="polite">
      <Figures>
        <Figure
          label={t("timemachine.arrivals")}
          value={<Count value={answer.arrivals} />}
          note={t("timemachine.since", {
            time: formatTime(1000 * answer.from_s, language.value),
          })}
        />
        <Figure label={t("timemachine.running")} value={<Count value={answer.running} />} />
        <Figure label={t("timemachine.usable")} value={<Count value={answer.devices} />} />
        <Figure
          label={t("timemachine.moreFree", { a: label(first), b: label(second) })}
          value={formatNumber(free, language.value, 1)}
        />
      </Figures>
      {answer.left_out ? (
        <p>
          <Status tone="warn">{t("timemachine.leftOut", { count: answer.left_out })}</Status>
        </p>
      ) : null}
      {answer.without_begin ? (
        <p>
          <Status tone="warn">
            {t("timemachine.withoutBegin", { count: answer.without_begin })}
          </Status>
        </p>
      ) : null}
      <Card title={t("timemachine.results")}>
        <Table
          label={t("timemachine.results")}
          rows={all}
          columns={columns(label, answer.currency)}
          rowKey={label}
        />
        <p class="placeholder">{t("timemachine.limits")}</p>
      </Card>
      <Card title={t("timemachine.full")}>
        <Chart
          label={t("timemachine.full")}
          times={answer.series_s}
          series={seriesOf(all, label, (one) => one.used_devices_full)}
          format={percent}
          most={1}
        />
      </Card>
      <Card title={t("timemachine.used")}>
        <Chart
          label={t("timemachine.used")}
          times={answer.series_s}
          series={seriesOf(all, label, (one) => one.devices_used)}
          format={(value) => formatNumber(value, language.value)}
        />
      </Card>
      <Card title={t("timemachine.waiting")}>
        <Chart
          label={t("timemachine.waiting")}
          times={answer.series_s}
          series={seriesOf(answer.results, label, (one) => one.waiting)}
          format={(value) => formatNumber(value, language.value)}
        />
      </Card>
    </div>
  );
}

function columns(
  label: (result: Scheduler.PolicyResult) => string,
  currency: string,
): Column<Scheduler.PolicyResult>[] {
  const count = (key: "placed_at_once" | "waited" | "never_placed", title: string) => ({
    key,
    title,
    align: "right" as const,
    value: (one: Scheduler.PolicyResult) => one[key],
    cell: (one: Scheduler.PolicyResult) => <Count value={one[key]} />,
  });
  const fraction = (
    key: "used_devices_full_mean" | "used_devices_full_peak" | "stranded_mean",
    title: string,
  ) => ({
    key,
    title,
    align: "right" as const,
    value: (one: Scheduler.PolicyResult) => one[key],
    cell: (one: Scheduler.PolicyResult) => <Percent pct={100 * one[key]} digits={1} />,
  });
  return [
    { key: "policy", title: t("timemachine.policy"), value: label },
    count("placed_at_once", t("timemachine.atOnce")),
    count("waited", t("timemachine.waited")),
    count("never_placed", t("timemachine.never")),
    {
      key: "p95",
      title: t("timemachine.p95"),
      align: "right",
      value: (one) => (one.waited ? one.wait_p95_s : null),
      cell: (one) => <Duration seconds={one.waited ? one.wait_p95_s : null} />,
    },
    fraction("used_devices_full_mean", t("timemachine.fullMean")),
    fraction("used_devices_full_peak", t("timemachine.fullPeak")),
    {
      key: "free",
      title: t("timemachine.freeMean"),
      align: "right",
      value: (one) => one.devices_free_mean,
      cell: (one) => (
        <span class="amount">{formatNumber(one.devices_free_mean, language.value, 1)}</span>
      ),
    },
    fraction("stranded_mean", t("timemachine.stranded")),
    {
      key: "hours",
      title: t("timemachine.hours"),
      align: "right",
      value: (one) => one.device_hours,
      cell: (one) => (
        <span class="amount">{formatNumber(one.device_hours, language.value, 1)}</span>
      ),
    },
    ...(currency
      ? [
          {
            key: "cost",
            title: t("timemachine.cost"),
            align: "right" as const,
            value: (one: Scheduler.PolicyResult) => one.cost,
            cell: (one: Scheduler.PolicyResult) => (
              <span class="amount">{formatMoney(one.cost, currency, language.value)}</span>
            ),
          },
        ]
      : []),
  ];
}
