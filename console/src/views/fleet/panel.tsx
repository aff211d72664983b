// SPDX-License-Identifier: Apache-2.0
// One device in full: amounts, state, and the pods that book it.

import { Link } from "wouter-preact";
import { useGet } from "../../api/use.ts";
import { stateOf } from "../../fleet/state.ts";
import { type Fleet, sharesOf } from "../../fleet/store.ts";
import { formatMemory, formatPercent } from "../../format.ts";
import { t, tValue } from "../../i18n.ts";
import { language } from "../../preferences.ts";
import { Card, Meter, Status } from "../../ui/index.ts";
import { devicePath, TONES, workloadPath } from "./links.ts";
import type { Pointed } from "./stage.ts";

/** UUID of a device, which the document of the fleet leaves out; undefined until the node answers. */
export function useUuid(fleet: Fleet, pointed: Pointed | null): string | undefined {
  const answer = useGet("/v1/nodes/{node}", {
    params: { node: pointed?.node ?? "" },
    isEnabled: pointed !== null,
  });
  const node = pointed && fleet.node(pointed.node);
  if (!node || !answer.data || pointed.at >= node.count) return undefined;
  const { vendor, index } = fleet.device(node, pointed.at);
  return answer.data.devices.find((one) => one.vendor === vendor && one.index === index)?.uuid;
}

export function DevicePanel(props: {
  id: string;
  fleet: Fleet;
  pointed: Pointed | null;
  uuid: string | undefined;
  /** True: the device was chosen, so screen readers announce it. */
  isChosen: boolean;
}) {
  const { fleet, pointed } = props;
  const node = pointed && fleet.node(pointed.node);
  if (!node || pointed.at >= node.count) {
    return (
      <Card class="fleet-panel">
        <p id={props.id} class="placeholder">
          {t("fleet.panel.none")}
        </p>
      </Card>
    );
  }
  const device = fleet.device(node, pointed.at);
  const state = stateOf(fleet, node, pointed.at);
  const shares = sharesOf(node, pointed.at);
  const locale = language.value;
  const name = `${node.name} #${device.index}`;
  return (
    <Card class="fleet-panel">
      <div data-device={`${node.name}/${device.index}`}>
        <div id={props.id} aria-live={props.isChosen ? "polite" : "off"}>
          <h2>
            {props.uuid ? <Link href={devicePath(node.name, props.uuid)}>{name}</Link> : name}
          </h2>
          <p>{device.model}</p>
          <Status tone={TONES[state]}>{t(`fleet.states.${state}`)}</Status>
          {device.reason ? <p>{device.reason}</p> : null}
          {node.problem ? <p>{node.problem}</p> : null}
          <Meter
            label={t("fleet.panel.memory")}
            value={device.used_mib}
            most={device.capacity_mib}
            text={`${formatMemory(device.used_mib, locale)} / ${formatMemory(device.capacity_mib, locale)}`}
          />
          <Meter
            label={t("fleet.panel.compute")}
            value={device.used_core_pct}
            most={device.capacity_core_pct}
            text={`${formatPercent(device.used_core_pct, locale)} / ${formatPercent(device.capacity_core_pct, locale)}`}
          />
          <Meter
            label={t("fleet.panel.slots")}
            value={device.used_slots}
            most={device.slots}
            text={`${device.used_slots} / ${device.slots}`}
          />
        </div>
        <dl class="fleet-facts">
          {device.foreign_mib > 0 ? (
            <Fact
              name={t("fleet.panel.foreign")}
              value={formatMemory(device.foreign_mib, locale)}
            />
          ) : null}
          {device.burst_mib > 0 ? (
            <Fact name={t("fleet.panel.burst")} value={formatMemory(device.burst_mib, locale)} />
          ) : null}
          {device.mode ? <Fact name={t("fleet.panel.mode")} value={device.mode} /> : null}
          {device.partitions ? (
            <Fact name={t("fleet.panel.partitions")} value={device.partitions} />
          ) : null}
          {device.stranded_by ? (
            <Fact
              name={t("fleet.panel.stranded")}
              value={tValue("fleet.causes", device.stranded_by)}
            />
          ) : (
            <Fact
              name={t("fleet.panel.offer")}
              value={`${formatMemory(device.offer_mib, locale)}, ${formatPercent(device.offer_core_pct, locale)}`}
            />
          )}
        </dl>
        <h3>{t("fleet.panel.allocations")}</h3>
        {shares.length === 0 ? (
          <p class="muted">
            {t(device.used_slots > 0 ? "fleet.panel.hidden" : "fleet.panel.unbooked")}
          </p>
        ) : (
          <ul class="fleet-shares">
            {shares.map((share) => {
              const { namespace, pod, state: phase } = share.allocation;
              return (
                <li key={`${namespace}/${pod}`}>
                  <Link href={workloadPath(namespace, pod)}>{`${namespace}/${pod}`}</Link>
                  <span class="muted">
                    {`${formatMemory(share.memory_mib, locale)}, ${formatPercent(share.core_pct, locale)}, ${phase}`}
                  </span>
                </li>
              );
            })}
          </ul>
        )}
      </div>
    </Card>
  );
}

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}
