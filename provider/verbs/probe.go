package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
)

// What a device enforces of memory windows cannot be queried: capability flags promise too much or too
// little. So it is tried, once per process and device, between queue pairs that connect the device to
// itself, in the background from its first use on. Until the result is known, connections expose memory
// by registrations; from then on, existing connections too, by windows.

// probed has the results.
var probed = struct {
	mu sync.Mutex
	m  map[string]probeAnswer // by name and GUID. Guarded by mu
}{m: make(map[string]probeAnswer)}

type probeAnswer struct {
	trusted bool      // windows can be trusted
	returns bool      // … and a peer's message invalidates them
	until   time.Time // when an inconclusive result expires; zero: this one is definite
}

// probeAgain is the least time until a device is probed again after an inconclusive result. The next
// connection after that starts the probe.
const probeAgain = time.Minute

// probe applies what is known of the device's registrations and windows. What is not known is measured
// and tried in the background, the windows only if they may be used.
func (d *device) probe(cfg Config) {
	d.costs.once.Do(func() { d.waiters.Go(func() { d.costs.measure(d.ctx) }) })
	if !d.mayHaveWindows(cfg) {
		return
	}
	key, now := keyOf(d.ctx), time.Now()
	probed.mu.Lock()
	defer probed.mu.Unlock()
	answer, known := probed.m[key]
	if known && (answer.until.IsZero() || now.Before(answer.until)) {
		d.heed(answer)
		return
	}
	answer.until = now.Add(probeAgain) // longer than a probe may take
	probed.m[key] = answer
	d.waiters.Go(d.probeWindows)
}

// keyOf identifies a device, however it was opened.
func keyOf(ctx *ibv.Context) string { return fmt.Sprintf("%s %#x", ctx.Name, ctx.GUID) }

// heed applies a result to the device's endpoints. No result takes trust back: connections of the
// shared domain have nothing but windows to keep their peers out.
func (d *device) heed(answer probeAnswer) {
	d.returns.CompareAndSwap(false, answer.returns)
	d.windows.CompareAndSwap(false, answer.trusted)
}

func (d *device) probeWindows() {
	began := time.Now()
	var answer probeAnswer
	wrong, err := tryAttempts(d, windowAttempts, 1)
	switch {
	case errors.Is(err, errProbeStopped): // the next user of the device tries again
		probed.mu.Lock()
		defer probed.mu.Unlock()
		delete(probed.m, keyOf(d.ctx))
		return
	case errors.Is(err, syscall.EOPNOTSUPP): // definite: there are no windows, whatever the flags tell (bnxt_re)
	case err != nil:
		answer = probeAnswer{until: began.Add(probeAgain)}
	default:
		answer = probeAnswer{trusted: len(wrong) == 0}
	}
	if answer.trusted {
		wrong, err = tryAttempts(d, returnAttempts, 1)
		answer.returns = err == nil && len(wrong) == 0
		if errors.Is(err, errProbeStopped) {
			answer.until = began // the next user of the device tries again
		}
	}
	d.learn(answer)
}

// learn stores the result of a probe, for this device and every other open one with the same key: a
// device may be open by name and by rdma_cm.
func (d *device) learn(answer probeAnswer) {
	key := keyOf(d.ctx)
	probed.mu.Lock()
	probed.m[key] = answer
	probed.mu.Unlock()
	d.heed(answer)
	devices.mu.Lock()
	defer devices.mu.Unlock()
	for _, other := range devices.m {
		if keyOf(other.ctx) == key {
			other.heed(answer)
		}
	}
}

// windowAttempt is one access that a peer attempts at a window of attemptSize bytes, and whether it
// should succeed.
type windowAttempt struct {
	what    string
	rights  ibv.Access // of the window
	op      ibv.Opcode
	succeed bool
	off, n  int  // offset from the window's begin, and length
	foreign bool // by the queue pair of another connection in the domain
	late    bool // after the invalidation

	returned bool // after an invalidation by the peer itself
}

// windowAttempts are the least that connections in a shared domain rely on. A process pays for them in
// its first second with a device. They find every failure that devices have been seen to have; the
// tests try more.
var windowAttempts = []windowAttempt{
	{what: "reading", rights: ibv.RemoteRead, op: ibv.OpRead, succeed: true, n: attemptSize},
	{what: "reading past the end", rights: ibv.RemoteRead, op: ibv.OpRead, off: attemptSize - 8, n: 16},
	{what: "reading by another connection", rights: ibv.RemoteRead, op: ibv.OpRead, n: 16, foreign: true},
	{what: "reading after the invalidation", rights: ibv.RemoteRead, op: ibv.OpRead, n: 16, late: true},
}

