// SPDX-License-Identifier: Apache-2.0
// Changes the limits of a running container, after a dialog that shows before and after.

import { useState } from "preact/hooks";
import type { Registry, Scheduler } from "../../../generated/api.ts";
import { useAction } from "../../api/act.ts";
import { post } from "../../api/client.ts";
import { useRights } from "../../api/rights.ts";
import { formatMemory, formatPercent } from "../../format.ts";
import { t } from "../../i18n.ts";
import { language } from "../../preferences.ts";
import { Dialog, ErrorBox, Status } from "../../ui/index.ts";
import { resizeOf } from "./limits.ts";

export function Resize(props: {
  namespace: string;
  pod: string;
  container: Registry.ContainerWorkload;
  onResized: () => void;
}) {
  const { namespace, pod, container } = props;
  const device = container.devices[0];
  const size = container.right_size[0];
  const [wanted, setWanted] = useState<Scheduler.ResizeRequest>();
  const [done, setDone] = useState<Scheduler.Resized>();
  const { isBusy, problem, forget, run } = useAction();
  const isAllowed = useRights(namespace)("POST /v1/resize");
  if (!device) return null;
  const button = {
    class: "button",
    disabled: !isAllowed,
    title: isAllowed ? undefined : t("shell.notAllowed"),
  };
  const now = { name: container.name, memoryMib: device.limit_mib, corePct: device.limit_core_pct };

  async function apply(): Promise<void> {
    if (!wanted) return;
    setDone(await post("/v1/resize", wanted));
    setWanted(undefined);
    props.onResized();
  }

  return (
    <>
      <form
        class="inline-form resize"
        aria-label={t("workload.resizeOf", { name: container.name })}
        onSubmit={(event) => {
          event.preventDefault();
          const form = new FormData(event.currentTarget);
          setDone(undefined);
          forget();
          setWanted(
            resizeOf(
              { namespace, pod },
              now,
              String(form.get("memory") ?? ""),
              String(form.get("core") ?? ""),
            ),
          );
        }}
      >
        <label>
          {t("workload.newMemory")}
          <input
            key={`memory ${device.limit_mib}`}
            name="memory"
            type="number"
            min="1"
            step="1"
            class="short"
            defaultValue={String(device.limit_mib)}
          />
        </label>
        <label>
          {t("workload.newCore")}
          <input
            key={`core ${device.limit_core_pct}`}
            name="core"
            type="number"
            min="0"
            max="100"
            step="1"
            class="short"
            defaultValue={String(device.limit_core_pct)}
          />
        </label>
        <button type="submit" {...button}>
          {t("workload.resize")}
        </button>
        {size ? (
          <button
            type="button"
            {...button}
            onClick={() => {
              setDone(undefined);
              forget();
              setWanted(
                resizeOf({ namespace, pod }, now, String(size.memory_mib), String(size.core_pct)),
              );
            }}
          >
            {t("workload.useRightSize")}
          </button>
        ) : null}
      </form>
      <div role="status" class="resize-done">
        {done ? (
          <Status tone={done.in_force ? "ok" : "warn"}>
            {t(done.in_force ? "workload.inForce" : "workload.notYetInForce")}
          </Status>
        ) : null}
      </div>
      {wanted ? (
        <Dialog
          title={t("workload.confirmTitle", { name: `${namespace}/${pod} ${container.name}` })}
          confirm={t("workload.resize")}
          isBusy={isBusy}
          onConfirm={() => run(apply)}
          onClose={() => setWanted(undefined)}
        >
          <p>{t("workload.confirmIntro")}</p>
          <table class="table">
            <thead>
              <tr>
                <th scope="col">{t("workload.limit")}</th>
                <th scope="col">{t("workload.before")}</th>
                <th scope="col">{t("workload.after")}</th>
              </tr>
            </thead>
            <tbody>
              <tr>
                <th scope="row">{t("workload.memory")}</th>
                <td>{formatMemory(now.memoryMib, language.value)}</td>
                <td>{formatMemory(wanted.memory_mib ?? now.memoryMib, language.value)}</td>
              </tr>
              <tr>
                <th scope="row">{t("workload.core")}</th>
                <td>{coreOf(now.corePct)}</td>
                <td>{coreOf(wanted.core_pct ?? now.corePct)}</td>
              </tr>
            </tbody>
          </table>
          {problem ? <ErrorBox error={problem} /> : null}
        </Dialog>
      ) : null}
    </>
  );
}

export function coreOf(pct: number): string {
  return pct ? formatPercent(pct, language.value) : t("workload.noLimit");
}
