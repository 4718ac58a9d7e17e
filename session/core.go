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
	mem Memory // or nil
	lim Limits

	bounds bounds
	terms  terms // set by Negotiate, before any Write

	cfg  Config
	ring bool          // what was sent outlives this process, and the ring detects a dead peer: see Limits.Window
	spin time.Duration // how long a wait polls

	rd, wr side
	ur     side // WriteUrgent, which overtakes a Write; it uses wr's state

	credits credit.Counts

	rxMu sync.Mutex
	rx   receiver // guarded by rxMu, like the endpoint's receiving methods

	urgent     []byte        // the newest urgent data that was not read; guarded by rxMu
	urgentCame chan struct{} // holds a token when urgent data has come

	txMu    sync.Mutex
	tx      sender      // guarded by txMu, like the endpoint's sending methods
	txWaits atomic.Bool // tx.pending, to be read without txMu

	failure  atomic.Pointer[error] // why the connection is over, set once
	detached sync.Once             // closes or aborts the endpoint; a second caller waits for the first
	ended    chan struct{}         // closed when the endpoint was closed or aborted
	acked    atomic.Bool           // CloseAck came: the peer has everything
	writeCut bool                  // a Write was taken in its middle: see TakeWrite; guarded by wr.op
	told     atomic.Bool           // a Write or Read has found that the connection is over: see outcome

	advances atomic.Uint64 // RDMA reads that have completed, and the peer's messages about what it has taken

	idle    idleState
	workers workers
	loans   atomic.Int32 // loans to the application
	notes   notes        // the peer's

	number   uint64   // the session's number in its process
	provider Endpoint // ep without its tracing: it may be a Describer, Starver or Withdrawer
}

// workers are the background goroutines of a session, and its loans.
type workers struct {
	sync.WaitGroup
	mu     sync.Mutex
	noMore bool // no further one may start; guarded by mu
}

// start adds a worker, which ends with Done. It returns false if the session has ended.
func (w *workers) start() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.noMore {
		return false
	}
	w.Add(1)
	return true
}

// stop prevents further starts, and waits for all workers.
func (w *workers) stop() {
	w.mu.Lock()
	w.noMore = true
	w.mu.Unlock()
	w.Wait()
}

func newCore(ep Endpoint, cfg Config) *core {
	c := &core{provider: ep, number: numbers.Add(1), cfg: cfg, ended: make(chan struct{})}
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

// signalAll makes all operations look again.
func (c *core) signalAll() {
	for _, sd := range c.sides() {
		sd.signal()
	}
}

// wakeWriters makes operations look again that wait for room or credit.
func (c *core) wakeWriters() {
	c.wr.signalSleeper()
	c.ur.signalSleeper()
}

// readWant returns what a Read waits for: also room, if something waits to be sent.
func (c *core) readWant() Events {
	if c.rx.fetch.queueFull.Load() || c.txWaits.Load() {
		return RecvReady | SendReady
	}
	return RecvReady
}

// errMidTransfer is why a connection is over that has ended during a transfer of the application's
// memory.
var errMidTransfer = fmt.Errorf("session: the connection ended in the middle of a transfer: %w", syscall.ECONNRESET)

// brokeProtocol returns why a connection is over whose peer has broken the protocol.
func brokeProtocol(err error) error {
	return fmt.Errorf("session: the peer broke the protocol: %w: %w", err, syscall.ECONNRESET)
}

// due is what is to be done after a use of the sender or receiver.
type due struct {
	wake  bool  // a waiting operation may go on
	fault error // why the connection is over
}

// violation notes that the peer has broken the protocol.
func (d *due) violation(format string, args ...any) {
	if d.fault == nil {
		d.fault = brokeProtocol(fmt.Errorf(format, args...))
	}
}

// detach ends the endpoint, and with it all exposures to the peer; giveBack is the endpoint's Close or
// Abort. No lock may be held.
func (c *core) detach(giveBack func()) {
	c.rxMu.Lock()
	c.txMu.Lock()
	c.tx.closed = true
	c.rx.stage.reach(closed)
	c.txMu.Unlock()
	c.rxMu.Unlock()
	c.detached.Do(func() {
		giveBack()
		close(c.ended)
	})
}

// over returns why the connection is over for Write: the session's own reason, or else the endpoint's.
// It is nil while the connection lives.
func (c *core) over() error {
	if p := c.failure.Load(); p != nil {
		return *p
	}
	if err := c.ep.Err(); err != nil {
		return connErr(err)
	}
	return nil
}

// connErr turns an endpoint's end in order into what a writer finds: EPIPE.
func connErr(err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("session: the peer's process has ended: %w", syscall.EPIPE)
	}
	return err
}

// peerProgress returns a number that grows when the peer takes what is sent: it answers, or makes room
// for more. Credit alone does not count, because control messages bring it, too.
func (c *core) peerProgress() uint64 {
	c.txMu.Lock()
	defer c.txMu.Unlock()
	return c.advances.Load() + c.tx.carried
}

// borrow begins a loan: the session's memory stays until the end of the loan. It fails if the session
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
