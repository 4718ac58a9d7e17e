// Package moving moves connections from TCP to a session of a provider, and keeps what is known of
// each. Only package san calls it: package san has the API, and chooses the providers.
//
//	plan.go proposal.go       the dialer's end: when a connection moves; the proposal and its proof
//	accepted.go condition.go  the acceptor's end: the table of connections; which of them may move
//	life.go counters.go       what is known of a connection, and of all of them
//	provider*.go              the providers: shm, verbs
package moving
