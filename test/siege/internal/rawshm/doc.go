// Package rawshm implements the protocol between processes of one host, as docs/PROTOCOL.md describes
// it, for peers that break it: the caller decides about each step and each number. It shares no code
// with the provider. Only tests import it.
package rawshm
