//go:build race

package endpointtest

// raceEnabled: the race detector allocates.
const raceEnabled = true
