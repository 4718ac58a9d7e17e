//go:build race

package containers

// moreMemory is how many times as much a process takes that the race detector watches.
const moreMemory = 10
