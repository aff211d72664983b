// SPDX-License-Identifier: Apache-2.0
// Why one pod waits: verdict now, ways to start it, devices of the closest nodes, decisions.

import type { ComponentChildren } from "preact";
import { Link } from "wouter-preact";
import type { Registry, Scheduler } from "../../../generated/api.ts";
import { useGet } from "../../api/use.ts";
import { formatMemory, formatNumber, formatPercent } from "../../format.ts";
import { t, tValue } from "../../i18n.ts";
import { language } from "../../preferences.ts";
import {
  Answered,
  Card,
  type Column,
  Count,
  Empty,
  Figure,
  Figures,
  Memory,
  Page,
  Percent,
  Status,
  Table,
  TimeAgo,
} from "../../ui/index.ts";
import { amountsText, estimateText, ReasonStatus } from "./texts.tsx";
import { changesShown, deviceRows, scoresOf } from "./ways.ts";
import { WayText } from "./waytext.tsx";

const EVERY_S = 5;
const WAYS_EVERY_S = 15;

type Name = { namespace: string; pod: string };

export function PodPage({ namespace, pod }: Name) {
  const params = { namespace, pod };
  const explained = useGet("/v1/explain/{namespace}/{pod}", { params, everyS: EVERY_S });
  return (
    <Page
      title={`${namespace}/${pod}`}
      intro={t("pending.podIntro")}
      actions={<Link href="/pending">{t("pending.all")}</Link>}
    >
      <Now namespace={namespace} pod={pod} />
      <Answered answer={explained}>
        {({ decisions, allocations }) => (
          <>
            <Allocations allocations={allocations} />
            <Devices decisions={decisions} />
            <Scores decisions={decisions} />
            <Decisions decisions={decisions} />
          </>
        )}
      </Answered>
    </Page>
  );
}

function Now({ namespace, pod }: Name) {
  const queues = useGet("/v1/queues", { query: { namespace }, everyS: EVERY_S });
  const row = queues.data?.waiting?.find((one) => one.pod === pod);
  const ways = useGet("/v1/whatif/pods/{namespace}/{pod}", {
    params: { namespace, pod },
    everyS: WAYS_EVERY_S,
    isEnabled: row !== undefined,
  });
  return (
    <Answered answer={queues}>
      {() =>
        row ? (
          <>
            <Place row={row} />
            <Answered answer={ways}>{({ now }) => <Verdict now={now} />}</Answered>
          </>
        ) : (
          <Card title={t("pending.now")}>
            <Empty>{t("pending.notWaiting")}</Empty>
          </Card>
        )
      }
    </Answered>
  );
}

function Place({ row }: { row: Scheduler.WaitingRow }) {
  const ahead = amountsText(row.ahead);
  return (
    <Figures>
      <Figure label={t("pending.reason")} value={<ReasonStatus reason={row.reason} />} />
      <Figure label={t("pending.wants")} value={amountsText(row.wanted)} />
      <Figure
        label={row.queue ? t("pending.positionIn", { queue: row.queue }) : t("pending.position")}
        value={<Count value={row.position} />}
        note={ahead ? t("pending.ahead", { amounts: ahead }) : t("pending.first")}
      />
      <Figure
        label={t("pending.estimate")}
        value={<span class="figure-sentence">{estimateText(row.estimate)}</span>}
      />
    </Figures>
  );
}

function Verdict({ now }: { now: Scheduler.Standing }) {
  return (
    <div class="columns">
      <Card title={t("pending.ways")}>
        {now.best ? (
          <p>
            <Status tone="ok">{t("pending.fits", { node: now.best })}</Status>
          </p>
        ) : (
          <Ways ways={now.closest ?? []} unmoved={now.unmoved ?? ""} />
        )}
      </Card>
      <Card title={t("pending.now")}>
        <p>{t("pending.nodesFit", { feasible: now.feasible, nodes: now.nodes })}</p>
        <ul>
          {(now.refusals ?? []).map((one) => (
            <li key={one.text}>
              {t("pending.nodesRefuse", { count: one.nodes })}: {one.text}
            </li>
          ))}
        </ul>
      </Card>
    </div>
  );
}

