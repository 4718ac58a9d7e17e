//go:build linux && cgo

package verbs

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// hwsimRuns are tests of the lanes with devices that also run on the simulated device. The others
// concern the guest's network, or the behaviour of rxe and siw.
var hwsimRuns = []hwsimRun{
	{"endpoints", "seed=1,jitter_us=8", "^TestEndpoint$/^(default|windows,_shared_domain)$", "TestEndpoint/.*/NoAllocation"},
	{"calm endpoints", "calm", "^TestEndpoint$/^(without_rdma_cm|without_windows|shared_domain)$", ""},
	{"timed endpoints", "latency_ns=2000", "^TestEndpoint$/^default$/^(Messages|BackPressure|Close|Abort|Read|Write|WriteThenMessage|ReadRevoked|EndStopsReads|EndStopsWrites|AllAtOnce)$", ""},
	{"end ahead of completions", "seed=2,kernel_us=0,jitter_us=3000", "^TestEndpoint$/^(default|shared_domain)$/^(Close|CloseDoesNotWait|Abort)$", ""},
	{"end of TCP ahead of completions", "seed=16,jitter_us=3000", "^TestEndpoint$/^without_rdma_cm$/^(Close|Abort)$", ""},
	{"connections", "seed=3", "^(TestPing|TestEveryDialIsAccepted|TestManyAtATime|TestTransfers|TestNothingIsLeft|" +
		"TestExposedIsTakenBackAtOnce|TestRefusals|TestAdmit|TestRequestsThatAreRefused|TestReadsThatThePeerServes|TestExchangeWithoutMTU|TestHalfOpenRequests|TestRequestOfAnEndingChannel|TestManyConnectionsLeaveNothing|TestDialsGivenUpLeaveNothing|TestShareUsedUp)$", ""},
	{"one listener after another", "seed=12", "^(TestListenerTakesOver|TestListenerOutlivesItsDevice|TestListenerThatWaitsIsClosed|TestListenerThatWaitsDoesNotLook|TestListenerWithoutDescriptors|TestListenerLooksWithoutDescriptors)$", ""},
	{"confirmations lost", "seed=5,lost_rtu=100,cm_timeout_ms=10000", "^TestConfirmationLost$", ""},
	{"a busy subnet manager", "seed=6,profile=mlx5-ib,sm_loss=70", "^TestManyAtATime$", ""},
	{"InfiniBand without rdma_cm", "seed=9,profile=mlx5-ib,grh", "^TestInfiniBandWithoutCM$", ""},
	{"InfiniBand without IPoIB", "seed=21,profile=mlx5-ib", "^TestInfiniBandWithoutIPoIB$", ""},
	{"a device by its address", "seed=10", "^(TestDeviceOfAnAddress|TestFailedDeviceIsOpenedAnew)$", ""},
	{"connections at rest", "seed=13", "^(TestConnectionAtRestIsSmall|TestManyAtRest)$", ""},
	{"requests that come again", "seed=13,cm_timeout_ms=1,cm_retries=10000,kernel_us=800", "^TestManyAtRest$", ""},
	{"locked queues of mlx5", "seed=11", "^TestLockedQueuesOfMLX5$", ""},
	{"relaxed ordering", "seed=19", "^TestRelaxedOrdering$", ""},
	{"sizes of the device", "seed=17,max_mr_size=1048576,max_msg_sz=65536", "^TestSizesOfTheDevice$", ""},
	{"small registrations", "seed=22,max_mr_size=16384", "^TestSmallRegistrations$", ""},
	{"smallest registrations", "seed=23,max_mr_size=10240", "^TestSmallRegistrations$", ""},
	{"memory that is not registered", "seed=18", "^TestUnregisteredMemoryIsCounted$", ""},
	{"windows without an end", "seed=25,mw_past_end", "^TestWindowsAreNotEnforced$", ""},
	{"windows of every queue pair", "seed=26,mw_any_qp", "^TestWindowsAreNotEnforced$", ""},
	{"windows that stay", "seed=27,mw_late", "^TestWindowsAreNotEnforced$", ""},
	{"windows that stay with the peer", "seed=28,mw_returned", "^TestWindowsAreNotEnforced$", ""},
	{"irdma's iWARP", "seed=7,profile=irdma-iwarp", "^TestIWARPIsWrittenTo$", ""},
	{"Chelsio's iWARP", "seed=8,profile=cxgb4", "^TestIWARPIsWrittenTo$", ""},
	{"the end on iWARP", "seed=24,profile=irdma-iwarp", "^(TestExposedIsTakenBackAtOnce|TestNothingIsLeft|TestPeerEndsAtOnce)$", ""},
	{"no reliable connections", "profile=efa", "^TestNoReliableConnections$", ""},
	{"no reliable connections of mana", "profile=mana-raw", "^TestNoReliableConnections$", ""},
	{"messages and memory", "seed=4", "^(TestLastOfWhatArrived|TestWindowBesideWhatWasDropped|TestWindowsInFullUse|" +
		"TestPeerOverspends|TestMessageTooLong|TestProbeEndsWithTheDevice|" +
		"TestWindowIsFreeBehindItsRevoke|TestWindowsAtATime|TestHostilePeer|TestHostilePeerAtOwnMemory|TestNothingWritesToWhatIsSent|TestPeerInvalidates|TestPeerReturns|TestPeerSendsImmediateData)$", ""},
}

