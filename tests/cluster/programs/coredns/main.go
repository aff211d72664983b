// SPDX-License-Identifier: Apache-2.0

// CoreDNS with the plugins that a cluster of the tests needs: names of Services, and forwarding of others.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/hosts"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	// A query passes the plugins in this order. The list of CoreDNS also has plugins that are not compiled in.
	dnsserver.Directives = []string{"health", "ready", "errors", "log", "cache", "hosts", "kubernetes", "forward"}
	coremain.Run()
}
