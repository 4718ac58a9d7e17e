//go:build linux

package overlay

import (
	"bytes"
	"io"
	"os/exec"
	"strings"
	"testing"

	"github.com/sanconn/san/test/overlay/internal/build"
)

// etcdctl runs etcdctl with a value on its standard input, and returns what it prints.
func etcdctl(t *testing.T, file, address, value string, args ...string) string {
	t.Helper()
	cmd := exec.Command(file, append([]string{"--endpoints", address}, args...)...)
	cmd.Stdin = strings.NewReader(value)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("etcdctl %v: %v\n%s", args, err, stderr.Bytes())
	}
	return string(out)
}

// watch runs an etcdctl that watches a key, and plain ones that put values, until so many of the
// server's connections are on shm. It returns what has carried all of them.
func watch(t *testing.T, file, plain, address, key string, carried int, look func() counters) map[string]int {
	t.Helper()
	_, out := start(t, file, "--endpoints", address, "watch", "--rev", "1", key) // beginning with the first put
	value := strings.Repeat("0123456789abcdef", 4<<10)
	event := "PUT\n" + key + "\n" + value + "\n"
	read := make([]byte, len(event))
	// A connection moves after 1.25 MiB of values. An attempt that has failed is repeated after four
	// times as much.
	const enough, most = 20, 200
	for n := 0; n < enough || n < most && look().Accepted["shm"] < carried; n++ {
		etcdctl(t, plain, address, value, "put", key)
		if _, err := io.ReadFull(out, read); err != nil || string(read) != event {
			t.Fatalf("watched: %v, %d bytes, which begin with %.80q", err, len(read), read)
		}
	}
	return moved(carried, look)
}

// TestEtcd runs etcd with etcdctl, and with a plain etcdctl.
func TestEtcd(t *testing.T) {
	server := others(t, san, "etcd")
	ctl, plain := others(t, san, "etcdctl"), others(t, "go", "etcdctl")
	address := freeAddress(t)
	args := build.EtcdArguments(t.TempDir(), address, freeAddress(t))
	start(t, server, append(args, "--enable-grpc-gateway=false")...) // the gateway would itself dial etcd
	until(t, "http://"+address+"/health")
	look := func() counters { return vars(t, "http://"+address+"/debug/vars") }

	accepted := watch(t, plain, plain, address, "one", 0, look)
	report(t, "etcd, a plain etcdctl", nil, accepted, 0, 0)
	accepted = watch(t, ctl, plain, address, "two", 1, look)
	report(t, "etcd, etcdctl", nil, accepted, 0, 1)
	etcdctl(t, ctl, address, "value", "put", "other")
	if out := etcdctl(t, plain, address, "", "get", "other"); out != "other\nvalue\n" {
		t.Errorf("get: %q", out)
	}
}
