// Package interop has the tests of other people's protocols over the library's
// connections: SSH, yamux, and curl at the other end. It is a module of its
// own, so that the library does not depend on them, and has no code that
// anybody could import.
package interop
