//go:build race

package containers

// moreMemory is how many times as much memory a process takes with the race detector.
const moreMemory = 10
