// SPDX-License-Identifier: Apache-2.0

import { useSignalEffect } from "@preact/signals";
import { Component, type ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Redirect, Route, Router, Switch, useLocation } from "wouter-preact";
import { ApiError } from "../api/client.ts";
import { staleSince } from "../api/contact.ts";
import { resume } from "../api/login.ts";
import { useRights } from "../api/rights.ts";
import { session } from "../api/session.ts";
import { formatTime } from "../format.ts";
import { t } from "../i18n.ts";
import { language, namespace, theme } from "../preferences.ts";
import { Empty, ErrorBox, keepTime, Loading, Status } from "../ui/index.ts";
import { views } from "../views/index.ts";
import { GROUPS, linkOf, listed } from "../views/view.ts";
import { Header } from "./header.tsx";
import { Login } from "./login.tsx";
import { Navigation } from "./navigation.tsx";

export function App() {
  useSignalEffect(() => {
    document.documentElement.lang = language.value;
    document.documentElement.dataset.theme = theme.value;
  });
  const [error, setError] = useState<ApiError>();
  function begin(): void {
    setError(undefined);
    resume().catch((problem: unknown) => {
      setError(
        problem instanceof ApiError ? problem : new ApiError(0, "unreachable", String(problem)),
      );
    });
  }
  useEffect(begin, []);
  if (error) {
    return (
      <main class="login">
        <ErrorBox error={error} onRetry={begin} />
      </main>
    );
  }
  if (session.value === "unknown") return <Loading />;
  if (session.value !== "open") return <Login />;
  return (
    <Router base="/console">
      <Shell />
    </Router>
  );
}

function Shell() {
  useEffect(keepTime, []);
  const may = useRights(namespace.value);
  const allowed = views.filter((view) => may(view.needs));
  const first = GROUPS.flatMap((group) => listed(allowed, group))[0];
  return (
    <div class="shell">
      <button
        type="button"
        class="button skip"
        onClick={() => document.getElementById("content")?.focus()}
      >
        {t("shell.skip")}
      </button>
      <Header />
      <Navigation />
      <main id="content" class="content" tabIndex={-1}>
        <StaleBanner />
        <Switch>
          {views.map((view) => (
            <Route key={view.name} path={view.path}>
              {(params: Record<string, string | undefined>) => (
                <Boundary key={view.name}>
                  <Titled title={t(view.titleKey)}>
                    <view.component params={params} />
                  </Titled>
                </Boundary>
              )}
            </Route>
          ))}
          <Route path="/">{first ? <Redirect to={linkOf(first)} replace /> : null}</Route>
          <Route>
            <Empty>{t("shell.notFound")}</Empty>
          </Route>
        </Switch>
      </main>
    </div>
  );
}

function Titled({ title, children }: { title: string; children: ComponentChildren }) {
  const [location] = useLocation();
  useEffect(() => document.getElementById("content")?.scrollTo(0, 0), [location]);
  useEffect(() => {
    document.title = `${title} · HAMi`;
  }, [title]);
  return <>{children}</>;
}

function StaleBanner() {
  const since = staleSince.value;
  return (
    <div role="status" class="stale-place">
      {since === null ? null : (
        <p class="banner">
          <Status tone="warn">
            {t("shell.stale", { time: formatTime(since, language.value) })}
          </Status>
        </p>
      )}
    </div>
  );
}

/** Confines an exception of a view to the view. */
class Boundary extends Component<
  { children: ComponentChildren },
  { problem?: string | undefined }
> {
  override state: { problem?: string | undefined } = {};

  static override getDerivedStateFromError(error: unknown): { problem: string } {
    return { problem: error instanceof Error ? error.message : String(error) };
  }

  override componentDidCatch(error: unknown): void {
    reportError(error);
  }

  override render() {
    if (this.state.problem === undefined) return this.props.children;
    return (
      <div class="error-box" role="alert">
        <Status tone="bad">{t("shell.failure")}</Status>
        <p class="code">{this.state.problem}</p>
        <button type="button" class="button" onClick={() => this.setState({ problem: undefined })}>
          {t("shell.retry")}
        </button>
      </div>
    );
  }
}
