package main

import (
	"encoding/json"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sanconn/san"
	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/verbs"
	"github.com/sanconn/san/regcache"
)

// patient is long enough for any single step on a busy machine. It is no goal.
const patient = "30s"

// devicesJSON runs "devices" and parses its output, whatever its exit code.
func devicesJSON(t *testing.T, args ...string) (int, *report) {
	t.Helper()
	code, stdout, stderr := sanperf(t, append([]string{"devices", "-json", "-timeout", patient, "-attempt", patient}, args...)...)
	r := new(report)
	if err := json.Unmarshal([]byte(stdout), r); err != nil {
		t.Fatalf("%v in\n%s%s", err, stdout, stderr)
	}
	return code, r
}

func TestDevicesSaysWhatWorksHere(t *testing.T) {
	out := mustRun(t, "devices")
	for _, want := range []string{"same host (shm): ", "other hosts (verbs): ", "libraries", "memlock limit", "environment: "} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	code, r := devicesJSON(t)
	if has := strings.Contains(out, forkSafety[ibv.ForkSafe()]); has != (r.Libraries == "") || r.ForkSafe != ibv.ForkSafe() {
		t.Errorf("libraries: %q; whether a fork is safe: %v, printed: %v", r.Libraries, r.ForkSafe, has)
	}
	if code != exitOK {
		t.Errorf("exit code %d", code)
	}
	if works := r.Providers["shm"].Works; works != (sanProvider() == "shm") {
		t.Errorf("shm works: %v: %s", works, r.Providers["shm"].Text)
	}
	if limit, limited := regcache.MemlockLimit(); (r.Memlock.Limit != nil) != limited || limited && *r.Memlock.Limit != limit {
		t.Errorf("memlock: %+v, want %d, applies: %v", r.Memlock, limit, limited)
	}
	for _, m := range r.Mechanisms {
		if m.Required && m.Error != "" {
			t.Errorf("%s: %s", m.Name, m.Error)
		}
	}
}

