package sanconn_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

var (
	hostileRuns = flag.Int("hostile.runs", 30, "runs of the test with a hostile peer, each with a seed of its own")
	hostileSeed = flag.Uint64("hostile.seed", 0, "the first of them; 0: a random one")
)

// TestHostilePeer uses a connection in every way while its peer sends anything, at any time, by TCP and
// by sessions. Every call returns once the peer has gone, and Close in time while the peer is silent.
// What is read is what came, in order, and nothing is left behind.
func TestHostilePeer(t *testing.T) {
	defer sanconn.SetBackTimeout(time.Second)()
	defer sanconn.SetSilentTimeout(time.Second)()
	first := *hostileSeed
	if first == 0 {
		first = rand.Uint64() >> 32
	}
	before, fds := runtime.NumGoroutine(), openFiles(t)
	moved, must := false, *hostileRuns > 20 // one in four or five reads from a session
	for i := 0; i < *hostileRuns || must && !moved && i < 10**hostileRuns; i++ {
		seed := first + uint64(i)
		h := &hostile{t: t, rand: rand.New(rand.NewPCG(seed, 0))}
		h.run()
		if t.Failed() {
			t.Fatalf("seed %d:\n%s\n%s", seed, strings.Join(h.log, "\n"), h.c.Debug())
		}
		moved = moved || slices.Max(h.read[1:]) > 0
	}
	if must && !moved {
		t.Error("nothing was read from a session")
	}
	settles(t, first, "goroutines", before, runtime.NumGoroutine)
	settles(t, first, "descriptors", fds, func() int { return openFiles(t) })
}

const (
	hostileSessions = 3 // at most, beside TCP: two bits of each byte that is read name its carrier
	hostileCycle    = 61
	hostileBound    = 10 * time.Second // for Close: twice its timeouts in this test, for a busy machine
)

// hostile is one run.
type hostile struct {
	t    *testing.T
	rand *rand.Rand // the peer's script
	c    *sanconn.Conn
	tcp  *net.TCPConn // the peer's
	ctx  context.Context

	dials    bool // the peer has dialed, and so proposes
	tcpSent  uint64
	sessions []*hostileSession
	moving   sync.WaitGroup
	answered bool // the peer has sent a note

	mu       sync.Mutex // guards what follows
	log      []string
	read     [1 + hostileSessions]uint64 // by this end's program, from each carrier
	begin    [1 + hostileSessions]uint64 // the first begin that the peer has sent
	until    [1 + hostileSessions]uint64
	said     [1 + hostileSessions]uint8 // saidBegin, saidLeave, saidEnd
	entering chan *twin.Endpoint        // of this end's proposals
}

const (
	saidBegin = 1 << iota
	saidLeave
	saidEnd // the peer's stream on the session has ended, after which TCP's may go on
)

func (h *hostile) logf(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.log = append(h.log, fmt.Sprintf(format, args...))
}

// content returns bytes that have their carrier and their position in it.
func content(carrier int, at, n uint64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(carrier)<<6 | byte((at+uint64(i))%hostileCycle)
	}
	return b
}

// check checks the bytes that this end's program has read.
func (h *hostile) check(b []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for len(b) > 0 {
		k := int(b[0] >> 6)
		n := 1
		for n < len(b) && int(b[n]>>6) == k {
			n++
		}
		if !bytes.Equal(b[:n], content(k, h.read[k], uint64(n))) {
			h.t.Errorf("of carrier %d, behind %d bytes, these come: %v", k, h.read[k], b[:min(n, 70)])
			return
		}
		for i := range h.read {
			switch {
			case i == k:
			case i == 0: // the bytes are a session's
				if h.said[k]&saidBegin == 0 || h.read[0] < h.begin[k] {
					h.t.Errorf("bytes of session %d come behind %d of TCP, and it begins (%v) at %d", k, h.read[0], h.said[k], h.begin[k])
				}
			case h.said[i]&saidEnd == 0 && h.read[i] > 0 && (h.said[i]&saidLeave == 0 || h.read[i] > h.until[i]): // there are fewer if some were returned
				h.t.Errorf("bytes of %d come behind %d of session %d, which ends (%v) at %d", k, h.read[i], i, h.said[i], h.until[i])
			}
		}
		h.read[k] += uint64(n)
		b = b[n:]
	}
}

