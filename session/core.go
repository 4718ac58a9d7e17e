package session

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/session/internal/credit"
)

// core is the state of a session, with its locks.
//
// Locks, in this order: rd.op, wr.op, ur.op (held for a whole operation), rxMu, txMu (held
// for one look; docs/ARCHITECTURE.md has what waits under them).
type core struct {
	ep  Endpoint
	mem Memory // nil: there is none
	lim Limits

	bounds bounds
	terms  terms // set by Negotiate, before any Write

	cfg  Config
	ring bool          // nothing that was sent is lost with this process, and a dead peer is found: see Limits.Window
	spin time.Duration // how long a wait polls

	rd, wr side
	ur     side // WriteUrgent, which overtakes a Write; its state is wr's

	credits credit.Counts

	rxMu sync.Mutex
	rx   receiver // guarded by rxMu, as are the endpoint's receiving methods

	urgent     []byte        // the newest that was not read; guarded by rxMu
	urgentCame chan struct{} // holds a token when some has come

	txMu    sync.Mutex
	tx      sender      // guarded by txMu, as are the endpoint's sending methods
	txWaits atomic.Bool // tx.pending, to be read without txMu

	failure  atomic.Pointer[error] // why the connection is over, set once
	detached sync.Once             // closes or aborts the endpoint; a second caller waits for the first
	acked    atomic.Bool           // CloseAck came: the peer has everything
	writeCut bool                  // a Write was taken in its middle: see TakeWrite; guarded by wr.op
	told     atomic.Bool           // a Write or Read has found that the connection is over: see outcome

	advances atomic.Uint64 // RDMA reads that have completed, and the peer's messages about what it takes

	idle    idleState
	workers workers
	loans   atomic.Int32 // memory that the application has
	notes   notes        // of the peer

	number   uint64   // of this session in its process
	provider Endpoint // ep, without what traces it: it may be a Describer, Starver or Withdrawer
}

// workers are the background goroutines of a session, and its loans.
type workers struct {
	sync.WaitGroup
	mu     sync.Mutex
	noMore bool // none starts any more; guarded by mu
}

// start registers one, which ends with Done, unless the session has ended.
func (w *workers) start() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.noMore {
		return false
	}
	w.Add(1)
	return true
}

// stop lets no more start, and waits for all of them.
func (w *workers) stop() {
	w.mu.Lock()
	w.noMore = true
	w.mu.Unlock()
	w.Wait()
}

func newCore(ep Endpoint, cfg Config) *core {
	c := &core{provider: ep, number: numbers.Add(1), cfg: cfg}
	sleeper, _ := ep.(Sleeper)
	if cfg.Trace != nil {
		ep = newTraced(ep, cfg.Trace, c.number)
	}
	c.ep, c.mem, c.lim = ep, ep.Memory(), ep.Limits()
	c.ring = c.lim.Ring()
	for _, sd := range c.sides() {
		sd.op.next = make(chan struct{}, 1)
		sd.wake = make(chan struct{}, 1)
		sd.sleeper = sleeper
	}
	c.idle.unlisted.Store(true)
	c.idle.fresh.Store(cfg.OnNote != nil)
	c.spin = cmp.Or(cfg.Spin, c.lim.Spin)
	if cfg.Disable&FeaturePoll != 0 {
		c.spin = 0
	}
	c.credits.Open(c.lim.Window)
	c.bounds = newBounds(&cfg, &c.lim)
	rx := &c.rx
	rx.msgs, rx.credits = ep, &c.credits
	rx.inbox = inbox{mem: c.mem, size: c.bounds.inbox, do: &rx.do}
	rx.fetch.mem, rx.fetch.bounds, rx.fetch.do, rx.fetch.stats = c.mem, &c.bounds, &rx.do, &rx.stats
	c.urgentCame = make(chan struct{}, 1)
	c.tx = sender{msgs: ep, mem: c.mem, credits: &c.credits, terms: &c.terms}
	c.tx.buffer.reads = &rx.fetch.reads.posted
	return c
}

func (c *core) sides() [3]*side { return [...]*side{&c.rd, &c.wr, &c.ur} }

// signalAll has all operations look again.
func (c *core) signalAll() {
	for _, sd := range c.sides() {
		sd.signal()
	}
}

// wakeWriters has those look again that wait for room or credit.
func (c *core) wakeWriters() {
	c.wr.signalSleeper()
	c.ur.signalSleeper()
}

// readWant is what a Read waits for: also room, if something of ours needs it.
func (c *core) readWant() Events {
	if c.rx.fetch.queueFull.Load() || c.txWaits.Load() {
		return RecvReady | SendReady
	}
	return RecvReady
}

// errMidTransfer is why a connection is over that has ended while memory of the application is
// in use.
var errMidTransfer = fmt.Errorf("session: the connection ended in the middle of a transfer: %w", syscall.ECONNRESET)

// brokeProtocol is why a connection is over whose peer has broken the protocol.
func brokeProtocol(err error) error {
	return fmt.Errorf("session: the peer broke the protocol: %w: %w", err, syscall.ECONNRESET)
}

// due is what a use of the sender or receiver has found that is to be done.
type due struct {
	wake  bool  // an operation that waits may go on
	fault error // why the connection is over
}

// violation notes what the peer has done.
func (d *due) violation(format string, args ...any) {
	if d.fault == nil {
		d.fault = brokeProtocol(fmt.Errorf(format, args...))
	}
}

// detach ends the endpoint, and with it what is exposed to the peer; giveBack is
// its Close or Abort. No lock may be held.
func (c *core) detach(giveBack func()) {
	c.rxMu.Lock()
	c.txMu.Lock()
	c.tx.closed = true
	c.rx.stage.reach(closed)
	c.txMu.Unlock()
	c.rxMu.Unlock()
	c.detached.Do(giveBack)
}

// over returns why the connection is over for Write: the session's own reason, else
// the endpoint's. It is nil while the connection lives.
func (c *core) over() error {
	if p := c.failure.Load(); p != nil {
		return *p
	}
	if err := c.ep.Err(); err != nil {
		return connErr(err)
	}
	return nil
}

// connErr turns an endpoint's orderly end into what a writer sees: EPIPE.
func connErr(err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("session: the peer's process has ended: %w", syscall.EPIPE)
	}
	return err
}

// peerProgress returns a number that grows as the peer takes what is sent: it answers, or makes room
// for more. Credit alone does not count: control messages bring it, too.
func (c *core) peerProgress() uint64 {
	c.txMu.Lock()
	defer c.txMu.Unlock()
	return c.advances.Load() + c.tx.carried
}

// borrow begins a loan: the session's memory stays until its end. It fails once the session
// has ended.
func (c *core) borrow() bool {
	if !c.workers.start() {
		return false
	}
	c.loans.Add(1)
	return true
}

func (c *core) endBorrow() {
	c.loans.Add(-1)
	c.workers.Done()
}
