// SPDX-License-Identifier: Apache-2.0

// Volcano's scheduler with its own actions and plugins.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	componentbaseoptions "k8s.io/component-base/config/options"
	"k8s.io/klog/v2"

	"volcano.sh/volcano/cmd/scheduler/app"
	"volcano.sh/volcano/cmd/scheduler/app/options"
	_ "volcano.sh/volcano/pkg/scheduler/actions"
	_ "volcano.sh/volcano/pkg/scheduler/plugins"
	"volcano.sh/volcano/pkg/util"
)

func main() {
	klog.InitFlags(nil)
	server := options.NewServerOption()
	server.AddFlags(pflag.CommandLine)
	util.LeaderElectionDefault(&server.LeaderElection)
	componentbaseoptions.BindLeaderElectionFlags(&server.LeaderElection, pflag.CommandLine)
	server.RegisterOptions()
	cliflag.InitFlags()
	defer klog.Flush()
	if err := run(server); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(server *options.ServerOption) error {
	if err := server.CheckOptionOrDie(); err != nil {
		return err
	}
	return app.Run(server)
}