func (h *hostile) run() {
	r := h.rand
	d, a, err := tcpPair()
	if err != nil {
		h.t.Fatal(err)
	}
	if h.dials = r.IntN(2) == 0; h.dials {
		d, a = a, d
	}
	h.tcp = a
	h.c = newconn.New(d, newconn.Config{Life: connpair.Nobody{}}).(*sanconn.Conn)
	ctx, over := context.WithCancel(context.Background())
	h.ctx = ctx
	h.entering = make(chan *twin.Endpoint, hostileSessions)

	var used, others sync.WaitGroup
	own := func(f func(*rand.Rand)) func() {
		r := rand.New(rand.NewPCG(r.Uint64(), 1))
		return func() { f(r) }
	}
	used.Go(own(h.reads))
	used.Go(own(h.writes))
	others.Go(own(h.uses))
	others.Go(own(h.uses))
	if !h.dials {
		others.Go(own(h.proposes))
	}
	for range 10 + r.IntN(150) {
		h.act(r)
	}
	closes := r.IntN(4)
	if closes == 3 && h.answered {
		closes = 0 // otherwise the silence on its sessions would be its own
	}
	h.logf("ends by %d", closes)
	stop := make(chan struct{})
	var serving sync.WaitGroup
	switch closes {
	case 0: // the peer's process ends
		h.gone()
	case 3: // … but the process that got the proposal, which is another one, stays silent
		h.tcp.Close()
	case 1: // the peer is silent, and holds everything
	case 2: // the peer takes what comes
		serving.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					h.drain(r)
					time.Sleep(100 * time.Microsecond)
				}
			}
		})
	}
	if closes == 1 || closes == 2 {
		began := time.Now()
		h.c.Close()
		if d := time.Since(began); d > hostileBound {
			h.t.Errorf("Close took %v", d)
		}
	}
	h.await("Read and Write", &used)
	over()
	h.c.Close()
	h.await("others", &others)
	close(stop)
	serving.Wait()
	h.gone()
	h.await("moves", &h.moving)
}

func (h *hostile) await(what string, g *sync.WaitGroup) {
	done := make(chan struct{})
	go func() { g.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(patience):
		b := make([]byte, 4<<20)
		h.mu.Lock()
		defer h.mu.Unlock()
		h.t.Fatalf("%s: it hangs\n%s\n%s\n%s", what, strings.Join(h.log, "\n"), h.c.Debug(), b[:runtime.Stack(b, true)])
	}
}

// gone ends the peer's process.
func (h *hostile) gone() {
	for _, s := range h.sessions {
		s.ends()
		s.ep.Kill()
	}
	for {
		select {
		case ep := <-h.entering:
			ep.Kill()
			continue
		default:
		}
		break
	}
	h.tcp.Close()
}

// isOver reports whether an error ends an operation's loop.
func isOver(err error) bool {
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded) && !unreadLeft(err)
}

func (h *hostile) reads(r *rand.Rand) {
	c := h.c
	raw, _ := c.SyscallConn()
	counts := countedOf(h.t, c)
	for {
		deadlineOf(r, c.SetReadDeadline)
		pauseSometimes(r)
		var err error
		way := r.IntN(10)
		switch way {
		default:
			b := make([]byte, 1+r.IntN(1<<(1+r.IntN(16))))
			var n int
			n, err = c.Read(b)
			h.check(b[:n])
		case 1:
			var b []byte
			if b, err = c.Peek(); err == nil {
				n := r.IntN(len(b) + 1)
				h.check(b[:n])
				err = c.Discard(n)
			}
		case 2:
			_, err = c.WriteTo(sink(func(b []byte) (int, error) {
				h.check(b)
				return len(b), errEnough
			}))
			if err == nil {
				err = io.EOF
			} else if errors.Is(err, errEnough) {
				err = nil
			}
		case 3:
			b := make([]byte, 1+r.IntN(8000))
			n, rerr := 0, error(nil)
			if err = raw.Read(func(fd uintptr) bool {
				n, rerr = syscall.Read(int(fd), b)
				return true
			}); err == nil && n >= 0 {
				h.check(b[:n])
			}
			switch {
			case unreadLeft(err) || errors.Is(err, syscall.ETIMEDOUT): // the peer does not leave
				err = nil
			case err == nil && n == 0:
				err = io.EOF
			case err == nil && rerr != nil && rerr != syscall.EAGAIN:
				err = rerr
			}
		case 4:
			b := make([]byte, 1+r.IntN(8000))
			var n int
			if n, err = counts.Read(b); unreadLeft(err) || errors.Is(err, syscall.ETIMEDOUT) {
				err = nil
			}
			h.check(b[:n])
		}
		h.logf("  read (%d): %v", way, err)
		if isOver(err) {
			return
		}
	}
}

