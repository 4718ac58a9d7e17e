package san

import (
	"context"
	"io"
	"net"
	"net/netip"
)

// provider is what the switch needs to know of a SAN service provider.
type provider interface {
	name() string

	// serves returns nil if a destination is worth an attempt (C3), and otherwise why
	// it is not. It does not block.
	serves(dst netip.Addr, s settings) error

	// listen adds a SAN listener beside tcp, on the same address (C2). An error,
	// preferably an *Unavailable, means that this listener does without this SAN.
	listen(tcp *net.TCPListener, s settings) (acceptor, error)

	// dial connects within ctx. It returns ECONNREFUSED or EHOSTUNREACH only if TCP
	// is guaranteed to fail as well (C4), otherwise preferably an *Unavailable.
	dial(ctx context.Context, r request) (transport, error)
}

// acceptor is a provider's listener.
type acceptor interface {
	// accept blocks until a dialer connects. net.ErrClosed is final; after other
	// errors it is called again.
	accept() (transport, error)

	// Waiting returns why no dialer comes yet, if settings.takeOver is set and another
	// process that shares the TCP listener has to end its own first; otherwise nil.
	Waiting() error

	io.Closer
}

// direct is an acceptor that hands connections over itself.
type direct interface {
	// serve calls take for each connection, in a goroutine that must not be blocked, until
	// the acceptor is closed and no call is under way.
	serve(take func(transport))
}

// opened is an acceptor with its provider's name.
type opened struct {
	name string
	acceptor
}
