//go:build !linux

package san

// systemLanes is empty, because there is no SAN on this system.
var systemLanes, sanLanes []lane
