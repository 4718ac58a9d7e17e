// Package moves tests connections between two processes that move and go back while they are used, while
// one process is killed or stopped at a random moment: no byte is wrong, nothing hangs, and a stream
// that was cut does not look complete.
package moves
