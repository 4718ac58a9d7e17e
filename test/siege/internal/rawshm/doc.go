// Package rawshm speaks the protocol between processes of one host as docs/PROTOCOL.md has
// it, for peers that do not keep to it: every step by itself, every number the caller's.
// It shares no code with the provider. Only tests import it.
package rawshm
