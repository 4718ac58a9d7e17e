// Package sanproxy forwards connections from a listener to where a dial function connects, so that
// programs that make their own sockets can use package san. A server that accepts no listener gets its
// clients through a Proxy on a san.Listener. A client without a dial hook connects to a Proxy whose Dial is
// a san.Dialer's. The command cmd/sanproxy is this package for programs that are not written in Go, or must
// not be changed.
//
// To serve the clients of package san from a server on a unix socket:
//
//	l, err := san.Listen("tcp", ":7000")
//	...
//	p := &sanproxy.Proxy{Dial: func(ctx context.Context, _ net.Conn) (net.Conn, error) {
//		return new(net.Dialer).DialContext(ctx, "unix", "/run/server.sock")
//	}}
//	err = p.Serve(l)
//
// Serve returns when the Proxy was ended: by Shutdown, which waits for its connections, or by Close, which
// resets them. Errors of single connections are logged to ErrorLog, and counted in Stats.
//
// The end of a stream is forwarded as an end of that direction, and a reset as a reset: a stream that was
// cut never looks complete, not even if this process is killed. (A unix socket has no reset: one that is
// closed ends in order, unless it has unread bytes.)
//
// A connection of package san begins on TCP, and may move to a SAN while it is forwarded. Before the move
// its bytes are spliced, as net does; afterwards bytes between the SAN and a socket are copied once, in the
// memory of the SAN.
package sanproxy
