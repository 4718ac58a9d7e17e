// Package moving has connections move from TCP to a session by a provider, and notes what becomes
// of them. Package san, which alone calls it, has the API, and chooses what they may move to.
//
//	plan.go proposal.go       the dialer's end: when a connection moves; what is proposed and proved
//	accepted.go condition.go  the acceptor's end: which connections there are, which it lets move
//	life.go counters.go       what is known of a connection, and of all of them
//	provider*.go              what carries them: shm, verbs
package moving
