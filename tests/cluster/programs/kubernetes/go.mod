// Marks the folder of main.go. The requirements are those of the release that is built: go build -modfile=1.37/go.mod
module hami.io/tests/cluster/kubernetes
