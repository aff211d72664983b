// SPDX-License-Identifier: Apache-2.0
// Questions to the scheduler about changes: a drained node, and pods that do not exist yet.

import { useState } from "preact/hooks";
import type { Scheduler } from "../../../generated/api.ts";
import { useAsk } from "../../api/ask.ts";
import { useGet } from "../../api/use.ts";
import { formatMemory, formatPercent } from "../../format.ts";
import { t } from "../../i18n.ts";
import { language, namespace } from "../../preferences.ts";
import {
  Answered,
  Card,
  type Column,
  Count,
  Empty,
  ErrorBox,
  Figure,
  Figures,
  Loading,
  Page,
  Status,
  Table,
} from "../../ui/index.ts";
import { entriesOf, LineError, podsOf } from "./manifest.ts";
import "./whatif.css";

const PODS_MOST = 200;
const EXAMPLE = "nvidia.com/gpu: 1\nnvidia.com/gpumem: 8000\nnvidia.com/gpucores: 25";

export function WhatIfView() {
  return (
    <Page title={t("whatif.title")} intro={t("whatif.intro")}>
      <Drain />
      <Start />
    </Page>
  );
}

function Drain() {
  const nodes = useGet("/v1/nodes");
  const drain = useAsk("/v1/whatif/drain");
  return (
    <Card title={t("whatif.drain.title")}>
      <div class="question">
        <p class="muted">{t("whatif.drain.intro")}</p>
        <Answered answer={nodes}>
          {({ items }) =>
            items.length ? (
              <form
                class="inline-form"
                onSubmit={(event) => {
                  event.preventDefault();
                  const form = new FormData(event.currentTarget);
                  drain.ask({ node: String(form.get("node")) });
                }}
              >
                <label>
                  {t("whatif.node")}
                  <select name="node">
                    {items.map(({ node }) => (
                      <option key={node}>{node}</option>
                    ))}
                  </select>
                </label>
                <button type="submit" class="button primary" disabled={drain.isLoading}>
                  {t("whatif.drain.ask")}
                </button>
              </form>
            ) : (
              <Empty>{t("whatif.drain.noNodes")}</Empty>
            )
          }
        </Answered>
        {drain.isLoading ? <Loading /> : null}
        {drain.error ? <ErrorBox error={drain.error} onRetry={drain.reload} /> : null}
        {drain.data ? <Drained answer={drain.data} /> : null}
      </div>
    </Card>
  );
}

function Drained({ answer }: { answer: Scheduler.Drained }) {
  const { pods, staying, rejected } = answer;
  if (!pods.length && !staying.length && !rejected.length) {
    return <Empty>{t("whatif.drain.nothing", { node: answer.node })}</Empty>;
  }
  return (
    <>
      <Outcomes
        label={t("whatif.drain.result", { node: answer.node })}
        answer={answer}
        figure={
          <Figure
            label={t("whatif.drain.staying")}
            value={<Count value={staying.length} />}
            note={t("whatif.drain.stayingNote")}
          />
        }
      />
      {staying.length ? (
        <Table
          label={t("whatif.drain.staying")}
          rows={staying}
          columns={[
            { key: "pod", title: t("whatif.pod"), value: (one) => `${one.namespace}/${one.pod}` },
            { key: "why", title: t("whatif.why"), value: (one) => one.why },
          ]}
          rowKey={(one) => `${one.namespace}/${one.pod}`}
        />
      ) : null}
    </>
  );
}