// hwsimUnlimited are tests that RLIMIT_MEMLOCK would prevent: of ready endpoints, measured costs, and an
// arena with room for a large Write.
var hwsimUnlimited = []hwsimRun{
	{"ready endpoints", "seed=29", "^(TestReady|TestReadyForOthers|TestReadyOfAFailedDevice|TestReadyOfOtherSizes|TestNoneReady)$", ""},
	{"ready endpoints of a NIC", "latency_ns=2000", "^(TestReady|TestEndWhileRefilling)$", ""},
	{"ready endpoints up to the limit", "seed=32,max_qp=5", "^(TestReadyUpToTheLimit|TestReadyGivesWay)$", ""},
	{"ready endpoints without trust", "seed=34,profile=bnxt_re", "^TestReadyWithoutTrust$", ""},
	{"ready endpoints behind the probe", "seed=31", "^TestReadyBehindTheProbe$", ""},
	{"ready endpoints on iWARP", "seed=30,profile=irdma-iwarp", "^TestReady$/^(domains|a_shared)", ""},
	{"a kernel that shares pages at forks", "seed=20,fork_needed", "^TestHeapWhereForksShareIt$", ""},
	{"costly registrations", "latency_ns=2000,reg_ns=3000000", "^TestWhatRegisteringCosts$", ""},
	{"very costly registrations", "latency_ns=2000,reg_ns=20000000", "^TestWhatRegisteringCosts$", ""},
	{"first connection", "seed=13", "^TestFirstLargeWrites$", ""},
	{"fast copies", "seed=33", "^TestWhereCopiesAreFast$", ""},
	{"windows come on", "seed=14", "^(TestWindowsComeOn|TestListenerProbes|TestTrustedWindowsShareRegistrations|TestLargeWritesWithoutWindows)$", ""},
	{"no windows, costly registrations", "latency_ns=2000,reg_ns=3000000", "^TestLargeWritesWithoutWindows$", ""},
	{"no windows, whatever it promises", "seed=15,profile=bnxt_re", "^TestLargeWritesWithoutWindows$", ""},
}

type hwsimRun struct{ name, settings, tests, skip string }

func (r hwsimRun) run(t *testing.T) { onHwsim(t, r.settings, r.tests, r.skip) }

// TestOnHwsim runs both in processes of their own, which find the simulated device's libraries in place
// of the system's.
func TestOnHwsim(t *testing.T) {
	if testenv.Device() != "" {
		return // this is such a process, or the lane of real drivers
	}
	for _, tt := range hwsimRuns {
		t.Run(tt.name, tt.run)
	}
	for _, tt := range hwsimUnlimited {
		t.Run(tt.name, func(t *testing.T) {
			if memlock() != 0 {
				testenv.Missing(t, "locked memory without a limit (root, or ulimit -l unlimited)")
			}
			tt.run(t)
		})
	}
}

// TestMemlockOnHwsim runs TestMemlockLimits on the simulated device: as root, but without the capability
// to exceed the limit.
func TestMemlockOnHwsim(t *testing.T) {
	if testenv.Device() != "" {
		return // this is such a process, or the lane of real drivers
	}
	testenv.NeedRoot(t)
	if _, err := exec.LookPath("setpriv"); err != nil {
		testenv.Missing(t, "setpriv")
	}
	for name, limit := range map[string]int{"64 KiB": MinMemlock, "8 MiB": 8 << 20} {
		t.Run(name, func(t *testing.T) {
			child := exec.Command("setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock", os.Args[0])
			runOnHwsim(t, child, "seed=35", "^TestWorkUnderMemlock$", "", fmt.Sprintf("%s=%d", memlockVariable, limit))
		})
	}
}

// onHwsim runs tests in a process on a simulated device.
func onHwsim(t *testing.T, settings, tests, skip string) {
	t.Helper()
	runOnHwsim(t, exec.Command(os.Args[0]), settings, tests, skip)
}

