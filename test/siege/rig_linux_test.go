package siege

import (
	"encoding/json"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
)

// calmTime and siegeTime are how long the bystander counts before and during an attack.
func calmTime() time.Duration  { return time.Second }
func siegeTime() time.Duration { return 2 * time.Second }

// rig is a victim and its bystander, with what was measured before the attack.
type rig struct {
	t         *testing.T
	address   string
	victim    *process
	bystander *process
	calm      experience
	before    usage
	attackers []*process
	cost      time.Duration // processor time that one round of the bystander costs the victim
}

// lay starts a victim and a bystander in a new network namespace.
func lay(t *testing.T, v spec) *rig {
	t.Helper()
	testenv.NeedSiege(t)
	newNamespace(t)
	if v.role, v.user = "victim", victimUser; v.args == nil {
		v.args = victimArgs{}
	}
	r := &rig{t: t, victim: start(t, v)}
	r.victim.hear("listening", &r.address)
	r.bystander = start(t, spec{role: "bystander", user: bystanderUser, args: r.address})
	var provider string
	if r.bystander.hear("ready", &provider); provider != "shm" {
		t.Fatalf("the bystander is on %s", provider)
	}
	began := usageOf(t, r.victim.pid())
	r.calm = r.meet(calmTime())
	r.before = usageOf(t, r.victim.pid())
	r.cost = (r.before.cpu - began.cpu) / time.Duration(max(1, r.calm.Rounds))
	if r.calm.Failures > 0 || r.calm.Dials["shm"] == 0 || r.calm.Dials["tcp"] != 0 || r.calm.Dials["plain"] == 0 {
		t.Fatalf("before any attack: %+v", r.calm)
	}
	return r
}

