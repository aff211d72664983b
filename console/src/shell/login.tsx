// SPDX-License-Identifier: Apache-2.0

import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "../api/client.ts";
import { login } from "../api/login.ts";
import { session } from "../api/session.ts";
import { t } from "../i18n.ts";
import { Status } from "../ui/index.ts";
import { Preferences } from "./preferences.tsx";

/** Asks for a Kubernetes token. */
export function Login() {
  const [problem, setProblem] = useState(
    session.value === "rejected" ? t("shell.login.expired") : "",
  );
  const [isBusy, setBusy] = useState(false);
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => input.current?.focus(), []);

  async function submit(event: Event): Promise<void> {
    event.preventDefault();
    const candidate = input.current?.value.trim() ?? "";
    if (!candidate) {
      setProblem(t("shell.login.empty"));
      return;
    }
    setBusy(true);
    try {
      if (!(await login(candidate))) setProblem(t("shell.login.rejected"));
    } catch (error) {
      const isKnown = error instanceof ApiError;
      setProblem(isKnown ? error.message : t("shell.errors.unreachable"));
    } finally {
      setBusy(false);
      input.current?.focus();
    }
  }

  return (
    <main class="login">
      <form class="card" onSubmit={submit}>
        <h1>{t("shell.login.title")}</h1>
        <p class="muted">{t("shell.login.intro")}</p>
        <label class="field">
          {t("shell.login.token")}
          <input
            ref={input}
            type="password"
            name="token"
            autocomplete="off"
            spellcheck={false}
            aria-invalid={problem ? true : undefined}
            aria-describedby={problem ? "login-problem" : undefined}
          />
        </label>
        <p id="login-problem" class="login-problem" role="alert">
          {problem ? <Status tone="bad">{problem}</Status> : null}
        </p>
        <button type="submit" class="button primary" disabled={isBusy}>
          {t("shell.login.submit")}
        </button>
        <p class="muted">
          {t("shell.login.create")} <code>kubectl create token NAME -n NAMESPACE</code>
        </p>
      </form>
      <div class="login-preferences">
        <Preferences />
      </div>
    </main>
  );
}
