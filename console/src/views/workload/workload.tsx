// SPDX-License-Identifier: Apache-2.0
// A pod that holds devices: limits, use, peak, waiting, recommended request, history; and its resize.

import { useMemo, useState } from "preact/hooks";
import { Link, useLocation } from "wouter-preact";
import type { Registry } from "../../../generated/api.ts";
import { useGet } from "../../api/use.ts";
import { formatMemory, formatPercent } from "../../format.ts";
import { t, tValue } from "../../i18n.ts";
import { language, namespace } from "../../preferences.ts";
import {
  Answered,
  Card,
  Chart,
  type Column,
  Count,
  Cut,
  Duration,
  devicePath,
  Empty,
  Entries,
  Figure,
  Figures,
  Hours,
  HoursSelect,
  Memory,
  Meter,
  Page,
  Percent,
  Status,
  Table,
  TimeAgo,
  workloadPath,
} from "../../ui/index.ts";
import { PressureDetails } from "../pressure/pressure.tsx";
import type { ViewProps } from "../view.ts";
import "./workload.css";
import { sharesOf } from "./limits.ts";
import { coreOf, Resize } from "./resize.tsx";

const EVERY_S = 10;

export function WorkloadView({ params }: ViewProps) {
  return params.namespace && params.pod ? (
    <OnePod namespace={params.namespace} pod={params.pod} />
  ) : (
    <AllPods namespace={params.namespace ?? namespace.value} />
  );
}

function StateOf({ state }: { state: string }) {
  const tone = state === "failed" ? "bad" : state === "running" ? "ok" : "neutral";
  return <Status tone={tone}>{tValue("workload.states", state)}</Status>;
}

function AllPods({ namespace }: { namespace: string }) {
  const [, navigate] = useLocation();
  const answer = useGet("/v1/allocations", { query: { namespace }, everyS: EVERY_S });
  const columns: Column<Registry.AllocationView>[] = [
    { key: "namespace", title: t("workload.namespace"), value: (one) => one.namespace },
    {
      key: "pod",
      title: t("workload.pod"),
      value: (one) => one.pod,
      cell: (one) => <Link href={workloadPath(one.namespace, one.pod)}>{one.pod}</Link>,
    },
    { key: "node", title: t("workload.node"), value: (one) => one.node },
    {
      key: "state",
      title: t("workload.state"),
      value: (one) => one.state,
      cell: (one) => <StateOf state={one.state} />,
    },
    {
      key: "devices",
      title: t("workload.devices"),
      align: "right",
      value: (one) => sharesOf(one).devices,
    },
    {
      key: "memory",
      title: t("workload.memory"),
      align: "right",
      value: (one) => sharesOf(one).memoryMib,
      cell: (one) => <Memory mib={sharesOf(one).memoryMib} />,
    },
    {
      key: "since",
      title: t("workload.since"),
      value: (one) => one.reserved_s,
      cell: (one) => <TimeAgo ms={one.reserved_s * 1000} />,
    },
  ];
  return (
    <Page title={t("workload.title")} intro={t("workload.listIntro")}>
      <Answered answer={answer}>
        {({ items }) => {
          const pods = items.filter((one) => one.origin !== "claim");
          if (!pods.length) return <Empty>{t("workload.none")}</Empty>;
          return (
            <Card>
              <Table
                label={t("workload.title")}
                rows={pods}
                columns={columns}
                rowKey={(one) => one.allocation_id}
                onOpen={(one) => navigate(workloadPath(one.namespace, one.pod))}
              />
            </Card>
          );
        }}
      </Answered>
    </Page>
  );
}

function OnePod({ namespace, pod }: { namespace: string; pod: string }) {
  const [hours, setHours] = useState(24);
  const answer = useGet("/v1/workloads/{namespace}/{pod}", {
    params: { namespace, pod },
    query: { hours },
    everyS: EVERY_S,
  });
  return (
    <Page
      title={`${namespace}/${pod}`}
      intro={t("workload.intro")}
      actions={<HoursSelect choices={[1, 6, 24, 72, 168]} value={hours} onChange={setHours} />}
    >
      <Answered answer={answer}>
        {(data) => <Workload workload={data} onResized={answer.reload} />}
      </Answered>
    </Page>
  );
}

function Workload(props: { workload: Registry.Workload; onResized: () => void }) {
  const { workload } = props;
  const { allocation } = workload;
  return (
    <>
      <Cut reason={workload.cut} />
      <Figures>
        <Figure
          label={t("workload.state")}
          value={<StateOf state={allocation.state} />}
          note={allocation.reason}
        />
        <Figure label={t("workload.node")} value={allocation.node} />
        <Figure label={t("workload.since")} value={<TimeAgo ms={allocation.reserved_s * 1000} />} />
        <Figure
          label={t("workload.sampled")}
          value={<Duration seconds={workload.sampled_s} />}
          note={t("workload.every", { seconds: workload.every_s })}
        />
      </Figures>
      {workload.containers.map((container) => (
        <Container
          key={container.name}
          workload={workload}
          container={container}
          onResized={props.onResized}
        />
      ))}
      <Card title={t("workload.history")}>
        <Entries label={t("workload.history")} entries={workload.entries} hasPod={false} />
      </Card>
    </>
  );
}