function Ways({ ways, unmoved }: { ways: readonly Scheduler.Way[]; unmoved: string }) {
  return (
    <>
      {ways.length ? (
        <ol aria-label={t("pending.ways")}>
          {changesShown(ways).map((way, index) => (
            // biome-ignore lint/suspicious/noArrayIndexKey: ways have no identity; their order is the content.
            <li key={index}>
              <WayText way={way} />
            </li>
          ))}
        </ol>
      ) : (
        <Empty>{t("pending.noWay")}</Empty>
      )}
      {unmoved ? <p class="muted">{t("pending.unmoved", { reason: unmoved })}</p> : null}
    </>
  );
}

function Allocations({ allocations }: { allocations: readonly Registry.AllocationView[] }) {
  const live = allocations.filter((one) => one.state !== "released");
  if (!live.length) return null;
  return (
    <Card title={t("pending.allocations")}>
      <ul>
        {live.map((one) => (
          <li key={one.allocation_id}>
            {t("pending.allocation", {
              state: tValue("pending.states", one.state),
              node: one.node,
            })}
          </li>
        ))}
      </ul>
    </Card>
  );
}

function Devices({ decisions }: { decisions: readonly Registry.DecisionRecord[] }) {
  const decision = decisions.find((one) => one.closest?.length);
  if (!decision) return null;
  return (
    <Card
      title={t("pending.devices")}
      actions={
        <span class="muted">
          {t("pending.asOf")} <TimeAgo ms={decision.time_s * 1000} />
        </span>
      }
    >
      <Table
        label={t("pending.devices")}
        rows={deviceRows(decision)}
        rowKey={(row) => `${row.node} ${row.uuid}`}
        columns={deviceColumns()}
      />
    </Card>
  );
}

type DeviceRow = ReturnType<typeof deviceRows>[number];

function deviceColumns(): Column<DeviceRow>[] {
  return [
    { key: "node", title: t("pending.node"), value: (row) => row.node },
    {
      key: "device",
      title: t("pending.device"),
      value: (row) => row.uuid,
      cell: (row) => (
        <span class="code" title={row.uuid}>
          {row.uuid || "–"}
        </span>
      ),
    },
    {
      key: "refusal",
      title: t("pending.refusal"),
      value: (row) => row.code,
      cell: (row) =>
        row.code ? (
          <Status tone="bad">{tValue("pending.codes", row.code)}</Status>
        ) : (
          <Status tone="ok">{t("pending.deviceFits")}</Status>
        ),
    },
    {
      key: "wanted",
      title: t("pending.wanted"),
      align: "right",
      value: (row) => row.wanted?.memory_mib,
      cell: (row) => <DeviceAmounts amounts={row.wanted} />,
    },
    {
      key: "free",
      title: t("pending.free"),
      align: "right",
      value: (row) => row.free?.memory_mib,
      cell: (row) => <DeviceAmounts amounts={row.free} />,
    },
    {
      key: "holders",
      title: t("pending.holders"),
      value: (row) => row.holders.length,
      cell: (row) => <Holders row={row} />,
    },
  ];
}

function DeviceAmounts({ amounts }: { amounts: Registry.Amounts | undefined }) {
  if (!amounts) return <>–</>;
  return (
    <>
      <Memory mib={amounts.memory_mib ?? 0} />, <Percent pct={amounts.core_pct ?? 0} />
    </>
  );
}