func (h *hostile) writes(r *rand.Rand) {
	c := h.c
	var at uint64
	for {
		deadlineOf(r, c.SetWriteDeadline)
		pause(r)
		b := bytes.Repeat([]byte{byte(at)}, 1+r.IntN(1<<(1+r.IntN(17))))
		var err error
		way := r.IntN(6)
		switch way {
		default:
			_, err = c.Write(b)
		case 1:
			v := net.Buffers{b[:len(b)/2], b[len(b)/2:]}
			_, err = c.WriteBuffers(&v)
		case 2:
			var room []byte
			if room, err = c.Reserve(len(b)); err == nil {
				pauseSometimes(r)
				err = c.Commit(copy(room, b))
			}
		case 3:
			_, err = c.ReadFrom(bytes.NewReader(b))
		case 4:
			_, err = c.WriteUrgent(b[:min(len(b), 64)])
			if errors.Is(err, errors.ErrUnsupported) {
				err = nil
			}
		}
		at++
		h.logf("  wrote (%d) %d: %v", way, len(b), err)
		if isOver(err) {
			return
		}
	}
}

// uses calls the other methods.
func (h *hostile) uses(r *rand.Rand) {
	c := h.c
	raw, _ := c.SyscallConn()
	for h.ctx.Err() == nil {
		for range 10 {
			pause(r)
		}
		what, err := r.IntN(60), error(nil)
		switch what {
		case 0:
			var f *os.File
			if f, err = c.File(); err == nil {
				f.Close()
			}
		case 1:
			err = raw.Control(func(uintptr) {})
		case 2:
			err = c.CloseWrite()
		case 3:
			err = c.CloseRead()
		case 4:
			c.SetLinger(0)
		case 5, 6, 7, 8:
			c.Debug()
		case 9, 10, 11:
			c.Stats()
		case 12, 13, 14:
			c.ReadUrgent(make([]byte, 10))
		case 15, 16, 17, 18:
			sanconn.Starve(c)
		case 19, 20, 21, 22, 23, 24:
			err = sanconn.LeaveSAN(c)
		case 25:
			ctx, cancel := context.WithTimeout(h.ctx, time.Millisecond)
			err = newconn.HandleOf(c).Moved(ctx)
			cancel()
		case 26:
			if r.IntN(4) == 0 {
				err = c.Close()
			}
		default:
			continue
		}
		h.logf("  uses %d: %v", what, err)
	}
}

// proposes is this end's part in moves, if it has dialed.
func (h *hostile) proposes(r *rand.Rand) {
	for range hostileSessions {
		for range r.IntN(6) {
			pause(r)
		}
		ea, eb := hostilePair(h.t, r)
		h.entering <- eb
		ctx, cancel := context.WithTimeout(h.ctx, time.Duration(1+r.IntN(30))*time.Millisecond)
		err := connpair.Propose(ctx, h.c, ea, hostileConfig, nil)
		cancel()
		h.logf("  proposed: %v", err)
	}
}

// hostileConfig is the configuration of this end's sessions.
var hostileConfig = session.Config{CloseTimeout: time.Second, CancelTimeout: time.Second}

func hostilePair(t *testing.T, r *rand.Rand) (ours, peers *twin.Endpoint) {
	return twin.Pair(twin.Config{
		Limits: carriers[2+r.IntN(len(carriers)-2)].limits,
		Violated: func(v twin.Violation) {
			if v.End == 0 && v.Kind == twin.Misuse {
				t.Error(v)
			}
		},
	})
}

// hostileSession is the peer's end of a session, over the bare endpoint.
type hostileSession struct {
	h       *hostile
	ep      *twin.Endpoint
	carrier int
	sent    uint64 // bytes of its stream
	dropped uint32 // messages dropped, for the header's credit
}

// The types of the session's messages that it sends.
const (
	msgNegotiate = 1
	msgData      = 2
	msgCredit    = 3
	msgShutdown  = 11
	msgClose     = 12
	msgCloseAck  = 13
	msgAbort     = 14
	msgPing      = 15
	msgUrgent    = 17
	msgInbox     = 20
	msgRefuse    = 18
	msgNote      = 24
	msgHeader    = 8
)

