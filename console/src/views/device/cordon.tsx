// SPDX-License-Identifier: Apache-2.0
// Cordons a device, or ends its cordon, after a dialog that asks for the reason.

import { useState } from "preact/hooks";
import { ApiError, post } from "../../api/client.ts";
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
  const [isBusy, setBusy] = useState(false);
  const [reason, setReason] = useState("");
  const [problem, setProblem] = useState<ApiError>();
  const action = t(isCordoned ? "device.uncordon" : "device.cordon");

  async function apply(): Promise<void> {
    setBusy(true);
    setProblem(undefined);
    try {
      await post("/v1/cordon", { node, device: uuid, cordoned: !isCordoned, reason });
      setOpen(false);
      setReason("");
      props.onDone();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setProblem(error);
    } finally {
      setBusy(false);
    }
  }

  return (
    <>
      <button
        type="button"
        class="button"
        onClick={() => {
          setProblem(undefined);
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
          onConfirm={() => void apply()}
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
