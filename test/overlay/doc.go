// Package overlay has other people's programs built by the command san, from sources that know
// nothing of it, and checks what their connections were carried by. Its programs beside the tests
// are clients and servers of theirs. They print the counters that package expvar has.
package overlay
