// SPDX-License-Identifier: Apache-2.0

import { useEffect, useRef } from "preact/hooks";
import { caller } from "../api/login.ts";
import { endSession, token } from "../api/session.ts";
import { t } from "../i18n.ts";
import { namespace, recentNamespaces, setNamespace } from "../preferences.ts";
import { Preferences } from "./preferences.tsx";
import { Search } from "./search.tsx";

export function Header() {
  return (
    <header class="header">
      <span class="brand">HAMi</span>
      <Search />
      <NamespaceFilter />
      <div class="header-end">
        {caller.value?.user ? (
          <span class="muted user" title={t("shell.user")}>
            {caller.value.user}
          </span>
        ) : null}
        <Preferences />
        {token.value ? (
          <button type="button" class="button" onClick={() => endSession("login")}>
            {t("shell.logout")}
          </button>
        ) : null}
      </div>
    </header>
  );
}

/** Limits all views to one namespace, from Enter or when the field is left. */
function NamespaceFilter() {
  const input = useRef<HTMLInputElement>(null);
  const chosen = namespace.value;
  useEffect(() => {
    if (input.current) input.current.value = chosen;
  }, [chosen]);
  return (
    <form
      class="namespace"
      onSubmit={(event) => {
        event.preventDefault();
        setNamespace(input.current?.value.trim() ?? "");
      }}
    >
      <label>
        {t("shell.namespace")}
        <input
          ref={input}
          name="namespace"
          list="namespaces"
          autocomplete="off"
          spellcheck={false}
          pattern="[a-z0-9]([a-z0-9\-]*[a-z0-9])?"
          placeholder={t("shell.allNamespaces")}
          onChange={(event) => {
            if (event.currentTarget.validity.valid) setNamespace(event.currentTarget.value.trim());
          }}
        />
      </label>
      <datalist id="namespaces">
        {recentNamespaces.value.map((one) => (
          <option key={one} value={one} />
        ))}
      </datalist>
      {chosen ? (
        <button type="button" class="button" onClick={() => setNamespace("")}>
          {t("shell.clearNamespace")}
        </button>
      ) : null}
    </form>
  );
}