function Start() {
  const start = useAsk("/v1/whatif/simulate");
  const [problem, setProblem] = useState("");
  function submit(form: FormData): void {
    try {
      const limits = entriesOf(String(form.get("limits")));
      const annotations = entriesOf(String(form.get("annotations")));
      const count = Number(form.get("count"));
      setProblem("");
      start.ask({
        pods: podsOf({ count, namespace: namespace.value || "default", limits, annotations }),
        fitting: false,
        explain: true,
      });
    } catch (error) {
      if (!(error instanceof LineError)) throw error;
      setProblem(t("whatif.start.line", { line: error.line }));
    }
  }
  return (
    <Card title={t("whatif.start.title")}>
      <div class="question">
        <p class="muted">{t("whatif.start.intro")}</p>
        <form
          class="inline-form"
          onSubmit={(event) => {
            event.preventDefault();
            submit(new FormData(event.currentTarget));
          }}
        >
          <label>
            {t("whatif.start.limits")}
            <textarea name="limits" rows={4} class="code" defaultValue={EXAMPLE} required />
          </label>
          <label>
            {t("whatif.start.annotations")}
            <textarea
              name="annotations"
              rows={4}
              class="code"
              placeholder="nvidia.com/use-gputype: A100"
            />
          </label>
          <label>
            {t("whatif.start.count")}
            <input
              name="count"
              type="number"
              class="short"
              min="1"
              max={PODS_MOST}
              defaultValue="1"
              required
            />
          </label>
          <button type="submit" class="button primary" disabled={start.isLoading}>
            {t("whatif.start.ask")}
          </button>
        </form>
        {problem ? (
          <p role="alert">
            <Status tone="bad">{problem}</Status>
          </p>
        ) : null}
        {start.isLoading ? <Loading /> : null}
        {start.error ? <ErrorBox error={start.error} onRetry={start.reload} /> : null}
        {start.data && start.data.without_devices > 0 ? (
          <Empty>{t("whatif.start.withoutDevices")}</Empty>
        ) : null}
        {start.data && start.data.without_devices === 0 ? (
          <Outcomes label={t("whatif.start.result")} answer={start.data} />
        ) : null}
      </div>
    </Card>
  );
}

function Outcomes(props: {
  label: string;
  answer: Pick<Scheduler.Simulated, "placed" | "refused" | "pods" | "rejected">;
  figure?: preact.ComponentChildren;
}) {
  const { placed, refused, pods, rejected } = props.answer;
  const waiting = pods.filter((one) => !one.node);
  return (
    <div aria-live="polite">
      <Figures>
        <Figure
          label={t("whatif.starts")}
          value={<Count value={placed} />}
          tone={refused ? "neutral" : "ok"}
        />
        <Figure
          label={t("whatif.waits")}
          value={<Count value={refused} />}
          tone={refused ? "bad" : "neutral"}
        />
        {props.figure}
      </Figures>
      {pods.length ? (
        <Table
          label={props.label}
          rows={pods}
          columns={columns()}
          rowKey={(one) => `${one.namespace}/${one.pod}`}
        />
      ) : null}
      {waiting.map((one) => (
        <section key={`${one.namespace}/${one.pod}`} class="reasons">
          <h3>{t("whatif.whyNot", { pod: `${one.namespace}/${one.pod}` })}</h3>
          <ul>
            {(one.refusals ?? []).map((refusal) => (
              <li key={refusal.text}>
                {t("whatif.refusal", { count: refusal.nodes, text: refusal.text })}
              </li>
            ))}
            {(one.closest ?? []).map((change) => (
              <li key={`${change.container} ${change.what}`}>
                {t("whatif.closest", {
                  what: change.container ? `${change.container}: ${change.what}` : change.what,
                  fits: change.fits,
                  asked: change.asked,
                  node: change.node,
                })}
              </li>
            ))}
          </ul>
        </section>
      ))}
      {rejected.map((one) => (
        <p key={`${one.namespace}/${one.pod}`} class="reasons">
          <Status tone="bad">
            {t("whatif.rejected", { pod: `${one.namespace}/${one.pod}`, problem: one.problem })}
          </Status>
        </p>
      ))}
    </div>
  );
}

function columns(): Column<Scheduler.Outcome>[] {
  return [
    { key: "pod", title: t("whatif.pod"), value: (one) => `${one.namespace}/${one.pod}` },
    {
      key: "outcome",
      title: t("whatif.outcome"),
      value: (one) => (one.node ? 1 : 0),
      cell: (one) =>
        one.node ? (
          <Status tone="ok">{t("whatif.outcomes.starts")}</Status>
        ) : (
          <Status tone="bad">{t("whatif.outcomes.waits")}</Status>
        ),
    },
    { key: "node", title: t("whatif.node"), value: (one) => one.node },
    { key: "devices", title: t("whatif.devices"), value: devicesOf },
  ];
}

function devicesOf(outcome: Scheduler.Outcome): string {
  const shares = (outcome.containers ?? []).flatMap((one) => one.shares);
  return shares
    .map((share) => {
      const memory = formatMemory(share.memory_mib, language.value);
      const core = share.core_pct ? `, ${formatPercent(share.core_pct, language.value)}` : "";
      return `${share.uuid} (${memory}${core})`;
    })
    .join("; ");
}