// returnAttempts has an attempt after an invalidation by the peer's own message (SEND_WITH_INV), whose
// completion must name the key.
var returnAttempts = []windowAttempt{
	{what: "reading after its own invalidation", rights: ibv.RemoteRead, op: ibv.OpRead, n: 16, returned: true},
}

const (
	attemptSize = 256
	// probeTime bounds each step of the probe, and probeUnused each step once the device is not in use
	// any more, because its close waits for the probe. Healthy devices take microseconds.
	probeTime   = 2 * time.Second
	probeUnused = 100 * time.Millisecond
)

// tryAttempts returns the attempts that did not end as they should, up to most of them. An error means
// that the probe was inconclusive.
func tryAttempts(d *device, attempts []windowAttempt, most int) (wrong []string, err error) {
	at, err := d.loopback()
	if err != nil {
		return nil, err
	}
	if at.gids == nil {
		return nil, fmt.Errorf("verbs: probe of %s: no active port with an address", d.ctx.Name)
	}
	pd, err := d.ctx.AllocPD()
	if err != nil {
		return nil, err
	}
	defer pd.Close()
	for _, a := range attempts {
		select {
		case <-d.stop:
			return nil, errProbeStopped
		default:
		}
		p := windowProbe{pd: pd, at: at}
		moved, err := p.attempt(&a)
		p.close()
		if err != nil {
			return nil, fmt.Errorf("verbs: probe of %s, %s: %w", d.ctx.Name, a.what, err)
		}
		if moved != a.succeed {
			wrong = append(wrong, a.what)
		}
		if len(wrong) == most {
			break
		}
	}
	return wrong, nil
}

// loopback returns a port of the device with its own addresses.
func (d *device) loopback() (attachment, error) {
	return d.at(func(p ibv.Port, g ibv.GIDEntry) bool {
		return p.LinkLayer == ibv.LinkInfiniBand || g.Type == ibv.GIDTypeRoCEv2 && !g.GID.Addr().IsLinkLocalUnicast()
	})
}

// windowProbe is two connections of a device to itself: the exposing ends, the reading ends, and one
// page for all.
type windowProbe struct {
	pd      *ibv.PD
	at      attachment
	cq      *ibv.CQ
	mw      *ibv.MW
	exposer [2]*ibv.QP
	reader  [2]*ibv.QP
	memory  messageMemory
	mr      *ibv.MR // of memory

	received ibv.WC // at the exposing end
}

// The window is in the middle of the exposing end's half of memory. The other half is the reading
// end's.
const (
	probeMemory = 4096
	probeWindow = probeMemory / 4
	probeReader = probeMemory / 2
)

// The numbers of the probe's work requests.
const (
	probeBind = 1 + iota
	probeUnbind
	probeMove
	probeReturn
	probeReceive
)

var (
	errProbeTime    = errors.New("no completion")
	errProbeReturn  = errors.New("the completion of a receive is without the key that was invalidated")
	errProbeStopped = errors.New("the device is not used any more")
)

// expose binds the window, and invalidates it if the attempt is to come after that.
func (p *windowProbe) expose(a *windowAttempt, begin uintptr) (key uint32, err error) {
	var wr ibv.SendWR
	wr.ID, wr.Flags = probeBind, ibv.Signaled
	key = p.mw.Bind(&wr, p.mr, begin, attemptSize, a.rights)
	if err = p.succeed(p.exposer[0], wr); err != nil {
		return key, err
	}
	switch {
	case a.late:
		wr = ibv.SendWR{ID: probeUnbind, Flags: ibv.Signaled}
		p.mw.Invalidate(&wr, key)
		err = p.succeed(p.exposer[0], wr)
	case a.returned:
		if _, err = p.exposer[0].PostRecv([]ibv.RecvWR{{ID: probeReceive}}); err == nil {
			err = p.succeed(p.reader[0], ibv.SendWR{ID: probeReturn, Opcode: ibv.OpSendWithInv, Flags: ibv.Signaled, InvKey: key})
		}
	}
	return key, err
}

// attempt makes the connections and lets the peer try.
func (p *windowProbe) attempt(a *windowAttempt) (moved bool, err error) {
	if err := p.open(); err != nil {
		return false, err
	}
	begin := addressOf(p.memory.mem) + probeWindow
	key, err := p.expose(a, begin)
	if err != nil {
		return false, err
	}
	theirs, ours := p.memory.mem[:probeReader], p.memory.mem[probeReader:]
	for i := range ours {
		theirs[i], ours[i] = 't', 'o'
	}
	qp := p.reader[0]
	if a.foreign {
		qp = p.reader[1]
	}
	wr := ibv.SendWR{ID: probeMove, Opcode: a.op, Flags: ibv.Signaled, RemoteAddr: uint64(begin) + uint64(a.off), RemoteKey: key,
		SGE: ibv.SGE{Addr: uint64(addressOf(ours)), Length: uint32(a.n), LKey: p.mr.LKey}}
	status, err := p.do(qp, wr)
	if err != nil {
		return false, err
	}
	if a.returned && (p.received.Flags&ibv.WCWithInv == 0 || p.received.InvKey != key) {
		return false, errProbeReturn
	}
	changed := bytes.IndexByte(ours, 't') >= 0 || bytes.IndexByte(theirs, 'o') >= 0
	switch status {
	case ibv.Success:
		return true, nil
	case ibv.RemAccessErr, ibv.RemOpErr, ibv.RemInvReqErr:
		return changed, nil
	}
	return false, status // the path has failed, not the window
}