func (h *hostile) enter(ep *twin.Endpoint) *hostileSession {
	s := &hostileSession{h: h, ep: ep, carrier: 1 + len(h.sessions)}
	h.sessions = append(h.sessions, s)
	ep.Start(s)
	b := make([]byte, 40)
	copy(b, "SANc")
	binary.LittleEndian.PutUint16(b[4:], session.Version)
	binary.LittleEndian.PutUint32(b[8:], uint32(max(ep.Limits().Window-session.ControlReserve, 0)))
	binary.LittleEndian.PutUint32(b[12:], 4096)
	s.send(msgNegotiate, 0, b)
	return s
}

// ends is called before the session ends, as over a ring any end may be one in order.
func (s *hostileSession) ends() {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	s.h.said[s.carrier] |= saidEnd
}

func (*hostileSession) Wake(session.Events) {}

func (s *hostileSession) send(kind, flags byte, body []byte) bool {
	if kind == msgNote {
		s.h.answered = true
	}
	if kind == msgShutdown || kind == msgClose || kind == msgAbort {
		s.ends()
	}
	m := make([]byte, msgHeader, msgHeader+len(body))
	m[0], m[1] = kind, flags
	binary.LittleEndian.PutUint32(m[4:], s.dropped)
	m = append(m, body...)
	if len(m) <= session.MaxControl {
		b := s.ep.ReserveControl(len(m))
		if b != nil {
			s.ep.CommitControl(copy(b, m))
		}
		return b != nil
	}
	b := s.ep.Reserve(len(m), len(m))
	if b != nil {
		s.ep.Commit(copy(b, m))
	}
	return b != nil
}

func (s *hostileSession) note(kind byte, at uint64) {
	h := s.h
	h.mu.Lock()
	switch {
	case kind == newconn.NoteBegin && h.said[s.carrier]&saidBegin == 0:
		h.said[s.carrier] |= saidBegin
		h.begin[s.carrier] = at
	case kind == newconn.NoteLeave && h.said[s.carrier]&saidLeave == 0:
		h.said[s.carrier] |= saidLeave
		h.until[s.carrier] = at
	}
	h.mu.Unlock()
	h.logf("session %d: note %d, %d: %v", s.carrier, kind, at, s.send(msgNote, 0, noteAt(kind, at)))
}

func (s *hostileSession) data(r *rand.Rand, n uint64) {
	n = min(n, 4000)
	flags := byte(r.IntN(8) / 7)
	ok := s.send(msgData, flags, content(s.carrier, s.sent, n))
	if ok {
		s.sent += n
	}
	s.h.logf("session %d: data %d to %d: %v", s.carrier, n, s.sent, ok)
}

// position returns the right position, or at times a wrong one.
func (s *hostileSession) position(r *rand.Rand, right uint64) uint64 {
	switch r.IntN(24) {
	case 0:
		return right + 1
	case 1:
		return right - 1
	case 2:
		return 0
	case 3:
		return math.MaxUint64 - uint64(r.IntN(3))
	case 4:
		return 1 << (32 + r.IntN(32))
	case 5:
		return right + uint64(r.IntN(1000))
	}
	return right
}

// drain takes what this end has sent, and at times replies as it should.
func (h *hostile) drain(r *rand.Rand) {
	for {
		select {
		case ep := <-h.entering:
			h.enter(ep)
			continue
		default:
		}
		break
	}
	h.tcp.SetReadDeadline(time.Now().Add(time.Microsecond))
	h.tcp.Read(make([]byte, 1<<17))
	for _, s := range h.sessions {
		var ev session.Event
		for range 200 {
			if !s.ep.Poll(&ev) {
				break
			}
			if ev.Kind != session.Message {
				continue
			}
			m := bytes.Clone(ev.Msg)
			s.ep.Drop()
			s.take(r, m)
		}
		if s.ep.Err() == nil {
			s.send(msgCredit, 0, nil)
		}
	}
}

