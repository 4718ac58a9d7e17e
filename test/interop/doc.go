// Package interop runs other people's programs over the library's connections: HTTP and gRPC, SSH,
// databases and their clients, and more. In each, only the listener or the dialer is changed. It is a
// module of its own, so that the library does not depend on them, and has no code to import.
//
// programs_test.go has the table of programs, ways_test.go the ways in which each is run. The code in
// docs/PROGRAMS.md is from here, and a test compares them.
package interop
