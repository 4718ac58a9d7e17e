// Package finding has the processes of a host that have the two ends of a TCP connection find each
// other by shared memory: each has names by which it is found for what it accepts on a port, and
// asks those who have one for what it has dialed. Who has the other end, the proposal shows, which is
// package moving's.
package finding
