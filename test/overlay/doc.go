// Package overlay builds other people's programs by the command san, from unchanged sources, and checks
// what has carried their connections. The programs in its directories are clients and servers for these
// tests. They print the counters from package expvar.
package overlay
