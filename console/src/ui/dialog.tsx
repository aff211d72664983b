// SPDX-License-Identifier: Apache-2.0

import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";
import { t } from "../i18n.ts";

/** A modal dialog; Escape and the first button cancel. The focus returns to where it was. */
export function Dialog(props: {
  title: string;
  children: ComponentChildren;
  /** Text of the button that confirms; absent: the dialog only informs. */
  confirm?: string;
  isDanger?: boolean;
  isBusy?: boolean;
  onConfirm?: () => void;
  onClose: () => void;
}) {
  const id = useId();
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const element = dialog.current;
    element?.showModal();
    // Closing returns the focus, which removing the element does not.
    return () => element?.close();
  }, []);
  return (
    <dialog
      ref={dialog}
      class="dialog"
      aria-labelledby={id}
      onCancel={(event) => {
        event.preventDefault();
        props.onClose();
      }}
    >
      <form
        onSubmit={(event) => {
          event.preventDefault();
          props.onConfirm?.();
        }}
      >
        <h2 id={id}>{props.title}</h2>
        <div class="dialog-body">{props.children}</div>
        <div class="dialog-actions">
          <button type="button" class="button" onClick={props.onClose}>
            {t(props.confirm ? "shell.cancel" : "shell.close")}
          </button>
          {props.confirm ? (
            <button
              type="submit"
              class={`button ${props.isDanger ? "danger" : "primary"}`}
              disabled={props.isBusy}
            >
              {props.confirm}
            </button>
          ) : null}
        </div>
      </form>
    </dialog>
  );
}