function Holders({ row }: { row: DeviceRow }) {
  const texts = row.holders.map((one) => {
    const name = one.name ? `${one.namespace}/${one.name}` : t("pending.otherNamespace");
    return `${name} (${formatMemory(one.memory_mib ?? 0, language.value)})`;
  });
  if (row.leftOut) texts.push(t("pending.more", { count: row.leftOut }));
  if (row.foreignMib) {
    texts.push(t("pending.outside", { amount: formatMemory(row.foreignMib, language.value) }));
  }
  if (row.burstMib) {
    texts.push(t("pending.beyond", { amount: formatMemory(row.burstMib, language.value) }));
  }
  return <>{texts.join(", ") || "–"}</>;
}

function Scores({ decisions }: { decisions: readonly Registry.DecisionRecord[] }) {
  const scores = scoresOf(decisions);
  if (!scores) return null;
  const rows = [
    ...(scores.nodes ?? []).map((one) => ({ name: one.node, ...one })),
    ...(scores.devices ?? []).map((one) => ({ name: one.uuid, ...one })),
  ];
  return (
    <Card title={t("pending.scores")}>
      <p class="muted">
        {t("pending.policies", { node: scores.node_policy, device: scores.device_policy })}
      </p>
      <Table
        label={t("pending.scores")}
        rows={rows}
        rowKey={(row) => row.name}
        columns={[
          { key: "name", title: t("pending.name"), value: (row) => row.name },
          scoreColumn("slot", t("pending.slots"), (row) => row.slot),
          scoreColumn("core", t("pending.core"), (row) => row.core),
          scoreColumn("memory", t("pending.memory"), (row) => row.memory),
          {
            key: "topology",
            title: t("pending.topology"),
            align: "right",
            value: (row) => row.topology ?? 0,
            cell: (row) => formatNumber(row.topology ?? 0, language.value, 2),
          },
        ]}
      />
    </Card>
  );
}

type ScoreRow = { name: string; slot?: number; core?: number; memory?: number; topology?: number };

function scoreColumn(
  key: string,
  title: string,
  value: (row: ScoreRow) => number | undefined,
): Column<ScoreRow> {
  return {
    key,
    title,
    align: "right",
    value: (row) => value(row) ?? 0,
    cell: (row) => formatPercent(100 * (value(row) ?? 0), language.value),
  };
}

function Decisions({ decisions }: { decisions: readonly Registry.DecisionRecord[] }) {
  if (!decisions.length) return <Empty>{t("pending.noDecision")}</Empty>;
  const columns: Column<Registry.DecisionRecord>[] = [
    {
      key: "time",
      title: t("pending.decided"),
      value: (row) => row.time_s,
      cell: (row) => <TimeAgo ms={row.time_s * 1000} />,
    },
    { key: "verb", title: t("pending.verb"), value: (row) => tValue("pending.verbs", row.verb) },
    {
      key: "verdict",
      title: t("pending.verdict"),
      value: (row) => row.verdict,
      cell: (row) => <DecisionStatus decision={row} />,
    },
    {
      key: "text",
      title: t("pending.text"),
      isSortable: false,
      value: (row) => row.error || row.node || "",
      cell: (row) => <Reasons decision={row} />,
    },
  ];
  return (
    <Card title={t("pending.decisions")}>
      <Table
        label={t("pending.decisions")}
        rows={decisions}
        columns={columns}
        rowKey={(row) => `${row.time_s} ${row.verb} ${row.verdict}`}
      />
    </Card>
  );
}

function DecisionStatus({ decision }: { decision: Registry.DecisionRecord }) {
  const tone = { placed: "ok", feasible: "ok", refused: "warn", error: "bad" } as const;
  return (
    <Status tone={tone[decision.verdict]}>{tValue("pending.verdicts", decision.verdict)}</Status>
  );
}

function Reasons({ decision }: { decision: Registry.DecisionRecord }): ComponentChildren {
  const refusals = decision.refusals ?? [];
  if (!refusals.length) return <>{decision.error || decision.node || "–"}</>;
  return (
    <ul class="plain">
      {refusals.map((one) => (
        <li key={one.text}>
          {t("pending.nodesRefuse", { count: one.count })}: {one.text}
        </li>
      ))}
    </ul>
  );
}