func (s *hostileSession) take(r *rand.Rand, m []byte) {
	if m[0] != msgCredit {
		s.dropped++
	}
	obeys := r.IntN(8) > 0
	if !obeys {
		return
	}
	switch m[0] {
	case msgNote:
		s.h.logf("session %d: got note %v", s.carrier, m[msgHeader:])
		switch m[msgHeader] {
		case newconn.NoteProposal:
			s.send(msgNote, 0, []byte{newconn.NoteAnswer, 1})
			s.note(newconn.NoteBegin, s.position(r, s.h.tcpSent))
		case newconn.NoteAnswer:
			s.note(newconn.NoteBegin, s.position(r, s.h.tcpSent))
		case newconn.NoteLeave:
			s.note(newconn.NoteLeave, s.position(r, s.sent))
		}
	case msgShutdown:
		s.send(msgShutdown, 0, nil)
		s.send(msgClose, 0, nil)
	case msgClose, msgAbort:
		s.send(msgCloseAck, 0, nil)
	case 19: // AskInbox
		s.send(msgInbox, 0, make([]byte, 32))
	case 4: // OfferRead
		s.send(msgRefuse, 0, append(bytes.Clone(m[msgHeader:msgHeader+4]), 0, 0, 0, 0))
	case 9: // CancelRead
		s.send(7, 0, append(append(bytes.Clone(m[msgHeader:msgHeader+4]), 0, 0, 0, 0), make([]byte, 8)...))
	}
}

// act is one step of the peer.
func (h *hostile) act(r *rand.Rand) {
	pause(r)
	var s *hostileSession
	if n := len(h.sessions); n > 0 {
		s = h.sessions[n-1]
		if r.IntN(6) == 0 {
			s = h.sessions[r.IntN(n)]
		}
	}
	what := r.IntN(100)
	switch {
	case what < 30:
		h.drain(r)
	case what < 40:
		h.mu.Lock()
		moved := s != nil && h.said[s.carrier]&(saidBegin|saidLeave) == saidBegin
		h.mu.Unlock()
		if moved && r.IntN(8) > 0 {
			return
		}
		h.tcp.SetWriteDeadline(time.Now().Add(time.Millisecond))
		n, err := h.tcp.Write(content(0, h.tcpSent, uint64(1+r.IntN(1<<r.IntN(17)))))
		h.tcpSent += uint64(n)
		h.logf("TCP to %d: %v", h.tcpSent, err)
	case what < 42:
		if r.IntN(3) == 0 {
			h.logf("TCP: CloseWrite")
			h.tcp.CloseWrite()
		}
	case what == 42:
		if r.IntN(4) == 0 {
			h.logf("TCP: reset")
			h.tcp.SetLinger(0)
			h.tcp.Close()
		}
	case what < 50 && h.dials && len(h.sessions) < hostileSessions:
		ea, eb := hostilePair(h.t, r)
		h.moving.Go(func() {
			ctx, cancel := context.WithTimeout(h.ctx, time.Second)
			defer cancel()
			err := connpair.Accept(ctx, ea, hostileConfig, func([]byte) *sanconn.Conn { return h.c })
			h.logf("  accepted: %v", err)
		})
		s = h.enter(eb)
		for range 1 + r.IntN(9)/8 {
			h.logf("session %d: proposal: %v", s.carrier, s.send(msgNote, 0, append([]byte{newconn.NoteProposal}, make([]byte, r.IntN(239)*r.IntN(2))...)))
		}
	case s == nil || s.ep.Err() != nil:
	case what < 54:
		s.note([]byte{newconn.NoteBegin, newconn.NoteLeave}[r.IntN(2)], s.position(r, []uint64{h.tcpSent, s.sent}[r.IntN(2)]))
	case what == 54:
		b := make([]byte, 1+r.IntN(8)*r.IntN(2)+9*r.IntN(12)/11)
		for i := range b {
			b[i] = byte(r.Uint32() % 6)
		}
		h.logf("session %d: note %v: %v", s.carrier, b, s.send(msgNote, 0, b))
	case what < 85:
		s.data(r, r.Uint64N(1<<(1+r.IntN(12))))
	case what < 90:
		s.send(msgUrgent, 0, make([]byte, 1+r.IntN(64)))
	case what < 96:
		h.logf("session %d: ping", s.carrier)
		s.send(msgPing, 0, nil)
	case what < 98:
		kind := []byte{msgShutdown, msgClose, msgAbort, msgCloseAck}[r.IntN(4)]
		h.logf("session %d: %d: %v", s.carrier, kind, s.send(kind, 0, nil))
	case what == 98:
		h.logf("session %d: ends", s.carrier)
		s.ends()
		[]func(){s.ep.Kill, s.ep.Abort, func() { s.ep.Close() }, s.ep.Break}[r.IntN(4)]()
	}
}
