// Package rdmalink is where a program may set which RDMA devices its network interfaces have,
// where the kernel has none: a simulated device's (test/hwsim). Package verbs looks here
// before it looks in sysfs.
package rdmalink

// Simulated has the devices by interface, in the place of the kernel's; nil: the kernel's
// count. It is set before package san is used, and not after.
var Simulated map[string]string

// loopback is the loopback interface's name, in each network namespace of Linux.
const loopback = "lo"

// Loopback reports whether loopback addresses are served. The kernel's devices never do.
func Loopback() bool { return Simulated[loopback] != "" }