// Only counters that the device has are reported as losses.
func TestLossesOfAPort(t *testing.T) {
	port := t.TempDir()
	if err := os.Mkdir(filepath.Join(port, "hw_counters"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"out_of_sequence": "7\n", "local_ack_timeout_err": "0\n", "rx_write_requests": "9\n", "rcvd_rnr_err": "N/A\n"} {
		if err := os.WriteFile(filepath.Join(port, "hw_counters", name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	losses := lossesOf(port)
	if want := map[string]uint64{"out_of_sequence": 7, "local_ack_timeout_err": 0}; !maps.Equal(losses, want) {
		t.Errorf("%v, want %v", losses, want)
	}
	var out strings.Builder
	d := rdmaDevice{Ports: []rdmaPort{{Num: 1, Losses: losses}}}
	d.print(&out)
	if want := "lost or repeated: local_ack_timeout_err 0 out_of_sequence 7\n"; !strings.Contains(out.String(), want) {
		t.Errorf("%q is not in\n%s", want, &out)
	}
}

func TestDevicesWithoutRDMASaysSoAndWhatItMeans(t *testing.T) {
	testenv.NeedNoDevice(t)
	_, r := devicesJSON(t)
	verbs := r.Providers["verbs"]
	if verbs.Works || !strings.Contains(verbs.Text, "device") || !strings.Contains(verbs.Text, "go by TCP") {
		t.Errorf("%+v", verbs)
	}
	if (r.Libraries == "") != (ibv.Available() == nil) {
		t.Errorf("libraries: %q, want %v", r.Libraries, ibv.Available())
	}
}

func TestDevicesExplainsWhatADialGets(t *testing.T) {
	address := serverProcess(t).ready[0].address
	code, r := devicesJSON(t, address)
	d := r.Destination
	if code != exitOK || d == nil || d.Gets != sanProvider() {
		t.Fatalf("exit code %d, %+v; want a connection by %s", code, d, sanProvider())
	}
	chosen := 0
	for _, provider := range []string{"shm", "verbs", "tcp"} {
		o := d.of(provider)
		if o.Chosen {
			chosen++
		}
		if (o.Local == "") != (o.Error != "") || o.Address != address {
			t.Errorf("%+v", o)
		}
	}
	if chosen != 1 {
		t.Errorf("%d of the ways are chosen", chosen)
	}
	// Afterwards the server still serves others.
	mustRun(t, "client", "-latency", "-time", "20ms", address)
}

func TestDevicesFailsWhereADialDoes(t *testing.T) {
	code, stdout, stderr := sanperf(t, "devices", testenv.UnusedAddress(t))
	if code != exitFailed || !strings.Contains(stderr, "gets no connection") || !strings.Contains(stdout, "refused") {
		t.Errorf("exit code %d:\n%s%s", code, stdout, stderr)
	}
}

func TestRDMAIsJudgedByWhatIsMissingFirst(t *testing.T) {
	device := func(change func(*rdmaDevice)) []rdmaDevice {
		d := rdmaDevice{
			Name: "rxe0", Listed: true,
			Ports:   []rdmaPort{{Num: 1, State: "active"}},
			Netdevs: []netdev{{Name: "eth0", Up: true, Addresses: []string{"10.0.0.1/24"}}},
		}
		change(&d)
		return []rdmaDevice{d}
	}
	asIs := func(*rdmaDevice) {}
	bare := func(d *rdmaDevice) { d.Netdevs, d.Ports[0].LinkLayer = nil, ibv.LinkInfiniBand.String() }
	without := map[string]string{"SAN_RDMACM": " OFF"}
	limit := func(bytes int64) memlock { return memlock{&bytes, "raise it"} }
	for _, c := range []struct {
		name   string
		report report
		said   outcome // the provider's outcome of a dial on loopback
		works  bool
		want   string
	}{
		{name: "all is there", report: report{Devices: device(asIs)}, works: true, want: "connections to hosts"},
		{name: "nothing is there", report: report{Libraries: "not found"}, want: "neither a device nor the libraries"},
		{name: "no libraries", report: report{Libraries: "libibverbs.so.1 is missing", Devices: device(asIs)}, want: "libibverbs.so.1 is missing"},
		{name: "no device", want: "no RDMA device"},
		{name: "no driver in the libraries", report: report{Devices: device(func(d *rdmaDevice) { d.Listed, d.Error = false, "not listed" })}, want: "ibverbs-providers"},
		{name: "no permission", report: report{Devices: device(func(d *rdmaDevice) { d.Error = "permission denied" })}, want: "rxe0: permission denied"},
		{name: "no rdma_cm", report: report{Manager: "rdma_cm: no such file", Devices: device(asIs)}, want: "modprobe rdma_ucm; in a container it has to be passed in, or SAN_RDMACM=off at both ends"},
		{name: "rdma_cm is neither there nor used", report: report{Manager: "rdma_cm: no such file", Switches: without, Devices: device(asIs)}, works: true, want: "rdma_cm is not used"},
		{name: "iWARP without rdma_cm", report: report{Switches: without, Devices: device(func(d *rdmaDevice) { d.Transport = "iWARP" })}, want: "there is no iWARP"},
		{name: "port down without rdma_cm", report: report{Switches: without, Devices: device(func(d *rdmaDevice) { d.Ports[0].State = "down" })}, want: "no port of a device is active"},
		{name: "memlock limit too low", report: report{Memlock: limit(verbs.MinMemlock - 1), Devices: device(asIs)}, want: "64 KiB at least: raise it"},
		{name: "memlock limit just enough", report: report{Memlock: limit(verbs.MinMemlock), Devices: device(asIs)}, works: true, want: "connections to hosts"},
		{name: "port down", report: report{Devices: device(func(d *rdmaDevice) { d.Ports[0].State = "down" })}, want: "no port of a device is active"},
		{name: "no interface here", report: report{Devices: device(func(d *rdmaDevice) { d.Netdevs = nil })}, want: "no port of a device is active"},
		{name: "InfiniBand without IPoIB", report: report{Devices: device(bare)}, want: "SAN_RDMACM=off at both ends"},
		{name: "InfiniBand without IPoIB, port down", report: report{Devices: device(func(d *rdmaDevice) { bare(d); d.Ports[0].State = "down" })}, want: "no port of a device is active"},
		{name: "InfiniBand without IPoIB and rdma_cm", report: report{Switches: without, Devices: device(bare)}, works: true, want: "on the same InfiniBand"},
		{name: "no address", report: report{Devices: device(func(d *rdmaDevice) { d.Netdevs[0].Addresses = nil })}, want: "no port of a device is active"},
		{name: "switched off", report: report{Devices: device(asIs)}, said: outcome{Error: "disabled", Reason: "disabled"}, want: "disabled"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.said.Provider = rdma
			got := c.report.judgeRDMA(&destination{Outcomes: []outcome{c.said}})
			if got.Works != c.works || !strings.Contains(got.Text, c.want) {
				t.Errorf("%+v, want %v and %q", got, c.works, c.want)
			}
			if !got.Works && !strings.Contains(got.Text, "go by TCP") {
				t.Errorf("%q does not say what it means", got.Text)
			}
			var printed strings.Builder
			c.report.print(&printed)
			if says := strings.Contains(printed.String(), "rdma_cm is not used"); says != (c.report.Switches != nil) {
				t.Errorf("it says that rdma_cm is not used: %v in\n%s", says, printed.String())
			}
		})
	}
}

func TestADeviceIsPrintedWithWhatMatters(t *testing.T) {
	d := rdmaDevice{
		Name: "rxe0", Listed: true, Transport: "InfiniBand/RoCE", Files: []string{"/dev/infiniband/uverbs0"},
		Caps: &rdmaCaps{QueuePairs: 100, Requests: 16, Elements: 4, ReadElements: 1, Completions: 64, Vectors: 2,
			ReadsOut: 8, ReadsIn: 9, Regions: 50, RegionBytes: 1 << 30, Windows: 7, WindowTypes: []string{"1", "2B"}},
		Ports: []rdmaPort{{Num: 1, State: "active", LinkLayer: "Ethernet", MTU: 4096,
			GIDs: []gid{{Index: 1, GID: "::ffff:10.0.0.1", Addr: "10.0.0.1", Type: "RoCE v2", Netdev: "eth0"}}}},
		Netdevs: []netdev{{Name: "eth0", Up: true, MTU: 9000, Addresses: []string{"10.0.0.1/24"}}},
	}
	const want = `
  rxe0  InfiniBand/RoCE  /dev/infiniband/uverbs0
    interface eth0  up  MTU 9000  10.0.0.1/24
    port 1  active  Ethernet  MTU 4096
      GID 1   RoCE v2   10.0.0.1   eth0
    queue pairs 100 of 16 requests, 4 elements (1 of a read); completions 64 on 2 vectors
    RDMA reads at a time 8 out, 9 in; memory regions 50 of up to 1 GiB
    memory windows 7 of type 1, 2B
`
	var got strings.Builder
	d.print(&got)
	if got.String() != want {
		t.Errorf("got %s\nwant %s", got.String(), want)
	}
	var missing strings.Builder
	(&rdmaDevice{Name: "mlx5_0", Error: "libibverbs does not list it"}).print(&missing)
	for _, part := range []string{"cannot be used: libibverbs", "no destination is served"} {
		if !strings.Contains(missing.String(), part) {
			t.Errorf("%q is not in %s", part, missing.String())
		}
	}
}

// In a guest's lane "devices" has to report the lane's devices as they are.
func TestDevicesListsTheDevicesOfTheLane(t *testing.T) {
	lane := testenv.NeedDevice(t)
	listen := map[string]string{"rxe": "10.8.0.2", "siw": "10.8.1.2"}[lane]
	l, err := san.Listen("tcp", net.JoinHostPort(listen, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go hold(l)
	code, r := devicesJSON(t, l.Addr().String())
	if code != exitOK || !r.Providers[rdma].Works {
		t.Errorf("exit code %d, %+v", code, r.Providers[rdma])
	}
	if o := r.Destination.of(rdma); o.Error != "" { // both ends are on one host, where shared memory is preferred
		t.Errorf("no connection moves there: %+v", r.Destination)
	}
	seen := 0
	for _, d := range r.Devices {
		if !strings.HasPrefix(d.Name, lane) {
			continue
		}
		seen++
		if !d.usable() || d.Caps == nil || d.Caps.QueuePairs == 0 || len(d.Ports) == 0 || len(d.Ports[0].GIDs) == 0 {
			t.Errorf("%+v", d)
		}
	}
	if seen != 2 {
		t.Errorf("%d devices of %s", seen, lane)
	}
}
