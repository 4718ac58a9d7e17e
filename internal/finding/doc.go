// Package finding lets the processes that hold the two ends of a TCP connection on one host find each
// other by shared memory. A process that accepts connections on a port has a name for that port. The
// process that has dialed a connection proposes the move to the names of other processes. The proposal,
// which package moving makes, shows which process has the other end.
package finding
