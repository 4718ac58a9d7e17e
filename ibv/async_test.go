//go:build linux && cgo

package ibv

import (
	"bytes"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// A port reports when its link goes down and comes back.
func TestAPortReportsItsLink(t *testing.T) {
	s := onSite(t)
	ctx := must(Open(spareDevice(t, s)))(t)
	atEnd(t, "device", ctx)
	async := must(ctx.AsyncChannel())(t)
	atEnd(t, "async channel", async)
	sh(t, "ip link set spare1 down")
	asyncEvent(t, async, EventPortErr)
	if p := must(ctx.Port(1))(t); p.State == PortActive {
		t.Errorf("the port is %v", p.State)
	}
	sh(t, "ip link set spare1 up")
	asyncEvent(t, async, EventPortActive)
}

// spareDevice makes a device at 10.8.7.1 that no other test uses.
func spareDevice(t *testing.T, s site) string {
	t.Helper()
	kind := strings.TrimRight(s.devices[0], "0123456789")
	sh(t, "ip link add spare1 type veth peer name spare2 && ip addr add 10.8.7.1/24 dev spare1 && ip link set spare1 up && ip link set spare2 up")
	t.Cleanup(func() { sh(t, "ip link del spare1") }) // the device goes with it
	sh(t, "rdma link add %s9 type %s netdev spare1", kind, kind)
	return kind + "9"
}

// A device is removed while there are a connection manager id and an open context on it. The removal
// waits for the process that uses the device, so that is a child.
func TestARemovedDeviceIsReported(t *testing.T) {
	const env = "SAN_TEST_REMOVAL"
	if os.Getenv(env) != "" {
		watchRemoval(t)
		return
	}
	s := onSite(t)
	device := spareDevice(t, s)
	child := exec.Command(os.Args[0], "-test.run=^TestARemovedDeviceIsReported$", "-test.v", "-test.timeout=120s")
	child.Env = append(os.Environ(), env+"="+device)
	child.Stderr = os.Stderr
	out := must(child.StdoutPipe())(t)
	check(t, child.Start())
	var text bytes.Buffer
	buf := make([]byte, 4096)
	for !strings.Contains(text.String(), "ready\n") {
		n, err := out.Read(buf)
		text.Write(buf[:n])
		if err != nil {
			t.Fatalf("the child: %v\n%s", err, &text)
		}
	}
	remove := exec.Command("rdma", "link", "delete", device)
	check(t, remove.Start())
	io.Copy(&text, out)
	if err := child.Wait(); err != nil {
		t.Errorf("the child: %v\n%s", err, &text)
	}
	check(t, remove.Wait())
}

func watchRemoval(t *testing.T) {
	name := os.Getenv("SAN_TEST_REMOVAL")
	ctx := must(Open(name))(t)
	ch := must(NewEventChannel())(t)
	id := must(ch.NewID())(t)
	check(t, id.Bind(netip.MustParseAddrPort("10.8.7.1:0")))
	if id.Context() == nil || id.Context().Name != name {
		t.Fatalf("bound to %v", id.Context())
	}
	os.Stdout.WriteString("ready\n")
	if ev := event(t, ch, DeviceRemoval); ev.ID != id {
		t.Errorf("the removal is of %p, want %p", ev.ID, id)
	}
	check(t, id.Close())
	check(t, ch.Close())
	check(t, ctx.Close())
}
