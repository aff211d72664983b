// SPDX-License-Identifier: Apache-2.0
// Cordons a device, or ends its cordon, after a dialog that asks for the reason.

import { useState } from "preact/hooks";
import { useAction } from "../../api/act.ts";
import { post } from "../../api/client.ts";
import { useRights } from "../../api/rights.ts";
import { t } from "../../i18n.ts";
import { Dialog, ErrorBox } from "../../ui/index.ts";

const REASON_MOST = 500;

export function Cordon(props: {
  node: string;
  uuid: string;
  isCordoned: boolean;
  onDone: () => void;
}) {
  const { node, uuid, isCordoned } = props;
  const [isOpen, setOpen] = useState(false);
  const [reason, setReason] = useState("");
  const { isBusy, problem, forget, run } = useAction();
  const isAllowed = useRights("")("POST /v1/cordon");
  const action = t(isCordoned ? "device.uncordon" : "device.cordon");

  async function apply(): Promise<void> {
    await post("/v1/cordon", { node, device: uuid, cordoned: !isCordoned, reason });
    setOpen(false);
    setReason("");
    props.onDone();
  }

  return (
    <>
      <button
        type="button"
        class="button"
        disabled={!isAllowed}
        title={isAllowed ? undefined : t("shell.notAllowed")}
        onClick={() => {
          forget();
          setOpen(true);
        }}
      >
        {action}
      </button>
      {isOpen ? (
        <Dialog
          title={t(isCordoned ? "device.uncordonTitle" : "device.cordonTitle", { node })}
          confirm={action}
          isBusy={isBusy}
          onConfirm={() => run(apply)}
          onClose={() => setOpen(false)}
        >
          <p>{t(isCordoned ? "device.uncordonIntro" : "device.cordonIntro")}</p>
          {isCordoned ? null : (
            <label>
              {t("device.cordonReason")}
              <input
                value={reason}
                maxLength={REASON_MOST}
                onInput={(event) => setReason(event.currentTarget.value)}
              />
            </label>
          )}
          {problem ? <ErrorBox error={problem} /> : null}
        </Dialog>
      ) : null}
    </>
  );
}
