package siege

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Sessions that lead to no connection are bounded by descriptors, as TCP's connections are.
func TestSessionsBeyondDescriptors(t *testing.T) {
	const files = 256
	r := lay(t, spec{limit: map[int]uint64{unix.RLIMIT_NOFILE: files}})
	r.attack("crowd", 4096)
	r.siege(bounds{descriptors: files / 4, memory: 16 << 20, space: 64 << 30})
}

// Dialers that do not negotiate keep nobody else from connecting.
func TestSilentDialers(t *testing.T) {
	r := lay(t, spec{})
	r.attack("silent", 256)
	r.siege(bounds{descriptors: 4, memory: 16 << 20, space: 8 << 30, cpu: asTCP})
}

// Links without connections can take only a part of the descriptors.
func TestIdleLinks(t *testing.T) {
	const files = 1024
	r := lay(t, spec{limit: map[int]uint64{unix.RLIMIT_NOFILE: files}})
	r.attack("idle", 600)
	r.siege(bounds{descriptors: files / 4, memory: 16 << 20, space: 128 << 30})
}

// They can take only a part of the address space, if that is limited.
func TestIdleLinksAndFewAddresses(t *testing.T) {
	const space = 8 << 30
	r := lay(t, spec{limit: map[int]uint64{unix.RLIMIT_AS: space}})
	r.attack("idle", 64)
	r.siege(bounds{descriptors: 64 * 4, memory: 16 << 20, space: space / 4})
}

// Sockets whose close waits block neither threads nor the listener's Close.
func TestSocketsThatLinger(t *testing.T) {
	r := lay(t, spec{})
	r.attack("linger", 30)
	r.siege(bounds{descriptors: 30 * 8, space: 30 << 28})
	r.victim.tell("close")
	var took time.Duration
	if r.victim.hear("closed", &took); took > 10*time.Second { // the sockets linger for an hour
		t.Errorf("the listener's Close took %v", took)
	}
}

// Descriptors that wait to be closed after such sockets are bounded by the part of the descriptors that
// is for all users: the victim can still open and accept. New dialers may have to stay on TCP.
func TestHangingUpBehindSocketsThatLinger(t *testing.T) {
	const files, late = 1024, 64 // descriptors that were in transit
	r := lay(t, spec{limit: map[int]uint64{unix.RLIMIT_NOFILE: files}})
	r.attack("closers", 24)
	r.siege(bounds{descriptors: files/2 + late, space: 24 << 28, cpu: asTCP})
}

// A link ends at the first message that has more descriptors than the protocol allows. Of these, no more
// are received than it allows.
func TestMessagesFullOfDescriptors(t *testing.T) {
	const links, descriptors = 31, 6 // descriptors of a link, and of a message
	r := lay(t, spec{limit: map[int]uint64{unix.RLIMIT_NOFILE: 1024}})
	outlived := 0
	if r.attack("stuffed", links).hear("outlived", &outlived); outlived > 0 {
		t.Errorf("%d links did not end", outlived)
	}
	r.siege(bounds{descriptors: links * descriptors, memory: 16 << 20, space: links << 28, cpu: asTCP})
}

// Connects without a further message leave nothing behind.
func TestConnectsInVain(t *testing.T) {
	const links = 60
	r := lay(t, spec{})
	r.attack("deaf", links)
	r.siege(bounds{descriptors: links * 5, memory: links << 16, space: links << 28})
}

// A flood of connections to the listener's unix socket keeps nobody else from the listener.
func TestHalfOpenFlood(t *testing.T) {
	r := lay(t, spec{})
	r.attack("halfopen", 2000)
	r.siege(bounds{descriptors: 4096, threads: 8, memory: 32 << 20, space: 1 << 30, cpu: asTCP})
}
