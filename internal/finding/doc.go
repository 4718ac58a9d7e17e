// Package finding has the processes of a host that have the two ends of a TCP connection find each
// other by shared memory: each has names by which it is found for what it accepts on a port, and
// proposes what it has dialed by the names of others. Which process has the other end is found by that
// proposal, which is package moving's.
package finding