// newNamespace puts the test's goroutine, and the processes that it starts, into a network namespace
// that has only a loopback interface.
func newNamespace(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// meet lets the bystander run for a time.
func (r *rig) meet(d time.Duration) (e experience) {
	r.t.Helper()
	r.bystander.tell(d.String())
	r.bystander.hear("met", &e)
	return e
}

// report returns the victim's own report.
func (r *rig) report() (v victimReport) {
	r.t.Helper()
	r.victim.tell("report")
	r.victim.hear("report", &v)
	return v
}

// attack starts an attacker, and returns when its attack has begun.
func (r *rig) attack(role string, args any) *process {
	r.t.Helper()
	b, err := json.Marshal(args)
	if err != nil {
		r.t.Fatal(err)
	}
	p := start(r.t, spec{role: role, user: attackerUser, args: attackArgs{r.address, string(b)}})
	var what string
	p.hear("stands", &what)
	// How processor time is shared with an attacker that burns it is up to the scheduler. With the
	// lowest priority, only what it makes the victim do remains.
	p.yield()
	r.t.Logf("attack: %s", what)
	r.attackers = append(r.attackers, p)
	return p
}

// bounds are how much more the victim may use than before, because of the attackers. 0 means no more
// than slack.
type bounds struct {
	connections int
	descriptors int
	threads     int
	memory      int64   // bytes of private memory
	shared      int64   // bytes of shared memory that it has touched
	space       int64   // bytes of address space
	cpu         float64 // processor time, in units of what the attackers themselves use
}

// slack is what may vary in any process: Go's runtime keeps threads, and memory for garbage.
var slack = bounds{connections: 4, descriptors: 32, threads: 12, memory: 24 << 20, shared: 64 << 20, space: 1 << 30, cpu: 0.25}

// siege lets the bystander run during the attack, and checks what it has met and what the victim uses.
// An attack that succeeds does so each time. So if a busy machine may be the cause of a failure, siege
// tries up to two more times.
func (r *rig) siege(most bounds) experience {
	r.t.Helper()
	open := r.report().Open
	met, peak, cpu, theirs := r.watch()
	for n := 0; n < 2 && (r.slow(met) || cpu > most.cpu*theirs+slack.cpu); n++ {
		m, p, c, t := r.watch()
		met.Dial, met.Echo = min(met.Dial, m.Dial), min(met.Echo, m.Echo)
		met.Failures, met.Failed = met.Failures+m.Failures, append(met.Failed, m.Failed...)
		peak = worst(peak, p)
		if c-most.cpu*t < cpu-most.cpu*theirs {
			cpu, theirs = c, t
		}
	}
	if n := r.report().Failed; n > 0 {
		r.t.Errorf("the victim lacked a descriptor %d times", n)
	}
	r.checkMet(met) // may end the attackers
	most.cpu *= theirs
	r.checkUsage(most, open, peak, cpu)
	return met
}

// watch lets the bystander run for a time, and a newcomer dial. It returns the most that the victim has
// used of each resource, how many processors it has used for the attackers, and how many these have used
// themselves.
func (r *rig) watch() (met experience, peak usage, cpu, theirs float64) {
	r.t.Helper()
	r.bystander.tell(siegeTime().String())
	first, before := usageOf(r.t, r.victim.pid()), r.attackersCPU()
	r.newcomer()
	peak = usageOf(r.t, r.victim.pid())
	for waiting := true; waiting; {
		select {
		case <-time.After(20 * time.Millisecond):
			peak = worst(peak, usageOf(r.t, r.victim.pid()))
		case line, ok := <-r.bystander.lines:
			waiting = false
			if !ok || json.Unmarshal([]byte(line[len("met "):]), &met) != nil {
				r.t.Fatalf("the bystander said %q", line)
			}
		}
	}
	last := usageOf(r.t, r.victim.pid())
	theirs = float64(r.attackersCPU()-before) / float64(last.at.Sub(first.at))
	return met, peak, last.processors(first, time.Duration(met.Rounds)*r.cost), theirs
}

// slow reports whether the bystander was served more slowly than before the attack.
func (r *rig) slow(met experience) bool {
	return met.Dial > max(floor, 3*r.calm.Dial) || met.Echo > max(floor, 3*r.calm.Echo)
}

// settle waits until the victim has processed what it was sent before the siege. That must end, but when
// it does is up to the victim.
func (r *rig) settle() {
	r.t.Helper()
	const look, idle, limit = 200 * time.Millisecond, 0.1, 10 * time.Second // idle is in processors
	was := usageOf(r.t, r.victim.pid())
	for end := was.at.Add(limit); ; {
		<-time.After(look)
		now := usageOf(r.t, r.victim.pid())
		if now.processors(was, 0) <= idle {
			return
		}
		if was = now; now.at.After(end) {
			r.t.Fatalf("the victim is busy with what it was sent %v ago", limit)
		}
	}
}

// attackersCPU returns the processor time that the attackers have used themselves.
func (r *rig) attackersCPU() (sum time.Duration) {
	for _, p := range r.attackers {
		sum += usageOf(r.t, p.pid()).cpu
	}
	return sum
}

// floor is the median up to which the bystander counts as served well, whatever it was before. On two
// processors the scheduler may let a thread that could run wait for one slice of others, which is 3 ms,
// and each dial and echo needs both the bystander's thread and the victim's.
const floor = 6 * time.Millisecond

// newcomer lets another process of the bystander's user dial for the first time, and returns the
// provider that serves it.
func (r *rig) newcomer() (provider string) {
	r.t.Helper()
	p := start(r.t, spec{role: "bystander", user: bystanderUser, args: r.address})
	p.hear("ready", &provider)
	r.t.Logf("a newcomer is served by %s", provider)
	p.kill()
	return provider
}

func (r *rig) checkMet(met experience) {
	r.t.Helper()
	dials := 0
	for _, n := range met.Dials {
		dials += n
	}
	r.t.Logf("bystander: %d dials %v, %d echoes; medians: dial %v (calm %v), echo %v (calm %v); fallbacks %v",
		dials, met.Dials, met.Echoes, met.Dial, r.calm.Dial, met.Echo, r.calm.Echo, met.Fallbacks)
	if met.Failures > 0 {
		r.t.Errorf("the bystander met %d failures: %q", met.Failures, met.Failed)
	}
	if met.Dials["shm"]+met.Dials["tcp"] == 0 || met.Dials["plain"] == 0 || met.Echoes == 0 {
		r.t.Errorf("the bystander was not served: %+v", met)
	}
	if r.slow(met) { // the machine may have become busy: measures again what is usual
		for _, p := range r.attackers {
			p.kill()
		}
		now := r.meet(calmTime())
		r.calm.Dial, r.calm.Echo = max(r.calm.Dial, now.Dial), max(r.calm.Echo, now.Echo)
	}
	if r.slow(met) {
		r.t.Errorf("slow: a dial takes %v instead of %v, an echo %v instead of %v", met.Dial, r.calm.Dial, met.Echo, r.calm.Echo)
	}
}

func (r *rig) checkUsage(most bounds, open int, peak usage, cpu float64) {
	r.t.Helper()
	r.t.Logf("victim: %v; before: %v; %.2f processors for the attackers (at most %.2f); %d connections", peak, r.before, cpu, most.cpu+slack.cpu, open)
	for _, x := range []struct {
		what     string
		is, most float64
	}{
		{"connections", float64(open), float64(most.connections + slack.connections)},
		{"descriptors", float64(peak.descriptors - r.before.descriptors), float64(most.descriptors + slack.descriptors)},
		{"threads", float64(peak.threads - r.before.threads), float64(most.threads + slack.threads)},
		{"bytes of its own", float64(peak.anonymous - r.before.anonymous), float64(most.memory + slack.memory)},
		{"bytes of shared memory", float64(peak.shared - r.before.shared), float64(most.shared + slack.shared)},
		{"bytes of addresses", float64(peak.space - r.before.space), float64(most.space + slack.space)},
		{"processors", cpu, most.cpu + slack.cpu},
	} {
		if x.is > x.most {
			r.t.Errorf("the victim has %v %s more, not at most %v", x.is, x.what, x.most)
		}
	}
}

// attackArgs are what each attacker gets.
type attackArgs struct {
	Address string
	More    string // the attack's own settings, in JSON
}
