// Package san lets an existing Go program move its bytes over a system area
// network: RDMA between hosts that have it, shared memory between processes
// of one host, plain TCP everywhere else.
//
// Listen and Dial stand where net.Listen and net.Dial stood; nothing else in
// the program changes:
//
//	l, err := san.Listen("tcp", ":8080")
//	c, err := san.Dial("tcp", "localhost:8080")
//
// The package is a switch: per connection it picks a provider ("shm", "verbs")
// or falls back to TCP, and never moves a byte itself. A connection over a SAN
// is a *sanconn.Conn; a fallback is net's own *net.TCPConn. InfoOf says which
// it is and why. A SAN connection is negotiated on the SAN itself and never inside
// the application's TCP stream, so that plain TCP clients and servers at the other
// end notice nothing.
//
// # Environment
//
// SAN_PROVIDERS restricts the providers of the whole process to a comma
// separated list, or to none. SAN_DISABLE switches mechanisms off: a comma
// separated list of the names in session.FeatureNames. SAN_SUBNETS, a list of
// prefixes, restricts the destinations of verbs; SAN_IWARP_OFFSET (a number),
// SAN_RDMACM=off and SAN_SHARED_DOMAIN=on say how its connections are made. All are
// read once; a value that is not understood is an error of every Dial and Listen of
// a TCP network.
package san
