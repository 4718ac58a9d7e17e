//go:build race

package endpointtest

// raceEnabled is true if the race detector is on, which allocates.
const raceEnabled = true
