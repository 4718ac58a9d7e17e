// Package overlay has other people's programs built by the command san, from sources that know
// nothing of it, and asks what their connections were carried by. Its programs beside the tests
// are clients and servers of theirs. They know of package expvar, by which they tell.
package overlay