// runOnHwsim does what onHwsim does, with a command that runs this program.
func runOnHwsim(t *testing.T, child *exec.Cmd, settings, tests, skip string, env ...string) {
	t.Helper()
	f := hwsim.New(t, settings)
	limit := 3*time.Minute + time.Duration(*resting)*50*time.Millisecond // also on a busy machine
	child.Args = append(child.Args, "-test.run="+tests, "-test.skip="+skip, fmt.Sprintf("-test.timeout=%v", limit),
		fmt.Sprintf("-resting=%d", *resting), "-test.v")
	child.Env = append(f.Env(), env...)
	out, err := child.CombinedOutput()
	if err != nil {
		t.Fatalf("%s, tests %s: %v\n%s", settings, tests, err, out)
	}
	if !bytes.Contains(out, []byte("--- PASS")) {
		t.Errorf("%s: no test ran\n%s", tests, out)
	}
	f.Check(t)
}

// If a dialer's confirmation is lost, its first message takes its place, long before rdma_cm repeats
// anything.
func TestConfirmationLost(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets the simulated device to lose it
	}
	l := listen(t, Config{})
	a, err := Dial(patient(t), netip.Addr{}, l.addrs()[0], Config{Disable: switchedOff()})
	if err != nil {
		t.Fatal(err)
	}
	defer a.discard()
	begin(a)
	a.CommitControl(len(a.ReserveControl(16)))
	b, err := accept(l)
	if err != nil {
		t.Fatal(err)
	}
	defer b.discard()
	begin(b)
	if ev := event(t, b); ev.Kind != session.Message {
		t.Errorf("event of kind %d", ev.Kind)
	}
}

// On iWARP other than siw nothing is read by RDMA, because the sink of a read would be open to the peer:
// large Writes go to the inbox, too.
func TestIWARPIsWrittenTo(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets the simulated device to iWARP
	}
	l := listen(t, Config{})
	x, y, err := connect(l, Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []*Endpoint{x, y} {
		if !e.dev.iwarp() || e.limits.CanRead || !e.limits.CanWrite {
			t.Errorf("%v: reads: %v, writes: %v", e.dev.ctx.Transport, e.limits.CanRead, e.limits.CanWrite)
		}
	}
	a, b := negotiate(t, x, y, session.Config{})
	sent, got := make([]byte, 4*largeWrite), make([]byte, 4*largeWrite)
	rand.NewChaCha8([32]byte{1}).Read(sent)
	carry(t, a, b, sent, got)
	if st := a.Stats(); st.OffersSent > 0 || st.OfferedBytesSent < 2*largeWrite {
		t.Errorf("%d offers, %d bytes by RDMA", st.OffersSent, st.OfferedBytesSent)
	}
}

// On iWARP a dial may find that the peer has ended the connection before its first message has come.
func TestPeerEndsAtOnce(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets the simulated device to iWARP
	}
	nothingLeft(t)
	l := listen(t, Config{})
	go discardAll(l)
	testenv.Eventually(t, patience, func() error {
		e, err := Dial(patient(t), netip.Addr{}, l.addrs()[0], Config{})
		if err == nil {
			e.discard()
			return errors.New("the peer is too slow")
		}
		if reasonOf(err) != session.ReasonUnreachable {
			t.Errorf("%v", err)
		}
		return nil
	})
}

// If registering costs as much as several copies, as many Writes of the same memory go through the send
// buffer first.
func TestWhatRegisteringCosts(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets registering to take time
	}
	l := listen(t, Config{})
	x, y, err := connect(l, Config{})
	if err != nil {
		t.Fatal(err)
	}
	awaitProbed(t, x.dev)
	copies := x.dev.costs.copiesBefore()
	if copies < 2 || copies > 8 { // docs/MEMORY.md: at the latest the ninth Write is not copied
		t.Errorf("a registration of 3 ms or more costs %d copies of %d bytes", copies, measureBytes)
	}
	a, b := negotiate(t, x, y, session.Config{})
	sent, got := make([]byte, 4*largeWrite), make([]byte, 4*largeWrite)
	for i := range copies + 1 {
		if n := a.Stats().OffersSent; n != 0 {
			t.Errorf("%d offers by %d Writes; a registration costs %d copies", n, i, copies)
		}
		carry(t, a, b, sent, got)
	}
	if a.Stats().OffersSent == 0 {
		t.Errorf("no offer by %d Writes; a registration costs %d copies", copies+1, copies)
	}

	// A Read into new memory copies, too.
	had, offers, read := y.dom.cache.Stats(), a.Stats().OffersSent, b.Stats().DirectBytesReceived
	for range 5 {
		carry(t, a, b, sent, make([]byte, len(sent)))
	}
	if got := cacheStatsSince(y, had).Once; got != 0 || b.Stats().DirectBytesReceived != read {
		t.Errorf("%d registrations for one use; %d bytes read into new memory", got, b.Stats().DirectBytesReceived-read)
	}
	if a.Stats().OffersSent < offers+5 {
		t.Errorf("%d offers by 5 Writes", a.Stats().OffersSent-offers)
	}
	testenv.Eventually(t, patience, func() error { // bytes that were fetched before the Read are copied
		carry(t, a, b, sent, got)
		if b.Stats().DirectBytesReceived == read {
			return errors.New("no Read into memory that comes again")
		}
		return nil
	})
}

