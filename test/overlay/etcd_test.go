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

// etcdctl runs one, with a value on its standard input, and returns what it prints.
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

// watch has an etcdctl watch a key that a plain one puts, until so many connections of the
// server's are on shm, and returns by what all have gone.
func watch(t *testing.T, file, plain, address, key string, carried int, look func() counters) map[string]int {
	t.Helper()
	_, out := start(t, file, "--endpoints", address, "watch", "--rev", "1", key) // from the first put on
	value := strings.Repeat("0123456789abcdef", 4<<10)
	event := "PUT\n" + key + "\n" + value + "\n"
	read := make([]byte, len(event))
	// Of what was put 1.25 MiB are enough for a connection to move. A try that has failed is made again
	// behind four times as much.
	const enough, most = 20, 200
	for n := 0; n < enough || n < most && look().Accepted["shm"] < carried; n++ {
		etcdctl(t, plain, address, value, "put", key)
		if _, err := io.ReadFull(out, read); err != nil || string(read) != event {
			t.Fatalf("watched: %v, %d bytes, which begin with %.80q", err, len(read), read)
		}
	}
	return moved(carried, look)
}

// TestEtcd has etcd and etcdctl, and a plain etcdctl for the same.
func TestEtcd(t *testing.T) {
	server := others(t, san, "etcd")
	ctl, plain := others(t, san, "etcdctl"), others(t, "go", "etcdctl")
	address := freeAddress(t)
	args := build.EtcdArguments(t.TempDir(), address, freeAddress(t))
	start(t, server, append(args, "--enable-grpc-gateway=false")...) // that dials etcd itself
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
