package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/sanconn/san/test/hwsim"
)

// The settings of the simulated link are about those of a ConnectX-7.
const simulatedLink = "latency_ns=2000,bandwidth=50000000000"

// simulatedBanner begins the table, with the device's settings.
const simulatedBanner = `SIMULATED: there is no RDMA device in this run. What SAN stands for is a model of one, in software,
on this host's processors, with modelled costs (%s; test/hwsim/README.md). It shows by which way
bytes go. Its rates say nothing about hardware, nor about TCP between hosts.

`

// simulate runs a comparison in new processes, with a simulated device's libraries in place of
// rdma-core's.
func simulate(ctx context.Context, std stdio, profile string, args []string) error {
	if known := hwsim.Profiles(); !slices.Contains(known, profile) {
		return usagef("compare: there is no family %q to simulate; there are %s", profile, strings.Join(known, ", "))
	}
	if why := cannotSimulate(); why != nil {
		return fmt.Errorf("-simulate: %w", why)
	}
	dir, err := os.MkdirTemp(memoryDir(), "sanperf")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	fabric, err := hwsim.In(dir, "profile="+profile+","+simulatedLink)
	if err != nil {
		return fmt.Errorf("-simulate: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, self, append([]string{"compare", "-require"}, args...)...)
	cmd.Env = append(fabric.Programs(), "SAN_PROVIDERS=verbs") // on one host, shm would be preferred
	cmd.Stdin, cmd.Stdout, cmd.Stderr = std.in, std.out, std.err
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("-simulate: the comparison failed: %w", err)
	}
	done, err := fabric.Work()
	if err != nil {
		return err
	}
	fmt.Fprintf(std.err, "SIMULATED: the device executed %d sends, %d RDMA writes, %d RDMA reads and %d binds of windows; of sends and writes, %d inline\n",
		done.Sends, done.Writes, done.Reads, done.Binds, done.Inline)
	return nil
}

// cannotSimulate returns why this program cannot load a device's libraries, whatever is installed.
func cannotSimulate() error {
	if runtime.GOOS != "linux" {
		return errors.New("RDMA is used on Linux alone")
	}
	build, _ := debug.ReadBuildInfo()
	if build != nil && slices.Contains(build.Settings, debug.BuildSetting{Key: "CGO_ENABLED", Value: "0"}) {
		return errors.New("this program is built without cgo, and so without RDMA: build it with CGO_ENABLED=1 and a C compiler")
	}
	return nil
}

// memoryDir returns the directory of the device's memory: "", which means the system's default, if there
// is no file system in memory.
func memoryDir() string {
	const dir = "/dev/shm"
	if info, err := os.Stat(dir); err == nil && info.IsDir() {
		return dir
	}
	return ""
}
