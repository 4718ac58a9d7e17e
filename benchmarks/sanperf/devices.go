package main

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/provider/verbs"
	"github.com/sanconn/san/regcache"
)

const (
	// destinationTime is enough for TCP's first retransmissions.
	destinationTime = 5 * time.Second
	// selfTime is for connections of a process to itself. It is long, because the question
	// is whether they work, not whether this host is busy.
	selfTime = 10 * time.Second
)

// runDevices is the command "devices", which examines this host. It uses more than the public API: the
// RDMA libraries and the kernel.
func runDevices(ctx context.Context, std stdio, args []string) error {
	fs := newFlagSet(std, "devices")
	asJSON := fs.Bool("json", false, "print one JSON document")
	var timeout, attempt span = span(destinationTime), 0
	fs.Var(&timeout, "timeout", "`time` that connecting to the address may take")
	fs.Var(&attempt, "attempt", "`time` that one attempt to move to a SAN may take (default: what it has in a program)")
	rest, err := parseArgs(fs, args, 1)
	if err != nil {
		return err
	}
	var to target
	if len(rest) == 1 {
		if to, err = parseTarget(rest[0]); err == nil && to.transport != "san" {
			err = errors.New("only a san: address leaves a choice to explain")
		}
		if err != nil {
			return usagef("devices: %w", err)
		}
	}

	r := examine(ctx)
	if len(rest) == 1 {
		r.Destination = explain(ctx, to.address, time.Duration(timeout), time.Duration(attempt))
	}
	if *asJSON {
		err = printJSON(std.out, r)
	} else {
		r.print(std.out)
	}
	if err == nil && r.Destination != nil && r.Destination.Gets == "" {
		err = errors.New("a dial to " + to.address + " gets no connection")
	}
	return err
}

// A report is the result of "devices". Each Error is empty if all is well.
type report struct {
	Providers   map[string]finding `json:"providers"` // "shm", "verbs": whether they work on this host
	Mechanisms  []mechanism        `json:"shm_mechanisms"`
	Libraries   string             `json:"rdma_libraries_error,omitempty"`
	Manager     string             `json:"rdma_cm_error,omitempty"` // set also if rdma_cm is not used
	ForkSafe    bool               `json:"fork_safe"`
	Devices     []rdmaDevice       `json:"rdma_devices"`
	Memlock     memlock            `json:"memlock"`
	Switches    map[string]string  `json:"environment"` // environment variables that are set
	Destination *destination       `json:"destination,omitempty"`
}

// A finding tells whether something works, and what that means or what to do about it.
type finding struct {
	Works bool   `json:"works"`
	Text  string `json:"text"`
}

type mechanism struct {
	Name     string `json:"name"`
	Required bool   `json:"required"`
	Use      string `json:"use"`
	Error    string `json:"error,omitempty"`
}

type memlock struct {
	Limit *int64 `json:"limit_bytes"` // nil: none applies to this process
	Cache string `json:"registration_cache"`
}

// A destination is the result of dials to an address, with connections that are used enough to move.
type destination struct {
	Address  string    `json:"address"`
	Gets     string    `json:"gets,omitempty"` // what would carry it
	Error    string    `json:"error,omitempty"`
	Outcomes []outcome `json:"outcomes,omitempty"`
}

type outcome struct {
	Address  string  `json:"address"`
	Provider string  `json:"provider"`
	Chosen   bool    `json:"chosen"`
	Local    string  `json:"local,omitempty"`
	Reason   string  `json:"reason,omitempty"` // one of san's reasons
	Error    string  `json:"error,omitempty"`
	Millis   float64 `json:"ms"`
}

// switches are the variables that operators may set.
var switches = []string{"SAN_PROVIDERS", "SAN_DISABLE", "SAN_SUBNETS", "SAN_IWARP_OFFSET", "SAN_SHARED_DOMAIN", "SAN_RDMACM",
	"SAN_TRAFFIC_CLASS", "SAN_SERVICE_LEVEL", "SAN_ACK_TIMEOUT", "SAN_ARENA", "SAN_MOVE", "SAN_SHM_DIR", "SAN_TRACE"}

// examine examines this host, and changes nothing.
func examine(ctx context.Context) *report {
	r := &report{
		Libraries: text(ibv.Available()),
		ForkSafe:  ibv.ForkSafe(),
		Devices:   rdmaDevices(),
		Memlock:   memlock{Cache: regcache.DefaultBudget().String()},
		Switches:  make(map[string]string),
	}
	if limit, limited := regcache.MemlockLimit(); limited {
		r.Memlock.Limit = &limit
	}
	r.Manager = text(rdmaManager())
	for _, name := range switches {
		if v := os.Getenv(name); v != "" {
			r.Switches[name] = v
		}
	}
	for _, m := range shm.Mechanisms() {
		r.Mechanisms = append(r.Mechanisms, mechanism{m.Name, m.Required, m.Use, text(m.Err)})
	}
	loopback := dialSelf(ctx)
	r.Providers = map[string]finding{
		sharedMemory: judgeSharedMemory(loopback),
		rdma:         r.judgeRDMA(loopback),
	}
	return r
}

// The names of the providers in package san.
const (
	sharedMemory = shm.Name
	rdma         = verbs.Name
)

// dialSelf makes connections of this process to itself.
func dialSelf(ctx context.Context) *destination {
	l, err := san.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return &destination{Error: err.Error()}
	}
	defer l.Close()
	go hold(l)
	return explain(ctx, l.Addr().String(), selfTime, selfTime)
}