func (p *windowProbe) open() (err error) {
	if p.memory, err = newMessageMemory(peerBudget{arena: controlArena()}, probeMemory); err != nil {
		return err
	}
	const as = ibv.LocalWrite | ibv.RelaxedOrdering | ibv.MWBind // the access with which connections register memory for windows
	if p.mr, err = p.memory.register(p.pd, p.memory.mem, as); err != nil {
		return err
	}
	if p.cq, err = p.pd.Context.CreateCQ(64, nil, 0); err != nil {
		return err
	}
	for i := range p.reader {
		if p.exposer[i], err = p.newQP(); err != nil {
			return err
		}
		if p.reader[i], err = p.newQP(); err != nil {
			return err
		}
		if err = p.connect(p.exposer[i], p.reader[i]); err != nil {
			return err
		}
	}
	p.mw, err = p.pd.AllocMW()
	return err
}

func (p *windowProbe) newQP() (*ibv.QP, error) {
	return ibv.CreateQP(ibv.QPConfig{
		PD: p.pd, SendCQ: p.cq, RecvCQ: p.cq,
		Cap: ibv.QPCap{SendWR: 8, RecvWR: 1},
	})
}

func (p *windowProbe) connect(a, b *ibv.QP) error {
	port := p.at.port
	path := ibv.QPPath{
		Port: uint8(port.Num), MTU: port.ActiveMTU,
		ReadsIssued: 1, ReadsServed: 1, Timeout: 14, RetryCount: 3, // the retries take 0.3 s
		PeerIsOnSubnet: p.at.isOnSubnet(p.at.gids[0].GID),
	}
	const peers = ibv.RemoteRead | ibv.RemoteWrite
	psn := [2]uint32{rand.Uint32() & psnMask, rand.Uint32() & psnMask}
	for i, qp := range []*ibv.QP{a, b} {
		other := b
		if i == 1 {
			other = a
		}
		path.PSN = psn[i]
		if err := qp.Init(path, peers); err != nil {
			return err
		}
		if err := p.at.inTurn(func(g ibv.GIDEntry) error {
			path.GIDIndex = uint8(g.Index)
			return qp.ReadyToReceive(path, ibv.QPPeer{QPNum: other.Num, PSN: psn[1-i], GID: g.GID, LID: port.LID})
		}); err != nil {
			return err
		}
		if err := qp.ReadyToSend(path); err != nil {
			return err
		}
	}
	return nil
}

// succeed performs one work request, which must not fail.
func (p *windowProbe) succeed(qp *ibv.QP, wr ibv.SendWR) error {
	status, err := p.do(qp, wr)
	if err == nil && status != ibv.Success {
		err = status
	}
	return err
}

// do performs one work request.
func (p *windowProbe) do(qp *ibv.QP, wr ibv.SendWR) (ibv.Status, error) {
	if _, err := qp.PostSend([]ibv.SendWR{wr}); err != nil {
		return 0, err
	}
	var wcs [8]ibv.WC
	began := time.Now()
	for time.Since(began) < probeTime {
		n, err := p.cq.Poll(wcs[:])
		if err != nil {
			return 0, err
		}
		status, done := ibv.Success, false
		for _, wc := range wcs[:n] {
			switch wc.ID {
			case probeReceive:
				p.received = wc
			case wr.ID:
				status, done = wc.Status, true
			}
		}
		if done {
			return status, nil
		}
		select {
		case <-p.at.dev.stop:
			if time.Since(began) > probeUnused {
				return 0, errProbeStopped
			}
		default:
		}
		time.Sleep(50 * time.Microsecond)
	}
	return 0, errProbeTime
}

// close frees what has been made: the window before its queue pair, and that before the memory.
func (p *windowProbe) close() {
	if p.mw != nil {
		p.mw.Close()
	}
	for _, qp := range append(p.reader[:], p.exposer[:]...) {
		if qp != nil {
			qp.Close()
		}
	}
	if p.cq != nil {
		p.cq.Close()
	}
	p.memory.close()
}
