package shm

import "sync"

// sharedDiag is what dials ask by, in one network namespace. It is kept by the links of that
// namespace, whose sockets keep the namespace as well, and by dials under way.
type sharedDiag struct {
	*diagSocket
	netns uint64 // 0: not shared
	uses  int    // guarded by the set's mu
}

// diagSet has a sharedDiag for each network namespace to which this process has links.
type diagSet struct {
	mu sync.Mutex // guards by; no system call under it
	by map[uint64]*sharedDiag
}

var diags diagSet

// get returns what asks about the network namespace of a TCP socket, which is this thread's,
// for the caller to drop.
func (s *diagSet) get(socket int) (*sharedDiag, error) {
	cookie := netns(socket)
	s.mu.Lock()
	if d := s.by[cookie]; d != nil {
		d.uses++
		s.mu.Unlock()
		return d, nil
	}
	s.mu.Unlock()
	sock, err := newDiagSocket()
	if err != nil {
		return nil, err
	}
	d := &sharedDiag{diagSocket: sock, uses: 1}
	if cookie == 0 || netns(sock.fd) != cookie { // the thread has gone elsewhere since the socket was made
		return d, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by[cookie] == nil { // otherwise another dial came first
		if s.by == nil {
			s.by = make(map[uint64]*sharedDiag)
		}
		d.netns = cookie
		s.by[cookie] = d
	}
	return d, nil
}

// keep adds a use, which ends with drop.
func (s *diagSet) keep(d *sharedDiag) *sharedDiag {
	s.mu.Lock()
	defer s.mu.Unlock()
	d.uses++
	return d
}

// drop ends a use. The last one closes the socket.
func (s *diagSet) drop(d *sharedDiag) {
	s.mu.Lock()
	d.uses--
	last := d.uses == 0
	if last && d.netns != 0 {
		delete(s.by, d.netns)
	}
	s.mu.Unlock()
	if last {
		d.close()
	}
}