// of returns a provider's outcome or, if it has none, the error that all dials get.
func (d *destination) of(provider string) outcome {
	for _, o := range d.Outcomes {
		if o.Provider == provider {
			return o
		}
	}
	return outcome{Provider: provider, Error: d.Error}
}

// hold accepts connections, because only accepted ones move, and closes each when its dialer has closed.
func hold(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			io.Copy(io.Discard, c)
			c.Close()
		}()
	}
}

func judgeSharedMemory(loopback *destination) finding {
	if found, yes := loopback.fails(); yes {
		return found
	}
	if problem := loopback.of(sharedMemory).Error; problem != "" {
		return finding{false, problem + "; connections between processes of this host go by TCP"}
	}
	return finding{true, "connections between processes of this host"}
}

// fails reports whether every dial fails before any provider is tried: an environment variable has an
// unknown value.
func (d *destination) fails() (finding, bool) {
	return finding{false, d.Error + "; every Listen and Dial fails"}, len(d.Outcomes) == 0 && d.Error != ""
}

// explain connects to an address by TCP, and then once for each provider, to move that connection.
// timeout bounds each dial, attempt each move. Zero means the bound that a program has by default.
func explain(ctx context.Context, address string, timeout, attempt time.Duration) *destination {
	found := &destination{Address: address}
	var d san.Dialer
	d.NetDialer.Timeout = timeout
	d.Options.AttemptTimeout = attempt
	outcomes, err := d.Explain(ctx, "tcp", address)
	found.Error = text(err)
	for _, o := range outcomes {
		line := outcome{
			Address:  o.Address.String(),
			Provider: o.Provider,
			Chosen:   o.Chosen,
			Error:    text(o.Err),
			Millis:   float64(o.Took) / float64(time.Millisecond),
		}
		if why := (*san.Unavailable)(nil); errors.As(o.Err, &why) {
			line.Reason = why.Reason.String()
		}
		if o.Local != nil {
			line.Local = o.Local.String()
		}
		if o.Chosen {
			found.Gets = o.Provider
		}
		found.Outcomes = append(found.Outcomes, line)
	}
	return found
}

// judgeRDMA returns whether RDMA can be used, or what is missing.
func (r *report) judgeRDMA(loopback *destination) finding {
	if found, yes := loopback.fails(); yes {
		return found
	}
	var usable, left, bare, listed, opened int // left: usable by the way in which connections are made
	first := ""
	for _, d := range r.Devices {
		if d.Listed {
			listed++
		}
		if d.Error == "" {
			opened++
		} else if first == "" {
			first = d.Name + ": " + d.Error
		}
		if d.bare() {
			bare++
		}
		if d.usable() {
			usable++
			if !r.withoutCM() || d.Transport != ibv.TransportIWARP.String() {
				left++
			}
		}
	}
	const tcp = "; connections to other hosts go by TCP"
	said := loopback.of(rdma)
	switch {
	case said.Error != "" && said.Reason != san.ReasonNotServed.String() && said.Reason != san.ReasonNoProvider.String():
		return finding{false, said.Error + tcp} // most likely RDMA is switched off
	case r.Libraries != "" && len(r.Devices) == 0:
		return finding{false, "neither a device nor the libraries" + tcp}
	case r.Libraries != "":
		return finding{false, "there are devices, but " + r.Libraries +
			" (libraries: libibverbs1, librdmacm1 and ibverbs-providers on Debian; libibverbs and librdmacm on Fedora; cgo)" + tcp}
	case len(r.Devices) == 0:
		return finding{false, "this host has no RDMA device, or its driver is not loaded" + tcp}
	case listed == 0:
		return finding{false, "the libraries do not know the devices of this host: the package of their drivers is missing (ibverbs-providers), " +
			"or the files in /dev/infiniband are not there, as in a container" + tcp}
	case opened == 0:
		return finding{false, "no device can be opened, " + first + tcp}
	case r.Manager != "" && !r.withoutCM():
		return finding{false, r.Manager + " (modprobe rdma_ucm; in a container it has to be passed in, or SAN_RDMACM=off at both ends)" + tcp}
	case r.Memlock.Limit != nil && *r.Memlock.Limit < verbs.MinMemlock:
		return finding{false, "the memlock limit has to be " + byteSize(verbs.MinMemlock).String() + " at least: " + r.Memlock.Cache + tcp}
	case bare > 0 && left == 0 && r.withoutCM():
		return finding{true, noManager + "; connections to hosts on the same InfiniBand that do without it too"}
	case usable == 0 && bare > 0:
		return finding{false, "InfiniBand without IPoIB is used with SAN_RDMACM=off at both ends" + tcp}
	case usable == 0:
		return finding{false, "no port of a device is active and has an interface with an address here" + tcp}
	case left == 0:
		return finding{false, noManager + ", and without it there is no iWARP" + tcp}
	case r.withoutCM():
		return finding{true, noManager + "; connections to hosts behind the interfaces below that do without it too"}
	}
	return finding{true, "connections to hosts behind the interfaces below"}
}

const noManager = "rdma_cm is not used (SAN_RDMACM=off)"

// withoutCM reports whether connections are made without rdma_cm.
func (r *report) withoutCM() bool {
	return strings.EqualFold(strings.TrimSpace(r.Switches["SAN_RDMACM"]), "off")
}

// text returns an error's text for the report, "" for nil.
func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
