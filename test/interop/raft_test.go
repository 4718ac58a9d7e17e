package interop

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/sanconn/san"
)

// streamLayer is the interface by which hashicorp/raft listens and dials.
type streamLayer struct {
	net.Listener
	dial func(ctx context.Context, network, address string) (net.Conn, error)
}

func (s streamLayer) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return s.dial(ctx, "tcp", string(address))
}

// raftState is a state machine: it appends the data of all commands. The last command has a checksum
// instead.
type raftState struct {
	mu       sync.Mutex
	data     []byte
	complete chan error // gets one value, when the last command comes
}

const (
	raftData = 'd' // followed by data
	raftLast = 'l' // followed by a checksum
)

func (s *raftState) Apply(l *raft.Log) any {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch kind, rest := l.Data[0], l.Data[1:]; kind {
	case raftData:
		s.data = append(s.data, rest...)
	case raftLast:
		var err error
		if got := checksum(s.data); got != string(rest) {
			err = fmt.Errorf("%d bytes have the checksum %s, want %s", len(s.data), got, rest)
		}
		s.complete <- err
	}
	return nil
}

func (s *raftState) Snapshot() (raft.FSMSnapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return raftSnapshot(bytes.Clone(s.data)), nil
}

func (s *raftState) Restore(from io.ReadCloser) error {
	data, err := io.ReadAll(from)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.data = data
	return err
}

type raftSnapshot []byte

func (s raftSnapshot) Persist(to raft.SnapshotSink) error {
	_, err := to.Write(s)
	return errors.Join(err, to.Close())
}

func (s raftSnapshot) Release() {}

// raftMember is a member of a cluster.
type raftMember struct {
	*raft.Raft
	state     *raftState
	transport *raft.NetworkTransport
}

func newRaftMember(id raft.ServerID, layer raft.StreamLayer) raftMember {
	config := raft.DefaultConfig()
	config.LocalID = id
	config.LogOutput = io.Discard // it would report that the other member ends
	config.TrailingLogs = 0       // so that a member that joins gets the snapshot
	m := raftMember{
		state:     &raftState{complete: make(chan error, 1)},
		transport: raft.NewNetworkTransport(layer, 3, patience, io.Discard),
	}
	store := raft.NewInmemStore()
	m.Raft = must(raft.NewRaft(config, m.state, store, store, raft.NewInmemSnapshotStore(), m.transport))
	return m
}

// end stops the member, and closes its listener.
func (m raftMember) end() error { return errors.Join(m.Shutdown().Error(), m.transport.Close()) }

// serveRaft is a replica without a vote, so that only the leader dials.
func serveRaft(l net.Listener) func() error {
	dial := new(san.Dialer).DialContext
	replica := newRaftMember("replica", streamLayer{l, dial})
	return func() error {
		select {
		case err := <-replica.state.complete:
			return errors.Join(err, replica.end())
		case <-time.After(patience / 2):
			return errors.New("the replica lacks the last command")
		}
	}
}

// useRaft is the leader. The replica gets a snapshot of the commands before it joined, and then further
// commands.
func useRaft(t *testing.T, dial dialFunc, address string) {
	l := must(san.Listen("tcp", "127.0.0.1:0"))
	leader := newRaftMember("leader", streamLayer{l, dial})
	t.Cleanup(func() { // after the replica has everything
		if err := leader.end(); err != nil {
			t.Error(err)
		}
	})
	wait := func(what string, f raft.Future) {
		t.Helper()
		if err := f.Error(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	wait("bootstrap", leader.BootstrapCluster(raft.Configuration{
		Servers: []raft.Server{{ID: "leader", Address: leader.transport.LocalAddr()}},
	}))
	<-leader.LeaderCh()
	var all []byte
	apply := func(n, size int) {
		for range n {
			data := randomBytes(size)
			all = append(all, data...)
			wait("apply", leader.Apply(append([]byte{raftData}, data...), patience))
		}
	}
	apply(8, 1<<20)
	wait("snapshot", leader.Raft.Snapshot())
	wait("add the replica", leader.AddNonvoter("replica", raft.ServerAddress(address), 0, patience))
	apply(200, 10_000)
	wait("the last", leader.Apply(append([]byte{raftLast}, checksum(all)...), patience))
}