// A device without reliable connections, such as EFA, and mana's in earlier versions, serves nobody. A
// dial stays on TCP.
func TestNoReliableConnections(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets the simulated device so
	}
	l := listen(t, Config{})
	_, err := Dial(patient(t), netip.Addr{}, l.addrs()[0], Config{})
	if reasonOf(err) != session.ReasonNotServed || errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("%v", err)
	}
}

var (
	hwsimFirst = flag.Int("hwsim.first", 1, "first seed of TestHwsimSeeds")
	hwsimTime  = flag.Duration("hwsim.time", 0, "how long TestHwsimSeeds takes new seeds")
)

// The families with reliable connections, their other features, and what their fabrics lose.
var (
	hwsimProfiles = []struct {
		name          string
		windows, noCM bool
		transfers     string // a pattern for subtests of TestTransfers
	}{
		{"mlx5-roce", true, true, "read|write"},
		{"mlx5-ib", true, false, "read|write"},
		{"bnxt_re", false, true, "read|write"},
		{"irdma-roce", true, true, "read|write"},
		{"irdma-iwarp", false, false, "write"},
		{"cxgb4", false, false, "write"},
		{"mana", false, true, "read|write"},
	}
	hwsimFabrics = []string{"jitter_us=10", "jitter_us=60", "jitter_us=5,cm_loss=10,lost_rtu=20", "jitter_us=5,loss=300"}
	hwsimGroups  = []string{
		"Messages|Reserve|ReserveControl|ControlBetween|BackPressure|KeepAndDrop|BeforeStart",
		"Close|CloseDoesNotWait|Abort|AfterTheEnd|Retire|WakeAtTheEnd",
		"AllocReads|AllocWrites|ReadShort|WriteShort|WriteThenMessage|ReadQueue|WriteQueue",
		"Read|Write|ReadRefused|WriteRefused",
		"ReadRevoked|WriteRevoked|EndStopsReads|EndStopsWrites|AllAtOnce",
	}
)

// hwsimSeed returns the device's settings, and the tests, that a seed stands for.
func hwsimSeed(seed int) (settings, tests string) {
	p := hwsimProfiles[seed%len(hwsimProfiles)]
	configs := []string{"default", "smallest", "without_windows", "shared_domain"}
	if p.windows {
		configs = append(configs, "windows", "windows,_shared_domain")
	}
	if p.noCM {
		configs = append(configs, "without_rdma_cm")
	}
	r := rand.New(rand.NewPCG(uint64(seed), 0))
	settings = fmt.Sprintf("seed=%d,profile=%s,%s", seed, p.name, hwsimFabrics[r.IntN(len(hwsimFabrics))])
	if r.IntN(8) == 0 {
		return settings, "^TestTransfers$/^(" + p.transfers + ")$"
	}
	return settings, fmt.Sprintf("^TestEndpoint$/^%s$/^(%s)$", configs[r.IntN(len(configs))], hwsimGroups[r.IntN(len(hwsimGroups))])
}

// TestHwsimSeeds runs the contract of session.Endpoint on simulated devices of all families, a part of
// it with each seed, for as long as a flag says.
func TestHwsimSeeds(t *testing.T) {
	var next atomic.Int64
	next.Store(int64(*hwsimFirst))
	end := time.Now().Add(*hwsimTime)
	var wg sync.WaitGroup
	for range max(2, runtime.NumCPU()) {
		wg.Go(func() {
			for time.Now().Before(end) && !t.Failed() {
				seed := int(next.Add(1) - 1)
				settings, tests := hwsimSeed(seed)
				t.Run(fmt.Sprint(seed), func(t *testing.T) { onHwsim(t, settings, tests, "") })
			}
		})
	}
	wg.Wait()
	t.Logf("%d seeds", next.Load()-int64(*hwsimFirst))
}
