//go:build !linux

package san

// systemLanes: there is no SAN on this system.
var systemLanes, sanLanes []lane