function Container(props: {
  workload: Registry.Workload;
  container: Registry.ContainerWorkload;
  onResized: () => void;
}) {
  const { workload, container } = props;
  const waits = container.pressure;
  return (
    <>
      <Card title={t("workload.container", { name: container.name })}>
        <Figures>
          <Figure label={t("workload.processes")} value={<Count value={container.processes} />} />
          <Figure
            label={t("workload.waited")}
            value={<Duration seconds={waits?.waited_s ?? 0} />}
            note={waits?.cause ? t(`pressure.causes.${waits.cause}`) : t("workload.notThrottled")}
            tone={waits?.cause ? "warn" : "ok"}
          />
          <Figure
            label={t("workload.refusals")}
            value={<Count value={waits?.refusals ?? 0} />}
            tone={waits?.refusals ? "warn" : "ok"}
          />
          <RightSize container={container} />
        </Figures>
        {container.devices.map((device) => (
          <Device key={device.uuid} node={workload.allocation.node} device={device} />
        ))}
        {workload.allocation.state === "running" ? (
          <Resize
            namespace={workload.namespace}
            pod={workload.pod}
            container={container}
            onResized={props.onResized}
          />
        ) : null}
      </Card>
      {waits ? <PressureDetails container={waits} /> : null}
    </>
  );
}

function RightSize({ container }: { container: Registry.ContainerWorkload }) {
  const size = container.right_size[0];
  if (!size) {
    return <Figure label={t("workload.rightSize")} value="–" note={t("workload.tooLittleData")} />;
  }
  return (
    <Figure
      label={t("workload.rightSize")}
      value={
        <>
          {size.profile ? `${size.profile} · ` : ""}
          <Memory mib={size.memory_mib} /> · {coreOf(size.core_pct)}
        </>
      }
      note={
        <>
          {t("workload.basedOn", { margin: size.margin_pct })} <Hours hours={size.hours} />
        </>
      }
    />
  );
}

function Device({ node, device }: { node: string; device: Registry.DeviceWorkload }) {
  const { series } = device;
  const memory = useMemo(
    () => [
      { label: t("workload.memory"), values: series.memory_mib },
      { label: t("workload.limit"), values: series.time_s.map(() => device.limit_mib) },
    ],
    [series, device.limit_mib, language.value],
  );
  const core = useMemo(
    () => [{ label: t("workload.core"), values: series.core_pct }],
    [series, language.value],
  );
  const hasPeak = device.peak_s > 0;
  return (
    <section class="workload-device" aria-label={device.uuid}>
      <h3>
        {device.model} <Link href={devicePath(node, device.uuid)}>{device.uuid}</Link>
      </h3>
      <Meter
        label={t("workload.memory")}
        value={device.used_mib}
        most={device.limit_mib}
        tone={device.used_mib > device.limit_mib ? "bad" : "ok"}
        text={`${formatMemory(device.used_mib, language.value)} / ${formatMemory(device.limit_mib, language.value)}`}
      />
      <Meter
        label={t("workload.core")}
        value={device.core_pct}
        most={device.limit_core_pct || 100}
        text={`${formatPercent(device.core_pct, language.value)} / ${coreOf(device.limit_core_pct)}`}
      />
      <dl class="workload-facts">
        <div>
          <dt>{t("workload.peak")}</dt>
          <dd>
            {hasPeak ? (
              <>
                <Memory mib={device.peak_mib} /> <TimeAgo ms={device.peak_s * 1000} />
              </>
            ) : (
              "–"
            )}
          </dd>
        </div>
        <div>
          <dt>{t("workload.p95")}</dt>
          <dd>{hasPeak ? <Percent pct={device.p95_core_pct} /> : "–"}</dd>
        </div>
        <div>
          <dt>{t("workload.mean")}</dt>
          <dd>{hasPeak ? <Percent pct={device.mean_core_pct} /> : "–"}</dd>
        </div>
      </dl>
      {hasPeak ? (
        <div class="columns">
          <Chart
            label={t("workload.memoryChart")}
            times={series.time_s}
            series={memory}
            format={(value) => formatMemory(value, language.value)}
          />
          <Chart
            label={t("workload.coreChart")}
            times={series.time_s}
            series={core}
            most={100}
            format={(value) => formatPercent(value, language.value)}
          />
        </div>
      ) : (
        <Empty>{t("workload.noSamples")}</Empty>
      )}
    </section>
  );
}
