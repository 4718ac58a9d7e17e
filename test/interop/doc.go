// Package interop runs other people's programs over the library's connections: HTTP
// and gRPC, SSH, databases and their clients, and more, each with its listener or its
// dialer changed and nothing else. It is a module of its own, so that the library does
// not depend on them, and has no code that anybody could import.
//
// programs_test.go has the table of programs, ways_test.go how each is run. The code
// in docs/PROGRAMS.md is from here, and a test compares them.
package interop
