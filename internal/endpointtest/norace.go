//go:build !race

package endpointtest

const raceEnabled = false
