// Package sanproxy forwards connections from a listener to wherever a dial function goes, so
// that programs that make their own sockets use package san: a server that takes no listener
// gets its clients through a Proxy on a san.Listener, and a client that takes no dial hook
// goes through one whose Dial is a san.Dialer's. The command cmd/sanproxy is this package for
// programs that are not in Go, or not to be changed.
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
// Serve returns when the Proxy has been ended: by Shutdown, which waits for its connections, or
// by Close, which resets them. What goes wrong with a single connection is a line in ErrorLog
// and a count in Stats.
//
// The end of a stream is passed on as such, one direction at a time, and a reset as a reset: what
// was cut short never looks complete, not even if this process is killed. (A unix socket has no
// reset: unless there are bytes that it has not read, a closed one ends in order.)
//
// A connection of package san begins on TCP, and may move to a SAN while it is forwarded. Before
// that its bytes are spliced, as net does; afterwards those between the SAN and a socket are
// copied once, in the memory of the SAN.
package sanproxy
