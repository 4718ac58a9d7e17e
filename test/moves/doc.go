// Package moves has the test of connections between two processes that move and come back
// while they are used, and of which one process is killed or stopped at any moment: no byte is
// wrong, nothing hangs, and a stream that was cut does not look complete.
package moves
