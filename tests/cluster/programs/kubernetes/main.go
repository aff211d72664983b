// SPDX-License-Identifier: Apache-2.0

// The Kubernetes components and etcd as one program, for tests: the name it is called by, or else its first
// argument, says which one it is. One link instead of seven; only the chosen component's command is ever built.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

const exitUsage = 2

// component runs one of the programs with its arguments (args[0] is its name) and returns the exit code.
type component func(args []string) int

func main() {
	components := map[string]component{
		"etcd":                    func(args []string) int { etcdmain.Main(args); return 0 },
		"kube-apiserver":          command(apiserver.NewAPIServerCommand),
		"kube-controller-manager": command(controllermanager.NewControllerManagerCommand),
		"kube-proxy":              command(proxy.NewProxyCommand),
		"kube-scheduler":          command(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
		"kubectl":                 runKubectl,
		"kubelet":                 command(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	}
	args := append([]string{filepath.Base(os.Args[0])}, os.Args[1:]...)
	if _, known := components[args[0]]; !known {
		args = args[1:]
	}
	if len(args) == 0 || components[args[0]] == nil {
		names := make([]string, 0, len(components))
		for name := range components {
			names = append(names, name)
		}
		slices.Sort(names)
		fmt.Fprintf(os.Stderr, "call this program by one of these names, or give one first: %v\n", names)
		os.Exit(exitUsage)
	}
	// Components read the arguments, and name themselves, by os.Args.
	os.Args = args
	os.Exit(components[args[0]](args))
}

func command(build func() *cobra.Command) component {
	return func([]string) int { return cli.Run(build()) }
}

func runKubectl([]string) int {
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
	return 0
}
