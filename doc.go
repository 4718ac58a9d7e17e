// Package san lets an existing Go program move its bytes over a system area network (SAN): RDMA between
// hosts that have it, and shared memory between processes of one host. Until a move pays, and wherever
// there is no SAN, the bytes go over plain TCP.
//
// Listen and Dial take the place of net.Listen and net.Dial; nothing else in the
// program changes:
//
//	l, err := san.Listen("tcp", ":8080")
//	c, err := san.Dial("tcp", "localhost:8080")
//
// Each connection begins as net's own, on TCP: routes, packet filters, backlogs, addresses and errors
// are those of the kernel and of net. It is a *sanconn.Conn around net's *net.TCPConn. Once it has been
// used enough for a move to pay, the dialer's side moves it in the background: a provider ("shm",
// "verbs") finds the process at the other end, and each direction goes on there in the middle of its
// stream. InfoOf returns what carries a connection, and why it has not moved. TCP carries the
// application's bytes and nothing else, so plain TCP clients and servers at the other end notice
// nothing.
//
// Settings are fields of Dialer and ListenConfig. Dial and Listen use their zero values. With the
// policy Require no byte goes by TCP. Connections move on Linux; on other systems they are net's own.
//
// # Errors
//
// Errors are *net.OpError with the causes that TCP has, except io.EOF, which is not wrapped: code that
// handles net's errors handles these. Only with the policy Require is it an error that there is no SAN:
// errors.As finds an *Unavailable in it, which has the Reason.
//
// # Concurrency
//
// All functions and methods may be called concurrently, those of a connection as net.Conn allows. The
// fields of a Dialer or ListenConfig must not be changed meanwhile.
//
// # Environment
//
// An operator can set, for the whole process:
//
//   - SAN_PROVIDERS: the only providers to use, in order of preference, separated by
//     commas; or none.
//   - SAN_DISABLE: mechanisms to switch off, separated by commas: see
//     sanconn.FeaturePoll and its neighbours.
//   - SAN_SHM_DIR: Dialer.ShmDir and ListenConfig.ShmDir where the program does not set them.
//   - SAN_MOVE=now: Options.MoveAtOnce for all dialers.
//   - SAN_SUBNETS: the only peers to connect to and to accept by verbs, as prefixes
//     such as 10.8.0.0/16, separated by commas.
//   - SAN_IWARP_OFFSET: RDMA.IWARPOffset where the program does not set it.
//   - SAN_RDMACM=off: RDMA.WithoutCM for all.
//   - SAN_SHARED_DOMAIN=on: all connections of an RDMA device share one protection
//     domain, and so their registrations, even without memory windows to keep their
//     peers apart. Memory is registered once for all of them, but a peer may then
//     reach memory that is exposed to others: see docs/SECURITY.md.
//   - SAN_TRAFFIC_CLASS, SAN_SERVICE_LEVEL, SAN_ACK_TIMEOUT: the fields of RDMA of these
//     names where the program does not set them.
//   - SAN_ARENA: the size in MiB up to which regcache.DefaultArena may grow.
//   - SAN_TRACE: a file that gets a line for each message: see docs/DEBUGGING.md.
//
// All variables are read once, at the first Dial or Listen on a TCP network. If a value is not
// understood, each Dial and Listen on a TCP network fails. docs/OPERATING.md has examples and ranges.
package san
